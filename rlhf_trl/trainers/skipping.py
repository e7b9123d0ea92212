"""Completions without advantage give no gradient: the forward of the loss leaves them out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from rlhf_trl.algorithms import Formulation
from rlhf_trl.errors import InputError, setting
from rlhf_trl.models import dropouts


@dataclass
class UpdateFields:
    """Fields that make an update of the policy faster, and change it by rounding only."""

    in_recipes: ClassVar = {"skip_zero_advantage": None}

    skip_zero_advantage: bool | None = setting(
        "skip completions of advantage 0; None: where that is exact", False
    )
    share_prompts: bool = setting("read a prompt once for its completions in the update", False)


def needs_all(
    row: Formulation, args: Any, configs: Sequence[Any], own_loss: bool = False
) -> str | None:
    """Return a setting with which completions whose advantage is 0 train all the same, or None.

    `configs` are those of the model and its adapters; `own_loss` says that a subclass computes the
    loss. Refuses `skip_zero_advantage: true` beside such a setting.
    """
    router = getattr(args, "router_aux_loss_coef", 0)
    has_router = any(hasattr(config, "output_router_logits") for config in configs)
    has_critic = getattr(row, "value_loss", "none") != "none"
    obstacles = {
        "formulation: trl, which is stock TRL": args.formulation == "trl",
        f"{row.label}, whose loss reads a teacher": row.family != "policy_gradient",
        f"{row.label}, whose critic learns from them": has_critic,
        "a loss of your own, which they may train": own_loss or callable(row.surrogate),
        f"beta: {args.beta}, a KL in the loss of {row.label}": row.kl == "loss" and args.beta,
        f"router_aux_loss_coef: {router}, a loss on every token": has_router and router,
        **random_numbers(args, configs),
    }
    return _first("skip_zero_advantage", args, obstacles)


def random_numbers(args: Any, configs: Sequence[Any]) -> dict[str, Any]:
    """Return the settings that draw random numbers in a forward: others, if less is read."""
    noise = {"neftune_noise_alpha": args.neftune_noise_alpha}
    for config in configs:
        noise |= dropouts(config)
    return {f"{name}: {value}, which draws other numbers": value for name, value in noise.items()}


def _first(field: str, args: Any, obstacles: dict[str, Any]) -> str | None:
    """Return the first obstacle that is there, or None; refuse a field that is true beside it."""
    reason = next((reason for reason, is_there in obstacles.items() if is_there), None)
    if reason and getattr(args, field):
        raise InputError(f"{field}: true does not go with {reason}; remove one of the two.")
    return reason


class Skipping:
    """Trainer mixin: the forward of the loss reads only what the gradient depends on.

    Its result has the shapes of the whole batch, so that the loss, its normalizers and TRL's
    metrics are computed as ever. The metric `entropy` is that of the completions that were read;
    the means of several processes are weighed by all their tokens.
    """

    skips = False  # whether completions whose advantage is 0 are left out
    _pack: Callable[..., Any] | None = None  # puts completions behind one copy of their prompt
    _of_loss: dict[str, Any] | None = None  # the batch, while the forward of its loss runs

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        configs = [model.config.get_text_config(), *getattr(model, "peft_config", {}).values()]
        # TRL's own config lacks both fields
        if getattr(self.args, "skip_zero_advantage", False) is not False:
            is_ours = type(self).row_loss.__module__.partition(".")[0] == "rlhf_trl"
            self.skips = needs_all(self._row, self.args, configs, own_loss=not is_ours) is None
        if getattr(self.args, "share_prompts", False):
            from rlhf_trl.rollouts import sharing

            obstacles = sharing.obstacles(self._row, self.args, configs)
            obstacles["a model that reads images"] = model.config is not configs[0]
            obstacles |= random_numbers(self.args, configs)
            _first("share_prompts", self.args, obstacles)
            self._pack = partial(sharing.packed, configs[0])

    # Extends GRPOTrainer._compute_loss, for whose forward the next method is meant.
    @override
    def _compute_loss(self, model, inputs):
        if self.model.training and (self.skips or self._pack):
            self._of_loss = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._of_loss = None

    # Extends GRPOTrainer._get_per_token_logps_and_entropies: reads fewer rows and columns.
    @override
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ):
        score, batch = super()._get_per_token_logps_and_entropies, self._of_loss
        whole = input_ids, attention_mask, logits_to_keep
        # tensors among the other arguments belong to images, of which a completion has any number
        if batch is None or any(torch.is_tensor(value) for value in kwargs.values()):
            return score(model, *whole, *args, **kwargs)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        if self.skips:
            rows = rows_to_read(batch["advantages"], attention_mask)
        part = cut(*whole, rows)
        packed = None if self._pack is None else self._pack(*part)
        if packed is None and len(rows) == len(input_ids):
            return score(model, *whole, *args, **kwargs)
        if packed is None:
            logps, entropies, _ = score(model, *part, *args, **kwargs)
        else:
            logps, entropies = packed.score(self, model)
        missing = logits_to_keep - part[2]
        logps, entropies = pad(logps, (0, missing)), pad(entropies, (0, missing))
        # a row that is not read has its old log-probabilities, so that its ratio is 1; without
        # them, the ratio is of log-probabilities to themselves, whatever they are
        old = batch.get("old_per_token_logps", batch.get("rollout_logps"))
        old = logps.new_zeros(len(input_ids), logits_to_keep) if old is None else old.to(logps)
        if self.skips:  # the row that is read although it has none, too: its gradient is 0
            has_advantage = batch["advantages"][rows].unsqueeze(1) != 0
            logps = torch.where(has_advantage, logps, old[rows] + 0 * logps)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        mean_entropy = (entropies * mask[rows]).sum() / mask[rows].sum().clamp(min=1)
        entropies = mean_entropy.expand(old.shape).index_copy(0, rows, entropies)
        return old.index_copy(0, rows, logps), entropies, None


def rows_to_read(advantages: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the numbers of the rows with an advantage; if there is none, of the shortest row.

    Without any, weights would have no gradient, and AdamW would pass over momentum and decay.
    """
    rows = (advantages != 0).nonzero().flatten()
    return rows if len(rows) else attention_mask.sum(1).argmin().view(1)


def cut(
    input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, rows: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Return rows of a batch of prompts and completions without the padding at their end.

    The padding in front of the prompts stays: without it, rotary positions would move.
    """
    attention_mask = attention_mask[rows]
    longest = int(attention_mask[:, -logits_to_keep:].sum(1).max().clamp(min=1))
    end = input_ids.shape[1] - logits_to_keep + longest
    return input_ids[rows, :end], attention_mask[:, :end], longest


def of_like_length(attention_mask: Tensor, logits_to_keep: int, most: int = 2) -> list[Tensor]:
    """Return the numbers of all rows, in at most so many parts (1 or 2), short rows first.

    There are two where `cut` then leaves at least 5 % fewer tokens to read than of one.
    """
    lengths, rows = attention_mask[:, -logits_to_keep:].sum(1).sort()
    widths = lengths + attention_mask.shape[1] - logits_to_keep  # of a part that ends with the row
    ends = torch.arange(1, len(rows), device=rows.device)  # of the first part
    tokens = ends * widths[:-1] + (len(rows) - ends) * widths[-1]
    if most == 1 or not len(tokens) or tokens.min() > 0.95 * len(rows) * widths[-1]:
        return [rows.sort()[0]]
    end = int(tokens.argmin()) + 1
    return [rows[:end].sort()[0], rows[end:].sort()[0]]
