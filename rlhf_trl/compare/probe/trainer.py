"""The properties of `probe`, tried on a trainer: TRL's, a subclass of one, or ours.

A trainer runs its own data path on fixed batches (see `measure`) and is judged by its gradient in
the parameters; its TRL base decides which properties it can show.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_trl.algorithms import Formulation, formulation
from rlhf_trl.compare import measure, rows
from rlhf_trl.compare.models import quick_and_quiet, untrained
from rlhf_trl.compare.probe import loss as shared
from rlhf_trl.compare.probe.loss import SCALED, Verdict
from rlhf_trl.compare.subjects import class_of, config_class
from rlhf_trl.compare.trainers import OURS, POLICY, base_name, row_arguments, trainer_classes
from rlhf_trl.compare.windows import offline, policy
from rlhf_trl.compare.windows.batches import BATCHES, PolicyBatch
from rlhf_trl.compare.windows.completions import completion
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.compare.windows.offline import PairWindow
from rlhf_trl.compare.windows.pair_examples import made_kind
from rlhf_trl.compare.windows.policy import PolicyWindow

SIZES = ((1, 2), (2, 2), (2, 4))
"""Prompts and completions of each; other trainers are given as many texts."""

ROUNDING, FIT = 3e-5, 1e-3  # float32's, of a gradient and of what is left of it by a fit
Inputs = dict[str, Any]
Size = tuple[int, int]
Change = Callable[[Inputs], Inputs]
Prepare = Callable[[Any], None]  # of a trainer


class Run(NamedTuple):
    """What one window gives."""

    loss: float
    gradient: Tensor  # (N,) in all parameters
    shares: Tensor  # (N, micro-batches) what each micro-batch adds to the gradient
    window: Any


class Trained:
    """A trainer's class, run on batches."""

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        """Import a trainer's class.

        Args:
            path: the module and the class, as `module:Class` or `module.Class`.
            settings: fields of its config. For a trainer of ours `algorithm` and `formulation` may
                be among them, and choose the row.
        """
        shared.allow_imports_from_working_folder()
        self.cls = class_of(path)
        self.base = base_name(self.cls)  # of the TRL trainer that it is or derives from
        self.online = self.base in POLICY  # whether it generates
        self.config = config_class(self.cls, trainer_classes(self.base)[1])
        self.fields = dict(settings)
        self.trainer_arguments: dict[str, Any] = {}
        self.row: Formulation | None = None  # None for trainers of TRL, whose config names no row
        own_config = getattr(self.cls, "config_class", None)
        default_row = getattr(own_config, "default_row", None)  # of a config of ours
        if default_row:
            self._take_row(default_row)
        if self.online:  # only these shuffle prompts, and a property may be about their order
            self.fields = _NOT_SHUFFLED | self.fields
        self._windows: dict[PolicyBatch, Any] = {}  # policy windows, or windows of pairs
        self._runs: dict[Any, Run] = {}  # by the arguments of `run`

    def _take_row(self, default_row: str) -> None:
        """Take the row of a trainer of ours out of the fields, and what it needs to run."""
        name = self.fields.pop("algorithm", default_row)
        formulation_name = self.fields.pop("formulation", "chapter")
        self.row = formulation(name, formulation_name)
        # the trainer needs some fields to run on the batches, unless the user has them
        self.fields = rows.fields_for_batches(self.row) | self.fields
        self.trainer_arguments = row_arguments(name, formulation_name)

    @property
    def left_out(self) -> dict[str, str]:
        """The properties that cannot be tried on this trainer, and why, in words for the user.

        They depend on whether the trainer generates (`online`), on the trainer of TRL that it
        derives from, and on its row.
        """
        reasons = {
            shared.NAN_UNDER_MASK: "no NaN can stand there: it makes its own log-probabilities"
        }
        row, base = self.row, self.base

        def leave_out(reason: str, *properties: str) -> None:
            for name in properties:
                reasons[name] = reason

        if not self.online:  # each example is given, so there are no completions of one prompt
            leave_out(
                "it has no groups and no ratio",
                shared.COMPLETION_ORDER,
                shared.EQUAL_REWARDS,
                shared.FIRST_RATIO,
            )
        elif row and (row.family == "distillation" or row.value_loss != "none"):
            # both properties are about rewards that alone decide, for all tokens of a completion
            leave_out(
                "a critic or a teacher judges each token",
                shared.EQUAL_REWARDS,
                shared.TOKENS_COUNT_ONCE,
            )
        if base == "RewardTrainer":
            leave_out("it scores, and makes no text more or less likely", shared.TOKENS_COUNT_ONCE)
            # A model that scores a whole text finds its last token by the id of the padding token,
            # so garbage there would be scored. A model that scores tokens (its row has an
            # aggregation) reads the labels instead, which say what counts.
            if not row or row.aggregation == "none":
                leave_out("its model tells padding from the token", shared.GARBAGE_UNDER_MASK)
        if base == "KTOTrainer":  # so the neighbor must stay the same
            reason = "an example meets the completion of its neighbor in the micro-batch"
            leave_out(reason, shared.PROMPT_ORDER, shared.MICRO_BATCHES)
        if base in ("ORPOTrainer", "CPOTrainer") and not row:
            # With padding on the left the first token is padding, so the mean has a token more; and
            # means over micro-batches of other lengths do not average to the mean over all.
            reason = "its likelihood is a mean over all tokens of the micro-batch but the first"
            leave_out(reason, shared.PADDING_SIDE, shared.MICRO_BATCHES)
        return reasons

    def run(
        self,
        size: Size,
        change: Change | None = None,
        prepare: Prepare | None = None,
        **fields: Any,
    ) -> Run:
        """Measure a window, or return what was measured with the same arguments before.

        Args:
            size: prompts, and completions of each.
            change: takes the inputs of the loss, of each micro-batch, and returns changed ones.
            prepare: changes the trainer before it runs.
            fields: of the `PolicyBatch`, in place of the usual ones.
        """
        key = size, change, prepare, *fields.items()
        if key in self._runs:
            return self._runs[key]
        batch = self._batch(size, fields)
        if batch not in self._windows:
            self._windows[batch] = self._window(batch)
        window = self._windows[batch]
        build = policy.build_trainer if self.online else offline.build_trainer
        trainer = build(self.cls, self.config, self.fields, batch, **self.trainer_arguments)
        if prepare is not None:
            self.batch = batch  # for `prepare`, which is a method such as `_prompts_backward`
            prepare(trainer)
        if change is not None:
            _change_inputs(trainer, change)
        gradients = _noted_gradients(trainer)
        if self.online:
            # not `stock`, which would refuse the completions that `prepare` puts in another order
            measured, _ = window.run(trainer)
        else:
            measured = window.measured(trainer)
        # By now `gradients` has filled: the gradient that stood after each micro-batch. A
        # micro-batch adds to it, so its own share is the difference from the one before.
        before_first = torch.zeros_like(gradients[0])
        shares = torch.stack([before_first, *gradients], 1).diff(dim=1)
        self._runs[key] = Run(measured.loss, measured.gradient, shares, window)
        return self._runs[key]

    def _batch(self, size: Size, fields: Mapping[str, Any]) -> PolicyBatch:
        """Return the usual batch of a size, with some fields changed."""
        prompts, group = size
        usual = {
            "ragged": True,
            "drift": 0.1,
            "group": group,
            "rows": prompts * group,
            "iterations": 2,
            "temperature": self.fields.get("temperature", 1.0),
        }
        return replace(BATCHES[0], **{**usual, **fields})

    def _window(self, batch: PolicyBatch) -> Any:
        """Prepare the window of a batch for this trainer."""
        if not self.online:
            hand_made = made_kind(self.trainer_arguments)
            ours = [c.__name__ for c in self.cls.__mro__ if c.__name__ in OURS]
            collator = ours[0] if ours else self.base  # ours order and cut their examples
            return PairWindow(hand_made or collator, batch)
        window = PolicyWindow(batch, _NOT_SHUFFLED)
        if not batch.drift:  # before the first step the reference is the policy
            window.generating = window.current = window.generating | untrained().state_dict()
        return window

    def columns(self, window: Any) -> Tensor:
        """Return the gradient of each completion's sum of log-probabilities, (N, columns).

        There is a column for each completion. TRL's ORPO and CPO also count whole texts, prompts
        included, so for these another column for each text follows.
        """
        view = window.view(window.batch.temperature) if self.online else window.view
        masks = [view.mask] if self.online else [view.micro[0].mask]
        is_stock = not self.row or self.trainer_arguments.get("formulation") == "trl"
        if is_stock and self.base in ("ORPOTrainer", "CPOTrainer"):
            masks.append(view.micro[0].text)
        columns = []
        for mask in masks:
            for only_row in torch.eye(len(mask)).double():  # 1 for one completion, 0 for others
                weights = mask * only_row[:, None]
                columns.append(view.gradient(weights if self.online else [weights]))
        return torch.stack(columns, 1)

    def checks(self) -> dict[str, Callable[[Size], str]]:
        """Return a check of each property: it says what is wrong with a batch, "" for nothing.

        Some make sense for trainers that generate alone; the caller drops those in `left_out`.
        """
        unchanged = self._unchanged
        if self.online:
            # TRL pads prompts on the left, completions on the right: prompts get more of that
            padded_left = _of_each_tensor(_more_padding(left=3), prompts=True)
            # the data are reversed, not the loss's inputs: these hold advantages already, which
            # are computed from the order of the data
            other_order = partial(unchanged, prepare=self._prompts_backward)
        else:
            padded_left = _of_each_tensor(_with_padding_left)
            other_order = partial(unchanged, change=_examples_backward)
        garbage = _of_each_tensor(_garbage)
        padded_right = _of_each_tensor(_more_padding(right=3))
        return {
            shared.GARBAGE_UNDER_MASK: partial(unchanged, change=garbage),
            shared.MORE_PADDING: partial(unchanged, change=padded_right),
            shared.PADDING_SIDE: partial(unchanged, change=padded_left),
            shared.COMPLETION_ORDER: partial(unchanged, prepare=self._completions_backward),
            shared.PROMPT_ORDER: other_order,
            shared.MICRO_BATCHES: self._splits,
            shared.EQUAL_REWARDS: self._ignores_equal_rewards,
            shared.FIRST_RATIO: self._starts_at_ratio_one,
            shared.TOKENS_COUNT_ONCE: self._counts_tokens_once,
        }

    def _unchanged(
        self, size: Size, change: Change | None = None, prepare: Prepare | None = None
    ) -> str:
        """Check that a change of the inputs, or of the trainer, changes no gradient."""
        return _unlike(self.run(size), self.run(size, change, prepare))

    def _completions_backward(self, trainer: Any) -> None:
        """Let a trainer generate the completions of each prompt in reverse order."""
        answer = completion(self.batch.ragged)
        last = self.batch.group - 1
        fix_completions(trainer, lambda ids, place, call: answer(ids, last - place, call))

    def _prompts_backward(self, trainer: Any) -> None:
        """Let a trainer take the prompts of the generation in reverse order."""
        count = self.batch.rows // self.batch.group
        trainer.train_dataset = trainer.train_dataset.select(reversed(range(count)))

    def _splits(self, size: Size) -> str:
        """Check that micro-batches of one prompt each average to the gradient of the batch."""
        prompts, group = size
        whole = self.run(size)
        parts = self.run(size, rows=group, accumulation=prompts, per_generation=prompts)
        fault = _unlike(whole, parts).removeprefix(SCALED)
        if not fault:
            return ""
        # where a micro-batch has a normalizer of its own, a number makes its share right
        _, unfitted = measure.fit(parts.shares, whole.gradient)
        return SCALED + fault if unfitted <= FIT else fault

    def _ignores_equal_rewards(self, size: Size) -> str:
        """Check that there is no gradient where all completions of a prompt have one reward."""
        usual = self.run(size, **_FIRST_STEP)
        equal = self.run(size, prepare=_reward_prompts, **_FIRST_STEP)
        usual_norm, equal_norm = float(usual.gradient.norm()), float(equal.gradient.norm())
        if equal_norm <= FIT * max(usual_norm, FIT):
            return ""
        return f"all groups have equal rewards; {_unlike(usual, equal)}"

    def _starts_at_ratio_one(self, size: Size) -> str:
        """Check that the first and the second update agree where the policy has not moved."""
        return _unlike(self.run(size, **_FIRST_STEP), self.run(size, drift=0.0))

    def _counts_tokens_once(self, size: Size) -> str:
        """Check that the gradient gives all tokens of a completion one weight.

        The completion with the highest reward must not become less likely.
        """
        run = self.run(size, **_FIRST_STEP)
        weights, unfitted = measure.fit(self.columns(run.window), run.gradient)
        if unfitted > FIT:
            return f"equal weights of a completion's tokens leave {unfitted:.1%} of the gradient"
        if self.online:
            best = int(run.window.view().rewards.argmax())
            if weights[best] > FIT * weights.abs().max():
                return f"completion {best}, which has the highest reward, is made less likely"
        return ""


_NOT_SHUFFLED = {"shuffle_dataset": False}
_FIRST_STEP = {"drift": 0.0, "iterations": 1}


def _change_inputs(trainer: Any, change: Change) -> None:
    """Let a trainer's loss see changed inputs."""
    compute_loss = trainer.compute_loss

    def compute_changed_loss(model: Any, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        return compute_loss(model, change(inputs), *args, **kwargs)

    trainer.compute_loss = compute_changed_loss


def _noted_gradients(trainer: Any) -> list[Tensor]:
    """Return a list that fills with the gradient, (N,), that stands after each micro-batch."""
    gradients: list[Tensor] = []
    training_step = trainer.training_step

    def noted_step(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        gradients.append(measure.flat_gradient(trainer.model))
        return loss

    trainer.training_step = noted_step
    return gradients


def _reward_prompts(trainer: Any) -> None:
    """Let all completions of a prompt have one reward."""
    trainer.reward_funcs = [_of_the_prompt] * len(trainer.reward_funcs)


def _unlike(run: Run, other: Run) -> str:
    return shared.difference(run.loss, run.gradient, other.loss, other.gradient, ROUNDING)


def _of_each_tensor(
    change_tensor: Callable[[str, Tensor, Tensor], Tensor], prompts: bool = False
) -> Change:
    """Return a change of the inputs of a loss: of each tensor that has a number for each token.

    Args:
        change_tensor: takes the name of a tensor, the tensor and the mask of its tokens, and
            returns the changed tensor.
        prompts: for a trainer that generates, whose prompts and completions are in different
            tensors: change those of the prompts; False: those of the completions. Other trainers
            have both in one tensor, and do not read this.
    """

    def change(inputs: Inputs) -> Inputs:
        """Return the inputs with these tensors changed."""
        generated = "completion_ids" in inputs
        changed = dict(inputs)
        for name, tensor in inputs.items():
            if generated and _is_of_prompts(name) != prompts:
                continue
            # a tensor has a number for each token if it has the shape of the tokens' mask
            mask = inputs.get(_mask_name(name, generated))
            if mask is not None and getattr(tensor, "shape", None) == mask.shape:
                changed[name] = change_tensor(name, tensor, mask)
        return changed

    return change


_OF_PROMPTS = ("teacher_prompt_", "prompt_")


def _is_of_prompts(name: str) -> bool:
    """Return whether an input of a loss on generated data is about prompts, not completions."""
    return name.startswith(_OF_PROMPTS)


def _mask_name(name: str, generated: bool) -> str:
    """Return the name of the mask that goes with an input of a loss.

    It is the mask whose name has the same prefix, such as `prompt_mask` with `prompt_ids`. Inputs
    about completions (`completion_ids`, `old_per_token_logps`) have no prefix in common: all that
    has none of the other prefixes goes with `completion_mask`.
    """
    prefixes = _OF_PROMPTS if generated else (*_OF_PROMPTS, "KL_", "chosen_", "rejected_")
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    if not generated:
        return f"{prefix}attention_mask"
    return f"{prefix}mask" if prefix else "completion_mask"


def _with_padding_left(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    """Move the padding of a tensor, (R, S), from the right to the left."""
    return tensor.gather(1, shared.left_padded_order(mask))


def _garbage(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    """Put other tokens, or log-probabilities far away, where the mask is 0."""
    if "mask" in name or "labels" in name:
        return tensor
    if "ids" in name:
        garbage = (tensor + 37) % 100 + 7  # ids of 7 to 106 are those of ordinary tokens
    else:
        garbage = shared.FAR * (1 - 2 * (torch.arange(mask.shape[1]) % 2))  # with either sign
    return torch.where(mask == 0, garbage, tensor).to(tensor)


def _more_padding(left: int = 0, right: int = 0) -> Callable[[str, Tensor, Tensor], Tensor]:
    """Return a function that adds this many tokens of padding to each side of a tensor, (R, S)."""

    def padded(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
        return pad(tensor, (left, right), value=-100 if "labels" in name else 0)

    return padded


def _examples_backward(inputs: Inputs) -> Inputs:
    """Reverse the order of the examples.

    An example has one row in each tensor, `list_length` consecutive rows (lists of completions), or
    two rows (pairs): one in the first half, of the chosen texts, and one in the second half.
    """
    size = inputs.get("list_length", 1)
    # of examples with `labels` of tokens each row is one; ORPO and CPO have two tensors for pairs
    are_pairs = "input_ids" in inputs and "labels" not in inputs and size == 1

    def reverse(tensor: Tensor) -> Tensor:
        halves = tensor.chunk(2) if are_pairs else [tensor]
        reversed_halves = [half.unflatten(0, (-1, size)).flip(0) for half in halves]
        return torch.cat(reversed_halves).flatten(0, 1)

    return {
        name: reverse(value) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def _of_the_prompt(prompts: Sequence[Any], **_: Any) -> list[float]:
    """Reward all completions of a prompt the same."""
    return [0.5 if prompt == prompts[0] else 0.25 for prompt in prompts]


def probe(path: str, settings: Mapping[str, Any], sizes: Sequence[Size] = SIZES) -> list[Verdict]:
    """Try every property on batches of growing size.

    Args:
        path: the trainer's class, as `module:Class`.
        settings: fields of its config.
        sizes: prompts and completions of each, of the batches.
    """
    trained = Trained(path, settings)
    checks = trained.checks()
    left_out = trained.left_out
    batches = {}  # by size: the batch in words
    for prompts, group in sizes:
        in_words = f"{prompts * group} texts"
        if trained.online:
            in_words = f"{prompts} x {group} completions"
        batches[prompts, group] = in_words
    verdicts = []
    with quick_and_quiet():
        for name in shared.NAMES:
            if name in left_out:
                verdicts.append(Verdict(name, "does not apply", left_out[name]))
            else:
                verdicts.append(shared.try_property(name, checks[name], batches))
    return verdicts
