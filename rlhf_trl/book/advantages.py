"""Advantage estimators: how much better was this completion (or token) than expected.

Rewards are (B,), and so are advantages unless they are of tokens, (B, T). Groups are consecutive
runs of `num_generations` completions of one prompt; None means that the whole batch is one group.
A B that is no multiple of it is an InputError.
"""

import torch
from torch import Tensor

from rlhf_trl.errors import InputError


def raw(rewards: Tensor) -> Tensor:
    """Return the reward itself: REINFORCE without a baseline.

    A_i = R_i

    Source: chapter 6, eq:policy_gradient_returns; what the book's code trains REINFORCE with.
    """
    return rewards


def batch_mean_baseline(rewards: Tensor) -> Tensor:
    """Subtract the mean reward of the batch.

    A_i = R_i - b,  b = (1/B) sum_j R_j

    Source: chapter 6, eq:REINFORCE_with_baseline, with the first of its two simplest baselines. The
    rewards are those of the whole batch, gathered over all processes.
    """
    return rewards - rewards.mean()


def moving_average_baseline(rewards: Tensor, baseline_value: float) -> Tensor:
    """Subtract a moving average of the rewards of earlier batches.

    A_i = R_i - b

    Source: chapter 6, eq:REINFORCE_with_baseline, with the second of its two simplest baselines.

    Args:
        baseline_value: b, the average before this batch (see `moving_average`).
    """
    return rewards - baseline_value


def moving_average(baseline_value: float, rewards: Tensor, baseline_decay: float) -> float:
    """Move the baseline toward the mean reward of this batch.

    b <- d b + (1 - d) (1/B) sum_j R_j

    Source: chapter 6, the moving average named before eq:REINFORCE_with_baseline.

    Args:
        baseline_value: b, the average so far.
        rewards: (B,) rewards of the whole batch, gathered over all processes.
        baseline_decay: d in [0, 1]; 1 never moves.

    Returns:
        The average to use for the next batch.
    """
    return baseline_decay * baseline_value + (1 - baseline_decay) * rewards.mean().item()


def leave_one_out(rewards: Tensor, num_generations: int | None = None) -> Tensor:
    """Subtract the mean reward of the *other* completions of the prompt.

    A_i = R_i - 1/(K-1) sum_{j != i} R_j = K/(K-1) (R_i - mean(R))

    Source: chapter 6, eq:RLOO_baseline and eq:RLOO_advantage_alt; RLOO (arXiv:2402.14740).

    K is `num_generations`, and an InputError below 2.
    """
    grouped = as_groups(rewards, num_generations, "leave_one_out", at_least=2)
    size = grouped.shape[1]
    return (size / (size - 1) * (grouped - grouped.mean(1, keepdim=True))).flatten()


def group_centered(rewards: Tensor, num_generations: int | None = None) -> Tensor:
    """Subtract the mean reward of the prompt's completions.

    A_i = r_i - mean(r_1 ... r_G)

    Source: chapter 6, eq:DrGRPO_ADV; Dr. GRPO (arXiv:2503.20783).

    G is `num_generations`.
    """
    grouped = as_groups(rewards, num_generations, "group_centered")
    return (grouped - grouped.mean(1, keepdim=True)).flatten()


def group_standardized(
    rewards: Tensor, num_generations: int | None = None, std_epsilon: float = 1e-4
) -> Tensor:
    """Center the rewards of the prompt's completions and divide by their standard deviation.

    A_i = (r_i - mean(r_1 ... r_G)) / (std(r_1 ... r_G) + e),  std with G - 1 in the denominator

    Source: chapter 6, eq:GRPO_ADV; GRPO (arXiv:2402.03300). The equation has no e; the chapter's
    listing and TRL have 1e-4, the book's code has 1e-8.

    Args:
        num_generations: G, the completions per prompt; below 2 it is an InputError.
        std_epsilon: e, in units of the reward.

    Returns:
        (B,) advantages. In a group of equal rewards they are not always 0: the computed mean may be
        off by a rounding error, which a small e enlarges. For six rewards of 0.3 in float32 they
        are 0.0003 with e = 1e-4 and 0.7 with e = 1e-8 (3 if the batch holds two such groups).
    """
    grouped = as_groups(rewards, num_generations, "group_standardized", at_least=2)
    centered = grouped - grouped.mean(1, keepdim=True)
    return (centered / (grouped.std(1, keepdim=True) + std_epsilon)).flatten()


def maxrl(
    binary_rewards: Tensor, num_generations: int | None = None, partial_credit: bool = False
) -> Tensor:
    """Center the successes of the prompt's completions and divide by the success rate.

    A_i = (r_i - mean(r)) / mean(r),  0 where mean(r) = 0

    Source: MaxRL (arXiv:2602.02710); the book prints no equation.

    `binary_rewards` are (B,), 1 for a success and 0 for a failure; other values are an InputError,
    unless `partial_credit` allows them, as in the book's code.
    """
    if not partial_credit and not ((binary_rewards == 0) | (binary_rewards == 1)).all():
        raise InputError("maxrl: binary_rewards must hold only 0 and 1 (a failure and a success)")
    grouped = as_groups(binary_rewards, num_generations, "maxrl")
    mean = grouped.mean(1, keepdim=True)
    solved = mean > 0  # elsewhere the inner `where` divides by 1, not by 0
    return torch.where(solved, (grouped - mean) / torch.where(solved, mean, 1), 0).flatten()


def gae(
    token_rewards: Tensor, old_values: Tensor, mask: Tensor, gamma: float, lam: float
) -> Tensor:
    """Estimate one advantage per token by generalized advantage estimation.

    A_t = sum_l (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t

    V after the last token is 0. Token t + 1 is the next token that counts.

    Source: chapter 6, eq:TD_RESIDUAL and eq:GAE_DFN; GAE (arXiv:1506.02438).

    Args:
        token_rewards: (B, T) rewards of the tokens.
        old_values: (B, T) values V_t of the state before token t, from the rollout.
        mask: (B, T) 1 on tokens that count.
        gamma: discount factor in [0, 1].
        lam: mixing parameter in [0, 1]; 0 is one-step TD, 1 the whole return.

    Returns:
        (B, T) advantages, 0 on masked positions.
    """
    counts = mask.bool()
    rewards = torch.where(counts, token_rewards, 0)
    values = torch.where(counts, old_values, 0)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(values[:, 0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(counts[:, t], advantage, 0)
        # a masked token changes nothing here, so the token before it sees the one after it
        next_advantage = torch.where(counts[:, t], advantage, next_advantage)
        next_value = torch.where(counts[:, t], values[:, t], next_value)
    return advantages


def whitened(advantages: Tensor, mask: Tensor) -> Tensor:
    """Bring the advantages of all tokens that count to mean 0 and standard deviation 1.

    A_t <- (A_t - mean(A)) / (std(A) + 1e-8)

    Source: not in the book's equations; PPO in practice (arXiv:2403.17031). The standard deviation
    is the unbiased one.

    Args:
        advantages: (B, T) advantages of the whole batch, gathered over all processes.
        mask: (B, T) 1 on tokens that count.

    Returns:
        (B, T) advantages, 0 on masked positions. A single token that counts is the mean: 0, too.
    """
    counted = advantages[mask.bool()]
    spread = counted.std() if len(counted) > 1 else 0
    return torch.where(mask.bool(), (advantages - counted.mean()) / (spread + 1e-8), 0)


def as_groups(rewards: Tensor, size: int | None, function: str, at_least: int = 1) -> Tensor:
    """View the rewards, (B,), as one row per prompt.

    Returns:
        (P, G), where G is the `size` of a group; None: B.

    Raises:
        InputError: B is not a multiple of G, or G is below `at_least`; it names the `function`.
    """
    if rewards.dim() != 1:
        raise InputError(f"{function}: rewards must have shape (B,), not {tuple(rewards.shape)}")
    size = len(rewards) if size is None else size
    if size < at_least:
        raise InputError(f"{function} needs at least {at_least} completions per prompt, not {size}")
    if len(rewards) % size:
        raise InputError(
            f"{function}: num_generations={size} does not divide the batch of {len(rewards)}"
        )
    return rewards.view(-1, size)
