"""From `--config x.yaml --key value ...` to checked dataclasses, or one sentence on what is wrong.

YAML file -> the files it `extends` -> command line -> types -> algorithm -> TRL. Everything that
can be checked without TRL, which takes seconds to import, is checked before it is imported.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from enum import EnumType
from math import isnan
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar
from typing import get_args as type_args

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, allowed, instead, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.run import launch
from rlhf_trl.run.config_files import (
    Key,
    Words,
    Written,
    copied,
    plain,
    read_command_line,
    read_config,
)
from rlhf_trl.run.config_types import (
    NAMES,
    RENAMED,
    Known,
    choices_of,
    fields_of,
    fits,
    imported,
    members_of,
    one_of,
    recipe_defaults,
    remedy,
    shape_of,
    show,
)
from rlhf_trl.run.yaml_loader import dump_yaml, read_word

__all__ = ["Loaded", "load_config", "read_config"]

# What TRL's own classes do not check, as the metadata of our fields say it.
RULES: dict[str, dict[str, Any]] = {
    key: {"range": wanted}
    for wanted, keys in {
        "1 or more": "per_device_train_batch_size per_device_eval_batch_size max_completion_length "
        "gradient_accumulation_steps steps_per_generation num_iterations max_length lora_r "
        "lora_alpha num_generations_eval generation_batch_size save_total_limit",
        "0 or more": "weight_decay max_grad_norm value_warmup_steps top_k adam_epsilon "
        "dataloader_num_workers neftune_noise_alpha eval_delay",
        "a number above 0": "eval_steps logging_steps save_steps repetition_penalty "
        "num_train_epochs",
        "a number above 0, at most 1": "top_p",
        "a number between 0 and 1": "min_p",
        "a number of at least 0 and below 1": "adam_beta1 adam_beta2 lora_dropout",
        "a number between 0.001 and 1000": "temperature",
        "a number between 0 and 1000000": "learning_rate value_learning_rate",
        "a whole number from 0 to 4294967295": "seed data_seed",
    }.items()
    for key in keys.split()
}
_INTEGRATIONS = "transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK"
_BACKENDS, _MODES = "accelerate.utils.DynamoBackend", "torch._inductor.list_mode_options"
RULES |= algorithms.EARLY
RULES |= {
    "report_to": {"choices": lambda: [*imported(_INTEGRATIONS), "all", "none"]},
    "lora_task_type": {"choices": lambda: [kind.value for kind in imported("peft.TaskType")]},
    "torch_compile_backend": {"choices": lambda: [b.value.lower() for b in imported(_BACKENDS)]},
    "torch_compile_mode": {"choices": lambda: [*imported(_MODES)()]},
}
Own = TypeVar("Own")
Trl = TypeVar("Trl")


class Loaded(NamedTuple, Generic[Own, Trl]):
    """A checked configuration."""

    own: Own  # the recipe's fields
    trl: Trl  # TRL's; None of a recipe that trains nothing
    model: Any  # TRL's ModelConfig, or None
    given: dict[str, Any]  # what files and command line say: one mapping, with `extends` resolved
    row: Any = None  # what the algorithm makes of TRL's fields, where the recipe has one

    def save(self, path: str | Path) -> None:
        """Write `given` as YAML, whole or not at all; `--config PATH` then repeats the run."""
        write_whole(path, lambda part: part.write_text(dump_yaml(self.given), encoding="utf-8"))


def load_config(
    own: type[Own], trl: type[Trl] | str | None, argv: Sequence[str] | None = None
) -> Loaded[Own, Trl]:
    """Read the command line and the config it names.

    Args:
        own: the dataclass of the recipe's own fields; a field typed as a dataclass is a block.
        trl: TRL's config class; as a string (`GRPOConfig`, or a dotted path for a class of another
            module), it is imported only after all cheaper checks have passed. None: the recipe
            trains nothing, and a config has its own fields only.
        argv: the words of the command line; None: `sys.argv[1:]`.

    Raises:
        InputError: a field is unknown, of another kind, or contradicts another.
        SystemExit: the words ask for help, which is printed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & {*words}:
        from rlhf_trl.run.help import recipe_help

        path = trl if isinstance(trl, str) else getattr(trl, "__name__", "")  # "" for None
        class_name = path.rpartition(".")[2]
        print(recipe_help(own, class_name, everything="all" in words))
        raise SystemExit(0)
    path, overrides = read_command_line(words)
    config = CheckedConfig(path, RULES)
    if overrides:
        from rlhf_trl.run.command_words import override

        for option, values in overrides:
            override(config, option, values)
    for old, new in RENAMED.items():
        config.rename(old, new)
    if "env" in config.values:
        config.fail(("env",), "is not read from a config; set environment variables in the shell")

    own_fields = fields_of(own)
    own_values = config.take(own_fields)
    own_run = config.build(own_values, own, path=())
    if "algorithm" in own_fields:
        _check_algorithm(config, own_run)
    if trl is None:
        config.refuse_unknown(config.values, own_fields, path=())
        in_written_order = {key: own_values[key] for key in config.values}
        return Loaded(own_run, trl=None, model=None, given=in_written_order)
    return _with_trl(config, own_run, own_values, trl)


def _with_trl(
    config: "CheckedConfig", own_run: Any, own_values: dict[str, Any], trl: type | str
) -> Loaded:
    """Return a whole configuration: the recipe's own fields are checked already, TRL's here.

    Args:
        config: what files and command line write.
        own_run: the recipe's own fields.
        own_values: what `config` writes of these, as plain values.
        trl: TRL's config class, as `load_config` takes it.
    """
    own = type(own_run)
    own_fields = fields_of(own)
    trl_class, model_class = imported(trl), imported("ModelConfig")
    trl_fields, model_fields = fields_of(trl_class), fields_of(model_class)
    # a recipe and our config class both declare these; the class gets the recipe's values below
    shared = trl_fields.keys() & {"algorithm", "formulation"}
    if twice := own_fields.keys() & (trl_fields.keys() - shared | model_fields.keys()):
        raise TypeError(f"{own.__name__} declares fields that TRL has: {', '.join(sorted(twice))}")
    config.refuse_unknown(config.values, {**own_fields, **trl_fields, **model_fields}, path=())
    trl_values, model_values = config.take(trl_fields), config.take(model_fields)
    settings = _trl_settings(trl_class, trl_values)
    settings |= {name: getattr(own_run, name) for name in shared}
    args = config.build(settings, trl_class, path=())
    row = None
    if hasattr(trl_class, "resolve"):  # a class of ours
        try:
            row = trl_class.resolve(args)  # the algorithm's row, and what it makes of the fields
            if row.algorithm is None:  # TRL's own loss with settings that are no row's
                imported("rlhf_trl.run.stock_words.check_stock_words")(args)
        except algorithms.FieldError as error:
            config.fail((error.field,), error.message)
    checked = {**own_values, **trl_values, **model_values}
    in_written_order = {key: checked[key] for key in config.values}
    model = config.build(model_values, model_class, path=())
    return Loaded(own_run, args, model, given=in_written_order, row=row)


def _trl_settings(trl_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what TRL's config class gets: the values of a config over the defaults of recipes."""
    settings = recipe_defaults(trl_class) | {**values}
    settings |= launch.cpu_settings(values, launch.world_size())
    fields = fields_of(trl_class)
    for old, new in RENAMED.items():  # where TRL has both, the old one's default counts
        if settings.get(new) is None and {old, new} <= fields.keys():
            settings[new] = fields[old][1].default
    return settings


class CheckedConfig(Written):
    """What files and the command line write, and the checks on it."""

    def __init__(self, path: str | Path, rules: Mapping[str, Mapping[str, Any]] | None = None):
        super().__init__(path)
        self.rules = rules or {}  # beside those at the fields

    def kind_of(self, block: dict[str, Any], kinds: list[Any], path: Key) -> Any:
        """Return which of several dataclasses a block is: the first whose choices all hold.

        Choices are the fields typed `Literal` (such as `source`), and the keys outside the block in
        `ONLY_WITH` (such as `algorithm`). A key of the block that goes with another choice is an
        error, unless the choice was written later than the key, which then does not count.
        """
        if len(kinds) == 1:
            return kinds[0]
        # by kind, its choices and the values that each may have: ("dataset", "source"): ["path"]
        choices_by_kind = [_choices(kind, path) for kind in kinds]
        defaults: dict[Key, Any] = {}  # of each choice, by the first kind that has it
        for choices in choices_by_kind:
            for choice, values in choices.items():
                defaults.setdefault(choice, values[0])
        chosen = {choice: self.value(choice, default) for choice, default in defaults.items()}
        # Refuse a value that no kind takes. The first kind has the choices of all kinds (`source`);
        # a choice of others only is a key that the first kind does not read, and comes below.
        for choice in choices_by_kind[0]:
            # keys outside the block, such as `algorithm`, are checked elsewhere
            is_in_block = len(choice) > len(path)
            values = [value for choices in choices_by_kind for value in choices.get(choice, ())]
            if is_in_block and chosen[choice] not in values:
                self.refuse_choice(chosen[choice], [*dict.fromkeys(values)], choice)
        unmet_by_kind = [
            {choice: values for choice, values in choices.items() if chosen[choice] not in values}
            for choices in choices_by_kind
        ]
        fitting = [kind for kind, unmet in zip(kinds, unmet_by_kind, strict=True) if not unmet]
        kind = fitting[0] if fitting else kinds[0]  # whose fields then tell what is wrong
        unread = [key for key in block if key not in fields_of(kind)]
        if unread:
            from rlhf_trl.run.config_faults import settle_key_of_other_kind

            for key in unread:
                settle_key_of_other_kind(self, block, (*path, key), kinds, unmet_by_kind, chosen)
        return kind

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
                from rlhf_trl.run.config_faults import missing

                self.fail((*path, name), missing(kind, self))
        checked = {}
        # fields with choices (such as `algorithm`) first: they decide what other fields may be
        for key in sorted(values, key=lambda key: "choices" not in known[key][1].metadata):
            value, (kind, field) = values[key], known[key]
            if value is not None:  # a block that few configs have is imported only for these
                kind = imported(field.metadata.get("block", kind))
            checked[key] = self.check(value, kind, (*path, key))
            rules = {} if path else self.rules.get(key, {})  # TRL's fields are at the top level
            items = checked[key] if isinstance(checked[key], list) else [checked[key]]
            for item in items:
                if wanted := instead(item, {**rules, **field.metadata}):
                    self.fail((*path, key), f"is {show(item)}; write {wanted}")
        return checked

    def refuse_choice(self, value: Any, choices: Sequence[Any], path: Key) -> NoReturn:
        """Raise an `InputError` about a value that is none of the choices."""
        self.fail(path, f"is {show(value)}; write {one_of(choices)}{nearest(value, choices)}")

    def check(self, value: Any, kind: Any, path: Key) -> Any:
        """Return `value` as a plain value (str, int, list, dict ...) that fits the type `kind`.

        The first alternative of the type that it fits is taken, and then what it contains is
        checked. `path` is its place in the config, for errors.
        """
        value, member = self._read_as(value, kind, path)
        if is_dataclass(member):  # where a field takes several, as `dataset:`, its keys tell which
            blocks = [member for member in members_of(kind) if is_dataclass(member)]
            return self.check_block(value, fields_of(self.kind_of(value, blocks, path)), path)
        # The last argument of a type: the items of list[X], the values of dict[str, X], and those
        # of tuple[X, X], as TRL has no tuple of several types.
        item_kind = (type_args(member) or (Any,))[-1]
        if isinstance(value, list):
            return [self.check(item, item_kind, (*path, str(i))) for i, item in enumerate(value)]
        if isinstance(value, dict):
            return {key: self.check(item, item_kind, (*path, key)) for key, item in value.items()}
        if (choices := choices_of(member)) and value not in choices:
            self.refuse_choice(value, choices, path)
        if isinstance(value, float) and isnan(value):
            self.fail(path, "is not a number (nan); write one")
        return float(value) if member is float else value

    def _read_as(self, value: Any, kind: Any, path: Key) -> tuple[Any, Any]:
        """Return a plain value, and the first alternative of the type `kind` that it fits.

        What follows an option on the command line is `Words`; the type tells what they mean.
        """
        members = members_of(kind)
        if isinstance(value, Words):
            from rlhf_trl.run.command_words import value_of_words

            value = value_of_words(self, value, kind, path)
        if isinstance(value, str) and list[str] in members and str not in members:
            value = [value]  # one string is a list of one, as in TRL's own parser
        fitting = [member for member in members if fits(value, member)]
        if isinstance(value, str) and path[-1].endswith("_kwargs"):
            # TRL types these as text, too, which it reads as a mapping in JSON; refuse other text
            is_mapping = isinstance(read_word(value), dict)
            fitting = fitting if is_mapping else []
        if not fitting:
            name = f", {NAMES[type(value)]}" if value is not None else ""
            self.fail(path, f"is {show(value)}{name}; write {remedy(value, kind)}")
        return value, fitting[0]

    def build(self, value: Any, kind: Any, path: Key) -> Any:
        """Turn a value that `check` returned into the dataclasses and enums that `kind` names.

        A dataclass may refuse its arguments; the `InputError` about it begins at `path`.
        """
        members = members_of(kind)
        member = next(m for m in members if fits(value, m))  # `check` has seen to it that one does
        if is_dataclass(member):
            member = self.kind_of(value, [m for m in members if is_dataclass(m)], path)
            known = fields_of(member)
            arguments = {}
            for key, inner in value.items():
                field_kind, _ = known[key]
                arguments[key] = self.build(inner, field_kind, (*path, key))
            try:
                return member(**arguments)
            except (ValueError, ZeroDivisionError) as error:  # num_generations: 0
                from rlhf_trl.run.config_faults import refusal_of

                raise refusal_of(member, value, error, self, path) from error
        if isinstance(value, list):
            item_kind = (type_args(member) or (Any,))[0]  # all items are of one, as in `check`
            built = [self.build(item, item_kind, (*path, str(i))) for i, item in enumerate(value)]
            return tuple(built) if shape_of(member) is tuple else built
        if isinstance(value, dict):
            return copied(value)  # TRL may change its own, and `Loaded.given` keeps what is written
        return member(value) if isinstance(member, EnumType) else value


def _choices(kind: Any, path: Key) -> dict[Key, list[Any]]:
    """Return the keys that decide whether a block is of this `kind`, with the values it needs."""
    choices: dict[Key, list[Any]] = {}
    for name, (field_kind, _) in fields_of(kind).items():
        if values := choices_of(field_kind):
            choices[*path, name] = values
    for name, values in getattr(kind, "ONLY_WITH", {}).items():
        choices[name,] = list(values)
    return choices


def _check_algorithm(config: CheckedConfig, run: Any) -> None:
    """Refuse an algorithm that is unknown, and loss fields that it does not read.

    `run` has the recipe's own fields, `config` all that is written.
    """
    formulation = getattr(run, "formulation", "chapter")
    try:
        row = algorithms.formulation(run.algorithm, formulation)
    except InputError as error:
        key = "formulation" if run.algorithm in algorithms.ALGORITHMS else "algorithm"
        raise InputError(f"{config.source((key,))}: {error}") from error
    values = {key: plain(value) for key, value in config.values.items()}
    _, algorithm_field = fields_of(type(run))["algorithm"]
    names = allowed(algorithm_field.metadata) or algorithms.ALGORITHMS
    others = {}  # the recipe's rows in this formulation: an error says which one reads the field
    for name in names:
        other = algorithms.ALGORITHMS[name].formulations.get(formulation)
        if other:
            others[name] = other
    # stock TRL computes formulation trl, so the row may leave TRL's own loss fields unread
    may_be_unread = values if formulation == "trl" else ()
    try:
        algorithms.resolve(row, values, others, passing=may_be_unread)
    except algorithms.FieldError as error:
        config.fail((error.field,), error.message)
    except InputError as error:
        raise InputError(f"{config.file}: {error}") from error
