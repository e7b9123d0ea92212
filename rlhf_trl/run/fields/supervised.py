"""The fields of recipes that learn from demonstrations, or from their own best answers."""

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from rlhf_trl.data.blocks import DemonstrationData, PromptData, Samples
from rlhf_trl.errors import setting
from rlhf_trl.run.fields.common import LLM_JUDGE, AnyRun


@dataclass(kw_only=True)
class SFTRun(AnyRun):
    """The fields of recipes/sft.py beside BookSFTConfig and TRL's ModelConfig."""

    dataset: DemonstrationData = setting("where answers come from", MISSING)
    demonstrator: Literal["imperfect", "right", "hinted"] = setting(
        "of reasoning-gym tasks", "imperfect"
    )
    max_completion_length: int = setting("of generated answers", 64)
    chat_template_fallback: str | None = setting("whose to take where the tokenizer has none")
    samples: Samples = setting("panels of answers", factory=Samples)


@dataclass(kw_only=True)
class RejectionSamplingRun(AnyRun):
    """The fields of recipes/rejection_sampling.py beside BookSFTConfig and TRL's ModelConfig."""

    dataset: PromptData = setting("where prompts come from", MISSING)
    strategy: Literal[
        "top_per_prompt", "top_k_overall", "random_per_prompt", "random_k_overall"
    ] = setting("which answers are trained", MISSING)
    k: int | None = setting("answers for *_k_overall; null: one per prompt", range="1 or more")
    ties: Literal["random", "first"] = setting("which of equal rewards", "random")
    rounds: int = setting("sample, select and train so often", 1, range="1 or more")
    num_generations: int = setting("answers to each prompt", 8, range="1 or more")
    max_completion_length: int = setting("tokens", 64)
    temperature: float = setting("of the answers, as are the next three", 1.0)
    top_p: float = setting("share of the probability to sample from", 1.0)
    top_k: int = setting("sample from this many likeliest tokens; 0: all", 0)
    min_p: float | None = setting("least share of the likeliest one's")
    chat_template_kwargs: dict[str, Any] = setting("as in enable_thinking", factory=dict)
    reward_funcs: list[str] = setting("names, dotted paths", factory=list)
    reward_model: str | None = setting("folder or hub name: one more reward")
    reward_aggregate: str | None = setting("of its tokens: mean, last, min or product")
    reward_model_strips_think: bool = setting("it reads answers without <think>...</think>", False)
    llm_judge: dict[str, Any] | None = setting("who grades: of llm_judge", block=LLM_JUDGE)
    reward_timeout: float = setting("seconds for one call; 0: no limit", 300.0, range="0 or more")
    correctness: str | None = setting("reward that tells right answers, to report")
    answers: str | None = setting("folder to keep them in; null: output_dir")
    reuse_answers: bool = setting("those of an earlier version, too", False)
    samples: Samples = setting("panels of answers", factory=Samples)
