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

    def culprit(sample: dict[str, Any], error: Exception) -> int | None:
        return None if waits else _culprit(function, sample, error)

    @contextmanager
    def named(sample: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except InputError:  # says itself what to do
            raise
        except Exception as error:
            raise InputError(
                f"reward function {name!r} raised {type(error).__name__}: {error}"
                f"{place_of(error)} {_where(sample, culprit(sample, error))}; fix it, or return "
                "None where it does not apply."
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


def _culprit(function: RewardFunc, sample: dict[str, Any], error: Exception) -> int | None:
    """Return the first completion for which a function raises an error; None: it cannot be told.

    It raises the same for that one alone, and again among those for which it does not: a function
    that raises at the end of its batch, say, raises for whatever is alone.
    """
    count = len(sample["completions"])

    def raises(places: list[int]) -> bool:
        rows = {
            key: [value[place] for place in places]
            if isinstance(value, list) and len(value) == count
            else value
            for key, value in sample.items()
        }
        try:
            function(**rows)
        except Exception as other:
            return (type(other), str(other)) == (type(error), str(error))
        return False

    suspects = [place for place in range(count) if raises([place])]
    others = [place for place in range(count) if place not in suspects]
    if not others:
        return None
    return next((place for place in suspects if raises(sorted([place, *others]))), None)


def _where(sample: dict[str, Any], index: int | None = None) -> str:
    """Return the step and the completion at `index`; None: the batch, which may hold only one."""
    state = sample.get("trainer_state")
    step = f"at step {state.global_step} " if state is not None else ""
    prompts = sample.get("prompts") or sample.get("prompt")
    count = len(sample["completions"])
    shown = index or 0
    prompt = f"prompt {completion_text(prompts[shown]) if prompts else None!r}"
    completion = f"completion {completion_text(sample['completions'][shown])!r}"
    if index is not None or count == 1:
        return f"{step}({prompt}, {completion})"
    return f"{step}in a batch of {count} that begins with {prompt} and {completion}"


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
