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
from rlhf_trl.compare.models import quiet, trainer_fields
from rlhf_trl.compare.policy import PolicyBatch
from rlhf_trl.compare.rows import Row, own_fields
from rlhf_trl.compare.surface import settings, shipped
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config import read_config, read_fields
from rlhf_trl.run.fields import AlignmentRun, PolicyGradientRun

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
    also: Mapping[str, Any] = field(default_factory=dict)
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
        online = self.base in POLICY
        names = ["heavy", "ragged", "accumulation", *(["on_policy", "extreme"] * online)]
        names += ["tools"] * (self.base == "GRPOTrainer")
        names += ["steps_per_generation"] * (online and self.generation > self.accumulation)
        across = [policy.ACROSS] * (online and self.generation < self.accumulation)
        return [batch for batch in policy.BATCHES if batch.name in names] + across

    @property
    def left_out(self) -> list[str]:
        """The user's fields that the batches replace by others."""
        return sorted(name for name, value in self.values.items() if name in OWN and value)

    def unsettled(self, built: Any) -> tuple[str, ...]:
        """Return the fields of UNSHOWN that may act in the user's run; `built` is its config."""
        set_to = {name: self.values.get(name, off) for name, off in UNSHOWN.items()}
        correction = "vllm_importance_sampling_correction"
        on = self.values.get(correction, getattr(built, correction, False))  # TRL's default: on
        # whoever names its mode knows of it
        on &= "vllm_importance_sampling_mode" not in self.values
        set_to[correction] = on and bool(self.values.get("use_vllm"))
        if not getattr(built, "beta", 1):  # then nothing reads the reference
            set_to["sync_ref_model"] = False
        found = sorted(n for n, off in UNSHOWN.items() if set_to[n] not in (None, off))
        if set_to[correction]:  # what makes its ratio far from 1
            drawn = self.values | (self.values.get("generation_kwargs") or {})
            scored = {"temperature": self.values.get("temperature", 1.0), "top_p": 1.0}
            usual = {**scored, "top_k": 0, "min_p": None}
            found += [n for n, value in usual.items() if drawn.get(n, value) not in (None, value)]
        return tuple(found)

    def could_be(self, name: str, which: str) -> bool:
        """Whether its trainer might compute a formulation of an algorithm."""
        row, own = formulation(name, which), self.also.get("algorithm")
        if {name, own} & _ALONE:
            return (name, which) == (own, self.also.get("formulation"))
        if self.base in POLICY:
            return row.trainer == "GRPOTrainer"
        home = pairs.own_trainer(name).removeprefix("Book") if self.also else row.trainer
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
    """Read a config, of ours or as `trl grpo --config` takes it, a trainer's dotted name, or both.

    A trainer that is not named, such as "mypackage.MyTrainer", is told from the config's keys.
    """
    given = read_config(path) if path else {}
    label = ", ".join(str(part) for part in (path, trainer) if part)
    if "algorithm" in given:
        return _ours(str(path), given, trainer, label)
    if "dataset" in given and trainer is None:  # of this project, but of no algorithm
        what = "SFT has one loss only, which rlhf-trl compare measures"
        raise InputError(f"{path} names no algorithm; {what}")
    others: list[str] = []
    if trainer is None:
        trainer, *others = _told(str(path), given)
    cls = class_of(trainer)
    base = pairs.base_name(cls)
    if base not in TRAINERS:
        known = ", ".join(TRAINERS)
        raise InputError(
            f"{trainer} has one loss only, which the matrix compares; --config and --trainer tell "
            f"apart what {known} compute"
        )
    stock, stock_config = pairs.trainer_classes(base)
    config = stock_config if cls is stock else config_class(cls, stock_config)
    values = _checked(path, config) if path else {}
    own = {f.name for f in fields_of(config)} - {f.name for f in fields_of(stock_config)}
    return Subject(label, base, (cls, config), values, _deciding(values, own), fits=tuple(others))


def _deciding(values: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    wanted = (LOSS_FIELDS | SHARED_FIELDS | set(own)) - SCHEDULE - OWN
    idle = ("vllm_", "sync_ref_", "ref_model_", "neftune_", "router_aux_")
    return {n: v for n, v in values.items() if n in wanted and not n.startswith(idle)}


def _ours(path: str, given: Mapping[str, Any], trainer: str | None, label: str) -> Subject:
    """Return a config of our own recipes as a subject."""
    from trl import ModelConfig

    name, which = given["algorithm"], given.get("formulation", "chapter")
    row = formulation(name, which)
    own_class, config = pairs.trainer_classes(pairs.own_trainer(name))
    cls = class_of(trainer) if trainer else own_class
    if not issubclass(cls, own_class):
        raise InputError(
            f"{path} is a config of this project's trainer, and {trainer} is none; leave --trainer "
            "out, or give a config of that trainer"
        )
    runs = [f.name for run in (PolicyGradientRun, AlignmentRun) for f in fields_of(run)]
    values = read_fields(path, [config, ModelConfig], runs)
    brought = own_fields(row)  # which stand for the user's where the equation does not read them
    fixed = {key: value for key, value in brought.items() if key not in row.reads}
    fields = brought | _deciding(values) | fixed
    if row.trainer == "GRPOTrainer":
        fields = dict(row.settings) | fields
    also = pairs.arguments(name, which)
    return Subject(label, pairs.base_name(cls), (cls, config), values, fields, also)


def class_of(dotted: str) -> type:
    """Import a trainer class by its dotted name; TRL's own need no module."""
    if dotted in pairs.STOCK:
        return pairs.trainer_classes(dotted)[0]
    module, _, name = dotted.rpartition(".")
    if not module:
        hint = nearest(dotted, TRAINERS)
        raise InputError(f"--trainer: {dotted!r} has no module{hint}; write mypackage.MyTrainer")
    try:
        found = getattr(import_module(module), name)
    except AttributeError as error:
        raise InputError(f"--trainer: {module} has no {name}") from error
    except Exception as error:  # whatever the user's module raises
        why = " ".join(str(error).split())
        raise InputError(f"--trainer: {module} cannot be imported: {why}") from error
    if not isinstance(found, type) or not pairs.base_name(found):
        raise InputError(f"--trainer: {dotted} is not a subclass of a trainer of TRL")
    return found


def config_class(trainer: type, stock: type) -> type:
    """Return the config class of a trainer: ours name it, others annotate `args` with it."""
    own = getattr(trainer, "config_class", None)
    if own is not None and issubclass(own, stock):
        return own
    kind = get_annotations(trainer.__init__, eval_str=True).get("args")
    members = getattr(kind, "__args__", (kind,))
    return next((m for m in members if isinstance(m, type) and issubclass(m, stock)), stock)


def _checked(path: str | Path, config: type) -> dict[str, Any]:
    import trl

    classes = [config, trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig]
    scripts = ("reward_funcs", "reward_model_name_or_path", "env")
    unknown = [name for name in scripts if not any(f.name == name for f in fields_of(config))]
    # TRL's own parser takes booleans for scale_rewards
    words = {"scale_rewards": {True: "group", False: "none"}}
    return read_fields(path, classes, unknown, words)


def _told(path: str, given: Mapping[str, Any]) -> list[str]:
    """Tell the trainer from the keys that only its config has, and from loss_type; then others."""
    names = {n: {f.name for f in fields_of(pairs.trainer_classes(n)[1])} for n in pairs.STOCK}
    anywhere = set().union(*names.values())
    used = [key for key in given if key in anywhere]
    fitting = [name for name in pairs.STOCK if all(key in names[name] for key in used)]
    losses = given.get("loss_type", [])
    losses = set(map(str, losses if isinstance(losses, list) else [losses]))
    fitting = [name for name in fitting if losses <= (_losses(name) or losses)]
    if "GRPOTrainer" in fitting and "reward_funcs" in given:
        fitting = [name for name in fitting if name in POLICY]
    chosen = [name for name in fitting if name in _USUAL] or fitting
    if len(chosen) == 1:
        return [*chosen, *(name for name in fitting if name not in chosen)]
    raise InputError(
        f"{path}: its keys fit {' and '.join(fitting) or 'no single trainer'}; say which with "
        f"--trainer, such as --trainer {(fitting or TRAINERS)[0]}"
    )


_USUAL = ("GRPOTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")


def _losses(trainer: str) -> set[str]:
    """Return the loss types that a trainer is known to have; none where it has no such field."""
    cases = [settings(case) for case in shipped()["losses"] if case.split()[0] == trainer]
    types = [case["loss_type"] for case in cases if "loss_type" in case]
    return {loss for each in types for loss in ([each] if isinstance(each, str) else each)}


def distances(
    subject: Subject,
    wanted: Sequence[tuple[str, str]] = (),
    matrix: Matrix | None = None,
    fixes: bool = True,
) -> list[Distance]:
    """Measure how far a subject is from formulations of algorithms, the nearest first.

    `wanted` has (algorithm, formulation) pairs; none: all that the trainer could compute. What was
    measured is kept in a `matrix`; without `fixes`, no change of fields is looked for.
    """
    matrix = matrix or Matrix()
    names = wanted or [
        (name, which)
        for name, row in ALGORITHMS.items()
        for which, form in row.formulations.items()
        if subject.could_be(name, which)
        and (which != "trl" or row.chapter.trl is not True)  # else it is the chapter's
    ]
    with quiet():
        try:
            found = [_distance(matrix, subject, *pair, fixes) for pair in names]
        except InputError:
            raise
        except Exception as error:  # whatever the user's trainer or config raises
            what = f"{subject.classes[0].__name__} cannot be run on the fixed batches"
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise InputError(f"{subject.label}: {what}: {message}") from error
    return sorted(found, key=lambda each: (not each.equal, _away(each.worst)))


def _away(result: Result) -> tuple[float, float]:
    """Order by direction first, which no learning rate can undo, then by length."""
    away = 1 - result.grad_cosine if math.isfinite(result.grad_cosine) else 0.0
    return round(away, 2), result.grad_rel_error


def _distance(matrix: Matrix, subject: Subject, name: str, which: str, fixes: bool) -> Distance:
    row = formulation(name, which)
    if not subject.could_be(name, which):
        own = "a config for {algorithm} ({formulation})" if subject.also else subject.base
        raise InputError(
            f"{subject.label}: {own.format(**subject.also)} is not compared with {name} ({which}), "
            "whose data or models are others"
        )
    fields = trainer_fields()
    if subject.base in POLICY:
        fields |= {"num_generations": policy.GROUP, "per_device_train_batch_size": policy.ROWS}
    built = subject.classes[1](**{**fields, **subject.fields})
    left = Book(name, which, _params(row, subject, built))
    results = _measured(matrix, subject, left)
    worst = _worst(results)
    if broken := [r.batch for r in results if not math.isfinite(r.grad_rel_error)]:
        what = "the gradient is not finite, or the book's is 0, on"
        raise InputError(f"{subject.label}: {what} {', '.join(broken)}")
    equal = all(r.agrees for r in results)
    untested = subject.unsettled(built) if equal else ()
    equal = equal and not untested
    changes: Mapping[str, Any] = {}
    then = None
    if equal or not fixes:
        pass
    elif subject.also:
        asked = {"algorithm": name, "formulation": which}
        extra = subject.fields.keys() & row.trainer_reads.keys() - own_fields(row).keys()
        wanted = _anywhere(subject, built) | {key: row.trainer_reads[key] for key in extra}
        shared = _differing(wanted, built)
        changes = {k: v for k, v in asked.items() if subject.also[k] != v} | shared
        if changes == shared:  # else some of its fields may not be the other row's
            then = _worst(_measured(matrix, subject, left, **shared)) if shared else None
    else:
        changes = _changes(subject, row, left, built)
        then = _worst(_measured(matrix, subject, left, **changes))
        if row.trl is not True and then.grad_rel_error > worst.grad_rel_error / 2:
            changes, then = {}, None  # nothing that brings the two close
    stock = not subject.also and subject.base != "RLOOTrainer"  # whose own reasons the table has
    why = str(row.trl) if stock and not equal and row.trl is not True else ""
    on_policy = next((r.verdict == "equal" for r in results if r.batch == "on_policy"), None)
    return Distance(name, which, equal, worst, on_policy, changes, then, why, untested)


def _worst(results: Sequence[Result]) -> Result:
    return max(results, key=_away)


def _measured(matrix: Matrix, subject: Subject, left: Book, **changes: Any) -> list[Result]:
    """Measure a subject with some fields changed, on the batches that say something about it."""
    batches = subject.batches
    # the baseline of REINFORCE spans the generation, which no window of several sees whole
    if changes.get("steps_per_generation") or left.algorithm == "reinforce":
        batches = [b for b in batches if b.per_generation == b.accumulation]
    row = Row(left, side_of(subject, **changes), variant=subject.label)
    return [matrix.compare(row, batch) for batch in batches]


def side_of(subject: Subject, **changes: Any) -> Stock:
    """Return a subject, with some fields changed, as a side of a comparison."""
    sampling = ("generation_kwargs", "steps_per_generation")  # of which the batches have their own
    values = {**subject.fields, **changes}
    fields = {name: value for name, value in values.items() if name not in sampling}
    trainer = subject.base
    if subject.also:
        trainer = pairs.own_trainer(subject.also["algorithm"])
    return Stock(fields, subject.label, trainer, classes=subject.classes, also=subject.also)


def _params(row: Formulation, subject: Subject, built: Any) -> dict[str, Any]:
    """Return the book's parameters that the user's config decides, as far as the row takes them."""
    params: dict[str, Any] = {}
    ours = ("max_completion_length", "importance_cap", "baseline_value")
    for name in (name for name in row.reads if name not in ours):
        given = subject.fields.get(name) if subject.also else getattr(built, name, None)
        if given is None and name == "epsilon_high":
            given = getattr(built, "epsilon", None)  # what TRL falls back to
        if name == "gamma_beta_ratio" and hasattr(built, "simpo_gamma"):
            given = built.simpo_gamma / built.beta
        # a row that smooths labels is not asked for with 0
        if given is None or (name == "label_smoothing" and not given):
            continue
        offset = 0 if subject.also else row.trl_offset.get(name, 0)
        # below 1, CISPO's absolute bound can only be a paper's relative one
        candidate = given - offset if offset and given >= offset else given
        row.parameters({**_required(row), name: candidate})  # refuses what the row cannot have
        params[name] = candidate
    return params


def _required(row: Formulation) -> dict[str, Any]:
    return {"max_completion_length": policy.LIMIT} if "max_completion_length" in row.reads else {}


def _changes(subject: Subject, row: Formulation, left: Book, built: Any) -> dict[str, Any]:
    """Return the fields whose values stand between the config and the row's settings."""
    given = {**_required(row), **left.params}
    values, want = row.parameters(given), dict(row.fixed(given))
    if "label_smoothing" in row.reads:
        want["label_smoothing"] = values["label_smoothing"]
    for name, offset in row.trl_offset.items():
        want[name] = values[name] + offset
    want |= _anywhere(subject, built)
    read = want.keys() | row.reads.keys() | {"beta"}
    for each in fields_of(subject.classes[1]):
        unread = each.name in LOSS_FIELDS & (subject.fields.keys() - read)
        if unread and each.default is not MISSING:
            want[each.name] = each.default
    if "loss_type" in want:
        want.setdefault("loss_weights", None)
    if "beta" not in row.reads and getattr(built, "beta", 0):
        want["beta"] = 0.0
    if not want.get("beta", getattr(built, "beta", 1)):
        want.pop("use_bias_correction_kl", None)  # read only with a KL
    changes = _differing(want, built)
    if getattr(row, "window", "") == "window" and subject.generation != subject.accumulation:
        changes["steps_per_generation"] = subject.accumulation
    return changes


def _anywhere(subject: Subject, built: Any) -> dict[str, Any]:
    """Return what every policy-gradient row wants: it is sampled as before, but scored at 1."""
    want: dict[str, Any] = {"mask_truncated_completions": False}
    if getattr(built, "temperature", 1.0) != 1.0:
        more = subject.values.get("generation_kwargs") or {}
        sampling = {"temperature": built.temperature, **more}
        want |= {"temperature": 1.0, "generation_kwargs": sampling}
    return want


def _differing(want: Mapping[str, Any], built: Any) -> dict[str, Any]:
    """Return what a config says otherwise, of the fields that it has."""
    had = {name: value for name, value in want.items() if hasattr(built, name)}
    return {name: v for name, v in had.items() if _plain(getattr(built, name)) != _plain(v)}


def _plain(value: Any) -> Any:
    """Return what a list of one holds: TRL takes either."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
