"""PPO (chapter 6): a policy and a learned value function on TRL's GRPOTrainer.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/ppo.py \
    --config configs/tiny/ppo.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.gym import GymData


@dataclass
class Run:
    """The fields of this recipe beside PPOConfig and TRL's ModelConfig."""

    dataset: GymData
    algorithm: str = field(default="ppo", metadata={"runs": ["ppo"]})
    formulation: str = "chapter"
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match", "format"])
    reward_model: str | None = None
    reward_aggregate: str | None = None
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.ppo.PPOConfig")
    own = loaded.own

    from rlhf_trl.run import train
    from rlhf_trl.trainers.policy_gradient import read_row
    from rlhf_trl.trainers.ppo import PPOTrainer

    name = f"{own.algorithm} ({own.formulation})"
    read_row(own.algorithm, own.formulation, loaded.trl)
    train.begin(loaded, name)
    tasks, arguments = train.prepare(loaded)
    train.run(PPOTrainer(**arguments), loaded, tasks, name)


if __name__ == "__main__":
    recipe(main)
