"""DPO and its relatives (chapter 8) on TRL's DPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/dpo.py \
    --config configs/tiny/dpo.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AlignmentRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AlignmentRun):
    """The fields of this recipe beside BookDPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("dpo")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.direct_alignment.BookDPOConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.direct_alignment import BookDPOTrainer

    train_preferences(loaded, BookDPOTrainer)


if __name__ == "__main__":
    recipe(main)
