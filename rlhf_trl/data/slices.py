"""Slices of the prompts to train on, by a hash: two runs with other slices have none in common."""

import re
from typing import Any

from rlhf_trl.data.prompt_keys import prompt_hash
from rlhf_trl.errors import InputError

PARTS = 10_000  # of which a slice has some: percents with two decimals
PERCENT = r"(\d+(?:\.\d\d?)?)%"


class Slice:
    """The prompts of a `dataset.slice`, such as `:50%` or `25%:75%`."""

    def __init__(self, written: str):
        match = re.fullmatch(f"(?:{PERCENT})?:(?:{PERCENT})?", written)
        if match:
            low, high = match.groups()
            self._first = round(float(low or 0) * PARTS / 100)
            self._end = round(float(high or 100) * PARTS / 100)
        if not match or not 0 <= self._first < self._end <= PARTS:
            raise InputError(
                f"dataset.slice is {written!r}; write shares of the prompts, the smaller one "
                "first, such as ':50%', '50%:' or '25%:75%'."
            )

    def has(self, hashes: Any) -> Any:
        """Tell whether a prompt is in the slice by its hash, an integer; of an array, elementwise.

        The remainder does not depend on how large a hash is, by which files hold prompts out.
        """
        places = hashes % PARTS
        return (places >= self._first) & (places < self._end)

    def has_key(self, key: str) -> bool:
        """Tell whether the prompt with a key (see `prompt_key`) is in the slice."""
        return bool(self.has(int.from_bytes(prompt_hash(key), "little")))
