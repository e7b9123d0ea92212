"""Results as text, Markdown, JSON or HTML."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, zip_longest
from typing import Any

from rlhf_trl.compare import as_stock
from rlhf_trl.compare.as_stock import AsStock
from rlhf_trl.compare.closest import Distance
from rlhf_trl.compare.matrix import EQUAL, RESIDUAL, Result
from rlhf_trl.compare.subjects import Subject
from rlhf_trl.compare.windows.batches import EXTREME
from rlhf_trl.evaluation import tables
from rlhf_trl.evaluation.tables import Line

FORMATS = ("table", "markdown", "json", "html")

SPECIAL = ("temperature", "small_rewards", "beta", "equal_rewards", "tools", "extreme")
"""Batches that change something else on purpose."""

_TEMPERATURE = (
    "TRL divides logits by the temperature before it takes log-probabilities, the book does not."
)


def verdict(result: Result) -> str:
    """Return a result's verdict in words: `equal`, `scaled by k`, `differs` or `both zero`."""
    if result.verdict == "scaled":
        return f"scaled by {result.grad_norm_ratio:.4g}"
    return result.verdict


def explanation(result: Result) -> str:
    """Return why the sides of a result differ; "" where they agree; or `unexplained`.

    The reasons are those of the terms that change the gradient on this batch: the row's own
    sentence, its sentence about the KL, the one about the temperature.
    """
    if result.residual is None:  # nothing differs, or `why` says why a side cannot be computed
        return result.why
    if not result.explained:  # the identities do not bring the gradients together
        return "unexplained"
    acting = {part.term for part in result.contributions if part.relative_change > RESIDUAL}
    if acting == {"temperature"}:
        return _TEMPERATURE
    row = result.row
    sentences = []
    # a row without a sentence of its own about the KL (`with_kl`) explains the KL here, too
    other_terms_act = bool(acting - {"temperature", "KL"})
    if other_terms_act or not row.with_kl:
        sentences.append(row.explanation)
    if "KL" in acting:
        sentences.append(row.with_kl)
    if "temperature" in acting:
        sentences.append(_TEMPERATURE)
    return " ".join(sentence for sentence in sentences if sentence)


def finite(value: float | None) -> float | None:
    """Return a number that JSON has, or None."""
    return value if value is not None and math.isfinite(value) else None


def record(result: Result) -> dict[str, Any]:
    """Return a result for programs; numbers that are not finite are null."""
    row = result.row
    numbers = ("loss_left", "loss_right", "grad_rel_error", "grad_rel_error_float64")
    numbers += ("grad_cosine", "grad_norm_ratio")
    return {
        "algorithm": row.algorithm,
        "variant": row.variant,
        "left": row.left.label,
        "right": row.right.label,
        "batch": result.batch,
        **{name: finite(getattr(result, name)) for name in numbers},
        "verdict": verdict(result),
        "explanation": explanation(result),
        "settings": row.settings,
        "identity": "; ".join(part.says for part in result.contributions),
        "residual": finite(result.residual),
        "terms": [asdict(part) for part in result.contributions],
    }


def summary(results: Sequence[Result]) -> list[list[Result]]:
    """Group results by row."""
    return [list(group) for _, group in groupby(results, key=lambda r: id(r.row))]


def shown(group: Sequence[Result]) -> Result:
    """Return the result that stands for all results of a row: where its sides differ most.

    A batch of SPECIAL only stands for a row that has no other batch.
    """
    plain = [result for result in group if result.batch not in SPECIAL] or group
    plain = [result for result in plain if math.isfinite(result.grad_cosine)] or plain

    def rounded_error(result: Result) -> float:
        """Return the error, so coarse that rounding does not choose between two results."""
        is_equal = result.grad_rel_error <= EQUAL
        return 0.0 if is_equal else float(f"{result.grad_rel_error:.2g}")

    return max(plain, key=rounded_error)


def _cells(result: Result, equal_on: str = "") -> dict[str, str]:
    """Return the cells of a line by column; the column "equal on" only where it is given."""
    row = result.row
    return {
        "algorithm": row.algorithm,
        "left": row.left.label,
        "right": row.right.label,
        "verdict": verdict(result),
        **({"equal on": equal_on} if equal_on else {}),
        **_gradient_cells(result),
        "batch": result.batch,
        "variant": row.variant or "-",
        "reason": explanation(result) or "-",
        "settings for equality": row.settings or "-",
        "loss difference": f"{result.loss_right - result.loss_left:+.1e}",
        "residual": "-" if result.residual is None else f"{result.residual:.0e}",
    }


def _gradient_cells(result: Result) -> dict[str, str]:
    return {
        "error": f"{result.grad_rel_error:.1e}",
        "cosine": number(result.grad_cosine, ".4f"),
        "ratio": number(result.grad_norm_ratio, ".4f"),
    }


def number(value: float, format_spec: str) -> str:
    """Format a number; "-" where it is undefined."""
    return format(value, format_spec) if math.isfinite(value) else "-"


def render(
    results: Sequence[Result],
    stocks: Sequence[AsStock],
    output_format: str,
    verbose: bool = False,
    by_batch: bool = False,
) -> str:
    """Write results in one of FORMATS, those of a row together.

    Without `verbose` and `by_batch` there is a line for each row: its result on the batch where its
    sides differ most, and the number of the batches on which they are equal.

    Args:
        results: of all rows on all batches.
        stocks: our trainers with formulation trl, beside TRL's; if there are any, a table of these
            comes first.
        output_format: one of FORMATS.
        verbose: write a line for each row and batch, and below it what each term changes alone.
        by_batch: write a line for each row and batch.
    """
    if output_format == "json":
        records = [as_stock.record(result) for result in stocks]
        return json.dumps(records + [record(result) for result in results], indent=2)
    if by_batch or verbose:
        lines = [_cells(result) for result in results]
    else:
        lines = []
        for group in summary(results):
            equal_on = f"{sum(result.agrees for result in group)}/{len(group)}"
            lines.append(_cells(shown(group), equal_on))
    terms = [_terms(result) for result in results] if verbose else []  # below each line
    written = table(lines, output_format, terms)
    if output_format == "markdown" and verbose:
        for line, sentences in zip(lines, terms, strict=True):
            if sentences:
                written += f"\n\n{line['algorithm']}, {line['batch']}:\n"
                written += "\n".join(f"- {sentence}" for sentence in sentences)
    if not stocks:
        return written
    first = table(as_stock.lines(stocks), output_format)
    if output_format == "html":
        return f"{first}\n{written}"
    return f"formulation trl against stock\n\n{first}\n\nthe book against TRL\n\n{written}"


def _terms(result: Result) -> list[str]:
    """Say what each term of a result changes alone."""
    sentence = "{0.term}: {0.says} (alone: {0.relative_change:.1e} of the gradient)"
    return [sentence.format(contribution) for contribution in result.contributions]


def table(lines: Sequence[Line], output_format: str, below: Sequence[Sequence[str]] = ()) -> str:
    """Write lines by column as text, Markdown or HTML; Markdown has no place for what is below."""
    if output_format == "markdown":
        return tables.markdown(lines)
    return (_html if output_format == "html" else tables.text)(lines, below)


def _html(lines: Sequence[Line], below: Sequence[Sequence[str]]) -> str:
    """Write lines as a page with one table, and what is `below` a line as a list in its own row."""

    def cell(tag: str, text: str) -> str:
        return f"<{tag}>{html.escape(text)}</{tag}>"

    rows = ["<tr>" + "".join(cell("th", name) for name in lines[0]) + "</tr>"]
    for line, sentences in zip_longest(lines, below, fillvalue=()):
        rows.append("<tr>" + "".join(cell("td", text) for text in line.values()) + "</tr>")
        if sentences:
            items = "".join(cell("li", sentence) for sentence in sentences)
            rows.append(f'<tr><td colspan="{len(line)}"><ul>{items}</ul></td></tr>')
    style = "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:2px 6px}"
    return (
        f'<!doctype html><meta charset="utf-8"><title>The book against TRL</title>'
        f"<style>{style}</style><table>\n" + "\n".join(rows) + "\n</table>"
    )


# --- a config or a trainer -----------------------------------------------------------------------


def render_distances(subject: Subject, distances: Sequence[Distance], output_format: str) -> str:
    """Write how far a config or a trainer is from algorithms, a line for each, the closest first.

    Args:
        subject: the config or trainer.
        distances: what `closest.distances` returned, sorted.
        output_format: one of FORMATS.
    """
    if output_format == "json":
        return json.dumps([_distance_record(subject, distance) for distance in distances], indent=2)
    written = table([_distance_cells(distance) for distance in distances], output_format)
    if output_format == "html":  # a whole page, before which no sentence can stand
        return written
    batches = []
    for batch in subject.batches:
        # a name such as "ragged" says enough; "extreme" does not say what is extreme
        needs_text = batch is EXTREME
        batches.append(f"{batch.name} ({batch.text})" if needs_text else batch.name)
    sentences = [
        _closest(subject, distances),
        f"measured on {', '.join(batches)}; each line shows the batch where it is worst",
    ]
    if subject.averages_unequal:
        sentences.append(
            "train_sampling_strategy: batch_rebalance makes micro-batches of unequal size, and TRL "
            "takes their plain mean: on pairs of 40 tokens and at most 200, an update is off by "
            "0.9 of its length; in formulations chapter and code each counts by its examples, and "
            "the update is that of equal ones to 1e-6"
        )
    if subject.left_out:
        left_out = ", ".join(subject.left_out)
        sentences.append(f"not measured: {left_out} (the batches have their own)")
    sentences += subject.run_otherwise
    head = [line for sentence in sentences for line in tables.wrapped(sentence)]
    return "\n".join([*head, "", written])


def _closest(subject: Subject, distances: Sequence[Distance]) -> str:
    """Say what a subject is equal to, or else how far the closest one is."""
    measured_as = f"{subject.label}: as {subject.trainer}, equal to"
    equal = [distance.name for distance in distances if distance.equal]
    if equal:
        return f"{measured_as} {', '.join(equal)}"
    closest = distances[0]
    cells = _gradient_cells(closest.worst)
    return (
        f"{measured_as} none of these; closest to {closest.name}: its gradient at a cosine of "
        f"{cells['cosine']}, {cells['ratio']} times as long"
    )


def as_text(fields: Mapping[str, Any]) -> str:
    """Return fields as YAML in one line."""
    pairs = fields.items()
    return ", ".join(f"{name}: {json.dumps(value).replace(chr(34), '')}" for name, value in pairs)


def _distance_cells(distance: Distance) -> dict[str, str]:
    """Return the cells of a line by column.

    The verdict says, too, if fields keep equality from being known, or if it holds on-policy only.
    """
    worst = distance.worst
    verdict_cell = "equal" if distance.equal else verdict(worst)
    if distance.untested:
        verdict_cell = f"not settled: {', '.join(distance.untested)} set"
    elif not distance.equal and distance.on_policy:
        verdict_cell += ", equal on-policy"
    after_changes = "-"
    if distance.then is not None:
        after_changes = "equal"
        if not distance.then.agrees:
            after_changes = f"{distance.then.verdict}, {distance.then.grad_rel_error:.1e}"
    return {
        "algorithm": distance.algorithm,
        "formulation": distance.formulation,
        "verdict": verdict_cell,
        **_gradient_cells(worst),
        "batch": worst.batch,
        "to get there": as_text(distance.changes) or "-",
        "then": after_changes,
        "why not": distance.why or "-",
    }


def _distance_record(subject: Subject, distance: Distance) -> dict[str, Any]:
    """Return a distance for programs."""
    worst = record(distance.worst)
    keys = ("batch", "grad_rel_error", "grad_cosine", "grad_norm_ratio", "verdict")
    return {
        "subject": subject.label,
        "trainer": subject.base,
        "algorithm": distance.algorithm,
        "formulation": distance.formulation,
        "equal": distance.equal,
        "equal_on_policy": distance.on_policy,
        **{key: worst[key] for key in keys},
        "changes": dict(distance.changes),
        "error_after_changes": None if distance.then is None else distance.then.grad_rel_error,
        "why_not": distance.why,
        "untested": list(distance.untested),
        "not_measured": list(subject.left_out),
    }
