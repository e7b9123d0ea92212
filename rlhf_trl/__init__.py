"""The algorithms of the RLHF Book as thin subclasses and loss hooks on Hugging Face TRL."""

from importlib import import_module
from typing import Any

# Loaded on first use: `import rlhf_trl` itself loads neither torch nor trl. See `__init__.pyi`.
_NAMES = {
    "book.selection": ("random_k_overall", "random_per_prompt", "top_k_overall", "top_per_prompt"),
    "losses.checked": (
        "PolicyGradientLoss",
        "PreferenceLoss",
        "distillation_loss",
        "policy_gradient_loss",
        "preference_loss",
        "reward_loss",
    ),
    "rewards.verifiers": (
        "contains_reward",
        "exact_match",
        "format_reward",
        "math_reward",
        "number_reward",
        "regex_reward",
    ),
}
_TRAINED = {
    "direct_alignment": ("DPO", "KTO"),
    "distillation": ("Distillation",),
    "orpo": ("ORPO",),
    "policy_gradient": ("GRPO",),
    "ppo": ("PPO",),
    "reward_models": ("Reward", "TokenReward"),
    "rloo": ("RLOO",),
    "sft": ("SFT",),
}
for _module, _kinds in _TRAINED.items():
    _both = [f"Book{kind}{part}" for kind in _kinds for part in ("Config", "Trainer")]
    _NAMES[f"trainers.{_module}"] = tuple(_both)
_HOME = {name: f"rlhf_trl.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """List what is loaded and what can be."""
    return sorted({*globals(), *_HOME})
