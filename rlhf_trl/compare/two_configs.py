"""Two configs side by side: the fields that differ, and loss and gradient on the same batches."""

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from enum import Enum
from typing import Any

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare.closest import of_whole_generations
from rlhf_trl.compare.matrix import Matrix, Verdict, judge
from rlhf_trl.compare.measure import sentence
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.pages import report
from rlhf_trl.compare.subjects import UNSHOWN, Subject, read_subject, side_of
from rlhf_trl.compare.trainers import POLICY
from rlhf_trl.compare.windows.pair_examples import made_kind
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import tables
from rlhf_trl.evaluation.tables import Line
from rlhf_trl.run.config import read_config
from rlhf_trl.run.differences import differences


@dataclass(frozen=True)
class OnBatch:
    """Loss and gradient of two configs on one batch."""

    batch: str
    first_loss: float
    second_loss: float
    error: float  # |second gradient - first gradient| / |first gradient|
    cosine: float  # of the angle between the gradients
    ratio: float  # |second gradient| / |first gradient|
    verdict: Verdict


@dataclass(frozen=True)
class TwoConfigs:
    """What two configs have in common and what not."""

    paths: tuple[str, str]
    fields: Mapping[str, tuple[Any, Any]]  # dotted key -> its two values, where they differ
    unseen: tuple[str, ...]  # those of `fields` that act on no fixed batch, such as a learning rate
    batches: tuple[OnBatch, ...]  # empty where the two cannot be measured on the same batches
    why_not: str = ""  # why they cannot be


_NAMES_OF_ROW = ("algorithm", "formulation")
"""Keys that choose the row, and with it the loss on every batch: a batch always shows them."""


def compare_configs(first: str, second: str) -> TwoConfigs:
    """Compare two configs, field by field and on the batches that both can be measured on.

    A field that one config leaves out has the default of its algorithm there, or else that of its
    class. Without a measurement, `why_not` of the result says why; the fields are compared all the
    same.
    """
    paths = (first, second)
    first_values, second_values = (read_config(path) for path in paths)
    try:
        first_subject, second_subject = (read_subject(path, None) for path in paths)
    except InputError as error:
        # `read_subject` refuses a config of SFT, for example. Without a subject the class is not
        # known, nor are its defaults, so the keys are compared as they are written.
        differing = differences(first_values, second_values)
        unseen = tuple(key for key in differing if key not in _NAMES_OF_ROW)
        return TwoConfigs(paths, differing, unseen, batches=(), why_not=str(error))
    # by key: the two values; a key that only the other config has gets its default here
    differing = differences(
        _defaults(first_subject, keys_of_other=second_values) | first_values,
        _defaults(second_subject, keys_of_other=first_values) | second_values,
    )
    results: tuple[OnBatch, ...] = ()
    why_not = ""
    if _kind(first_subject) == _kind(second_subject):
        results = _measured(first_subject, second_subject)
    else:
        bases = f"{first_subject.base} and {second_subject.base}"
        why_not = f"{bases} train on different kinds of data"
    # a subject's `fields` decide its loss; the batches show all of these but UNSHOWN
    shown = {*_NAMES_OF_ROW, *first_subject.fields, *second_subject.fields} - UNSHOWN.keys()
    unseen = tuple(key for key in differing if key not in shown)
    return TwoConfigs(paths, differing, unseen, results, why_not)


def _defaults(subject: Subject, keys_of_other: Collection[str]) -> dict[str, Any]:
    """Return the values of fields that a config may leave out.

    For the keys of the other config they are the defaults of this one's class; for all that this
    one's algorithm reads they are the algorithm's defaults, which override the former.
    """
    defaults = {
        field.name: field.default.value if isinstance(field.default, Enum) else field.default
        for field in fields_of(subject.classes[1])
        if field.name in keys_of_other and field.default is not MISSING
    }
    if subject.trainer_arguments:
        row = formulation(
            subject.trainer_arguments["algorithm"], subject.trainer_arguments["formulation"]
        )
        defaults |= {**row.reads, **row.trainer_reads}
        defaults["formulation"] = subject.trainer_arguments["formulation"]
    return defaults


def _kind(subject: Subject) -> str:
    """Return the kind of a subject's data; two subjects of the same kind can share batches.

    The kind is one of `MADE`, "prompts" for trainers that generate, or the trainer's name.
    """
    return made_kind(subject.trainer_arguments) or (
        "prompts" if subject.base in POLICY else subject.base
    )


def _measured(first: Subject, second: Subject) -> tuple[OnBatch, ...]:
    """Return loss and gradient of both on each batch that says something about both.

    Both train on the same kind of data (`_kind`), so that the window of one serves the other.

    Raises:
        InputError: one of them cannot be run on the batches.
    """
    matrix = Matrix()
    kind = made_kind(first.trainer_arguments) or first.base
    batches = [batch for batch in first.batches if batch in second.batches]
    algorithms = [subject.trainer_arguments.get("algorithm") for subject in (first, second)]
    if "reinforce" in algorithms:  # whose baseline is the mean of a whole generation
        batches = of_whole_generations(batches)
    results = []
    with quick_and_quiet():
        for batch in batches:
            window = matrix.window(kind, columns=(), batch=batch)
            try:
                first_loss, first_gradient = matrix.side(side_of(first), window)
                second_loss, second_gradient = matrix.side(side_of(second), window)
            except InputError:
                raise
            except Exception as exception:  # whatever a config makes a trainer raise
                both = f"{first.label} and {second.label}"
                message = f"{both} cannot both be run on the fixed batches: {sentence(exception)}"
                raise InputError(message) from exception
            error, cosine, ratio, verdict = judge(first_gradient, second_gradient)
            results.append(
                OnBatch(
                    batch=batch.name,
                    first_loss=first_loss,
                    second_loss=second_loss,
                    error=error,
                    cosine=cosine,
                    ratio=ratio,
                    verdict=verdict,
                )
            )
    return tuple(results)


def render(compared: TwoConfigs, output_format: str) -> str:
    """Write the comparison; `output_format` is "table", "markdown" or "json"."""
    if output_format == "json":
        content = {**vars(compared), "batches": [_finite(result) for result in compared.batches]}
        return json.dumps(content, indent=2, default=str)
    first, second = compared.paths
    field_lines = [_field_line(key, compared) for key in compared.fields]
    parts = []
    if not field_lines:
        parts.append(f"{first} and {second}: no field differs")
    else:
        count = len(field_lines)
        noun = "field" if count == 1 else "fields"
        parts.append(f"{first} and {second} differ in {count} {noun}:")
        if output_format == "markdown":
            parts.append(tables.markdown(field_lines))
        else:
            line = "  {field}: {first} -> {second}"
            parts.append("\n".join(line.format(**cells) for cells in field_lines))
    if compared.why_not:  # nothing is measured, so `unseen` needs no word of its own
        parts.append(f"loss and gradient are not compared: {compared.why_not}")
        return "\n\n".join(parts)
    parts.append("loss and gradient on the same batches, of the first and of the second:")
    parts.append(report.table([_batch_line(result) for result in compared.batches], output_format))
    if compared.unseen:
        unseen = ", ".join(compared.unseen)
        parts.append(f"not measured (the batches have their own, or it acts elsewhere): {unseen}")
    return "\n\n".join(parts)


def _field_line(key: str, compared: TwoConfigs) -> Line:
    first, second = compared.fields[key]
    return {"field": key, "first": _shown(first), "second": _shown(second)}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _batch_line(result: OnBatch) -> Line:
    return {
        "batch": result.batch,
        "first loss": f"{result.first_loss:.6f}",
        "second loss": f"{result.second_loss:.6f}",
        "gradients": result.verdict,
        "error": f"{result.error:.1e}",
        "cosine": report.number(result.cosine, ".4f"),
        "ratio": report.number(result.ratio, ".4f"),
    }


def _finite(result: OnBatch) -> dict[str, Any]:
    """Return a result for programs; numbers that are not finite are null."""
    numbers = {"error": result.error, "cosine": result.cosine, "ratio": result.ratio}
    return {**vars(result), **{name: report.finite(value) for name, value in numbers.items()}}
