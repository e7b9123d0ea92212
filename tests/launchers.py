"""What tests measure of launches, held against rlhf_trl/compare/launchers.md, or written there.

RLHF_TRL_LAUNCHERS=FILE pytest tests/test_*_processes.py tests/test_zero*.py
python tests/launchers.py FILE       # writes the page from what these tests have measured
"""

import json
import os
import re
import sys
from pathlib import Path

from rlhf_trl.algorithms import ALGORITHMS

PAGE = Path(__file__).parent.parent / "rlhf_trl" / "compare" / "launchers.md"
SAME = {"processes": 1e-6, "zero": 2e-5}  # up to which a difference is rounding
FORMULATIONS = ("chapter", "code", "trl")
STAGES = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
AS_CHAPTER = {("reward", "code"), ("reward", "trl")}
REASONS = {
    "dapo": "its code takes a mean over the tokens of a micro-batch",
    "kto": "its reference point is a mean over the completions of a process, each of which meets "
    "the prompt of its neighbor",
    "orpo": "TRL's ORPO takes one mean over all tokens of a micro-batch",
    "orm": "its code takes a mean over the tokens of a micro-batch",
    "prm": "its code takes a mean over the steps of a micro-batch",
}


def hold(section, line, column, apart):
    """Hold a measured difference against the page; with RLHF_TRL_LAUNCHERS, write it down."""
    if (file := os.environ.get("RLHF_TRL_LAUNCHERS")) is not None:
        with open(file, "a") as results:
            results.write(json.dumps([section, line, column, apart]) + "\n")
        return
    cell = read()[section][line][column]
    if cell.startswith("same"):
        assert apart <= SAME[section], (line, column, apart)
    else:  # the size of an exception, which rounding moves little
        stated = float(cell)
        assert stated / 3 < apart < stated * 3, (line, column, apart)


def read():
    """Return the cells of the page by section, line and column."""
    sections = {}
    for name, text in zip(SAME, PAGE.read_text().split("\n## ")[1:], strict=False):
        rows = [re.split(r" *\| *", line.strip("| ")) for line in text.splitlines() if "|" in line]
        head, _, *lines = rows
        sections[name] = {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}
    return sections


def page(results):
    """Return the page of results: (section, line, column, difference)."""
    largest = {}
    for section, line, column, apart in results:
        key = section, line, column
        largest[key] = max(apart, largest.get(key, 0.0))

    def cell(section, line, column):
        apart = largest.get((section, line, column))
        if apart is None and section == "processes":
            if column not in ALGORITHMS[line].formulations:
                return "none"
            return "as chapter" if (line, column) in AS_CHAPTER else "-"
        if apart is None:
            return "-"
        return f"same ({apart:.0e})" if apart <= SAME[section] else f"{apart:.1e}"

    def table(section, lines, columns):
        first = {"processes": "row", "zero": "trainer"}[section]
        rows = [[first, *columns], ["---"] * (len(columns) + 1)]
        rows += [[line, *(cell(section, line, column) for column in columns)] for line in lines]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    exceptions = []
    for name in sorted({k[1] for k, apart in largest.items() if apart > SAME[k[0]]}):
        sizes = [
            f"{column} {apart:.1e}"
            for (section, line, column), apart in largest.items()
            if line == name and apart > SAME[section]
        ]
        exceptions.append(f"- {name} ({', '.join(sizes)}): {REASONS[name]}.")
    trainers = sorted({line for section, line, _ in largest if section == "zero"})
    return PAGE_TEXT.format(
        rows=table("processes", ALGORITHMS, FORMULATIONS),
        zero=table("zero", trainers, STAGES),
        exceptions="\n".join(exceptions),
    )


PAGE_TEXT = """# The same update under several launchers

Written by tests/launchers.py from what tests measure on two CPU processes with gloo, and held by
them. `rlhf-trl check-launch` measures your own config and launch.

## Two processes against one

Every row and formulation on fixed completions, pairs or texts, with SGD, without clipping, in
float32: the largest difference of a weight after one to three optimizer steps of two micro-batches
each. "same" is up to 1e-6, which is rounding; "none": there is no such formulation; "-": no test
trains it so.

{rows}

## ZeRO on two processes against one process without it

Two SGD steps of every trainer at accumulation 2: the norm of the difference of the changes of the
weights, relative to the change by one process. "same" is up to 2e-5; "-": no test trains it so.

{zero}

## Exceptions

{exceptions}

With these the update depends on how examples are shared out over processes and micro-batches, in
TRL and in the book's code as well.
"""

if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    PAGE.write_text(page([json.loads(line) for line in lines]))
