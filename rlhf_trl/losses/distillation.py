"""The loss of a row of on-policy distillation, without any check."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_trl import book
from rlhf_trl.algorithms import Distillation
from rlhf_trl.book.aggregation import masked
from rlhf_trl.losses.calling import call, look_up


def distilled_loss(
    row: Distillation,
    params: Mapping[str, Any],
    student: Tensor,
    teachers: Iterable[tuple[Tensor, Tensor | float]],
    mask: Tensor,
    token_weights: Tensor | None = None,
    **also: Any,
) -> Tensor:
    """Compute the loss without any check: what `distillation_loss` does after them.

    `student` is what the row's function reads of it, and `teachers` the same of each with its
    weight, a number or (B,). `token_weights`, (B, T), are constants on the losses of the tokens;
    the rest is for the aggregation.
    """
    function, name = look_up(book.distillation, row.loss), student_name(row)
    counted = mask.bool().view(*mask.shape, *[1] * (student.dim() - 2))
    student = torch.where(counted, student, 0)
    losses: Tensor | float = 0
    for teacher, weight in teachers:
        pair = {name: student, f"teacher_{name}": torch.where(counted, teacher, 0)}
        each = call(function, params, pair)
        losses = losses + (weight.unsqueeze(-1) if isinstance(weight, Tensor) else weight) * each
    if token_weights is not None:
        losses = losses * masked(token_weights, mask)
    aggregate = look_up(book.aggregation, row.aggregation)
    return call(aggregate, params, {"losses": losses, "mask": mask, **also})


def student_name(row: Distillation) -> str:
    """Return what a row's function reads of the student: "logps" or "logits"."""
    return next(iter(inspect.signature(look_up(book.distillation, row.loss)).parameters))
