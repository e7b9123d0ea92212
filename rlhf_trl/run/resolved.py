"""Every value that a config resolves to: where it comes from, and what differs between two."""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, is_dataclass
from enum import Enum
from typing import Any

from rlhf_trl.algorithms.parameters import LOSS_FIELDS
from rlhf_trl.evaluation import tables
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import COMMAND_LINE, Key, Written
from rlhf_trl.run.config_types import RENAMED, fields_of, recipe_defaults, show
from rlhf_trl.run.differences import UNSET, differences
from rlhf_trl.run.options import join_options, read_options, written_by
from rlhf_trl.run.shipped import existing_config
from rlhf_trl.run.stages import stage_of_config

ROW = "row."  # what keys of the algorithm's row begin with
MEANINGS = {
    "loss": r"algorithm|formulation|row\..*|disable_dropout|.*_only_loss|mask_truncated.*",
    "model": r"model_.*|value_model_.*|dtype|attn_implementation|use_peft|lora_.*|load_in_.*",
    "data": r"dataset\..*|reward_.*|num_generations|temperature|top_[pk]|min_p|max_samples|seed|"
    r"data_seed|demonstrator.*|chat_template.*|strategy|ties|answers|eos_token|pad_token",
    "length": r"max_.*length|max_steps|num_train_epochs|per_device_train_.*|truncation_mode|"
    r"gradient_accumulation_steps|generation_batch_size|steps_per_generation|num_iterations|"
    r"overlong|packing.*",
    "optimizer": r"learning_rate|lr_.*|warmup.*|optim.*|adam_.*|weight_decay|max_grad_norm",
    "machine": r"use_cpu|.*bf16.*|.*fp16.*|tf32|expect.*|dataloader_.*|use_vllm|vllm_.*|ddp_.*|"
    r"fsdp.*|deepspeed.*|torch_.*|.*_checkpointing.*|use_liger_.*|per_device_eval_.*|"
    r"read_prompts_once|skip_zero_advantage|share_prompts",
    "reports and the rest": ".*",
}
"""What a field is about, by patterns of its name; the first one that fits counts."""


@dataclass(frozen=True)
class Setting:
    """A value of a resolved config."""

    value: Any
    source: str  # the file, the command line or the default that it comes from
    is_written: bool  # whether a file or the command line has it


def settings(config: str, words: Sequence[str] = ()) -> dict[str, Setting]:
    """Return every value that a recipe reads, by dotted key; those of the row begin with `row.`.

    Args:
        config: path of a config of a recipe, or name of one that ships.
        words: further options of the recipe.
    """
    path = str(existing_config(config, "configs"))
    command_line = join_options(words, ["--config", path])
    stage = stage_of_config(read_options(command_line), path)
    loaded = stage.load(command_line)
    written = written_by(command_line)
    for old, new in RENAMED.items():
        written.rename(old, new)
    resolved: dict[str, Setting] = {}
    for part in filter(None, (loaded.own, loaded.trl, loaded.model)):
        for way, value, field in _values(part):
            writer = written.last_writer(way)
            source = _default_source(loaded, way, value, field)
            if writer >= 0:
                source = _writer(written, writer)
            resolved[".".join(way)] = Setting(value, source, writer >= 0)
    if loaded.row is not None:
        for name in loaded.row.row.parts:
            part = getattr(loaded.row.row, name)
            value = part if isinstance(part, str) else part.__name__
            resolved[ROW + name] = Setting(value, loaded.row.label, is_written=True)
    return resolved


def _values(part: Any, above: Key = ()) -> Iterator[tuple[Key, Any, Field]]:
    """Return the way to each field of a dataclass and of the blocks in it, its value and itself."""
    for name, (_, field) in fields_of(type(part)).items():
        if name in RENAMED:
            continue
        value = getattr(part, name)
        if is_dataclass(value):
            yield from _values(value, (*above, name))
        else:
            yield (*above, name), _plain(value), field


def _plain(value: Any) -> Any:
    """Return a value of a config class as a config would have it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return asdict(value) if is_dataclass(value) else value


def _writer(written: Written, writer: int) -> str:
    """Return which file it is that wrote a key, or that it was the command line."""
    name = written.writers[writer]
    if name == COMMAND_LINE:
        return name
    is_base = writer < len(written.writers) - 2  # the config itself and the command line are last
    return f"{'base' if is_base else 'file'} {name}"


def _default_source(loaded: Loaded, way: Key, value: Any, field: Field) -> str:
    """Return where the value of a field comes from that no file and no option has."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    row = loaded.row.row if loaded.row is not None else None
    of_row = {**row.reads, **row.trainer_reads, **row.settings} if row else {}
    if way[0] in of_row:
        return row.label
    if loaded.trl is not None and recipe_defaults(type(loaded.trl)).get(way[0], UNSET) == value:
        return "default of recipes"
    return "default" if _plain(default) == value else "follows from others"


def meaning(key: str) -> str:
    """Return which of the `MEANINGS` a field has."""
    if key in LOSS_FIELDS:
        return "loss"
    return next(name for name, pattern in MEANINGS.items() if re.fullmatch(pattern, key))


def shown(config: str, words: Sequence[str] = ()) -> str:
    """Return the text of `rlhf-trl configs show`: every value, its source, by what it is about."""
    lines: dict[str, list[dict[str, str]]] = {name: [] for name in MEANINGS}
    for key, setting in settings(config, words).items():
        line = {"field": key, "value": show(setting.value), "from": setting.source}
        lines[meaning(key)].append(line)
    return _by_meaning(lines)


def differing(first: str, second: str) -> dict[str, tuple[Any, Any]]:
    """Return the two values of every key that differs between two configs.

    What only one of two recipes reads counts where its config, or its row, says it.
    """
    one, other = settings(first), settings(second)
    changed = differences(
        {key: setting.value for key, setting in one.items()},
        {key: setting.value for key, setting in other.items()},
    )
    read_by_one_only = {**one, **other}.keys() - (one.keys() & other.keys())
    for key in read_by_one_only:
        if not {**one, **other}[key].is_written:
            del changed[key]
    return changed


def differences_shown(first: str, second: str) -> str:
    """Return the text of `rlhf-trl configs diff`."""
    changed = differing(first, second)
    if not changed:
        return f"{first} and {second} resolve to the same values"
    lines: dict[str, list[dict[str, str]]] = {name: [] for name in MEANINGS}
    for key, values in changed.items():
        cells = [value if isinstance(value, str) else show(value) for value in values]
        lines[meaning(key)].append({"field": key, first: cells[0], second: cells[1]})
    how = f"rlhf-trl compare --config {first} --config {second}"
    return f"{_by_meaning(lines)}\n\nwhat it does to loss and gradient: {how}"


def _by_meaning(lines: dict[str, list[dict[str, str]]]) -> str:
    """Return a table for each meaning that has any lines."""
    parts = [
        f"{name}\n{tables.text(of_name, width=sys.maxsize)}"
        for name, of_name in lines.items()
        if of_name
    ]
    return "\n\n".join(parts)
