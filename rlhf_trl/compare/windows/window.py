"""What the windows of all families have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_trl.compare.measure import Book, Measured, Stock
from rlhf_trl.compare.windows.batches import PolicyBatch
from rlhf_trl.compare.windows.terms import Identity


class Window(ABC):
    """What one optimizer step sees: the same texts for a trainer and for the book's functions."""

    batch: PolicyBatch

    @abstractmethod
    def build(self, side: Stock) -> Any:
        """Build the trainer of a stock side, its data and completions fixed."""

    @abstractmethod
    def measured(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build` built.

        Args:
            trainer: the trainer.
            double: compute in float64; only for trainers of pairs that can, `offline.DOUBLE`.

        Raises:
            InputError: its loss saw other texts than the book's side.
        """

    @abstractmethod
    def book(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss, and its gradient in the parameters, (N,)."""

    @abstractmethod
    def changed(self, side: Book, steps: Sequence[Identity]) -> Tensor:
        """Return the book's gradient in the parameters, (N,), after identities, in their order."""

    def stock(self, side: Stock, double: bool = False) -> tuple[float, Tensor]:
        """Return a stock side's loss and gradient, (N,)."""
        measured = self.measured(self.build(side), double)
        return measured.loss, measured.gradient
