"""The equations of the book as pure functions: tensors in, tensors out, nothing else.

A module is loaded when it is first used: no run needs the equations of all chapters.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_trl.book import (
        advantages,
        aggregation,
        distillation,
        kl,
        preference,
        reward_models,
        rewards,
        surrogates,
        value,
    )

__all__ = [
    "advantages",
    "aggregation",
    "distillation",
    "kl",
    "preference",
    "reward_models",
    "rewards",
    "surrogates",
    "value",
]


def __getattr__(name: str) -> ModuleType:
    """Import a module of the book."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
