"""What an identity changes: the derivative of the book's loss on a window, taken apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class Terms:
    """The derivative of a loss in log-probabilities, taken apart.

    Of a `View` tensors have the shapes below. A `DistillationView` has derivatives in logits,
    (B, T, V), and token weights (B, 1, 1).
    """

    view: Any  # `View` or `DistillationView`
    surrogate: Tensor  # (B, T) the policy gradient's part
    kl: Tensor  # (B, T) the part of beta * KL
    token_weight: Tensor  # (B, 1) by what the aggregation multiplies a token's loss
    beta: float  # the weight of the KL


@dataclass
class PairTerms:
    """The derivative of a loss in what a model puts out: weights (R, S) per micro-batch."""

    view: Any  # `PairView`
    weights: list[Tensor]


@dataclass(frozen=True)
class Identity:
    """One change: the term of the equation that differs, and what to do, in words and symbols."""

    term: str
    says: str
    # changes a `Terms` or `PairTerms` in place; None where only arguments or temperature change
    apply: Callable[[Any], None] | None = None
    # returns other arguments for the left side's function, given the view and its own arguments
    arguments: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None
    # whether log-probabilities are taken at the trainer's temperature
    temperature: bool = False


def apply(steps: Sequence[Identity], terms: Terms | PairTerms) -> None:
    """Change the terms in place by those identities that change a derivative."""
    for step in steps:
        if step.apply:
            step.apply(terms)
