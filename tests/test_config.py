"""Config loading: what a YAML and a command line mean, and the sentence each mistake gets."""

import importlib
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from rlhf_trl import algorithms
from rlhf_trl.data.blocks import OfflinePairs, PreferenceData
from rlhf_trl.errors import InputError
from rlhf_trl.run import launch
from rlhf_trl.run.config import load_config, read_config
from rlhf_trl.run.options import join_options, read_options
from rlhf_trl.run.read_fields import read_fields
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.yaml_loader import dump_yaml, read_yaml

ROOT = Path(__file__).parent.parent


class Unit(Enum):
    CHARS = "chars"
    WORDS = "words"


@dataclass
class Spec:
    name: str
    weight: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Data:
    specs: list[Spec]
    size: int = 2000
    unit: Unit = Unit.WORDS
    split: Literal["train", "test"] = "train"
    system_prompt: str | None = None

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"size must be positive,\nnot {self.size}")


@dataclass
class Expect:
    processes: int = 1
    strategy: str | None = None


@dataclass
class Run:
    dataset: Data
    algorithm: str = "grpo"
    formulation: str = "chapter"
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match"])
    shuffle: bool = True
    expect: Expect | None = None


BASE = """
dataset:
  specs: [{name: spell_backward}]
use_cpu: true
bf16: false
output_dir: out
"""


@pytest.fixture
def load(tmp_path):
    """Write `head + text` to x.yaml and `files` beside it, and load it with a command line."""

    def load(text="", *argv, own=Run, trl="GRPOConfig", head=BASE, files=()):
        for name, content in dict(files).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        (tmp_path / "x.yaml").write_text(head + text)
        return load_config(own, trl, ["--config", str(tmp_path / "x.yaml"), *argv])

    return load


def refusal(load, *args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        load(*args, **kwargs)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def load_for_its_machine(path, own, trl, argv=()):
    """Load a config as the machine it is meant for would: `expect.processes`, on this CPU."""
    from rlhf_trl.run.plan import launched_with

    processes = (read_config(path).get("expect") or {}).get("processes") or 1
    with launched_with(processes):
        return load_config(own, trl, ["--config", str(path), "--use_cpu", *argv])


# what a config means


def test_values_arrive_in_the_three_dataclasses(load):
    loaded = load(
        "learning_rate: 1e-6\n"
        "max_grad_norm: 1\n"
        "report_to: none\n"
        "resume_from_checkpoint: auto\n"
        "lr_scheduler_type: cosine\n"
        "generation_kwargs: {top_k: 20, stop: [a, b]}\n"
        "lr_scheduler_kwargs: null\n"
        "model_name_or_path: some/model\n"
        "lora_target_modules: all-linear\n"
    )
    assert loaded.own.dataset == Data(specs=[Spec("spell_backward")])
    assert loaded.trl.learning_rate == 1e-6
    assert loaded.trl.max_grad_norm == 1.0
    assert loaded.trl.report_to == []
    assert loaded.trl.resume_from_checkpoint == "auto"
    assert loaded.trl.lr_scheduler_type.value == "cosine"
    assert loaded.trl.generation_kwargs == {"top_k": 20, "stop": ["a", "b"]}
    assert loaded.trl.lr_scheduler_kwargs is None
    assert loaded.model.model_name_or_path == "some/model"
    assert loaded.model.lora_target_modules == "all-linear"


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "0.000001", "1.0e-06", ".1e-5"])
def test_every_way_to_write_a_float(load, text):
    assert load(f"learning_rate: {text}\n").trl.learning_rate == pytest.approx(1e-6, rel=1e-12)


def test_yaml_scalars_follow_version_1_2(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: [yes, on, 010, 1_000, 12:30, 2024-01-01, 0x1F, 1e3, .inf, true, ~, '1']\n")
    assert read_yaml(path)["a"] == [
        *["yes", "on", 10, "1_000", "12:30", "2024-01-01", "0x1F"],
        *[1000.0, float("inf"), True, None, "1"],
    ]


def test_own_fields_become_enums_and_nested_dataclasses(load):
    own = load("expect: {processes: 1}\n", "--dataset.unit", "chars").own
    assert own.dataset.unit is Unit.CHARS
    assert own.expect == Expect(processes=1)


def test_extends_merges_mappings_replaces_lists_and_removes_unset_keys(load):
    loaded = load(
        "extends: sub/middle.yaml\n"
        "generation_kwargs: {top_p: 0.5, stop: !unset }\n"
        "reward_funcs: [c]\n"
        "seed: !unset\n",
        head="",
        files={
            "sub/middle.yaml": "extends: ../root.yaml\nreward_funcs: [a, b]\nmax_steps: 7\n",
            "root.yaml": BASE + "seed: 5\ngeneration_kwargs: {top_k: 20, top_p: 1, stop: x}\n",
        },
    )
    assert loaded.trl.generation_kwargs == {"top_k": 20, "top_p": 0.5}
    assert loaded.own.reward_funcs == ["c"]
    assert loaded.trl.max_steps == 7
    assert loaded.trl.seed == 42  # TRL's default
    assert "seed" not in loaded.given and "extends" not in loaded.given


def test_the_command_line_wins_over_the_file(load):
    text = (
        "seed: 1\ngeneration_kwargs: {top_k: 5, top_p: 0.9}\nreward_funcs: [x]\nuse_peft: false\n"
    )
    loaded = load(
        *[text, "--seed", "2", "--learning_rate=1e-4", "--generation_kwargs.top_k", "20"],
        *["--reward_funcs", "a", "b", "--use_peft", "--dataset.size", "300"],
        *["--dataset.specs.0.weight", "2", "--dataset.specs.0.config.max_len", "7"],
        *["--expect.processes", "1", "--no_shuffle", "--reward-weights", "-1", "0.5"],
        *["--model_init_kwargs", '{"num_labels": 1}', "--run_name", "12 #3: a"],
    )
    own, trl = loaded.own, loaded.trl
    assert (trl.seed, trl.learning_rate) == (2, 1e-4)
    assert trl.generation_kwargs == {"top_k": 20, "top_p": 0.9}
    assert own.reward_funcs == ["a", "b"]
    assert loaded.model.use_peft is True
    assert own.dataset.size == 300
    assert own.dataset.specs == [Spec("spell_backward", 2.0, {"max_len": 7})]
    assert type(own.dataset.specs[0].weight) is float
    assert own.expect == Expect(processes=1)
    assert own.shuffle is False
    assert trl.reward_weights == [-1.0, 0.5]
    assert trl.model_init_kwargs == {"num_labels": 1}
    assert trl.run_name == "12 #3: a"


def test_config_equals_path(tmp_path):
    (tmp_path / "x.yaml").write_text(BASE + "seed: 3\n")
    loaded = load_config(Run, "GRPOConfig", ["--seed", "4", f"--config={tmp_path / 'x.yaml'}"])
    assert loaded.trl.seed == 4


def test_an_override_reaches_one_of_two_lists_with_the_same_anchor(load):
    head = "use_cpu: true\ndataset:\n  specs:\n  - {name: a, config: {n: &n [1]}}\n"
    text = "  - {name: b, config: {n: *n}}\n"
    loaded = load(text, "--dataset.specs.0.config.n.0", "7", head=head)
    assert [spec.config["n"] for spec in loaded.own.dataset.specs] == [[7], [1]]


def test_dots_lead_into_a_mapping_given_on_the_command_line(load):
    argv = ["--generation_kwargs", "{top_k: 1}", "--generation_kwargs.top_p", "0.5"]
    assert load("", *argv).trl.generation_kwargs == {"top_k": 1, "top_p": 0.5}


@pytest.mark.parametrize("argv", [[], ["--reward_clip_range", "-1", "1"]])
def test_a_tuple_field_takes_a_list_of_its_length(load, argv):
    head = "use_cpu: true\n" + ("" if argv else "reward_clip_range: [-1, 1]\n")
    assert load("", *argv, own=NoAlgorithm, trl="RLOOConfig", head=head).trl.reward_clip_range == (
        -1.0,
        1.0,
    )
    sentence = refusal(
        load, "reward_clip_range: [1]\n", own=NoAlgorithm, trl="RLOOConfig", head="use_cpu: true\n"
    )
    assert "reward_clip_range is [1], a list; write a list of 2" in sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seed", "1", "--seed", "2"], "--seed is given more than once; write one"),
        (["--seed=1", "--seed=1"], "--seed is given more than once"),
        (["--own.size", "1", "--own.size", "2"], "--own.size is given more than once"),
        (["--bf16", "--no-bf16"], r"--no-bf16 is given more than once \(as --bf16\)"),
        (["--max-steps", "1", "--max_steps", "2"], "--max_steps is given more than once"),
    ],
)
def test_an_option_that_is_repeated_is_refused(load, words, sentence):
    with pytest.raises(InputError, match=f"^command line: {sentence}"):
        load("", *words)


def test_options_that_overrule_others_stand_once():
    first = ["--config", "x.yaml", "--seed", "1", "--betas", "1", "2", "--flag"]
    later = ["--betas", "3", "--no_flag", "--name=y"]
    assert join_options(first, later, ["--seed", "5"]) == [
        *["--config", "x.yaml", "--betas", "3", "--no_flag", "--name=y", "--seed", "5"]
    ]


@pytest.mark.parametrize("words", [[], ["true"], ["1"], ["yes"]])
def test_ways_to_switch_a_flag_on(load, words):
    assert load("", "--log_completions", *words).trl.log_completions is True


@pytest.mark.parametrize("text", ["12", "1e-6", "true", "null", "[a", "a: b", "#x", "'q'", ""])
def test_a_string_option_is_taken_as_typed(load, text):
    assert load("", "--project", text).trl.project == text


def test_an_empty_word_is_not_null(load):
    assert load("", "--run_name", "").trl.run_name == ""
    assert load("", "--run_name", "null").trl.run_name is None


def test_text_with_a_colon_is_not_a_mapping(load):
    argv = ["--dataset.specs.0.config.prompt", "Question: why"]
    assert load("", *argv).own.dataset.specs[0].config == {"prompt": "Question: why"}


def test_the_same_command_line_means_what_it_means_to_trl(load):
    from trl import GRPOConfig, ModelConfig, TrlParser

    argv = [
        *["--learning_rate", "1e-4", "--max_grad_norm", "2", "--num_train_epochs", "1"],
        *["--report_to", "none", "--lr_scheduler_type", "cosine", "--eval_strategy", "steps"],
        *["--eval_steps", "5", "--reward_weights", "1", "0.5", "--no_gradient_checkpointing"],
        *["--lora_target_modules", "all-linear", "--use_peft", "--log_completions", "true"],
        *["--model_init_kwargs", '{"num_labels": 1}', "--optim", "sgd", "--include_for_metrics"],
        *["loss", "--dtype", "bfloat16", "--pad_to_multiple_of", "8", "--run_name", "r"],
        *["--use-cpu", "--bf16", "false", "--disable_tqdm", "yes", "--debug", "underflow_overflow"],
    ]
    loaded = load("", *argv, own=NoAlgorithm, head="{}\n")
    trl_args, model_args = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config(argv)
    assert asdict(loaded.model) == asdict(model_args)
    assert loaded.trl.to_dict() == trl_args.to_dict()
    assert trl_args.learning_rate == 1e-4 and model_args.use_peft  # the oracle read something


@pytest.mark.parametrize(
    ("text", "argv", "expected"),
    [
        ("", (), True),  # TRL's default
        ("activation_checkpointing: null\n", (), True),
        ("gradient_checkpointing: false\n", (), False),
        ("activation_checkpointing: false\n", (), False),
        ("gradient_checkpointing: true\nactivation_checkpointing: true\n", (), True),
        ("activation_checkpointing: true\n", ("--gradient_checkpointing", "false"), False),
        ("gradient_checkpointing: true\n", ("--activation_checkpointing", "false"), False),
        ("extends: base.yaml\ngradient_checkpointing: false\n", (), False),
    ],
)
def test_the_old_name_of_activation_checkpointing_is_the_new_one(load, text, argv, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        files = {"base.yaml": "activation_checkpointing: true\n"}
        loaded = load(text, *argv, files=files)
    both = (loaded.trl.activation_checkpointing, loaded.trl.gradient_checkpointing)
    assert both == (expected, expected)
    assert "gradient_checkpointing" not in loaded.given


def test_the_old_and_the_new_name_with_different_values(load):
    text = "gradient_checkpointing: true\nactivation_checkpointing: false\n"
    sentence = refusal(load, text)
    assert "x.yaml: gradient_checkpointing is the old name of activation_checkpointing" in sentence
    argv = ["--gradient_checkpointing_kwargs.use_reentrant", "true"]
    loaded = load("", *argv).trl
    assert loaded.activation_checkpointing_kwargs == {"use_reentrant": True}
    argv += ["--activation_checkpointing_kwargs.use_reentrant", "false"]
    assert "command line: gradient_checkpointing_kwargs is the old" in refusal(load, "", *argv)


@dataclass
class NoAlgorithm:
    shuffle: bool = True


def test_an_empty_own_class_works_with_another_trainer(load):
    loaded = load("loss_type: sigmoid\n", own=NoAlgorithm, trl="DPOConfig", head="use_cpu: true\n")
    assert loaded.trl.loss_type == ["sigmoid"]
    assert loaded.given == {"use_cpu": True, "loss_type": ["sigmoid"]}


def test_a_class_by_dotted_path_or_itself(load):
    from trl import SFTConfig

    head = "use_cpu: true\nbf16: false\n"
    by_path = load(own=NoAlgorithm, trl="trl.trainer.sft_config.SFTConfig", head=head).trl
    assert type(by_path) is type(load(own=NoAlgorithm, trl=SFTConfig, head=head).trl) is SFTConfig


def test_the_saved_config_repeats_the_run(load, tmp_path):
    odd = ["1e-6", "yes", "010", "null", "2024-01-01", "12:30", "a: b #c", "ünï\n two", "", "0x1F"]
    loaded = load(
        "extends: base.yaml\nlearning_rate: 1e-6\nadam_epsilon: 1e-20\nlr_scheduler_type: cosine\n",
        *["--seed", "9", "--dataset.size", "30", "--reward_funcs", *odd, "--use_peft"],
        head="",
        files={"base.yaml": BASE},
    )
    assert loaded.own.reward_funcs == odd
    loaded.save(tmp_path / "run" / "config.yaml")
    again = load_config(Run, "GRPOConfig", ["--config", str(tmp_path / "run" / "config.yaml")])
    assert again.given == loaded.given
    assert again.own == loaded.own
    assert again.trl.to_dict() == loaded.trl.to_dict()
    assert asdict(again.model) == asdict(loaded.model)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]
    # a plain YAML reader sees the same strings
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["reward_funcs"] == odd


def test_dumped_yaml_reads_back_exactly(tmp_path):
    shared = [1e-20, 1e20, float("inf"), -3, True, None]
    content = {"a": shared, "b": {"c": shared, "d": "1e5"}, "e": "- ünï"}
    text = dump_yaml(content)
    assert "ünï" in text and "&" not in text and "*" not in text  # a person can read it
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    assert read_yaml(tmp_path / "x.yaml") == content


def test_the_algorithm_sets_the_fields_it_fixes(load):
    assert load().trl.scale_rewards == "group"
    assert load("algorithm: drgrpo\n", trl=STAGES["grpo"].config).trl.scale_rewards == "none"


def test_the_algorithms_defaults_replace_trls(load):
    epsilon_high = algorithms.formulation("dapo", "chapter").reads["epsilon_high"]
    assert epsilon_high is not None
    text, ours = "algorithm: dapo\ncorrectness_reward: exact_match\n", STAGES["grpo"].config
    assert load(text, trl=ours).trl.epsilon_high == epsilon_high
    assert load(f"{text}epsilon_high: 0.5\n", trl=ours).trl.epsilon_high == 0.5


def test_a_field_that_depends_on_a_parameter_is_worked_out(load):
    flipped = load("algorithm: cdpo\nlabel_smoothing: 0.2\n", trl=STAGES["dpo"].config).trl
    # 2 (1 - 0.2) and -(1 - 0.4)
    assert (flipped.loss_type, flipped.loss_weights) == (["sigmoid", "robust"], [1.6, -0.6])
    by_default = load("algorithm: cdpo\n", "--beta", "0.3", trl=STAGES["dpo"].config).trl
    assert (by_default.label_smoothing, by_default.loss_weights) == (0.1, [1.8, -0.8])
    by_hand = load("algorithm: cdpo\n", "--label_smoothing", "0.5", trl=STAGES["dpo"].config).trl
    assert by_hand.loss_weights == [1.0, 0.0]
    repeated = "algorithm: cdpo\nloss_weights: [1.0, -0.8]\n"
    assert "contradicts cdpo (chapter)" in refusal(load, repeated, trl=STAGES["dpo"].config)
    broken = "algorithm: cdpo\nlabel_smoothing: much\n"
    assert "label_smoothing must be a number, not 'much'" in refusal(
        load, broken, trl=STAGES["dpo"].config
    )


def test_a_recipe_runs_its_own_algorithms_only(load):
    @dataclass
    class Pairs(Run):
        algorithm: str = field(default="dpo", metadata={"choices": ["dpo", "kto"]})

    assert load(own=Pairs, trl="DPOConfig").own.algorithm == "dpo"
    sentence = refusal(load, "algorithm: grpo\n", own=Pairs, trl="DPOConfig")
    assert 'algorithm is "grpo"; write one of dpo, kto.' in sentence
    sentence = refusal(load, "algorithm: dpo\ndesirable_weight: 2.0\n", own=Pairs, trl="DPOConfig")
    assert "remove it, or choose one that reads it: kto." in sentence


def test_a_fixed_field_may_be_repeated_with_its_value(load):
    assert load("scale_rewards: group\n").trl.scale_rewards == "group"


# one sentence per mistake

FILE_MISTAKES = {
    "unknown key": ("learning_rat: 1\n", "x.yaml: learning_rat ", "'learning_rate'"),
    "key of another recipe": ("simpo_gamma: 1\n", "x.yaml: simpo_gamma is not", ""),
    "unknown key in a block": ("expect: {proceses: 1}\n", "expect.proceses ", "'processes'"),
    "unknown key, nothing near": ("expect: {q: 1}\n", "expect.q ", "processes, strategy"),
    "list for a float": ("learning_rate: [1]\n", "learning_rate is [1], a list", "a number"),
    "float for an integer": ("num_generations: 4.0\n", "num_generations is 4.0, a float", "4"),
    "fraction for an integer": ("num_generations: 4.5\n", "is 4.5, a float", "an integer"),
    "boolean for an integer": ("max_steps: true\n", "max_steps is true, a boolean", "an integer"),
    "boolean for a float": ("learning_rate: true\n", "is true, a boolean", "a number"),
    "null": ("seed: null\n", "seed is null", "an integer"),
    "null for a string": ("project: null\n", "project is null", "a string"),
    "number for a string": ("run_name: 12\n", "run_name is 12, an integer", '"12"'),
    "quoted number": ("learning_rate: '1'\n", 'learning_rate is "1", a string', "a number"),
    "yes": ("use_peft: yes\n", 'use_peft is "yes", a string', "true or false"),
    "on": ("log_completions: on\n", 'log_completions is "on"', "true or false"),
    "one for a boolean": ("use_peft: 1\n", "use_peft is 1, an integer", "true or false"),
    "string for a mapping": ("expect: ddp\n", 'expect is "ddp", a string', "a mapping or null"),
    "list for a dict field": ("generation_kwargs: [1]\n", "is [1], a list", "a mapping"),
    "wrong item of a list": ("reward_funcs: [a, 1]\n", "reward_funcs.1 is 1", '"1"'),
    "mapping for a list": ("reward_funcs: {a: 1}\n", "is {", "a list"),
    "not a number": ("learning_rate: .nan\n", "learning_rate is not a number", ""),
    "wrong choice of an enum": ("save_strategy: stesp\n", 'is "stesp"', "no, steps, epoch, best"),
    "number for an enum": (
        "save_strategy: 3\n",
        "is 3, an integer; ",
        "one of no, steps, epoch, best.",
    ),
    "wrong choice of TRL's list": ("dtype: float8\n", 'dtype is "float8"', "auto, bfloat16"),
    "env": ("env: {A: 1}\n", "env is not read from a config", "in the shell"),
    "unknown algorithm": ("algorithm: grop\n", "x.yaml: unknown algorithm 'grop'", "'grpo'"),
    "unknown formulation": ("formulation: book\n", "x.yaml: ", "chapter"),
    "field not read": (
        "sapo_temperature_pos: 1.0\n",
        "sapo_temperature_pos is not read by grpo (chapter); remove it",
        "sapo",
    ),
    "contradiction": (
        "loss_type: bnpo\n",
        "loss_type is 'bnpo', which contradicts grpo (chapter) and its loss_type: 'grpo'",
        "remove it",
    ),
    "generation batch": (
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 3\nnum_generations: 5\n",
        "num_generations is 5, which does not divide the generation batch of 12 "
        "(per_device_train_batch_size 4 x 1 process x gradient_accumulation_steps 3)",
        "write one of 2, 3, 4, 6, 12,",
    ),
    "generation batch by steps_per_generation": (
        "per_device_train_batch_size: 2\nsteps_per_generation: 5\nnum_generations: 4\n",
        "batch of 10 (per_device_train_batch_size 2 x 1 process x steps_per_generation 5)",
        "write one of 2, 5, 10,",
    ),
    "generation batch of its own": (
        "per_device_train_batch_size: 2\ngeneration_batch_size: 10\nnum_generations: 4\n",
        "generation batch of 10 (generation_batch_size)",
        "write one of 2, 5, 10,",
    ),
    "default num_generations": (
        "per_device_train_batch_size: 4\n",
        "x.yaml: num_generations is 8",
        "write one of 2, 4,",
    ),
    "no generations": ("num_generations: 0\n", "num_generations is 0", "one of 2, 4, 8"),
    "batch of one": ("per_device_train_batch_size: 1\n", "batch of 1 ", "raise the batch"),
    "TRL's own check": ("warmup_steps: -1\n", "x.yaml: warmup_steps: ", "warmup_steps >= 0"),
    "TRL's own choices": ("debug: wrong\n", "x.yaml: debug: wrong is not", "underflow_overflow"),
    "a tracker": (
        "report_to: wandbb\n",
        'x.yaml: report_to is "wandbb"; write one of ',
        "wandb, codecarbon, clearml, dagshub, flyte, dvclive, swanlab, kubeflow, all, none (did "
        "you mean 'wandb'?).",
    ),
    "one of several trackers": ("report_to: [wandb, tensor]\n", 'report_to is "tensor"; ', ""),
    "a kind of adapter": (
        "lora_task_type: LM\n",
        'lora_task_type is "LM"',
        "SEQ_CLS, SEQ_2_SEQ_LM",
    ),
    "a compiler": ("torch_compile_backend: inductr\n", 'is "inductr"', "did you mean 'inductor'?"),
    "TRL's check of the model": (
        "load_in_8bit: true\nload_in_4bit: true\n",
        "x.yaml: ModelConfig: ",
        "at the same time",
    ),
}


@pytest.mark.parametrize("name", FILE_MISTAKES)
def test_mistake_in_the_file(load, tmp_path, name):
    text, what, remedy = FILE_MISTAKES[name]
    sentence = refusal(load, text)
    assert str(tmp_path / "x.yaml") in sentence
    assert what in sentence
    assert remedy in sentence.split(what)[1]


BLOCK_MISTAKES = {
    "missing block": ("{}\n", "x.yaml: dataset is missing; write a mapping"),
    "config of TRL": (
        "dataset_name: trl-lib/Capybara\n",
        "x.yaml: dataset is missing, and dataset_name is a key of TRL's own configs; `rlhf-trl "
        "translate ",
    ),
    "missing field of a block": ("dataset: {size: 3}\n", "dataset.specs is missing; write a list"),
    "missing field of a list item": (
        "dataset: {specs: [{weight: 2}]}\n",
        "dataset.specs.0.name is missing; write a string",
    ),
    "null block": ("dataset: null\n", "dataset is null; write a mapping"),
    "string block": ("dataset: gsm8k\n", 'dataset is "gsm8k", a string; write a mapping'),
    "unknown key in a list item": (
        "dataset: {specs: [{nmae: a, name: b}]}\n",
        "dataset.specs.0.nmae is not a known key (did you mean 'name'?)",
    ),
    "wrong literal": (
        "dataset: {specs: [], split: tset}\n",
        "dataset.split is \"tset\"; write one of train, test (did you mean 'test'?)",
    ),
    "wrong enum": ("dataset: {specs: [], unit: word}\n", "write one of chars, words"),
    "the block's own check": (
        "dataset: {specs: [], size: 0}\n",
        "x.yaml: dataset: size must be positive, not 0",
    ),
}


@pytest.mark.parametrize("name", BLOCK_MISTAKES)
def test_mistake_in_a_block(load, name):
    text, part = BLOCK_MISTAKES[name]
    assert part in refusal(load, text, head="")


YAML_MISTAKES = {
    "duplicate key": (
        "seed: 1\nmax_steps: 2\nseed: 3\n",
        "line 3: 'seed' is given twice",
        "line 1",
    ),
    "duplicate key in a block": ("a:\n  b: 1\n  b: 1\n", "line 3: 'b' is given twice", "line 2"),
    "broken": ("a: 1\nb: [1,\nc: }\n", "x.yaml, line 3: ", ""),
    "tab": ("a:\n\tb: 1\n", "x.yaml, line 2: ", ""),
    "python tag": ("a: !!python/name:os.system\n", "line 1: the tag !!python/name:os", "plain"),
    "python call": ("a: !!python/object/apply:os.getcwd []\n", "line 1: the tag", "plain value"),
    "date tag": ("a: !!timestamp 2024-01-01\n", "line 1: the tag !!timestamp", "plain value"),
    "wrong tag": ("a: !!int b\n", "x.yaml: ", "'b'"),
    "merge key": ("a: &a {b: 1}\nc: {<<: *a}\n", "line 2: the merge key", "extends"),
    "key that is a number": ("1: a\n", "line 1: the key 1 is not a string", "quotes"),
    "two documents": ("a: 1\n---\nb: 1\n", "x.yaml, line 2: ", ""),
    "a list": ("- a\n", "x.yaml: the config must be a mapping", "a list"),
    "nothing": ("# empty\n", "x.yaml: the config must be a mapping", "nothing"),
    "unset in a list": ("a: [{b: !unset }]\n", "line 1: !unset removes a key", ""),
    "unset before a brace": ("a: {b: !unset}\n", "line 1: while scanning a tag,", "'}'"),
    "unset with a value": ("a: !unset 3\n", "line 1: !unset takes no value", ""),
    "unset without a base": ("seed: 1\nsede: !unset\n", "x.yaml: sede is !unset", "'seed'"),
    "extends that is a list": ("extends: [a.yaml]\n", 'extends is ["a.yaml"]', "one YAML file"),
    "control character": ("a: \x07\n", "x.yaml: ", ""),
}


@pytest.mark.parametrize("name", YAML_MISTAKES)
def test_mistake_in_the_yaml(load, name):
    text, what, remedy = YAML_MISTAKES[name]
    sentence = refusal(load, text, head="")
    assert what in sentence
    assert remedy in sentence.split(what)[1]


def test_extends_missing_file_names_the_chain(load, tmp_path):
    sentence = refusal(
        load, "extends: a.yaml\n", head="", files={"a.yaml": "extends: sub/b.yaml\n"}
    )
    chain = [str(tmp_path / name) for name in ("x.yaml", "a.yaml", "sub/b.yaml")]
    assert sentence.startswith(" extends ".join(chain) + ", which is not a file")


def test_extends_cycle_names_the_chain(load, tmp_path):
    sentence = refusal(load, "extends: a.yaml\n", head="", files={"a.yaml": "extends: x.yaml\n"})
    chain = [str(tmp_path / name) for name in ("x.yaml", "a.yaml", "x.yaml")]
    assert sentence.startswith(" extends ".join(chain) + ", which is a cycle")


def test_a_mistake_in_a_base_names_the_base(load, tmp_path):
    files = {"a.yaml": BASE + "generation_kwargs: {top_k: 1}\nseed: x\n"}
    sentence = refusal(load, "extends: a.yaml\nmax_steps: 1\n", head="", files=files)
    assert sentence.startswith(f'{tmp_path / "a.yaml"}: seed is "x", a string')


def test_a_block_replaced_on_the_command_line_names_the_command_line(load):
    files = {"a.yaml": BASE + "expect: {strategy: ddp}\n"}
    text = "extends: a.yaml\nexpect: {processes: 1}\n"
    sentence = refusal(load, text, "--expect", "{processes: x}", head="", files=files)
    assert sentence.startswith('command line: expect.processes is "x", a string')
    sentence = refusal(load, text, "--dataset", "{size: 3}", head="", files=files)
    assert sentence.startswith("command line: dataset.specs is missing; write a list")


def test_a_key_that_the_child_overrides_names_the_child(load, tmp_path):
    files = {"a.yaml": BASE + "seed: 1\n"}
    sentence = refusal(load, "extends: a.yaml\nseed: x\n", head="", files=files)
    assert sentence.startswith(f'{tmp_path / "x.yaml"}: seed is "x", a string')


LINE_MISTAKES = {
    "unknown option": (["--learning_rat", "1"], "learning_rat is not a known key", "learning_rate"),
    "abbreviation": (["--per_device_train", "4"], "per_device_train is not a known key", ""),
    "unknown key in a block": (["--dataset.sized", "4"], "dataset.sized is not", "'size'"),
    "unknown block": (["--datasets.size", "4"], "datasets is not a known key", "'dataset'"),
    "unknown key in a list item": (["--dataset.specs.0.nam", "a"], "specs.0.nam is not", "'name'"),
    "index": (["--dataset.specs.1.weight", "2"], "dataset.specs is a list of 1", "'1'"),
    "word for an index": (["--dataset.specs.name", "a"], "dataset.specs is a list of 1", "'name'"),
    "below a scalar": (["--output_dir.x", "1"], "output_dir is neither a mapping nor a list", ""),
    "word for a float": (["--learning_rate", "abc"], 'learning_rate is "abc", a string', "number"),
    "float for an integer": (["--seed", "1.0"], "seed is 1.0, a float", "write 1"),
    "word for a boolean": (["--use_peft", "maybe"], 'use_peft is "maybe"', "true or false"),
    "wrong choice": (["--save_strategy", "stesp"], 'is "stesp"', "no, steps, epoch, best"),
    "unknown algorithm": (["--algorithm", "grop"], "unknown algorithm 'grop'", "'grpo'"),
    "no such formulation": (["--formulation", "book"], "no formulation 'book'", "chapter"),
    "no value": (["--learning_rate"], "learning_rate has no value", "a number"),
    "no value for a list": (["--reward_funcs"], "reward_funcs has no value", "a list"),
    "two values": (["--seed", "1", "2"], "seed takes one value and got 2: 1 2", ""),
    "value after equals": (["--seed=1", "2"], "'2' belongs to no option", "--key value"),
    "single dash": (["-seed", "1"], "-seed is not an option", "--"),
    "field not read": (["--delta", "4"], "delta is not read by grpo (chapter)", ""),
    "contradiction": (["--loss_type", "bnpo"], "loss_type is 'bnpo', which contradicts", "remove"),
    "env": (["--env.A", "1"], "env is not read from a config", "shell"),
    "batch": (["--num_generations", "3"], "num_generations is 3", "one of 2, 4, 8"),
    "second config": (["--config", "y.yaml"], "give exactly one config file", "--config PATH"),
    "extends": (["--extends", "y.yaml"], "extends is not a known key", ""),
}


@pytest.mark.parametrize("name", LINE_MISTAKES)
def test_mistake_on_the_command_line(load, name):
    argv, what, remedy = LINE_MISTAKES[name]
    sentence = refusal(load, "", *argv)
    assert sentence.startswith("command line: ")
    assert what in sentence
    assert remedy in sentence.split(what)[1]


@pytest.mark.parametrize("argv", [[], ["--config"], ["--config="], ["--config", "a", "b"]])
def test_exactly_one_config(argv):
    sentence = refusal(lambda: load_config(Run, "GRPOConfig", argv))
    assert sentence == "command line: give exactly one config file, as --config PATH."


def test_a_config_that_is_not_there(tmp_path):
    path = tmp_path / "none.yaml"
    sentence = refusal(lambda: load_config(Run, "GRPOConfig", ["--config", str(path)]))
    assert sentence == f"{path}: the config cannot be read (No such file or directory)."


def test_a_config_that_is_not_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes("a: ü\n".encode("latin-1"))
    sentence = refusal(lambda: load_config(Run, "GRPOConfig", ["--config", str(path)]))
    assert sentence == f"{path}: the config is not UTF-8 text."


def test_one_string_equals_the_list_of_one_that_an_algorithm_fixes(load, monkeypatch):
    row = algorithms.Formulation(settings={"loss_type": ["hinge"]})
    monkeypatch.setattr(algorithms, "formulation", lambda *names: row)
    assert load("loss_type: hinge\n", trl="DPOConfig").trl.loss_type == ["hinge"]
    assert "contradicts" in refusal(load, "loss_type: ipo\n", trl="DPOConfig")


def test_true_is_not_the_number_one_that_an_algorithm_fixes(load, monkeypatch):
    row = algorithms.Formulation(settings={"beta": 0.0})
    monkeypatch.setattr(algorithms, "formulation", lambda *names: row)
    assert load("beta: 0\n").trl.beta == 0.0
    assert "contradicts" in refusal(load, "beta: false\n")


def test_other_exceptions_are_not_swallowed(load):
    with pytest.raises(TypeError, match="unexpected keyword"):
        load("accelerator_config: {no_such: 1}\n")


def test_a_recipe_may_not_declare_a_field_that_trl_has(load):
    @dataclass
    class Twice:
        seed: int = 0

    with pytest.raises(TypeError, match="seed"):
        load("", own=Twice, head="use_cpu: true\n")


@pytest.mark.parametrize(
    ("recipe", "name", "key", "value", "wanted"),
    [
        ("grpo", "grpo", "dataset.size", "0", "1 to 1000000"),
        ("grpo", "grpo", "dataset.eval_size", "-1", "1 to 1000000"),
        ("grpo", "grpo", "dataset.specs.0.weight", "0.0", "a number above 0"),
        ("grpo", "grpo", "samples.every", "-1", "0 or more"),
        ("grpo", "grpo", "samples.count", "0", "1 or more"),
        ("grpo", "grpo", "samples.temperature", "-0.5", "0 or more"),
        ("grpo", "grpo", "samples.top_p", "0.0", "a number above 0, at most 1"),
        ("grpo", "grpo", "samples.top_p", "1.5", "a number above 0, at most 1"),
        ("grpo", "grpo", "samples.max_tokens", "0", "1 or more"),
        ("grpo", "grpo", "rollouts.every", "0", "1 or more"),
        ("grpo", "grpo", "rollouts.cap", "0.0", "a number above 0"),
        ("grpo", "../own/grpo", "dataset.eval_size", "0", "1 or more"),
        ("dpo", "dpo", "max_samples", "0", "1 or more"),
        ("reward", "kwise", "dataset.list_length", "1", "2 or more"),
        ("orm", "orm", "dataset.candidates", "1", "0 (none), or 2 or more"),
        ("orm", "orm", "dataset.samples_per_prompt", "0", "1 or more"),
        ("prm", "prm", "dataset.errors", "1.5", "a number between 0 and 1"),
        ("prm", "prm", "dataset.max_steps", "0", "1 or more"),
        (
            *("rejection_sampling", "rejection_sampling", "temperature", "0.0"),
            "a number between 0.001 and 1000",
        ),
        ("rejection_sampling", "rejection_sampling", "rounds", "0", "1 or more"),
        ("rejection_sampling", "rejection_sampling", "k", "0", "1 or more"),
    ],
)
def test_a_number_out_of_range_is_refused_before_trl_is_looked_for(
    recipe, name, key, value, wanted
):
    said = refused_option("no.such.Class", recipe, name, key, value)
    assert said == f"command line: {key} is {value}; write {wanted}."


def refused_option(trainer_config, recipe, name, key, value):
    given = ["--config", str(ROOT / "configs" / "tiny" / f"{name}.yaml"), f"--{key}", value]
    run = STAGES[recipe].part("fields")
    return refusal(load_config, run, trainer_config, given)


@pytest.mark.parametrize(
    ("recipe", "name", "key", "value", "wanted"),
    [
        ("grpo", "reinforce", "baseline_decay", "7.0", "a number between 0 and 1"),
        ("grpo", "dapo", "dynamic_sampling_rounds", "-1", "0 or more"),
        ("grpo", "grpo", "missing_eos_penalty", "-1.0", "0 or more"),
        ("dpo", "dpo", "nll_weight", "-1.0", "0 or more"),
        ("ppo", "ppo", "value_warmup_steps", "-1", "0 or more"),
        ("distill", "sdpo", "kl_top_k", "0", "1 or more"),
        ("grpo", "grpo", "learning_rate", "-1.0", "a number between 0 and 1000000"),
        ("grpo", "grpo", "num_iterations", "0", "1 or more"),
        ("grpo", "grpo", "temperature", "0.0", "a number between 0.001 and 1000"),
    ],
)
def test_a_number_of_a_trainer_out_of_range_names_its_key(recipe, name, key, value, wanted):
    said = refused_option(STAGES[recipe].config, recipe, name, key, value)
    assert said == f"command line: {key} is {value}; write {wanted}."


BAD_WITHOUT_TRL = {
    "duplicate": ("seed: 1\nseed: 2\n", "given twice"),
    "type": ("dataset: {specs: 3}\n", "dataset.specs is 3"),
    "loss field": ("dataset: {specs: []}\nsapo_temperature_pos: 1\n", "is not read by"),
}


@pytest.mark.parametrize("name", BAD_WITHOUT_TRL)
def test_bad_yaml_fails_before_trl_is_imported(tmp_path, name):
    text, part = BAD_WITHOUT_TRL[name]
    (tmp_path / "x.yaml").write_text(text)
    program = (
        "import sys\n"
        "from rlhf_trl.errors import InputError\n"
        "from rlhf_trl.run.config import load_config\n"
        "from rlhf_trl.data.gym import GymData\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Run:\n"
        "    dataset: GymData\n"
        "    algorithm: str = 'grpo'\n"
        "try:\n"
        f"    load_config(Run, 'GRPOConfig', ['--config', {str(tmp_path / 'x.yaml')!r}])\n"
        "except InputError as error:\n"
        "    print(error, {'trl', 'torch', 'transformers'} & set(sys.modules))\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root
    )
    assert part in done.stdout and done.stdout.rstrip().endswith("set()")


# TRL below, and other machines

TRL_CLASSES = [
    *["trl.GRPOConfig", "trl.SFTConfig", "trl.DPOConfig", "trl.KTOConfig", "trl.RewardConfig"],
    *["trl.RLOOConfig", "trl.experimental.orpo.ORPOConfig", "trl.experimental.cpo.CPOConfig"],
    "trl.ModelConfig",
]


@pytest.mark.parametrize("name", TRL_CLASSES)
def test_every_default_of_trl_passes_its_own_type_check(tmp_path, name):
    module, _, name = name.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    defaults = {f.name: getattr(f.default, "value", f.default) for f in fields(cls) if f.init}
    plain = {k: v for k, v in defaults.items() if isinstance(v, str | int | float | None)}
    (tmp_path / "x.yaml").write_text(dump_yaml(plain))
    assert read_fields(tmp_path / "x.yaml", [cls]).keys() == plain.keys()
    assert len(plain) > 15


def test_a_config_for_eight_processes_loads_here(tmp_path):
    path = tmp_path / "x.yaml"
    batch = "per_device_train_batch_size: 1\nnum_generations: 8\nbf16: true\n"
    base = "dataset: {specs: []}\n" + batch
    path.write_text(base + "expect: {processes: 8, strategy: fsdp}\n")
    loaded = load_for_its_machine(path, Run, "GRPOConfig")
    assert loaded.trl.generation_batch_size == 8
    assert loaded.own.expect.processes == 8

    path.write_text(base + "expect: {processes: 4}\n")
    sentence = refusal(lambda: load_for_its_machine(path, Run, "GRPOConfig"))
    assert "x 4 processes x" in sentence and "write one of 2, 4," in sentence


def test_the_world_size_is_what_the_launcher_says(load, monkeypatch):
    assert launch.world_size() == 1
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert launch.world_size() == 3


# keys that depend on a choice

MADE = BASE.replace("dataset:\n", "dataset:\n  pairs: on_policy\n  samples_per_prompt: 4\n")


@dataclass
class PairsRun:
    dataset: PreferenceData
    algorithm: str = "dpo"
    formulation: str = "chapter"


def test_a_later_choice_lays_aside_what_it_does_not_read(load):
    files = {"base.yaml": MADE}
    child = "extends: base.yaml\ndataset:\n  pairs: offline\n"
    loaded = load(child, own=PairsRun, trl="DPOConfig", head="", files=files)
    assert loaded.given["dataset"] == {"specs": [{"name": "spell_backward"}], "pairs": "offline"}
    assert isinstance(loaded.own.dataset, OfflinePairs)
    words = ["--dataset.source", "path", "--dataset.path", "x.json"]
    loaded = load("", *words, own=PairsRun, trl="DPOConfig", head=MADE)
    assert loaded.given["dataset"] == {"source": "path", "path": "x.json"}


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ("  samples_per_prompt: 4\n", []),  # the default is offline
        ("  samples_per_prompt: 4\n  pairs: offline\n", []),
        ("  pairs: offline\n", ["--dataset.samples_per_prompt", "4"]),
    ],
)
def test_a_key_that_the_choice_before_it_does_not_read_is_refused(load, child, words):
    child = f"extends: base.yaml\ndataset:\n{child}"
    kwargs = {"own": PairsRun, "trl": "DPOConfig", "head": "", "files": {"base.yaml": BASE}}
    sentence = refusal(load, child, *words, **kwargs)
    assert sentence.endswith(
        "dataset.samples_per_prompt is not read with dataset.pairs: offline; remove it, or write "
        "dataset.pairs: on_policy or mixed."
    )


def test_a_source_that_is_none_and_a_file_without_a_name(load):
    own = {"own": PairsRun, "trl": "DPOConfig"}
    sentence = refusal(load, "", "--dataset.source", "hub", **own)
    assert sentence.endswith('dataset.source is "hub"; write one of reasoning_gym, path.')
    sentence = refusal(load, "", "--dataset.source", "[path]", **own)
    assert 'dataset.source is ["path"]; write one of reasoning_gym, path' in sentence
    sentence = refusal(load, "", "--dataset.source", "path", **own)
    assert "dataset.path is missing" in sentence


def test_another_source_starts_the_block_anew(load):
    files = {"base.yaml": BASE.replace("dataset:\n", "dataset:\n  eval_size: 7\n")}
    child = "extends: base.yaml\ndataset:\n  source: path\n  path: x.json\n"
    own = {"own": PairsRun, "trl": "DPOConfig", "head": ""}
    loaded = load(child, **own, files=files)
    assert loaded.given["dataset"] == {"source": "path", "path": "x.json"}
    # the same source named again is no other source
    files["middle.yaml"] = child + "  eval_path: y.json\n"
    again = "extends: middle.yaml\ndataset:\n  source: path\n  split: train[:9]\n"
    found = load(again, **own, files=files).own.dataset
    assert (found.path, found.eval_path, found.split) == ("x.json", "y.json", "train[:9]")


def test_of_a_block_with_another_source_nothing_stays(tmp_path):
    (tmp_path / "base.yaml").write_text("dataset: {specs: [{name: a}], eval_size: 7, seed: 3}\n")
    (tmp_path / "x.yaml").write_text(
        "extends: base.yaml\ndataset:\n  source: path\n  path: x.json\n  seed: !unset\n"
    )
    assert read_config(tmp_path / "x.yaml") == {"dataset": {"source": "path", "path": "x.json"}}
    start = ["--config", str(tmp_path / "base.yaml")]
    source, path = ["--dataset.source", "path"], ["--dataset.path", "y.json"]
    for words in ([*source, *path], [*path, *source]):
        block = read_options([*start, *words])["dataset"]
        assert block == {"source": "path", "path": "y.json"}
    # a source that is named again is the same
    options = read_options(["--config", str(tmp_path / "x.yaml"), "--dataset.source", "path"])
    assert options == {"dataset": {"source": "path", "path": "x.json"}}


@dataclass
class Refusing:
    dataset: Data
    model: str = "m"
    weight: float = 0.0

    def __post_init__(self):
        if self.weight > 1:
            raise ValueError("the model cannot take this: `weight` is above 1")


def test_what_a_library_refuses_is_told_by_the_key_in_backticks(load, tmp_path):
    sentence = refusal(
        load,
        "model: x\nweight: 2.0\n",
        own=Refusing,
        trl=None,
        head="dataset: {specs: [{name: spell_backward}]}\n",
    )
    assert sentence == (
        f"{tmp_path / 'x.yaml'}: weight: the model cannot take this: `weight` is above 1"
    )
