"""Direct alignment (chapter 8) on TRL's DPOTrainer and KTOTrainer: a row of the table, read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.algorithms import Preference, RowConfig, of_the_row
from rlhf_trl.data.fitting import fit, kto_order, rotated
from rlhf_trl.errors import InputError, setting
from rlhf_trl.evaluation.beside_loss import AnswersBesideLoss
from rlhf_trl.evaluation.over_examples import OverExamples, Replay
from rlhf_trl.losses.preferences import completions_loss
from rlhf_trl.reward_models.accuracy import pair_accuracy
from rlhf_trl.trainers.on_trl import OnTRL, Safeguards, fields_set, with_signature_of
from rlhf_trl.trainers.rebalanced import Rebalanced


@dataclass
class AlignmentFields(RowConfig, Safeguards):
    """What the configs of all direct-alignment trainers have beside TRL's fields.

    Of an example of more than `max_length` tokens, the prompt loses its first ("cut_prompt") or
    completions lose their last ("cut_completion"), or it is dropped ("drop"), and so are pairs of
    twice the same completion; None leaves it to TRL. `max_completion_length` is that of the answers
    that evaluation generates.
    """

    kind = Preference
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
    trainers = ("DPOTrainer", "CPOTrainer")  # SimPO, a row of TRL's CPOTrainer, is computed here

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


class Aligned(Rebalanced, OnTRL, AnswersBesideLoss, OverExamples):
    """What the direct-alignment trainers share: the row, and a seam in TRL's loss."""

    reference_names: ClassVar[tuple[str, ...]] = ()  # TRL's for its log-probabilities

    def _take(self, args: Any, model: Any) -> Any:
        args = super()._take(args, model)
        self.fitted = {}
        self.max_completion_length = getattr(args, "max_completion_length", None) or 64
        return args

    def _counts_examples(self) -> bool:
        fields = ("overlong", "interleave_labels")
        is_fitted = any(getattr(self.args, name, None) is not None for name in fields)
        return is_fitted or super()._counts_examples()

    # Calls _compute_loss, which reads the reference's log-probabilities and returns no policy's.
    def _recorded(self, compute: Any, model: Any, inputs: Any, return_outputs: bool) -> Any:
        """Return what TRL's `compute` does, which logs its metrics, and the output of each call."""
        outputs = []

        def recorder(**arguments: Any) -> Any:
            outputs.append(model(**arguments))
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

    def _with_auxiliary(self, loss: Tensor, outputs: Any) -> Tensor:
        """Add the auxiliary loss of a mixture of experts, where TRL adds it."""
        if not self.aux_loss_enabled:
            return loss
        return loss + self.router_aux_loss_coef * outputs.aux_loss

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
        meanwhile: dict[str, Any] = {}  # what the config holds while TRL's trainer is made
        if not self._row.reference:
            if kwargs.get("ref_model") is not None or args.sync_ref_model:
                raise InputError(f"{self._row.label} reads no reference model; remove it.")
            meanwhile["precompute_ref_log_probs"] = True
        if not self._stock:  # TRL's loss is computed for its metrics only
            meanwhile |= {"loss_type": ["sigmoid"], "loss_weights": None}
        with fields_set(args, meanwhile):
            super().__init__(model, args=args, **kwargs)
        # the config's own value again, from which TRL's trainer has set this under `meanwhile`
        self.precompute_ref_logps = args.precompute_ref_log_probs and self._row.reference
        if not self._stock:
            _check_reference(self.model, self.ref_model)

    # Extends DPOTrainer._prepare_dataset: our rules for over-long and identical pairs go first.
    @override
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        if getattr(args, "overlong", None) is None:
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        unlimited = copy(args)
        unlimited.max_length = None  # so that TRL cuts nothing
        dataset = super()._prepare_dataset(dataset, processing_class, unlimited, dataset_name)
        sides = ("chosen_ids", "rejected_ids")
        dataset, self.fitted[dataset_name] = fit(dataset, sides, args.max_length, args.overlong)
        return dataset

    # Replaces DPOTrainer._precompute_ref_logps where no reference is read.
    @override
    def _precompute_ref_logps(self, dataset, name, batch_size):
        if not self._row.reference:
            return dataset
        from rlhf_trl.trainers.reference_cache import refuse_own_files

        refuse_own_files(self, dataset)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    # Extends DPOTrainer._compute_loss: the row's loss and rewards replace TRL's; its metrics stay,
    # with a pair accuracy that counts a tie as one half (rewards/accuracies: as wrong).
    @override
    def _compute_loss(self, model, inputs, return_outputs):
        compute = super()._compute_loss
        if self._stock and (self.model.training or not self._evaluates_examples()):
            return compute(model, inputs, return_outputs)
        if self._row.reference:
            inputs = {**inputs, **self._reference(inputs)}
        else:
            zeros = torch.zeros(self._batch_size(inputs), device=inputs["input_ids"].device)
            # TRL's loss, computed for its metrics, subtracts a reference all the same
            inputs = {**inputs, **dict.fromkeys(self.reference_names, zeros)}
        # `result` is TRL's loss, or with `return_outputs` a pair of that and its outputs
        result, (outputs, *_) = self._recorded(compute, model, inputs, return_outputs)
        if self._stock:
            self._log_stock_accuracy(outputs, inputs)
            return result
        loss = self._with_auxiliary(self._row_loss(outputs.log_probs, inputs), outputs)
        return (loss, result[1]) if return_outputs else loss

    def _log_stock_accuracy(self, outputs: Any, inputs: Mapping[str, Any]) -> None:
        """Log the pair accuracy of TRL's own loss, by what the policy returned."""
        # TRL's method sums what any model gives; `Replay` stands for one that returns `outputs`
        logps = self.compute_ref_log_probs(Replay([outputs]), inputs)
        sides = zip(logps, self.reference_names, strict=True)
        log_ratios = [policy - inputs[name] for policy, name in sides]
        self._logged["pair_accuracy"].append(pair_accuracy(*log_ratios))

    def _row_loss(self, token_logps: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the row's loss, with the NLL of the chosen if it has a weight; log the rewards.

        `token_logps` are (2B, L) under the policy, the B chosen texts first; TRL has set them to 0
        where no token of a completion is predicted.
        """
        mask = inputs["completion_mask"][:, 1:]  # of the tokens that are predicted
        # cut to these: in front, prompt-learning adapters add tokens of their own
        sums = token_logps[:, -mask.shape[1] :].sum(1)
        lengths = mask.sum(1)
        divisors = lengths if self._row.logps == "mean" else torch.ones_like(lengths)
        chosen, rejected = (sums / divisors).chunk(2)
        logps = {"policy_chosen_logps": chosen, "policy_rejected_logps": rejected}
        if self._row.reference:  # the inputs hold its sums, see `_reference`
            for name, divisor in zip(self.reference_names, divisors.chunk(2), strict=True):
                logps[name] = inputs[name] / divisor
        result = completions_loss(self._row, self._parameters, **logps)
        self._log_rewards(result.chosen_rewards, result.rejected_rewards)
        if not self._nll_weight:
            return result.loss
        nll = -(sums / lengths).chunk(2)[0].mean()
        self._logged["nll"].append(self.accelerator.gather(nll.detach()).mean().item())
        return result.loss + self._nll_weight * nll

    def _log_rewards(self, chosen: Tensor, rejected: Tensor) -> None:
        """Log a batch's (B,) implicit rewards in the place of those that TRL has just logged."""
        chosen, rejected = self.accelerator.gather(chosen), self.accelerator.gather(rejected)
        margins = chosen - rejected
        self._logged["rewards/chosen"][-1] = chosen.mean().item()
        self._logged["rewards/rejected"][-1] = rejected.mean().item()
        self._logged["rewards/margins"][-1] = margins.mean().item()
        self._logged["rewards/accuracies"][-1] = (margins > 0).float().mean().item()
        self._logged["pair_accuracy"].append(pair_accuracy(chosen, rejected))

    def _batch_size(self, inputs):
        return len(inputs["input_ids"]) // 2

    def _texts(self):
        return "chosen_ids", "rejected_ids"


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

    # Extends KTOTrainer._prepare_dataset, which rotates completions at once: each example gets the
    # completion of a neighbor as its mismatched one. Before that, ours cuts and orders examples.
    @override
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        overlong = getattr(args, "overlong", None)
        interleaved = getattr(args, "interleave_labels", None)
        if overlong is None and interleaved is None:
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        unlimited = copy(args)
        if overlong is not None:
            unlimited.max_length = None  # so that TRL cuts nothing
        # while this is False, TRL does not rotate: `rotated` does, in the final order
        calculate_kl, self.calculate_KL = self.calculate_KL, False
        try:
            dataset = super()._prepare_dataset(dataset, processing_class, unlimited, dataset_name)
        finally:
            self.calculate_KL = calculate_kl
        numbers: dict[str, list[int]] = {}  # of examples that are cut or left out, by reason
        if overlong is not None:
            dataset, numbers = fit(dataset, ("completion_ids",), args.max_length, overlong)
        batch = args.per_device_train_batch_size
        if interleaved is not None:
            order = kto_order(
                dataset["label"], dataset["prompt_ids"], batch, args.seed, interleaved
            )
            # an example that would be the only one of its batch has no neighbor there
            numbers["left over"] = sorted({*range(len(dataset))} - {*order})
            dataset = dataset.select(order)
        self.fitted[dataset_name] = numbers
        return rotated(dataset, batch)

    # Extends KTOTrainer._precompute_ref_logps: with several processes, it needs a file of the data.
    @override
    def _precompute_ref_logps(self, dataset, name, batch_size):
        from rlhf_trl.trainers.reference_cache import refuse_own_files

        refuse_own_files(self, dataset)
        return super()._precompute_ref_logps(dataset, name, batch_size)

    # Extends KTOTrainer._compute_loss: see BookDPOTrainer. TRL calls the model on mismatched pairs
    # first, then on the examples.
    @override
    def _compute_loss(self, model, inputs, return_outputs):
        compute = super()._compute_loss
        if self._stock and (self.model.training or not self._evaluates_examples()):
            return compute(model, inputs, return_outputs)
        inputs = {**inputs, **self._reference(inputs)}
        if self._stock:
            with self._reference_given():
                return compute(model, inputs, return_outputs)
        result, (kl, outputs, *_) = self._recorded(compute, model, inputs, return_outputs)
        # (B,) sums, also over the mismatched ones; the slice is that of BookDPOTrainer._row_loss
        logps = outputs.log_probs[:, 1 - inputs["input_ids"].shape[1] :].sum(1)
        kl_logps = kl.log_probs[:, 1 - inputs["KL_input_ids"].shape[1] :].sum(1)
        loss = self._with_auxiliary(self._row_loss(logps, kl_logps, inputs), outputs)
        return (loss, result[1]) if return_outputs else loss

    def _row_loss(self, logps: Tensor, kl_logps: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the row's loss from (B,) log-probabilities of examples and of mismatched pairs."""
        chosen = inputs["label"].bool()
        ref_logps = inputs["ref_logps"]
        kl_logps = self.accelerator.gather(kl_logps)  # of all processes, as TRL's reference point
        ref_kl_logps = self.accelerator.gather(inputs["ref_KL_logps"])
        if self.reference_point == "rejected":
            # the book's code takes those of this micro-batch alone: rejected ones, or all if one
            of_point = ~chosen if (~chosen).sum() > 1 else torch.ones_like(chosen)
            kl_logps, ref_kl_logps = logps[of_point].detach(), ref_logps[of_point]
            z = book.preference.kto_reference_point(kl_logps, ref_kl_logps)
            self._logged["kl"][-1] = z.item()  # in place of TRL's, of mismatched pairs
        return completions_loss(
            self._row,
            self._parameters,
            policy_chosen_logps=logps[chosen],
            policy_rejected_logps=logps[~chosen],
            ref_chosen_logps=ref_logps[chosen],
            ref_rejected_logps=ref_logps[~chosen],
            policy_kl_logps=kl_logps,
            ref_kl_logps=ref_kl_logps,
        ).loss


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
