"""A config of `trl grpo|rloo|dpo|kto|orpo|reward|sft`, as one for this project's recipes.

The recipe gets what TRL's script would have: the loss by the row whose settings it is, or by the
nearest one with the fields that differ, in formulation `trl`; and every other field as it stands.
What a recipe has otherwise is written out. RLOO, whose recipe stands on GRPOTrainer, becomes the
row whose update is the same.

A config that a Python script prints (`yaml.dump(args.to_dict())`) has every field of its class:
`changes_of_printed` takes what the script has set.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import LOSS_FIELDS, Formulation, contradicted, formulation, names
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.ports.commands import COMMANDS
from rlhf_trl.ports.comments import Line, as_comment, commented, launch_line
from rlhf_trl.ports.explain import entries, table
from rlhf_trl.ports.quantities import Quantity
from rlhf_trl.run.config_types import RENAMED, fields_of, imported, recipe_defaults
from rlhf_trl.run.stages import STAGES, Stage
from rlhf_trl.run.stock_words import check_stock_words
from rlhf_trl.run.yaml_loader import dump_yaml

RECIPES = {name: name for name in COMMANDS} | {"rloo": "grpo"}
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


def is_of_trl(values: Mapping[str, Any]) -> bool:
    """Tell whether a config is one for a command of TRL, by a field that the book's code lacks."""
    return "model_name_or_path" in values or is_printed(values)


def is_printed(values: Mapping[str, Any]) -> bool:
    """Tell whether a config is what a script printed: only that has this field."""
    return "accelerator_config" in values


@dataclass(frozen=True)
class Printed:
    """What a script has set, by the config that it printed."""

    changes: Mapping[str, Any]  # what differs from TRL's defaults
    hidden: tuple[str, ...] = ()  # fields whose values to_dict() hides
    at_default: int = 0  # number of the others
    processes: int = 1  # of the script


@dataclass(frozen=True)
class OfTRL:
    """The values of a config of TRL beside their translation."""

    path: str | Path
    values: Mapping[str, Any]
    command: str
    lines: Mapping[str, Line]
    left_out: Mapping[str, str]
    printed: Printed | None = None

    def text(self, output: Any = "THIS_FILE") -> str:
        """Return the YAML for a recipe."""
        processes = self.printed.processes if self.printed else 1
        count = f"{processes} processes" if processes > 1 else "one process"
        script = STAGES[RECIPES[self.command]].script
        parts = [
            f"# {Path(self.path).name} of `trl {self.command}`, for {count}:\n",
            launch_line(script, output, processes, on_cpu=bool(self.values.get("use_cpu"))),
            "# What is not here has TRL's default there and here.\n",
        ]
        parts += [as_comment(sentence) for sentence in self._missing()]
        for to, line in self.lines.items():
            parts.append(commented(dump_yaml({to: line.value}), str(line.note)))
        parts += ["# left out:\n"] * bool(self.left_out)
        parts += [as_comment(f"  {name}: {why}") for name, why in self.left_out.items()]
        return "".join(parts)

    def _missing(self) -> list[str]:
        """Return what a reader has to add to the translation of a printed config."""
        sentences = []
        if self.printed and self.printed.hidden:
            hidden = ", ".join(self.printed.hidden)
            sentences.append(f"Not printed by to_dict(), so add what the script sets: {hidden}")
        if self.printed and "reward_funcs" in self.lines and not self.lines["reward_funcs"].value:
            sentences.append(
                "A trainer's config has no reward_funcs, so add what the script hands to its "
                "trainer, by dotted paths as my_module.my_reward."
            )
        return sentences

    def explained(self) -> str:
        """Return a table, field by field, and of the examples of a step."""
        fields = _fields(self.command)
        meanings = {name: _help(fields[name]) for name in self.values}
        rows = entries(self.values, meanings, self.lines, self.left_out, self._added)
        # (type, dataclass field) of each field of TRL's, for the defaults of what a side leaves out
        config = fields_of(imported(COMMANDS[self.command]))
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        theirs = [self.values.get(name, config[name][1].default) for name in names]
        ours = [self.lines[n].value if n in self.lines else config[n][1].default for n in names]
        processes = self.printed.processes if self.printed else 1
        examples = [sizes[0] * sizes[1] * processes for sizes in (theirs, ours)]
        text = table(rows, [Quantity("examples per optimizer step", *examples)], "TRL")
        if self.printed:
            text += f"\n\n{self.printed.at_default} more fields have TRL's defaults there and here."
        return text

    def _added(self, name: str) -> str:
        """Say what a field is that only the translation has."""
        ours = fields_of(STAGES[RECIPES[self.command]].part("config"))
        if name in _fields(self.command) or name not in ours:
            return "TRL's default, written out"
        return f"no field of `trl {self.command}`; here: {_help(ours[name])}"


def _help(declared: Any) -> str:
    """Return the first sentence that --help has for a field, of TRL's or of ours."""
    text = declared[1].metadata.get("help", "") if declared else "of TRL's script"
    return text.split(". ")[0].strip(".") or "TRL's"


def read_trl(path: str | Path, values: Mapping[str, Any], command: str | None) -> OfTRL:
    """Read a config of TRL; `command` is its own, as "dpo", where the fields fit several.

    A field that TRL does not have, or that no recipe can take, is an InputError.
    """
    command = _command(path, values, command)
    printed = None
    if is_printed(values):
        printed = changes_of_printed(path, values, command)
        values = printed.changes
    stage = STAGES[RECIPES[command]]
    left_out: dict[str, str] = {}  # filled in by `_rloo` and `_row`
    if command == "rloo":
        lines = _rloo(path, values, stage, left_out)
    else:
        lines = _row(path, values, stage, command, left_out)
    sources = tuple(name for name in DATA if name in values)
    lines["dataset"] = Line(_data(path, values), "as TRL's script loads it", sources)
    if rewards := values.get("reward_funcs"):
        names = [name if "." in name else OF_TRL + name for name in rewards]
        lines["reward_funcs"] = Line(names, "", ("reward_funcs",))
    elif stage.name == "grpo":
        lines["reward_funcs"] = Line([], "TRL's default: the reward model alone")
    if model := values.get("reward_model_name_or_path"):
        of_script = "reward_model_name_or_path"
        # a field of another name here, so the comment names TRL's
        lines["reward_model"] = Line(model, note=of_script, sources=(of_script,))
    of_no_row = f"not of the row {lines['algorithm'].value}" if "algorithm" in lines else ""
    for name, value in values.items():
        if name not in OF_SCRIPTS and name not in lines and name not in left_out:
            lines[name] = Line(value, of_no_row if name in LOSS_FIELDS else "", (name,))
    # What recipes turn on is turned off, as TRL has none of it: switches by False, others by None.
    # With None, `interleave_labels` keeps the order of the data; its False is an order of its own.
    for name, value in recipe_defaults(stage.part("config")).items():
        is_switch = isinstance(value, bool | None) and name != "interleave_labels"
        stock = False if is_switch else None
        lines.setdefault(name, Line(stock, f"as TRL; recipes have {_shown(value)}"))
    return OfTRL(path, values, command, lines, left_out, printed)


def changes_of_printed(path: Any, values: Mapping[str, Any], command: str) -> Printed:
    """Return what a printed config has otherwise than TRL's class by default."""
    hidden = tuple(name for name in values if values[name] == f"<{name.upper()}>")
    usual = _printed_defaults(path, values, command)
    changes = {
        name: value
        for name, value in values.items()
        if name not in hidden and (name not in usual or usual[name] != value)
    }
    processes = 1
    if size := values.get("generation_batch_size"):
        on_each = values["per_device_train_batch_size"] * values["steps_per_generation"]
        processes = size // on_each
    return Printed(changes, hidden, len(values) - len(changes) - len(hidden), processes)


def _printed_defaults(path: Any, values: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return TRL's defaults as to_dict() prints them where nothing else is set."""
    usual = _stock(path, {}, command).to_dict()
    # on the script's machine, not on NEUTRAL's
    usual |= {"use_cpu": False, "bf16": not values.get("fp16"), "report_to": []}
    usual["dataloader_pin_memory"] = not values.get("use_cpu")
    for old, new in RENAMED.items():  # one field under two names
        usual[old] = values.get(new)
    if "generation_batch_size" in values:  # TRL makes both of the batch sizes
        usual["generation_batch_size"] = values["generation_batch_size"]
        usual["steps_per_generation"] = values.get("gradient_accumulation_steps")
    return usual


def _stock(path: Any, values: Mapping[str, Any], command: str) -> Any:
    """Return TRL's own config of its fields among the values."""
    config = imported(COMMANDS[command])
    known = {name: value for name, value in values.items() if name in fields_of(config)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about TRL's defaults
            return config(**known | NEUTRAL)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}.") from error


def _shown(value: Any) -> str:
    if callable(value):  # of a row, which computes it from its parameters
        return value.__doc__
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(path: Any, values: Mapping[str, Any], command: str | None) -> str:
    """Return which of TRL's commands a config is for, by the fields that it has.

    A `command` that is named is only checked: it must exist, and have all the fields.

    Raises:
        InputError: no command takes all the fields, or several do.
    """
    known = {name: {*_fields(name)} for name in COMMANDS}
    if command is not None:
        if command not in known:
            hint = nearest(command, known)
            raise InputError(f"--command: {command!r}{hint}; write one of {', '.join(known)}.")
        unknown = [name for name in values if name not in known[command]]
        if unknown:
            hint = nearest(unknown[0], known[command])
            raise InputError(f"{path}: {unknown[0]} is not a field of `trl {command}`{hint}.")
        return command
    fitting = [name for name, fields in known.items() if values.keys() <= fields]
    if is_printed(values):  # it has all fields of its class, so a class with more is not its own
        own = {name: {*fields_of(imported(COMMANDS[name]))} for name in fitting}
        fitting = [name for name in fitting if own[name] <= values.keys()]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        ways = ", ".join(f"`trl {name}`" for name in fitting)
        choices = f"{', '.join(fitting[:-1])} or {fitting[-1]}"
        raise InputError(f"{path}: its fields fit {ways}; say which with --command {choices}.")
    everywhere = set().union(*known.values())
    unknown = next((name for name in values if name not in everywhere), None)
    if unknown is None:
        raise InputError(f"{path}: its fields belong to different commands of TRL; remove some.")
    raise InputError(f"{path}: {unknown} is no field of TRL's{nearest(unknown, everywhere)}.")


def _fields(command: str) -> dict[str, Any]:
    """Return what `trl COMMAND` takes, by name; None for a field of its script."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # ORPO's config is there
    fields = {**fields_of(imported("ModelConfig")), **fields_of(imported(COMMANDS[command]))}
    names = OF_SCRIPTS if RECIPES[command] == "grpo" else DATA
    return fields | dict.fromkeys(names)


def _row(
    path: Any, values: Mapping[str, Any], stage: Stage, command: str, left_out: dict[str, str]
) -> dict[str, Line]:
    """Return the fields of the row that TRL's own config amounts to, with all that it reads.

    Where no row amounts to it, it is the nearest one, with TRL's value of all that the row fixes.
    """
    if command == "sft":  # one loss, and no row in the table
        return {}
    stock = _stock(path, values, command)
    if "use_bias_correction_kl" in values and not stock.beta:
        left_out["use_bias_correction_kl"] = "decides nothing while beta is 0"
    written = {name: value for name, value in values.items() if name not in left_out}
    try:
        check_stock_words(stock)  # refuses a loss_type, say, that TRL does not know
        algorithm = _nearest_row(stage, stock)
        row = formulation(algorithm, "trl")
        lines = _read(row, stock, written)
        values_read = {name: line.value for name, line in lines.items() if line.value is not None}
        row.parameters(values_read)  # refuses numbers that the row cannot have
        return {**_named(algorithm, stock, written), **lines}
    except InputError as error:
        raise InputError(f"{path}: {str(error).removesuffix('.')}.") from error


def _nearest_row(stage: Stage, stock: Any) -> str:
    """Return the row of a stage that fixes the fewest fields otherwise than a config of TRL's.

    Of several, it is one with the config's `loss_type`, else the first.
    """

    def distance(name: str) -> tuple[int, bool]:
        apart = contradicted(formulation(name, "trl"), vars(stock))
        return len(apart), "loss_type" in apart

    rows = names(stage.family, "trl")
    return min((n for n in rows if formulation(n, "trl").trainer == stage.stock), key=distance)


def _named(algorithm: str, stock: Any, values: Mapping[str, Any]) -> dict[str, Line]:
    """Return the name of a row, and what TRL's config writes of the fields that the row fixes.

    Where it has one otherwise, all are returned: they tell the recipe that no other row is nearer.
    """
    row = formulation(algorithm, "trl")
    apart = contradicted(row, vars(stock))
    why, whose = "the row whose settings these are", "TRL's own loss; chapter: the book's equation"
    if apart:
        why, whose = f"the nearest row; not its own: {', '.join(apart)}", "TRL's own loss"
    sources = tuple(name for name in row.settings if name in values)
    lines = {"algorithm": Line(algorithm, why, sources), "formulation": Line("trl", whose)}
    for name in row.settings if apart else sources:
        if name == "use_bias_correction_kl" and not stock.beta:
            continue
        # TRL's config has made "group" of true and a list of one loss_type. Of a word that the file
        # has, the word itself is kept; of anything else what TRL has made of it.
        is_word = isinstance(values.get(name), str)
        value = values[name] if is_word else getattr(stock, name)
        notes = [f"{algorithm} has {_shown(row.settings[name])}"] if name in apart else []
        notes += [] if name in values else ["TRL's default"]
        lines[name] = Line(value, "; ".join(notes), (name,) if name in values else ())
    return lines


def _read(row: Formulation, stock: Any, values: Mapping[str, Any]) -> dict[str, Line]:
    """Return what a row reads, as TRL's config has it.

    Raises:
        InputError: a bound is one that the row cannot have.
    """
    lines = {}
    for name in row.reads:
        value = getattr(stock, name)
        note = "" if name in values else "TRL's default"
        if name == "epsilon_high" and value is None:
            value = stock.epsilon  # as TRL does
        if offset := row.trl_offset.get(name, 0):
            if value < offset:
                raise InputError(
                    f"{name} is {value}, for TRL an upper bound of the ratio itself, and the row "
                    f"{row.label} has none below {offset:g}; raise it, or train it in Python, with "
                    "this config of TRL (recipes/library.md)."
                )
            note = f"TRL's {value}, less {offset:g}: an upper bound of 1 + this"
            value -= offset
        lines[name] = Line(value, note, (name,) if name in values else ())
    return lines


def _rloo(
    path: Any, values: Mapping[str, Any], stage: Stage, left_out: dict[str, str]
) -> dict[str, Line]:
    """Return the row rloo with RLOOTrainer's settings, which its recipe trains on GRPOTrainer.

    RLOOTrainer clips the ratio of a completion's probabilities. While each completion is trained
    once, by the policy that sampled it, the ratio is 1 and its gradient the row's; what it clips
    otherwise has no counterpart, and is an InputError. What is not read goes into `left_out`.
    """
    stock = _stock(path, values, "rloo")
    trainer = "train it in Python with BookRLOOTrainer (recipes/library.md)"
    for name in ("normalize_advantages", "reward_clip_range"):
        if getattr(stock, name):
            why = "is not read by recipes/grpo.py"
            raise InputError(f"{path}: {name} {why}; remove it or {trainer}.")
    if stock.num_iterations > 1 or stock.steps_per_generation > stock.gradient_accumulation_steps:
        name = "num_iterations" if stock.num_iterations > 1 else "steps_per_generation"
        raise InputError(
            f"{path}: {name} is {getattr(stock, name)}, so later steps are off-policy, where "
            f"RLOOTrainer clips a ratio and the row rloo of recipes/grpo.py has none; {trainer}."
        )
    beta_note, beta_sources = "TRL's default", ()
    if "beta" in values:
        beta_note, beta_sources = "", ("beta",)
    lines = {
        "algorithm": Line("rloo", "on GRPOTrainer, with RLOOTrainer's update"),
        "formulation": Line("chapter", "sums over tokens, as RLOOTrainer"),
        "beta": Line(stock.beta, beta_note, beta_sources),
        "kl_estimator": Line("k1", "which RLOOTrainer subtracts from the reward, summed"),
        "vllm_importance_sampling_correction": Line(False, "RLOOTrainer has none"),
    }
    once = "not read: each completion is trained once, where its ratio is 1"
    unread = dict.fromkeys(("epsilon", "epsilon_high"), once)
    unread |= dict.fromkeys(("normalize_advantages", "reward_clip_range"), "off, as in the recipe")
    left_out |= {name: reason for name, reason in unread.items() if name in values}
    # the recipe's config derives from GRPOConfig, whose defaults of shared fields may be others
    here = fields_of(stage.part("config"))
    for name, (_, declared) in fields_of(type(stock)).items():
        known = declared.default is not MISSING and name not in LOSS_FIELDS | left_out.keys()
        if known and name not in values and declared.default != here[name][1].default:
            lines[name] = Line(declared.default, "RLOOConfig's default")
    return lines


def _data(path: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block `dataset:`, with held-out rows only if the config evaluates.

    Raises:
        InputError: no data set is named.
    """
    if "dataset_name" not in values:
        why = "name the data set, as TRL's script."
        if "model_name_or_path" not in values:
            why = "a trainer's config has neither data nor model; add dataset_name and "
            why += "model_name_or_path to the file, in the words of TRL's scripts."
        raise InputError(f"{path}: dataset_name is missing; {why}")
    block = {"source": "path"}
    block |= {to: values[name] for name, to in DATA.items() if name in values}
    if values.get("eval_strategy", "no") != "no":
        block.setdefault("eval_split", "test")  # TRL's default of dataset_test_split
    else:
        block.pop("eval_split", None)
    return block
