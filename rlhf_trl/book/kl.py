"""Per-token estimators of KL(pi || pi_ref) from the log-probabilities of the sampled tokens.

The chapter's sign is r = log pi_ref - log pi (chapter 15, eq:kl_expectation: KL is the mean of
log pi - log pi_ref over samples of pi). The book's published code uses the opposite sign of r in
the same three formulas, which estimate something else; they stand here under their own names.
Chapter 15 prints the expectation only; k1, k2 and k3 are Schulman's
(joschu.net/blog/kl-approx.html). All take (B, T) log-probabilities of the sampled tokens in nats,
`logps` under pi and `ref_logps` under pi_ref, and return (B, T) estimates in nats.
"""

from torch import Tensor, expm1


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


def code_k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return k1 as the book's code has it: an estimate of minus KL(pi || pi_ref).

    code_k1 = -r,  r = log pi - log pi_ref

    Source: the book's code, policy_gradients/loss.py. Subtracted from a reward it rewards drift.
    """
    return ref_logps - logps


def code_k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return k2 as the book's code has it: r is squared, so it equals `k2`.

    code_k2 = r^2 / 2,  r = log pi - log pi_ref

    Source: the book's code, policy_gradients/loss.py.
    """
    return (logps - ref_logps) ** 2 / 2


def code_k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return k3 as the book's code has it: an estimate of chi2(pi || pi_ref) - KL(pi || pi_ref).

    code_k3 = exp(r) - 1 - r,  r = log pi - log pi_ref

    Source: the book's code, policy_gradients/loss.py. It is never negative.
    """
    log_ratio = logps - ref_logps
    return expm1(log_ratio) - log_ratio


def exact(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(pi || pi_ref) of each next-token distribution, from logits (..., T, V): (..., T).

    KL = sum_v pi(v) (log pi(v) - log pi_ref(v)); over the tokens of an answer sampled from pi, its
    sum estimates the KL of whole answers without bias, like that of k1, with less variance.

    Source: chapter 15, eq:kl_expectation.
    """
    logps, ref_logps = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logps.exp() * (logps - ref_logps)).sum(-1)
