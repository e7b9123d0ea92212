"""Reading the answer that a text gives, and comparing it with the right one: texts, numbers, math.

A right answer that cannot be read is a `NotRead`, whose words go on from "the right answer 'x' ".
"""

import logging
import re
import threading
from contextlib import suppress
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from functools import lru_cache
from math import floor, log10, nan
from typing import Any, NamedTuple

# Tasks whose answer is a number, whatever way it is written.
NUMERIC = {"basic_arithmetic", "chain_sum", "gcd", "gsm8k", "lcm", "leg_counting", "products"}
TOLERANCE = Decimal("1e-6")
# A sign counts only where it cannot be an operator, and digits in a word or an index are no number.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:[eE][-+]?\d+)?"
)
# What may surround a number in \boxed{}: units, degrees, spaces, currency, bold type.
TRIM = re.compile(
    r"\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}|\^\{?\\circ\}?|\\[$%!,;: ]|(?<!\d)\*\*|\*\*(?!\d)"
)
# What makes more of a text than the one number in it, for which # stands here.
MORE = re.compile(
    r"\\[a-zA-Z]"  # a LaTeX command
    r"|[\^*√∞<>≤≥±×÷∪∩]|#!|[a-zA-Z]\("
    r"|(?<![a-zA-Z])[-+/]|[-+/](?![a-zA-Z])"  # but follow-up, km/h
    r"|#[^\W\d_](?![^\W\d_])|#\s*(?:pi|π)\b"  # 2x, but 2cm
    r"|(?<![a-zA-Z])\d"  # 1.000.000
    r"|\b(?:hundred|thousand|million|billion|trillion|dozen|half)\b",
    re.IGNORECASE,
)
# What stands before the last number of a fraction, a power or a root.
PART = re.compile(r"[\w)}\]]\s*(?:[/^÷]|\*\*)\s*[({]*$|\}\s*\{$|\\(?:sqrt|[dt]?frac)\s*\{?$")


PARSING_SECONDS = 10
COMPARING_SECONDS = 5


class NotRead(ValueError):
    """Why a right answer cannot be read, and what to write instead."""


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, plain or a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def normalize(task: str, answer: str) -> str:
    """Return the spelling of `answer` under which equal answers to `task` are equal strings."""
    if task in NUMERIC:
        with suppress(ValueError):
            return str(int(answer))  # exact, whatever its size
        with suppress(ValueError):
            number = float(answer)
            return str(int(number)) if number.is_integer() else repr(number)
    return answer.strip()


def same_answer(text: str, right: str, task: str) -> bool:
    """Return whether `extract_answer` finds the right answer to a task in `text`; case counts."""
    answer = extract_answer(text)
    return answer is not None and normalize(task, answer) == normalize(task, right)


def read_number(text: str, alone: bool = False) -> Decimal | None:
    """Return the number that `text` gives as its answer, exactly as it is written, or None.

    That is the number in the last `\\boxed{...}`, else the one that follows the last `####` on its
    line, else the last number of the text, unless it ends a fraction, a power or a root. In the
    first two, and in a text that is to be a number `alone`, several numbers, operators and LaTeX
    commands are no answer. Thousands separators are removed.
    """
    text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    marked = marked_answer(text)
    if marked is None and alone:
        marked = text
    if marked is None:
        numbers = list(NUMBER.finditer(text))
        if not numbers or PART.search(text[: numbers[-1].start()][-20:]):
            return None
        return _decimal(numbers[-1].group())
    marked = TRIM.sub("", marked)
    numbers = NUMBER.findall(marked)
    rest = NUMBER.sub("#", marked)
    fractions = any(sign.isnumeric() and not sign.isdecimal() for sign in rest)  # such as ½, ²
    if len(numbers) != 1 or fractions or MORE.search(rest):
        return None
    return _decimal(numbers[0])


def right_number(text: str) -> Decimal:
    """Return the one number that a right answer is."""
    number = read_number(text, alone=True)
    if number is None:
        if re.search(r"\d", text):
            raise NotRead(
                "is not one number; write math in place of number, which also knows fractions, "
                "powers, sets and LaTeX, or name a column of numbers after a colon (number:COLUMN)."
            )
        raise NotRead(
            "holds no number; name a column of numbers after a colon (number:COLUMN), or use "
            "contains."
        )
    return number


def same_number(number: Decimal, right: Decimal) -> bool:
    """Return whether two numbers differ by at most 1e-6, of the right one where it is below 1.

    So two whole numbers are the same only if they are equal, whatever their size.
    """
    with _unlimited():
        return abs(number - right) <= TOLERANCE * min(Decimal(1), abs(right))


def _decimal(digits: str) -> Decimal | None:
    with _unlimited():
        number = Decimal(digits.replace(",", ""))
    return number if number.is_finite() else None


def _unlimited() -> Any:
    """Return a context in which no exponent is too large and nothing is raised."""
    return localcontext(Context(prec=28, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[]))


def extract_answer(text: str) -> str | None:
    """Return what stands in the last `<answer>...</answer>` of `text`, stripped, or None."""
    from reasoning_gym.utils import extract_answer as gym_extract

    return gym_extract(text)


def marked_answer(text: str) -> str | None:
    """Return what stands in the last `\\boxed{...}`, else after the last `####`, else None.

    A box that is cut off is "".
    """
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        return _until_closed(rest)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return None


def _until_closed(text: str) -> str:
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return ""


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
    if not parsed or isinstance(parsed[0], str) or NOT_MATH.search(SETTLED.sub("", parsed[-1])):
        raise NotRead(
            "is no mathematics that math-verify can read; write it in LaTeX, leave the example "
            "out, or name a column of answers after a colon (math:COLUMN)."
        )
    expression, written = parsed
    size = _size(expression)
    if 0 < size < TOLERANCE:  # which math-verify would not tell from 0
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
    if marked is None:
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

    how = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True, malformed_operators=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    limit = PARSING_SECONDS if _in_main_thread() else None
    return parse(text, [how], extraction_mode="first_match", parsing_timeout=limit)


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
