"""Supervised fine-tuning on TRL's SFTTrainer."""

from typing import Any

from datasets import Dataset
from trl import SFTTrainer

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.trainers.evaluating import OverExamples
from rlhf_trl.trainers.on_trl import OnTRL


class BookSFTTrainer(OnTRL, AnswersHeldOut, OverExamples, SFTTrainer):
    """SFTTrainer that is evaluated by answering, or by loss and token accuracy."""

    streams = True
    measured = ("loss", "mean_token_accuracy")

    def __init__(self, *args: Any, **kwargs: Any):
        self.left_out: dict[str, int] = {}  # examples without a token to train on, by data set
        super().__init__(*args, **kwargs)

    # Extends SFTTrainer._prepare_dataset, which drops examples silently: counts them, then packs.
    def _prepare_dataset(
        self, dataset, processing_class, args, packing, formatting_func, dataset_name
    ):
        def prepared(rows, packed):
            given = (processing_class, args, packed, formatting_func, dataset_name)
            return super(BookSFTTrainer, self)._prepare_dataset(rows, *given)

        if not isinstance(dataset, Dataset):
            return prepared(dataset, packing)
        found = prepared(dataset, False)
        self.left_out[dataset_name] = len(dataset) - len(found)
        if not len(found):
            raise InputError(
                f"max_length: {args.max_length} leaves no token to train on in any of the "
                f"{len(dataset)} {dataset_name} examples, whose prompts fill it; raise it."
            )
        return prepared(found, True) if packing else found
