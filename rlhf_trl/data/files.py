"""Data sets of one's own: files and the hub, as `datasets.Dataset`s in TRL's formats."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_trl.data import columns
from rlhf_trl.data.columns import Counted, cells, code, converted, table
from rlhf_trl.data.gym import GymTasks, Row
from rlhf_trl.data.prompt_keys import prompt_hash, prompt_key
from rlhf_trl.data.readers import Misfit, WrongRow, check_reader, examples_of, forms
from rlhf_trl.errors import InputError, within

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

LEFT_OUT = "left_out"  # a column: why a reader makes nothing of a row
PART = 1 << 20  # bytes of a file to hash at once
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class FileData:
    """The `dataset:` block of a data set of one's own.

    `eval_size` prompts, chosen by a hash of their text, are held out with all their rows; or, with
    `eval_path` (by default `path`) or `eval_split` (by default `split` without its slice), the
    first `eval_size` prompts there (by default 256) that are not trained on.
    """

    path: str  # file (JSON, JSONL, Parquet, CSV), folder or hub name
    source: Literal["path"] = "path"
    split: str = "train"  # of a hub data set, or a slice: train[:90%]
    eval_path: str | None = None  # held-out rows from another file
    eval_split: str | None = None  # held-out rows from another slice
    eval_size: int | None = within("1 or more", None)  # prompts to hold out
    columns: dict[str, str] = field(default_factory=dict)  # {our name: the data set's name}
    name: str | None = None  # config of a hub data set
    reader: str | None = None  # of a published data set: gsm8k, hh, prm800k, ...
    system_prompt: str | None = None  # for prompts without a system message


@dataclass
class Samples:
    """The `samples:` block: a greedy and a sampled answer to each of some held-out prompts."""

    every: int = within("0 or more", 0)  # steps between panels; 0: no panels
    count: int = within("1 or more", 4)  # prompts in a panel
    choice: Literal["fixed", "round_robin"] = "round_robin"  # always the first ones, or the next
    file: str | None = None  # other prompts: a JSON list, or one per line
    temperature: float = within("0 or more", 1.0)  # of the sampled answer
    top_p: float = within("a number above 0, at most 1", 1.0)  # of the sampled answer
    max_tokens: int | None = within("1 or more", None)  # null: as in evaluation
    start: bool = True  # one panel before the first update


@dataclass
class Examples:
    """The examples of a run.

    `train` holds pairs (`prompt`, `chosen`, `rejected`, perhaps `margin` and `kind`, "offline" or
    "on_policy"), unpaired examples (`prompt`, `completion`, `label`), ranked lists (`prompt`,
    `ranked`), outcomes (unpaired ones with `finished`), traces (`prompt`, `completions`, `labels`),
    demonstrations (`prompt`, `completion`), or prompts with all columns beside them; `held_out`
    examples like them for evaluation. `dropped` counts the rows left out, by reason;
    `candidates` are outcomes to rank, those of one prompt in a row.
    """

    train: "Dataset"
    held_out: "Dataset | None"
    tasks: GymTasks | None
    dropped: dict[str, int]
    candidates: list[Row] = field(default_factory=list)

    @property
    def conversational(self) -> bool:
        """Whether prompts are lists of messages."""
        return isinstance(self.train[0]["prompt"], list)


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
    from datasets import load_dataset

    lines = forms(reader)[0].lines if reader else ()
    kind, files = _files(path, name, key)
    folder = Path(path).is_dir()
    try:
        if lines and (not kind or files[0].suffix.lower() == ".jsonl"):
            given = {"path": "text", **_line_files(path, split, lines)}
        elif kind and (not folder or any(f.suffix != f.suffix.lower() for f in files)):
            given = {"path": kind, "data_files": list(map(str, files))}
        else:
            given = {"path": path, "name": name}
        if Path(path).exists():
            given["cache_dir"] = _cache_of(Path(path))
        found = load_dataset(**given, split=split)
        table(found).validate(full=True)  # what is not UTF-8 is read all the same
    except Exception as error:  # the libraries below raise many kinds
        _find_fault(kind, files, key)
        said = " ".join(str(error.__cause__ or error).split())[:300]
        raise InputError(
            f"dataset.{key}: {path} cannot be read at split {split!r} ({type(error).__name__}: "
            f"{said}); write the path of a file ({', '.join(FORMATS)}) or of a copy of a hub set, "
            "dataset.name where it has several configs, and a split or slice that is not empty."
        ) from error
    if given["path"] == "json" and found.column_names == ["text"]:  # what a list of anything is
        _find_fault(kind, files, key)
    found = found.select(range(len(found))[:count])
    return _made(found, reader, path) if reader else (found, {})


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
    there = dataset.column_names
    each = [("text",) if form.lines and there == ["text"] else form.needs for form in forms(name)]
    number = next((n for n, needs in enumerate(each) if set(needs) <= set(there)), None)
    if number is None:
        lacking = next(column for column in each[0] if column not in there)
        raise InputError(
            f"dataset: row 0 of {where} has no column {lacking} but {', '.join(there)}; the reader "
            f"{name} needs {' or '.join(map(', '.join, each))}; name another, or none."
        )
    needs, kinds = list(each[number]), {**forms(name)[number].makes, LEFT_OUT: "string"}
    features = {column: _feature(kind) for column, kind in kinds.items()}
    given = {"name": name, "form": number}
    made = converted(dataset.select_columns(needs), _make, where, features, **given)
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
    listed = file.suffix == ".json" and content.lstrip()[:1] == b"["
    for n, line in enumerate([content] if listed else content.splitlines(), 1):
        where = f"dataset.{key}: {file}" + ("" if listed else f", line {n}")
        try:
            value = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON ({error}); fix it.") from error
        for m, row in enumerate(value if listed else [value]):
            if not isinstance(row, dict):
                where += f": element {m}" if listed else ""
                raise InputError(f"{where} is not an object of columns; write one.")


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
    or name, `config.columns` and the rest. No training example, of the first `count` rows, asks
    what a held-out one asks (see `prompt_key`).
    """
    import numpy as np

    check_reader(config.reader, *shapes)

    def side(key: str, path: str, split: str, limit: int | None) -> Any:
        dataset, left_out = read(path, split, limit, config.name, config.reader, key)
        found, dropped = convert(dataset, path, config.columns, **how)
        return columns.with_system_prompt(found, config.system_prompt), left_out | dropped

    size = 256 if config.eval_size is None else config.eval_size
    train, dropped = side("path", config.path, config.split, count)
    columns.check_alike(train, train[0], config.path)
    turns = getattr(config, "turns", "last")  # only demonstrations have the choice
    keys = _keys(train, turns)
    if config.eval_path or config.eval_split:
        key, path = "eval_path" if config.eval_path else "eval_split", config.eval_path
        path, split = path or config.path, config.eval_split or config.split.partition("[")[0]
        found, _ = side(key, path, split, None)
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
