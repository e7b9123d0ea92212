"""Rejection sampling (chapter 9): sample, score, select, and fine-tune on TRL's SFTTrainer.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/rejection_sampling.py \
    --config configs/tiny/rejection_sampling.yaml
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AnyRun, PromptData, Samples
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of this recipe beside TRL's SFTConfig and ModelConfig."""

    dataset: PromptData
    strategy: Literal["top_per_prompt", "top_k_overall", "random_per_prompt", "random_k_overall"]
    k: int | None = None  # answers that *_k_overall take; null: as many as there are prompts
    ties: Literal["random", "first"] = "random"
    rounds: int = 1
    num_generations: int = 8  # answers to each prompt
    max_completion_length: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reward_funcs: list[str] = field(default_factory=list)
    reward_model: str | None = None
    reward_aggregate: str | None = None
    reward_model_strips_think: bool = False
    correctness: str | None = None  # the reward function that tells right answers, for the report
    answers: str | None = None  # the folder where they are kept; null: in output_dir
    samples: Samples = field(default_factory=Samples)


def main() -> None:
    """Parse, sample, score, select, train, evaluate, save, report."""
    loaded = load_config(Run, "SFTConfig")

    from rlhf_trl.run.rejection_sampling import train_on_selected
    from rlhf_trl.trainers.sft import BookSFTTrainer

    train_on_selected(loaded, BookSFTTrainer)


if __name__ == "__main__":
    recipe(main)
