"""Policies side by side: the same held-out prompts and scores, with errors, in one table."""

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState

from rlhf_trl.book.kl import exact
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import AnswersHeldOut, Scores, named_rewards
from rlhf_trl.rollouts.generate import (
    Completion,
    Sampling,
    check_lengths,
    generate,
    prompt_texts,
)

Numbers = dict[str, dict[str, float | None]]  # by metric: value, error, difference, its error


class Policy(AnswersHeldOut):
    """A policy outside training, which answers and is scored as in the evaluation of a run.

    Args:
        name: for people.
        model: in evaluation mode.
        tokenizer: the model's.
        args (`TrainingArguments`): of the run.
        longest: most tokens of a completion.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, args: Any, longest: int):
        self.name, self.model, self.processing_class, self.args = name, model, tokenizer, args
        self.accelerator = Accelerator(cpu=args.use_cpu, mixed_precision=args.mixed_precision)
        self.model_wrapped = self.accelerator.prepare_model(model, evaluation_mode=True)
        self.max_completion_length, self.scores = longest, {}
        self.rewards: Sequence[Callable[..., Any]] = ()  # in TRL's convention
        self.weights: Sequence[float] | None = None
        self.scorers: Mapping[str, Callable[..., Any]] = {}  # likewise; no part of the reward
        self.template = None
        if hasattr(args, "chat_template_kwargs"):
            self.template = self.chat_template_kwargs = args.chat_template_kwargs or {}
            self.tools = self.chat_template = None

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Stop if an answer to one of them may not fit the context."""
        longest, config = self.max_completion_length, self.model.config
        check_lengths(rows, self.processing_class, config, self.name, longest, self.template)

    def reply(
        self, prompt: Any, sampling: Sampling, streamer: Any = None
    ) -> tuple[Completion, Scores]:
        """Return an answer to one prompt, and what the `scorers` give it."""
        row = {"prompt": prompt}
        (said,) = generate(
            self.model_wrapped,
            self.processing_class,
            [row],
            sampling=sampling,
            max_new_tokens=self.max_completion_length,
            device=self.accelerator.device,
            template=self.template,
            streamer=streamer,
        )
        return said, self._called(self.scorers, [row], [said])

    def judge(self, rows: Sequence[dict[str, Any]], said: Sequence[Completion]) -> Scores:
        """Return the scores, those of all reward functions, what they come to, and the scorers'."""
        scores = super().judge(rows, said)
        if self.rewards:
            names = [function.__name__ for function in self.rewards]
            given = self._called(dict(zip(names, self.rewards, strict=True)), rows, said)
            columns = [[math.nan if v is None else v for v in given[name]] for name in names]
            weights = torch.tensor(self.weights or [1.0] * len(names))
            found = named_rewards(torch.tensor(columns).T, weights, names)
            scores |= {name: values for name, values in found.items() if name not in scores}
        return scores | self._called(self.scorers, rows, said)

    def _called(
        self,
        functions: Mapping[str, Callable[..., Any]],
        rows: Sequence[Mapping[str, Any]],
        said: Sequence[Completion],
    ) -> Scores:
        texts: list[Any] = [one.text for one in said]
        if not isinstance(rows[0]["prompt"], str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        given = {
            **{key: [row[key] for row in rows] for key in rows[0] if key != "prompt"},
            **{"prompts": [row["prompt"] for row in rows], "completions": texts},
            **{"completion_ids": [list(one.ids) for one in said]},
            **{"finished": [one.finished for one in said], "trainer_state": TrainerState()},
            **dict.fromkeys(("log_extra", "log_metric"), lambda *_: None),
        }
        found = {name: function(**given) for name, function in functions.items()}
        return {n: asyncio.run(v) if inspect.iscoroutine(v) else v for n, v in found.items()}

    @torch.no_grad()
    def kl(self, other: "Policy", said: Sequence[Completion]) -> list[float]:
        """Return the KL to another policy along answers to the held-out prompts, in nats each.

        That is the sum, over the tokens of an answer, of the exact KL between the two next-token
        distributions; averaged over sampled answers, it estimates the KL of whole answers.

        Raises:
            InputError: the other one has another vocabulary.
        """
        tokenizer = self.processing_class
        if tokenizer.get_vocab() != other.processing_class.get_vocab():
            raise InputError(
                f"--reference: {other.name} has another vocabulary than {self.name}, so there is "
                "no KL between them; name a model with the same tokenizer."
            )
        texts, found = prompt_texts(tokenizer, self.held_out, self.template), []
        special = isinstance(self.held_out[0]["prompt"], str)
        for text, one in zip(texts, said, strict=True):
            start = tokenizer(text, add_special_tokens=special)["input_ids"]
            ids = torch.tensor([[*start, *one.ids]], device=self.accelerator.device)
            logits, others = (
                each.model_wrapped(input_ids=ids).logits[0, len(start) - 1 : -1].float()
                for each in (self, other)
            )
            width = len(tokenizer)  # what is beyond only fills up, perhaps to another size
            found.append(float(exact(logits[:, :width], others[:, :width]).sum()))
        return found


def mean_and_error(values: Sequence[float], groups: Sequence[Any]) -> tuple[float, float | None]:
    """Return a mean and its standard error, where the values of a group may go together.

    se^2 = G / (G - 1) sum_g (sum_{i in g} (x_i - mean))^2 / n^2, which for groups of one is the
    usual one; None for a single group.

    Args:
        values: (n,).
        groups: (n,) the group of each, such as its prompt.
    """
    mean = sum(values) / len(values)
    sums: dict[Any, float] = defaultdict(float)
    for value, group in zip(values, groups, strict=True):
        sums[group] += value - mean
    if len(sums) < 2:
        return mean, None
    spread = sum(each**2 for each in sums.values()) * len(sums) / (len(sums) - 1)
    return mean, math.sqrt(spread) / len(values)


def compare(scores: Mapping[str, Scores], groups: Sequence[Any]) -> dict[str, Numbers]:
    """Return the numbers of each policy by metric, as a run names them.

    Args:
        scores: by policy; the first is the one that the others differ from.
        groups: the prompt of each row.

    Returns:
        `value` and its `error`; for all but the first also `difference` and `difference_error`,
        over the rows to which the score applies for both.
    """
    first, found = next(iter(scores.values())), {}
    for policy, each in scores.items():
        found[policy] = numbers = {}
        for name, values in each.items():
            told = _applied(("value", "error"), values, groups)
            if each is not first and name in first:
                pairs = zip(values, first[name], strict=True)
                gaps = [None if None in (a, b) else a - b for a, b in pairs]
                told |= _applied(("difference", "difference_error"), gaps, groups)
            if "value" in told:
                numbers[f"eval_{name}"] = told
    return found


def _applied(
    keys: tuple[str, str], values: Sequence[float | None], groups: Sequence[Any]
) -> dict[str, float | None]:
    rows = [(v, g) for v, g in zip(values, groups, strict=True) if v is not None]
    return dict(zip(keys, mean_and_error(*zip(*rows, strict=True)), strict=True)) if rows else {}


def table(found: Mapping[str, Numbers]) -> str:
    """Return one table: a line for each metric, a column for each policy."""
    cells = [["", *found]]
    for key in dict.fromkeys(key for numbers in found.values() for key in numbers):
        row = [key.removeprefix("eval_").replace("_", " ")]
        for told in (numbers.get(key, {}) for numbers in found.values()):
            cell = _shown(told, "value", "error", "")
            if "difference" in told:
                cell += f"  ({_shown(told, 'difference', 'difference_error', '+')})"
            row.append(cell)
        cells.append(row)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    lines += ["", "± is a standard error, by prompt"]
    if len(found) > 1:
        lines[-1] += f"; in brackets, the difference from {next(iter(found))}, prompt by prompt"
    return "\n".join(lines)


def _shown(told: Mapping[str, float | None], value: str, error: str, sign: str) -> str:
    if value not in told:
        return "-"
    return f"{told[value]:{sign}.3f}" + ("" if told[error] is None else f" ± {told[error]:.3f}")
