"""A run of rejection sampling: answers are sampled, scored and selected, then trained on."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from trl.data_utils import is_conversational

from rlhf_trl import output
from rlhf_trl.book.selection import STRATEGIES, Pairs
from rlhf_trl.data.columns import code
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.data.reached import reached
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.function_scores import function_scores
from rlhf_trl.models import load_tokenizer
from rlhf_trl.output import write_json
from rlhf_trl.reward_models.metrics import coverage, ranking_metrics
from rlhf_trl.reward_models.report import draw_reward_report, write_candidates
from rlhf_trl.rewards.calls import watched
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rewards.loading import (
    answer_columns,
    check_all_rewarded,
    check_right_answers,
    load_rewards,
)
from rlhf_trl.rewards.verifiers import VERIFIERS
from rlhf_trl.rollouts.generate import Completion, Sampling, check_prompts, prompt_texts
from rlhf_trl.rollouts.sampling import fingerprint, in_batches, read_or_make, sample_completions
from rlhf_trl.run import train
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.policy_gradients import check_reward_model
from rlhf_trl.run.resuming import RESUMING
from rlhf_trl.run.supervised import fix_fields, print_counts

NAME = "rejection sampling"
TEMPLATE_COLUMNS = ("chat_template_kwargs", "tools")  # of the data; the chat template reads them
# What is trained is the answers, as they were sampled.
FIXED = {"completion_only_loss": True, "assistant_only_loss": False}


@dataclass(frozen=True)
class Rollouts:
    """The answers to M prompts, N to each, their rewards, and whether they are right if known."""

    prompts: Any  # the rows, a data set
    answers: list[list[Completion]]
    rewards: list[list[float]]
    labels: list[list[bool]] | None

    def selection_metrics(self, pairs: Pairs) -> dict[str, Any]:
        """Return the numbers of a selection, given as pairs of a prompt's and its answer's place.

        The rates and coverages at the end are about the scores of all answers, not about the
        selection. A prompt is decidable if it has right and wrong answers, so that a choice by
        scores can be better than chance. The hit rate is how often the best scored answer to a
        decidable prompt is right, the random rate how often one drawn at random is. The coverages
        map n to the share of prompts with a right answer among their n best scored.
        """
        numbers: dict[str, Any] = {
            "answers": sum(map(len, self.answers)),
            "prompts": len(self.answers),
            "selected": len(pairs),
            "prompts_covered": len({prompt for prompt, _ in pairs}),
            "selected_cut_off": sum(not self.answers[m][n].finished for m, n in pairs),
        }
        if self.labels is None:
            return numbers
        scores, labels, groups = self.candidates()
        shares_right = [sum(row) / len(row) for row in self.labels]
        decidable = [share for share in shares_right if 0 < share < 1]
        numbers["share_right"] = sum(labels) / len(labels)
        numbers["selected_right"] = sum(self.labels[m][n] for m, n in pairs) / len(pairs)
        numbers["decidable"] = len(decidable) / len(self.labels)
        if decidable:  # `top1_accuracy` is a mean over decidable prompts
            numbers["decidable_hit_rate"] = ranking_metrics(scores, labels, groups)["top1_accuracy"]
            numbers["decidable_random_rate"] = sum(decidable) / len(decidable)
        numbers["coverage"] = coverage(scores, labels, groups)
        equal_scores = [0.0] * len(labels)  # among these, `coverage` chooses at random
        numbers["random_coverage"] = coverage(equal_scores, labels, groups)
        return numbers

    def candidates(self) -> tuple[list[float], list[bool], list[int]]:
        """Return score, label and prompt number of each answer, where labels are known."""
        scores = [reward for row in self.rewards for reward in row]
        labels = [label for row in self.labels for label in row]
        groups = [number for number, row in enumerate(self.rewards) for _ in row]
        return scores, labels, groups


def train_on_selected(loaded: Loaded[Any, Any], trainer_class: Any) -> None:
    """Do what the recipe of rejection sampling does: sample, score, select, train, evaluate.

    Beside what `train.run` leaves, `<output_dir>` then holds `selection.json`, `scores.jsonl` and
    `reward_report.png` (where it is known which answers are right), and the `answers` unless they
    go elsewhere. All rounds but the last are runs in `round-N`, whose model the next starts from.
    """
    own, args = loaded.own, loaded.trl
    by = f"{NAME}, which trains answers as they were sampled, and nothing else"
    fix_fields(loaded, FIXED, by)
    if own.rounds > 1 and loaded.model.use_peft:
        raise InputError(
            "rounds: each round but the first would start from an adapter, which use_peft cannot "
            "train another one on; write rounds: 1, merge the adapter and run again from there."
        )
    check_reward_model(own)
    resume = args.resume_from_checkpoint  # as written; `begin` puts the run's own checkpoint there
    train.begin(loaded, NAME)
    columns = answer_columns(own)
    data = train.read(args, load_prompts, own.dataset, columns, own.chat_template_kwargs)
    train.check_held_out(args, data.held_out)
    tokenizer = load_tokenizer(loaded.model, args, data.conversational)
    train.check_template(data, tokenizer, args, own.dataset)
    # a field that SFTConfig lacks, and that generating reads there
    args.max_completion_length = own.max_completion_length
    with train.naming_refused_row(data, tokenizer, args):
        for rows in (data.train, data.held_out or []):
            check_prompts(rows, tokenizer, loaded.model, args)
    for number in range(1, own.rounds + 1):
        config_of_round = _round(loaded, number, resume)
        if number < own.rounds:  # a run of its own; the last one is the run that has begun above
            if _is_done(config_of_round):
                continue
            train.begin(config_of_round, f"{NAME}, round {number} of {own.rounds}")
        with watched(config_of_round.trl, own.reward_timeout):
            _train(config_of_round, data, tokenizer, trainer_class)


def _round(loaded: Loaded[Any, Any], number: int, resume: str | None) -> Loaded[Any, Any]:
    """Return what `load_config` would have returned for a round; the last one is the run itself."""
    root = Path(loaded.trl.output_dir)
    own, args, model = copy(loaded.own), copy(loaded.trl), copy(loaded.model)
    own.answers = own.answers or str(root / "answers")  # one folder for all rounds
    if number > 1:
        model.model_name_or_path = str(root / f"round-{number - 1}" / "model")
    if number == own.rounds:
        return loaded._replace(own=own, trl=args, model=model)
    args.output_dir = str(root / f"round-{number}")
    args.resume_from_checkpoint = resume
    # what the round's config.yaml gets: a run of one round, which can be repeated by itself
    given = {
        **loaded.given,
        "model_name_or_path": model.model_name_or_path,
        "rounds": 1,
        "output_dir": args.output_dir,
    }
    return loaded._replace(own=own, trl=args, model=model, given=given)


def _is_done(loaded: Loaded[Any, Any]) -> bool:
    """Tell whether a round is finished; refuse one that was run with other settings."""
    folder = Path(loaded.trl.output_dir)
    if not output.finished(folder):
        return False
    before, now = read_config(folder / "config.yaml"), loaded.given
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    changed -= {*RESUMING, "answers", "reuse_answers"}  # none of which changes a round
    if changed:
        raise InputError(
            f"{folder} was run with another {min(changed)}; restore it, or name another output_dir."
        )
    return True


def _train(loaded: Loaded[Any, Any], data: Examples, tokenizer: Any, trainer_class: Any) -> None:
    """Do a round: sample, score and select answers, and train on those selected."""
    from datasets import Dataset

    own, args = loaded.own, loaded.trl
    rollouts, correctness = roll_out(loaded, data, tokenizer)
    pairs = _select(loaded, rollouts)  # (number of the prompt, number of the answer to it)
    metrics = rollouts.selection_metrics(pairs)
    if args.process_index == 0:
        shown = [f"{key} {n:.4g}" for key, n in metrics.items() if not isinstance(n, dict)]
        print(f"{own.strategy}: {', '.join(shown)}", flush=True)
    dataset = Dataset.from_list([_example(rollouts, tokenizer, pair) for pair in pairs])
    # transformers refuses an eval_strategy without a data set; what is evaluated is `held_out`
    eval_dataset = None if args.eval_strategy == "no" else dataset.select([0])
    trainer = train.build(
        loaded, trainer_class, data, tokenizer, train_dataset=dataset, eval_dataset=eval_dataset
    )
    print_counts(trainer)  # of the answers that max_length leaves out or cuts
    trainer.max_completion_length = own.max_completion_length
    if data.tasks is None and data.held_out is not None:  # `train.run` does it for the gym's tasks
        trainer.held_out = data.held_out.to_list()
        trainer.scores = {} if correctness is None else {correctness.__name__: correctness}
    # `run` keeps a checksum of the rows, and so refuses to resume with other answers
    selected_data = replace(data, train=dataset)
    report = partial(_report, rollouts=rollouts, metrics=metrics)
    train.run(trainer, loaded, selected_data, NAME, write_more=report, prompts=data.train)


def _select(loaded: Loaded[Any, Any], rollouts: Rollouts) -> Pairs:
    """Return the answers that the config's strategy selects, which reads some of its options."""
    own = loaded.own
    strategy = STRATEGIES[own.strategy]
    one_per_prompt = len(rollouts.answers)
    options = {"k": own.k or one_per_prompt, "seed": loaded.trl.seed, "ties": own.ties}
    parameters = signature(strategy).parameters
    read = {key: value for key, value in options.items() if key in parameters}
    return strategy(rollouts.rewards, **read)


def _example(rollouts: Rollouts, tokenizer: Any, pair: tuple[int, int]) -> dict[str, list[int]]:
    """Return the tokens of prompt and answer as sampled: no end is put behind one that was cut."""
    prompt_number, answer_number = pair
    row = rollouts.prompts[prompt_number]
    answer_ids = list(rollouts.answers[prompt_number][answer_number].ids)
    is_text = not is_conversational({"prompt": row["prompt"]})  # a chat template has special tokens
    texts = prompt_texts(tokenizer, [row])
    prompt_ids = tokenizer(texts, add_special_tokens=is_text)["input_ids"][0]
    mask = [0] * len(prompt_ids) + [1] * len(answer_ids)
    return {"input_ids": prompt_ids + answer_ids, "completion_mask": mask}


def roll_out(loaded: Loaded[Any, Any], data: Examples, tokenizer: Any) -> tuple[Rollouts, Any]:
    """Return the scored answers to the training prompts, and the function that finds right answers.

    The function is that of `correctness_of`, which may be None. Answers and rewards are kept in
    files whose names hash all that they depend on, so that a later run with another selection, but
    the same sampling, takes them from there.
    """
    own, args, model = loaded.own, loaded.trl, loaded.model
    functions = _reward_functions(own, data, args.output_dir)
    rows, count = data.train, own.num_generations
    sampling = Sampling(own.temperature, own.top_p, own.top_k, own.min_p)

    def kept_lines(path: Path, make: Callable[[], list[Any]]) -> list[Any]:
        """Return a line for each row, from the file if it is there, else made and kept in it."""
        lines = read_or_make(path, make)
        if len(lines) != len(rows):
            raise InputError(f"answers: {path} does not hold {len(rows)} lines of JSON; remove it.")
        return lines

    def sample() -> list[Any]:
        """Return the answers to each row, as `Completion`s."""
        # the processes share the rows, as `in_batches` does below
        return sample_completions(model, args, rows, count, args.seed, sampling, share_batches=True)

    answers_path = _answers_path(loaded, rows, sampling)
    answers = []
    for line in kept_lines(answers_path, sample):  # from JSON, a completion is a list of its fields
        answers.append([Completion(*fields) for fields in line])

    def score() -> list[Any]:
        """Return the rewards of the answers to each row."""
        all_functions = [*functions]
        if own.reward_model:  # loaded only if no file has its rewards
            strips_think = own.reward_model_strips_think
            reward = load_reward_model(
                own.reward_model, tokenizer, args, own.reward_aggregate, strips_think
            )
            all_functions.append(reward)
        return in_batches(partial(_rewards, all_functions, answers), args, rows, count)

    rewards_path = _rewards_path(loaded, rows, functions, answers_path)
    rewards = score() if rewards_path is None else kept_lines(rewards_path, score)
    correctness = correctness_of(own, data)
    if correctness is None:
        return Rollouts(rows, answers, rewards, labels=None), None
    # not kept in a file, and quickly done: every process computes all, so that nothing is gathered
    right = in_batches(
        partial(_rewards, [correctness], answers), args, rows, count, share_batches=False
    )
    labels = [[value == 1 for value in row] for row in right]
    return Rollouts(rows, answers, rewards, labels), correctness


def _reward_functions(own: Any, data: Examples, folder: str) -> list[Any]:
    """Return the reward functions of a config without its reward model, which takes long to load.

    They have read the right answers of all rows. A judge's replies are kept in the `folder`.
    """
    if own.reward_model and not own.reward_funcs:
        return []
    columns = data.train.column_names
    functions = load_rewards(own.reward_funcs, data.tasks, columns, own.llm_judge, folder)
    check_right_answers(own.reward_funcs, data.train, data.held_out)
    if not own.reward_model:  # it would reward every row
        check_all_rewarded(own.reward_funcs, data.train)
    return functions


def correctness_of(own: Any, data: Examples) -> Any:
    """Return the function that tells right answers from wrong ones; None: there is none.

    `own` are the recipe's fields. The function is the one that `correctness` names, by default
    exact_match for questions of the gym, and else the first of reward_funcs that is a verifier.
    """
    name = own.correctness
    if not name and data.tasks:
        name = "exact_match"
    elif not name:
        verifiers = [name for name in own.reward_funcs if name.partition(":")[0] in VERIFIERS]
        if not verifiers:
            return None
        name = verifiers[0]
    (correctness,) = load_rewards([name], data.tasks, data.train.column_names)
    return correctness


def _answers_path(loaded: Loaded[Any, Any], rows: Any, sampling: Sampling) -> Path:
    """Return the file of the answers, whose name hashes all that sampling reads.

    Earlier versions hashed less. Their file is a fallback: if only that one exists, it is taken
    with `reuse_answers`, and without it a line says that the file is there.
    """
    own, args, model = loaded.own, loaded.trl, loaded.model
    name = model.model_name_or_path
    # Rename no key, whatever it is called: the names of users' files are hashes of these keys, too.
    hashed_earlier = {
        "model": fingerprint(name, model.model_revision, with_base=False),
        "prompts": sha256("".join(map(json.dumps, rows["prompt"])).encode()).hexdigest(),
        "how": [
            own.num_generations,
            *sampling,
            own.max_completion_length,
            args.seed,
            model.dtype,
        ],
        "also": [args.per_device_eval_batch_size, own.chat_template_kwargs],
    }
    template_columns = [column for column in TEMPLATE_COLUMNS if column in rows.column_names]
    quantization = {
        key: value
        for key, value in vars(model).items()
        if key.startswith(("load_in_", "bnb_", "use_bnb_"))
    }
    hashed = {
        **hashed_earlier,
        "model": fingerprint(name, model.model_revision),  # of an adapter, with its base
        "columns": _rows_hash(rows.select_columns(template_columns)) if template_columns else None,
        "loading": [model.attn_implementation, args.model_init_kwargs],
        "quantization": quantization,
    }
    path = Path(own.answers, f"answers-{_key(**hashed)}.jsonl")
    earlier_path = Path(own.answers, f"answers-{_key(**hashed_earlier)}.jsonl")
    if args.process_index == 0:
        path = _new_or_earlier(path, earlier_path, own.reuse_answers)
    return broadcast_object_list([path])[0]  # as the main process sees the folder


def _new_or_earlier(path: Path, earlier_path: Path, reuse: bool) -> Path:
    """Return the path; where only the earlier one exists, that one, or print why not."""
    if path.exists() or not earlier_path.exists():
        return path
    if reuse:
        print(f"answers: {earlier_path} is reused, as reuse_answers says", flush=True)
        return earlier_path
    print(
        f"answers: {earlier_path} is of an earlier version, whose name leaves out what the "
        "template gets from the data, quantization, attention and an adapter's base; "
        "sampled anew (reuse_answers: true takes it)",
        flush=True,
    )
    return path


def _rewards_path(
    loaded: Loaded[Any, Any], rows: Any, functions: list[Any], answers_path: Path
) -> Path | None:
    """Return the file of the rewards, whose name hashes all they depend on; None: keep none.

    Args:
        loaded: the config.
        rows: the prompts.
        functions: the reward functions but for the reward model, which is hashed by its files, as
            it is not loaded yet.
        answers_path: the file of the answers, beside which that of the rewards stands.
    """
    own = loaded.own
    key = None
    try:
        # `reached` hashes the code and the values that a function depends on
        hashed_functions = [(function.__name__, reached(function)) for function in functions]
    except ValueError as error:  # a function depends on something that has no hash
        if loaded.trl.process_index == 0:
            print(f"answers: their rewards are not kept for another run: {error}", flush=True)
    else:
        key = _key(
            code=code("data", "reward_models", "rewards"),  # of these folders of the package
            functions=hashed_functions,
            reward_model=own.reward_model and fingerprint(own.reward_model),
            how=[own.reward_aggregate, own.reward_model_strips_think],
            rows=_rows_hash(rows),
            answers=sha256(answers_path.read_bytes()).hexdigest(),
        )
    (key,) = broadcast_object_list([key])  # hashes of pickled values may differ by process
    if key is None:
        return None
    stem = answers_path.stem.replace("answers", "rewards")
    return answers_path.with_stem(f"{stem}-{key}")


def _rows_hash(rows: Any) -> str:
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _key(**what: Any) -> str:
    return sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _rewards(
    functions: list[Any], answers: list[list[Completion]], batch: list[dict[str, Any]], first: int
) -> list[list[float]]:
    """Return the rewards of the answers to a batch of prompts: the sum over the functions.

    `answers` are those to all prompts, of which the batch begins at the place `first`.
    """
    count = len(answers[first])  # of the answers to each prompt
    completions = [
        completion
        for prompt_answers in answers[first : first + len(batch)]
        for completion in prompt_answers
    ]
    rows = [row for row in batch for _ in range(count)]  # that of each completion
    # functions are scored by name; here numbers do, as nobody reads the names
    scores_by_number = function_scores(dict(enumerate(functions)), rows, completions)
    # by function, a value for each completion, None where the function does not apply
    by_function = scores_by_number.values()
    totals = []
    for place, values in enumerate(zip(*by_function, strict=True)):
        applied = [value for value in values if value is not None]
        if not applied:
            raise InputError(
                f"no reward function applied to an answer to prompt {first + place // count + 1}: "
                "all returned None; let at least one of them return a number for every answer."
            )
        totals.append(float(sum(applied)))
    return [totals[start : start + count] for start in range(0, len(totals), count)]


def _report(trainer: Any, folder: Path, title: str, rollouts: Rollouts, metrics: Any) -> None:
    """Write what was selected of what, and the scores of all answers with their figure."""
    write_json(folder / "selection.json", metrics)
    if rollouts.labels is None:
        return
    rows = []
    by_prompt = zip(rollouts.prompts, rollouts.answers, rollouts.labels, strict=True)
    for row, completions, labels in by_prompt:
        for answer, label in zip(completions, labels, strict=True):
            scored = {"completion": answer.text, "label": label, "finished": answer.finished}
            rows.append({**row, **scored})
    candidates = rollouts.candidates()
    scores, _, _ = candidates
    write_candidates(folder, rows, ({"reward": score} for score in scores))
    draw_reward_report(folder / "reward_report.png", title, candidates=candidates, selecting=True)
