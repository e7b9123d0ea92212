"""Answers and their rewards in a trainer of TRL's GRPO kind: judged when held out, and recorded."""

from collections import defaultdict
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


class RewardedAnswers(AnswersHeldOut):
    """Trainer mixin: reward functions judge held-out answers; generations are recorded."""

    def judge(self, rows: Rows, answers: Completions) -> Scores:
        """Return the trainer's `scores`, the rewards of all functions, and their sum, `reward`.

        Processes share the work: each calls the functions on the answers to its own rows.
        """
        share = self.share(rows)
        is_chat = is_conversational({"prompt": rows[0]["prompt"]})
        texts = [answers[i].text for i in share]
        if is_chat:
            completions = [[{"role": "assistant", "content": text}] for text in texts]
        else:
            completions = texts
        # what reward functions log here is dropped: TRL would add it to the next generation's logs
        pending = self._pending_extra_logs, self._pending_metrics
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        self._finished = [answers[i].finished for i in share]  # functions get it by `with_finished`
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
        # a reward may also be one of the `scores`, which come first and count
        return scores | {name: values for name, values in named.items() if name not in scores}

    def _weighted(self, per_func: Tensor) -> Tensor:
        """Return the (B,) weighted sums of (B, F) rewards of F functions."""
        return (per_func * self.reward_weights.to(per_func.device)).nansum(dim=1)

    def _log_penalties(self, penalized: dict[str, Tensor], group: int) -> None:
        """Log what `with_penalties` returned, as metrics and in the table of completions.

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
        """Return B samples and their rewards for the record.

        `endings` is (B, 2): how many tokens a completion has, and whether the model ended it;
        `per_func` is (B, F), the rewards of F functions.
        """
        rewards = self._weighted(per_func)
        samples = zip(prompts, completions, *endings.T.tolist(), rewards.tolist(), strict=True)
        named = dict(zip(self.reward_func_names, per_func.T, strict=True))
        named |= with_penalties(self.args, rewards, *endings.T)
        return list(samples), {name: column.tolist() for name, column in named.items()}

    def _newest(self, endings: Tensor) -> Recorded:
        """Return samples and rewards of the generation that TRL has just logged."""
        logs = self._logs
        return self._samples(logs["prompt"], logs["completion"], endings, self._rewards_per_func)

    def _record_generation(self, output: dict[str, Any], endings: Tensor) -> None:
        """Record the newest generation with its advantages."""
        advantages = list(self._logs["advantages"])
        self.record(
            "train",
            self._carried["generation"],
            *self._newest(endings),
            advantages,
            self.num_generations,
        )
