"""How a run ends before its last step: with a checkpoint of a step boundary that all reach."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.distributed import TCPStore
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from rlhf_trl.errors import Diverged
from rlhf_trl.run.signals import signals

KEY, NOBODY = "stop", "nobody"


class Stop(TrainerCallback):
    """Ends a run that got a signal, and keeps what an error would lose. Add it last.

    No process waits for another one at a step. The first to see its signal writes into a store that
    all of them stop one step later, which none can have passed: every step ends with a collective.
    Where they meet anyway (evaluation, checkpoint, last step), they ask each other.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._store: TCPStore | None = None
        self._stopping = False
        # brings back the last boundary; None: there was none, or weights have moved since
        self._restore: Callable[[], None] | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        """Connect the processes."""
        if args.world_size > 1:
            from rlhf_trl.run.processes import shared_store

            self._store = shared_store(args.process_index, KEY, NOBODY)

    def on_step_begin(self, args, state, control, **kwargs):
        """Have signals wait for a boundary from now on."""
        signals.training = True

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Forget the boundary, whose weights are about to change."""
        self._restore = None

    def on_step_end(self, args, state, control, **kwargs):
        """Stop here if that was agreed."""
        self._restore = restorer_of_boundary(self._trainer)
        if not _epoch_to_evaluate(args, state):
            self._stop_if(self._agreed(state), args, control)

    def on_epoch_end(self, args, state, control, **kwargs):
        """Stop here, after the evaluation, if the last step of an epoch was agreed on."""
        if signals.training and _epoch_to_evaluate(args, state):
            self._stop_if(self._agreed(state), args, control)

    def on_evaluate(self, args, state, control, **kwargs):
        """Stop if a signal came in the evaluation, which may have moved the random state."""
        if signals.training:
            self._restore = restorer_of_boundary(self._trainer)
            self._stop_if(self._anybody(), args, control)

    def on_save(self, args, state, control, **kwargs):
        """End the run if it was told to: its checkpoint is whole."""
        complete = not (args.save_only_model or _epoch_to_evaluate(args, state))
        if self._stopping or (complete and self._anybody()):
            signals.end(f"at step {state.global_step}; {signals.kept()}")

    def _agreed(self, state: Any) -> bool:
        """Return whether this is the step at which all processes stop."""
        if self._store is None or state.global_step >= state.max_steps:
            return self._anybody()
        if signals.received is None:
            agreed = self._store.get(KEY)
        else:
            proposed = f"{state.global_step + 1} {signals.received}"
            agreed = self._store.compare_set(KEY, NOBODY, proposed)
        step, _, number = agreed.decode().partition(" ")
        if step != str(state.global_step):
            return False
        signals.received = int(number)
        return True

    def _anybody(self) -> bool:
        """Return whether any process got a signal; all of them have to ask."""
        if self._store is not None:
            signals.received = max(gather_object([signals.received or 0])) or None
        return signals.received is not None

    def _stop_if(self, agreed: bool, args: Any, control: Any) -> None:
        if agreed:
            from rlhf_trl.run.early_checkpoints import save_resumable

            save_resumable(args)
            args.save_strategy = SaveStrategy.STEPS  # with "best", an evaluation sets should_save
            control.should_save = self._stopping = True

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Save the last step boundary if an error ends the block; say what was saved.

        That needs one process whose weights are still those of the boundary. What has diverged is
        not saved.
        """
        try:
            yield
        except Diverged:
            raise
        except Exception:
            if signals.training:
                from rlhf_trl.run.early_checkpoints import save_boundary

                signals.saved_note = save_boundary(self._trainer, self._restore)
            raise


def _epoch_to_evaluate(args: Any, state: Any) -> bool:
    """Return whether an epoch ends with this step, and is evaluated then."""
    return args.eval_strategy == IntervalStrategy.EPOCH and state.epoch == int(state.epoch)


def restorer_of_boundary(trainer: Any) -> Callable[[], None]:
    """Return a function that takes the trainer back to this step boundary after a broken-off step.

    It brings back what a checkpoint holds beside weights: the random states, the counters and the
    generation in use. `Stop` drops it before weights change. Making it takes .1 ms: no device has
    to be waited for, as even the random state of a GPU is kept on the CPU.
    """
    # lists and dictionaries are changed in place, so they are copied; all else is replaced
    attributes = {
        name: copy(value) if isinstance(value, dict | list) else value
        for name, value in vars(trainer).items()
    }
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore() -> None:
        vars(trainer).update(attributes)
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)

    return restore
