"""Supervised fine-tuning (chapter 4) on TRL's SFTTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/sft.py \
    --config configs/tiny/sft.yaml
"""

from dataclasses import dataclass, field
from typing import Literal

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AnyRun, DemonstrationData, Samples
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of this recipe beside TRL's SFTConfig and ModelConfig."""

    dataset: DemonstrationData  # where answers come from
    demonstrator: Literal["imperfect", "right", "hinted"] = "imperfect"  # of reasoning-gym tasks
    max_completion_length: int = 64  # of generated answers
    samples: Samples = field(default_factory=Samples)  # panels of answers


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "SFTConfig")

    from rlhf_trl.run.supervised import train_supervised
    from rlhf_trl.trainers.sft import BookSFTTrainer

    train_supervised(loaded, BookSFTTrainer)


if __name__ == "__main__":
    recipe(main)
