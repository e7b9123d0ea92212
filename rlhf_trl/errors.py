"""The one exception that is shown to the user as a sentence, without a traceback."""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class InputError(ValueError):
    """What was wrong, where it stands, and what to write instead, in one sentence.

    Whatever reads a config, data, a model or a folder may raise it, and says so in that sentence.
    """


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest `known` word, or `""` if none is close."""
    close = get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


@contextmanager
def naming(keys: Collection[str], phase: str = "") -> Iterator[None]:
    """Make one sentence of what a library refuses: about a key in its message, or the `phase`.

    Of the `keys` it is the first one in backticks there, as `key`, `key=value` or `args.key`.
    """
    try:
        yield
    except InputError:
        raise
    except (ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error.args[0] if error.args else error).split()).rstrip(".")
        named = [key for key in re.findall(r"`(?:args\.)?(\w+)[`=]", said) if key in keys]
        if not (named or phase):
            raise
        what = named[0] if named else phase
        raise InputError(f"{what}: {said}; write another value, or remove it.") from error
