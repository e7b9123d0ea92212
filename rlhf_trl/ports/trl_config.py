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
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import LOSS_FIELDS, Formulation, contradicted, formulation, names
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.ports.commands import COMMANDS
from rlhf_trl.ports.comments import Line, as_comment, commented, launch_line
from rlhf_trl.ports.explain import DIFFERS, Entry, entries, table
from rlhf_trl.ports.quantities import Quantity
from rlhf_trl.run.config_types import RENAMED, fields_of, imported, recipe_defaults
from rlhf_trl.run.stages import STAGES, Stage
from rlhf_trl.run.stock_words import check_stock_words
from rlhf_trl.run.yaml_loader import dump_yaml

RECIPES = {name: name for name in COMMANDS} | {"rloo": "grpo"}
# Fields of TRL's scripts, and the keys of the block `dataset:` that they become.
DATASET_KEYS = {
    "dataset_name": "path",
    "dataset_config": "name",
    "dataset_train_split": "split",
    "dataset_test_split": "eval_split",
}
# Fields of TRL's scripts, which its config classes do not have.
SCRIPT_FIELDS = {*DATASET_KEYS, "reward_funcs", "reward_model_name_or_path"}
TRL_REWARDS = "trl.rewards."  # where TRL's script looks for a reward without a module
# Fields that TRL's classes once had, with what to do without them.
DROPPED = {
    "max_prompt_length": "prompts are no longer cut there by a limit of their own; remove it",
    "reference_free": "DPO always has a reference there; remove it",
    "rpo_alpha": (
        "the term is a loss_type there; write loss_type: [sigmoid, sft] and loss_weights: [1.0, "
        "ALPHA] in its place"
    ),
}
# With these, TRL's config class can be built on any machine.
NEUTRAL = {"use_cpu": True, "bf16": False, "report_to": "none"}


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
class LossLines:
    """The part of a translation that decides the loss."""

    lines: Mapping[str, Line] = field(default_factory=dict)  # by the recipe's fields
    left_out: Mapping[str, str] = field(default_factory=dict)  # why TRL's fields have no line


@dataclass(frozen=True)
class Trained:
    """What a translation for recipes/sft.py trains, beside TRL's."""

    turns: str  # the recipe's dataset.turns
    there: str  # what TRL trains
    difference: str  # what is trained otherwise here; "": nothing


@dataclass(frozen=True)
class OfTRL:
    """The values of a config of TRL beside their translation."""

    path: str | Path
    values: Mapping[str, Any]
    command: str
    lines: Mapping[str, Line]
    left_out: Mapping[str, str]
    printed: Printed | None = None
    trained: Trained | None = None  # of SFT

    def text(self, output: Any = "THIS_FILE") -> str:
        """Return the YAML for a recipe."""
        processes = self.printed.processes if self.printed else 1
        count = f"{processes} processes" if processes > 1 else "one process"
        script = STAGES[RECIPES[self.command]].script
        parts = [
            f"# {Path(self.path).name} of `trl {self.command}`, for {count}:\n",
            launch_line(script, output, processes, on_cpu=bool(self.values.get("use_cpu"))),
            as_comment(f"What is not here has TRL's default there and here{self._but}."),
        ]
        parts += [as_comment(sentence) for sentence in self._missing()]
        for to, line in self.lines.items():
            note = str(line.note)
            if to == "dataset" and self.trained and self.trained.difference:
                note += f"; {self.trained.difference}"
            parts.append(commented(dump_yaml({to: line.value}), note))
        parts += ["# left out:\n"] * bool(self.left_out)
        parts += [as_comment(f"  {name}: {why}") for name, why in self.left_out.items()]
        return "".join(parts)

    @property
    def _but(self) -> str:
        """Name the fields of TRL that are not written and may differ from TRL's default."""
        if not self.trained:
            return ""
        return ", but for completion_only_loss and assistant_only_loss: dataset.turns decides them"

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
        if self.trained and self.trained.difference:
            here = {"dataset.turns": self.trained.turns}
            rows.append(Entry("", None, self.trained.there, here, DIFFERS, self.trained.difference))
        values_here = {name: line.value for name, line in self.lines.items()}
        examples = Quantity(
            name="examples per optimizer step",
            code=self._examples_per_step(self.values),
            here=self._examples_per_step(values_here),
        )
        text = table(rows, [examples], "TRL")
        if self.printed:
            count = self.printed.at_default
            text += f"\n\n{count} more fields have TRL's defaults there and here{self._but}."
        return text

    def _examples_per_step(self, values: Mapping[str, Any]) -> int:
        """Return the examples of an optimizer step, with TRL's default of a field without value."""
        count = self.printed.processes if self.printed else 1
        trl_fields = fields_of(imported(COMMANDS[self.command]))
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            _, declared = trl_fields[name]
            count *= values.get(name, declared.default)
        return count

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
    """Read a config of TRL, and translate its fields.

    Args:
        path: the file, for messages.
        values: what it holds.
        command: the command of TRL that it is for, as "dpo"; None: see by its fields.

    Raises:
        InputError: a field is unknown, no recipe can take it, or the fields fit several commands.
    """
    command = _command(path, values, command)
    printed = None
    if is_printed(values):
        printed = changes_of_printed(path, values, command)
        values = printed.changes
    stage = STAGES[RECIPES[command]]
    if command == "rloo":
        loss = _loss_of_rloo(path, values, stage)
    elif command == "sft":  # one loss, and no row in the table of algorithms
        loss = LossLines()
    else:
        loss = _loss_of_nearest_row(path, values, stage, command)
    lines = dict(loss.lines)
    sources = tuple(name for name in DATASET_KEYS if name in values)
    block = _data(path, values)
    trained = None
    if command == "sft":
        trained = _trained(path, values)
        block["turns"] = trained.turns
        sources += ("assistant_only_loss",) * (trained.turns == "all")
    lines["dataset"] = Line(block, "as TRL's script loads it", sources)
    if rewards := values.get("reward_funcs"):
        dotted_paths = [name if "." in name else TRL_REWARDS + name for name in rewards]
        lines["reward_funcs"] = Line(dotted_paths, "", ("reward_funcs",))
    elif stage.name == "grpo":
        lines["reward_funcs"] = Line([], "TRL's default: the reward model alone")
    if model := values.get("reward_model_name_or_path"):
        trl_name = "reward_model_name_or_path"  # the comment names it, as the field here differs
        lines["reward_model"] = Line(model, note=trl_name, sources=(trl_name,))
    # All other fields stand as they are; a field of a loss is then one that the row does not read.
    unread_note = f"not of the row {lines['algorithm'].value}" if "algorithm" in lines else ""
    for name, value in values.items():
        is_translated = name in SCRIPT_FIELDS or name in lines or name in sources
        if not is_translated and name not in loss.left_out:
            lines[name] = Line(value, unread_note if name in LOSS_FIELDS else "", (name,))
    # What recipes turn on is turned off, as TRL has none of it: switches by False, others by None.
    # With None, `interleave_labels` keeps the order of the data; its False is an order of its own.
    for name, value in recipe_defaults(stage.part("config")).items():
        is_switch = isinstance(value, bool | None) and name != "interleave_labels"
        turned_off = False if is_switch else None
        lines.setdefault(name, Line(turned_off, f"as TRL; recipes have {_shown(value)}"))
    return OfTRL(path, values, command, lines, loss.left_out, printed, trained)


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
    usual = _trl_config(path, {}, command).to_dict()
    # on the script's machine, not on NEUTRAL's
    usual |= {"use_cpu": False, "bf16": not values.get("fp16"), "report_to": []}
    usual["dataloader_pin_memory"] = not values.get("use_cpu")
    for old, new in RENAMED.items():  # one field under two names
        usual[old] = values.get(new)
    if "generation_batch_size" in values:  # TRL makes both of the batch sizes
        usual["generation_batch_size"] = values["generation_batch_size"]
        usual["steps_per_generation"] = values.get("gradient_accumulation_steps")
    return usual


def _trl_config(path: Any, values: Mapping[str, Any], command: str) -> Any:
    """Return an object of TRL's own config class, built from its fields among the values."""
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
    fields_by_command = {name: {*_fields(name)} for name in COMMANDS}
    if command is not None:
        if command not in fields_by_command:
            hint, choices = nearest(command, fields_by_command), ", ".join(fields_by_command)
            raise InputError(f"--command: {command!r}{hint}; write one of {choices}.")
        unknown = [name for name in values if name not in fields_by_command[command]]
        if unknown:
            _check_dropped(path, unknown[0])
            hint = nearest(unknown[0], fields_by_command[command])
            raise InputError(f"{path}: {unknown[0]} is not a field of `trl {command}`{hint}.")
        return command
    fitting = [name for name, fields in fields_by_command.items() if values.keys() <= fields]
    if is_printed(values):  # it has all fields of its class, so a class with more is not its own
        of_class = {name: fields_of(imported(COMMANDS[name])).keys() for name in fitting}
        fitting = [name for name in fitting if of_class[name] <= values.keys()]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        commands = ", ".join(f"`trl {name}`" for name in fitting)
        choices = f"{', '.join(fitting[:-1])} or {fitting[-1]}"
        raise InputError(f"{path}: its fields fit {commands}; say which with --command {choices}.")
    everywhere = set().union(*fields_by_command.values())
    unknown = next((name for name in values if name not in everywhere), None)
    if unknown is None:
        raise InputError(f"{path}: its fields belong to different commands of TRL; remove some.")
    _check_dropped(path, unknown)
    raise InputError(f"{path}: {unknown} is no field of TRL's{nearest(unknown, everywhere)}.")


def _check_dropped(path: Any, name: str) -> None:
    """Stop at a field that TRL's classes once had."""
    if name in DROPPED:
        raise InputError(f"{path}: TRL dropped {name}: {DROPPED[name]}.")


def _fields(command: str) -> dict[str, Any]:
    """Return what `trl COMMAND` takes, by name; None for a field of its script."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # ORPO's config is there
    fields = {**fields_of(imported("ModelConfig")), **fields_of(imported(COMMANDS[command]))}
    names = SCRIPT_FIELDS if RECIPES[command] == "grpo" else DATASET_KEYS
    return fields | dict.fromkeys(names)


def _loss_of_nearest_row(
    path: Any, values: Mapping[str, Any], stage: Stage, command: str
) -> LossLines:
    """Return the loss of a config of TRL as the nearest row of our table, in formulation `trl`.

    A row is an algorithm with the TRL settings that it fixes and the parameters that it reads. If
    the config has some of these settings otherwise, TRL's values of all of them are written.

    Raises:
        InputError: TRL does not know a word, or the row cannot have a number.
    """
    trl_config = _trl_config(path, values, command)
    left_out = {}
    if "use_bias_correction_kl" in values and not trl_config.beta:
        left_out["use_bias_correction_kl"] = "decides nothing while beta is 0"
    written = {name: value for name, value in values.items() if name not in left_out}
    try:
        check_stock_words(trl_config)  # refuses a loss_type, say, that TRL does not know
        algorithm = _nearest_row(stage, trl_config)
        row = formulation(algorithm, "trl")
        parameters = _parameters(row, trl_config, written)
        numbers = {name: line.value for name, line in parameters.items() if line.value is not None}
        row.parameters(numbers)  # refuses numbers that the row cannot have
        return LossLines(_name_and_settings(algorithm, trl_config, written) | parameters, left_out)
    except InputError as error:
        raise InputError(f"{path}: {str(error).removesuffix('.')}.") from error


def _nearest_row(stage: Stage, trl_config: Any) -> str:
    """Return the name of the row with the fewest settings that a config of TRL contradicts.

    Of several, it is a row with the config's `loss_type`, else the first of them.
    """

    def distance(name: str) -> tuple[int, bool]:
        contradictions = contradicted(formulation(name, "trl"), vars(trl_config))
        return len(contradictions), "loss_type" in contradictions

    rows = names(stage.family, "trl")
    return min((n for n in rows if formulation(n, "trl").trainer == stage.stock), key=distance)


def _name_and_settings(
    algorithm: str, trl_config: Any, values: Mapping[str, Any]
) -> dict[str, Line]:
    """Return the lines that name a row, and TRL's values of the settings that the row fixes.

    If the config contradicts none of the settings, only those are written that the file has. If it
    contradicts one, all are written: without them the recipe would ask for a row that is nearer.

    Args:
        algorithm: the name of the row.
        trl_config: an object of TRL's config class, with the file's values.
        values: what the file has.
    """
    row = formulation(algorithm, "trl")
    contradictions = contradicted(row, vars(trl_config))
    sources = tuple(name for name in row.settings if name in values)
    if contradictions:
        to_write: Iterable[str] = row.settings
        why = f"the nearest row; not its own: {', '.join(contradictions)}"
        whose = "TRL's own loss"
    else:
        to_write = sources
        why = "the row whose settings these are"
        whose = "TRL's own loss; chapter: the book's equation"
    lines = {"algorithm": Line(algorithm, why, sources), "formulation": Line("trl", whose)}
    for name in to_write:
        if name == "use_bias_correction_kl" and not trl_config.beta:
            continue
        # TRL's config has made "group" of true and a list of one loss_type. Of a word that the file
        # has, the word itself is kept; of anything else what TRL has made of it.
        is_word = isinstance(values.get(name), str)
        value = values[name] if is_word else getattr(trl_config, name)
        notes = [f"{algorithm} has {_shown(row.settings[name])}"] if name in contradictions else []
        notes += [] if name in values else ["TRL's default"]
        lines[name] = Line(value, "; ".join(notes), (name,) if name in values else ())
    return lines


def _parameters(row: Formulation, trl_config: Any, values: Mapping[str, Any]) -> dict[str, Line]:
    """Return the parameters that a row reads, with the values of TRL's config.

    TRL may write a parameter as another number than the row: CISPO's `epsilon_high` is a bound of
    the ratio itself in TRL, 5, and its distance from 1 in the row, 4. `row.trl_offset` is the
    difference, 1.

    Raises:
        InputError: the row cannot have the bound, as it would be below the offset.
    """
    lines = {}
    for name in row.reads:
        value = getattr(trl_config, name)
        note = "" if name in values else "TRL's default"
        if name == "epsilon_high" and value is None:
            value = trl_config.epsilon  # as TRL does
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


def _loss_of_rloo(path: Any, values: Mapping[str, Any], stage: Stage) -> LossLines:
    """Return the loss of RLOOTrainer as the row rloo, which recipes/grpo.py trains on GRPOTrainer.

    RLOOTrainer clips the ratio of a completion's probabilities, and the row has no ratio. While the
    policy that sampled a completion trains on it once, the ratio is 1, and both have one gradient.

    Raises:
        InputError: later steps are off-policy, or a setting has no counterpart in the recipe.
    """
    trl_config = _trl_config(path, values, "rloo")
    remedy = "train it in Python with BookRLOOTrainer (recipes/library.md)"
    for name in ("normalize_advantages", "reward_clip_range"):
        if getattr(trl_config, name):
            why = "is not read by recipes/grpo.py"
            raise InputError(f"{path}: {name} {why}; remove it or {remedy}.")
    off_policy_field = None
    if trl_config.num_iterations > 1:
        off_policy_field = "num_iterations"
    elif trl_config.steps_per_generation > trl_config.gradient_accumulation_steps:
        off_policy_field = "steps_per_generation"
    if off_policy_field:
        value = getattr(trl_config, off_policy_field)
        raise InputError(
            f"{path}: {off_policy_field} is {value}, so later steps are off-policy, where "
            f"RLOOTrainer clips a ratio and the row rloo of recipes/grpo.py has none; {remedy}."
        )
    beta_note, beta_sources = "TRL's default", ()
    if "beta" in values:
        beta_note, beta_sources = "", ("beta",)
    lines = {
        "algorithm": Line("rloo", "on GRPOTrainer, with RLOOTrainer's update"),
        "formulation": Line("chapter", "sums over tokens, as RLOOTrainer"),
        "beta": Line(trl_config.beta, beta_note, beta_sources),
        "kl_estimator": Line("k1", "which RLOOTrainer subtracts from the reward, summed"),
        "vllm_importance_sampling_correction": Line(False, "RLOOTrainer has none"),
    }
    once = "not read: each completion is trained once, where its ratio is 1"
    unread = dict.fromkeys(("epsilon", "epsilon_high"), once)
    unread |= dict.fromkeys(("normalize_advantages", "reward_clip_range"), "off, as in the recipe")
    left_out = {name: reason for name, reason in unread.items() if name in values}
    # the recipe's config derives from GRPOConfig, so RLOOConfig's other defaults are written out
    recipe_fields = fields_of(stage.part("config"))
    for name, (_, declared) in fields_of(type(trl_config)).items():
        is_decided = name in values or name in LOSS_FIELDS
        default = declared.default
        if not is_decided and default is not MISSING:
            _, declared_by_recipe = recipe_fields[name]
            if default != declared_by_recipe.default:
                lines[name] = Line(default, "RLOOConfig's default")
    return LossLines(lines, left_out)


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
    block |= {to: values[name] for name, to in DATASET_KEYS.items() if name in values}
    if values.get("eval_strategy", "no") != "no":
        block.setdefault("eval_split", "test")  # TRL's default of dataset_test_split
    else:
        block.pop("eval_split", None)
    return block


def _trained(path: Any, values: Mapping[str, Any]) -> Trained:
    """Return what TRL trains, and what the recipe does. It depends on columns that nobody has read.

    Raises:
        InputError: TRL trains on the prompts of pairs, too.
    """
    if values.get("assistant_only_loss"):
        if values.get("completion_only_loss") is False:
            return Trained("all", "every answer is trained", "")
        there = "every answer in `messages`, or in the completion of a prompt, is trained"
        difference = (
            "of `messages`, every answer is trained there and here; of prompt-completion pairs, "
            "TRL trains answers in the completion, and here those in the prompt, too (turns: last: "
            "the completion alone)"
        )
        return Trained("all", there, difference)
    if values.get("completion_only_loss") is False:
        raise InputError(
            f"{path}: completion_only_loss is false, so TRL trains every token of prompts, too, "
            "and recipes/sft.py never does; remove it or train it in Python with BookSFTTrainer "
            "(recipes/library.md)."
        )
    there = "every token of `messages`, or the completion of a prompt, is trained"
    difference = (
        "of `messages`, TRL trains every token, and here the last answer's are trained (turns: "
        "all: every answer; every token: in Python with BookSFTTrainer, recipes/library.md); of "
        "prompt-completion pairs, the completion is trained there and here"
    )
    return Trained("last", there, difference)
