"""The `dataset:` blocks of reward models, which learn from judged answers."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlhf_trl.data.blocks import FileData, GymData, OfflinePairs, SampledPairs
from rlhf_trl.errors import setting


@dataclass
class _Ranks:
    """Evaluation ranks `candidates` sampled answers of each held-out question (0: none)."""

    candidates: int = setting(
        "sampled answers to rank in evaluation", 8, range="0 (none), or 2 or more"
    )
    sampled_from: str | None = setting("null: the model that is trained")


@dataclass
class OfflineRewardPairs(_Ranks, OfflinePairs):
    """`OfflinePairs` for a Bradley-Terry model."""

    ONLY_WITH: ClassVar = {"algorithm": ("reward",)}


@dataclass
class SampledRewardPairs(_Ranks, SampledPairs):
    """`SampledPairs` for a Bradley-Terry model."""

    ONLY_WITH: ClassVar = {"algorithm": ("reward",)}


@dataclass
class RankedLists(_Ranks, GymData):
    """Lists for a K-wise model: `list_length` demonstrations of one question in `ORDER`."""

    ONLY_WITH: ClassVar = {"algorithm": ("kwise",)}

    list_length: int = setting("answers in a ranked list", 4, range="2 or more")


@dataclass
class RewardPairsFile(FileData):
    """A file or hub data set of pairs, with a column `margin` where it has one."""

    ONLY_WITH: ClassVar = {"algorithm": ("reward",)}


@dataclass
class RankedFile(FileData):
    """A file or hub data set of ranked lists; `list_length` is that of lists made from scores."""

    ONLY_WITH: ClassVar = {"algorithm": ("kwise",)}

    list_length: int = setting("answers in a ranked list", 4, range="2 or more")


RewardData = OfflineRewardPairs | SampledRewardPairs | RankedLists | RewardPairsFile | RankedFile


@dataclass
class SampledAnswers(_Ranks, GymData):
    """`samples_per_prompt` answers of each question, labeled by exact match."""

    samples_per_prompt: int = setting("sampled answers to each question", 8, range="1 or more")


@dataclass
class AnswersFile(FileData):
    """A file or hub data set of labeled answers; evaluation ranks those of one prompt."""

    candidates: int = setting("answers to rank in evaluation", 8, range="0 (none), or 2 or more")


OutcomeData = SampledAnswers | AnswersFile


@dataclass
class _Steps:
    """How steps are put together; all rows of a long trace have its prompt."""

    step_separator: str = setting("follows every step", "\n")
    step_split: str = setting("regular expression that cuts completions", r"\n+")
    max_steps: int | None = setting(
        "of a row; longer traces become several rows", range="1 or more"
    )


@dataclass
class SyntheticTraces(_Steps, _Ranks, GymData):
    """One demonstration of each question, a share of `errors` of them with an error."""

    traces: Literal["synthetic"] = setting("demonstrations, or the model's answers", "synthetic")
    errors: float = setting("share of traces with an error", 0.6, range="a number between 0 and 1")


@dataclass
class SampledTraces(_Steps, _Ranks, GymData):
    """`samples_per_prompt` answers of a model to each question."""

    traces: Literal["sampled"] = setting("the model's answers", "sampled")
    samples_per_prompt: int = setting("sampled answers to each question", 8, range="1 or more")


@dataclass
class TracesFile(_Steps, FileData):
    """A file or hub data set of traces."""


ProcessData = SyntheticTraces | SampledTraces | TracesFile
