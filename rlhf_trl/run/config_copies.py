"""`rlhf-trl configs`: what ships, one line each, and copies of it that work from any folder."""

import os
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from rlhf_trl.errors import InputError, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.run.config_files import Key, Written, read_config, value_at
from rlhf_trl.run.folders import home
from rlhf_trl.run.shipped import FOLDERS, config_file, existing_config, names
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.run.yaml_loader import dump_yaml

DURATION = re.compile(r"\b\d+(?:\.\d+)? (?:s|min|minutes|h|hours)\b")
NOT_TRAINED = ("pipeline/", "accelerate/")  # what names of configs of no recipe begin with
SHARED = "tiny/base"  # what others extend, and which is none to train with
FILE = re.compile(r"^([^#\n]*: )([\w./-]+\.(?:yaml|json|txt))", re.MULTILINE)  # a key, its file
KEY = re.compile(r"( *)(\w+):")
COMMENT = re.compile(r" # (.*)$")


def listing(pattern: str = "") -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return a line for each config of a recipe, and for each other config that ships.

    `pattern` is a folder or part of the names; none of them is an `InputError`.
    """
    part = f"{pattern}/" if pattern in FOLDERS else pattern
    known = [name for name in names() if part in name]
    if not known:
        raise InputError(f"no config that ships is called {pattern}{nearest(pattern, names())}.")
    of_recipes, others = [], []
    for name in known:
        if name.startswith(NOT_TRAINED):
            others.append({"config": name, "what it is": _header(config_file(name))})
        elif name != SHARED:
            of_recipes.append(_line(name))
    return of_recipes, others


def _line(name: str) -> dict[str, str]:
    """Return the cells of a recipe's config."""
    path = config_file(name)
    values = read_config(path)
    specs = value_at(values, ("dataset", "specs"), default=[])
    tasks = [spec["name"] for spec in specs] if isinstance(specs, list) else []
    data = value_at(values, ("dataset", "path")) or "+".join(tasks)
    duration = DURATION.search(_header(path))
    return {
        "config": name,
        "recipe": stage_of_config(values, name).name,
        "algorithm": values.get("algorithm", "-"),
        "model": values["model_name_or_path"],
        "data": data or "-",
        "time measured": duration[0] if duration else "-",
    }


def _header(path: Path) -> str:
    """Return the comment that a file begins with, as one line."""
    return " ".join(line.removeprefix("#").strip() for line in _comment_on_top(path))


def _comment_on_top(path: Path) -> list[str]:
    """Return the lines of the comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(takewhile(lambda line: line.startswith("#"), lines))


def copy(name: str, target: str) -> None:
    """Write a config to a new file, with all that it extends, so that it can be used from there.

    Files that it names relative to itself or to the project are named by their whole paths.

    Args:
        name: path of a config, or name of one that ships.
        target: the file, which must not exist.
    """
    source = existing_config(name, "copy")
    if os.path.lexists(target):
        raise InputError(f"copy: {target} exists; name another file.")
    text = source.read_text(encoding="utf-8")
    if re.search("^extends:", text, re.MULTILINE):
        text = _with_bases(source)

    def whole(match: re.Match[str]) -> str:
        """Return a key with the whole path of its file, where that is one."""
        key, file = match.groups()
        for folder in (source.parent, home()):
            if (folder / file).is_file():
                return f"{key}{(folder / file).resolve()}"
        return match[0]

    write_whole(target, FILE.sub(whole, text))


def _with_bases(source: Path) -> str:
    """Return a config with what it extends laid below it, and the comments at the ends of lines."""
    written = Written(source)
    *bases, own, _ = written.writers
    comments: dict[Key | None, str] = {}  # of the last file that has the key
    for file in (*bases, own):
        for path, line in _with_keys(Path(file).read_text(encoding="utf-8")):
            comment = COMMENT.search(line)
            comments[path] = f" # {comment[1]}" if comment else ""
    lines = [*_comment_on_top(source), f"# With all of {', '.join(Path(b).name for b in bases)}."]
    for path, line in _with_keys(dump_yaml(written.values)):
        # a longer text, and one whose quote is open, go on in the next line
        is_whole = len(line) <= 60 and not (line.count("'") % 2 or line.count('"') % 2)
        lines.append(line + comments.get(path, "") if path and is_whole else line)
    return "\n".join(lines) + "\n"


def _with_keys(text: str) -> Iterator[tuple[Key | None, str]]:
    """Return the lines of YAML, each with the way to the key that it begins with, if it does."""
    path: Key = ()
    for line in text.splitlines():
        match = KEY.match(line)
        if match:
            path = (*path[: len(match[1]) // 2], match[2])
        yield path if match else None, line
