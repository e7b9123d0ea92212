"""The rows of a reward-model run, and the sampled answers of any: made once, and kept."""

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_trl.data.files import Examples, FileData
from rlhf_trl.data.judgments import (
    GYM_COLUMNS,
    OutcomeData,
    ProcessData,
    load_outcomes,
    load_pairs_or_ranked,
    load_traces,
)
from rlhf_trl.data.verifiers import exact_match
from rlhf_trl.errors import InputError
from rlhf_trl.models import load_tokenizer
from rlhf_trl.output import write_whole
from rlhf_trl.rollouts.sampling import sample_completions, sampling_model


def prepare_rewards(own: Any, args: Any, model: Any) -> tuple[Examples, Any]:
    """Return the examples of a run and the tokenizer.

    Sampled answers are kept in `<output_dir>/samples-<side>.jsonl`, where a resumed run finds them;
    such a file can be the `dataset.path` of an outcome reward model.

    Args:
        own: the recipe's fields: `dataset` (`RewardData`, `OutcomeData` or `ProcessData`),
            `max_samples`, `formulation`, and `algorithm`, which is "kwise" where lists are wanted.
        args (`TrainingArguments`): the config of the trainer, with `max_completion_length` of the
            answers that are sampled.
        model (`ModelConfig`): the model to train, and to sample from unless the data set names one.

    Raises:
        InputError: see the loaders in `data/judgments.py`, and `load_tokenizer`.
    """
    config = own.dataset
    sample = sampler(model, args, config)
    with reading(args, config):
        if isinstance(config, ProcessData):
            neutral = own.formulation == "code"  # the chapter's loss has two classes
            data = load_traces(config, own.max_samples, sample, neutral)
        elif isinstance(config, OutcomeData):
            data = load_outcomes(config, own.max_samples, sample)
        else:
            data = load_pairs_or_ranked(config, own.max_samples, sample)
    for reason, count in data.dropped.items():
        if count and args.process_index == 0:
            print(f"left out {count}: {reason}", flush=True)
    return data, load_tokenizer(model, args, data.conversational)


def reading(args: Any, config: Any) -> AbstractContextManager[None]:
    """Let the main process convert a file before the others, which then find what it kept."""
    files = isinstance(config, FileData)
    return args.main_process_first(desc="reading data") if files else nullcontext()


def sampler(model: Any, args: Any, config: Any) -> Any:
    """Return what samples answers of a `dataset:` block, or None for a block of files."""
    if isinstance(config, FileData):
        return None
    return partial(kept_samples, sampling_model(model, config), args, config.seed)


def kept_samples(
    model: Any, args: Any, seed: int, rows: list[dict[str, Any]], count: int, side: str
) -> list[dict[str, Any]]:
    """Return outcomes of rows, from `<output_dir>/samples-<side>.jsonl`; sample them if need be.

    Args:
        model (`ModelConfig`): whose model answers.
        args (`TrainingArguments`): see `sample_completions`.
        seed: of the sampling.
        rows: rows of `GymTasks`.
        count: answers to each.
        side: "train" or "held-out".

    Raises:
        InputError: the file holds something else than would be sampled now.
    """
    path = Path(args.output_dir) / f"samples-{side}.jsonl"
    longest, name = args.max_completion_length, model.model_name_or_path
    how = {"sampled_from": name, "max_completion_length": longest}
    with args.main_process_first(local=False, desc="sampling answers"):
        if not path.exists():
            answers = sample_completions(model, args, rows, count, seed)
            lines = [
                json.dumps({**_outcome(row, one), **how}) + "\n"
                for row, each in zip(rows, answers, strict=True)
                for one in each
            ]
            write_whole(path, lambda part: part.write_text("".join(lines), encoding="utf-8"))
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        asked = [(row["question"], {key: row.pop(key) for key in how}) for row in found]
    except (ValueError, KeyError, TypeError, AttributeError):  # not as it was written
        asked = None
    if asked != [(row["question"], how) for row in rows for _ in range(count)]:
        raise InputError(
            f"output_dir: {path} does not hold {count} answers to each of the {len(rows)} {side} "
            f"questions, of at most {longest} tokens and by {name}; the run's settings or the file "
            "were changed since, so write elsewhere with --output_dir."
        )
    return found


def _outcome(row: dict[str, Any], one: Any) -> dict[str, Any]:
    (right,) = exact_match([one.text], answer=[row["answer"]], task=[row["task"]])
    return {
        "prompt": row["prompt"],
        "completion": [{"role": "assistant", "content": one.text}],
        "label": bool(right),
        "finished": one.finished,
        **{name: row[name] for name in GYM_COLUMNS},
    }
