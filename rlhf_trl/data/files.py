"""Data sets of one's own: files and the hub, as `datasets.Dataset`s in TRL's formats."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_trl.data.gym import GymTasks, Row
from rlhf_trl.data.readers import (
    PARTED,
    SIDES,
    UNANSWERED,
    Misfit,
    examples_of,
    forms,
    split_prompt,
)
from rlhf_trl.errors import InputError, nearest

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

UNSPLIT = f"{PARTED}, or {UNANSWERED}"
LEFT_OUT = "left_out"  # a column: why a reader makes nothing of a row
WRITTEN_CHAT = r"^\s*\[\s*\{\s*[\"'](role|content)[\"']"  # messages in a cell of a CSV file
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class FileData:
    """The `dataset:` block of a data set of one's own.

    `path` is a JSON, JSONL, Parquet or CSV file, a folder of them or a hub name (of whose configs
    `name` is one), read at `split`, such as `train[:90%]` (a file is all `train`). `reader` makes
    examples of the rows of a published data set (see `READERS`); `columns` maps this package's
    column names to the data set's, or the reader's, as in `{chosen: better}`. `system_prompt`, a
    text, is put before prompts that begin with none.

    Held out are, with all their rows, `eval_size` prompts chosen by a hash of their text; or, with
    `eval_path` (by default `path`) or `eval_split` (by default `split` without its slice), the
    first `eval_size` prompts there (by default 256) that are not trained on.
    """

    path: str
    source: Literal["path"] = "path"
    split: str = "train"
    eval_path: str | None = None
    eval_split: str | None = None
    eval_size: int | None = None
    columns: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    reader: str | None = None
    system_prompt: str | None = None


@dataclass
class Samples:
    """The `samples:` block.

    Every `every` optimizer steps (0: never), and with `start` before the first one, `count` prompts
    are answered, always the `fixed` first ones or the next ones in turn (`round_robin`). They are
    held-out prompts of the data set, or those of `file`: a JSON list of texts, or one text per
    line. Each gets a greedy answer and one sampled at `temperature` and `top_p`, of `max_tokens` at
    most; null is as in evaluation.
    """

    every: int = 0
    count: int = 4
    choice: Literal["fixed", "round_robin"] = "round_robin"
    file: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    start: bool = True


@dataclass
class Examples:
    """The examples of a run.

    Attributes:
        train: pairs (`prompt`, `chosen`, `rejected`, perhaps `margin` and `kind`, which is
            "offline" or "on_policy"), unpaired examples (`prompt`, `completion`, `label`), ranked
            lists (`prompt`, `ranked`), outcomes (unpaired ones with `finished`), traces (`prompt`,
            `completions`, `labels`), demonstrations (`prompt`, `completion`), or prompts with all
            columns that the data set has beside them.
        held_out: examples like them for evaluation, or None.
        tasks: the gym tasks behind them, or None.
        dropped: how many rows were left out, by the reason.
        candidates: outcomes to rank, those of one prompt in a row; empty where there are none.
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
) -> tuple["Dataset", dict[str, int]]:
    """Return the first `count` rows of a file, folder or hub data set, and what was left out.

    With a `reader`, they are the examples that it makes of these rows; it counts the rows of which
    it makes none, by the reason.

    Raises:
        InputError: no such file, data set, split or reader, or a row that cannot be read.
    """
    from datasets import load_dataset

    lines = forms(reader)[0].lines if reader else ()
    kind, files = _files(path, name)
    folder = Path(path).is_dir()
    try:
        if lines and (not kind or files[0].suffix.lower() == ".jsonl"):
            given = {"path": "text", **_line_files(path, split, lines)}
        elif kind and (not folder or any(f.suffix != f.suffix.lower() for f in files)):
            given = {"path": kind, "data_files": list(map(str, files))}
        else:
            given = {"path": path, "name": name}
        found = load_dataset(**given, split=split)
        table(found).validate(full=True)  # what is not UTF-8 is read all the same
    except Exception as error:  # the libraries below raise many kinds
        if kind == "json":
            list(map(_check_json, files))
        said = " ".join(str(error.__cause__ or error).split())[:300]
        raise InputError(
            f"dataset: {path} cannot be read at split {split!r} ({type(error).__name__}: {said}); "
            f"write the path of a file ({', '.join(FORMATS)}) or of a local copy of a hub data "
            "set, its config as dataset.name where it has several, and one of its splits or a "
            "slice that is not empty (a file is all train), such as train[:90%]."
        ) from error
    if given["path"] == "json" and found.column_names == ["text"]:  # what a list of anything is
        list(map(_check_json, files))
    found = found.select(range(len(found))[:count])
    return _made(found, reader, path) if reader else (found, {})


def _files(path: str, name: str | None) -> tuple[str | None, list[Path]]:
    """Return the kind of a file, or of those in a folder, and the files; None: a hub name."""
    from datasets.data_files import FILES_TO_IGNORE

    source = Path(path)
    there = sorted(source.iterdir()) if source.is_dir() else [source]
    files = [f for f in there if f.suffix.lower() in FORMATS and f.name not in FILES_TO_IGNORE]
    kinds = list(dict.fromkeys(FORMATS[file.suffix.lower()] for file in files))
    if len(kinds) > 1:
        raise InputError(
            f"dataset.path: {path} has files of several kinds ({' and '.join(kinds)}); write the "
            "path of a folder with one."
        )
    if files == [source] and not source.is_file():
        raise InputError(f"dataset: there is no file {path!r}; write the path of one.")
    if source.is_file() and not files:
        raise InputError(
            f"dataset.path: {path} is a file of a kind that is not read; save it as one of "
            f"{', '.join(FORMATS)}."
        )
    if name and source.is_file():
        raise InputError(f"dataset.name: {path} is a file, which has no configs; remove it.")
    return next(iter(kinds), None), files


def _line_files(path: str, split: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what names the files of a data set that is read line by line."""
    from huggingface_hub import hf_hub_download

    if Path(path).exists():
        return {"data_dir": path} if Path(path).is_dir() else {"data_files": path}
    splits = [part.partition("[")[0] for part in split.split("+")]
    found = {
        part: [hf_hub_download(path, name.format(part), repo_type="dataset") for name in names]
        for part in dict.fromkeys(splits)
    }
    return {"data_files": found}


def _made(dataset: "Dataset", name: str, where: str) -> tuple["Dataset", dict[str, int]]:
    """Return the examples that a reader makes of rows, and how many rows it makes none of."""
    from datasets import Features

    there = dataset.column_names
    each = [("text",) if form.lines and there == ["text"] else form.needs for form in forms(name)]
    number = next((n for n, needs in enumerate(each) if set(needs) <= set(there)), None)
    if number is None:
        lacking = next(column for column in each[0] if column not in there)
        raise InputError(
            f"dataset: row 0 of {where} has no column {lacking}; the reader {name} needs "
            f"{' or '.join(map(', '.join, each))}, and there are {', '.join(there)}; name another "
            "reader, or none."
        )
    needs, kinds = list(each[number]), {**forms(name)[number].makes, LEFT_OUT: "string"}
    made = dataset.select_columns(needs).map(
        _make,
        with_indices=True,
        batched=True,
        remove_columns=needs,
        features=Features({column: _feature(kind) for column, kind in kinds.items()}),
        fn_kwargs={"name": name, "form": number, "where": where, "code": code()},
    )
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


def _make(
    batch: dict[str, list[Any]], numbers: list[int], name: str, form: int, where: str, code: str
) -> dict[str, list[Any]]:
    reader, found = forms(name)[form], []
    for n, *cells in zip(numbers, *batch.values(), strict=True):
        try:
            made = examples_of(dict(zip(batch, cells, strict=True)), reader)
        except Misfit as error:
            raise InputError(
                f"dataset: row {n} of {where}: {error}; the reader {name} reads rows of another "
                "form, so mend or remove the row, or name another reader."
            ) from error
        found += [{LEFT_OUT: one} if isinstance(one, str) else one for one in made]
    return {column: [row.get(column) for row in found] for column in (*reader.makes, LEFT_OUT)}


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


def _check_json(file: Path) -> None:
    """Name the line of a JSON file, or the element of its list, that is not an object."""
    content = file.read_bytes()
    if content.strip() in (b"", b"[]"):
        raise InputError(f"dataset: {file} has no rows; there is nothing to train on.")
    lines = {f", line {n}": line for n, line in enumerate(content.splitlines(), 1)}
    listed = file.suffix == ".json" and content.lstrip()[:1] == b"["
    for where, line in ({"": content} if listed else lines).items():
        where = f"dataset.path: {file}{where}"
        try:
            value = json.loads(line.decode()) if line.strip() else {}
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where} is not UTF-8 text (byte {error.start}: {error.reason}); save the file as "
                "UTF-8."
            ) from error
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON ({error}); mend it.") from error
        for n, row in enumerate(value if listed else [value]):
            if not isinstance(row, dict):
                where += f": element {n}" if listed else ""
                raise InputError(f"{where} is not an object of columns; write one.")


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a `samples.file`.

    Raises:
        InputError: a file that cannot be read, or holds none.
    """
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
    max_samples: int | None,
    convert: Callable[..., tuple["Dataset", dict[str, int]]],
    **options: Any,
) -> Examples:
    """Read what a block with `source: path` names.

    `convert` makes examples of what was read, and counts what it leaves out; it takes its file or
    name, `config.columns` and the `options`, too. None of the training examples (of the first
    `max_samples` rows) has a prompt that is held out.

    Raises:
        InputError: an `eval_size` that leaves a side empty, or what `read` and `convert` raise.
    """
    import numpy as np

    def side(path: str, split: str, count: int | None) -> tuple["Dataset", dict[str, int]]:
        dataset, left_out = read(path, split, count, config.name, config.reader)
        found, dropped = convert(dataset, path, config.columns, **options)
        return with_system_prompt(found, config.system_prompt), left_out | dropped

    size = 256 if config.eval_size is None else config.eval_size
    if size < 1:
        raise InputError(
            f"dataset.eval_size: {size} leaves nothing to evaluate on; write 1 or more, or remove "
            "it."
        )
    train, dropped = side(config.path, config.split, max_samples)
    _check_alike(train, train[0], config.path)
    if config.eval_path or config.eval_split:
        path = config.eval_path or config.path
        found, _ = side(path, config.eval_split or config.split.partition("[")[0], None)
        _check_alike(found, train[0], path)
        return _without_trained(train, found, size, dropped, path)
    if config.eval_size is None:
        return Examples(train, None, None, dropped)
    keys = _keys(train)
    held = np.isin(keys, np.unique(keys)[:size])
    if held.all():
        raise InputError(
            f"dataset.eval_size: {config.path} has {len(np.unique(keys))} different prompts, and "
            f"{size} held out leave nothing to train on; write less."
        )
    sides = [train.select(np.flatnonzero(which)) for which in (~held, held)]
    return Examples(*sides, None, dropped)


def _without_trained(
    train: "Dataset", found: "Dataset", size: int, dropped: dict[str, int], where: str
) -> Examples:
    """Hold out the first `size` prompts of `found` that are not trained on."""
    import numpy as np

    keys = _keys(found)
    fresh = np.flatnonzero(~np.isin(keys, _keys(train)))
    if not len(fresh):
        raise InputError(
            f"dataset: all prompts of {where} to evaluate on are trained on; give split and "
            "eval_split different slices, such as train[:90%] and train[90%:], evaluate on another "
            "file, or write eval_size alone, which holds prompts out."
        )
    chosen = list(dict.fromkeys(keys[fresh].tolist()))[:size]
    held_out = found.select(fresh[np.isin(keys[fresh], chosen)])
    dropped["to evaluate on: the prompt is trained on"] = len(found) - len(fresh)
    return Examples(train, held_out, None, dropped)


def _keys(dataset: "Dataset") -> "np.ndarray":
    """Return a hash of each prompt (B,), equal where they are the same but for letter case."""
    import numpy as np

    batches = dataset.select_columns(["prompt"]).iter(1000)
    digests = (
        blake2b(_same(prompt).encode(), digest_size=8).digest()
        for batch in batches
        for prompt in batch["prompt"]
    )
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _same(prompt: Any) -> str:
    """Return what makes two prompts the same: as in the gym, not letter case or outer space."""
    if isinstance(prompt, list):
        prompt = repr([(m["role"], m["content"].strip()) for m in prompt])
    return prompt.strip().lower()


def _check_alike(dataset: "Dataset", model: Row, where: str) -> None:
    """Refuse texts among messages, and examples with other columns than `model` has."""
    from datasets import Json

    read = ("prompt", *SIDES, "ranked", "completions")  # what else there is, rewards make sense of
    mixed = any(isinstance(feature, Json) for feature in dataset.features.values())
    for n, row in enumerate(dataset if mixed else dataset.select([0])):
        for name in dict.fromkeys([*model, *row]):
            kinds = (_form(r[name], name in read) if name in r else "missing" for r in (row, model))
            one, other = kinds
            if one != other:
                raise InputError(
                    f"dataset: {where}: {name} is {one} in row {n} of those that are left and "
                    f"{other} in the first training row; write the same in all."
                )


def _form(value: Any, read: bool) -> str:
    if read and isinstance(value, list):
        return "messages" if isinstance(value[0], dict) else f"a list of {_form(value[0], read)}"
    return "a text" if read and isinstance(value, str) else "a value"


# --- columns -------------------------------------------------------------------------------------


def renamed(
    dataset: "Dataset",
    where: str,
    columns: Mapping[str, str],
    shapes: Sequence[Sequence[str]],
    optional: Sequence[str] = (),
) -> "Dataset":
    """Return the columns of a shape under this package's names, and no others.

    The first of the `shapes` whose second column is there is meant, or else the last; those of
    `optional` may be missing. Messages have no key that is None; conversations do not repeat the
    prompt, which is taken out of them where it is missing, and rows with `UNSPLIT` ones are left
    out.

    Raises:
        InputError: a column to map that is not there or not read, or one that is missing.
    """
    from datasets import Json

    there = dataset.column_names
    known = dict.fromkeys([*(name for shape in shapes for name in shape), *optional])
    for ours, theirs in columns.items():
        if ours not in known:
            raise InputError(
                f"dataset.columns: {ours!r} is not a column that is read{nearest(ours, known)}; "
                f"write one of {', '.join(known)}."
            )
        if theirs not in there:
            raise InputError(
                f"dataset.columns: {where} has no column {theirs!r}{nearest(theirs, there)}; it "
                f"has {', '.join(there)}."
            )
    names = {name: columns.get(name, name) for name in known}
    shape = next((s for s in shapes if names[s[1]] in there), shapes[-1])
    found = [name for name in (*shape, *optional) if names[name] in there]
    first = {names[name]: name for name in reversed(found)}
    dataset = dataset.select_columns(list(first)).rename_columns(first)
    for name in found:
        if (one := first[names[name]]) != name:  # a column may be read as two
            dataset = dataset.add_column(name, dataset[one][:], feature=dataset.features[one])
    if isinstance(dataset.features.get("prompt"), Json):  # different kinds of values
        _check_alike(prompts := dataset.select_columns(["prompt"]), prompts[0], where)
    dataset = _split_prompts(without_none(dataset, dataset.column_names, where), where)
    if lacking := [name for name in shape if name not in dataset.column_names]:
        others = shapes[list(shapes).index(shape) + 1 :]
        also = "".join(f" (or {', '.join(other)})" for other in others)
        raise InputError(
            f"dataset: row 0 of {where} lacks {', '.join(lacking)}; needed are "
            f"{', '.join(shape)}{also}, and there are {', '.join(there)}; map them with "
            f"dataset.columns, as in {{{lacking[0]}: {there[0]}}}."
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


def code() -> str:
    """Return what tells the code here from other versions; `datasets` knows functions by name."""
    from datasets.fingerprint import Hasher

    return Hasher.hash([path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))])


def _split_prompts(dataset: "Dataset", where: str) -> "Dataset":
    """Take the prompt out of conversations, where any has to be split."""
    from datasets import Features, List, Value

    features, there = dict(dataset.features), dataset.column_names
    sides = [name for name in SIDES if name in there]
    chats = [name for name in there if not isinstance(features[name], Value | dict)]
    if not sides or not ("prompt" in chats or set(sides) <= set(chats)):
        return dataset
    if {"prompt", *sides} <= set(chats):
        answers = [_are_answers(table(dataset.select_columns([name]))[name]) for name in sides]
        if all(answers):
            return dataset
    for name in sides:
        if getattr(features[name], "dtype", "").endswith("string"):
            features[name] = List({"role": Value("string"), "content": Value("string")})
    if "prompt" not in chats:
        features["prompt"] = features[sides[0]]
    given = {"code": code()}
    split = dataset.map(_split_batch, batched=True, features=Features(features), fn_kwargs=given)
    if not len(split):
        raise InputError(
            f"dataset: in all {len(dataset)} rows of {where} {UNSPLIT}; there is nothing to train "
            "on."
        )
    return split


def unsplit(given: "Dataset", found: "Dataset") -> dict[str, int]:
    """Return how many of the given rows `renamed` left out, by the reason."""
    return {UNSPLIT: len(given) - len(found)} if len(found) < len(given) else {}


def _are_answers(column: "pa.ChunkedArray") -> bool:
    """Whether all cells are lists of one message of the assistant."""
    import pyarrow as pa
    import pyarrow.compute as pc

    inner = column.type.value_type if is_list(column.type) else pa.null()
    if not pa.types.is_struct(inner) or inner.get_field_index("role") < 0:
        return False
    roles = pc.struct_field(pc.list_flatten(column), "role")
    one = pc.all(pc.equal(pc.list_value_length(column), 1)).as_py()
    return one and pc.all(pc.equal(roles, "assistant")).as_py()


def _split_batch(batch: dict[str, list[Any]], code: str) -> dict[str, list[Any]]:
    rows = zip(*batch.values(), strict=True)
    split = (split_prompt(dict(zip(batch, row, strict=True))) for row in rows)
    rows = [row for row in split if not isinstance(row, str)]
    return {name: [row.get(name) for row in rows] for name in ("prompt", *batch)}


def with_system_prompt(dataset: "Dataset", text: str | None) -> "Dataset":
    """Put a system message before prompts that begin with none; what is plain becomes messages."""
    from datasets import Features, Json, List

    if text is None:
        return dataset
    if "completions" in dataset.column_names:
        raise InputError(
            "dataset.system_prompt is not read with traces, which are plain; remove it."
        )
    names = [name for name in ("prompt", *SIDES, "ranked") if name in dataset.column_names]
    chats = {n: List(List(Json())) if n == "ranked" else List(Json()) for n in names}
    return dataset.map(
        _system_batch,
        batched=True,
        features=Features({**dataset.features, **chats}),
        fn_kwargs={"text": text, "code": code()},
    )


def _system_batch(batch: dict[str, list[Any]], text: str, code: str) -> dict[str, list[Any]]:
    system = {"role": "system", "content": text}
    prompts = [as_messages(prompt, "user") for prompt in batch["prompt"]]
    found = {"prompt": [p if p[0]["role"] == "system" else [system, *p] for p in prompts]}
    for name in (name for name in SIDES if name in batch):
        found[name] = [as_messages(side, "assistant") for side in batch[name]]
    if "ranked" in batch:
        found["ranked"] = [[as_messages(s, "assistant") for s in row] for row in batch["ranked"]]
    return found


def as_messages(value: Any, role: str) -> list[dict[str, str]]:
    """Return messages as they are, and a text as the only one, of `role`."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def differing(dataset: "Dataset", *sides: str) -> "Dataset":
    """Leave out the examples whose two sides are the same."""
    found = dataset.filter(_differ, input_columns=list(sides), batched=True)
    return found if len(found) < len(dataset) else dataset


def _differ(ones: list[Any], others: list[Any]) -> list[bool]:
    return [one != other for one, other in zip(ones, others, strict=True)]


# --- cells ---------------------------------------------------------------------------------------


def table(dataset: "Dataset") -> "pa.Table":
    """Return the Arrow table of a data set, which is a view where its rows are neighbors."""
    return dataset.with_format("arrow")[:]


def is_list(kind: "pa.DataType") -> bool:
    """Whether an Arrow type is that of lists of any length."""
    import pyarrow as pa

    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def check_cells(dataset: "Dataset", names: Sequence[str], where: str) -> None:
    """Let `check_cell` look at what may be wrong in whole columns."""
    import numpy as np

    for name in names:
        chunks = table(dataset.select_columns([name]))[name].chunks
        sound = [_is_boolean(cells) if name == "label" else _sound(cells) for cells in chunks]
        for n in np.flatnonzero(~np.concatenate(sound)).tolist():
            check_cell(name, dataset[n][name], f"row {n} of {where}")


def _is_boolean(cells: "pa.Array") -> "np.ndarray":
    """Tell which cells are booleans."""
    import numpy as np
    import pyarrow as pa

    boolean = pa.types.is_boolean(cells.type)
    return _mask(cells.is_valid()) if boolean else np.zeros(len(cells), dtype=bool)


def _sound(cells: "pa.Array") -> "np.ndarray":
    """Tell which cells are surely no fault: texts, and messages with a text."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = cells.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        blank = pc.or_(pc.equal(pc.utf8_length(cells), 0), pc.utf8_is_space(cells))
        return _mask(pc.invert(pc.or_(blank, pc.match_substring_regex(cells, WRITTEN_CHAT))))
    inner = kind.value_type if is_list(kind) else pa.null()
    if not pa.types.is_struct(inner) or not {"role", "content"} <= {f.name for f in inner}:
        return np.zeros(len(cells), dtype=bool)
    lengths = pc.fill_null(pc.list_value_length(cells), 0).to_numpy()
    texts = pc.struct_field(cells.flatten(), "content")
    each, last = _mask(texts.is_valid()), _sound(texts)  # only the last must not be blank
    found, ends = lengths > 0, np.cumsum(lengths) - 1
    found[found] = last[ends[found]]
    found[np.repeat(np.arange(len(lengths)), lengths)[~each]] = False
    return found


def _mask(values: "pa.Array") -> "np.ndarray":
    return values.fill_null(False).to_numpy(zero_copy_only=False)


def check_cell(name: str, value: Any, where: str) -> None:
    """Refuse a label that is not boolean, and any other cell without a text."""
    if name == "label":
        if not isinstance(value, bool):
            raise InputError(
                f"dataset: {where}: label is {value!r}, which is not boolean; write true for "
                "desirable and false for undesirable."
            )
        return
    if isinstance(value, list) and value:
        if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
            raise InputError(
                f"dataset: {where}: {name} is a list, but not of messages with role and content."
            )
        if not all(isinstance(m["content"], str) for m in value):
            raise InputError(f"dataset: {where}: a message of {name} has no text.")
        value = value[-1]["content"]
    elif value is not None and not isinstance(value, str | list):
        raise InputError(
            f"dataset: {where}: {name} is {value!r}; write a text or a list of messages."
        )
    elif isinstance(value, str) and re.match(WRITTEN_CHAT, value):
        raise InputError(
            f"dataset: {where}: {name} is a text that spells out messages, as a CSV file has them; "
            "save them as messages, in JSON lines or Parquet."
        )
    if not value or not value.strip():
        raise InputError(f"dataset: {where}: {name} is empty; fill it or remove the row.")
