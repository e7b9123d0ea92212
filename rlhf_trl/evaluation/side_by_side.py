"""Policies side by side: the same held-out prompts and scores, with errors, in one table."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trl.book.kl import exact
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.called import called
from rlhf_trl.evaluation.held_out import AnswersHeldOut, Completions, Rows, Scores, named_rewards
from rlhf_trl.evaluation.tables import side_by_side
from rlhf_trl.models import load_tokenizer
from rlhf_trl.policies import load_policy
from rlhf_trl.rollouts.generate import Completion, Sampling, check_prompts, generate, prompt_texts

Numbers = dict[str, dict[str, float | None]]  # by metric


class Policy(AnswersHeldOut):
    """A policy outside training, which answers and is scored as in the evaluation of a run."""

    rewards: Sequence[Callable[..., Any]] = ()  # the run's
    weights: Sequence[float] | None = None  # of the rewards; None: 1 each
    scorers: Mapping[str, Callable[..., Any]] = {}  # like rewards, but no part of their sum
    columns: Mapping[str, Any] = {}  # what the row of a prompt has beside it in `reply`

    def __init__(self, name: str, config: Any, args: Any, conversational: bool):
        self.name = name
        self.args = args
        self._config = config
        self.scores = {}
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
        rows = [{"prompt": prompt, **self.columns}]
        completions = generate(
            self.model_wrapped,
            self.processing_class,
            rows,
            sampling=sampling,
            max_new_tokens=self.max_completion_length,
            device=self.accelerator.device,
            template=self.template,
            streamer=streamer,
        )
        return completions[0], called(self.scorers, rows, completions)

    def judge(self, rows: Rows, answers: Completions) -> Scores:
        """Return the scores, those of the rewards, the reward they come to, and the scorers'."""
        scores = super().judge(rows, answers)
        if self.rewards:
            functions = {function.__name__: function for function in self.rewards}
            rewards = called(functions, rows, answers)
            columns = [  # with NaN, as TRL has it, where a reward does not apply
                [math.nan if value is None else value for value in values]
                for values in rewards.values()
            ]
            weights = torch.tensor(self.weights or [1.0] * len(columns))
            total = named_rewards(
                torch.tensor(columns).T, weights, list(rewards), answers, self.args
            )
            for name, values in total.items():
                scores.setdefault(name, values)  # as in training, a score of the task goes first
        return scores | called(self.scorers, rows, answers)

    @torch.no_grad()
    def kl(self, other: "Policy", answers: Completions) -> list[float]:
        """Return the KL to another policy along answers to held-out prompts (`book.kl.exact`).

        It is over all logits, as answers are sampled from all. A model may have more logits than
        its tokenizer has tokens.

        Args:
            other: the policy that the KL is to.
            answers: this policy's answer to each held-out prompt.

        Raises:
            InputError: the other policy has another vocabulary, or fewer logits.
        """
        tokenizer = self.processing_class
        if tokenizer.get_vocab() != other.processing_class.get_vocab():
            raise InputError(
                f"--reference: {other.name} has another vocabulary than {self.name}, so there is "
                "no KL between them; name a model with the same tokenizer."
            )
        is_text = isinstance(self.held_out[0]["prompt"], str)  # a chat template has special tokens
        prompts = prompt_texts(tokenizer, self.held_out, self.template)
        kls = []
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt_ids = tokenizer(prompt, add_special_tokens=is_text)["input_ids"]
            logits = self._answer_logits(prompt_ids, answer.ids)
            other_logits = other._answer_logits(prompt_ids, answer.ids)
            missing = other_logits.shape[1] - logits.shape[1]
            if missing < 0:
                raise InputError(
                    f"--reference: {other.name} has {other_logits.shape[1]} logits and {self.name} "
                    f"{logits.shape[1]}, of which some can be sampled from {self.name} only, so "
                    "that the KL is infinite; name a model with as many."
                )
            # what this policy has no logit for, it never samples; -inf would make 0 * inf = NaN
            logits = pad(logits, (0, missing), value=-1e9)
            kls.append(float(exact(logits, other_logits).sum()))
        return kls

    def _answer_logits(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Tensor:
        """Return the (T, V) logits before each token of an answer."""
        ids = torch.tensor([[*prompt_ids, *answer_ids]], device=self.accelerator.device)
        return self.model_wrapped(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float()


def mean_and_error(
    values: Sequence[float | None], groups: Sequence[int], weights: Sequence[float] | None = None
) -> tuple[float | None, float | None]:
    """Return mean and standard error of the values that are not None, clustered by group.

    se^2 = G / (G - 1) sum_g (sum_{i in g} w_i (x_i - mean))^2 / (sum_i w_i)^2; with one value in
    each of the G groups and equal `weights` (None), that is the usual one. The mean is None without
    a value, and the error without a second group.
    """
    places = [place for place, value in enumerate(values) if value is not None]
    if not places:
        return None, None
    x = np.array([values[place] for place in places], dtype=float)
    w = np.array([1 if weights is None else weights[place] for place in places])
    group_of = [groups[place] for place in places]
    count = len(set(group_of))
    total = sum(w.tolist())
    # summed one by one, as in `AnswersHeldOut`: the mean is that of the run bit for bit
    mean = sum(value * weight for value, weight in zip(x.tolist(), w.tolist(), strict=True)) / total
    if count == 1:
        return mean, None
    sums = np.bincount(group_of, w * (x - mean))  # of each group
    return mean, math.sqrt((sums**2).sum() * count / (count - 1)) / total


def compare(
    scores: Mapping[str, Scores],
    groups: Sequence[int],
    weights: Mapping[str, Mapping[str, Sequence[float]]] = MappingProxyType({}),
) -> dict[str, Numbers]:
    """Return means of policies, and differences from the first policy, with standard errors.

    A difference is taken row by row, where the score applies to both.

    Args:
        scores: by policy and metric, a value for each row.
        groups: the number of each row's prompt.
        weights: by policy and metric, those of the rows where they are not all 1; where they are
            not the first policy's, there is no difference.

    Returns:
        By policy and metric, `value`, its `error`, `difference` and `difference_error`.
    """
    first_policy = next(iter(scores))
    numbers: dict[str, Numbers] = {policy: {} for policy in scores}
    for policy, metrics in scores.items():
        for name, values in metrics.items():
            own_weights = weights.get(policy, {}).get(name)
            first_weights = weights.get(first_policy, {}).get(name)
            first_values = scores[first_policy].get(name)
            differences: list[float | None] = [None] * len(values)
            if first_values and own_weights == first_weights:
                for row, (value, first) in enumerate(zip(values, first_values, strict=True)):
                    if value is not None and first is not None:
                        differences[row] = value - first
            mean, error = mean_and_error(values, groups, own_weights)
            if mean is None:
                continue
            difference, difference_error = mean_and_error(differences, groups, own_weights)
            numbers[policy][f"eval_{name}"] = {
                "value": mean,
                "error": error,
                "difference": difference,
                "difference_error": difference_error,
            }
    return numbers


def table(numbers: Mapping[str, Numbers]) -> str:
    """Return one table that fits the terminal: a line for each metric, a column for each policy."""
    first = next(iter(numbers))
    lines: dict[str, dict[str, str]] = {}
    for policy, metrics in numbers.items():
        for key, metric in metrics.items():
            cell = _with_error(f"{metric['value']:.3f}", metric["error"])
            if metric["difference"] is not None and policy != first:
                difference = f"{metric['difference']:+.3f}"
                cell += f"  ({_with_error(difference, metric['difference_error'])})"
            name = key.removeprefix("eval_").replace("_", " ")
            lines.setdefault(name, {"": name, **dict.fromkeys(numbers, "-")})[policy] = cell
    legend = "±: standard error by prompt"
    if len(numbers) > 1:
        legend += f"; in brackets: difference from {first}, by prompt"
    return f"{side_by_side([*lines.values()])}\n\n{legend}"


def _with_error(value: str, error: float | None) -> str:
    """Return a number with its standard error, where there is one."""
    return value if error is None else f"{value} ± {error:.3f}"
