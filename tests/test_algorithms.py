"""The table: complete, consistent with the functions it names and with the installed TRL."""

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_trl import algorithms, book
from rlhf_trl.algorithms import (
    ALGORITHMS,
    FORMULATIONS,
    REQUIRED,
    algorithm,
    formulation,
    names,
    policy_gradients,
)
from rlhf_trl.compare.drift.surface import shipped
from rlhf_trl.errors import RANGES, InputError

ROWS = [(name, which) for name, row in ALGORITHMS.items() for which in row.formulations]
POLICY_GRADIENT = [row for row in ROWS if row[0] in names("policy_gradient")]
PREFERENCE = [row for row in ROWS if row[0] in names("direct_alignment")]
DISTILLATION = [row for row in ROWS if row[0] in names("distillation")]
REWARD_MODEL = [row for row in ROWS if row[0] in names("reward_model")]
TENSORS = {
    "logps", "old_logps", "mask", "rewards", "token_rewards", "binary_rewards", "num_generations",
    "advantages", "ratio", "kl", "values", "old_values", "returns", "losses", "normalizer",
    "prompt_tokens",
}  # fmt: skip
HOMES = {
    "advantage": book.advantages,
    "ratio": book.surrogates,
    "surrogate": book.surrogates,
    "aggregation": book.aggregation,
    "kl_penalty": book.rewards,
    "value_loss": book.value,
}


def test_the_rows():
    assert {"reward", "kwise", "orm", "prm"} <= {*names("reward_model")}
    of_the_book = {name for name, row in ALGORITHMS.items() if "code" in row.formulations}
    assert {name for name in of_the_book if "trl" not in ALGORITHMS[name].formulations} == {
        "reinforce", "ppo", "maxrl", "simpo", "orm", "prm",
    }  # fmt: skip
    for name, row in ALGORITHMS.items():
        assert row.name == name
        assert row.source and row.paper and row.title
        assert "chapter" in row.formulations
        assert set(row.formulations) <= set(FORMULATIONS)
        assert all(isinstance(getattr(row, f), str) for f in {*FORMULATIONS} - {*row.formulations})


@pytest.mark.parametrize(("name", "which"), POLICY_GRADIENT)
def test_a_row_names_functions_and_reads_their_parameters(name, which):
    row = formulation(name, which)
    wanted = {"beta", "kl_estimator"} if row.kl != "none" else set()
    wanted |= {"vf_coef"} if row.value_loss != "none" else set()
    chosen = [row.chosen(row.reads)]
    if "baseline" in row.reads:
        chosen += [row.chosen({"baseline": b}) for b in algorithms.BASELINES]
    if "importance_cap" in row.reads:
        chosen += [row.chosen({"importance_cap": 2.0})]
    for made in chosen:
        for part, home in HOMES.items():
            if getattr(made, part) != "none":
                wanted |= set(inspect.signature(getattr(home, getattr(made, part))).parameters)
    wanted -= TENSORS
    only_in_reads = set(row.reads) - wanted
    assert only_in_reads <= {"baseline"}
    assert wanted <= set(row.reads) | set(row.constants)
    assert not set(row.reads) & set(row.constants)
    assert (row.kl == "reward") == (row.kl_penalty != "none")
    assert row.differs and (row.trl is True or row.trl)


@pytest.mark.parametrize(("name", "which"), PREFERENCE)
def test_a_preference_row_says_what_its_function_takes(name, which):
    row = formulation(name, which)
    parameters = inspect.signature(getattr(book.preference, row.loss)).parameters
    tensors = {name for name in parameters if name.endswith(("_logps", "_nll"))}
    numbers = set(parameters) - tensors
    needed = {n for n in numbers if parameters[n].default is inspect.Parameter.empty}
    assert needed == set(row.reads) and set(row.constants) <= numbers
    assert not set(row.reads) & set(row.constants)
    assert row.reference == ("ref_chosen_logps" in tensors)
    averaged = name in ("simpo", "orpo", "dpo_norm") or (name, which) == ("ipo", "trl")
    assert row.logps == ("mean" if averaged else "sum")
    assert row.differs and (row.trl is True or row.trl)


@pytest.mark.parametrize(("name", "which"), REWARD_MODEL)
def test_a_reward_row_names_functions(name, which):
    row = formulation(name, which)
    parameters = inspect.signature(getattr(book.reward_models, row.loss)).parameters
    assert (row.aggregation != "none") == ("logits" in parameters)
    assert row.aggregation == "none" or hasattr(book.aggregation, row.aggregation)
    assert row.differs and (row.trl is True or row.trl)


@pytest.mark.parametrize(("name", "which"), DISTILLATION)
def test_a_distillation_row_names_functions(name, which):
    row = formulation(name, which)
    parameters = inspect.signature(getattr(book.distillation, row.loss)).parameters
    assert set(row.reads) <= set(parameters) and hasattr(book.aggregation, row.aggregation)
    assert ("kl_top_k" in row.reads) == (name == "sdpo")
    assert row.differs and (row.trl is True or row.trl)


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_what_a_row_reads_and_fixes_is_a_known_field(name, which):
    row = formulation(name, which)
    known = algorithms.LOSS_FIELDS | algorithms.SHARED_FIELDS
    assert {*row.reads, *row.settings, *row.trainer_reads} <= known
    assert not set(row.reads) & set(row.settings)
    json.dumps(dataclasses.asdict(row) | {"settings": row.fixed({})}, allow_nan=False)


def test_labels_are_the_chapters():
    assert "eq:GRPO_token" in algorithm("grpo").source
    assert formulation("grpo", "code").label == "grpo (code)"


@pytest.mark.parametrize(
    ("name", "which", "says"),
    [
        (
            "grop",
            "chapter",
            "unknown algorithm 'grop' (did you mean 'grpo'?); known: reinforce, rl",
        ),
        (
            "grpo",
            "chaptr",
            "no formulation 'chaptr' (did you mean 'chapter'?); it has chapter, cod",
        ),
        ("ppo", "trl", "TRL removed PPO and its value heads in 1.13; it has chapter, code"),
        ("simpo", "trl", "CPOTrainer is not the trainer that the recipe builds on"),
        ("kwise", "code", "the book's code compares pairs only; it has chapter"),
        ("opd", "code", "the book's code has self-distillation (sdpo) only; it has chapter, trl"),
    ],
)
def test_what_does_not_exist_is_named(name, which, says):
    with pytest.raises(InputError) as error:
        formulation(name, which)
    assert says in str(error.value)


def test_defaults_and_constants_become_parameters():
    assert formulation("grpo", "code").parameters({"beta": 0.1}) == {
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.1,
        "kl_estimator": "k3",
        "std_epsilon": 1e-8,
    }
    assert formulation("dapo", "chapter").parameters({})["epsilon_high"] == 0.28
    assert formulation("drgrpo", "trl").reads["max_completion_length"] == REQUIRED


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("sapo", {"epsilon": 0.1}, "does not read epsilon; it reads sapo_temperature_pos, "),
        ("grpo", {"epsilon_hgh": 0.1}, "epsilon_hgh (did you mean 'epsilon_high'?)"),
        ("drgrpo", {}, "needs max_completion_length, which has no default"),
        ("drgrpo", {"max_completion_length": 2.5}, "must be a whole number of tokens, not 2.5"),
        ("drgrpo", {"max_completion_length": 0}, "must be a whole number of tokens, not 0"),
        ("grpo", {"epsilon": "0.2"}, "epsilon must be a number, not '0.2'"),
        ("grpo", {"epsilon": None}, "epsilon must be a number, not None"),
        ("grpo", {"epsilon": True}, "epsilon must be a number, not True"),
        ("grpo", {"beta": -0.1}, "beta must be 0 or more, not -0.1"),
        ("grpo", {"beta": float("nan")}, "beta must be a number, not nan"),
        ("grpo", {"kl_estimator": "kl3"}, "one of k1, k2, k3 (did you mean 'k3'?), not 'kl3'"),
        (
            "sapo",
            {"sapo_temperature_pos": 0},
            "sapo_temperature_pos must be a number above 0, not 0",
        ),
        ("ppo", {"gamma": 1.5}, "gamma must be a number between 0 and 1, not 1.5"),
        ("reinforce", {"baseline": "mean"}, "one of none, batch_mean, moving_average, not 'mean'"),
        ("reinforce", {"baseline": "moving_average"}, "needs baseline_value"),
        ("reinforce", {"baseline_value": 1.0}, "needs baseline_value"),
        ("maxrl", {"beta": 0.1}, "does not read beta; it reads importance_cap"),
        ("dpo", {"label_smoothing": 0.1}, "does not read label_smoothing; it reads beta"),
        ("dpo", {"beta": 0}, "beta must be a number above 0, not 0"),
        (
            "cdpo",
            {"label_smoothing": 0.6},
            "label_smoothing must be a number between 0 and 0.5, not 0.6",
        ),
        ("simpo", {"gamma": 0.5}, "does not read gamma; it reads beta, gamma_beta_ratio"),
        ("kto", {"desirable_weight": -1}, "desirable_weight must be 0 or more, not -1"),
        ("reward", {"center_rewards_coefficient": -1}, "must be 0 or more, not -1"),
    ],
)
def test_parameters_that_cannot_be_are_named(name, given, says):
    with pytest.raises(InputError) as error:
        formulation(name, "chapter").parameters(given)
    assert says in str(error.value)
    assert str(error.value).startswith(f"{name} (chapter)")


def test_the_table_of_parameters_has_what_rows_read_or_fix_and_nothing_else():
    rows = [form for row in ALGORITHMS.values() for form in row.formulations.values()]
    read = {name for row in rows for name in {**row.reads, **row.trainer_reads}}
    fixed = {name for row in rows for name in row.settings}
    listed = {name for name, _ in algorithms.PARAMETERS}
    assert read <= listed <= read | fixed
    for name, family in algorithms.PARAMETERS:
        line = algorithms.parameter(name, family)
        assert line.range is None or line.range in RANGES, name


def test_code_and_trl_differ_from_their_own_chapter_only_where_a_module_says_so():
    """A chapter row that gets another aggregation moves its own formulations and no other row."""
    source = Path(policy_gradients.__file__).read_text()
    row = "_GRPO = replace(\n    _ON_GROUPS,"
    assert row in source
    changed = source.replace(row, f'{row} aggregation="token_mean",')
    other: dict = {}
    exec(compile(changed, "table", "exec"), other)
    moved = {name for name, row in other["ROWS"].items() if row != policy_gradients.ROWS[name]}
    assert moved == {"grpo"}
    assert {f.aggregation for f in other["ROWS"]["grpo"].formulations.values()} == {"token_mean"}


def test_the_lists_do_not_overlap():
    assert not algorithms.LOSS_FIELDS & algorithms.SHARED_FIELDS


@pytest.fixture(scope="module")
def trl_configs():
    import trl
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    stable = [trl.GRPOConfig, trl.RLOOConfig, trl.SFTConfig, trl.DPOConfig, trl.KTOConfig]
    return [*stable, trl.RewardConfig, ORPOConfig, CPOConfig]


@pytest.fixture(scope="module")
def with_distillation(trl_configs):
    import trl
    from trl.experimental.sdpo import SDPOConfig

    return [*trl_configs, trl.DistillationConfig, SDPOConfig]


def test_every_field_of_the_installed_trl_is_known(trl_configs):
    listed = {name for fields in shipped()["fields"].values() for name in fields}
    fields = {field.name: config for config in trl_configs for field in dataclasses.fields(config)}
    new = sorted(f"{fields[name].__name__}.{name}" for name in fields.keys() - listed)
    assert not new, (
        f"TRL has config fields that rlhf_trl does not know: {new}. Put those that touch a loss "
        "into algorithms/parameters.py, then record the surface with rlhf-trl drift --record."
    )


def test_no_listed_field_has_left_trl(with_distillation):
    fields = {field.name for config in with_distillation for field in dataclasses.fields(config)}
    ours = {name for row in ALGORITHMS.values() for f in row.formulations.values() for name in
            {*f.reads, *f.trainer_reads}}  # fmt: skip
    assert (algorithms.LOSS_FIELDS | algorithms.SHARED_FIELDS) - fields <= ours


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_trl_accepts_the_settings(name, which, tmp_path, with_distillation):
    row = formulation(name, which)
    wanted = row.trainer.replace("Trainer", "Config")
    (config_class,) = (config for config in with_distillation if config.__name__ == wanted)
    settings = row.fixed({})
    config = config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)
    assert {field: getattr(config, field) for field in settings} == settings


def test_settings_that_depend_on_a_parameter():
    cdpo, simpo = formulation("cdpo", "trl"), formulation("simpo", "chapter")
    # e = 0.2: 2 (1 - 0.2) = 1.6 and -(1 - 0.4) = -0.6
    assert cdpo.fixed({"label_smoothing": 0.2}) == {
        "loss_type": ["sigmoid", "robust"],
        "loss_weights": pytest.approx([1.6, -0.6], abs=1e-15),
    }
    # 2.5 * 0.4, and the default 2 * 0.5
    assert simpo.fixed({"beta": 2.5, "gamma_beta_ratio": 0.4})["simpo_gamma"] == 1.0
    assert simpo.fixed({})["simpo_gamma"] == 1.0
    with pytest.raises(InputError, match="label_smoothing must be a number, not 'a'"):
        cdpo.fixed({"label_smoothing": "a"})


def test_a_family_is_asked_for_by_name():
    with pytest.raises(InputError) as error:
        formulation("dpo", "chapter", algorithms.PolicyGradient)
    assert str(error.value) == (
        "dpo is not a policy-gradient algorithm; those are " + ", ".join(names("policy_gradient"))
    )


def test_importing_the_table_loads_neither_trl_nor_torch():
    code = (
        "import sys, rlhf_trl, rlhf_trl.algorithms;"
        "rlhf_trl.exact_match;"
        "assert not {'trl', 'torch', 'transformers'} & set(sys.modules);"
        "rlhf_trl.policy_gradient_loss;"
        "assert not {'trl', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_formulations_are_listed_in_reading_order():
    assert all(
        list(row.formulations) == [f for f in FORMULATIONS if f in row.formulations]
        for row in ALGORITHMS.values()
    )
