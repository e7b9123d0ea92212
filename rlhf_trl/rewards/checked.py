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

    A result is a list with a value for each completion: a number that float32 can sum, or None,
    which TRL reads as "this does not apply here".
    """
    # a reward is a function, or an object with the method `__call__`
    is_coroutine = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    async def async_wrapper(**kwargs: Any) -> list[float | None]:
        with _naming_errors(function, name, kwargs, is_coroutine) as arguments:
            rewards = await function(**arguments)
        return _validated(rewards, name, kwargs)

    def wrapper(**kwargs: Any) -> list[float | None]:
        with _naming_errors(function, name, kwargs, is_coroutine) as arguments:
            rewards = function(**arguments)
        return _validated(rewards, name, kwargs)

    wrapped = wraps(function)(async_wrapper if is_coroutine else wrapper)
    wrapped.__name__ = name.rpartition(".")[2]  # TRL's logs show it: a dotted path without module
    return wrapped


@contextmanager
def _naming_errors(
    function: RewardFunc, name: str, sample: dict[str, Any], is_coroutine: bool
) -> Iterator[dict[str, Any]]:
    """Yield arguments with which the block calls a reward function; turn errors to `InputError`s.

    Args:
        function: the reward function.
        name: its name in the config.
        sample: the arguments as TRL gives them; copies are yielded.
        is_coroutine: whether the function is a coroutine function.
    """
    from rlhf_trl.rewards.calls import in_call

    try:
        with in_call(name, sample, is_coroutine) as arguments:
            yield arguments
    except InputError:  # a sentence for the user already, of `in_call` or of the function
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
    bad_places = [n for n, r in enumerate(rewards) if not _is_valid(r)] if is_list else []
    if is_list and not bad_places:
        return list(rewards)
    from rlhf_trl.rewards.faults import refusal

    raise refusal(name, rewards, sample, bad_places[0] if is_list else None)


def _is_valid(reward: Any) -> bool:
    try:
        value = reward.item() if hasattr(reward, "item") else reward
    except (RuntimeError, ValueError):  # a tensor or array of several numbers
        return False
    return value is None or (isinstance(value, int | float) and abs(value) <= LARGEST)
