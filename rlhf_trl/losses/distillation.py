"""The loss of a row of on-policy distillation, without any check."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

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
    **counts: Any,
) -> Tensor:
    """Compute the loss without any check: what `distillation_loss` does after them.

    Args:
        student: what the row's function reads of it: (B, T) log-probabilities or (B, T, V) logits.
        teachers: the same of each teacher, with its weight, a number or (B,).
        mask: (B, T) 1 on tokens that count.
        token_weights: (B, T) constants on the losses of the tokens.
        counts: what the aggregation takes besides, such as `normalizer` and `num_generations`.
    """
    name = student_name(row)
    tensors = {name: masked(student, mask)}
    losses: Tensor | float = 0
    for teacher, weight in teachers:
        tensors[f"teacher_{name}"] = masked(teacher, mask)
        if isinstance(weight, Tensor):
            weight = weight.unsqueeze(-1)  # (B, 1), for losses of tokens
        losses = losses + weight * call(look_up(book.distillation, row.loss), params, tensors)
    if token_weights is not None:
        losses = losses * masked(token_weights, mask)
    aggregate = look_up(book.aggregation, row.aggregation)
    return call(aggregate, params, {"losses": losses, "mask": mask, **counts})


def student_name(row: Distillation) -> str:
    """Return what a row's function reads of the student, its first argument: logps or logits."""
    return next(iter(inspect.signature(look_up(book.distillation, row.loss)).parameters))
