"""What `rlhf-trl preview` does: what a config would train on, without loading any model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trl import unpair_preference_dataset

from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.examples import SIDES, Examples
from rlhf_trl.data.fitting import shortened
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.preview import (
    CUT,
    DROPPED,
    IDENTICAL,
    TOO_LONG,
    WHOLE,
    Measured,
    Row,
    prompt_keys,
    side_numbers,
)
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.evaluation import tables
from rlhf_trl.models import UNTRAINED, load_tokenizer, model_config
from rlhf_trl.reward_models.reader import Reader, prompt_ids
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.examples import prompts
from rlhf_trl.run.fed import fed_prompts
from rlhf_trl.run.held_rows import answer_text, tokens_of
from rlhf_trl.run.options import join_options
from rlhf_trl.run.reward_models import loader_of
from rlhf_trl.run.shipped import existing_config
from rlhf_trl.run.stages import Stage, stage_of_config
from rlhf_trl.run.supervised import check_marks, decide_what_is_trained, load_tokenizers
from rlhf_trl.run.train import check_template, naming_refused_row

UNPAIRED = "KTO learns from each answer of a pair by itself; a row is one answer"
Measure = Callable[[Row], Measured]


class _NeedsAnswers(Exception):
    """The data are made of answers that a model would have to sample."""


@dataclass
class Opened:
    """A run's config and data, as its trainer would get them, with the tokenizer."""

    config: str  # path
    stage: Stage
    loaded: Loaded
    data: Examples
    note: str | None  # on what the examples are
    measure: Measure
    limit: str  # of lengths, in words
    tokenizer: Any  # that the trainer gets
    templated: Any  # the one whose chat template is applied

    @property
    def turns(self) -> str:
        """Which turns are trained; only the block of SFT can ask for "all"."""
        return getattr(self.loaded.own.dataset, "turns", "last")

    @property
    def is_prompts(self) -> bool:
        """Whether the rows are prompts to answer, not examples to learn from."""
        return _answers_prompts(self.stage, self.data)

    def measured(self, rows: Iterable[Row]) -> list[Measured]:
        """Return rows in tokens."""
        with naming_refused_row(self.data, self.templated, self.loaded.trl):
            return [self.measure(row) for row in rows]


def opened(config: str, words: Sequence[str] = ()) -> Opened:
    """Read a config of any recipe that trains, with options of the recipe, and its data."""
    stage = stage_of_config(read_config(existing_config(config, "preview")), config)
    loaded = stage.load(join_options(words, ["--config", config]))
    if stage.name == "sft":
        decide_what_is_trained(loaded)
    if hasattr(loaded.own.dataset, "step_split"):  # of a process model: see `train_reward_model`
        loaded.trl.step_separator = loaded.own.dataset.step_separator
        loaded.trl.step_split = loaded.own.dataset.step_split
    data, note = _examples(stage, loaded)
    if stage.name == "kto" and "chosen" in data.train.column_names:
        data.train, note = unpair_preference_dataset(data.train), UNPAIRED
        data.held_out = data.held_out and unpair_preference_dataset(data.held_out)
    if stage.name == "sft":
        tokenizer, templated = load_tokenizers(loaded, data)
        if data.conversational:
            check_marks(templated, loaded.trl)
    else:
        templated = tokenizer = load_tokenizer(loaded.model, loaded.trl, data.conversational)
    check_template(data, templated, loaded.trl, loaded.own.dataset)
    measure, limit = _measure(stage, loaded, data, templated)
    return Opened(config, stage, loaded, data, note, measure, limit, tokenizer, templated)


def preview(config: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a config would train on, in numbers; `as_text` makes a table of them.

    `train` and `held_out` are those of `side_numbers`, the latter None where nothing is held out.
    `overlap` counts the prompts on both sides. `left_out` says how many rows are not even read as
    examples, by reason.

    Args:
        config: of any recipe that trains.
        words: options of the recipe.
    """
    run = opened(config, words)
    return numbers(run, run.measured(run.data.train))


def numbers(run: Opened, measured: Sequence[Measured]) -> dict[str, Any]:
    """Return the numbers of `preview`; `measured` are the training rows in tokens."""
    data, turns = run.data, run.turns
    held_out = list(data.held_out or ())
    train_numbers = side_numbers(list(data.train), measured, turns)
    shared = prompt_keys(data.train, turns) & prompt_keys(held_out, turns)
    return {
        "config": run.config,
        "recipe": run.stage.name,
        "algorithm": run.loaded.row.label if run.loaded.row else None,
        "limit": run.limit,
        "notes": [*filter(None, [run.note]), *data.notes],
        "left_out": {reason: count for reason, count in data.dropped.items() if count},
        "left_out_places": {reason: data.first_places(reason) for reason in data.places},
        "left_out_held_out": {why: count for why, count in data.dropped_held_out.items() if count},
        "overlap": len(shared),
        "train": train_numbers,
        "held_out": side_numbers(held_out, run.measured(held_out), turns) if held_out else None,
    }


def as_text(numbers: dict[str, Any]) -> str:
    """Return what `preview` returned as a table of the two sides, with sentences around it."""
    title = f"{numbers['config']}: {numbers['algorithm'] or numbers['recipe']}; {numbers['limit']}"
    sides = {"train": numbers["train"], "held out": numbers["held_out"]}
    sides = {name: _cells(side) for name, side in sides.items() if side}
    lines = [
        {"": place, **{name: cells.get(place, "-") for name, cells in sides.items()}}
        for place in dict.fromkeys(place for cells in sides.values() for place in cells)
    ]
    out = [title, *numbers["notes"], "", tables.text(lines), ""]
    for side, key in (("training", "left_out"), ("held-out", "left_out_held_out")):
        for reason, count in numbers[key].items():
            place = numbers["left_out_places"].get(reason, "")
            rows = "rows" if "to evaluate on" in reason else f"{side} rows"
            out.append(f"left out {count} {rows}: {reason}{place}")
    if numbers["held_out"] is None:
        out.append("nothing is held out")
    else:
        out.append(f"{numbers['overlap']} prompts are both trained on and held out")
    return "\n".join(out)


def _cells(side: dict[str, Any]) -> dict[str, str]:
    """Return the numbers of a side as text, by what they are; shares are those of its rows."""
    cells = {}
    for name, count in side.items():
        if name in ("rows", "prompts"):
            cells[name] = str(count)
        elif name != "tokens":
            cells[name.replace("_", " ")] = f"{count} ({count / side['rows']:.1%})"
    for column, lengths in side["tokens"].items():
        values = " / ".join(f"{value:g}" for value in lengths.values())
        cells[f"tokens of {column}, {' / '.join(lengths)}"] = values
    return cells


def _examples(stage: Stage, loaded: Loaded) -> tuple[Examples, str | None]:
    """Return the examples of a run, and a note; of answers to be sampled, the prompts alone.

    Candidates, which a reward model's evaluation samples, are not shown, and so not asked for.
    """
    own = loaded.own

    def sample(*_: Any) -> Any:
        """Stand for the function that would sample answers."""
        raise _NeedsAnswers

    try:
        if stage.makes == "reward_model":
            load, arguments = loader_of(_without_candidates(own), sample)
            return load(*arguments), None
        if stage.family == "direct_alignment":
            unpaired = stage.options.get("unpaired", False)
            return load_preferences(own.dataset, own.max_samples, unpaired, sample), None
        if stage.name == "sft":
            return load_demonstrations(own.dataset, own.demonstrator), None
        load_examples = stage.part("examples")  # of a stage that answers prompts
        return load_examples(own), None
    except _NeedsAnswers:
        data = load_prompts(own.dataset)
        data.train = data.train.select(range(len(data.train))[: own.max_samples])
        name = getattr(own.dataset, "sampled_from", None) or loaded.model.model_name_or_path
        note = f"the answers are sampled from {name} when the run begins; here are the prompts"
        return data, note


def _without_candidates(own: Any) -> Any:
    """Return the fields of a reward model's run without what is sampled for evaluation alone."""
    names = {field.name for field in fields(own.dataset)}
    if isinstance(own.dataset, FileData) or "candidates" not in names:
        return own
    unread: dict[str, Any] = {"candidates": 0}
    if "samples_per_prompt" not in names:  # nothing is sampled, so that it would be refused
        unread["sampled_from"] = None
    return replace(own, dataset=replace(own.dataset, **unread))


def _answers_prompts(stage: Stage, data: Examples) -> bool:
    """Whether a run answers the prompts of its rows; they may have answers all the same."""
    has_answers = {"chosen", "completion", "completions", "ranked"} & {*data.train.column_names}
    asks = stage.examples is not None and stage.part("examples") is prompts
    return asks or not has_answers


def _measure(stage: Stage, loaded: Loaded, data: Examples, tokenizer: Any) -> tuple[Measure, str]:
    """Return what measures a row as the run's trainer reads it, and the limit in words."""
    args = loaded.trl
    if _answers_prompts(stage, data):
        return _measure_prompts(loaded, tokenizer)
    longest = f"max_length {args.max_length}"
    if stage.makes == "reward_model":
        return _measure_judged(loaded, tokenizer), f"{longest}: longer rows are dropped"
    if stage.name == "sft":
        return _measure_demonstrations(loaded, tokenizer), f"{longest}, {args.truncation_mode}"
    limit = f"{longest}, overlong: {args.overlong or 'as TRL'}"
    return _measure_preferences(args, tokenizer), limit


def context_of(loaded: Loaded) -> int | None:
    """Return how many tokens a run's model reads at most; None: any number, or it is not known."""
    if loaded.model.model_name_or_path == UNTRAINED:
        return None
    config = model_config(loaded.model, loaded.trl).get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _measure_prompts(loaded: Loaded, tokenizer: Any) -> tuple[Measure, str]:
    """Measure prompts, which must leave room for an answer in the model's context."""
    args, context = loaded.trl, context_of(loaded)
    answer = getattr(args, "max_completion_length", None)
    answer = answer or getattr(loaded.own, "max_completion_length", 0)

    def measure(row: Row) -> Measured:
        (prompt,) = fed_prompts(loaded, [row], tokenizer)
        count = len(prompt.ids)
        fits = context is None or count + answer <= context
        return Measured(count, {}, WHOLE if fits else TOO_LONG)

    return measure, f"answers of at most {answer} tokens in a context of {context or 'any length'}"


def _measure_preferences(args: Any, tokenizer: Any) -> Measure:
    """Measure pairs and labeled answers, which the rule `overlong` cuts or drops."""

    def measure(row: Row) -> Measured:
        sides = [side for side in SIDES if side in row]
        prompt, texts, _ = tokens_of(tokenizer, row, sides)
        completions = [ids[len(prompt) :] for ids in texts]
        rule = args.overlong or "cut_prompt"
        fitting = shortened(prompt, completions, args.max_length, rule)
        fate = WHOLE
        if fitting is None:
            fate = DROPPED
        elif len(sides) == 2 and fitting[1][0] == fitting[1][1]:
            fate = IDENTICAL
        elif fitting != (prompt, completions):
            fate = CUT
        return Measured(len(prompt), dict(zip(sides, map(len, completions), strict=True)), fate)

    return measure


def _measure_demonstrations(loaded: Loaded, tokenizer: Any) -> Measure:
    """Measure demonstrations, which `max_length` cuts, or drops where no answer is left."""

    def measure(row: Row) -> Measured:
        prompt, (ids,), _ = tokens_of(tokenizer, row, ("completion",))
        limit = loaded.trl.max_length
        fate = WHOLE if limit is None or len(ids) <= limit else CUT
        if answer_text(tokenizer, row, loaded) is None:
            fate = DROPPED
        return Measured(len(prompt), {"completion": len(ids) - len(prompt)}, fate)

    return measure


def _measure_judged(loaded: Loaded, tokenizer: Any) -> Measure:
    """Measure what a reward model reads; a row whose longest text is over `max_length` is dropped.

    A row has the steps of one answer (`completions`), a list of answers (`ranked`), or an answer on
    each side (`chosen` and `rejected`, or `completion`).
    """
    own, args = loaded.own, loaded.trl
    step_options = ()
    if own.algorithm == "prm":
        step_options = (own.dataset.step_separator, own.dataset.step_split)
    reader = Reader(own.algorithm, own.formulation, *step_options)

    def longest_text(row: Row, column: str) -> int:
        """Return the tokens of the longest text, a prompt with an answer, of a column."""
        prompt, cell = row["prompt"], row[column]
        if column == "completions":
            return len(reader.encode_steps(tokenizer, prompt, cell).ids)
        finished = row.get("finished", True)
        answers = cell if column == "ranked" else [cell]
        return max(len(reader.encode(tokenizer, prompt, a, finished).ids) for a in answers)

    def measure(row: Row) -> Measured:
        columns = [name for name in ("completions", *SIDES, "ranked") if name in row]
        longest = {column: longest_text(row, column) for column in columns}
        prompt_length = len(prompt_ids(tokenizer, row["prompt"]))
        answer_lengths = {column: length - prompt_length for column, length in longest.items()}
        is_long = args.max_length is not None and max(longest.values()) > args.max_length
        return Measured(prompt_length, answer_lengths, fate=DROPPED if is_long else WHOLE)

    return measure
