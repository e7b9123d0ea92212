"""Columns of a data set of one's own: names, the prompt in them, and what a cell must hold."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_trl.data.arrow import cells
from rlhf_trl.data.examples import LISTED
from rlhf_trl.data.gym import Row
from rlhf_trl.data.readers import (
    PARTED,
    READERS,
    SIDES,
    UNANSWERED,
    WrongRow,
    columns_read,
    forms,
    split_prompt,
)
from rlhf_trl.errors import InputError, nearest

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Shape = Sequence[str]  # columns that make an example, such as ("prompt", "chosen", "rejected")
Names = Mapping[str, str]  # {this package's name of a column: the data set's name of that column}
# examples, and the numbers, from 0, of the rows that make none, by reason
Counted = tuple["Dataset", dict[str, list[int]]]
UNSPLIT = f"{PARTED}, or {UNANSWERED}"  # why no prompt can be split off a row
TEMPLATE = ("tools", "chat_template_kwargs")  # columns that TRL's trainers hand to chat templates
VALUES = ("label", "margin", "finished")  # columns of one value that are not texts
# Of OpenAI's messages, and what some chat templates call what a tool says. An unknown role would
# be trained on as a speaker whom no model knows.
OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROLES = (*OPENAI_ROLES, "ipython", "environment", "observation")
ROW = "__row__"  # a column: the number of the row, from 0, that an example is made of
# What a column may be called elsewhere, in small letters. A name with several meanings is not here:
# `input` is the question in one data set and a context beside the instruction in another.
SYNONYMS = {
    "prompt": ("question", "instruction", "query", "problem", "user"),
    "completion": ("answer", "output", "response", "solution", "reply", "assistant"),
    "chosen": ("better", "preferred", "accepted", "winner", "chosen_response"),
    "rejected": ("worse", "dispreferred", "refused", "loser", "rejected_response"),
    "label": ("labels", "is_good", "is_correct", "desirable", "thumbs_up"),
    "completions": ("steps", "responses"),
    "labels": ("ratings",),
    "ranked": ("ranking", "ranked_responses"),
}
WRITTEN_CHAT = r"^\s*\[\s*\{\s*[\"'](role|content)[\"']"  # messages in a cell of a CSV file


def code(*rooms: str) -> str:
    """Return a hash of the code here, since `datasets` caches by the names of functions.

    Or of the code in other `rooms`, folders of the package.
    """
    from datasets.fingerprint import Hasher

    package = Path(__file__).parents[1]
    files = [path for room in rooms or ("data",) for path in sorted((package / room).glob("*.py"))]
    return Hasher.hash([path.read_bytes() for path in files])


class BadRows(InputError):
    """Rows of which nothing can be made: why, by their numbers from 0.

    `places` says where some of them stand ("line 3"); the others are "row 3", counted from 1.
    """

    def __init__(self, where: str, reasons: Mapping[int, str], places: Mapping[int, str] = {}):
        self.reasons = dict(reasons)
        count = len(reasons)
        if count == 1:
            ((number, reason),) = reasons.items()
            place = (
                f"{where}, {places[number]}" if number in places else f"row {number + 1} of {where}"
            )
            remedy = "or write dataset.skip_bad: 1 to leave it out"
            super().__init__(f"dataset: {place}: {reason}, {remedy}.")
            return
        first = f"; the first {LISTED}" if count > LISTED else ""
        remedy = f"fix or remove them, or write dataset.skip_bad: {count} to leave them out"
        super().__init__(
            f"dataset: {count} rows of {where} are bad{first}: {listed(reasons, places, LISTED)}; "
            f"{remedy}."
        )


def listed(
    reasons: Mapping[int, str], places: Mapping[int, str] = {}, most: int | None = None
) -> str:
    """Name rows, at `most` so many, with what is wrong with them; reasons are not repeated."""
    by_reason: dict[str, list[str]] = {}
    for number in sorted(reasons)[:most]:
        by_reason.setdefault(reasons[number], []).append(place_of(number, places))
    return ", ".join(f"{', '.join(rows)} ({reason})" for reason, rows in by_reason.items())


def place_of(number: int, places: Mapping[int, str]) -> str:
    """Say where the row of a number stands: as `places` says, or by counting rows from 1."""
    return places.get(number, f"row {number + 1}")


def row_numbers(dataset: "Dataset") -> Sequence[int]:
    """Return the number, from 0, of the row that each example is made of."""
    return dataset[ROW][:] if ROW in dataset.column_names else range(len(dataset))


def numbered(dataset: "Dataset") -> "Dataset":
    """Return the data set with the numbers of its rows, which stay when rows are left out."""
    if ROW in dataset.column_names:
        return dataset
    return dataset.add_column(ROW, np.arange(len(dataset)))


def rows_missing(before: "Dataset", after: "Dataset") -> list[int]:
    """Return the numbers of the rows that are in `before`, and no longer in `after`."""
    if len(before) == len(after):
        return []
    return sorted({*row_numbers(before)} - {*row_numbers(after)})


def unnumbered(dataset: "Dataset") -> "Dataset":
    """Return the data set without the numbers of its rows."""
    return dataset.remove_columns(ROW) if ROW in dataset.column_names else dataset


def without_rows(dataset: "Dataset", numbers: Sequence[int]) -> "Dataset":
    """Leave out the rows of these numbers; the others keep theirs, in the column `ROW`."""
    arguments = {"left_out": list(numbers), "code": code()}
    options = {"batched": True, "with_indices": True, "desc": "Leaving out rows"}
    # `select` would leave neighbors apart, which makes all that follows slow
    arrow = dataset.with_format("arrow").map(_without, **options, fn_kwargs=arguments)
    return arrow.with_format(None)


def _without(batch: "pa.Table", places: list[int], left_out: list[int], code: str) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.compute as pc

    if ROW not in batch.column_names:
        batch = batch.append_column(ROW, pa.array(places, pa.int64()))
    return batch.filter(pc.invert(pc.is_in(batch[ROW], pa.array(left_out, pa.int64()))))


def converted(
    dataset: "Dataset",
    convert: Callable[..., list[Row]],
    where: str,
    features: dict[str, Any] | None = None,
    numbered: bool = False,
    **options: Any,
) -> "Dataset":
    """Return the new rows that `convert` makes of all rows.

    Args:
        dataset: the rows.
        convert: takes a row and the `options`, and returns a list of rows, or raises `WrongRow`.
        where: the path or name of the data set, for errors.
        features: of the new columns; None: `datasets` infers them.
        numbered: whether the column `ROW` says which row a new one is made of.
        options: further arguments of `convert`.

    Raises:
        BadRows: `convert` refuses some rows; all of them are named.
    """
    import pyarrow as pa
    from datasets import Features, Value

    if features and numbered:
        features = {**features, ROW: Value("int64")}
    names = list(features) if features else None
    # `code` is part of the key under which `datasets` caches the result
    arguments = {"convert": convert, "names": names, "numbered": numbered, "code": code()}
    try:
        return dataset.map(
            _convert,
            with_indices=True,
            batched=True,
            remove_columns=dataset.column_names,
            features=features and Features(features),
            fn_kwargs={**arguments, **options},
            desc="Converting rows",
        )
    except WrongRow:  # raised by the first bad row; a second pass finds all of them
        raise BadRows(where, _wrong_rows(dataset, partial(convert, **options))) from None
    except pa.ArrowException as error:
        raise InputError(
            f"dataset: {where}: a column holds values of different kinds, such as texts and "
            f"messages ({' '.join(str(error).split())}); write the same in all."
        ) from error


def _convert(
    batch: dict[str, list[Any]],
    places: list[int],
    convert: Callable[..., list[Row]],
    names: list[str] | None,
    numbered: bool,
    code: str,
    **options: Any,
) -> dict[str, list[Any]]:
    """Return the examples that `convert` makes of a batch of rows, as columns.

    Args:
        batch: the rows as columns; `ROW` is not handed to `convert`.
        places: of the rows in the data set, from 0: their numbers, unless `ROW` has these.
        convert: as `converted` takes it.
        names: of the new columns; None: those of the first example.
        numbered: whether the examples get the column `ROW`.
        code: not read here; with it, what `datasets` cached of older code is not taken.
        options: further arguments of `convert`.

    Raises:
        WrongRow: `convert` can make nothing of one of the rows.
    """
    numbers = batch.get(ROW, places)
    columns = [name for name in batch if name != ROW]
    examples: list[Row] = []
    for number, *row in zip(numbers, *(batch[name] for name in columns), strict=True):
        made = convert(dict(zip(columns, row, strict=True)), **options)
        examples += [{**example, ROW: number} for example in made] if numbered else made
    if names is None:  # those of the first example; a batch without examples has no columns
        names = list(examples[0]) if examples else []
    return {name: [example.get(name) for example in examples] for name in names}


def _wrong_rows(dataset: "Dataset", convert: Callable[[Row], Any]) -> dict[int, str]:
    """Return what is wrong with each row that `convert` refuses, by the number of the row."""
    reasons: dict[int, str] = {}
    place = 0
    for batch in dataset.iter(1000):
        for cells_of_row in zip(*batch.values(), strict=True):
            row = dict(zip(batch, cells_of_row, strict=True))
            number = row.pop(ROW, place)
            place += 1
            try:
                convert(row)
            except WrongRow as error:
                reasons.setdefault(number, str(error))  # several examples may be of one row
    return reasons


def check_mapped(there: Sequence[str], columns: Names, where: str) -> None:
    """Refuse a column to map that is not there."""
    for theirs in columns.values():
        if theirs not in there:
            raise InputError(
                f"dataset.columns: {where} has no {theirs!r}{nearest(theirs, there)}; it has "
                f"{', '.join(there)}."
            )


def select_shape(
    dataset: "Dataset",
    where: str,
    columns: Names,
    shapes: Sequence[Shape],
    optional: Shape = (),
    instead: Shape = (),
) -> "Dataset":
    """Select the columns of one shape, under our names, and split prompts off conversations.

    The last message of a conversation is the answer; the messages before it become the column
    `prompt`. A row whose prompt cannot be split off, for a reason of `UNSPLIT`, is left out.
    Messages lose keys that are None. The column `ROW` stays.

    Args:
        dataset: the rows.
        where: the path or name of the data set, for errors.
        columns: {our name of a column: the data set's name}, where the two differ.
        shapes: the columns of an example, in our names, such as ("prompt", "chosen", "rejected").
            The second column tells shapes apart, since conversations may lack the first, `prompt`:
            the first shape whose second column the data set has is read, or else the last shape.
        optional: columns that are read where the data set has them.
        instead: columns that the caller makes a shape of, for the error message.

    Raises:
        InputError: a column is missing, or goes unread; BadRows: cells cannot be read.
    """
    from datasets import Json

    original = dataset
    columns_there = [name for name in dataset.column_names if name != ROW]
    theirs = _names_there(columns_there, where, columns, shapes, optional)
    shape = next((shape for shape in shapes if theirs[shape[1]] in columns_there), shapes[-1])
    names = [name for name in (*shape, *optional) if theirs[name] in columns_there]
    dataset = _selected(dataset, names, theirs)
    dataset = with_template_columns(_with_csv_values(dataset, where), where)
    # a column is Json where its cells have different keys or types, perhaps texts and messages
    if isinstance(dataset.features.get("prompt"), Json):
        prompts = dataset.select_columns(["prompt"])
        check_alike(prompts, prompts[0], where)
    of_examples = [name for name in dataset.column_names if name not in (*TEMPLATE, ROW)]
    dataset = _split_prompts(without_none(dataset, of_examples, where), where)
    # checked only now, as `_split_prompts` may have made the column `prompt`
    lacking = [name for name in shape if name not in dataset.column_names]
    if lacking:
        # earlier shapes are no alternative: the data set lacks their second column
        others = list(shapes[list(shapes).index(shape) + 1 :])
        if instead:
            others.append(instead)
        alternatives = "".join(f" (or {', '.join(other)})" for other in others)
        hint = mapping_hint([*lacking, *instead], columns_there, theirs, original)
        raise InputError(
            f"dataset: {where} lacks {', '.join(lacking)}; it needs {', '.join(shape)}"
            f"{alternatives} and has {', '.join(columns_there)}; {hint}."
        )
    return dataset


def _names_there(
    there: Sequence[str], where: str, columns: Names, shapes: Sequence[Shape], optional: Shape
) -> dict[str, str]:
    """Return {our name: the data set's name} for all columns that may be read.

    `there` are the columns of the data set; the other arguments are those of `select_shape`.

    Raises:
        InputError: `columns` maps a column that nobody reads or that is not there, or the data set
            has columns of chat templates that would go unread.
    """
    of_shapes = [name for shape in shapes for name in shape]
    known = dict.fromkeys([*of_shapes, *optional])
    for ours in columns:
        if ours not in known:
            readers = [name for name in READERS if ours in columns_read(name)]
            instead = f", or name a reader of it ({', '.join(readers)})" if readers else ""
            raise InputError(
                f"dataset.columns: {ours!r} is not a column that is read{nearest(ours, known)}; "
                f"write one of {', '.join(known)}{instead}."
            )
    check_mapped(there, columns, where)
    check_unread(set(there) - set(columns.values()) - set(optional), where)
    return {name: columns.get(name, name) for name in known}


def renamed_for_reader(
    dataset: "Dataset", columns: Names, reader: str, where: str
) -> tuple["Dataset", Names]:
    """Give columns of a data set the names by which a reader knows them.

    Return the data set, and what of `columns` renames columns that the reader makes.
    """
    there = [name for name in dataset.column_names if name != ROW]
    read = columns_read(reader)
    made = {column for form in forms(reader) for column in form.makes}
    before = {ours: theirs for ours, theirs in columns.items() if ours in read and theirs in there}
    after = {ours: theirs for ours, theirs in columns.items() if ours not in before}
    for ours, theirs in after.items():
        if theirs not in made:
            raise InputError(
                f"dataset.columns: {ours}: {theirs} renames nothing; the reader {reader} reads "
                f"{', '.join(sorted(read))}, {where} has {', '.join(there)}, and of that the "
                f"reader makes {', '.join(sorted(made))}{nearest(theirs, [*there, *made])}."
            )
    hidden = [ours for ours in before if ours in there and ours not in before.values()]
    dataset = dataset.remove_columns(hidden)
    return dataset.rename_columns({theirs: ours for ours, theirs in before.items()}), after


def _selected(dataset: "Dataset", names: Sequence[str], theirs: Names) -> "Dataset":
    """Return the columns `names`, and `ROW`, of a data set.

    `names` are our names; `theirs` maps each to the data set's name. Two names may map to one
    column, which is then renamed to the first name and copied for the second.
    """
    # {their name: our name}; reversed, so that the first of two names of ours is kept
    ours = {theirs[name]: name for name in reversed(names)}
    numbers = [ROW] if ROW in dataset.column_names else []
    dataset = dataset.select_columns([*ours, *numbers]).rename_columns(ours)
    for name in names:
        source = ours[theirs[name]]
        if source != name:  # the second name
            dataset = dataset.add_column(name, dataset[source][:], feature=dataset.features[source])
    return dataset


def mapping_hint(
    lacking: Sequence[str], there: Sequence[str], taken: Mapping[str, str], dataset: "Dataset"
) -> str:
    """Say how to map columns, and which column may be meant, to judge by its name.

    Where several columns of the data set may mean one of ours, none is suggested.

    Args:
        lacking: columns of ours that the data set lacks.
        there: columns of the data set.
        taken: {our name: the data set's name} of columns that are read already.
        dataset: the rows, for the types of their columns.
    """
    free = [name for name in there if name not in taken.values()]
    if not free:
        return "add them"
    turns = [name for name in free if _holds_messages(dataset.features[name], ("from", "value"))]
    if len(turns) == 1:
        return (
            f"if {turns[0]} is a conversation as ShareGPT has it, write dataset.reader: sharegpt "
            f"and dataset.columns: {{conversations: {turns[0]}}}"
        )
    guesses = {}  # {our name: the data set's name}
    for ours in lacking:
        if ours == "messages":
            candidates = [name for name in free if _holds_messages(dataset.features[name])]
        else:
            candidates = [name for name in free if name.lower() in SYNONYMS.get(ours, ())]
        if len(candidates) == 1:
            guesses[ours] = candidates[0]
    if not guesses:
        return "map them with dataset.columns, as in {OURS: THEIRS}"
    suggestion = ", ".join(f"{ours}: {theirs}" for ours, theirs in guesses.items())
    unread = [name for name in free if name not in guesses.values()]
    about_unread = f" and that {', '.join(unread)} may go unread" if unread else ""
    return (
        f"map them with dataset.columns, perhaps {{{suggestion}}} (a guess by the names: check "
        f"that they mean this{about_unread})"
    )


def _holds_messages(feature: Any, keys: Sequence[str] = ("role", "content")) -> bool:
    """Whether a column holds lists of messages with these keys."""
    message = getattr(feature, "feature", None)
    return isinstance(message, dict) and {*keys} <= message.keys()


MEDIA = ("images", "videos", "audios")


def check_unread(names: Collection[str], where: str) -> None:
    """Refuse columns without which models would see other prompts: of chat templates, and media."""
    if media := [name for name in MEDIA if name in names]:
        raise InputError(
            f"dataset: {where} has a column {media[0]}, and only texts are trained here; remove it "
            "where the texts do without."
        )
    if unread := [name for name in TEMPLATE if name in names]:
        raise InputError(
            f"dataset: {where} has a column {unread[0]}, which is not read here, so that models "
            "would see the prompts without it; remove it, or use a recipe that reads it (sft, dpo, "
            "kto, reward)."
        )


def with_template_columns(dataset: "Dataset", where: str) -> "Dataset":
    """Return the data set with its `TEMPLATE` columns parsed, as each row was written.

    Arrow gives the values of a nested column the same keys, with None where a row has no such key;
    these keys are removed. In a file, `tools` are a list or None, `chat_template_kwargs` a mapping
    or None; both may be JSON text.
    """
    from datasets import Json, Value

    names = [name for name in TEMPLATE if name in dataset.column_names]
    if not names:
        return dataset
    features = {**dataset.features, **{name: Json() for name in names}}
    # texts (Value) and Json columns keep each row's own keys
    padded = [name for name in names if not isinstance(dataset.features[name], Json | Value)]
    return converted(dataset, _template_row, where, features, numbered=True, padded=padded)


def _template_row(row: Row, padded: list[str]) -> list[Row]:
    """Return a row with its `TEMPLATE` columns parsed, in a list as `converted` takes it.

    Empty `tools` are None, which chat templates read as no tools; empty `chat_template_kwargs` are
    {}, since TRL unpacks them as keywords.

    Args:
        row: a row; `TEMPLATE` columns that it lacks are not added.
        padded: the columns in which keys that hold None were added by Arrow, and are removed.

    Raises:
        WrongRow: a cell is neither a list of tools, or a mapping, nor the JSON text of one.
    """
    from trl.trainer.utils import remove_none_values

    values: dict[str, Any] = {}
    for name, kind in zip(TEMPLATE, (list, dict), strict=True):
        if name not in row:
            continue
        value = row[name]
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise WrongRow(f"{name} is a text that is not JSON ({error}); fix it") from None
        if value is not None and not isinstance(value, kind):
            word = "list of tools" if kind is list else "mapping"
            raise WrongRow(f"{name} is {value!r:.80}; write a {word}, or its JSON")
        if value and name in padded:
            value = remove_none_values(value)
        empty = None if name == "tools" else {}
        values[name] = value or empty
    return [{**row, **values}]


def _with_csv_values(dataset: "Dataset", where: str) -> "Dataset":
    """Return a CSV file's columns `VALUES` as numbers or booleans; they are read as texts."""
    from datasets import Value

    if dataset.info.builder_name != "csv":
        return dataset
    for name in VALUES:
        if name not in dataset.column_names or dataset.features[name].dtype != "string":
            continue
        values = [_csv_value(text) for text in cells(dataset, name)]
        kinds = {type(value) for value in values if value is not None}
        if not kinds:  # all cells are empty
            continue
        if len(kinds) > 1 or str in kinds:  # str: neither a number nor true or false
            raise BadRows(where, _wrong_csv_values(dataset, name, values))
        (kind,) = kinds
        feature = Value("bool" if kind is bool else "float64")
        dataset = dataset.remove_columns(name).add_column(name, values, feature=feature)
    return dataset


def _wrong_csv_values(
    dataset: "Dataset", name: str, values: Sequence[bool | float | str | None]
) -> dict[int, str]:
    """Return what is wrong with a column's cells, by the numbers of their rows.

    `values` are the cells as `_csv_value` reads them.
    """
    kind, words = (float, "a number") if name == "margin" else (bool, "true or false")
    rows = zip(row_numbers(dataset), cells(dataset, name), values, strict=True)
    return {
        number: f"{name} is {text!r}; write {words}"
        for number, text, value in rows
        if value is not None and not isinstance(value, kind)
    }


def _csv_value(text: str | None) -> bool | float | str | None:
    """Return what a cell says where numbers, or true and false, are expected; else its text."""
    if text is None:
        return None
    word = text.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        return float(word)
    except ValueError:
        return text


def without_none(dataset: "Dataset", names: Sequence[str], where: str) -> "Dataset":
    """Return the data set with tidied messages in the columns `names`.

    Arrow gives all messages of a column the same keys, with None where a message has no such key.
    Three kinds of columns of messages differ:

    - Messages with role and content only, and texts, stay as they are.
    - Messages with more keys lose those that are None; the column becomes Json, the one type in
      which each message keeps just its own keys.
    - Messages that may call tools (all columns of Json included) get an empty `content` where they
      only call tools.
    """
    from datasets import Features, Json, List

    padded = {}  # {column whose messages have keys that Arrow added: its new type}
    calling = []  # columns whose messages may call tools
    for name in names:
        feature = dataset.features[name]
        if "timestamp" in str(feature):  # what JSON's reader makes of texts that are all dates
            raise InputError(
                f"dataset: {where}: all of {name} looks like dates, which are not read as texts; "
                "write something else beside them, or save the file as Parquet."
            )
        inner = getattr(feature, "feature", None)  # of a list: what its elements are
        keys = inner.keys() if isinstance(inner, dict) else {}
        calls = {"role", "tool_calls"} <= {*keys}
        if calls or {"role", "content"} < {*keys}:  # there are more keys, which some may lack
            padded[name] = List(Json())
        if calls or isinstance(inner, Json):  # the type Json does not tell which keys there are
            calling.append(name)
    if padded:
        features = Features({**dataset.features, **padded})
        arguments = {"names": list(padded), "code": code()}
        options = {"batched": True, "features": features, "desc": "Removing empty values"}
        dataset = dataset.map(_without_keys, **options, fn_kwargs=arguments)
    if calling:
        arguments = {"names": calling, "code": code()}
        options = {"features": dataset.features, "desc": "Filling in contents"}
        dataset = dataset.map(_with_content, **options, fn_kwargs=arguments)
    return dataset


def _without_keys(batch: dict[str, list[Any]], names: list[str], code: str) -> dict[str, Any]:
    from trl.trainer.utils import remove_none_values

    return {name: remove_none_values(batch[name]) for name in names}


def _with_content(row: Row, names: list[str], code: str) -> Row:
    """Give messages that only call tools the empty text that their `content` stands for."""
    return {
        name: [
            {**message, "content": ""} if _only_calls(message) else message for message in row[name]
        ]
        for name in names
        if isinstance(row[name], list)
    }


def _only_calls(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return bool(message.get("tool_calls")) and message.get("content") is None


def _split_prompts(dataset: "Dataset", where: str) -> "Dataset":
    """Split prompts off the columns `SIDES`, which hold answers or whole conversations.

    What happens depends on what the columns hold:

        prompt              answers            result
        texts               texts              returned as they are
        messages            one message each   returned as they are
        messages            texts              texts become messages
        messages            conversations      each answer loses the messages before its last
        texts or missing    conversations      the same; `prompt` becomes messages
    """
    from datasets import List, Value

    features = dict(dataset.features)
    sides = [name for name in SIDES if name in features]
    # neither Value (a text) nor dict (one mapping): a List of messages, or Json, which may hold one
    chats = {name for name in features if not isinstance(features[name], Value | dict)}
    has_chats = "prompt" in chats or set(sides) <= chats
    if not sides or not has_chats:
        return dataset
    if {"prompt", *sides} <= chats:  # prompts may have been split off already
        answers = (cell for name in sides for cell in cells(dataset, name))
        if all(_is_answer(answer) for answer in answers):
            return dataset
    for name in sides:  # texts beside messages become messages
        if getattr(features[name], "dtype", "").endswith("string"):
            features[name] = List({"role": Value("string"), "content": Value("string")})
    if "prompt" not in chats:  # it will hold messages, as the answers do
        features["prompt"] = features[sides[0]]
    split = converted(dataset, _split_row, where, features, numbered=True)
    if not len(split):
        raise InputError(
            f"dataset: in all {len(dataset)} rows of {where} {UNSPLIT}: nothing to train on."
        )
    return split


def _is_answer(cell: Any) -> bool:
    """Whether a cell is no more than one message of the assistant, or empty."""
    if not isinstance(cell, list):
        return cell is None
    return len(cell) == 1 and isinstance(cell[0], dict) and cell[0].get("role") == "assistant"


def _split_row(row: Row) -> list[Row]:
    """Return a row with its prompt apart, or an empty list where `UNSPLIT` says why it has none."""
    for name in ("prompt", *SIDES):
        check_roles(row.get(name))
    split = split_prompt(row)
    if isinstance(split, str):
        return []
    texts = {name: split.get(name) for name in ("prompt", *SIDES) if name in row}
    # A text is left, though other rows have messages. If a cell beside it is empty, that is what is
    # wrong with the row; otherwise the column holds both kinds, which `converted` refuses.
    if any(isinstance(text, str) for text in texts.values()):
        for name in (name for name, text in texts.items() if not text):
            check_cell(name, None)  # raises
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
    arguments = {"text": text, "names": names, "code": code()}
    options = {"features": features, "desc": "Adding the system prompt"}
    return dataset.map(_system_row, **options, fn_kwargs=arguments)


def _system_row(row: Row, text: str, names: list[str], code: str) -> Row:
    """Return the columns `names` of a row as messages, of which a system message is the first."""

    def messages(value: Any, role: str) -> list[Any]:
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    answers = {name: messages(row[name], "assistant") for name in names if name in SIDES}
    if "ranked" in names:
        answers["ranked"] = [messages(answer, "assistant") for answer in row["ranked"]]
    prompt = messages(row["prompt"], "user")
    if prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": text}, *prompt]
    return {"prompt": prompt, **answers}


def check_alike(dataset: "Dataset", model: Row, where: str) -> None:
    """Refuse rows that have other columns than the row `model`, or texts where it has messages."""
    from datasets import Json

    # only a Json column can hold different kinds; otherwise the first row speaks for all
    may_differ = any(isinstance(feature, Json) for feature in dataset.features.values())
    for n, row in enumerate(dataset if may_differ else dataset.select([0])):
        for name in dict.fromkeys([*model, *row]):
            form = _form(name, row[name]) if name in row else "missing"
            model_form = _form(name, model[name]) if name in model else "missing"
            if form != model_form:
                raise InputError(
                    f"dataset: {where}: {name} is {form} in row {n + 1} of those that are left and "
                    f"{model_form} in the first training row; write the same in all."
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


def check_cells(
    dataset: "Dataset", names: Sequence[str], where: str, written: Names | None = None
) -> None:
    """Check each cell of these columns with `check_cell`, and name all rows with a bad one.

    `written` maps a column to the name that the file, and so the message, has for it.

    Raises:
        BadRows: names the rows, and what is wrong with each.
    """
    written = written or {}
    reasons: dict[int, str] = {}
    for name in names:
        for place, cell in enumerate(cells(dataset, name)):
            try:
                check_cell(written.get(name, name), cell)
            except WrongRow as error:
                reasons.setdefault(place, str(error))
    if reasons:
        numbers = row_numbers(dataset)
        raise BadRows(where, {numbers[place]: reason for place, reason in reasons.items()})


def check_roles(value: Any) -> None:
    """Refuse messages of a role that chat templates do not know, such as `human` or `gpt`."""
    for message in value if isinstance(value, list) else ():
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        if role not in ROLES:
            known = f"{', '.join(OPENAI_ROLES[:-1])} or {OPENAI_ROLES[-1]}"
            raise WrongRow(f"a message has the role {role!r}; write {known}")


def check_cell(name: str, value: Any) -> None:
    """Check the cell of a column that the message calls `name`.

    A label is boolean, a margin 0 or more. Any other cell holds a text that is not blank, or
    messages: each has a known role and a text, and the last is not blank or calls tools.

    Raises:
        WrongRow: says what is wrong.
    """
    check_roles(value)
    wrong = None
    if name == "label":
        if not isinstance(value, bool):
            remedy = "write true for desirable and false for undesirable"
            wrong = f"label is {value!r}, which is not boolean; {remedy}"
    elif name == "margin":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            reason = "which is not a number; write how much better chosen is, or remove the column"
            wrong = f"margin is {value!r}, {reason}"
        elif value < 0:
            reason = "which makes rejected the better one; swap the two, or remove the row"
            wrong = f"margin is {value!r}, {reason}"
    elif isinstance(value, list) and value:
        if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
            wrong = f"{name} is a list, but not of messages with role and content"
        elif not all(isinstance(m["content"], str) for m in value):
            wrong = f"a message of {name} has no text"
        elif not (value[-1]["content"].strip() or value[-1].get("tool_calls")):
            empty = "the last message of messages" if name == "messages" else name
            wrong = f"{empty} is empty; fill it or remove the row"
    elif value in (None, []) or (isinstance(value, str) and not value.strip()):
        wrong = f"{name} is empty; fill it or remove the row"
    elif not isinstance(value, str):
        wrong = f"{name} is {value!r}; write a text or a list of messages"
    elif re.match(WRITTEN_CHAT, value):
        remedy = "save them as messages, in JSON lines or Parquet"
        wrong = f"{name} is a text that spells out messages, as a CSV file has them; {remedy}"
    if wrong:
        raise WrongRow(wrong)
