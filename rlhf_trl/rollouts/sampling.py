"""Answers sampled from a model before training, of which training data are made, and kept."""

import json
from copy import copy
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, wait_for_everyone

from rlhf_trl.data.files import FileData
from rlhf_trl.data.judgments import GYM_COLUMNS
from rlhf_trl.data.verifiers import exact_match
from rlhf_trl.errors import InputError
from rlhf_trl.models import load_tokenizer, prepare_model, whole_weights
from rlhf_trl.output import write_whole
from rlhf_trl.rollouts.generate import SAMPLED, Completion, check_prompts, generate, seeded


def sampler(model: Any, args: Any, config: Any) -> Any:
    """Return what samples the answers of which a `dataset:` block is made; None: it is of files.

    The `model` (`ModelConfig`) to train answers, unless `config`, the block, names another one.
    """
    if isinstance(config, FileData):
        return None
    other, name = copy(model), getattr(config, "sampled_from", None)
    other.model_name_or_path = name or model.model_name_or_path

    def sample(*asked: Any) -> list[dict[str, Any]]:
        try:
            return kept_samples(other, args, config.seed, *asked)
        except InputError as error:
            key = "dataset.sampled_from" if name else "model_name_or_path"
            raise InputError(str(error).replace("model_name_or_path", key, 1)) from error

    return sample


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
    if not broadcast_object_list([path.exists()])[0]:
        answers = zip(rows, sample_completions(model, args, rows, count, seed), strict=True)
        if args.process_index == 0:
            lines = (json.dumps({**_outcome(r, one), **how}) for r, each in answers for one in each)
            text = "".join(f"{line}\n" for line in lines)
            write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
        wait_for_everyone()
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


def sample_completions(
    model: Any, args: Any, rows: list[dict[str, Any]], count: int, seed: int
) -> list[list[Completion]]:
    """Sample completions at temperature 1.

    Every process samples all of them with a whole model, under ZeRO-3 too: so any number of
    processes gets the same ones, and none waits for another until the launch times out.

    Args:
        model (`ModelConfig`): whose model answers.
        args (`TrainingArguments`): its device, `per_device_eval_batch_size` (completions at a
            time) and `max_completion_length`.
        rows: with conversational prompts.
        count: completions of each prompt.
        seed: of the sampling; the caller's random state is left alone.

    Returns:
        For each row, `count` completions.

    Raises:
        InputError: a classifier, such as a reward model; and see `load_tokenizer`, `check_prompts`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = load_tokenizer(model, args)
    check_prompts(rows, tokenizer, model, args)
    fields = copy(args)
    policy = prepare_model(model, fields)
    if isinstance(policy, str):
        trust = getattr(args, "trust_remote_code", False)
        config = AutoConfig.from_pretrained(
            policy, revision=model.model_revision, trust_remote_code=trust
        )
        if any("Classification" in name for name in config.architectures or ()):
            raise InputError(
                f"model_name_or_path: {model.model_name_or_path!r} is a classifier, which writes "
                "no answers; name a language model with dataset.sampled_from."
            )
        with whole_weights(args):
            policy = AutoModelForCausalLM.from_pretrained(policy, **fields.model_init_kwargs)
    policy = policy.to(args.device).eval()
    size = max(1, args.per_device_eval_batch_size // count)
    found: list[list[Completion]] = []
    # `generate` too would wait for the others under ZeRO-3
    with whole_weights(args), seeded(seed, args.device):
        for first in range(0, len(rows), size):
            answers = generate(
                policy,
                tokenizer,
                rows[first : first + size],
                sampling=SAMPLED,
                max_new_tokens=args.max_completion_length,
                device=args.device,
                count=count,
            )
            found += [answers[i : i + count] for i in range(0, len(answers), count)]
    return found
