"""Evaluation that takes every metric over each held-out example once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.trainer_utils import has_length
from typing_extensions import override

Batch = Mapping[str, Any]  # tensors of R rows each, by name; whatever else is there holds for all


class Recorder:
    """A model as a function that keeps what it returns."""

    def __init__(self, model: Any):
        self.model = model
        self.outputs: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        output = self.model(*args, **kwargs)
        self.outputs.append(output)
        return output

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, for a user's `compute_loss` that reads one."""
        return getattr(self.model, name)


class Replay:
    """In the place of a model: returns what was recorded, call by call."""

    def __init__(self, outputs: Sequence[Any], model: Any = None):
        self._outputs = iter(outputs)
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the next call returned."""
        return next(self._outputs)

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, as `Recorder` does."""
        return getattr(self._model, name)


@dataclass(frozen=True)
class Example:
    """What the loss reads of one example: its rows of a batch, and of what the model returned."""

    inputs: dict[str, Any]
    outputs: list[dict[str, Any]]  # of each call of the model


class OverExamples:
    """Trainer mixin: evaluation logs what the loss gives for one batch of all held-out examples.

    The Trainer logs means of batches' means: a short last batch weighs as much as a full one, and
    on several processes the examples that fill the last batches count twice. Here the model reads
    batch by batch, and what the loss reads is kept (a few numbers per token, never logits of a
    language model). At the end the trainer's own loss and metrics are computed once, on one batch
    that holds every example once. So all of them mean what they mean on a batch, whatever
    `per_device_eval_batch_size` and the number of processes: a mean over tokens is one over all
    tokens, a minimum is that of all examples, and KTO's reference point is that of all completions.
    What a model itself computes over a batch, the auxiliary loss of a mixture of experts, is the
    mean of what it was in the batch of each example. Of a streamed data set, whose length is not
    known, the examples that fill the last batches of several processes still count twice.
    """

    # The order of rows in a batch of examples a, b with two rows each: a1 a2 b1 b2 if the rows of
    # an example are neighbors, else a1 b1 a2 b2 (all chosen, then all rejected ones).
    rows_are_neighbors = False
    _evaluated: list[Example] | None = None  # while the evaluation loop runs
    _output_classes: Sequence[type] = ()  # of the calls whose output is kept

    # Extends Trainer.evaluation_loop, whose metrics are means of batches' means.
    @override
    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
        """Run the loop, then compute loss and metrics on all examples as one batch."""
        kwargs["metric_key_prefix"] = metric_key_prefix
        if not self._evaluates_examples():
            return super().evaluation_loop(dataloader, *args, **kwargs)
        self._evaluated = []
        try:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
            examples = self._evaluated
        finally:
            self._evaluated = None
        if has_length(dataloader.dataset):
            # on several processes, the first examples come again to fill the last batches
            examples = examples[: self._count(dataloader.dataset)]
        if examples:
            self._batch_metrics().clear()  # those of single batches, which the loop has added
            loss = self._on_one_batch(examples)
            output.metrics[f"{metric_key_prefix}_loss"] = loss.item()
        return output

    # Extends Trainer.prediction_step: keeps what the loss reads.
    @override
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Take a step, and keep its examples while the evaluation loop runs."""
        if self._evaluated is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._with_reference(self._prepare_inputs(inputs))
        recorder = Recorder(model)
        # a copy, since `inputs` are kept below and a loss may take something out of them
        result = super().prediction_step(recorder, dict(inputs), prediction_loss_only, ignore_keys)
        # a loss may call the model several times; calls of which it reads nothing are dropped
        calls = [(type(output), self._kept(output)) for output in recorder.outputs]
        self._output_classes = [kind for kind, fields in calls if fields]
        outputs = [fields for _, fields in calls if fields]
        self._evaluated += gather_object(self._examples(inputs, outputs))
        return result

    def _on_one_batch(self, examples: Sequence[Example]) -> Tensor:
        """Return the loss of all examples, and log their metrics.

        Every process computes the same, so that what it gathers from the others changes no mean.
        """
        inputs = self._joined([example.inputs for example in examples])
        outputs = []
        for call, output_class in enumerate(self._output_classes):
            fields = self._joined([example.outputs[call] for example in examples])
            outputs.append(output_class(**fields))
        with _outside_of_data_loaders(self.accelerator):
            loss, _, _ = self.prediction_step(Replay(outputs, self.model), inputs, True)
        return loss

    def _with_reference(self, inputs: Batch) -> Batch:
        """Return a batch with what the loss would ask other models."""
        return inputs

    def _kept(self, output: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return what the loss reads of what the model returned."""
        return {
            name: value
            for name, value in output.items()
            if isinstance(value, Tensor) and name != "logits"
        }

    def _batch_metrics(self) -> dict[str, list[float]]:
        """Return where TRL keeps the metrics of evaluation's batches until it logs them."""
        return self._metrics["eval"]

    def _count(self, dataset: Any) -> int:
        """Return how many examples a data set has."""
        return len(dataset)

    def _batch_size(self, inputs: Batch) -> int:
        """Return how many examples a batch holds, B."""
        return len(inputs["input_ids"])

    def _examples(self, inputs: Batch, outputs: Sequence[Mapping[str, Any]]) -> list[Example]:
        """Take a batch, and what the calls of the model returned for it, apart."""
        count = self._batch_size(inputs)
        rows = self._apart(inputs, count)
        rows_of_calls = [self._apart(fields, count) for fields in outputs]
        return [Example(rows[n], [of_call[n] for of_call in rows_of_calls]) for n in range(count)]

    def _apart(self, batch: Batch, count: int) -> list[dict[str, Any]]:
        """Split a batch into its `count` examples.

        Of a tensor of k * count rows, each example gets its k rows, (k, ...), a pair two; see
        `rows_are_neighbors` for their order. A scalar, and what is no tensor, holds for the whole
        batch and goes to every example. Images are left out: the loss does not read them.
        """
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, value in batch.items():
            if not isinstance(value, Tensor):
                values = [value] * count
            elif value.dim() == 0:
                values = [value.cpu()] * count
            elif value.dim() > 3 or len(value) % count:
                # Images have 4 dimensions, or are cut into patches, whose number has nothing to do
                # with that of the examples.
                continue
            elif self.rows_are_neighbors:
                values = value.cpu().unflatten(0, (count, -1))  # (B, k, ...)
            else:
                values = value.cpu().unflatten(0, (-1, count)).transpose(0, 1)  # (B, k, ...)
            for part, own in zip(parts, values, strict=True):
                # a view would keep the memory of the whole batch
                part[name] = own.clone() if isinstance(own, Tensor) else own
        return parts

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one batch of the parts of examples, padded on the right."""
        batch = {}
        for name, first in parts[0].items():
            values = [part[name] for part in parts]
            if not isinstance(first, Tensor):
                batch[name] = first
                continue
            if first.dim() == 0:
                joined = torch.stack(values).mean()
            else:
                joined = _padded(values, -100 if name.endswith("labels") else 0)
                # back to the order of rows that the batch had in `_apart`
                joined = joined if self.rows_are_neighbors else joined.transpose(0, 1)
                joined = joined.flatten(0, 1)
            batch[name] = joined.to(self.args.device)
        return batch


def _padded(values: Sequence[Tensor], filler: int) -> Tensor:
    """Stack (k,) or (k, T, ...) tensors whose T differ, with a filler behind the shorter ones."""
    if values[0].dim() == 1:
        return torch.stack(list(values))
    longest = max(value.shape[1] for value in values)
    rows, _, *more = values[0].shape
    stacked = values[0].new_full((len(values), rows, longest, *more), filler)
    for place, value in zip(stacked, values, strict=True):
        place[:, : value.shape[1]] = value
    return stacked


@contextmanager
def _outside_of_data_loaders(accelerator: Any) -> Iterator[None]:
    """Let `gather_for_metrics` cut nothing off, as it does at the last batch of a data loader.

    An evaluation may come while training's loader stands at its last batch. [None] is what
    accelerate has where no loader is in use.
    """
    state = accelerator.gradient_state
    loaders, state.dataloader_references = state.dataloader_references, [None]
    try:
        yield
    finally:
        state.dataloader_references = loaders
