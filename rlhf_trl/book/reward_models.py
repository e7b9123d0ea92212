"""Reward models: losses of comparisons (B,), and of tokens (B, T) or steps, before any averaging.

`chosen` and `rejected` are the (B,) rewards of the preferred completions and of the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the negative log-likelihood of a preference.

    l = -log sigmoid(r_c - r_r)

    Source: chapter 5, eq:rewardmodeling1 (the same as eq:rewardmodeling2).
    """
    return -F.logsigmoid(chosen - rejected)


def bradley_terry_margin(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return the negative log-likelihood of a preference that is to exceed a margin.

    l = -log sigmoid(r_c - r_r - m)

    Source: chapter 5, eq:rewardmodelingmargin; Llama 2 (arXiv:2307.09288).

    Args:
        margin: (B,) how much better the preferred is, or one number; 0: eq:rewardmodeling1.
    """
    return bradley_terry(chosen, rejected + margin)


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return a penalty on rewards that drift away from 0, which no comparison prevents.

    l = (r_c + r_r)^2

    Source: arXiv:2312.09244; TRL adds center_rewards_coefficient times its mean.
    """
    return (chosen + rejected) ** 2


def plackett_luce(rewards: Tensor) -> Tensor:
    """Return the negative log-likelihood of a ranking: the best of all, of the rest, and so on.

    l = -sum_k (r_k - log sum_{j >= k} exp(r_j))

    Source: chapter 5, eq:kwise_rm; arXiv:2301.11270.

    Args:
        rewards: (B, K) rewards of the completions of a prompt, the best first.

    Returns:
        (B,) losses; for K = 2 those of `bradley_terry`.
    """
    places = range(rewards.shape[1])
    losses = [torch.logsumexp(rewards[:, k:], 1) - rewards[:, k] for k in places]
    return sum(losses, rewards.new_zeros(()))


def outcome(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross-entropy of each token, or each step.

    l_t = -(y log p_t + (1 - y) log(1 - p_t)), with p_t = sigmoid(w_t)

    Source: chapter 5, eq:orm_token_loss and, on steps, eq:prm_loss.

    Args:
        logits: (B, T) w_t.
        labels: (B, T) y: 1 for right, 0 for wrong.
    """
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


def process(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of each step over the classes bad, neutral and good.

    l_s = -w_y log softmax(logits_s)_y

    Source: chapter 5, the listing of the process reward model; the book's code.

    Args:
        logits: (B, S, C), C = 3.
        labels: (B, S) y: 0 for bad, 1 for neutral, 2 for good.
        class_weights: (C,) w; None: all 1.
    """
    return F.cross_entropy(
        logits.transpose(1, 2), labels.long(), weight=class_weights, reduction="none"
    )
