"""Data sets of one's own: files and the hub, as `datasets.Dataset`s in TRL's formats."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_trl.data import columns
from rlhf_trl.data.arrow import cells, table
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.columns import (
    LISTED,
    ROW,
    TEMPLATE,
    BadRows,
    Counted,
    check_unread,
    code,
    converted,
    listed,
    unnumbered,
    without_rows,
)
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.gym import Row
from rlhf_trl.data.prompt_keys import prompt_hash, prompt_key
from rlhf_trl.data.readers import Misfit, WrongRow, check_reader, examples_of, forms
from rlhf_trl.errors import InputError, reason_in_short

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

LEFT_OUT = "left_out"  # a column: why a reader makes nothing of a row
PART = 1 << 20  # bytes of a file to hash at once
BAD = "dataset.skip_bad: "  # how the reason of rows that are left out as bad begins
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


class Rows(NamedTuple):
    """The rows of a file, folder or hub data set, and what `load_dataset` took to read them."""

    dataset: "Dataset"
    path: str
    kind: str | None  # of the files; None: a hub data set
    source: dict[str, Any]
    split: str


def read(
    path: str,
    split: str = "train",
    count: int | None = None,
    name: str | None = None,
    reader: str | None = None,
    key: str = "path",
) -> Counted:
    """Return the first `count` rows of a file, folder or hub data set, and what was left out.

    With a `reader`, return the examples that it makes of these rows, and count by reason the rows
    of which it makes none. `key` is the field that named the path or the split.
    """
    rows = _rows(path, split, count, name, reader, key)
    if not reader:
        return rows.dataset, {}
    try:
        examples, dropped = _made(rows.dataset, reader, path)
    except BadRows as error:
        raise BadRows(path, error.reasons, _places(rows, error.reasons)) from error
    return unnumbered(examples), dropped


def read_examples(
    config: FileData,
    path: str,
    split: str,
    count: int | None,
    key: str,
    convert: Callable[..., Counted],
    answers: Sequence[str] = (),
    **how: Any,
) -> Counted:
    """Return the examples made of the first `count` rows, and how many rows were left out.

    See `read` and `read_sides`. Columns of `answers` hold the texts that stand in the file. Up to
    `config.skip_bad` bad rows are left out, and listed in the reason for it.
    """
    rows = _rows(path, split, count, config.name, config.reader, key)
    dataset, bad = rows.dataset, {}
    if not config.reader:
        dataset = _answers_as_written(rows, [config.columns.get(name, name) for name in answers])
    while True:
        try:
            made, left_out = dataset, {}
            if config.reader:
                made, left_out = _made(dataset, config.reader, path)
            examples, dropped = convert(made, path, config.columns, **how)
            break
        except BadRows as error:
            bad |= error.reasons
            places = _places(rows, bad)
            if len(bad) > config.skip_bad or len(bad) == len(rows.dataset):
                raise BadRows(path, bad, places) from error
            dataset = without_rows(dataset, list(bad))
    examples = columns.with_system_prompt(examples, config.system_prompt)
    if {*TEMPLATE} & {*examples.column_names} and isinstance(examples[0]["prompt"], str):
        raise InputError(
            f"dataset: {path} has tools or chat_template_kwargs, which only chat templates read, "
            "and prompts that are texts; write messages, or remove these columns."
        )
    if bad:
        dropped = {f"{BAD}{path}: {listed(bad, places)}": len(bad), **dropped}
    return examples, left_out | dropped


def _rows(
    path: str, split: str, count: int | None, name: str | None, reader: str | None, key: str
) -> Rows:
    from datasets import load_dataset

    lines = forms(reader)[0].lines if reader else ()
    kind, files = _files(path, name, key)
    folder = Path(path).is_dir()
    try:
        if lines and (not kind or files[0].suffix.lower() == ".jsonl"):
            source = {"path": "text", **_line_files(path, split, lines)}
        elif kind and (not folder or any(f.suffix != f.suffix.lower() for f in files)):
            source = {"path": kind, "data_files": list(map(str, files))}
        else:
            source = {"path": path, "name": name}
        if kind == "csv":
            source |= _csv_as_texts(files[0])
        if Path(path).exists():
            source["cache_dir"] = _cache_of(Path(path))
        dataset = load_dataset(**source, split=split)
        table(dataset).validate(full=True)  # what is not UTF-8 is read all the same
    except InputError:
        raise
    except Exception as error:  # the libraries below raise many kinds
        _find_fault(kind, files, key)
        said = reason_in_short(error.__cause__ or error)
        raise InputError(
            f"dataset.{key}: {path} cannot be read at split {split!r} ({type(error).__name__}: "
            f"{said}); write the path of a file ({', '.join(FORMATS)}) or of a copy of a hub set, "
            "dataset.name where it has several configs, and a split or slice that is not empty."
        ) from error
    if source["path"] == "json" and dataset.column_names == ["text"]:  # what a list of anything is
        _find_fault(kind, files, key)
    return Rows(dataset.select(range(len(dataset))[:count]), path, kind, source, split)


def _csv_as_texts(file: Path) -> dict[str, Any]:
    """Return the options with which all cells of a CSV file are texts, and empty ones None.

    Otherwise 02139 is a number, `true` a boolean, and NA nothing.
    """
    import pandas as pd
    from datasets import Features, Value

    head = pd.read_csv(file, nrows=1, dtype=str)
    if not isinstance(head.index, pd.RangeIndex):  # pandas takes the first cells for names of rows
        raise InputError(
            f"dataset: {file}, line 2 has more cells than line 1 has names of columns; name them "
            "all, and put cells that hold commas into double quotes."
        )
    features = Features({name: Value("string") for name in head.columns})
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def _of_each_row(rows: Rows, of_file: Callable[[Path], list[Any]]) -> list[Any] | None:
    """Return what `of_file` says of each row of a file, for the rows that were read.

    None is returned where it does not say it of all rows.
    """
    from datasets import ReadInstruction, load_dataset, load_dataset_builder

    files = load_dataset_builder(**rows.source).config.data_files
    values = {
        str(split): [value for file in paths for value in of_file(Path(file))]
        for split, paths in files.items()
    }
    counts = {str(split): len(part) for split, part in load_dataset(**rows.source).items()}
    if any(len(values[split]) != count for split, count in counts.items()):
        return None
    parts = ReadInstruction.from_spec(rows.split).to_absolute(counts)
    chosen = [value for part in parts for value in values[part.splitname][part.from_ : part.to]]
    return chosen[: len(rows.dataset)]


def _places(rows: Rows, numbers: Mapping[int, str]) -> dict[int, str]:
    """Return the line, in which file of several, of rows with these numbers, where it is known."""
    if rows.kind not in ("json", "csv"):
        return {}
    kind = "text" if rows.source["path"] == "text" else rows.kind

    def of_file(file: Path) -> list[str]:
        start = "" if Path(rows.path).is_file() else f"{file.name}, "
        return [f"{start}{place}" for place in _places_in(file, kind)]

    places = _of_each_row(rows, of_file)
    return {} if places is None else {number: places[number] for number in numbers}


def _places_in(file: Path, kind: str) -> list[str]:
    """Return the line at which each row of a file begins; of a JSON list, its row."""
    if kind == "json" and _is_list(file):
        return [f"row {number}" for number, _ in enumerate(json.loads(file.read_bytes()), 1)]
    if kind in ("json", "text"):
        with file.open("rb") as stream:
            lines = enumerate(stream, 1)
            return [f"line {n}" for n, line in lines if kind == "text" or line.strip()]
    places, start = [], 1
    with file.open(encoding="utf-8-sig", newline="") as stream, suppress(csv.Error):
        reader = csv.reader(stream)  # which refuses cells of more than 128 KiB
        for cells_of_row in reader:
            if cells_of_row:  # pandas skips blank lines
                places.append(f"line {start}")
            start = reader.line_num + 1
    return places[1:]


def _is_list(file: Path) -> bool:
    """Whether a JSON file is one list, and not lines of objects."""
    with file.open("rb") as stream:
        return next((line for line in stream if line.strip()), b"").lstrip()[:1] == b"["


def _answers_as_written(rows: Rows, names: Sequence[str]) -> "Dataset":
    """Return the rows with the texts that stand in the file in columns of right answers.

    As values, 1.50 would be 1.5 and `true` would be True. Whole numbers, whose text is the same,
    stay, as do lists and mappings. Of Parquet and the hub, only booleans become texts: other values
    have no text there.
    """
    from datasets import Json, Value

    dataset = rows.dataset
    for name in names:
        feature = dataset.features.get(name)
        dtype = str(getattr(feature, "dtype", ""))
        if dtype == "bool":
            dataset = dataset.cast_column(name, Value("string"))
            continue
        inexact = isinstance(feature, Json) or dtype.startswith(("float", "timestamp", "date"))
        if rows.kind != "json" or not inexact:
            continue
        texts = _of_each_row(rows, partial(_answers_in, name=name))
        if texts is None:
            raise InputError(
                f"dataset: {rows.path}: the numbers in {name} cannot be compared as they are "
                "written; write JSON lines or a list of objects, or put the answers into quotes."
            )
        if not any(isinstance(text, list | dict) for text in texts):
            dataset = dataset.remove_columns(name)
            dataset = dataset.add_column(name, texts, feature=Value("string"))
    return dataset


def _answers_in(file: Path, name: str) -> list[Any]:
    """Return the cells of a column of a JSON file; numbers and booleans are the texts there."""
    load = partial(json.loads, parse_float=str, parse_int=str, parse_constant=str)

    def written(row: Row) -> Any:
        answer = row.get(name)
        return {True: "true", False: "false"}[answer] if isinstance(answer, bool) else answer

    if _is_list(file):
        return [written(row) for row in load(file.read_bytes())]
    with file.open("rb") as stream:
        return [written(load(line)) for line in stream if line.strip()]


def _files(path: str, name: str | None, key: str) -> tuple[str | None, list[Path]]:
    """Return the kind of a file, or of those in a folder, and the files; None: a hub name."""
    from datasets.data_files import FILES_TO_IGNORE

    source, wrong = Path(path), None
    there = sorted(source.iterdir()) if source.is_dir() else [source]
    files = [f for f in there if f.suffix.lower() in FORMATS and f.name not in FILES_TO_IGNORE]
    kinds = list(dict.fromkeys(FORMATS[file.suffix.lower()] for file in files))
    if len(kinds) > 1:
        kinds_said = " and ".join(kinds)
        wrong = (
            f"{path} has files of several kinds ({kinds_said}); write the path of a folder with one"
        )
    elif files == [source] and not source.is_file():
        wrong = f"there is no file {path!r}; write the path of one"
    elif source.is_file() and not files:
        wrong = (
            f"{path} is a file of a kind that is not read; save it as one of {', '.join(FORMATS)}"
        )
    elif name and source.is_file():
        key, wrong = "name", f"{path} is a file, which has no configs; remove it"
    if wrong:
        raise InputError(f"dataset.{key}: {wrong}.")
    return next(iter(kinds), None), files


def _cache_of(path: Path) -> str:
    """Return the folder in which `datasets` keeps what it makes of a file or folder.

    Its name hashes sizes and content: `datasets` goes by time, which archives and images fix.
    """
    from datasets import config
    from datasets.fingerprint import Hasher

    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]

    def parts() -> Iterator[bytes]:
        for file in files:
            yield f"{file} {file.stat().st_size}\n".encode()
            with file.open("rb") as stream:
                while part := stream.read(PART):
                    yield part

    return str(Path(config.HF_DATASETS_CACHE, Hasher.hash_bytes(parts())))


def _find_fault(kind: str | None, files: list[Path], key: str) -> None:
    """Name the line that is not UTF-8, not JSON or no object, or the file with other columns."""
    from datasets import load_dataset

    for file in files if kind in ("json", "csv") else ():
        content = file.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise InputError(
                f"dataset.{key}: {file}, line {line} is not UTF-8 text (byte {error.start}: "
                f"{error.reason}); save the file as UTF-8."
            ) from error
        if kind == "json":
            _check_json(file, content, key)
    if len(files) > 1:
        given = {"path": kind, "split": "train"}
        try:
            each = {f: load_dataset(**given, data_files=str(f)).column_names for f in files}
        except Exception:  # one is broken by itself, which the caller says
            return
        for file, names in each.items():
            if differ := {*names} ^ {*each[files[0]]}:
                raise InputError(
                    f"dataset.{key}: {file} and {files[0]} differ in the columns "
                    f"{', '.join(sorted(differ))}; write the same in all files of the folder."
                )


def _line_files(path: str, split: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what names the files of a data set that is read line by line."""
    from huggingface_hub import hf_hub_download

    if Path(path).exists():
        return {"data_dir": path} if Path(path).is_dir() else {"data_files": path}
    found = {
        part: [hf_hub_download(path, name.format(part), repo_type="dataset") for name in names]
        for part in dict.fromkeys([part.partition("[")[0] for part in split.split("+")])
    }
    return {"data_files": found}


def _made(dataset: "Dataset", name: str, where: str) -> Counted:
    """Return the examples that a reader makes of rows, and how many rows it leaves out."""
    there = [column for column in dataset.column_names if column != ROW]
    check_unread(there, where)
    each = [("text",) if form.lines and there == ["text"] else form.needs for form in forms(name)]
    number = next((n for n, needs in enumerate(each) if set(needs) <= set(there)), None)
    if number is None:
        lacking = next(column for column in each[0] if column not in there)
        raise InputError(
            f"dataset: {where} has no column {lacking} but {', '.join(there)}; the reader "
            f"{name} needs {' or '.join(map(', '.join, each))}; name another, or none."
        )
    needs, kinds = list(each[number]), {**forms(name)[number].makes, LEFT_OUT: "string"}
    features = {column: _feature(kind) for column, kind in kinds.items()}
    given = {"name": name, "form": number}
    numbers = [ROW] if ROW in dataset.column_names else []
    rows = dataset.select_columns([*needs, *numbers])
    made = converted(rows, _make, where, features, numbered=True, **given)
    counts = table(made.select_columns([LEFT_OUT]))[LEFT_OUT].drop_null().value_counts()
    dropped = {each["values"]: each["counts"] for each in counts.to_pylist()}
    if sum(dropped.values()) == len(made):
        raise InputError(
            f"dataset: the reader {name} makes no example of the {len(made)} rows of {where} "
            f"({', '.join(dropped)}); there is nothing to train on."
        )
    if not dropped:
        return made.remove_columns(LEFT_OUT), {}
    given = {"batched": True, "remove_columns": [LEFT_OUT], "fn_kwargs": {"code": code()}}
    given["desc"] = "Leaving out rows"
    # `filter` would leave neighbors apart, which makes all that follows slow
    return made.with_format("arrow").map(_kept, **given).with_format(None), dropped


def _make(row: Row, name: str, form: int) -> list[Row]:
    try:
        made = examples_of(row, forms(name)[form])
    except Misfit as error:
        told = f"{error}; the reader {name} reads rows of another form"
        raise WrongRow(f"{told}, so fix or remove the row, or name another reader") from error
    return [{LEFT_OUT: one} if isinstance(one, str) else one for one in made]


def _kept(batch: "pa.Table", code: str) -> "pa.Table":
    return batch.filter(batch[LEFT_OUT].is_null()).drop([LEFT_OUT])


def _feature(kind: Any) -> Any:
    """Return the feature of `datasets` that a reader's word for a type means."""
    from datasets import List, Value

    if isinstance(kind, list):
        return List(_feature(kind[0]))
    if isinstance(kind, dict):
        return {name: _feature(inner) for name, inner in kind.items()}
    return Value(kind)


def _check_json(file: Path, content: bytes, key: str) -> None:
    """Name the line of a JSON file, or the element of its list, that is not an object."""
    if content.strip() in (b"", b"[]"):
        raise InputError(f"dataset.{key}: {file} has no rows; there is nothing to train on.")
    whole = file.suffix.lower() == ".json" and _is_list(file)
    wrong: list[str] = []
    for number, line in enumerate([content] if whole else content.splitlines(), 1):
        try:
            value = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            wrong.append(
                f"is not JSON ({error})" if whole else f"line {number} is not JSON ({error})"
            )
            continue
        for place, row in enumerate(value if whole else [value], 1):
            if not isinstance(row, dict):
                at = f"element {place}" if whole else f"line {number}"
                wrong.append(f"{at} is not an object of columns")
    if wrong:
        more = f", and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise InputError(
            f"dataset.{key}: {file}{' ' if whole else ', '}{', '.join(wrong[:LISTED])}{more}; "
            "write an object of columns there."
        )


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a `samples.file`."""
    try:
        text = path.read_text(encoding="utf-8")
        prompts = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"samples.file: {str(path)!r} cannot be read: {error}.") from error
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
        raise InputError(f"samples.file: {str(path)!r} is not a list of texts.")
    if not (prompts := [p.strip() for p in prompts if p.strip()]):
        raise InputError(f"samples.file: {str(path)!r} holds no prompt.")
    return prompts


def read_sides(
    config: FileData, count: int | None, convert: Callable[..., Counted], *shapes: str, **how: Any
) -> Examples:
    """Read what a block with `source: path` names; its reader, if any, makes one of the `shapes`.

    `convert` makes examples of what was read, and counts what it leaves out; it also takes the path
    or name, `config.columns` and the rest (but for `answers`: see `read_examples`). No training
    example, of the first `count` rows, asks what a held-out one asks (see `prompt_key`).
    """
    import numpy as np

    check_reader(config.reader, *shapes)

    def side(key: str, path: str, split: str, limit: int | None) -> Any:
        return read_examples(config, path, split, limit, key, convert, **how)

    size = 256 if config.eval_size is None else config.eval_size
    train, dropped = side("path", config.path, config.split, count)
    columns.check_alike(train, train[0], config.path)
    turns = getattr(config, "turns", "last")  # only demonstrations have the choice
    keys = _keys(train, turns)
    if config.eval_path or config.eval_split:
        key, path = "eval_path" if config.eval_path else "eval_split", config.eval_path
        path, split = path or config.path, config.eval_split or config.split.partition("[")[0]
        found, there = side(key, path, split, None)
        dropped |= {f"{why} (to evaluate on)": n for why, n in there.items() if why.startswith(BAD)}
        found = found.select_columns([n for n in found.column_names if n in train.column_names])
        columns.check_alike(found, train[0], path)
        others = _keys(found, turns)
        fresh = np.flatnonzero(~np.isin(others, keys))
        if not len(fresh):
            raise InputError(
                f"dataset.{key}: every prompt of {path} to evaluate on is trained on; write other "
                "slices, such as train[:90%] and train[90%:], another file, or eval_size alone."
            )
        chosen = list(dict.fromkeys(others[fresh].tolist()))[:size]
        held_out = found.select(fresh[np.isin(others[fresh], chosen)])
        dropped["to evaluate on: the prompt is trained on"] = len(found) - len(fresh)
        return Examples(train, held_out, None, dropped)
    if config.eval_size is None:
        return Examples(train, None, None, dropped)
    held = np.isin(keys, np.unique(keys)[:size])
    if held.all():
        raise InputError(
            f"dataset.eval_size: {config.path} has {len(np.unique(keys))} different prompts "
            f"(system text, letter case and white space aside), and {size} held out leave nothing "
            "to train on; hold out fewer."
        )
    sides = [train.select(np.flatnonzero(which)) for which in (~held, held)]
    return Examples(*sides, None, dropped)


def _keys(dataset: "Dataset", turns: str) -> "np.ndarray":
    """Return a hash of each prompt (B,): the same where two ask the same (see `prompt_key`)."""
    import numpy as np

    hashes = bytearray()
    for prompt in cells(dataset, "prompt"):
        hashes += prompt_hash(prompt_key(prompt, turns))
    return np.frombuffer(bytes(hashes), dtype=np.uint64)
