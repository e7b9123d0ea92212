"""What a user wants to know about: a config or a trainer, and which of its fields decide a loss."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from dataclasses import fields as fields_of
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, SHARED_FIELDS, formulation
from rlhf_trl.compare.drift.surface import settings, shipped
from rlhf_trl.compare.measure import Stock
from rlhf_trl.compare.rows import fields_for_batches
from rlhf_trl.compare.trainers import (
    POLICY,
    STOCK,
    base_name,
    own_trainer,
    row_arguments,
    trainer_classes,
)
from rlhf_trl.compare.windows.batches import ACROSS, BATCHES, PolicyBatch
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config import read_config
from rlhf_trl.run.fields.policy_gradients import PolicyGradientRun
from rlhf_trl.run.fields.preferences import AlignmentRun
from rlhf_trl.run.read_fields import read_fields

SFT = "SFTTrainer"

TRAINERS = tuple(name for name in STOCK if name != SFT)
"""Stock trainers whose configs are held against rows of the table, which has none of SFT."""

SCHEDULE = {
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
    "max_length",
}
"""Fields of the schedule: each fixed batch has its own, and several schedules are measured."""

SET_BY_BATCHES = {
    "num_generations",
    "num_generations_eval",
    "max_completion_length",
    "reward_weights",
    "missing_eos_penalty",
    "teacher_models",
    "teacher_weights",
    "teacher",
    "teacher_rate",
    "demonstration",
    "demonstration_template",
}
"""Further fields whose value comes from the fixed batches, whatever the user's value is."""

_ONE_TEXT_A_ROW = "the batches hold one padded text a row"

_GIVEN = "the batches' completions are given"

RUN_OTHERWISE = {
    "packing": _ONE_TEXT_A_ROW,
    "padding_free": _ONE_TEXT_A_ROW,
    "use_vllm": _GIVEN,
    "use_transformers_paged": _GIVEN,
    "vllm_importance_sampling_mode": _GIVEN,
}
"""Fields by which a run holds or samples texts, with what the fixed batches have instead."""

UNSHOWN = {
    "delta": None,
    "off_policy_mask_threshold": None,
    "reward_clip_range": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "disable_dropout": True,
    "neftune_noise_alpha": None,
    "router_aux_loss_coef": None,
    "use_liger_kernel": False,
    "sync_ref_model": False,
    "vllm_importance_sampling_correction": False,
}
"""Fields whose effect the fixed batches may not show, with the value that switches each off.

They concern rare tokens, noise, experts, other kernels, a reference that moves, another sampler. A
config with another value in one of them is not known to be any algorithm.
"""

_OTHER_MODELS_OR_DATA = {"ppo", "kwise", "orm", "prm"}

_OTHER_MODELS_OR_DATA |= {
    name for name, row in ALGORITHMS.items() if row.chapter.family == "distillation"
}
"""Algorithms whose models or data no other formulation uses: each is compared with itself only."""


@dataclass(frozen=True)
class Subject:
    """What a user wants to know about."""

    label: str  # its file, its class, or both
    base: str  # the stock trainer it is or derives from
    classes: tuple[type, type]  # trainer and config
    values: Mapping[str, Any]  # all fields that the user gives
    fields: Mapping[str, Any]  # those that decide the loss
    # further arguments of the trainer: the algorithm of a config of this project
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    fits: tuple[str, ...] = ()  # other trainers that the keys fit, where none was named

    @property
    def trainer(self) -> str:
        """What it was measured as, and what else it may be."""
        others = " and ".join(self.fits)
        return self.base + (f" (it may be {others}, too: name it with --trainer)" if others else "")

    @property
    def accumulation(self) -> int:
        """The user's micro-batches of a window."""
        return self.values.get("gradient_accumulation_steps") or 1

    @property
    def generation(self) -> int:
        """The user's micro-batches that one generation feeds."""
        if size := self.values.get("generation_batch_size"):
            return size // self.values.get("per_device_train_batch_size", 8)  # 8: TRL's default
        return self.values.get("steps_per_generation") or self.accumulation

    @property
    def batches(self) -> list[PolicyBatch]:
        """The windows on which it is measured."""
        names = ["heavy", "ragged", "accumulation"]
        further_batches: list[PolicyBatch] = []  # which are not among `BATCHES`
        if self.base == "GRPOTrainer":
            names.append("tools")
        if self.base in POLICY:
            names += ["on_policy", "extreme"]
            if self.generation > self.accumulation:
                names.append("steps_per_generation")
            if self.generation < self.accumulation:
                further_batches.append(ACROSS)
        return [batch for batch in BATCHES if batch.name in names] + further_batches

    @property
    def left_out(self) -> list[str]:
        """The fields that the user sets and the batches replace by values of their own."""
        return sorted(
            name for name, value in self.values.items() if name in SET_BY_BATCHES and value
        )

    @property
    def run_otherwise(self) -> list[str]:
        """The fields of RUN_OTHERWISE that the user sets, in sentences by reason."""
        fields_by_reason: dict[str, list[str]] = defaultdict(list)
        for name, reason in RUN_OTHERWISE.items():
            if self.values.get(name):
                fields_by_reason[reason].append(name)
        return [
            f"not measured: {', '.join(names)} ({reason})"
            for reason, names in fields_by_reason.items()
        ]

    @property
    def averages_unequal(self) -> bool:
        """Whether TRL takes the plain mean over micro-batches of several sizes."""
        cut_by_length = self.values.get("train_sampling_strategy") == "batch_rebalance"
        formulation = self.trainer_arguments.get("formulation", "trl")
        return cut_by_length and self.accumulation > 1 and formulation == "trl"

    def untested_fields(self, config: Any) -> tuple[str, ...]:
        """Return the fields that may act in the user's run, but not on the fixed batches.

        They are those of UNSHOWN; with vLLM, also those of how it samples. `config` is the user's
        config, an object of the trainer's config class.
        """
        values = {name: self.values.get(name, off) for name, off in UNSHOWN.items()}
        corrects_sampler = self._corrects_sampler(config)
        values["vllm_importance_sampling_correction"] = corrects_sampler
        if not getattr(config, "beta", 1):  # without a KL nothing reads the reference
            values["sync_ref_model"] = False
        acting = sorted(name for name, off in UNSHOWN.items() if values[name] not in (None, off))
        if self.averages_unequal:
            acting.append("train_sampling_strategy")
        if corrects_sampler:
            acting += self._unusual_sampling()
        return tuple(acting)

    def _corrects_sampler(self, config: Any) -> bool:
        """Whether TRL weighs each loss by the ratio of policy to vLLM without being asked to."""
        name = "vllm_importance_sampling_correction"
        is_on = self.values.get(name, getattr(config, name, False))  # TRL's default: on
        # a user who names the correction's mode knows of the correction
        is_known = "vllm_importance_sampling_mode" in self.values
        return bool(is_on and not is_known and self.values.get("use_vllm"))

    def _unusual_sampling(self) -> list[str]:
        """Return the fields by which vLLM samples from another distribution than TRL scores."""
        sampled_with = self.values | (self.values.get("generation_kwargs") or {})
        scored_with = {
            "temperature": self.values.get("temperature", 1.0),
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
        }
        return [
            name
            for name, value in scored_with.items()
            if sampled_with.get(name) not in (None, value)
        ]

    def could_be(self, name: str, formulation_name: str) -> bool:
        """Whether its trainer might compute a formulation of an algorithm."""
        row = formulation(name, formulation_name)
        own_algorithm = self.trainer_arguments.get("algorithm")
        if {name, own_algorithm} & _OTHER_MODELS_OR_DATA:
            own_formulation = self.trainer_arguments.get("formulation")
            return (name, formulation_name) == (own_algorithm, own_formulation)
        if self.base in POLICY:
            return row.trainer in ("GRPOTrainer", self.base)
        stock_trainer = row.trainer
        if self.trainer_arguments:  # a trainer of ours: where our recipe trains this row
            stock_trainer = own_trainer(name).removeprefix("Book")
        return stock_trainer == self.base


def read_subject(path: str | Path | None, trainer: str | None) -> Subject:
    """Read what a user asks about: a config, a trainer, or both.

    A config that names an algorithm is a config of our recipes. A trainer of ours without a config
    trains the row that its config class has by default. Everything else is read as TRL's: a
    trainer with the fields of its config, and no row.

    Args:
        path: a config of this project, or one as `trl grpo --config` takes it.
        trainer: the dotted name of a trainer, such as "mypackage.MyTrainer". Without one, the
            config's keys tell which trainer of TRL it is for.

    Raises:
        InputError: config and trainer do not go together, or the keys do not tell which trainer
            they are for.
    """
    config_keys = read_config(path) if path else {}
    label = ", ".join(str(part) for part in (path, trainer) if part)
    if "algorithm" in config_keys:
        return _of_recipes(str(path), config_keys, trainer, label)
    # `dataset` is a block of this project's configs; only those for SFT name no algorithm
    if "dataset" in config_keys and trainer is None:
        return _of_sft(label, config_keys)
    other_trainers: list[str] = []
    if trainer is None:
        trainer, *other_trainers = _trainers_of_keys(str(path), config_keys)
    classes = _trainer_and_config(trainer)
    default_row = getattr(classes[1], "default_row", None)  # only configs of this project have one
    if path is None and default_row is not None:
        return _own_subject(label, classes, default_row, "chapter", values={})
    return _stock_subject(label, classes, path, other_trainers)


def _trainer_and_config(trainer: str) -> tuple[type, type]:
    """Return the class that a dotted name names, and its config class."""
    trainer_class = class_of(trainer)
    stock_class, stock_config = trainer_classes(base_name(trainer_class))
    if trainer_class is stock_class:
        return trainer_class, stock_config
    return trainer_class, config_class(trainer_class, stock_config)


def _stock_subject(
    label: str, classes: tuple[type, type], path: str | Path | None, other_trainers: Sequence[str]
) -> Subject:
    """Return a trainer of TRL, or a subclass, as a subject, with the config at `path`, if any."""
    trainer_class, config = classes
    base = base_name(trainer_class)
    values = _checked(path, config) if path else {}
    stock_fields = {f.name for f in fields_of(trainer_classes(base)[1])}
    added_fields = {f.name for f in fields_of(config)} - stock_fields  # by a subclass
    return Subject(
        label=label,
        base=base,
        classes=classes,
        values=values,
        fields=_loss_fields(values, added_fields),
        fits=tuple(other_trainers),
    )


def _of_sft(label: str, config_keys: Mapping[str, Any]) -> Subject:
    """Return a config of our recipe for SFT as a subject; it has no row of the table."""
    classes = trainer_classes("BookSFTTrainer")
    names = {f.name for f in fields_of(classes[1])}
    values = {name: value for name, value in config_keys.items() if name in names}
    return Subject(label, SFT, classes, values, _loss_fields(values))


def _loss_fields(values: Mapping[str, Any], added: Collection[str] = ()) -> dict[str, Any]:
    """Return those of a config's values that decide the loss on the fixed batches.

    Args:
        values: the values of a config's fields.
        added: the fields that a subclass has added to TRL's config: each may decide the loss.
    """
    deciding = (LOSS_FIELDS | SHARED_FIELDS | set(added)) - SCHEDULE - SET_BY_BATCHES
    # what these fields are about (vLLM, a moving reference, noise, experts) is in no fixed batch
    prefixes_without_effect = ("vllm_", "sync_ref_", "ref_model_", "neftune_", "router_aux_")
    return {
        name: value
        for name, value in values.items()
        if name in deciding and not name.startswith(prefixes_without_effect)
    }


def _of_recipes(
    path: str, config_keys: Mapping[str, Any], trainer: str | None, label: str
) -> Subject:
    """Return a config of our own recipes, for our trainer or a subclass of it, as a subject."""
    from trl import ModelConfig

    algorithm = config_keys["algorithm"]
    own_class, config = trainer_classes(own_trainer(algorithm))
    trainer_class = class_of(trainer) if trainer else own_class
    if not issubclass(trainer_class, own_class):
        raise InputError(
            f"{path} is a config of this project's trainer, and {trainer} is none; leave --trainer "
            "out, or give a config of that trainer"
        )
    # keys such as `dataset`, which the recipe reads and the trainer's config does not have
    run_fields = [f.name for run in (PolicyGradientRun, AlignmentRun) for f in fields_of(run)]
    values = read_fields(path, [config, ModelConfig], run_fields)
    formulation_name = config_keys.get("formulation", "chapter")
    return _own_subject(label, (trainer_class, config), algorithm, formulation_name, values)


def _own_subject(
    label: str,
    classes: tuple[type, type],
    algorithm: str,
    formulation_name: str,
    values: Mapping[str, Any],
) -> Subject:
    """Return one of our trainers, or a subclass, with its config as a subject.

    Args:
        label: how the subject is called in sentences.
        classes: the trainer and its config class.
        algorithm: the row that it trains.
        formulation_name: the row's formulation.
        values: the fields that the user's config sets.
    """
    row = formulation(algorithm, formulation_name)
    base = base_name(classes[0])
    # a default of None, which most fields of our config classes have, leaves the field to the row
    defaults = {
        config_field.name: config_field.default
        for config_field in fields_of(classes[1])
        if config_field.name in row.reads and config_field.default not in (None, MISSING)
    }
    fields = _loss_fields(defaults | values)
    for name, value in fields_for_batches(row).items():
        # The user's value holds for what the equation reads, such as PPO's `gamma`. Any other field
        # is set for the batches, which do not have, for example, the reward that the user names.
        is_in_equation = name in row.reads
        if name not in fields or not is_in_equation:
            fields[name] = value
    # A row of GRPOTrainer fixes some fields of its config, such as `loss_type`; the user's value
    # overrides that. A trainer of ours has these fields only if it stands on GRPOTrainer, too:
    # BookRLOOTrainer, which also trains rows of GRPOTrainer, stands on RLOOTrainer.
    if base == row.trainer == "GRPOTrainer":
        fields = dict(row.settings) | fields
    return Subject(
        label=label,
        base=base,
        classes=classes,
        values=values,
        fields=fields,
        trainer_arguments=row_arguments(algorithm, formulation_name),
    )


def class_of(dotted: str) -> type:
    """Import a trainer class by its name, as `module.Class` or `module:Class`.

    TRL's own need no module.
    """
    dotted = dotted.replace(":", ".")
    if dotted in STOCK:
        return trainer_classes(dotted)[0]
    module, _, name = dotted.rpartition(".")
    if not module:
        hint = nearest(dotted, TRAINERS)
        raise InputError(f"--trainer: {dotted!r} has no module{hint}; write mypackage.MyTrainer")
    try:
        trainer = getattr(import_module(module), name)
    except AttributeError as error:
        hint = nearest(name, dir(import_module(module)))
        raise InputError(f"--trainer: {module} has no {name}{hint}") from error
    except Exception as error:  # whatever the user's module raises
        why = " ".join(str(error).split())
        raise InputError(f"--trainer: {module} cannot be imported: {why}") from error
    if not isinstance(trainer, type) or not base_name(trainer):
        raise InputError(f"--trainer: {dotted} is not a subclass of a trainer of TRL")
    return trainer


def config_class(trainer: type, stock: type) -> type:
    """Return the config class of a trainer: ours name it, others annotate `args` with it.

    Args:
        trainer: the trainer's class.
        stock: TRL's config class for it, which is returned where the trainer names none.
    """
    own = getattr(trainer, "config_class", None)
    if own is not None and issubclass(own, stock):
        return own
    annotation = get_annotations(trainer.__init__, eval_str=True).get("args")
    members = getattr(annotation, "__args__", (annotation,))  # of a union, as `GRPOConfig | None`
    return next((m for m in members if isinstance(m, type) and issubclass(m, stock)), stock)


def _checked(path: str | Path, config: type) -> dict[str, Any]:
    """Read a config as a script of TRL takes it; its keys must be fields that a script knows."""
    import trl

    classes = [config, trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig]
    # keys that the scripts read themselves: they may stand in the file and are skipped
    keys_of_scripts = ("reward_funcs", "reward_model_name_or_path", "env")
    config_names = {f.name for f in fields_of(config)}
    skipped = [name for name in keys_of_scripts if name not in config_names]
    # TRL's own parser takes booleans for scale_rewards
    words = {"scale_rewards": {True: "group", False: "none"}}
    return read_fields(path, classes, skipped, words)


def _trainers_of_keys(path: str, config_keys: Mapping[str, Any]) -> list[str]:
    """Return the trainers of TRL for which a config may be, the most usual one first.

    Only keys that some config class of TRL has are looked at; all others are a recipe's own. A
    trainer fits if its config class has all these keys and knows every `loss_type` that is named.

    Raises:
        InputError: no trainer fits, or several of which none is the usual one.
    """
    field_names = {
        trainer: {f.name for f in fields_of(trainer_classes(trainer)[1])} for trainer in STOCK
    }
    of_any_trainer = set().union(*field_names.values())
    trainer_keys = of_any_trainer.intersection(config_keys)
    loss_types = config_keys.get("loss_type", [])
    if not isinstance(loss_types, list):
        loss_types = [loss_types]
    loss_types = {str(loss_type) for loss_type in loss_types}
    fitting = []
    for trainer in STOCK:
        known_losses = _loss_types(trainer)  # empty if its config has no field `loss_type`
        knows_losses = not known_losses or loss_types <= known_losses
        if trainer_keys <= field_names[trainer] and knows_losses:
            fitting.append(trainer)
    # `reward_funcs` is a field of no config class: only TRL's scripts for GRPO and RLOO read it. So
    # it decides for these two, unless other keys have already ruled out GRPO.
    if "GRPOTrainer" in fitting and "reward_funcs" in config_keys:
        fitting = [trainer for trainer in fitting if trainer in POLICY]
    chosen = [trainer for trainer in fitting if trainer in _PREFERRED] or fitting
    if len(chosen) == 1:
        return chosen + [trainer for trainer in fitting if trainer not in chosen]
    example = fitting[0] if fitting else TRAINERS[0]
    raise InputError(
        f"{path}: its keys fit {' and '.join(fitting) or 'no single trainer'}; say which with "
        f"--trainer, such as --trainer {example}"
    )


_PREFERRED = ("GRPOTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
"""Where a config's keys fit several trainers, one of these is assumed."""


def _loss_types(trainer: str) -> set[str]:
    """Return the loss types that a trainer is known to have; none where it has no such field.

    They are those of the recorded losses, whose keys are such as "GRPOTrainer loss_type=grpo".
    """
    loss_types: set[str] = set()
    for case in shipped()["losses"]:
        loss_type = settings(case).get("loss_type", [])
        if case.split()[0] == trainer:
            loss_types.update([loss_type] if isinstance(loss_type, str) else loss_type)
    return loss_types


def side_of(subject: Subject, **changes: Any) -> Stock:
    """Return a subject, with some fields changed, as a side of a comparison."""
    sampling = ("generation_kwargs", "steps_per_generation")  # the batches fix what is sampled
    values = {**subject.fields, **changes}
    fields = {name: value for name, value in values.items() if name not in sampling}
    trainer = subject.base
    # A side names our trainer where it is ours: the one with which our recipe trains the row. No
    # recipe trains with BookRLOOTrainer, so that one goes by its stock trainer, RLOOTrainer.
    if subject.trainer_arguments and trainer != "RLOOTrainer":
        trainer = own_trainer(subject.trainer_arguments["algorithm"])
    return Stock(
        fields,
        subject.label,
        trainer,
        classes=subject.classes,
        trainer_arguments=subject.trainer_arguments,
    )
