"""The fields of recipes that learn from demonstrations, or from their own best answers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_trl.data.blocks import DemonstrationData, PromptData, Samples
from rlhf_trl.errors import within
from rlhf_trl.run.fields.common import AnyRun


@dataclass(kw_only=True)
class SFTRun(AnyRun):
    """The fields of recipes/sft.py beside BookSFTConfig and TRL's ModelConfig."""

    dataset: DemonstrationData  # where answers come from
    demonstrator: Literal["imperfect", "right", "hinted"] = "imperfect"  # of reasoning-gym tasks
    max_completion_length: int = 64  # of generated answers
    chat_template_fallback: str | None = None  # whose to take where the tokenizer has none
    samples: Samples = field(default_factory=Samples)  # panels of answers


@dataclass(kw_only=True)
class RejectionSamplingRun(AnyRun):
    """The fields of recipes/rejection_sampling.py beside BookSFTConfig and TRL's ModelConfig."""

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
    reward_timeout: float = within("0 or more", 300.0)  # seconds for one call; 0: no limit
    correctness: str | None = None  # reward that tells right answers, to report
    answers: str | None = None  # folder to keep them in; null: output_dir
    reuse_answers: bool = False  # those of an earlier version, too
    samples: Samples = field(default_factory=Samples)  # panels of answers
