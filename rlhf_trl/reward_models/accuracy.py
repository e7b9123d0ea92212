"""How often the better answer gets the higher reward."""

from typing import Any


def pair_accuracy(chosen: Any, rejected: Any) -> float:
    """Return the share of the N pairs of rewards (N,) whose chosen is higher; a tie is half one.

    They are arrays or tensors.
    """
    return float(((chosen > rejected) + (chosen == rejected) / 2).mean())
