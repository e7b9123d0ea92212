"""The harness: the two sides of a comparison, and a trainer's loss and gradient on a fixed batch.

A fixed batch is a data set and completions that depend on nothing but the prompt, the place in the
group and the number of the call. Everything behind generation is the trainer's own: scoring,
advantages, shuffling, splitting, loss, accumulation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Module
from transformers import Trainer

from rlhf_trl.algorithms import Formulation, formulation
from rlhf_trl.errors import InputError

Batch = dict[str, Any]  # what a loss gets: tensors by name


@dataclass(frozen=True)
class Measured:
    """What one accumulation window gives."""

    loss: float  # the sum over the window's micro-batches of the scaled losses
    gradient: Tensor  # (N,) in all parameters, by sorted name, flattened, in float64


@dataclass(frozen=True)
class Book:
    """A side of a comparison: the public function, with parameters that are not the row's own."""

    algorithm: str
    formulation: str = "chapter"
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How it is called in a table."""
        return self.formulation

    @property
    def row(self) -> Formulation:
        """What the table of algorithms says of it."""
        return formulation(self.algorithm, self.formulation)


@dataclass(frozen=True)
class Stock:
    """A side of a comparison: a trainer of TRL, with fields of its config."""

    config: Mapping[str, Any]
    label: str  # how it is called in a table
    trainer: str = "GRPOTrainer"
    columns: tuple[str, ...] = ()  # further columns of the data set
    classes: tuple[type, type] | None = None  # trainer and config, where they are not TRL's own
    trainer_arguments: Mapping[str, Any] = field(
        default_factory=dict
    )  # further arguments of the trainer


def batches(trainer: Any) -> Iterator[Any]:
    """Return what the trainer's own data loader yields, epoch after epoch."""
    while True:
        is_empty = True
        for batch in trainer.get_train_dataloader():
            is_empty = False
            yield batch
        if is_empty:
            raise InputError(f"{type(trainer).__name__} takes no batch from its data")


def accumulate(trainer: Any, source: Iterator[Any], count: int = 0) -> tuple[Measured, list[Batch]]:
    """Run the trainer's own `training_step` over one accumulation window, without an optimizer.

    What the training loop of transformers does around `training_step` is done here: it fetches the
    window, and tells the trainer the number of micro-batches, by which the step divides its loss.

    Args:
        trainer: a trainer of TRL's on one process.
        source: what `batches` returned; one window is taken from it.
        count: micro-batches of the window, where an epoch ends before the window is full; 0: as
            many as the trainer's config says.

    Returns:
        Loss and gradient, and the micro-batches as the loss saw them.
    """
    prepared: list[Batch] = []
    compute_loss = trainer.compute_loss

    def remember(model: Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        """Keep what the loss sees, and compute it."""
        prepared.append(dict(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    args, model = trainer.args, trainer.model
    count = count or args.gradient_accumulation_steps
    window, num_items_in_batch = trainer.get_batch_samples(source, count, args.device)
    trainer.current_gradient_accumulation_steps = len(window)
    trainer.compute_loss = remember
    model.zero_grad()
    try:
        losses = [trainer.training_step(model, batch, num_items_in_batch) for batch in window]
    finally:
        del trainer.compute_loss  # this uncovers the class's method again
    measured = Measured(sum(map(float, losses)), flat_gradient(model))
    model.zero_grad()
    return measured, prepared


def logged_metrics(trainer: Any) -> dict[str, float | None]:
    """Return the metrics that a trainer has gathered, as its `log` hands them on.

    Those that depend on the machine are left out. One without a value, NaN or None, is None.
    """
    logged: dict[str, Any] = {}

    def keep(_: Any, logs: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.update(logs)

    # what transformers does with the metrics of a trainer, such as printing them, is not needed
    with patch.object(Trainer, "log", keep):
        trainer.log({"loss": 0.0})  # logs of a training step have one; trainers look for it
    del logged["loss"]
    metrics: dict[str, float | None] = {}
    for name, value in logged.items():
        if not any(part in name for part in UNSTABLE):
            has_value = value is not None and not math.isnan(value)
            metrics[name] = float(f"{value:.6g}") if has_value else None
    return metrics


UNSTABLE = ("runtime", "per_second", "time", "flos")
"""What is in the names of metrics that depend on the machine."""


def check_same(trainer: Any, seen: Sequence[Batch], fixed: Sequence[Batch], key: str) -> None:
    """Refuse a trainer whose loss saw other token ids than those of the fixed micro-batches.

    Args:
        trainer: the trainer, for the sentence of the error.
        seen: the micro-batches as its loss saw them.
        fixed: the micro-batches as they should be.
        key: the name of the tensor that must be the same, such as "completion_ids".
    """
    is_same = len(seen) == len(fixed) and all(
        key in batch and torch.equal(batch[key], fixed_batch[key])
        for batch, fixed_batch in zip(seen, fixed, strict=True)
    )
    if not is_same:
        tensors = "completions" if key == "completion_ids" else "token ids"
        raise InputError(
            f"{type(trainer).__name__} changed the {tensors} of the fixed batch; compare needs a "
            "trainer whose loss sees the texts that it was given, or that were generated, whole"
        )


def flat_gradient(model: Module) -> Tensor:
    """Return the gradients of all parameters, (N,), by sorted name; 0 where there is none."""
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
        for _, p in sorted(model.named_parameters())
        if p.requires_grad
    ]
    return torch.cat(parts).detach().double().cpu()


def sentence(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def fit(columns: Tensor, gradient: Tensor, cutoff: float | None = None) -> tuple[Tensor, float]:
    """Return the weights with which columns make a gradient, and the share that they leave.

    Args:
        columns: (N, parts) gradients.
        gradient: (N,).
        cutoff: directions whose squared size, relative to the largest, is below it are noise.
    """
    inverse = torch.linalg.pinv(columns.T @ columns, rtol=cutoff)
    weights = inverse @ (columns.T @ gradient)
    size = float(gradient.norm())
    return weights, float((columns @ weights - gradient).norm()) / size if size else 0.0
