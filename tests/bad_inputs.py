"""What users get wrong: a table of bad inputs, each with the word that its sentence must hold.

`python tests/bad_inputs.py [PART OF A NAME]` runs them and prints how each one ends.
"""

import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf_trl.run.stages import STAGES
from rlhf_trl.tiny import checkpoint_path

LIMIT = 60  # seconds until an input counts as one that does not end
REMOVED = object()  # the value of a key that the config lacks
NAN, INF = float("nan"), float("inf")

GYM = {"specs": [{"name": "spell_backward"}], "size": 16, "eval_size": 4}
SHARED = {
    "model_name_or_path": "tiny",
    "output_dir": "out",
    "dataset": GYM,
    "use_cpu": True,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-4,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
ON_POLICY = {"num_generations": 2, "max_completion_length": 4, "reward_funcs": ["exact_match"]}
OFFLINE = {"max_length": 64, "dataset": {**GYM, "pairs": "offline"}}
CONFIGS = {
    "grpo": {**SHARED, **ON_POLICY, "algorithm": "grpo"},
    "ppo": {**SHARED, **ON_POLICY, "algorithm": "ppo", "num_generations": 1},
    "distill": {**SHARED, **ON_POLICY, "algorithm": "opd", "teacher_models": ["tiny"]},
    "rejection_sampling": {**SHARED, **ON_POLICY, "strategy": "top_per_prompt"},
    "dpo": {**SHARED, **OFFLINE, "algorithm": "dpo"},
    "kto": {**SHARED, **OFFLINE, "algorithm": "kto"},
    "orpo": {**SHARED, **OFFLINE, "algorithm": "orpo"},
    "reward": {**SHARED, **OFFLINE, "algorithm": "reward"},
    "orm": {**SHARED, "max_length": 64, "algorithm": "orm"},
    "prm": {**SHARED, "max_length": 64, "algorithm": "prm"},
    "sft": {**SHARED, "max_length": 64, "max_completion_length": 4},
}
CONFIGS["reward"]["dataset"] = {**GYM, "pairs": "offline", "candidates": 0}
"""By recipe, a config that trains one step; a bad input changes it."""


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """One mistake in an input, and what its error has to name."""

    name: str
    word: str  # a key, a file or a library, which the sentence holds
    recipe: str = "grpo"
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config, by dotted key
    text: str | None = None  # in place of the config
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # beside the config, by name
    model: Callable[[Path], Any] | None = None  # what is done to the embedded model's folder
    options: tuple[str, ...] = ()  # on the command line
    env: Mapping[str, str] = field(default_factory=dict)


class Ending(NamedTuple):
    """How a run of a bad input ended."""

    kind: str  # "sentence", "traceback and sentence", "traceback", "accepted" or "no end"
    text: str  # the sentence, or the end of the traceback
    seconds: float


# --- values ---------------------------------------------------------------------------------------

# By recipe and key, values that no run can have; the sentence names the key.
VALUES: dict[str, dict[str, list[Any]]] = {
    "grpo": {
        "learning_rate": ["fast", -1, NAN, INF, 1e30, [1e-6], True],
        "per_device_train_batch_size": [0, -1, 2.5, "four", True],
        "per_device_eval_batch_size": [0],
        "gradient_accumulation_steps": [0],
        "num_generations": [0, -2, 3, "two"],
        "generation_batch_size": [-4],
        "steps_per_generation": [0],
        "num_iterations": [0],
        "max_completion_length": [0, -5, 2.5, 10**9],
        "max_steps": [0, -5, "many", 2.5, True],
        "temperature": [0, -1, 1e-30, NAN, INF, "hot"],
        "top_p": [0, 7, -0.5, "most"],
        "top_k": [-1, 0.5],
        "min_p": [2, -1],
        "repetition_penalty": [0, -1, "no"],
        "save_total_limit": [0, -1],
        "logging_steps": [0, -1],
        "eval_steps": [0],
        "warmup_steps": [-1],
        "weight_decay": [-1],
        "adam_beta1": [1, -0.1],
        "adam_beta2": [1.5],
        "adam_epsilon": [-1],
        "max_grad_norm": [-1, NAN],
        "seed": [-1, 1.5, 2**70],
        "data_seed": [-1],
        "optim": ["adamm", "adamw_bnb_8bit", "galore_adamw"],
        "lr_scheduler_type": ["linnear", "reduce_lr_on_plateau"],
        "eval_strategy": ["sometimes"],
        "save_strategy": ["best"],
        "beta": [-1],
        "epsilon": [-0.2],
        "reward_weights": [[0], [NAN], [], ["a"], [1, 2]],
        "reward_funcs": [[], ["nothing"], ["math.pi"], ["nowhere.reward"], ["exact_match:truth"]],
        "reward_model": ["nowhere", "tiny"],
        "report_to": ["wand"],
        "output_dir": [None, "", 5, "config.yaml", "/proc/out"],
        "model_name_or_path": [None, "", 5, "no/such-model", "./nowhere"],
        "resume_from_checkpoint": ["nowhere", True],
        "algorithm": ["grppo", "dpo", None],
        "formulation": ["book"],
        "fp16": [True],
        "tf32": [True],
        "dtype": ["float16", "int8", "float31"],
        "attn_implementation": ["flash", "flash_attention_2"],
        "cache_implementation": ["big"],
        "use_vllm": [True],
        "use_liger_kernel": [True],
        "deepspeed": ["nowhere.json"],
        "push_to_hub": [True],
        "dataloader_num_workers": [-1],
        "dataloader_prefetch_factor": [2],
        "ignore_data_skip": [True],
        "enable_jit_checkpoint": [True],
        "torch_compile_backend": ["gcc"],
        "dataset": [None, [], "rows.jsonl"],
        "dataset.source": ["nowhere"],
        "dataset.size": [0, -1, 1.5, "many", 10**9],
        "dataset.eval_size": [0, 10**9],
        "dataset.seed": ["one"],
        "dataset.system_prompt": [5],
        "dataset.specs": [[], "spell_backward", [{}], [{"name": "spell_forward"}]],
        "samples.every": [-1],
        "samples.count": [0],
        "samples.top_p": [0, 1.5],
        "samples.choice": ["any"],
        "samples.temperature": [-1],
        "rollouts": ["everything"],
        "expect.processes": [0, 2],
        "expect.strategy": ["fsdp3"],
        "generation_kwargs": [
            {"topp": 0.5},
            {"max_new_tokens": 3},
            "few",
            {"do_sample": False},
        ],
        "lr_scheduler_kwargs": [{"nothing": 1}],
        "optim_args": ["nothing", "nothing=1"],
        "hub_strategy": ["sometimes"],
        "router_aux_loss_coef": ["big"],
        "missing_eos_penalty": [-1],
        "dynamic_sampling_rounds": [-1],
        "num_completions_to_print": ["all"],
    },
    "ppo": {
        "gamma": [-1, 2],
        "lam": [1.5],
        "cliprange_value": [0],
        "value_learning_rate": [-1],
        "value_model_name_or_path": ["nowhere"],
    },
    "distill": {
        "teacher_models": [[], ["nowhere"]],
        "teacher_weights": [[1, 1]],
        "kl_top_k": [0],
    },
    "rejection_sampling": {
        "strategy": ["best"],
        "k": [0],
        "rounds": [0],
        "num_generations": [0],
        "temperature": [0, -1, 1e-30],
        "top_p": [0, 7],
        "top_k": [-1],
        "min_p": [2],
        "max_completion_length": [0],
        "reward_funcs": [[]],
    },
    "dpo": {
        "beta": [0, -1],
        "label_smoothing": [0.7],
        "max_length": [0, 2],
        "loss_type": ["sigmoidal"],
        "max_samples": [0],
        "dataset.pairs": ["online"],
        "dataset.samples_per_prompt": [8],
        "precompute_ref_log_probs": ["yes"],
    },
    "kto": {"desirable_weight": [-1], "undesirable_weight": [-1]},
    "orpo": {"beta": [0]},
    "reward": {
        "center_rewards_coefficient": [-1],
        "dataset.candidates": [1, -2],
        "model_name_or_path": ["tiny_untrained"],
    },
    "prm": {"dataset.errors": [2], "dataset.step_split": ["["], "dataset.traces": ["made"]},
    "sft": {
        "max_length": [0],
        "demonstrator": ["perfect"],
        "packing_strategy": ["bfdd"],
        "max_completion_length": [0],
        "neftune_noise_alpha": [-1],
    },
}


def bad_values() -> Iterator[BadInput]:
    """Yield a bad input for each of `VALUES`."""
    for recipe, of_recipe in VALUES.items():
        for key, values in of_recipe.items():
            for value in values:
                yield BadInput(
                    name=f"{recipe}: {key} {value}"[:80],
                    word=key,
                    recipe=recipe,
                    changes={key: value},
                )


def changed(key: str, value: Any, word: str | None = None, **how: Any) -> BadInput:
    """Return a bad input that is one value; the sentence names its key."""
    changes = {**how.pop("changes", {}), key: value}
    name = f"{how.get('recipe', 'grpo')}: " + ", ".join(f"{k} {v}" for k, v in changes.items())
    name = name.replace(repr(REMOVED), "missing").replace(ADAPTED, "adapter")
    name += "".join(f", {k}={v}" for k, v in how.get("env", {}).items())
    return BadInput(name=name, word=word or key, changes=changes, **how)


WITH_LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
ADAPTED = ", ".join(f"{k} {v}" for k, v in WITH_LORA.items())  # in names
SAVING = {"save_strategy": "steps", "save_steps": 1}
EPOCH = {"max_steps": -1}
SPECS = "dataset.specs"


def words(**config: Any) -> list[dict[str, Any]]:
    return [{"name": "spell_backward", **config}]


KEYS = [
    # missing
    changed("dataset", REMOVED),
    changed("dataset.specs", REMOVED),
    changed("model_name_or_path", REMOVED),
    changed("output_dir", REMOVED),
    changed("strategy", REMOVED, recipe="rejection_sampling"),
    changed("teacher_models", REMOVED, recipe="distill"),
    # unknown
    changed("learning_rat", 1e-4),
    changed("lr", 1e-4),
    changed("warmup_ratio", 0.1),
    changed("no_cuda", True),
    changed("evaluation_strategy", "steps"),
    changed("max_prompt_length", 64),
    changed("dataset.sise", 4),
    changed("dataset.split", "train"),
    changed("samples.evry", 4),
    changed("expect.proceses", 1),
    changed("", 1, word="key"),
    changed("max_length", 64),
    changed("num_generations", 2, recipe="dpo"),
    changed("beta", 0.1, recipe="sft"),
    changed("reward_funcs", ["exact_match"], recipe="dpo"),
    changed("dataset.pairs", "offline"),
    changed("list_length", 4, recipe="reward"),
    # of others' losses
    changed("label_smoothing", 0.1, recipe="dpo", changes={"algorithm": "ipo"}),
    changed("gamma", 0.9),
    changed("epsilon", 0.2, changes={"algorithm": "reinforce"}),
    changed("loss_type", "dapo"),
    changed("delta", 2.0),
    changed("entropy_coef", 0.1),
    changed("off_policy_mask_threshold", 0.1),
    changed("sapo_temperature_pos", 1.0),
    # against another key
    changed("save_steps", 0, changes={"save_strategy": "steps"}),
    changed("save_steps", -1, changes={"save_strategy": "steps"}),
    changed("num_train_epochs", 0, changes=EPOCH),
    changed("num_train_epochs", -1, changes=EPOCH),
    changed("eval_steps", 1.5, changes={"eval_strategy": "steps"}),
    changed(
        "eval_strategy",
        "steps",
        changes={
            "dataset.eval_size": REMOVED,
            "dataset.source": "path",
            "dataset.path": "rows.jsonl",
            "dataset.specs": REMOVED,
            "dataset.size": REMOVED,
        },
        files={"rows.jsonl": '{"prompt": "a", "answer": "b"}\n' * 8},
    ),
    changed("load_best_model_at_end", True),
    changed(
        "load_best_model_at_end",
        True,
        word="metric_for_best_model",
        changes={
            **SAVING,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "metric_for_best_model": "nothing",
        },
    ),
    changed("generation_batch_size", 4, changes={"steps_per_generation": 1}),
    changed("reward_weights", [0, 0], changes={"reward_funcs": ["exact_match", "format"]}),
    changed("reward_weights", [1.0], changes={"reward_funcs": ["exact_match", "format"]}),
    changed("reward_funcs", ["exact_match", "exact_match"]),
    changed("reward_aggregate", "mean"),
    changed("reward_model_strips_think", True),
    changed(
        "activation_checkpointing",
        True,
        changes={"gradient_checkpointing": False},
        word="gradient_checkpointing",
    ),
    changed("num_generations", 1),
    changed("bf16", True, changes={"fp16": True}, word="fp16"),
    changed("use_cpu", False, env={"ACCELERATE_USE_CPU": "true"}),
    changed(
        "demonstrator",
        "right",
        recipe="sft",
        changes={"dataset": {"source": "path", "path": "rows.jsonl"}},
        files={"rows.jsonl": '{"prompt": "a", "completion": "b"}\n' * 8},
    ),
    changed(
        "completion_only_loss",
        False,
        recipe="sft",
        changes={"dataset": {"source": "path", "path": "rows.jsonl"}},
        files={"rows.jsonl": '{"prompt": "a", "completion": "b"}\n' * 8},
    ),
    changed("env", {"CUDA_VISIBLE_DEVICES": ""}),
    changed("expect.strategy", "fsdp", word="strategy"),
    changed("generation_kwargs", {"top_p": 0.5}, changes={"top_p": 0.9}),
    changed("generation_kwargs", {"top_p": 7}),
    changed("model_init_kwargs", {"nothing": 1}, word="nothing"),
    changed("model_init_kwargs", {"dtype": "float16"}, word="dtype"),
    changed("log_completions_hub_repo", "a/b"),
    changed(
        "dataset.sampled_from", "nowhere", recipe="dpo", changes={"dataset.pairs": "on_policy"}
    ),
    changed(
        "dataset.list_length",
        40,
        recipe="reward",
        changes={"algorithm": "kwise", "dataset.pairs": REMOVED},
    ),
    # tasks
    changed(SPECS, words(config={"min_word_length": 3})),
    changed(SPECS, words(config={"min_word_len": "three"})),
    changed(SPECS, words(config={"min_word_len": 9, "max_word_len": 3})),
    changed(SPECS, words(config={"min_word_len": 100, "max_word_len": 200})),
    changed(SPECS, words(config=[3])),
    changed(SPECS, words(weight=0)),
    changed(SPECS, words(weight=-1)),
    changed(SPECS, words(wieght=1)),
    changed(SPECS, words() * 2),
    changed(SPECS, [{"name": "chain_sum", "config": {"min_terms": 0}}]),
    changed("samples.file", "nowhere.txt", changes={"samples.every": 1}),
    changed("samples.file", "empty.txt", changes={"samples.every": 1}, files={"empty.txt": ""}),
    changed("samples.file", "bad.json", changes={"samples.every": 1}, files={"bad.json": "{"}),
    # adapters
    *(
        changed(key, value, changes=WITH_LORA)
        for key, value in (
            ("lora_r", 0),
            ("lora_r", -4),
            ("lora_r", 1.5),
            ("lora_alpha", -3),
            ("lora_alpha", 0),
            ("lora_alpha", 0.5),
            ("lora_dropout", 1.5),
            ("lora_dropout", -0.1),
            ("lora_dropout", 1),
            ("lora_target_modules", ["nothing"]),
            ("lora_target_modules", []),
            ("lora_target_modules", 3),
            ("lora_modules_to_save", ["nothing"]),
            ("lora_target_parameters", ["nothing"]),
            ("lora_task_type", "CAUSAL"),
            ("lora_task_type", "SEQ_CLS"),
        )
    ),
    changed("lora_r", 8),
    changed("use_dora", True, word="use_peft"),
    changed("load_in_4bit", True, changes={"load_in_8bit": True, **WITH_LORA}, word="8 bit"),
    changed("load_in_4bit", True, word="add use_peft"),
    changed("load_in_8bit", True, word="load_in_8bit"),
    changed("bnb_4bit_quant_type", "nf5", changes={"load_in_4bit": True, **WITH_LORA}),
    # trackers and the hub
    changed("report_to", "wandb", env={"WANDB_MODE": "online", "WANDB_API_KEY": "short"}),
    changed("report_to", "mlflow"),
    changed("report_to", ["wandb", "nothing"]),
    changed("push_to_hub", True, env={"HF_TOKEN": "hf_wrong"}),
    changed(
        "model_revision",
        "nothing",
        changes={"model_name_or_path": "no/such-model"},
        word="model_name_or_path",
    ),
    changed("dataset", {"source": "path", "path": "no/such-data"}, word="dataset.path"),
    # launches
    changed("max_steps", 1, word="cpu_2proc.yaml", env={"MASTER_ADDR": "localhost"}),
    changed("max_steps", 1, word="mixed_precision", env={"ACCELERATE_MIXED_PRECISION": "fp16"}),
    changed("max_steps", 1, word="mixed_precision", env={"ACCELERATE_MIXED_PRECISION": "fp8"}),
    changed("max_steps", 1, word="strategy fsdp", env={"ACCELERATE_USE_FSDP": "true"}),
    changed(
        "max_steps",
        1,
        word="cpu.yaml",
        changes={"use_cpu": REMOVED},
        env={"ACCELERATE_USE_CPU": "False"},
    ),
]

TEXT = "model_name_or_path: tiny\noutput_dir: out\n"
BLOCK = "dataset: {specs: [{name: spell_backward}]}\n"
EXTENDING = "extends: base.yaml\n"


def bombs(levels: int, width: int = 9) -> str:
    """Return a few lines of YAML that mean width ** levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


def text(name: str, content: str | bytes, word: str, **how: Any) -> BadInput:
    """Return a bad input that is the text of the config."""
    return BadInput(name=f"yaml: {name}", word=word, text=content, **how)


YAML = [
    text("empty", "", "config.yaml"),
    text("only a comment", "# nothing\n", "config.yaml"),
    text("a list", "- a\n- b\n", "config.yaml"),
    text("a word", "grpo\n", "config.yaml"),
    text("a number", "5\n", "config.yaml"),
    text("open bracket", TEXT + "reward_funcs: [a, b\n", "line"),
    text("open quote", TEXT + "run_name: 'a\n", "line"),
    text("tab", TEXT + "dataset:\n\tsize: 4\n", "line 4"),
    text("indentation", TEXT + "  seed: 1\n", "line 3"),
    text("no space behind the colon", TEXT + "seed:1\n", "line"),
    text("colon in a value", TEXT + "run_name: a: b\n", "line 3"),
    text("twice", TEXT + "output_dir: other\n", "output_dir"),
    text("a key twice in a block", TEXT + "dataset: {size: 1, size: 2}\n", "size"),
    text("key that is a number", TEXT + "1: a\n", "line 3"),
    text("key that is a list", TEXT + "? [a]\n: b\n", "line 3"),
    text("tag of Python", TEXT + "seed: !!python/object/apply:os.system [echo]\n", "line 3"),
    text("unknown tag", TEXT + "seed: !secret 5\n", "!secret"),
    text("merge key", "a: &a {seed: 1}\nb:\n  <<: *a\n", "<<"),
    text("unknown anchor", TEXT + "seed: *nothing\n", "nothing"),
    text("two documents", TEXT + "---\n" + TEXT, "line"),
    text("latin-1", b"run_name: caf\xe9\n", "UTF-8"),
    text("zero bytes", b"run_name: a\x00b\n", "config.yaml"),
    text("a picture", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "config.yaml"),
    text("utf-16", "seed: 1\n".encode("utf-16"), "config.yaml"),
    text("!unset with a value", TEXT + "seed: !unset 5\n", "!unset"),
    text("!unset in a list", TEXT + "reward_funcs: [!unset ]\n", "!unset"),
    text("!unset without a base", TEXT + "seed: !unset\n", "seed"),
    text("lists in lists", TEXT + "seed: " + "[" * 500 + "]" * 500, "config.yaml"),
    text(
        "mappings in mappings",
        TEXT + "seed: " + "{a: " * 500 + "1" + "}" * 500,
        "config.yaml",
    ),
    text("a list of itself", TEXT + "seed: &a [*a]\n", "config.yaml"),
    text("a mapping of itself", TEXT + "dataset: &a {size: *a}\n", "config.yaml"),
    text("billion laughs", bombs(10), "config.yaml"),
    text("billion laughs as a value", bombs(10) + "reward_funcs: *a9\n", "config.yaml"),
    text("a huge number", TEXT + "seed: " + "9" * 5000 + "\n", "config.yaml"),
    text("a huge float", TEXT + "learning_rate: 1e999\n" + BLOCK, "learning_rate"),
    text("sexagesimal", TEXT + "seed: 1:30\n" + BLOCK, "seed"),
    text("yes for a boolean", TEXT + "bf16: yes\n" + BLOCK, "bf16"),
    text("a number in words", TEXT + "learning_rate: 1e-4 # per step\nseed: one\n" + BLOCK, "seed"),
    text("number with underscores", TEXT + "seed: 1_000\n" + BLOCK, "seed"),
    text("JSON with a comma too many", '{"seed": 1,}}', "line"),
    text("extends nothing", "extends:\n" + TEXT, "extends"),
    text("extends a list", "extends: [a.yaml, b.yaml]\n" + TEXT, "extends"),
    text("extends a number", "extends: 5\n" + TEXT, "extends"),
    text("extends no file", EXTENDING + TEXT, "base.yaml"),
    text("extends a folder", "extends: .\n" + TEXT, "extends"),
    text("extends itself", "extends: config.yaml\n" + TEXT, "cycle"),
    text("a cycle", EXTENDING, "cycle", files={"base.yaml": "extends: config.yaml\n"}),
    text("extends a list file", EXTENDING, "base.yaml", files={"base.yaml": "- a\n"}),
    text("extends a broken file", EXTENDING, "base.yaml", files={"base.yaml": "a: [\n"}),
    text("extends an address", "extends: https://example.org/a.yaml\n", "extends"),
    text(
        "unknown key in the base",
        EXTENDING,
        "base.yaml",
        files={"base.yaml": TEXT + "sed: 1\n" + BLOCK},
    ),
    text("!unset of no key", EXTENDING + "sed: !unset\n", "sed", files={"base.yaml": TEXT}),
    text(
        "list over mapping",
        EXTENDING + "dataset: [1]\n",
        "dataset",
        files={"base.yaml": TEXT + "dataset: {size: 4}\n"},
    ),
]


def options(*given: str, word: str) -> BadInput:
    """Return a bad input that is a command line; `--config` stands before it."""
    return BadInput(name=f"options: {' '.join(given)}"[:80], word=word, options=given)


OPTIONS = [
    options("--seed", "1", "--seed", "2", word="--seed"),
    options("-s", "1", word="-s"),
    options("seed=1", word="--config"),
    options("--seed", word="seed"),
    options("--seed", "one", word="seed"),
    options("--seed", "1", "2", word="seed"),
    options("--sed", "1", word="sed"),
    options("--dataset.sise", "1", word="dataset.sise"),
    options("--dataset.specs.5.name", "a", word="dataset.specs"),
    options("--dataset.specs.first.name", "a", word="dataset.specs"),
    options("--seed.size", "1", word="seed"),
    options("--config", "other.yaml", word="--config"),
    options("--no_use_cpu", "maybe", word="use_cpu"),
    options("--max_steps=", word="max_steps"),
    options("--generation_kwargs", "{top_k: 5", word="generation_kwargs"),
    options("--dataset", "[" * 300, word="dataset"),
    options("--", word="--"),
]

# --- models ---------------------------------------------------------------------------------------


def setting(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return what changes the keys of a JSON file of a model's folder."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        content |= changes
        content = {key: value for key, value in content.items() if value is not REMOVED}
        (folder / file).write_text(json.dumps(content))

    return change


def writing(file: str, content: str | bytes) -> Callable[[Path], None]:
    """Return what writes a file of a model's folder."""

    def write(folder: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (folder / file).write_bytes(data)

    return write


def without(*names: str) -> Callable[[Path], None]:
    """Return what removes files of a model's folder."""

    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


class Malicious:
    """What creates a file where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def pickled(folder: Path) -> None:
    """Replace the weights by a pickle that does something."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious()))


def zipped_pickle(folder: Path) -> None:
    """Replace the weights by a file of torch that does something."""
    import torch

    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Malicious()}, folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    """Keep half of the weights' bytes."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def renamed_weights(folder: Path) -> None:
    """Give all weights names that no model has."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({f"a.{k}": v for k, v in weights.items()}, folder / "model.safetensors")


def dropped_weight(folder: Path) -> None:
    """Leave out one weight."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def not_finite(folder: Path) -> None:
    """Make one weight not a number."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(NAN)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def missing_shard(folder: Path) -> None:
    """Name a shard in the index that is not there."""
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def layers(count: int) -> Callable[[Path], None]:
    return setting("config.json", num_hidden_layers=count, layer_types=["full_attention"] * count)


def model(name: str, change: Callable[[Path], Any], word: str = "model", **how: Any) -> BadInput:
    """Return a bad input that is a folder of a model; the sentence names folder or key."""
    changes = {"model_name_or_path": "./model", **how.pop("changes", {})}
    return BadInput(name=f"model: {name}", word=word, model=change, changes=changes, **how)


TEMPLATE = "chat_template.jinja"
MODELS = [
    model("no config", without("config.json")),
    model("config that is a list", writing("config.json", "[]")),
    model("config that is no JSON", writing("config.json", "{")),
    model("config that is empty", writing("config.json", "")),
    model("config without a type", setting("config.json", model_type=REMOVED)),
    model("unknown type", setting("config.json", model_type="nothing")),
    model("no architectures", setting("config.json", architectures=REMOVED)),
    model("unknown architecture", setting("config.json", architectures=["Nothing"])),
    model("encoder", setting("config.json", model_type="bert", architectures=["BertModel"])),
    model("more layers", layers(3)),
    model("fewer layers", layers(1)),
    model("no layers", layers(0)),
    model("layers below 0", setting("config.json", num_hidden_layers=-1)),
    model("wider", setting("config.json", hidden_size=128)),
    model("narrower feed-forward", setting("config.json", intermediate_size=144)),
    model("larger vocabulary", setting("config.json", vocab_size=200)),
    model("smaller vocabulary", setting("config.json", vocab_size=60)),
    model("width in words", setting("config.json", hidden_size="wide")),
    model("heads that do not divide", setting("config.json", num_attention_heads=3)),
    model("unknown activation", setting("config.json", hidden_act="swoosh")),
    model("unknown dtype", setting("config.json", dtype="float31")),
    model(
        "float16 by itself",
        setting("config.json", dtype="float16"),
        "dtype",
        changes={"dtype": "auto"},
    ),
    model("short context", setting("config.json", max_position_embeddings=4)),
    model("untied", setting("config.json", tie_word_embeddings=False)),
    model("no weights", without("model.safetensors")),
    model("weights cut off", cut_off),
    model("empty weights", writing("model.safetensors", b"")),
    model("a header of gigabytes", writing("model.safetensors", struct.pack("<Q", 2**60) + b"{}")),
    model("weights that are text", writing("model.safetensors", "weights")),
    model("weights of other names", renamed_weights),
    model("a weight missing", dropped_weight),
    model("a weight not finite", not_finite),
    model("a shard missing", missing_shard),
    model("pickle", pickled),
    model("pickle in a zip", zipped_pickle),
    model("no tokenizer", without("tokenizer.json", "tokenizer_config.json")),
    model("no tokenizer.json", without("tokenizer.json")),
    model("tokenizer that is no JSON", writing("tokenizer.json", "{")),
    model("tokenizer of nothing", writing("tokenizer.json", "{}")),
    model("tokenizer_config that is a list", writing("tokenizer_config.json", "[]")),
    model("unknown tokenizer class", setting("tokenizer_config.json", tokenizer_class="Nothing")),
    model("no end token", setting("tokenizer_config.json", eos_token=None), "eos_token"),
    model(
        "end token out of the vocabulary", setting("tokenizer_config.json", eos_token="<nothing>")
    ),
    model("generation_config that is no JSON", writing("generation_config.json", "{")),
    model(
        "remote code",
        setting(
            "config.json",
            model_type="own",
            auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
        ),
        "custom code",
        files={"model/own.py": "raise SystemExit('it ran')\n"},
    ),
    model("empty folder", lambda folder: shutil.rmtree(folder) or folder.mkdir()),
    model("a file", lambda folder: shutil.rmtree(folder) or folder.write_text("model")),
    model(
        "an adapter without a base",
        writing(
            "adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "nowhere"}'
        ),
    ),
    model("an adapter_config of nothing", writing("adapter_config.json", "{}"), "adapter"),
    # templates
    model("no template", without(TEMPLATE), "chat template"),
    model("template that is empty", writing(TEMPLATE, ""), "template"),
    model("template with a syntax error", writing(TEMPLATE, "{% for %}"), "template"),
    model("template that raises", writing(TEMPLATE, "{{ raise_exception('no') }}"), "template"),
    model(
        "template that reads what is not there",
        writing(TEMPLATE, "{{ nothing.at.all }}"),
        "template",
    ),
    model("template that divides by 0", writing(TEMPLATE, "{{ 1 / 0 }}"), "template"),
    model(
        "template without end",
        writing(TEMPLATE, "{% for i in range(1000000000) %}a{% endfor %}"),
        "template",
    ),
    model(
        "template that drops the prompt",
        writing(TEMPLATE, "<user>\n{% if add_generation_prompt %}<assistant>\n{% endif %}"),
        "template",
    ),
    model("template of one word", writing(TEMPLATE, "hello"), "template"),
    model(
        "template that drops the prompt, dpo",
        writing(TEMPLATE, "{{ messages[-1].content if messages[-1].role == 'assistant' else '' }}"),
        "template",
        recipe="dpo",
    ),
    model(
        "template that drops the answer, sft",
        writing(TEMPLATE, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"),
        "template",
        recipe="sft",
    ),
    model(
        "template that drops the prompt, reward",
        writing(TEMPLATE, "{{ messages[-1].content if messages[-1].role == 'assistant' else '' }}"),
        "template",
        recipe="reward",
    ),
    model(
        "template that opens a file",
        writing(TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        "template",
    ),
    BadInput(
        name="template: no file",
        word="chat_template_path",
        recipe="sft",
        changes={"chat_template_path": "nowhere.jinja"},
    ),
    BadInput(
        name="template: an empty file",
        word="template",
        recipe="sft",
        changes={"chat_template_path": "a.jinja"},
        files={"a.jinja": ""},
    ),
    BadInput(
        name="template: no model",
        word="chat_template_path",
        recipe="sft",
        changes={"chat_template_path": "no/such-model"},
    ),
    # other models
    BadInput(
        name="reward_model: no folder of one",
        word="reward_model",
        model=without("config.json"),
        changes={"reward_model": "./model"},
    ),
    BadInput(
        name="reward_model: a list",
        word="reward_model",
        model=writing("config.json", "[]"),
        changes={"reward_model": "./model"},
    ),
    BadInput(
        name="value_model: a list",
        word="value_model_name_or_path",
        recipe="ppo",
        model=writing("config.json", "[]"),
        changes={"value_model_name_or_path": "./model"},
    ),
    BadInput(
        name="value_model: more layers",
        word="value_model_name_or_path",
        recipe="ppo",
        model=layers(3),
        changes={"value_model_name_or_path": "./model"},
    ),
    BadInput(
        name="teacher: more layers",
        word="model: './model'",
        recipe="distill",
        model=layers(3),
        changes={"teacher_models": ["./model"]},
    ),
    BadInput(
        name="teacher: a list",
        word="teacher",
        recipe="distill",
        model=writing("config.json", "[]"),
        changes={"teacher_models": ["./model"]},
    ),
    BadInput(
        name="reward: more layers",
        word="model",
        recipe="reward",
        model=layers(3),
        changes={"model_name_or_path": "./model"},
    ),
    BadInput(
        name="sft: fewer layers",
        word="model",
        recipe="sft",
        model=layers(1),
        changes={"model_name_or_path": "./model"},
    ),
    BadInput(
        name="dpo: more layers",
        word="model",
        recipe="dpo",
        model=layers(3),
        changes={"model_name_or_path": "./model"},
    ),
]

# --- data -----------------------------------------------------------------------------------------

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
ANSWERED = {"prompt": "a", "completion": "b"}
ASKED = {"prompt": "a", "answer": "b"}


def lines(*rows: Any, count: int = 8) -> str:
    """Return JSON lines: the rows, the last of them repeated."""
    rows = (*rows, *[rows[-1]] * (count - len(rows)))
    return "".join(json.dumps(row) + "\n" for row in rows)


def said(content: Any, role: str = "user", **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}]


def data(
    name: str,
    recipe: str,
    content: str | bytes | None,
    word: str = "dataset",
    /,
    file: str = "rows.jsonl",
    **block: Any,
) -> BadInput:
    """Return a bad input that is a file of examples; the sentence names it, or its key."""
    return BadInput(
        name=f"data: {name} ({recipe}, {file})",
        word=word,
        recipe=recipe,
        changes={"dataset": {"source": "path", "path": file, **block}},
        files={} if content is None else {file: content},
    )


DATA = [
    data("no file", "grpo", None),
    data("no file", "dpo", None, file="rows.parquet"),
    data("empty", "grpo", ""),
    data("empty", "sft", "", file="rows.json"),
    data("empty", "sft", "", file="rows.csv"),
    data("empty", "dpo", b"", file="rows.parquet"),
    data("an empty list", "grpo", "[]", file="rows.json"),
    data("only a header", "sft", "prompt,completion\n", file="rows.csv"),
    data("blank lines", "grpo", "\n\n\n"),
    data("kind of file", "grpo", "prompt\n", file="rows.txt"),
    data("no suffix", "grpo", lines(ASKED), file="rows"),
    data("no JSON", "grpo", "a\nb\n"),
    data("a cut-off line", "grpo", lines(ASKED) + '{"prompt": "a'),
    data("a line that is a list", "grpo", lines(ASKED) + "[1]\n"),
    data("a line that is a number", "grpo", lines(ASKED) + "5\n"),
    data("a list of texts", "grpo", '["a", "b"]', file="rows.json"),
    data("a list of lists", "grpo", '[["a"], ["b"]]', file="rows.json"),
    data("a mapping", "grpo", '{"a": {"prompt": "b"}}', file="rows.json"),
    data("lists in lists", "grpo", "[" * 100_000 + "]" * 100_000, file="rows.json"),
    data("mappings in mappings", "grpo", '{"prompt": ' * 20_000 + "1" + "}" * 20_000),
    data("latin-1", "grpo", b'{"prompt": "caf\xe9"}\n' * 4),
    data("utf-16", "grpo", lines(ASKED).encode("utf-16")),
    data("zero bytes", "grpo", b"\x00" * 100),
    data("no Parquet", "grpo", "prompt\n", file="rows.parquet"),
    data("cut-off Parquet", "grpo", b"PAR1" + bytes(100), file="rows.parquet"),
    data("ragged CSV", "sft", "prompt,completion\na,b,c\nd,e\n", file="rows.csv"),
    data("open quote in CSV", "sft", 'prompt,completion\na,b\n"a,b\nc,d\n', file="rows.csv"),
    data("no column prompt", "grpo", lines({"question": "a", "answer": "b"}), "prompt"),
    data("no column answer", "grpo", lines({"prompt": "a"}), "answer"),
    data("no column rejected", "dpo", lines({"prompt": "a", "chosen": "b"}), "rejected"),
    data("no column chosen", "reward", lines({"prompt": "a", "rejected": "b"}), "chosen"),
    data("no column completion", "sft", lines({"prompt": "a"}), "completion"),
    data("no column label", "kto", lines(ANSWERED), "label"),
    data("no column labels", "prm", lines({"prompt": "a", "completions": ["b"]}), "labels"),
    data("other columns in a row", "sft", lines(ANSWERED, {"prompt": "a"})),
    data(
        "unknown column mapped", "sft", lines(ANSWERED), "question", columns={"prompt": "question"}
    ),
    data(
        "two columns from one",
        "grpo",
        lines(ASKED),
        "columns",
        columns={"prompt": "answer", "answer": "answer"},
    ),
    data("columns a list", "sft", lines(ANSWERED), "dataset.columns", columns=["prompt"]),
    data("unknown reader", "sft", lines(ANSWERED), "dataset.reader", reader="gsm9k"),
    data("reader of another recipe", "sft", lines(ANSWERED), "dataset.reader", reader="prm800k"),
    data("reader of other columns", "grpo", lines(ASKED), "question", reader="gsm8k"),
    data("unknown split", "grpo", lines(ASKED), split="validation"),
    data("empty split", "grpo", lines(ASKED), split="train[5:5]"),
    data("split that is no slice", "grpo", lines(ASKED), split="train[a:b]"),
    data("held out more than there is", "grpo", lines(ASKED), "dataset.eval_size", eval_size=8),
    data("no file to evaluate on", "grpo", lines(ASKED), "dataset.eval_path", eval_path="no.jsonl"),
    data(
        "evaluated on what is trained", "grpo", lines(ASKED), "dataset.eval", eval_path="rows.jsonl"
    ),
    data("name of a config", "grpo", lines(ASKED), "dataset.name", name="main"),
    data("skip_bad below 0", "grpo", lines(ASKED), "dataset.skip_bad", skip_bad=-1),
    data("turns", "sft", lines(ANSWERED), "dataset.turns", turns="first"),
    data("unknown role", "sft", lines({"messages": said("a", "human") + said("b", "gpt")}), "role"),
    data("unknown role", "grpo", lines({"prompt": said("a", "human"), "answer": "b"}), "role"),
    data(
        "unknown role",
        "dpo",
        lines(
            {
                **PAIR,
                "prompt": said("a", "human"),
                "chosen": said("b", "assistant"),
                "rejected": said("c", "assistant"),
            }
        ),
        "role",
    ),
    data(
        "role that is a number",
        "sft",
        lines({"messages": said("a", 5) + said("b", "assistant")}),
        "role",
    ),
    data("no role", "sft", lines({"messages": [{"content": "a"}, {"content": "b"}]})),
    data("no content", "sft", lines({"messages": [{"role": "user"}, {"role": "assistant"}]})),
    data("content that is a number", "sft", lines({"messages": said(5) + said(6, "assistant")})),
    data("content that is null", "sft", lines({"messages": said("a") + said(None, "assistant")})),
    data("no answer of the assistant", "sft", lines({"messages": said("a")})),
    data("messages that are a text", "sft", lines({"messages": "a"})),
    data("messages that are empty", "sft", lines({"messages": []})),
    data(
        "messages spelled out",
        "sft",
        "prompt,completion\n" + "\"[{'role': 'user', 'content': 'a'}]\",b\n" * 8,
        file="rows.csv",
    ),
    data("empty prompt", "grpo", lines({"prompt": "", "answer": "b"}), "prompt"),
    data("null prompt", "grpo", lines({"prompt": None, "answer": "b"}), "prompt"),
    data("prompt of numbers", "grpo", lines({"prompt": 5, "answer": "b"}), "prompt"),
    data("prompt that is a mapping", "grpo", lines({"prompt": {"a": 1}, "answer": "b"}), "prompt"),
    data(
        "texts and messages",
        "grpo",
        lines({"prompt": "a", "answer": "b"}, {"prompt": said("a"), "answer": "b"}),
    ),
    data("empty completion", "sft", lines({"prompt": "a", "completion": " "}), "completion"),
    data("completion of numbers", "sft", lines({"prompt": "a", "completion": 5}), "completion"),
    data("null completion", "sft", lines({"prompt": "a", "completion": None}), "completion"),
    data("empty chosen", "dpo", lines({**PAIR, "chosen": ""}), "chosen"),
    data("chosen is rejected", "dpo", lines({**PAIR, "rejected": "b"}), "chosen"),
    data("margin NaN", "reward", lines({**PAIR, "margin": NAN}), "margin"),
    data("margin below 0", "reward", lines({**PAIR, "margin": -1}), "margin"),
    data("margin in words", "reward", lines({**PAIR, "margin": "big"}), "margin"),
    data("label in words", "kto", lines({**ANSWERED, "label": "good"}), "label"),
    data("label null", "kto", lines({**ANSWERED, "label": None}), "label"),
    data("label 2", "kto", lines({**ANSWERED, "label": 2}), "label"),
    data("labels all alike", "kto", lines({**ANSWERED, "label": True}), "label"),
    data(
        "steps and labels differ",
        "prm",
        lines({"prompt": "a", "completions": ["b", "c"], "labels": [1]}),
        "labels",
    ),
    data(
        "labels out of range",
        "prm",
        lines({"prompt": "a", "completions": ["b"], "labels": [7]}),
        "label",
    ),
    data("no steps", "prm", lines({"prompt": "a", "completions": [], "labels": []})),
    data("ranked of one", "reward", lines({"prompt": "a", "ranked": ["b"]})),
    data(
        "tools that are no JSON",
        "sft",
        lines({"messages": said("a") + said("b", "assistant"), "tools": "{"}),
        "tools",
    ),
    data(
        "template arguments that are a list",
        "sft",
        lines({"messages": said("a") + said("b", "assistant"), "chat_template_kwargs": [1]}),
        "chat_template_kwargs",
    ),
    data("column of the trainer", "grpo", lines({**ASKED, "completions": "a"}), "completions"),
    data("too few rows", "grpo", lines(ASKED, count=1)),
    data("rows left out", "sft", lines({"prompt": "a" * 500, "completion": "b"}), "max_length"),
    data(
        "prompt longer than the context",
        "grpo",
        lines({"prompt": "a" * 500, "answer": "b"}),
        "context",
    ),
    data(
        "letters that the model has not",
        "grpo",
        lines({"prompt": "日本語", "answer": "b"}),
        "prompt",
    ),
]

# --- folders --------------------------------------------------------------------------------------

FOLDERS = [
    BadInput(name="output_dir: holds files", word="output_dir", files={"out/notes.txt": "mine"}),
    BadInput(
        name="output_dir: below a file",
        word="output_dir",
        changes={"output_dir": "config.yaml/out"},
    ),
    BadInput(name="output_dir: too long", word="output_dir", changes={"output_dir": "a" * 300}),
    BadInput(name="output_dir: a zero byte", word="output_dir", changes={"output_dir": "a\0b"}),
    BadInput(
        name="resume: an empty folder of files",
        word="resume_from_checkpoint",
        changes={"resume_from_checkpoint": "auto"},
        files={"out/notes.txt": "mine"},
    ),
    BadInput(
        name="resume: no whole checkpoint",
        word="resume_from_checkpoint",
        changes={"resume_from_checkpoint": "out/checkpoint-1"},
        files={"out/checkpoint-1/model.safetensors": ""},
    ),
    BadInput(
        name="resume: a damaged manifest",
        word="resume_from_checkpoint",
        changes={"resume_from_checkpoint": "out/checkpoint-1"},
        files={"out/checkpoint-1/manifest.json": "{"},
    ),
    BadInput(
        name="reward_funcs: a module that raises",
        word="reward_funcs",
        changes={"reward_funcs": ["own_rewards_a.reward"]},
        files={"own_rewards_a.py": "1 / 0\n"},
    ),
    BadInput(
        name="reward_funcs: a syntax error",
        word="reward_funcs",
        changes={"reward_funcs": ["own_rewards_b.reward"]},
        files={"own_rewards_b.py": "def reward(:\n"},
    ),
    BadInput(
        name="reward_funcs: no such function",
        word="reward_funcs",
        changes={"reward_funcs": ["own_rewards_c.reward"]},
        files={"own_rewards_c.py": "a = 1\n"},
    ),
    BadInput(
        name="config: no file", word="nowhere.yaml", text=None, options=("--config=nowhere.yaml",)
    ),
    BadInput(
        name="config: a folder", word="out", options=("--config=out",), files={"out/a.txt": ""}
    ),
]


def bad_inputs() -> list[BadInput]:
    """Return all of them."""
    return [*bad_values(), *KEYS, *YAML, *OPTIONS, *MODELS, *DATA, *FOLDERS]


_TOGGLED = "a config may hold the values of an adapter for runs with --use_peft"
_PEFT = "PEFT names its own argument, and the sentence stands below a traceback"
_PASSES = "PEFT passes over names that no module has"
KNOWN = {
    "grpo: optim_args nothing=1": "transformers hands it to the optimizers that have options",
    "grpo: lora_r 8": _TOGGLED,
    "grpo: use_dora True": _TOGGLED,
    "grpo: use_peft True, lora_target_modules ['nothing']": _PEFT,
    "grpo: use_peft True, lora_target_modules []": _PEFT,
    "grpo: adapter, lora_modules_to_save ['nothing']": _PASSES,
    "grpo: adapter, lora_target_parameters ['nothing']": _PASSES,
    "model: unknown tokenizer class": "the tokenizer itself is in tokenizer.json",
    "model: end token out of the vocabulary": "the tokenizer adds it, and the model has rows left",
    "model: generation_config that is no JSON": "sampling is the run's own; nothing of it is read",
    "data: letters that the model has not (grpo, rows.jsonl)": "the tokenizer has a token for them",
}
"""By name, those that end otherwise, and why that stays."""


# --- running them ---------------------------------------------------------------------------------


def config_of(case: BadInput) -> dict[str, Any]:
    """Return the config of a case as one mapping."""
    config = json.loads(json.dumps(CONFIGS[case.recipe]))
    for path, value in case.changes.items():
        *blocks, key = path.split(".")
        block = config
        for name in blocks:
            block = block.setdefault(name, {})
        if value is REMOVED:
            block.pop(key, None)
        else:
            block[key] = value
    return config


def prepare(case: BadInput, folder: Path) -> list[str]:
    """Write the files of a case; return its command line."""
    if case.model is not None:
        shutil.copytree(checkpoint_path(), folder / "model")
        case.model(folder / "model")
    content = yaml.safe_dump(config_of(case)) if case.text is None else case.text
    for name, data in {"config.yaml": content, **case.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    if any(word.startswith("--config=") for word in case.options):
        return list(case.options)
    return ["--config", "config.yaml", *case.options]


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in what takes longer."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def as_a_new_process(folder: Path, argv: list[str], env: Mapping[str, str]) -> Iterator[None]:
    """Be in a folder with a command line and an environment, and leave no trace of them."""
    from accelerate.state import AcceleratorState, GradientState

    kept = os.getcwd(), sys.argv, sys.path[:], dict(os.environ)
    os.chdir(folder)
    os.environ.update(env)
    sys.argv, sys.path[:0] = ["recipe.py", *argv], [str(folder)]
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        os.chdir(kept[0])
        sys.argv, sys.path[:] = kept[1:3]
        os.environ.clear()
        os.environ.update(kept[3])


@cache
def import_all() -> None:
    """Import what recipes do, so that no limit ends in the middle of an import."""
    import datasets  # noqa: F401
    import wandb  # noqa: F401

    for stage in STAGES.values():
        for part in ("config", "trainer", "run"):
            stage.part(part)


def run(case: BadInput, folder: Path, limit: float = LIMIT) -> Ending:
    """Launch the recipe of a case in this process, in a folder of its own, and say how it ends."""
    import_all()
    argv, errors, start = prepare(case, folder), io.StringIO(), time.time()
    code: Any = None
    try:
        with (
            as_a_new_process(folder, argv, case.env),
            redirect_stdout(io.StringIO()),
            redirect_stderr(errors),
            no_longer_than(limit),
        ):
            STAGES[case.recipe].launch()
    except SystemExit as stop:
        code = stop.code
    except TimeoutError as error:
        return Ending("no end", str(error), time.time() - start)
    except BaseException:
        return Ending("traceback", traceback.format_exc(), time.time() - start)
    seconds, shown = time.time() - start, errors.getvalue()
    if code is None or code == 0:
        return Ending("accepted", shown[-500:], seconds)
    if not isinstance(code, str) or not code.startswith("error: ") or "\n" in code:
        return Ending("traceback", f"{code}\n{shown[-2000:]}", seconds)
    kind = "traceback and sentence" if "Traceback (most recent" in shown else "sentence"
    return Ending(kind, code, seconds)


def is_right(case: BadInput, ending: Ending) -> bool:
    """Whether a case ended in one sentence that names what is wrong."""
    return (
        ending.kind == "sentence"
        and re.search(rf"(?<!\w){re.escape(case.word)}", ending.text) is not None
    )


def main(part: str = "") -> None:
    """Run the cases whose name holds `part`; print those that do not end as they should."""
    import tempfile

    cases = [case for case in bad_inputs() if part in case.name]
    counts: dict[str, int] = {}
    started = time.time()
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            ending = run(case, Path(folder), 20)
        kind = ending.kind if ending.kind != "sentence" or is_right(case, ending) else "other key"
        counts[kind] = counts.get(kind, 0) + 1
        last = ending.text.strip().splitlines()[-1:] or [""]
        kind += " (known)" * (case.name in KNOWN)
        print(f"{kind:12} {ending.seconds:5.1f}  {case.name:60} {last[0][:250]}", flush=True)
    print(len(cases), counts, f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
