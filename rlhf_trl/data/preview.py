"""Training data in numbers: rows, prompts, lengths in tokens, what a limit does, what repeats."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_trl.data.prompt_keys import prompt_key

WHOLE, CUT, DROPPED, IDENTICAL, TOO_LONG = "whole", "cut", "dropped", "identical", "too_long"
UNCOUNTED = ("id", "kind")  # columns by which two rows differ that are the same to train on

Row = Mapping[str, Any]


class Measured(NamedTuple):
    """A row in tokens, before any limit, and what its run does to it."""

    prompt: int
    answers: Mapping[str, int]  # by column; of a list of answers, the longest
    # WHOLE; CUT or DROPPED by a limit; IDENTICAL: a pair without contrast, dropped as well;
    # TOO_LONG: a prompt that leaves no room for the answer, so that the run stops
    fate: str = WHOLE


def side_numbers(rows: Sequence[Row], measured: Sequence[Measured], turns: str) -> dict[str, Any]:
    """Return the numbers of one side, training or held out.

    All are counts of rows but `prompts`, the different ones, and `tokens`: median, 90 % and longest
    of the prompts, of each column of answers, and of prompt and longest answer together.

    Args:
        rows: N of them.
        measured: the same rows, measured.
        turns: which turns of the assistant are trained on: see `prompt_key`.
    """
    repeated = len(rows) - len({_as_text(row) for row in rows})
    numbers: dict[str, Any] = {
        "rows": len(rows),
        "prompts": len(prompt_keys(rows, turns)),
        "repeated_rows": repeated,
    }
    fates = Counter(row.fate for row in measured)
    numbers |= {fate: count for fate, count in sorted(fates.items()) if fate != WHOLE}
    if "label" in rows[0]:
        numbers["desirable"] = sum(bool(row["label"]) for row in rows)
    columns = measured[0].answers
    if {"chosen", "rejected"} <= columns.keys():
        longer_by = [row.answers["chosen"] - row.answers["rejected"] for row in measured]
        numbers["chosen_longer"] = sum(difference > 0 for difference in longer_by)
        numbers["chosen_as_long"] = sum(difference == 0 for difference in longer_by)
    tokens = {"prompt": _lengths(row.prompt for row in measured)}
    for column in columns:
        tokens[column] = _lengths(row.answers[column] for row in measured)
    if columns:
        tokens["prompt and answer"] = _lengths(
            row.prompt + max(row.answers.values()) for row in measured
        )
    return {**numbers, "tokens": tokens}


def prompt_keys(rows: Iterable[Row], turns: str) -> set[str]:
    """Return what the rows ask: see `prompt_key`."""
    return {prompt_key(row["prompt"], turns) for row in rows}


def _as_text(row: Row) -> str:
    """Return a text that is the same for rows that are trained on as the same."""
    columns = {name: cell for name, cell in row.items() if name not in UNCOUNTED}
    return json.dumps(columns, sort_keys=True, default=str)


def _lengths(lengths: Iterable[int]) -> dict[str, float]:
    """Return the median, the length that 90 % do not exceed, and the longest."""
    values = np.fromiter(lengths, dtype=np.int64)
    return {
        "median": float(np.median(values)),
        "90%": int(np.percentile(values, 90, method="inverted_cdf")),
        "longest": int(values.max()),
    }
