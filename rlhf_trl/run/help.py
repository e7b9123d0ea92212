"""The `--help` of a recipe, without torch and TRL, whose import takes seconds.

What it says of a field of ours is the comment beside it; TRL's fields are read from TRL's source.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NamedTuple

from rlhf_trl.algorithms import REQUIRED, formulation, parameter
from rlhf_trl.errors import allowed
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.config_types import (
    RENAMED,
    choices_of,
    fields_of,
    members_of,
    shape_of,
    show,
)
from rlhf_trl.run.folders import home

SOURCES = (
    *(("transformers", "training_args.py"), ("trl", "experimental/*/*_config.py")),
    *(("trl", "trainer/*_config.py"), ("rlhf_trl", "trainers/*.py")),
)
OF_THE_ROW = "(the algorithm's)"


class _Told(NamedTuple):
    """What a field takes, what it is by default, what it does, and whether TRL lacks it."""

    kind: str
    default: str
    words: str
    ours: bool = True


def recipe_help(own: type, trl: str, everything: bool) -> str:
    """Return a line for each field of a recipe, and for those of TRL that it sets, or all.

    `own` is the dataclass of its own fields, and `trl` the name of TRL's config class or of ours;
    "" where nothing is trained.
    """
    ours, name = dict(_own(own)), Path(sys.argv[0]).stem
    theirs = _declared("ModelConfig") | _declared(trl) if trl else {}
    more = {key: each for key, each in theirs.items() if each.ours and each.default != OF_THE_ROW}
    if not everything:
        more = {key: each for key, each in more.items() if key not in _declared("Safeguards")}
    if "algorithm" in ours:
        name = ours["algorithm"].default
        more = {**dict(_of_loss(own, name, theirs)), **more}
    rest = [key for key in theirs if key not in {*more, *RENAMED}]
    title, tiny = "TRL's fields:", home() / "configs" / "tiny" / f"{name}.yaml"
    if tiny.is_file() and not everything:
        rest = [key for key in read_config(tiny) if key in rest]
        title = f"TRL's fields that configs/tiny/{name}.yaml sets (--help all: all of TRL's):"
    lines = ["usage: --config FILE [--traceback] [--key VALUE ...] [--block.key VALUE ...]"]
    for head, part in (
        ("this recipe's fields:", ours),
        ("fields of its trainer that TRL lacks, or whose default an algorithm decides:", more),
        (title, {key: theirs[key] for key in rest}),
    ):
        lines += ["", head] if part else []
        for key, each in part.items():
            lines += _field_lines(key, each, get_terminal_size((120, 0)).columns)
    return "\n".join(lines)


def _field_lines(key: str, field: _Told, width: int) -> list[str]:
    """Return what is told of a field, at most `width` wide: name, type and default, words.

    The words begin in a column of their own, where that leaves them room.
    """
    takes = f"{field.kind} = {field.default}"
    many = len(takes) > width - 32  # choices, and a line may break after each of them
    takes = takes.replace("|", "| ") if many else takes
    column = 27 if width >= 100 else 13
    indent = {"initial_indent": f"  --{key:27} ", "subsequent_indent": " " * 34}
    lines = wrap(f"{takes:{column}} {field.words}", width, **indent, break_on_hyphens=False)
    return [line.replace("| ", "|") for line in lines] if many else lines


def _own(cls: type, block: str = "") -> Iterator[tuple[str, _Told]]:
    """Yield the fields of a dataclass and of the blocks in it, by their dotted names."""
    source = "".join(inspect.getsource(each) for each in reversed(cls.__mro__[:-1]))
    comments = _comments(source)
    for name, (kind, field) in fields_of(cls).items():
        words = allowed(field.metadata) or _kinds(kind)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield block + name, _Told("|".join(words), _short(default), comments.get(name, ""))
        inner: dict[str, _Told] = {}
        for member in filter(is_dataclass, members_of(kind)):
            for key, each in _own(member, f"{block}{name}."):
                before = inner.setdefault(key, each)  # of several sources, kinds are joined
                words = dict.fromkeys(f"{before.kind}|{each.kind}".split("|"))
                inner[key] = before._replace(kind="|".join(words))
        yield from inner.items()


def _comments(source: str) -> dict[str, str]:
    """Return the comments on the fields of a class, beside them or above."""
    found = dict(re.findall(r"^    (\w+): .*  # (.*)$", source, re.M))
    return found | {
        key: text for text, key in re.findall(r"^    # (.*)\n    (\w+): ", source, re.M)
    }


def _kinds(kind: Any) -> list[str]:
    """Return words for the alternatives of a type, but for null."""
    shapes = [(m, shape_of(m)) for m in members_of(kind) if m is not type(None)]
    found = (choices_of(m) or [getattr(shape, "__name__", "any")] for m, shape in shapes)
    return [*dict.fromkeys(str(word) for words in found for word in words)]


def _short(default: Any) -> str:
    if default is MISSING or default == REQUIRED:
        return "(required)"
    plain = isinstance(default, str) and default and default.isprintable()
    return "(below)" if is_dataclass(default) else default if plain else show(default)


def _of_loss(own: type, first: str, theirs: dict[str, _Told]) -> Iterator[tuple[str, _Told]]:
    """Yield the fields that the algorithms of a recipe read, its `first` algorithm before all."""
    of, told = fields_of(own), set()
    for name in sorted(allowed(of["algorithm"][1].metadata), key=lambda name: name != first):
        row = formulation(name, of["formulation"][1].default)
        for key, value in {**row.reads, **row.trainer_reads}.items():
            if key in theirs and key not in told:
                told.add(key)
                yield key, theirs[key]._replace(default=f"{_short(value)} ({name})")


class _Declaration(NamedTuple):
    """A class in a source file."""

    node: ast.ClassDef
    source: str  # of the whole file
    ours: bool  # whether it is of this package


def _declared(name: str) -> dict[str, _Told]:
    """Return the fields of a config class and of those that it extends, from the sources."""
    classes: dict[str, _Declaration] = {}
    for package, pattern in SOURCES:
        for file in Path(find_spec(package).origin).parent.glob(pattern):
            source = file.read_text(encoding="utf-8")
            for node in ast.parse(source).body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name] = _Declaration(node, source, package == "rlhf_trl")
    return _fields_in_source(name, classes)


def _fields_in_source(name: str, classes: Mapping[str, _Declaration]) -> dict[str, _Told]:
    """Return the fields of one of the classes and of its bases among them; of others none.

    What a field does is said in the docstring of its class, as TRL does, or in a comment, as we do.
    """
    fields: dict[str, _Told] = {}
    if name not in classes:
        return fields
    node, source, ours = classes[name]
    for base in reversed(node.bases):
        fields |= _fields_in_source(ast.unparse(base), classes)
    docstring = ast.get_docstring(node) or ""
    meanings = dict(re.findall(r"^ +(\w+) \(.*?\):\s+([^.;:]+)", docstring, re.M))
    meanings |= _comments("\n".join(source.split("\n")[node.lineno : node.end_lineno]))
    recipe_defaults: dict[str, Any] = {}
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign):
            continue
        key = ast.unparse(statement.target)
        if "ClassVar" not in ast.unparse(statement):
            fields[key] = _in_source(statement, meanings.get(key, ""))._replace(ours=ours)
        if key == "in_recipes":
            recipe_defaults = ast.literal_eval(statement.value)
    for key, value in recipe_defaults.items():
        fields[key] = fields[key]._replace(default=_short(value))
    return fields


def _in_source(node: ast.AnnAssign, words: str) -> _Told:
    """Return what a field's line says, whose default may be a call of `field` or `of_the_row`."""
    default = node.value
    if isinstance(default, ast.Call):
        given = {each.arg: each.value for each in default.keywords}
        told = given.get("metadata", ast.Dict([], []))
        said = [v for k, v in zip(told.keys, told.values, strict=True) if k.value == "help"]
        if ast.unparse(default.func) == "of_the_row":
            words = parameter(*(argument.value for argument in default.args)).meaning
        words = getattr((*said, None)[0], "value", words).partition(". ")[0]
        row = ast.Constant(OF_THE_ROW if default.args else None)
        default = given.get("default", given.get("default_factory", row))
    try:
        shown = _short(ast.literal_eval(default))
    except ValueError:
        shown = ast.unparse(default)
    kind = re.sub(r"Literal\[(.*)\]", r"\1", ast.unparse(node.annotation).replace(" | None", ""))
    return _Told(re.sub(" [|] |', '", "|", kind).strip("'"), shown, words)
