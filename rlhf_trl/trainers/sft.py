"""Supervised fine-tuning on TRL's SFTTrainer."""

from typing import Any

from datasets import Dataset
from trl import SFTTrainer

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.trainers.on_trl import OnTRL


class BookSFTTrainer(OnTRL, AnswersHeldOut, SFTTrainer):
    """SFTTrainer that is evaluated by answering, or by loss and token accuracy.

    Attributes:
        left_out (`dict[str, int]`): by the name of a data set, how many examples had no token to
            train on within `max_length`.
    """

    streams = True

    def __init__(self, *args: Any, **kwargs: Any):
        self.left_out: dict[str, int] = {}
        super().__init__(*args, **kwargs)

    # Extends AnswersHeldOut.evaluate: where nothing is answered, the trainer's metrics are told.
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate, by answering where there are prompts for it."""
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if eval_dataset is None and not self.held_out:
            names = [f"{metric_key_prefix}_{name}" for name in ("loss", "mean_token_accuracy")]
            self._tell({name: metrics[name] for name in names if name in metrics}, [])
        return metrics

    # Extends SFTTrainer._prepare_dataset, which drops examples without a token to train on
    # silently, and packs them.
    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """Count what is dropped; before packing, too."""
        if not isinstance(dataset, Dataset):
            return super()._prepare_dataset(
                dataset, processing_class, args, packing, formatting_func, dataset_name
            )
        found = super()._prepare_dataset(
            dataset, processing_class, args, False, formatting_func, dataset_name
        )
        self.left_out[dataset_name] = len(dataset) - len(found)
        if not len(found):
            raise InputError(
                f"max_length: {args.max_length} leaves no token to train on in any of the "
                f"{len(dataset)} {dataset_name} examples, whose prompts fill it; raise it."
            )
        if packing:
            found = super()._prepare_dataset(
                found, processing_class, args, True, formatting_func, dataset_name
            )
        return found
