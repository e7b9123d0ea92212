"""Reward functions called on answers outside training."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerState

from rlhf_trl.evaluation.held_out import Scores
from rlhf_trl.rewards.finished import with_finished
from rlhf_trl.rollouts.generate import Completions, Rows


def function_scores(
    functions: Mapping[str, Callable[..., Any]], rows: Rows, answers: Completions
) -> Scores:
    """Return the scores that reward functions, by name, give the answers to rows.

    The functions get the arguments that TRL's trainers would give them.
    """
    completions: list[Any] = [answer.text for answer in answers]
    if not isinstance(rows[0]["prompt"], str):  # prompts are conversations
        completions = [[{"role": "assistant", "content": text}] for text in completions]

    def log_nothing(*_: Any) -> None:
        """Stand in for the functions with which a reward function logs in TRL's trainers."""

    arguments = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    arguments |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": [list(answer.ids) for answer in answers],
        "trainer_state": TrainerState(),  # of step 0, since nothing is trained
        "log_extra": log_nothing,
        "log_metric": log_nothing,
    }
    finished = [answer.finished for answer in answers]
    scores: Scores = {}
    for name, function in functions.items():
        result = with_finished(function, lambda: finished)(**arguments)
        scores[name] = asyncio.run(result) if inspect.iscoroutine(result) else result
    return scores
