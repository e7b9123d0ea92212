"""Direct alignment: from log-probabilities of whole completions to losses.

Log-probabilities are per completion, either summed over its tokens or averaged; each function
says which. Unless it says otherwise, c is the chosen and r the rejected completion of one prompt,
d_c = log pi(c) - log pi_ref(c), d_r likewise, and the loss to minimize is the mean of what is
returned. Chapter 8 prints an equation for DPO only; the others are their papers'.

What a function takes under these names, and returns, unless its docstring says otherwise:
    policy_chosen_logps, policy_rejected_logps: (B,) log-probabilities of the chosen and of the
        rejected under the policy, in nats; averaged ones in nats per token.
    ref_chosen_logps, ref_rejected_logps: (B,) the same under the reference policy.
    beta: strength of the pull toward the reference; above 0.
    Returns: (B,) losses.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
) -> Tensor:
    """Return the negative log-likelihood of the preference under the implicit rewards beta * d.

    l = -log sigmoid(beta (d_c - d_r))

    Source: chapter 8, eq:dpo_core; DPO (arXiv:2305.18290), on sums; log 2 where the policy is the
    reference. On averages it is the length-normalized DPO of Tulu 3 (arXiv:2411.15124).
    """
    chosen = policy_chosen_logps - ref_chosen_logps
    rejected = policy_rejected_logps - ref_rejected_logps
    return -F.logsigmoid(beta * (chosen - rejected))


def cdpo(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Return DPO's loss if a share of the labels is expected to be flipped.

    l = -(1 - e) log sigmoid(beta (d_c - d_r)) - e log sigmoid(-beta (d_c - d_r))

    Source: conservative DPO (Mitchell 2023, ericmitchell.ai/cdpo.pdf), on sums.

    Args:
        label_smoothing: e, the share of flipped labels, from 0 (DPO) to 0.5 (no label counts).
    """
    logps = (policy_chosen_logps, policy_rejected_logps, ref_chosen_logps, ref_rejected_logps)
    kept = dpo(*logps, beta=beta)
    flipped = dpo(*logps, beta=-beta)  # as if the rejected were preferred
    return (1 - label_smoothing) * kept + label_smoothing * flipped


def ipo(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
) -> Tensor:
    """Return the squared distance of the log-ratio gap from a target.

    l = (d_c - d_r - 1 / (2 beta))^2

    Source: IPO (arXiv:2310.12036), equation 17, where beta is tau, half the inverse of the target.
    The chapter's Psi is DPO's; IPO's is the identity. On sums in the paper, on averages in TRL.
    """
    chosen = policy_chosen_logps - ref_chosen_logps
    rejected = policy_rejected_logps - ref_rejected_logps
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def simpo(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    beta: float,
    gamma_beta_ratio: float,
) -> Tensor:
    """Return DPO's loss on averages, without a reference and with a margin.

    l = -log sigmoid(beta (log p(c)/|c| - log p(r)/|r| - g))

    Source: SimPO (arXiv:2405.14734), on averages; its margin gamma is beta * g.

    Args:
        beta: scale of the gap; above 0.
        gamma_beta_ratio: g, the margin in nats per token.
    """
    return -F.logsigmoid(beta * (policy_chosen_logps - policy_rejected_logps - gamma_beta_ratio))


def log_odds(logps: Tensor) -> Tensor:
    """Return the log-odds of events whose log-probabilities are given.

    log(p / (1 - p)) = log p - log(1 - p)

    Source: ORPO (arXiv:2403.07691), equation 4. Log-probabilities in nats, of any shape, are below
    0; the result is exact near 0 and far from it.
    """
    half = -math.log(2)  # the log-probability at which odds are even
    # each branch gets only numbers at which it is exact and has a finite gradient
    near = torch.log(-torch.expm1(logps.clamp(min=half)))
    far = torch.log1p(-torch.exp(logps.clamp(max=half)))
    return logps - torch.where(logps > half, near, far)


def orpo(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    chosen_nll: Tensor,
    beta: float,
    max_logp: float = 0.0,
) -> Tensor:
    """Return the likelihood loss of the chosen with an odds-ratio penalty on the rejected.

    l = NLL(c) - beta log sigmoid(log-odds(c) - log-odds(r)), with p(y) = exp(log pi(y)/|y|)

    Source: ORPO (arXiv:2403.07691), equations 6 and 7, on averages, where beta is lambda.

    Args:
        chosen_nll: (B,) or scalar negative log-likelihood of the chosen, in nats per token.
        beta: weight of the odds ratio.
        max_logp: clamp larger log-probabilities to this; below 0 it keeps the odds finite.

    Returns:
        (B,) losses; infinite where a log-probability is 0.
    """
    chosen = log_odds(policy_chosen_logps.clamp(max=max_logp))
    rejected = log_odds(policy_rejected_logps.clamp(max=max_logp))
    return chosen_nll - beta * F.logsigmoid(chosen - rejected)


def kto_reference_point(policy_kl_logps: Tensor, ref_kl_logps: Tensor) -> Tensor:
    """Estimate how far the policy is from the reference on completions of other prompts.

    z = max(0, (1/M) sum_j d_j), without a gradient

    Source: KTO (arXiv:2402.01306).

    Args:
        policy_kl_logps: (M,) summed log-probabilities under the policy of completions paired with
            prompts they were not written for, in nats.
        ref_kl_logps: (M,) those under the reference policy.

    Returns:
        The scalar z, in nats; at least 0.
    """
    return (policy_kl_logps - ref_kl_logps).mean().clamp(min=0).detach()


def kto(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    policy_kl_logps: Tensor,
    ref_kl_logps: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    class_means: bool = False,
) -> Tensor:
    """Return the loss of each example against a reference point; examples need no partner.

    l_c = w_d (1 - sigmoid(beta (d_c - z))), l_r = w_u (1 - sigmoid(beta (z - d_r)))

    Source: KTO (arXiv:2402.01306), on sums, with z of `kto_reference_point`. The C desirable stand
    for the chosen and the R undesirable for the rejected; either may be 0.

    Args:
        policy_kl_logps: (M,) of mismatched pairs under the policy.
        ref_kl_logps: (M,) of mismatched pairs under the reference policy.
        desirable_weight: w_d.
        undesirable_weight: w_u.
        class_means: return (1/C) sum_c l_c + (1/R) sum_r l_r, as the book's code does, so that both
            classes weigh the same: twice the mean of all where C = R.

    Returns:
        (C + R,) losses, the desirable first; with `class_means` their scalar, to which a class
        without examples adds 0.
    """
    z = kto_reference_point(policy_kl_logps, ref_kl_logps)
    chosen = 1 - torch.sigmoid(beta * (policy_chosen_logps - ref_chosen_logps - z))
    rejected = 1 - torch.sigmoid(beta * (z - (policy_rejected_logps - ref_rejected_logps)))
    chosen, rejected = desirable_weight * chosen, undesirable_weight * rejected
    if class_means:
        return chosen.sum() / max(len(chosen), 1) + rejected.sum() / max(len(rejected), 1)
    return torch.cat([chosen, rejected])


def apo_zero(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
    offset: float = 0.0,
) -> Tensor:
    """Return a loss that pushes the chosen up and the rejected down, each on its own.

    l = -sigmoid(beta d_c) + sigmoid(beta d_r)

    Source: APO (arXiv:2408.06266), equation 7, on sums.

    Args:
        offset: a constant that is added to losses between -1 and 1; TRL adds 1.
    """
    chosen = torch.sigmoid(beta * (policy_chosen_logps - ref_chosen_logps))
    rejected = torch.sigmoid(beta * (policy_rejected_logps - ref_rejected_logps))
    return offset - chosen + rejected


def apo_down(
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    beta: float,
    offset: float = 0.0,
) -> Tensor:
    """Return a loss that pushes the chosen down, and the rejected further down.

    l = sigmoid(beta d_c) - sigmoid(beta (d_c - d_r))

    Source: APO (arXiv:2408.06266), equation 8, on sums.

    Args:
        offset: a constant that is added to losses between -1 and 1; TRL adds 1.
    """
    chosen = beta * (policy_chosen_logps - ref_chosen_logps)
    rejected = beta * (policy_rejected_logps - ref_rejected_logps)
    return offset + torch.sigmoid(chosen) - torch.sigmoid(chosen - rejected)
