"""Generation that reads a prompt once for all its completions: the tokens of stock `generate`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer
from transformers.generation import logits_process

# fields of a GenerationConfig that say how long, and from which token on, nothing is written
LENGTHS = {"max_new_tokens", "pad_token_id", "bos_token_id", "eos_token_id"}
# those that shape the probabilities, in the order in which `generate` applies them, and the values
# with which they do nothing
SHAPES = {
    "temperature": (logits_process.TemperatureLogitsWarper, (None, 1.0)),
    "top_k": (logits_process.TopKLogitsWarper, (None, 0)),
    "top_p": (logits_process.TopPLogitsWarper, (None, 1.0)),
    "min_p": (logits_process.MinPLogitsWarper, (None,)),
}
OTHERS = {"do_sample", "disable_compile", "transformers_version"}
# of GenerationMixin; a model with its own is left to them
METHODS = ("generate", "_sample", "_prefill", "prepare_inputs_for_generation")


class _InPlaceLayer(DynamicLayer):
    """The keys and values of a layer, (B, H, L, D), in memory that is taken once."""

    def __init__(self, prompts: DynamicLayer, room: int):
        """Take those of prompts, with room for so many tokens behind them."""
        super().__init__()
        self.lazy_initialization(prompts.keys, prompts.values)
        both = prompts.keys, prompts.values
        self._memory = [nn.functional.pad(states, (0, 0, 0, room)) for states in both]
        self._show(prompts.get_seq_length())

    def _show(self, length: int) -> None:
        self.keys, self.values = (memory[:, :, :length] for memory in self._memory)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences at these places, which may come several times."""
        self._memory = [memory[indices] for memory in self._memory]
        self._show(self.get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write new keys and values behind the others, and return all."""
        before = self.get_seq_length()
        self._show(before + key_states.shape[2])
        self.keys[:, :, before:] = key_states
        self.values[:, :, before:] = value_states
        return self.keys, self.values


def decode_or_generate(model: Any, stock: Any, **inputs: Any) -> Tensor:
    """Return what the stock method would; by `decode` if it can."""
    is_text = inputs.keys() == {"input_ids", "attention_mask", "generation_config"}
    if is_text and is_plain(model, inputs["generation_config"]):
        return decode(model, **inputs)
    return stock(**inputs)


def is_plain(model: Any, config: GenerationConfig) -> bool:
    """Tell whether `decode` can take the place of a model's `generate`.

    It knows full attention over all that was read (by torch's sdpa), the four `SHAPES`, and models
    that draw nothing at random themselves, as dropout would once for each sequence that is read.
    """
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.get_text_config()._attn_implementation != "sdpa":
        return False
    if any(getattr(type(base), name) is not getattr(GenerationMixin, name) for name in METHODS):
        return False
    settings = {name for name, value in config.to_diff_dict().items() if value is not None}
    if config.repetition_penalty == 1.0:
        settings -= {"repetition_penalty"}
    if not settings <= LENGTHS | SHAPES.keys() | OTHERS:
        return False
    dropout = [getattr(base.config.get_text_config(), "attention_dropout", 0)]
    dropout += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    if model.training and any(dropout):
        return False
    layers = DynamicCache(config=base.config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


@torch.no_grad()
def decode(
    model: Any, input_ids: Tensor, attention_mask: Tensor, generation_config: GenerationConfig
) -> Tensor:
    """Return (B, L) prompts, padded on the left, and up to `max_new_tokens` behind them.

    Equal prompts in a row are read once. Sequences that have ended leave the batch once they are a
    quarter of it; random numbers are drawn for them all the same, as `generate` draws them.
    """
    config, mask, ids = generation_config, attention_mask, input_ids
    is_new = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    is_new[1:] = (ids[1:] != ids[:-1]).any(1) | (mask[1:] != mask[:-1]).any(1)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)  # as `generate` counts them
    options = {"use_cache": True, "logits_to_keep": 1, "return_dict": True}
    inputs = {"attention_mask": mask[is_new], "position_ids": positions[is_new]}
    output = model(input_ids=ids[is_new], **inputs, **options)
    cache = output.past_key_values
    cache.layers = [_InPlaceLayer(layer, config.max_new_tokens) for layer in cache.layers]
    rows = is_new.cumsum(0) - 1  # of the prompts that were read, for each sequence
    cache.batch_select_indices(rows)
    logits, position = output.logits[rows, -1], positions[:, -1:]

    shape = logits_process.LogitsProcessorList()
    for name, (make, neutral) in SHAPES.items():
        if config.do_sample and getattr(config, name) not in neutral:
            shape.append(make(getattr(config, name)))
    ends = torch.tensor(config.eos_token_id, device=ids.device)
    has_ended = torch.zeros_like(is_new)
    kept = torch.arange(len(ids), device=ids.device)  # places of the sequences in the batch
    for step in range(config.max_new_tokens):
        if step:
            position, mask = position + 1, torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            # four dimensions, which the model takes as they are: no mask is built in every step
            inputs = {"attention_mask": mask[:, None, None].bool(), "position_ids": position}
            inputs["past_key_values"] = cache
            logits = model(input_ids=ids[kept, -1:], **inputs, **options).logits[:, -1]
        scores = shape(ids[kept], logits.float())
        if config.do_sample:
            probabilities = scores.new_ones(len(ids), scores.shape[1])
            probabilities[kept] = scores.softmax(-1)
            tokens = torch.multinomial(probabilities, num_samples=1)
        else:
            tokens = torch.full_like(ids[:, :1], config.pad_token_id)
            tokens[kept] = scores.argmax(-1, keepdim=True)
        tokens = tokens.masked_fill(has_ended[:, None], config.pad_token_id)
        ids = torch.cat([ids, tokens], dim=1)
        has_ended |= torch.isin(tokens[:, 0], ends)
        go_on = ~has_ended[kept]
        left = int(go_on.sum())
        if not left:
            break
        if left <= 0.75 * len(kept):
            places = go_on.nonzero()[:, 0]
            cache.batch_select_indices(places)
            kept, mask, position = kept[places], mask[places], position[places]
    return ids
