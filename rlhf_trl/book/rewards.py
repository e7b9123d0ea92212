"""What happens to rewards before they become advantages: KL penalties, and DAPO's two devices.

`rewards` are (B,), of completions; `kl` is (B, T), estimates per token in nats; `mask` is (B, T), 1
on tokens that count; `beta` is a weight, in reward per nat.
"""

import torch
from torch import Tensor

from rlhf_trl.book.advantages import as_groups
from rlhf_trl.book.aggregation import masked
from rlhf_trl.errors import InputError


def summed_kl_penalty(rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Subtract the KL of the whole completion from its reward.

    R_i <- R_i - beta sum_t kl_{i,t}

    Source: chapter 15, eq:kl_standard; chapter 6 on RLOO. The sum over the tokens estimates the KL
    between the distributions of completions.
    """
    return rewards - beta * masked(kl, mask).sum(1)


def averaged_kl_penalty(rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Subtract the KL per token, averaged over the completion, from its reward.

    R_i <- R_i - beta (1/|a_i|) sum_t kl_{i,t}

    Source: the book's code, policy_gradients/utils.py.
    """
    return rewards - beta * masked(kl, mask).sum(1) / mask.sum(1).clamp(min=1)


def per_token_kl_penalty(rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Give every token its own KL penalty, and the last one the reward of the completion.

    r_{i,t} = -beta kl_{i,t} + [t is the last token] R_i

    Source: chapter 6, listing of PPO, and chapter 15, eq:kl_standard.

    The result is (B, T), 0 on masked positions.
    """
    return at_last_token(rewards, mask) - beta * masked(kl, mask)


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Give the reward of a completion to its last token that counts.

    r_{i,t} = [t is the last token] R_i

    Source: chapter 6, on PPO: the reward is reached at the EOS token.

    The result is (B, T), all 0 for a sequence without tokens.
    """
    counts = mask.bool()
    tokens_from_here = counts.long().flip(1).cumsum(1).flip(1)
    return torch.where(counts & (tokens_from_here == 1), rewards.unsqueeze(1), 0)


def overlong_penalty(lengths: Tensor, max_completion_length: int, soft_punish_cache: int) -> Tensor:
    """Punish completions that come close to the length limit, in proportion.

    P(n) = 0 if n <= L - C,  (L - C - n) / C if n <= L,  -1 beyond

    Source: DAPO (arXiv:2503.14476), eq. 13; chapter 6 describes it in words.

    Args:
        lengths: (B,) tokens n of the completions.
        max_completion_length: L, the limit in tokens.
        soft_punish_cache: C, the number of tokens before the limit over which the penalty grows;
            an InputError unless it is 1 to L.

    Returns:
        (B,) penalties in [-1, 0], to be added to the rewards.
    """
    if not 1 <= soft_punish_cache <= max_completion_length:
        raise InputError(
            f"overlong_penalty: soft_punish_cache must lie between 1 and max_completion_length="
            f"{max_completion_length}, not {soft_punish_cache}"
        )
    free = max_completion_length - soft_punish_cache
    # unsigned integers would wrap around below 0
    lengths = lengths if lengths.is_floating_point() else lengths.to(torch.get_default_dtype())
    return ((free - lengths) / soft_punish_cache).clamp(-1, 0)


def has_contrast(
    correctness: Tensor,
    num_generations: int | None = None,
    lowest: float = 0.0,
    highest: float = 1.0,
) -> Tensor:
    """Say which prompts teach something: not all completions wrong, and not all right.

    keep_p = not (all_i c_{p,i} = lowest) and not (all_i c_{p,i} = highest)

    Source: DAPO (arXiv:2503.14476), dynamic sampling; chapter 6 describes it in words.

    Args:
        correctness: (B,) correctness rewards, without penalties, prompt after prompt.
        num_generations: the completions per prompt, of which B must be a multiple.
        lowest: the reward of a wrong answer.
        highest: the reward of a right answer.

    Returns:
        (P,) booleans.
    """
    grouped = as_groups(correctness, num_generations, "has_contrast")
    return ~((grouped == lowest).all(1) | (grouped == highest).all(1))
