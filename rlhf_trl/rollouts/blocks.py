"""The block `rollouts:` of configs, apart from what writes the record."""

from dataclasses import dataclass
from typing import Literal

from rlhf_trl.errors import setting


@dataclass
class Rollouts:
    """The `rollouts:` block."""

    every: int = setting("1: all generations of training; 10: every tenth", 1, range="1 or more")
    cap: float = setting("GB; there every other one goes", 1.0, range="a number above 0")


Record = Rollouts | Literal["off"]  # the field `rollouts`
