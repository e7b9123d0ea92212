"""What the examples of a run are called, in what it prints and reports."""

from typing import Any

# What the examples of preferences and judgments are called, by a column that only they have.
KINDS = {
    "chosen": "pairs",
    "ranked": "ranked lists",
    "completions": "traces",
    "completion": "answers",
}

# The column of the examples of algorithms that learn neither from pairs nor as KTO and SFT do.
COLUMNS = {"kwise": "ranked", "prm": "completions", "orm": "completion"}


def kind_of(args: Any, row: Any) -> str:
    """Return what the examples of a run are called, whose algorithm has this `row` (SFT: None)."""
    known = kind_of_config(args)
    return known or KINDS[COLUMNS.get(row.algorithm, "chosen")]


def kind_of_config(args: Any) -> str | None:
    """Return what the examples are called where TRL's config decides it; None: its columns do."""
    from trl import GRPOConfig, KTOConfig, SFTConfig

    if isinstance(args, GRPOConfig):
        return "completions"
    if isinstance(args, SFTConfig):
        return "packed rows" if args.packing else "answers"
    if isinstance(args, KTOConfig):  # makes two answers of a pair
        return "answers"
    return None
