"""Command lines put together from several, and read without checking their keys."""

from collections.abc import Sequence
from typing import Any

from rlhf_trl.errors import option_name
from rlhf_trl.run.command_words import override
from rlhf_trl.run.config_files import Written, plain, read_command_line


def written_by(words: Sequence[str]) -> Written:
    """Return what a command line with `--config PATH` and the files write, unchecked."""
    path, overrides = read_command_line([*words])
    written = Written(path)
    for option, value in overrides:
        override(written, option, value)
    return written


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Return what a command line with `--config PATH` gives, without checking its keys."""

    def untyped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: untyped(item) for key, item in value.items()}
        return [untyped(item) for item in value] if isinstance(value, list) else plain(value)

    return untyped(written_by(words).values)


def join_options(*layers: Sequence[str]) -> list[str]:
    """Return the options of several command lines, of which each overrules those before it."""
    options: dict[str, list[str]] = {}
    for words in layers:
        name = ""
        for word in words:
            if word.startswith("--"):
                name = option_name(word)
                options.pop(name, None)  # it stands where it was given last
            options.setdefault(name, []).append(word)
    return [word for words in options.values() for word in words]
