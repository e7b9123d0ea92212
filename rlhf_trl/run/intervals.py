"""How often a resumed run logs, evaluates and saves."""

from typing import Any

from transformers import TrainerCallback


class IntervalsOfNow(TrainerCallback):
    """Has a resumed run follow the `logging_steps`, `eval_steps` and `save_steps` of its config.

    transformers would go on with those that the checkpoint has kept.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace what came from the checkpoint; a fraction is of all steps of now."""
        state.compute_steps(args, state.max_steps)
