"""Prompts to learn from by rewards: those of gym tasks, and one's own (prompt_files.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_trl.data.blocks import FileData, PromptData
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.gym import GymTasks


def load_prompts(
    config: PromptData,
    answers: Sequence[str] = (),
    template_arguments: Mapping[str, Any] | None = None,
) -> Examples:
    """Make or read prompts, with all columns beside them.

    Args:
        config: the block.
        answers: columns of right answers in a file, which are read as the text that the file has.
        template_arguments: arguments of the chat template for all prompts; they become a column,
            which TRL and `prompt_texts` read.
    """
    if isinstance(config, FileData):
        from rlhf_trl.data.prompt_files import read_prompt_files

        data = read_prompt_files(config, answers)
    else:
        tasks = GymTasks(config)
        data = examples(tasks.train, tasks.held_out, tasks)
    if not template_arguments:
        return data
    column = {"chat_template_kwargs": dict(template_arguments)}
    description = "Adding chat_template_kwargs"
    data.train = data.train.map(lambda _: column, desc=description)
    if data.held_out is not None:
        data.held_out = data.held_out.map(lambda _: column, desc=description)
    if data.tasks is not None:  # evaluation reads the tasks' rows, not `data.held_out`
        for row in data.tasks.held_out:
            row.update(column)
    return data
