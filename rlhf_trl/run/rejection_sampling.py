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
from rlhf_trl.evaluation.called import called
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
from rlhf_trl.rollouts.sampling import fingerprint, in_batches, kept, sample_completions
from rlhf_trl.run import train
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.policy_gradients import check_reward_model
from rlhf_trl.run.resuming import RESUMING
from rlhf_trl.run.supervised import print_counts

NAME = "rejection sampling"
TEMPLATE_COLUMNS = ("chat_template_kwargs", "tools")  # of the data, that the chat template gets
# What is trained is the answers, as they were sampled.
FIXED = {"completion_only_loss": True, "assistant_only_loss": False, "chat_template_path": None}


@dataclass(frozen=True)
class Rollouts:
    """The answers to M prompts, N to each, their rewards, and whether they are right if known."""

    prompts: Any  # the rows, a data set
    answers: list[list[Completion]]
    rewards: list[list[float]]
    labels: list[list[bool]] | None

    def told(self, pairs: Pairs) -> dict[str, Any]:
        """Return the numbers of a selection."""
        found: dict[str, Any] = {
            "answers": sum(map(len, self.answers)),
            "prompts": len(self.answers),
            "selected": len(pairs),
            "prompts_covered": len({i for i, _ in pairs}),
            "selected_cut_off": sum(not self.answers[i][j].finished for i, j in pairs),
        }
        if self.labels is None:
            return found
        scores, labels, groups = self.candidates()
        both = [sum(row) / len(row) for row in self.labels if 0 < sum(row) < len(row)]
        found["share_right"] = sum(labels) / len(labels)
        found["selected_right"] = sum(self.labels[i][j] for i, j in pairs) / len(pairs)
        found["decidable"] = len(both) / len(self.labels)
        if both:
            found["decidable_hit_rate"] = ranking_metrics(scores, labels, groups)["top1_accuracy"]
            found["decidable_random_rate"] = sum(both) / len(both)
        found["coverage"] = coverage(scores, labels, groups)
        return found | {"random_coverage": coverage([0.0] * len(labels), labels, groups)}

    def candidates(self) -> tuple[list[float], list[bool], list[int]]:
        """Return score, label and prompt of each answer."""
        groups = [i for i, row in enumerate(self.rewards) for _ in row]
        flat = [[value for row in rows for value in row] for rows in (self.rewards, self.labels)]
        return *flat, groups


def train_on_selected(loaded: Any, trainer_class: Any) -> None:
    """Do what the recipe of rejection sampling does: sample, score, select, train, evaluate.

    Beside what `train.run` leaves, `<output_dir>` then holds `selection.json`, `scores.jsonl` and
    `reward_report.png` (where it is known which answers are right), and the `answers` unless they
    go elsewhere. All rounds but the last are runs in `round-N`, whose model the next starts from.
    """
    own, args = loaded.own, loaded.trl
    train.fix(loaded, FIXED, f"{NAME}, which trains answers as they were sampled, and nothing else")
    if own.rounds > 1 and loaded.model.use_peft:
        raise InputError(
            "rounds: each round but the first would start from an adapter, which use_peft cannot "
            "train another one on; write rounds: 1, merge the adapter and run again from there."
        )
    check_reward_model(own)
    resume = args.resume_from_checkpoint
    train.begin(loaded, NAME)
    answers = answer_columns(own)
    data = train.read(args, load_prompts, own.dataset, answers, own.chat_template_kwargs)
    train.check_held_out(args, data.held_out)
    tokenizer = load_tokenizer(loaded.model, args, data.conversational)
    train.check_template(data, tokenizer, args, own.dataset)
    args.max_completion_length = own.max_completion_length
    for rows in (data.train, data.held_out or []):
        check_prompts(rows, tokenizer, loaded.model, args)
    for number in range(1, own.rounds + 1):
        each = _round(loaded, number, resume)
        if number < own.rounds:
            if _is_done(each):
                continue
            train.begin(each, f"{NAME}, round {number} of {own.rounds}")
        with watched(each.trl, own.reward_timeout):
            _train(each, data, tokenizer, trainer_class)


def _round(loaded: Any, number: int, resume: str | None) -> Any:
    """Return what `load_config` would have returned for a round; the last one is the run itself."""
    root = Path(loaded.trl.output_dir)
    own, args, model = copy(loaded.own), copy(loaded.trl), copy(loaded.model)
    own.answers = own.answers or str(root / "answers")
    if number > 1:
        model.model_name_or_path = str(root / f"round-{number - 1}" / "model")
    if number == own.rounds:
        return loaded._replace(own=own, trl=args, model=model)
    args.output_dir, args.resume_from_checkpoint = str(root / f"round-{number}"), resume
    given = {"model_name_or_path": model.model_name_or_path, "rounds": 1}
    given = loaded.given | given | {"output_dir": args.output_dir}
    return loaded._replace(own=own, trl=args, model=model, given=given)


def _is_done(loaded: Any) -> bool:
    """Tell whether a round is finished; refuse one that was run with other settings."""
    folder = Path(loaded.trl.output_dir)
    if not output.finished(folder):
        return False
    before, now = read_config(folder / "config.yaml"), loaded.given
    other = [k for k in before.keys() | now.keys() if before.get(k) != now.get(k)]
    if other := sorted(set(other) - {*RESUMING, "answers", "reuse_answers"}):
        raise InputError(
            f"{folder} was run with another {other[0]}; restore it, or name another output_dir."
        )
    return True


def _train(loaded: Any, data: Examples, tokenizer: Any, trainer_class: Any) -> None:
    from datasets import Dataset

    own, args = loaded.own, loaded.trl
    rollouts, correctness = roll_out(loaded, data, tokenizer)
    strategy = STRATEGIES[own.strategy]
    given = {"k": own.k or len(data.train), "seed": args.seed, "ties": own.ties}
    reads = signature(strategy).parameters
    pairs = strategy(rollouts.rewards, **{k: v for k, v in given.items() if k in reads})
    told = rollouts.told(pairs)
    if args.process_index == 0:
        known = [f"{k} {v:.4g}" for k, v in told.items() if not isinstance(v, dict)]
        print(f"{own.strategy}: {', '.join(known)}", flush=True)
    dataset = Dataset.from_list(list(map(partial(_learned, rollouts, tokenizer), pairs)))
    # answered are the held-out prompts, but transformers wants a data set to evaluate on
    asked = None if args.eval_strategy == "no" else dataset.select([0])
    sides = {"train_dataset": dataset, "eval_dataset": asked}
    trainer = train.build(loaded, trainer_class, data, tokenizer, **sides)
    print_counts(trainer)
    trainer.max_completion_length = own.max_completion_length
    if data.tasks is None and data.held_out is not None:
        trainer.held_out = data.held_out.to_list()
        trainer.scores = {} if correctness is None else {correctness.__name__: correctness}
    # a resumed run is refused if other answers are selected now
    trained = replace(data, train=dataset)
    report = partial(_report, rollouts=rollouts, told=told)
    train.run(trainer, loaded, trained, NAME, extra=report, prompts=data.train)


def _learned(rollouts: Rollouts, tokenizer: Any, pair: tuple[int, int]) -> dict[str, list[int]]:
    """Return the tokens of prompt and answer as sampled: no end is put behind one that was cut."""
    row, ids = rollouts.prompts[pair[0]], list(rollouts.answers[pair[0]][pair[1]].ids)
    special = not is_conversational({"prompt": row["prompt"]})
    prompt = tokenizer(prompt_texts(tokenizer, [row]), add_special_tokens=special)["input_ids"][0]
    return {"input_ids": prompt + ids, "completion_mask": [0] * len(prompt) + [1] * len(ids)}


def roll_out(loaded: Any, data: Examples, tokenizer: Any) -> tuple[Rollouts, Any]:
    """Return the scored answers to the training prompts, and what tells the right ones or None.

    Answers and rewards are kept under names that hash all they depend on, but for the selection.
    """
    own, args, model = loaded.own, loaded.trl, loaded.model
    columns, functions = data.train.column_names, []
    if own.reward_funcs or not own.reward_model:
        functions += load_rewards(own.reward_funcs, data.tasks, columns)
        check_right_answers(own.reward_funcs, data.train, data.held_out)
        if not own.reward_model:
            check_all_rewarded(own.reward_funcs, data.train)
    rows, count = data.train, own.num_generations
    sampling = Sampling(own.temperature, own.top_p, own.top_k, own.min_p)

    def lines(path: Path, make: Callable[[], list[Any]]) -> list[Any]:
        if len(found := kept(path, make)) != len(rows):
            raise InputError(f"answers: {path} does not hold {len(rows)} lines of JSON; remove it.")
        return found

    def sample() -> list[Any]:
        return sample_completions(model, args, rows, count, args.seed, sampling, dealt=True)

    def score() -> list[Any]:
        if own.reward_model:
            how = (own.reward_aggregate, own.reward_model_strips_think)
            functions.append(load_reward_model(own.reward_model, tokenizer, args, *how))
        return in_batches(partial(_rewards, functions, answers), args, rows, count)

    sampled = _answers_path(loaded, rows, sampling)
    answers = [[Completion(*one) for one in each] for each in lines(sampled, sample)]
    scored = _rewards_path(loaded, rows, functions, sampled)
    rewards = score() if scored is None else lines(scored, score)
    correctness = correctness_of(own, data)
    if correctness is None:
        return Rollouts(rows, answers, rewards, None), None
    right = in_batches(partial(_rewards, [correctness], answers), args, rows, count, dealt=False)
    labels = [[value == 1 for value in row] for row in right]
    return Rollouts(rows, answers, rewards, labels), correctness


def correctness_of(own: Any, data: Examples) -> Any:
    """Return the function that tells right answers: the named one, or the first verifier's; None.

    `own` are the recipe's fields. Questions of the gym have exact_match by default.
    """
    verifiers = [each for each in own.reward_funcs if each.partition(":")[0] in VERIFIERS]
    name = own.correctness or ("exact_match" if data.tasks else next(iter(verifiers), None))
    if name is None:
        return None
    (correctness,) = load_rewards([name], data.tasks, data.train.column_names)
    return correctness


def _answers_path(loaded: Any, rows: Any, sampling: Sampling) -> Path:
    """Return the file of the answers, whose name hashes all that sampling reads.

    The name that earlier versions gave left some of it out. With `reuse_answers` that file is
    taken; otherwise a line says that it is there.
    """
    own, args, model = loaded.own, loaded.trl, loaded.model
    longest, name = own.max_completion_length, model.model_name_or_path
    earlier = {
        "model": fingerprint(name, model.model_revision, with_base=False),
        "prompts": sha256("".join(map(json.dumps, rows["prompt"])).encode()).hexdigest(),
        "how": [own.num_generations, *sampling, longest, args.seed, model.dtype],
        "also": [args.per_device_eval_batch_size, own.chat_template_kwargs],
    }
    read = [name for name in TEMPLATE_COLUMNS if name in rows.column_names]
    quantized = ("load_in_", "bnb_", "use_bnb_")
    now = {
        **earlier,
        "model": fingerprint(name, model.model_revision),
        "columns": _rows_hash(rows.select_columns(read)) if read else None,
        "loading": [model.attn_implementation, args.model_init_kwargs],
        "quantization": {k: v for k, v in vars(model).items() if k.startswith(quantized)},
    }
    paths = [Path(own.answers, f"answers-{_key(**what)}.jsonl") for what in (now, earlier)]
    place = 0
    if args.process_index == 0 and paths[1].exists() and not paths[0].exists():
        place = int(own.reuse_answers)
        if place:
            print(f"answers: {paths[1]} is reused, as reuse_answers says", flush=True)
        else:
            print(
                f"answers: {paths[1]} is of an earlier version, whose name leaves out what the "
                "template gets from the data, quantization, attention and an adapter's base; "
                "sampled anew (reuse_answers: true takes it)",
                flush=True,
            )
    return paths[broadcast_object_list([place])[0]]


def _rewards_path(loaded: Any, rows: Any, functions: list[Any], sampled: Path) -> Path | None:
    """Return the file of the rewards, whose name hashes all they depend on; None: keep none."""
    own, judged = loaded.own, None
    try:
        functions_read = [(function.__name__, reached(function)) for function in functions]
    except ValueError as error:
        if loaded.trl.process_index == 0:
            print(f"answers: their rewards are not kept for another run: {error}", flush=True)
    else:
        judged = _key(
            code=code("data", "reward_models", "rewards"),
            functions=functions_read,
            reward_model=own.reward_model and fingerprint(own.reward_model),
            how=[own.reward_aggregate, own.reward_model_strips_think],
            rows=_rows_hash(rows),
            answers=sha256(sampled.read_bytes()).hexdigest(),
        )
    (judged,) = broadcast_object_list([judged])  # the processes need not pickle values alike
    return judged and sampled.with_stem(f"{sampled.stem.replace('answers', 'rewards')}-{judged}")


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
    """Return the rewards of the answers to a batch of prompts: the sum over the functions."""
    count = len(answers[first])
    said = [one for i in range(first, first + len(batch)) for one in answers[i]]
    rows = [row for row in batch for _ in range(count)]
    columns = called(dict(enumerate(functions)), rows, said).values()
    found = [[value for value in each if value is not None] for each in zip(*columns, strict=True)]
    if not all(found):
        place = next(n for n, each in enumerate(found) if not each)
        raise InputError(
            f"no reward function applied to an answer to prompt {first + place // count + 1}: all "
            "returned None; let at least one of them return a number for every answer."
        )
    total = [float(sum(each)) for each in found]
    return [total[n : n + count] for n in range(0, len(total), count)]


def _report(trainer: Any, folder: Path, title: str, rollouts: Rollouts, told: Any) -> None:
    """Write what was selected of what, and the scores of all answers with their figure."""
    write_json(folder / "selection.json", told)
    if rollouts.labels is None:
        return
    candidates = rollouts.candidates()
    rows = (
        {**row, "completion": one.text, "label": label, "finished": one.finished}
        for row, *each in zip(rollouts.prompts, rollouts.answers, rollouts.labels, strict=True)
        for one, label in zip(*each, strict=True)
    )
    write_candidates(folder, rows, ({"reward": score} for score in candidates[0]))
    draw_reward_report(folder / "reward_report.png", title, candidates=candidates, selecting=True)
