"""Columns of a data set of one's own: names, the prompt in them, and what a cell must hold."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_trl.data.gym import Row
from rlhf_trl.data.readers import PARTED, SIDES, UNANSWERED, WrongRow, split_prompt
from rlhf_trl.errors import InputError, nearest

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Shape = Sequence[str]  # columns that make an example
Names = Mapping[str, str]  # the data set's columns, by this package's names
Counted = tuple["Dataset", dict[str, int]]  # examples, and how many rows make none, by reason
UNSPLIT = f"{PARTED}, or {UNANSWERED}"
WRITTEN_CHAT = r"^\s*\[\s*\{\s*[\"'](role|content)[\"']"  # messages in a cell of a CSV file


def code(*rooms: str) -> str:
    """Return a hash of the code here, since `datasets` caches by the names of functions.

    Or of the code in other `rooms`, folders of the package.
    """
    from datasets.fingerprint import Hasher

    package = Path(__file__).parents[1]
    files = [path for room in rooms or ("data",) for path in sorted((package / room).glob("*.py"))]
    return Hasher.hash([path.read_bytes() for path in files])


def table(dataset: "Dataset") -> "pa.Table":
    """Return the Arrow table of a data set, which is a view where its rows are neighbors."""
    return dataset.with_format("arrow")[:]


def cells(dataset: "Dataset", name: str) -> Iterator[Any]:
    """Iterate over one column, without holding all of it."""
    for batch in dataset.select_columns([name]).iter(1000):
        yield from batch[name]


@contextmanager
def at(number: int, where: str) -> Iterator[None]:
    """Say where a `WrongRow` is."""
    try:
        yield
    except WrongRow as error:
        raise InputError(f"dataset: row {number} of {where}: {error}.") from error


def converted(
    dataset: "Dataset",
    convert: Callable[..., list[Row]],
    where: str,
    features: dict[str, Any] | None = None,
    **options: Any,
) -> "Dataset":
    """Return the rows that `convert` makes of each row, or say which row is a `WrongRow`."""
    import pyarrow as pa
    from datasets import Features

    names = list(features) if features else None
    given = {"convert": convert, "where": where, "names": names, "code": code(), **options}
    how = {"with_indices": True, "batched": True, "remove_columns": dataset.column_names}
    how["features"] = features and Features(features)
    try:
        return dataset.map(_convert, **how, fn_kwargs=given)
    except pa.ArrowException as error:
        raise InputError(
            f"dataset: {where}: a column holds values of different kinds, such as texts and "
            f"messages ({' '.join(str(error).split())}); write the same in all."
        ) from error


def _convert(
    batch: dict[str, list[Any]],
    numbers: list[int],
    convert: Callable[..., list[Row]],
    where: str,
    names: list[str] | None,
    code: str,
    **options: Any,
) -> dict[str, list[Any]]:
    found: list[Row] = []
    for n, *row in zip(numbers, *batch.values(), strict=True):
        with at(n, where):
            found += convert(dict(zip(batch, row, strict=True)), **options)
    return {name: [row.get(name) for row in found] for name in names or (found[:1] or [{}])[0]}


def check_mapped(there: Sequence[str], columns: Names, where: str) -> None:
    """Refuse a column to map that is not there."""
    for theirs in columns.values():
        if theirs not in there:
            raise InputError(
                f"dataset.columns: {where} has no {theirs!r}{nearest(theirs, there)}; it has "
                f"{', '.join(there)}."
            )


def renamed(
    dataset: "Dataset", where: str, columns: Names, shapes: Sequence[Shape], optional: Shape = ()
) -> "Dataset":
    """Return the columns of one shape, and no others, under this package's names.

    The shape is the first of `shapes` whose second column is there, or else the last; `optional`
    columns may be missing. Messages lose keys that are None. Conversations lose their prompt, which
    becomes the column `prompt` where there is none; rows with `UNSPLIT` ones are left out.
    """
    from datasets import Json

    there = dataset.column_names
    known = dict.fromkeys([*(name for shape in shapes for name in shape), *optional])
    for ours in columns:
        if ours not in known:
            raise InputError(
                f"dataset.columns: {ours!r} is not a column that is read{nearest(ours, known)}; "
                f"write one of {', '.join(known)}."
            )
    check_mapped(there, columns, where)
    names = {name: columns.get(name, name) for name in known}
    shape = next((s for s in shapes if names[s[1]] in there), shapes[-1])
    found = [name for name in (*shape, *optional) if names[name] in there]
    first = {names[name]: name for name in reversed(found)}
    dataset = dataset.select_columns(list(first)).rename_columns(first)
    for name in found:
        if (one := first[names[name]]) != name:  # a column may be read as two
            dataset = dataset.add_column(name, dataset[one][:], feature=dataset.features[one])
    if isinstance(dataset.features.get("prompt"), Json):  # different kinds of values
        check_alike(prompts := dataset.select_columns(["prompt"]), prompts[0], where)
    dataset = _split_prompts(without_none(dataset, dataset.column_names, where), where)
    if lacking := [name for name in shape if name not in dataset.column_names]:
        others = shapes[list(shapes).index(shape) + 1 :]
        also = "".join(f" (or {', '.join(other)})" for other in others)
        free = [name for name in there if name not in names.values()]
        pairs = ", ".join(f"{ours}: {theirs}" for ours, theirs in zip(lacking, free, strict=False))
        remedy = f"map them with dataset.columns, as in {{{pairs}}}" if free else "add them"
        raise InputError(
            f"dataset: row 0 of {where} lacks {', '.join(lacking)}; it needs "
            f"{', '.join(shape)}{also} and has {', '.join(there)}; {remedy}."
        )
    return dataset


def without_none(dataset: "Dataset", names: Sequence[str], where: str) -> "Dataset":
    """Remove the keys that only other messages have, as `load_dataset` does for some files."""
    from datasets import Features, Json, List
    from trl.trainer.utils import remove_none_values

    ragged = {}
    for name in names:
        feature = dataset.features[name]
        if "timestamp" in str(feature):
            raise InputError(
                f"dataset: {where}: all of {name} looks like dates, which are not read as texts; "
                "write something else beside them, or save the file as Parquet."
            )
        inner = getattr(feature, "feature", None)
        if isinstance(inner, dict) and {"role", "content"} < inner.keys():
            ragged[name] = List(Json())
    if not ragged:
        return dataset
    features = Features({**dataset.features, **ragged})
    return dataset.map(remove_none_values, batched=True, features=features)


def _split_prompts(dataset: "Dataset", where: str) -> "Dataset":
    """Take the prompt out of conversations, where any has to be split."""
    from datasets import List, Value

    features, there = dict(dataset.features), dataset.column_names
    sides = [name for name in SIDES if name in there]
    chats = [name for name in there if not isinstance(features[name], Value | dict)]
    if not sides or not ("prompt" in chats or set(sides) <= set(chats)):
        return dataset
    if {"prompt", *sides} <= set(chats) and all(
        _is_answer(cell) for name in sides for cell in cells(dataset, name)
    ):
        return dataset
    for name in sides:
        if getattr(features[name], "dtype", "").endswith("string"):
            features[name] = List({"role": Value("string"), "content": Value("string")})
    if "prompt" not in chats:
        features["prompt"] = features[sides[0]]
    split = converted(dataset, _split_row, where, features)
    if not len(split):
        raise InputError(
            f"dataset: in all {len(dataset)} rows of {where} {UNSPLIT}: nothing to train on."
        )
    return split


def _is_answer(cell: Any) -> bool:
    """Whether a cell is no more than one message of the assistant."""
    if not isinstance(cell, list):
        return cell is None
    return len(cell) == 1 and isinstance(cell[0], dict) and cell[0].get("role") == "assistant"


def _split_row(row: Row) -> list[Row]:
    split = split_prompt(row)
    if isinstance(split, str):
        return []
    texts = {name: split.get(name) for name in ("prompt", *SIDES) if name in row}
    if any(isinstance(text, str) for text in texts.values()):  # the column's others are messages
        for name in (name for name, text in texts.items() if not text):
            check_cell(name, None)
    return [split]


def with_system_prompt(dataset: "Dataset", text: str | None) -> "Dataset":
    """Put a system message before prompts without one; plain texts become messages."""
    from datasets import Features, Json, List

    if text is None:
        return dataset
    if "completions" in dataset.column_names:
        raise InputError("dataset.system_prompt is not read with traces, plain texts; remove it.")
    names = [name for name in ("prompt", *SIDES, "ranked") if name in dataset.column_names]
    chats = {n: List(List(Json())) if n == "ranked" else List(Json()) for n in names}
    features = Features({**dataset.features, **chats})
    given = {"text": text, "names": names, "code": code()}
    return dataset.map(_system_row, features=features, fn_kwargs=given)


def _system_row(row: Row, text: str, names: list[str], code: str) -> Row:
    def messages(value: Any, role: str) -> list[Any]:
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    answers = {name: messages(row[name], "assistant") for name in names if name in SIDES}
    if "ranked" in names:
        answers["ranked"] = [messages(one, "assistant") for one in row["ranked"]]
    prompt = messages(row["prompt"], "user")
    if prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": text}, *prompt]
    return {"prompt": prompt, **answers}


def differing(dataset: "Dataset", *sides: str) -> "Dataset":
    """Leave out the examples whose two sides are the same."""
    given = {"input_columns": list(sides), "batched": True}
    found = dataset.filter(lambda *two: [a != b for a, b in zip(*two, strict=True)], **given)
    return found if len(found) < len(dataset) else dataset


def check_alike(dataset: "Dataset", model: Row, where: str) -> None:
    """Refuse texts among messages, and examples with other columns than `model` has."""
    from datasets import Json

    mixed = any(isinstance(feature, Json) for feature in dataset.features.values())
    for n, row in enumerate(dataset if mixed else dataset.select([0])):
        for name in dict.fromkeys([*model, *row]):
            one, other = (_form(name, r[name]) if name in r else "missing" for r in (row, model))
            if one != other:
                raise InputError(
                    f"dataset: {where}: {name} is {one} in row {n} of those that are left and "
                    f"{other} in the first training row; write the same in all."
                )


def _form(name: str, value: Any) -> str:
    """Say what a cell is; just "a value" in columns that only rewards read."""
    if name in ("prompt", *SIDES, "ranked", "completions"):
        if isinstance(value, list):
            first = value[0]
            return "messages" if isinstance(first, dict) else f"a list of {_form(name, first)}"
        if isinstance(value, str):
            return "a text"
    return "a value"


def check_cells(dataset: "Dataset", names: Sequence[str], where: str) -> None:
    """Refuse what `check_cell` refuses anywhere in these columns."""
    for name in names:
        for n, cell in enumerate(cells(dataset, name)):
            with at(n, where):
                check_cell(name, cell)


def check_cell(name: str, value: Any) -> None:
    """Refuse a label that is not boolean, a margin that is not 0 or more, a cell without a text."""
    wrong = None
    if name == "label":
        if not isinstance(value, bool):
            told = "write true for desirable and false for undesirable"
            wrong = f"label is {value!r}, which is not boolean; {told}"
    elif name == "margin":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            told = "which is not a number; write how much better chosen is, or remove the column"
            wrong = f"margin is {value!r}, {told}"
        elif value < 0:
            told = "which makes rejected the better one; swap the two, or remove the row"
            wrong = f"margin is {value!r}, {told}"
    elif isinstance(value, list) and value:
        if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
            wrong = f"{name} is a list, but not of messages with role and content"
        elif not all(isinstance(m["content"], str) for m in value):
            wrong = f"a message of {name} has no text"
        elif not value[-1]["content"].strip():
            wrong = f"{name} is empty; fill it or remove the row"
    elif value in (None, []) or (isinstance(value, str) and not value.strip()):
        wrong = f"{name} is empty; fill it or remove the row"
    elif not isinstance(value, str):
        wrong = f"{name} is {value!r}; write a text or a list of messages"
    elif re.match(WRITTEN_CHAT, value):
        told = "save them as messages, in JSON lines or Parquet"
        wrong = f"{name} is a text that spells out messages, as a CSV file has them; {told}"
    if wrong:
        raise WrongRow(wrong)
