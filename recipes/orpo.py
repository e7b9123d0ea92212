"""ORPO (chapter 8) on the ORPOTrainer of TRL's experimental package.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/orpo.py \
    --config configs/tiny/orpo.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AlignmentRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AlignmentRun):
    """The fields of this recipe beside BookORPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("orpo")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.orpo.BookORPOConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.orpo import BookORPOTrainer

    train_preferences(loaded, BookORPOTrainer)


if __name__ == "__main__":
    recipe(main)
