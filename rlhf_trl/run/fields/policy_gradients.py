"""The fields of recipes that answer prompts and learn from rewards."""

from dataclasses import dataclass, field

from rlhf_trl.data.blocks import PromptData, Samples
from rlhf_trl.errors import within
from rlhf_trl.run.fields.common import Run, algorithm_of


@dataclass(kw_only=True)
class PolicyGradientRun(Run):
    """The fields of recipes that answer prompts and learn from rewards."""

    dataset: PromptData  # where prompts come from
    # names, dotted paths
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match", "format"])
    reward_model: str | None = None  # folder or hub name: one more reward
    reward_aggregate: str | None = None  # of its tokens: mean, last, min or product
    reward_model_strips_think: bool = False  # it reads answers without <think>...</think>
    reward_timeout: float = within("0 or more", 300.0)  # seconds for one call; 0: no limit
    samples: Samples = field(default_factory=Samples)  # panels of answers


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
