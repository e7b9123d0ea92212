"""What `rlhf_trl` offers, for type checkers: at run time, `__init__.py` imports it on first use."""

from rlhf_trl.book.selection import (
    random_k_overall as random_k_overall,
)
from rlhf_trl.book.selection import (
    random_per_prompt as random_per_prompt,
)
from rlhf_trl.book.selection import (
    top_k_overall as top_k_overall,
)
from rlhf_trl.book.selection import (
    top_per_prompt as top_per_prompt,
)
from rlhf_trl.losses.checked import (
    PolicyGradientLoss as PolicyGradientLoss,
)
from rlhf_trl.losses.checked import (
    PreferenceLoss as PreferenceLoss,
)
from rlhf_trl.losses.checked import (
    distillation_loss as distillation_loss,
)
from rlhf_trl.losses.checked import (
    policy_gradient_loss as policy_gradient_loss,
)
from rlhf_trl.losses.checked import (
    preference_loss as preference_loss,
)
from rlhf_trl.losses.checked import (
    reward_loss as reward_loss,
)
from rlhf_trl.rewards.verifiers import (
    contains_reward as contains_reward,
)
from rlhf_trl.rewards.verifiers import (
    exact_match as exact_match,
)
from rlhf_trl.rewards.verifiers import (
    format_reward as format_reward,
)
from rlhf_trl.rewards.verifiers import (
    math_reward as math_reward,
)
from rlhf_trl.rewards.verifiers import (
    number_reward as number_reward,
)
from rlhf_trl.rewards.verifiers import (
    regex_reward as regex_reward,
)
from rlhf_trl.trainers.direct_alignment import (
    BookDPOConfig as BookDPOConfig,
)
from rlhf_trl.trainers.direct_alignment import (
    BookDPOTrainer as BookDPOTrainer,
)
from rlhf_trl.trainers.direct_alignment import (
    BookKTOConfig as BookKTOConfig,
)
from rlhf_trl.trainers.direct_alignment import (
    BookKTOTrainer as BookKTOTrainer,
)
from rlhf_trl.trainers.distillation import (
    BookDistillationConfig as BookDistillationConfig,
)
from rlhf_trl.trainers.distillation import (
    BookDistillationTrainer as BookDistillationTrainer,
)
from rlhf_trl.trainers.orpo import (
    BookORPOConfig as BookORPOConfig,
)
from rlhf_trl.trainers.orpo import (
    BookORPOTrainer as BookORPOTrainer,
)
from rlhf_trl.trainers.policy_gradient import (
    BookGRPOConfig as BookGRPOConfig,
)
from rlhf_trl.trainers.policy_gradient import (
    BookGRPOTrainer as BookGRPOTrainer,
)
from rlhf_trl.trainers.ppo import BookPPOConfig as BookPPOConfig
from rlhf_trl.trainers.ppo import BookPPOTrainer as BookPPOTrainer
from rlhf_trl.trainers.reward_models import (
    BookRewardConfig as BookRewardConfig,
)
from rlhf_trl.trainers.reward_models import (
    BookRewardTrainer as BookRewardTrainer,
)
from rlhf_trl.trainers.reward_models import (
    BookTokenRewardConfig as BookTokenRewardConfig,
)
from rlhf_trl.trainers.reward_models import (
    BookTokenRewardTrainer as BookTokenRewardTrainer,
)
from rlhf_trl.trainers.rloo import (
    BookRLOOConfig as BookRLOOConfig,
)
from rlhf_trl.trainers.rloo import (
    BookRLOOTrainer as BookRLOOTrainer,
)
from rlhf_trl.trainers.sft import BookSFTConfig as BookSFTConfig
from rlhf_trl.trainers.sft import BookSFTTrainer as BookSFTTrainer
