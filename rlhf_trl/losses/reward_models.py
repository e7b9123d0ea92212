"""The loss of a reward model's row, without any check."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_trl import book
from rlhf_trl.algorithms import RewardModel
from rlhf_trl.book.aggregation import masked
from rlhf_trl.losses.calling import call, look_up, promoted


def scores_loss(row: RewardModel, params: Mapping[str, Any], **tensors: Tensor) -> Tensor:
    """Compute a reward model's loss without any check: what `reward_loss` does after them.

    `params` is what `RewardModel.parameters` returned, the tensors those that the row's function
    reads, as `reward_loss` takes them; rewards or logits first.
    """
    tensors = promoted(tensors, next(iter(tensors)))
    if row.aggregation != "none":
        return _loss_of_tokens(row, params, tensors)
    loss = call(look_up(book.reward_models, row.loss), params, tensors).mean()
    if weight := params.get("center_rewards_coefficient"):
        loss = loss + weight * call(book.reward_models.centering, {}, tensors).mean()
    return loss


def _loss_of_tokens(
    row: RewardModel, params: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Tensor:
    """Return the loss of a model that judges tokens or steps: the mean over those with a label."""
    logits, labels = tensors["logits"], tensors["labels"]
    if labels.dim() == 1:  # one for each completion
        labels = labels.unsqueeze(1).expand(logits.shape[:2])
    mask = tensors.get("mask", 1) * (labels != -100).to(logits.dtype)  # given masks are such, too
    labels = masked(labels, mask)  # -100 is no class
    tensors = {**tensors, "logits": masked(logits, mask), "labels": labels, "mask": mask}
    if (weights := tensors.get("class_weights")) is not None:
        total = (weights[labels.long()] * mask).sum()
        tensors["normalizer"] = total.clamp(min=torch.finfo(total.dtype).tiny)  # not 0 / 0
    tensors["losses"] = call(look_up(book.reward_models, row.loss), params, tensors)
    return call(look_up(book.aggregation, row.aggregation), params, tensors)
