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
from rlhf_trl.rollouts.store import Record, Rollouts
from rlhf_trl.run.launch import Expect


def algorithm_of(recipe: str, default: str | None = None) -> Any:
    """Declare the field `algorithm` of a recipe: the rows that it trains, and its own."""
    return field(default=default or recipe, metadata={"runs": of_recipe(recipe)})


@dataclass(kw_only=True)
class AnyRun:
    """The fields of every recipe."""

    expect: Expect | None = None
    save_checksums: bool = True  # False: a flipped bit or an edited row is not noticed
    resume_changed: list[str] = field(default_factory=list)  # what may differ in a resumed run
    rollouts: Record = field(default_factory=Rollouts)


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of every recipe with a row."""

    algorithm: str
    formulation: str = "chapter"


@dataclass(kw_only=True)
class PolicyGradientRun(Run):
    """The fields of recipes that answer prompts and learn from rewards."""

    dataset: PromptData
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match", "format"])
    reward_model: str | None = None
    reward_aggregate: str | None = None
    reward_model_strips_think: bool = False  # it reads completions without <think>...</think>
    samples: Samples = field(default_factory=Samples)


@dataclass(kw_only=True)
class ExamplesRun(Run):
    """The fields of recipes that learn from a data set of examples."""

    max_samples: int | None = None  # the first so many rows or questions only


@dataclass(kw_only=True)
class AlignmentRun(ExamplesRun):
    """The fields of recipes that learn from preferences."""

    dataset: PreferenceData
    samples: Samples = field(default_factory=Samples)
