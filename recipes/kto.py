"""KTO (chapter 8) on TRL's KTOTrainer, from pairs or from labelled examples.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/kto.py \
    --config configs/tiny/kto.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AlignmentRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AlignmentRun):
    """The fields of this recipe beside UnpairedConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("kto")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.direct_alignment.UnpairedConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.direct_alignment import UnpairedTrainer

    train_preferences(loaded, UnpairedTrainer, unpaired=True)


if __name__ == "__main__":
    recipe(main)
