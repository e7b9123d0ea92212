"""What a trainer is fed: tokens of examples, with marks on those that it learns from.

The marks come from the trainer itself, which prepares the examples with the run's tokenizer and
settings. It stands on the embedded model, so that no weights of the run's are loaded.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset

from rlhf_trl.models import EMBEDDED, path_or_name
from rlhf_trl.rollouts.generate import prompt_texts
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.stages import Stage

# Fields of TRL's configs that load, write or report what a trainer that never trains needs not.
UNUSED: Mapping[str, Any] = {
    "report_to": [],
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "precompute_ref_log_probs": False,
    "sync_ref_model": False,
    "model_init_kwargs": None,
    "dataset_num_proc": None,
}


@dataclass(frozen=True)
class Fed:
    """A text as a trainer reads it."""

    name: str  # such as "chosen"
    ids: list[int]
    trained: list[bool]  # for each token, whether the loss reads what the model says of it


def fed_examples(
    stage: Stage, loaded: Loaded[Any, Any], rows: Dataset, tokenizer: Any
) -> list[list[Fed]]:
    """Return each example that the stage's trainer makes of rows, as one text or several.

    Rows that the trainer drops are missing, and packed ones are one example. Of a text that is
    judged as a whole, the last token is marked, behind which the score is read.

    Args:
        stage: of the run; its trainer learns from the answers in `rows`.
        loaded: the config.
        rows: as the run reads them.
        tokenizer: that the trainer gets.
    """
    args = copy(loaded.trl)
    with TemporaryDirectory() as folder:
        for name, value in {**UNUSED, "output_dir": folder}.items():
            if hasattr(args, name):
                setattr(args, name, value)
        stand_in = copy(loaded.model)
        stand_in.model_name_or_path = EMBEDDED
        with _silent_on_shares():
            trainer = stage.part("trainer")(
                model=path_or_name(stand_in),
                args=args,
                train_dataset=rows,
                processing_class=tokenizer,
            )
        prepared = trainer.train_dataset
        read = trainer._remove_unused_columns(prepared, description="training")
        batches = (trainer.data_collator([row]) for row in read)
        return [list(_texts(batch, row)) for batch, row in zip(batches, prepared, strict=True)]


@contextmanager
def _silent_on_shares() -> Iterator[None]:
    """Keep KTOTrainer from judging the shares of labels: these rows are some of the data set's."""

    def is_of_other_matters(record: logging.LogRecord) -> bool:
        return "different amounts of desirable" not in record.getMessage()

    logger = logging.getLogger("trl.trainer.kto_trainer")
    logger.addFilter(is_of_other_matters)
    try:
        yield
    finally:
        logger.removeFilter(is_of_other_matters)


def fed_prompts(
    loaded: Loaded[Any, Any], rows: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[Fed]:
    """Return the prompts of rows as they are answered, with no token marked."""
    texts = prompt_texts(tokenizer, rows, getattr(loaded.trl, "chat_template_kwargs", None))
    is_text = isinstance(rows[0]["prompt"], str)  # a chat template writes special tokens itself
    ids_of_prompts = tokenizer(texts, add_special_tokens=is_text)["input_ids"]
    return [Fed("prompt", ids, [False] * len(ids)) for ids in ids_of_prompts]


def _texts(batch: Mapping[str, Any], row: Mapping[str, Any]) -> Iterator[Fed]:
    """Yield the texts of a collated batch of one example, without padding."""
    sides = [("", batch)]
    if "chosen_input_ids" in batch:  # TRL's ORPOTrainer keeps the two sides apart
        sides = [
            (side, {key.removeprefix(f"{side}_"): value for key, value in batch.items()})
            for side in ("chosen", "rejected")
        ]
    for side, tensors in sides:
        every_ids = tensors["input_ids"].tolist()
        names = [side] if side else _names(len(every_ids), row)
        for number, (name, ids) in enumerate(zip(names, every_ids, strict=True)):
            length = len(ids)
            if "attention_mask" in tensors:
                length = int(tensors["attention_mask"][number].sum())
            if "labels" in tensors:
                trained = (tensors["labels"][number] != -100).tolist()
            elif "completion_mask" in tensors:
                trained = tensors["completion_mask"][number].bool().tolist()
            else:
                trained = [place == length - 1 for place in range(len(ids))]
            yield Fed(name, ids[:length], trained[:length])


def _names(count: int, row: Mapping[str, Any]) -> list[str]:
    """Return what the texts of an example are called, of which there are so many."""
    if count == 2:
        return ["chosen", "rejected"]
    if count > 2:
        return [f"rank {number + 1}" for number in range(count)]
    if isinstance(row.get("label"), bool):
        return ["desirable" if row["label"] else "undesirable"]
    return ["text"]
