"""Which printed algorithm a config or a trainer computes, and what to change to get another.

The losses are measured with the user's fields, and with those changed, on the fixed batches, which
bring their own prompts, completions, rewards, model and schedule.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from dataclasses import fields as fields_of
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, SHARED_FIELDS, Formulation, formulation
from rlhf_trl.compare import pairs, policy
from rlhf_trl.compare.matrix import POLICY, Matrix, Result
from rlhf_trl.compare.measure import Book, Stock
from rlhf_trl.compare.models import quick_and_quiet, trainer_fields
from rlhf_trl.compare.policy import PolicyBatch
from rlhf_trl.compare.rows import Row, fields_for_batches
from rlhf_trl.compare.surface import settings, shipped
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config import read_config
from rlhf_trl.run.fields.policy_gradients import PolicyGradientRun
from rlhf_trl.run.fields.preferences import AlignmentRun
from rlhf_trl.run.read_fields import read_fields

SFT = "SFTTrainer"

TRAINERS = tuple(name for name in pairs.STOCK if name != SFT)
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
        further_batches: list[PolicyBatch] = []  # which are not among `policy.BATCHES`
        if self.base == "GRPOTrainer":
            names.append("tools")
        if self.base in POLICY:
            names += ["on_policy", "extreme"]
            if self.generation > self.accumulation:
                names.append("steps_per_generation")
            if self.generation < self.accumulation:
                further_batches.append(policy.ACROSS)
        return [batch for batch in policy.BATCHES if batch.name in names] + further_batches

    @property
    def left_out(self) -> list[str]:
        """The fields that the user sets and the batches replace by values of their own."""
        return sorted(
            name for name, value in self.values.items() if name in SET_BY_BATCHES and value
        )

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
            stock_trainer = pairs.own_trainer(name).removeprefix("Book")
        return stock_trainer == self.base


@dataclass(frozen=True)
class Distance:
    """How far a subject is from a formulation of an algorithm."""

    algorithm: str
    formulation: str  # "chapter" or "code"; "trl" where stock TRL has a loss of its own
    equal: bool  # whether the gradients agree on every batch
    worst: Result  # on the batch on which they differ most
    on_policy: bool | None  # whether they agree on the on-policy batch; None where there is none
    changes: Mapping[str, Any]  # fields to change, with the values to give them
    # the result on the worst batch after these changes, measured; None with nothing to change
    then: Result | None
    why: str  # why no settings give equality, where the table of algorithms says so
    untested: tuple[str, ...] = ()  # fields whose effect the fixed batches may not show

    @property
    def name(self) -> str:
        """The formulation that the subject is held against, in words."""
        return f"{self.algorithm} ({self.formulation})"


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
    stock_class, stock_config = pairs.trainer_classes(pairs.base_name(trainer_class))
    if trainer_class is stock_class:
        return trainer_class, stock_config
    return trainer_class, config_class(trainer_class, stock_config)


def _stock_subject(
    label: str, classes: tuple[type, type], path: str | Path | None, other_trainers: Sequence[str]
) -> Subject:
    """Return a trainer of TRL, or a subclass, as a subject, with the config at `path`, if any."""
    trainer_class, config = classes
    base = pairs.base_name(trainer_class)
    values = _checked(path, config) if path else {}
    stock_fields = {f.name for f in fields_of(pairs.trainer_classes(base)[1])}
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
    classes = pairs.trainer_classes("BookSFTTrainer")
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
    own_class, config = pairs.trainer_classes(pairs.own_trainer(algorithm))
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
    base = pairs.base_name(classes[0])
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
        trainer_arguments=pairs.arguments(algorithm, formulation_name),
    )


def class_of(dotted: str) -> type:
    """Import a trainer class by its name, as `module.Class` or `module:Class`.

    TRL's own need no module.
    """
    dotted = dotted.replace(":", ".")
    if dotted in pairs.STOCK:
        return pairs.trainer_classes(dotted)[0]
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
    if not isinstance(trainer, type) or not pairs.base_name(trainer):
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
        trainer: {f.name for f in fields_of(pairs.trainer_classes(trainer)[1])}
        for trainer in pairs.STOCK
    }
    of_any_trainer = set().union(*field_names.values())
    trainer_keys = of_any_trainer.intersection(config_keys)
    loss_types = config_keys.get("loss_type", [])
    if not isinstance(loss_types, list):
        loss_types = [loss_types]
    loss_types = {str(loss_type) for loss_type in loss_types}
    fitting = []
    for trainer in pairs.STOCK:
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


def distances(
    subject: Subject,
    wanted: Sequence[tuple[str, str]] = (),
    matrix: Matrix | None = None,
    fixes: bool = True,
) -> list[Distance]:
    """Measure how far a subject is from formulations of algorithms, the nearest first.

    Args:
        subject: what is measured.
        wanted: (algorithm, formulation) pairs; none: all that the trainer could compute.
        matrix: keeps what was measured for the next call.
        fixes: whether to look for changes of fields that bring the subject closer.

    Raises:
        InputError: the trainer cannot be run on the fixed batches, or is not comparable with one of
            the `wanted`.
    """
    matrix = matrix or Matrix()
    measured = []
    with quick_and_quiet():
        try:
            for algorithm, formulation_name in wanted or _comparable(subject):
                measured.append(_distance(matrix, subject, algorithm, formulation_name, fixes))
        except InputError:
            raise
        except Exception as error:  # whatever the user's trainer or config raises
            problem = f"{subject.classes[0].__name__} cannot be run on the fixed batches"
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(f"{subject.label}: {problem}: {message}") from error
    return sorted(measured, key=lambda distance: (not distance.equal, _away(distance.worst)))


def _comparable(subject: Subject) -> list[tuple[str, str]]:
    """Return the (algorithm, formulation) pairs that the subject's trainer could compute."""
    return [
        (algorithm, formulation_name)
        for algorithm, row in ALGORITHMS.items()
        for formulation_name in row.formulations
        if subject.could_be(algorithm, formulation_name)
        # where stock TRL computes the chapter's equation (`trl` is True), "trl" is the same again
        and (formulation_name != "trl" or row.chapter.trl is not True)
    ]


def _away(result: Result) -> tuple[float, float]:
    """Return the key by which results are sorted, the nearest first: (1 - cosine, error).

    The direction comes first, since no learning rate can undo a difference in it. 1 - cosine is
    rounded, so that the error decides between directions that hardly differ.
    """
    has_cosine = math.isfinite(result.grad_cosine)
    from_direction = 1 - result.grad_cosine if has_cosine else 0.0
    return round(from_direction, 2), result.grad_rel_error


def _distance(
    matrix: Matrix, subject: Subject, algorithm: str, formulation_name: str, fixes: bool
) -> Distance:
    """Measure a subject against one formulation; with `fixes`, also with changed fields.

    Raises:
        InputError: the subject trains on other data or models, or has no finite gradient.
    """
    row = formulation(algorithm, formulation_name)
    if not subject.could_be(algorithm, formulation_name):
        raise InputError(_incomparable(subject, algorithm, formulation_name))
    config = _built_config(subject)
    book = Book(algorithm, formulation_name, _params(row, subject, config))
    results = _measured(matrix, subject, book)
    # infinite where the book's gradient alone is 0; where both are, it is 0
    broken = [result.batch for result in results if not math.isfinite(result.grad_rel_error)]
    if broken:
        problem = "the gradient is not finite, or the book's is 0, on"
        raise InputError(f"{subject.label}: {problem} {', '.join(broken)}")
    agrees_on_batches = all(result.agrees for result in results)
    # Fields that the user sets may act in the user's run and not on the fixed batches. Then the two
    # cannot be called equal, even though they agree here. A difference remains one in any case.
    untested = subject.untested_fields(config) if agrees_on_batches else ()
    equal = agrees_on_batches and not untested
    worst = _worst(results)
    changes: Mapping[str, Any] = {}
    after_changes = None
    if fixes and not equal:
        if subject.trainer_arguments:  # a config of ours
            changes, after_changes = _fix_of_own(matrix, subject, book, config)
        else:
            changes, after_changes = _fix_of_stock(matrix, subject, book, config, worst)
    # verdicts on that batch alone, if it is measured; two zero gradients ("both zero") show nothing
    on_policy = [result.verdict for result in results if result.batch == "on_policy"]
    equal_on_policy = on_policy[0] == "equal" if on_policy else None
    return Distance(
        algorithm=algorithm,
        formulation=formulation_name,
        equal=equal,
        worst=worst,
        on_policy=equal_on_policy,
        changes=changes,
        then=after_changes,
        why="" if equal else _why_no_settings(subject, row),
        untested=untested,
    )


def _incomparable(subject: Subject, algorithm: str, formulation_name: str) -> str:
    """Return the sentence that refuses to hold a subject against a formulation."""
    label = subject.base
    if subject.trainer_arguments:
        label = "a config for {algorithm} ({formulation})".format(**subject.trainer_arguments)
    return (
        f"{subject.label}: {label} is not compared with {algorithm} ({formulation_name}), "
        "whose data or models are others"
    )


def _why_no_settings(subject: Subject, row: Formulation) -> str:
    """Return why no settings of the subject's trainer give a row, "" where there is no reason.

    The table's reason, `row.trl`, is about the row's stock trainer, so it does not apply to a
    trainer of ours, nor to RLOOTrainer, on which no row stands (rloo stands on GRPOTrainer).
    """
    reason_applies = not subject.trainer_arguments and subject.base != "RLOOTrainer"
    # `row.trl` is True where the stock trainer computes the row, else the reason why it cannot
    return row.trl if reason_applies and isinstance(row.trl, str) else ""


def _built_config(subject: Subject) -> Any:
    """Return the subject's config, an object of its config class, as for the fixed batches."""
    fields = trainer_fields()
    if subject.base in POLICY:
        fields |= {"num_generations": policy.GROUP, "per_device_train_batch_size": policy.ROWS}
    fields |= subject.fields
    return subject.classes[1](**fields)


def _fix_of_own(
    matrix: Matrix, subject: Subject, book: Book, config: Any
) -> tuple[dict[str, Any], Result | None]:
    """Return what to change in a config of ours to get another row.

    Args:
        matrix: measures the config after the changes.
        subject: what the user has written.
        book: the row to get, with its parameters.
        config: the user's config, an object of our class.

    Returns:
        The fields to change, with new values, and the worst result after that. The result is None
        where there is nothing to measure: no change, or a change of the algorithm or formulation,
        whose fields may not be those of the subject.
    """
    row = book.row
    new_values = _fields_of_plain_scoring(subject, config)
    # Fields that the trainer reads and the equation does not, such as `nll_weight`, go back to the
    # row's values. Those that the trainer needs on the fixed batches stay: no user has set them.
    read_by_trainer = row.trainer_reads.keys() - fields_for_batches(row).keys()
    for name in subject.fields.keys() & read_by_trainer:
        new_values[name] = row.trainer_reads[name]
    field_changes = _differing(new_values, config)
    row_changes = {}
    for name, value in (("algorithm", book.algorithm), ("formulation", book.formulation)):
        if subject.trainer_arguments[name] != value:
            row_changes[name] = value
    if row_changes or not field_changes:
        return row_changes | field_changes, None
    return field_changes, _worst(_measured(matrix, subject, book, **field_changes))


def _fix_of_stock(
    matrix: Matrix, subject: Subject, book: Book, config: Any, worst: Result
) -> tuple[dict[str, Any], Result | None]:
    """Return what to change in a config of TRL's, and the worst result after that.

    Where TRL has no settings that give the row, changes are only proposed if they halve the error
    of `worst`, the result before.
    """
    changes = _changes(subject, book, config)
    after_changes = _worst(_measured(matrix, subject, book, **changes))
    is_far = after_changes.grad_rel_error > worst.grad_rel_error / 2
    if book.row.trl is not True and is_far:
        return {}, None
    return changes, after_changes


def _worst(results: Sequence[Result]) -> Result:
    return max(results, key=_away)


def _measured(matrix: Matrix, subject: Subject, book: Book, **changes: Any) -> list[Result]:
    """Measure a subject with some fields changed, on the batches that say something about it."""
    batches = subject.batches
    if changes.get("steps_per_generation") or book.algorithm == "reinforce":
        batches = of_whole_generations(batches)
    row = Row(book, side_of(subject, **changes), variant=subject.label)
    return [matrix.compare(row, batch) for batch in batches]


def of_whole_generations(batches: Sequence[PolicyBatch]) -> list[PolicyBatch]:
    """Return the windows that see all of a generation: REINFORCE's baseline is its mean reward."""
    return [batch for batch in batches if batch.per_generation == batch.accumulation]


def side_of(subject: Subject, **changes: Any) -> Stock:
    """Return a subject, with some fields changed, as a side of a comparison."""
    sampling = ("generation_kwargs", "steps_per_generation")  # the batches fix what is sampled
    values = {**subject.fields, **changes}
    fields = {name: value for name, value in values.items() if name not in sampling}
    trainer = subject.base
    # A side names our trainer where it is ours: the one with which our recipe trains the row. No
    # recipe trains with BookRLOOTrainer, so that one goes by its stock trainer, RLOOTrainer.
    if subject.trainer_arguments and trainer != "RLOOTrainer":
        trainer = pairs.own_trainer(subject.trainer_arguments["algorithm"])
    return Stock(
        fields,
        subject.label,
        trainer,
        classes=subject.classes,
        trainer_arguments=subject.trainer_arguments,
    )


def _params(row: Formulation, subject: Subject, config: Any) -> dict[str, Any]:
    """Return the parameters of the book's function that the user's config decides.

    Each parameter that the row reads and the config has is among them. In a config of TRL's, the
    default counts where the user sets nothing, and a number that means something else to TRL is
    converted. In a config of ours, a field that is not set keeps the row's default.
    """
    params: dict[str, Any] = {}
    # A subject is held against a row's plain equation. `importance_cap` and `baseline_value` would
    # make it another one, and the length limit is that of the batches (`_length_limit`).
    not_from_user = ("max_completion_length", "importance_cap", "baseline_value")
    for name in row.reads:
        if name in not_from_user:
            continue
        value = _value_of_user(subject, config, name)
        # A row that reads label_smoothing smooths the labels by default. A 0, TRL's default, does
        # not smooth at all, so it is not taken for the user's share: the row keeps its own.
        if value is None or (name == "label_smoothing" and not value):
            continue
        # What TRL adds to a parameter: its epsilon_high for CISPO, the bound itself, is 1 more than
        # the row's, the distance from 1. A smaller value (a bound below 1 makes no sense) must be
        # meant as the row's, and is taken as it is.
        offset = 0 if subject.trainer_arguments else row.trl_offset.get(name, 0)
        if offset and value >= offset:
            value = value - offset
        row.parameters({**_length_limit(row), name: value})  # refuses what the row cannot have
        params[name] = value
    return params


def _value_of_user(subject: Subject, config: Any, name: str) -> Any:
    """Return the value that the user's config has for a parameter of a row, None for none."""
    if name == "gamma_beta_ratio" and hasattr(config, "simpo_gamma"):  # a CPOConfig: gamma itself
        return config.simpo_gamma / config.beta
    value = subject.fields.get(name) if subject.trainer_arguments else getattr(config, name, None)
    if value is None and name == "epsilon_high":
        return getattr(config, "epsilon", None)  # what TRL falls back to
    return value


def _length_limit(row: Formulation) -> dict[str, Any]:
    """Return the batches' limit of a completion as a parameter, if the row reads one."""
    return {"max_completion_length": policy.LIMIT} if "max_completion_length" in row.reads else {}


def _changes(subject: Subject, book: Book, config: Any) -> dict[str, Any]:
    """Return the fields, with new values, that turn a config of TRL's into a row.

    Args:
        subject: what the user has written.
        book: the row, with the parameters that the user's fields give it.
        config: the user's config, an object of TRL's class.
    """
    row = book.row
    new_values = _trl_values(book)
    new_values |= _fields_of_plain_scoring(subject, config)
    new_values |= _defaults_of_unread(subject, read=new_values.keys() | row.reads.keys())
    if "loss_type" in new_values:  # the weights of the user's losses do not fit the row's losses
        new_values.setdefault("loss_weights", None)
    if "beta" not in row.reads and getattr(config, "beta", 0):  # the row has no KL
        new_values["beta"] = 0.0
    beta = new_values.get("beta", getattr(config, "beta", None))
    if beta == 0:  # without a KL nothing reads this field, so it needs no change
        new_values.pop("use_bias_correction_kl", None)
    changes = _differing(new_values, config)
    # A policy-gradient row with window "window" divides by the tokens of its accumulation window.
    # TRL divides by the tokens of the generation over its number of windows. The two are the same
    # if each generation feeds exactly one window: then steps_per_generation is the accumulation.
    divides_by_window = getattr(row, "window", "") == "window"
    if divides_by_window and subject.generation != subject.accumulation:
        changes["steps_per_generation"] = subject.accumulation
    return changes


def _trl_values(book: Book) -> dict[str, Any]:
    """Return the fields of TRL's config that make a row, and parameters whose default differs."""
    row = book.row
    params = {**_length_limit(row), **book.params}
    values = row.parameters(params)  # these, and the row's defaults for all others
    trl_values = dict(row.fixed(params))
    if "label_smoothing" in row.reads:  # the row's default is not TRL's, which is 0
        trl_values["label_smoothing"] = values["label_smoothing"]
    for name, offset in row.trl_offset.items():  # as CISPO's bound, which is 1 more in TRL
        trl_values[name] = values[name] + offset
    return trl_values


def _defaults_of_unread(subject: Subject, read: Collection[str]) -> dict[str, Any]:
    """Return the defaults of the loss fields that the user sets and a row does not read.

    Args:
        subject: what the user has written.
        read: the fields that the row reads, or that are set for it anyway.

    `beta` is left out: for a row without a KL it has to be 0, whatever its default is.
    """
    unread = LOSS_FIELDS & (subject.fields.keys() - {*read, "beta"})
    return {
        config_field.name: config_field.default
        for config_field in fields_of(subject.classes[1])
        if config_field.name in unread and config_field.default is not MISSING
    }


def _fields_of_plain_scoring(subject: Subject, config: Any) -> dict[str, Any]:
    """Return the fields that every policy-gradient row has alike: no masking, temperature 1.

    No row masks truncated completions, and none divides logits by a temperature when it scores. The
    user's temperature moves to where it is used for sampling alone. Configs of other trainers do
    not have these fields, and `_differing` leaves them out.
    """
    new_values: dict[str, Any] = {"mask_truncated_completions": False}
    if getattr(config, "temperature", 1.0) != 1.0:
        sampling = {"temperature": config.temperature}
        sampling |= subject.values.get("generation_kwargs") or {}
        new_values |= {"temperature": 1.0, "generation_kwargs": sampling}
    return new_values


def _differing(new_values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the new values of those fields that a config has with another value."""
    return {
        name: value
        for name, value in new_values.items()
        if hasattr(config, name) and _unlisted(getattr(config, name)) != _unlisted(value)
    }


def _unlisted(value: Any) -> Any:
    """Return the only item of a list of one, any other value as it is: TRL takes either."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
