"""Data for reward models: comparisons, answers judged as a whole, and answers judged by steps."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlhf_trl.data import made
from rlhf_trl.data.blocks import (
    AnswersFile,
    OutcomeData,
    ProcessData,
    RankedFile,
    RankedLists,
    RewardData,
    SampledAnswers,
    SampledPairs,
    SampledTraces,
    TracesFile,
)
from rlhf_trl.data.columns import UNSPLIT, Counted, Names, check_cell, converted, renamed
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.files import read_sides
from rlhf_trl.data.gym import GYM_COLUMNS, GymTasks, Row
from rlhf_trl.data.pair_files import UNPAIRED
from rlhf_trl.data.pairs import Sample, load_preferences
from rlhf_trl.data.readers import PARTED, WrongRow, split_prompt
from rlhf_trl.data.steps import LABELS, check_step_split
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

BLANK = "a blank answer has no steps"  # why a sampled trace is left out


def load_pairs_or_ranked(
    config: RewardData, max_samples: int | None, sample: Sample, margin: bool = True
) -> Examples:
    """Make or read pairs, or lists for a K-wise model, of at most `max_samples` questions.

    `sample` returns outcomes of rows of `GymTasks`; it takes the rows, the number of answers to
    each, and their side, "train" or "held-out". `margin` says whether that column is read.
    """
    _check_source(config)
    held: dict[str, list[Row]] = {}
    if isinstance(config, RankedFile):
        length = config.list_length
        return read_sides(config, max_samples, checked_ranked, "ranked lists", length=length)
    if isinstance(config, RankedLists):
        found = _ranked(config, GymTasks(config), max_samples)
    else:

        def answers(rows: list[Row], count: int, side: str) -> list[Row]:
            number = max(count, config.candidates) if side == "held-out" else count
            held[side] = sample(rows, number, side)
            return held[side]

        found = load_preferences(config, max_samples, sample=answers, margin=margin)
    found.candidates = _candidates(config, found.tasks, sample, held.get("held-out"))
    return found


def _ranked(config: RankedLists, tasks: GymTasks, max_samples: int | None) -> Examples:
    length, asked = config.list_length, tasks.train[:max_samples]
    train = made.ranked_demonstrations(asked, length, config.seed)
    if not train:
        raise InputError(f"dataset.list_length: no question has {length} demonstrations; lower it.")
    held_out = made.ranked_demonstrations(tasks.held_out, length, config.eval_seed)
    reason = f"not {length} different demonstrations"
    dropped = {reason: len(asked) - len(train)}
    dropped_held_out = {reason: len(tasks.held_out) - len(held_out)}
    return examples(train, held_out, tasks, dropped, dropped_held_out=dropped_held_out)


def load_outcomes(config: OutcomeData, max_samples: int | None, sample: Sample) -> Examples:
    """Sample or read answers with a label: whether they are right (see `load_pairs_or_ranked`).

    Where held-out rows of a file have several completions of a prompt, these are the candidates.
    """
    _check_source(config)
    if isinstance(config, AnswersFile):
        found = read_sides(config, max_samples, checked_outcomes, "outcomes")
        _check_labels(found.train.unique("label"), config.path)
        together: dict[str, list[Row]] = {}
        for row in found.held_out or () if config.candidates else ():
            together.setdefault(repr(row["prompt"]), []).append(row)
        found.candidates = [row for group in together.values() if len(group) > 1 for row in group]
        return found
    tasks = GymTasks(config)
    train, held = _samples_of_both(config, tasks, tasks.train[:max_samples], sample)
    _check_labels((row["label"] for row in train), "the answers that were sampled")
    held_out = _first(held, tasks, config.samples_per_prompt)
    return examples(train, held_out, tasks, {}, _candidates(config, tasks, sample, held))


def load_traces(
    config: ProcessData, max_samples: int | None, sample: Sample, neutral: bool = True
) -> Examples:
    """Make, sample or read answers with a label for each of their steps.

    See `load_pairs_or_ranked`; rows are chunks of `max_steps`, and `neutral` says whether the model
    learns from neutral steps.
    """
    _check_source(config)
    check_step_split(config.step_split)
    if isinstance(config, TracesFile):
        where, found = config.path, read_sides(config, max_samples, checked_traces, "traces")
    else:
        tasks, held = GymTasks(config), None
        asked = tasks.train[:max_samples]
        made.check_cut(asked, config.step_split)
        if isinstance(config, SampledTraces):
            where = "the sampled traces"
            train, held = _samples_of_both(config, tasks, asked, sample)
            held_out = _first(held, tasks, config.samples_per_prompt)
        else:
            where = "the synthetic traces"
            train = made.synthetic_traces(asked, config.errors, config.seed)
            held_out = made.synthetic_traces(tasks.held_out, config.errors, config.eval_seed)
        answered = {"train": len(train), "held-out": len(held_out)}
        train, held_out = (made.labeled_traces(x, config.step_split) for x in (train, held_out))
        if not train:  # sampled, and all blank
            _check_labels((), where)
        found = examples(train, held_out, tasks, {}, _candidates(config, tasks, sample, held))
        found.dropped[BLANK] = answered["train"] - len(train)
        found.dropped_held_out[BLANK] = answered["held-out"] - len(held_out)
    found.train = chunked(found.train, config.max_steps)
    if found.held_out is not None:
        found.held_out = chunked(found.held_out, config.max_steps)
    if found.tasks is None:
        found.train = found.train.select(range(len(found.train))[:max_samples])
    labels = {label for labels in found.train["labels"][:] for label in labels}
    _check_labels(*((labels, where) if neutral else (labels - {0}, where, " that is not neutral")))
    return found


def chunked(dataset: "Dataset", max_steps: int | None) -> "Dataset":
    """Return traces of at most `max_steps` steps: row k of one starts at step k * max_steps.

    Each row has the prompt, but not the steps before it, as in the book's code.
    """
    if max_steps is None:
        return dataset
    return converted(dataset, _chunks, "", dict(dataset.features), size=max_steps)


def _chunks(row: Row, size: int) -> list[Row]:
    return [
        {name: cell if name == "prompt" else cell[n : n + size] for name, cell in row.items()}
        for n in range(0, len(row["completions"]), size)
    ]


def _samples_of_both(
    config: SampledAnswers | SampledTraces, tasks: GymTasks, asked: list[Row], sample: Sample
) -> tuple[list[Row], list[Row]]:
    count = config.samples_per_prompt
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
    return [row for group in made.groups(held, len(tasks.held_out)) for row in group[:count]]


def _check_source(config: Any) -> None:
    answered = isinstance(config, SampledPairs | SampledAnswers | SampledTraces)
    if getattr(config, "sampled_from", None) and not (config.candidates or answered):
        raise InputError(
            "dataset.sampled_from is not read with dataset.candidates: 0; remove one of the two."
        )


def _check_labels(labels: Iterable[Any], where: str, which: str = "") -> None:
    if len(found := set(labels)) < 2:
        has = f"every label{which} of {where} is {str(found.pop()).lower()}" if found else None
        raise InputError(
            f"dataset: {has or f'{where} has no label{which}'}, but rows of both kinds are needed."
        )


def checked_ranked(dataset: "Dataset", where: str, columns: Names, length: int) -> Counted:
    """Return examples with `prompt` and `ranked`, best first, and how many were left out.

    They may have `completions`, each with `response` and `overall_score` (as UltraFeedback has
    them), of which the best `length` of different scores are kept.
    """
    shapes, dropped = (("prompt", "ranked"), ("prompt", "completions")), {}
    scored = columns.get("completions", "completions") in dataset.column_names
    dataset = renamed(dataset, where, columns, shapes if scored else shapes[:1])
    if "completions" in dataset.column_names:
        found = converted(dataset, _by_score, where, numbered=True, length=length)
        dropped = {f"not {length} different scores": len(dataset) - len(found)}
        if not len(found):
            raise InputError(
                f"dataset.list_length: no row of {where} has {length} different scores; lower it."
            )
        dataset = found
    length = len(dataset[0]["ranked"] or ())
    return converted(dataset, _ranked_row, where, length=length), dropped


def _by_score(row: Row, length: int) -> list[Row]:
    try:
        scored = {float(c["overall_score"]): c["response"] for c in reversed(row["completions"])}
    except (TypeError, ValueError, KeyError) as error:
        wanted = "a mapping with response and a number overall_score; write these, or a column"
        raise WrongRow(f"completions are not each {wanted} ranked") from error
    best = [scored[score] for score in sorted(scored, reverse=True)[:length]]
    return [{"prompt": row["prompt"], "ranked": best}] if len(best) == length else []


def _ranked_row(row: Row, length: int) -> list[Row]:
    prompt, ranked = row["prompt"], row["ranked"]
    if not isinstance(ranked, list) or len(ranked) < 2:
        wanted = "a list of two or more completions, the best one first"
        raise WrongRow(f"ranked is {ranked!r:.80}; write {wanted}")
    if len(ranked) != length:
        told = f"ranked has {len(ranked)} completions and the rows before have {length}"
        raise WrongRow(f"{told}; make all lists equally long")
    each = [_split({"prompt": prompt}, text) for text in ranked]
    if any(one["prompt"] != each[0]["prompt"] for one in each):
        raise WrongRow(f"{PARTED} in ranked; write answers to one prompt")
    check_cell("prompt", each[0]["prompt"])
    for n, one in enumerate(each):
        check_cell(f"ranked[{n}]", one["completion"])
    return [{"prompt": each[0]["prompt"], "ranked": [one["completion"] for one in each]}]


def _split(row: Row, text: Any) -> Row:
    found = split_prompt({**row, "completion": text})
    if isinstance(found, str):
        raise WrongRow(f"{found}; end every completion with the assistant's")
    return found


def checked_outcomes(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return examples with `prompt`, `completion`, boolean `label` and `finished`.

    They may have lists `completions` and `labels` of each prompt; `finished` and `GYM_COLUMNS` are
    optional.
    """
    shapes = (("prompt", "completions", "labels"), UNPAIRED)
    found = renamed(dataset, where, columns, shapes, ("finished", *GYM_COLUMNS))
    made = converted(found, _outcomes, where)
    dropped = {UNSPLIT: len(dataset) - len(found)}
    return made.rename_columns({"right": "label", "ended": "finished"}), dropped


def _outcomes(row: Row) -> list[Row]:
    own = ("completions", "labels", "completion", "label", "finished")
    rest = {name: cell for name, cell in row.items() if name not in own}
    both = [(row.get("completion"), row.get("label"))]
    if "completions" in row:
        both = zip(*_lists(row), strict=True)
    found = []
    for text, label in both:
        one = _split(rest, text)
        check_cell("prompt", one["prompt"])
        check_cell("completion", one["completion"])
        one["right"] = _boolean("label", label)
        one["ended"] = _boolean("finished", row.get("finished", True))
        found.append(one)
    return found


def checked_traces(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return examples with `prompt`, `completions` (the steps) and `labels`.

    Labels are -1, 0, 1 or boolean (read as 1 and -1). None is left out.
    """
    dataset = renamed(dataset, where, columns, (("prompt", "completions", "labels"),))
    return converted(dataset, _trace, where).rename_columns({"marks": "labels"}), {}


def _trace(row: Row) -> list[Row]:
    check_cell("prompt", row["prompt"])
    steps, labels = _lists(row)
    for k, (step, label) in enumerate(zip(steps, labels, strict=True)):
        if not isinstance(step, str) or not step.strip():
            raise WrongRow(f"step {k} is {step!r}; write a text, or remove the step with its label")
        if not isinstance(label, int | float) or label not in LABELS:
            wanted = "-1 (bad), 0 (neutral), 1 (good), or true and false"
            raise WrongRow(f"the label of step {k} is {label!r}; write {wanted}")
    marks = [(1 if y else -1) if isinstance(y, bool) else int(y) for y in labels]
    return [{"prompt": row["prompt"], "completions": steps, "marks": marks}]


def _lists(row: Row) -> tuple[list[Any], list[Any]]:
    texts, labels = row["completions"], row["labels"]
    if not isinstance(texts, list) or not isinstance(labels, list) or not texts:
        told = "completions and labels are not two lists with something in them"
        raise WrongRow(f"{told}; write a label for each completion")
    if len(texts) != len(labels):
        counts = f"{len(texts)} completions and {len(labels)} labels"
        raise WrongRow(f"it has {counts}; write one label for each")
    return texts, labels


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        told = "which is neither boolean nor 0 or 1; write true or false"
        raise WrongRow(f"{name} is {value!r}, {told}")
    return bool(value)
