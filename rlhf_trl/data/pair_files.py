"""Pairs and labeled answers of files and hub data sets: their columns, checked."""

from typing import TYPE_CHECKING

from rlhf_trl.data.arrow import differing
from rlhf_trl.data.columns import (
    ROW,
    TEMPLATE,
    UNSPLIT,
    Counted,
    Names,
    check_cells,
    renamed,
    unnumbered,
)
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

PAIRED = ("prompt", "chosen", "rejected")
UNPAIRED = ("prompt", "completion", "label")


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
