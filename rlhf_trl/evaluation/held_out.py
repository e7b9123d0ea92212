"""Evaluation by answering: held-out prompts, greedily and by sampling, scored by the task."""

import math
from collections.abc import Callable, Sequence
from typing import Any

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
from rlhf_trl.rollouts.generate import GREEDY, SAMPLED, Completion, Completions, Rows, Sampling

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
    is averaged over the answers to which it applies (is not None); a score that applies to none is
    left out. `length` is in tokens, `cut_off` the share of answers that max_completion_length
    ended. The training's random state is left untouched.
    """

    held_out: Sequence[dict[str, Any]] = ()  # rows with a `prompt` and what the scores read
    scores: dict[str, Score]  # reward-like; the data set's columns come as keywords
    max_completion_length: int
    # metrics of the trainer's own evaluation that `on_answers` gets
    measured: tuple[str, ...] = ()
    # called on the main process with step, metrics and answers
    on_answers: Callable[[int, dict[str, float], list[dict[str, Any]]], None] | None = None
    rollouts: Any = None  # the `Store` that records answers, on the main process

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
        self.log(dict(metrics))  # a copy, since `log` adds the epoch to what it gets
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        self._tell(metrics, answers)
        self.model.train(was_training)
        return metrics

    def _scored_answers(self, prefix: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the mean of each score where it applies, by prefixed name, and the answers."""
        completions, scores = self.scored(prefix)
        metrics = {}
        for name, values in scores.items():
            applicable = [value for value in values if value is not None]
            if applicable:
                metrics[f"{prefix}_{name}"] = sum(applicable) / len(applicable)
        return metrics, answer_lines(self.held_out, *completions)

    def scored(
        self, prefix: str = "eval"
    ) -> tuple[tuple[list[Completion], list[Completion]], Scores]:
        """Return greedy and sampled completions of the held-out prompts, and all their scores."""
        rows = self.held_out
        self.model.eval()
        greedy, sampled = self.complete(rows)
        greedy_scores = self._all_scores(rows, greedy, f"{prefix}-greedy")
        sampled_scores = self._all_scores(rows, sampled, f"{prefix}-sampled")
        scores = greedy_scores | {
            f"sampled_{name}": values for name, values in sampled_scores.items()
        }
        return (greedy, sampled), scores

    def _all_scores(self, rows: Rows, completions: Completions, split: str) -> Scores:
        """Judge answers and record them; return their scores, `length` and `cut_off`."""
        scores = self.judge(rows, completions)
        self.record_answers(split, rows, completions, scores)
        length = [len(completion.ids) for completion in completions]
        cut_off = [not completion.finished for completion in completions]
        return {**scores, "length": length, "cut_off": cut_off}

    def judge(self, rows: Rows, answers: Completions) -> Scores:
        """Return the scores of the answers to rows, by name."""
        columns = {k: [row[k] for row in rows] for k in rows[0] if k != "prompt"}
        texts = [answer.text for answer in answers]
        return {
            name: checked(score, name)(completions=texts, **columns)
            for name, score in self.scores.items()
        }

    def record(self, split: str, generation: int, *contents: Any) -> None:
        """Write a generation to the record, if there is one, on the main process.

        `contents` are samples, rewards and further arguments of `Store.write`.
        """
        if self.rollouts is not None and self.is_world_process_zero():
            when = self.state.global_step, self.state.epoch or 0.0
            self.rollouts.write(split, generation, when, *contents)

    def record_answers(self, split: str, rows: Rows, answers: Completions, scores: Scores) -> None:
        """Record answers to rows, with the step as the number of their generation."""
        if self.rollouts is None:
            return
        rewards = dict(scores)
        total = rewards.pop("reward", [None] * len(rows))
        samples = [
            (row["prompt"], answer.text, len(answer.ids), answer.finished, reward)
            for row, answer, reward in zip(rows, answers, total, strict=True)
        ]
        self.record(split, self.state.global_step, samples, rewards)

    def _tell(self, metrics: dict[str, float], answers: list[dict[str, Any]]) -> None:
        if self.on_answers is not None and self.is_world_process_zero():
            self.on_answers(self.state.global_step, metrics, answers)

    def answer(
        self, rows: Rows, sampling: Sampling = SAMPLED, max_new_tokens: int | None = None
    ) -> list[dict[str, Any]]:
        """Answer and record rows; return their `answer_lines`, in order."""
        greedy, sampled = self.complete(rows, sampling, max_new_tokens)
        self.record_answers("samples-greedy", rows, greedy, {})
        self.record_answers("samples-sampled", rows, sampled, {})
        return answer_lines(rows, greedy, sampled)

    @property
    def template(self) -> dict[str, Any] | None:
        """The chat template's arguments, where all rows share them: see `prompt_texts`."""
        if not hasattr(self, "chat_template_kwargs"):  # GRPOTrainer's
            return None
        own = {"tools": self.tools or None, "chat_template": self.chat_template}
        return own | self.chat_template_kwargs

    def share(self, rows: Rows) -> list[int]:
        """Return the places of this process's rows: equally many on every process.

        The last rows repeat the first, since all have to generate together under ZeRO-3 and FSDP.
        """
        count = math.ceil(len(rows) / self.accelerator.num_processes)
        first = count * self.accelerator.process_index
        return [i % len(rows) for i in range(first, first + count)]

    def complete(
        self, rows: Rows, sampling: Sampling = SAMPLED, max_new_tokens: int | None = None
    ) -> tuple[list[Completion], list[Completion]]:
        """Return the greedy completions of all rows, and the sampled ones, in order.

        The processes share the rows. `max_new_tokens` is by default `max_completion_length`.
        """
        places = self.share(rows)
        device = self.accelerator.device
        options = {
            "max_new_tokens": max_new_tokens or self.max_completion_length,
            "device": device,
            "template": self.template,
        }
        completed = []  # (place of a row, its greedy and its sampled completion)
        # as GRPOTrainer generates: the first context gathers weights that ZeRO-3 has sharded, the
        # last one those of FSDP
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
        greedy_by_place: dict[int, Completion] = {}
        sampled_by_place: dict[int, Completion] = {}
        # a row that fills the last share comes twice; its last completion counts, everywhere
        for place, greedy_completion, sampled_completion in gather_object(completed):
            greedy_by_place[place] = greedy_completion
            sampled_by_place[place] = sampled_completion
        all_places = range(len(rows))
        return [greedy_by_place[n] for n in all_places], [sampled_by_place[n] for n in all_places]


def with_penalties(
    args: Any, rewards: Tensor, lengths: Tensor, finished: Tensor
) -> dict[str, Tensor]:
    """Return the penalties of a run, and `reward_with_penalties`, their sum with the rewards.

    A penalty is at most 0. All are (B,), as are the completions' rewards, lengths in tokens, and
    `finished`: whether the model ended them. Without a penalty in the config, the result is empty.
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
    rewards: Tensor, weights: Tensor, names: Sequence[str], answers: Completions, args: Any
) -> Scores:
    """Return (B, R) rewards by the names of their functions, and their weighted sum as `reward`.

    The result also has what `with_penalties` returns for `args`. NaN, which says that a reward does
    not apply, becomes None.
    """
    rewards, weights = rewards.cpu(), weights.cpu()
    # for an answer to which no reward applies, `nansum` is 0, but there is no `reward` either
    total = (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), math.nan)
    lengths = torch.tensor([len(answer.ids) for answer in answers])
    finished = torch.tensor([answer.finished for answer in answers])
    columns = dict(zip(names, rewards.T, strict=True)) | {"reward": total}
    columns |= with_penalties(args, total, lengths, finished)
    return {
        name: [None if math.isnan(value) else value for value in column.tolist()]
        for name, column in columns.items()
    }


def answer_lines(rows: Rows, greedy: Completions, sampled: Completions) -> list[dict[str, Any]]:
    """Return question, right answer, greedy and sampled text for every row."""
    lines = []
    for row, greedy_completion, sampled_completion in zip(rows, greedy, sampled, strict=True):
        right_answer = row.get("answer")
        lines.append(
            {
                "question": row.get("question", completion_text(row["prompt"])),
                "answer": None if right_answer is None else str(right_answer),
                "greedy": greedy_completion.text,
                "sampled": sampled_completion.text,
            }
        )
    return lines
