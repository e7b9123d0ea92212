"""Supervised fine-tuning (chapter 4) on TRL's SFTTrainer; rebuilds the embedded warm start.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/sft.py \
    --config configs/tiny/sft.yaml
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import GymData
from rlhf_trl.run.launch import Expect, recipe


@dataclass
class Run:
    """The fields of this recipe beside TRL's SFTConfig and ModelConfig."""

    dataset: GymData
    demonstrator: Literal["imperfect", "right"] = "imperfect"
    max_completion_length: int = 64  # of the answers that evaluation generates
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "SFTConfig")

    from rlhf_trl.run.train import train_supervised
    from rlhf_trl.trainers.sft import AnsweringSFTTrainer

    train_supervised(loaded, AnsweringSFTTrainer)


if __name__ == "__main__":
    recipe(main)
