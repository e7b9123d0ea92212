"""A trainer's accumulation window held against a loss written down for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM

from rlhf_trl.compare.matrix import judge
from rlhf_trl.compare.measure import Batch, Measured, accumulate, flat_gradient


@dataclass(frozen=True)
class Comparison:
    """Two measurements of the same batch: the trainer's, and what it is held against."""

    trainer: Measured
    reference: Measured

    @property
    def relative_error(self) -> float:
        """|g_trainer - g_reference| / |g_reference|."""
        return judge(self.reference.gradient, self.trainer.gradient)[0]

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the gradients."""
        return judge(self.reference.gradient, self.trainer.gradient)[1]

    @property
    def norm_ratio(self) -> float:
        """|g_trainer| / |g_reference|."""
        return judge(self.reference.gradient, self.trainer.gradient)[2]


def plain_copy(trainer: Any) -> Module:
    """Return a fresh model of plain transformers with the weights that the trainer has now."""
    plain = AutoModelForCausalLM.from_config(trainer.model.config)
    plain.load_state_dict(trainer.model.state_dict())
    return plain.train(trainer.model.training)


def measure(
    trainer: Any, source: Iterator[Any], reference: Callable[[Module, list[Batch]], Tensor]
) -> Comparison:
    """Measure one window of a trainer, and a loss of a plain model on its micro-batches."""
    ours, window = accumulate(trainer, source)
    plain = plain_copy(trainer)
    loss = reference(plain, window)
    loss.backward()
    return Comparison(ours, Measured(float(loss.detach()), flat_gradient(plain)))
