"""Rejection sampling: which of the answers to M prompts, N to each, are trained on.

Rewards are (M, N), a tensor or rows of numbers; a selection is a list of (prompt, answer) places in
them. The `random_*` functions are the matched controls, chapter 9's baselines beside the two
selections, with the draws of the book's code: as many pairs, whatever the rewards.

With rewards of 0 and 1 most answers tie. `ties="random"` chooses among equals by the `seed`;
"first" is the book's code, whose top k are then the first right answers in the order of the data.
"""

import math
import random
from collections.abc import Sequence

from torch import Tensor

from rlhf_trl.errors import InputError

Rewards = Tensor | Sequence[Sequence[float]]
Pairs = list[tuple[int, int]]


def top_per_prompt(rewards: Rewards, seed: int = 0, ties: str = "random") -> Pairs:
    """Take the best answer to each prompt.

    S(R) = (argmax_j r_{1,j}, ..., argmax_j r_{M,j})

    Source: chapter 9, eq:rs_selection_per_prompt.

    Returns M pairs, in the order of the prompts.
    """
    rows, rng = _rows(rewards, "top_per_prompt", ties), random.Random(seed)
    best = [[j for j, reward in enumerate(row) if reward == max(row)] for row in rows]
    return [(i, js[0] if ties == "first" else rng.choice(js)) for i, js in enumerate(best)]


def top_k_overall(rewards: Rewards, k: int, seed: int = 0, ties: str = "random") -> Pairs:
    """Take the best answers of all, however many to the same prompt.

    S_K(R) = the K largest of r_{1,1}, ..., r_{M,N}

    Source: chapter 9, eq:rs_topk_selection.

    Returns min(K, M * N) pairs, the best first.
    """
    rows = _rows(rewards, "top_k_overall", ties, k)
    pairs = _pairs(rows)
    if ties == "random":
        random.Random(seed).shuffle(pairs)
    return sorted(pairs, key=lambda pair: rows[pair[0]][pair[1]], reverse=True)[:k]


def random_per_prompt(rewards: Rewards, seed: int = 0) -> Pairs:
    """Take any answer to each prompt: the control of `top_per_prompt`."""
    rows, rng = _rows(rewards, "random_per_prompt"), random.Random(seed)
    return [(i, rng.randrange(len(row))) for i, row in enumerate(rows)]


def random_k_overall(rewards: Rewards, k: int, seed: int = 0) -> Pairs:
    """Take any answers of all: the control of `top_k_overall`."""
    pairs = _pairs(_rows(rewards, "random_k_overall", k=k))
    return random.Random(seed).sample(pairs, min(k, len(pairs)))


STRATEGIES = {f.__name__: f for f in (top_per_prompt, top_k_overall)}
STRATEGIES |= {f.__name__: f for f in (random_per_prompt, random_k_overall)}


def _rows(rewards: Rewards, name: str, ties: str = "first", k: int = 1) -> list[list[float]]:
    rows = rewards.tolist() if isinstance(rewards, Tensor) else [list(row) for row in rewards]
    if not rows or not all(isinstance(row, list) for row in rows) or len({*map(len, rows)}) != 1:
        raise InputError(f"{name}: rewards must have shape (M, N), as many answers to each prompt")
    if not rows[0] or not all(math.isfinite(reward) for row in rows for reward in row):
        raise InputError(f"{name}: rewards must be finite numbers, at least one for each prompt")
    if ties not in ("random", "first"):
        raise InputError(f"{name}: ties must be random or first, not {ties!r}")
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"{name}: k must be a whole number of 1 or more, not {k!r}")
    return rows


def _pairs(rows: list[list[float]]) -> Pairs:
    return [(i, j) for i, row in enumerate(rows) for j in range(len(row))]
