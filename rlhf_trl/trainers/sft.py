"""Supervised fine-tuning on TRL's SFTTrainer."""

from copy import copy
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from torch import Tensor
from trl import SFTConfig, SFTTrainer
from typing_extensions import override

from rlhf_trl.data.fitting import beyond_limit
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.evaluation.over_examples import Example, OverExamples
from rlhf_trl.trainers.on_trl import OnTRL, Safeguards, with_signature_of


@dataclass
class BookSFTConfig(Safeguards, SFTConfig):
    """SFTConfig with what recipes turn on."""


class BookSFTTrainer(OnTRL, AnswersHeldOut, OverExamples, SFTTrainer):
    """SFTTrainer that is evaluated by answering, or by loss and token accuracy.

    Both are means over all tokens. With label smoothing or a `compute_loss_func`, which read
    logits, they are the Trainer's, means over batches.
    """

    config_class = BookSFTConfig
    measured = ("loss", "mean_token_accuracy")
    _stock = True  # the loss is TRL's

    @with_signature_of(SFTTrainer.__init__)
    def __init__(self, **kwargs: Any):
        # the numbers of examples without a token to train on, by data set
        self.left_out: dict[str, list[int]] = {}
        self.cut_off: dict[str, list[int]] = {}  # and of those whose end max_length cuts off
        super().__init__(**kwargs)

    # Extends SFTTrainer._prepare_dataset, which cuts and drops examples silently: counts them.
    @override
    def _prepare_dataset(
        self, dataset, processing_class, args, packing, formatting_func, dataset_name
    ):
        prepare = super()._prepare_dataset

        def prepared(rows, args, packing):
            """Return rows as SFTTrainer prepares them; tokenized ones stay as they are."""
            return prepare(rows, processing_class, args, packing, formatting_func, dataset_name)

        if not isinstance(dataset, Dataset):
            return prepared(dataset, args, packing)
        unlimited = copy(args)
        unlimited.max_length = None  # so that nothing is cut at first
        # step by step, so that rows can be counted: tokenized, then cut, and at the end packed
        whole = prepared(dataset, unlimited, packing=False)
        fitting = prepared(whole, args, packing=False)
        if not len(fitting):
            raise InputError(
                f"max_length: {args.max_length} leaves no token to train on in any of the "
                f"{len(whole)} {dataset_name} examples, whose prompts fill it; raise it."
            )
        self.left_out[dataset_name], self.cut_off[dataset_name] = beyond_limit(whole, args)
        return prepared(fitting, args, packing=True) if packing else fitting

    # Extends OverExamples.evaluation_loop, which keeps no logits.
    @override
    def evaluation_loop(self, *args, **kwargs):
        """Run the loop, over examples unless the loss reads logits."""
        if self.label_smoother is not None or self.compute_loss_func is not None:
            return super(OverExamples, self).evaluation_loop(*args, **kwargs)
        return super().evaluation_loop(*args, **kwargs)

    # Extends OverExamples': without padding a batch is one row, and an example is a sequence in it.
    def _examples(self, inputs, outputs):
        if not self.padding_free:
            return super()._examples(inputs, outputs)
        starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], inputs["position_ids"].shape[1]]
        return [
            Example(
                {"input_ids": inputs["input_ids"][:, start:end].cpu()},
                [_between(fields, start, end - 1) for fields in outputs],
            )
            for start, end in zip(starts, ends, strict=True)
            if end - start > 1  # a single token, as of padding, has none to predict
        ]

    def _count(self, dataset):
        if not self.padding_free:
            return super()._count(dataset)
        if "seq_lengths" in dataset.column_names:  # of packed rows
            return sum(length > 1 for lengths in dataset["seq_lengths"] for length in lengths)
        return sum(len(ids) > 1 for ids in dataset["input_ids"])


def _between(fields: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """Return what (1, L - 1) tensors say of the tokens after `start` up to `end`."""
    return {
        name: (value[:, start:end] if value.dim() else value).cpu().clone()
        for name, value in fields.items()
    }
