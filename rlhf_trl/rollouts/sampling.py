"""Completions sampled from a model, of which training data are made."""

import json
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object, wait_for_everyone

from rlhf_trl.errors import InputError
from rlhf_trl.models import check_prompts, load_tokenizer, prepare_model, whole_weights
from rlhf_trl.output import write_whole
from rlhf_trl.rollouts.generate import Completion, generate, seeded


def sampling_model(model: Any, data: Any) -> Any:
    """Return the `ModelConfig` of whose answers a `dataset:` block is made.

    Args:
        model (`ModelConfig`): the model to train.
        data (`GymData`): `sampled_from`, if it has that, may name another one.
    """
    other = copy(model)
    other.model_name_or_path = getattr(data, "sampled_from", None) or model.model_name_or_path
    return other


def is_kept(path: Path) -> bool:
    """Return whether the main process finds a file; every process asks, and gets one answer."""
    return broadcast_object_list([path.exists()])[0]


def keep(path: Path, rows: Iterable[dict[str, Any]], args: Any) -> None:
    """Let the main process write rows as JSON Lines; the others wait for it."""
    if args.process_index == 0:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
    wait_for_everyone()


def sample_completions(
    model: Any, args: Any, rows: list[dict[str, Any]], count: int, seed: int
) -> list[list[Completion]]:
    """Sample completions at temperature 1, each process a share of them.

    Any number of processes samples the same, and each holds the whole model, under ZeRO-3 too.

    Args:
        model (`ModelConfig`): whose model answers.
        args (`TrainingArguments`): its device, `per_device_eval_batch_size` (completions at a
            time) and `max_completion_length`.
        rows: with conversational prompts.
        count: completions of each prompt.
        seed: of the sampling; the caller's random state is left alone.

    Returns:
        For each row, `count` completions; on every process those of all rows.

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
    found: list[tuple[int, list[list[Completion]]]] = []
    with whole_weights(args):  # `generate` too would wait for the others under ZeRO-3
        for first in range(0, len(rows), size)[args.process_index :: args.world_size]:
            # a seed of its own for each batch, whichever process samples it
            with seeded(seed + first, args.device):
                answers = generate(
                    policy,
                    tokenizer,
                    rows[first : first + size],
                    do_sample=True,
                    max_new_tokens=args.max_completion_length,
                    device=args.device,
                    count=count,
                )
            groups = [answers[i : i + count] for i in range(0, len(answers), count)]
            found.append((first, groups))
    return [group for _, groups in sorted(gather_object(found)) for group in groups]
