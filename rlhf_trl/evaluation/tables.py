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
    sizes = {name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0]}
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
