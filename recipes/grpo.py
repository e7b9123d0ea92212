"""Policy-gradient algorithms (chapter 6) on TRL's GRPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/grpo.py \
    --config configs/tiny/grpo.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import PolicyGradientRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(PolicyGradientRun):
    """The fields of this recipe beside BookGRPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("grpo")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.policy_gradient.BookGRPOConfig")

    from rlhf_trl.run.train import train_policy
    from rlhf_trl.trainers.policy_gradient import BookGRPOTrainer

    train_policy(loaded, BookGRPOTrainer)


if __name__ == "__main__":
    recipe(main)
