"""The fields that recipes have beside those of TRL's config and its ModelConfig."""

from dataclasses import dataclass, field
from typing import Any

from rlhf_trl.algorithms import of_recipe

# the blocks of single recipes, which read them here
from rlhf_trl.data.demonstrations import DemonstrationData as DemonstrationData
from rlhf_trl.data.files import Samples as Samples
from rlhf_trl.data.judgments import OutcomeData as OutcomeData
from rlhf_trl.data.judgments import ProcessData as ProcessData
from rlhf_trl.data.judgments import RewardData as RewardData
from rlhf_trl.data.pairs import PreferenceData
from rlhf_trl.data.prompts import PromptData as PromptData
from rlhf_trl.errors import within as within
from rlhf_trl.rollouts.store import Record, Rollouts
from rlhf_trl.run.launch import Expect


def algorithm_of(recipe: str, default: str | None = None) -> Any:
    """Declare the field `algorithm` of a recipe: the rows that it trains, and its own."""
    return field(default=default or recipe, metadata={"choices": of_recipe(recipe)})


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
