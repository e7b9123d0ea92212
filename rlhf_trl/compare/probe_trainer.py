"""The properties of `probe`, tried on a trainer: TRL's, a subclass of one, or ours.

A trainer runs its own data path on fixed batches (see `measure`) and is judged by the gradient in
the parameters. Its TRL base decides which properties it can show. What weight each completion has
is read off the gradient: it is a sum of those of the completions' log-probabilities.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare import measure, pairs, policy, rows
from rlhf_trl.compare import probe as of_functions
from rlhf_trl.compare.closest import class_of, config_class
from rlhf_trl.compare.matrix import POLICY
from rlhf_trl.compare.models import quiet, untrained
from rlhf_trl.compare.probe import FAR, SCALED, Verdict, judged
from rlhf_trl.errors import InputError

SIZES = ((1, 2), (2, 2), (2, 4))
"""Prompts and completions of each, or pairs in place of prompts."""

# rounding in float32, of a gradient and of what a least-squares fit makes of it
ROUNDING, FIT = 3e-5, 1e-3
Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]

_OFFLINE = {
    of_functions.NAN: "no NaN can stand there: the trainer makes its own log-probabilities",
    of_functions.ORDER: "it has no groups",
    of_functions.FLAT: "it has no groups",
    of_functions.RATIO: "it has no ratio",
}


@dataclass(frozen=True)
class Run:
    """What a window gives."""

    loss: float
    gradient: Tensor  # (N,)
    parts: Tensor  # (N, micro-batches) what each adds to the gradient
    window: Any  # that it ran on


class Trained:
    """A trainer's class, run on batches."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Import `module:Class`; `settings` are fields of its config, or a row of ours."""
        self.path, fields = path, dict(settings)
        of_functions.look_here()
        self.cls = class_of(path.replace(":", "."))
        self.base = pairs.base_name(self.cls)
        _, stock = pairs.trainer_classes(self.base)
        self.config = config_class(self.cls, stock)
        self.also: dict[str, Any] = {}
        self.row = None
        if hasattr(self.cls, "default_row"):
            names = ("algorithm", "formulation")
            usual = (self.cls.default_row, "chapter")
            self.also = {n: fields.pop(n, u) for n, u in zip(names, usual, strict=True)}
            self.row = formulation(**{f"{n}_name": v for n, v in self.also.items()})
            self.config = self.cls.config_class
            fields = rows.own_fields(self.row) | fields
            self.also |= pairs.STEP if self.also["algorithm"] == "prm" else {}
        self.fields, self.online = fields, self.base in POLICY
        self.windows: dict[Any, Any] = {}

    @property
    def left_out(self) -> dict[str, str]:
        """The properties that do not apply, and why."""
        found = {of_functions.NAN: _OFFLINE[of_functions.NAN]} if self.online else dict(_OFFLINE)
        row, base = self.row, self.base
        if self.online and row and (row.family == "distillation" or row.value_loss != "none"):
            found |= dict.fromkeys(
                (of_functions.FLAT, of_functions.ONCE), "a critic or a teacher judges each token"
            )
        if base == "RewardTrainer":
            found[of_functions.GARBAGE] = "what is padding is told from the token"
            found[of_functions.ONCE] = "it scores whole texts"
        if base == "KTOTrainer":
            why = "each example meets the completion of its neighbor in the batch"
            found |= dict.fromkeys((of_functions.PROMPTS, of_functions.SPLIT), why)
        if base in ("ORPOTrainer", "CPOTrainer") and not row:
            why = "its likelihood is one mean over all tokens of a micro-batch but the first"
            found |= dict.fromkeys((of_functions.SIDE, of_functions.SPLIT), why)
        return found

    def run(
        self,
        size: tuple[int, int],
        change: Change | None = None,
        ready: Callable[[Any], None] = lambda trainer: None,
        **how: Any,
    ) -> Run:
        """Measure a batch; `change` is one of what the loss sees, `ready` one of the trainer."""
        prompts, group = size
        count = prompts * group
        usual = {"ragged": True, "drift": 0.1, "group": group, "rows": count}
        batch = replace(policy.BATCHES[0], **usual | {"iterations": 2} | how)
        heat = {n: self.fields[n] for n in ("temperature",) if self.online and n in self.fields}
        self.batch = batch = replace(batch, **heat)
        if batch not in self.windows:
            if self.online:
                new = policy.PolicyWindow(batch, {"shuffle_dataset": False})
            else:  # ours order and cut their examples
                ours = [c.__name__ for c in self.cls.__mro__ if c.__name__ in pairs.OURS]
                kind = pairs.made_kind(self.also) or [*ours, self.base][0]
                new = pairs.PairWindow(kind, batch)
            if self.online and not batch.drift:  # before the first step the reference is the policy
                new.generating = new.current = new.generating | untrained().state_dict()
            self.windows[batch] = new
        window = self.windows[batch]
        given = {"shuffle_dataset": False} if self.online else {}
        build = policy.build_trainer if self.online else pairs.build_trainer
        columns = () if self.online else ((),)
        trainer = build(self.cls, self.config, given | self.fields, batch, *columns, **self.also)
        ready(trainer)
        original, step, sums = trainer.compute_loss, trainer.training_step, []

        def changed(model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
            return original(model, change(inputs) if change else inputs, *args, **kwargs)

        def noted(model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = step(model, *args, **kwargs)
            sums.append(measure.flat_gradient(trainer.model))
            return loss

        trainer.compute_loss, trainer.training_step = changed, noted
        if self.online:
            measured, _ = window.run(trainer)
        else:
            trainer.model.load_state_dict(window.current)
            measured, _ = measure.accumulate(trainer, measure.batches(trainer))
        parts = [now - before for now, before in zip(sums, [0 * sums[0], *sums], strict=False)]
        return Run(measured.loss, measured.gradient, torch.stack(parts, 1), window)

    def columns(self, run: Run) -> Tensor:
        """Return the gradient of each completion's sum of log-probabilities, (N, completions)."""
        if self.online:
            view = run.window.view(run.window.batch.temperature)
            return torch.stack([view.gradient(each) for each in _rows_alone(view.mask)], 1)
        view, found = run.window.view, []
        for place, part in enumerate(view.micro):
            # ORPO and CPO count the likelihood of whole texts, too
            texts = [part.text] if self.base in ("ORPOTrainer", "CPOTrainer") else []
            for mask in (part.mask, *texts):
                for each in _rows_alone(mask):
                    weights = [0 * other.outputs for other in view.micro]
                    weights[place] = each
                    found.append(view.gradient(weights))
        return torch.stack(found, 1)


def _rows_alone(mask: Tensor) -> list[Tensor]:
    return [mask * (torch.arange(len(mask)) == row).unsqueeze(1) for row in range(len(mask))]


def _fitted(columns: Tensor, gradient: Tensor) -> tuple[Tensor, float]:
    """Return the weights with which columns make a gradient, and what they leave of it."""
    weights = torch.linalg.pinv(columns.T @ columns) @ (columns.T @ gradient)
    size = float(gradient.norm())
    return weights, float((columns @ weights - gradient).norm()) / size if size else 0.0


def _families(inputs: Inputs, prompts: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the masks of what a loss sees, (B, T), and the tensors that each is for."""
    tokens = [n for n, t in inputs.items() if isinstance(t, Tensor) and t.dim() == 2]
    if "completion_ids" not in inputs:  # texts that were given
        starts = [n.removesuffix("attention_mask") for n in tokens if "attention_mask" in n]
        for start in starts:
            others = tuple(other for other in starts if other and not start)
            mine = [n for n in tokens if n.startswith(start) and not n.startswith(others)]
            yield f"{start}attention_mask", mine
        return
    for start in ("prompt_", "teacher_prompt_") if prompts else ("completion_",):
        if f"{start}mask" in inputs:
            mine = [n for n in tokens if n.startswith(start)] if prompts else tokens
            yield f"{start}mask", [n for n in mine if ("prompt" in n) == prompts]


def _each(how: Callable[[str, Tensor, Tensor], Tensor], prompts: bool = False) -> Change:
    """Return a change of tensors of tokens by name, tensor and mask; of prompts, or of the rest."""

    def change(inputs: Inputs) -> Inputs:
        found = dict(inputs)
        for mask, names in _families(inputs, prompts):
            for name in names:
                if inputs[name].shape == inputs[mask].shape:
                    found[name] = how(name, inputs[name], inputs[mask])
        return found

    return change


def _garbage(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    if "mask" in name or "labels" in name:
        return tensor
    sign = 1 - 2 * (torch.arange(mask.shape[1]) % 2)
    other = (tensor + 37) % 100 + 7 if "ids" in name else FAR * sign
    return torch.where(mask == 0, other, tensor).to(tensor)


def _padded(left: int, right: int) -> Any:
    return lambda name, t, _: pad(t, (left, right), value=-100 if "labels" in name else 0)


def _flipped(inputs: Inputs) -> Inputs:
    """Turn the order of the examples around, of chosen and rejected in their halves."""
    halves = 2 if "input_ids" in inputs and "labels" not in inputs else 1
    listed = inputs.get("list_length", 1)

    def flip(each: Tensor) -> Tensor:
        return each.unflatten(0, (-1, listed)).flip(0).flatten(0, 1)

    return {
        n: torch.cat([flip(half) for half in t.chunk(1 if listed > 1 else halves)])
        if isinstance(t, Tensor)
        else t
        for n, t in inputs.items()
    }


def _unlike(one: Run, other: Run) -> str:
    """Say how two runs differ that should not, "" if they do not."""
    if not (other.gradient.isfinite().all() and abs(other.loss) < torch.inf):
        return f"the loss is {other.loss:.3g}, its gradient has {_short(other.gradient)}"
    size, length = float(one.gradient.norm()), float(other.gradient.norm())
    apart = float((one.gradient - other.gradient).norm())
    losses = f", the loss {one.loss:.4g} and {other.loss:.4g}"
    if apart <= ROUNDING * max(size, length):
        alike = abs(one.loss - other.loss) <= ROUNDING * (1 + abs(one.loss))
        return "" if alike else f"the gradient is the same{losses}"
    along = float((one.gradient * length / size - other.gradient).norm()) if size else length
    if along <= ROUNDING * length:
        return f"{SCALED}the gradient is {length / size:.4g} times as long{losses}"
    return f"the gradient is {apart / size if size else length:.2g} of its length away{losses}"


def _short(gradient: Tensor) -> str:
    return f"{int((~gradient.isfinite()).sum())} NaN"


def _properties(of: Trained) -> Iterator[tuple[str, Callable[[tuple[int, int]], str]]]:
    """Yield the properties: a function of a size that returns what is wrong, "" if nothing."""
    first = {"drift": 0.0, "iterations": 1}

    def same(change: Change | None = None, ready: Any = None) -> Callable[[tuple[int, int]], str]:
        also = {"ready": ready} if ready else {}
        return lambda size: _unlike(of.run(size), of.run(size, change, **also))

    yield of_functions.GARBAGE, same(_each(_garbage))
    yield of_functions.WIDER, same(_each(_padded(0, 3)))
    if of.online:
        yield of_functions.SIDE, same(_each(_padded(3, 0), prompts=True))
    else:
        left = lambda _, t, mask: t.gather(1, of_functions.turned(mask))  # noqa: E731
        yield of_functions.SIDE, same(_each(left))

    def turned(trainer: Any) -> None:
        batch = of.batch
        answer = policy.completion(batch.ragged, batch.limit)
        last = batch.group - 1
        measure.fix_completions(trainer, lambda ids, i, call: answer(ids, last - i, call))

    def prompts(trainer: Any) -> None:
        count = of.batch.rows * of.batch.accumulation // of.batch.group
        trainer.train_dataset = trainer.train_dataset.select(reversed(range(count)))

    yield of_functions.ORDER, same(ready=turned)
    order = same(ready=prompts) if of.online else same(_flipped)
    yield of_functions.PROMPTS, order

    def split(size: tuple[int, int]) -> str:
        count, group = size
        whole = of.run(size)
        found = of.run(size, rows=group, accumulation=count, per_generation=count)
        told = _unlike(whole, found)
        # where a micro-batch has a normalizer of its own, the right one is it times a number
        scaled = _fitted(found.parts, whole.gradient)[1] <= FIT
        return f"{SCALED}{told.removeprefix(SCALED)}" if told and scaled else told

    yield of_functions.SPLIT, split

    def equal(trainer: Any) -> None:
        trainer.reward_funcs = [_equal_in_groups(f) for f in trainer.reward_funcs]

    def flat(size: tuple[int, int]) -> str:
        usual, now = of.run(size, **first), of.run(size, ready=equal, **first)
        small = float(now.gradient.norm()) <= FIT * max(float(usual.gradient.norm()), FIT)
        return "" if small else f"all groups have equal rewards; {_unlike(usual, now)}"

    yield of_functions.FLAT, flat

    def ratio(size: tuple[int, int]) -> str:
        return _unlike(of.run(size, **first), of.run(size, drift=0.0))

    yield of_functions.RATIO, ratio

    def once(size: tuple[int, int]) -> str:
        found = of.run(size, **first)
        weights, left = _fitted(of.columns(found), found.gradient)
        if left > FIT:
            return f"equal weights of a completion's tokens leave {left:.1%} of the gradient"
        if of.online:
            best = int(found.window.view().rewards.argmax())
            if weights[best] > FIT * weights.abs().max():
                return f"completion {best}, which has the highest reward, is made less likely"
        return ""

    yield of_functions.ONCE, once


def _equal_in_groups(reward: Any) -> Any:
    """Return a reward that is the same for all completions of a prompt, and not for all prompts."""

    @wraps(reward)
    def changed(prompts: list[Any], **_: Any) -> list[float]:
        return [0.5 if prompt == prompts[0] else 0.25 for prompt in prompts]

    return changed


def probe(path: str, settings: Mapping[str, Any], sizes: Any = SIZES) -> list[Verdict]:
    """Try every property on batches of growing size."""
    of, told = Trained(path, settings), {}
    with quiet():
        for name, check in _properties(of):
            if name in of.left_out:
                continue
            wrong: list[tuple[str, str]] = []
            for size in sizes:
                try:
                    found = check(size)
                except InputError:
                    raise
                except Exception as error:  # whatever the trainer raises
                    found = measure.sentence(error)
                if found:
                    where = f"{size[0]} x {size[1]} completions"
                    where = where if of.online else f"{size[0] * size[1]} texts"
                    wrong.append((found, f"{where}: {found.removeprefix(SCALED)}"))
            told[name] = judged(name, wrong)
    left = {n: Verdict(n, "does not apply", why) for n, why in of.left_out.items()}
    return [(told | left)[name] for name in of_functions.NAMES]
