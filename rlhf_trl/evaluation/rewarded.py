"""Answers and their rewards in a trainer of TRL's GRPO kind: judged when held out, and recorded."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.data_utils import is_conversational

from rlhf_trl.evaluation.held_out import (
    WITH_PENALTIES,
    AnswersHeldOut,
    Scores,
    named_rewards,
    with_penalties,
)
from rlhf_trl.rollouts.generate import Completions, Rows

Recorded = tuple[list[tuple[Any, ...]], dict[str, list[float]]]
"""Samples without their advantages, and rewards by name, as `Store.write` takes them."""


@dataclass
class Unrecorded:
    """A generation that waits until the loss has estimated all its advantages."""

    samples_and_rewards: Recorded
    advantages: Tensor  # (B,) of this process, as far as they are known
    missing: int  # how many are not


class RewardedAnswers(AnswersHeldOut):
    """Trainer mixin: reward functions judge held-out answers; generations go into the record."""

    _unrecorded: dict[int, Unrecorded]  # by the number of the generation

    def judge(self, rows: Rows, answers: Completions) -> Scores:
        """Return the scores, those of all reward functions, and the reward they come to."""
        share = self.share(rows)
        is_chat = is_conversational({"prompt": rows[0]["prompt"]})
        texts = [answers[i].text for i in share]
        if is_chat:
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        else:
            completions = texts
        # reward functions may log something, which TRL would add to the logs of the next generation
        pending = self._pending_extra_logs, self._pending_metrics
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        self._finished = [answers[i].finished for i in share]
        rewards = super()._calculate_rewards(
            [rows[i] for i in share],
            [rows[i]["prompt"] for i in share],
            completions,
            [answers[i].ids for i in share],
        )
        self._pending_extra_logs, self._pending_metrics = pending
        per_func = rewards[: len(rows)]  # TRL gathers all shares, which end with repeated rows
        named = named_rewards(
            per_func, self.reward_weights, self.reward_func_names, answers, self.args
        )
        scores = super().judge(rows, answers)
        return scores | {name: values for name, values in named.items() if name not in scores}

    def _weighted(self, per_func: Tensor) -> Tensor:
        """Return the (B,) weighted sums of (B, F) rewards of F functions."""
        return (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)

    def _log_penalties(self, penalized: dict[str, Tensor], group: int) -> None:
        """Log what `with_penalties` returns, in the table of completions, too.

        `group` is the number of completions of a prompt.
        """
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, column in penalized.items():
            metrics[name].append(column.mean().item())
            self._logs["extra"][name].extend(column.tolist())
        if group > 1:  # TRL has counted groups by their rewards alone
            spread = penalized[WITH_PENALTIES].view(-1, group).std(dim=1)
            is_equal = torch.isclose(spread, torch.zeros_like(spread))
            metrics["frac_reward_zero_std"][-1] = is_equal.float().mean().item()

    def _samples(
        self, prompts: Any, completions: Any, endings: Tensor, per_func: Tensor
    ) -> Recorded:
        """Return samples and rewards for the record.

        `endings` is (B, 2): how many tokens a completion has, and whether the model ended it.
        """
        rewards = self._weighted(per_func)
        samples = zip(prompts, completions, *endings.T.tolist(), rewards.tolist(), strict=True)
        named = dict(zip(self.reward_func_names, per_func.T, strict=True))
        named |= with_penalties(self.args, rewards, *endings.T)
        return list(samples), {name: column.tolist() for name, column in named.items()}

    def _record_generation(self, output: dict[str, Any], endings: Tensor) -> None:
        """Record a generation, unless only the loss will estimate its advantages."""
        number, logs = self._carried["generation"], self._logs
        per_func = self._rewards_per_func
        recorded = self._samples(logs["prompt"], logs["completion"], endings, per_func)
        if "token_rewards" not in output:
            self.record("train", number, *recorded, list(logs["advantages"]), self.num_generations)
            return
        places = torch.arange(len(output["advantages"]), device=endings.device)
        output["recorded_as"] = torch.stack([torch.full_like(places, number), places], dim=1)
        count = len(places)
        self._unrecorded[number] = Unrecorded(recorded, torch.zeros(count), count)

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
