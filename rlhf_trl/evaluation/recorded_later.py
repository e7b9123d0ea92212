"""Generations whose advantages only the loss estimates: they go into the record after it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.evaluation.rewarded import Recorded


@dataclass
class Unrecorded:
    """A generation that waits until the loss has estimated all its advantages."""

    samples_and_rewards: Recorded
    advantages: Tensor  # (B,) of this process, as far as they are known
    missing: int  # how many are not


class RecordedLater:
    """Mixin of a trainer of `RewardedAnswers`, before it among the bases."""

    _unrecorded: dict[int, Unrecorded]  # by the number of the generation; the trainer sets it

    def _record_generation(self, output: dict[str, Any], endings: Tensor) -> None:
        """Record a generation, unless only the loss will estimate its advantages."""
        if "token_rewards" not in output:
            super()._record_generation(output, endings)
            return
        number = self._carried["generation"]
        count = len(output["advantages"])
        places = torch.arange(count, device=endings.device)
        # goes with each completion through TRL's shuffle into the micro-batches
        output["recorded_as"] = torch.stack([torch.full_like(places, number), places], dim=1)
        self._unrecorded[number] = Unrecorded(self._newest(endings), torch.zeros(count), count)

    def _record_estimated(self, recorded_as: Tensor, advantages: Tensor) -> None:
        """Take the (B,) advantages of a micro-batch; with its last one, record a generation.

        `recorded_as` is (B, 2): the number of the generation, and the place in it.
        """
        number, places = recorded_as[0, 0].item(), recorded_as[:, 1].cpu()
        waiting = self._unrecorded[number]
        waiting.advantages[places] = advantages.to(waiting.advantages)
        waiting.missing -= len(places)
        if waiting.missing:
            return
        del self._unrecorded[number]
        everywhere = self.accelerator.gather(waiting.advantages.to(self.args.device)).tolist()
        self.record("train", number, *waiting.samples_and_rewards, everywhere, self.num_generations)
