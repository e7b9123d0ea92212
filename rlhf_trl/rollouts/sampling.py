"""Completions sampled from a model, of which training data are made."""

from copy import copy
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.models import load_tokenizer, prepare_model
from rlhf_trl.rollouts.generate import Completion, check_prompts, generate, seeded


def sampling_model(model: Any, data: Any) -> Any:
    """Return the `ModelConfig` of whose answers a `dataset:` block is made.

    Args:
        model (`ModelConfig`): the model to train.
        data (`GymData`): `sampled_from`, if it has that, may name another one.
    """
    other = copy(model)
    other.model_name_or_path = getattr(data, "sampled_from", None) or model.model_name_or_path
    return other


def sample_completions(
    model: Any, args: Any, rows: list[dict[str, Any]], count: int, seed: int
) -> list[list[Completion]]:
    """Sample completions at temperature 1.

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
        policy = AutoModelForCausalLM.from_pretrained(policy, **fields.model_init_kwargs)
    policy = policy.to(args.device).eval()
    size = max(1, args.per_device_eval_batch_size // count)
    found: list[list[Completion]] = []
    with seeded(seed, args.device):
        for first in range(0, len(rows), size):
            answers = generate(
                policy,
                tokenizer,
                rows[first : first + size],
                do_sample=True,
                max_new_tokens=args.max_completion_length,
                device=args.device,
                count=count,
            )
            found += [answers[i : i + count] for i in range(0, len(answers), count)]
    return found
