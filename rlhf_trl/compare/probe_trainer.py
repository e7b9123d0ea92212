"""The properties of `probe`, tried on a trainer: TRL's, a subclass of one, or ours.

A trainer runs its own data path on fixed batches (see `measure`) and is judged by its gradient in
the parameters; its TRL base decides which properties it can show.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare import measure, pairs, policy, rows
from rlhf_trl.compare import probe as shared
from rlhf_trl.compare.closest import class_of, config_class
from rlhf_trl.compare.matrix import POLICY
from rlhf_trl.compare.models import quiet, untrained
from rlhf_trl.compare.probe import SCALED, Verdict

SIZES = ((1, 2), (2, 2), (2, 4))
"""Prompts and completions of each; other trainers are given as many texts."""

ROUNDING, FIT = 3e-5, 1e-3  # float32's, of a gradient and of what is left of it by a fit
Inputs = dict[str, Any]
Size = tuple[int, int]
Run = tuple[float, Tensor, Tensor, Any]  # loss, gradient, each micro-batch's share of it, window


class Trained:
    """A trainer's class, run on batches."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Import `module:Class`; `settings` are fields of its config, or a row of ours."""
        shared.look_here()
        self.cls = class_of(path.replace(":", "."))
        self.base = pairs.base_name(self.cls)
        self.online = self.base in POLICY
        self.config = config_class(self.cls, pairs.trainer_classes(self.base)[1])
        self.fields, self.also, self.row = dict(settings), {}, None
        own_config = getattr(self.cls, "config_class", None)
        if default := getattr(own_config, "default_row", None):
            name = self.fields.pop("algorithm", default)
            which = self.fields.pop("formulation", "chapter")
            self.row, self.config = formulation(name, which), self.cls.config_class
            self.fields = rows.own_fields(self.row) | self.fields
            self.also = pairs.arguments(name, which)
        if self.online:
            self.fields = _IN_ORDER | self.fields
        self._windows: dict[Any, Any] = {}
        self._runs: dict[Any, Run] = {}

    @property
    def left_out(self) -> dict[str, str]:
        """The properties that do not apply, and why."""
        found = {shared.NAN: "no NaN can stand there: it makes its own log-probabilities"}
        row, base = self.row, self.base

        def leave(why: str, *names: str) -> None:
            found.update(dict.fromkeys(names, why))

        if not self.online:
            leave("it has no groups and no ratio", shared.ORDER, shared.FLAT, shared.RATIO)
        elif row and (row.family == "distillation" or row.value_loss != "none"):
            leave("a critic or a teacher judges each token", shared.FLAT, shared.ONCE)
        if base == "RewardTrainer":
            leave("it scores, and makes no text more or less likely", shared.ONCE)
            if not row or row.aggregation == "none":
                leave("its model tells padding from the token", shared.GARBAGE)
        if base == "KTOTrainer":
            why = "an example meets the completion of its neighbor in the micro-batch"
            leave(why, shared.PROMPTS, shared.SPLIT)
        if base in ("ORPOTrainer", "CPOTrainer") and not row:
            why = "its likelihood is a mean over all tokens of the micro-batch but the first"
            leave(why, shared.SIDE, shared.SPLIT)
        return found

    def run(self, size: Size, change: Any = None, ready: Any = None, **how: Any) -> Run:
        """Measure a batch; `change` is one of what the loss sees, `ready` one of the trainer."""
        key = size, change, ready, *how.items()
        if key in self._runs:
            return self._runs[key]
        count = size[0] * size[1]
        usual = {"ragged": True, "drift": 0.1, "group": size[1], "rows": count, "iterations": 2}
        usual["temperature"] = self.fields.get("temperature", 1.0)
        self.batch = batch = replace(policy.BATCHES[0], **usual | how)
        if batch not in self._windows:
            self._windows[batch] = self._window(batch)
        window = self._windows[batch]
        build = policy.build_trainer if self.online else pairs.build_trainer
        trainer = build(self.cls, self.config, self.fields, batch, **self.also)
        if ready:
            ready(trainer)
        original, step, sums = trainer.compute_loss, trainer.training_step, []

        def changed(model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
            return original(model, change(inputs) if change else inputs, *args, **kwargs)

        def noted(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            sums.append(measure.flat_gradient(trainer.model))
            return loss

        trainer.compute_loss, trainer.training_step = changed, noted
        found = window.run(trainer)[0] if self.online else window.stock(trainer)
        shares = torch.stack(sums, 1).diff(dim=1, prepend=torch.zeros(len(sums[0]), 1).double())
        self._runs[key] = found.loss, found.gradient, shares, window
        return self._runs[key]

    def _window(self, batch: policy.PolicyBatch) -> Any:
        if not self.online:  # ours order and cut their examples
            ours = [c.__name__ for c in self.cls.__mro__ if c.__name__ in pairs.OURS]
            return pairs.PairWindow(pairs.made_kind(self.also) or [*ours, self.base][0], batch)
        window = policy.PolicyWindow(batch, _IN_ORDER)
        if not batch.drift:  # before the first step the reference is the policy
            window.generating = window.current = window.generating | untrained().state_dict()
        return window

    def columns(self, window: Any) -> Tensor:
        """Return the gradient of each completion's sum of log-probabilities, (N, completions)."""
        view = window.view(window.batch.temperature) if self.online else window.view
        masks = [view.mask] if self.online else [view.micro[0].mask]
        stock = not self.row or self.also.get("formulation") == "trl"
        if stock and self.base in ("ORPOTrainer", "CPOTrainer"):  # which count whole texts, too
            masks.append(view.micro[0].text)
        rows = [mask * one[:, None] for mask in masks for one in torch.eye(len(mask)).double()]
        return torch.stack([view.gradient(r if self.online else [r]) for r in rows], 1)

    def checks(self) -> dict[str, Callable[[Size], str]]:
        """Return the properties: what is wrong with a batch, "" if nothing."""
        first = {"drift": 0.0, "iterations": 1}

        def same(change: Any = None, ready: Any = None) -> Callable[[Size], str]:
            return lambda size: _unlike(self.run(size), self.run(size, change, ready))

        def left(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
            return tensor.gather(1, shared.turned(mask))

        def turned(trainer: Any) -> None:
            answer = policy.completion(self.batch.ragged)
            last = self.batch.group - 1
            measure.fix_completions(trainer, lambda ids, i, call: answer(ids, last - i, call))

        def backward(trainer: Any) -> None:
            count = self.batch.rows // self.batch.group
            trainer.train_dataset = trainer.train_dataset.select(reversed(range(count)))

        def split(size: Size) -> str:
            count, group = size
            micro = {"rows": group, "accumulation": count, "per_generation": count}
            whole, found = self.run(size), self.run(size, **micro)
            told = _unlike(whole, found).removeprefix(SCALED)
            # where a micro-batch has a normalizer of its own, a number makes its share right
            return (SCALED if told and _left(found[2], whole[1])[1] <= FIT else "") + told

        def equal(trainer: Any) -> None:
            trainer.reward_funcs = [_of_the_prompt] * len(trainer.reward_funcs)

        def flat(size: Size) -> str:
            usual, now = self.run(size, **first), self.run(size, ready=equal, **first)
            small = float(now[1].norm()) <= FIT * max(float(usual[1].norm()), FIT)
            return "" if small else f"all groups have equal rewards; {_unlike(usual, now)}"

        def once(size: Size) -> str:
            _, gradient, _, window = self.run(size, **first)
            weights, left = _left(self.columns(window), gradient)
            if left > FIT:
                return f"equal weights of a completion's tokens leave {left:.1%} of the gradient"
            best = int(window.view().rewards.argmax()) if self.online else 0
            if self.online and weights[best] > FIT * weights.abs().max():
                return f"completion {best}, which has the highest reward, is made less likely"
            return ""

        return {
            shared.GARBAGE: same(_each(_garbage)),
            shared.WIDER: same(_each(_padded(0, 3))),
            shared.SIDE: same(_each(_padded(3, 0), True) if self.online else _each(left)),
            shared.ORDER: same(ready=turned),
            shared.PROMPTS: same(ready=backward) if self.online else same(_flipped),
            shared.SPLIT: split,
            shared.FLAT: flat,
            shared.RATIO: lambda s: _unlike(self.run(s, **first), self.run(s, drift=0.0)),
            shared.ONCE: once,
        }


_IN_ORDER = {"shuffle_dataset": False}


def _left(columns: Tensor, gradient: Tensor) -> tuple[Tensor, float]:
    """Return the weights with which columns make a gradient, and what they leave of it."""
    weights = torch.linalg.pinv(columns.T @ columns) @ (columns.T @ gradient)
    size = float(gradient.norm())
    return weights, float((columns @ weights - gradient).norm()) / size if size else 0.0


def _unlike(one: Run, other: Run) -> str:
    return shared.unlike(*one[:2], *other[:2], ROUNDING)


def _each(how: Callable[[str, Tensor, Tensor], Tensor], prompts: bool = False) -> Any:
    """Return a change of tensors of tokens by name, tensor and mask; of `prompts`, or the rest."""

    def change(inputs: Inputs) -> Inputs:
        new, generated = dict(inputs), "completion_ids" in inputs
        starts = ("teacher_prompt_", "prompt_", *(() if generated else ("KL_", *_SIDES)))
        for name, tensor in inputs.items():
            start = next((each for each in starts if name.startswith(each)), "")
            whole = "completion_mask" if generated and not start else f"{start}mask"
            mask = inputs.get(whole if generated else f"{start}attention_mask")
            told = not generated or bool(start) == prompts
            if told and mask is not None and getattr(tensor, "shape", None) == mask.shape:
                new[name] = how(name, tensor, mask)
        return new

    return change


_SIDES = ("chosen_", "rejected_")


def _garbage(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    if "mask" in name or "labels" in name:
        return tensor
    sign = 1 - 2 * (torch.arange(mask.shape[1]) % 2)
    other = (tensor + 37) % 100 + 7 if "ids" in name else shared.FAR * sign
    return torch.where(mask == 0, other, tensor).to(tensor)


def _padded(left: int, right: int) -> Any:
    return lambda name, t, _: pad(t, (left, right), value=-100 if "labels" in name else 0)


def _flipped(inputs: Inputs) -> Inputs:
    """Turn the order of the examples around, of chosen and rejected in their halves."""
    size = inputs.get("list_length", 1)
    halves = 2 if "input_ids" in inputs and "labels" not in inputs and size == 1 else 1

    def flip(tensor: Tensor) -> Tensor:
        parts = [half.unflatten(0, (-1, size)).flip(0) for half in tensor.chunk(halves)]
        return torch.cat(parts).flatten(0, 1)

    return {n: flip(t) if isinstance(t, Tensor) else t for n, t in inputs.items()}


def _of_the_prompt(prompts: Sequence[Any], **_: Any) -> list[float]:
    """Reward all completions of a prompt the same."""
    return [0.5 if prompt == prompts[0] else 0.25 for prompt in prompts]


def probe(path: str, settings: Mapping[str, Any], sizes: Sequence[Size] = SIZES) -> list[Verdict]:
    """Try every property on batches of growing size."""
    trained = Trained(path, settings)
    checks, left_out = trained.checks(), trained.left_out
    texts = {size: f"{size[0] * size[1]} texts" for size in sizes}
    if trained.online:
        texts = {size: f"{size[0]} x {size[1]} completions" for size in sizes}
    with quiet():
        return [
            Verdict(name, "does not apply", left_out[name])
            if name in left_out
            else shared.tried(name, checks[name], texts)
            for name in shared.NAMES
        ]
