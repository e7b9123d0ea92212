"""Evaluation by answering: held-out prompts, greedily and by sampling, scored by the task."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.data.answers import completion_text
from rlhf_trl.rewards.checked import checked
from rlhf_trl.rollouts import generate as rollouts
from rlhf_trl.rollouts.generate import GREEDY, SAMPLED, Completion, Rows, Said, Sampling

if TYPE_CHECKING:
    from rlhf_trl.rollouts.store import Store

Score = Callable[..., list[float | None]]
Scores = dict[str, list[float | None]]  # by name
PENALTIES = ("overlong_penalty", "missing_eos_penalty")
WITH_PENALTIES = "reward_with_penalties"


class AnswersHeldOut:
    """Trainer mixin whose `evaluate` answers the `held_out` prompts and scores the answers.

    Replaces `transformers.Trainer.evaluate`, so that `eval_strategy`, `eval_steps`,
    `eval_on_start`, trackers and `metric_for_best_model` work as usual. TRL's own evaluation of a
    policy-gradient run reports the loss on fresh samples, which says nothing about the task; it
    still runs where an `eval_dataset` is passed, and in a trainer without `held_out`.

    Metrics are `eval_<score>` for greedy answers and `eval_sampled_<score>` for answers sampled at
    temperature 1 under a fixed seed, whatever the checkpoint's generation_config asks for. A score
    is averaged over the answers to which it applies (is not None); where there is none, it is left
    out. `length` is in tokens, `cut_off` the share of answers that max_completion_length ended. The
    training's random state is left untouched.
    """

    held_out: Sequence[dict[str, Any]] = ()  # rows with a `prompt` and what the scores read
    scores: dict[str, Score]  # reward-like; the data set's columns come as keywords
    max_completion_length: int
    measured: tuple[str, ...] = ()  # the metrics of the trainer's own evaluation that are told
    # called on the main process with step, metrics and answers
    on_answers: Callable[[int, dict[str, float], list[dict[str, Any]]], None] | None = None
    rollouts: "Store | None" = None  # takes what is answered, on the main process

    @override
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Answer, score, log, and tell the callbacks; every process returns the same metrics."""
        if eval_dataset is not None or not self.held_out:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            if eval_dataset is None and self.measured:
                names = [f"{metric_key_prefix}_{name}" for name in self.measured]
                self._tell({name: metrics[name] for name in names if name in metrics}, [])
            return metrics
        was_training = self.model.training
        metrics, answers = self._scored_answers(metric_key_prefix)
        self.log(dict(metrics))  # a copy: it adds the epoch
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self._tell(metrics, answers)
        self.model.train(was_training)
        return metrics

    def _scored_answers(self, prefix: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        completions, scores = self.scored(prefix)
        metrics = {}
        for name, values in scores.items():
            applied = [value for value in values if value is not None]
            if applied:
                metrics[f"{prefix}_{name}"] = sum(applied) / len(applied)
        return metrics, shown(self.held_out, *completions)

    def scored(
        self, prefix: str = "eval"
    ) -> tuple[tuple[list[Completion], list[Completion]], Scores]:
        """Return greedy and sampled completions of the held-out prompts, and all their scores."""
        rows, scores = self.held_out, {}
        self.model.eval()
        completions = self.complete(rows)
        for infix, said in zip(("", "sampled_"), completions, strict=True):
            judged = self.judge(rows, said)
            self.record_answers(f"{prefix}-{infix[:-1] or 'greedy'}", rows, said, judged)
            each = {**judged, "length": [len(one.ids) for one in said]}
            each["cut_off"] = [not one.finished for one in said]
            scores |= {f"{infix}{name}": values for name, values in each.items()}
        return completions, scores

    def judge(self, rows: Rows, said: Said) -> Scores:
        """Return the scores of the answers to rows, by name."""
        columns = {k: [row[k] for row in rows] for k in rows[0] if k != "prompt"}
        texts = [one.text for one in said]
        return {
            name: checked(score, name)(completions=texts, **columns)
            for name, score in self.scores.items()
        }

    def record(self, split: str, generation: int, *told: Any) -> None:
        """Hand a generation to the record, where the main process keeps one: see `Store.write`."""
        if self.rollouts is not None and self.is_world_process_zero():
            when = self.state.global_step, self.state.epoch or 0.0
            self.rollouts.write(split, generation, when, *told)

    def record_answers(self, split: str, rows: Rows, said: Said, scores: Scores) -> None:
        """Record answers to rows; the step is their generation."""
        if self.rollouts is None:
            return
        rewards = dict(scores)
        total = rewards.pop("reward", [None] * len(rows))
        samples = [
            (row["prompt"], one.text, len(one.ids), one.finished, reward)
            for row, one, reward in zip(rows, said, total, strict=True)
        ]
        self.record(split, self.state.global_step, samples, rewards)

    def _tell(self, metrics: dict[str, float], answers: list[dict[str, Any]]) -> None:
        if self.on_answers is not None and self.is_world_process_zero():
            self.on_answers(self.state.global_step, metrics, answers)

    def answer(
        self, rows: Rows, sampling: Sampling = SAMPLED, max_new_tokens: int | None = None
    ) -> list[dict[str, Any]]:
        """Return question, right answer, greedy and sampled text for every row, in order."""
        completions = self.complete(rows, sampling, max_new_tokens)
        for how, said in zip(("greedy", "sampled"), completions, strict=True):
            self.record_answers(f"samples-{how}", rows, said, {})
        return shown(rows, *completions)

    @property
    def template(self) -> dict[str, Any] | None:
        """The chat template's arguments, where all rows share them: see `prompt_texts`."""
        if not hasattr(self, "chat_template_kwargs"):  # GRPOTrainer's
            return None
        own = {"tools": self.tools or None, "chat_template": self.chat_template}
        return own | self.chat_template_kwargs

    def share(self, rows: Rows) -> list[int]:
        """Return the places of the rows of this process: equally many everywhere.

        The last ones repeat, since generation is collective under ZeRO-3 and FSDP.
        """
        count = math.ceil(len(rows) / self.accelerator.num_processes)
        first = count * self.accelerator.process_index
        return [i % len(rows) for i in range(first, first + count)]

    def complete(
        self, rows: Rows, sampling: Sampling = SAMPLED, max_new_tokens: int | None = None
    ) -> tuple[list[Completion], list[Completion]]:
        """Return a greedy and a sampled completion of every row, in order.

        The processes share the rows. Without `max_new_tokens`, the run's `max_completion_length`
        holds.
        """
        places = self.share(rows)
        device = self.accelerator.device
        options = {
            "max_new_tokens": max_new_tokens or self.max_completion_length,
            "device": device,
            "template": self.template,
        }
        completed = []  # place, greedy and sampled completion
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=getattr(self.args, "ds3_gather_for_generation", True),
                gradient_checkpointing_kwargs=self.args.activation_checkpointing_kwargs,
            ) as model,
            rollouts.seeded(self.args.seed + self.accelerator.process_index, device),
            DistributedBackend(self.accelerator).summon_full_params(
                self.model_wrapped, recurse=False
            ),
        ):
            size = self.args.per_device_eval_batch_size
            for first in range(0, len(places), size):
                batch = places[first : first + size]
                inputs = (model, self.processing_class, [rows[place] for place in batch])
                greedy = rollouts.generate(*inputs, sampling=GREEDY, **options)
                sampled = rollouts.generate(*inputs, sampling=sampling, **options)
                completed += zip(batch, greedy, sampled, strict=True)
        by_place = {place: pair for place, *pair in gather_object(completed)}
        greedy, sampled = zip(*(by_place[place] for place in range(len(rows))), strict=True)
        return list(greedy), list(sampled)


def with_penalties(
    args: Any, rewards: Tensor, lengths: Tensor, finished: Tensor
) -> dict[str, Tensor]:
    """Return the penalties that a run's config names, and `reward_with_penalties`, their sum.

    A penalty is what it adds to the reward, at most 0. All are (B,), as are the rewards and the
    lengths (in tokens) of completions and whether the model ended them. Without a penalty, the
    result is empty: a config holds None in what its row does not read.
    """
    penalties = {}
    cache = getattr(args, "soft_punish_cache", None)
    if cache is not None:
        limit = args.max_completion_length
        penalties["overlong_penalty"] = book.rewards.overlong_penalty(lengths, limit, cache)
    missing_eos = getattr(args, "missing_eos_penalty", None)
    if missing_eos:
        penalties["missing_eos_penalty"] = torch.where(finished.bool(), 0.0, -missing_eos)
    if not penalties:
        return {}
    total = rewards
    for penalty in penalties.values():
        total = total + penalty
    return {**penalties, WITH_PENALTIES: total}


def named_rewards(
    rewards: Tensor, weights: Tensor, names: Sequence[str], said: Said, args: Any
) -> Scores:
    """Return (B, R) rewards by the names of their functions, and their weighted sum as `reward`.

    The penalties that `args` names follow: see `with_penalties`. NaN, where a reward does not
    apply, becomes None.
    """
    rewards, weights = rewards.cpu(), weights.cpu()
    total = (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)
    lengths = torch.tensor([len(one.ids) for one in said])
    finished = torch.tensor([one.finished for one in said])
    columns = dict(zip(names, rewards.T, strict=True)) | {"reward": total}
    columns |= with_penalties(args, total, lengths, finished)
    return {
        name: [None if math.isnan(value) else value for value in column.tolist()]
        for name, column in columns.items()
    }


def shown(rows: Rows, greedy: Said, sampled: Said) -> list[dict[str, Any]]:
    """Return question, right answer, greedy and sampled text for every row."""
    return [
        {
            "question": row.get("question", completion_text(row["prompt"])),
            "answer": right if isinstance(right := row.get("answer"), str | None) else str(right),
            "greedy": one.text,
            "sampled": other.text,
        }
        for row, one, other in zip(rows, greedy, sampled, strict=True)
    ]
