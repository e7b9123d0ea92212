"""The examples of a run, as its trainer and its evaluation take them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_trl.data.gym import GymTasks, Row

if TYPE_CHECKING:
    from datasets import Dataset

SIDES = ("chosen", "rejected", "completion")  # columns that hold answers
LISTED = 10  # rows that a message lists
OF_TEXTS = "prompts are texts: no chat template is applied (messages get it)"


@dataclass
class Examples:
    """The examples of a run.

    `train` holds pairs (`prompt`, `chosen`, `rejected`, perhaps `margin` and `kind`, "offline" or
    "on_policy"), unpaired examples (`prompt`, `completion`, `label`), ranked lists (`prompt`,
    `ranked`), outcomes (unpaired ones with `finished`), traces (`prompt`, `completions`, `labels`),
    demonstrations (`prompt`, `completion`), or prompts with all columns beside them; `held_out`
    examples like them for evaluation. `dropped` counts the rows left out, by reason;
    `dropped_held_out` counts those of `held_out` where they are counted by themselves. `places`
    says where rows left out of a file stand ("line 3"), by reason. `candidates` are outcomes to
    rank, those of one prompt in a row. `notes` are sentences to print.
    """

    train: "Dataset"
    held_out: "Dataset | None"
    tasks: GymTasks | None
    dropped: dict[str, int]
    candidates: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dropped_held_out: dict[str, int] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    @property
    def conversational(self) -> bool:
        """Whether prompts are lists of messages."""
        return isinstance(self.train[0]["prompt"], list)

    def first_places(self, reason: str) -> str:
        """Return where the rows stand that are left out for a reason: " (line 3, line 7)" or ""."""
        places = list(dict.fromkeys(self.places.get(reason, ())))  # several examples may be of one
        more = f" and {len(places) - LISTED} more" if len(places) > LISTED else ""
        return f" ({', '.join(places[:LISTED])}{more})" if places else ""


def may_hold_tools(rows: "Dataset") -> bool:
    """Whether there are tools, or messages with other keys than role and content."""
    return "tools" in rows.column_names or any("Json" in str(f) for f in rows.features.values())


def examples(
    train: list[Row],
    held_out: list[Row],
    tasks: GymTasks,
    dropped: Mapping[str, int] | None = None,
    candidates: list[Row] | None = None,
    dropped_held_out: Mapping[str, int] | None = None,
) -> Examples:
    """Return rows as the examples of a run; no held-out rows are None."""
    from datasets import Dataset

    sides = [Dataset.from_list(rows) if rows else None for rows in (train, held_out)]
    result = Examples(*sides, tasks, dict(dropped or {}), candidates or [])
    result.dropped_held_out = dict(dropped_held_out or {})
    return result
