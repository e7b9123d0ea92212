"""The fields that recipes share."""

from dataclasses import dataclass, field
from typing import Any

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
    warmup_from_zero: bool = True  # false: step k of W = int(...) has the rate k / (W + 1)


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of every recipe with a row."""

    algorithm: str  # `rlhf-trl algorithms` explains each
    formulation: str = "chapter"  # chapter, code or trl: whose equation


@dataclass(kw_only=True)
class ExamplesRun(Run):
    """The fields of recipes that learn from a data set of examples."""

    max_samples: int | None = within("1 or more", None)  # use at most this many rows or questions
