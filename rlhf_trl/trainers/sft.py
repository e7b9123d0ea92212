"""Supervised fine-tuning on TRL's SFTTrainer."""

from copy import copy
from typing import Any

import numpy as np
from datasets import Dataset
from trl import SFTTrainer

from rlhf_trl.data.columns import cells
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.trainers.fitting import lengths
from rlhf_trl.trainers.on_trl import OnTRL


class BookSFTTrainer(OnTRL, AnswersHeldOut, SFTTrainer):
    """SFTTrainer that is evaluated by answering, or by loss and token accuracy."""

    streams = True
    measured = ("loss", "mean_token_accuracy")

    def __init__(self, *args: Any, **kwargs: Any):
        self.left_out: dict[str, int] = {}  # examples without a token to train on, by data set
        self.cut_off: dict[str, int] = {}  # and examples whose end max_length cuts off
        super().__init__(*args, **kwargs)

    # Extends SFTTrainer._prepare_dataset, which cuts and drops examples silently: counts them.
    def _prepare_dataset(
        self, dataset, processing_class, args, packing, formatting_func, dataset_name
    ):
        def prepared(rows, args, packed):
            given = (processing_class, args, packed, formatting_func, dataset_name)
            return super(BookSFTTrainer, self)._prepare_dataset(rows, *given)

        if not isinstance(dataset, Dataset):
            return prepared(dataset, args, packing)
        unlimited = copy(args)
        unlimited.max_length = None
        whole = prepared(dataset, unlimited, False)
        fitting = prepared(whole, args, False)
        self.left_out[dataset_name] = len(whole) - len(fitting)
        if not len(fitting):
            raise InputError(
                f"max_length: {args.max_length} leaves no token to train on in any of the "
                f"{len(whole)} {dataset_name} examples, whose prompts fill it; raise it."
            )
        self.cut_off[dataset_name] = _count_cut_off(whole, args)
        return prepared(fitting, args, True) if packing else fitting


def _count_cut_off(dataset: Dataset, args: Any) -> int:
    """Count the tokenized examples that keep tokens to train on, but not those at their end."""
    if args.max_length is None or args.truncation_mode == "keep_end":
        return 0
    longer = np.flatnonzero(lengths(dataset, "input_ids") > args.max_length)
    labels = dataset.select(longer).select_columns(["labels"])
    return sum(
        any(label != -100 for label in row[: args.max_length]) for row in cells(labels, "labels")
    )
