"""Strict YAML: duplicate keys and tags are errors, and a scalar means what YAML 1.2 says it means.

YAML 1.1, which PyYAML reads, takes `1e-6` for a string, `no` for a boolean and `010` for 8. Here
`1e-6` is a number, `yes` and `on` are strings (so a boolean field refuses them) and 010 is 10.
"""

import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import yaml

from rlhf_trl.errors import InputError

_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[str, list[str], Callable[[str], Any]]] = {  # pattern, starts, reader
    "null": (r"~|null|Null|NULL|", ["", *"~nN"], lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"], lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+", [*"-+0123456789"], int),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}


MOST_VALUES = 100_000  # that a config may have, counting what its aliases repeat

# The value of `key: !unset`: the key that the base file sets is removed.
UNSET = type("Unset", (), {"__repr__": lambda self: "!unset"})()


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own registry)
    yaml_constructors = {_TAG + "str": yaml.SafeLoader.construct_scalar}  # noqa: RUF012

    # Extends SafeLoader.get_single_node: a few lines of aliases can stand for billions of values.
    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _count(node, {}) > MOST_VALUES:
            self._fail(f"aliases (*name) make more than {MOST_VALUES} values of the file", node)
        return node

    def _fail(self, problem: str, node: yaml.Node) -> None:
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)

    def _mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        """Read a mapping; refuse keys that are no strings or stand twice, and YAML's merge key."""
        mapping, lines = {}, {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                self._fail(f"the key {key!r} is not a string; put it in quotes", key_node)
            if key == "<<":
                self._fail("the merge key '<<' is not read here; use extends: PATH", key_node)
            if key in mapping:
                first = f"first on line {lines[key]}"
                self._fail(f"{key!r} is given twice, {first}; keep one", key_node)
            lines[key] = key_node.start_mark.line + 1
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def _list(self, node: yaml.SequenceNode) -> list[Any]:
        items = self.construct_sequence(node, deep=True)
        if _holds_unset(items):
            self._fail("!unset removes a key of a base file, and lists replace whole", node)
        return items

    def _unset(self, node: yaml.Node) -> Any:
        if node.value:
            self._fail("!unset takes no value", node)
        return UNSET

    def _unknown_tag(self, node: yaml.Node) -> None:
        tag = node.tag.replace(_TAG, "!!")
        self._fail(f"the tag {tag} is not read here; write a plain value", node)


def _count(node: yaml.Node, counts: dict[yaml.Node, float]) -> float:
    """Return how many values a node stands for, aliases written out; of one in itself, infinity."""
    if node not in counts:
        counts[node] = inf  # until it is counted
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        else:
            parts = node.value if isinstance(node, yaml.SequenceNode) else []
        counts[node] = 1 + sum(_count(part, counts) for part in parts)
    return counts[node]


def _holds_unset(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is UNSET or any(_holds_unset(v) for v in inner)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, (_pattern, _starts, _read) in _SCALARS.items():
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _starts)
    _Loader.add_constructor(
        _TAG + _kind, lambda loader, node, read=_read: read(loader.construct_scalar(node))
    )
_Loader.add_constructor(_TAG + "map", _Loader._mapping)
_Loader.add_constructor(_TAG + "seq", _Loader._list)
_Loader.add_constructor("!unset", _Loader._unset)
_Loader.add_constructor(None, _Loader._unknown_tag)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping that the file at `path` holds."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: the config cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the config is not UTF-8 text.") from error
    try:
        content = yaml.load(text, _Loader)
    except RecursionError as error:
        raise InputError(f"{path}: the config is nested too deeply to be read.") from error
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        if context := getattr(error, "context", None):
            problem = f"{context}, {problem}"
        raise InputError(f"{where}: {problem}.") from error
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"{path}: the config must be a mapping of key: value, and holds {kind}.")
    return content


def read_word(text: str) -> Any:
    """Return what a word of the command line means as a YAML scalar, `[list]` or `{mapping}`.

    A string comes back as it was typed: the shell has already taken the quotes.
    """
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    accidental = isinstance(value, dict | list) and text[0] not in "[{"
    typed = not text.strip() or isinstance(value, str) or value is UNSET or accidental
    return text if typed else value


def dump_yaml(content: dict[str, Any]) -> str:
    """Return YAML that `read_yaml` reads back as exactly `content`."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
