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
from rlhf_trl.compare.rows import Row, own_fields
from rlhf_trl.compare.surface import settings, shipped
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config import read_config
from rlhf_trl.run.fields.policy_gradients import PolicyGradientRun
from rlhf_trl.run.fields.preferences import AlignmentRun
from rlhf_trl.run.read_fields import read_fields

TRAINERS = tuple(name for name in pairs.STOCK if name != "SFTTrainer")
"""Stock trainers whose configs can be told apart."""

SCHEDULE = {
    *("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"),
    *("num_iterations", "max_length"),
}
OWN = {
    *("num_generations", "num_generations_eval", "max_completion_length"),
    *("reward_weights", "missing_eos_penalty", "teacher_models", "teacher_weights", "teacher"),
    *("teacher_rate", "demonstration", "demonstration_template"),
}
"""Fields for which the batches have values of their own: several like the user's, or others."""

UNSHOWN = {
    **dict.fromkeys(("delta", "off_policy_mask_threshold", "reward_clip_range")),
    **{"entropy_coef": 0.0, "top_entropy_quantile": 1.0, "use_adaptive_entropy": False},
    **{"disable_dropout": True, "neftune_noise_alpha": None, "router_aux_loss_coef": None},
    **{"use_liger_kernel": False, "sync_ref_model": False},
    "vllm_importance_sampling_correction": False,
}
"""Fields that act where no batch of these may come, with the value at which none does: the terms of
rare tokens, noise, experts, other kernels, a reference that moves, another sampler. Where a config
has another value, it is not known to be any algorithm."""


_ALONE = {"ppo", "kwise", "orm", "prm"}
_ALONE |= {name for name, row in ALGORITHMS.items() if row.chapter.family == "distillation"}
"""Algorithms whose models or data are of a kind that no other formulation reads."""


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
            return size // self.values.get("per_device_train_batch_size", 8)
        return self.values.get("steps_per_generation") or self.accumulation

    @property
    def batches(self) -> list[PolicyBatch]:
        """The windows on which it is measured."""
        names = ["heavy", "ragged", "accumulation"]
        across: list[PolicyBatch] = []
        if self.base == "GRPOTrainer":
            names.append("tools")
        if self.base in POLICY:
            names += ["on_policy", "extreme"]
            if self.generation > self.accumulation:
                names.append("steps_per_generation")
            if self.generation < self.accumulation:
                across.append(policy.ACROSS)
        return [batch for batch in policy.BATCHES if batch.name in names] + across

    @property
    def left_out(self) -> list[str]:
        """The user's fields that the batches replace by others."""
        return sorted(name for name, value in self.values.items() if name in OWN and value)

    @property
    def averages_unequal(self) -> bool:
        """Whether TRL takes the plain mean over micro-batches of several sizes."""
        cut_by_length = self.values.get("train_sampling_strategy") == "batch_rebalance"
        formulation = self.trainer_arguments.get("formulation", "trl")
        return cut_by_length and self.accumulation > 1 and formulation == "trl"

    def unsettled(self, config: Any) -> tuple[str, ...]:
        """Return the fields of UNSHOWN that may act in the user's run; `config` is its config."""
        set_to = {name: self.values.get(name, off) for name, off in UNSHOWN.items()}
        corrects = self._corrects_sampler(config)
        set_to["vllm_importance_sampling_correction"] = corrects
        if not getattr(config, "beta", 1):  # then nothing reads the reference
            set_to["sync_ref_model"] = False
        acting = sorted(name for name, off in UNSHOWN.items() if set_to[name] not in (None, off))
        if self.averages_unequal:
            acting.append("train_sampling_strategy")
        return (*acting, *(self._unusual_sampling() if corrects else ()))

    def _corrects_sampler(self, config: Any) -> bool:
        """Whether losses are weighed by what policy and vLLM say of the same tokens, unasked."""
        name = "vllm_importance_sampling_correction"
        is_on = self.values.get(name, getattr(config, name, False))  # TRL's default: on
        # whoever names its mode knows of it
        is_known = "vllm_importance_sampling_mode" in self.values
        return bool(is_on and not is_known and self.values.get("use_vllm"))

    def _unusual_sampling(self) -> list[str]:
        """Return the fields that bring what vLLM samples from away from what is scored."""
        sampled = self.values | (self.values.get("generation_kwargs") or {})
        usual = {
            "temperature": self.values.get("temperature", 1.0),
            "top_p": 1.0,
            "top_k": 0,
            "min_p": None,
        }
        return [name for name, value in usual.items() if sampled.get(name) not in (None, value)]

    def could_be(self, name: str, formulation_name: str) -> bool:
        """Whether its trainer might compute a formulation of an algorithm."""
        row, own = formulation(name, formulation_name), self.trainer_arguments.get("algorithm")
        if {name, own} & _ALONE:
            return (name, formulation_name) == (own, self.trainer_arguments.get("formulation"))
        if self.base in POLICY:
            return row.trainer in ("GRPOTrainer", self.base)
        home = (
            pairs.own_trainer(name).removeprefix("Book") if self.trainer_arguments else row.trainer
        )
        return home == self.base


@dataclass(frozen=True)
class Distance:
    """How far a subject is from a formulation of an algorithm."""

    algorithm: str
    formulation: str  # "chapter" or "code"; "trl" where stock TRL has a loss of its own
    equal: bool  # whether the gradients agree on every batch
    worst: Result  # on the batch on which they differ most
    on_policy: bool | None  # whether they agree on the on-policy batch; None where there is none
    changes: Mapping[str, Any]  # fields to change, with the values to give them
    then: Result | None  # the worst after these changes, measured; None with nothing to change
    why: str  # why no settings give equality, where the table says so
    untested: tuple[str, ...] = ()  # fields that act only where no batch of these may come

    @property
    def name(self) -> str:
        """What it is held against, in words."""
        return f"{self.algorithm} ({self.formulation})"


def read_subject(path: str | Path | None, trainer: str | None) -> Subject:
    """Read what a user asks about: a config, a trainer, or both.

    A config with an algorithm is one of our recipes'. Of our trainers without a config, the row is
    the one that their config class has by default. All else is read as TRL's: a trainer with its
    config's fields, and no row.

    Args:
        path: a config of this project, or one as `trl grpo --config` takes it.
        trainer: the dotted name of a trainer, such as "mypackage.MyTrainer". Without one, the
            config's keys tell which trainer of TRL it is for.

    Raises:
        InputError: config and trainer do not go together, the keys do not tell which trainer they
            are for, or the trainer has one loss only.
    """
    config_keys = read_config(path) if path else {}
    label = ", ".join(str(part) for part in (path, trainer) if part)
    if "algorithm" in config_keys:
        return _of_recipes(str(path), config_keys, trainer, label)
    # `dataset` is a block of this project's configs, of which those of SFT have no algorithm
    if "dataset" in config_keys and trainer is None:
        reason = "SFT has one loss only, which rlhf-trl compare measures"
        raise InputError(f"{path} names no algorithm; {reason}")
    other_trainers: list[str] = []
    if trainer is None:
        trainer, *other_trainers = _trainers_of_keys(str(path), config_keys)
    classes = _trainer_and_config(trainer)
    default_row = getattr(classes[1], "default_row", None)  # only configs of this project have one
    if path is None and default_row is not None:
        return _own_subject(label, classes, default_row, "chapter", values={})
    return _stock_subject(label, classes, path, other_trainers)


def _trainer_and_config(trainer: str) -> tuple[type, type]:
    """Return the class that a dotted name names, and its config class; refuse TRL's SFTTrainer."""
    trainer_class = class_of(trainer)
    base = pairs.base_name(trainer_class)
    if base not in TRAINERS:
        known = ", ".join(TRAINERS)
        raise InputError(
            f"{trainer} has one loss only, which the matrix compares; --config and --trainer tell "
            f"apart what {known} compute"
        )
    stock_class, stock_config = pairs.trainer_classes(base)
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


def _loss_fields(values: Mapping[str, Any], added: Collection[str] = ()) -> dict[str, Any]:
    """Return those of a config's values that decide the loss.

    Fields that a subclass has `added` to TRL's config may all do so.
    """
    deciding = (LOSS_FIELDS | SHARED_FIELDS | set(added)) - SCHEDULE - OWN
    idle = ("vllm_", "sync_ref_", "ref_model_", "neftune_", "router_aux_")
    return {
        name: value
        for name, value in values.items()
        if name in deciding and not name.startswith(idle)
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
    # keys such as `dataset`, which are the run's and no fields of the trainer's config
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
        label: how it is called in sentences.
        classes: the trainer and its config class.
        algorithm: the row that it trains.
        formulation_name: the row's formulation.
        values: what the user's config says.
    """
    row = formulation(algorithm, formulation_name)
    base = pairs.base_name(classes[0])
    # None, which our config classes mostly have, leaves a field to the row
    defaults = {
        config_field.name: config_field.default
        for config_field in fields_of(classes[1])
        if config_field.name in row.reads and config_field.default not in (None, MISSING)
    }
    # What the trainer needs to run on the batches, such as the name of a reward that they have,
    # overrides the user's values. Only where the equation reads the field, as PPO's `gamma`, the
    # user's value holds.
    needed = own_fields(row)
    not_in_equation = {name: value for name, value in needed.items() if name not in row.reads}
    fields = needed | _loss_fields(defaults | values) | not_in_equation
    # TRL's fields that the row fixes, such as `loss_type`, unless the user has them. Where only one
    # of the two is GRPOTrainer, they are fields of another config: BookRLOOTrainer trains rows of
    # GRPOTrainer, and our distillation, which stands on GRPOTrainer, rows of other trainers.
    if base == "GRPOTrainer" and row.trainer == "GRPOTrainer":
        fields = dict(row.settings) | fields
    trainer_arguments = pairs.arguments(algorithm, formulation_name)
    return Subject(label, base, classes, values, fields, trainer_arguments)


def class_of(dotted: str) -> type:
    """Import a trainer class by its dotted name; TRL's own need no module."""
    if dotted in pairs.STOCK:
        return pairs.trainer_classes(dotted)[0]
    module, _, name = dotted.rpartition(".")
    if not module:
        hint = nearest(dotted, TRAINERS)
        raise InputError(f"--trainer: {dotted!r} has no module{hint}; write mypackage.MyTrainer")
    try:
        trainer = getattr(import_module(module), name)
    except AttributeError as error:
        raise InputError(f"--trainer: {module} has no {name}") from error
    except Exception as error:  # whatever the user's module raises
        why = " ".join(str(error).split())
        raise InputError(f"--trainer: {module} cannot be imported: {why}") from error
    if not isinstance(trainer, type) or not pairs.base_name(trainer):
        raise InputError(f"--trainer: {dotted} is not a subclass of a trainer of TRL")
    return trainer


def config_class(trainer: type, stock: type) -> type:
    """Return the config class of a trainer: ours name it, others annotate `args` with it."""
    own = getattr(trainer, "config_class", None)
    if own is not None and issubclass(own, stock):
        return own
    kind = get_annotations(trainer.__init__, eval_str=True).get("args")
    members = getattr(kind, "__args__", (kind,))
    return next((m for m in members if isinstance(m, type) and issubclass(m, stock)), stock)


def _checked(path: str | Path, config: type) -> dict[str, Any]:
    """Read a config as a script of TRL takes it; its keys must be fields of one of the classes."""
    import trl

    classes = [config, trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig]
    scripts = ("reward_funcs", "reward_model_name_or_path", "env")
    unknown = [name for name in scripts if not any(f.name == name for f in fields_of(config))]
    # TRL's own parser takes booleans for scale_rewards
    words = {"scale_rewards": {True: "group", False: "none"}}
    return read_fields(path, classes, unknown, words)


def _trainers_of_keys(path: str, config_keys: Mapping[str, Any]) -> list[str]:
    """Return the trainers of TRL for which a config may be, the most usual one first.

    Of the keys only those count that a config class of TRL has, since others are a recipe's own.
    A trainer fits if its class has all of them, and if it knows every `loss_type` that is named.

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
        known_losses = _loss_types(trainer)  # none: its config has no field `loss_type`
        knows_losses = not known_losses or loss_types <= known_losses
        if trainer_keys <= field_names[trainer] and knows_losses:
            fitting.append(trainer)
    # No class has `reward_funcs`, which TRL's scripts for policy gradients read themselves. So it
    # says that the config is theirs, unless other keys have ruled GRPO out.
    if "GRPOTrainer" in fitting and "reward_funcs" in config_keys:
        fitting = [trainer for trainer in fitting if trainer in POLICY]
    chosen = [trainer for trainer in fitting if trainer in _USUAL] or fitting
    if len(chosen) == 1:
        return chosen + [trainer for trainer in fitting if trainer not in chosen]
    example = fitting[0] if fitting else TRAINERS[0]
    raise InputError(
        f"{path}: its keys fit {' and '.join(fitting) or 'no single trainer'}; say which with "
        f"--trainer, such as --trainer {example}"
    )


_USUAL = ("GRPOTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
"""The trainers that are assumed where a config's keys fit several."""


def _loss_types(trainer: str) -> set[str]:
    """Return the loss types that a trainer is known to have; none where it has no such field."""
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
        InputError: the trainer cannot be run on the fixed batches.
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
        and (formulation_name != "trl" or row.chapter.trl is not True)  # else it is the chapter's
    ]


def _away(result: Result) -> tuple[float, float]:
    """Order results by direction first, which no learning rate can undo, then by the error.

    The cosine is rounded, so that directions which hardly differ leave the order to the error.
    """
    away = 1 - result.grad_cosine if math.isfinite(result.grad_cosine) else 0.0
    return round(away, 2), result.grad_rel_error


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
    left = Book(algorithm, formulation_name, _params(row, subject, config))
    results = _measured(matrix, subject, left)
    broken = [result.batch for result in results if not math.isfinite(result.grad_rel_error)]
    if broken:
        problem = "the gradient is not finite, or the book's is 0, on"
        raise InputError(f"{subject.label}: {problem} {', '.join(broken)}")
    agrees = all(result.agrees for result in results)
    # only equality needs the proviso that no field acts where these batches do not come
    untested = subject.unsettled(config) if agrees else ()
    equal = agrees and not untested
    worst = _worst(results)
    changes: Mapping[str, Any] = {}
    after_changes = None
    if fixes and not equal:
        if subject.trainer_arguments:  # a config of ours
            changes, after_changes = _fix_of_own(matrix, subject, left, config)
        else:
            changes, after_changes = _fix_of_stock(matrix, subject, left, config, worst)
    equal_on_policy = None
    for result in results:
        if result.batch == "on_policy":
            # not `agrees`, which holds for two zero gradients, too: they show nothing
            equal_on_policy = result.verdict == "equal"
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
    """Return why no settings of its stock trainer give a row, "" where the table has no reason.

    `row.trl` is True, or the reason why the row's stock trainer has no settings for it. That one
    is never RLOOTrainer (for rloo it is GRPOTrainer), nor a trainer of ours.
    """
    is_about_it = not subject.trainer_arguments and subject.base != "RLOOTrainer"
    return row.trl if is_about_it and isinstance(row.trl, str) else ""


def _built_config(subject: Subject) -> Any:
    """Return the subject's config, built as for the fixed batches."""
    fields = trainer_fields()
    if subject.base in POLICY:
        fields |= {"num_generations": policy.GROUP, "per_device_train_batch_size": policy.ROWS}
    return subject.classes[1](**{**fields, **subject.fields})


def _fix_of_own(
    matrix: Matrix, subject: Subject, left: Book, config: Any
) -> tuple[dict[str, Any], Result | None]:
    """Return what to change in a config of ours to get the row `left`, and the worst result then.

    The result is None where there is nothing to measure: no change, or another algorithm or
    formulation, whose fields may not be those of the subject.
    """
    row = left.row
    wanted = _wanted_of_any_row(subject, config)
    # Fields that the trainer reads and the equation does not, such as `nll_weight`, go back to the
    # row's values; not those that `_own_subject` has set for the batches.
    read_by_trainer = row.trainer_reads.keys() - own_fields(row).keys()
    for name in subject.fields.keys() & read_by_trainer:
        wanted[name] = row.trainer_reads[name]
    field_changes = _differing(wanted, config)
    row_changes = {}
    for name, value in (("algorithm", left.algorithm), ("formulation", left.formulation)):
        if subject.trainer_arguments[name] != value:
            row_changes[name] = value
    if row_changes or not field_changes:
        return row_changes | field_changes, None
    return field_changes, _worst(_measured(matrix, subject, left, **field_changes))


def _fix_of_stock(
    matrix: Matrix, subject: Subject, left: Book, config: Any, worst: Result
) -> tuple[dict[str, Any], Result | None]:
    """Return what to change in a config of TRL's, and the worst result after that.

    Where TRL has no settings that give the row, changes are only proposed if they halve the error
    of `worst`, the result before.
    """
    changes = _changes(subject, left, config)
    after_changes = _worst(_measured(matrix, subject, left, **changes))
    is_far = after_changes.grad_rel_error > worst.grad_rel_error / 2
    if left.row.trl is not True and is_far:
        return {}, None
    return changes, after_changes


def _worst(results: Sequence[Result]) -> Result:
    return max(results, key=_away)


def _measured(matrix: Matrix, subject: Subject, left: Book, **changes: Any) -> list[Result]:
    """Measure a subject with some fields changed, on the batches that say something about it."""
    batches = subject.batches
    if changes.get("steps_per_generation") or left.algorithm == "reinforce":
        batches = of_whole_generations(batches)
    row = Row(left, side_of(subject, **changes), variant=subject.label)
    return [matrix.compare(row, batch) for batch in batches]


def of_whole_generations(batches: Sequence[PolicyBatch]) -> list[PolicyBatch]:
    """Return the windows that see all of a generation, which REINFORCE's baseline spans."""
    return [batch for batch in batches if batch.per_generation == batch.accumulation]


def side_of(subject: Subject, **changes: Any) -> Stock:
    """Return a subject, with some fields changed, as a side of a comparison."""
    sampling = ("generation_kwargs", "steps_per_generation")  # the batches fix what is sampled
    values = {**subject.fields, **changes}
    fields = {name: value for name, value in values.items() if name not in sampling}
    trainer = subject.base
    # Of ours, the name of our trainer is needed. `own_trainer` has that of the recipe, which is
    # BookGRPOTrainer for rloo; a BookRLOOTrainer, which no recipe trains with, keeps its base.
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
    """Return the book's parameters that the user's config decides, as far as the row takes them.

    A config of TRL's has its defaults and its meanings of the fields, which are converted here; of
    ours only `subject.fields` count, as a field that it does not set has the row's default.
    """
    params: dict[str, Any] = {}
    # The length is the batches' (`_required`); without the other two a row is its plain equation.
    not_in_config = ("max_completion_length", "importance_cap", "baseline_value")
    for name in row.reads:
        if name in not_in_config:
            continue
        value = _given_value(subject, config, name)
        # A row that reads label_smoothing is about smoothed labels: 0, as TRL has by default, does
        # not ask for it, and the row keeps its own share.
        if value is None or (name == "label_smoothing" and not value):
            continue
        offset = 0 if subject.trainer_arguments else row.trl_offset.get(name, 0)
        # CISPO's epsilon_high is the bound itself in TRL, 1 + the row's. A bound below 1 makes no
        # sense, so such a value must be meant as the row's.
        if offset and value >= offset:
            value = value - offset
        row.parameters({**_required(row), name: value})  # refuses what the row cannot have
        params[name] = value
    return params


def _given_value(subject: Subject, config: Any, name: str) -> Any:
    """Return the value that the user's config gives to a parameter of a row, None for none."""
    if name == "gamma_beta_ratio" and hasattr(config, "simpo_gamma"):  # a CPOConfig: gamma itself
        return config.simpo_gamma / config.beta
    value = subject.fields.get(name) if subject.trainer_arguments else getattr(config, name, None)
    if value is None and name == "epsilon_high":
        return getattr(config, "epsilon", None)  # what TRL falls back to
    return value


def _required(row: Formulation) -> dict[str, Any]:
    """Return the parameter that a row needs and only the batches know."""
    return {"max_completion_length": policy.LIMIT} if "max_completion_length" in row.reads else {}


def _changes(subject: Subject, book: Book, config: Any) -> dict[str, Any]:
    """Return the fields, with new values, that stand between a config of TRL's and a row.

    These are TRL's settings for the row, its parameters where TRL means other numbers by them, and
    the user's loss fields that the row does not read, which go back to their defaults.

    Args:
        subject: what the user has written.
        book: the row, with the parameters that the user's fields give it.
        config: the user's config, an object of TRL's class.
    """
    row = book.row
    params = {**_required(row), **book.params}
    values = row.parameters(params)  # with the defaults of those that nobody has given
    wanted = dict(row.fixed(params))  # TRL's settings for the row
    if "label_smoothing" in row.reads:  # the row's default is not TRL's, which is 0
        wanted["label_smoothing"] = values["label_smoothing"]
    for name, offset in row.trl_offset.items():  # as cispo's bound, which is 1 more in TRL
        wanted[name] = values[name] + offset
    wanted |= _wanted_of_any_row(subject, config)
    wanted |= _defaults_of_unread(subject, wanted.keys() | row.reads.keys())
    if "loss_type" in wanted:  # the weights of the user's losses do not fit those of the row
        wanted.setdefault("loss_weights", None)
    if "beta" not in row.reads and getattr(config, "beta", 0):
        wanted["beta"] = 0.0
    beta = wanted.get("beta", getattr(config, "beta", None))
    if beta == 0:  # then there is no KL, and nothing reads this
        wanted.pop("use_bias_correction_kl", None)
    changes = _differing(wanted, config)
    # A row with window "window" divides by the tokens of its accumulation window, TRL by those of
    # an average one of the generation, which is the same where a generation is one window. Rows
    # that are no policy gradients have no window.
    if getattr(row, "window", "") == "window" and subject.generation != subject.accumulation:
        changes["steps_per_generation"] = subject.accumulation
    return changes


def _defaults_of_unread(subject: Subject, read: Collection[str]) -> dict[str, Any]:
    """Return the defaults of the loss fields that the user gives and a row does not read.

    `beta` is left out: where a row reads none it has to be 0, whatever its default is.
    """
    unread = LOSS_FIELDS & (subject.fields.keys() - {*read, "beta"})
    return {
        config_field.name: config_field.default
        for config_field in fields_of(subject.classes[1])
        if config_field.name in unread and config_field.default is not MISSING
    }


def _wanted_of_any_row(subject: Subject, config: Any) -> dict[str, Any]:
    """Return what every policy-gradient row wants: it is sampled as before, but scored at 1.

    Configs of other trainers do not have these fields, and `_differing` leaves them out.
    """
    wanted: dict[str, Any] = {"mask_truncated_completions": False}
    if getattr(config, "temperature", 1.0) != 1.0:
        sampling = {"temperature": config.temperature}
        sampling |= subject.values.get("generation_kwargs") or {}
        wanted |= {"temperature": 1.0, "generation_kwargs": sampling}
    return wanted


def _differing(wanted: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return those of the wanted values that a config has a field for, with another value."""
    return {
        name: value
        for name, value in wanted.items()
        if hasattr(config, name) and _plain(getattr(config, name)) != _plain(value)
    }


def _plain(value: Any) -> Any:
    """Return what a list of one holds: TRL takes either."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
