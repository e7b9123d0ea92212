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

    The function takes rows with questions, the number of answers to each, and their side, "train"
    or "held-out". It returns an outcome for each answer, question by question: a dict of the
    answer, whether it is right and whether it is finished (see `_outcome`).

    Args:
        model: the `ModelConfig` to train, whose model answers unless the block names another.
        args: the config of the trainer, of which the folder, the length of answers, the batch size
            and the device are read.
        config: the block.
        record: the `rollouts:` block, or "off".
    """
    if isinstance(config, FileData):
        return None
    name_in_block = getattr(config, "sampled_from", None)
    answering = copy(model)
    answering.model_name_or_path = name_in_block or model.model_name_or_path

    def sample(rows: list[Any], count: int, side: str) -> list[dict[str, Any]]:
        try:
            return saved_samples(answering, args, config.seed, record, rows, count, side)
        except InputError as error:
            if not name_in_block:
                raise
            # errors of loading name the field of a ModelConfig; the user wrote the block's field
            sentence = str(error).replace("model_name_or_path", "dataset.sampled_from", 1)
            raise InputError(sentence) from error

    return sample


def saved_samples(
    model: Any, args: Any, seed: int, record: Record, rows: list[Any], count: int, side: str
) -> list[dict[str, Any]]:
    """Return `count` outcomes of each row, in order: dicts as `_outcome` returns them.

    They are read from `<output_dir>/samples-<side>.jsonl`, which is written first if it is not
    there; then the answers are recorded, too, as the split `data-<side>`. So a resumed run does not
    sample again, and the file can be the `dataset.path` of an outcome reward model.

    Args:
        model: the `ModelConfig` of the model that answers.
        args: the config of the trainer.
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

    def make_lines() -> list[Any]:
        """Sample, and return the lines of the file: outcomes with their origin."""
        answers = sample_completions(model, args, rows, count, seed, Sampling())
        outcomes = [
            _outcome(row, completion)
            for row, completions in zip(rows, answers, strict=True)
            for completion in completions
        ]
        if record != "off" and args.process_index == 0:
            _record_samples(args.output_dir, record, side, rows, answers, outcomes, count)
        return [{**outcome, **origin} for outcome in outcomes]

    lines = read_or_make(path, make_lines)
    questions_and_origins = [(row["question"], origin) for row in rows for _ in range(count)]
    if _questions_and_origins(lines, origin_keys=[*origin]) != questions_and_origins:
        raise InputError(
            f"output_dir: {path} does not hold {count} answers to each of the {len(rows)} {side} "
            f"questions, of at most {longest} tokens and by {name}; go elsewhere with --output_dir."
        )
    return [{key: line[key] for key in line if key not in origin} for line in lines]


def _questions_and_origins(
    lines: list[Any], origin_keys: list[str]
) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the question and the origin of each line; None if no run has written these lines."""
    try:
        return [(line["question"], {key: line[key] for key in origin_keys}) for line in lines]
    except (KeyError, TypeError):
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
    is_right = {"exact_match": [outcome["label"] for outcome in outcomes]}
    samples = []
    for row, completions in zip(rows, answers, strict=True):
        for text, finished, ids in completions:
            reward = None  # no reward function is called: `is_right` tells what an answer is worth
            samples.append((row["prompt"], text, len(ids), finished, reward))
    # the facts of the run are written when it begins to train
    store = Store(folder, record, facts={}, answers=right_answers)
    generation = 0  # the only one of this split
    step_and_epoch = (0, 0.0)  # before training
    store.write(
        f"data-{side}", generation, step_and_epoch, samples, is_right, samples_per_prompt=count
    )
    store.flush()
    store.close()


def _outcome(row: dict[str, Any], completion: Completion) -> dict[str, Any]:
    """Return an answer to a row as an example of outcome data: with `label` and `finished`."""
    return {
        "prompt": row["prompt"],
        "completion": [{"role": "assistant", "content": completion.text}],
        "label": same_answer(completion.text, row["answer"], row["task"]),
        "finished": completion.finished,
        **{name: row[name] for name in GYM_COLUMNS},
    }


def sample_completions(
    model: Any,
    args: Any,
    rows: Any,
    count: int,
    seed: int,
    sampling: Sampling,
    share_batches: bool = False,
) -> list[list[Completion]]:
    """Return `count` sampled completions of each row, on every process.

    Without `share_batches`, every process samples all completions, the same ones, with a whole
    model, under ZeRO-3, too: if one process sampled for all, the others could wait until the launch
    times out. With `share_batches`, each process samples some of the batches, each with a seed of
    its own, so that the number of processes does not matter. The caller's random state is left
    alone.
    """
    tokenizer = load_tokenizer(model, args)
    check_prompts(rows, tokenizer, model, args)
    policy = load_policy(model, args)

    def answer(batch: list[dict[str, Any]], first: int) -> list[list[Completion]]:
        """Return the completions of each row of a batch, whose first row is number `first`."""
        if share_batches:
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
        return in_batches(answer, args, rows, count, share_batches)


def in_batches(
    function: Callable[[list[Any], int], list[Any]],
    args: Any,
    rows: Any,
    count: int,
    share_batches: bool = True,
) -> list[Any]:
    """Return a value for each row, in order, computed batch by batch.

    Args:
        function: takes a batch of rows and the number of its first row, and returns a value for
            each row of the batch.
        args: the config of the trainer. A batch has at most `per_device_eval_batch_size`
            completions.
        rows: a list or data set.
        count: completions of each row.
        share_batches: whether each process computes only some batches; all get all values.
    """
    size = max(1, args.per_device_eval_batch_size // count)
    starts = range(0, len(rows), size)
    if share_batches:
        starts = starts[args.process_index :: args.world_size]
    numbered_values: list[tuple[int, Any]] = []
    for start in starts:
        numbers = range(start, min(start + size, len(rows)))
        values = function([rows[number] for number in numbers], start)
        numbered_values += zip(numbers, values, strict=True)
    if share_batches:
        numbered_values = gather_object(numbered_values)
    return [value for _, value in sorted(numbered_values, key=itemgetter(0))]


def read_or_make(path: Path, make: Callable[[], list[Any]]) -> list[Any]:
    """Return the lines of a JSON file; if it is not there, all processes `make` them, one writes.

    A file that is broken has no lines.
    """
    (is_there,) = broadcast_object_list([path.exists()])  # as the main process sees it
    if not is_there:
        lines = make()
        if PartialState().is_main_process:
            write_lines(path, lines)
        wait_for_everyone()
    try:
        return read_lines(path)
    except ValueError:  # somebody has changed the file
        return []


def fingerprint(name: str, revision: str | None = None, with_base: bool = True) -> str:
    """Return what tells a model from others: a hash of its files, or its name on the hub.

    The hash of an adapter covers its base, too, unless `with_base` is False.
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
