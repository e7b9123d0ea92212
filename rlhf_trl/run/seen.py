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
        batches_of_generation = new_batches * args.num_iterations
        batches_learned = step * args.gradient_accumulation_steps
        generations, batches_of_last = divmod(batches_learned, batches_of_generation)
        return batch * (generations * new_batches + min(batches_of_last, new_batches)), kind
    examples_per_epoch = len(trainer.train_dataset)
    if args.dataloader_drop_last:
        examples_per_epoch -= examples_per_epoch % batch
    examples_per_step = batch * args.gradient_accumulation_steps
    # the last step of an epoch may be smaller: it counts, but no example beyond the epoch's end
    steps_per_epoch = math.ceil(examples_per_epoch / examples_per_step)
    whole_epochs, steps_of_last = divmod(step, steps_per_epoch)
    examples_of_last = min(steps_of_last * examples_per_step, examples_per_epoch)
    return whole_epochs * examples_per_epoch + examples_of_last, kind
