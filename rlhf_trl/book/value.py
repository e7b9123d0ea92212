"""The critic of PPO: its targets and its loss per token.

All tensors are (B, T): `values` are those of the critic that is trained, `old_values` those at
rollout time, `returns` its targets.
"""

import torch
from torch import Tensor


def lambda_returns(advantages: Tensor, old_values: Tensor) -> Tensor:
    """Return the regression targets of the value function.

    G_t = A_t + V_old(s_t)

    Source: chapter 6, listing after eq:GAE_DFN; the advantages are those of `gae`.
    """
    return advantages + old_values


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Return the squared error of the value function.

    l_t = (V_t - G_t)^2 / 2

    Source: chapter 6, listing of PPO.
    """
    return (values - returns) ** 2 / 2


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float
) -> Tensor:
    """Return the larger of the squared errors of the value and of the value held near the old one.

    l_t = max((V_t - G_t)^2, (clip(V_t, V_old - c, V_old + c) - G_t)^2) / 2

    Source: chapter 6, listing of the value network's loss; the book's code.

    Args:
        cliprange_value: c, in units of the reward.
    """
    near_old = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    return torch.max(value_loss(values, returns), value_loss(near_old, returns))
