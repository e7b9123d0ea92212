"""Telling reward functions which completions the model itself ended."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

NAMES = ("completion_finished", "finished")
"""How a reward function may call the parameter; a column of the data set with that name wins."""


def with_finished(
    function: Any, finished: Callable[[], list[bool]], only_by_name: bool = False
) -> Any:
    """Wrap a reward function so that it is told which completions are finished.

    This is done if it has a parameter of one of the `NAMES` or, unless `only_by_name`, takes any
    keyword. Other functions, and models, are returned as they are. `finished()` returns, for each
    completion of the call, whether the model ended it.
    """
    names = _accepted_names(function, only_by_name)
    if not names:
        return function

    @wraps(function)
    def wrapper(**columns: Any) -> Any:  # a column of the data set comes before a name of ours
        return function(**{**dict.fromkeys(names, finished()), **columns})

    @wraps(function)
    async def async_wrapper(**columns: Any) -> Any:
        return await function(**{**dict.fromkeys(names, finished()), **columns})

    # TRL awaits coroutine functions only, so the wrapper of one has to be one
    is_coroutine = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return async_wrapper if is_coroutine else wrapper


def _accepted_names(function: Any, only_by_name: bool) -> list[str]:
    """Return which of the `NAMES` a reward function takes; a model takes none."""
    if not callable(function) or hasattr(function, "forward"):
        return []
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values()) and not only_by_name
    return [name for name in NAMES if takes_all or name in parameters]
