"""Reward models of whole texts (chapter 5) on TRL's RewardTrainer: Bradley-Terry and K-wise.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/reward.py \
    --config configs/tiny/reward.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import ExamplesRun, RewardData, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(ExamplesRun):
    """The fields of this recipe beside BookRewardConfig and TRL's ModelConfig."""

    dataset: RewardData  # where pairs or lists come from
    algorithm: str = algorithm_of("reward")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.reward_models.BookRewardConfig")

    from rlhf_trl.run.reward_models import train_reward_model
    from rlhf_trl.trainers.reward_models import BookRewardTrainer

    train_reward_model(loaded, BookRewardTrainer)


if __name__ == "__main__":
    recipe(main)
