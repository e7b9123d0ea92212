"""Data sets of one's own: files and the hub, as `datasets.Dataset`s in TRL's formats."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_trl.data import columns
from rlhf_trl.data.arrow import cells, table
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.columns import (
    ROW,
    TEMPLATE,
    BadRows,
    Counted,
    check_unread,
    code,
    converted,
    listed,
    place_of,
    unnumbered,
    without_rows,
)
from rlhf_trl.data.examples import LISTED, Examples
from rlhf_trl.data.gym import Row
from rlhf_trl.data.prompt_keys import prompt_hash, prompt_key
from rlhf_trl.data.readers import (
    Misfit,
    WrongRow,
    check_reader,
    detected,
    examples_of,
    forms,
)
from rlhf_trl.errors import InputError, reason_in_short

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

LEFT_OUT = "left_out"  # a column: why a reader makes nothing of a row
DEEP = 500  # brackets in a row of JSON that make it worth a look
PART = 1 << 20  # bytes of a file to hash at once
BAD = "dataset.skip_bad: "  # how the reason of rows that are left out as bad begins
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


# examples, and where the rows stand that make none ("line 3"), by reason
Placed = tuple["Dataset", dict[str, list[str]]]


class Rows(NamedTuple):
    """The rows of a file, folder or hub data set, and what `load_dataset` took to read them."""

    dataset: "Dataset"
    path: str
    kind: str | None  # of the files, "json", "csv" or "parquet"; None: a hub data set
    source: dict[str, Any]  # the arguments of `load_dataset` but the split
    split: str


def read(
    path: str,
    split: str = "train",
    count: int | None = None,
    name: str | None = None,
    reader: str | None = None,
    key: str = "path",
) -> tuple["Dataset", dict[str, int]]:
    """Return the rows of a file, folder or hub data set, and how many were left out, by reason.

    Args:
        path: of the file or folder, or the name on the hub.
        split: of the data set, or a slice of one.
        count: how many rows to read, from the first; None: all.
        name: the config of a hub data set.
        reader: the name of a reader, which makes examples of the rows; None: return the rows.
        key: the field of the block that named the path or the split, for errors.
    """
    rows = _rows(path, split, count, name, reader, key)
    if not reader:
        return rows.dataset, {}
    try:
        examples, dropped = _examples_by_reader(rows.dataset, reader, path)
    except BadRows as error:
        raise BadRows(path, error.reasons, _places(rows, error.reasons)) from error
    return unnumbered(examples), {reason: len(numbers) for reason, numbers in dropped.items()}


def read_examples(
    config: FileData,
    path: str,
    split: str,
    count: int | None,
    key: str,
    convert: Callable[..., Counted],
    answers: Sequence[str] = (),
    shapes: Sequence[str] = (),
    notes: list[str] | None = None,
    **options: Any,
) -> Placed:
    """Return the examples made of the first `count` rows, and where rows stand that make none.

    Rows are left out by the reader, by `convert`, or because they are bad. The reason of bad rows
    lists which ones they are.

    Args:
        config: the block, with reader, columns and system prompt.
        path: of the file or folder, or the name on the hub.
        split: of the data set, or a slice of one.
        count: how many rows to read, from the first; None: all.
        key: the field of the block that named the path or the split, for errors.
        convert: makes examples of rows, and counts what it leaves out, by reason; it takes the
            rows, the path, `config.columns` and the `options`.
        answers: columns of right answers, which are read as the text that the file has: "1.50",
            not 1.5.
        shapes: what the examples may serve as, by which a reader is chosen where none is named.
        notes: gets a sentence if a reader is chosen by the columns.
        options: further arguments of `convert`.

    Raises:
        BadRows: there are more than `config.skip_bad` bad rows.
    """
    rows = _rows(path, split, count, config.name, config.reader, key)
    dataset = rows.dataset
    reader = config.reader or _reader_by_columns(config, rows, shapes, notes)
    if not reader:
        # a reader parses answers itself
        theirs = [config.columns.get(name, name) for name in answers]  # as the data set calls them
        dataset = _answers_as_written(rows, theirs)
    names = config.columns  # that are left to rename
    if reader:
        dataset, names = columns.renamed_for_reader(dataset, names, reader, path)
    bad: dict[int, str] = {}  # {number of a row: what is wrong with it}, of all passes
    places: dict[int, str] = {}  # {number of a row: where it stands, such as "line 3"}
    while True:  # each pass leaves out the bad rows that the passes before raised
        try:
            readable, dropped_by_reader = dataset, {}
            if reader:
                readable, dropped_by_reader = _examples_by_reader(dataset, reader, path)
            examples, dropped = convert(readable, path, names, **options)
            break
        except BadRows as error:
            bad |= error.reasons
            places = _places(rows, bad)
            no_row_is_left = len(bad) == len(rows.dataset)
            if len(bad) > config.skip_bad or no_row_is_left:
                raise BadRows(path, bad, places) from error
            dataset = without_rows(dataset, list(bad))
    examples = columns.with_system_prompt(examples, config.system_prompt)
    if {*TEMPLATE} & {*examples.column_names} and isinstance(examples[0]["prompt"], str):
        raise InputError(
            f"dataset: {path} has tools or chat_template_kwargs, which only chat templates read, "
            "and prompts that are texts; write messages, or remove these columns."
        )
    left_out = dict(dropped_by_reader)
    if bad:
        left_out[f"{BAD}{path}: {listed(bad, places)}"] = list(bad)
    for reason, numbers in dropped.items():  # a reason may be the reader's, too
        left_out[reason] = left_out.get(reason, []) + numbers
    if any(left_out.values()):
        places = _places(rows, [number for numbers in left_out.values() for number in numbers])
    return examples, {
        reason: [place_of(number, places) for number in numbers]
        for reason, numbers in left_out.items()
    }


def _reader_by_columns(
    config: FileData, rows: Rows, shapes: Sequence[str], notes: list[str] | None
) -> str | None:
    """Return the reader that the columns of rows call for, and note it; None: they call for none.

    Columns that the user maps, and those of rows that only rewards read, are taken as they are.
    """
    if config.columns or "prompts" in shapes:
        return None
    names = [name for name in rows.dataset.column_names if name != ROW]
    chosen = rows.dataset.features.get("chosen")
    turn = getattr(chosen, "feature", chosen)  # of a list: what its elements are
    from_value = isinstance(turn, dict) and {"from", "value"} <= turn.keys()
    reader = detected(names, from_value, shapes)
    if reader is not None and notes is not None:
        columns_read = ", ".join(names)
        notes.append(f"{rows.path} is read by dataset.reader: {reader} (it has {columns_read})")
    return reader


def _rows(
    path: str, split: str, count: int | None, name: str | None, reader: str | None, key: str
) -> Rows:
    """Load the rows of a file, folder or hub data set; the arguments are those of `read`.

    Raises:
        InputError: they cannot be read. If a line of a file is the cause, the error names it.
    """
    from datasets import load_dataset

    kind, files = _files(path, name, key)
    if kind == "json":
        _check_nesting(files, key)
    try:
        source = _source(path, split, name, reader, kind, files)
        dataset = load_dataset(**source, split=split)
        table(dataset).validate(full=True)  # load_dataset lets texts through that are not UTF-8
    except InputError:  # a sentence already, of `_source`
        raise
    except Exception as error:  # the libraries below raise many kinds
        _refuse_faulty_files(kind, files, key)  # raises a clearer error, if it finds a faulty file
        # an error of `datasets` may only say that it failed, and have the reason as its cause
        reason = reason_in_short(error.__cause__ or error)
        raise InputError(
            f"dataset.{key}: {path} cannot be read at split {split!r} ({type(error).__name__}: "
            f"{reason}); write the path of a file ({', '.join(FORMATS)}) or of a copy of a hub "
            "set, dataset.name where it has several configs, and a split or slice that is not "
            "empty."
        ) from error
    # load_dataset reads a JSON list of anything but objects as one column, text
    if source["path"] == "json" and dataset.column_names == ["text"]:
        _refuse_faulty_files(kind, files, key)
    first_rows = dataset.select(range(len(dataset))[:count])
    return Rows(first_rows, path, kind, source, split)


def _source(
    path: str, split: str, name: str | None, reader: str | None, kind: str | None, files: list[Path]
) -> dict[str, Any]:
    """Return the arguments of `load_dataset` but the split.

    `kind` and `files` are what `_files` returned; the other arguments are those of `read`.
    """
    # the names of files on the hub that this reader parses line by line, if it is such a reader
    lines = forms(reader)[0].lines if reader else ()
    # of a folder, load_dataset reads only files whose suffix is in small letters
    has_odd_suffix = any(file.suffix != file.suffix.lower() for file in files)
    if lines and (not kind or files[0].suffix.lower() == ".jsonl"):
        source = {"path": "text", **_line_files(path, split, lines)}
    elif kind and (has_odd_suffix or not Path(path).is_dir()):
        source = {"path": kind, "data_files": list(map(str, files))}
    else:
        source = {"path": path, "name": name}
    if kind == "csv":
        source |= _csv_as_texts(files[0])  # files of a folder have the same columns
    if Path(path).exists():
        source["cache_dir"] = _cache_of(Path(path))
    return source


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
    """Return one value for each row that was read.

    `of_file` takes a file and returns a value for each row of that file. Return None where the
    number of its values is not the number of rows that load_dataset found: then it is unknown
    which value belongs to which row.
    """
    from datasets import ReadInstruction, load_dataset, load_dataset_builder

    files = load_dataset_builder(**rows.source).config.data_files  # by split
    values = {
        str(split): [value for file in paths for value in of_file(Path(file))]
        for split, paths in files.items()
    }
    # `_rows` has loaded the same source, so load_dataset takes it from its cache
    counts = {str(split): len(part) for split, part in load_dataset(**rows.source).items()}
    if any(len(values[split]) != count for split, count in counts.items()):
        return None
    # the parts of a split such as "train[:9]+test", from which row to which
    parts = ReadInstruction.from_spec(rows.split).to_absolute(counts)
    of_split = [value for part in parts for value in values[part.splitname][part.from_ : part.to]]
    return of_split[: len(rows.dataset)]  # perhaps only the first rows were read


def _places(rows: Rows, numbers: Iterable[int]) -> dict[int, str]:
    """Return {number of a row: where it stands}, such as "line 3" or "part-1.json, line 3".

    Without known lines, the result is empty.
    """
    if rows.kind not in ("json", "csv"):
        return {}
    kind = "text" if rows.source["path"] == "text" else rows.kind  # text: read line by line

    def of_file(file: Path) -> list[str]:
        start = "" if Path(rows.path).is_file() else f"{file.name}, "
        return [f"{start}{place}" for place in _places_in(file, kind)]

    places = _of_each_row(rows, of_file)
    return {} if places is None else {number: places[number] for number in numbers}


def _places_in(file: Path, kind: str) -> list[str]:
    """Return where each row of a file begins: "line 3", or "row 3" of a JSON list.

    `kind` is "json", "csv", or "text" for a file whose every line is a row.
    """
    if kind == "json" and _is_list(file):
        return [f"row {number}" for number, _ in enumerate(json.loads(file.read_bytes()), 1)]
    places: list[str] = []
    if kind in ("json", "text"):
        with file.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if kind == "text" or line.strip():  # JSON's reader skips blank lines
                    places.append(f"line {number}")
        return places
    start = 1
    with file.open(encoding="utf-8-sig", newline="") as stream, suppress(csv.Error):
        reader = csv.reader(stream)  # csv.Error: a cell of more than 128 KiB
        for cells_of_row in reader:
            if cells_of_row:  # pandas skips blank lines
                places.append(f"line {start}")
            start = reader.line_num + 1
    return places[1:]  # the first line has the names of the columns


def _is_list(file: Path) -> bool:
    """Whether a JSON file is one list, and not lines of objects."""
    with file.open("rb") as stream:
        return next((line for line in stream if line.strip()), b"").lstrip()[:1] == b"["


def _answers_as_written(rows: Rows, names: Sequence[str]) -> "Dataset":
    """Return the rows; right answers, in the columns `names`, become texts as the file has them.

    Parsed, 1.50 would be 1.5 and `true` would be True. What becomes a text:

    - in JSON, numbers that are not whole, dates and booleans; a column with lists or mappings stays
    - in Parquet and on the hub, booleans alone: other values have no written text there
    - in CSV, nothing: all cells are texts already
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
        if any(isinstance(text, list | dict) for text in texts):  # the column stays as it is
            continue
        dataset = dataset.remove_columns(name)
        dataset = dataset.add_column(name, texts, feature=Value("string"))
    return dataset


def _answers_in(file: Path, name: str) -> list[Any]:
    """Return the cells of a column of a JSON file; numbers and booleans as the file has them."""
    load = partial(json.loads, parse_float=str, parse_int=str, parse_constant=str)

    def written(row: Row) -> Any:
        answer = row.get(name)
        return {True: "true", False: "false"}[answer] if isinstance(answer, bool) else answer

    if _is_list(file):
        return [written(row) for row in load(file.read_bytes())]
    with file.open("rb") as stream:
        return [written(load(line)) for line in stream if line.strip()]


def _files(path: str, name: str | None, key: str) -> tuple[str | None, list[Path]]:
    """Return the kind of a path's files, a value of `FORMATS`, and the files.

    The path names a file, a folder or a hub data set; `name` is the config of a hub data set. The
    kind is None for a hub data set, and for a folder without files of a known kind: load_dataset
    decides how to read these.

    Raises:
        InputError: there is no such file, it is of another kind, or a folder has several kinds.
    """
    from datasets.data_files import FILES_TO_IGNORE

    source = Path(path)
    there = sorted(source.iterdir()) if source.is_dir() else [source]
    files = [f for f in there if f.suffix.lower() in FORMATS and f.name not in FILES_TO_IGNORE]
    kinds = list(dict.fromkeys(FORMATS[file.suffix.lower()] for file in files))
    if len(kinds) > 1:
        raise InputError(
            f"dataset.{key}: {path} has files of several kinds ({' and '.join(kinds)}); write the "
            "path of a folder with one."
        )
    if files == [source] and not source.is_file():  # its suffix tells that it is no hub name
        raise InputError(f"dataset.{key}: there is no file {path!r}; write the path of one.")
    if source.is_file() and not files:
        raise InputError(
            f"dataset.{key}: {path} is a file of a kind that is not read; save it as one of "
            f"{', '.join(FORMATS)}."
        )
    if source.is_file() and name:
        raise InputError(f"dataset.name: {path} is a file, which has no configs; remove it.")
    return kinds[0] if kinds else None, files


def _cache_of(path: Path) -> str:
    """Return the folder in which `datasets` caches what it makes of a file or folder.

    The folder's name is a hash of sizes and content. `datasets` itself goes by the time of change,
    which may be the same for different files: archives and container images set it to a fixed time.
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


def _refuse_faulty_files(kind: str | None, files: list[Path], key: str) -> None:
    """Look for what keeps files from being read; return if nothing is found.

    Raises:
        InputError: a line is not UTF-8, not JSON or no object, or a file has other columns.
    """
    if kind in ("json", "csv"):
        for file in files:
            content = file.read_bytes()
            _check_utf8(file, content, key)
            if kind == "json":
                _check_json(file, content, key)
    if len(files) > 1:
        _check_columns(kind, files, key)


def _check_utf8(file: Path, content: bytes, key: str) -> None:
    """Refuse a file that is not UTF-8, and name the line."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"dataset.{key}: {file}, line {line} is not UTF-8 text (byte {error.start}: "
            f"{error.reason}); save the file as UTF-8."
        ) from error


def _check_columns(kind: str | None, files: list[Path], key: str) -> None:
    """Refuse a file of a folder that has other columns than the first file."""
    from datasets import load_dataset

    names_of = {}
    for file in files:
        try:
            rows = load_dataset(path=kind, split="train", data_files=str(file))
        except Exception:  # this file cannot be read even alone: the caller's error says so
            return
        names_of[file] = set(rows.column_names)
    for file, names in names_of.items():
        differing = sorted(names ^ names_of[files[0]])
        if differing:
            raise InputError(
                f"dataset.{key}: {file} and {files[0]} differ in the columns "
                f"{', '.join(differing)}; write the same in all files of the folder."
            )


def _line_files(path: str, split: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of load_dataset that name files to be read line by line.

    `names` are the names of the files on the hub, with {} in place of a split's name. Hub files are
    downloaded.
    """
    from huggingface_hub import hf_hub_download

    if Path(path).exists():
        return {"data_dir": path} if Path(path).is_dir() else {"data_files": path}
    files: dict[str, list[str]] = {}  # {name of a split: downloaded files}
    for part in split.split("+"):  # such as "train[:9]" and "test" of "train[:9]+test"
        split_name = part.partition("[")[0]
        if split_name not in files:
            paths = [name.format(split_name) for name in names]
            files[split_name] = [hf_hub_download(path, file, repo_type="dataset") for file in paths]
    return {"data_files": files}


def _examples_by_reader(dataset: "Dataset", reader: str, where: str) -> Counted:
    """Return the examples that a reader makes of rows, and the rows that it leaves out.

    A reader has a form (`Reader`) for each layout in which its data set is published; the first
    form whose columns the rows have makes the examples.

    Args:
        dataset: the rows.
        reader: its name.
        where: the path or name of the data set, for errors.
    """
    names = [name for name in dataset.column_names if name != ROW]
    # a file that was read line by line has one column, `text`; a form of `lines` parses it
    is_lines = names == ["text"]
    needs_of_forms = [
        ("text",) if form.lines and is_lines else form.needs for form in forms(reader)
    ]
    fitting = [number for number, needs in enumerate(needs_of_forms) if set(needs) <= set(names)]
    if not fitting:
        lacking = next(column for column in needs_of_forms[0] if column not in names)
        needed = " or ".join(", ".join(needs) for needs in needs_of_forms)
        raise InputError(
            f"dataset: {where} has no column {lacking} but {', '.join(names)}; the reader "
            f"{reader} needs {needed}; map them with dataset.columns, as in {{{lacking}: THEIRS}}, "
            "name another reader, or none."
        )
    form_number = fitting[0]
    row_number = [ROW] if ROW in dataset.column_names else []
    form = forms(reader)[form_number]
    read = [*needs_of_forms[form_number], *(name for name in form.takes if name in names)]
    check_unread([name for name in names if name not in read], where)
    rows = dataset.select_columns([*read, *row_number])
    makes = form.makes
    features = {column: _feature(kind) for column, kind in makes.items()}
    features[LEFT_OUT] = _feature("string")  # the reason why a row gives no example
    # an example for each row, or, in the column LEFT_OUT, the reason why there is none
    results = converted(
        rows, _examples_or_reasons, where, features, numbered=True, name=reader, form=form_number
    )
    dropped: dict[str, list[int]] = {}
    reasons = table(results.select_columns([LEFT_OUT, ROW]))
    for row in reasons.filter(reasons[LEFT_OUT].is_valid()).to_pylist():
        dropped.setdefault(row[LEFT_OUT], []).append(row[ROW])
    if sum(map(len, dropped.values())) == len(results):
        raise InputError(
            f"dataset: the reader {reader} makes no example of the {len(results)} rows of {where} "
            f"({', '.join(dropped)}); there is nothing to train on."
        )
    if "tools" in makes and not any(cells(results, "tools")):
        results = results.remove_columns("tools")  # which few recipes read
    if not dropped:
        return results.remove_columns(LEFT_OUT), {}
    # not by `filter`, which keeps all rows and a list of the numbers of some: slow to read later
    examples = results.with_format("arrow").map(
        _without_reasons,
        batched=True,
        remove_columns=[LEFT_OUT],
        fn_kwargs={"code": code()},  # part of the key under which `datasets` caches the result
        desc="Leaving out rows",
    )
    return examples.with_format(None), dropped


def _examples_or_reasons(row: Row, name: str, form: int) -> list[Row]:
    """Return the examples that a reader makes of a row, or {`LEFT_OUT`: why it makes none}.

    `name` is the reader's, and `form` the number of its form.
    """
    try:
        examples = examples_of(row, forms(name)[form])
    except Misfit as error:
        problem = f"{error}; the reader {name} reads rows of another form"
        raise WrongRow(f"{problem}, so fix or remove the row, or name another reader") from error
    # a text in place of an example is the reason why there is none
    return [{LEFT_OUT: made} if isinstance(made, str) else made for made in examples]


def _without_reasons(batch: "pa.Table", code: str) -> "pa.Table":
    """Return the examples of a batch: its rows without a reason to leave them out."""
    return batch.filter(batch[LEFT_OUT].is_null()).drop([LEFT_OUT])


def _feature(kind: Any) -> Any:
    """Return the feature of `datasets` that a reader's word for a type means."""
    from datasets import Json, List, Value

    if kind == "json":
        return Json()
    if isinstance(kind, list):
        return List(_feature(kind[0]))
    if isinstance(kind, dict):
        return {name: _feature(inner) for name, inner in kind.items()}
    return Value(kind)


def _check_nesting(files: list[Path], key: str) -> None:
    """Refuse JSON that is nested so deeply that the C++ code which reads it would crash."""
    for file in files:
        with file.open("rb") as stream:
            # a list is parsed whole, other files line by line
            parts = [stream.read()] if _is_list(file) else stream
            for part in parts:
                if part.count(b"[") + part.count(b"{") < DEEP:  # too few to be nested deeply
                    continue
                try:
                    json.loads(part)
                except RecursionError as error:
                    raise InputError(
                        f"dataset.{key}: {file} is nested too deeply; write flatter rows."
                    ) from error
                except ValueError:  # not JSON: load_dataset will fail, and its error is reported
                    continue


def _check_json(file: Path, content: bytes, key: str) -> None:
    """Refuse a JSON file whose lines, or elements of its list, are not all objects; name those."""
    if content.strip() in (b"", b"[]"):
        raise InputError(f"dataset.{key}: {file} has no rows; there is nothing to train on.")
    # in a .jsonl file, a line that begins with [ is itself the fault
    is_list = file.suffix.lower() == ".json" and _is_list(file)
    faults = _faults_of_list(content) if is_list else _faults_of_lines(content)
    if faults:
        separator = " " if is_list else ", "
        more = f", and {len(faults) - LISTED} more" if len(faults) > LISTED else ""
        raise InputError(
            f"dataset.{key}: {file}{separator}{', '.join(faults[:LISTED])}{more}; "
            "write an object of columns there."
        )


def _faults_of_list(content: bytes) -> list[str]:
    """Return what is wrong with a JSON list of rows."""
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        return [f"is not JSON ({error})"]
    return [
        f"element {place} is not an object of columns"
        for place, row in enumerate(rows, 1)
        if not isinstance(row, dict)
    ]


def _faults_of_lines(content: bytes) -> list[str]:
    """Return what is wrong with lines of JSON; blank lines do not count."""
    faults = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            faults.append(f"line {number} is not JSON ({error})")
            continue
        if not isinstance(row, dict):
            faults.append(f"line {number} is not an object of columns")
    return faults


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
    config: FileData,
    count: int | None,
    convert: Callable[..., Counted],
    *shapes: str,
    **options: Any,
) -> Examples:
    """Read what a block with `source: path` names, and hold some prompts out.

    No training example asks what a held-out one asks (see `prompt_key`).

    Args:
        config: the block.
        count: how many rows to train on, from the first; None: all.
        convert: makes examples of rows, as `read_examples` calls it.
        shapes: what the block's reader, if it has one, may make.
        options: `answers` of `read_examples`, and further arguments of `convert`.
    """
    import numpy as np

    check_reader(config.reader, *shapes)
    notes: list[str] = []
    options |= {"shapes": shapes, "notes": notes}
    limits = [limit for limit in (count, config.limit) if limit is not None]
    most = min(limits, default=None)
    count = None if config.mix else most  # a mixture has `most` of all files
    train, dropped = read_examples(
        config, config.path, config.split, count, "path", convert, **options
    )
    columns.check_alike(train, train[0], config.path)
    files = np.zeros(len(train), dtype=np.int64)  # which file each example is of
    if config.mix:
        from rlhf_trl.data.mixtures import mixed, with_other_files

        def read_other(block: FileData, path: str, split: str, key: str) -> Placed:
            return read_examples(block, path, split, None, key, convert, **options)

        train, files, dropped = with_other_files(config, train, dropped, shapes, read_other)
    turns = getattr(config, "turns", "last")  # only demonstrations have the choice
    keys = _keys(train, turns)
    held_out, dropped_held_out, placed = None, {}, {}
    if config.eval_path or config.eval_split:
        # the reasons say "to evaluate on"
        held_out, dropped_held_out, placed = _read_held_out(
            config, train, keys, turns, convert, options
        )
    elif config.eval_size is not None:
        is_held_out = _held_out_by_hash(config, keys)
        held_out = train.select(np.flatnonzero(is_held_out))
        train = train.select(np.flatnonzero(~is_held_out))
        keys, files = keys[~is_held_out], files[~is_held_out]
    counts = {reason: len(places) for reason, places in dropped.items()} | dropped_held_out
    data = Examples(train, held_out, tasks=None, dropped=counts, notes=notes)
    data.places = {why: places for why, places in dropped.items() if not why.startswith(BAD)}
    data.places |= placed
    if config.mix:
        keys = mixed(config, data, keys, files, most)
    return _sliced(config, data, keys)


def _held_out_by_hash(config: FileData, keys: "np.ndarray") -> "np.ndarray":
    """Return which of N prompts, (N,), are the `eval_size` with the smallest hashes.

    So the order of rows does not matter. `keys` are the (N,) hashes, as `_keys` returns them.
    """
    import numpy as np

    different = np.unique(keys)  # sorted
    is_held_out = np.isin(keys, different[: config.eval_size])
    if is_held_out.all():
        whole = f"the mixture of {config.path} and others" if config.mix else config.path
        raise InputError(
            f"dataset.eval_size: {whole} has {len(different)} different prompts "
            f"(system text, letter case and white space aside), and {config.eval_size} held out "
            "leave nothing to train on; hold out fewer, or none: eval_size: null beside "
            "eval_strategy: no."
        )
    return is_held_out


def _sliced(config: FileData, data: Examples, keys: "np.ndarray") -> Examples:
    """Leave only a slice of the training examples, if `config` names a slice.

    What is held out does not depend on the slice: a held-out prompt is in no slice.

    Args:
        config: the block.
        data: the examples, N of them to train on.
        keys: (N,) hashes of the prompts to train on, as `_keys` returns them.
    """
    import numpy as np

    if config.slice is None:
        return data
    from rlhf_trl.data.slices import Slice

    is_in = Slice(config.slice).has(keys)
    if not is_in.any():
        raise InputError(
            f"dataset.slice: none of the {len(keys)} rows to train on is in {config.slice!r}; "
            "write a larger share."
        )
    data.train = data.train.select(np.flatnonzero(is_in))
    data.dropped["the prompt is in no slice to train on"] = int((~is_in).sum())
    return data


def _read_held_out(
    config: FileData,
    train: "Dataset",
    train_keys: "np.ndarray",
    turns: str,
    convert: Callable[..., Counted],
    options: Mapping[str, Any],
) -> tuple["Dataset", dict[str, int], dict[str, list[str]]]:
    """Read `eval_path` or `eval_split`: the first prompts there that are not trained on.

    Args:
        config: the block.
        train: the N training examples.
        train_keys: (N,) hashes of their prompts, as `_keys` returns them.
        turns: which answers of a conversation are trained on, "last" or "all".
        convert: makes examples of rows, as `read_examples` calls it.
        options: further arguments of `read_examples`.

    Returns:
        The examples, how many were left out, by reason, and where those of a file of its own stand.
    """
    import numpy as np

    key = "eval_path" if config.eval_path else "eval_split"
    path = config.eval_path or config.path
    split = config.eval_split or config.split.partition("[")[0]
    examples, left_out = read_examples(config, path, split, None, key, convert, **options)
    # of one file for both, the reasons are told where it is read to train on; bad rows name theirs
    told = {
        f"{reason} (to evaluate on)": places
        for reason, places in left_out.items()
        if config.eval_path or reason.startswith(BAD)
    }
    dropped = {reason: len(places) for reason, places in told.items()}
    placed = {reason: places for reason, places in told.items() if not reason.startswith(BAD)}
    # both sides have the same columns; `check_alike` refuses one that is missing here
    shared = [name for name in examples.column_names if name in train.column_names]
    examples = examples.select_columns(shared)
    columns.check_alike(examples, train[0], path)
    keys = _keys(examples, turns)
    fresh = np.flatnonzero(~np.isin(keys, train_keys))
    if not len(fresh):
        raise InputError(
            f"dataset.{key}: every prompt of {path} to evaluate on is trained on; write other "
            "slices, such as train[:90%] and train[90%:], another file, or eval_size alone."
        )
    dropped["to evaluate on: the prompt is trained on"] = len(examples) - len(fresh)
    size = 256 if config.eval_size is None else config.eval_size  # see `FileData`
    first_keys = list(dict.fromkeys(keys[fresh].tolist()))[:size]  # of different prompts
    return examples.select(fresh[np.isin(keys[fresh], first_keys)]), dropped, placed


def _keys(dataset: "Dataset", turns: str) -> "np.ndarray":
    """Return a hash of each of N prompts, (N,): equal if two ask the same (see `prompt_key`)."""
    import numpy as np

    hashes = bytearray()
    for prompt in cells(dataset, "prompt"):
        hashes += prompt_hash(prompt_key(prompt, turns))
    return np.frombuffer(bytes(hashes), dtype=np.uint64)
