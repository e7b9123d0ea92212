"""Preference data: pairs made of reasoning-gym tasks, and pairs or labeled answers of files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf_trl.data.answers import completion_text
from rlhf_trl.data.columns import (
    ROW,
    TEMPLATE,
    UNSPLIT,
    Counted,
    Names,
    check_cells,
    differing,
    renamed,
    unnumbered,
)
from rlhf_trl.data.files import Examples, FileData, read_sides
from rlhf_trl.data.gym import GymData, GymTasks, Row
from rlhf_trl.data.made import examples, groups, mixed_pairs, offline_pairs, on_policy_pairs
from rlhf_trl.errors import InputError, within

if TYPE_CHECKING:
    from datasets import Dataset

PAIRED = ("prompt", "chosen", "rejected")
UNPAIRED = ("prompt", "completion", "label")
Sample = Callable[[list[Row], int, str], list[Row]]


@dataclass
class OfflinePairs(GymData):
    """Pairs of the right answer and one of the demonstrator's errors."""

    pairs: Literal["offline"] = "offline"  # right answers beside errors, or sampled ones


@dataclass
class SampledPairs(GymData):
    """Pairs of right and wrong answers of a model; `mixed`: and of all offline pairs, shuffled."""

    pairs: Literal["on_policy", "mixed"] = "on_policy"
    samples_per_prompt: int = within("2 or more", 8)  # answers to choose from
    sampled_from: str | None = None  # null: the model that is trained


PreferenceData = OfflinePairs | SampledPairs | FileData  # the `dataset:` block of preference data


def load_preferences(
    config: PreferenceData,
    max_samples: int | None = None,
    unpaired: bool = False,
    sample: Sample | None = None,
    margin: bool = False,
) -> Examples:
    """Make or read the pairs that a `dataset:` block describes, of the first `max_samples` rows.

    `unpaired` says whether examples with `UNPAIRED` columns are accepted beside pairs, and `margin`
    whether that column is read. `sample` returns answers, as rows with a `completion`, those of one
    question in a row; it takes rows of `GymTasks`, the number of answers to each, and their side,
    "train" or "held-out". Answers beyond that number are ignored.
    """
    if isinstance(config, FileData):
        shapes, how = ("pairs", "unpaired"), {"unpaired": unpaired, "margin": margin}
        return read_sides(config, max_samples, checked_pairs, *shapes[: 1 + unpaired], **how)
    tasks = GymTasks(config)
    asked = tasks.train[:max_samples]
    if config.pairs == "offline":
        train = offline_pairs(asked, config.seed)
        return examples(train, offline_pairs(tasks.held_out, config.eval_seed), tasks)
    count = config.samples_per_prompt

    def pairs(rows: list[Row], side: str) -> list[Row]:
        each = groups(sample(rows, count, side), len(rows))
        texts = [[completion_text(row["completion"]) for row in group[:count]] for group in each]
        return on_policy_pairs(rows, texts, config.seed)

    rows = pairs(asked, "train")
    if not rows:
        raise InputError(
            "dataset.pairs: the model gave no prompt both a right and a wrong answer, so there is "
            "no on-policy pair; raise dataset.size or samples_per_prompt, or use offline pairs."
        )
    dropped = {f"right and wrong not both among {count} samples": len(asked) - len(rows)}
    held_out = pairs(tasks.held_out, "held-out")
    if config.pairs == "mixed":
        rows = mixed_pairs(offline_pairs(asked, config.seed), rows, config.seed)
        offline = offline_pairs(tasks.held_out, config.eval_seed)
        held_out = mixed_pairs(offline, held_out, config.eval_seed)
    return examples(rows, held_out, tasks, dropped)


def checked_pairs(
    dataset: "Dataset", where: str, columns: Names, unpaired: bool = False, margin: bool = False
) -> Counted:
    """Return pairs, or `unpaired` examples where accepted, and how many were left out.

    They have the columns of chat templates (`TEMPLATE`) where the data set has them.
    """
    from datasets import Value

    shapes, count = (PAIRED, UNPAIRED) if unpaired else (PAIRED,), len(dataset)
    optional = ("margin", *TEMPLATE) if margin else TEMPLATE
    dataset = renamed(dataset, where, columns, shapes, optional)
    dropped = {UNSPLIT: count - len(dataset)}
    checked = [name for name in dataset.column_names if name not in (*TEMPLATE, ROW)]
    check_cells(dataset, checked, where)
    dataset = unnumbered(dataset)
    if "label" in dataset.column_names:
        if len(labels := dataset.unique("label")) == 1:
            raise InputError(
                f"dataset: label is {str(labels.pop()).lower()} in all of {where}; KTO needs both."
            )
        return dataset, dropped
    if "margin" in dataset.column_names:
        dataset = dataset.cast_column("margin", Value("float64"))
    found = differing(dataset, "chosen", "rejected")
    if not len(found):
        raise InputError(
            f"dataset: chosen and rejected are the same in all {len(dataset)} rows of {where}."
        )
    dropped["chosen identical to rejected"] = len(dataset) - len(found)
    if "margin" in found.column_names:
        apart = [n for n, margin in enumerate(found["margin"]) if margin]
        if not apart:
            raise InputError(
                f"dataset: margin is 0 in all {len(found)} rows of {where}: nothing is preferred."
            )
        if ties := len(found) - len(apart):
            found, dropped = found.select(apart), dropped | {"a tie: margin is 0": ties}
    return found, dropped
