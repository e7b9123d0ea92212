"""A recipe's run in this process, where somebody else looks at its trainer or trains it."""

from collections.abc import Callable, Sequence
from unittest.mock import patch

from rlhf_trl.run import train
from rlhf_trl.run.stages import STAGES


def start(stage: str, words: Sequence[str], run_trainer: Callable[..., None]) -> None:
    """Do the run of a stage up to its trainer, which is handed on.

    Args:
        stage: the name of the recipe.
        words: its command line.
        run_trainer: called in place of `train.run`, with the same arguments.

    Raises:
        InputError: what the recipe refuses.
    """
    with patch.object(train, "run", run_trainer):
        recipe = STAGES[stage]
        recipe.part("run")(recipe.load(words), recipe.part("trainer"), **recipe.options)
