"""Configs and trainers of users, against the formulations they are closest to."""

import re
from pathlib import Path

import pytest

from rlhf_trl.cli import main
from rlhf_trl.compare import closest, subjects
from rlhf_trl.compare.closest import distances
from rlhf_trl.compare.matrix import EQUAL, Matrix
from rlhf_trl.compare.subjects import read_subject
from rlhf_trl.compare.windows.batches import EXTREME
from rlhf_trl.compare.windows.policy import PolicyWindow
from rlhf_trl.errors import InputError

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def shared():
    return Matrix()


@pytest.fixture(autouse=True)
def one_matrix(shared, monkeypatch):
    """Measure the windows and the book's sides once for all subjects of this file."""
    monkeypatch.setattr(closest, "Matrix", lambda: shared)


# As TRL's documentation gives them for these papers, with what people have around them.
CONFIGS = {
    "GRPO": (
        """
        model_name_or_path: Qwen/Qwen2-0.5B-Instruct
        dataset_name: trl-lib/DeepMath-103K
        loss_type: grpo
        num_generations: 16
        beta: 0.04
        epsilon: 0.2
        use_bias_correction_kl: false
        learning_rate: 1e-6
        """,
        "grpo/chapter",
        ("drgrpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ),
    "TRL's defaults": (
        "{num_generations: 8, gradient_accumulation_steps: 8, reward_funcs: [x.y]}",
        "dapo/chapter",
        ("grpo", {"loss_type": "grpo"}),
    ),
    "Dr. GRPO": (
        "{loss_type: dr_grpo, scale_rewards: none, beta: 0.0, num_generations: 8}",
        "drgrpo/chapter",
        ("grpo", {"loss_type": "grpo", "scale_rewards": "group"}),
    ),
    "DAPO": (
        """
        epsilon: 0.2
        epsilon_high: 0.28
        beta: 0.0
        loss_type: dapo
        max_completion_length: 20480
        num_generations: 16
        per_device_train_batch_size: 512
        num_iterations: 16
        """,
        "dapo/chapter",
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ),
    "GSPO": (
        """
        importance_sampling_level: sequence
        loss_type: grpo
        beta: 0.0
        epsilon: 3e-4
        epsilon_high: 4e-4
        gradient_accumulation_steps: 1
        steps_per_generation: 4
        """,
        "gspo/chapter",
        ("grpo", {"importance_sampling_level": "token"}),
    ),
    "CISPO": (
        "{loss_type: cispo, epsilon_high: 5.0, num_iterations: 16, scale_rewards: batch}",
        None,
        ("cispo/trl", {"scale_rewards": "group"}),
    ),
    "DPO": (
        "{loss_type: sigmoid, beta: 0.1, label_smoothing: 0.1, max_length: 512}",
        "dpo/chapter",
        (
            "cdpo",
            {"loss_type": ["sigmoid", "robust"], "loss_weights": pytest.approx([1.8, -0.8])},
        ),
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.promise) if case in ("GSPO", "DAPO") else case
        for case in CONFIGS
    ],
)
def test_a_users_config(case, tmp_path):
    text, closest, (other, changes) = CONFIGS[case]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    subject = read_subject(path, None)
    if closest:
        first = distances(subject)[0]
        assert (f"{first.algorithm}/{first.formulation}", first.equal) == (closest, True)
        assert first.changes == {} and first.worst.grad_rel_error < EQUAL
    name, _, which = other.partition("/")
    [asked] = distances(subject, [(name, which or "chapter")])
    assert not asked.equal and asked.worst.grad_rel_error > 1e-3
    assert asked.changes == changes
    assert asked.then.verdict == "equal"


def test_ours_with_the_lower_bound_is_the_chapters_cispo():
    first = distances(read_subject(ROOT / "configs/tiny/cispo.yaml", None))[0]
    assert (first.algorithm, first.formulation, first.equal) == ("cispo", "chapter", True)


@pytest.mark.parametrize(
    "name",
    ["grpo", "dapo", "reinforce", "maxrl", "dpo", "cdpo", "ipo", "simpo", "orpo", "kto", "reward"],
)
def test_our_configs_compute_what_they_are_called(name):
    subject = read_subject(ROOT / f"configs/tiny/{name}.yaml", None)
    [asked] = distances(subject, [(name, "chapter")])
    assert asked.equal


TRAINER = """
from __future__ import annotations
from dataclasses import dataclass
from trl import DPOTrainer, GRPOConfig, GRPOTrainer

class Same(GRPOTrainer):
    pass

class Doubled(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)

class Shortened(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        out["completion_ids"] = out["completion_ids"][:, :-1]
        out["completion_mask"] = out["completion_mask"][:, :-1]
        out.pop("old_per_token_logps", None)
        return out

class Negated(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return -super()._compute_loss(model, inputs)

@dataclass
class OwnConfig(GRPOConfig):
    my_coef: float = 0.5

class Weighted(GRPOTrainer):
    def __init__(self, model, reward_funcs, args: OwnConfig, **kwargs):
        super().__init__(model, reward_funcs, args, **kwargs)

    def _compute_loss(self, model, inputs):
        return self.args.my_coef * super()._compute_loss(model, inputs)

class Demanding(GRPOTrainer):
    def __init__(self, *args, needed, **kwargs):
        super().__init__(*args, **kwargs)

class Hinged(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        self.loss_types = ["hinge"]
        return super()._compute_loss(model, inputs, return_outputs)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"users_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / f"{name}.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_users_trainer(package):
    [same] = distances(read_subject(None, f"{package}.Same"), [("dapo", "chapter")])
    assert same.equal
    [twice] = distances(read_subject(None, f"{package}.Doubled"), [("dapo", "chapter")])
    assert twice.worst.verdict == "scaled"
    assert twice.worst.grad_norm_ratio == pytest.approx(2, rel=1e-5)
    [hinged] = distances(read_subject(None, f"{package}.Hinged"), [("dpo", "chapter")])
    assert hinged.worst.verdict == "differs"
    [negated] = distances(read_subject(None, f"{package}.Negated"), [("dapo", "chapter")])
    assert negated.worst.verdict == "differs"
    for name, sentence in (
        ("Shortened", "Shortened changed the completions"),
        ("Demanding", "Demanding cannot be run on the fixed batches: TypeError: .*needed"),
    ):
        with pytest.raises(InputError, match=sentence):
            distances(read_subject(None, f"{package}.{name}"), [("dapo", "chapter")])


def test_a_users_own_config_field_counts(package, tmp_path):
    for value, equal in ((1.0, True), (0.25, False)):
        path = tmp_path / f"{value}.yaml"
        path.write_text(f"my_coef: {value}\nloss_type: grpo")
        subject = read_subject(path, f"{package}.Weighted")
        [asked] = distances(subject, [("grpo", "chapter")])
        assert asked.equal == equal


# text, algorithm asked for, equal, changes, what else the answer must say
ASKED = {
    "several losses": (
        "{loss_type: [sigmoid, bco_pair, sft], loss_weights: [0.8, 0.2, 1.0], beta: 0.1}",
        "dpo",
        False,
        {"loss_type": ["sigmoid"], "loss_weights": None},
    ),
    "a weight on one loss": (
        "{loss_type: [sigmoid], loss_weights: [0.5], beta: 0.1}",
        "dpo",
        False,
        {"loss_weights": None},
    ),
    "plain DPO is no cDPO": (
        "{loss_type: sigmoid, beta: 0.1, max_length: 9}",
        "cdpo",
        False,
        {
            "loss_type": ["sigmoid", "robust"],
            "loss_weights": [1.8, -0.8],
            "label_smoothing": 0.1,
        },
    ),
    "KTO without reference point": (
        "{loss_type: apo_zero_unpaired, desirable_weight: 1.0}",
        "kto",
        False,
        {"loss_type": "kto"},
    ),
    "a term that no batch triggers": (
        "{loss_type: grpo, delta: 10.0, num_generations: 8}",
        "grpo",
        False,
        {"delta": None},
    ),
    "overlong filtering, which the chapter's DAPO has not": (
        "{loss_type: dapo, epsilon_high: 0.28, mask_truncated_completions: true}",
        "dapo",
        False,
        {"mask_truncated_completions": False},
    ),
    "a KL that DAPO has not": (
        "{loss_type: dapo, epsilon_high: 0.28, beta: 0.04, num_generations: 8}",
        "dapo",
        False,
        {"beta": 0.0},
    ),
    "several windows of a generation": (
        "{loss_type: dapo, epsilon_high: 0.28, num_generations: 8, generation_batch_size: 64, "
        "per_device_train_batch_size: 8}",
        "dapo",
        False,
        {"steps_per_generation": 1},
    ),
    "a relative bound of CISPO": (
        "{loss_type: cispo, epsilon_high: 0.2, num_generations: 8}",
        "cispo/trl",
        False,
        {"epsilon_high": 1.2},
    ),
    "SimPO with its own margin": (
        "{loss_type: simpo, beta: 2.5, simpo_gamma: 1.0, cpo_alpha: 0.0}",
        "simpo",
        True,
        {},
    ),
    "a boolean for scale_rewards": (
        "{loss_type: dr_grpo, scale_rewards: false, num_generations: 8}",
        "drgrpo",
        True,
        {},
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_a_config_is_asked(case, tmp_path):
    text, asked_for, equal, changes = ASKED[case]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    name, _, which = asked_for.partition("/")
    [asked] = distances(read_subject(path, None), [(name, which or "chapter")])
    assert (asked.equal, asked.changes) == (equal, changes)
    if changes:
        assert asked.then.verdict == "equal"


def test_the_nearest_is_nearest_in_direction(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("{loss_type: dr_grpo, num_generations: 8}")
    found = distances(read_subject(path, None))
    # rewards are still scaled and the length is fixed: DAPO's direction, the tokens' share of its
    # length; GRPO's error of length is smaller than Dr. GRPO's, its direction further away
    assert (found[0].algorithm, found[0].worst.verdict) == ("dapo", "scaled")
    cosines = {(d.algorithm, d.formulation): d.worst.grad_cosine for d in found}
    assert cosines["drgrpo", "chapter"] > cosines["grpo", "chapter"] + 0.05
    order = [(d.algorithm, d.formulation) for d in found]
    assert order.index(("drgrpo", "chapter")) < order.index(("grpo", "chapter"))
    main(["compare", "--config", str(path), "--algorithms", "dapo,drgrpo"])
    assert "closest to dapo (chapter): its gradient at a cosine of 1.0000, 0.3" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_readmes_answer_is_what_compare_says(tmp_path, capsys, monkeypatch):
    shown = re.search(r"\$ rlhf-trl (compare --config .*)\n((?:.+\n|\n)+?)error: (.*)\n```", README)
    monkeypatch.chdir(tmp_path)
    Path("my_run.yaml").write_text("{loss_type: dr_grpo, num_generations: 8}")
    with pytest.raises(SystemExit) as stopped:
        main(shown[1].split())
    for said, found in ((shown[2], capsys.readouterr().out), (f"error: {shown[3]}", stopped.value)):
        assert re.sub(r"\d\b", "#", said) == re.sub(r"\d\b", "#", str(found))  # but the last digits


def test_a_window_of_several_generations_has_no_single_mean(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "{loss_type: dapo, num_generations: 8, gradient_accumulation_steps: 4, "
        "steps_per_generation: 2}"
    )
    [asked] = distances(read_subject(path, None), [("dapo", "chapter")])
    assert not asked.equal and asked.worst.batch == "several_generations"
    assert asked.changes == {"steps_per_generation": 4} and asked.then.agrees


TAMPERED = """
from trl import GRPOTrainer

class Capped(GRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.args.delta = 5.0

class Positive(GRPOTrainer):
    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        total = (rewards * self.reward_weights).sum(1, keepdim=True)
        return rewards * (total > 0)

class Short(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        inputs = dict(inputs)
        inputs["completion_mask"] = inputs["completion_mask"].clone()
        inputs["completion_mask"][:, 12:] = 0
        return super()._compute_loss(model, inputs)
"""


@pytest.mark.parametrize("name", ["Capped", "Positive", "Short"])
def test_what_acts_on_large_ratios_signed_rewards_or_late_tokens_only_is_seen(
    tmp_path, monkeypatch, name
):
    module = f"tampered_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / f"{module}.py").write_text(TAMPERED)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text("{loss_type: grpo, num_generations: 8}")
    [asked] = distances(read_subject(path, f"{module}.{name}"), [("grpo", "chapter")])
    assert not asked.equal


def test_the_extreme_batch_is_what_it_says():
    window = PolicyWindow(EXTREME)
    view = window.view()
    counts, ratio = view.mask.bool(), view.ratio[view.mask.bool()]
    assert 0.08 < ratio.min() < 0.12 and 6 < ratio.max() < 9
    groups = view.rewards.view(-1, 16)
    advantage = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)
    assert advantage.abs().max() > 2  # of groups of 4 it is 1.5 at most
    negative = (advantage.view(-1, 1) < 0).expand_as(counts) & counts
    assert view.ratio[negative].max() > 5  # beyond the bounds that people give `delta`
    assert view.rewards.min() < 0 < view.rewards.max() and counts.sum(1).max() == 40
    prompts = window.ids["prompt_mask"].sum(1)
    assert prompts.max() > prompts.min() + 5


def test_a_term_that_was_measured_is_no_open_question(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{loss_type: dapo, delta: 10.0, num_generations: 8}")
    [other] = distances(read_subject(path, None), [("grpo", "chapter")])
    assert (other.equal, other.untested) == (False, ())
    [same] = distances(read_subject(path, None), [("dapo", "chapter")])
    assert (same.equal, same.untested) == (False, ("delta",))


def test_advice_for_a_config_of_ours_says_what_it_does_not_say_yet(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("{algorithm: grpo, temperature: 0.6, generation_kwargs: {top_p: 0.9}}")
    found = distances(read_subject(path, None), [("grpo", "chapter"), ("gspo", "code")])
    same, other = sorted(found, key=lambda each: each.algorithm)
    scored = {"temperature": 1.0, "generation_kwargs": {"temperature": 0.6, "top_p": 0.9}}
    assert not same.equal and same.changes == scored and same.then.agrees
    assert other.changes == {"algorithm": "gspo", "formulation": "code"} | scored
    assert other.then is None  # its fields may be others


def test_what_is_left_out_is_said(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("{loss_type: grpo, num_generations: 8, reward_weights: [1.0]}")
    main(["compare", "--config", str(path), "--algorithms", "grpo"])
    assert "not measured: num_generations, reward_weights" in capsys.readouterr().out
    path.write_text("{algorithm: grpo, missing_eos_penalty: 1.0}")
    main(["compare", "--config", str(path), "--algorithms", "grpo"])
    assert "not measured: missing_eos_penalty" in capsys.readouterr().out
    path.write_text("{loss_type: grpo, use_vllm: true}")
    main(["compare", "--config", str(path), "--algorithms", "grpo"])
    assert "not measured: use_vllm (the batches' completions are given)" in capsys.readouterr().out
    path.write_text("{packing: true, max_length: 64}")
    main(["compare", "--config", str(path), "--trainer", "SFTTrainer"])
    assert (
        "not measured: packing (the batches hold one padded text a row)" in capsys.readouterr().out
    )


def test_stock_trainers_average_unequal_micro_batches(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    text = "{algorithm: dpo, gradient_accumulation_steps: 4, formulation: %s"
    for which, unequal in (("trl", True), ("chapter", False)):
        path.write_text(f"{text % which}, train_sampling_strategy: batch_rebalance}}")
        main(["compare", "--config", str(path), "--algorithms", "dpo"])
        assert (
            "TRL takes their plain mean" in " ".join(capsys.readouterr().out.split())
        ) == unequal
        [distance] = distances(read_subject(path, None), [("dpo", which)])
        assert distance.untested == (("train_sampling_strategy",) if unequal else ())


@pytest.mark.parametrize(
    ("text", "trainer", "said"),
    [
        ("beta: 0.05", None, "GRPOTrainer (it may be RLOOTrainer, too: name it with --trainer)"),
        ("beta: 0.05", "RLOOTrainer", "RLOOTrainer"),
        ("loss_type: dapo", None, "GRPOTrainer"),  # which RLOOConfig has not
    ],
)
def test_a_trainer_that_is_only_assumed_is_said_to_be(text, trainer, said, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"num_generations: 8\nreward_funcs: [accuracy_reward]\n{text}\n")
    assert read_subject(path, trainer).trainer == said


@pytest.mark.parametrize(
    ("text", "trainer", "sentence"),
    [
        ("loss_typ: grpo\nepsilon: 0.2", None, r"loss_typ is not a known key.*loss_type"),
        (
            "epsilon: wide\nnum_generations: 4",
            None,
            r'run.yaml: epsilon is "wide", a string; write a number',
        ),
        ("beta: 0.1", None, r"fit .*DPOTrainer.*; say which with --trainer"),
        ("loss_type: grop", None, r"fit no single trainer; say which with --trainer"),
        ("loss_type: 3", None, r"fit no single trainer; say which with --trainer"),
        ("loss_type: grop", "GRPOTrainer", r"cannot be run .*Unknown loss type: grop"),
        ("temperature: 0.0", "GRPOTrainer", r"cannot be run .*ZeroDivisionError"),
        ("epsilon: -1.0", "GRPOTrainer", r"epsilon must be 0 or more"),
        ("algorithm: gropo", None, r"unknown algorithm 'gropo'.*grpo"),
        ("a: [", None, r"run.yaml"),
        ("beta: 0.1", "nowhere.Trainer", r"nowhere cannot be imported"),
        ("beta: 0.1", "trl.Trainers", r"trl has no Trainers"),
        ("beta: 0.1", "trl:SFTTrainr", r"trl has no SFTTrainr .did you mean 'SFTTrainer'"),
        ("beta: 0.1", "pathlib.Path", r"not a subclass of a trainer of TRL"),
        ("beta: 0.1", "GRPOTrainr", r"has no module.*GRPOTrainer"),
    ],
)
def test_bad_input_ends_in_one_sentence(text, trainer, sentence, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence) as caught:
        distances(read_subject(path, trainer))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "equal", "changes"),
    [
        ("algorithm: kwise", "kwise/chapter", {}),
        ("algorithm: orm\nformulation: code", "orm/code", {}),
        (
            "algorithm: prm\nformulation: code\nclass_weights: [2.0, 1.0, 1.0]",
            None,
            {"class_weights": None},
        ),
        ("algorithm: ppo\ngamma: 0.9\nvf_coef: 0.5", "ppo/chapter", {}),
        ("algorithm: ppo\nwhiten_advantages: true", None, {"whiten_advantages": False}),
        pytest.param(
            "algorithm: opd\nteacher_models: [a, b]", "opd/chapter", {}, marks=pytest.mark.promise
        ),
        pytest.param(
            "algorithm: sdpo\nformulation: code\nteacher: start\ndemonstration_template: "
            "'see {demonstration}'\ncorrectness_reward: exact_match",
            "sdpo/code",
            {},
            marks=pytest.mark.promise,
        ),
    ],
)
def test_a_config_whose_models_or_data_are_its_own(text, equal, changes, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    subject = read_subject(path, None)
    (found,) = distances(subject)
    assert found.equal == (equal is not None)
    assert equal in (None, f"{found.algorithm}/{found.formulation}")
    assert found.changes == changes and not found.why
    assert not changes or found.then.agrees
    with pytest.raises(InputError, match=r"is not compared with grpo \(chapter\)"):
        distances(subject, [("grpo", "chapter")])


def test_a_trainer_may_be_named_with_a_colon_before_its_class():
    assert subjects.class_of("trl:SFTTrainer") is subjects.class_of("trl.SFTTrainer")


def test_a_subclass_of_ours_is_compared_with_our_config():
    from trl import GRPOConfig

    trainer = subjects.class_of("rlhf_trl.trainers.policy_gradient.BookGRPOTrainer")
    own = type("Own", (trainer,), {})
    assert subjects.config_class(own, GRPOConfig) is trainer.config_class


def test_a_subclass_of_ours_is_measured_without_a_config():
    subject = subjects.read_subject(None, "rlhf_trl.trainers.rloo.BookRLOOTrainer")
    assert subject.trainer_arguments == {"algorithm": "rloo", "formulation": "chapter"}
    assert subject.fields["beta"] == 0.05  # RLOOConfig's
    own, other = distances(subject, [("rloo", "chapter"), ("rloo", "code")], fixes=False)
    assert own.equal and not other.equal and own.formulation == "chapter"
    assert subject.could_be("rloo", "trl")


@pytest.mark.parametrize(
    ("text", "trainer", "lines"),
    [
        (
            "dataset: {size: 8}\nmax_steps: 3",
            None,
            ["equal to SFT's mean over the window"],
        ),
        (
            "label_smoothing_factor: 0.1",
            "SFTTrainer",
            [
                "equal to neither mean of SFT",
                "to get there: label_smoothing_factor: 0.0; then equal to the mean over the window",
            ],
        ),
        (
            "neftune_noise_alpha: 5.0",
            "SFTTrainer",
            ["not measured, and may act elsewhere: neftune_noise_alpha"],
        ),
    ],
)
def test_a_config_of_sft_is_held_against_its_means(text, trainer, lines, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    main(["compare", "--config", str(path), *(["--trainer", trainer] if trainer else [])])
    output = " ".join(capsys.readouterr().out.split())
    for line in lines:
        assert line in output
    assert "mean over each micro-batch differs" in output


def test_sft_has_no_row_to_be_required():
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--trainer", "SFTTrainer", "--require", "dpo"])
    assert "--require names a row, and SFT has none; leave it out" in stop.value.code
