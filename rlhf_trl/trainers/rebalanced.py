"""Micro-batches of like cost, of which each counts by its share of the examples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from rlhf_trl.data.fitting import lengths
from rlhf_trl.errors import InputError


class Rebalanced:
    """Trainer mixin for losses that are means over examples, with `batch_rebalance`.

    transformers' sampler of that name cuts the N examples of an optimizer step into M micro-batches
    of like cost, n_m examples each, and the Trainer adds up their mean losses l_m divided by M.
    Here the loss is sum_m (n_m / N) l_m, that of equal micro-batches; formulation trl is as before.
    """

    _examples = 0.0  # of a micro-batch of this optimizer step, on average over processes, too

    def _rebalances(self) -> bool:
        return not self._stock and self.args.train_sampling_strategy == "batch_rebalance"

    def _texts(self) -> tuple[str, ...]:
        """Return the columns of the texts that a row is padded with; none: the loss is no mean."""
        return ()

    def _take(self, args: Any, model: Any) -> Any:
        args = super()._take(args, model)
        if self._rebalances() and not self._texts():
            raise InputError(
                f"train_sampling_strategy: the loss of {self._row.label} depends on which examples "
                "share a micro-batch, and batch_rebalance chooses these by their length; write "
                "random."
            )
        return args

    def _counts_examples(self) -> bool:
        return self._rebalances() or super()._counts_examples()

    # Extends Trainer._get_train_sampler, which knows the lengths of single texts only.
    @override
    def _get_train_sampler(self, dataset=None):
        """Return the sampler, drawn by the run's seed."""
        if not self._rebalances():
            return super()._get_train_sampler(dataset)
        rows, name = self.train_dataset, self.args.length_column_name
        needed = self.args.gradient_accumulation_steps * self.args.world_size
        if len(rows) < needed:
            raise InputError(
                f"train_sampling_strategy: batch_rebalance makes {needed} micro-batches of an "
                f"optimizer step, and there are {len(rows)} examples; add some, or lower "
                "gradient_accumulation_steps."
            )
        if name not in rows.column_names:
            rows = Dataset.from_dict({name: padded_lengths(rows, self._texts())})
        sampler = super()._get_train_sampler(rows)
        seed = self.args.data_seed
        sampler.seed = self.args.seed if seed is None else seed  # it takes 42 for all runs
        return sampler

    # Extends Trainer.get_batch_samples: counts the examples of an optimizer step.
    @override
    def get_batch_samples(self, *args, **kwargs):
        """Take the micro-batches of an optimizer step."""
        samples, num_items = super().get_batch_samples(*args, **kwargs)
        if self._rebalances() and samples:
            count = sum(map(self._batch_size, samples))
            total = self.accelerator.reduce(torch.tensor(count, device=self.args.device)).item()
            self._examples = total / (len(samples) * self.args.world_size)
            self._micro_batches = len(samples)
        return samples, num_items

    # Extends Trainer.training_step, which divides a loss by `current_gradient_accumulation_steps`.
    @override
    def training_step(self, model, inputs, *args, **kwargs):
        """Take a step whose loss counts by its share of the examples."""
        if not self._rebalances():
            return super().training_step(model, inputs, *args, **kwargs)
        weight = self._batch_size(inputs) / self._examples
        self.current_gradient_accumulation_steps = self._micro_batches / weight
        several = self.args.world_size > 1
        with _gathering_unequal(self.accelerator) if several else nullcontext():
            return super().training_step(model, inputs, *args, **kwargs)


@contextmanager
def _gathering_unequal(accelerator: Any) -> Iterator[None]:
    """Let TRL's metrics gather tensors of which each process has another number of rows."""
    gather = accelerator.gather

    def gather_rows(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return gather(tensor)
        counts = gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        missing = max(counts) - len(tensor)
        parts = gather(pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing))).split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    accelerator.gather = gather_rows
    try:
        yield
    finally:
        del accelerator.gather


def padded_lengths(rows: Any, texts: Sequence[str]) -> np.ndarray:
    """Return (N,) tokens: of a row's longest text, behind its prompt where that is apart."""
    if texts == ("ranked_ids",):
        return np.array([max(map(len, ranked)) for ranked in rows["ranked_ids"]])
    longest = np.max([lengths(rows, name) for name in texts], axis=0)
    return longest + lengths(rows, "prompt_ids") if "prompt_ids" in rows.column_names else longest
