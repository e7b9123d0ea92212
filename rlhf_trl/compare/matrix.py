"""The matrix: every row on every batch, and the verdict that its numbers give."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare.identities import Identity, Terms, at_temperature
from rlhf_trl.compare.policy import PolicyBatch, PolicyWindow, View, build_trainer
from rlhf_trl.compare.rows import Book, Row, Stock

EQUAL, ZERO, RESIDUAL = 1e-5, 1e-8, 1e-5
"""Relative error up to which gradients are equal; norm of none; residual of an identity."""

Verdict = Literal["equal", "scaled", "differs", "both zero"]


@dataclass(frozen=True)
class Contribution:
    """What one identity does alone: |g_changed - g_left| / |g_left|."""

    term: str
    says: str
    relative_change: float


@dataclass(frozen=True)
class Result:
    """A row on a batch.

    Attributes:
        row: what was compared.
        batch: the name of the batch.
        loss_left: the left side's loss.
        loss_right: the right side's.
        grad_rel_error: |g_right - g_left| / |g_left|.
        grad_cosine: cosine of the angle between the gradients.
        grad_norm_ratio: |g_right| / |g_left|.
        verdict: what these numbers mean.
        contributions: what each identity does alone, where there is a difference.
        residual: relative error after all identities; None where there is no difference.
    """

    row: Row
    batch: str
    loss_left: float
    loss_right: float
    grad_rel_error: float
    grad_cosine: float
    grad_norm_ratio: float
    verdict: Verdict
    contributions: tuple[Contribution, ...] = ()
    residual: float | None = None

    @property
    def explained(self) -> bool:
        """Whether a difference, if there is one, is proved by the identities."""
        return self.residual is None or self.residual <= RESIDUAL


class Matrix:
    """Runs rows on batches; windows and sides are measured once each."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._windows: dict[str, PolicyWindow] = {}
        self._measured: dict[Any, tuple[float, Tensor]] = {}

    def run(self, rows: Iterable[Row], batches: Iterable[PolicyBatch]) -> list[Result]:
        """Measure rows on all batches that they are for.

        Args:
            rows: what to compare.
            batches: the windows.

        Returns:
            One result per row and batch, rows first.
        """
        batches = list(batches)
        return [self.compare(row, b) for row in rows for b in batches if applies(row, b)]

    def compare(self, row: Row, batch: PolicyBatch) -> Result:
        """Measure one row on one batch.

        Args:
            row: what to compare.
            batch: the window.
        """
        loss_left, left = self._side(row.left, batch)
        loss_right, right = self._side(row.right, batch)
        numbers = judge(left, right)
        contributions: tuple[Contribution, ...] = ()
        residual = None
        if numbers[-1] in ("scaled", "differs"):
            steps = list(row.identities)
            if batch.temperature != 1 and isinstance(row.right, Stock):
                steps.append(at_temperature())
            contributions = tuple(
                Contribution(s.term, s.says, _error(self._changed(row.left, batch, [s]), left))
                for s in steps
            )
            changed = self._changed(row.left, batch, steps)
            residual = float((right - changed).norm() / (right.norm() or left.norm()))
        return Result(
            row, batch.name, loss_left, loss_right, *numbers, contributions, residual
        )

    def window(self, batch: PolicyBatch) -> PolicyWindow:
        """Return the window of a batch, prepared."""
        if batch.name not in self._windows:
            self._windows[batch.name] = PolicyWindow(batch)
        return self._windows[batch.name]

    def _side(self, side: Book | Stock, batch: PolicyBatch) -> tuple[float, Tensor]:
        key = (repr(side), batch.name)
        if key not in self._measured:
            self._measured[key] = self._measure(side, batch)
        return self._measured[key]

    def _measure(self, side: Book | Stock, batch: PolicyBatch) -> tuple[float, Tensor]:
        window = self.window(batch)
        if isinstance(side, Book):
            view = window.view()
            given = view.arguments(side.algorithm, side.formulation, side.params)
            loss, weights = view.book(side.algorithm, side.formulation, given)
            return loss, view.gradient(weights)
        import trl

        fields = dict(side.config)
        if batch.beta:
            fields["beta"] = batch.beta
        if "reward_weights" in fields:
            fields["reward_weights"] = [w * batch.reward_scale for w in fields["reward_weights"]]
        trainer = getattr(trl, side.trainer)
        config = getattr(trl, side.trainer.replace("Trainer", "Config"))
        measured = window.stock(build_trainer(trainer, config, fields, batch))
        return measured.loss, measured.gradient

    def _changed(self, side: Book, batch: PolicyBatch, steps: list[Identity]) -> Tensor:
        """Return the side's gradient after the identities."""
        hot = any(step.temperature for step in steps)
        view = self.window(batch).view(batch.temperature if hot else 1.0)
        given = view.arguments(side.algorithm, side.formulation, side.params)
        for step in steps:
            given = step.arguments(view, given) if step.arguments else given
        _, weights = view.book(side.algorithm, side.formulation, given)
        beta = given.get("beta", 0.0) if "ref_logps" in given else 0.0
        norm = view.norm(_norm(side))
        kl = beta * norm * _slope(side, view, given) if beta else torch.zeros_like(weights)
        terms = Terms(view, weights - kl, kl, norm, beta)
        for step in steps:
            if step.apply:
                step.apply(terms)
        return view.gradient(terms.surrogate + terms.kl)


def judge(left: Tensor, right: Tensor) -> tuple[float, float, float, Verdict]:
    """Say what two gradients are to each other.

    Args:
        left: (N,) the left side's.
        right: (N,) the right side's.

    Returns:
        |right - left| / |left|, cosine, |right| / |left|, and the verdict. A cosine or ratio that a
        zero gradient leaves undefined is NaN.
    """
    size, other = float(left.norm()), float(right.norm())
    if size < ZERO and other < ZERO:
        return 0.0, math.nan, math.nan, "both zero"
    if size < ZERO or other < ZERO:
        return math.inf if size < ZERO else 1.0, math.nan, math.nan, "differs"
    error, dot = _error(right, left), float(left @ right)
    factor = dot / size**2
    verdict: Verdict = "differs"
    if error <= EQUAL:
        verdict = "equal"
    elif _error(right, factor * left) <= EQUAL:
        verdict = "scaled"
    return error, dot / size / other, other / size, verdict


def applies(row: Row, batch: PolicyBatch) -> bool:
    """Whether a row has something to say about a batch."""
    books = [side for side in (row.left, row.right) if isinstance(side, Book)]
    if row.batches:
        return batch.name in row.batches
    if batch.temperature != 1 and len(books) == 2:
        return False  # the book never divides logits
    reads = [formulation(b.algorithm, b.formulation).reads for b in books]
    return not batch.beta or all("beta" in names for names in reads)


def _error(found: Tensor, reference: Tensor) -> float:
    size = float(reference.norm())
    return float((found - reference).norm()) / size if size else math.inf


def _norm(side: Book) -> str:
    row = formulation(side.algorithm, side.formulation)
    micro = row.aggregation == "token_mean" and row.window == "micro_batch"
    return "token_mean_micro_batch" if micro else str(row.aggregation)


def _slope(side: Book, view: View, given: Mapping[str, Any]) -> Tensor:
    """Return d k / d logps of the side's estimator in the loss, (B, T); 0 if it is elsewhere."""
    row = formulation(side.algorithm, side.formulation)
    if row.kl != "loss":
        return torch.zeros_like(view.mask)
    log_ratio = view.logps - view.ref_logps
    slopes = {
        ("chapter", "k1"): torch.ones_like(log_ratio),
        ("chapter", "k2"): log_ratio,
        ("chapter", "k3"): -torch.expm1(-log_ratio),
        ("code", "k1"): -torch.ones_like(log_ratio),
        ("code", "k2"): log_ratio,
        ("code", "k3"): torch.expm1(log_ratio),
    }
    estimator = given.get("kl_estimator", row.reads.get("kl_estimator", "k3"))
    return slopes[row.kl_sign, estimator] * view.mask
