"""The fields of recipes that answer prompts and learn from rewards."""

from dataclasses import MISSING, dataclass
from typing import Any

from rlhf_trl.data.blocks import PromptData, Samples
from rlhf_trl.errors import setting
from rlhf_trl.models import Quantization
from rlhf_trl.run.fields.common import LLM_JUDGE, Run, algorithm_of


@dataclass(kw_only=True)
class PolicyGradientRun(Run):
    """The fields of recipes that answer prompts and learn from rewards."""

    dataset: PromptData = setting("where prompts come from", MISSING)
    reward_funcs: list[str] = setting(
        "names, dotted paths", factory=lambda: ["exact_match", "format"]
    )
    reward_model: str | None = setting("folder or hub name: one more reward")
    reward_aggregate: str | None = setting("of its tokens: mean, last, min or product")
    reward_model_strips_think: bool = setting("it reads answers without <think>...</think>", False)
    llm_judge: dict[str, Any] | None = setting("who grades: of llm_judge", block=LLM_JUDGE)
    reward_timeout: float = setting("seconds for one call; 0: no limit", 300.0, range="0 or more")
    reward_quantization: Quantization | None = setting("the reward model in 8 or 4 bits")
    reference_quantization: Quantization | None = setting("the reference in 8 or 4 bits")
    samples: Samples = setting("panels of answers", factory=Samples)


@dataclass(kw_only=True)
class GRPORun(PolicyGradientRun):
    """The fields of recipes/grpo.py beside BookGRPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("grpo", default="grpo")


@dataclass(kw_only=True)
class PPORun(PolicyGradientRun):
    """The fields of recipes/ppo.py beside BookPPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("ppo", default="ppo")


@dataclass(kw_only=True)
class DistillationRun(PolicyGradientRun):
    """The fields of recipes/distill.py beside BookDistillationConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("distill", default="opd")
