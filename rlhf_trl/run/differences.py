"""What differs between two configs: the one answer for resuming, comparing and racing."""

from collections.abc import Mapping
from typing import Any

UNSET = "unset"
"""Stands for the value of a key that a config does not have."""


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], block: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return (value before, value now) of every key whose values differ, sorted by key.

    Keys of blocks are dotted (`dataset.size`); lists are compared whole, and a key that one side
    lacks has the value `UNSET` there. `block` is what stands before each key, with its dot.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key, UNSET), now.get(key, UNSET)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changed |= differences(old, new, f"{block}{key}.")
        elif old != new:
            changed[block + key] = (old, new)
    return changed
