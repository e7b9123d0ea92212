"""Answers that are mathematics, as math-verify reads and compares them."""

import logging
import re
import threading
from functools import lru_cache
from math import floor, log10, nan
from typing import Any, NamedTuple

from rlhf_trl.data.answers import NotRead, extract_answer, marked_answer
from rlhf_trl.data.number_answers import TOLERANCE

PARSING_SECONDS = 10
COMPARING_SECONDS = 5


# What math-verify would read as something else than a person does, and what to write for it.
AS_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\*\*(.*)\*\*$", r"\1"),
        (r"^(?:\$\$?|\\[(\[])(.*?)(?:\$\$?|\\[)\]])$", r"\1"),  # $x$, \(x\), \[x\]
        (r"(?<![\d.,])(\d{1,3})(?:\\[,;:! ]|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))", r"\1"),
        (r"(?<=\d)(?:\\[,;:! ]|\{,\}|[ \u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),  # 1 000 000
        (r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),  # 3 4/5
        (r"(?<=\d)[eE]([-+]?\d+)", r" \\times 10^{\1}"),
        (r"(?<![\\a-zA-Z])(?:pi(?![a-zA-Z])|π)", r"\\pi "),
        (r"^([a-zA-Z]{3,}(?: [a-zA-Z]+)*)\.?$", r"\\text{\1}"),
    )
]
# A word, two short ones, and several points in a number.
NOT_MATH = re.compile(
    r"(?:^|\s)(?:[a-zA-Z]{3,}|[a-zA-Z]{2} [a-zA-Z]{2})(?=[\s.,:;?!]|$)|\d\.\d+\.\d"
)
SETTLED = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}|\\[a-zA-Z]+")


class RightMath(NamedTuple):
    """A right answer as math-verify reads it, and the digits to which it compares decimals."""

    parsed: list[Any]
    digits: int = 6


@lru_cache(maxsize=1 << 16)
def right_math(text: str) -> RightMath:
    """Return what a right answer means: a number, set, interval, expression, equation or word."""
    marked = marked_answer(text)
    parsed = _parsed_box(text if marked is None else marked)
    # parsed[0] is the expression, or a text if it was not understood; parsed[-1] is what was read
    if not parsed or isinstance(parsed[0], str) or NOT_MATH.search(SETTLED.sub("", parsed[-1])):
        raise NotRead(
            "is no mathematics that math-verify can read; write it in LaTeX, leave the example "
            "out, or name a column of answers after a colon (math:COLUMN)."
        )
    expression, written = parsed
    size = _size(expression)
    # With 6 digits behind the point, math-verify would not tell so small a number from 0: it gets
    # as many as the number has zeros there, and 6 more.
    if 0 < size < TOLERANCE:
        return RightMath([expression.evalf(), written], digits=5 - floor(log10(size)))
    return RightMath(parsed)


def same_math(text: str, right: RightMath) -> bool:
    """Return whether the answer that a text gives equals the right one.

    It is read from `<answer>...</answer>`, if there is one, in that from `\boxed{...}`, else
    behind `####`, else all of it; without one, also as TRL's `accuracy_reward` reads it.
    """
    from math_verify import verify

    tagged = extract_answer(text)
    marked = marked_answer(text if tagged is None else tagged)
    if marked is None:  # no mark within the tags: all that they hold
        marked = tagged
    parsed = _parse(text) if marked is None else _parsed_box(marked)
    limit = COMPARING_SECONDS if _in_main_thread() else None
    return verify(right.parsed, parsed, float_rounding=right.digits, timeout_seconds=limit)


def _parsed_box(answer: str) -> list[Any]:
    answer = answer.strip().replace("\N{MINUS SIGN}", "-")
    for pattern, replacement in AS_LATEX:
        answer = pattern.sub(replacement, answer)
    return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list[Any]:
    """Return the answer in `text` as an expression and as a string; the string alone; or nothing.

    The settings are those of TRL's `accuracy_reward`, but that `\\frac12` is read, too.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    extraction = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True, malformed_operators=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    limit = PARSING_SECONDS if _in_main_thread() else None
    return parse(text, [extraction], extraction_mode="first_match", parsing_timeout=limit)


def _in_main_thread() -> bool:
    """Return whether math-verify's time limits, which are signals, work here."""
    if threading.current_thread() is threading.main_thread():
        return True
    for name in ("math_verify.parser", "math_verify.grader"):  # which would warn, as TRL says
        logging.getLogger(name).setLevel(logging.ERROR)
    return False


def _size(expression: Any) -> float:
    """Return the absolute value of a real number, NaN of anything else."""
    try:
        return abs(float(expression.evalf()))
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return nan
