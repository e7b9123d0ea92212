"""Demonstrations for supervised fine-tuning: those of the gym's tasks, and answers of files."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_trl.data import made
from rlhf_trl.data.blocks import DemonstrationData, FileData
from rlhf_trl.data.columns import (
    TEMPLATE,
    Counted,
    Names,
    check_cells,
    code,
    numbered,
    rows_missing,
    select_shape,
    unnumbered,
)
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.files import read_sides
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.data.readers import UNANSWERED, forms
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("prompt", "completion")
NO_PROMPT = "nothing comes before the answer"  # why a row is left out


def load_demonstrations(config: DemonstrationData, demonstrator: str) -> Examples:
    """Make or read the demonstrations that a `dataset:` block describes.

    `demonstrator` says which answers gym tasks get for training, `imperfect` or `right`; their
    held-out answers are right ones.
    """
    if isinstance(config, FileData):
        config = _learning_chosen(config)
        config = replace(config, mix=[_learning_chosen(file) for file in config.mix])
        data = read_sides(config, None, checked_demonstrations, "prompt/completion", "messages")
        if config.turns == "all" and not data.conversational:
            raise InputError(
                f"dataset.turns: all needs messages, not the texts of {config.path}; write last."
            )
        return data
    tasks = GymTasks(config)
    train = made.demonstrations(tasks.train, demonstrator, config.seed)
    return examples(train, made.demonstrations(tasks.held_out, "right"), tasks)


def _learning_chosen(file: Any) -> Any:
    """Return a block with a reader such that the chosen answers of pairs are demonstrations."""
    makes_pairs = file.reader and all("chosen" in form.makes for form in forms(file.reader))
    if not makes_pairs or "completion" in file.columns:
        return file
    return replace(file, columns={**file.columns, "completion": "chosen"})


def checked_demonstrations(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return prompts with their completions, and the rows that were left out, by reason.

    Of `messages`, the last one is the completion, and the ones before it are the prompt. Columns of
    chat templates (`TEMPLATE`) stay.

    Args:
        dataset: the rows.
        where: the path or name of the data set, for errors.
        columns: {our name of a column: the data set's name}.
    """
    columns, has_messages = _answer_column(dataset, where, columns)
    # messages are read as completions: `select_shape` splits the prompt off, and leaves out rows
    # whose last message is not the assistant's
    split = select_shape(dataset, where, columns, (COLUMNS,), TEMPLATE, instead=("messages",))
    names_in_errors = {"completion": "messages" if has_messages else "completion"}
    check_cells(split, ["completion"], where, names_in_errors)
    dropped = {UNANSWERED: rows_missing(dataset, split)}
    # before prompts are checked: a missing prompt leaves its row out, and is no error
    split = numbered(split)
    with_prompt = split.filter(
        _have_prompt,
        batched=True,
        input_columns=list(COLUMNS),
        fn_kwargs={"code": code()},
        desc="Leaving out rows",
    )
    if not len(with_prompt):
        raise InputError(f"dataset: in all {len(dataset)} rows of {where} {NO_PROMPT}.")
    dropped[NO_PROMPT] = rows_missing(split, with_prompt)
    if not dropped[NO_PROMPT]:
        with_prompt = split  # the same rows, without the list of indices that makes `filter`'s slow
    check_cells(with_prompt, ["prompt"], where)
    return unnumbered(with_prompt), dropped


def _answer_column(dataset: "Dataset", where: str, columns: Names) -> tuple[Names, bool]:
    """Return `columns` with messages mapped to `completion`, and whether messages are read.

    The arguments are those of `checked_demonstrations`.
    """
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


def _have_prompt(prompts: list[Any], completions: list[Any], code: str) -> list[bool]:
    """Tell which rows have a prompt; rows of texts count, as their empty prompts are errors."""
    return [p is not None or isinstance(c, str) for p, c in zip(prompts, completions, strict=True)]
