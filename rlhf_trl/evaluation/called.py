"""Reward functions called on answers outside training."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerState

from rlhf_trl.evaluation.held_out import Scores
from rlhf_trl.rewards.finished import with_finished
from rlhf_trl.rollouts.generate import Rows, Said


def called(functions: Mapping[str, Callable[..., Any]], rows: Rows, said: Said) -> Scores:
    """Score answers to rows with functions, by name, that take what TRL gives reward functions."""
    texts: list[Any] = [one.text for one in said]
    if not isinstance(rows[0]["prompt"], str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    given = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"} | {
        "prompts": [row["prompt"] for row in rows],
        "completions": texts,
        "completion_ids": [list(one.ids) for one in said],
        "trainer_state": TrainerState(),
        **dict.fromkeys(("log_extra", "log_metric"), lambda *_: None),
    }
    finished = [one.finished for one in said]
    results = {
        name: with_finished(function, lambda: finished)(**given)
        for name, function in functions.items()
    }
    return {n: asyncio.run(v) if inspect.iscoroutine(v) else v for n, v in results.items()}
