"""Data for reward models: comparisons, answers judged as a whole, and answers judged by steps."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlhf_trl.data import made
from rlhf_trl.data.blocks import SampledPairs
from rlhf_trl.data.columns import (
    UNSPLIT,
    Counted,
    Names,
    check_cell,
    converted,
    rows_missing,
    select_shape,
)
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.files import read_sides
from rlhf_trl.data.gym import GYM_COLUMNS, GymTasks, Row
from rlhf_trl.data.judgment_blocks import (
    AnswersFile,
    OutcomeData,
    ProcessData,
    RankedFile,
    RankedLists,
    RewardData,
    SampledAnswers,
    SampledTraces,
    SyntheticTraces,
    TracesFile,
)
from rlhf_trl.data.pair_files import UNPAIRED
from rlhf_trl.data.pairs import Sample, load_preferences
from rlhf_trl.data.readers import PARTED, WrongRow, split_prompt
from rlhf_trl.data.sampled import groups
from rlhf_trl.data.steps import LABELS, check_step_split
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

BLANK = "a blank answer has no steps"  # why a sampled trace is left out


def load_pairs_or_ranked(
    config: RewardData, max_samples: int | None, sample: Sample, margin: bool = True
) -> Examples:
    """Make or read pairs, or lists for a K-wise model.

    Args:
        config: the block.
        max_samples: train on at most this many questions.
        sample: samples answers to rows of `GymTasks` (see `Sample`) and returns them as outcomes.
        margin: whether the column `margin` of pairs is read.
    """
    _check_source(config)
    if isinstance(config, RankedFile):
        length = config.list_length
        return read_sides(config, max_samples, checked_ranked, "ranked lists", length=length)
    if isinstance(config, RankedLists):
        data = _ranked(config, GymTasks(config), max_samples)
        data.candidates = _candidates(config, data.tasks, sample)
        return data
    outcomes_of_side: dict[str, list[Row]] = {}  # stays empty if the pairs are not sampled

    def sample_and_keep(rows: list[Row], count: int, side: str) -> list[Row]:
        """Sample, and keep the outcomes: held-out ones become pairs and, below, candidates."""
        if side == "held-out":
            count = max(count, config.candidates)
        outcomes_of_side[side] = sample(rows, count, side)
        return outcomes_of_side[side]

    data = load_preferences(config, max_samples, sample=sample_and_keep, margin=margin)
    data.candidates = _candidates(config, data.tasks, sample, outcomes_of_side.get("held-out"))
    return data


def _ranked(config: RankedLists, tasks: GymTasks, max_samples: int | None) -> Examples:
    """Make lists of demonstrations of the first `max_samples` questions, the best one first."""
    length = config.list_length
    questions = tasks.train[:max_samples]
    train = made.ranked_demonstrations(questions, length, config.seed)
    if not train:
        raise InputError(f"dataset.list_length: no question has {length} demonstrations; lower it.")
    held_out = made.ranked_demonstrations(tasks.held_out, length, config.eval_seed)
    reason = f"not {length} different demonstrations"
    dropped = {reason: len(questions) - len(train)}
    dropped_held_out = {reason: len(tasks.held_out) - len(held_out)}
    return examples(train, held_out, tasks, dropped, dropped_held_out=dropped_held_out)


def load_outcomes(config: OutcomeData, max_samples: int | None, sample: Sample) -> Examples:
    """Sample or read answers with a label: whether they are right.

    Where held-out rows of a file have several completions of a prompt, these are the candidates.
    The arguments are those of `load_pairs_or_ranked`.
    """
    _check_source(config)
    if isinstance(config, AnswersFile):
        data = read_sides(config, max_samples, checked_outcomes, "outcomes")
        _check_labels(data.train.unique("label"), config.path)
        if config.candidates and data.held_out is not None:
            data.candidates = _rows_of_repeated_prompts(data.held_out)
        return data
    tasks = GymTasks(config)
    train, held_out = _samples_of_both_sides(config, tasks, tasks.train[:max_samples], sample)
    _check_labels((row["label"] for row in train), "the answers that were sampled")
    first_held_out = _first(held_out, tasks, config.samples_per_prompt)
    candidates = _candidates(config, tasks, sample, held_out)
    return examples(train, first_held_out, tasks, {}, candidates)


def _rows_of_repeated_prompts(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose prompts have several completions, prompt by prompt."""
    rows_by_prompt: dict[str, list[Row]] = {}
    for row in rows:
        rows_by_prompt.setdefault(repr(row["prompt"]), []).append(row)
    candidates: list[Row] = []
    for rows_of_prompt in rows_by_prompt.values():
        if len(rows_of_prompt) > 1:
            candidates += rows_of_prompt
    return candidates


def load_traces(
    config: ProcessData, max_samples: int | None, sample: Sample, neutral: bool = True
) -> Examples:
    """Make, sample or read answers with a label for each of their steps.

    Answers are cut into chunks of at most `config.max_steps` steps; each chunk is a row.

    Args:
        config: the block.
        max_samples: train on at most this many questions, or chunks of a file.
        sample: samples answers to rows of `GymTasks` (see `Sample`) and returns them as outcomes.
        neutral: whether the model learns from neutral steps.
    """
    _check_source(config)
    check_step_split(config.step_split)
    if isinstance(config, TracesFile):
        where = config.path
        data = read_sides(config, max_samples, checked_traces, "traces")
    elif isinstance(config, SampledTraces):
        where = "the sampled traces"
        data = _sampled_traces(config, max_samples, sample, where)
    else:
        where = "the synthetic traces"
        data = _synthetic_traces(config, max_samples, sample, where)
    data.train = chunked(data.train, config.max_steps)
    if data.held_out is not None:
        data.held_out = chunked(data.held_out, config.max_steps)
    if data.tasks is None:  # of a file, `max_samples` counts chunks; of tasks, questions: see above
        data.train = data.train.select(range(len(data.train))[:max_samples])
    labels = {label for labels_of_row in data.train["labels"][:] for label in labels_of_row}
    if neutral:
        _check_labels(labels, where)
    else:  # steps labeled 0 are neutral, and nothing is learned from them
        _check_labels(labels - {0}, where, qualifier=" that is not neutral")
    return data


def _sampled_traces(
    config: SampledTraces, max_samples: int | None, sample: Sample, where: str
) -> Examples:
    """Sample answers to questions, and label their steps."""
    tasks = GymTasks(config)
    questions = tasks.train[:max_samples]
    made.check_cut(questions, config.step_split)
    train, held_out = _samples_of_both_sides(config, tasks, questions, sample)
    first_held_out = _first(held_out, tasks, config.samples_per_prompt)
    data = _labeled(train, first_held_out, tasks, config.step_split, where)
    data.candidates = _candidates(config, tasks, sample, held_out)
    return data


def _synthetic_traces(
    config: SyntheticTraces, max_samples: int | None, sample: Sample, where: str
) -> Examples:
    """Make demonstrations, some with an error, and label their steps."""
    tasks = GymTasks(config)
    questions = tasks.train[:max_samples]
    made.check_cut(questions, config.step_split)
    train = made.synthetic_traces(questions, config.errors, config.seed)
    held_out = made.synthetic_traces(tasks.held_out, config.errors, config.eval_seed)
    data = _labeled(train, held_out, tasks, config.step_split, where)
    data.candidates = _candidates(config, tasks, sample)
    return data


def _labeled(
    train: list[Row], held_out: list[Row], tasks: GymTasks, step_split: str, where: str
) -> Examples:
    """Return answers with labeled steps; blank ones, which have none, are left out and counted."""
    train_traces = made.labeled_traces(train, step_split)
    held_out_traces = made.labeled_traces(held_out, step_split)
    if not train_traces:
        _check_labels((), where)  # raises, as there are no labels
    dropped = {BLANK: len(train) - len(train_traces)}
    dropped_held_out = {BLANK: len(held_out) - len(held_out_traces)}
    return examples(
        train_traces, held_out_traces, tasks, dropped, dropped_held_out=dropped_held_out
    )


def chunked(dataset: "Dataset", max_steps: int | None) -> "Dataset":
    """Cut traces into rows of at most `max_steps` steps: row k starts at step k * max_steps.

    Each row has the prompt, but not the steps of the rows before, as in the book's code.
    """
    if max_steps is None:
        return dataset
    return converted(dataset, _chunks, "", dict(dataset.features), size=max_steps)


def _chunks(row: Row, size: int) -> list[Row]:
    return [
        {name: cell if name == "prompt" else cell[n : n + size] for name, cell in row.items()}
        for n in range(0, len(row["completions"]), size)
    ]


def _samples_of_both_sides(
    config: SampledAnswers | SampledTraces, tasks: GymTasks, questions: list[Row], sample: Sample
) -> tuple[list[Row], list[Row]]:
    """Return outcomes of the training questions and of the held-out ones.

    Held-out questions get as many as labeling or ranking (`candidates`) needs, whichever is more.
    """
    count = config.samples_per_prompt
    train = sample(questions, count, "train")
    return train, sample(tasks.held_out, max(count, config.candidates), "held-out")


def _candidates(
    config: Any, tasks: GymTasks | None, sample: Sample, outcomes: list[Row] | None = None
) -> list[Row]:
    """Return `config.candidates` outcomes of each held-out question: of `outcomes`, or sampled."""
    if tasks is None or not config.candidates:
        return []
    if outcomes is None:
        outcomes = sample(tasks.held_out, config.candidates, "held-out")
    return _first(outcomes, tasks, config.candidates)


def _first(outcomes: list[Row], tasks: GymTasks, count: int) -> list[Row]:
    """Return the first `count` outcomes of each held-out question."""
    return [row for group in groups(outcomes, len(tasks.held_out)) for row in group[:count]]


def _check_source(config: Any) -> None:
    """Refuse `sampled_from` where nothing is sampled."""
    trains_on_samples = isinstance(config, SampledPairs | SampledAnswers | SampledTraces)
    samples = trains_on_samples or getattr(config, "candidates", 0)
    if getattr(config, "sampled_from", None) and not samples:
        raise InputError(
            "dataset.sampled_from is not read with dataset.candidates: 0; remove one of the two."
        )


def _check_labels(labels: Iterable[Any], where: str, qualifier: str = "") -> None:
    """Refuse labels that are all the same; `qualifier` follows "label" in the error."""
    kinds = set(labels)
    if len(kinds) >= 2:
        return
    problem = f"{where} has no label{qualifier}"
    if kinds:
        problem = f"every label{qualifier} of {where} is {str(kinds.pop()).lower()}"
    raise InputError(f"dataset: {problem}, but rows of both kinds are needed.")


def checked_ranked(dataset: "Dataset", where: str, columns: Names, length: int) -> Counted:
    """Return examples with `prompt` and `ranked`, and the rows that were left out, by reason.

    `ranked` holds completions, the best one first. All lists must be as long as the first list.

    In place of `ranked`, the data set may have `completions`, each with `response` and
    `overall_score` (as UltraFeedback has them): the best `length` of different scores are ranked,
    and rows with fewer are left out.

    `where` is the path or name of the data set; `columns` is {our name of a column: its name}.
    """
    shapes = [("prompt", "ranked")]
    if columns.get("completions", "completions") in dataset.column_names:
        shapes.append(("prompt", "completions"))
    dataset = select_shape(dataset, where, columns, tuple(shapes))
    dropped = {}
    if "completions" in dataset.column_names:
        # numbered: rows are left out here, and an error of `_ranked_row` has to name the file's row
        ranked = converted(dataset, _by_score, where, numbered=True, length=length)
        dropped = {f"not {length} different scores": rows_missing(dataset, ranked)}
        if not len(ranked):
            raise InputError(
                f"dataset.list_length: no row of {where} has {length} different scores; lower it."
            )
        dataset = ranked
    first_length = len(dataset[0]["ranked"] or ())  # `_ranked_row` asks the same of all
    return converted(dataset, _ranked_row, where, length=first_length), dropped


def _by_score(row: Row, length: int) -> list[Row]:
    """Return a row with the `length` best completions of different scores, if it has so many."""
    try:
        # reversed: of completions with the same score, the first one stays in the dict
        scored = {float(c["overall_score"]): c["response"] for c in reversed(row["completions"])}
    except (TypeError, ValueError, KeyError) as error:
        raise WrongRow(
            "completions are not each a mapping with response and a number overall_score; write "
            "these, or a column ranked"
        ) from error
    best = [scored[score] for score in sorted(scored, reverse=True)[:length]]
    return [{"prompt": row["prompt"], "ranked": best}] if len(best) == length else []


def _ranked_row(row: Row, length: int) -> list[Row]:
    """Return a row of `length` ranked completions with the prompt that all of them answer."""
    prompt, ranked = row["prompt"], row["ranked"]
    if not isinstance(ranked, list) or len(ranked) < 2:
        raise WrongRow(
            f"ranked is {ranked!r:.80}; write a list of two or more completions, the best one first"
        )
    if len(ranked) != length:
        problem = f"ranked has {len(ranked)} completions and the rows before have {length}"
        raise WrongRow(f"{problem}; make all lists equally long")
    examples = [_split({"prompt": prompt}, text) for text in ranked]  # prompt and completion each
    prompt = examples[0]["prompt"]
    completions = [example["completion"] for example in examples]
    if any(example["prompt"] != prompt for example in examples):
        raise WrongRow(f"{PARTED} in ranked; write answers to one prompt")
    check_cell("prompt", prompt)
    for n, completion in enumerate(completions):
        check_cell(f"ranked[{n}]", completion)
    return [{"prompt": prompt, "ranked": completions}]


def _split(row: Row, completion: Any) -> Row:
    """Return a row with this completion, and with the prompt split off a conversation."""
    split_or_reason = split_prompt({**row, "completion": completion})
    if isinstance(split_or_reason, str):  # why it cannot be split
        raise WrongRow(f"{split_or_reason}; end every completion with the assistant's")
    return split_or_reason


def checked_outcomes(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return examples with `prompt`, `completion`, boolean `label` and `finished`.

    In place of `completion` and `label`, the data set may have lists `completions` and `labels`;
    `finished` and `GYM_COLUMNS` are optional. Also return the rows that were left out, by reason.
    """
    shapes = (("prompt", "completions", "labels"), UNPAIRED)
    split = select_shape(dataset, where, columns, shapes, optional=("finished", *GYM_COLUMNS))
    # `_outcomes` returns `right` and `ended`: under the names label and finished, `datasets` would
    # give the new columns the types of the old ones
    made = converted(split, _outcomes, where)
    dropped = {UNSPLIT: rows_missing(dataset, split)}
    return made.rename_columns({"right": "label", "ended": "finished"}), dropped


def _outcomes(row: Row) -> list[Row]:
    """Return an outcome for each completion of a row: its only one, or those of a list."""
    of_completions = ("completions", "labels", "completion", "label", "finished")
    of_prompt = {name: cell for name, cell in row.items() if name not in of_completions}
    labeled = [(row.get("completion"), row.get("label"))]
    if "completions" in row:
        labeled = zip(*_lists(row), strict=True)
    outcomes = []
    for completion, label in labeled:
        outcome = _split(of_prompt, completion)
        check_cell("prompt", outcome["prompt"])
        check_cell("completion", outcome["completion"])
        outcome["right"] = _boolean("label", label)
        outcome["ended"] = _boolean("finished", row.get("finished", True))
        outcomes.append(outcome)
    return outcomes


def checked_traces(dataset: "Dataset", where: str, columns: Names) -> Counted:
    """Return examples with `prompt`, `completions` (the steps) and `labels` of -1, 0 or 1.

    The data set's labels may also be true (read as 1) and false (-1). No row is left out.
    """
    dataset = select_shape(dataset, where, columns, (("prompt", "completions", "labels"),))
    # `_trace` returns `marks`, a new name for the reason told in `checked_outcomes`
    return converted(dataset, _trace, where).rename_columns({"marks": "labels"}), {}


def _trace(row: Row) -> list[Row]:
    """Return a row whose steps are texts and whose labels, now called `marks`, are -1, 0 or 1."""
    check_cell("prompt", row["prompt"])
    steps, labels = _lists(row)
    for k, (step, label) in enumerate(zip(steps, labels, strict=True)):
        if not isinstance(step, str) or not step.strip():
            raise WrongRow(f"step {k} is {step!r}; write a text, or remove the step with its label")
        if not isinstance(label, int | float) or label not in LABELS:
            remedy = "write -1 (bad), 0 (neutral), 1 (good), or true and false"
            raise WrongRow(f"the label of step {k} is {label!r}; {remedy}")
    marks = [(1 if y else -1) if isinstance(y, bool) else int(y) for y in labels]
    return [{"prompt": row["prompt"], "completions": steps, "marks": marks}]


def _lists(row: Row) -> tuple[list[Any], list[Any]]:
    """Return the completions and labels of a row; refuse them unless two lists of one length."""
    texts, labels = row["completions"], row["labels"]
    if not isinstance(texts, list) or not isinstance(labels, list) or not texts:
        problem = "completions and labels are not two lists with something in them"
        raise WrongRow(f"{problem}; write a label for each completion")
    if len(texts) != len(labels):
        counts = f"{len(texts)} completions and {len(labels)} labels"
        raise WrongRow(f"it has {counts}; write one label for each")
    return texts, labels


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, int | float) or value not in (0, 1):
        raise WrongRow(
            f"{name} is {value!r}, which is neither boolean nor 0 or 1; write true or false"
        )
    return bool(value)
