"""The fields that recipes share."""

from dataclasses import MISSING, dataclass
from typing import Any

from rlhf_trl.errors import setting
from rlhf_trl.rollouts.blocks import Record, Rollouts
from rlhf_trl.run.launch import Expect
from rlhf_trl.run.stages import STAGES

EXPLAINED = "`rlhf-trl algorithms` explains each"
WHOSE_EQUATION = "chapter, code or trl: whose equation"
LLM_JUDGE = "rlhf_trl.rewards.judge.LLMJudge"


def algorithm_of(stage: str, default: str) -> Any:
    """Declare the field `algorithm` of a stage: one of the rows that it trains, and its own."""
    return setting(EXPLAINED, default, choices=STAGES[stage].algorithms)


@dataclass(kw_only=True)
class AnyRun:
    """The fields of every recipe."""

    expect: Expect | None = setting("refuse any other launch")
    save_checksums: bool = setting("false: a flipped bit or an edited row goes unnoticed", True)
    resume_changed: list[str] = setting("what may differ in a resumed run", factory=list)
    rollouts: Record = setting("off: no completion is kept", factory=Rollouts)
    warmup_from_zero: bool = setting("false: step k of W = int(...) has the rate k / (W + 1)", True)


@dataclass(kw_only=True)
class Run(AnyRun):
    """The fields of every recipe with a row."""

    algorithm: str = setting(EXPLAINED, MISSING)
    formulation: str = setting(WHOSE_EQUATION, "chapter")


@dataclass(kw_only=True)
class ExamplesRun(Run):
    """The fields of recipes that learn from a data set of examples."""

    max_samples: int | None = setting("use at most this many rows or questions", range="1 or more")
