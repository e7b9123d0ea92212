"""A translation field by field: what a config says and means, and what becomes of each field.

"There" is the foreign config, which is translated; "here" is the recipe's, its translation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_trl.evaluation import tables
from rlhf_trl.ports.book_fields import meaning_of
from rlhf_trl.ports.comments import Differs, Line, Note
from rlhf_trl.ports.quantities import Quantity, quantities
from rlhf_trl.ports.sheet import Sheet

SAME, CONVERTED, DIFFERS, LEFT_OUT = "same", "converted", "differs", "not carried over"
WIDEST = 40  # characters of a value that are shown


@dataclass(frozen=True)
class Entry:
    """One field of the foreign config, or one that only the translation has."""

    field: str  # its name in the foreign config; "": it has none
    value: Any  # in the foreign config
    meaning: str  # in the foreign config
    here: Mapping[str, Any]  # name -> value of the recipe's fields that are made of it
    verdict: str  # SAME, CONVERTED, DIFFERS or LEFT_OUT
    note: str

    def line(self, side: str) -> dict[str, str]:
        """Return the cells of a table; `side` heads the column of the value there."""
        here = "; ".join(
            name if isinstance(value, dict) else f"{name}: {_shown(value)}"
            for name, value in self.here.items()
        )
        value = _shown(self.value) if self.field else "-"
        return {
            "field": self.field or "-",
            "verdict": self.verdict,
            side: value if len(value) <= WIDEST else f"{value[: WIDEST - 3]}...",
            "here": here or "-",
        }


def entries_of_book(sheet: Sheet) -> list[Entry]:
    """Return the fields of the book's code, then what it fixes and a recipe has a field for."""
    fields = {name: sheet[name] for name in sheet.table}
    meanings = {name: meaning_of(sheet.kind, name) for name in fields}
    added = "no field of the book's code"
    return entries(fields, meanings, sheet.lines, sheet.left_out, lambda name: added)


def entries(
    fields: Mapping[str, Any],
    meanings: Mapping[str, str],
    lines: Mapping[str, Line],
    left_out: Mapping[str, Note],
    added: Callable[[str], str],
) -> list[Entry]:
    """Return an entry for each foreign field, and for each of the recipe's that is made of none.

    Args:
        fields: the values of the foreign config, by field.
        meanings: what the foreign fields mean.
        lines: the translation, by the recipe's fields; each line names the foreign fields that it
            is made of, its `sources`.
        left_out: by foreign field, why it has no counterpart: as a text, or as a Differs where the
            foreign code does something that the recipe does not do.
        added: takes the name of a field that only the translation has; returns what to say of it.
    """
    rows = []
    for name, value in fields.items():
        lines_made_of_field = {to: line for to, line in lines.items() if name in line.sources}
        here = {to: line.value for to, line in lines_made_of_field.items()}
        if lines_made_of_field:
            notes = [line.note for line in lines_made_of_field.values() if line.note]
            verdict = _verdict(name, value, lines_made_of_field)
        else:
            reason = left_out.get(name, "")
            notes = [reason]
            verdict = DIFFERS if isinstance(reason, Differs) else LEFT_OUT
        rows.append(
            Entry(
                field=name,
                value=value,
                meaning=meanings[name],
                here=here,
                verdict=verdict,
                note=_joined(notes),
            )
        )
    for to, line in lines.items():
        if not line.sources:
            verdict = DIFFERS if isinstance(line.note, Differs) else SAME
            rows.append(
                Entry(
                    field="",
                    value=None,
                    meaning=added(to),
                    here={to: line.value},
                    verdict=verdict,
                    note=str(line.note),
                )
            )
    return rows


def _verdict(name: str, value: Any, lines_made_of_field: Mapping[str, Line]) -> str:
    if any(isinstance(line.note, Differs) for line in lines_made_of_field.values()):
        return DIFFERS
    if any(to == name and line.value == value for to, line in lines_made_of_field.items()):
        return SAME
    return CONVERTED


def _joined(notes: Iterable[Note]) -> str:
    return "; ".join(dict.fromkeys(str(note) for note in notes if note))


def table(rows: Sequence[Entry], counted: Sequence[Quantity], side: str) -> str:
    """Return a table of the fields, and one of the quantities, as text.

    Args:
        rows: the fields; the first line of the text counts their verdicts.
        counted: how much each side trains; empty: there is no second table.
        side: whose config is translated, such as "TRL": the head of the column of its values.
    """
    verdicts = [row.verdict for row in rows]
    summary = [
        f"{verdict}: {count}"
        for verdict in (SAME, CONVERTED, DIFFERS, LEFT_OUT)
        if (count := verdicts.count(verdict))
    ]
    text = f"{', '.join(summary)}\n\n"
    text += tables.text([row.line(side) for row in rows], _sentences(rows))
    if counted:
        lines = [
            {
                "quantity": quantity.name,
                "verdict": DIFFERS if quantity.differs else SAME,
                "here": _shown(quantity.here),
                side: _shown(quantity.code),
            }
            for quantity in counted
        ]
        text += f"\n\n{tables.text(lines)}"
    return text


def _sentences(rows: Sequence[Entry]) -> list[list[str]]:
    """Return what stands under each entry: its meaning there, and its note where it is new."""
    first: dict[str, str] = {}  # the field at which a note stands in full
    sentences = []
    for row in rows:
        below = [f"there: {row.meaning}"]
        if row.note:
            place = first.setdefault(row.note, row.field)
            is_new = place == row.field or not place
            below.append(f"note: {row.note}" if is_new else f"note: as at {place}")
        sentences.append(below)
    return sentences


def explain_book(sheet: Sheet) -> str:
    """Return the whole table of a config of the book's code."""
    return table(entries_of_book(sheet), quantities(sheet), "the book's code")


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return str(value)
