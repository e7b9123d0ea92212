"""The matrix: every row on every batch, and the verdict that its numbers give."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare import pairs
from rlhf_trl.compare.identities import Identity, PairTerms, Terms, at_temperature
from rlhf_trl.compare.models import quiet
from rlhf_trl.compare.pairs import DOUBLE, TOKENS, PairWindow
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
        grad_rel_error: |g_right - g_left| / |g_left|; the left side is in float64, TRL in float32.
        grad_rel_error_float64: the same with both in float64, where TRL computes in it.
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
    grad_rel_error_float64: float | None
    grad_cosine: float
    grad_norm_ratio: float
    verdict: Verdict
    contributions: tuple[Contribution, ...] = ()
    residual: float | None = None

    @property
    def explained(self) -> bool:
        """Whether a difference, if there is one, is proved by the identities."""
        return self.residual is None or self.residual <= RESIDUAL

    @property
    def agrees(self) -> bool:
        """Whether the two sides take the same step."""
        return self.verdict in ("equal", "both zero")


Measurement = tuple[float, Tensor]


class Matrix:
    """Runs rows on batches; windows and sides are measured once each."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._windows: dict[Any, PolicyWindow | PairWindow] = {}
        self._measured: dict[Any, Measurement] = {}

    def run(self, rows: Iterable[Row], batches: Iterable[PolicyBatch]) -> list[Result]:
        """Return one result per row and batch that it is for, rows first."""
        batches = list(batches)
        with quiet():
            return [self.compare(row, b) for row in rows for b in batches if applies(row, b)]

    def compare(self, row: Row, batch: PolicyBatch) -> Result:
        """Measure one row on one batch."""
        window = self.window(row, batch)
        loss_left, left = self._side(row.left, window)
        loss_right, right = self._side(row.right, window)
        error, cosine, ratio, verdict = judge(left, right)
        exact = None
        if isinstance(row.right, Stock) and row.right.trainer in DOUBLE:
            exact = judge(left, self._side(row.right, window, double=True)[1])[0]
        contributions: tuple[Contribution, ...] = ()
        residual = None
        if verdict in ("scaled", "differs"):
            steps = list(row.identities)
            if batch.temperature != 1 and isinstance(row.right, Stock):
                steps.append(at_temperature())
            contributions = tuple(
                Contribution(s.term, s.says, _error(changed(row.left, window, [s]), left))
                for s in steps
            )
            found = changed(row.left, window, steps) if steps else left
            residual = float((right - found).norm() / (right.norm() or left.norm()))
        losses, numbers = (loss_left, loss_right), (error, exact, cosine, ratio)
        return Result(row, batch.name, *losses, *numbers, verdict, contributions, residual)

    def window(self, row: Row, batch: PolicyBatch) -> PolicyWindow | PairWindow:
        """Return the window of a row on a batch, prepared."""
        kind, columns = kind_of(row)
        key = (kind, columns, batch)
        if key not in self._windows:
            policy = kind in POLICY
            self._windows[key] = PolicyWindow(batch) if policy else PairWindow(kind, batch, columns)
        return self._windows[key]

    def _side(
        self, side: Book | Stock, window: PolicyWindow | PairWindow, double: bool = False
    ) -> Measurement:
        key = (repr(side), id(window), double)
        if key not in self._measured:
            ours = isinstance(side, Book)
            self._measured[key] = book(side, window) if ours else stock(side, window, double)
        return self._measured[key]


POLICY = ("GRPOTrainer", "RLOOTrainer")
"""The stock trainers that generate."""


def kind_of(row: Row) -> tuple[str, tuple[str, ...]]:
    """Return whose window a row needs: a trainer's name, and further columns of its data."""
    if isinstance(row.right, Stock):
        name = "GRPOTrainer" if row.right.trainer in POLICY else row.right.trainer
        return name, row.right.columns
    return (TOKENS if row.algorithm == "orm" else formulation(*_name(row.left)).trainer), ()


def _name(side: Book) -> tuple[str, str]:
    return side.algorithm, side.formulation


def book(side: Book, window: PolicyWindow | PairWindow) -> Measurement:
    """Compute the book's loss and gradient on a window."""
    if isinstance(window, PairWindow):
        loss, weights = window.view.book(*_name(side), side.params)
        return loss, window.view.gradient(weights)
    view = window.view()
    loss, slopes = view.book(*_name(side), view.arguments(*_name(side), side.params))
    return loss, view.gradient(slopes)


def stock(side: Stock, window: PolicyWindow | PairWindow, double: bool = False) -> Measurement:
    """Build TRL's trainer for a window and measure it; `double` computes in float64."""
    classes = side.classes or pairs.trainer_classes(side.trainer)
    fields, batch = dict(side.config), window.batch
    if isinstance(window, PairWindow):
        trainer = pairs.build_trainer(*classes, fields, batch, side.columns, **side.also)
        measured = window.stock(trainer, double)
    else:
        if batch.beta:
            fields["beta"] = batch.beta
        if "reward_weights" in fields:
            fields["reward_weights"] = [w * batch.reward_scale for w in fields["reward_weights"]]
        measured = window.stock(build_trainer(*classes, fields, batch, **side.also))
    return measured.loss, measured.gradient


def changed(side: Book, window: PolicyWindow | PairWindow, steps: list[Identity]) -> Tensor:
    """Return the book's gradient after identities, in their order."""
    if isinstance(window, PairWindow):
        pair_terms = PairTerms(window.view, window.view.book(*_name(side), side.params)[1])
        for step in steps:
            if step.apply:
                step.apply(pair_terms)
        return window.view.gradient(pair_terms.weights)
    hot = any(step.temperature for step in steps)
    view = window.view(window.batch.temperature if hot else 1.0)
    given = view.arguments(*_name(side), side.params)
    for step in steps:
        given = step.arguments(view, given) if step.arguments else given
    _, weights = view.book(*_name(side), given)
    beta = given.get("beta", 0.0) if "ref_logps" in given else 0.0
    norm = view.norm(_norm(side))
    kl = beta * norm * _slope(side, view, given) if beta else torch.zeros_like(weights)
    terms = Terms(view, weights - kl, kl, norm, beta)
    for step in steps:
        if step.apply:
            step.apply(terms)
    return view.gradient(terms.surrogate + terms.kl)


def judge(left: Tensor, right: Tensor) -> tuple[float, float, float, Verdict]:
    """Say what two gradients, (N,) each, are to each other.

    Returns:
        |right - left| / |left|, cosine, |right| / |left|, and the verdict. A cosine or ratio that a
        zero gradient leaves undefined is NaN.
    """
    size, other = float(left.norm()), float(right.norm())
    if not math.isfinite(size * other):
        return math.inf, math.nan, math.nan, "differs"
    if size < ZERO and other < ZERO:
        return 0.0, math.nan, math.nan, "both zero"
    if size < ZERO or other < ZERO:
        return math.inf if size < ZERO else 1.0, math.nan, math.nan, "differs"
    error, dot = _error(right, left), float(left @ right)
    factor = dot / size**2
    verdict: Verdict = "differs"
    if error <= EQUAL:
        verdict = "equal"
    elif factor > 0 and _error(right, factor * left) <= EQUAL:
        verdict = "scaled"
    return error, dot / size / other, other / size, verdict


def applies(row: Row, batch: PolicyBatch) -> bool:
    """Whether a row has something to say about a batch."""
    if row.batches or batch.reward is not None:
        return batch.name in row.batches
    if kind_of(row)[0] not in POLICY:
        return batch.name in pairs.BATCHES
    books = [side for side in (row.left, row.right) if isinstance(side, Book)]
    if batch.temperature != 1 and len(books) == 2:
        return False  # the book never divides logits
    return not batch.beta or all("beta" in formulation(*_name(b)).reads for b in books)


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
