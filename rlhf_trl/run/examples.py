"""What the evaluation of a policy's run asks: a loader for each kind of stage.

Each takes the recipe's own fields and returns the examples of its `dataset:` block.
"""

from typing import Any

from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.rewards.loading import answer_columns


def prompts(own: Any) -> Examples:
    """Return the prompts of a run that learns from its own answers."""
    template_arguments = getattr(own, "chat_template_kwargs", None)
    return load_prompts(own.dataset, answer_columns(own), template_arguments)


def demonstrations(own: Any) -> Examples:
    """Return the demonstrations of a file, or the prompts that gym tasks hold out."""
    if isinstance(own.dataset, FileData):
        return load_demonstrations(own.dataset, own.demonstrator)
    return prompts(own)


def pairs(own: Any) -> Examples:
    """Return the pairs of a file, or the prompts that gym tasks hold out."""
    if isinstance(own.dataset, FileData):
        return load_preferences(own.dataset, own.max_samples)
    return prompts(own)


def labeled(own: Any) -> Examples:
    """Return the pairs or labeled answers of a file, or the prompts that gym tasks hold out."""
    if isinstance(own.dataset, FileData):
        return load_preferences(own.dataset, own.max_samples, unpaired=True)
    return prompts(own)
