"""Pairs made of sampled answers."""

import random
from collections.abc import Sequence

from rlhf_trl.data.answers import as_completion, same_answer
from rlhf_trl.data.gym import Row


def groups(rows: list[Row], number: int) -> list[list[Row]]:
    """Cut rows into `number` groups of neighbors of equal size."""
    size = len(rows) // number
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def on_policy_pairs(
    rows: Sequence[Row], completions: Sequence[Sequence[str]], seed: int
) -> list[Row]:
    """Return a pair for each row that has right and wrong completions.

    `seed` draws one of the right ones and one of the wrong ones.
    """
    rng = random.Random(seed)
    pairs = []
    for row, texts in zip(rows, completions, strict=True):
        right = [text for text in texts if same_answer(text, row["answer"], row["task"])]
        wrong = [text for text in texts if not same_answer(text, row["answer"], row["task"])]
        if right and wrong:
            chosen = as_completion(rng.choice(right))
            rejected = as_completion(rng.choice(wrong))
            pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def mixed_pairs(offline: list[Row], on_policy: list[Row], seed: int) -> list[Row]:
    """Return both kinds of pairs, shuffled; the column `kind` says which one a pair is."""
    rows = [{**row, "kind": "offline"} for row in offline]
    rows += [{**row, "kind": "on_policy"} for row in on_policy]
    random.Random(seed).shuffle(rows)
    return rows
