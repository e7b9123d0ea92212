"""The `--help` of a recipe, without torch and TRL, whose import takes seconds.

The fields of recipes say themselves what they do: see `errors.setting`. Those of config classes,
TRL's and ours, are read from the source of these classes, which import TRL.
"""

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, is_dataclass
from functools import cache
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
    imported,
    members_of,
    shape_of,
    show,
)
from rlhf_trl.run.folders import home

# Where config classes are declared: a package, and the files in it.
SOURCES = (
    ("transformers", "training_args.py"),
    ("trl", "experimental/*/*_config.py"),
    ("trl", "trainer/*_config.py"),
    ("rlhf_trl", "trainers/*.py"),
)
OF_THE_ROW = "(the algorithm's)"
USAGE = "usage: --config FILE [--traceback] [--key VALUE ...] [--block.key VALUE ...]"


class FieldHelp(NamedTuple):
    """What the help says of a field."""

    kind: str  # its type, or its choices with | between them
    default: str
    meaning: str
    is_ours: bool = True  # declared by a class of this package, not by one of TRL


Helps = dict[str, FieldHelp]  # by the name of the field


def recipe_help(own: type, config_class: str, everything: bool) -> str:
    """Return the help of the recipe whose script runs: its usage, and its fields."""
    lines = fields_help(own, config_class, everything, Path(sys.argv[0]).stem)
    return f"{USAGE}\n{lines}"


def fields_help(own: type, config_class: str, everything: bool, recipe: str) -> str:
    """Return the help of a recipe's fields: its own, those of its trainer, and fields of TRL.

    Of TRL's fields, those are shown that the recipe's tiny config sets, or all.

    Args:
        own: the dataclass of the recipe's own fields.
        config_class: the name of TRL's config class or of ours; "" where nothing is trained.
        everything: whether to show the fields of TRL that the recipe's tiny config leaves alone.
        recipe: its name.
    """
    recipe_fields = _recipe_fields(own)
    config_fields: Helps = {}
    if config_class:
        config_fields = _config_fields("ModelConfig") | _config_fields(config_class)
    trainer_fields = _trainer_fields(own, config_fields, everything)

    name = recipe  # of its tiny config
    if "algorithm" in recipe_fields:
        name = recipe_fields["algorithm"].default
    tiny_config = home() / "configs" / "tiny" / f"{name}.yaml"
    # fields of the trainer have a section of their own, and of two names the old one is not shown
    shown = [key for key in config_fields if key not in {*trainer_fields, *RENAMED}]
    heading = "TRL's fields:"
    if tiny_config.is_file() and not everything:
        shown = [key for key in read_config(tiny_config) if key in shown]
        heading = f"TRL's fields that configs/tiny/{name}.yaml sets (--help all: all of TRL's):"

    sections = {
        "this recipe's fields:": recipe_fields,
        "fields of its trainer that TRL lacks, or whose default an algorithm decides:": (
            trainer_fields
        ),
        heading: {key: config_fields[key] for key in shown},
    }
    return "\n".join(_section_lines(sections))


def _section_lines(sections: Mapping[str, Helps]) -> list[str]:
    """Return the lines of sections, by their titles; a section without fields has none."""
    width = get_terminal_size((120, 0)).columns
    lines = []
    for title, section in sections.items():
        if section:
            lines += ["", title]
        for key, field_help in section.items():
            lines += _field_lines(key, field_help, width)
    return lines


def _trainer_fields(own: type, config_fields: Helps, everything: bool) -> Helps:
    """Return those of a config class that our trainer adds, or whose default an algorithm decides.

    The fields that algorithms read come first. Safeguards are shown with `everything` only.
    """
    hidden: Helps = {} if everything else _config_fields("Safeguards")
    added = {
        key: field_help
        for key, field_help in config_fields.items()
        if field_help.is_ours and field_help.default != OF_THE_ROW and key not in hidden
    }
    if "algorithm" in fields_of(own):
        return _loss_fields(own, config_fields) | added
    return added


def _loss_fields(own: type, config_fields: Helps) -> Helps:
    """Return the fields that the algorithms of a recipe read; those of its default one come first.

    The default shown is that of the first algorithm that reads the field, which is named with it.
    """
    own_fields = fields_of(own)
    algorithm_field = own_fields["algorithm"][1]
    default_formulation = own_fields["formulation"][1].default
    names = sorted(
        allowed(algorithm_field.metadata), key=lambda name: name != algorithm_field.default
    )
    helps: Helps = {}
    for name in names:
        row = formulation(name, default_formulation)
        for key, value in {**row.reads, **row.trainer_reads}.items():
            if key in config_fields and key not in helps:
                helps[key] = config_fields[key]._replace(default=f"{_short(value)} ({name})")
    return helps


def _field_lines(key: str, field_help: FieldHelp, width: int) -> list[str]:
    """Return what the help says of a field, at most `width` wide: name, type, default, meaning.

    Name, type and meaning stand in three columns. Where a name or a type is longer than its column,
    the rest of the line moves to the right.
    """
    name_column = f"  --{key:27} "
    name_width = len(f"  --{'':27} ")
    takes = f"{field_help.kind} = {field_help.default}"
    breaks_choices = len(takes) > width - name_width  # they fill more than a line
    if breaks_choices:  # for `wrap`, which breaks lines at blanks; taken out again below
        takes = takes.replace("|", "| ")
    takes_width = 27 if width >= 100 else 13  # a narrow terminal needs the room for the meaning
    lines = wrap(
        f"{takes:{takes_width}} {field_help.meaning}",
        width,
        initial_indent=name_column,
        subsequent_indent=" " * (name_width + 2),
        break_on_hyphens=False,
    )
    if breaks_choices:
        lines = [line.replace("| ", "|") for line in lines]
    return lines


def _recipe_fields(cls: type, block: str = "") -> Helps:
    """Return the fields of a dataclass and of the blocks in it, by their dotted names."""
    helps: Helps = {}
    for name, (kind, field) in fields_of(cls).items():
        key = block + name
        kind = imported(field.metadata.get("block", kind))
        words = allowed(field.metadata) or _kinds(kind)
        meaning = field.metadata.get("help", "")
        helps[key] = FieldHelp("|".join(words), _short(_default_of(field)), meaning)
        helps |= _block_fields(kind, f"{key}.")
    return helps


def _block_fields(kind: Any, block: str) -> Helps:
    """Return the fields of all blocks that a field may hold.

    What several blocks have takes the types of all, and the rest from the first of them.
    """
    helps: Helps = {}
    for member in filter(is_dataclass, members_of(kind)):
        for key, field_help in _recipe_fields(member, block).items():
            first = helps.setdefault(key, field_help)
            kinds = dict.fromkeys([*first.kind.split("|"), *field_help.kind.split("|")])
            helps[key] = first._replace(kind="|".join(kinds))
    return helps


def _default_of(field: Field) -> Any:
    """Return the default of a field, also one that is made anew for each object."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _kinds(kind: Any) -> list[str]:
    """Return words for the alternatives of a type, but for null."""
    words: list[str] = []
    for member in members_of(kind):
        if member is not type(None):
            type_name = getattr(shape_of(member), "__name__", "any")
            words += map(str, choices_of(member) or [type_name])
    return list(dict.fromkeys(words))


def _short(default: Any) -> str:
    """Return a default as the help shows it: a word without quotes, a block not at all."""
    if default is MISSING or default == REQUIRED:
        return "(required)"
    if is_dataclass(default):
        return "(below)"
    is_word = isinstance(default, str) and default and default.isprintable()
    return default if is_word else show(default)


class _Declaration(NamedTuple):
    """A config class in a source file."""

    node: ast.ClassDef
    is_ours: bool  # whether it is of this package


@cache
def _declarations() -> Mapping[str, _Declaration]:
    """Return all classes of the `SOURCES`, by name."""
    classes: dict[str, _Declaration] = {}
    for package, pattern in SOURCES:
        for file in Path(find_spec(package).origin).parent.glob(pattern):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    classes[node.name] = _Declaration(node, package == "rlhf_trl")
    return classes


def _config_fields(name: str) -> Helps:
    """Return the fields of a config class and of its bases; none of a class that is not known.

    What a field means stands at its declaration, or, in TRL's classes, in their docstrings, as in
    ``name (`type`, *optional*): meaning.``.
    """
    helps: Helps = {}
    if name not in _declarations():
        return helps
    node, is_ours = _declarations()[name]
    for base in reversed(node.bases):
        helps |= _config_fields(ast.unparse(base))
    docstring = ast.get_docstring(node) or ""
    # the name, and the meaning up to the first period, semicolon or colon
    meanings = dict(re.findall(r"^ +(\w+) \(.*?\):\s+([^.;:]+)", docstring, re.M))
    recipe_defaults: dict[str, Any] = {}  # what recipes have in place of the class's defaults
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign):  # what declares a field, as in `x: int = 1`
            continue
        key = ast.unparse(statement.target)
        if key == "in_recipes":
            recipe_defaults = ast.literal_eval(statement.value)
        elif "ClassVar" not in ast.unparse(statement.annotation):
            helps[key] = _declared_field(statement, meanings.get(key, ""), is_ours)
    for key, value in recipe_defaults.items():
        helps[key] = helps[key]._replace(default=_short(value))
    return helps


def _declared_field(statement: ast.AnnAssign, meaning: str, is_ours: bool) -> FieldHelp:
    """Return what the declaration of a field says.

    The value of a field is its default, or a call of one of three functions:
        epsilon: float = of_the_row("epsilon")       meaning and default are the algorithm's
        size: int = setting("how many rows", 100)    meaning, default (none: null)
        lr: float = field(default=1e-6, metadata={"help": "The rate."})

    Args:
        statement: the declaration.
        meaning: that of the class's docstring, "" for none; shown where the call has none.
        is_ours: whether the class is of this package.
    """
    default = statement.value  # an expression; an `ast.Constant` stands for a value
    if isinstance(default, ast.Call):
        function = ast.unparse(default.func)
        positional = default.args
        by_name = {keyword.arg: keyword.value for keyword in default.keywords}
        if function == "of_the_row":
            name_and_family = [argument.value for argument in positional]
            meaning = parameter(*name_and_family).meaning
            default = ast.Constant(OF_THE_ROW)
        elif function == "setting":
            meaning = positional[0].value
            default = positional[1] if len(positional) > 1 else ast.Constant(None)
        else:
            meaning = _help_in_metadata(by_name.get("metadata")) or meaning
            default = by_name.get("default", by_name.get("default_factory", ast.Constant(None)))
        meaning = meaning.partition(". ")[0]  # the first sentence
    try:
        shown_default = _short(ast.literal_eval(default))
    except ValueError:  # an expression, such as the name of a factory
        shown_default = ast.unparse(default)
    return FieldHelp(_kind_in_source(statement.annotation), shown_default, meaning, is_ours)


def _help_in_metadata(metadata: ast.expr | None) -> str | None:
    """Return the text behind "help" in the metadata of a field; None where it has none."""
    if isinstance(metadata, ast.Dict):
        for key, value in zip(metadata.keys, metadata.values, strict=True):
            if key.value == "help":
                return getattr(value, "value", None)
    return None


def _kind_in_source(annotation: ast.expr) -> str:
    """Return the alternatives of an annotation with | between them, but for None."""
    kind = ast.unparse(annotation).replace(" | None", "")
    kind = re.sub(r"Literal\[(.*)\]", r"\1", kind)
    return kind.replace("', '", "|").replace(" | ", "|").strip("'")
