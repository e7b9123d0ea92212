"""Reward functions checked at every call: a broken result stops the run with one sentence."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from math import isfinite
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.rewards.verifiers import RewardFunc


def checked(function: RewardFunc, name: str) -> RewardFunc:
    """Wrap a reward function so that a broken result stops the run with one sentence.

    Right is one finite number per completion, or None: TRL reads it as "this does not apply here".
    """
    waits = inspect.iscoroutinefunction(function)

    @contextmanager
    def named(sample: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except InputError:  # says itself what to do
            raise
        except Exception as error:
            from rlhf_trl.rewards.faults import culprit, place_of, where

            at_fault = None if waits else culprit(function, sample, error)
            raise InputError(
                f"reward function {name!r} raised {type(error).__name__}: {error}"
                f"{place_of(error)} {where(sample, at_fault)}; fix it, or return None where it "
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


def _validated(rewards: Any, name: str, sample: dict[str, Any]) -> list[float | None]:
    wanted = len(sample["completions"])
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != wanted:
        listed = isinstance(rewards, list | tuple)
        got = f"{len(rewards)} values" if listed else f"{rewards!r:.80}"
        returned = f"{got} for {wanted} completions"
        remedy = f"return a list of {wanted} numbers, one per completion"
        raise _refusal(name, returned, remedy, sample)
    for place, reward in enumerate(rewards):
        value = reward.item() if hasattr(reward, "item") else reward
        if value is not None and not (isinstance(value, int | float) and isfinite(value)):
            remedy = "return a finite number, or None where it does not apply"
            raise _refusal(name, repr(value), remedy, sample, place)
    return list(rewards)


def _refusal(
    name: str, returned: str, remedy: str, sample: dict[str, Any], place: int | None = None
) -> InputError:
    """Return the error about what a reward function returned, for one completion or the batch."""
    from rlhf_trl.rewards.faults import where

    return InputError(
        f"reward function {name!r} returned {returned} {where(sample, place)}; {remedy}."
    )
