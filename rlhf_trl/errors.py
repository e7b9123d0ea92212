"""The one exception that is shown to the user as a sentence, without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """What was wrong, where it stands, and what to write instead, in one sentence."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest `known` word, or `""` if none is close."""
    close = get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
