"""KTO (chapter 8) on TRL's KTOTrainer, from pairs or from labelled examples.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/kto.py \
    --config configs/tiny/kto.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.preferences import PreferenceData, Samples


@dataclass
class Run:
    """The fields of this recipe beside UnpairedConfig and TRL's ModelConfig."""

    dataset: PreferenceData
    algorithm: str = field(default="kto", metadata={"runs": ["kto"]})
    formulation: str = "chapter"
    max_samples: int | None = None  # the first so many rows or questions only
    samples: Samples = field(default_factory=Samples)
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.direct_alignment.UnpairedConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.direct_alignment import UnpairedTrainer

    train_preferences(loaded, UnpairedTrainer, unpaired=True)


if __name__ == "__main__":
    recipe(main)
