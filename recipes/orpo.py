"""ORPO (chapter 8) on the ORPOTrainer of TRL's experimental package.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/orpo.py \
    --config configs/tiny/orpo.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.preferences import PreferenceData, Samples


@dataclass
class Run:
    """The fields of this recipe beside OddsRatioConfig and TRL's ModelConfig."""

    dataset: PreferenceData
    algorithm: str = field(default="orpo", metadata={"runs": ["orpo"]})
    formulation: str = "chapter"
    max_samples: int | None = None  # the first so many rows or questions only
    samples: Samples = field(default_factory=Samples)
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.orpo.OddsRatioConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.orpo import OddsRatioTrainer

    train_preferences(loaded, OddsRatioTrainer)


if __name__ == "__main__":
    recipe(main)
