"""Reward models of whole texts (chapter 5) on TRL's RewardTrainer: Bradley-Terry and K-wise.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/reward.py \
    --config configs/tiny/reward.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.reward_data import RewardData


@dataclass
class Run:
    """The fields of this recipe beside ComparisonConfig and TRL's ModelConfig."""

    dataset: RewardData
    algorithm: str = field(default="reward", metadata={"runs": ["reward", "kwise"]})
    formulation: str = "chapter"
    max_samples: int | None = None  # the first so many rows or questions only
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.reward_models.ComparisonConfig")

    from rlhf_trl.run.rewards import train_reward_model
    from rlhf_trl.trainers.reward_models import ComparisonTrainer

    train_reward_model(loaded, ComparisonTrainer)


if __name__ == "__main__":
    recipe(main)
