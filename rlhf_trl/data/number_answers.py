"""Answers that are one number, read exactly as they are written."""

import re
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from typing import Any

from rlhf_trl.data.answers import NotRead, marked_answer

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
# What makes a text more than the one number in it: an operator, a command, a word for a number.
# The pattern is for a text in which # stands for the number.
MORE_THAN_NUMBER = re.compile(
    r"\\[a-zA-Z]"  # a LaTeX command
    r"|[\^*√∞<>≤≥±×÷∪∩]|#!|[a-zA-Z]\("
    r"|(?<![a-zA-Z])[-+/]|[-+/](?![a-zA-Z])"  # but follow-up, km/h
    r"|#[^\W\d_](?![^\W\d_])|#\s*(?:pi|π)\b"  # 2x, but 2cm
    r"|(?<![a-zA-Z])\d"  # 1.000.000
    r"|\b(?:hundred|thousand|million|billion|trillion|dozen|half)\b",
    re.IGNORECASE,
)
# What stands before the last number of a fraction, a power or a root.
BEFORE_PART = re.compile(r"[\w)}\]]\s*(?:[/^÷]|\*\*)\s*[({]*$|\}\s*\{$|\\(?:sqrt|[dt]?frac)\s*\{?$")


def read_number(text: str, alone: bool = False) -> Decimal | None:
    """Return the number that `text` gives as its answer, exactly as it is written, or None.

    Thousands separators are removed. The number is read from the first of these that is there:

    1. the last `\\boxed{...}`
    2. what follows the last `####` on its line
    3. with `alone`, all of the text, as of a right answer; without, the last number of the text,
       unless it ends a fraction, a power or a root

    A box, what follows `####`, and a text with `alone` must hold just one number: with several
    numbers, an operator or a LaTeX command, the answer is None.
    """
    text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    marked = marked_answer(text)
    if marked is None and alone:
        marked = text
    if marked is None:
        return _last_number(text)
    marked = TRIM.sub("", marked)  # without units and the like
    numbers = NUMBER.findall(marked)
    rest = NUMBER.sub("#", marked)  # the text with # in place of the number
    has_fraction = any(sign.isnumeric() and not sign.isdecimal() for sign in rest)  # such as ½, ²
    if len(numbers) != 1 or has_fraction or MORE_THAN_NUMBER.search(rest):
        return None
    return _decimal(numbers[0])


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None: there is none, or it ends a fraction or the like."""
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    before = text[: numbers[-1].start()][-20:]  # a few characters are enough for BEFORE_PART
    if BEFORE_PART.search(before):
        return None
    return _decimal(numbers[-1].group())


def right_number(text: str) -> Decimal:
    """Return the one number that a right answer is.

    Raises:
        NotRead: it is not one number.
    """
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
    """Return whether two numbers differ by at most 1e-6, or 1e-6 of a right number below 1.

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
