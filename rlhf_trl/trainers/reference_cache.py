"""The file in which TRL keeps the reference's log-probabilities of a data set."""

from typing import Any

from accelerate.utils import gather_object
from datasets import IterableDataset

from rlhf_trl.errors import InputError


def refuse_own_files(trainer: Any, dataset: Any) -> None:
    """Stop where each process would look for that file in a folder of its own.

    TRL writes it on the first process, beside the data set's own file; a data set in memory has
    none, and datasets gives each process another temporary folder.
    """
    if isinstance(dataset, IterableDataset):  # which TRL refuses
        return
    files = gather_object([dataset._get_cache_file_path("reference")])
    if len({*files}) > 1:
        raise InputError(
            f"precompute_ref_log_probs: {trainer.accelerator.num_processes} processes cannot share "
            "the log-probabilities of a data set in memory; write the data to a file and load it "
            "from there, or remove precompute_ref_log_probs."
        )
