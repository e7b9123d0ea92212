"""Completions of one prompt read as one sequence: the prompt is computed once for all of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_trl.algorithms import Formulation
from rlhf_trl.trainers.skipping import configs_in, random_in


def cannot_share(row: Formulation, args: Any, model: Any) -> str | None:
    """Return the setting with which completions of a prompt cannot be one sequence, or None."""
    config = model.config.get_text_config()
    attention, layers = config._attn_implementation, set(getattr(config, "layer_types", None) or ())
    if args.formulation == "trl":
        return "formulation: trl, which is stock TRL"
    if row.family != "policy_gradient" or row.value_loss != "none":
        return f"{row.label}, whose loss reads more than log-probabilities"
    if attention not in ("sdpa", "eager"):
        return f"attn_implementation: {attention}, which takes no mask of pairs"
    if layers - {"full_attention"} or (not layers and getattr(config, "sliding_window", None)):
        return "layers that are not full attention (layer_types, sliding_window)"
    if hasattr(config, "output_router_logits"):
        return "a mixture of experts, whose router counts tokens"
    if config is not model.config:
        return f"a model of images ({model.config.model_type})"
    if not hasattr(config, "rope_parameters"):
        return f"positions that are not rotary ({config.model_type})"
    if any(getattr(c, "is_prompt_learning", False) for c in configs_in(model)):
        return "an adapter with tokens of its own"
    return random_in(args, configs_in(model))


@dataclass
class Packed:
    """Completions behind one copy of their prompt, S sequences of at most L tokens.

    A sequence is the prompt but for its last token, then for each completion that token and its
    own. So each token of a completion is predicted by the one before it, as ever.
    """

    ids: Tensor  # (B, P + T) of the padded batch
    logits_to_keep: int  # T
    source: Tensor  # (S, L) places of the tokens in the flat padded batch
    segment: Tensor  # (S, L) 0 in prompts, 1 and more in completions, -1 in padding
    is_additive: bool  # whether the model adds its mask, as "eager" does

    def score(self, trainer: Any, model: Any) -> tuple[Tensor, Tensor]:
        """Return (B, T) log-probabilities and entropies, 0 where a completion has ended.

        A token sees the prompt and its own completion, at the positions of the padded batch.
        """
        columns = self.ids.shape[1]
        first = columns - self.logits_to_keep  # column of the completions
        is_own = self.segment.unsqueeze(2) == self.segment.unsqueeze(1)
        sees = (is_own | (self.segment == 0).unsqueeze(1)).tril().unsqueeze(1)  # (S, 1, L, L)
        if self.is_additive:
            zeros = torch.zeros_like(sees, dtype=trainer.model.dtype)
            sees = zeros.masked_fill(~sees, torch.finfo(zeros.dtype).min)
        ids, positions = self.ids.flatten()[self.source], self.source % columns
        is_scored = (self.segment > 0) & (positions >= first)
        with trainer.accelerator.autocast():
            outputs = model(
                input_ids=ids,
                attention_mask=sees,
                position_ids=positions,
                labels=ids.masked_fill(~is_scored, -100),
                fused_lm_head=True,
            )
        places, predicted = self.source[is_scored], is_scored[:, 1:]
        return tuple(
            values.new_zeros(self.ids.numel())
            .index_copy(0, places, values[predicted])
            .view(self.ids.shape)[:, first:]
            for values in (outputs.log_probs, outputs.entropy)
        )


def packed(
    config: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int
) -> Packed | None:
    """Put the completions of a padded batch, (B, P + T), behind one copy of each prompt.

    None if that takes no fewer operations. In a layer of width H and inner width I, a token takes
    4 H^2 + 3 H I products, and a pair of tokens in a sequence 2 H.
    """
    columns = input_ids.shape[1]
    first = columns - logits_to_keep
    prompts = torch.cat([(input_ids * attention_mask)[:, :first], attention_mask[:, :first]], 1)
    groups = torch.unique(prompts, dim=0, return_inverse=True)[1].tolist()
    starts = attention_mask.argmax(1).tolist()
    lengths = attention_mask[:, first:].sum(1).tolist()
    places: dict[int, list[int]] = {}  # of each sequence
    segments: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        if group not in places:
            prompt = range(row * columns + starts[row], row * columns + first - 1)
            places[group], segments[group] = [*prompt], [0] * len(prompt)
        own = range(row * columns + first - 1, row * columns + first + lengths[row])
        places[group] += own
        segments[group] += [row + 1] * len(own)

    def padded(rows: dict[int, list[int]], value: int) -> Tensor:
        tensors = [torch.tensor(values) for values in rows.values()]
        return pad_sequence(tensors, True, value).to(input_ids.device)

    width = config.hidden_size
    inner = getattr(config, "intermediate_size", 4 * width)

    def products(sequences: int, length: int) -> int:
        return sequences * length * (4 * width**2 + 3 * width * inner + 2 * width * length)

    longest = max(map(len, places.values()))
    if products(len(places), longest) >= products(*input_ids.shape):
        return None
    is_additive = config._attn_implementation == "eager"
    tensors = padded(places, 0), padded(segments, -1)
    return Packed(input_ids, logits_to_keep, *tensors, is_additive)
