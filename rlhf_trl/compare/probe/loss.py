"""Properties that any policy-gradient loss has, tried on a function of which nothing is known.

The function gets tensors by the names of its parameters (`SYNONYMS`) and returns the scalar loss,
a tuple that begins with it, or an object with an attribute `loss`. Batches of growing size are
tried, so that the first one on which a property fails is a small counter-example.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import tables

SYNONYMS = {
    "logps": "logps log_probs log_prob logprobs per_token_logps policy_logps new_logps",
    "old_logps": "old_logps old_log_probs old_log_prob old_logprobs old_per_token_logps",
    "ref_logps": "ref_logps ref_log_probs ref_log_prob ref_logprobs ref_per_token_logps",
    "advantages": "advantages advantage adv",
    "rewards": "rewards reward scores",
    "mask": "mask completion_mask response_mask action_mask loss_mask",
    "num_generations": "num_generations group_size num_rollouts",
    "binary_rewards": "binary_rewards",
}
"""What a function may call its tensors: (B, T), but (B,) rewards; advantages are (B,) or (B, T)."""

SIZES = ((1, 2, 3), (2, 2, 3), (2, 2, 5), (2, 4, 6), (3, 4, 10))
"""Prompts, completions of each, and tokens of the longest one."""

NAMES = (
    "garbage under the mask changes nothing",
    "NaN under the mask changes nothing",
    "more padding changes nothing",
    "the side of the padding does not matter",
    "the order of the completions of a prompt does not matter",
    "the order of the prompts does not matter",
    "micro-batches of one prompt average to the batch",
    "a zero-variance group gives no gradient",
    "at the first step every ratio is 1",
    "each token, and EOS, counts once",
)
"""The properties."""

(
    GARBAGE_UNDER_MASK,
    NAN_UNDER_MASK,
    MORE_PADDING,
    PADDING_SIDE,
    COMPLETION_ORDER,
    PROMPT_ORDER,
    MICRO_BATCHES,
    EQUAL_REWARDS,
    FIRST_RATIO,
    TOKENS_COUNT_ONCE,
) = NAMES

FAR = 30.0  # garbage under the mask: log-probabilities that no ratio survives
Batch = dict[str, Any]  # tensors by their names in SYNONYMS, and `num_generations`
Check = Callable[[Batch], str]  # says what is wrong with a batch, "" for nothing


@dataclass(frozen=True)
class Verdict:
    """What became of a property."""

    name: str
    verdict: str  # "holds", "normalizer not invariant", "broken" or "does not apply"
    example: str = ""  # the smallest batch on which it fails, and what happens there


class Loss:
    """A function as a loss of batches."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Import the function and find out which tensors to pass to it.

        Args:
            path: the module and the function, as `module:function`.
            settings: further arguments, which are passed as they are.

        Raises:
            InputError: the function cannot be imported, lacks a parameter for a tensor that every
                loss needs, needs a further argument, or cannot be run on a batch.
        """
        self.path = path
        self.settings = dict(settings)
        self.function = _imported(path)
        parameters = inspect.signature(self.function).parameters
        # from a tensor's name in SYNONYMS to the function's parameter for it
        self.names = _tensor_names(parameters)
        for any_of in (("logps",), ("mask",), ("advantages", "rewards")):
            if not self.names.keys() & any_of:
                own, known = ", ".join(parameters), ", ".join(SYNONYMS)
                why = f"no parameter for {' or '.join(any_of)}, but {own}"
                raise InputError(f"{path} has {why}; write one around it that has these: {known}")
        required = _required(parameters)
        missing = required - set(self.names.values()) - self.settings.keys()
        if missing:
            raise InputError(
                f"{path} needs {', '.join(sorted(missing))}; write NAME=VALUE for each"
            )
        # losses such as `policy_gradient_loss` refuse a reference where no KL reads it
        if self.names.get("ref_logps") not in required and not self.settings.get("beta"):
            self.names.pop("ref_logps", None)
        self._choose_tensors(required)  # sets `left_out` and `per_token`, which a call reads

    def _choose_tensors(self, required: set[str]) -> None:
        """Choose the optional tensors to leave out, and whether each token has an advantage.

        A function for many algorithms, such as `policy_gradient_loss`, has the default None for
        tensors that only some algorithms read, and refuses a tensor that the chosen algorithm does
        not read. So the choices are tried in turn. The first one with which the function can be run
        is kept in `left_out` and `per_token`.

        Args:
            required: the parameters that the function does not have a default for.
        """
        optional = {
            name
            for name in ("binary_rewards", "old_logps")
            if name in self.names and self.names[name] not in required
        }
        choices = [optional, set()]  # what to leave out, in turn
        if len(optional) == 2:
            choices = [
                {"binary_rewards"},  # most algorithms read old_logps alone
                {"binary_rewards", "old_logps"},  # those without a ratio read neither
                {"old_logps"},  # MaxRL reads binary_rewards alone
                set(),
            ]
        first_error = None
        for per_token in (False, True):
            for left_out in choices:
                self.per_token = per_token
                self.left_out = left_out
                try:
                    self(sample(*SIZES[-1]))
                    return
                except Exception as error:  # whatever the function raises
                    first_error = first_error or error
        problem = f"{self.path} cannot be run on a batch: {first_error!r}"
        raise InputError(problem) from first_error

    def __call__(self, batch: Batch) -> tuple[float, Tensor]:
        """Return the loss and its gradient with respect to the log-probabilities, (B, T)."""
        tensors = dict(batch)
        tensors["logps"] = batch["logps"].clone().requires_grad_()
        if self.per_token:
            tensors["advantages"] = batch["advantages"][:, None].expand_as(batch["logps"])
        arguments = {
            parameter: tensors[name]
            for name, parameter in self.names.items()
            if name not in self.left_out
        }
        loss = self.function(**arguments, **self.settings)
        loss = loss[0] if isinstance(loss, tuple) else getattr(loss, "loss", loss)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise InputError(f"{self.path} returns no scalar; write a function that reduces it")
        (slope,) = torch.autograd.grad(loss, tensors["logps"], allow_unused=True)
        if slope is None:  # the loss does not depend on logps
            slope = torch.zeros_like(batch["logps"])
        return float(loss.detach()), slope


def _imported(path: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    module, _, name = path.partition(":")
    if not name:
        raise InputError(f"{path} names no function; write module:function")
    allow_imports_from_working_folder()
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # whatever the user's module raises
        raise InputError(f"{path} cannot be imported: {error}") from error


def _required(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """Return the parameters without a default, but for `*args` and `**kwargs`."""
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in starred
    }


def _tensor_names(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return how a function calls the tensors that it takes, by the names in SYNONYMS."""
    names = {}
    for name, synonyms in SYNONYMS.items():
        for synonym in synonyms.split():
            if synonym in parameters:
                names.setdefault(name, synonym)
    return names


def allow_imports_from_working_folder() -> None:
    """Let modules of the working folder be imported."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def sample(prompts: int, group: int, tokens: int) -> Batch:
    """Return a batch in float64: ragged completions, padded on the right, ratios of 0.7 to 1.4.

    Log-probabilities under the padding are as random as the others, so that a loss that reads them
    shows it.

    Args:
        prompts: number of prompts.
        group: completions of each prompt.
        tokens: length of the longest completion.
    """
    draw = torch.Generator().manual_seed(prompts * 100 + group * 10 + tokens)
    rows = prompts * group

    def noise(size: float) -> Tensor:
        """Return (rows, tokens) random numbers between -size and size."""
        return size * (2 * torch.rand(rows, tokens, generator=draw, dtype=torch.float64) - 1)

    logps = noise(1.0) - 2
    # 0, 1, 2, ... within each prompt, and up to 0.3 more: no two of a prompt are alike
    rewards = torch.arange(rows, dtype=torch.float64) % group
    rewards = rewards + 0.3 * torch.rand(rows, generator=draw, dtype=torch.float64)
    grouped = rewards.view(prompts, group)
    standardized = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
    advantages = standardized.flatten()
    # at least 2, so that no completion's first token is its last one, too
    lengths = tokens - torch.arange(rows) % (tokens - 1)
    mask = (torch.arange(tokens) < lengths[:, None]).to(torch.float64)
    return {
        "logps": logps,
        "old_logps": logps - noise(0.35),
        "ref_logps": logps - noise(0.2),
        "rewards": rewards,
        "advantages": advantages,
        "binary_rewards": (advantages > 0).to(torch.float64),
        "mask": mask,
        "num_generations": group,
    }


TOKENS = ("logps", "old_logps", "ref_logps", "mask")  # tensors with a number for each token
ROWS = (*TOKENS, "rewards", "advantages", "binary_rewards")  # tensors with a row per completion


def _picked(batch: Batch, rows: Tensor) -> Batch:
    return batch | {name: batch[name][rows] for name in ROWS}


def _filled(value: float, batch: Batch) -> Batch:
    """Put a value under the mask, with a sign that alternates between tokens.

    `old_logps` gets the opposite sign, so that ratios are far from 1, too.
    """
    sign = 1 - 2 * (torch.arange(batch["mask"].shape[1]) % 2)
    signs = {"logps": sign, "old_logps": -sign, "ref_logps": sign}
    filled = dict(batch)
    for name, sign_of_tensor in signs.items():
        filled[name] = torch.where(batch["mask"] == 0, value * sign_of_tensor, batch[name])
    return filled


def left_padded_order(mask: Tensor) -> Tensor:
    """Return (B, T) indices of tokens that, gathered in this order, have the padding on the left.

    `mask` is (B, T) with the padding on the right.
    """
    width = mask.shape[1]
    padding = width - mask.sum(1).long()
    return (torch.arange(width) - padding[:, None]) % width


def _at_first(batch: Batch) -> Batch:
    """Return a batch before the first update: nothing has moved yet."""
    return batch | dict.fromkeys(("old_logps", "ref_logps"), batch["logps"])


def _order(batch: Batch, groups: bool) -> Tensor:
    """Return row numbers that reverse the prompts (`groups`), or else the completions of each.

    Applied twice, they give the original order again.
    """
    size = batch["num_generations"]
    rows = torch.arange(len(batch["mask"])).view(-1, size)
    return (rows.flip(0) if groups else rows.flip(1)).flatten()


def _properties(loss: Loss) -> dict[str, Check]:
    """Return a check of each property."""
    return {
        GARBAGE_UNDER_MASK: partial(_unchanged, loss, partial(_filled, FAR)),
        NAN_UNDER_MASK: partial(_unchanged, loss, partial(_filled, math.nan)),
        MORE_PADDING: partial(_unchanged, loss, _widened, back=_narrowed),
        PADDING_SIDE: partial(_unchanged, loss, _padded_left, back=_padded_right),
        COMPLETION_ORDER: partial(_unchanged_by_order, loss, groups=False),
        PROMPT_ORDER: partial(_unchanged_by_order, loss, groups=True),
        MICRO_BATCHES: partial(_splits, loss),
        EQUAL_REWARDS: partial(_ignores_equal_rewards, loss),
        FIRST_RATIO: partial(_starts_at_ratio_one, loss),
        TOKENS_COUNT_ONCE: partial(_counts_tokens_once, loss),
    }


def _unchanged(
    loss: Loss,
    change: Callable[[Batch], Batch],
    batch: Batch,
    back: Callable[[Batch, Tensor], Tensor] | None = None,
) -> str:
    """Check that a change of the batch changes neither loss nor gradient.

    Args:
        loss: the function.
        change: returns the changed batch.
        batch: the original batch.
        back: for changes that move, add or reorder tokens. It takes the original batch and the
            gradient of the changed one, and returns that gradient in the original order and shape.
    """
    value, slope = loss(batch)
    new_value, new_slope = loss(change(batch))
    if back is not None:
        new_slope = back(batch, new_slope)
    return difference(value, slope, new_value, new_slope)


def _widened(batch: Batch) -> Batch:
    """Add three tokens of padding on the right."""
    return batch | {name: torch.nn.functional.pad(batch[name], (0, 3)) for name in TOKENS}


def _narrowed(batch: Batch, slope: Tensor) -> Tensor:
    return slope[:, : batch["mask"].shape[1]]


def _padded_left(batch: Batch) -> Batch:
    return batch | {
        name: batch[name].gather(1, left_padded_order(batch["mask"])) for name in TOKENS
    }


def _padded_right(batch: Batch, slope: Tensor) -> Tensor:
    return torch.zeros_like(slope).scatter(1, left_padded_order(batch["mask"]), slope)


def _unchanged_by_order(loss: Loss, batch: Batch, groups: bool) -> str:
    """Check that the order of prompts, or of the completions of each, does not matter."""
    order = _order(batch, groups)
    return _unchanged(loss, lambda b: _picked(b, order), batch, lambda _, slope: slope[order])


def _splits(loss: Loss, batch: Batch) -> str:
    """Check that micro-batches of one prompt each average to the batch's loss and gradient.

    Where each micro-batch's gradient only has another length, the normalizer is another one. That
    gives a milder verdict: the fault begins with SCALED.
    """
    size = batch["num_generations"]
    value, slope = loss(batch)
    rows = torch.arange(len(batch["mask"]))
    parts = [loss(_picked(batch, rows_of_prompt)) for rows_of_prompt in rows.split(size)]
    mean_value = sum(part_value for part_value, _ in parts) / len(parts)
    mean_slope = torch.cat([part_slope for _, part_slope in parts]) / len(parts)
    # of each prompt's gradients alone, so the losses are left out: 0 and 0
    faults = [
        difference(0, whole, 0, part)
        for whole, part in zip(slope.split(size), mean_slope.split(size), strict=True)
    ]
    if any(fault and not fault.startswith(SCALED) for fault in faults):
        # broken in some micro-batch, even where the whole gradient happens to be scaled
        return difference(value, slope, mean_value, mean_slope).replace(SCALED, "")
    return max(faults)  # "" only if all are ""


def _ignores_equal_rewards(loss: Loss, batch: Batch) -> str:
    """Check that the first prompt has no gradient if its completions all have the same reward."""
    rows = slice(0, batch["num_generations"])
    equal = {name: batch[name].clone() for name in ("rewards", "advantages", "binary_rewards")}
    equal["rewards"][rows] = 0.7
    equal["advantages"][rows] = 0.0
    equal["binary_rewards"][rows] = 1.0
    _, slope = loss(_at_first(batch) | equal)
    worst = slope[rows].abs().max()
    return "" if worst <= 1e-9 else f"prompt 0 has equal rewards and a gradient of {worst:.1e}"


def _starts_at_ratio_one(loss: Loss, batch: Batch) -> str:
    """Check that before the first update only ratios count, not the log-probabilities themselves.

    All log-probabilities are shifted alike, by another number for each token, so that all ratios
    remain 1.
    """
    first = _at_first(batch)
    shift = torch.linspace(-0.9, 0.4, batch["logps"].numel(), dtype=torch.float64)
    shift = shift.view_as(batch["logps"])
    shifted = {name: first[name] + shift for name in ("logps", "old_logps", "ref_logps")}
    return difference(0, loss(first)[1], 0, loss(first | shifted)[1])


def _counts_tokens_once(loss: Loss, batch: Batch) -> str:
    """Check that all tokens of a completion are pushed alike, in the advantage's direction."""
    first = _at_first(batch)
    _, slope = loss(first)
    advantages = first["advantages"]
    for row, row_slope in enumerate(slope):
        own = row_slope[first["mask"][row] == 1]
        alike = (own - own.mean()).abs().max() <= 1e-7 * own.abs().max()
        if not alike:
            return f"the tokens of row {row}, all alike, have slopes of {_short(own)}"
        if "advantages" in loss.names and (own * advantages[row]).mean() > 0:
            return f"row {row} has advantage {advantages[row]:.2g} and is pushed the other way"
    return ""


SCALED = "scaled: "


def difference(
    value: float, slope: Tensor, new_value: float, new_slope: Tensor, rounding: float = 1e-7
) -> str:
    """Say how a loss and its gradient differ from what they should be, "" if they do not.

    To judge a gradient alone, pass 0 as both losses.

    Args:
        value: the loss as it should be.
        slope: its gradient, in log-probabilities, (B, T), or in parameters, (N,).
        new_value: the loss to judge.
        new_slope: its gradient.
        rounding: relative difference up to which numbers are equal.

    Returns:
        A sentence, which begins with SCALED where the gradient only has another length. A loss
        that differs is a fault, too, even where the gradients agree.
    """
    if not math.isfinite(new_value) or not new_slope.isfinite().all():
        count = int((~new_slope.isfinite()).sum())
        return f"the loss is {new_value:.3g}, its gradient has {count} NaN"
    # what each sentence below adds about the loss
    losses = "" if value == new_value else f", the loss {value:.4g} and {new_value:.4g}"
    length = float(slope.norm())
    new_length = float(new_slope.norm())
    apart = float((slope - new_slope).norm())
    if apart <= rounding * max(length, new_length):
        alike = abs(value - new_value) <= rounding * (1 + abs(value))
        return "" if alike else f"the gradient is the same{losses}"
    if length:  # a zero gradient has no direction to share
        stretched = slope * new_length / length
        if float((stretched - new_slope).norm()) <= rounding * new_length:
            times = f"{new_length / length:.4g} times as long"
            return f"{SCALED}the gradient is {times}{losses}"
    if slope.ndim == 1:  # in parameters: no token to point at
        lengths = f"{length:.4g} and {new_length:.4g}"
        return f"the gradients of lengths {lengths} are {apart:.4g} apart{losses}"
    row, token = divmod(int((slope - new_slope).abs().argmax()), slope.shape[1])
    slopes = f"{slope[row, token]:.4g} and {new_slope[row, token]:.4g}"
    return f"the gradient of row {row}, token {token} is {slopes}{losses}"


def _short(numbers: Tensor) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers.tolist())


def probe(path: str, settings: Mapping[str, Any]) -> list[Verdict]:
    """Try every property of a function, `module:function`, on batches of growing size."""
    batches = {}
    for size in SIZES:
        lengths = _short(sample(*size)["mask"].sum(1))
        batches[size] = f"{size[0]} x {size[1]} completions of {lengths} tokens"
    verdicts = []
    for name, check in _properties(Loss(path, settings)).items():

        def check_size(size: tuple[int, int, int], check: Check = check) -> str:
            return check(sample(*size))

        verdicts.append(try_property(name, check_size, batches))
    return verdicts


def try_property(name: str, check: Callable[[Any], str], batches: Mapping[Any, str]) -> Verdict:
    """Return the verdict on a property.

    A batch on which the property is broken ends the search. A fault that is only SCALED does not,
    as a larger batch may still break the property; the first such fault, on the smallest batch, is
    kept as the example.

    Args:
        name: the property.
        check: says what is wrong with a batch, "" for nothing.
        batches: from what `check` takes for a batch to that batch in words, the smallest first.
    """
    verdict = Verdict(name, "holds")
    for batch, batch_name in batches.items():
        try:
            fault = check(batch)
        except InputError:
            raise
        except Exception as error:  # whatever is probed raises
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if fault and not fault.startswith(SCALED):
            return Verdict(name, "broken", f"{batch_name}: {fault}")
        if fault and verdict.verdict == "holds":
            example = f"{batch_name}: {fault.removeprefix(SCALED)}"
            verdict = Verdict(name, "normalizer not invariant", example)
    return verdict


def report(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as text, each with its example, if there is one, below it."""
    lines = [{"property": verdict.name, "verdict": verdict.verdict} for verdict in verdicts]
    below = [[verdict.example] if verdict.example else [] for verdict in verdicts]
    return tables.text(lines, below)
