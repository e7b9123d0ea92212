"""Preference data: pairs made from reasoning-gym tasks, and data sets of files and the hub."""

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_trl.data.gym import GymData, GymTasks
from rlhf_trl.data.verifiers import completion_text, exact_match
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.tiny.demonstrator import ONLY_RIGHT, demonstrate, only_errors

PAIRED = ("prompt", "chosen", "rejected")
UNPAIRED = ("prompt", "completion", "label")
ATTEMPTS = 100  # orders tried before there are said to be too few different prompts
Row = dict[str, Any]
Sample = Callable[[list[Row], int, str], list[Row]]


@dataclass
class FileData:
    """The `dataset:` block of a data set of one's own.

    `path` is a JSON, JSONL or Parquet file or a hub name, read at `split`, such as `train[:90%]` (a
    file is all `train`); `columns` maps this package's column names to the data set's, as in
    `{chosen: better}`. With `eval_path` (by default `path`) or `eval_split` (by default `split`
    without its slice), the first `eval_size` prompts there (by default 256) are held out, with all
    their rows; training rows with one of them are left out.
    """

    path: str
    source: Literal["path"] = "path"
    split: str = "train"
    eval_path: str | None = None
    eval_split: str | None = None
    eval_size: int | None = None
    columns: dict[str, str] = field(default_factory=dict)


@dataclass
class OfflinePairs(GymData):
    """Pairs of the right answer and one of the demonstrator's errors."""

    pairs: Literal["offline"] = "offline"


@dataclass
class SampledPairs(GymData):
    """Pairs of a right and a wrong answer among `samples_per_prompt` that a model samples.

    The model is `sampled_from`, or the one that is trained. `mixed` are these (`on_policy`) and the
    offline pairs of all questions, shuffled.
    """

    pairs: Literal["on_policy", "mixed"] = "on_policy"
    samples_per_prompt: int = 8
    sampled_from: str | None = None


PreferenceData = OfflinePairs | SampledPairs | FileData  # the `dataset:` block of preference data


@dataclass
class Samples:
    """The `samples:` block.

    Every `every` optimizer steps (0: never), `count` prompts are answered, always the `fixed` first
    ones or the next ones in turn (`round_robin`). They are held-out prompts of the data set, or
    those of `file`: a JSON list of texts, or one text per line.
    """

    every: int = 0
    count: int = 4
    choice: Literal["fixed", "round_robin"] = "round_robin"
    file: str | None = None


class Sides:
    """Training and held-out rows as data sets."""

    train: list[Row]
    held_out: list[Row] | None

    @property
    def conversational(self) -> bool:
        """Whether prompts are lists of messages."""
        return isinstance(self.train[0]["prompt"], list)

    @property
    def train_dataset(self) -> Any:
        """The training rows as a `Dataset`."""
        from datasets import Dataset

        return Dataset.from_list(self.train)

    @property
    def eval_dataset(self) -> Any:
        """The held-out rows as a `Dataset`, or None."""
        from datasets import Dataset

        return Dataset.from_list(self.held_out) if self.held_out else None


@dataclass
class Preferences(Sides):
    """The rows of a run.

    Attributes:
        train: rows with the columns `PAIRED` or `UNPAIRED`; pairs have a `margin` where it is read
            and there, and a `kind` ("offline" or "on_policy") where both are mixed.
        held_out: rows like them for evaluation, or None.
        tasks: the gym tasks behind them, or None.
        dropped: how many rows were left out, by the reason.
    """

    train: list[Row]
    held_out: list[Row] | None
    tasks: GymTasks | None
    dropped: dict[str, int]


def load_preferences(
    config: PreferenceData,
    max_samples: int | None = None,
    unpaired: bool = False,
    sample: Sample | None = None,
    margin: bool = False,
) -> Preferences:
    """Make or read the rows that a `dataset:` block describes.

    Args:
        config: the block.
        max_samples: the first so many training rows only; None: all.
        unpaired: whether rows with `UNPAIRED` columns are accepted beside pairs.
        sample: returns answers, as rows with a `completion`, those of one question in a row; takes
            rows of `GymTasks`, the number of answers to each, and their side, "train" or
            "held-out". Pairs are made of the first so many, should there be more.
        margin: whether a column `margin` is read.

    Raises:
        InputError: nothing to train on, or data that cannot be: see `checked_rows`.
    """
    check_max_samples(max_samples)
    if isinstance(config, FileData):

        def check(rows: list[Row], where: str) -> tuple[list[Row], dict[str, int]]:
            return checked_rows(rows, where, config.columns, unpaired, margin)

        train, held_out, dropped = from_path(config, max_samples, check)
        return Preferences(train, held_out, None, dropped)
    tasks = GymTasks(config)
    asked = tasks.train[:max_samples]
    if config.pairs == "offline":
        held_out = offline_pairs(tasks.held_out, config.eval_seed)
        return Preferences(offline_pairs(asked, config.seed), held_out, tasks, {})
    count = config.samples_per_prompt
    if count < 2:
        raise InputError(f"dataset.samples_per_prompt: {count} is no pair; write 2 or more.")

    def pairs(rows: list[Row], side: str) -> list[Row]:
        each = groups(sample(rows, count, side), len(rows))
        texts = [[completion_text(row["completion"]) for row in group[:count]] for group in each]
        return on_policy_pairs(rows, texts, config.seed)

    rows = pairs(asked, "train")
    if not rows:
        raise InputError(
            "dataset.pairs: on no prompt did the model give both right and wrong answers, so there "
            "is no on-policy pair; raise dataset.size or samples_per_prompt, or use offline pairs."
        )
    dropped = {f"right and wrong not both among {count} samples": len(asked) - len(rows)}
    held_out = pairs(tasks.held_out, "held-out")
    if config.pairs == "mixed":
        rows = mixed_pairs(offline_pairs(asked, config.seed), rows, config.seed)
        offline = offline_pairs(tasks.held_out, config.eval_seed)
        held_out = mixed_pairs(offline, held_out, config.eval_seed)
    return Preferences(rows, held_out or None, tasks, dropped)


def check_max_samples(max_samples: int | None) -> None:
    """Refuse a `max_samples` that leaves nothing."""
    if max_samples is not None and max_samples < 1:
        raise InputError(f"max_samples: {max_samples} leaves the data set empty; write 1 or more.")


def groups(rows: list[Row], number: int) -> list[list[Row]]:
    """Cut rows into so many groups of neighbors, equally many in each."""
    size = len(rows) // number
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def offline_pairs(rows: Iterable[Row], seed: int) -> list[Row]:
    """Return one pair per row of `GymTasks`: the right answer, and one of the usual errors.

    Args:
        rows: rows with `prompt`, `task`, `question` and `answer`.
        seed: of the choice of errors.
    """
    rng = random.Random(seed)

    def answer(row: Row, mixture: Mapping[str, float]) -> list[dict[str, str]]:
        text = demonstrate(row["task"], row["question"], row["answer"], rng, mixture)
        return [{"role": "assistant", "content": text}]

    return [
        {
            "prompt": row["prompt"],
            "chosen": answer(row, ONLY_RIGHT),
            "rejected": answer(row, only_errors(row["task"])),
        }
        for row in rows
    ]


def on_policy_pairs(
    rows: Sequence[Row], completions: Sequence[Sequence[str]], seed: int
) -> list[Row]:
    """Return a pair for each row among whose completions some are right and some wrong.

    Args:
        rows: rows with `prompt`, `task` and `answer`.
        completions: the texts sampled for each.
        seed: of the choice among the right and among the wrong ones.
    """
    rng = random.Random(seed)
    pairs = []
    for row, texts in zip(rows, completions, strict=True):
        count = len(texts)
        right = exact_match(list(texts), answer=[row["answer"]] * count, task=[row["task"]] * count)
        sides = [[t for t, r in zip(texts, right, strict=True) if r == want] for want in (1, 0)]
        if all(sides):
            chosen, rejected = ([{"role": "assistant", "content": rng.choice(s)}] for s in sides)
            pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def mixed_pairs(offline: list[Row], on_policy: list[Row], seed: int) -> list[Row]:
    """Return both kinds of pairs, shuffled; the column `kind` says which one a pair is."""
    rows = [{**row, "kind": "offline"} for row in offline]
    rows += [{**row, "kind": "on_policy"} for row in on_policy]
    random.Random(seed).shuffle(rows)
    return rows


def from_path(
    config: FileData,
    max_samples: int | None,
    check: Callable[[list[Row], str], tuple[list[Row], dict[str, int]]],
) -> tuple[list[Row], list[Row] | None, dict[str, int]]:
    """Read what a block with `source: path` names.

    Args:
        config: the block.
        max_samples: the first so many training rows only; None: all.
        check: makes rows to train on of those read (the second argument names them in error
            messages), and counts what it leaves out.

    Returns:
        Training rows, none with a prompt that is held out; held-out rows or None, all those of
        `eval_size` prompts; and the counts of the training side.

    Raises:
        InputError: no path, only held-out prompts, or what `read_rows` and `check` raise.
    """
    train, dropped = check(read_rows(config.path, config.split, max_samples), config.path)
    _check_alike(train, train[0], config.path)
    if not (config.eval_path or config.eval_split):
        if config.eval_size is not None:
            raise InputError(
                "dataset.eval_size is not read without eval_path or eval_split; write one of them, "
                "or remove it."
            )
        return train, None, dropped
    size = 256 if config.eval_size is None else config.eval_size
    if size < 1:
        raise InputError(
            f"dataset.eval_size: {size} leaves nothing to evaluate on; write 1 or "
            "more, or remove eval_path and eval_split."
        )
    path = config.eval_path or config.path
    found, _ = check(read_rows(path, config.eval_split or config.split.partition("[")[0]), path)
    _check_alike(found, train[0], path)
    prompts = set([*dict.fromkeys(map(_prompt, found))][:size])
    held_out = [row for row in found if _prompt(row) in prompts]
    rest = [row for row in train if _prompt(row) not in prompts]
    if not rest:
        raise InputError(
            f"dataset: all {len(train)} training rows of {config.path} have a prompt that is held "
            "out, so there is nothing to train on; give split and eval_split different slices, "
            "such as train[:90%] and train[90%:], or evaluate on another file."
        )
    return rest, held_out, {**dropped, "the prompt is held out": len(train) - len(rest)}


def _prompt(row: Row) -> str:
    """Return what makes two prompts the same: as in the gym, not letter case or outer space."""
    prompt = row["prompt"]
    if isinstance(prompt, list):
        prompt = repr([(m["role"], m["content"].strip()) for m in prompt])
    return prompt.strip().lower()


def _check_alike(rows: Sequence[Row], model: Row, where: str) -> None:
    """Refuse texts among messages, and rows with other columns than `model` has."""
    for n, row in enumerate(rows):
        for name in dict.fromkeys([*model, *row]):
            one, other = (_form(r.get(name)) if name in r else "missing" for r in (row, model))
            if one != other:
                raise InputError(
                    f"dataset: {where}: {name} is {one} in row {n} of those that are left and "
                    f"{other} in the first training row; write the same in all."
                )


def _form(value: Any) -> str:
    if isinstance(value, list):
        return "messages" if isinstance(value[0], dict) else f"a list of {_form(value[0])}"
    return "a text" if isinstance(value, str) else "a value"


def read_rows(path: str, split: str = "train", count: int | None = None) -> list[Row]:
    """Return the rows of a JSON, JSONL or Parquet file, or of a data set on the hub.

    Args:
        path: the file, or the name of the data set.
        split: of the data set, with slices such as `train[:90%]`; a file is all `train`.
        count: the first so many only; None: all.

    Raises:
        InputError: no such file, data set or split, or a line that cannot be read.
    """
    file = Path(path)
    if file.suffix in (".json", ".jsonl", ".parquet") and not file.is_file():
        raise InputError(f"dataset.path: there is no file {path!r}; write the path of one.")
    if file.suffix == ".parquet":
        import pyarrow.parquet

        try:
            table = pyarrow.parquet.read_table(file)
        except (OSError, ValueError) as error:
            raise InputError(f"dataset.path: {path} is not a Parquet file: {error}.") from error
        return table.take(_places(table.num_rows, split, path)[:count]).to_pylist()
    if file.suffix == ".jsonl":
        lines = file.read_bytes().splitlines()
        numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
        chosen = [numbered[i] for i in _places(len(numbered), split, path)[:count]]
        return [_json(line, f"{path}, line {n}") for n, line in chosen]
    if file.suffix == ".json":
        rows = _json(file.read_bytes(), path, list)
        for n, row in enumerate(rows):
            if not isinstance(row, dict):
                raise InputError(f"dataset.path: {path}: element {n} is not an object of columns.")
        return [rows[i] for i in _places(len(rows), split, path)[:count]]
    return _from_hub(path, split, count)


def _places(count: int, split: str, path: str) -> list[int]:
    """Return which of the `count` rows of a file a split names."""
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({"train": count})
    except (ValueError, AssertionError) as error:
        raise InputError(
            f"dataset: {path} is a file, which has no split {split!r}; write train, or a slice "
            "such as train[:90%], for split and eval_split."
        ) from error
    found = [i for part in parts for i in range(part.from_, part.to)]
    if count and not found:
        raise InputError(
            f"dataset: {path} has {count} rows, and split {split!r} holds none of them; write "
            "slices such as train[:90%] and train[90%:] for split and eval_split."
        )
    return found


def _json(content: bytes, where: str, kind: type = dict) -> Any:
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise InputError(
            f"dataset.path: {where} is not UTF-8 text (byte {error.start}: {error.reason}); save "
            "the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise InputError(f"dataset.path: {where} is not JSON ({error}); mend it.") from error
    if not isinstance(value, kind):
        wanted = "a list of rows" if kind is list else "an object of columns"
        raise InputError(f"dataset.path: {where} is not {wanted}.")
    return value


def _from_hub(path: str, split: str, count: int | None) -> list[Row]:
    from datasets import load_dataset

    try:
        found = load_dataset(path, split=split)
        return found.select(range(len(found))[:count]).to_list()
    except Exception as error:  # the hub's client raises many kinds
        raise InputError(
            f"dataset.path: {path!r} is neither a .json, .jsonl or .parquet file here nor a data "
            f"set that can be reached with split {split!r} ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}); download it and write the path "
            "of a local copy."
        ) from error


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


def checked_rows(
    rows: Sequence[Row],
    where: str,
    columns: Mapping[str, str],
    unpaired: bool,
    margin: bool = False,
) -> tuple[list[Row], dict[str, int]]:
    """Rename columns, bring messages into one form, and refuse what cannot be trained on.

    Args:
        rows: as they were read.
        where: their file or data set, for error messages.
        columns: from this package's names to those of the rows.
        unpaired: whether `UNPAIRED` rows are accepted, too.
        margin: whether a column `margin` of pairs is kept.

    Returns:
        The rows with `PAIRED` or `UNPAIRED` columns only, and how many were left out.

    Raises:
        InputError: no rows; columns that are missing; an empty prompt or completion; chosen and
            rejected the same everywhere; labels that are not boolean; a margin that is no number.
    """
    optional = ("margin",) if margin else ()
    found = renamed(rows, where, columns, (PAIRED, UNPAIRED) if unpaired else (PAIRED,), optional)
    single = "chosen" not in found[0]
    wanted = UNPAIRED if single else PAIRED
    converted, same = [], 0
    for n, row in enumerate(found):
        for name in wanted:
            check_cell(name, row[name], f"row {n} of {where}")
        if "margin" in row:
            row["margin"] = _margin(row["margin"], f"row {n} of {where}")
        if not single and row["chosen"] == row["rejected"]:
            same += 1
            continue
        converted.append(row)
    if not converted:
        raise InputError(
            f"dataset: chosen and rejected are the same in all {same} rows of {where}, so there is "
            "nothing to prefer."
        )
    if single and len(labels := {row["label"] for row in converted}) == 1:
        raise InputError(
            f"dataset: label is {str(labels.pop()).lower()} in all rows of {where}; KTO needs both "
            "desirable and undesirable examples."
        )
    return converted, {"chosen identical to rejected": same} if not single else {}


def renamed(
    rows: Sequence[Row],
    where: str,
    columns: Mapping[str, str],
    shapes: Sequence[Sequence[str]],
    optional: Sequence[str] = (),
) -> list[Row]:
    """Return rows with the columns of one of `shapes`, and those of `optional` that are there.

    Args:
        rows: as they were read.
        where: their file or data set, for error messages.
        columns: from this package's names to those of the rows.
        shapes: columns that go together; the first shape whose second column is there is meant,
            or else the last.
        optional: columns that all rows have or none.

    Raises:
        InputError: no rows, a column to map that is not there or not read, or one that is missing.
    """
    if not rows:
        raise InputError(f"dataset: {where} has no rows; there is nothing to train on.")
    there = list(rows[0])
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
    others = shapes[list(shapes).index(shape) + 1 :]
    kept = [n for n in optional if n not in shape and any(names[n] in row for row in rows)]
    found = []
    for n, row in enumerate(rows):
        row = {name: row[names[name]] for name in (*shape, *kept) if names[name] in row}
        row = split_prompt(row)
        if lacking := [name for name in (*shape, *kept) if name not in row]:
            also = "".join(f" (or {', '.join(other)})" for other in others)
            raise InputError(
                f"dataset: row {n} of {where} lacks {', '.join(lacking)}; needed are "
                f"{', '.join(shape)}{also}, and there are {', '.join(there)}; map them with "
                f"dataset.columns, as in {{{lacking[0]}: {there[0]}}}."
            )
        found.append(row)
    return found


def split_prompt(row: Row) -> Row:
    """Take the prompt out of conversations that repeat it; a text beside messages becomes one."""
    sides = [name for name in ("chosen", "rejected", "completion") if name in row]
    if isinstance(row.get("prompt"), list):
        texts = {side: row[side] for side in sides if isinstance(row[side], str)}
        row = row | {s: [{"role": "assistant", "content": text}] for s, text in texts.items()}
    if not sides or not all(isinstance(row[s], list) and row[s] for s in sides):
        return row
    row = dict(row)
    if not isinstance(row.get("prompt"), list):
        before = row[sides[0]][:-1]
        if before:
            row["prompt"] = before
        elif row.get("prompt"):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    for side in sides:
        # what comes before the last message is the prompt, which is kept once
        row[side] = row[side][-1:]
    return row


def _margin(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(
            f"dataset: {where}: margin is {value!r}, which is not a number; write how much better "
            "chosen is, or remove the column."
        )
    return float(value)


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
    if not value or not value.strip():
        raise InputError(f"dataset: {where}: {name} is empty; fill it or remove the row.")


# --- token ids ---------------------------------------------------------------------------------


def shortened(
    prompt: list[int], completions: Sequence[list[int]], max_length: int | None, rule: str
) -> tuple[list[int], list[list[int]]] | None:
    """Make a prompt and its completions fit into `max_length` tokens.

    Args:
        prompt: its token ids.
        completions: those of each completion; all keep the same prompt.
        max_length: of prompt and completion together; None: no limit.
        rule: "cut_prompt" (its first tokens go), "cut_completion" (their last) or "drop".

    Returns:
        Prompt and completions, or None where the rule leaves no prompt or no completion.
    """
    longest = max(map(len, completions))
    if max_length is None or len(prompt) + longest <= max_length:
        return prompt, list(completions)
    if rule == "cut_prompt" and longest < max_length:
        return prompt[longest - max_length :], list(completions)
    if rule == "cut_completion" and len(prompt) < max_length:
        return prompt, [ids[: max_length - len(prompt)] for ids in completions]
    return None


def fit(
    dataset: Any, sides: Sequence[str], max_length: int | None, rule: str
) -> tuple[Any, dict[str, int]]:
    """Shorten or drop over-long rows of a tokenised data set, then drop pairs without contrast.

    Args:
        dataset (`Dataset`): with `prompt_ids` and the columns `sides`.
        sides: the columns of the completions.
        max_length: see `shortened`, as is `rule`.

    Returns:
        The data set that is left, and how many rows were cut and dropped, by the reason.

    Raises:
        InputError: nothing is left.
    """
    counts = {"cut": 0, "over-long": 0, "identical": 0}
    kept, rows = [], []
    for n, row in enumerate(dataset.select_columns(["prompt_ids", *sides])):
        whole = [row[side] for side in sides]
        short = shortened(row["prompt_ids"], whole, max_length, rule)
        if short is None:
            counts["over-long"] += 1
            continue
        prompt, completions = short
        counts["cut"] += short != (row["prompt_ids"], whole)
        if len(completions) == 2 and completions[0] == completions[1]:
            counts["identical"] += 1
            continue
        kept.append(n)
        rows.append({"prompt_ids": prompt, **dict(zip(sides, completions, strict=True))})
    if not kept:
        reasons = ", ".join(f"{n} {why}" for why, n in counts.items() if n and why != "cut")
        raise InputError(
            f"dataset: no row is left ({reasons}, with max_length {max_length} and "
            f"overlong: {rule}); raise max_length or choose another rule."
        )
    if sum(counts.values()) == 0:
        return dataset, counts
    dataset = dataset.select(kept)
    if counts["cut"]:
        dataset = dataset.map(lambda _, n: rows[n], with_indices=True, load_from_cache_file=False)
    return dataset, counts


def kto_order(
    labels: Sequence[bool],
    prompts: Sequence[Sequence[int]],
    batch: int,
    seed: int,
    interleave: bool = True,
) -> list[int]:
    """Return an order of unpaired examples whose neighbours never share a prompt.

    The labels are spread evenly: as many of each make them alternate. "Neighbours" are those whose
    completions TRL combines: each example of a batch and the one before it, the first and the last.

    Args:
        labels: (N,) whether each is desirable.
        prompts: (N,) their token ids.
        batch: examples per device and batch.
        seed: of the order.
        interleave: False: all desirable before all undesirable, to show what goes wrong then.

    Returns:
        Indices; the last example is left out if it would make a batch of its own.

    Raises:
        InputError: only one label; batches of one; or too few different prompts.
    """
    rng = random.Random(seed)
    classes = [
        [i for i, label in enumerate(labels) if bool(label) is want] for want in (True, False)
    ]
    if not all(classes):
        raise InputError(
            f"dataset: label is {str(bool(classes[0])).lower()} in all {len(labels)} examples; KTO "
            "needs both desirable and undesirable ones."
        )
    if batch < 2:
        raise InputError(
            "per_device_train_batch_size is 1, and KTO's reference point needs another example in "
            "the batch; write 2 or more."
        )
    keys = [tuple(ids) for ids in prompts]
    for _ in range(ATTEMPTS):
        places = []
        for side, members in enumerate(classes):
            rng.shuffle(members)
            spread = len(members) if interleave else 1
            first = 0 if interleave else side * len(labels)
            places += [(first + (k + 0.5) / spread, side, i) for k, i in enumerate(members)]
        order = [i for _, _, i in sorted(places)]
        if len(order) % batch == 1:
            order.pop()
        if _separate(order, labels, keys, batch):
            return order
    raise InputError(
        "dataset: too few different prompts for KTO, which compares each example with the "
        f"completion of another prompt in its batch of {batch}; add prompts or change "
        "per_device_train_batch_size."
    )


def _separate(order: list[int], labels: Sequence[bool], keys: list[Any], batch: int) -> bool:
    """Swap examples of one label until no neighbours share a key; tell whether that worked."""

    def before(place: int) -> int:
        first = place - place % batch
        return place - 1 if place > first else min(first + batch, len(order)) - 1

    def after(place: int) -> int:
        first = place - place % batch
        return place + 1 if place + 1 < min(first + batch, len(order)) else first

    def clashes(place: int) -> bool:
        return keys[order[place]] == keys[order[before(place)]]

    def swap(one: int, other: int) -> None:
        order[one], order[other] = order[other], order[one]

    def settles(one: int, other: int) -> bool:
        if labels[order[one]] != labels[order[other]]:
            return False
        swap(one, other)
        if not any(map(clashes, (one, after(one), other, after(other)))):
            return True
        swap(one, other)
        return False

    count = len(order)
    return all(
        not clashes(place) or any(settles(place, (place + n) % count) for n in range(1, count))
        for place in range(count)
    )


def rotated(dataset: Any, batch: int) -> Any:
    """Add `KL_completion_ids`: in each batch, the completion of the example before.

    Args:
        dataset (`Dataset`): in the order of `kto_order`, with `prompt_ids` and `completion_ids`.
        batch: examples per device and batch.

    Raises:
        InputError: an example would meet a completion of its own prompt.
    """

    def rotate(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions, prompts = rows["completion_ids"], rows["prompt_ids"]
        before = [*prompts[-1:], *prompts[:-1]]
        if any(a == b for a, b in zip(prompts, before, strict=True)):
            raise InputError("dataset: two neighbours share a prompt; order them with kto_order.")
        return {"KL_completion_ids": [*completions[-1:], *completions[:-1]]}

    return dataset.map(rotate, batched=True, batch_size=batch, load_from_cache_file=False)
