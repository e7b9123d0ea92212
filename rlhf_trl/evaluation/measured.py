"""What a run's evaluations have measured, and the number that stands for it in one line."""

import json
from pathlib import Path
from typing import Any

from rlhf_trl.output import numbered

# The scores of answers that stand above the progress bar: the first of these that was measured.
SCORES_OF_ANSWERS = {"exact_match": "exact match", "reward": "reward"}
# What the last line of a run shows: the first of these that was measured.
HEADLINES = {
    **SCORES_OF_ANSWERS,
    "pair_accuracy": "pair accuracy",
    "first_error": "first error found",
    "auc": "AUC",
    "loss": "loss",
}


def read_evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the evaluations of a run by step, in order."""
    return {
        step: json.loads(path.read_text())
        for step, path in sorted(numbered(folder, "step-").items())
    }
