"""A trained reward model as a reward function."""

from collections.abc import Callable
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.tasks.rewards import checked, completion_text

BATCH = 64  # texts scored at once


def load_reward_model(path: str, tokenizer: Any, args: Any) -> Callable[..., list[float]]:
    """Return a reward function that scores prompt and completion with a sequence classifier.

    The text is that of training: rendered with the reward model's own chat template (joined, where
    prompts are plain text), with its end-of-sequence token exactly where the policy ended its
    completion, so that a cut-off answer does not look finished.

    Args:
        path: folder or hub name of a sequence classifier with one label.
        tokenizer: the policy's, whose end-of-sequence token ends a completion.
        args (`TrainingArguments`): where the model goes.

    Raises:
        InputError: no such model, several labels, or no trained score.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.integrations.deepspeed import (
        is_deepspeed_zero3_enabled,
        set_hf_deepspeed_config,
        unset_hf_deepspeed_config,
    )

    whole = is_deepspeed_zero3_enabled()
    if whole:  # ZeRO-3 would shard a model that no optimizer ever sees
        unset_hf_deepspeed_config()
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype="auto", output_loading_info=True
        )
        own = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"reward_model: {path!r} is neither a reward model's folder here nor a hub model that "
            f"can be reached ({str(error).splitlines()[0]}); name a sequence classifier."
        ) from error
    finally:
        if whole:
            set_hf_deepspeed_config(args.hf_deepspeed_config)
    if model.config.num_labels != 1:
        raise InputError(
            f"reward_model: {path!r} has num_labels {model.config.num_labels}, but a reward is one "
            "number; name a model with num_labels 1."
        )
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"]))
        raise InputError(
            f"reward_model: {path!r} lacks {missing}, so its scores would be random; name a "
            "trained reward model."
        )
    model.eval().requires_grad_(False).to(args.device)
    if own.pad_token is None:
        own.pad_token = own.eos_token
    model.config.pad_token_id = own.pad_token_id

    def text_of(prompt: Any, completion: Any, ids: list[int]) -> str:
        finished = bool(ids) and ids[-1] == tokenizer.eos_token_id
        if isinstance(prompt, str):
            return prompt + completion + (own.eos_token if finished else "")
        answer = {"role": "assistant", "content": completion_text(completion)}
        text = own.apply_chat_template([*prompt, answer], tokenize=False)
        if finished or own.eos_token not in text:
            return text
        return text[: text.rindex(own.eos_token)]

    def reward_model(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        texts = [text_of(*row) for row in zip(prompts, completions, completion_ids, strict=True)]
        scores: list[float] = []
        for first in range(0, len(texts), BATCH):
            inputs = own(
                texts[first : first + BATCH],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(args.device)
            with torch.inference_mode():
                logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            scores += logits[:, 0].float().tolist()
        return scores

    return checked(reward_model, "reward_model")
