"""Answers sampled from a model before training, of which training data are made, and kept."""

import json
from collections.abc import Callable
from copy import copy
from hashlib import blake2b, file_digest
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, wait_for_everyone

from rlhf_trl.data.answers import same_answer
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.gym import GYM_COLUMNS
from rlhf_trl.errors import InputError
from rlhf_trl.models import ADAPTER, EMBEDDED, load_tokenizer
from rlhf_trl.output import read_lines, write_lines
from rlhf_trl.policies import load_policy, whole_weights
from rlhf_trl.rollouts.blocks import Record
from rlhf_trl.rollouts.generate import Completion, Sampling, check_prompts, generate, seeded
from rlhf_trl.rollouts.store import Store
from rlhf_trl.tiny import checkpoint_path

Sampler = Callable[[list[Any], int, str], list[dict[str, Any]]]


def sampler(model: Any, args: Any, config: Any, record: Record) -> Sampler | None:
    """Return the function that samples answers for a `dataset:` block; None if it reads files.

    It takes rows with questions, the number of answers to each, and their side, "train" or
    "held-out", and returns an outcome for each answer: see `kept_samples`.

    Args:
        model: the `ModelConfig` to train, whose model answers unless the block names another.
        args: the config of the trainer, of which the folder, the length of answers, the batch size
            and the device are read.
        config: the block.
        record: the `rollouts:` block, or "off".
    """
    if isinstance(config, FileData):
        return None
    other_name = getattr(config, "sampled_from", None)
    answering = copy(model)
    answering.model_name_or_path = other_name or model.model_name_or_path

    def sample(rows: list[Any], count: int, side: str) -> list[dict[str, Any]]:
        try:
            return kept_samples(answering, args, config.seed, record, rows, count, side)
        except InputError as error:
            if not other_name:
                raise
            # errors of loading name the field of a ModelConfig; the user has written another one
            named = str(error).replace("model_name_or_path", "dataset.sampled_from", 1)
            raise InputError(named) from error

    return sample


def kept_samples(
    model: Any, args: Any, seed: int, record: Record, rows: list[Any], count: int, side: str
) -> list[dict[str, Any]]:
    """Return outcomes of rows, from `<output_dir>/samples-<side>.jsonl`; sample them if need be.

    A resumed run finds the file, and it can be the `dataset.path` of an outcome reward model. The
    answers are recorded, too, as `data-<side>`.

    Args:
        model: the `ModelConfig` of the model that answers.
        args: of the run.
        seed: of the samples.
        record: the `rollouts:` block, or "off".
        rows: the questions.
        count: answers to each.
        side: "train" or "held-out".

    Raises:
        InputError: the file holds other samples.
    """
    path = Path(args.output_dir) / f"samples-{side}.jsonl"
    longest = args.max_completion_length
    name = model.model_name_or_path
    origin = {"sampled_from": name, "max_completion_length": longest}  # in each line of the file

    def make() -> list[Any]:
        """Sample, and return the lines of the file."""
        answers = sample_completions(model, args, rows, count, seed, Sampling())
        outcomes = [
            _outcome(row, completion)
            for row, completions in zip(rows, answers, strict=True)
            for completion in completions
        ]
        if record != "off" and args.process_index == 0:
            _record_samples(args.output_dir, record, side, rows, answers, outcomes, count)
        return [{**outcome, **origin} for outcome in outcomes]

    expected = [(row["question"], origin) for row in rows for _ in range(count)]
    outcomes = kept(path, make)  # with an origin each, which `_take_origins` removes
    if _take_origins(outcomes, [*origin]) != expected:
        raise InputError(
            f"output_dir: {path} does not hold {count} answers to each of the {len(rows)} {side} "
            f"questions, of at most {longest} tokens and by {name}; go elsewhere with --output_dir."
        )
    return outcomes


def _take_origins(outcomes: list[Any], keys: list[str]) -> list[tuple[Any, Any]] | None:
    """Take the origin, with these keys, out of each line; return questions and origins in pairs.

    Lines that no run has written, such as those of another kind of file, are None.
    """
    try:
        origins = [{key: outcome.pop(key) for key in keys} for outcome in outcomes]
        return [
            (outcome["question"], origin) for outcome, origin in zip(outcomes, origins, strict=True)
        ]
    except (KeyError, TypeError, AttributeError):
        return None


def _record_samples(
    folder: str,
    record: Record,
    side: str,
    rows: list[Any],
    answers: list[list[Completion]],
    outcomes: list[dict[str, Any]],
    count: int,
) -> None:
    """Record sampled answers, `count` of each row, with whether they are right."""
    right_answers = ((row["prompt"], str(row["answer"])) for row in rows)
    samples = []
    for row, completions in zip(rows, answers, strict=True):
        for text, finished, ids in completions:
            reward = None  # no reward function is called; `is_right` below says what they are worth
            samples.append((row["prompt"], text, len(ids), finished, reward))
    # the facts of the run come when it trains
    store = Store(folder, record, facts={}, answers=right_answers)
    is_right = {"exact_match": [outcome["label"] for outcome in outcomes]}
    generation = 0  # the only one of this split
    step_and_epoch = (0, 0.0)  # before training
    store.write(f"data-{side}", generation, step_and_epoch, samples, is_right, size=count)
    store.flush()
    store.close()


def _outcome(row: dict[str, Any], one: Any) -> dict[str, Any]:
    return {
        "prompt": row["prompt"],
        "completion": [{"role": "assistant", "content": one.text}],
        "label": same_answer(one.text, row["answer"], row["task"]),
        "finished": one.finished,
        **{name: row[name] for name in GYM_COLUMNS},
    }


def sample_completions(
    model: Any, args: Any, rows: Any, count: int, seed: int, sampling: Sampling, dealt: bool = False
) -> list[list[Completion]]:
    """Sample `count` completions of each row, the same ones on any number of processes.

    Every process has a whole model, under ZeRO-3 too, and samples all completions: if one sampled
    for all, the others could wait until the launch times out. With `dealt`, the processes share the
    batches, and each batch has a seed of its own, whoever samples it. The caller's random state is
    left alone.
    """
    tokenizer = load_tokenizer(model, args)
    check_prompts(rows, tokenizer, model, args)
    policy = load_policy(model, args)

    def answer(batch: list[dict[str, Any]], first: int) -> list[list[Completion]]:
        if dealt:  # by the place of the batch, which any process may have
            torch.manual_seed(seed + first)
        answers = generate(
            policy,
            tokenizer,
            batch,
            sampling=sampling,
            max_new_tokens=args.max_completion_length,
            device=args.device,
            count=count,
        )
        return [answers[start : start + count] for start in range(0, len(answers), count)]

    # around `generate`, too: under ZeRO-3, transformers would let it wait for other processes
    with whole_weights(args), seeded(seed, args.device):
        return in_batches(answer, args, rows, count, dealt)


def in_batches(
    answer: Callable[..., list[Any]], args: Any, rows: Any, count: int, dealt: bool = True
) -> list[Any]:
    """Return what a function makes of each row, in order; it takes a batch and its first place.

    A batch has so many rows, of a list or data set, that `count` completions of each come to
    `per_device_eval_batch_size`. The processes share the batches if `dealt`; all get all values.
    """
    size = max(1, args.per_device_eval_batch_size // count)
    starts = range(0, len(rows), size)
    if dealt:
        starts = starts[args.process_index :: args.world_size]  # one in so many
    by_place: list[tuple[int, Any]] = []
    for start in starts:
        places = range(start, min(start + size, len(rows)))
        values = answer([rows[place] for place in places], start)
        by_place += zip(places, values, strict=True)
    if dealt:
        by_place = gather_object(by_place)
    return [value for _, value in sorted(by_place, key=itemgetter(0))]


def kept(path: Path, make: Callable[[], list[Any]]) -> list[Any]:
    """Return the lines of a JSON file, none if it is broken; all processes make it if need be."""
    (is_there,) = broadcast_object_list([path.exists()])  # as the main process sees it
    if not is_there:
        lines = make()
        if PartialState().is_main_process:
            write_lines(path, lines)
        wait_for_everyone()
    try:
        return read_lines(path)
    except ValueError:  # not as it was written
        return []


def fingerprint(name: str, revision: str | None = None, with_base: bool = True) -> str:
    """Return what tells a model from others: a hash of its files, or its name on the hub.

    An adapter's is that of its base, too, unless `with_base` is False.
    """
    folder = Path(checkpoint_path() if name == EMBEDDED else name)
    if not folder.is_dir():
        return f"{name}@{revision}"
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as stream:
            digest.update(path.name.encode() + file_digest(stream, "blake2b").digest())
    adapter = folder / ADAPTER
    if with_base and adapter.is_file():
        config = json.loads(adapter.read_text(encoding="utf-8"))
        base = fingerprint(config["base_model_name_or_path"], config.get("revision"))
        digest.update(base.encode())
    return digest.hexdigest()
