"""On-policy distillation (chapter 12) on TRL's GRPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/distill.py \
    --config configs/tiny/opd.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import PolicyGradientRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(PolicyGradientRun):
    """The fields of this recipe beside BookDistillationConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("distill", "opd")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.distillation.BookDistillationConfig")

    from rlhf_trl.run.train import train_policy
    from rlhf_trl.trainers.distillation import BookDistillationTrainer

    train_policy(loaded, BookDistillationTrainer)


if __name__ == "__main__":
    recipe(main)
