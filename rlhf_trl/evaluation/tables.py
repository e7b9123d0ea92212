"""Tables: Markdown for pages, text that fits the terminal."""

import shutil
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest

SHORT = 24  # characters of a cell that shares a line with others
UNBROKEN = 12  # characters at the start of a heading that stay on one line
SCORED_BY = "scored_by_"  # what the name of a reward model's score begins with, in columns
Line = Mapping[str, str]  # a line's cells by column; "-" where there is nothing to say


def markdown(lines: Sequence[Line]) -> str:
    """Return lines as a table in Markdown; all have the columns of the first one."""
    rows = [[*lines[0]], ["---"] * len(lines[0]), *([*line.values()] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def text(
    lines: Sequence[Line], below: Sequence[Sequence[str]] = (), width: int | None = None
) -> str:
    """Return lines as text of at most `width` characters, by default those of the terminal.

    As many columns as fit stand side by side. Under each line follow its other cells, and
    its sentences: `below` has a list of them for each line.
    """
    width = width or shutil.get_terminal_size().columns
    sizes = _sizes(lines)
    beside = _columns_that_fit(sizes, width)
    out = ["  ".join(name.ljust(sizes[name]) for name in beside).rstrip()]
    for line, sentences in zip_longest(lines, below, fillvalue=()):
        out.append("  ".join(line[name].ljust(sizes[name]) for name in beside).rstrip())
        cells = [(name, line[name]) for name in sizes if name not in beside and line[name] != "-"]
        for are_short, group in groupby(cells, lambda cell: len(cell[1]) <= SHORT):
            texts = [f"{name}: {value}" for name, value in group]
            if are_short:  # short cells share a line, a long one has its own
                texts = ["; ".join(texts)]
            for cell_text in texts:
                out += wrapped(cell_text, "    ", width)
        for sentence in sentences:
            out += wrapped(sentence, "    ", width)
    return "\n".join(out)


def _columns_that_fit(sizes: Mapping[str, int], width: int) -> list[str]:
    """Return the first columns, at least one, that fit a width with two spaces between them."""
    columns: list[str] = []
    used = 0
    for name, size in sizes.items():
        needed = used + size + (2 if columns else 0)
        if columns and needed > width:
            break
        columns.append(name)
        used = needed
    return columns


def that_fit(lines: Sequence[Line], width: int | None = None) -> tuple[list[Line], list[str]]:
    """Return lines with the columns that stand side by side, and the names of the others.

    From the left, each column that still fits `width`, by default the terminal's, is taken.
    """
    width = width or shutil.get_terminal_size().columns
    taken: list[str] = []
    left_out: list[str] = []
    room = width + 2  # two spaces stand behind each column but the last
    for name, size in _sizes(lines).items():
        if size + 2 <= room or not taken:  # the first one is taken in any case
            taken.append(name)
            room -= size + 2
        else:
            left_out.append(name)
    return [{name: line[name] for name in taken} for line in lines], left_out


def side_by_side(lines: Sequence[Line], width: int | None = None) -> str:
    """Return lines as text of at most `width` characters whose columns are to be compared.

    Where not all fit, cells wrap, first where they have two spaces. Columns that would have to be
    narrower than `SHORT` follow in a further table with the same first column, which never wraps.
    """
    width = width or shutil.get_terminal_size().columns
    _, left_out = that_fit(lines, width)
    if not left_out:
        return text(lines, width=width)
    first, *names = lines[0]
    full_widths = {}  # what each column needs if its cells wrap at two spaces only
    for name in names:
        parts = [part for line in lines for part in line[name].split("  ")]
        full_widths[name] = max(len(part) for part in (name[:UNBROKEN], *parts))
    tables = _shared_out(full_widths, width - _sizes(lines)[first])
    return "\n\n".join(_wrapped_table(lines, first, columns, width) for columns in tables)


def _shared_out(full_widths: Mapping[str, int], room: int) -> list[dict[str, int]]:
    """Return the columns of each table, with their widths: as many as fit `room` at their smallest.

    A column shrinks to `SHORT` at most, and has two spaces before it.
    """
    tables: list[dict[str, int]] = [{}]
    used = 0
    for name, full_width in full_widths.items():
        smallest = 2 + min(full_width, SHORT)
        if tables[-1] and used + smallest > room:
            tables.append({})
            used = 0
        tables[-1][name] = full_width
        used += smallest
    return tables


def _wrapped_table(
    lines: Sequence[Line], first: str, full_widths: Mapping[str, int], width: int
) -> str:
    """Return the first column and some others, whose cells wrap, as text.

    Args:
        lines: all lines of the table.
        first: the first column, which keeps its width.
        full_widths: the other columns, with the width that each would have if there were room.
        width: characters of a line at most.
    """
    first_width = _sizes(lines)[first]
    sizes = {name: min(size, SHORT) for name, size in full_widths.items()}
    spare = width - first_width - sum(2 + size for size in sizes.values())  # may be below 0
    wide = [name for name, size in full_widths.items() if size > SHORT]
    # they share evenly the room that is left, or that is lacking; 8 characters remain in any case
    for name in wide:
        sizes[name] = min(full_widths[name], max(8, SHORT + spare // len(wide)))
    # the rows of the table, the heading first; a cell is a list of the lines that it wraps into
    rows = [[[first], *(_heading(name, size) for name, size in sizes.items())]]
    for line in lines:
        rows.append([[line[first]], *(_cell(line[name], size) for name, size in sizes.items())])
    out = []
    for row in rows:
        for pieces in zip_longest(*row, fillvalue=""):  # a line of text: one line of each cell
            padded = zip(pieces, [first_width, *sizes.values()], strict=True)
            out.append("  ".join(piece.ljust(size) for piece, size in padded).rstrip())
    return "\n".join(out)


def _heading(name: str, size: int) -> list[str]:
    """Return a heading's lines; that of a path breaks after its slashes and hyphens."""
    parts = textwrap.wrap(name.replace("/", "/ "), size) if len(name) > size else [name]
    return [part.replace("/ ", "/") for part in parts]


def _cell(value: str, size: int) -> list[str]:
    """Return a cell's lines: what two spaces part, wrapped."""
    parts = value.split("  ")
    return [line for part in parts for line in textwrap.wrap(part, size, break_on_hyphens=False)]


def _sizes(lines: Sequence[Line]) -> dict[str, int]:
    """Return the width of each column."""
    return {name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]}


def wrapped(sentence: str, indent: str = "", width: int | None = None) -> list[str]:
    """Return a sentence as lines of at most `width` characters, by default the terminal's."""
    width = width or shutil.get_terminal_size().columns
    further = indent + "  "
    return textwrap.wrap(
        sentence, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
    )


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation, without the latter for a single value."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"
