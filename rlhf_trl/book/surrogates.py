"""Likelihood ratios and per-token losses: what is differentiated, before any averaging.

Every loss (to be minimized) is elementwise, (B, T). `logps` and `old_logps` are (B, T)
log-probabilities in nats, under the policy that is trained and the one that generated; `ratio` is
(B, T) of tokens, or (B, 1) of sequences where it says so; `mask` is (B, T), 1 on tokens that count.
Advantages are (B, 1) when a sequence has one and (B, T) when each token has its own; they broadcast
against (B, T).
"""

import torch
from torch import Tensor


def token_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return the likelihood ratio of each token; 1 on-policy.

    rho_t = pi(a_t | s_t) / pi_old(a_t | s_t)

    Source: chapter 6, eq:PPO_POL_RATIO and eq:PPO_EQN_EXPANDED; PPO (arXiv:1707.06347).
    """
    return torch.exp(logps - old_logps)


def sequence_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return the geometric mean of the token ratios of each sequence.

    rho_i = (pi(a_i | s) / pi_old(a_i | s))^(1/|a_i|) = exp((1/|a_i|) sum_t log rho_{i,t})

    Source: chapter 6, eq:GSPO_ratio; GSPO (arXiv:2507.18071).

    Returns:
        (B, 1) ratios; 1 on-policy and for a sequence without tokens.
    """
    log_ratio = torch.where(mask.bool(), logps - old_logps, 0)
    return torch.exp(log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1))


def product_ratio(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Return the likelihood ratio of each whole sequence, the product of its token ratios.

    rho_i = pi(a_i | s) / pi_old(a_i | s) = exp(sum_t log rho_{i,t})

    Source: not in the book; TRL's RLOOTrainer, after arXiv:2402.14740, where a completion is one
    action.

    Returns:
        (B, 1) ratios; 1 on-policy and for a sequence without tokens.
    """
    log_ratio = torch.where(mask.bool(), logps - old_logps, 0)
    return torch.exp(log_ratio.sum(1, keepdim=True))


def log_prob_weighting(logps: Tensor, advantages: Tensor) -> Tensor:
    """Weight log-probabilities by advantages: the plain policy gradient.

    l_t = -A_t log pi(a_t | s_t)

    Source: chapter 6, eq:REINFORCE_with_advantage.
    """
    return -advantages * logps


def truncated_importance_weight(
    logps: Tensor, ratio: Tensor, advantages: Tensor, importance_cap: float
) -> Tensor:
    """Weight log-probabilities by advantages and by a capped, constant importance weight.

    l_t = -sg(min(rho_t, C)) A_t log pi(a_t | s_t)

    Source: chapter 6, eq:reinforce_tis, here against the drift between updates of one batch.
    On-policy it is `log_prob_weighting`.

    Args:
        importance_cap: C, at least 1 to leave on-policy tokens alone.
    """
    return -ratio.clamp(max=importance_cap).detach() * advantages * logps


def clipped_ratio(ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """Clip the objective: no gradient once the ratio has moved far enough in the wanted direction.

    l_t = -min(rho_t A_t, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A_t)

    Source: chapter 6, eq:PPO_EQN_EXPANDED and eq:GRPO_token; with rho_i eq:GSPO_objective; two
    different bounds are DAPO's clip-higher (arXiv:2503.14476).

    Args:
        ratio: (B, T) token ratios or (B, 1) sequence ratios.
        epsilon: distance of the lower bound from 1.
        epsilon_high: distance of the upper bound from 1.

    Returns:
        (B, T) losses, or (B, 1) when ratio and advantages are.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.min(ratio * advantages, clipped * advantages)


def clipped_importance_weight(
    logps: Tensor, ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float
) -> Tensor:
    """Clip the importance weight, not the objective: every token keeps a gradient.

    l_t = -sg(clip(rho_t, 1 - epsilon, 1 + epsilon_high)) A_t log pi(a_t | s_t)

    Source: chapter 6, eq:CISPO_objective and eq:CISPO_ratio; CISPO (arXiv:2506.13585).

    Args:
        epsilon: distance of the lower bound from 1; 1 means no lower bound.
        epsilon_high: distance of the upper bound from 1.
    """
    return -ratio.clamp(1 - epsilon, 1 + epsilon_high).detach() * advantages * logps


def soft_gate(
    ratio: Tensor, advantages: Tensor, sapo_temperature_pos: float, sapo_temperature_neg: float
) -> Tensor:
    """Let the gradient fade with the distance of the ratio from 1, instead of clipping it.

    l_t = -(4 / tau) sigmoid(tau (rho_t - 1)) A_t,  tau = tau_pos if A_t > 0 else tau_neg

    Source: SAPO (arXiv:2511.20347); chapter 6 describes it in words. On-policy the gradient is that
    of the unclipped ratio.

    Args:
        sapo_temperature_pos: tau_pos, above 0.
        sapo_temperature_neg: tau_neg, above 0.
    """
    # new_tensor: a bare float would become float32 and cost seven digits in float64
    positive = advantages.new_tensor(sapo_temperature_pos)
    negative = advantages.new_tensor(sapo_temperature_neg)
    temperature = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
