"""What collators make of the fixed data: read, and held against what they should make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_trl.compare import measure
from rlhf_trl.compare.trainers import EXPERIMENTAL, OURS
from rlhf_trl.compare.windows.pair_examples import encoded
from rlhf_trl.data.fitting import shortened
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.tokenizer import build_tokenizer


@dataclass
class _Texts:
    """The fixed examples as a collator should tokenize them."""

    # from the token ids of a text to where it comes from: the number of the example, and its side,
    # "chosen", "rejected" or "completion"
    sources: dict[tuple[int, ...], tuple[int, str]]
    prompts: dict[int, list[int]]  # number of the example -> the ids that are left of its prompt


def _expected_texts(
    trainer: str, examples: Sequence[Mapping[str, Any]], max_length: int | None
) -> _Texts:
    """Tokenize the examples; of those longer than `max_length` keep what the trainer keeps.

    TRL keeps the first tokens, our trainers keep the whole completion and the end of the prompt,
    and trainers of reward models drop the example.

    Args:
        trainer: the name of the trainer that collates.
        examples: the data.
        max_length: tokens of a text at most.
    """
    tokenizer = build_tokenizer()
    rule = "cut_prompt" if trainer in OURS else "cut_completion"
    if trainer.endswith("RewardTrainer"):
        rule = "drop"
    # TRL's trainers of ORPO and CPO put BOS before a prompt; all others do not
    start = [tokenizer.bos_token_id] if trainer in EXPERIMENTAL else []
    texts = _Texts(sources={}, prompts={})
    for number, example in enumerate(examples):
        # two sides of a pair, or the single completion of KTO and SFT
        sides = [side for side in ("chosen", "rejected", "completion") if side in example]
        prompt = [*start, *encoded(tokenizer, example["prompt"])]
        completions = [
            [*encoded(tokenizer, example[side]), tokenizer.eos_token_id] for side in sides
        ]
        fitting = shortened(prompt, completions, max_length, rule)
        if fitting is None:  # dropped
            continue
        prompt, completions = fitting
        texts.prompts[number] = prompt
        for side, completion in zip(sides, completions, strict=True):
            texts.sources[(*prompt, *completion)] = (number, side)
    return texts


def check_collation(
    trainer: str,
    prepared: Sequence[measure.Batch],
    examples: Sequence[Mapping[str, Any]],
    max_length: int | None,
) -> None:
    """Refuse a collator that does not hand on the texts, sides, labels and margins as they are.

    Both sides of a comparison take them from TRL's collator; here they are held against the data.

    Args:
        trainer: the name of the trainer whose collator it is.
        prepared: the micro-batches that the collator made.
        examples: the data from which it made them.
        max_length: tokens of a text at most.
    """
    texts = _expected_texts(trainer, examples, max_length)
    for inputs in prepared:
        fault = _collation_fault(trainer, inputs, examples, texts, max_length)
        if fault:
            raise InputError(f"{trainer} does not collate the fixed data as it is: {fault}")


def _collation_fault(
    trainer: str,
    inputs: measure.Batch,
    examples: Sequence[Mapping[str, Any]],
    texts: _Texts,
    max_length: int | None,
) -> str:
    """Return in what a micro-batch differs from the examples, "" for nothing.

    Args:
        trainer: the name of the trainer whose collator made it.
        inputs: the micro-batch.
        examples: the data.
        texts: the examples as they should be tokenized, in which each text of the micro-batch is
            looked up by its token ids.
        max_length: tokens of a text at most.
    """
    ids, attention, mask, chosen = sequences(inputs)
    unpadded = [tuple(text) for text in _unpadded(ids, attention)]
    if not texts.sources.keys() >= set(unpadded):
        return "token ids that are in no text"
    sources = [texts.sources[text] for text in unpadded]
    numbers = [number for number, _ in sources]
    of_pairs = numbers[: len(numbers) // 2]  # the chosen texts of all pairs come first
    are_pairs = "chosen" in examples[0]
    if "label" in inputs:
        if [examples[number]["label"] for number in numbers] != chosen.tolist():
            return "labels"
    elif are_pairs:
        expected = [(number, side) for side in ("chosen", "rejected") for number in of_pairs]
        if sources != expected:
            return "chosen and rejected"
    if "margin" in inputs:
        margins = torch.tensor([examples[number]["margin"] for number in of_pairs])
        if not torch.allclose(margins, inputs["margin"].float()):
            return "margins"
    if not trainer.endswith("RewardTrainer"):  # which scores whole texts, without such a mask
        prompt_lengths = [len(texts.prompts[number]) for number in numbers]
        if not torch.equal(_completion_masks(attention, prompt_lengths), mask.to(attention)):
            return "which tokens are the completion's"
    if "KL_input_ids" in inputs:
        kl_ids = _unpadded(inputs["KL_input_ids"], inputs["KL_attention_mask"])
        if kl_ids != _mismatched(examples, texts, numbers, max_length):
            return "the mismatched pairs of the KL"
    return ""


def _unpadded(ids: Tensor, attention: Tensor) -> list[list[int]]:
    """Return the token ids of texts, (R, S), without padding."""
    rows = zip(ids, attention.bool(), strict=True)
    return [row[is_text].tolist() for row, is_text in rows]


def _completion_masks(attention: Tensor, prompt_lengths: Sequence[int]) -> Tensor:
    """Return (R, S) masks that are 1 on the tokens behind each prompt, but for padding."""
    masks = torch.zeros_like(attention)
    for mask, on, length in zip(masks, attention, prompt_lengths, strict=True):
        mask[on.bool().nonzero().flatten()[length:]] = 1
    return masks


def _mismatched(
    examples: Sequence[Mapping[str, Any]],
    texts: _Texts,
    numbers: Sequence[int],
    max_length: int | None,
) -> list[list[int]]:
    """Return KTO's mismatched pairs: each prompt with the completion of the example before it."""
    tokenizer = build_tokenizer()
    pairs = []
    for place, number in enumerate(numbers):
        completion = encoded(tokenizer, examples[numbers[place - 1]]["completion"])
        text = [*texts.prompts[number], *completion, tokenizer.eos_token_id]
        pairs.append(text[:max_length])
    return pairs


class _Sequences(NamedTuple):
    """The texts of a micro-batch."""

    ids: Tensor  # (R, S) of all tokens, the first one included
    attention: Tensor  # (R, S) 1 on all tokens, 0 on padding
    mask: Tensor  # (R, S) 1 on the completion's tokens
    # (R,) whether the completion is preferred; without a meaning for SFT and for outcome and
    # process models, which have no pairs and do not read it
    chosen: Tensor


def sequences(inputs: measure.Batch) -> _Sequences:
    """Return the texts that a trainer has collated.

    Trainers mark the tokens of the completion in one of three ways: by a mask, by token labels
    (`labels`) that are -100 elsewhere, or, where they score whole texts, not at all. They mark the
    preferred completions by `label` (KTO), or by putting them into the first half (pairs).
    """
    if "chosen_input_ids" in inputs:  # ORPO and CPO keep the two sides of pairs apart
        ids = _both_sides(inputs, "input_ids", 0)
        attention = _both_sides(inputs, "attention_mask", 0)
        mask = (_both_sides(inputs, "labels", -100) != -100).long()
    else:
        ids = inputs["input_ids"]
        attention = inputs.get("attention_mask", torch.ones_like(ids))
        mask = inputs.get("completion_mask", attention)
        if "labels" in inputs:
            mask = (inputs["labels"] != -100).long()
    chosen = torch.arange(len(ids)) < len(ids) // 2
    if "label" in inputs:
        chosen = torch.as_tensor(inputs["label"]).bool()
    return _Sequences(ids, attention, mask, chosen)


def _both_sides(inputs: measure.Batch, name: str, filler: int) -> Tensor:
    """Return a tensor of the chosen texts and below it that of the rejected ones, padded alike."""
    rows = [*inputs[f"chosen_{name}"], *inputs[f"rejected_{name}"]]
    return pad_sequence(rows, batch_first=True, padding_value=filler)
