"""Which values of the book's fields carry over, and what to write in place of others."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rlhf_trl.book.selection import STRATEGIES
from rlhf_trl.ports.book_fields import DEFAULTS, SCHEDULES

NULLABLE = {
    "max_samples": int,
    "data.max_train_samples": int,
    "data.max_test_samples": int,
    "max_prompt_length": int,
    "max_completion_length": int,
    "chat_template_source": str,
    "ref_model_name": str,
    "sample_prompts_file": str,
    "wandb_entity": str,
    "wandb_project": str,
    "wandb_run_name": str,
}
"""Fields that may be null, with the type of their other values."""
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True)
class Rule:
    """What a value has to be."""

    holds: Callable[[Any], bool]
    remedy: str  # what goes on behind "FIELD is VALUE"


_COUNT = Rule(lambda value: value is None or value >= 1, "; write 1 or more")
_ABOVE_0 = Rule(lambda value: value > 0, "; write a number above 0")
_FROM_0 = Rule(lambda value: value >= 0, "; write 0 or more")
_PROBABILITY = Rule(lambda value: 0 < value <= 1, "; write a number above 0, at most 1")
# from 1 on, TRL reads a number of steps, and rows are counted
_SHARE = Rule(lambda value: 0 <= value < 1, "; write a number from 0 to below 1")
_CUT = Rule(lambda value: value is None, ", and the recipes cut by max_length only; remove it")


def _one_of(*names: str) -> Rule:
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
    return Rule(lambda value: value in names, f"; write {listed}")


RULES: dict[str, Rule] = {
    # how much is trained
    "data.size": _COUNT,
    "data.max_train_samples": _COUNT,
    "data.max_test_samples": _COUNT,
    "max_samples": _COUNT,
    "samples": _COUNT,
    "prompts_per_step": _COUNT,
    "num_rollouts": _COUNT,
    "num_completions_per_prompt": _COUNT,
    "selection.top_k": _COUNT,
    "batch_size": _COUNT,
    "train_batch_size": _COUNT,
    "rollout_chunk": _COUNT,
    "batch_acc": _COUNT,
    "grad_accum_steps": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "num_epochs": _COUNT,
    "epochs": _COUNT,
    "num_steps": _COUNT,
    "max_steps": _COUNT,
    "max_tokens": _COUNT,
    "max_length": _COUNT,
    "max_seq_length": _COUNT,
    "max_new_tokens": _COUNT,
    "max_prompt_length": _CUT,
    "max_completion_length": _CUT,
    "val_ratio": _SHARE,
    "rollout_batch_size": _COUNT,
    # how
    "lr": _ABOVE_0,
    "learning_rate": _ABOVE_0,
    "warmup_ratio": _SHARE,
    "lr_scheduler": _one_of(*SCHEDULES),
    "weight_decay": _FROM_0,
    # the code makes all gradients 0 with 0, which turns TRL's clipping off
    "max_norm": _ABOVE_0,
    "max_grad_norm": _ABOVE_0,
    "seed": Rule(lambda value: 0 <= value < 2**32, "; write a number from 0 to 4294967295"),
    "kl_estimator": _one_of("kl1", "kl2", "kl3"),
    "l_cache": _COUNT,
    "freeze_backbone": Rule(
        lambda value: not value, ", and the recipes train the whole model; write false"
    ),
    "success_reward_threshold": Rule(
        lambda value: value == 1, ", and the recipe takes 1 for right; write 1.0"
    ),
    # sampling
    "temperature": _ABOVE_0,
    "top_p": _PROBABILITY,
    "top_k": _FROM_0,
    "min_p": Rule(lambda value: 0 <= value <= 1, "; write a number from 0 to 1"),
    "repetition_penalty": _ABOVE_0,
    "selection.strategy": _one_of(*STRATEGIES),
    # evaluation and logs
    "eval_interval": _FROM_0,
    "log_every": _COUNT,
    "sample_num_prompts": _COUNT,
    "sample_max_tokens": _COUNT,
    "sample_temperature": _ABOVE_0,
    "sample_top_p": _PROBABILITY,
    "sample_prompt_strategy": _one_of("fixed", "round_robin"),
}


def wrong_type(kind: str, name: str, value: Any) -> str:
    """Return what is wrong with the type of a field's value; "": nothing."""
    expected = NULLABLE.get(name, type(DEFAULTS[kind][name]))
    if expected is type(None) or (value is None and name in NULLABLE):
        return ""  # of `data.specs`, which `data` reads
    fits = isinstance(value, int | float) if expected is float else isinstance(value, expected)
    if isinstance(value, bool):
        fits = expected is bool
    if fits and isinstance(value, float):
        fits = isfinite(value)
    return "" if fits else f"{name} is {value!r}; write {_TYPES[expected]}"


def wrong_value(name: str, value: Any) -> str:
    """Return what is wrong with a field's value, which has its type; "": nothing."""
    rule = RULES.get(name)
    return "" if rule is None or rule.holds(value) else f"{name} is {value!r}{rule.remedy}"
