"""What the fields of configs may hold: the types of dataclasses, and words for their values."""

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from enum import EnumType
from importlib import import_module
from json import dumps
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_type_hints
from typing import get_args as type_args
from typing import get_origin as type_origin

# Fields that transformers has given another name; TRL's own defaults still use the old one.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# What to write for a value of a type; its name as that of a value is mostly the same.
REMEDIES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    NoneType: "null",
    Any: "any value",
}
NAMES = REMEDIES | {bool: "a boolean", float: "a float"}

Known = Mapping[str, tuple[Any, Field]]  # the fields of a dataclass, each with its type


def fields_of(cls: Any) -> dict[str, tuple[Any, Field]]:
    """Return name -> (type, field) for what a dataclass takes."""
    hints = get_type_hints(cls)
    return {field.name: (hints[field.name], field) for field in fields(cls) if field.init}


def members_of(kind: Any) -> list[Any]:
    """Return the alternatives of a type; beside an enum, `str` only stands for its values."""
    members = list(type_args(kind)) if type_origin(kind) in (Union, UnionType) else [kind]
    has_enum = any(isinstance(m, EnumType) for m in members)
    return [m for m in members if not (has_enum and m is str)]


def choices_of(member: Any) -> list[Any]:
    """Return the values that a Literal or an Enum allows, or [] for another type."""
    if type_origin(member) is Literal:
        return list(type_args(member))
    if isinstance(member, EnumType):
        return [item.value for item in member]
    return []


def shape_of(member: Any) -> Any:
    """Return the class that a plain value of a type has, or Any."""
    if is_dataclass(member):
        return dict
    return NoneType if member is None else type_origin(member) or member


def fits(value: Any, member: Any) -> bool:
    """Whether a plain value has the shape of one alternative of a type."""
    if choices := choices_of(member):
        return type(value) in {type(choice) for choice in choices}
    shape = shape_of(member)
    if shape is tuple:
        return isinstance(value, list) and len(value) == len(type_args(member))
    if shape not in REMEDIES:
        raise TypeError(f"a config field cannot be typed {member}")
    return shape in (Any, type(value)) or (shape is float and type(value) is int)


def describe(kind: Any) -> str:
    """Return what to write for a value of this type."""

    def words(member: Any) -> str:
        if choices := choices_of(member):
            return one_of(choices)
        if shape_of(member) is tuple:
            return f"a list of {len(type_args(member))}"
        return REMEDIES[shape_of(member)]

    return " or ".join(dict.fromkeys(map(words, members_of(kind))))


def remedy(value: Any, kind: Any) -> str:
    """Return what to write in place of a value that is not of this type."""
    members = set(members_of(kind))
    if int in members and isinstance(value, float) and value.is_integer():
        return f"{int(value)}"
    if str in members and {str, NoneType} >= members and isinstance(value, bool | int | float):
        return f'it in quotes ("{show(value)}")'
    return describe(kind)


def one_of(choices: Sequence[Any]) -> str:
    """Return the words that say what may be chosen."""
    words = [choice if isinstance(choice, str) else show(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def show(value: Any) -> str:
    """Return a value as JSON, cut where it is long."""
    text = dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def imported(name: Any) -> Any:
    """Return the class that a dotted path names (in `trl` where it has no dot), or the class."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module or "trl"), attribute)


def recipe_defaults(config_class: type) -> dict[str, Any]:
    """Return what recipes have in place of the defaults of a config class: its `in_recipes`."""
    values: dict[str, Any] = {}
    for base in reversed(config_class.__mro__):
        values |= vars(base).get("in_recipes", {})
    return values
