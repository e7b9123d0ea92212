"""Rejection sampling (chapter 9): sample, score, select, and fine-tune on TRL's SFTTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/rejection_sampling.py \
    --config configs/tiny/rejection_sampling.yaml
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_trl.run.config import load_config
from rlhf_trl.run.fields import AnyRun, PromptData, Samples, within
from rlhf_trl.run.launch import recipe


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of this recipe beside TRL's SFTConfig and ModelConfig."""

    dataset: PromptData  # where prompts come from
    # which answers are trained
    strategy: Literal["top_per_prompt", "top_k_overall", "random_per_prompt", "random_k_overall"]
    k: int | None = within("1 or more", None)  # answers for *_k_overall; null: one per prompt
    ties: Literal["random", "first"] = "random"  # which of equal rewards
    rounds: int = within("1 or more", 1)  # sample, select and train so often
    num_generations: int = within("1 or more", 8)  # answers to each prompt
    max_completion_length: int = 64  # tokens
    temperature: float = 1.0  # of the answers, as are the next three
    top_p: float = 1.0  # share of the probability to sample from
    top_k: int = 0  # sample from this many likeliest tokens; 0: all
    min_p: float | None = None  # least share of the likeliest one's
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # as in enable_thinking
    reward_funcs: list[str] = field(default_factory=list)  # names, dotted paths
    reward_model: str | None = None  # folder or hub name: one more reward
    reward_aggregate: str | None = None  # of its tokens: mean, last, min or product
    reward_model_strips_think: bool = False  # it reads answers without <think>...</think>
    correctness: str | None = None  # reward that tells right answers, to report
    answers: str | None = None  # folder to keep them in; null: output_dir
    reuse_answers: bool = False  # those of an earlier version, too
    samples: Samples = field(default_factory=Samples)  # panels of answers


def main() -> None:
    """Parse, sample, score, select, train, evaluate, save, report."""
    loaded = load_config(Run, "SFTConfig")

    from rlhf_trl.run.rejection_sampling import train_on_selected
    from rlhf_trl.trainers.sft import BookSFTTrainer

    train_on_selected(loaded, BookSFTTrainer)


if __name__ == "__main__":
    recipe(main)
