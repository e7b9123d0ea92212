"""What all our trainers have in common: they stand on methods of TRL and transformers."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import IterableDataset

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError

OVERRIDDEN = {
    "Trainer": "create_optimizer create_scheduler evaluate evaluation_loop get_batch_samples "
    "_init_training_state _load_best_model _load_from_checkpoint _save",
    "GRPOTrainer": "_calculate_rewards _compute_loss _generate_and_score_completions "
    "_generate_single_turn _get_per_token_logps_and_entropies _get_train_sampler "
    "_load_optimizer_and_scheduler _prepare_inputs _save_checkpoint",
    "DPOTrainer": "_compute_loss _precompute_ref_logps _prepare_dataset evaluate",
    "KTOTrainer": "_compute_loss _prepare_dataset evaluate",
    "ORPOTrainer": "concatenated_forward evaluation_loop get_batch_loss_metrics",
    "RewardTrainer": "_prepare_dataset _set_signature_columns_if_needed compute_loss evaluate",
    "SFTTrainer": "_prepare_dataset evaluate",
}
"""What our trainers override, by the class that has it: renamed there, ours would never be called.

A test keeps it complete.
"""


class OnTRL:
    """Trainer mixin: a row, whose name is on the card; no streamed data, unless `streams`.

    Raises:
        InputError: a streamed data set; and, when a class is defined on it, a method that is gone.
    """

    streams = False
    _algorithm: str | None = None

    def _take(self, resolved: algorithms.Resolved) -> Any:
        """Keep a row before the parent is built, and return the config that it makes."""
        self._row, self._parameters = resolved.row, dict(resolved.parameters)
        self._algorithm, self._stock = resolved.algorithm, resolved.formulation == "trl"
        return resolved.args

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for parent in cls.__mro__:
            for name in OVERRIDDEN.get(parent.__name__, "").split():
                if hasattr(cls, name) and not hasattr(parent, name):
                    library = parent.__module__.partition(".")[0]
                    raise InputError(
                        f"{library} {version(library)} has no {parent.__name__}.{name}, which "
                        f"{cls.__name__} overrides and would now compute without; install the "
                        "versions that constraints.txt pins."
                    )

    def __init__(self, *args: Any, **kwargs: Any):
        if not self.streams and _streamed([args, kwargs]):
            raise InputError(
                f"{type(self).__name__}: a streamed data set (IterableDataset) cannot be counted, "
                "ordered or resumed; load it whole, with streaming=False."
            )
        if (algorithm := self._algorithm) is not None:  # before TRL tags the model
            self._name = algorithms.ALGORITHMS[algorithm].title
            general = [tag for tag in self._tag_names if tag not in algorithms.ALGORITHMS]
            self._tag_names, self._paper = [*general, algorithm], paper(algorithm)
        super().__init__(*args, **kwargs)


def paper(algorithm: str) -> dict[str, str | None]:
    """Return title, arXiv number and BibTeX of a row's paper; without an entry, what the row says.

    Args:
        algorithm: the row.
    """
    where = algorithms.ALGORITHMS[algorithm].paper
    number = re.split("[: ]", where)[-1]
    entries = Path(__file__).parents[1].joinpath("papers.bib").read_text("utf-8").split("\n\n")
    entry = next((entry.strip() for entry in entries if number in entry), where)
    title = re.search(r"title *= *{{(.*)}}|$", entry)[1] or where
    return {"title": title, "id": number if "arXiv" in where else None, "citation": entry}


def _streamed(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_streamed, value.values() if isinstance(value, dict) else value))
    return isinstance(value, IterableDataset)
