"""The `--help` of a recipe, without torch and TRL, whose import takes seconds.

What it says of a field of ours is the comment beside it; TRL's fields are read from TRL's source.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from textwrap import shorten
from types import NoneType
from typing import Any, NamedTuple

from rlhf_trl.algorithms import REQUIRED, formulation
from rlhf_trl.run.config import (
    RENAMED,
    choices_of,
    fields_of,
    members_of,
    read_config,
    shape_of,
    show,
)
from rlhf_trl.run.folders import home

LIBRARIES = ("rlhf_trl", "transformers", "trl")
PLACES = (
    *("training_args.py", "experimental/*/*_config.py", "trainer/*_config.py"),  # of theirs
    "trainers/*.py",
)
OF_THE_ROW = "(the algorithm's)"


class _Told(NamedTuple):
    """What a field takes, what it is by default, and what it does."""

    kind: str
    default: str
    words: str

    def line(self, name: str) -> str:
        """Return one line, whose words are cut to the width of the terminal."""
        takes = f"  --{name:27} {f'{self.kind} = {self.default}':27} "
        room = max(get_terminal_size((120, 0)).columns - len(takes), 40)
        return (takes + shorten(self.words, room, placeholder=" ...")).rstrip()


def recipe_help(own: type, trl: str, everything: bool) -> str:
    """Return a line for each field of a recipe, and for each of TRL's that its tiny config sets.

    Args:
        own: the dataclass of the recipe's own fields.
        trl: the name of TRL's config class, or of our subclass of it.
        everything: whether to list all of TRL's fields.
    """
    ours, name = dict(_own(own)), Path(sys.argv[0]).stem
    package, *libraries = (Path(find_spec(each).origin).parent for each in LIBRARIES)
    added = _declared(trl, package)
    theirs = _declared("ModelConfig", *libraries) | _declared(trl, *libraries, package)
    more = {key: each for key, each in added.items() if each.default != OF_THE_ROW}
    if "algorithm" in ours:
        name = fields_of(own)["algorithm"][1].default
        more = {**dict(_of_loss(own, name, theirs)), **more}
    rest = {key: each for key, each in theirs.items() if key not in {*more, *RENAMED}}
    title, tiny = "TRL's fields:", home() / "configs" / "tiny" / f"{name}.yaml"
    if tiny.is_file() and not everything:
        rest = {key: rest[key] for key in read_config(tiny) if key in rest}
        title = f"TRL's fields that configs/tiny/{name}.yaml sets (--help all: all of TRL's):"
    lines = ["usage: --config FILE [--key VALUE ...] [--block.key VALUE ...]"]
    for head, part in {
        "this recipe's fields:": ours,
        "fields of its trainer that TRL lacks, or whose default an algorithm decides:": more,
        title: rest,
    }.items():
        lines += ["", head, *(each.line(key) for key, each in part.items())] if part else []
    return "\n".join(lines)


def _own(cls: type, block: str = "") -> Iterator[tuple[str, _Told]]:
    """Yield the fields of a dataclass and of the blocks in it, by their dotted names."""
    source = "".join(inspect.getsource(each) for each in reversed(cls.__mro__[:-1]))
    comments = dict(re.findall(r"^    (\w+): .*  # (.*)$", source, re.M))
    comments |= {key: above for above, key in re.findall(r"^    # (.*)\n    (\w+): ", source, re.M)}
    for name, (kind, field) in fields_of(cls).items():
        words = field.metadata.get("runs") or field.metadata.get("choices") or _kinds(kind)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield block + name, _Told("|".join(words), _short(default), comments.get(name, ""))
        inner: dict[str, _Told] = {}
        for member in filter(is_dataclass, members_of(kind)):
            for key, each in _own(member, f"{block}{name}."):
                before = inner.setdefault(key, each)  # of several sources, kinds are joined
                words = dict.fromkeys(f"{before.kind}|{each.kind}".split("|"))
                inner[key] = before._replace(kind="|".join(words))
        yield from inner.items()


def _kinds(kind: Any) -> list[str]:
    """Name the alternatives of a type, leaving out null."""
    found = (choices_of(m) or [getattr(shape_of(m), "__name__", "any")] for m in members_of(kind))
    words = dict.fromkeys(str(word) for words in found for word in words)
    return [word for word in words if word != NoneType.__name__]


def _short(default: Any) -> str:
    if default is MISSING or default == REQUIRED:
        return "(required)"
    if is_dataclass(default):
        return "(below)"
    plain = isinstance(default, str) and default and default.isprintable()
    return default if plain else show(default)


def _of_loss(own: type, first: str, theirs: dict[str, _Told]) -> Iterator[tuple[str, _Told]]:
    """Yield the fields that the algorithms of a recipe read, its `first` algorithm before all."""
    of, told = fields_of(own), set()
    for name in sorted(of["algorithm"][1].metadata["runs"], key=lambda name: name != first):
        row = formulation(name, of["formulation"][1].default)
        for key, value in {**row.reads, **row.trainer_reads}.items():
            if key in theirs and key not in told:
                told.add(key)
                yield key, theirs[key]._replace(default=f"{_short(value)} ({name})")


def _declared(name: str, *packages: Path) -> dict[str, _Told]:
    """Return what packages declare of the fields of a config class and of those it extends."""
    files = [file for package in packages for place in PLACES for file in package.glob(place)]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    classes = {n.name: n for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)}

    def of(name: str) -> dict[str, _Told]:
        found: dict[str, _Told] = {}
        if (declared := classes.get(name)) is not None:
            for base in reversed(declared.bases):
                found |= of(ast.unparse(base))
            said = re.findall(
                r"^ +(\w+) \(.*?\):\s+([^.;:]+)", ast.get_docstring(declared) or "", re.M
            )
            for node in declared.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node):
                    name = ast.unparse(node.target)
                    found[name] = _in_source(node, dict(said).get(name, ""))
        return found

    return of(name)


def _in_source(node: ast.AnnAssign, words: str) -> _Told:
    """Return what a field's line says, whose default may be a call of `field` or `of_the_row`."""
    default = node.value
    if isinstance(default, ast.Call):
        given = {each.arg: each.value for each in default.keywords}
        told = given.get("metadata", ast.Dict([], []))
        said = [v for k, v in zip(told.keys, told.values, strict=True) if k.value == "help"]
        words = getattr((*default.args, *said, None)[0], "value", words).partition(". ")[0]
        row = ast.Constant(OF_THE_ROW if default.args else None)
        default = given.get("default", given.get("default_factory", row))
    try:
        shown = _short(ast.literal_eval(default))
    except ValueError:
        shown = ast.unparse(default)
    kind = re.sub(r"Literal\[(.*)\]", r"\1", ast.unparse(node.annotation).replace(" | None", ""))
    return _Told(re.sub(" [|] |', '", "|", kind).strip("'"), shown, words)
