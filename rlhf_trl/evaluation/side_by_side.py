"""Policies side by side: the same held-out prompts and scores, with errors, in one table."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import pad

from rlhf_trl.book.kl import exact
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import AnswersHeldOut, Rows, Said, Scores, called, named_rewards
from rlhf_trl.evaluation.tables import side_by_side
from rlhf_trl.models import load_policy, load_tokenizer
from rlhf_trl.rollouts.generate import Completion, Sampling, check_prompts, generate, prompt_texts

Numbers = dict[str, dict[str, float | None]]  # by metric


class Policy(AnswersHeldOut):
    """A policy outside training, which answers and is scored as in the evaluation of a run."""

    rewards: Sequence[Callable[..., Any]] = ()  # the run's
    weights: Sequence[float] | None = None  # of these; None: 1 each
    scorers: Mapping[str, Callable[..., Any]] = {}  # like them, but no part of the reward
    columns: Mapping[str, Any] = {}  # beside the prompt, of what `reply` answers

    def __init__(self, name: str, config: Any, args: Any, conversational: bool):
        self.name, self.args, self._config, self.scores = name, args, config, {}
        self.processing_class = load_tokenizer(config, args, conversational)
        self.model = load_policy(config, args)
        self.max_completion_length = args.max_completion_length
        self.accelerator = Accelerator(cpu=args.use_cpu, mixed_precision=args.mixed_precision)
        self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
        if hasattr(args, "chat_template_kwargs"):
            self.chat_template_kwargs = args.chat_template_kwargs or {}
            self.tools = self.chat_template = None

    def check(self, rows: Rows) -> None:
        """Refuse prompts whose answers may not fit the context."""
        check_prompts(rows, self.processing_class, self._config, self.args, self.model.config)

    def reply(
        self, prompt: Any, sampling: Sampling, streamer: Any = None
    ) -> tuple[Completion, Scores]:
        """Return an answer to one prompt, and what the `scorers` give it."""
        rows, device = [{"prompt": prompt, **self.columns}], self.accelerator.device
        options = {"sampling": sampling, "max_new_tokens": self.max_completion_length}
        options |= {"device": device, "template": self.template, "streamer": streamer}
        said = generate(self.model_wrapped, self.processing_class, rows, **options)
        return said[0], called(self.scorers, rows, said)

    def judge(self, rows: Rows, said: Said) -> Scores:
        """Return the scores, those of the rewards, the reward they come to, and the scorers'."""
        scores = super().judge(rows, said)
        if self.rewards:
            given = called({f.__name__: f for f in self.rewards}, rows, said)
            columns = [[math.nan if v is None else v for v in each] for each in given.values()]
            weights = torch.tensor(self.weights or [1.0] * len(columns))
            named = named_rewards(torch.tensor(columns).T, weights, list(given), said, self.args)
            scores = {**scores, **named, **scores}  # the first ones keep their place and value
        return scores | called(self.scorers, rows, said)

    @torch.no_grad()
    def kl(self, other: "Policy", said: Said) -> list[float]:
        """Return the KL to another policy along answers to held-out prompts (`book.kl.exact`).

        It is over all logits, from which the answers were sampled, be they more than the tokens.
        """
        tokenizer, found = self.processing_class, []
        if tokenizer.get_vocab() != other.processing_class.get_vocab():
            raise InputError(
                f"--reference: {other.name} has another vocabulary than {self.name}, so there is "
                "no KL between them; name a model with the same tokenizer."
            )
        special = isinstance(self.held_out[0]["prompt"], str)  # a chat template has them
        texts = prompt_texts(tokenizer, self.held_out, self.template)
        for asked, one in zip(texts, said, strict=True):
            start = tokenizer(asked, add_special_tokens=special)["input_ids"]
            ids = torch.tensor([[*start, *one.ids]], device=self.accelerator.device)
            mine, others = (
                each.model_wrapped(input_ids=ids).logits[0, len(start) - 1 : -1].float()
                for each in (self, other)
            )
            extra = others.shape[1] - mine.shape[1]
            if extra < 0:
                raise InputError(
                    f"--reference: {other.name} has {others.shape[1]} logits and {self.name} "
                    f"{mine.shape[1]}, of which some can be sampled from {self.name} only, so that "
                    "the KL is infinite; name a model with as many."
                )
            mine = pad(mine, (0, extra), value=-1e9)  # never sampled
            found.append(float(exact(mine, others).sum()))
        return found


def mean_and_error(
    values: Sequence[float | None], groups: Sequence[int], weights: Sequence[float] | None = None
) -> tuple[float | None, float | None]:
    """Return mean and standard error of what is not None, where values of a group go together.

    se^2 = G / (G - 1) sum_g (sum_{i in g} w_i (x_i - mean))^2 / (sum_i w_i)^2; with one value in
    each of the G groups and equal `weights` (None), that is the usual one. None: no value, or no
    second group.
    """
    weights = [1] * len(values) if weights is None else weights
    rows = [row for row in zip(values, groups, weights, strict=True) if row[0] is not None]
    if not rows:
        return None, None
    values, groups, weights = map(list, zip(*rows, strict=True))
    total, count = sum(weights), len(set(groups))
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    sums = np.bincount(groups, np.array(weights) * (np.array(values, dtype=float) - mean))
    spread = (sums**2).sum() * count / max(count - 1, 1)
    return mean, math.sqrt(spread) / total if count > 1 else None


def compare(
    scores: Mapping[str, Scores],
    groups: Sequence[int],
    weights: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType({}),
) -> dict[str, Numbers]:
    """Return, by policy and metric, `value` and `difference` from the first policy, and `error`s.

    A difference is taken row by row, where the score applies to both; `groups` numbers the prompts.
    `weights` has, by policy and metric, those of the rows where they are not all 1; where they are
    not the first policy's, there is no difference.
    """
    start, found = next(iter(scores)), {name: {} for name in scores}
    first = scores[start]
    for policy, each in scores.items():
        for name, values in each.items():
            own, others = (weights.get(model, {}).get(name) for model in (policy, start))
            comparable = first.get(name) if own == others else None
            pairs = zip(values, comparable or [None] * len(values), strict=True)
            gaps = [None if None in pair else pair[0] - pair[1] for pair in pairs]
            told = (*mean_and_error(values, groups, own), *mean_and_error(gaps, groups, own))
            if told[0] is not None:
                keys = ("value", "error", "difference", "difference_error")
                found[policy][f"eval_{name}"] = dict(zip(keys, told, strict=True))
    return found


def table(found: Mapping[str, Numbers]) -> str:
    """Return one table that fits the terminal: a line for each metric, a column for each policy."""
    first, legend = next(iter(found)), "±: standard error by prompt"
    lines: dict[str, dict[str, str]] = {}
    for policy, numbers in found.items():
        for key, told in numbers.items():
            cell = _with_error(f"{told['value']:.3f}", told["error"])
            if told["difference"] is not None and policy != first:
                gap = _with_error(f"{told['difference']:+.3f}", told["difference_error"])
                cell += f"  ({gap})"
            name = key.removeprefix("eval_").replace("_", " ")
            lines.setdefault(name, {"": name, **dict.fromkeys(found, "-")})[policy] = cell
    if len(found) > 1:
        legend += f"; in brackets: difference from {first}, by prompt"
    return f"{side_by_side([*lines.values()])}\n\n{legend}"


def _with_error(value: str, error: float | None) -> str:
    """Return a number with its standard error, where there is one."""
    return value if error is None else f"{value} ± {error:.3f}"
