"""ORPO (chapter 8) on TRL's ORPOTrainer, the one trainer here that builds on trl.experimental."""

import os
from copy import copy
from dataclasses import dataclass
from typing import Any

from datasets import DatasetDict
from torch import Tensor
from trl import DPOTrainer
from trl.trainer.utils import selective_log_softmax
from typing_extensions import override

from rlhf_trl.algorithms import of_the_row
from rlhf_trl.data.fitting import fit
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.over_examples import Batch, Recorder, Replay
from rlhf_trl.losses.preferences import completions_loss
from rlhf_trl.reward_models.accuracy import pair_accuracy
from rlhf_trl.trainers.direct_alignment import Aligned, AlignmentFields
from rlhf_trl.trainers.on_trl import fields_set, with_signature_of

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
try:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
except ImportError as error:
    import trl

    raise InputError(
        f"TRL {trl.__version__} has no trl.experimental.orpo, on which ORPO is built here; install "
        "the version that constraints.txt pins, or choose another algorithm."
    ) from error

_NO_LIMIT = 2**31  # tokens, of which no text has as many


@dataclass
class BookORPOConfig(AlignmentFields, ORPOConfig):
    """ORPOConfig whose beta belongs to the algorithm; None means the row's own value."""

    default_row = "orpo"
    trainers = ("ORPOTrainer",)

    beta: float | None = of_the_row("beta", "direct_alignment")


class BookORPOTrainer(Aligned, ORPOTrainer):
    """ORPOTrainer whose loss is a row of `rlhf_trl.algorithms`."""

    config_class = BookORPOConfig

    @with_signature_of(ORPOTrainer.__init__)
    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any):
        args = self._take(args, model)
        if isinstance(held_out := kwargs.get("eval_dataset"), dict):  # ORPOTrainer takes no dict
            kwargs["eval_dataset"] = DatasetDict(held_out)
        if not self._counts_examples():  # formulation "trl", where TRL also cuts over-long pairs
            super().__init__(model, args=args, **kwargs)
            return
        # what the config holds while ORPOTrainer is made, which so cuts nothing; `_fitted` does
        meanwhile: dict[str, Any] = {"max_length": _NO_LIMIT}
        if isinstance(model, str):  # ORPOTrainer's device map, "auto", fails on several processes
            meanwhile["model_init_kwargs"] = {"device_map": None, **(args.model_init_kwargs or {})}
        if not self._stock and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise InputError(
                f"{self._row.label} reads prompt and completion as one text, which an "
                "encoder-decoder model does not; write formulation: trl."
            )
        datasets = {name: kwargs.get(name) for name in ("train_dataset", "eval_dataset")}
        for name, dataset in datasets.items():
            if self._stock:
                _check_no_tools(dataset)
            elif _is_whole(dataset):  # ORPOTrainer gets one row; `_fitted` tokenizes all, below
                kwargs[name] = dataset.select([0])
        with fields_set(args, meanwhile):
            super().__init__(model, args=args, **kwargs)
        self._tokenizer = self.processing_class  # DPOTrainer's, whose `_prepare_dataset` is called
        self.max_length = args.max_length  # that of the user, not of `meanwhile`
        for name, dataset in datasets.items():
            if dataset is not None:
                rows = getattr(self, name) if self._stock else dataset  # stock: tokenized already
                setattr(self, name, self._fitted(rows, name.removesuffix("_dataset")))

    # Extends ORPOTrainer.tokenize_row, whose second end and first token DPO, KTO and SFT lack.
    @override
    def tokenize_row(self, feature, model=None):
        """Return the columns of a tokenized pair in formulation "trl"; others come after."""
        return super().tokenize_row(feature, model) if self._stock else {}

    # Extends Aligned's: examples are tokenized anew.
    def _counts_examples(self) -> bool:
        return not self._stock or super()._counts_examples()

    def _fitted(self, dataset: Any, name: str) -> Any:
        """Tokenize as DPO does, apply the rule for over-long pairs, and drop identical ones."""
        if isinstance(dataset, dict):
            return {key: self._fitted(part, f"{name}_{key}") for key, part in dataset.items()}
        if self._stock:
            options = {"remove_columns": dataset.column_names, "load_from_cache_file": False}
            dataset = dataset.map(_ids, **options, desc=f"Splitting {name} dataset")
        else:
            unlimited = copy(self.args)
            unlimited.max_length = None
            tokenizer = self.processing_class
            dataset = DPOTrainer._prepare_dataset(self, dataset, tokenizer, unlimited, name)
        # None becomes a rule, too, since nothing has been cut above
        sides, rule = ("chosen_ids", "rejected_ids"), self.args.overlong or "cut_prompt"
        dataset, self.fitted[name] = fit(dataset, sides, self.max_length, rule)
        options = {"remove_columns": dataset.column_names, "desc": f"Joining {name} dataset"}
        return dataset.map(_columns, **options)

    # Extends ORPOTrainer.concatenated_forward: keeps the result for the loss, and for evaluation
    # what it comes to in each pair, where TRL takes means over a batch (its padding included).
    @override
    def concatenated_forward(self, model, batch):
        """Run the model, and keep what it returned."""
        if isinstance(model, Replay):
            self._forward = _as_one_batch(**model())
        elif isinstance(model, Recorder):
            self._forward = super().concatenated_forward(model.model, batch)
            model.outputs.append(self._of_pairs(batch))
        else:
            self._forward = super().concatenated_forward(model, batch)
        return self._forward

    def _of_pairs(self, batch: Batch) -> dict[str, Tensor]:
        """Return what `_as_one_batch` needs, (B,) each, and the auxiliary loss, if there is one."""
        chosen_logps, rejected_logps, chosen_logits, rejected_logits, _, *aux = self._forward
        both = self.concatenated_inputs(
            batch, padding_value=self.padding_value, device=self.accelerator.device
        )
        ids = both["concatenated_input_ids"][:, 1:].chunk(2)
        masks = both["concatenated_attention_mask"][:, 1:].chunk(2)
        chosen_tokens = selective_log_softmax(chosen_logits, ids[0])
        pairs = {
            "chosen_logps": chosen_logps,
            "rejected_logps": rejected_logps,
            "nll_sums": -(chosen_tokens * masks[0]).sum(1),
            "chosen_logit_sums": (chosen_logits.mean(-1) * masks[0]).sum(1),
            "rejected_logit_sums": (rejected_logits.mean(-1) * masks[1]).sum(1),
            "chosen_lengths": masks[0].sum(1),
            "rejected_lengths": masks[1].sum(1),
        }
        return pairs | ({"aux_loss": aux[0]} if aux else {})

    def _batch_size(self, inputs):
        return len(inputs["chosen_labels"])

    # Extends OverExamples': where ORPOTrainer keeps the metrics of batches.
    def _batch_metrics(self):
        return self._stored_metrics["eval"]

    # Replaces OverExamples': what `_of_pairs` returned is kept whole.
    def _kept(self, output):
        return dict(output)

    # Extends ORPOTrainer.get_batch_loss_metrics: the row's loss on TRL's log-probabilities.
    @override
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        """Compute the row's loss, and TRL's metrics with log-probabilities that are sums."""
        loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
        if self._stock and (train_eval == "train" or not self._evaluates_examples()):
            return loss, metrics
        (chosen, rejected), aux = self._forward[:2], self._forward[5:]
        prefix = "eval_" if train_eval == "eval" else ""
        for side, logps in (("chosen", chosen), ("rejected", rejected)):
            sums = logps.detach() * (batch[f"{side}_labels"] != -100).sum(1)  # of TRL's means
            metrics[f"{prefix}logps/{side}"] = self.accelerator.gather(sums).mean().item()
        both = self.accelerator.gather((chosen.detach(), rejected.detach()))
        metrics[f"{prefix}pair_accuracy"] = pair_accuracy(*both)
        if self._stock:
            return loss, metrics
        metrics[f"{prefix}nll_loss"] = self.accelerator.gather(-chosen.detach()).mean().item()
        logps = {"policy_chosen_logps": chosen, "policy_rejected_logps": rejected}
        result = completions_loss(self._row, self._parameters, **logps, chosen_nll=-chosen)
        return result.loss + (self.aux_loss_coef * aux[0] if aux else 0), metrics


def _as_one_batch(
    *,
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    nll_sums: Tensor,
    chosen_logit_sums: Tensor,
    rejected_logit_sums: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    aux_loss: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return what ORPOTrainer.concatenated_forward returns, as if all examples were one batch.

    In evaluation the model reads small batches, and TRL's loss is then computed once on all. The
    arguments, (N,) each, are what `_of_pairs` has recorded: log-probabilities of completions, sums
    over the tokens of prompt and completion, and the numbers of these tokens. In the result logits
    and NLL (of the chosen) are means over all tokens.
    """
    forward = (
        chosen_logps,
        rejected_logps,
        chosen_logit_sums.sum() / chosen_lengths.sum(),
        rejected_logit_sums.sum() / rejected_lengths.sum(),
        nll_sums.sum() / chosen_lengths.sum(),
    )
    return forward if aux_loss is None else (*forward, aux_loss)


def _check_no_tools(dataset: Any) -> None:
    """Refuse a column that TRL's own ORPOTrainer would not read."""
    if "tools" in (getattr(dataset, "column_names", None) or ()):
        raise InputError(
            "dataset: TRL's ORPOTrainer does not hand the column tools to the chat "
            "template; remove it, or leave out formulation: trl."
        )


def _is_whole(dataset: Any) -> bool:
    """Whether a data set is one that can be counted; others are refused later."""
    return hasattr(dataset, "select") and len(dataset) > 0


def _ids(row: dict[str, Any]) -> dict[str, list[int]]:
    """Take a tokenized pair apart: its prompt is what both sides begin with."""
    chosen, rejected = (row[f"{side}_input_ids"] for side in ("chosen", "rejected"))
    start = min(row[f"{side}_labels"].count(-100) for side in ("chosen", "rejected"))
    while chosen[:start] != rejected[:start]:  # the prompt's end may be merged into an answer
        start -= 1
    sides = {"chosen_ids": chosen[start:], "rejected_ids": rejected[start:]}
    return {"prompt_ids": chosen[:start], **sides}


def _columns(row: dict[str, list[int]]) -> dict[str, list[int]]:
    """Put a pair together as ORPOTrainer's collator expects it."""
    prompt = row["prompt_ids"]
    columns = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for side in ("chosen", "rejected"):
        ids = row[f"{side}_ids"]
        columns[f"{side}_input_ids"] = prompt + ids
        columns[f"{side}_attention_mask"] = [1] * len(prompt + ids)
        columns[f"{side}_labels"] = [-100] * len(prompt) + ids
    return columns
