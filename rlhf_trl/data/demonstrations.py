"""Demonstrations for supervised fine-tuning: those of the gym's tasks, and answers of files."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_trl.data import made
from rlhf_trl.data.blocks import DemonstrationData, FileData
from rlhf_trl.data.columns import (
    LISTED,
    TEMPLATE,
    Counted,
    Names,
    check_cells,
    code,
    renamed,
    row_numbers,
    unnumbered,
)
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.files import read_sides
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.data.readers import UNANSWERED, forms
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

ANSWERED = ("prompt", "completion")
UNASKED = "nothing comes before the answer"


def load_demonstrations(config: DemonstrationData, demonstrator: str) -> Examples:
    """Make or read the demonstrations that a `dataset:` block describes.

    The `demonstrator` of gym tasks is `imperfect` or `right`; evaluation is on right answers.
    """
    if isinstance(config, FileData):
        if _makes_pairs(config.reader) and "completion" not in config.columns:
            config = replace(config, columns={**config.columns, "completion": "chosen"})
        data = read_sides(config, None, checked_demonstrations, "prompt/completion", "messages")
        if config.turns == "all" and not data.conversational:
            raise InputError(
                f"dataset.turns: all needs messages, not the texts of {config.path}; write last."
            )
        return data
    tasks = GymTasks(config)
    train = made.demonstrations(tasks.train, demonstrator, config.seed)
    return examples(train, made.demonstrations(tasks.held_out, "right"), tasks)


def _makes_pairs(reader: str | None) -> bool:
    """Tell whether a reader makes pairs, of which the chosen answers are demonstrations."""
    return reader is not None and all("chosen" in form.makes for form in forms(reader))


def checked_demonstrations(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return prompts with their completions, and how many were left out.

    The last of the `messages` is the completion, and those before it the prompt. Columns of chat
    templates (`TEMPLATE`) stay.
    """
    columns, has_messages = _answer_column(dataset, where, columns)
    # `renamed` takes the prompt out of messages that are read as completions
    answered = renamed(dataset, where, columns, (ANSWERED,), TEMPLATE, instead=("messages",))
    names_in_errors = {"completion": "messages" if has_messages else "completion"}
    check_cells(answered, ["completion"], where, names_in_errors)
    # before prompts are checked: one that is missing leaves its row out, and is no error
    asked = answered.filter(
        _asked,
        batched=True,
        input_columns=list(ANSWERED),
        fn_kwargs={"code": code()},
        desc="Leaving out rows",
    )
    if not len(asked):
        raise InputError(f"dataset: in all {len(dataset)} rows of {where} {UNASKED}.")
    dropped = {
        _naming_rows(UNANSWERED, dataset, answered): len(dataset) - len(answered),
        UNASKED: len(answered) - len(asked),
    }
    if not dropped[UNASKED]:
        asked = answered  # the same rows, without the indices of `filter`, which make all slow
    check_cells(asked, ["prompt"], where)
    return unnumbered(asked), dropped


def _answer_column(dataset: "Dataset", where: str, columns: Names) -> tuple[Names, bool]:
    """Return the mapping `columns` with messages as completions; tell whether messages are read."""
    columns = dict(columns)
    messages = columns.pop("messages", None)  # the data set's name of that column
    has_completion = "completion" in (*dataset.column_names, *columns)
    if messages is None and "messages" in dataset.column_names and not has_completion:
        messages = "messages"
    if messages is not None:
        columns["completion"] = messages
    elif "text" in dataset.column_names and not has_completion:
        raise InputError(
            f"dataset: {where} has texts alone, which do not tell the prompt from the answer to "
            "learn; give prompt and completion, or messages."
        )
    return columns, messages is not None


def _naming_rows(reason: str, whole: "Dataset", kept: "Dataset") -> str:
    """Return why rows are left out with the first of their numbers, from 1."""
    numbers = sorted({*row_numbers(whole)} - {*row_numbers(kept)})
    if not numbers:
        return reason
    rows = ", ".join(f"row {number + 1}" for number in numbers[:LISTED])
    more = f" and {len(numbers) - LISTED} more" if len(numbers) > LISTED else ""
    return f"{reason}: {rows}{more}"


def _asked(prompts: list[Any], completions: list[Any], code: str) -> list[bool]:
    """Tell which rows have a prompt; of texts all are kept, as their empty prompts are errors."""
    return [p is not None or isinstance(c, str) for p, c in zip(prompts, completions, strict=True)]
