"""Where models answer outside TRL's own rollouts: one generation, for evaluation and for data."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from datasets.utils import tqdm
from transformers import GenerationConfig
from trl.data_utils import is_conversational

from rlhf_trl.errors import InputError
from rlhf_trl.models import UNTRAINED, model_config

Rows = Sequence[Mapping[str, Any]]  # with a `prompt`


class Sampling(NamedTuple):
    """How tokens are drawn: at a `temperature` (0: the likeliest), from all tokens by default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None


GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling()


class Completion(NamedTuple):
    """A generated completion."""

    text: str  # without special tokens
    finished: bool  # whether the model ended it
    ids: Sequence[int] = ()  # up to the one that ended it


Completions = Sequence[Completion]


def prompt_texts(
    tokenizer: Any, rows: Rows, template: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the texts of prompts; the chat template turns conversations into texts.

    `template` holds the chat template's arguments for all rows, as in GRPOTrainer; None: each row
    has its own (`template_arguments`), as in TRL's trainers on data sets.
    """
    if not _conversational(rows):
        return [row["prompt"] for row in rows]
    texts = []
    for row in rows:
        arguments = template_arguments(row) if template is None else template
        texts.append(
            tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, tokenize=False, **arguments
            )
        )
    return texts


def template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments for one row: `tools` and `chat_template_kwargs`."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return {"tools": tools or None, **(row.get("chat_template_kwargs") or {})}


def _conversational(rows: Rows) -> bool:
    return is_conversational({"prompt": rows[0]["prompt"]})


def check_prompts(rows: Rows, tokenizer: Any, model: Any, args: Any, config: Any = None) -> None:
    """Stop before loading the model if a prompt plus its completion cannot fit the context.

    `model` is a `ModelConfig`, and `config` the transformers config of the model that it names;
    None: look it up.
    """
    if config is None and model.model_name_or_path == UNTRAINED:
        return  # it has no config.json to look up
    config = config or model_config(model, args)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if context is None or not len(rows):
        return
    # a chat template writes special tokens itself; to texts, `generate` adds them
    added = 0 if _conversational(rows) else tokenizer.num_special_tokens_to_add()
    room = context - args.max_completion_length - added  # tokens of a prompt without `added` ones
    template = getattr(args, "chat_template_kwargs", None)
    longest, longest_text = 0, ""  # tokens of the longest prompt without `added` ones, and its text
    batch_count = -(-len(rows) // 1000)  # of `_batches`: rounded up
    bar = {"total": batch_count, "leave": False, "disable": len(rows) < 50_000}
    for batch in tqdm(_batches(rows), "lengths of prompts", **bar):
        texts = prompt_texts(tokenizer, batch, template)
        # a token has at least one byte: a text of at most `room` bytes fits and is not tokenized
        texts = [text for text in texts if len(text.encode()) > room]
        if not texts:
            continue
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        lengths = [len(ids) for ids in encoded]
        candidates = [(longest, longest_text), *zip(lengths, texts, strict=True)]
        longest, longest_text = max(candidates)  # by length first
    if longest > room:
        needed = longest + added + args.max_completion_length
        raise InputError(
            f"the longest prompt has {longest + added} tokens and with max_completion_length "
            f"{args.max_completion_length} needs {needed}, but {model.model_name_or_path!r} has a "
            f"context of {context}: it ends in {longest_text[-80:]!r}; shorten one of the two."
        )


def _batches(rows: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows of a list or data set by the thousand."""
    for first in range(0, len(rows), 1000):
        batch = rows[first : first + 1000]
        if isinstance(batch, dict):  # a slice of a data set is a dict of columns
            batch = [
                dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)
            ]
        yield batch


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return every token that ends a completion: the model's and the tokenizer's, as in TRL."""
    own = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None})


@contextmanager
def without_generation_config(model: Any) -> Iterator[None]:
    """Keep the generation_config that came with a checkpoint from changing what is generated.

    transformers' `generate` fills what the config of a call leaves open (min_p, num_beams,
    bad_words_ids, ...) from the model's, and most of these have no value that means "off".
    """
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's wrapper
    config_of_checkpoint = owner.generation_config
    owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        owner.generation_config = config_of_checkpoint


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw with a seed, and leave the random state of the CPU and of `device` as it was."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    device: torch.device,
    count: int = 1,
    template: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Completion]:
    """Return `count` completions of each prompt, prompt by prompt.

    The model's generation_config decides nothing but `end_tokens`. The prompts of the rows are
    all conversations or all texts; see `prompt_texts` for the `template`. The `options` are those
    of transformers' `generate`: a `logits_processor`, or a `streamer` of a single completion.
    """
    ends = end_tokens(model, tokenizer)
    is_sampled = sampling.temperature > 0
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=is_sampled,
        num_return_sequences=count,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        disable_compile=True,  # as GRPOTrainer generates
        **(sampling._asdict() if is_sampled else {}),
    )
    inputs = tokenizer(
        prompt_texts(tokenizer, rows, template),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=not _conversational(rows),  # a chat template writes them itself
    )
    with without_generation_config(model):
        output = model.generate(
            input_ids=inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            generation_config=config,
            **options,
        )
    ids = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    is_end = torch.isin(ids, torch.tensor(ends, device=ids.device))
    finished = is_end.any(dim=1).tolist()
    # a length counts the first end token; after it is padding, which may be an end token itself
    ends_before = is_end.cumsum(dim=1) - is_end.long()
    lengths = (ends_before == 0).sum(dim=1).tolist()
    return [
        Completion(texts[row], finished[row], ids[row, :length].tolist())
        for row, length in enumerate(lengths)
    ]
