"""The checkpoint of a run that ends before its last step, by a signal or an error."""

from collections.abc import Callable
from typing import Any

from rlhf_trl.errors import reason_in_short
from rlhf_trl.output import whole_checkpoints
from rlhf_trl.run.signals import signals


def save_resumable(args: Any) -> None:
    """Have the next checkpoint hold all that a resumed run needs, and push it nowhere."""
    args.save_only_model = args.push_to_hub = False


def save_boundary(trainer: Any, restore: Callable[[], None] | None) -> str:
    """Save the last step boundary, which `restore` brings back; return what is kept, in a sentence.

    That needs one process whose weights are still those of the boundary; otherwise `restore` is
    None.
    """
    failed = ""
    step = trainer.state.global_step
    alone = trainer.args.world_size == 1 and not trainer.is_deepspeed_enabled
    if alone and restore is not None and step not in whole_checkpoints(signals.folder):
        try:
            restore()
            save_resumable(trainer.args)
            trainer._save_checkpoint(trainer.model_wrapped, None)
        except Exception as error:  # the error that ends the run must still be reported
            failed = f" (step {step} could not be saved: {reason_in_short(error)})"
    return f"{signals.kept()}{failed}."
