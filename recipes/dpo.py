"""DPO and its relatives (chapter 8) on TRL's DPOTrainer.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/dpo.py \
    --config configs/tiny/dpo.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.preferences import PreferenceData, Samples

RUNS = ["dpo", "cdpo", "ipo", "simpo", "dpo_norm", "apo_zero", "apo_down"]


@dataclass
class Run:
    """The fields of this recipe beside PreferenceConfig and TRL's ModelConfig."""

    dataset: PreferenceData
    algorithm: str = field(default="dpo", metadata={"runs": RUNS})
    formulation: str = "chapter"
    max_samples: int | None = None  # the first so many rows or questions only
    samples: Samples = field(default_factory=Samples)
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.direct_alignment.PreferenceConfig")

    from rlhf_trl.run.preferences import train_preferences
    from rlhf_trl.trainers.direct_alignment import PreferenceTrainer

    train_preferences(loaded, PreferenceTrainer)


if __name__ == "__main__":
    recipe(main)
