"""What micro-batches of unequal size need: lengths to cut them by, and metrics that gather them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trl.data import fitting
from rlhf_trl.errors import InputError


def check_mean(label: str, texts: Sequence[str]) -> None:
    """Refuse a row whose loss is not a mean over examples: it has no columns of texts."""
    if not texts:
        raise InputError(
            f"train_sampling_strategy: the loss of {label} depends on which examples share a "
            "micro-batch, and batch_rebalance chooses these by their length; write random."
        )


def lengths(rows: Any, texts: Sequence[str], args: Any) -> Any:
    """Return a data set of nothing but lengths, the user's own column or the tokens of each row.

    A row of several texts has the length of its longest, as they are padded together.

    Args:
        rows: the tokenized examples.
        texts: the columns of their texts; a prompt apart stands in front of each.
        args: of the run.

    Raises:
        InputError: there are fewer examples than micro-batches of an optimizer step.
    """
    needed = args.gradient_accumulation_steps * args.world_size
    if len(rows) < needed:
        raise InputError(
            f"train_sampling_strategy: batch_rebalance makes {needed} micro-batches of "
            f"an optimizer step, and there are {len(rows)} examples; add some, or lower "
            "gradient_accumulation_steps."
        )
    name = args.length_column_name
    if name in rows.column_names:
        return rows.select_columns([name])
    if "ranked_ids" in texts:
        longest = np.array([max(map(len, ranked)) for ranked in rows["ranked_ids"]])
    else:
        longest = np.max([fitting.lengths(rows, text) for text in texts], axis=0)
    if "prompt_ids" in rows.column_names:
        longest = longest + fitting.lengths(rows, "prompt_ids")
    return Dataset.from_dict({name: longest})


@contextmanager
def gathering_unequal(accelerator: Any) -> Iterator[None]:
    """Let `gather` take tensors of which each process has another number of rows."""
    gather = accelerator.gather

    def gather_rows(tensor: Tensor) -> Tensor:
        if not tensor.dim() or accelerator.num_processes == 1:
            return gather(tensor)
        counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        missing = max(counts) - len(tensor)
        padded = pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))
        parts = gather(padded).split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    accelerator.gather = gather_rows
    try:
        yield
    finally:
        del accelerator.gather
