"""Reward functions called on answers outside training."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerState

from rlhf_trl.evaluation.held_out import Scores
from rlhf_trl.rewards.finished import with_finished
from rlhf_trl.rollouts.generate import Completions, Rows


def called(functions: Mapping[str, Callable[..., Any]], rows: Rows, answers: Completions) -> Scores:
    """Score answers to rows with functions, by name, that take what TRL gives reward functions."""
    completions: list[Any] = [one.text for one in answers]
    if not isinstance(rows[0]["prompt"], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]

    def log_nothing(*_: Any) -> None:
        """Stand for the functions that TRL gives to reward functions to log with."""

    arguments = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    arguments |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": completions,
        "completion_ids": [list(one.ids) for one in answers],
        "trainer_state": TrainerState(),  # of step 0, since nothing is trained
        "log_extra": log_nothing,
        "log_metric": log_nothing,
    }
    finished = [one.finished for one in answers]
    scores: Scores = {}
    for name, function in functions.items():
        # a function that asks for it is told which answers the model ended
        result = with_finished(function, lambda: finished)(**arguments)
        scores[name] = asyncio.run(result) if inspect.iscoroutine(result) else result
    return scores
