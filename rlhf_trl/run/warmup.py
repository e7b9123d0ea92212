"""The warm-up of the book's code, whose first step has a rate above 0."""

from functools import partial
from typing import Any

from transformers import TrainerCallback

from rlhf_trl.checkpoints import follow_schedule
from rlhf_trl.errors import InputError

DECAYS = ("linear", "constant_with_warmup")  # schedules of which the book's code has its own


class WarmupFromFirstStep(TrainerCallback):
    """Make step k of W have the rate k / (W + 1), where transformers' has (k - 1) / W.

    W is a share of all steps rounded down, where transformers rounds up. Behind the warm-up a
    linear schedule falls to 0 from the full rate, as transformers' does.
    """

    def __init__(self, args: Any):
        if args.lr_scheduler_type not in DECAYS:
            raise InputError(
                f"warmup_from_zero: false is read with lr_scheduler_type {' or '.join(DECAYS)}, "
                f"not {args.lr_scheduler_type}; remove it."
            )

    def on_train_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        """Replace the factors of the schedule, which may have been brought back from a run."""
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate wraps DeepSpeed's
        steps = state.max_steps
        warmup = int(args.warmup_steps if args.warmup_steps >= 1 else steps * args.warmup_steps)
        last = steps if args.lr_scheduler_type == "linear" else None
        factor = partial(_factor, warmup=warmup, last=last)
        schedule.lr_lambdas = [factor for _ in schedule.lr_lambdas]
        follow_schedule(schedule)


def _factor(done: int, warmup: int, last: int | None) -> float:
    """Return the share of the full rate after so many steps; `last`: when it has fallen to 0."""
    if done < warmup:
        return (done + 1) / (warmup + 1)
    return 1.0 if last is None else max(0.0, (last - done) / max(1, last - warmup))
