"""Reward functions checked at every call: a broken result stops the run with one sentence."""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import Any

from rlhf_trl.data.answers import completion_text
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.verifiers import RewardFunc

# Where code lies that is not the user's.
NOT_THEIRS = (
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
    "<frozen",
)


def checked(function: RewardFunc, name: str) -> RewardFunc:
    """Wrap a reward function so that a broken result stops the run with one sentence.

    Right is one finite number per completion, or None: TRL reads it as "this does not apply here".
    """
    waits = inspect.iscoroutinefunction(function)

    def culprit(sample: dict[str, Any]) -> dict[str, Any]:
        # One completion at a time, to name the one that makes the function raise.
        count = len(sample["completions"])
        for i in range(0 if waits else count):
            each = {k: isinstance(v, list) and len(v) == count for k, v in sample.items()}
            one = {k: [v[i]] if each[k] else v for k, v in sample.items()}
            try:
                function(**one)
            except Exception:
                return one
        return sample

    @contextmanager
    def named(sample: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except InputError:  # says itself what to do
            raise
        except Exception as error:
            raise InputError(
                f"reward function {name!r} raised {type(error).__name__}: {error}"
                f"{place_of(error)} {_where(culprit(sample))}; fix it, or return None where it "
                "does not apply."
            ) from error

    async def waiting(**kwargs: Any) -> list[float | None]:
        with named(kwargs):
            rewards = await function(**kwargs)
        return _validated(rewards, name, kwargs)

    def wrapper(**kwargs: Any) -> list[float | None]:
        with named(kwargs):
            rewards = function(**kwargs)
        return _validated(rewards, name, kwargs)

    wrapped = wraps(function)(waiting if waits else wrapper)
    wrapped.__name__ = name.rpartition(".")[2]
    return wrapped


def place_of(error: Exception) -> str:
    """Return the file and line of the user's own code that an exception was raised in, if any.

    That is the deepest call outside this package, the installed ones and Python's own.
    """
    for call in reversed(traceback.extract_tb(error.__traceback__)):
        if not call.filename.startswith(NOT_THEIRS):
            return f" at {os.path.relpath(call.filename)}, line {call.lineno}"
    return ""


def _where(sample: dict[str, Any], index: int = 0) -> str:
    state = sample.get("trainer_state")
    step = f"at step {state.global_step} " if state is not None else ""
    prompts = sample.get("prompts") or sample.get("prompt")
    completion = sample["completions"][index]
    prompt = completion_text(prompts[index]) if prompts else None
    return f"{step}(prompt {prompt!r}, completion {completion_text(completion)!r})"


def _validated(rewards: Any, name: str, sample: dict[str, Any]) -> list[float | None]:
    wanted = len(sample["completions"])
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != wanted:
        listed = isinstance(rewards, list | tuple)
        got = f"{len(rewards)} values" if listed else f"{rewards!r:.80}"
        raise InputError(
            f"reward function {name!r} returned {got} for {wanted} completions {_where(sample)}; "
            f"return a list of {wanted} numbers, one per completion."
        )
    for i, reward in enumerate(rewards):
        value = reward.item() if hasattr(reward, "item") else reward
        if value is not None and not (isinstance(value, int | float) and isfinite(value)):
            raise InputError(
                f"reward function {name!r} returned {value!r} {_where(sample, i)}; return a "
                "finite number, or None where it does not apply."
            )
    return list(rewards)
