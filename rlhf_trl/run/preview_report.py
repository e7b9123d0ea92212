"""What `rlhf-trl preview` shows: numbers, faults, examples as they are fed, rewards, what comes."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_trl.data.answers import completion_text
from rlhf_trl.data.examples import OF_TEXTS
from rlhf_trl.data.made import demonstrations
from rlhf_trl.data.preview import DROPPED, IDENTICAL, Measured
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.function_scores import function_scores
from rlhf_trl.models import UNTRAINED, path_or_name
from rlhf_trl.output import write_whole
from rlhf_trl.rewards.loading import answer_columns, load_rewards
from rlhf_trl.rewards.verifiers import ANSWER
from rlhf_trl.rollouts.generate import Completion
from rlhf_trl.run.fake_models import Texts
from rlhf_trl.run.fed import Fed, fed_examples, fed_prompts
from rlhf_trl.run.plan import Plan, batches, steps_to_come
from rlhf_trl.run.policy_gradients import on_policy_note
from rlhf_trl.run.preview import Opened, as_text, context_of, numbers, opened
from rlhf_trl.run.preview_faults import counted, faults_of_tokens, faulty_rows, unbalanced_labels
from rlhf_trl.run.preview_page import MADE_BY, as_html, as_lines, example_html
from rlhf_trl.run.shares import Launch

SHOWN = 3  # examples
PREPARED = 64  # examples of which the tokens are looked at
ASKS_A_SERVER = "llm_judge"


@dataclass
class Report:
    """What a run would train on, and how."""

    numbers: dict[str, Any]  # of `preview`
    faults: list[str]
    to_come: list[str]  # sentences: the algorithm, batches, checkpoints
    rewards: list[str]  # a sentence for each reward function
    examples: list[list[Fed]]  # the first ones, faulty ones before others
    tokenizer: Any

    def as_text(self, width: int, in_color: bool) -> str:
        """Return all of it for a terminal of so many letters in a line."""
        first, _, rest = as_text(self.numbers).partition("\n")
        faults = [f"! {fault}" for fault in self.faults]
        if in_color:
            faults = [f"\x1b[1;31m{fault}\x1b[0m" for fault in faults]
        lines = [first, *faults, rest, "", *self.to_come, *self.rewards]
        marks = "in green" if in_color else "in [[ ]]"
        for number, example in enumerate(self.examples, 1):
            title = f"-- example {number} as it is fed; {marks} what is trained "
            lines += [
                "",
                title.ljust(width, "-"),
                *as_lines(example, self.tokenizer, width, in_color),
            ]
        return "\n".join(lines)

    def write_html(self, path: str) -> None:
        """Write it as a page; a file that is no page of a preview is not replaced."""
        target = Path(path)
        if target.exists() and MADE_BY not in target.read_text(encoding="utf-8", errors="replace"):
            raise InputError(
                f"--html: {path} exists and is no page of a preview; name another file."
            )
        title, _, table = as_text(self.numbers).partition("\n")
        above = "\n".join([table.strip(), "", *self.to_come, *self.rewards])
        parts = [
            example_html(f"example {number} as it is fed", example, self.tokenizer)
            for number, example in enumerate(self.examples, 1)
        ]
        try:
            write_whole(target, as_html(title, above, self.faults, parts))
        except OSError as error:
            raise InputError(
                f"--html: {path} cannot be written ({error.strerror}); name another file."
            ) from error

    def as_json(self) -> str:
        """Return it for programs: the numbers, and the rest beside them."""
        more = {"faults": self.faults, "to_come": self.to_come, "rewards": self.rewards}
        examples = [[asdict(text) for text in example] for example in self.examples]
        return json.dumps({**self.numbers, **more, "examples": examples}, indent=2)


def report(
    config: str, words: Sequence[str] = (), completion: str | None = None, sample: bool = False
) -> Report:
    """Return what a config would train on, and how.

    Args:
        config: of any recipe that trains.
        words: options of the recipe.
        completion: that the rewards judge; None: the right answer of each example.
        sample: whether to load the model and let it answer the prompts that are shown; the rewards
            then judge these answers.
    """
    run = opened(config, words)
    if sample and completion is not None:
        raise InputError("--sample is not read with --completion; remove one of the two.")
    if sample and not run.is_prompts:
        raise InputError(
            f"--sample: {run.stage.name} learns from the answers of its data, and samples none; "
            "remove it."
        )
    rows = list(run.data.train)
    measured = run.measured(rows)
    faults = faulty_rows(rows, measured, run.loaded.trl, context_of(run.loaded))
    kept = [n for n, row in enumerate(measured) if row.fate not in (DROPPED, IDENTICAL)]
    if not kept:
        raise InputError(
            f"dataset: no training row is left; {'; '.join(counted(faults, len(rows)))}."
        )
    faulty = {place for places in faults.values() for place in places}
    order = sorted(kept, key=lambda place: place not in faulty)  # faulty ones first
    examples = _fed(run, order[:PREPARED])
    # the trainer has given its tokenizer the template, and perhaps tokens, of chat_template_path
    tokenizer = run.templated if run.is_prompts else run.tokenizer
    # a limit may have cut the texts that reach it
    limit = None if run.is_prompts else run.loaded.trl.max_length
    faults_shown = [
        *counted(faults, len(rows)),
        *faults_of_tokens(examples, tokenizer, _ends(run), limit),
    ]
    if run.stage.name == "kto" and not run.is_prompts:
        labels = [rows[place]["label"] for place in kept]
        faults_shown += unbalanced_labels(labels, run.loaded.row.parameters)
    examples = examples[:SHOWN]
    if sample:
        judged = [rows[place] for place in order[:SHOWN]]
        answers, what = _sampled_answers(run, judged), "sampled answers to the shown"
        pairs = zip(examples, answers, strict=True)
        examples = [[_with_answer(prompt, answer)] for (prompt,), answer in pairs]
    else:
        judged = rows[:SHOWN]
        answers, what = _answers_to_judge(run, judged, completion)
    return Report(
        numbers=numbers(run, measured),
        faults=faults_shown,
        to_come=_to_come(run, measured, len(kept)),
        rewards=_called_rewards(run, judged, answers, what),
        examples=examples,
        tokenizer=tokenizer,
    )


def _fed(run: Opened, places: Sequence[int]) -> list[list[Fed]]:
    """Return the training rows at these places as the trainer reads them."""
    rows = run.data.train.select(places)
    if run.is_prompts:
        return [[prompt] for prompt in fed_prompts(run.loaded, list(rows), run.templated)]
    try:
        return fed_examples(run.stage, run.loaded, rows, run.tokenizer)
    except InputError:
        if run.stage.name != "kto" or len(places) == len(run.data.train):
            raise
        return _fed(run, range(len(run.data.train)))  # these have not both labels; all may have


def _ends(run: Opened) -> set[int]:
    """Return the tokens at which the run's model stops generating; a reward model has none."""
    from transformers import GenerationConfig

    if run.stage.makes == "reward_model":
        return set()
    ends = {run.tokenizer.eos_token_id}
    if getattr(run.loaded.trl, "eos_token", None):  # the trainer adds it to the model's
        ends.add(run.tokenizer.convert_tokens_to_ids(run.loaded.trl.eos_token))
    model = run.loaded.model
    if model.model_name_or_path == UNTRAINED:
        return ends
    try:
        config = GenerationConfig.from_pretrained(path_or_name(model))
    except OSError:  # a model without such a file stops at the tokenizer's
        return ends
    named = config.eos_token_id
    return ends | {*(named if isinstance(named, list) else [named])} - {None}


def _to_come(run: Opened, measured: Sequence[Measured], count: int) -> list[str]:
    """Return what the run does with `count` examples: a sentence each."""
    args, loaded = run.loaded.trl, run.loaded
    longest = max(row.prompt + max(row.answers.values(), default=0) for row in measured)
    if run.stage.prompted:
        longest += args.max_completion_length
    tokens = min(longest, getattr(args, "max_length", None) or longest)
    if run.is_prompts and not run.stage.prompted:
        return []  # the examples are yet to be sampled
    texts = Texts(rows=args.per_device_train_batch_size, tokens=tokens)
    plan = Plan(stage=run.stage, loaded=loaded, launch=Launch(), texts=texts)
    known = None if getattr(args, "packing", False) else count
    steps = steps_to_come(plan, known)
    note = on_policy_note(loaded)
    sentences = [] if note is None else [note]
    if not run.data.conversational:
        sentences.append(OF_TEXTS)
    if run.stage.prompted:
        sentences.append(
            f"trained: sampled answers of at most {args.max_completion_length} tokens, with the "
            f"{run.templated.eos_token} that ends them"
        )
    sentences += batches(plan, known)
    for noun, strategy, every in (
        ("checkpoints", args.save_strategy, args.save_steps),
        ("evaluations", args.eval_strategy, args.eval_steps or args.logging_steps),
    ):
        kind = getattr(strategy, "value", strategy)
        if kind == "steps" and steps:
            every = int(every) if every >= 1 else max(1, int(steps * every))
            sentences.append(f"{noun}: {steps // every}, every {every} steps, and one at the end")
        elif kind == "epoch":
            sentences.append(f"{noun}: one each epoch, of {args.num_train_epochs:g}")
    return sentences


def _answers_to_judge(
    run: Opened, rows: Sequence[dict[str, Any]], completion: str | None
) -> tuple[list[Completion], str]:
    """Return an answer to each row that rewards may judge, if one is known, and what it is.

    It is the `completion`, or else the right answer: of the gym's tasks as the demonstrator writes
    it, of one's own data as it stands in the column that the rewards compare with.
    """
    texts: list[str] = []
    if completion is not None:
        texts, what = [completion] * len(rows), "--completion to the first"
    elif run.data.tasks is not None:
        what = "right answers to the first"
        with suppress(InputError, KeyError):  # a task that the demonstrator does not know
            texts = [completion_text(row["completion"]) for row in demonstrations(rows, "right")]
    else:
        names = (*answer_columns(run.loaded.own), ANSWER)
        column = next((name for name in names if name in rows[0]), None)
        what = f"the column {column} to the first"
        texts = [str(row[column]) for row in rows if column]
    return [Completion(text, finished=True) for text in texts], what


def _sampled_answers(run: Opened, rows: Sequence[dict[str, Any]]) -> list[Completion]:
    """Load the run's model and return one answer to each row, sampled as the run samples."""
    from rlhf_trl.rollouts.sampling import sample_completions
    from rlhf_trl.run.chat import sampling_of

    loaded = run.loaded
    args = loaded.trl
    model = copy(loaded.model)
    sampled_from = getattr(loaded.own.dataset, "sampled_from", None)
    if sampled_from is not None:
        model.model_name_or_path = sampled_from
    if not hasattr(args, "max_completion_length"):  # a field that SFTConfig lacks
        args.max_completion_length = loaded.own.max_completion_length
    if template := getattr(args, "chat_template_kwargs", None):
        rows = [{**row, "chat_template_kwargs": template} for row in rows]
    answers = sample_completions(model, args, rows, 1, args.seed, sampling_of(loaded))
    return [answer for (answer,) in answers]


def _with_answer(prompt: Fed, answer: Completion) -> Fed:
    """Return a prompt with an answer, all of whose tokens are trained."""
    trained = [*prompt.trained, *[True] * len(answer.ids)]
    return Fed("prompt and sampled answer", [*prompt.ids, *answer.ids], trained)


def _called_rewards(
    run: Opened, rows: Sequence[dict[str, Any]], answers: Sequence[Completion], what: str
) -> list[str]:
    """Call the reward functions on answers to rows; say what each returns for `what` they are."""
    own, data = run.loaded.own, run.data
    names = getattr(own, "reward_funcs", None) or []
    sentences = []
    if getattr(own, "reward_model", None):
        sentences.append(f"reward_model {own.reward_model}: not called, as it has weights to load")
    if not names:
        return sentences
    called = [name for name in names if name.partition(":")[0] != ASKS_A_SERVER]
    functions = load_rewards(called, data.tasks, data.train.column_names) if called else []
    if not answers:
        return [
            *sentences,
            "rewards are not called: name a text for them with --completion, or let the model "
            "answer with --sample",
        ]
    for name, function in zip(called, functions, strict=True):
        begun = time.perf_counter()
        values = function_scores({name: function}, rows, answers)[name]
        seconds = time.perf_counter() - begun
        shown = ", ".join("none" if value is None else f"{value:g}" for value in values)
        sentences.append(
            f"reward {name}: {shown} for {what} {len(rows)} rows, in {1000 * seconds:.3g} ms a call"
        )
    if len(called) < len(names):
        sentences.append(f"reward {ASKS_A_SERVER}: not called, as it asks a server")
    return sentences


def terminal() -> tuple[int, bool]:
    """Return the width of the terminal, and whether it shows colors; NO_COLOR turns them off."""
    in_color = os.isatty(1) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return shutil.get_terminal_size().columns, in_color
