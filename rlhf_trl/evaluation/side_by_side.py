"""Policies side by side: the same held-out prompts and scores, with errors, in one table."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import LogitsProcessorList

from rlhf_trl.evaluation.function_scores import function_scores
from rlhf_trl.evaluation.held_out import AnswersHeldOut, Completions, Rows, Scores, named_rewards
from rlhf_trl.evaluation.tables import side_by_side
from rlhf_trl.models import load_tokenizer
from rlhf_trl.policies import load_policy
from rlhf_trl.rollouts.generate import GREEDY, Completion, Sampling, check_prompts, generate
from rlhf_trl.rollouts.own_draws import OwnDraws

Numbers = dict[str, dict[str, float | None]]  # by metric
Samples = Sequence[Sequence[float | None]]  # of a metric: the values of a row's answers, by row


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
        # a model with a template of its own keeps it
        self.processing_class = load_tokenizer(
            config, args, conversational, replaces_template=False
        )
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
        completions = self._generate(rows, sampling=sampling, streamer=streamer)
        return completions[0], function_scores(self.scorers, rows, completions)

    def draw(self, number: int) -> list[Completion]:
        """Return a sampled answer to each held-out prompt, another one for each number.

        What is drawn depends on the run's seed, the place of the prompt and the number. It is the
        same in batches of any size, but for their rounding.
        """
        size = self.args.per_device_eval_batch_size
        answers = []
        for first in range(0, len(self.held_out), size):
            rows = self.held_out[first : first + size]
            seeds = [(self.args.seed, first + place, number) for place in range(len(rows))]
            draws = OwnDraws(seeds, self.max_completion_length)
            # the likeliest token is the one drawn, since nothing else is left
            answers += self._generate(
                rows, sampling=GREEDY, logits_processor=LogitsProcessorList([draws])
            )
        return answers

    def _generate(self, rows: Rows, **options: Any) -> list[Completion]:
        """Return an answer to each row; the options are those of `generate`."""
        return generate(
            self.model_wrapped,
            self.processing_class,
            rows,
            max_new_tokens=self.max_completion_length,
            device=self.accelerator.device,
            template=self.template,
            **options,
        )

    def all_scores(self, answers: Completions) -> Scores:
        """Return all scores of answers to the held-out prompts, as in the run's evaluation."""
        return self._all_scores(self.held_out, answers, "")

    def judge(self, rows: Rows, answers: Completions) -> Scores:
        """Return the scores, those of the rewards, the reward they come to, and the scorers'."""
        scores = super().judge(rows, answers)
        if self.rewards:
            functions = {function.__name__: function for function in self.rewards}
            rewards = function_scores(functions, rows, answers)
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
        return scores | function_scores(self.scorers, rows, answers)


def mean_and_error(
    values: Sequence[float | None], groups: Sequence[int], weights: Sequence[float] | None = None
) -> tuple[float | None, float | None]:
    """Return mean and standard error of the values that are not None, clustered by group.

    se^2 = G / (G - 1) sum_g (sum_{i in g} w_i (x_i - mean))^2 / (sum_i w_i)^2

    With one value in each of the G groups and equal weights, this is the usual standard error. The
    mean is None if there is no value, and the error if there is only one group. `weights` are by
    default all 1.
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
    samples: Mapping[str, Mapping[str, Samples]] = MappingProxyType({}),
) -> dict[str, Numbers]:
    """Return means of policies, and differences from the first policy, with standard errors.

    A difference is taken row by row, where the score applies to both policies.

    Args:
        scores: by policy and metric, a value for each of N rows.
        groups: (N,) the number of each row's prompt.
        weights: by policy and metric, (N,) weights of the rows, for metrics whose rows do not count
            equally. If they differ from the first policy's, there is no difference.
        samples: by policy and metric, the values of each row's answers, for metrics whose value of
            a row is the mean over several answers. All answers count equally, each to the prompt of
            its row. A metric has weights or samples, never both.

    Returns:
        By policy and metric, `value`, its `error`, the standard `deviation` of single values,
        `difference` and `difference_error`.
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
            all_values, all_groups = values, groups
            if name in samples.get(policy, {}):  # then there are no weights
                all_values, all_groups = _flattened(samples[policy][name], groups)
            mean, error = mean_and_error(all_values, all_groups, own_weights)
            if mean is None:
                continue
            difference, difference_error = mean_and_error(differences, groups, own_weights)
            numbers[policy][f"eval_{name}"] = {
                "value": mean,
                "error": error,
                "deviation": _deviation(all_values),
                "difference": difference,
                "difference_error": difference_error,
            }
    return numbers


def _flattened(samples: Samples, groups: Sequence[int]) -> tuple[list[float | None], list[int]]:
    """Return the values of all samples of all rows in one list, and the group of each."""
    values: list[float | None] = []
    group_of: list[int] = []
    for row, group in zip(samples, groups, strict=True):
        values += row
        group_of += [group] * len(row)
    return values, group_of


def _deviation(values: Sequence[float | None]) -> float | None:
    """Return the standard deviation of the values that are not None; None of fewer than two."""
    applied = [value for value in values if value is not None]
    return float(np.std(np.array(applied, dtype=float), ddof=1)) if len(applied) > 1 else None


def table(numbers: Mapping[str, Numbers]) -> str:
    """Return one table that fits the terminal: a line for each metric, a column for each policy."""
    return f"{side_by_side(table_lines(numbers))}\n\n{legend(numbers)}"


def table_lines(numbers: Mapping[str, Numbers], deviations: bool = False) -> list[dict[str, str]]:
    """Return a line for each metric with a cell for each policy; `deviations` go into the cells."""
    first = next(iter(numbers))
    lines: dict[str, dict[str, str]] = {}
    for policy, metrics in numbers.items():
        for key, metric in metrics.items():
            cell = _with_error(f"{metric['value']:.3f}", metric["error"])
            if deviations and metric["deviation"] is not None:
                cell += f", sd {metric['deviation']:.3f}"
            if metric["difference"] is not None and policy != first:
                difference = f"{metric['difference']:+.3f}"
                cell += f"  ({_with_error(difference, metric['difference_error'])})"
            name = key.removeprefix("eval_").replace("_", " ")
            lines.setdefault(name, {"": name, **dict.fromkeys(numbers, "-")})[policy] = cell
    return [*lines.values()]


def legend(numbers: Mapping[str, Numbers]) -> str:
    """Return what the errors and brackets of a table's cells mean."""
    text = "±: standard error by prompt"
    if len(numbers) > 1:
        text += f"; in brackets: difference from {next(iter(numbers))}, by prompt"
    return text


def _with_error(value: str, error: float | None) -> str:
    """Return a number with its standard error, where there is one."""
    return value if error is None else f"{value} ± {error:.3f}"
