"""Distillation: how far the student is from its teacher at the states that it visits.

Losses are of tokens, (B, T), to be minimized; nothing of a teacher is differentiated. `logps` and
`teacher_logps` are (B, T) log-probabilities of the sampled tokens, `logits` and `teacher_logits`
(B, T, V) those of all tokens at the same places, at temperature 1.
"""

import torch
from torch import Tensor


def sampled_reverse_kl(logps: Tensor, teacher_logps: Tensor) -> Tensor:
    """Weight log-probabilities by how much likelier the teacher finds the sampled token.

    l_t = -sg(A_t) log pi(a_t | s_t),  A_t = log pi_T(a_t | s_t) - log pi(a_t | s_t)

    Source: chapter 12, eq:opd_kl_advantage. Given the states, its expected gradient over a_t is
    that of `reverse_kl`; its value means nothing.
    """
    return -(teacher_logps - logps).detach() * logps


def reverse_kl(logits: Tensor, teacher_logits: Tensor, kl_top_k: int | None = None) -> Tensor:
    """Sum the divergence of the student from the teacher over the vocabulary.

    l_t = KL(pi(. | s_t) || pi_T(. | s_t)) = sum_v p_v (log p_v - log q_v)

    Source: chapter 12, eq:opd_reverse_kl; with `kl_top_k` the book's code (SDPO), which tells apart
    only the student's K likeliest tokens and puts all others in one bucket, of probability
    1 - sum_{v in K} p_v (at least 1e-7), in both distributions.
    """
    p, q = logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)
    if kl_top_k is not None:
        p, places = p.topk(min(kl_top_k, p.shape[-1]))
        p, q = _with_tail(p), _with_tail(q.gather(-1, places))
    return (p.exp() * (p - q)).sum(-1)


def _with_tail(logps: Tensor) -> Tensor:
    covered = logps.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logps, torch.log(-torch.expm1(covered))], -1)
