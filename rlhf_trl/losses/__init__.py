"""The loss of an algorithm on plain tensors: a row of the table, read over the book's functions.

`policy_gradient_loss`, `preference_loss`, `reward_loss` and `distillation_loss` are the whole of
it, one for each family; they check what they are given. What they compute then is what trainers
call: a module for each family, loaded when it is used.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "PolicyGradientLoss": "checked",
    "policy_gradient_loss": "checked",
    "preference_loss": "checked",
    "reward_loss": "checked",
    "distillation_loss": "checked",
    "shaped_rewards": "policy_gradients",
    "estimate_advantages": "policy_gradients",
    "surrogate_loss": "policy_gradients",
    "kl_estimate": "policy_gradients",
    "PreferenceLoss": "preferences",
    "completions_loss": "preferences",
    "scores_loss": "reward_models",
    "distilled_loss": "distillation",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
