"""Prompts with demonstrated completions, in SFTTrainer's conversational format."""

import random
from typing import Any

from rlhf_trl.tiny.demonstrator import ONLY_RIGHT, demonstrate


def demonstrations(rows: list[dict[str, Any]], kind: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return one `prompt` and `completion` per row of `GymTasks`.

    Args:
        rows: rows with `prompt`, `task`, `question` and `answer`.
        kind: `imperfect` (the demonstrator's mixture of right and wrong) or `right`.
        seed: of the demonstrator's choices.
    """
    rng = random.Random(seed)
    mixture = ONLY_RIGHT if kind == "right" else None
    return [
        {
            "prompt": row["prompt"],
            "completion": [
                {
                    "role": "assistant",
                    "content": demonstrate(
                        row["task"], row["question"], row["answer"], rng, mixture
                    ),
                }
            ],
        }
        for row in rows
    ]
