"""The one exception that is shown to the user as a sentence, without a traceback."""

import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, field
from difflib import get_close_matches
from typing import Any, NoReturn

# Conditions on the number in a field, by the words that tell the user what to write instead.
RANGES: dict[str, Callable[[Any], bool]] = {
    "0 or more": lambda value: value >= 0,
    "1 or more": lambda value: value >= 1,
    "2 or more": lambda value: value >= 2,
    "0 (none), or 2 or more": lambda value: value == 0 or value >= 2,
    "1 to 1000000": lambda value: 1 <= value <= 1_000_000,
    "a number above 0": lambda value: value > 0,
    "a number above 0, at most 1": lambda value: 0 < value <= 1,
    "a number between 0 and 1": lambda value: 0 <= value <= 1,
    "a number between 0 and 0.5": lambda value: 0 <= value <= 0.5,
    "a number between 0 and 1000000": lambda value: 0 <= value <= 1_000_000,
    "a number between 0.001 and 1000": lambda value: 0.001 <= value <= 1000,
    "a number of at least 0 and below 1": lambda value: 0 <= value < 1,
    "a whole number from 0 to 4294967295": lambda value: 0 <= value < 1 << 32,
    "a whole number of tokens": lambda value: value >= 1 and value == int(value),
}


class InputError(ValueError):
    """What was wrong, where it stands, and what to write instead, in one sentence.

    Whatever reads a config, data, a model or a folder may raise it, and says so in that sentence.
    Lines, as in the text of an exception that it repeats, are joined: an error is one line.
    """

    def __init__(self, sentence: str) -> None:
        lines = (line.strip() for line in str(sentence).splitlines())
        super().__init__(" ".join(line for line in lines if line))


class Diverged(InputError):
    """Training has left the finite numbers, so that nothing of now is worth saving."""


class Stopped(SystemExit):
    """The end of a run by a signal, whatever code is running."""


def takes_traceback(words: list[str]) -> bool:
    """Take the option `--traceback` out of a command line; return whether it was there."""
    asked = "--traceback" in words
    words[:] = [word for word in words if word != "--traceback"]
    return asked


def end(sentence: str, with_traceback: bool) -> NoReturn:
    """End the program with `error: sentence`, below the traceback of what is handled if asked."""
    if with_traceback:
        traceback.print_exc()
    sys.exit(f"error: {sentence}")


def reason_in_short(error: BaseException, width: int = 300) -> str:
    """Return what an error says, in one line; of what is longer than `width`, the first words."""
    return textwrap.shorten(str(error), width, placeholder=" ...", break_on_hyphens=False)


def setting(
    help: str,
    default: Any = None,
    *,
    factory: Any = MISSING,
    range: str | None = None,
    choices: Collection[Any] | Callable[[], Collection[Any]] | None = None,
    block: str | None = None,
) -> Any:
    """Declare a field of a config, with what `--help` says of it.

    Args:
        help: what the field does, in a few words.
        default: the value if the user sets none; `dataclasses.MISSING`: the user must set one.
        factory: makes the default instead, if that is a list, a mapping or a block.
        range: the key of `RANGES` whose condition a number must meet.
        choices: the words that the value may be, or a function that returns them.
        block: the dotted path of a dataclass, if the value is a block of that dataclass's fields;
            imported only if a config has the block.
    """
    limits = {"range": range, "choices": choices, "block": block}
    metadata = {"help": help} | {key: value for key, value in limits.items() if value is not None}
    if factory is not MISSING:
        default = MISSING
    return field(default=default, default_factory=factory, metadata=metadata)


def instead(value: Any, metadata: Mapping[str, Any]) -> str | None:
    """Return what to write for a value that `range` or `choices` of a field rule out, or None."""
    range_name, choices = metadata.get("range"), allowed(metadata)
    if value is None or not (range_name or choices):
        return None
    if range_name:
        return None if RANGES[range_name](value) else range_name
    return None if value in choices else f"one of {', '.join(choices)}{nearest(value, choices)}"


def allowed(metadata: Mapping[str, Any]) -> Collection[Any]:
    """Return the `choices` of a field, which may be a function that returns them; without: ()."""
    choices = metadata.get("choices") or ()
    return choices if isinstance(choices, Collection) else choices()


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the closest `known` word, or `""` if none is close.

    Upper and lower case do not count.
    """
    by_lower = {str(k).lower(): str(k) for k in known}
    close = get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def refuse_repeated(words: Iterable[str], several: Collection[str] = ()) -> None:
    """Refuse a command line that gives an option twice, of which only the last would count.

    Options in `several` may be repeated; `--no_x`, `--no-x` and `--x=1` are all the option `x`.
    """
    written: dict[str, str] = {}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        name = option_name(option)
        if name in written and name not in several:
            other = f" (as {written[name]})" if option != written[name] else ""
            raise InputError(f"command line: {option} is given more than once{other}; write one.")
        written[name] = option


def option_name(option: str) -> str:
    """Return the name of the field that an option such as `--no-history` or `--a.b=1` sets."""
    name = option.removeprefix("--").partition("=")[0]
    head, dot, tail = name.partition(".")
    return head.replace("-", "_").removeprefix("no_") + dot + tail


def key_named_in(message: str, keys: Collection[str]) -> str | None:
    """Return which of the `keys` a library's message is about, or None where it does not say.

    It is the first one in backticks there, as `key`, `key=value` or `args.key`.
    """
    for key in re.findall(r"`(?:args\.)?(\w+)[`=]", message):
        if key in keys:
            return key
    return None


@contextmanager
def naming(keys: Collection[str], phase: str = "") -> Iterator[None]:
    """Turn a library's error into one sentence: about the key that it names, or else the `phase`.

    See `key_named_in`. An error that names no key stays as it is if there is no `phase`.
    """
    try:
        yield
    except InputError:
        raise
    except (ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # the first argument, since the text of a KeyError has quotes around it
        message = " ".join(str(error.args[0] if error.args else error).split()).rstrip(".")
        subject = key_named_in(message, keys) or phase
        if not subject:
            raise
        raise InputError(f"{subject}: {message}; write another value, or remove it.") from error
