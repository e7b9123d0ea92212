"""A config of `trl grpo|dpo|kto|orpo|reward|sft`, as one for this project's recipes.

The recipe gets what TRL's script would have: the loss by the row whose settings it is, in
formulation `trl`, and every other field as it stands. What a recipe has otherwise is written out.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import formulation
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.ports.comments import Line, commented
from rlhf_trl.ports.explain import entries, table
from rlhf_trl.ports.quantities import Quantity
from rlhf_trl.run.config_types import fields_of, imported, recipe_defaults
from rlhf_trl.run.stages import STAGES, Stage
from rlhf_trl.run.yaml_loader import dump_yaml

# TRL's commands, and the config classes of their trainers.
COMMANDS = {
    "grpo": "GRPOConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "orpo": "trl.experimental.orpo.ORPOConfig",
    "reward": "RewardConfig",
    "sft": "SFTConfig",
}
# Fields of TRL's scripts, which stand in the block `dataset:` here.
DATA = {
    "dataset_name": "path",
    "dataset_config": "name",
    "dataset_train_split": "split",
    "dataset_test_split": "eval_split",
}
OF_SCRIPTS = {*DATA, "reward_funcs", "reward_model_name_or_path"}
OF_TRL = "trl.rewards."  # where its script finds rewards without a module
NEUTRAL = {"use_cpu": True, "bf16": False, "report_to": "none"}  # a config on any machine


def is_of_trl(given: Mapping[str, Any]) -> bool:
    """Tell whether a config is one for a command of TRL, by a field that the book's code lacks."""
    return "model_name_or_path" in given


@dataclass(frozen=True)
class OfTRL:
    """The values of a config of TRL beside their translation."""

    path: str | Path
    given: Mapping[str, Any]
    command: str
    lines: Mapping[str, Line]

    def text(self, output: Any = "THIS_FILE") -> str:
        """Return the YAML for a recipe."""
        head = (
            f"# {Path(self.path).name} of `trl {self.command}`, for one process:\n"
            "# accelerate launch --config_file configs/accelerate/one_gpu.yaml "
            f"{STAGES[self.command].script} --config {output}\n"
            "# What is not here has TRL's default there and here.\n"
        )
        fields = [(dump_yaml({to: line.value}), line.note) for to, line in self.lines.items()]
        return head + "".join(commented(body, str(note)) for body, note in fields)

    def explained(self) -> str:
        """Return a table, field by field, and of the examples of a step."""
        fields = {**_fields(self.command)}
        meanings = {name: _help(fields[name]) for name in self.given}
        found = entries(self.given, meanings, self.lines, {}, "TRL's default, written out")
        config = fields_of(imported(COMMANDS[self.command]))
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        sizes = [self.given.get(name, config[name][1].default) for name in names]
        own = [self.lines[n].value if n in self.lines else config[n][1].default for n in names]
        steps = Quantity("examples per optimizer step", sizes[0] * sizes[1], own[0] * own[1])
        return table(found, [steps], "TRL")


def _help(declared: Any) -> str:
    """Return the first sentence that TRL's --help has for a field."""
    text = declared[1].metadata.get("help", "") if declared else "of TRL's script"
    return text.split(". ")[0].strip(".") or "TRL's"


def read_trl(path: str | Path, given: Mapping[str, Any], command: str | None) -> OfTRL:
    """Read a config of TRL; `command` is its own, as "dpo", where the fields fit several.

    A field that TRL does not have, or that no recipe can take, is an InputError.
    """
    command = _command(path, given, command)
    stage = STAGES[command]
    lines = _row(path, given, stage, command)
    sources = tuple(name for name in DATA if name in given)
    lines["dataset"] = Line(_data(path, given), "as TRL's script loads it", sources)
    if rewards := given.get("reward_funcs"):
        names = [name if "." in name else OF_TRL + name for name in rewards]
        lines["reward_funcs"] = Line(names, "", ("reward_funcs",))
    elif command == "grpo":
        lines["reward_funcs"] = Line([], "TRL's default: the reward model alone")
    if model := given.get("reward_model_name_or_path"):
        of_script = "reward_model_name_or_path"
        lines["reward_model"] = Line(model, of_script, (of_script,))
    for name, value in given.items():
        if name not in OF_SCRIPTS and name not in lines:
            lines[name] = Line(value, "", (name,))
    for name, value in recipe_defaults(stage.part("config")).items():
        stock = None if not isinstance(value, bool) or name == "interleave_labels" else False
        lines.setdefault(name, Line(stock, f"as TRL; recipes have {_shown(value)}"))
    return OfTRL(path, given, command, lines)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(path: Any, given: Mapping[str, Any], command: str | None) -> str:
    """Tell which of TRL's commands a config is for, by the fields that it has."""
    known = {name: {*_fields(name)} for name in COMMANDS}
    if command is not None:
        if command not in known:
            hint = nearest(command, known)
            raise InputError(f"--command: {command!r}{hint}; write one of {', '.join(known)}.")
        unknown = [name for name in given if name not in known[command]]
        if unknown:
            hint = nearest(unknown[0], known[command])
            raise InputError(f"{path}: {unknown[0]} is not a field of `trl {command}`{hint}.")
        return command
    fitting = [name for name, fields in known.items() if given.keys() <= fields]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        ways = ", ".join(f"`trl {name}`" for name in fitting)
        raise InputError(f"{path}: its fields fit {ways}; say which with --command {fitting[0]}.")
    everywhere = set().union(*known.values())
    unknown = next((name for name in given if name not in everywhere), None)
    if unknown is None:
        raise InputError(f"{path}: its fields belong to different commands of TRL; remove some.")
    raise InputError(f"{path}: {unknown} is no field of TRL's{nearest(unknown, everywhere)}.")


def _fields(command: str) -> dict[str, Any]:
    fields = {**fields_of(imported("ModelConfig")), **fields_of(imported(COMMANDS[command]))}
    names = OF_SCRIPTS if command == "grpo" else DATA
    return fields | dict.fromkeys(names)


def _row(path: Any, given: Mapping[str, Any], stage: Stage, command: str) -> dict[str, Line]:
    """Return the fields of the row that TRL's own config amounts to, with all that it reads."""
    if command == "sft":
        return {}
    config = imported(COMMANDS[command])
    values = {k: v for k, v in given.items() if k in fields_of(config)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about TRL's defaults
            stock = config(**values | NEUTRAL)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}.") from error
    resolved = stage.part("config").resolve(stock)
    if resolved.algorithm is None:
        raise InputError(
            f"{path}: no row of the table has these loss fields, and recipes train rows; train it "
            f"in Python, where {stage.trainer_name} takes TRL's config as it is "
            "(recipes/library.md)."
        )
    row = formulation(resolved.algorithm, "trl")
    settings = tuple(name for name in row.settings if name in given)
    lines = {
        "algorithm": Line(resolved.algorithm, "the row whose settings these are", settings),
        "formulation": Line("trl", "TRL's own loss; chapter: the book's equation"),
    }
    for name in row.reads:
        value = getattr(stock, name)
        if name == "epsilon_high" and value is None:
            value = stock.epsilon
        offset = row.trl_offset.get(name, 0)
        note = "" if name in given else "TRL's default"
        if offset:
            note = f"TRL's {value}, less {offset:g}: an upper bound of 1 + this"
            value -= offset
        lines[name] = Line(value, note, (name,) if name in given else ())
    return lines


def _data(path: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block `dataset:`."""
    if "dataset_name" not in given:
        raise InputError(f"{path}: dataset_name is missing; name the data set, as TRL's script.")
    block = {"source": "path"}
    block |= {to: given[name] for name, to in DATA.items() if name in given}
    if given.get("eval_strategy", "no") != "no":
        block.setdefault("eval_split", "test")
    else:
        block.pop("eval_split", None)
    return block
