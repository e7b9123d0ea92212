"""What a config of SFT computes, held against the two means that supervised fine-tuning may take.

Both are the mean of -log pi over the tokens that are trained on: TRL takes it over all of a window
(`num_items_in_batch`), the book's published code over each micro-batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from rlhf_trl.compare.identities import TOKENS_OF_THE_WINDOW
from rlhf_trl.compare.matrix import Matrix, Verdict, judge
from rlhf_trl.compare.measure import Book, Stock, sentence
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.pages import report
from rlhf_trl.compare.subjects import UNSHOWN, Subject, side_of
from rlhf_trl.compare.trainers import trainer_classes
from rlhf_trl.compare.windows.batches import BATCHES
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import tables

MEANS = {"mean over the window": [TOKENS_OF_THE_WINDOW], "mean over each micro-batch": []}
"""The equations by name, each as what changes the gradient of the book's code to its own."""

_BATCHES = ("heavy", "ragged", "accumulation")


class OfMean(NamedTuple):
    """A config of SFT against one of the means, on the batch where it is farthest from it."""

    mean: str
    error: float  # |its gradient - the mean's| / |the mean's|
    cosine: float
    ratio: float  # |its gradient| / |the mean's|
    verdict: Verdict
    batch: str


def measure(subject: Subject, matrix: Matrix, **changes: Any) -> list[OfMean]:
    """Measure a subject, with some fields changed, against both means.

    Raises:
        InputError: the trainer cannot be run on the fixed batches.
    """
    try:
        with quick_and_quiet():
            return [_farthest(side_of(subject, **changes), mean, matrix) for mean in MEANS]
    except InputError:
        raise
    except Exception as error:  # whatever the user's trainer or config raises
        name = subject.classes[0].__name__
        message = f"{name} cannot be run on the fixed batches: {sentence(error)}"
        raise InputError(f"{subject.label}: {message}") from error


def _farthest(side: Stock, mean: str, matrix: Matrix) -> OfMean:
    results = []
    for batch in BATCHES:
        if batch.name in _BATCHES:
            window = matrix.window("SFTTrainer", (), batch)
            left = window.changed(Book("sft", "code"), MEANS[mean])
            _, right = matrix.side(side, window)
            results.append(OfMean(mean, *judge(left, right), batch.name))
    return max(results, key=lambda result: result.error)


def fix(subject: Subject) -> dict[str, Any]:
    """Return the fields that a config sets otherwise than TRL does, with TRL's defaults."""
    defaults = {f.name: f.default for f in fields(trainer_classes("SFTTrainer")[1])}
    return {
        name: defaults[name]
        for name, value in subject.fields.items()
        if defaults.get(name, MISSING) not in (MISSING, value) and name not in UNSHOWN
    }


def render(subject: Subject, output_format: str) -> str:
    """Measure a subject and write the result; `output_format` is one of report.FORMATS."""
    matrix = Matrix()
    measured = measure(subject, matrix)
    changes = {} if any(result.verdict == "equal" for result in measured) else fix(subject)
    after_changes = measure(subject, matrix, **changes) if changes else []
    if output_format == "json":
        return json.dumps(
            [result._asdict() | {"changes": changes} for result in measured], indent=2
        )
    written = report.table([_cells(result) for result in measured], output_format)
    if output_format == "html":
        return written
    return "\n".join([*_sentences(subject, measured, changes, after_changes), "", written])


def _sentences(
    subject: Subject,
    measured: Sequence[OfMean],
    changes: Mapping[str, Any],
    after_changes: Sequence[OfMean],
) -> list[str]:
    """Return what stands above the table, in lines."""
    equal = [result.mean for result in measured if result.verdict == "equal"]
    what = f"equal to SFT's {' and its '.join(equal)}" if equal else "equal to neither mean of SFT"
    sentences = [f"{subject.label}: as {subject.trainer}, {what}"]
    if changes:
        then = [result.mean for result in after_changes if result.verdict == "equal"]
        end = f"then equal to the {' and the '.join(then)}" if then else "then equal to neither"
        sentences.append(f"to get there: {report.as_text(changes)}; {end}")
    if untested := subject.untested_fields(config=None):
        sentences.append(f"not measured, and may act elsewhere: {', '.join(untested)}")
    sentences += subject.run_otherwise
    batches = ", ".join(_BATCHES)
    sentences.append(f"measured on {batches}; each line shows the batch where it is worst")
    return [line for text in sentences for line in tables.wrapped(text)]


def _cells(result: OfMean) -> dict[str, str]:
    return {
        "-log pi": result.mean,
        "verdict": result.verdict,
        "error": f"{result.error:.1e}",
        "cosine": f"{result.cosine:.4f}",
        "ratio": f"{result.ratio:.4f}",
        "batch": result.batch,
    }
