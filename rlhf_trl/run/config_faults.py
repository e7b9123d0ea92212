"""What is wrong with a config whose keys do not go together, or whose values a library refuses."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_trl.errors import InputError, key_named_in
from rlhf_trl.run import launch
from rlhf_trl.run.config_files import Key, Written
from rlhf_trl.run.config_types import Known, describe, fields_of

# What a config of `trl sft` and its like names the data with.
OF_TRL = ("dataset_name", "datasets", "dataset_config", "dataset_train_split", "dataset_test_split")
Choices = dict[Key, list[Any]]  # keys that decide what a block is, with the values that they need


def of_trl(values: Mapping[str, Any], file: str) -> str | None:
    """Return what an error says of a config of TRL's own commands; None: it is none of these."""
    keys = [key for key in OF_TRL if key in values]
    if not keys:
        return None
    return (
        f"{keys[0]} is a key of TRL's own configs; `rlhf-trl translate {file}` writes one for a "
        "recipe here"
    )


def missing(kind: Any, config: Written) -> str:
    """Return what is wrong where a config lacks a field of this type."""
    hint = of_trl(config.values, config.file)
    return f"is missing, and {hint}" if hint else f"is missing; write {describe(kind)}"


def settle_key_of_other_kind(
    config: Written,
    block: dict[str, Any],
    path: Key,
    kinds: Sequence[Any],
    unmet_by_kind: Sequence[Choices],
    chosen: Mapping[Key, Any],
) -> None:
    """Remove a key that the chosen kind of a block lacks, or refuse it where it was meant.

    An example: `dataset.eval_split` is a key of data with `source: path`, and the config says
    `source: gym`. If a base file has the key, and a later file or the command line the source, the
    key was meant for the source before, and is removed. If not, the user contradicts himself. A key
    that no kind has is left to the caller.

    Args:
        config: what files and command line write.
        block: the block, which is changed.
        path: the place of the key: ("dataset", "eval_split").
        kinds: the dataclasses that the block may be.
        unmet_by_kind: for each kind the choices that it needs and the config contradicts, with the
            values that it needs: {("dataset", "source"): ["path"]}; empty for the chosen kind.
        chosen: what the config has for each choice: {("dataset", "source"): "gym"}.
    """
    key = path[-1]
    needed: Choices = {}  # what the kinds that have this key need, and the config contradicts
    for kind, unmet_choices in zip(kinds, unmet_by_kind, strict=True):
        if key in fields_of(kind):
            needed |= unmet_choices
    if any(config.decided_after(choice, path) for choice in needed):  # written later than the key
        del block[key]
    elif needed:
        choice, values = next(iter(needed.items()))
        name = ".".join(choice)
        remedy = f"remove it, or write {name}: {' or '.join(values)}"
        config.fail(path, f"is not read with {name}: {chosen[choice]}; {remedy}")


def refusal_of(
    cls: type, values: Mapping[str, Any], error: Exception, config: Written, path: Key
) -> InputError:
    """Return the error about a dataclass that refuses its values: file, key and its message.

    Args:
        cls: the dataclass, of this package or of TRL.
        values: what it was to be made of.
        error: what it raised.
        config: what files and command line write.
        path: the place of the block; (): the whole config, in which the message may name a key.
    """
    message = " ".join(str(error).split())
    known = fields_of(cls)
    if not path and "num_generations" in known:
        from rlhf_trl.run.divisibility import unfit_batch

        values_or_defaults = {key: field.default for key, (_, field) in known.items()} | {**values}
        if unfit := unfit_batch(values_or_defaults, launch.world_size()):
            return InputError(f"{config.source((unfit.key,))}: {unfit.key} {unfit.sentence}")
    if not path and (key := _key_at_fault(message, known, values)):
        path = (key,)
    return InputError(f"{config.source(path)}: {'.'.join(path) or cls.__name__}: {message}")


def _key_at_fault(message: str, known: Known, values: Mapping[str, Any]) -> str | None:
    """Return which key a library's message is about, or None where it does not say.

    Messages of transformers have no backticks. There it is the first key of the config that the
    message spells, or else the first whose value the message spells.
    """
    if "`" in message:
        return key_named_in(message, known)
    words = re.findall(r"\w+", message)
    keys_spelled = [word for word in words if word in values]
    keys_of_spelled_values = [key for key, value in values.items() if value in words]
    return next(iter([*keys_spelled, *keys_of_spelled_values]), None)
