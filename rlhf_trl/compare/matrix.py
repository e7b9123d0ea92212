"""The matrix: every row on every batch, and the verdict that its numbers give."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from traceback import extract_tb
from typing import Any, Literal

from torch import Tensor
from tqdm import tqdm

from rlhf_trl.compare.identities import AT_TEMPERATURE
from rlhf_trl.compare.measure import Book, Stock, sentence
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.rows import Row
from rlhf_trl.compare.trainers import DISTILLING, OURS, POLICY
from rlhf_trl.compare.windows.batches import OFFLINE_BATCHES, PolicyBatch
from rlhf_trl.compare.windows.distillation import DistillationWindow, GeneratedWindow
from rlhf_trl.compare.windows.offline import DOUBLE, PairWindow
from rlhf_trl.compare.windows.pair_examples import made_kind
from rlhf_trl.compare.windows.policy import PolicyWindow
from rlhf_trl.compare.windows.terms import Identity
from rlhf_trl.compare.windows.window import Window
from rlhf_trl.errors import InputError

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
            is_ours = isinstance(row.right, Stock) and row.right.trainer in OURS
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
                alone = _error(window.changed(row.left, [step]), left)
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
            window: Window
            if kind in POLICY:
                window = PolicyWindow(batch)
            elif kind == GENERATED:
                generated = self.window("GRPOTrainer", (), batch)
                window = GeneratedWindow(generated)
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
            self._measured[key] = window.book(side) if is_book else window.stock(side, double)
        return self._measured[key]


GENERATED = "BookDistillationTrainer"
"""The kind of window of our trainer of distillation."""


def kind_of(row: Row) -> tuple[str, tuple[str, ...]]:
    """Return the kind of window that a row needs, and further columns of its data.

    The kind is the name of a trainer, or one of `pair_examples.MADE`.
    """
    if isinstance(row.right, Stock):
        return kind_of_stock(row.right), row.right.columns
    kind = "orm" if row.algorithm == "orm" else row.left.row.trainer
    return kind, ()


def kind_of_stock(side: Stock) -> str:
    """Return the kind of window that a stock side needs: a trainer's name, or one of MADE."""
    ours = ("BookGRPOTrainer", "BookRLOOTrainer", "BookPPOTrainer")
    if side.trainer in (*POLICY, *ours):  # all of these answer the prompts of a GRPOTrainer
        return "GRPOTrainer"
    if side.trainer == "BookORPOTrainer" and side.trainer_arguments.get("formulation") == "trl":
        return "ORPOTrainer"  # in this formulation ours tokenizes as TRL's does
    return made_kind(side.trainer_arguments) or side.trainer


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
    after_steps = window.changed(side, steps) if steps else left
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
    if kind not in (*POLICY, GENERATED):
        return batch.name in OFFLINE_BATCHES
    books = [side for side in (row.left, row.right) if isinstance(side, Book)]
    if batch.temperature != 1 and len(books) == 2:
        return False  # the book never divides logits
    return not batch.beta or all("beta" in side.row.reads for side in books)


def _error(gradient: Tensor, reference: Tensor) -> float:
    """Return |gradient - reference| / |reference|, infinite where the reference is 0."""
    size = float(reference.norm())
    return float((gradient - reference).norm()) / size if size else math.inf
