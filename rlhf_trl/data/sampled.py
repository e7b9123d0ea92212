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
    """Return a pair for each row: the answer that scores best, and the one that scores worst.

    A row whose answers all score alike gives no pair.

    Args:
        rows: the questions.
        answers: to each question, with `prompt`, `completion` and `finished`.
        score: what scores answers, such as a reward model.
    """
    scores = iter(score([answer for group in answers for answer in group]))
    pairs = []
    for row, group in zip(rows, answers, strict=True):
        scores_of_group = [next(scores) for _ in group]
        # from best to worst; a stable sort: of equal scores, the earlier sample counts as better
        places = sorted(range(len(group)), key=lambda place: -scores_of_group[place])
        best, worst = places[0], places[-1]
        if scores_of_group[best] > scores_of_group[worst]:
            chosen, rejected = group[best]["completion"], group[worst]["completion"]
            pairs.append({"prompt": row["prompt"], "chosen": chosen, "rejected": rejected})
    return pairs


def mixed_pairs(offline: list[Row], on_policy: list[Row], seed: int) -> list[Row]:
    """Return both kinds of pairs, shuffled; the column `kind` says which one a pair is."""
    rows = [{**row, "kind": "offline"} for row in offline]
    rows += [{**row, "kind": "on_policy"} for row in on_policy]
    random.Random(seed).shuffle(rows)
    return rows
