"""Reward functions checked at every call: a broken result stops the run with one sentence."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.rewards.verifiers import RewardFunc

LARGEST = 1e16  # float32 holds the sum of a million squares of it


def checked(function: RewardFunc, name: str) -> RewardFunc:
    """Wrap a reward function so that an exception or a broken result stops the run, in a sentence.

    A result is a list with one number per completion, which float32 can sum, or None: TRL reads it
    as "this does not apply here".
    """
    # a function is one, or an object that is called like a function
    is_coroutine = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    async def waiting(**kwargs: Any) -> list[float | None]:
        with _naming_errors(function, name, kwargs, is_coroutine) as arguments:
            rewards = await function(**arguments)
        return _validated(rewards, name, kwargs)

    def wrapper(**kwargs: Any) -> list[float | None]:
        with _naming_errors(function, name, kwargs, is_coroutine) as arguments:
            rewards = function(**arguments)
        return _validated(rewards, name, kwargs)

    wrapped = wraps(function)(waiting if is_coroutine else wrapper)
    # TRL logs it by this: without the module of a dotted path
    wrapped.__name__ = name.rpartition(".")[2]
    return wrapped


@contextmanager
def _naming_errors(
    function: RewardFunc, name: str, sample: dict[str, Any], is_coroutine: bool
) -> Iterator[dict[str, Any]]:
    """Yield the arguments for a call in the block; what it raises becomes an `InputError`.

    Args:
        function: the reward function.
        name: its name in the config.
        sample: the arguments as TRL gives them, of which the function gets copies.
        is_coroutine: whether the function is one.
    """
    from rlhf_trl.rewards.calls import in_call

    try:
        with in_call(name, sample, is_coroutine) as arguments:
            yield arguments
    except InputError:  # of `in_call`, or the function's own: says itself what to do
        raise
    except Exception as error:
        from rlhf_trl.rewards.faults import culprit_in_time, place_of, where

        # a coroutine cannot be called anew here
        at_fault = None if is_coroutine else culprit_in_time(function, name, sample, error)
        raise InputError(
            f"reward function {name!r} raised {type(error).__name__}: {error}"
            f"{place_of(error)} {where(sample, at_fault)}; fix it, or return None where it "
            "does not apply."
        ) from error


def _validated(rewards: Any, name: str, sample: dict[str, Any]) -> list[float | None]:
    """Return rewards as a list, or refuse them; `name` and `sample` are those of the call."""
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    is_list = isinstance(rewards, list | tuple) and len(rewards) == len(sample["completions"])
    # the places of wrong rewards; None: what was returned is no list of the right length
    wrong = [n for n, reward in enumerate(rewards) if not _is_right(reward)] if is_list else [None]
    if not wrong:
        return list(rewards)
    from rlhf_trl.rewards.faults import refusal

    raise refusal(name, rewards, sample, wrong[0])


def _is_right(reward: Any) -> bool:
    try:
        value = reward.item() if hasattr(reward, "item") else reward
    except (RuntimeError, ValueError):  # of several numbers
        return False
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST)
