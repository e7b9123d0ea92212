"""What the estimators of KL(pi || pi_ref) estimate, and where their gradients point.

Everything is a sum over all sequences of a small vocabulary, in float64: there is no sampling, so a
mean that differs from the exact KL is a bias, and a gradient that points elsewhere does so always.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.book import kl
from rlhf_trl.compare.pages import report
from rlhf_trl.output import write_whole

ESTIMATORS: dict[str, kl.Estimator] = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
ESTIMATORS |= {f"code {name}": kl.in_code(estimator) for name, estimator in ESTIMATORS.items()}
"""The functions of `book/kl.py`; those of the code have the other sign of the log-ratio."""

MEASURED = {
    "on": [("value", "none"), ("loss", "none"), ("loss", "token"), ("reward", "none")],
    "off": [
        ("value", "none"),
        ("value", "token"),
        ("value", "sequence"),
        ("loss", "none"),
        ("loss", "token"),
        ("reward", "none"),
        ("reward", "token"),
        ("reward", "sequence"),
    ],
}
"""By who samples, the (placement, ratio) pairs that are measured; `Row` says what they mean.

On-policy every ratio is 1, so it only matters to a gradient in the loss, which goes through it.
"""


@dataclass(frozen=True)
class Row:
    """One estimator in one place, over every sequence that could be sampled."""

    estimator: str  # a key of ESTIMATORS
    # "value" (the number itself), "loss" (the gradient through the sample's log-probabilities) or
    # "reward" (the score-function gradient with -k in the reward)
    placement: str
    # what multiplies the estimate: "none", "token" (pi/mu of each token; in the loss the gradient
    # goes through it, as in TRL's use_bias_correction_kl) or "sequence" (their product, a constant)
    ratio: str
    policy: str  # who samples: "on", the policy itself; "off", the behavior policy mu
    tokens: int  # length T of the sequences
    # mean of the estimate summed over the tokens, in nats; of gradients the mean gradient's length
    expected: float
    exact: float  # KL(pi || pi_ref) of whole sequences, in nats, or the length of its gradient
    bias: float  # expected - exact; for gradients the length of the difference
    variance: float  # over samples; for gradients the sum over their components
    # of mean and exact gradient; None for values, and where the mean gradient is zero
    cosine: float | None = None
    norm_ratio: float | None = None  # expected / exact for gradients; None for values

    @property
    def component(self) -> float:
        """The mean gradient along the exact one, 1 if it is right; for values expected / exact."""
        if self.placement == "value":
            return self.expected / self.exact
        return 0.0 if self.cosine is None else self.cosine * self.norm_ratio


def toy() -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits (V + 1, V) of policy, reference and behavior policy for V = 5.

    Row v holds the logits of the token after token v, the last row those of the first token. Since
    the reference, the policy has learned a favorite token after each one, more in some places than
    in others, with a drift of everything else beside it; the behavior policy is half-way.
    """
    places = torch.arange(30, dtype=torch.float64).reshape(6, 5)
    reference = torch.sin(2.3 * places)
    drift = 0.4 * torch.cos(1.7 * places + 0.5)
    for row, gain in enumerate([0.3, 1.8, 0.6, 0.15, 1.2, 0.9]):
        drift[row, (2 * row + 1) % 5] += gain
    behavior = reference + drift / 2 + 0.2 * torch.sin(3.1 * places)
    return reference + drift, reference, behavior


def measure_kl(
    policy: Tensor, reference: Tensor, behavior: Tensor, tokens: Sequence[int] = (1, 3)
) -> list[Row]:
    """Hold every estimator and placement against the exact KL and its exact gradient.

    Sums over all V^T sequences. The gradients are those that a minimizer of the loss follows, per
    unit of beta: mean over samples of sum_t d k_t / d log pi_t * grad log pi_t in the loss, and of
    (sum_t k_t) sum_t grad log pi_t in the reward.

    Args:
        policy: (V + 1, V) logits, which are the parameters; row v follows token v, the last row
            starts a sequence.
        reference: (V + 1, V) logits of pi_ref.
        behavior: (V + 1, V) logits of mu, which samples off-policy.
        tokens: lengths T of the sequences.

    Returns:
        A row for each combination in MEASURED. With one token, "token" and "sequence" are the same.
    """
    rows = []
    for length in tokens:
        sequences = _all_sequences(policy, reference, behavior, length)
        for sampled_by, estimator in product(MEASURED, ESTIMATORS):
            for placement, ratio in MEASURED[sampled_by]:
                make_row = _value_row if placement == "value" else _gradient_row
                rows.append(make_row(sequences, estimator, placement, ratio, sampled_by, length))
    return rows


@dataclass(frozen=True)
class _Sequences:
    """All N sequences of T tokens; the P parameters are the policy's logits, flattened."""

    logps: Tensor  # (N, T) log-probabilities of the tokens under the policy
    ref_logps: Tensor  # (N, T) under the reference
    behavior_logps: Tensor  # (N, T) under the behavior policy
    scores: Tensor  # (N, T, P) grad log pi of each token
    kl: float  # KL(pi || pi_ref) of sequences
    kl_gradient: Tensor  # (P,)

    def sampler_logps(self, sampled_by: str) -> Tensor:
        """Return the log-probabilities of who samples: "on" the policy, or "off" policy, (N, T)."""
        return self.logps if sampled_by == "on" else self.behavior_logps


def _all_sequences(policy: Tensor, reference: Tensor, behavior: Tensor, length: int) -> _Sequences:
    """Return all V^T sequences of a length, with their log-probabilities, and the exact KL.

    Args:
        policy: (V + 1, V) logits, the parameters in which `scores` and `kl_gradient` are
            derivatives.
        reference: (V + 1, V) logits of pi_ref.
        behavior: (V + 1, V) logits of mu.
        length: T.
    """
    sequences = torch.tensor(list(product(range(policy.shape[1]), repeat=length)))  # (N, T)
    logits = policy.detach().clone().requires_grad_()
    logps = _logps(logits, sequences)
    ref_logps = _logps(reference.detach(), sequences)
    sequence_logps = logps.sum(1)
    kl = (sequence_logps.exp() * (sequence_logps - ref_logps.sum(1))).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    # the gradient of each of the N * T log-probabilities, (V + 1, V) each
    scores = [torch.autograd.grad(logp, logits, retain_graph=True)[0] for logp in logps.flatten()]
    return _Sequences(
        logps=logps.detach(),
        ref_logps=ref_logps,
        behavior_logps=_logps(behavior.detach(), sequences),
        scores=torch.stack(scores).reshape(*logps.shape, -1),  # (N, T, P)
        kl=float(kl.detach()),
        kl_gradient=kl_gradient.flatten(),
    )


def _factor(ratio: str, log_ratio: Tensor) -> Tensor | float:
    """Return what multiplies an estimate: 1, the ratio of each token, or that of the sequence.

    `log_ratio` is (N, T), of tokens. The ratio is (N, T) of tokens, or (N, 1) of sequences.
    """
    if ratio == "none":
        return 1.0
    if ratio == "token":
        return log_ratio.exp()
    return log_ratio.sum(1, keepdim=True).exp()


def _value_row(
    sequences: _Sequences, estimator: str, placement: str, ratio: str, sampled_by: str, length: int
) -> Row:
    """Return the row of an estimator as a number: mean and variance over all sequences.

    The last five arguments become fields of the `Row`, whose comments say what they mean.
    """
    sampler_logps = sequences.sampler_logps(sampled_by)
    probabilities = sampler_logps.sum(1).exp()  # (N,) with which each sequence is sampled
    estimates = ESTIMATORS[estimator](sequences.logps, sequences.ref_logps)
    sums = (estimates * _factor(ratio, sequences.logps - sampler_logps)).sum(1)
    mean = probabilities @ sums
    return Row(
        estimator=estimator,
        placement=placement,
        ratio=ratio,
        policy=sampled_by,
        tokens=length,
        expected=float(mean),
        exact=sequences.kl,
        bias=float(mean - sequences.kl),
        variance=float(probabilities @ (sums - mean) ** 2),
    )


def _gradient_row(
    sequences: _Sequences, estimator: str, placement: str, ratio: str, sampled_by: str, length: int
) -> Row:
    """Return the row of an estimator in the loss or in the reward: the gradient that it gives.

    The last five arguments become fields of the `Row`, whose comments say what they mean.
    """
    sampler_logps = sequences.sampler_logps(sampled_by)
    probabilities = sampler_logps.sum(1).exp()  # (N,) with which each sequence is sampled
    logps = sequences.logps.clone().requires_grad_()
    estimates = ESTIMATORS[estimator](logps, sequences.ref_logps)
    factor = _factor(ratio, logps - sampler_logps)  # 1, (N, T) or (N, 1)
    if placement == "loss":
        (slopes,) = torch.autograd.grad((estimates * factor).sum(), logps)
    else:  # score function: the whole sequence's estimate weighs each token, and has no gradient
        slopes = (estimates.sum(1, keepdim=True) * factor).detach().expand_as(logps)
    # (N, P) by the chain rule: d loss / d logp of each token times d logp / d parameters
    gradients = torch.einsum("nt,ntp->np", slopes, sequences.scores)
    mean = probabilities @ gradients
    variance = probabilities @ (gradients - mean).square().sum(1)
    exact = sequences.kl_gradient
    mean_norm, exact_norm = mean.norm(), exact.norm()
    cosine = None
    is_zero = mean_norm < 1e-12 * exact_norm  # up to rounding
    if not is_zero:
        cosine = float(mean @ exact / (mean_norm * exact_norm))
    return Row(
        estimator=estimator,
        placement=placement,
        ratio=ratio,
        policy=sampled_by,
        tokens=length,
        expected=float(mean_norm),
        exact=float(exact_norm),
        bias=float((mean - exact).norm()),
        variance=float(variance),
        cosine=cosine,
        norm_ratio=float(mean_norm / exact_norm),
    )


def _logps(logits: Tensor, sequences: Tensor) -> Tensor:
    """Return the log-probabilities, (N, T), of the tokens of sequences, (N, T)."""
    start = torch.full_like(sequences[:, :1], len(logits) - 1)  # the last row starts a sequence
    tokens_before = torch.cat([start, sequences[:, :-1]], dim=1)
    return logits.log_softmax(-1)[tokens_before, sequences]


def table(rows: Sequence[Row]) -> str:
    """Return rows of one policy in Markdown: a line per length and estimator, a column per place.

    The cell of a value is its mean ± standard deviation in nats. The cell of a gradient has three
    numbers: its cosine with the exact gradient, its length and its standard deviation, these two
    relative to the exact gradient's length.
    """
    lines: dict[tuple[int, str], dict[str, str]] = {}  # by tokens and estimator: cells by column
    for row in rows:
        spread = row.variance**0.5
        if row.placement == "value":
            cell = f"{row.expected:.3f} ± {spread:.2f}"
        else:
            cosine = "-" if row.cosine is None else f"{row.cosine:.2f}"
            cell = f"{cosine} / {row.norm_ratio:.2f} / {spread / row.exact:.1f}"
        if row.ratio != "none":
            column = f"{row.placement} x {row.ratio}"
        elif row.placement == "value":
            column = "value"
        else:
            column = f"in the {row.placement}"
        head = {"tokens": str(row.tokens), "estimator": row.estimator}
        line = lines.setdefault((row.tokens, row.estimator), head)
        line[column] = cell
    return report.table([*lines.values()], "markdown")


def figure(rows: Sequence[Row], path: str | Path) -> None:
    """Draw how much of the exact value, or gradient, each estimator gives on average, as a PNG.

    A panel for each length of the sequences (down) and placement (across).
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    titles = {
        "value": "as a number\nmean / exact KL",
        "loss": "in the loss\npull along the exact gradient",
        "reward": "in the reward\npull along the exact gradient",
    }
    lengths = sorted({row.tokens for row in rows})
    names = list(dict.fromkeys(row.estimator for row in rows))
    drawing = Figure(figsize=(9, 1.2 + 2.6 * len(lengths)), layout="constrained")
    axes = drawing.subplots(len(lengths), len(titles), sharey=True, sharex="col", squeeze=False)
    for panels, tokens in zip(axes, lengths, strict=True):
        panels[0].set_ylabel(f"{tokens} token{'s' * (tokens > 1)}")
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.4, -0.6)  # the first estimator on top
        for panel, placement in zip(panels, titles, strict=True):
            in_panel = [row for row in rows if (row.tokens, row.placement) == (tokens, placement)]
            _draw_panel(panel, in_panel, names)
    drawing.suptitle("What estimators of KL(pi || pi_ref) give on average")
    for top, bottom, title in zip(axes[0], axes[-1], titles.values(), strict=True):
        top.set_title(title, fontsize="medium")
        bottom.set_xlabel("1: right, 0: none, below 0: wrong way")
    handles = [
        Line2D([], [], marker=mark, color=color, linestyle="none", label=label)
        for mark, color, label in _MARKS.values()
    ]
    drawing.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small")
    write_whole(path, lambda part: drawing.savefig(part, dpi=100))


_MARKS = {
    ("on", "none"): ("o", "tab:blue", "on-policy"),
    ("on", "token"): ("D", "tab:cyan", "on-policy, times token ratio"),
    ("off", "none"): ("x", "tab:red", "off-policy"),
    ("off", "token"): ("s", "tab:orange", "off-policy, times token ratio"),
    ("off", "sequence"): ("^", "tab:green", "off-policy, times sequence ratio"),
}
"""Mark, color and label by who samples, and ratio."""


def _draw_panel(axis: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Draw the rows of one length and placement.

    Args:
        axis: of matplotlib.
        rows: what to draw.
        names: of the estimators, in the order in which they stand below each other.
    """
    axis.axvline(0, color="0.6", linewidth=0.8)
    axis.axvline(1, color="0.3", linewidth=1.2, linestyle="--")
    axis.grid(axis="x", alpha=0.3)
    for place, ((policy, ratio), (mark, color, _)) in enumerate(_MARKS.items()):
        marked = [row for row in rows if (row.policy, row.ratio) == (policy, ratio)]
        pulls = [row.component for row in marked]
        # the five marks of an estimator are spread around its height
        heights = [names.index(row.estimator) + 0.15 * (place - 2) for row in marked]
        style = {"marker": mark, "color": color, "linestyle": "none", "markersize": 5}
        axis.plot(pulls, heights, **style)


def page(image: str = "kl.png") -> str:
    """Return the section on KL estimators in Markdown; `image` is what `figure` drew."""
    rows = measure_kl(*toy())

    by_fields = {(r.estimator, r.placement, r.tokens, r.ratio, r.policy): r for r in rows}

    def row_of(
        estimator: str, placement: str, tokens: int, ratio: str = "none", policy: str = "on"
    ) -> Row:
        """Return the one row with these fields."""
        return by_fields[estimator, placement, tokens, ratio, policy]

    def against(row: Row) -> str:
        """Return a mean gradient in words, relative to the exact one."""
        return f"cosine {row.cosine:.2f}, length {row.norm_ratio:.2f}"

    # the numbers in the text below
    code_k3 = row_of("code k3", "value", 1).expected
    exact = {row.tokens: row.exact for row in rows if row.placement == "value"}
    shown = [row for row in rows if row.estimator != "code k2"]  # which equals k2
    tables = {sampler: table([r for r in shown if r.policy == sampler]) for sampler in MEASURED}
    k3_rewards = [row_of("k3", "reward", tokens).norm_ratio for tokens in (1, 3)]
    return f"""## KL estimators: as a number, in the loss, in the reward

A policy over five tokens has drifted from its reference: KL(pi || pi_ref) is {exact[1]:.3f} nats
for one token and {exact[3]:.3f} for three. Every sequence is summed over in float64, so the numbers
have no sampling error. Estimates per token (`rlhf_trl/book/kl.py`; "code" is the other sign of the
log-ratio, as in the book's code; code k2 equals k2) are summed over the sequence. A value is its
mean ± its standard deviation over samples. A gradient is held against the exact gradient of the
KL of sequences: cosine / length relative to it / standard deviation over samples relative to it.
In the reward it is the score-function (REINFORCE) gradient for -beta k, without a baseline.
"x token" is times the importance ratio pi/mu of each token, "x sequence" times their product. In
the loss the gradient of the ratio counts: TRL's `use_bias_correction_kl: true` (at its level
"token") is k3 in the column "loss x token".

![what each estimator gives on average, relative to the exact value or gradient]({image})

Samples of the policy itself:

{tables["on"]}

Samples of an earlier policy mu, half-way back to the reference:

{tables["off"]}

- As numbers, k1 and k3 are unbiased and k2 is not. With the code's sign k1 estimates -KL and k3
  estimates chi2 - KL ({code_k3:.3f} where the KL is {exact[1]:.3f}).
- In the loss, k1 has no gradient on average, only noise, in either sign.
- In the loss, k2 has the exact gradient for one token. For three tokens it has not
  ({against(row_of("k2", "loss", 3))}): a loss per token leaves out what a token does
  to the KL of the tokens after it, so no entry in the loss is exact there.
- k3 in the loss has the gradient of the reverse, KL(pi_ref || pi), for one token
  ({against(row_of("k3", "loss", 1))}). Times the token ratio it has, on-policy, the
  gradient of k2 in each sample. The code's k3 has the gradient of chi2(pi || pi_ref) / 2
  for one token.
- In the reward, k1 is right at both lengths, and with the code's sign it is the exact opposite: it
  rewards drift. k3 there, in either sign, gives a difference of two gradients that cancel as the
  drift gets small; here the chapter's has {k3_rewards[0]:.2f} and {k3_rewards[1]:.2f} of the exact
  length. For other drifts k2 and k3 in the reward can point the wrong way.
- Off-policy without a ratio nothing is right, and here k1 in the loss pulls away from the
  reference. For one token the ratio repairs k1 and k3 as numbers and in the loss, and k1 in the
  reward. For three, only the ratio of the whole sequence does, as numbers and in the reward, with
  more noise; with the token ratio k1 in the reward has
  {against(row_of("k1", "reward", 3, "token", "off"))}.
"""
