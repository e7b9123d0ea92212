"""From per-token losses to one number, over a micro-batch or over a whole accumulation window.

Without a normalizer the denominator is counted from the mask that is given: a micro-batch. With
the number of sequences or tokens of the whole window as normalizer, the results of its
micro-batches add up to the value over the window. Masked positions are skipped, not multiplied by
zero: a NaN there does not matter. `losses` are (B, T), or (B, 1) to be spread over the tokens;
`mask` is (B, T), 1 on tokens that count; the result is a scalar.
"""

import torch
from torch import Tensor

from rlhf_trl.book.advantages import as_groups


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replace what stands on masked positions by 0, in the values and in their gradient.

    Values may have further dimensions behind those of the mask, as logits (B, T, V) have.
    """
    further = [1] * (values.dim() - mask.dim())
    return torch.where(mask.bool().reshape(*mask.shape, *further), values, 0)


def sequence_mean(losses: Tensor, mask: Tensor, normalizer: Tensor | float | None = None) -> Tensor:
    """Average over the tokens of each sequence, then over sequences: each sequence counts the same.

    L = (1/B) sum_i (1/|a_i|) sum_t l_{i,t}

    Source: chapter 6, eq:loss_per_sequence; GRPO (arXiv:2402.03300).

    A sequence without tokens adds 0 and counts in B. The normalizer counts sequences.
    """
    means = masked(losses, mask).sum(1) / mask.sum(1).clamp(min=1)
    return means.sum() / (len(mask) if normalizer is None else normalizer)


def sequence_sum(losses: Tensor, mask: Tensor, normalizer: Tensor | float | None = None) -> Tensor:
    """Sum over the tokens of each sequence, then average: the policy gradient as it is derived.

    L = (1/B) sum_i sum_t l_{i,t}

    Source: chapter 6, eq:REINFORCE_with_baseline, the listing after eq:trajectory_log_grad.

    The normalizer counts sequences.
    """
    return masked(losses, mask).sum() / (len(mask) if normalizer is None else normalizer)


def token_mean(losses: Tensor, mask: Tensor, normalizer: Tensor | float | None = None) -> Tensor:
    """Average over all tokens: each token counts the same.

    L = sum_i sum_t l_{i,t} / sum_i |a_i|

    Source: chapter 6, eq:loss_per_token; DAPO (arXiv:2503.14476).

    A batch without tokens gives 0. The normalizer counts tokens.
    """
    return masked(losses, mask).sum() / (
        mask.sum().clamp(min=1) if normalizer is None else normalizer
    )


def fixed_length(
    losses: Tensor,
    mask: Tensor,
    max_completion_length: int,
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """Divide the sum over the tokens by a constant: no length is favored.

    L = (1/B) sum_i (1/L_max) sum_t l_{i,t}

    Source: chapter 6, eq:loss_fixed_length; Dr. GRPO (arXiv:2503.20783).

    L_max, `max_completion_length`, is the same for the whole training. The normalizer counts
    sequences.
    """
    return sequence_sum(losses, mask, normalizer) / max_completion_length


def per_prompt(
    losses: Tensor,
    mask: Tensor,
    num_generations: int | None = None,
    prompt_tokens: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """Average over all tokens of a prompt's completions, then over prompts.

    L = (1/P) sum_p (sum_{i in p} sum_t l_{i,t}) / (sum_{i in p} |a_i|)

    Source: chapter 6, eq:CISPO_objective; DAPO's paper (arXiv:2503.14476) and the book's code of
    chapter 12 (SDPO) divide alike.

    Args:
        losses: (B, T), and so is the mask.
        num_generations: completions of each prompt; None: all are of one.
        prompt_tokens: (B,) the number of tokens of all completions of the same prompt, for batches
            that lack some of these completions; None: counted from the mask.
        normalizer: P; None: B / num_generations, a fraction where completions are lacking.
    """
    size = num_generations or len(mask)
    if prompt_tokens is None:
        prompt_tokens = as_groups(mask.sum(1), size, "per_prompt").sum(1).repeat_interleave(size)
    totals = masked(losses, mask).sum(1) / prompt_tokens.clamp(min=1)
    return totals.sum() / (len(mask) / size if normalizer is None else normalizer)
