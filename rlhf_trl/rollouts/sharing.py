"""Completions of one prompt read as one sequence: the prompt is computed once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_trl.algorithms import Formulation


def obstacles(row: Formulation, args: Any, configs: Sequence[Any]) -> dict[str, Any]:
    """Return what forbids that completions are one sequence, and whether it is there.

    `configs` are those of the text model and of its adapters.
    """
    model, *adapters = configs
    attention, layers = model._attn_implementation, {*(getattr(model, "layer_types", None) or ())}
    has_windows = getattr(model, "sliding_window", None) and not layers
    reads_more = getattr(row, "value_loss", "none") != "none" or row.family != "policy_gradient"
    return {
        "formulation: trl, which is stock TRL": args.formulation == "trl",
        f"{row.label}, whose loss reads more than log-probabilities": reads_more,
        f"attn_implementation: {attention}, which takes no mask of pairs of tokens": (
            attention not in ("sdpa", "eager")
        ),
        f"layer_types of {model.model_type}, which are not all full attention": (
            has_windows or layers - {"full_attention"}
        ),
        f"the router of {model.model_type}, which counts tokens": (
            hasattr(model, "output_router_logits")
        ),
        f"positions of {model.model_type}, which are not rotary": (
            not hasattr(model, "rope_parameters")
        ),
        "an adapter that learns a prompt": any(
            getattr(adapter, "is_prompt_learning", False) for adapter in adapters
        ),
    }


@dataclass
class Packed:
    """Completions behind one copy of their prompt: S sequences of at most L tokens.

    A sequence is the prompt but for its last token, then for each completion that token and its
    own, so that each token of a completion is predicted by the one before it.
    """

    ids: Tensor  # (B, P + T) of the padded batch
    logits_to_keep: int  # T
    source: Tensor  # (S, L) places of the tokens in the flat padded batch
    segment: Tensor  # (S, L) 0 in prompts, another number in each completion, -1 in padding
    adds_mask: bool  # whether attention adds its mask, as "eager" does

    def score(self, trainer: Any, model: Any) -> list[Tensor]:
        """Return (B, T) log-probabilities and entropies, 0 where a completion has ended.

        A token sees the prompt and its own completion, at the positions of the padded batch.
        """
        columns = self.ids.shape[1]
        first = columns - self.logits_to_keep
        is_own = self.segment.unsqueeze(2) == self.segment.unsqueeze(1)
        mask = (is_own | (self.segment == 0).unsqueeze(1)).tril().unsqueeze(1)  # (S, 1, L, L)
        if self.adds_mask:
            zeros = torch.zeros_like(mask, dtype=trainer.model.dtype)
            mask = zeros.masked_fill(~mask, torch.finfo(zeros.dtype).min)
        ids, positions = self.ids.flatten()[self.source], self.source % columns
        is_scored = (self.segment > 0) & (positions >= first)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        inputs["labels"] = ids.masked_fill(~is_scored, -100)
        with trainer.accelerator.autocast():
            outputs = model(**inputs, fused_lm_head=True)
        places, is_predicted = self.source[is_scored], is_scored[:, 1:]
        scores = []
        for values in (outputs.log_probs, outputs.entropy):
            flat = values.new_zeros(self.ids.numel()).index_copy(0, places, values[is_predicted])
            scores.append(flat.view(self.ids.shape)[:, first:])
        return scores


def packed(
    config: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
) -> Packed | None:
    """Put the completions of a padded batch, (B, P + T), behind one copy of each prompt.

    None if that takes no fewer products: in a layer of width H and inner width I, a token takes
    4 H^2 + 3 H I, and a pair of tokens in a sequence 2 H.
    """
    columns = input_ids.shape[1]
    first = columns - logits_to_keep  # the column where completions begin
    prompts = torch.cat([(input_ids * attention_mask)[:, :first], attention_mask[:, :first]], 1)
    groups = torch.unique(prompts, dim=0, return_inverse=True)[1].tolist()
    starts = attention_mask.argmax(1).tolist()
    lengths = attention_mask[:, first:].sum(1).tolist()
    sources: dict[int, list[int]] = {}  # by prompt
    segments: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        begin = row * columns
        if group not in sources:
            sources[group] = list(range(begin + starts[row], begin + first - 1))
            segments[group] = [0] * len(sources[group])
        sources[group] += range(begin + first - 1, begin + first + lengths[row])
        segments[group] += [row + 1] * (lengths[row] + 1)
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", 4 * width)

    def products(sequences: int, length: int) -> int:
        return sequences * length * (4 * width**2 + 3 * width * inner + 2 * width * length)

    if products(len(sources), max(map(len, sources.values()))) >= products(*input_ids.shape):
        return None
    source = pad_sequence(list(map(torch.tensor, sources.values())), True, 0)
    segment = pad_sequence(list(map(torch.tensor, segments.values())), True, -1)
    tensors = source.to(input_ids.device), segment.to(input_ids.device)
    return Packed(input_ids, logits_to_keep, *tensors, config._attn_implementation == "eager")
