"""How often the better answer gets the higher reward."""

from typing import Any


def pair_accuracy(chosen: Any, rejected: Any) -> float:
    """Return the share of N pairs whose chosen reward is the higher one; a tie counts half.

    `chosen` and `rejected` are the rewards (N,), arrays or tensors.
    """
    return float(((chosen > rejected) + (chosen == rejected) / 2).mean())
