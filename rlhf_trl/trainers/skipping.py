"""Completions without advantage give no gradient: the forward of the loss leaves them out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from rlhf_trl.algorithms import Formulation
from rlhf_trl.errors import InputError, setting
from rlhf_trl.models import dropouts
from rlhf_trl.output import MANIFEST, read_manifest


@dataclass
class UpdateFields:
    """Fields that make an update of the policy faster, and change it by rounding only."""

    in_recipes: ClassVar = {"skip_zero_advantage": None}

    skip_zero_advantage: bool | None = setting(
        "leave completions whose advantage is 0 out of the update; None: where that is exact", False
    )
    share_prompts: bool = setting("read a prompt once for its completions in the update", False)


def needs_all(row: Formulation, args: Any, configs: Sequence[Any]) -> str | None:
    """Return the setting with which completions whose advantage is 0 train all the same, or None.

    `configs` are those of the model and, if there are any, of its adapters.
    """
    if args.formulation == "trl":
        return "formulation: trl, which is stock TRL"
    if row.family != "policy_gradient":
        return f"{row.label}, whose loss reads a teacher"
    if row.value_loss != "none":
        return f"{row.label}, whose critic learns from them"
    if callable(row.surrogate):
        return "a surrogate of your own, which may train without an advantage"
    if row.kl == "loss" and args.beta:
        return f"beta: {args.beta}, a KL in the loss of {row.label}"
    weight = getattr(args, "router_aux_loss_coef", 0)
    if weight and any(hasattr(config, "output_router_logits") for config in configs):
        return f"router_aux_loss_coef: {weight}, a loss on every token"
    return random_in(args, configs)


def random_in(args: Any, configs: Sequence[Any]) -> str | None:
    """Return a setting that makes a forward in training a random one, or None."""
    noise = {name: value for config in configs for name, value in dropouts(config).items()}
    if args.neftune_noise_alpha:
        noise["neftune_noise_alpha"] = args.neftune_noise_alpha
    for name, value in noise.items():
        return f"{name}: {value}, which would draw other numbers"
    return None


def decided(row: Formulation, args: Any, configs: Sequence[Any]) -> tuple[bool, str]:
    """Return whether a run skips, and if not why; refuse `skip_zero_advantage` if it cannot.

    The arguments are those of `needs_all`.
    """
    wanted = getattr(args, "skip_zero_advantage", False)  # TRL's own config has no such field
    if wanted is False:
        return False, "skip_zero_advantage: false"
    reason = needs_all(row, args, configs)
    if wanted and reason:
        raise InputError(
            f"skip_zero_advantage is true, but completions without advantage count with {reason}; "
            "remove one of the two."
        )
    return reason is None, reason or ""


def was_skipping(checkpoint: str) -> bool:
    """Tell whether the run that made a checkpoint left out completions without advantage."""
    has_manifest = Path(checkpoint, MANIFEST).exists()  # one of stock TRL has none
    return has_manifest and read_manifest(checkpoint).get("skip_zero_advantage", False)


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
        self.skips, _ = decided(self._row, self.args, configs_in(model))
        if getattr(self.args, "share_prompts", False):
            from rlhf_trl.trainers.sharing import cannot_share, packed

            if reason := cannot_share(self._row, self.args, model):
                raise InputError(
                    f"share_prompts is true, but prompts cannot be shared with {reason}; remove "
                    "one of the two."
                )
            self._pack = partial(packed, model.config)

    # Extends GRPOTrainer._load_optimizer_and_scheduler: a run goes on as it began.
    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.skips and self.args.skip_zero_advantage is None:
            self.skips = was_skipping(checkpoint)

    # Extends GRPOTrainer._compute_loss, for whose forward the next method is meant.
    @override
    def _compute_loss(self, model, inputs):
        if self.model.training and (self.skips or self._pack):
            self._of_loss = inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._of_loss = None

    # Extends GRPOTrainer._get_per_token_logps_and_entropies: fewer rows and columns.
    @override
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ):
        whole = input_ids, attention_mask, logits_to_keep
        score, batch = super()._get_per_token_logps_and_entropies, self._of_loss
        # what belongs to images is not one row for each completion
        if batch is None or any(torch.is_tensor(value) for value in kwargs.values()):
            return score(model, *whole, *args, **kwargs)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        if self.skips:
            rows = rows_with_advantage(batch["advantages"], attention_mask)
        part = cut(*whole, rows)
        packed = None if self._pack is None else self._pack(*part)
        if packed is not None:
            (logps, entropies), aux_loss = packed.score(self, model), None
        elif len(rows) == len(input_ids):
            return score(model, *whole, *args, **kwargs)
        else:
            logps, entropies, aux_loss = score(model, *part, *args, **kwargs)
        # without old log-probabilities, 0: a ratio of log-probabilities to themselves is 1
        others = batch.get("old_per_token_logps", batch.get("rollout_logps"))
        others = logps.new_zeros(len(input_ids), logits_to_keep) if others is None else others
        mask = (
            batch["completion_mask"][rows] * batch.get("tool_mask", batch["completion_mask"])[rows]
        )
        missing = logits_to_keep - part[2]
        entropies = pad(entropies, (0, missing))
        mean_entropy = (entropies * mask).sum() / mask.sum().clamp(min=1)
        return (
            others.to(logps.dtype).index_copy(0, rows, pad(logps, (0, missing))),
            mean_entropy.expand(others.shape).index_copy(0, rows, entropies),
            aux_loss,
        )


def configs_in(model: Any) -> list[Any]:
    """Return the configs of a language model and of its adapters."""
    return [model.config.get_text_config(), *getattr(model, "peft_config", {}).values()]


def rows_with_advantage(advantages: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the numbers of the rows to read: those with an advantage, or the shortest one.

    A row is read in any case: weights without a gradient are passed over by the optimizer, with
    their momentum and decay.
    """
    rows = (advantages != 0).nonzero().flatten()
    return rows if len(rows) else attention_mask.sum(1).argmin().view(1)


def cut(
    input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, rows: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Return the rows of a batch of prompts and completions without the padding they end with.

    The padding in front of the prompts stays: without it, rotary positions would move.
    """
    attention_mask = attention_mask[rows]
    longest = int(attention_mask[:, -logits_to_keep:].sum(1).max().clamp(min=1))
    end = input_ids.shape[1] - logits_to_keep + longest
    return input_ids[rows, :end], attention_mask[:, :end], longest
