"""Pairs made of sampled answers."""

import random
from collections.abc import Callable, Sequence

from rlhf_trl.data.answers import as_completion, same_answer
from rlhf_trl.data.gym import Row

Score = Callable[[list[Row]], list[float]]  # takes answers


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


def ranked_pairs(rows: Sequence[Row], answers: Sequence[Sequence[Row]], score: Score) -> list[Row]:
    """Return a pair for each row: of its answers, the one that scores best and the worst one.

    A row has none if all its answers score alike, as equal ones do.

    Args:
        rows: the questions.
        answers: to each, with `prompt`, `completion` and `finished`.
        score: what scores answers, such as a reward model.
    """
    scores = iter(score([answer for group in answers for answer in group]))
    pairs = []
    for row, group in zip(rows, answers, strict=True):
        by_score = sorted(((next(scores), -place) for place in range(len(group))), reverse=True)
        (best, first), (worst, last) = by_score[0], by_score[-1]
        if best > worst:  # of equal scores, the first sample is the better one
            chosen, rejected = group[-first]["completion"], group[-last]["completion"]
            pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def mixed_pairs(offline: list[Row], on_policy: list[Row], seed: int) -> list[Row]:
    """Return both kinds of pairs, shuffled; the column `kind` says which one a pair is."""
    rows = [{**row, "kind": "offline"} for row in offline]
    rows += [{**row, "kind": "on_policy"} for row in on_policy]
    random.Random(seed).shuffle(rows)
    return rows
