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

    prompt: int  # tokens of the prompt
    answers: Mapping[str, int]  # {column: tokens of the answer}; of a list of answers, the longest
    # What happens to the row: WHOLE: nothing; CUT or DROPPED by a limit; IDENTICAL: a pair of equal
    # answers, dropped as well; TOO_LONG: a prompt that leaves no room for the answer: the run stops
    fate: str = WHOLE


def side_numbers(rows: Sequence[Row], measured: Sequence[Measured], turns: str) -> dict[str, Any]:
    """Return the numbers of one side, training or held out.

    Args:
        rows: the N rows.
        measured: the same N rows in tokens, with what the run does to each.
        turns: which turns of the assistant are trained on: see `prompt_key`.

    Returns:
        `prompts`: how many different prompts.
        `tokens`: the median, 90 % and longest length of the prompts, of each column of answers, and
        of prompt and longest answer together.
        All other keys: how many rows there are, are repeated, are cut, dropped or the like (one key
        for each fate), are desirable, or are pairs whose chosen answer is longer or as long.
    """
    repeated = len(rows) - len({_as_text(row) for row in rows})
    numbers: dict[str, Any] = {
        "rows": len(rows),
        "prompts": len(prompt_keys(rows, turns)),
        "repeated_rows": repeated,
    }
    fates = Counter(row.fate for row in measured)  # such as {"whole": 90, "cut": 10}
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
    """Return the keys of the rows' prompts (see `prompt_key`), each once."""
    return {prompt_key(row["prompt"], turns) for row in rows}


def _as_text(row: Row) -> str:
    """Return a text that is the same for two rows that differ at most in `UNCOUNTED` columns."""
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
