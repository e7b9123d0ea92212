"""Process reward models (chapter 5): is this step right, asked at the end of every step.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/prm.py \
    --config configs/tiny/prm.yaml
"""

from dataclasses import dataclass

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import ExamplesRun, ProcessData, algorithm_of
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(ExamplesRun):
    """The fields of this recipe beside BookTokenRewardConfig and TRL's ModelConfig."""

    dataset: ProcessData  # where traces come from
    algorithm: str = algorithm_of("prm")
    formulation: str = "code"


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.reward_models.BookTokenRewardConfig")
    data = loaded.own.dataset

    from rlhf_trl.run.reward_models import train_reward_model
    from rlhf_trl.trainers.reward_models import BookTokenRewardTrainer

    steps = {"step_separator": data.step_separator, "step_split": data.step_split}
    train_reward_model(loaded, BookTokenRewardTrainer, **steps)


if __name__ == "__main__":
    recipe(main)
