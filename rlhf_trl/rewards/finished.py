"""Telling reward functions which completions the model itself ended."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

NAMES = ("completion_finished", "finished")
"""What reward functions may call it; a column of the data set that has the name comes before."""


def with_finished(
    function: Any, finished: Callable[[], list[bool]], only_by_name: bool = False
) -> Any:
    """Let a reward function that takes it know which completions are finished.

    That is one with a parameter of one of the `NAMES` or, unless `only_by_name`, one that takes any
    keyword. Other functions, and models, are returned as they are. `finished` says of the
    completions that are being judged which of them the model ended.
    """
    names = _names_taken(function, only_by_name)
    if not names:
        return function

    @wraps(function)
    def wrapper(**columns: Any) -> Any:  # columns come last, so that one of the name replaces it
        return function(**{**dict.fromkeys(names, finished()), **columns})

    @wraps(function)
    async def waiting(**columns: Any) -> Any:
        return await function(**{**dict.fromkeys(names, finished()), **columns})

    # a coroutine function stays one, as TRL awaits these only
    waits = map(inspect.iscoroutinefunction, (function, type(function).__call__))
    return waiting if any(waits) else wrapper


def _names_taken(function: Any, only_by_name: bool) -> list[str]:
    """Return which of the `NAMES` a reward function takes; a model takes none."""
    if not callable(function) or hasattr(function, "forward"):
        return []
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not only_by_name
    return [name for name in NAMES if takes_all or name in parameters]
