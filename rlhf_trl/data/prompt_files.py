"""Prompts of one's own to learn from by rewards: a file or hub set whose columns rewards read."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_trl.data.arrow import table
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.columns import (
    ROW,
    Counted,
    Names,
    check_cells,
    check_mapped,
    mapping_hint,
    unnumbered,
    with_template_columns,
    without_none,
)
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.files import read_sides
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

# Names of columns that TRL or the trainers here use for something else: what they hand to reward
# functions beside the columns, or read themselves.
RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
    "image",  # makes TRL's trainer a multimodal one, as does the next
    "images",
)


def read_prompt_files(config: FileData, answers: Sequence[str]) -> Examples:
    """Read prompts, with all other columns; those of `answers` keep the text of the file."""
    data = read_sides(config, None, checked_prompts, "prompts", answers=answers)
    _note_empty_answers(data, answers)
    return data


def _note_empty_answers(data: Examples, answers: Sequence[str]) -> None:
    """Note how many right answers are null, on each side."""
    for side, rows in (("train", data.train), ("held-out", data.held_out)):
        for name in answers if rows is not None else ():
            if name in rows.column_names and (count := _nulls(rows, name)):
                data.notes.append(
                    f"{name} is empty in {count} of {len(rows)} {side} rows: rewards that "
                    "compare with it do not apply there, and leave these rows out of averages"
                )


def _nulls(dataset: "Dataset", name: str) -> int:
    return table(dataset.select_columns([name]))[name].null_count


def checked_prompts(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return all columns, with `prompt` checked, and {}: no row is left out.

    Args:
        dataset: the rows.
        where: the path or name of the data set, for errors.
        columns: {new name of a column: the data set's name}, where the two differ.
    """
    columns_there = [name for name in dataset.column_names if name != ROW]
    check_mapped(columns_there, columns, where)
    if len(set(columns.values())) < len(columns):
        raise InputError("dataset.columns maps two names to one column; read it under one name.")
    # columns whose name another column is to get
    replaced = [name for name in columns if name in columns_there and name not in columns.values()]
    dataset = dataset.remove_columns(replaced)
    dataset = dataset.rename_columns({theirs: ours for ours, theirs in columns.items()})
    if "prompt" not in dataset.column_names:
        raise InputError(
            f"dataset: {where} has no column prompt, but {', '.join(columns_there)}; "
            f"{mapping_hint(['prompt'], columns_there, columns, dataset)}."
        )
    for name in dataset.column_names:
        if name in RESERVED:
            raise InputError(
                f"dataset: {where} has a column {name}, which is something else to the trainer; "
                f"read it as another with dataset.columns, as in {{my_{name}: {name}}}."
            )
    dataset = without_none(with_template_columns(dataset, where), ["prompt"], where)
    check_cells(dataset, ["prompt"], where)
    return unnumbered(dataset), {}  # without ROW, the row numbers for errors
