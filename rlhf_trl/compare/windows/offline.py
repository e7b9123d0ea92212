"""Direct alignment, reward models and SFT on fixed windows: TRL's trainers, the book's functions.

The token ids are those that the trainer's own collator made, the log-probabilities or scores those
of a plain forward. Policy and reference are two versions of one untrained model. Batches that need
a rollout do not apply; the others keep their names: `on_policy` has the policy at the reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rlhf_trl.compare import measure, models
from rlhf_trl.compare.measure import Book, Measured, Stock
from rlhf_trl.compare.trainers import EXPERIMENTAL, base_name, trainer_classes
from rlhf_trl.compare.windows.batches import PolicyBatch
from rlhf_trl.compare.windows.collation import check_collation, sequences
from rlhf_trl.compare.windows.pair_examples import (
    FORMATS,
    MADE,
    RANKED,
    by_hand,
    fixed_examples,
    made_kind,
)
from rlhf_trl.compare.windows.terms import Identity, PairTerms, apply
from rlhf_trl.compare.windows.window import Window
from rlhf_trl.losses.checked import preference_loss, reward_loss

_MODELS = {
    "RewardTrainer": models.untrained_scorer,
    "kwise": models.untrained_scorer,
    "orm": models.untrained_token_scorer,
    "prm": models.untrained_token_scorer,
    "prm/code": partial(models.untrained_token_scorer, 3),
}

UNPAIRED = ("KTOTrainer", "SFTTrainer", "orm", "prm", "prm/code")
"""Trainers that take single completions."""

DOUBLE = ("RewardTrainer", *EXPERIMENTAL)
"""Trainers that can be measured in float64: they compute in the precision of the model.

The others use a fused head, which accumulates in float32. None of these loads a reference model.
"""


@dataclass
class Micro:
    """What a loss sees of a micro-batch of R texts, in float64.

    S is the number of tokens of a text but the first, which nothing predicts.
    """

    # (R, S) log-probabilities of the tokens, or scores of them; (R, 1) scores of whole texts; of
    # the kind "prm/code" (R, S, 3) logits of three classes
    outputs: Tensor
    gradient: models.Gradients  # of `outputs` in the model's parameters
    ref: Tensor  # as `outputs`, under the reference policy; 0 for reward models
    mask: Tensor  # (R, S) 1 on the completion's tokens
    text: Tensor  # (R, S) 1 on all tokens
    chosen: Tensor  # (R,) whether the completion is preferred
    labels: Tensor | None  # (R, S) of tokens or steps, -100 elsewhere; None but for MADE
    # (M,) log-probabilities of mismatched pairs under policy and reference, for KTO
    kl: tuple[Tensor, Tensor] | None
    margin: Tensor | None  # (R / 2,) for reward models

    @property
    def lengths(self) -> Tensor:
        """(R, 1) tokens of each completion."""
        return self.mask.sum(1, keepdim=True)

    def margins(self, beta: float, mean: bool = False) -> Tensor:
        """Return beta * (d_chosen - d_rejected) of each pair, (R / 2, 1), d being log-ratios."""
        ratio = ((self.outputs - self.ref) * self.mask).sum(1, keepdim=True)
        ratio = ratio / self.lengths if mean else ratio
        return beta * (ratio[self.chosen] - ratio[~self.chosen])


@dataclass
class PairView:
    """The book's side of a window: its micro-batches."""

    micro: list[Micro]

    def gradient(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the gradient of sum(weights * outputs) in the parameters, (N,)."""
        pairs = zip(self.micro, weights, strict=True)
        return torch.stack([part.gradient(weight) for part, weight in pairs]).sum(0)

    def book(self, side: Book) -> tuple[float, list[Tensor]]:
        """Return the book's loss of the window, and per micro-batch its derivative in `outputs`."""
        leaves = [part.outputs.clone().requires_grad_() for part in self.micro]
        pairs = zip(self.micro, leaves, strict=True)
        loss = torch.stack([_loss(side, part, leaf) for part, leaf in pairs]).mean()
        return float(loss.detach()), list(torch.autograd.grad(loss, leaves))


def _loss(side: Book, part: Micro, outputs: Tensor) -> Tensor:
    """Return the book's loss of a micro-batch.

    Args:
        side: the algorithm, its formulation and parameters.
        part: the micro-batch.
        outputs: `part.outputs` as a leaf, in which the caller differentiates.
    """
    if side.algorithm == "sft":
        return -(outputs * part.mask).sum() / part.mask.sum()
    settings = {"formulation": side.formulation, **side.params}
    if side.algorithm in ("orm", "prm"):  # with labels of tokens; the others compare texts
        return reward_loss(side.algorithm, logits=outputs, labels=part.labels, **settings)
    if side.row.trainer == "RewardTrainer":
        return _comparison_loss(side, part, outputs.squeeze(1), settings)
    return _preference_loss(side, part, outputs, settings)


def _comparison_loss(
    side: Book, part: Micro, scores: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """Return the loss of a Bradley-Terry or K-wise model from the scores of completions, (R,)."""
    chosen, rejected = scores[part.chosen], scores[~part.chosen]
    if side.algorithm != "kwise":
        pair = {"chosen": chosen, "rejected": rejected, "margin": part.margin}
        return reward_loss("bradley_terry", **pair, **settings)
    if part.labels is not None:  # lists of RANKED completions, the best first
        return reward_loss("kwise", rewards=scores.view(-1, RANKED), **settings)
    return reward_loss("kwise", rewards=torch.stack([chosen, rejected], 1), **settings)


def _preference_loss(
    side: Book, part: Micro, token_logps: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """Return the direct-alignment loss of a micro-batch.

    `preference_loss` takes the tensors that the row reads, and refuses any other.

    Args:
        side: the algorithm, its formulation and parameters.
        part: the micro-batch.
        token_logps: (R, S) log-probabilities of the tokens under the policy.
        settings: formulation and parameters, as `preference_loss` takes them.
    """
    row = side.row
    is_chosen = part.chosen

    def of_completions(logps: Tensor) -> Tensor:
        """Return (R,) sums over the tokens of each completion, or means, as the row has it."""
        total = (logps * part.mask).sum(1)
        return total / part.mask.sum(1) if row.logps == "mean" else total

    policy = of_completions(token_logps)
    ref = of_completions(part.ref)
    logps = {"policy_chosen_logps": policy[is_chosen], "policy_rejected_logps": policy[~is_chosen]}
    if row.reference:
        logps |= {"ref_chosen_logps": ref[is_chosen], "ref_rejected_logps": ref[~is_chosen]}
    if side.algorithm == "orpo":  # ORPO's likelihoods are means, so this is a mean per token, too
        logps["chosen_nll"] = -policy[is_chosen]
    if part.kl is not None:  # KTO
        logps |= {"policy_kl_logps": part.kl[0], "ref_kl_logps": part.kl[1]}
    return preference_loss(side.algorithm, **logps, **settings).loss


def build_trainer(
    trainer: type,
    config: type,
    fields: Mapping[str, Any],
    batch: PolicyBatch,
    columns: Sequence[str] = (),
    **trainer_arguments: Any,
) -> Any:
    """Build a trainer of TRL, or a subclass, for a window.

    Args:
        trainer: the class.
        config: its config class.
        fields: those of the config. The fields that make the window override them: both sides see
            the window's texts, whatever a user's config says.
        batch: the window.
        columns: as `fixed_examples` takes them: "margin", or how the texts are written.
        trainer_arguments: further arguments of the trainer.
    """
    kind = made_kind(trainer_arguments) or base_name(trainer)
    if kind in MADE:
        examples, _ = by_hand(kind, batch)  # the micro-batches are for the book's side
    else:
        examples = fixed_examples(kind, batch, columns)
    config_fields = dict(fields) | _window_fields(kind, batch)
    arguments = _window_arguments(kind, batch, columns, trainer_arguments)
    built = models.make_trainer(trainer, config, config_fields, examples, **arguments)
    if hasattr(built, "reference_point"):
        # Our KTO trainer, which in formulation code takes the rejected completions for the point.
        # Here it takes the mismatched pairs, whose log-probabilities the book's side gets.
        built.reference_point = "mismatched"
    return built


def _window_arguments(
    kind: str, batch: PolicyBatch, columns: Sequence[str], trainer_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the trainer's arguments, with the models and the tokenizer that a window adds.

    `kind` is the name of its stock trainer, or one of MADE.
    """
    arguments = dict(trainer_arguments)
    if batch.name == "cut" and kind in ("DPOTrainer", "KTOTrainer"):
        # this batch is about a reference that is given; otherwise the trainer makes its own
        reference = models.untrained()
        reference.load_state_dict(models.drifted(reference.state_dict(), 0.1, seed=5))
        arguments.setdefault("ref_model", reference)
    if batch.name == "adapter":
        arguments |= models.adapter()
    if batch.name == "continued":
        arguments |= models.continued_adapter()
    # a tokenizer that puts BOS before a text; not for chats, whose template does so
    if {"ended", "implicit"}.intersection(columns):
        arguments["processing_class"] = models.tokenizer_with_bos()
    # Reward models, ORPO and CPO have no reference, so any model will do. The other trainers get
    # the model that `make_trainer` loads from a folder, so that TRL finds the reference there.
    needs_no_reference = kind in MADE or kind in DOUBLE
    if needs_no_reference and "model" not in arguments:
        arguments["model"] = _MODELS.get(kind, models.untrained)()
    if kind == "RewardTrainer":
        # A reward model finds the last token of a text by this id. It is the trainer's task to set
        # it: without it here, a trainer that forgets to do so is found out.
        arguments["model"].config.pad_token_id = None
    return arguments


def _window_fields(kind: str, batch: PolicyBatch) -> dict[str, Any]:
    """Return the fields of a config that make a window for a kind of trainer."""
    fields = {
        "per_device_train_batch_size": batch.rows if kind in UNPAIRED else batch.rows // 2,
        "gradient_accumulation_steps": batch.accumulation,
        **dict(batch.fields),
    }
    if batch.max_length:
        fields["max_length"] = batch.max_length
    if kind in MADE:
        fields["train_sampling_strategy"] = "sequential"
    return fields


class PairWindow(Window):
    """A window of one kind of trainer, prepared once."""

    def __init__(self, trainer: str, batch: PolicyBatch, columns: Sequence[str] = ()) -> None:
        """Move the policy.

        Args:
            trainer: the name of the trainer that collates, or one of MADE.
            batch: the window.
            columns: as `fixed_examples` takes them.
        """
        self.batch = batch
        self._trainer_name = trainer
        self._columns = columns
        self._is_by_hand = trainer in MADE
        self._classes = () if self._is_by_hand else trainer_classes(trainer)
        self.kind = trainer if self._is_by_hand else base_name(self._classes[0])
        self._build_model = _MODELS.get(self.kind, models.untrained)
        # with this seed KTO's reference point is above 0, and clamped in one micro-batch only
        self.current = models.drifted(self._build_model().state_dict(), batch.drift, seed=38)

    @cached_property
    def prepared(self) -> list[measure.Batch]:
        """The micro-batches as the trainer collates them."""
        batch = self.batch
        if self._is_by_hand:
            _, micro = by_hand(self._trainer_name, batch)
            return micro
        trainer = build_trainer(*self._classes, {}, batch, self._columns)
        trainer.model.load_state_dict(self.current)
        _, micro = measure.accumulate(trainer, measure.batches(trainer), batch.cut_window_to)
        # `check_collation` knows neither what further fields nor what other formats make of texts
        if not batch.fields and not set(FORMATS).intersection(self._columns):
            examples = fixed_examples(self.kind, batch, self._columns)
            check_collation(self._trainer_name, micro, examples, batch.max_length)
        return micro

    def build(self, side: Stock) -> Any:
        """Build the trainer of a stock side."""
        trainer, config = side.classes or trainer_classes(side.trainer)
        arguments = side.trainer_arguments
        return build_trainer(trainer, config, side.config, self.batch, side.columns, **arguments)

    def book(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss and its gradient."""
        loss, slopes = self.view.book(side)
        return loss, self.view.gradient(slopes)  # by the chain rule

    def changed(self, side: Book, steps: Sequence[Identity]) -> Tensor:
        """Return the gradient after identities, which change the derivatives in the outputs."""
        _, weights = self.view.book(side)
        terms = PairTerms(self.view, weights)
        apply(steps, terms)
        return self.view.gradient(terms.weights)

    def measured(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build_trainer` built; `double`, for those in DOUBLE: in float64.

        Raises:
            InputError: its loss saw other token ids than the book's side.
        """
        models.take(trainer.model, self.current)
        if double:
            trainer.model.double()
        if getattr(trainer.args, "sync_ref_model", False):  # as after an optimizer step
            trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        measured, micro = measure.accumulate(
            trainer, measure.batches(trainer), self.batch.cut_window_to
        )
        if "prepared" in vars(self):  # the book's side has already been prepared
            keys = {"input_ids", "chosen_input_ids"}
            if self._is_by_hand:
                keys.add("labels")
            for key in sorted(keys & micro[0].keys()):
                measure.check_same(trainer, micro, self.prepared, key)
        return measured

    @cached_property
    def view(self) -> PairView:
        """The book's side of the window."""
        policy = self._build_model().double()
        reference = self._build_model().double()
        policy.load_state_dict(self.current)
        return PairView([self._micro(policy, reference, inputs) for inputs in self.prepared])

    def _micro(self, policy: Module, reference: Module, inputs: measure.Batch) -> Micro:
        """Return what the book's loss sees of a micro-batch, from plain forwards.

        The first token of a text has no log-probability. So masks and labels are cut by one, to
        stand beside the log-probabilities, or scores, of the tokens after it.
        """
        ids, attention, mask, chosen = sequences(inputs)
        is_language_model = self._build_model is models.untrained
        if is_language_model:
            outputs = models.token_logps(policy, ids, attention)  # (R, S)
            ref = models.token_logps(reference, ids, attention)
        else:  # a reward model: (R, 1) scores of texts, or (R, 1 + S, classes) of tokens
            outputs = policy(input_ids=ids, attention_mask=attention).logits
            if outputs.dim() == 3:
                outputs = outputs[:, 1:].squeeze(-1)  # (R, S), or (R, S, 3) with three classes
            ref = torch.zeros_like(outputs)  # a reward model has no reference, and no loss reads it
        kl = None
        if "KL_input_ids" in inputs:  # KTO's mismatched pairs
            kl = _mismatched_logps(policy, inputs), _mismatched_logps(reference, inputs)
        return Micro(
            outputs=outputs.detach(),
            gradient=models.Gradients(policy, outputs),
            ref=ref.detach(),
            mask=mask[:, 1:].double(),
            text=attention[:, 1:].double(),
            chosen=chosen,
            # "labels" of TRL's collators are token ids: all that counts of them is in `mask`
            labels=inputs["labels"][:, 1:] if self._is_by_hand else None,
            kl=kl,
            margin=inputs["margin"].double() if "margin" in inputs else None,
        )


def _mismatched_logps(model: Module, inputs: measure.Batch) -> Tensor:
    """Return the log-probabilities, (M,), of the completions of KTO's mismatched pairs."""
    logps = models.token_logps(model, inputs["KL_input_ids"], inputs["KL_attention_mask"])
    return (logps * inputs["KL_completion_mask"][:, 1:]).sum(1).detach()
