"""The algorithms of the RLHF Book as thin subclasses and loss hooks on Hugging Face TRL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_trl.book.selection import (
        random_k_overall,
        random_per_prompt,
        top_k_overall,
        top_per_prompt,
    )
    from rlhf_trl.losses.checked import (
        PolicyGradientLoss,
        PreferenceLoss,
        distillation_loss,
        policy_gradient_loss,
        preference_loss,
        reward_loss,
    )
    from rlhf_trl.rewards.verifiers import (
        contains_reward,
        exact_match,
        format_reward,
        math_reward,
        number_reward,
        regex_reward,
    )
    from rlhf_trl.trainers.direct_alignment import (
        BookDPOConfig,
        BookDPOTrainer,
        BookKTOConfig,
        BookKTOTrainer,
    )
    from rlhf_trl.trainers.distillation import BookDistillationConfig, BookDistillationTrainer
    from rlhf_trl.trainers.orpo import BookORPOConfig, BookORPOTrainer
    from rlhf_trl.trainers.policy_gradient import BookGRPOConfig, BookGRPOTrainer
    from rlhf_trl.trainers.ppo import BookPPOConfig, BookPPOTrainer
    from rlhf_trl.trainers.reward_models import (
        BookRewardConfig,
        BookRewardTrainer,
        BookTokenRewardConfig,
        BookTokenRewardTrainer,
    )
    from rlhf_trl.trainers.rloo import BookRLOOConfig, BookRLOOTrainer
    from rlhf_trl.trainers.sft import BookSFTConfig, BookSFTTrainer

__all__ = [
    "BookDPOConfig",
    "BookDPOTrainer",
    "BookDistillationConfig",
    "BookDistillationTrainer",
    "BookGRPOConfig",
    "BookGRPOTrainer",
    "BookKTOConfig",
    "BookKTOTrainer",
    "BookORPOConfig",
    "BookORPOTrainer",
    "BookPPOConfig",
    "BookPPOTrainer",
    "BookRLOOConfig",
    "BookRLOOTrainer",
    "BookRewardConfig",
    "BookRewardTrainer",
    "BookSFTConfig",
    "BookSFTTrainer",
    "BookTokenRewardConfig",
    "BookTokenRewardTrainer",
    "PolicyGradientLoss",
    "PreferenceLoss",
    "contains_reward",
    "distillation_loss",
    "exact_match",
    "format_reward",
    "math_reward",
    "number_reward",
    "policy_gradient_loss",
    "preference_loss",
    "random_k_overall",
    "random_per_prompt",
    "regex_reward",
    "reward_loss",
    "top_k_overall",
    "top_per_prompt",
]

# Loaded on first use: `import rlhf_trl` itself loads neither torch nor trl.
_HOME = dict.fromkeys(__all__, "rlhf_trl.losses.checked")
_SELECTIONS = ("top_per_prompt", "top_k_overall", "random_per_prompt", "random_k_overall")
_HOME |= dict.fromkeys(_SELECTIONS, "rlhf_trl.book.selection")
_REWARDS = (
    "contains_reward",
    "exact_match",
    "format_reward",
    "math_reward",
    "number_reward",
    "regex_reward",
)
_HOME |= dict.fromkeys(_REWARDS, "rlhf_trl.rewards.verifiers")
_TRAINERS = {
    "GRPO": "policy_gradient",
    "RLOO": "rloo",
    "PPO": "ppo",
    "Distillation": "distillation",
    "DPO": "direct_alignment",
    "KTO": "direct_alignment",
    "ORPO": "orpo",
    "Reward": "reward_models",
    "TokenReward": "reward_models",
    "SFT": "sft",
}
for _name, _module in _TRAINERS.items():
    _HOME |= dict.fromkeys(
        (f"Book{_name}Config", f"Book{_name}Trainer"), f"rlhf_trl.trainers.{_module}"
    )


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """List what is loaded and what can be."""
    return sorted({*globals(), *_HOME})
