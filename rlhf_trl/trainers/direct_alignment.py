"""Direct alignment (chapter 8) on TRL's DPOTrainer and KTOTrainer: a row of the table, read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.algorithms import Preference, RowConfig, of_the_row
from rlhf_trl.data.fitting import fit, kto_order, rotated
from rlhf_trl.errors import InputError, setting
from rlhf_trl.evaluation.beside_loss import AnswersBesideLoss
from rlhf_trl.evaluation.over_examples import OverExamples, Replay
from rlhf_trl.losses import completions_loss
from rlhf_trl.reward_models.accuracy import pair_accuracy
from rlhf_trl.trainers.on_trl import OnTRL, Safeguards, fields_set, with_signature_of


@dataclass
class AlignmentFields(RowConfig, Safeguards):
    """What the configs of all direct-alignment trainers have beside TRL's fields.

    Of an example of more than `max_length` tokens, the prompt loses its first ("cut_prompt") or
    completions lose their last ("cut_completion"), or it is dropped ("drop"), and so are pairs of
    twice the same completion; None leaves it to TRL. `max_completion_length` is that of the answers
    that evaluation generates.
    """

    family: ClassVar[str] = "direct_alignment"
    in_recipes: ClassVar = {"overlong": "cut_prompt"}
    trainers: ClassVar[tuple[str, ...]]  # whose rows the config is for

    overlong: Literal["cut_prompt", "cut_completion", "drop"] | None = setting(
        "what becomes of examples longer than max_length; None: what TRL does"
    )
    max_completion_length: int = setting("of answers at evaluation", 64)

    def check_for(self, row: Preference) -> None:
        """Refuse a row of another trainer, and TRL's own rule for over-long examples."""
        if row.trainer not in self.trainers:
            raise InputError(f"{row.label} is not trained on {self.trainers[0]}; use its recipe.")
        mode = getattr(self, "truncation_mode", "keep_start")
        if self.overlong is not None and mode != "keep_start":
            raise InputError(
                f"truncation_mode: {mode} is TRL's rule; write overlong: "
                "cut_prompt, which keeps the end without cutting into completions."
            )


@dataclass
class BookDPOConfig(AlignmentFields, DPOConfig):
    """DPOConfig whose loss fields belong to the algorithm; None means the row's own value."""

    default_row = "dpo"
    trainers = ("DPOTrainer", "CPOTrainer")  # the latter's only row, SimPO, needs none of it

    beta: float | None = of_the_row("beta", "direct_alignment")
    label_smoothing: float | None = of_the_row("label_smoothing")
    loss_type: list[str] | None = of_the_row("loss_type")  # noqa: RUF009
    gamma_beta_ratio: float | None = of_the_row("gamma_beta_ratio")
    nll_weight: float | None = of_the_row("nll_weight")

    # Extends DPOConfig.__post_init__, which counts the losses in a loss_type that may be None here.
    def __post_init__(self):
        if self.loss_weights is not None and self.loss_type is None:
            raise InputError(
                f"loss_weights is {self.loss_weights}, but there is no loss_type whose losses it "
                "weighs: they belong to the algorithm; remove it."
            )
        super().__post_init__()


@dataclass
class BookKTOConfig(AlignmentFields, KTOConfig):
    """KTOConfig whose loss fields belong to the algorithm; None means the row's own value."""

    default_row = "kto"
    trainers = ("KTOTrainer",)
    in_recipes: ClassVar = {"interleave_labels": True}

    interleave_labels: bool | None = setting(
        "spread the labels evenly; False: all desirable ones first; None: the order of the data"
    )
    beta: float | None = of_the_row("beta", "direct_alignment")
    desirable_weight: float | None = of_the_row("desirable_weight")
    undesirable_weight: float | None = of_the_row("undesirable_weight")
    loss_type: str | None = of_the_row("loss_type")


class Aligned(OnTRL, AnswersBesideLoss, OverExamples):
    """What the direct-alignment trainers share: the row, and a seam in TRL's loss."""

    reference_names: ClassVar[tuple[str, ...]] = ()  # the reference's log-probabilities, as TRL's

    def _take(self, args: Any, model: Any) -> Any:
        args = super()._take(args, model)
        self.fitted = {}
        self.max_completion_length = getattr(args, "max_completion_length", None) or 64
        return args

    def _counts_examples(self) -> bool:
        fields = ("overlong", "interleave_labels")
        return any(getattr(self.args, name, None) is not None for name in fields)

    # Calls _compute_loss, which has no seam: reference log-probabilities are given, ours recorded.
    def _recorded(self, compute: Any, model: Any, inputs: Any, return_outputs: bool) -> Any:
        """Return TRL's result, whose metrics stay, and all that the model returned."""
        outputs = []

        def recorder(**given: Any) -> Any:
            outputs.append(model(**given))
            return outputs[-1]

        with self._reference_given():
            return compute(recorder, inputs, return_outputs), outputs

    @contextmanager
    def _reference_given(self) -> Iterator[None]:
        """Let TRL's loss read the reference's log-probabilities in its inputs."""
        precomputed, self.precompute_ref_logps = self.precompute_ref_logps, True
        try:
            yield
        finally:
            self.precompute_ref_logps = precomputed

    def _reference(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reference's summed log-probabilities, computed unless they are there."""
        names = self.reference_names
        if names[0] in inputs:
            return {name: inputs[name] for name in names if name in inputs}
        logps = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        return dict(zip(names, logps, strict=True))

    # Extends OverExamples': the reference answers batch by batch.
    def _with_reference(self, inputs):
        if not self.reference_names or not self._row.reference:
            return inputs
        return {**inputs, **self._reference(inputs)}


class BookDPOTrainer(Aligned, DPOTrainer):
    """DPOTrainer whose loss is a row of `rlhf_trl.algorithms`."""

    config_class = BookDPOConfig
    reference_names = ("ref_chosen_logps", "ref_rejected_logps")

    # Where no reference is read, TRL loads none if told that its log-probabilities are precomputed.
    @with_signature_of(DPOTrainer.__init__)
    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        args = self._take(args, model)
        self._nll_weight = args.nll_weight if "nll_weight" in self._row.trainer_reads else 0
        during: dict[str, Any] = {}
        if not self._row.reference:
            if kwargs.get("ref_model") is not None or args.sync_ref_model:
                raise InputError(f"{self._row.label} reads no reference model; remove it.")
            during["precompute_ref_log_probs"] = True
        if not self._stock:  # TRL's loss is computed for its metrics only
            during |= {"loss_type": ["sigmoid"], "loss_weights": None}
        with fields_set(args, during):
            super().__init__(model, args=args, **kwargs)
        self.precompute_ref_logps = args.precompute_ref_log_probs and self._row.reference
        if not self._stock:
            _check_reference(self.model, self.ref_model)

    # Extends DPOTrainer._prepare_dataset: our rules for over-long and identical pairs go first.
    @override
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        if getattr(args, "overlong", None) is None:
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        whole = copy(args)
        whole.max_length = None
        dataset = super()._prepare_dataset(dataset, processing_class, whole, dataset_name)
        sides = ("chosen_ids", "rejected_ids")
        dataset, counts = fit(dataset, sides, args.max_length, args.overlong)
        self.fitted[dataset_name] = counts
        return dataset

    # Replaces DPOTrainer._precompute_ref_logps where no reference is read.
    @override
    def _precompute_ref_logps(self, dataset, name, batch_size):
        if not self._row.reference:
            return dataset
        return super()._precompute_ref_logps(dataset, name, batch_size)

    # Extends DPOTrainer._compute_loss: the row's loss and rewards replace TRL's; its metrics stay,
    # with a pair accuracy that counts a tie as one half (rewards/accuracies: as wrong).
    @override
    def _compute_loss(self, model, inputs, return_outputs):
        compute = super()._compute_loss
        mode = "train" if self.model.training else "eval"
        if self._stock and (mode == "train" or not self._safe("evaluate_examples")):
            return compute(model, inputs, return_outputs)
        if self._row.reference:
            inputs = {**inputs, **self._reference(inputs)}
        else:
            zeros = torch.zeros(self._batch_size(inputs), device=inputs["input_ids"].device)
            # TRL subtracts them all the same
            inputs = {**inputs, **dict.fromkeys(self.reference_names, zeros)}
        result, (outputs, *_) = self._recorded(compute, model, inputs, return_outputs)
        if self._stock:
            logps = self.compute_ref_log_probs(Replay([outputs]), inputs)  # as TRL sums them
            sides = zip(logps, self.reference_names, strict=True)
            ratios = [policy - inputs[name] for policy, name in sides]
            self._metrics[mode]["pair_accuracy"].append(pair_accuracy(*ratios))
            return result
        mask = inputs["completion_mask"][:, 1:]
        sums = outputs.log_probs[:, -mask.shape[1] :].sum(1)
        lengths = mask.sum(1)
        policy = sums / lengths if self._row.logps == "mean" else sums
        given = {}
        for side, logps, length in zip(
            ("chosen", "rejected"), policy.chunk(2), lengths.chunk(2), strict=True
        ):
            given[f"policy_{side}_logps"] = logps
            if self._row.reference:
                total = inputs[f"ref_{side}_logps"]
                given[f"ref_{side}_logps"] = total / length if self._row.logps == "mean" else total
        found = completions_loss(self._row, self._parameters, **given)
        chosen, rejected = map(
            self.accelerator.gather, (found.chosen_rewards, found.rejected_rewards)
        )
        values = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected}
        values["accuracies"] = (chosen > rejected).float()
        for name, each in values.items():  # in place of what TRL has just logged
            self._metrics[mode][f"rewards/{name}"][-1] = each.mean().item()
        self._metrics[mode]["pair_accuracy"].append(pair_accuracy(chosen, rejected))
        loss = found.loss
        if self._nll_weight:
            nll = -(sums / lengths).chunk(2)[0].mean()
            self._metrics[mode]["nll"].append(self.accelerator.gather(nll.detach()).mean().item())
            loss = loss + self._nll_weight * nll
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        return (loss, result[1]) if return_outputs else loss

    def _batch_size(self, inputs):
        return len(inputs["input_ids"]) // 2


class BookKTOTrainer(Aligned, KTOTrainer):
    """KTOTrainer whose loss is a row of `rlhf_trl.algorithms`, and whose labels are interleaved.

    TRL takes the mismatched completions that KTO's reference point needs from the neighbors in a
    device's batch, so the order of the examples is part of the method: it is drawn by `args.seed`
    such that the labels are spread evenly and no example meets a completion of its own prompt.
    """

    config_class = BookKTOConfig
    reference_names = ("ref_logps", "ref_KL_logps")

    @with_signature_of(KTOTrainer.__init__)
    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        super().__init__(model, args=self._take(args, model), **kwargs)
        self.reference_point = self._row.reference_point
        if not self._stock:
            _check_reference(self.model, self.ref_model)

    # Extends KTOTrainer._prepare_dataset: examples are ordered before completions are rotated.
    @override
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        overlong = getattr(args, "overlong", None)
        interleaved = getattr(args, "interleave_labels", None)
        if overlong is None and interleaved is None:
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        uncut_args = copy(args)
        if overlong is not None:
            uncut_args.max_length = None
        calculate_kl, self.calculate_KL = self.calculate_KL, False  # TRL would rotate too early
        try:
            dataset = super()._prepare_dataset(dataset, processing_class, uncut_args, dataset_name)
        finally:
            self.calculate_KL = calculate_kl
        counts: dict[str, int] = {}
        if overlong is not None:
            dataset, counts = fit(dataset, ("completion_ids",), args.max_length, overlong)
        batch = args.per_device_train_batch_size
        if interleaved is not None:
            order = kto_order(
                dataset["label"], dataset["prompt_ids"], batch, args.seed, interleaved
            )
            counts["left over"] = len(dataset) - len(order)
            dataset = dataset.select(order)
        self.fitted[dataset_name] = counts
        return rotated(dataset, batch)

    # Extends KTOTrainer._compute_loss: see BookDPOTrainer; mismatched pairs are the first call.
    @override
    def _compute_loss(self, model, inputs, return_outputs):
        compute = super()._compute_loss
        if self._stock and (self.model.training or not self._safe("evaluate_examples")):
            return compute(model, inputs, return_outputs)
        inputs = {**inputs, **self._reference(inputs)}
        if self._stock:
            with self._reference_given():
                return compute(model, inputs, return_outputs)
        result, (kl, outputs, *_) = self._recorded(compute, model, inputs, return_outputs)
        policy = outputs.log_probs[:, 1 - inputs["input_ids"].shape[1] :].sum(1)
        kl_policy = kl.log_probs[:, 1 - inputs["KL_input_ids"].shape[1] :].sum(1)
        wanted = inputs["label"].bool()
        kl_logps, kl_ref = map(self.accelerator.gather, (kl_policy, inputs["ref_KL_logps"]))
        if self.reference_point == "rejected":
            those = ~wanted if (~wanted).sum() > 1 else torch.ones_like(wanted)
            kl_logps, kl_ref = policy[those].detach(), inputs["ref_logps"][those]
            z = book.preference.kto_reference_point(kl_logps, kl_ref)
            self._metrics["train" if self.model.training else "eval"]["kl"][-1] = z.item()
        found = completions_loss(
            self._row,
            self._parameters,
            policy_chosen_logps=policy[wanted],
            policy_rejected_logps=policy[~wanted],
            ref_chosen_logps=inputs["ref_logps"][wanted],
            ref_rejected_logps=inputs["ref_logps"][~wanted],
            policy_kl_logps=kl_logps,
            ref_kl_logps=kl_ref,
        )
        loss = found.loss
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
        return (loss, result[1]) if return_outputs else loss


def _check_reference(model: Any, reference: Any) -> None:
    if reference is None:
        return
    # DeepSpeed's engine has a config of its own
    configs = [getattr(m, "module", m).config for m in (model, reference)]
    sizes = [config.get_text_config().vocab_size for config in configs]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"the reference model has a vocabulary of {sizes[1]} tokens and the model one of "
            f"{sizes[0]}; choose a reference with the same tokenizer."
        )
