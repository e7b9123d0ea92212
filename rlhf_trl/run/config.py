"""From `--config x.yaml --key value ...` to checked dataclasses, or one sentence on what is wrong.

YAML file -> the files it `extends` -> command line -> types -> algorithm -> TRL. Everything that
can be checked without TRL, which takes seconds to import, is checked before it is imported.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import EnumType
from importlib import import_module
from itertools import takewhile
from json import dumps
from math import isnan
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, Union, get_type_hints
from typing import get_args as type_args
from typing import get_origin as type_origin

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, allowed, instead, nearest, option_name, refuse_repeated
from rlhf_trl.output import write_whole
from rlhf_trl.run.launch import cpu_settings, world_size
from rlhf_trl.run.yaml_loader import UNSET, dump_yaml, read_word, read_yaml

COMMAND_LINE = "command line"
# What TRL's own classes do not check, as the metadata of our fields say it.
RULES: dict[str, dict[str, Any]] = {
    key: {"range": wanted}
    for wanted, keys in {
        "1 or more": "per_device_train_batch_size per_device_eval_batch_size max_completion_length "
        "gradient_accumulation_steps steps_per_generation num_iterations max_length lora_r",
        "0 or more": "learning_rate weight_decay max_grad_norm seed",
        "a number above 0": "temperature eval_steps logging_steps save_steps",
    }.items()
    for key in keys.split()
}
_INTEGRATIONS = "transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK"
_BACKENDS, _MODES = "accelerate.utils.DynamoBackend", "torch._inductor.list_mode_options"
RULES |= {
    "report_to": {"choices": lambda: [*imported(_INTEGRATIONS), "all", "none"]},
    "lora_task_type": {"choices": lambda: [kind.value for kind in imported("peft.TaskType")]},
    "torch_compile_backend": {"choices": lambda: [b.value.lower() for b in imported(_BACKENDS)]},
    "torch_compile_mode": {"choices": lambda: [*imported(_MODES)()]},
}
# Fields that transformers has given another name; TRL's own defaults still use the old one.
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
# What TRL's own parser takes for a boolean on the command line.
BOOLEAN_WORDS = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), True),
    **dict.fromkeys(("no", "false", "f", "n", "0"), False),
}
# What to write for a value of a type; its name as that of a value is mostly the same.
REMEDIES = {
    **{bool: "true or false", int: "an integer", float: "a number", str: "a string"},
    **{list: "a list", dict: "a mapping", NoneType: "null", Any: "any value"},
}
NAMES = REMEDIES | {bool: "a boolean", float: "a float"}

Own = TypeVar("Own")
Trl = TypeVar("Trl")
Key = tuple[str, ...]  # the way to a key: ("dataset", "specs", "0", "name")
Known = Mapping[str, tuple[Any, Field]]  # the fields of a dataclass, each with its type


class Loaded(NamedTuple, Generic[Own, Trl]):
    """A checked configuration: the recipe's fields, TRL's, the model's, and what the user gave.

    `given` is one plain mapping with `extends` resolved and the command line folded in. `row` is
    what the algorithm makes of TRL's fields, where the recipe has one.
    """

    own: Own
    trl: Trl
    model: Any
    given: dict[str, Any]
    row: Any = None

    def save(self, path: str | Path) -> None:
        """Write `given` as YAML, whole or not at all; `--config PATH` then repeats the run."""
        write_whole(path, lambda part: part.write_text(dump_yaml(self.given), encoding="utf-8"))


def load_config(
    own: type[Own], trl: type[Trl] | str | None, argv: Sequence[str] | None = None
) -> Loaded[Own, Trl]:
    """Read the command line and the config it names.

    `own` is the dataclass of the recipe's own fields; one typed as a dataclass is a block. `trl` is
    TRL's config class; as a string (`GRPOConfig`, or a dotted path for a class of another module),
    it is imported only after all cheaper checks have passed. None: the recipe trains nothing, and a
    config has its own fields only. `argv` is by default `sys.argv[1:]`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & {*words}:
        from rlhf_trl.run.help import recipe_help

        class_name = getattr(trl, "__name__", trl or "").rpartition(".")[2]
        print(recipe_help(own, class_name, "all" in words))
        raise SystemExit(0)
    path, overrides = _read_command_line(words)
    config = _Config(path, RULES)
    for option, values in overrides:
        config.override(option, values)
    for old, new in RENAMED.items():
        config.rename(old, new)
    if "env" in config.values:
        config.fail(("env",), "is not read from a config; set environment variables in the shell")

    own_fields = fields_of(own)
    own_given = config.take(own_fields)
    own_run = config.build(own_given, own, ())
    if "algorithm" in own_fields:
        _check_algorithm(config, own_run)
    if trl is None:
        config.refuse_unknown(config.values, own_fields, ())
        return Loaded(own_run, None, None, {key: own_given[key] for key in config.values})

    trl_class, model_class = imported(trl), imported("ModelConfig")
    trl_fields, model_fields = fields_of(trl_class), fields_of(model_class)
    if twice := own_fields.keys() & (trl_fields.keys() | model_fields.keys()):
        raise TypeError(f"{own.__name__} declares fields that TRL has: {', '.join(sorted(twice))}")
    config.refuse_unknown(config.values, {**own_fields, **trl_fields, **model_fields}, ())
    trl_given, model_given = config.take(trl_fields), config.take(model_fields)
    checked = {**own_given, **trl_given, **model_given}
    _check_generation_batch(config, trl_given, trl_fields)
    settings = trl_given | cpu_settings(trl_given, world_size())
    for old, new in RENAMED.items():
        if settings.get(new) is None and {old, new} <= trl_fields.keys():
            settings[new] = trl_fields[old][1].default
    args, row = config.build(settings, trl_class, ()), None
    if hasattr(trl_class, "resolve"):
        row = trl_class.resolve(args, own_run.algorithm, own_run.formulation)
        args = row.args
    given = {key: checked[key] for key in config.values}
    return Loaded(own_run, args, config.build(model_given, model_class, ()), given, row)


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the mapping of a YAML file with everything it extends, without checking its keys."""
    return _Config(path).values


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Return what a command line with `--config PATH` gives, without checking its keys."""
    path, overrides = _read_command_line([*words])
    config = _Config(path)
    for option, value in overrides:
        config.override(option, value)

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else _plain(value)

    return plain(config.values)


def read_fields(
    path: str | Path,
    classes: Sequence[Any],
    ignore: Sequence[str] = (),
    words: Mapping[str, Mapping[Any, Any]] | None = None,
) -> dict[str, Any]:
    """Return the checked values of a YAML file whose keys belong to any of several dataclasses.

    The first of the `classes` that has a field decides its type; keys to `ignore` may hold
    anything. `words` has, by key, what takes the place of booleans that its type does not have.
    """
    config = _Config(path)
    for key in ignore:
        config.values.pop(key, None)
    for key, means in (words or {}).items():
        if isinstance(config.values.get(key), bool):
            config.values[key] = means[config.values[key]]
    known = {name: field for each in reversed(classes) for name, field in fields_of(each).items()}
    config.refuse_unknown(config.values, known, ())
    return config.check_block(config.values, {k: known[k] for k in config.values}, ())


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


class _Words(tuple[str, ...]):
    """What followed an option on the command line; the type of its field says what it means."""

    def untyped(self) -> Any:
        """Return the value these words have where no type is known; a bare option is true."""
        values = [read_word(word) for word in self] or [True]
        return values[0] if len(values) == 1 else values


def _read_command_line(argv: list[str]) -> tuple[str, list[tuple[str, _Words]]]:
    """Return the path after `--config`, and the other options in order."""
    options, equals = [], "="  # a value behind = is all that an option has
    for word in argv:
        if re.match("--?$|-[A-Za-z]", word):
            raise InputError(f"{COMMAND_LINE}: {word} is not an option; options start with --.")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif equals:
            raise InputError(f"{COMMAND_LINE}: {word!r} belongs to no option; write --key value.")
        else:
            options[-1][1].append(word)
    refuse_repeated(argv, several=("config",))  # which has a sentence of its own
    match [words for name, words in options if name == "config"]:
        case [[str(path)]] if path:
            return path, [(name, _Words(words)) for name, words in options if name != "config"]
    raise InputError(f"{COMMAND_LINE}: give exactly one config file, as --config PATH.")


def _read_files(path: Path, extended_by: tuple[Path, ...] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Return (file, content) for a config and all it extends, the deepest base first."""
    chain = " extends ".join(os.path.normpath(each) for each in (*extended_by, path))
    if path.resolve() in [each.resolve() for each in extended_by]:
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


class _Config:
    """The merged mapping, what each file and the command line gave to it, and the checks on it."""

    def __init__(self, path: str | Path, rules: Mapping[str, Mapping[str, Any]] | None = None):
        self.values: dict[str, Any] = {}
        self.rules = rules or {}  # beside those at the fields
        self.file = str(path)
        # (file, every key it writes), the deepest base first, the command line last
        self.layers: list[tuple[str, dict[Key, Any]]] = []
        for file, content in _read_files(Path(path)):
            self.layers.append((file, _keys(content)))
            _merge(self.values, content, file)
        self.layers.append((COMMAND_LINE, {}))

    def source(self, path: Key) -> str:
        """Return where the key at `path`, or the block it is missing from, was last written."""
        prefixes = [path[:n] for n in range(len(path), 0, -1)]
        if not self.layers[-1][1].keys().isdisjoint(prefixes):  # it replaces blocks whole
            return COMMAND_LINE
        wrote = (file for p in prefixes for file, keys in reversed(self.layers) if p in keys)
        return next(wrote, self.file)

    def fail(self, path: Key, message: str) -> NoReturn:
        """Raise an `InputError` about the key at `path`."""
        raise InputError(f"{self.source(path)}: {'.'.join(path)} {message}.")

    def value(self, path: Key, default: Any = None) -> Any:
        """Return the plain value at `path`."""
        node: Any = self.values
        for key in path:
            if (node := _plain(node).get(key, UNSET)) is UNSET:
                return default
        return _plain(node)

    def override(self, option: str, new: Any) -> None:
        """Set one option of the command line; dots lead into blocks, mappings and lists."""
        head, *tail = option.split(".")
        head = head.replace("-", "_")
        if head.startswith("no_") and not tail and not new:
            head, new = head.removeprefix("no_"), False
        path, written, node = (head, *tail), self.layers[-1][1], self.values
        for depth, place in enumerate(path):
            here = f"{COMMAND_LINE}: --{option}: {'.'.join(path[:depth])} is"
            if isinstance(node, list):
                if not place.isdecimal() or int(place) >= len(node):
                    raise InputError(
                        f"{here} a list of {len(node)}, and {place!r} is no index (the first is 0)."
                    )
                place = int(place)
            elif not isinstance(node, dict):
                raise InputError(f"{here} neither a mapping nor a list.")
            if depth == len(path) - 1:
                node[place] = new
                break
            child = _plain(node[place] if isinstance(node, list) else node.get(place))
            if child is None:
                child = written[path[: depth + 1]] = {}
            node[place] = node = child
        written |= {path: _plain(new), **_keys(_plain(new), path)}

    def rename(self, old: str, new: str) -> None:
        """Take the old name of a key for the new one; what was written later wins."""
        if old not in self.values:
            return
        value, layers = self.values.pop(old), [self._layer((name,)) for name in (old, new)]
        if new not in self.values or layers[0] > layers[1]:
            self.values[new] = value
            self.layers[layers[0]][1][new,] = _plain(value)
        elif layers[0] == layers[1] and _plain(value) != _plain(self.values[new]):
            self.fail((old,), f"is the old name of {new}, which has another value; remove it")

    def _layer(self, path: Key) -> int:
        """Return the place of what last wrote the key or part of it; -1: nobody did."""
        wrote = [any(p[: len(path)] == path for p in keys) for _, keys in self.layers]
        return max((n for n, did in enumerate(wrote) if did), default=-1)

    def _since(self, path: Key) -> int:
        """Return the place since which a key has had its value; -1: nobody wrote it."""
        wrote = [(n, keys[path]) for n, (_, keys) in enumerate(self.layers) if path in keys]
        same = takewhile(lambda each: each[1] == wrote[-1][1], reversed(wrote))
        return min((n for n, _ in same), default=-1)

    def kind_of(self, value: dict[str, Any], kinds: list[Any], path: Key) -> Any:
        """Return which of several dataclasses a block is: the first whose tags all hold.

        Tags are the fields typed `Literal`, and the keys outside the block in `ONLY_WITH`. Keys
        that were written for another dataclass before this one was chosen are removed.
        """
        if len(kinds) == 1:
            return kinds[0]
        tags = [_tags(kind, path) for kind in kinds]
        given = {t: self.value(t, default=v[0]) for each in reversed(tags) for t, v in each.items()}
        for tag in tags[0]:
            allowed = [*dict.fromkeys(v for each in tags for v in each.get(tag, ()))]
            if len(tag) > len(path) and given[tag] not in allowed:
                self.refuse_choice(given[tag], allowed, tag)
        missed = [{t: v for t, v in each.items() if given[t] not in v} for each in tags]
        chosen = missed.index({}) if {} in missed else 0
        known = fields_of(kinds[chosen])
        for key in [key for key in value if (*path, key) not in tags[chosen]]:
            others = {
                tag: allowed
                for kind, each in zip(kinds, missed, strict=True)
                for tag, allowed in each.items()
                if key in fields_of(kind)
            }
            # another source, the first tag, starts the block anew
            choices = [next(iter(tags[chosen]))] if key in known else others
            if any(self._since(tag) > self._layer((*path, key)) for tag in choices):
                del value[key]
            elif key not in known and others:
                tag, allowed = next(iter(others.items()))
                remedy = f"remove it, or write {'.'.join(tag)}: {' or '.join(allowed)}"
                self.fail((*path, key), f"is not read with {'.'.join(tag)}: {given[tag]}; {remedy}")
        return kinds[chosen]

    def refuse_unknown(self, values: dict[str, Any], known: Known, path: Key) -> None:
        """Stop at the first key of `values` that is not one of the `known`."""
        for key in values:
            if key not in known:
                near = nearest(key, known)
                if not near and len(known) <= 12:
                    near = f" (known here: {', '.join(known)})"
                self.fail((*path, key), f"is not a known key{near}")

    def take(self, known: Known) -> dict[str, Any]:
        """Return the checked values of those top-level keys that are `known`."""
        values = {key: value for key, value in self.values.items() if key in known}
        return self.check_block(values, known, ())

    def check_block(self, values: dict[str, Any], known: Known, path: Key) -> dict[str, Any]:
        """Return the plain values of a block, each checked against the type of its field."""
        self.refuse_unknown(values, known, path)
        for name, (kind, field) in known.items():
            if field.default is MISSING and field.default_factory is MISSING and name not in values:
                self.fail((*path, name), f"is missing; write {_describe(kind)}")
        checked = {}
        # what has choices decides what else may be given
        for key in sorted(values, key=lambda key: "choices" not in known[key][1].metadata):
            value, (kind, field) = values[key], known[key]
            checked[key] = self.check(value, kind, (*path, key))
            rules = {} if path else self.rules.get(key, {})
            for one in checked[key] if isinstance(checked[key], list) else [checked[key]]:
                if wanted := instead(one, {**rules, **field.metadata}):
                    self.fail((*path, key), f"is {show(one)}; write {wanted}")
        return checked

    def refuse_choice(self, value: Any, allowed: Sequence[Any], path: Key) -> NoReturn:
        """Raise an `InputError` about a value that is none of the allowed ones."""
        self.fail(path, f"is {show(value)}; write {_one_of(allowed)}{nearest(value, allowed)}")

    def check(self, value: Any, kind: Any, path: Key) -> Any:
        """Return `value` as a plain value (str, int, list, dict ...) that fits the type `kind`."""
        members = members_of(kind)
        if isinstance(value, _Words):
            value = self._mean(value, kind, path)
        if isinstance(value, str) and list[str] in members and str not in members:
            value = [value]  # one string is a list of one, as in TRL's own parser
        member = next((m for m in members if _fits(value, m)), UNSET)
        if member is UNSET:
            name = f", {NAMES[type(value)]}" if value is not None else ""
            self.fail(path, f"is {show(value)}{name}; write {_remedy(value, kind)}")
        if is_dataclass(member):
            member = self.kind_of(value, [m for m in members if is_dataclass(m)], path)
            return self.check_block(value, fields_of(member), path)
        item = (type_args(member) or (Any,))[-1]  # TRL's tuples are of one type, too
        if isinstance(value, list):
            return [self.check(v, item, (*path, str(i))) for i, v in enumerate(value)]
        if isinstance(value, dict):
            return {key: self.check(v, item, (*path, key)) for key, v in value.items()}
        if (allowed := choices_of(member)) and value not in allowed:
            self.refuse_choice(value, allowed, path)
        if isinstance(value, float) and isnan(value):
            self.fail(path, "is not a number (nan); write one")
        return float(value) if member is float else value

    def _mean(self, words: _Words, kind: Any, path: Key) -> Any:
        """Return the plain value that command-line words have for a field of this type."""
        members = members_of(kind)
        if not words and bool not in members and Any not in members:
            self.fail(path, f"has no value; write {_describe(kind)}")
        if not words or Any in members:
            return words.untyped()
        lists = [(type_args(m) or (Any,))[0] for m in members if shape_of(m) in (list, tuple)]
        if len(words) == 1:
            value = read_word(words[0])
            if bool in members and str not in members:
                value = BOOLEAN_WORDS.get(words[0].lower(), value)
            fitting = [v for v in (value, words[0]) if any(_fits(v, m) for m in members)]
            if fitting or not lists:
                return [*fitting, value][0]
        if not lists:
            self.fail(path, f"takes one value and got {len(words)}: {' '.join(words)}")
        return [self._mean(_Words([word]), lists[0], path) for word in words]

    def build(self, value: Any, kind: Any, path: Key) -> Any:
        """Turn a checked plain value into the dataclasses and enums that its type `kind` names."""
        members = members_of(kind)
        member = next(m for m in members if _fits(value, m))
        if is_dataclass(member):
            member = self.kind_of(value, [m for m in members if is_dataclass(m)], path)
            known = fields_of(member)
            inner = {k: self.build(v, known[k][0], (*path, k)) for k, v in value.items()}
            try:
                return member(**inner)
            except ValueError as error:
                message = " ".join(str(error).split())
                words = re.findall(r"\w+", message)
                named = [word for word in words if word in value]
                named += [key for key, one in value.items() if one in words]
                path = path or tuple(named[:1])
                name = ".".join(path) or member.__name__
                raise InputError(f"{self.source(path)}: {name}: {message}") from error
        if isinstance(value, list):
            item = (type_args(member) or (Any,))[0]
            built = [self.build(v, item, (*path, str(i))) for i, v in enumerate(value)]
            return tuple(built) if shape_of(member) is tuple else built
        if isinstance(value, dict):
            return _copy(value)
        return member(value) if isinstance(member, EnumType) else value


def _merge(base: dict[str, Any], new: dict[str, Any], file: str, path: Key = ()) -> None:
    """Lay the mapping of one file over those that it extends."""
    for key, value in new.items():
        if value is UNSET and key not in base:
            name = ".".join((*path, key))
            near = nearest(key, base)
            raise InputError(f"{file}: {name} is !unset, but no base file sets it{near}.")
        if value is UNSET:
            del base[key]
        elif isinstance(value, dict):
            if not isinstance(base.get(key), dict):
                base[key] = {}
            _merge(base[key], value, file, (*path, key))
        else:
            base[key] = _copy(value)


def _keys(content: Any, path: Key = ()) -> dict[Key, Any]:
    """Return everything that a mapping writes, by its key."""
    found = {}
    for key, value in content.items() if isinstance(content, dict) else ():
        found |= {(*path, key): value, **_keys(value, (*path, key))}
    return found


def _tags(kind: Any, path: Key) -> dict[Key, list[Any]]:
    """Return what chooses a dataclass among those that a block may be, and its allowed values."""
    literals = {(*path, n): choices_of(k) for n, (k, _) in fields_of(kind).items() if choices_of(k)}
    return literals | {(name,): list(v) for name, v in getattr(kind, "ONLY_WITH", {}).items()}


def _plain(value: Any) -> Any:
    return value.untyped() if isinstance(value, _Words) else value


def _copy(value: Any) -> Any:
    """Copy a YAML value; unlike deepcopy, it parts what two aliases of an anchor share."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


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


def _fits(value: Any, member: Any) -> bool:
    """Whether a plain value has the shape of one alternative of a type."""
    if choices := choices_of(member):
        return type(value) in {type(choice) for choice in choices}
    shape = shape_of(member)
    if shape is tuple:
        return isinstance(value, list) and len(value) == len(type_args(member))
    if shape not in REMEDIES:
        raise TypeError(f"a config field cannot be typed {member}")
    return shape in (Any, type(value)) or (shape is float and type(value) is int)


def _describe(kind: Any) -> str:
    """Return what to write for a value of this type."""

    def words(member: Any) -> str:
        if choices := choices_of(member):
            return _one_of(choices)
        if shape_of(member) is tuple:
            return f"a list of {len(type_args(member))}"
        return REMEDIES[shape_of(member)]

    return " or ".join(dict.fromkeys(map(words, members_of(kind))))


def _remedy(value: Any, kind: Any) -> str:
    members = set(members_of(kind))
    if int in members and isinstance(value, float) and value.is_integer():
        return f"{int(value)}"
    if str in members and {str, NoneType} >= members and isinstance(value, bool | int | float):
        return f'it in quotes ("{show(value)}")'
    return _describe(kind)


def _one_of(choices: Sequence[Any]) -> str:
    words = [choice if isinstance(choice, str) else show(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def show(value: Any) -> str:
    """Return a value as JSON, cut where it is long."""
    text = dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_algorithm(config: _Config, run: Any) -> None:
    """Refuse an algorithm that is unknown, and loss fields that it does not read."""
    formulation = getattr(run, "formulation", "chapter")
    try:
        row = algorithms.formulation(run.algorithm, formulation)
    except InputError as error:
        key = "formulation" if run.algorithm in algorithms.ALGORITHMS else "algorithm"
        raise InputError(f"{config.source((key,))}: {error}") from error
    given = {key: _plain(value) for key, value in config.values.items()}
    names = allowed(fields_of(type(run))["algorithm"][1].metadata) or algorithms.ALGORITHMS
    known = {name: algorithms.ALGORITHMS[name].formulations.get(formulation) for name in names}
    others = {name: each for name, each in known.items() if each}
    try:
        algorithms.resolve(row, given, others)
    except algorithms.FieldError as error:
        config.fail((error.field,), error.message)
    except InputError as error:
        raise InputError(f"{config.file}: {error}") from error


def _check_generation_batch(config: _Config, args: dict[str, Any], known: Known) -> None:
    """Say which num_generations divide the generation batch, where the given one does not."""
    if not {"num_generations", "generation_batch_size", "steps_per_generation"} <= known.keys():
        return

    def value(name: str) -> Any:
        return args.get(name, known[name][1].default)

    batch, how = value("generation_batch_size"), "generation_batch_size"
    if batch is None:
        each, processes = value("per_device_train_batch_size"), world_size()
        names = ("steps_per_generation", "gradient_accumulation_steps")
        steps = next((name for name in names if value(name) is not None), names[1])
        batch = each * processes * value(steps)
        many = f"{processes} process{'es' * (processes > 1)}"
        how = f"per_device_train_batch_size {each} x {many} x {steps} {value(steps)}"
    if batch <= 0 or not (generations := value("num_generations")) or batch % generations:
        divisors = [str(n) for n in range(2, batch + 1) if batch % n == 0]
        remedy = f"write {_one_of(divisors)}, or change" if divisors else "raise"
        shown = f"is {show(value('num_generations'))}, which does not divide the generation batch"
        config.fail(("num_generations",), f"{shown} of {batch} ({how}); {remedy} the batch")


def imported(name: Any) -> Any:
    """Return the class that a dotted path names (in `trl` where it has no dot), or the class."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module or "trl"), attribute)
