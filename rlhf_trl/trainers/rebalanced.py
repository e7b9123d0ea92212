"""Micro-batches of like cost, of which each counts by its share of the examples."""

from typing import Any

import torch
from typing_extensions import override


class Rebalanced:
    """Trainer mixin: `train_sampling_strategy: batch_rebalance`, where losses are means.

    transformers' sampler of that name cuts the N examples of an optimizer step into M micro-batches
    of like cost, n_m examples each, and the Trainer adds up their mean losses l_m divided by M.
    Here the loss is sum_m (n_m / N) l_m, that of equal micro-batches; formulation trl is as before.
    """

    _step_examples = 0  # N, of all processes

    def _texts(self) -> tuple[str, ...]:
        """Return the columns of the texts a row is padded with; none: the loss is no such mean."""
        return ()

    def _rebalances(self) -> bool:
        return not self._stock and self.args.train_sampling_strategy == "batch_rebalance"

    def _take(self, args: Any, model: Any) -> Any:
        args = super()._take(args, model)
        if self._rebalances():
            from rlhf_trl.data import micro_batches

            micro_batches.check_mean(self._row.label, self._texts())
        return args

    def _counts_examples(self) -> bool:
        return self._rebalances() or super()._counts_examples()

    # Extends Trainer._get_train_sampler, which knows the lengths of single texts only.
    @override
    def _get_train_sampler(self, dataset=None):
        if not self._rebalances():
            return super()._get_train_sampler(dataset)
        from rlhf_trl.data import micro_batches

        lengths = micro_batches.lengths(self.train_dataset, self._texts(), self.args)
        sampler = super()._get_train_sampler(lengths)
        sampler.seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return sampler

    # Extends Trainer.get_batch_samples: counts the examples of an optimizer step.
    @override
    def get_batch_samples(self, *args, **kwargs):
        """Take the micro-batches of an optimizer step."""
        samples, num_items = super().get_batch_samples(*args, **kwargs)
        if self._rebalances():
            count = torch.tensor(sum(map(self._batch_size, samples)), device=self.args.device)
            self._step_examples = self.accelerator.reduce(count).item()
        return samples, num_items

    # Extends Trainer.training_step, which divides a loss by `current_gradient_accumulation_steps`.
    @override
    def training_step(self, model, inputs, *args, **kwargs):
        """Take a step whose loss counts by its share of the examples."""
        if not self._rebalances():
            return super().training_step(model, inputs, *args, **kwargs)
        from rlhf_trl.data import micro_batches

        # of the processes, whose number here cancels out, DDP takes the mean
        share = self._batch_size(inputs) * self.args.world_size / self._step_examples
        self.current_gradient_accumulation_steps = 1 / share
        with micro_batches.gathering_unequal(self.accelerator):
            return super().training_step(model, inputs, *args, **kwargs)
