"""Per-token estimators of KL(pi || pi_ref) from the log-probabilities of the sampled tokens.

The chapter's sign is r = log pi_ref - log pi (chapter 15, eq:kl_expectation: KL is the mean of
log pi - log pi_ref over samples of pi). The book's published code (policy_gradients/loss.py) has
the opposite sign of r in the same three formulas, which is the two policies exchanged. Over samples
of pi its k1 estimates -KL, so that subtracted from a reward it rewards drift; its k2 is the same;
and its k3 estimates chi2(pi || pi_ref) - KL, which is never negative.
Chapter 15 prints the expectation only; k1, k2 and k3 are Schulman's
(joschu.net/blog/kl-approx.html). All take (B, T) log-probabilities of the sampled tokens in nats,
`logps` under pi and `ref_logps` under pi_ref, and return (B, T) estimates in nats.
"""

from collections.abc import Callable

from torch import Tensor, expm1

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the k1 estimate of KL(pi || pi_ref): unbiased, high variance, may be negative.

    k1 = -r,  r = log pi_ref - log pi

    Source: chapter 15, eq:kl_expectation.
    """
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the k2 estimate of KL(pi || pi_ref): biased, low variance, never negative.

    k2 = r^2 / 2,  r = log pi_ref - log pi

    Its gradient, taken through sampled tokens, is an unbiased estimate of the gradient of each
    token's KL, its prefix given; that of k1 has mean zero and that of k3 is biased.

    Source: chapter 15 (regularization), estimator by Schulman.
    """
    return (ref_logps - logps) ** 2 / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the k3 estimate of KL(pi || pi_ref): unbiased, low variance, never negative.

    k3 = exp(r) - 1 - r,  r = log pi_ref - log pi

    Source: chapter 15 (regularization), estimator by Schulman; the KL of GRPO (arXiv:2402.03300).
    """
    log_ratio = ref_logps - logps
    return expm1(log_ratio) - log_ratio


def in_code(estimator: Estimator) -> Estimator:
    """Return k1, k2 or k3 as the book's code has it: with the other sign of r."""
    return lambda logps, ref_logps: estimator(ref_logps, logps)


def exact(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(pi || pi_ref) of each next-token distribution, from logits (..., T, V): (..., T).

    KL = sum_v pi(v) (log pi(v) - log pi_ref(v)); over the tokens of an answer sampled from pi, its
    sum estimates the KL of whole answers without bias, like that of k1, with less variance.

    Source: chapter 15, eq:kl_expectation.
    """
    logps, ref_logps = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logps.exp() * (logps - ref_logps)).sum(-1)
