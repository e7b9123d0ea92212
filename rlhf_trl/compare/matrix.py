"""The matrix: every row on every batch, and the verdict that its numbers give."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from rlhf_trl.compare import distillation, pairs
from rlhf_trl.compare.distillation import DistillationWindow
from rlhf_trl.compare.identities import AT_TEMPERATURE, Identity, PairTerms, Terms
from rlhf_trl.compare.measure import DISTILLING, Book, Stock, sentence
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.pairs import DOUBLE, PairWindow
from rlhf_trl.compare.policy import PolicyBatch, PolicyWindow, View, build_trainer
from rlhf_trl.compare.rows import Row
from rlhf_trl.errors import InputError
from rlhf_trl.losses.policy_gradients import kl_estimate

EQUAL = 1e-5  # relative error up to which two gradients are equal
ZERO = 1e-8  # norm below which a gradient is zero
RESIDUAL = 1e-5  # relative error up to which identities explain a difference

Verdict = Literal["equal", "scaled", "differs", "both zero", "cannot run", "not on this TRL"]


@dataclass(frozen=True)
class Contribution:
    """What one identity does alone: |g_changed - g_left| / |g_left|."""

    term: str
    says: str
    relative_change: float


@dataclass(frozen=True)
class Result:
    """A row on a batch."""

    row: Row
    batch: str
    loss_left: float
    loss_right: float
    # |g_right - g_left| / |g_left|; the left side is in float64, TRL in float32
    grad_rel_error: float
    grad_rel_error_float64: float | None  # the same with both in float64, where TRL computes in it
    grad_cosine: float  # of the angle between the gradients
    grad_norm_ratio: float  # |g_right| / |g_left|
    verdict: Verdict
    # what each identity does alone, where there is a difference
    contributions: tuple[Contribution, ...] = ()
    # relative error after all identities; None where neither gradients nor identities differ
    residual: float | None = None
    why: str = ""  # why it cannot run

    @property
    def explained(self) -> bool:
        """Whether a difference, if there is one, is proved by the identities."""
        return self.residual is None or self.residual <= RESIDUAL

    @property
    def agrees(self) -> bool:
        """Whether the two sides take the same step."""
        return self.verdict in ("equal", "both zero")


Measurement = tuple[float, Tensor]
Window = PolicyWindow | PairWindow | DistillationWindow


class Matrix:
    """Runs rows on batches; windows and sides are measured once each."""

    def __init__(self) -> None:
        """Start with nothing measured."""
        self._windows: dict[Any, Window] = {}
        self._measured: dict[Any, Measurement] = {}

    def run(self, rows: Iterable[Row], batches: Iterable[PolicyBatch]) -> list[Result]:
        """Return one result per row and batch that it is for, rows first."""
        rows, batches = list(rows), list(batches)
        results: dict[tuple[int, int], Result] = {}  # by the numbers of row and batch
        count = sum(applies(row, batch) for batch in batches for row in rows)
        progress = tqdm(total=count, desc="compare", disable=None)  # on a terminal only
        with quick_and_quiet(), progress as bar:
            for batch_number, batch in enumerate(batches):
                for row_number, row in enumerate(rows):
                    if applies(row, batch):
                        results[row_number, batch_number] = self._tried(row, batch)
                        bar.update()
                self._windows.clear()  # the gradients of a batch fill hundreds of MB
                self._measured.clear()
        return [results[numbers] for numbers in sorted(results)]

    def _tried(self, row: Row, batch: PolicyBatch) -> Result:
        """Measure one row on one batch; what another release of TRL breaks becomes the verdict.

        "not on this TRL": the release lacks something that is imported, or our trainer, which is
        written for the recorded release, does not run on it. "cannot run": any other fault.
        """
        try:
            return self.compare(row, batch)
        except InputError:
            raise
        except Exception as error:  # whatever another release breaks
            is_ours = isinstance(row.right, Stock) and row.right.trainer in pairs.OURS
            is_missing = is_ours or isinstance(error, ImportError)
            return Result(
                row=row,
                batch=batch.name,
                loss_left=math.nan,
                loss_right=math.nan,
                grad_rel_error=math.nan,
                grad_rel_error_float64=None,
                grad_cosine=math.nan,
                grad_norm_ratio=math.nan,
                verdict="not on this TRL" if is_missing else "cannot run",
                # the last frame's line is the statement that raised
                why=f"{sentence(error)} at {extract_tb(error.__traceback__)[-1].line}",
            )

    def compare(self, row: Row, batch: PolicyBatch) -> Result:
        """Measure both sides of a row on a batch, and try its identities on the left gradient.

        Identities explain differences. Where the sides are equal, the row's identities must change
        nothing on this batch. If they do, the result has a residual, which shows that they claim a
        difference that is not there.
        """
        kind, columns = kind_of(row)
        window = self.window(kind, columns, batch)
        loss_left, left = self.side(row.left, window)
        loss_right, right = self.side(row.right, window)
        error, cosine, ratio, verdict = judge(left, right)
        error_in_float64 = None
        if isinstance(row.right, Stock) and row.right.trainer in DOUBLE:
            _, right_in_float64 = self.side(row.right, window, double=True)
            error_in_float64, *_ = judge(left, right_in_float64)
        steps = list(row.identities)
        # TRL divides logits by the temperature, the book never does
        if batch.temperature != 1 and isinstance(row.right, Stock):
            steps.append(AT_TEMPERATURE)
        residual = None
        if verdict in ("scaled", "differs"):
            residual = _residual(row.left, window, steps, left, right)
        elif verdict == "equal" and steps:
            after_steps = _residual(row.left, window, steps, left, right)
            residual = None if after_steps <= RESIDUAL else after_steps
        contributions = []
        if residual is not None:
            for step in steps:
                alone = _error(changed(row.left, window, [step]), left)
                contributions.append(Contribution(step.term, step.says, alone))
        return Result(
            row=row,
            batch=batch.name,
            loss_left=loss_left,
            loss_right=loss_right,
            grad_rel_error=error,
            grad_rel_error_float64=error_in_float64,
            grad_cosine=cosine,
            grad_norm_ratio=ratio,
            verdict=verdict,
            contributions=tuple(contributions),
            residual=residual,
        )

    def window(self, kind: str, columns: tuple[str, ...], batch: PolicyBatch) -> Window:
        """Return a window, prepared; kind and columns are what `kind_of` returns of a row."""
        key = (kind, columns, batch)
        if key not in self._windows:
            if kind in POLICY:
                window = PolicyWindow(batch)
            elif kind in DISTILLING:
                window = DistillationWindow(batch)
            else:
                window = PairWindow(kind, batch, columns)
            self._windows[key] = window
        return self._windows[key]

    def side(self, side: Book | Stock, window: Window, double: bool = False) -> Measurement:
        """Return loss and gradient of a side on a window."""
        key = (repr(side), id(window), double)
        if key not in self._measured:
            is_book = isinstance(side, Book)
            self._measured[key] = book(side, window) if is_book else stock(side, window, double)
        return self._measured[key]


POLICY = ("GRPOTrainer", "RLOOTrainer")
"""The stock trainers that generate."""


def kind_of(row: Row) -> tuple[str, tuple[str, ...]]:
    """Return the kind of window that a row needs, and further columns of its data.

    The kind is the name of a trainer, or one of `pairs.MADE`.
    """
    if isinstance(row.right, Stock):
        return kind_of_stock(row.right), row.right.columns
    kind = "orm" if row.algorithm == "orm" else row.left.row.trainer
    return kind, ()


def kind_of_stock(side: Stock) -> str:
    """Return the kind of window that a stock side needs: a trainer's name, or one of MADE."""
    ours = ("BookGRPOTrainer", "BookRLOOTrainer", "BookPPOTrainer", "BookDistillationTrainer")
    if side.trainer in (*POLICY, *ours):  # all of these answer the prompts of a GRPOTrainer
        return "GRPOTrainer"
    if side.trainer == "BookORPOTrainer" and side.trainer_arguments.get("formulation") == "trl":
        return "ORPOTrainer"  # in this formulation ours tokenizes as TRL's does
    return pairs.made_kind(side.trainer_arguments) or side.trainer


def book(side: Book, window: Window) -> Measurement:
    """Compute the book's loss and gradient on a window."""
    is_online = isinstance(window, PolicyWindow)
    if is_online and side.row.family != "distillation":
        view = window.view()
        loss, slopes = view.book(side, view.arguments(side))
    elif is_online:
        view = distillation.of_policy(window, side)
        loss, slopes = view.book(side)
    else:
        view = window.view
        loss, slopes = view.book(side)
    # by the chain rule: `slopes` are the loss's derivatives in what the model puts out
    return loss, view.gradient(slopes)


def stock(side: Stock, window: Window, double: bool = False) -> Measurement:
    """Compute a stock side's loss and gradient on a window.

    `double` computes in float64, for those trainers of pairs that can, `pairs.DOUBLE`.
    """
    trainer = built(side, window)
    if isinstance(window, PairWindow):
        measured = window.stock(trainer, double)
    else:
        measured = window.stock(trainer)
    return measured.loss, measured.gradient


def built(side: Stock, window: Window) -> Any:
    """Build the trainer of a stock side for a window."""
    trainer_class, config = side.classes or pairs.trainer_classes(side.trainer)
    fields = dict(side.config)
    batch = window.batch
    arguments = side.trainer_arguments
    if isinstance(window, PairWindow):
        return pairs.build_trainer(trainer_class, config, fields, batch, side.columns, **arguments)
    if isinstance(window, DistillationWindow):
        return distillation.build_trainer(trainer_class, config, fields, batch, **arguments)
    # A side's fields override those of the window. The two that a batch may be about, the KL and
    # the scale of the rewards, must be the batch's all the same: they are set here.
    if batch.beta:
        fields["beta"] = batch.beta
    if "reward_weights" in fields:
        weights = fields["reward_weights"]
        fields["reward_weights"] = [weight * batch.reward_scale for weight in weights]
    return build_trainer(trainer_class, config, fields, batch, **arguments)


def changed(side: Book, window: Window, steps: list[Identity]) -> Tensor:
    """Return the book's gradient in the parameters, (N,), after identities, in their order."""
    if isinstance(window, PairWindow):
        _, weights = window.view.book(side)
        pair_terms = PairTerms(window.view, weights)
        _apply(steps, pair_terms)
        return window.view.gradient(pair_terms.weights)
    if isinstance(window, DistillationWindow):
        return _changed_distillation(side, window, steps)
    return _changed_policy(side, window, steps)


def _apply(steps: list[Identity], terms: Terms | PairTerms) -> None:
    """Change the terms in place by those identities that change a derivative."""
    for step in steps:
        if step.apply:
            step.apply(terms)


def _changed_distillation(side: Book, window: DistillationWindow, steps: list[Identity]) -> Tensor:
    """Return the gradient after identities; a divergence is all surrogate, without a KL term."""
    view = window.view
    _, weights = view.book(side)
    token_weight = view.token_weight(side.row.aggregation)
    terms = Terms(view, surrogate=weights, kl=0 * weights, token_weight=token_weight, beta=0.0)
    _apply(steps, terms)
    return view.gradient(terms.surrogate)


def _changed_policy(side: Book, window: PolicyWindow, steps: list[Identity]) -> Tensor:
    """Return the gradient after identities, which may change the temperature and arguments, too."""
    at_temperature = any(step.temperature for step in steps)
    view = window.view(window.batch.temperature if at_temperature else 1.0)
    arguments = view.arguments(side)
    for step in steps:
        if step.arguments:
            arguments = step.arguments(view, arguments)
    _, weights = view.book(side, arguments)
    terms = _apart(side, view, arguments, weights)
    _apply(steps, terms)
    return view.gradient(terms.surrogate + terms.kl)


def _apart(side: Book, view: View, arguments: dict[str, Any], weights: Tensor) -> Terms:
    """Take the derivative of a loss apart: the policy gradient's part, and that of beta * KL.

    Args:
        side: the row, its formulation and parameters.
        view: the window.
        arguments: of the book's function.
        weights: (B, T) d loss / d logps.
    """
    row = side.row
    beta = arguments.get("beta", 0.0) if "ref_logps" in arguments else 0.0
    aggregation = row.aggregation
    if aggregation == "token_mean" and row.window == "micro_batch":
        aggregation = "token_mean_micro_batch"
    token_weight = view.token_weight(aggregation)
    kl = torch.zeros_like(weights)
    if beta and row.kl == "loss":
        logps = view.logps.clone().requires_grad_()
        params = {**row.reads, **arguments}
        estimate = kl_estimate(row, params, logps, view.ref_logps, view.mask)
        (slope,) = torch.autograd.grad(estimate.sum(), logps)
        kl = beta * token_weight * slope
    return Terms(view, surrogate=weights - kl, kl=kl, token_weight=token_weight, beta=beta)


def judge(left: Tensor, right: Tensor) -> tuple[float, float, float, Verdict]:
    """Compare two gradients, (N,) each.

    Returns:
        |right - left| / |left|, cosine, |right| / |left|, and the verdict. Where either gradient is
        zero or not finite, cosine and ratio are NaN.
    """
    left_norm, right_norm = float(left.norm()), float(right.norm())
    if not math.isfinite(left_norm * right_norm):  # NaN or infinite on either side
        return math.inf, math.nan, math.nan, "differs"
    if left_norm < ZERO and right_norm < ZERO:
        return 0.0, math.nan, math.nan, "both zero"
    if left_norm < ZERO:
        return math.inf, math.nan, math.nan, "differs"
    if right_norm < ZERO:
        return 1.0, math.nan, math.nan, "differs"
    error = _error(right, left)
    dot = float(left @ right)
    factor = (
        dot / left_norm**2
    )  # factor * left is as close to the right gradient as a multiple gets
    verdict: Verdict = "differs"
    if error <= EQUAL:
        verdict = "equal"
    elif factor > 0 and _error(right, factor * left) <= EQUAL:
        verdict = "scaled"
    return error, dot / left_norm / right_norm, right_norm / left_norm, verdict


def _residual(
    side: Book, window: Window, steps: list[Identity], left: Tensor, right: Tensor
) -> float:
    """Return the relative error that is left between two gradients, (N,), after all identities.

    Args:
        side: the left side, whose gradient the identities change.
        window: on which both are measured.
        steps: the identities.
        left: the left gradient without them.
        right: the right gradient.
    """
    after_steps = changed(side, window, steps) if steps else left
    return float((right - after_steps).norm() / (right.norm() or left.norm()))


def applies(row: Row, batch: PolicyBatch) -> bool:
    """Return whether a row has something to say about a batch."""
    only_for_rows_about_it = batch.reward is not None or batch.sampler or batch.max_length
    if row.batches or only_for_rows_about_it:
        return batch.name in row.batches
    is_rloo = isinstance(row.right, Stock) and row.right.trainer == "RLOOTrainer"
    if is_rloo and batch.name in ("tools", "extreme"):
        return False  # it knows no tools, and float32 rounds the product of 40 ratios
    kind, _ = kind_of(row)
    if kind not in POLICY:
        return batch.name in pairs.BATCHES
    books = [side for side in (row.left, row.right) if isinstance(side, Book)]
    if batch.temperature != 1 and len(books) == 2:
        return False  # the book never divides logits
    return not batch.beta or all("beta" in side.row.reads for side in books)


def _error(gradient: Tensor, reference: Tensor) -> float:
    """Return |gradient - reference| / |reference|, infinite where the reference is 0."""
    size = float(reference.norm())
    return float((gradient - reference).norm()) / size if size else math.inf
