"""What the loops of the book's published code do with a config, told anew in plain arithmetic.

The configs are in golden/book_configs.yaml. The rules were read off the code's training scripts, at
the revision that the file names; nothing here imports rlhf_trl.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parent / "golden" / "book_configs.yaml"

# Fields that a config leaves out, by the folder of its script: only those that are read here.
_SAMPLED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "device": "auto"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "policy_gradients": _SAMPLED
    | {
        "prompts_per_step": 4,
        "num_rollouts": 8,
        "train_batch_size": 2,
        "batch_acc": 4,
        "max_new_tokens": 512,
        "max_norm": 1.0,
        "lr": 5e-6,
        "beta": 0.0,
    },
    "distillation": _SAMPLED
    | {
        "prompts_per_step": 4,
        "num_rollouts": 8,
        "rollout_chunk": 4,
        "num_steps": 200,
        "warmup_ratio": 0.05,
        "max_new_tokens": 1024,
        "max_norm": 1.0,
        "lr": 1e-6,
    },
    "direct_alignment": {
        "max_samples": 1000,
        "max_length": 512,
        "learning_rate": 5e-7,
        "num_epochs": 1,
        "batch_size": 4,
        "gradient_accumulation_steps": 4,
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    },
    "instruction_tuning": {
        "max_samples": None,
        "max_length": 2048,
        "lr": 5e-6,
        "num_epochs": 3,
        "batch_size": 4,
        "gradient_accumulation_steps": 8,
        "warmup_ratio": 0.1,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
    },
    "rejection_sampling": _SAMPLED
    | {
        "temperature": 0.8,
        "max_new_tokens": 512,
        "num_completions_per_prompt": 8,
        "lr": 5e-6,
        "num_epochs": 2,
        "train_batch_size": 1,
        "batch_acc": 8,
        "max_norm": 1.0,
        "max_seq_length": 1024,
    },
    "reward_models": {
        "samples": 5000,
        "rollouts_per_prompt": 32,
        "max_length": 512,
        "max_tokens": 5500,
        "batch_size": 2,
        "grad_accum_steps": 8,
        "epochs": 2,
        "lr": 5e-5,
        "warmup_ratio": 0.1,
        "val_ratio": 0.1,
        "lr_scheduler": "linear_decay",
    },
}


@dataclass(frozen=True)
class BookConfig:
    """A config of the book's code: the folder of its script, its name and its fields."""

    folder: str
    name: str
    fields: dict[str, Any]

    def __getitem__(self, field: str) -> Any:
        value = self.fields.get(field, DEFAULTS[self.folder].get(field))
        return float(value) if field in ("lr", "learning_rate") else value

    @property
    def text(self) -> str:
        """The config as YAML, which is what the translation reads."""
        return yaml.safe_dump(self.fields, sort_keys=False)


def book_configs() -> dict[str, BookConfig]:
    """Return the configs by `folder/name`."""
    values = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    return {key: BookConfig(*key.split("/"), fields) for key, fields in values.items()}


def quantities(config: BookConfig, rows: int) -> dict[str, Any]:
    """Return what the loop of a config does with a training set of `rows` rows, by name.

    `rows` are the questions of a policy-gradient or distillation run, the pairs of direct
    alignment, the conversations of SFT, the selected answers of rejection sampling, and what a
    reward model is trained on after its validation rows and its overlong ones are gone.
    """
    return _LOOPS[config.folder](config, rows)


ADAM = {"betas": (0.9, 0.999), "epsilon": 1e-8}  # torch's own, which no script changes


def _policy_gradient(config: BookConfig, rows: int) -> dict[str, Any]:
    prompts = config["prompts_per_step"]
    completions = prompts * config["num_rollouts"]
    batches = completions // config["train_batch_size"]  # drop_last
    steps_per_phase = math.ceil(batches / config["batch_acc"])
    phases = rows // prompts  # the loader of questions drops its last, smaller batch
    return {
        **_sampling(config),
        **ADAM,
        "weight decay": 0.0,
        "gradient norm clipped at": config["max_norm"],
        "examples per optimizer step": config["train_batch_size"] * config["batch_acc"],
        "examples per micro-batch": config["train_batch_size"],
        "prompts per phase": prompts,
        "completions per phase": completions,
        "optimizer steps per phase": steps_per_phase,
        "optimizer steps": phases * steps_per_phase,
        "learning rates": _rates(phases * steps_per_phase, config["lr"], lambda step: 1.0),
        "beta": config["beta"],
        "temperature of log-probabilities": 1.0,
    }


def _distillation(config: BookConfig, rows: int) -> dict[str, Any]:
    prompts = config["prompts_per_step"]
    completions = prompts * config["num_rollouts"]
    steps = config["num_steps"]
    warmup = int(steps * config["warmup_ratio"])

    def factor(step: int) -> float:
        return (step + 1) / (warmup + 1) if step < warmup else 1.0

    return {
        **_sampling(config),
        **ADAM,
        "weight decay": 0.0,
        "gradient norm clipped at": config["max_norm"],
        "examples per optimizer step": completions,
        "examples per micro-batch": config["rollout_chunk"],
        "prompts per phase": prompts,
        "completions per phase": completions,
        "optimizer steps per phase": 1,
        "optimizer steps": steps,
        "learning rates": _rates(steps, config["lr"], factor),
        "temperature of log-probabilities": 1.0,
    }


def _direct_alignment(config: BookConfig, rows: int) -> dict[str, Any]:
    rows = min(rows, config["max_samples"] or rows)
    accumulation = config["gradient_accumulation_steps"]
    batches = math.ceil(rows / config["batch_size"])
    # the schedule leaves out the step that an epoch's leftover batches make
    scheduled = batches // accumulation * config["num_epochs"]
    steps = math.ceil(batches / accumulation) * config["num_epochs"]
    leftover = batches % accumulation
    return {
        **_supervised(config, scheduled, config["learning_rate"], steps),
        "gradient norm clipped at": config["max_grad_norm"],
        "weight decay": config["weight_decay"],
        "examples per optimizer step": config["batch_size"] * accumulation,
        "examples per micro-batch": config["batch_size"],
        "optimizer steps": steps,
        "weight of a leftover micro-batch": 1 / accumulation if leftover else None,
        "longest sequence": config["max_length"],
    }


def _instruction_tuning(config: BookConfig, rows: int) -> dict[str, Any]:
    rows = min(rows, config["max_samples"] or rows)
    accumulation = config["gradient_accumulation_steps"]
    batches = math.ceil(rows / config["batch_size"])
    steps = batches // accumulation * config["num_epochs"]  # leftover batches train nothing
    return {
        **_supervised(config, steps, config["lr"], steps),
        "gradient norm clipped at": config["max_grad_norm"],
        "weight decay": config["weight_decay"],
        "examples per optimizer step": config["batch_size"] * accumulation,
        "examples per micro-batch": config["batch_size"],
        "optimizer steps": steps,
        "weight of a leftover micro-batch": 0.0 if batches % accumulation else None,
        "longest sequence": config["max_length"],
    }


def _supervised(config: BookConfig, scheduled: int, rate: float, steps: int) -> dict[str, Any]:
    """Return the learning rates of `steps` steps, of which the schedule knows `scheduled`."""
    warmup = int(scheduled * config["warmup_ratio"])

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return max(0.0, (scheduled - step) / max(1, scheduled - warmup))

    return {**ADAM, "warm-up steps": warmup, "learning rates": _rates(steps, rate, factor)}


def _rejection_sampling(config: BookConfig, rows: int) -> dict[str, Any]:
    accumulation = config["batch_acc"]
    batches = math.ceil(rows / config["train_batch_size"])
    steps = math.ceil(batches / accumulation) * config["num_epochs"]
    leftover = batches % accumulation
    return {
        **_sampling(config),
        **ADAM,
        "completions per prompt": config["num_completions_per_prompt"],
        "gradient norm clipped at": config["max_norm"],
        "weight decay": 0.0,
        "examples per optimizer step": config["train_batch_size"] * accumulation,
        "examples per micro-batch": config["train_batch_size"],
        "optimizer steps": steps,
        "learning rates": _rates(steps, config["lr"], lambda step: 1.0),
        "weight of a leftover micro-batch": 1 / accumulation if leftover else None,
        "longest sequence": config["max_seq_length"],
    }


def _reward_model(config: BookConfig, rows: int) -> dict[str, Any]:
    accumulation = config["grad_accum_steps"]
    size = config["batch_size"]
    batches = rows // size if rows > size else math.ceil(rows / size)  # drop_last but for one
    steps = math.ceil(batches / accumulation) * config["epochs"]
    warmup = int(steps * config["warmup_ratio"])

    def decaying(step: int) -> float:
        if step < warmup:
            return step / warmup
        return (steps - step) / max(1, steps - warmup)

    def rising(step: int) -> float:
        return min(1.0, 0.1 + 0.9 * step / warmup) if warmup else 1.0

    # the process reward model's script reads no schedule: its rate rises and stays
    rises = config["lr_scheduler"] == "warmup_only" or config.name == "prm"
    leftover = batches % accumulation
    return {
        **ADAM,
        "weight decay": 0.01,  # of torch's AdamW
        "weights without decay": "none",
        "gradient norm clipped at": None,
        "examples per optimizer step": size * accumulation,
        "examples per micro-batch": size,
        "optimizer steps": steps,
        "warm-up steps": warmup,
        "learning rates": _rates(steps, config["lr"], rising if rises else decaying),
        "weight of a leftover micro-batch": 1 / accumulation if leftover else None,
        "longest sequence": config["max_tokens" if config.name == "prm" else "max_length"],
    }


def _sampling(config: BookConfig) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p")
    return {
        "sampling": {name: config[name] for name in names},
        "longest completion": config["max_new_tokens"],
    }


def _rates(steps: int, rate: float, factor: Any) -> list[float]:
    """Return the learning rate of each optimizer step."""
    return [rate * factor(step) for step in range(steps)]


_LOOPS = {
    "policy_gradients": _policy_gradient,
    "distillation": _distillation,
    "direct_alignment": _direct_alignment,
    "instruction_tuning": _instruction_tuning,
    "rejection_sampling": _rejection_sampling,
    "reward_models": _reward_model,
}


def dapo_steps(config: BookConfig, with_contrast: list[bool]) -> int:
    """Return the optimizer steps of DAPO's loop on questions whose groups have contrast, or not.

    Questions are asked in order until a phase is full, so that groups without contrast are left
    out; the phase in which the questions run out is trained on as it is.
    """
    prompts = config["prompts_per_step"]
    asked = len(with_contrast) // prompts * prompts
    kept = sum(with_contrast[:asked])
    phases = [prompts] * (kept // prompts) + [kept % prompts] * (kept % prompts > 0)
    batches = [groups * config["num_rollouts"] // config["train_batch_size"] for groups in phases]
    return sum(math.ceil(count / config["batch_acc"]) for count in batches)


def comment(text: str, field: str) -> str:
    """Return the comment at a field of a translation: the lines over it and its end, joined."""
    lines = text.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith(f"{field}:"))
    above: list[str] = []
    while lines[place - len(above) - 1].startswith("# "):
        above.insert(0, lines[place - len(above) - 1][2:])
    _, _, behind = lines[place].partition(" # ")
    return " ".join([*above, behind])
