"""The fields that recipes have beside those of TRL's config and its ModelConfig."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_trl.data.blocks import (
    DemonstrationData,
    OutcomeData,
    PreferenceData,
    ProcessData,
    PromptData,
    RewardData,
    Samples,
)
from rlhf_trl.errors import within
from rlhf_trl.rollouts.store import Record, Rollouts
from rlhf_trl.run.launch import Expect
from rlhf_trl.run.stages import STAGES


def algorithm_of(stage: str, default: str) -> Any:
    """Declare the field `algorithm` of a stage: one of the rows that it trains, and its own."""
    return field(default=default, metadata={"choices": STAGES[stage].algorithms})


@dataclass(kw_only=True)
class AnyRun:
    """The fields of every recipe."""

    expect: Expect | None = None  # refuse any other launch
    save_checksums: bool = True  # false: a flipped bit or an edited row goes unnoticed
    resume_changed: list[str] = field(default_factory=list)  # what may differ in a resumed run
    rollouts: Record = field(default_factory=Rollouts)  # off: no completion is kept


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of every recipe with a row."""

    algorithm: str  # `rlhf-trl algorithms` explains each
    formulation: str = "chapter"  # chapter, code or trl: whose equation


@dataclass(kw_only=True)
class PolicyGradientRun(Run):
    """The fields of recipes that answer prompts and learn from rewards."""

    dataset: PromptData  # where prompts come from
    # names, dotted paths
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match", "format"])
    reward_model: str | None = None  # folder or hub name: one more reward
    reward_aggregate: str | None = None  # of its tokens: mean, last, min or product
    reward_model_strips_think: bool = False  # it reads answers without <think>...</think>
    samples: Samples = field(default_factory=Samples)  # panels of answers


@dataclass(kw_only=True)
class ExamplesRun(Run):
    """The fields of recipes that learn from a data set of examples."""

    max_samples: int | None = within("1 or more", None)  # use at most this many rows or questions


@dataclass(kw_only=True)
class AlignmentRun(ExamplesRun):
    """The fields of recipes that learn from preferences."""

    dataset: PreferenceData  # where pairs come from
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


@dataclass(kw_only=True)
class DPORun(AlignmentRun):
    """The fields of recipes/dpo.py beside BookDPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("dpo", default="dpo")


@dataclass(kw_only=True)
class KTORun(AlignmentRun):
    """The fields of recipes/kto.py beside BookKTOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("kto", default="kto")


@dataclass(kw_only=True)
class ORPORun(AlignmentRun):
    """The fields of recipes/orpo.py beside BookORPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("orpo", default="orpo")


@dataclass(kw_only=True)
class RewardRun(ExamplesRun):
    """The fields of recipes/reward.py beside BookRewardConfig and TRL's ModelConfig."""

    dataset: RewardData  # where pairs or lists come from
    algorithm: str = algorithm_of("reward", default="reward")


@dataclass(kw_only=True)
class OutcomeRun(ExamplesRun):
    """The fields of recipes/orm.py beside BookTokenRewardConfig and TRL's ModelConfig."""

    dataset: OutcomeData  # where answers come from
    algorithm: str = algorithm_of("orm", default="orm")


@dataclass(kw_only=True)
class ProcessRun(ExamplesRun):
    """The fields of recipes/prm.py beside BookTokenRewardConfig and TRL's ModelConfig."""

    dataset: ProcessData  # where traces come from
    algorithm: str = algorithm_of("prm", default="prm")
    formulation: str = "code"


@dataclass(kw_only=True)
class SFTRun(AnyRun):
    """The fields of recipes/sft.py beside BookSFTConfig and TRL's ModelConfig."""

    dataset: DemonstrationData  # where answers come from
    demonstrator: Literal["imperfect", "right", "hinted"] = "imperfect"  # of reasoning-gym tasks
    max_completion_length: int = 64  # of generated answers
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
    correctness: str | None = None  # reward that tells right answers, to report
    answers: str | None = None  # folder to keep them in; null: output_dir
    reuse_answers: bool = False  # those of an earlier version, too
    samples: Samples = field(default_factory=Samples)  # panels of answers
