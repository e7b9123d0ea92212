"""Loading a checkpoint of a model that has weights in common."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def tied_weights_are_no_news(model: Any) -> Iterator[None]:
    """Drop the warning of transformers that a checkpoint lacks exactly the tied weights.

    They are saved once, under the name of the weight that they are tied to.
    """
    tied = [*(getattr(model, "all_tied_weights_keys", None) or ())]
    warning = f"There were missing keys in the checkpoint model loaded: {tied}."
    logger = logging.getLogger("transformers.trainer")

    def is_news(record: logging.LogRecord) -> bool:
        return record.getMessage() != warning

    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)
