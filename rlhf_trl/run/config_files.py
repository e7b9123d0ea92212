"""What files and the command line write of a config, and which of them wrote what.

The deepest file that a config `extends` is laid down first, those that extend it over it, and the
command line over all: mappings are merged, anything else is replaced. Another `source` is another
block: of what was written under it before, nothing stays.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rlhf_trl.errors import InputError, nearest, refuse_repeated
from rlhf_trl.run.config_types import show
from rlhf_trl.run.yaml_loader import UNSET, read_word, read_yaml

COMMAND_LINE = "command line"
Key = tuple[str, ...]  # the way to a key: ("dataset", "specs", "0", "name")


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the mapping of a YAML file with everything it extends, without checking its keys."""
    return Written(path).values


class Words(tuple[str, ...]):
    """What followed an option on the command line; the type of its field says what it means."""

    def untyped(self) -> Any:
        """Return the value these words have where no type is known; a bare option is true."""
        values = [read_word(word) for word in self] or [True]
        return values[0] if len(values) == 1 else values


def read_command_line(argv: list[str]) -> tuple[str, list[tuple[str, Words]]]:
    """Return the path after `--config`, and the other options in order."""
    options: list[tuple[str, list[str]]] = []
    # "=" where no bare word may follow, which is after --key=value and before any option, else ""
    equals = "="
    for word in argv:
        if re.match("--?$|-[A-Za-z]", word):  # but -1 is a value
            raise InputError(f"{COMMAND_LINE}: {word} is not an option; options start with --.")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif equals:
            raise InputError(f"{COMMAND_LINE}: {word!r} belongs to no option; write --key value.")
        else:
            options[-1][1].append(word)
    refuse_repeated(argv, several=("config",))  # a second --config gets its own sentence below
    config_words = [words for name, words in options if name == "config"]  # of each --config
    others = [(name, Words(words)) for name, words in options if name != "config"]
    if len(config_words) == 1 and len(config_words[0]) == 1 and config_words[0][0]:
        return config_words[0][0], others
    raise InputError(f"{COMMAND_LINE}: give exactly one config file, as --config PATH.")


def _read_files(path: Path, extended_by: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return (file, content) for a config and all it extends, the deepest base first."""
    chain = " extends ".join(os.path.normpath(file) for file in (*extended_by, path))
    if path.resolve() in [file.resolve() for file in extended_by]:
        raise InputError(f"{chain}, which is a cycle; remove one of these extends.")
    if extended_by and not path.is_file():
        raise InputError(f"{chain}, which is not a file; a path is relative to the file it is in.")
    content, name = read_yaml(path), os.path.normpath(path)
    if "extends" not in content:
        return [(name, content)]
    base = content.pop("extends")
    if not isinstance(base, str):
        raise InputError(f"{name}: extends is {show(base)}; write the path of one YAML file.")
    return [*_read_files(path.parent / base, (*extended_by, path)), (name, content)]


class Written:
    """The mapping that files and a command line write, and which of them wrote what."""

    def __init__(self, path: str | Path):
        if not Path(path).is_file():
            from rlhf_trl.run.shipped import config_file

            path = config_file(path)
        self.file = str(path)
        self.values: dict[str, Any] = {}
        self.writers: list[str] = []  # files, the deepest base first, and the command line last
        self._last: dict[Key, int] = {}  # the place in that list of who wrote a key last
        # the place of who gave a key its value, which later ones may repeat, and the value
        self._decided: dict[Key, tuple[int, Any]] = {}
        for file, content in _read_files(Path(path)):
            self.writers.append(file)
            self._lay(self.values, content)
            self.note((), content)
        self.writers.append(COMMAND_LINE)

    def _lay(self, block: dict[str, Any], content: dict[str, Any], path: Key = ()) -> None:
        """Lay what a file writes over what those that it extends have written.

        Args:
            block: what these have written at `path`, which is changed.
            content: what the file, the last of the writers, writes there.
            path: the place of the block; (): the whole config.
        """
        for key, value in content.items():
            below = block.get(key)
            if value is UNSET and key not in block:
                name = ".".join((*path, key))
                near = nearest(key, block)
                raise InputError(
                    f"{self.writers[-1]}: {name} is !unset, but no base file sets it{near}."
                )
            if value is UNSET:
                del block[key]
            elif isinstance(value, dict):
                if not isinstance(below, dict):
                    block[key] = {}
                elif value.get("source", below.get("source")) != below.get("source"):
                    # Another source empties the block. That removes its !unset keys, too, which
                    # would be refused in an empty block; one that was never there still is.
                    value = {k: v for k, v in value.items() if v is not UNSET or k not in below}
                    block[key] = {}
                    self.forget((*path, key))
                self._lay(block[key], value, (*path, key))
            else:
                block[key] = copied(value)

    def note(self, path: Key, value: Any) -> None:
        """Remember that the last of the writers wrote the key at `path`, and all keys in it.

        Who writes a value that the key has already does not decide it.
        """
        writer = len(self.writers) - 1
        self._last[path] = writer
        if path not in self._decided or self._decided[path][1] != value:
            self._decided[path] = writer, value
        if isinstance(value, dict):
            for key, inner in value.items():
                self.note((*path, key), inner)

    def forget(self, path: Key) -> None:
        """Forget who wrote the keys of a block."""
        for notes in (self._last, self._decided):
            for key in [key for key in notes if key[: len(path)] == path]:
                del notes[key]

    def last_writer(self, path: Key) -> int:
        """Return who last wrote a key or part of it; -1: nobody did."""
        parts = (writer for key, writer in self._last.items() if key[: len(path)] == path)
        return max(parts, default=-1)

    def decided_after(self, choice: Key, path: Key) -> bool:
        """Whether a choice got its value from a later writer than the last one of the key."""
        writer, _ = self._decided.get(choice, (-1, None))
        return writer > self.last_writer(path)

    def source(self, path: Key) -> str:
        """Return where the key at `path`, or the block it is missing from, was last written."""
        prefixes = [path[:length] for length in range(len(path), 0, -1)]
        writers = [self.writers[self._last[prefix]] for prefix in prefixes if prefix in self._last]
        if COMMAND_LINE in writers:  # it replaces blocks whole
            return COMMAND_LINE
        return writers[0] if writers else self.file

    def fail(self, path: Key, message: str) -> NoReturn:
        """Raise an `InputError` about the key at `path`."""
        raise InputError(f"{self.source(path)}: {'.'.join(path)} {message}.")

    def value(self, path: Key, default: Any = None) -> Any:
        """Return the plain value at `path`."""
        return value_at(self.values, path, default)

    def rename(self, old: str, new: str) -> None:
        """Move the value of a key's old name to its new name; what was written later wins."""
        if old not in self.values:
            return
        value = self.values.pop(old)
        wrote_old = self.last_writer((old,))  # the number of its writer, the later the larger
        wrote_new = self.last_writer((new,))
        if new not in self.values or wrote_old > wrote_new:
            self.values[new] = value
            self._last[new,] = wrote_old
        elif wrote_old == wrote_new and plain(value) != plain(self.values[new]):
            self.fail((old,), f"is the old name of {new}, which has another value; remove it")


def value_at(values: Mapping[str, Any], path: Sequence[str], default: Any = None) -> Any:
    """Return the plain value that stands in nested blocks at `path`, `default` where none does."""
    node: Any = values
    for key in path:
        block = plain(node)
        if not isinstance(block, Mapping) or key not in block:
            return default
        node = block[key]
    return plain(node)


def plain(value: Any) -> Any:
    """Return the value that words of the command line have where no type is known."""
    return value.untyped() if isinstance(value, Words) else value


def copied(value: Any) -> Any:
    """Copy a YAML value; unlike deepcopy, it parts what two aliases of an anchor share."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value
