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
    numbered,
    rows_missing,
    select_shape,
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
    """Return pairs, or labeled examples, and the rows that were left out, by reason.

    Three kinds of rows are left out: conversations whose prompt cannot be split off (`UNSPLIT`),
    pairs of two equal answers, and ties, which are pairs with a margin of 0. The examples have the
    columns of chat templates (`TEMPLATE`) where the data set has them.

    Args:
        dataset: the rows.
        where: the path or name of the data set, for errors.
        columns: {our name of a column: the data set's name}.
        unpaired: whether labeled examples, of the columns `UNPAIRED`, are accepted as well.
        margin: whether the column `margin` of pairs is read.
    """
    shapes = (PAIRED, UNPAIRED) if unpaired else (PAIRED,)
    optional = ("margin", *TEMPLATE) if margin else TEMPLATE
    split = select_shape(dataset, where, columns, shapes, optional)  # without UNSPLIT rows
    dropped = {UNSPLIT: rows_missing(dataset, split)}
    checked = [name for name in split.column_names if name not in (*TEMPLATE, ROW)]
    check_cells(split, checked, where)
    if "label" in split.column_names:  # labeled examples
        labels = split.unique("label")
        if len(labels) == 1:
            raise InputError(
                f"dataset: label is {str(labels[0]).lower()} in all of {where}; KTO needs both."
            )
        return unnumbered(split), dropped
    split = numbered(split)
    pairs = differing(split, "chosen", "rejected")
    if not len(pairs):
        raise InputError(
            f"dataset: chosen and rejected are the same in all {len(split)} rows of {where}."
        )
    dropped["chosen identical to rejected"] = rows_missing(split, pairs)
    if "margin" in pairs.column_names:
        preferred = _without_ties(pairs, where)
        if len(preferred) < len(pairs):
            dropped["a tie: margin is 0"] = rows_missing(pairs, preferred)
        pairs = preferred
    return unnumbered(pairs), dropped


def _without_ties(pairs: "Dataset", where: str) -> "Dataset":
    """Return the pairs whose margin is not 0."""
    from datasets import Value

    pairs = pairs.cast_column("margin", Value("float64"))
    preferred = [place for place, margin in enumerate(pairs["margin"]) if margin]
    if not preferred:
        raise InputError(
            f"dataset: margin is 0 in all {len(pairs)} rows of {where}: nothing is preferred."
        )
    return pairs if len(preferred) == len(pairs) else pairs.select(preferred)
