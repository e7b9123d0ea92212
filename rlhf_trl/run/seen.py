"""How much a run has learned from: a step of one algorithm is more data than that of another."""

import math
from typing import TYPE_CHECKING, Any

from rlhf_trl.run.kinds import KINDS, kind_of_config

if TYPE_CHECKING:
    from datasets import Dataset


def examples_seen(trainer: Any, rows: "Dataset", step: int) -> tuple[int, str]:
    """Return how many examples the first `step` optimizer steps learned from, and their kind.

    An example counts anew in every epoch; a completion that several updates use counts once, and
    one that another has replaced (dynamic sampling) does not. `rows` are what the training examples
    were made of.
    """
    from trl import GRPOConfig

    args = trainer.args
    # where the config's class does not decide the kind, the first known column of the rows does
    kind = kind_of_config(args) or next(KINDS[name] for name in KINDS if name in rows.column_names)
    batch = args.train_batch_size * args.world_size
    if isinstance(args, GRPOConfig):
        # A generation makes this many batches. All of them are learned from once, then all of them
        # again, num_iterations times in all; only the first time are they new.
        new_batches = args.steps_per_generation
        batches_learned = step * args.gradient_accumulation_steps
        generations, in_the_last = divmod(batches_learned, new_batches * args.num_iterations)
        return batch * (generations * new_batches + min(in_the_last, new_batches)), kind
    size = len(trainer.train_dataset)
    if args.dataloader_drop_last:
        size -= size % batch
    window = batch * args.gradient_accumulation_steps  # examples of an optimizer step
    steps_per_epoch = math.ceil(size / window)  # the last of which may be smaller
    epochs, steps_in_the_last = divmod(step, steps_per_epoch)
    return epochs * size + min(steps_in_the_last * window, size), kind
