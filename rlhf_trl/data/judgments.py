"""Data for reward models: comparisons, answers judged as a whole, and answers judged by steps."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rlhf_trl.data.gym import GymData, GymTasks
from rlhf_trl.data.preferences import (
    FileData,
    OfflinePairs,
    Row,
    Sample,
    SampledPairs,
    Sides,
    check_cell,
    check_max_samples,
    from_path,
    groups,
    load_preferences,
    renamed,
    split_prompt,
)
from rlhf_trl.data.steps import LABELS, LETTERS, check_step_split, label_steps, split_steps
from rlhf_trl.data.verifiers import completion_text
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.demonstrator import (
    COMPLETION,
    MALFORMED,
    ONLY_RIGHT,
    RIGHT,
    demonstrate,
    mixture,
    only_errors,
)

# Kinds of demonstrations from the best to the worst: the nearer to the right answer, the better.
ORDER = (
    RIGHT,
    "letters_swapped",
    "off_by_one",
    "last_letter_dropped",
    "last_term_ignored",
    "copied",
    MALFORMED,
)
REPEATED = "letter_repeated"  # an error of synthetic traces beside the demonstrator's
OUTCOME = ("prompt", "completion", "label")
GYM_COLUMNS = ("question", "answer", "task")
PROBLEM = "Problem: {}\nReasoning trace:\n"  # the prompt of the book's code (train_prm.py)


@dataclass
class _Ranks:
    """Evaluation ranks `candidates` sampled answers of each held-out question (0: none)."""

    candidates: int = 8
    sampled_from: str | None = None


@dataclass
class OfflineRewardPairs(_Ranks, OfflinePairs):
    """`OfflinePairs` for a Bradley-Terry model."""

    ONLY_WITH: ClassVar = {"algorithm": ("reward",)}


@dataclass
class SampledRewardPairs(_Ranks, SampledPairs):
    """`SampledPairs` for a Bradley-Terry model."""

    ONLY_WITH: ClassVar = {"algorithm": ("reward",)}


@dataclass
class RankedLists(_Ranks, GymData):
    """Lists for a K-wise model: `list_length` demonstrations of one question in `ORDER`."""

    ONLY_WITH: ClassVar = {"algorithm": ("kwise",)}

    list_length: int = 4


@dataclass
class RewardPairsFile(FileData):
    """A file or hub data set of pairs, with a column `margin` where it has one."""

    ONLY_WITH: ClassVar = {"algorithm": ("reward",)}


@dataclass
class RankedFile(FileData):
    """A file or hub data set of ranked lists; `list_length` is that of lists made from scores."""

    ONLY_WITH: ClassVar = {"algorithm": ("kwise",)}

    list_length: int = 4


RewardData = OfflineRewardPairs | SampledRewardPairs | RankedLists | RewardPairsFile | RankedFile


@dataclass
class SampledAnswers(_Ranks, GymData):
    """`samples_per_prompt` answers of each question, labelled by exact match."""

    samples_per_prompt: int = 8


@dataclass
class AnswersFile(FileData):
    """A file or hub data set of labelled answers; evaluation ranks those of one prompt."""

    candidates: int = 8


OutcomeData = SampledAnswers | AnswersFile


@dataclass
class _Steps:
    """How steps are put together: the text of a trace is each step followed by `step_separator`.

    `step_split` is the regular expression that cuts a completion into steps. A trace of more than
    `max_steps` becomes several rows with the same prompt, each with the next so many steps.
    """

    step_separator: str = "\n"
    step_split: str = r"\n+"
    max_steps: int | None = None


@dataclass
class SyntheticTraces(_Steps, _Ranks, GymData):
    """One demonstration of each question, a share of `errors` of them with an error."""

    traces: Literal["synthetic"] = "synthetic"
    errors: float = 0.6


@dataclass
class SampledTraces(_Steps, _Ranks, GymData):
    """`samples_per_prompt` answers of a model to each question."""

    traces: Literal["sampled"] = "sampled"
    samples_per_prompt: int = 8


@dataclass
class TracesFile(_Steps, FileData):
    """A file or hub data set of traces."""


ProcessData = SyntheticTraces | SampledTraces | TracesFile


@dataclass
class RewardRows(Sides):
    """The rows of a run.

    Attributes:
        train: pairs (`prompt`, `chosen`, `rejected`), ranked lists (`prompt`, `ranked`), outcomes
            (`prompt`, `completion`, `label`, `finished`) or traces (`prompt`, `completions`,
            `labels`).
        held_out: rows like them for evaluation, or None.
        candidates: outcomes to rank, those of one prompt in a row; empty where there are none.
        tasks: the gym tasks behind them, or None.
        dropped: how many training rows were left out, by the reason.
    """

    train: list[Row]
    held_out: list[Row] | None
    candidates: list[Row]
    tasks: GymTasks | None
    dropped: dict[str, int]


def load_pairs_or_ranked(config: RewardData, max_samples: int | None, sample: Sample) -> RewardRows:
    """Make or read pairs, or lists for a K-wise model.

    Args:
        config: the block.
        max_samples: the first so many training rows or questions only; None: all.
        sample: returns outcomes of rows of `GymTasks`; takes the rows, the number of answers to
            each, and their side, "train" or "held-out".

    Raises:
        InputError: see `load_preferences`, `checked_ranked` and `ranked_demonstrations`.
    """
    _check(config, max_samples)
    if isinstance(config, RankedLists | RankedFile):
        return _load_ranked(config, max_samples, sample)
    held: dict[str, list[Row]] = {}

    def answers(rows: list[Row], count: int, side: str) -> list[Row]:
        number = max(count, config.candidates) if side == "held-out" else count
        held[side] = sample(rows, number, side)
        return held[side]

    data = load_preferences(config, max_samples, sample=answers, margin=True)
    candidates = _candidates(config, data.tasks, sample, held.get("held-out"))
    return RewardRows(data.train, data.held_out, candidates, data.tasks, data.dropped)


def _load_ranked(
    config: RankedLists | RankedFile, max_samples: int | None, sample: Sample
) -> RewardRows:
    length = config.list_length
    _at_least(config, "list_length", 2)
    if isinstance(config, RankedFile):

        def check(rows: list[Row], where: str) -> tuple[list[Row], dict[str, int]]:
            return checked_ranked(rows, where, config.columns, length)

        train, held_out, dropped = from_path(config, max_samples, check)
        return RewardRows(train, held_out, [], None, dropped)
    tasks = GymTasks(config)
    asked = tasks.train[:max_samples]
    train = ranked_demonstrations(asked, length, config.seed)
    if not train:
        raise InputError(
            f"dataset.list_length: no question has {length} different demonstrations; write less."
        )
    held_out = ranked_demonstrations(tasks.held_out, length, config.eval_seed)
    dropped = {f"not {length} different demonstrations": len(asked) - len(train)}
    candidates = _candidates(config, tasks, sample)
    return RewardRows(train, held_out or None, candidates, tasks, dropped)


def load_outcomes(config: OutcomeData, max_samples: int | None, sample: Sample) -> RewardRows:
    """Sample or read answers with a label: whether they are right.

    Where held-out rows of a file have several completions of a prompt, these are the candidates.

    Args:
        config: the block.
        max_samples: the first so many training rows or questions only; None: all.
        sample: see `load_pairs_or_ranked`.

    Raises:
        InputError: see `checked_outcomes`, or all training labels are the same.
    """
    _check(config, max_samples)
    if isinstance(config, AnswersFile):

        def check(rows: list[Row], where: str) -> tuple[list[Row], dict[str, int]]:
            return checked_outcomes(rows, where, config.columns), {}

        train, held_out, dropped = from_path(config, max_samples, check)
        together: dict[str, list[Row]] = {}
        for row in held_out or ():
            together.setdefault(repr(row["prompt"]), []).append(row)
        candidates = [row for group in together.values() if len(group) > 1 for row in group]
        _check_labels((row["label"] for row in train), config.path)
        return RewardRows(train, held_out, candidates if config.candidates else [], None, dropped)
    tasks = GymTasks(config)
    train, held = _samples_of_both(config, tasks, tasks.train[:max_samples], sample)
    _check_labels((row["label"] for row in train), "the answers that were sampled")
    held_out = _first(held, tasks, config.samples_per_prompt)
    return RewardRows(train, held_out, _candidates(config, tasks, sample, held), tasks, {})


def load_traces(
    config: ProcessData, max_samples: int | None, sample: Sample, neutral: bool = True
) -> RewardRows:
    """Make, sample or read answers with a label for each of their steps.

    Args:
        config: the block.
        max_samples: the first so many training rows (chunks of `max_steps`) or questions only;
            None: all.
        sample: see `load_pairs_or_ranked`.
        neutral: whether the model learns from neutral steps.

    Raises:
        InputError: see `checked_traces`; a `step_split` that does not fit the task; or all labels
            of the training rows are the same.
    """
    _check(config, max_samples)
    check_step_split(config.step_split)
    if config.max_steps is not None:
        _at_least(config, "max_steps", 1)
    tasks, held, dropped, where = None, None, {}, "the synthetic traces"
    if isinstance(config, TracesFile):
        where = config.path

        def check(rows: list[Row], where: str) -> tuple[list[Row], dict[str, int]]:
            return checked_traces(rows, where, config.columns)

        train, held_out, dropped = from_path(config, max_samples, check)
    else:
        tasks = GymTasks(config)
        asked = tasks.train[:max_samples]
        _check_cut(asked, config.step_split)
        if isinstance(config, SampledTraces):
            where = "the sampled traces"
            train, held = _samples_of_both(config, tasks, asked, sample)
            held_out = _first(held, tasks, config.samples_per_prompt)
        else:
            if not 0 <= config.errors <= 1:
                raise InputError(f"dataset.errors: {config.errors} is no share; write 0 to 1.")
            train = synthetic_traces(asked, config.errors, config.seed)
            held_out = synthetic_traces(tasks.held_out, config.errors, config.eval_seed)
        train = labelled_traces(train, config.step_split)
        held_out = labelled_traces(held_out, config.step_split)
    train = chunked(train, config.max_steps)
    if tasks is None:
        train = train[:max_samples]
    if held_out is not None:
        held_out = chunked(held_out, config.max_steps)
    learnt = (label for row in train for label in row["labels"] if neutral or label)
    _check_labels(learnt, where, "" if neutral else " that is not neutral")
    return RewardRows(train, held_out, _candidates(config, tasks, sample, held), tasks, dropped)


# --- the tiny world ------------------------------------------------------------------------------


def ranked_demonstrations(rows: Iterable[Row], length: int, seed: int) -> list[Row]:
    """Return, for each question, the right answer and `length` - 1 errors of different kinds.

    Args:
        rows: rows of `GymTasks`.
        length: of each list.
        seed: of the choice of kinds and of the demonstrations.

    Returns:
        Rows with `prompt` and `ranked`, in `ORDER`; without the questions for which there are not
        so many different texts.

    Raises:
        InputError: a task that has fewer kinds.
    """
    rng = random.Random(seed)
    found = []
    for row in rows:
        kinds = sorted(mixture(row["task"]), key=ORDER.index)
        if length > len(kinds):
            raise InputError(
                f"dataset.list_length: {row['task']} has {len(kinds)} kinds of demonstrations "
                f"({', '.join(kinds)}) and no lists of {length}; write {len(kinds)} or less."
            )
        # a kind that cannot be shown is replaced by another, so texts may repeat
        texts = list(dict.fromkeys(_demonstration(row, {kind: 1.0}, rng) for kind in kinds))
        if len(texts) < length:
            continue
        chosen = [0, *sorted(rng.sample(range(1, len(texts)), length - 1))]
        ranked = [[{"role": "assistant", "content": texts[i]}] for i in chosen]
        found.append({"prompt": row["prompt"], "ranked": ranked})
    return found


def synthetic_traces(rows: Iterable[Row], errors: float, seed: int) -> list[Row]:
    """Return one demonstration of each question: right, or with one of the errors equally often.

    Args:
        rows: rows of `GymTasks`.
        errors: share of those with an error: one of the demonstrator's, or `REPEATED`, which writes
            a letter twice.
        seed: of all choices.

    Returns:
        The rows with a `completion`.
    """
    rng = random.Random(seed)
    found = []
    for row in rows:
        kind = RIGHT
        if rng.random() < errors:
            kind = rng.choice([REPEATED, *only_errors(row["task"])])
        if kind == REPEATED:
            place = rng.randrange(len(row["answer"])) + 1
            answer = row["answer"]
            text = COMPLETION.format(answer[:place] + answer[place - 1 :])
        else:
            text = _demonstration(row, {kind: 1.0}, rng)
        found.append({**row, "completion": [{"role": "assistant", "content": text}]})
    return found


def labelled_traces(rows: Iterable[Row], step_split: str) -> list[Row]:
    """Return `prompt`, `completions` and `labels` of answers; a blank one has no steps.

    Args:
        rows: with `prompt`, `completion`, `answer` and `task`.
        step_split: see `split_steps`.
    """
    found = []
    for row in rows:
        steps = split_steps(completion_text(row["completion"]), step_split)
        labels = label_steps(steps, row["answer"], row["task"])
        if steps:
            found.append({"prompt": row["prompt"], "completions": steps, "labels": labels})
    return found


def chunked(rows: list[Row], max_steps: int | None) -> list[Row]:
    """Return rows of at most `max_steps` steps: row k of a trace has steps k * max_steps and on.

    Every one has the prompt and none the steps before it, as in the book's code.
    """
    if max_steps is None:
        return rows
    return [
        {
            **row,
            "completions": row["completions"][first : first + max_steps],
            "labels": row["labels"][first : first + max_steps],
        }
        for row in rows
        for first in range(0, len(row["completions"]), max_steps)
    ]


def _demonstration(row: Row, kinds: Mapping[str, float], rng: random.Random) -> str:
    return demonstrate(row["task"], row["question"], row["answer"], rng, kinds)


def _check_cut(rows: Sequence[Row], step_split: str) -> None:
    for row in rows:
        text = _demonstration(row, ONLY_RIGHT, random.Random(0))
        if set(label_steps(split_steps(text, step_split), row["answer"], row["task"])) != {1}:
            raise InputError(
                f"dataset.step_split: {step_split!r} does not cut {text!r} into letters and its "
                f"closing tag; write '{LETTERS}'."
            )


def _samples_of_both(
    config: SampledAnswers | SampledTraces, tasks: GymTasks, asked: list[Row], sample: Sample
) -> tuple[list[Row], list[Row]]:
    count = config.samples_per_prompt
    _at_least(config, "samples_per_prompt", 1)
    train = sample(asked, count, "train")
    return train, sample(tasks.held_out, max(count, config.candidates), "held-out")


def _candidates(
    config: Any, tasks: GymTasks | None, sample: Sample, held: list[Row] | None = None
) -> list[Row]:
    if tasks is None or not config.candidates:
        return []
    if held is None:
        held = sample(tasks.held_out, config.candidates, "held-out")
    return _first(held, tasks, config.candidates)


def _first(held: list[Row], tasks: GymTasks, count: int) -> list[Row]:
    return [row for group in groups(held, len(tasks.held_out)) for row in group[:count]]


def _check(config: Any, max_samples: int | None) -> None:
    """Refuse what leaves nothing to train on or to rank."""
    check_max_samples(max_samples)
    if not hasattr(config, "candidates"):
        return
    _at_least(config, "candidates", 2, none=0)
    answered = isinstance(config, SampledPairs | SampledAnswers | SampledTraces)
    if getattr(config, "sampled_from", None) and not (config.candidates or answered):
        raise InputError(
            "dataset.sampled_from is not read with dataset.candidates: 0; remove it, or write 2 or "
            "more candidates."
        )


def _at_least(config: Any, key: str, least: int, none: int | None = None) -> None:
    if (value := getattr(config, key)) < least and value != none:
        also = "" if none is None else f", or {none} for none"
        raise InputError(f"dataset.{key}: {value} is too few; write {least} or more{also}.")


def _check_labels(labels: Iterable[Any], where: str, which: str = "") -> None:
    if len(found := set(labels)) < 2:
        has = f"every label{which} of {where} is {str(found.pop()).lower()}" if found else None
        raise InputError(
            f"dataset: {has or f'{where} has no label{which}'}, so there is nothing to tell apart; "
            "a reward model needs rows of both kinds."
        )


# --- files and the hub ---------------------------------------------------------------------------


def checked_ranked(
    rows: Sequence[Row], where: str, columns: Mapping[str, str], length: int
) -> tuple[list[Row], dict[str, int]]:
    """Return rows with `prompt` and `ranked`, best first.

    Args:
        rows: with these columns; or with `completions`, each with `response` and `overall_score`
            (as UltraFeedback has them), of which the best `length` of different scores are kept.
        where: their file or data set, for error messages.
        columns: from this package's names to those of the rows.
        length: of lists made from scores.

    Returns:
        The rows, and how many were left out.

    Raises:
        InputError: missing columns, an empty text, or lists of unequal length or of one.
    """
    shapes = (("prompt", "ranked"), ("prompt", "completions"))
    found = renamed(rows, where, columns, shapes if _has(rows, columns) else shapes[:1])
    ties = f"not {length} different scores"
    dropped = {ties: 0} if "completions" in found[0] else {}
    lists = []
    for n, row in enumerate(found):
        at = f"row {n} of {where}"
        if "completions" in row:
            if (best := _by_score(row["completions"], length, at)) is None:
                dropped[ties] += 1
                continue
            row["ranked"] = best
        ranked = row["ranked"]
        if not isinstance(ranked, list) or len(ranked) < 2:
            raise InputError(
                f"dataset: {at}: ranked is {ranked!r:.80}; write a list of two or more "
                "completions, the best one first."
            )
        lists.append(_ranked_row(row["prompt"], ranked, at))
        if len(ranked) != (first := len(lists[0]["ranked"])):
            raise InputError(
                f"dataset: {at}: ranked has {len(ranked)} completions and the rows before have "
                f"{first}; make all lists equally long."
            )
    if not lists:
        raise InputError(
            f"dataset: no row of {where} has {length} completions of different scores; lower "
            "dataset.list_length."
        )
    return lists, dropped


def _has(rows: Sequence[Row], columns: Mapping[str, str]) -> bool:
    return bool(rows) and columns.get("completions", "completions") in rows[0]


def _by_score(completions: Any, length: int, where: str) -> list[str] | None:
    try:
        scored = {float(c["overall_score"]): c["response"] for c in reversed(completions)}
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(
            f"dataset: {where}: completions are not each a mapping with response and a number "
            "overall_score; write these, or a column ranked."
        ) from error
    best = [scored[score] for score in sorted(scored, reverse=True)[:length]]
    return best if len(best) == length else None


def _ranked_row(prompt: Any, ranked: Sequence[Any], where: str) -> Row:
    each = [split_prompt({"prompt": prompt, "completion": text}) for text in ranked]
    check_cell("prompt", each[0]["prompt"], where)
    for n, row in enumerate(each):
        check_cell(f"ranked[{n}]", row["completion"], where)
    return {"prompt": each[0]["prompt"], "ranked": [row["completion"] for row in each]}


def checked_outcomes(rows: Sequence[Row], where: str, columns: Mapping[str, str]) -> list[Row]:
    """Return rows with `prompt`, `completion`, boolean `label` and `finished`.

    Args:
        rows: with these columns (`finished` is optional, and so are those of the gym), or with
            lists `completions` and `labels` of each prompt.
        where: their file or data set, for error messages.
        columns: from this package's names to those of the rows.

    Raises:
        InputError: missing columns, lists of different length, an empty prompt or completion, or a
            label that is neither boolean nor 0 or 1.
    """
    listed = ("prompt", "completions", "labels")
    found = []
    kept = ("finished", *GYM_COLUMNS)
    for n, row in enumerate(renamed(rows, where, columns, (listed, OUTCOME), kept)):
        at = f"row {n} of {where}"
        each = [row]
        if "completions" in row:
            texts, labels = _lists(row, at)
            rest = {k: v for k, v in row.items() if k not in listed}
            each = [
                split_prompt({**rest, "prompt": row["prompt"], "completion": t, "label": y})
                for t, y in zip(texts, labels, strict=True)
            ]
        for one in each:
            check_cell("prompt", one["prompt"], at)
            check_cell("completion", one["completion"], at)
            one["label"] = _boolean("label", one["label"], at)
            one["finished"] = _boolean("finished", one.get("finished", True), at)
            found.append(one)
    return found


def checked_traces(
    rows: Sequence[Row], where: str, columns: Mapping[str, str]
) -> tuple[list[Row], dict[str, int]]:
    """Return rows with `prompt`, `completions` (the steps) and `labels`.

    Args:
        rows: with these columns, labels -1, 0, 1 or boolean (read as 1 and -1); or those of PRM800K
            (`question` with a `problem`, `label` with `steps`), where every rated completion of a
            step is a step, as in the book's code.
        where: their file or data set, for error messages.
        columns: from this package's names to those of the rows.

    Returns:
        The rows, and how many rows or steps of PRM800K were left out.

    Raises:
        InputError: missing columns, an empty prompt or step, steps and labels of different number,
            another label, or nothing that is rated.
    """
    dropped: dict[str, int] = {}
    if rows and not _has(rows, columns) and isinstance(rows[0].get("label"), dict):
        rows, dropped = _from_prm800k(rows, where)
        where = f"the rated rows of {where}"
    found = renamed(rows, where, columns, (("prompt", "completions", "labels"),))
    for n, row in enumerate(found):
        at = f"row {n} of {where}"
        check_cell("prompt", row["prompt"], at)
        steps, labels = _lists(row, at)
        for k, (step, label) in enumerate(zip(steps, labels, strict=True)):
            if not isinstance(step, str) or not step.strip():
                raise InputError(
                    f"dataset: {at}: step {k} is {step!r}; write a text, or remove the step with "
                    "its label."
                )
            if not isinstance(label, int | float) or label not in LABELS:
                raise InputError(
                    f"dataset: {at}: the label of step {k} is {label!r}; write -1 (bad), 0 "
                    "(neutral), 1 (good), or true and false."
                )
        row["labels"] = [(1 if y else -1) if isinstance(y, bool) else int(y) for y in labels]
    return found, dropped


def _lists(row: Row, where: str) -> tuple[list[Any], list[Any]]:
    texts, labels = row["completions"], row["labels"]
    if not isinstance(texts, list) or not isinstance(labels, list) or not texts:
        raise InputError(
            f"dataset: {where}: completions and labels are not two lists with something in them; "
            "write a label for each completion."
        )
    if len(texts) != len(labels):
        raise InputError(
            f"dataset: {where} has {len(texts)} completions and {len(labels)} labels; write one "
            "label for each."
        )
    return texts, labels


def _boolean(name: str, value: Any, where: str) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise InputError(
            f"dataset: {where}: {name} is {value!r}, which is neither boolean nor 0 or 1; write "
            "true or false."
        )
    return bool(value)


def _from_prm800k(rows: Sequence[Row], where: str) -> tuple[list[Row], dict[str, int]]:
    dropped = {"completions of a step without a rating": 0, "rows without problem or step": 0}
    found = []
    for row in rows:
        problem = str((row.get("question") or {}).get("problem") or "").strip()
        steps, labels = [], []
        for step in (row.get("label") or {}).get("steps") or ():
            for one in step.get("completions") or ():
                text, rating = (one.get("text") or "").strip(), one.get("rating")
                if not text or rating is None:
                    dropped["completions of a step without a rating"] += 1
                    continue
                steps.append(text)
                labels.append(rating)
        if not problem or not steps:
            dropped["rows without problem or step"] += 1
            continue
        prompt = PROBLEM.format(problem)
        found.append({"prompt": prompt, "completions": steps, "labels": labels})
    if not found:
        raise InputError(
            f"dataset: {where} has label.steps, but none of them has a text and a rating; there is "
            "nothing to train on."
        )
    return found, dropped
