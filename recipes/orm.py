"""Outcome reward models (chapter 5): is the answer going to be right, asked of every token.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/orm.py \
    --config configs/tiny/orm.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import ExamplesRun, OutcomeData, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(ExamplesRun):
    """The fields of this recipe beside BookTokenRewardConfig and TRL's ModelConfig."""

    dataset: OutcomeData  # where answers come from
    algorithm: str = algorithm_of("orm")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.reward_models.BookTokenRewardConfig")

    from rlhf_trl.run.reward_models import train_reward_model
    from rlhf_trl.trainers.reward_models import BookTokenRewardTrainer

    train_reward_model(loaded, BookTokenRewardTrainer)


if __name__ == "__main__":
    recipe(main)
