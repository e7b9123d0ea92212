"""KTO (chapter 8) on TRL's KTOTrainer, from pairs or from labeled examples.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/kto.py \
    --config configs/tiny/kto.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AlignmentRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AlignmentRun):
    """The fields of this recipe beside BookKTOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("kto")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.direct_alignment.BookKTOConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.direct_alignment import BookKTOTrainer

    train_preferences(loaded, BookKTOTrainer, unpaired=True)


if __name__ == "__main__":
    recipe(main)
