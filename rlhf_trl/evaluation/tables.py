"""Tables: Markdown for pages, text that fits the terminal."""

import shutil
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest

SHORT = 24  # characters of a cell that shares a line with others
Line = Mapping[str, str]  # a line's cells by column; "-" where there is nothing to say


def markdown(lines: Sequence[Line]) -> str:
    """Return lines as a table in Markdown; all have the columns of the first one."""
    rows = [[*lines[0]], ["---"] * len(lines[0]), *([*line.values()] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def text(
    lines: Sequence[Line], below: Sequence[Sequence[str]] = (), width: int | None = None
) -> str:
    """Return lines as text of at most `width` characters, by default those of the terminal.

    As many columns as fit stand side by side; each line's other columns, and its sentences in
    `below`, follow under it.
    """
    width = width or shutil.get_terminal_size().columns
    sizes = _sizes(lines)
    beside: list[str] = []
    while len(beside) < len(sizes):
        more = [*sizes][: len(beside) + 1]
        if beside and sum(sizes[name] + 2 for name in more) - 2 > width:
            break
        beside = more
    out = ["  ".join(name.ljust(sizes[name]) for name in beside).rstrip()]
    for line, said in zip_longest(lines, below, fillvalue=()):
        out.append("  ".join(line[name].ljust(sizes[name]) for name in beside).rstrip())
        cells = [(n, line[n]) for n in [*sizes][len(beside) :] if line[n] != "-"]
        for short, group in groupby(cells, lambda cell: len(cell[1]) <= SHORT):
            each = [f"{name}: {value}" for name, value in group]
            for sentence in ["; ".join(each)] if short else each:
                out += wrapped(sentence, "    ", width)
        for sentence in said:
            out += wrapped(sentence, "    ", width)
    return "\n".join(out)


def that_fit(lines: Sequence[Line], width: int | None = None) -> tuple[list[Line], list[str]]:
    """Return lines with the columns that stand side by side, and the names of the others.

    From the left, each column that still fits `width`, by default the terminal's, is taken.
    """
    width = width or shutil.get_terminal_size().columns
    taken: list[str] = []
    left_out: list[str] = []
    room = width + 2
    for name, size in _sizes(lines).items():
        fits = size + 2 <= room or not taken
        (taken if fits else left_out).append(name)
        room -= fits * (size + 2)
    return [{name: line[name] for name in taken} for line in lines], left_out


def side_by_side(lines: Sequence[Line], width: int | None = None) -> str:
    """Return lines as text of at most `width` characters whose columns are to be compared.

    Where not all fit, cells wrap, first where they have two spaces. Columns that would have to be
    narrower than `SHORT` follow in a further table with the same first column.
    """
    width = width or shutil.get_terminal_size().columns
    if not that_fit(lines, width)[1]:
        return text(lines, width=width)
    first, *names = lines[0]
    margin = _sizes(lines)[first]
    wanted = {
        name: max(len(part) for line in lines for part in [name[:12], *line[name].split("  ")])
        for name in names
    }
    tables: list[list[str]] = [[]]
    for name in names:
        least = sum(2 + min(wanted[n], SHORT) for n in [*tables[-1], name])
        if tables[-1] and margin + least > width:
            tables.append([])
        tables[-1].append(name)
    return "\n\n".join(
        _wrapped_table(lines, first, table, margin, wanted, width) for table in tables
    )


def _wrapped_table(
    lines: Sequence[Line],
    first: str,
    names: Sequence[str],
    margin: int,
    wanted: Mapping[str, int],
    width: int,
) -> str:
    """Return the first column, `margin` wide, and some others, whose cells wrap."""
    wide = [name for name in names if wanted[name] > SHORT]
    spare = width - margin - sum(2 + min(wanted[name], SHORT) for name in names)
    sizes = {name: min(wanted[name], SHORT) for name in names}
    for name in wide:
        sizes[name] = min(wanted[name], max(8, SHORT + spare // len(wide)))
    rows = [[[first], *(_heading(name, sizes[name]) for name in names)]]
    rows += [[[line[first]], *(_cell(line[name], sizes[name]) for name in names)] for line in lines]
    out = []
    for row in rows:
        for pieces in zip_longest(*row, fillvalue=""):
            padded = zip(pieces, [margin, *sizes.values()], strict=True)
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


def wrapped(said: str, indent: str = "", width: int | None = None) -> list[str]:
    """Return a sentence as lines of at most `width` characters, by default the terminal's."""
    width = width or shutil.get_terminal_size().columns
    further = indent + "  "
    return textwrap.wrap(
        said, width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
    )


def mean_and_spread(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation, without the latter for a single value."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"
