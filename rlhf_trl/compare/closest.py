"""Which printed algorithm a config or a trainer computes, and what to change to get another.

The losses are measured on the fixed batches with the user's fields; the batches bring their own
prompts, completions, rewards, model and schedule. What a change of fields would give is measured,
too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import (
    ALGORITHMS,
    LOSS_FIELDS,
    SHARED_FIELDS,
    Formulation,
    algorithm,
    formulation,
)
from rlhf_trl.compare import pairs, policy
from rlhf_trl.compare.matrix import POLICY, Matrix, Result
from rlhf_trl.compare.models import quiet, trainer_fields
from rlhf_trl.compare.policy import PolicyBatch
from rlhf_trl.compare.rows import Book, Row, Stock
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config import read_config, read_fields
from rlhf_trl.run.yaml_loader import read_yaml

TRAINERS = (
    "GRPOTrainer",
    "RLOOTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
    "ORPOTrainer",
    "CPOTrainer",
)
"""Stock trainers whose configs can be told apart."""

GEOMETRY = frozenset(
    [
        "generation_batch_size",
        "gradient_accumulation_steps",
        "mask_truncated_completions",
        "max_completion_length",
        "max_length",
        "neftune_noise_alpha",
        "num_generations",
        "num_generations_eval",
        "num_iterations",
        "ref_model_mixup_alpha",
        "ref_model_sync_steps",
        "reward_weights",
        "steps_per_generation",
        "sync_ref_model",
        "vllm_importance_sampling_cap",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
    ]
)
"""Fields for which the fixed batches have values of their own, or that say which tokens count."""


@dataclass(frozen=True)
class Subject:
    """What a user wants to know about.

    Attributes:
        label: its file, its class, or both.
        base: the stock trainer it is or derives from.
        classes: trainer and config class.
        fields: the user's fields that decide the loss.
        schedule: the user's accumulation and steps per generation.
        also: further arguments of the trainer.
    """

    label: str
    base: str
    classes: tuple[type, type]
    fields: Mapping[str, Any]
    schedule: Mapping[str, int] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> list[PolicyBatch]:
        """The windows on which it is measured."""
        names = ["heavy", "ragged", "accumulation"]
        if self.base in POLICY:
            names.insert(0, "on_policy")
            if self.schedule.get("steps_per_generation", 0) > self.schedule.get(
                "gradient_accumulation_steps", 1
            ):
                names.append("steps_per_generation")
        return [batch for batch in policy.BATCHES if batch.name in names]


@dataclass(frozen=True)
class Distance:
    """How far a subject is from a formulation of an algorithm.

    Attributes:
        algorithm: its name.
        formulation: "chapter" or "code"; "trl" where stock TRL has a loss of its own.
        equal: whether the gradients agree on every batch.
        worst: the batch on which they differ most.
        on_policy: whether they agree on the on-policy batch; None where there is none.
        changes: fields to change, with the values to give them.
        then: the worst batch after these changes, measured; None if there is nothing to change.
        why: why no settings give equality, where the table says so.
    """

    algorithm: str
    formulation: str
    equal: bool
    worst: Result
    on_policy: bool | None
    changes: Mapping[str, Any]
    then: Result | None
    why: str


def read_subject(path: str | Path | None, trainer: str | None) -> Subject:
    """Read a config, a trainer's dotted name, or both.

    Args:
        path: YAML of one of our recipes, or as `trl grpo --config` takes it.
        trainer: such as "mypackage.MyTrainer" or "GRPOTrainer"; None: told from the config's keys.

    Raises:
        InputError: if the file or the class does not exist, or the trainer cannot be told.
    """
    given = read_config(path) if path else {}
    label = ", ".join(str(part) for part in (path, trainer) if part)
    if "algorithm" in given:
        return _ours(str(path), given, trainer, label)
    if trainer is None:
        trainer = _told(str(path), given)
    cls = _class(trainer)
    base = pairs.base_name(cls)
    if base not in TRAINERS:
        known = ", ".join(TRAINERS)
        raise InputError(f"{trainer} derives from none of the trainers that are compared: {known}")
    stock, config = pairs.trainer_classes(base)
    config = config if cls is stock else _config_class(cls, config)
    values = _checked(path, config) if path else {}
    wanted = (LOSS_FIELDS | SHARED_FIELDS) - GEOMETRY
    return Subject(
        label=label,
        base=base,
        classes=(cls, config),
        fields={name: value for name, value in values.items() if name in wanted},
        schedule=_schedule(values),
    )


def _schedule(values: Mapping[str, Any]) -> dict[str, int]:
    names = ("gradient_accumulation_steps", "steps_per_generation")
    return {name: values[name] for name in names if values.get(name)}


def _ours(path: str, given: Mapping[str, Any], trainer: str | None, label: str) -> Subject:
    """Return a config of our own recipes as a subject."""
    name, which = given["algorithm"], given.get("formulation", "chapter")
    row = formulation(name, which)
    if algorithm(name).family != "policy_gradient" or name == "ppo":
        raise InputError(
            f"{path}: compare reads configs of recipes/grpo.py, and {name} is not one of its "
            "algorithms; give the stock trainer's own config instead"
        )
    from rlhf_trl.trainers.policy_gradient import PolicyGradientConfig, PolicyGradientTrainer

    cls = _class(trainer) if trainer else PolicyGradientTrainer
    own = ("algorithm", "formulation", "dataset", "reward_funcs", "expect")
    values = read_fields(path, [PolicyGradientConfig, _import("ModelConfig")], own)
    wanted = (LOSS_FIELDS | SHARED_FIELDS) - GEOMETRY
    fields = {key: value for key, value in values.items() if key in wanted}
    ours = {"correctness_reward": "right", "format_reward": "has_format"}
    # no completion of the batches comes near the penalty, and no group is sampled again
    ours |= {"soft_punish_cache": 1, "dynamic_sampling_rounds": 0}
    fields |= {key: value for key, value in ours.items() if key in row.trainer_reads}
    if "soft_punish_cache" in fields:
        fields["max_completion_length"] = 2 * policy.LIMIT
    return Subject(
        label=label,
        base="GRPOTrainer",
        classes=(cls, PolicyGradientConfig),
        fields=dict(row.settings) | fields,
        schedule=_schedule(values),
        also={"algorithm": name, "formulation": which},
    )


def _import(name: str) -> Any:
    return getattr(import_module("trl"), name)


def _class(dotted: str) -> type:
    """Import a trainer class by its dotted name; TRL's own need no module."""
    if dotted in TRAINERS:
        return pairs.trainer_classes(dotted)[0]
    module, _, name = dotted.rpartition(".")
    if not module:
        hint = nearest(dotted, TRAINERS)
        raise InputError(f"--trainer: {dotted!r} has no module{hint}; write mypackage.MyTrainer")
    try:
        found = getattr(import_module(module), name)
    except ImportError as error:
        raise InputError(f"--trainer: {module} cannot be imported: {error}") from error
    except AttributeError as error:
        raise InputError(f"--trainer: {module} has no {name}") from error
    if not isinstance(found, type) or not pairs.base_name(found):
        raise InputError(f"--trainer: {dotted} is not a subclass of a trainer of TRL")
    return found


def _config_class(trainer: type, stock: type) -> type:
    """Return the config class that a trainer's `args` are annotated with, or the stock one."""
    kind = get_annotations(trainer.__init__).get("args")
    members = getattr(kind, "__args__", (kind,))
    return next((m for m in members if isinstance(m, type) and issubclass(m, stock)), stock)


def _checked(path: str | Path, config: type) -> dict[str, Any]:
    classes = [config, *(_import(n) for n in ("ModelConfig", "ScriptArguments"))]
    classes.append(_import("DatasetMixtureConfig"))
    also = ("reward_funcs", "reward_model_name_or_path", "env", "dataset_text_field")
    return read_fields(path, classes, [key for key in also if key in read_yaml(path)])


def _told(path: str, given: Mapping[str, Any]) -> str:
    """Tell the trainer from the keys that only its config has, and from loss_type."""
    from dataclasses import fields as fields_of

    configs = {name: pairs.trainer_classes(name)[1] for name in TRAINERS}
    names = {name: {f.name for f in fields_of(config)} for name, config in configs.items()}
    anywhere = set().union(*names.values())
    used = [key for key in given if key in anywhere]
    fitting = [name for name in TRAINERS if all(key in names[name] for key in used)]
    losses = given.get("loss_type", [])
    for loss in [losses] if isinstance(losses, str) else losses:
        fitting = [name for name in fitting if loss in _LOSSES.get(name, (loss,))]
    if "GRPOTrainer" in fitting and "reward_funcs" in given:
        fitting = [name for name in fitting if name in POLICY]
    for preferred in (_USUAL, TRAINERS):
        chosen = [name for name in fitting if name in preferred]
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            break
    raise InputError(
        f"{path}: its keys fit {' and '.join(fitting) or 'no single trainer'}; say which with "
        f"--trainer, such as --trainer {(fitting or TRAINERS)[0]}"
    )


_USUAL = ("GRPOTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
_LOSSES = {
    "DPOTrainer": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "GRPOTrainer": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "KTOTrainer": ("kto", "apo_zero_unpaired"),
    "CPOTrainer": ("sigmoid", "hinge", "ipo", "simpo"),
    "RLOOTrainer": (),
    "RewardTrainer": (),
    "ORPOTrainer": (),
}


def distances(subject: Subject, wanted: Sequence[tuple[str, str]] = ()) -> list[Distance]:
    """Measure how far a subject is from formulations of algorithms.

    Args:
        subject: the config or trainer.
        wanted: (algorithm, formulation) pairs; none: all that the trainer could compute.

    Returns:
        Equal ones first, then by the worst relative error.
    """
    matrix = Matrix()
    names = wanted or [
        (name, which)
        for name, row in ALGORITHMS.items()
        for which, form in row.formulations.items()
        if _could(subject.base, form, name)
        and (which != "trl" or row.chapter.trl is not True)  # else it is the chapter's
    ]
    with quiet():
        try:
            found = [_distance(matrix, subject, *pair) for pair in names]
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            message = " ".join(str(error).split())
            raise InputError(
                f"{subject.label}: {subject.classes[0].__name__}: {message}"
            ) from error
    return sorted(found, key=lambda d: (not d.equal, d.worst.grad_rel_error))


def _could(base: str, row: Formulation, name: str) -> bool:
    if base in POLICY:
        return row.trainer == "GRPOTrainer" and name != "ppo"
    return row.trainer == base and name not in ("orm", "prm", "kwise")


def _distance(matrix: Matrix, subject: Subject, name: str, which: str) -> Distance:
    row = formulation(name, which)
    if not _could(subject.base, row, name):
        raise InputError(f"{subject.base} cannot be compared with {name}: {row.trainer} is its own")
    built = subject.classes[1](**{**trainer_fields(), **_roomy(subject), **dict(subject.fields)})
    left = Book(name, which, _params(row, subject, lambda key: getattr(built, key, None)))
    batches = subject.batches
    if name == "reinforce":  # its baseline spans the generation, which no window sees whole
        batches = [batch for batch in batches if batch.name != "steps_per_generation"]
    results = _measured(matrix, subject, left, subject.fields, batches)
    worst = max(results, key=lambda r: r.grad_rel_error)
    equal = all(r.verdict in ("equal", "both zero") for r in results)
    on_policy = [r.verdict == "equal" for r in results if r.batch == "on_policy"]
    changes, then = {}, None
    if subject.also and not equal:
        changes = {"algorithm": name, "formulation": which}
    elif not equal:
        changes = _changes(subject, row, left, built)
    if changes and not subject.also:
        fields = {**subject.fields, **changes}
        if fields.pop("steps_per_generation", None):
            batches = [batch for batch in batches if batch.name != "steps_per_generation"]
        fields.pop("generation_kwargs", None)
        then = max(
            _measured(matrix, subject, left, fields, batches), key=lambda r: r.grad_rel_error
        )
        if row.trl is not True and then.grad_rel_error > worst.grad_rel_error / 2:
            changes, then = {}, None  # nothing that brings the two close
    why = "" if equal or row.trl is True else str(row.trl)
    return Distance(
        name, which, equal, worst, on_policy[0] if on_policy else None, changes, then, why
    )


def _roomy(subject: Subject) -> dict[str, Any]:
    if subject.base not in POLICY:
        return {}
    return {"num_generations": policy.GROUP, "per_device_train_batch_size": policy.ROWS}


def _measured(
    matrix: Matrix,
    subject: Subject,
    left: Book,
    fields: Mapping[str, Any],
    batches: Sequence[PolicyBatch],
) -> list[Result]:
    right = Stock(
        dict(fields), subject.label, subject.base, classes=subject.classes, also=subject.also
    )
    row = Row(left.algorithm, subject.label, left, right)
    return [matrix.compare(row, batch) for batch in batches]


def _params(row: Formulation, subject: Subject, value: Callable[[str], Any]) -> dict[str, Any]:
    """Return the book's parameters that the user's config decides, as far as the row takes them."""
    params: dict[str, Any] = {}
    for name in row.reads:
        given = subject.fields.get(name) if subject.also else value(name)
        if given is None and name == "epsilon_high":
            given = value("epsilon")  # what TRL falls back to
        if name == "gamma_beta_ratio" and value("simpo_gamma") is not None:
            given = value("simpo_gamma") / value("beta")
        if given is None or name in ("max_completion_length", "importance_cap", "baseline_value"):
            continue
        candidate = given if subject.also else given - row.trl_offset.get(name, 0)
        try:
            row.parameters({**_required(row), name: candidate})
        except InputError:
            continue  # the row keeps its default
        params[name] = candidate
    return params


def _required(row: Formulation) -> dict[str, Any]:
    return {"max_completion_length": policy.LIMIT} if "max_completion_length" in row.reads else {}


def _changes(subject: Subject, row: Formulation, left: Book, built: Any) -> dict[str, Any]:
    """Return the fields whose values stand between the config and the row's settings."""
    values = row.parameters({**_required(row), **left.params})
    want = dict(row.fixed({**_required(row), **left.params}))
    for name, offset in row.trl_offset.items():
        want[name] = values[name] + offset
    if getattr(built, "temperature", 1.0) != 1.0:
        want |= {"temperature": 1.0, "generation_kwargs": {"temperature": built.temperature}}
    accumulation = subject.schedule.get("gradient_accumulation_steps", 1)
    steps = subject.schedule.get("steps_per_generation", 0)
    if getattr(row, "window", "") == "window" and steps > accumulation:
        want["steps_per_generation"] = accumulation
    kept = {name: value for name, value in want.items() if hasattr(built, name)}
    if not getattr(built, "beta", 1):
        kept.pop("use_bias_correction_kl", None)  # read only with a KL
    return {n: v for n, v in kept.items() if _plain(getattr(built, n)) != _plain(v)}


def _plain(value: Any) -> Any:
    """Return what a list of one holds: TRL takes either."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
