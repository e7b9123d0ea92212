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
from itertools import product
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

GARBAGE, NAN, WIDER, SIDE, ORDER, PROMPTS, SPLIT, FLAT, RATIO, ONCE = NAMES

FAR = 30.0  # garbage under the mask: log-probabilities that no ratio survives
Batch = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What became of a property."""

    name: str
    verdict: str  # "holds", "normalizer not invariant", "broken" or "does not apply"
    example: str = ""  # the smallest batch on which it fails, and what happens there


class Loss:
    """A function as a loss of batches."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Import `module:function` and see what it takes; `settings` are given as they are."""
        self.path, self.settings = path, dict(settings)
        module, _, name = path.partition(":")
        if not name:
            raise InputError(f"{path} names no function; write module:function")
        look_here()
        try:
            self.function = getattr(import_module(module), name)
        except Exception as error:  # whatever the user's module raises
            raise InputError(f"{path} cannot be imported: {error}") from error
        known = inspect.signature(self.function).parameters
        found = {ours: [n for n in names.split() if n in known] for ours, names in SYNONYMS.items()}
        self.names = {ours: names[0] for ours, names in found.items() if names}
        for need in (("logps",), ("mask",), ("advantages", "rewards")):
            if not self.names.keys() & need:
                here, names = ", ".join(known), ", ".join(SYNONYMS)
                why = f"no parameter for {' or '.join(need)}, but {here}"
                raise InputError(f"{path} has {why}; write one around it that has these: {names}")
        required = {n for n, p in known.items() if p.default is p.empty and p.kind not in (2, 4)}
        if unmet := required - set(self.names.values()) - self.settings.keys():
            raise InputError(f"{path} needs {', '.join(sorted(unmet))}; write NAME=VALUE for each")
        if self.names.get("ref_logps") not in required and not self.settings.get("beta"):
            self.names.pop("ref_logps", None)
        self._find_out(required)

    def _find_out(self, required: set[str]) -> None:
        """Find out which optional tensors are welcome, and whether each token has an advantage."""
        optional = [n for n in ("binary_rewards", "old_logps") if n in self.names]
        optional = [n for n in optional if self.names[n] not in required]
        given, failed = [set(optional[:1]), set(optional), set(optional[1:]), set()], None
        for self.per_token, self.left_out in product((False, True), given):
            try:
                self(sample(*SIZES[-1]))
                return
            except Exception as error:  # whatever the function raises
                failed = failed or error
        raise InputError(f"{self.path} cannot be run on a batch: {failed!r}") from failed

    def __call__(self, batch: Batch) -> tuple[float, Tensor]:
        """Return the loss and its gradient with respect to the log-probabilities."""
        given = dict(batch)
        given["logps"] = batch["logps"].clone().requires_grad_()
        if self.per_token:
            given["advantages"] = batch["advantages"][:, None].expand_as(batch["logps"])
        tensors = {n: given[ours] for ours, n in self.names.items() if ours not in self.left_out}
        found = self.function(**tensors, **self.settings)
        found = found[0] if isinstance(found, tuple) else getattr(found, "loss", found)
        if not isinstance(found, Tensor) or found.ndim:
            raise InputError(f"{self.path} returns no scalar; write a function that reduces it")
        (slope,) = torch.autograd.grad(found, given["logps"], allow_unused=True)
        return float(found.detach()), torch.zeros_like(batch["logps"]) if slope is None else slope


def look_here() -> None:
    """Let modules of the working folder be imported."""
    sys.path[:0] = [str(Path.cwd())] * (str(Path.cwd()) not in sys.path)


def sample(prompts: int, group: int, tokens: int) -> Batch:
    """Return a batch in float64: ragged completions, padded on the right, ratios of 0.7 to 1.4."""
    draw = torch.Generator().manual_seed(prompts * 100 + group * 10 + tokens)
    rows = prompts * group

    def noise(size: float) -> Tensor:
        return size * (2 * torch.rand(rows, tokens, generator=draw, dtype=torch.float64) - 1)

    logps, rewards = noise(1.0) - 2, torch.arange(rows, dtype=torch.float64) % group
    rewards = rewards + 0.3 * torch.rand(rows, generator=draw, dtype=torch.float64)
    grouped = rewards.view(prompts, group)
    centered = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
    lengths = tokens - torch.arange(rows) % (tokens - 1)  # never 1, so that a last token is one
    mask = (torch.arange(tokens) < lengths[:, None]).to(torch.float64)
    batch = {"logps": logps, "old_logps": logps - noise(0.35), "ref_logps": logps - noise(0.2)}
    batch |= {"rewards": rewards, "advantages": centered.flatten()}
    batch["binary_rewards"] = (centered.flatten() > 0).to(torch.float64)
    return batch | {"mask": mask, "num_generations": group}


TOKENS = ("logps", "old_logps", "ref_logps", "mask")
ROWS = (*TOKENS, "rewards", "advantages", "binary_rewards")


def _picked(batch: Batch, rows: Tensor) -> Batch:
    return batch | {name: batch[name][rows] for name in ROWS}


def _filled(value: float, batch: Batch) -> Batch:
    """Put a value under the mask; the signs alternate, and between tensors, too."""
    sign = 1 - 2 * (torch.arange(batch["mask"].shape[1]) % 2)
    hidden, signs = batch["mask"] == 0, (sign, -sign, sign)
    pairs = zip(TOKENS, signs, strict=False)
    return batch | {n: torch.where(hidden, value * each, batch[n]) for n, each in pairs}


def turned(mask: Tensor) -> Tensor:
    """Return the place of each token with the padding on the left."""
    width, lengths = mask.shape[1], mask.sum(1).long()
    return (torch.arange(width) - (width - lengths)[:, None]) % width


def _at_first(batch: Batch) -> Batch:
    """Return a batch before the first update: nothing has moved yet."""
    return batch | dict.fromkeys(("old_logps", "ref_logps"), batch["logps"])


def _order(batch: Batch, groups: bool) -> Tensor:
    """Turn around the prompts, or the completions of each; twice is the order as it was."""
    size = batch["num_generations"]
    rows = torch.arange(len(batch["mask"])).view(-1, size)
    return (rows.flip(0) if groups else rows.flip(1)).flatten()


def _properties(loss: Loss) -> dict[str, Callable[[Batch], str]]:
    """Return the properties: what is wrong with a batch, "" if nothing."""

    def same(
        change: Callable[[Batch], Batch],
        back: Callable[[Batch, Tensor], Tensor] = lambda _, slope: slope,
    ) -> Callable[[Batch], str]:
        def check(batch: Batch) -> str:
            (value, slope), (other, moved) = loss(batch), loss(change(batch))
            return unlike(value, slope, other, back(batch, moved))

        return check

    def reordered(groups: bool) -> Callable[[Batch], str]:
        return same(lambda b: _picked(b, _order(b, groups)), lambda b, s: s[_order(b, groups)])

    def wider(batch: Batch) -> Batch:
        return batch | {n: torch.nn.functional.pad(batch[n], (0, 3)) for n in TOKENS}

    def left(batch: Batch) -> Batch:
        return batch | {n: batch[n].gather(1, turned(batch["mask"])) for n in TOKENS}

    def right(batch: Batch, slope: Tensor) -> Tensor:
        return torch.zeros_like(slope).scatter(1, turned(batch["mask"]), slope)

    def split(batch: Batch) -> str:
        size, rows = batch["num_generations"], torch.arange(len(batch["mask"]))
        value, slope = loss(batch)
        parts = [loss(_picked(batch, each)) for each in rows.split(size)]
        mean = sum(each for each, _ in parts) / len(parts)
        found = torch.cat([each for _, each in parts]) / len(parts)
        scales = [
            unlike(0, old, 0, new)
            for old, new in zip(slope.split(size), found.split(size), strict=True)
        ]
        if any(each and not each.startswith(SCALED) for each in scales):
            return unlike(value, slope, mean, found).replace(SCALED, "")
        return max(scales)

    def flat(batch: Batch) -> str:
        rows = slice(0, batch["num_generations"])
        now = {name: batch[name].clone() for name in ("rewards", "advantages", "binary_rewards")}
        now["rewards"][rows], now["advantages"][rows], now["binary_rewards"][rows] = 0.7, 0.0, 1.0
        worst = loss(_at_first(batch) | now)[1][rows].abs().max()
        return "" if worst <= 1e-9 else f"prompt 0 has equal rewards and a gradient of {worst:.1e}"

    def first(batch: Batch) -> str:
        now = _at_first(batch)
        shift = torch.linspace(-0.9, 0.4, batch["logps"].numel(), dtype=torch.float64)
        moved = {n: now[n] + shift.view_as(batch["logps"]) for n in TOKENS[:3]}
        return unlike(0, loss(now)[1], 0, loss(now | moved)[1])

    def once(batch: Batch) -> str:
        now = _at_first(batch)
        slope, advantages = loss(now)[1], now["advantages"]
        for row, each in enumerate(slope):
            own = each[now["mask"][row] == 1]
            if not (own - own.mean()).abs().max() <= 1e-7 * own.abs().max():
                return f"the tokens of row {row}, all alike, have slopes of {_short(own)}"
            if "advantages" in loss.names and (own * advantages[row]).mean() > 0:
                return f"row {row} has advantage {advantages[row]:.2g} and is pushed the other way"
        return ""

    return {
        GARBAGE: same(partial(_filled, FAR)),
        NAN: same(partial(_filled, math.nan)),
        WIDER: same(wider, lambda batch, slope: slope[:, : batch["mask"].shape[1]]),
        SIDE: same(left, right),
        ORDER: reordered(groups=False),
        PROMPTS: reordered(groups=True),
        SPLIT: split,
        FLAT: flat,
        RATIO: first,
        ONCE: once,
    }


SCALED = "scaled: "


def unlike(value: float, slope: Tensor, other: float, moved: Tensor, rounding: float = 1e-7) -> str:
    """Say how a loss and its gradient differ from what they should be, "" if they do not.

    A gradient is in log-probabilities, (B, T), or in parameters, (N,).
    """
    if not math.isfinite(other) or not moved.isfinite().all():
        return f"the loss is {other:.3g}, its gradient has {int((~moved.isfinite()).sum())} NaN"
    losses = f", the loss {value:.4g} and {other:.4g}" * (value != other)
    size, length, apart = (float(each.norm()) for each in (slope, moved, slope - moved))
    if apart <= rounding * max(size, length):
        alike = abs(value - other) <= rounding * (1 + abs(value))
        return "" if alike else f"the gradient is the same{losses}"
    if size and float((slope * length / size - moved).norm()) <= rounding * length:
        return f"{SCALED}the gradient is {length / size:.4g} times as long{losses}"
    if slope.ndim == 1:
        return f"the gradients of lengths {size:.4g} and {length:.4g} are {apart:.4g} apart{losses}"
    row, token = divmod(int((slope - moved).abs().argmax()), slope.shape[1])
    slopes = f"{slope[row, token]:.4g} and {moved[row, token]:.4g}"
    return f"the gradient of row {row}, token {token} is {slopes}{losses}"


def _short(numbers: Tensor) -> str:
    return ", ".join(f"{each:.3g}" for each in numbers.tolist())


def probe(path: str, settings: Mapping[str, Any]) -> list[Verdict]:
    """Try every property on batches of growing size."""
    batches, checks = {}, _properties(Loss(path, settings))
    for size in SIZES:
        lengths = _short(sample(*size)["mask"].sum(1))
        batches[size] = f"{size[0]} x {size[1]} completions of {lengths} tokens"
    return [
        tried(name, lambda size, c=check: c(sample(*size)), batches)
        for name, check in checks.items()
    ]


def tried(name: str, check: Callable[[Any], str], batches: Mapping[Any, str]) -> Verdict:
    """Return the verdict on a property; `batches` are named, the smallest first."""
    found = Verdict(name, "holds")
    for batch, where in batches.items():
        try:
            told = check(batch)
        except InputError:
            raise
        except Exception as error:  # whatever is probed raises
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if told and not told.startswith(SCALED):
            return Verdict(name, "broken", f"{where}: {told}")
        if told and found.verdict == "holds":
            example = f"{where}: {told.removeprefix(SCALED)}"
            found = Verdict(name, "normalizer not invariant", example)
    return found


def report(found: Sequence[Verdict]) -> str:
    """Return the verdicts as text."""
    lines = [{"property": each.name, "verdict": each.verdict} for each in found]
    return tables.text(lines, [[each.example] if each.example else [] for each in found])
