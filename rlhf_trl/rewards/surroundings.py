"""What a reward function has to leave as it is: settings of the process, and random states."""

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

BLOCK = 624  # numbers that a Mersenne Twister makes at once
# How many blocks after a state are searched, in portions of growing size: 600 million numbers.
PORTIONS = (10, *[1000] * 1000)

State = tuple[np.ndarray, int]
"""A Mersenne Twister's block of numbers, and how many of them are drawn."""


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None


# {what an error calls a setting: (how to read it, how to restore it)}
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the current folder": (_current_folder, os.chdir),
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, torch.set_default_device),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
}


def _torch_state() -> State:
    # The bytes: seed (8), numbers left in the block (4), whether it is seeded (4), the place (8),
    # then the block, with 8 bytes for each number.
    bytes_ = torch.get_rng_state().numpy()
    block = bytes_[24 : 24 + 8 * BLOCK].view(np.uint64).astype(np.uint32)
    return block, BLOCK + 1 - int(bytes_[8:12].view(np.int32)[0])


def _python_state() -> State:
    *block, drawn = random.getstate()[1]
    return np.array(block, np.uint32), drawn


def _numpy_state() -> State:
    state = np.random.get_state(legacy=False)["state"]
    return state["key"], state["pos"]


GENERATORS = {"torch": _torch_state, "random": _python_state, "numpy.random": _numpy_state}


class Surroundings:
    """Settings and random states of this process as they are now."""

    def __init__(self) -> None:
        self._settings = {name: read() for name, (read, _) in SETTINGS.items()}
        self._states = {name: read() for name, read in GENERATORS.items()}

    def restore(self) -> tuple[str, ...]:
        """Restore the settings that have changed since; return their names."""
        changed = []
        for name, (read, restore) in SETTINGS.items():
            if read() != self._settings[name]:
                changed.append(name)
                restore(self._settings[name])
        return tuple(changed)

    def seeded(self) -> list[str]:
        """Return the generators that have been seeded or set back since; drawing is allowed."""
        return [
            name
            for name, read in GENERATORS.items()
            if not is_drawn_from(self._states[name], read())
        ]


def is_drawn_from(before: State, after: State) -> bool:
    """Return whether drawing numbers leads a Mersenne Twister from one state to another."""
    (block, drawn), (later_block, later_drawn) = before, after
    # no new block was made: a seed may have set the place in it back
    if np.array_equal(block, later_block):
        return later_drawn >= drawn
    # search for the later block's numbers among those of the blocks that follow `block`
    later_numbers = _twister(later_block, drawn=0).random_raw(BLOCK)
    twister = _twister(block, drawn=BLOCK)  # at the end of its block
    for portion in PORTIONS:
        numbers = twister.random_raw(portion * BLOCK).reshape(portion, BLOCK)
        if (numbers == later_numbers).all(axis=1).any():
            return True
    return False


def _twister(block: np.ndarray, drawn: int) -> np.random.MT19937:
    """Return a generator in this state."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": block, "pos": drawn}}
    return twister
