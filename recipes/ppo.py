"""PPO (chapter 6): a policy and a learned value function on TRL's GRPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/ppo.py \
    --config configs/tiny/ppo.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import PolicyGradientRun, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(PolicyGradientRun):
    """The fields of this recipe beside BookPPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("ppo")


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.ppo.BookPPOConfig")

    from rlhf_trl.run.train import train_policy
    from rlhf_trl.trainers.ppo import BookPPOTrainer

    train_policy(loaded, BookPPOTrainer)


if __name__ == "__main__":
    recipe(main)
