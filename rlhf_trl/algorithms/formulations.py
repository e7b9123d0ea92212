"""What a row of the table says: parts, parameters and settings of each way to compute a loss."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar

from rlhf_trl.algorithms.parameters import BASELINES, PARAMETERS, Family, parameter
from rlhf_trl.errors import InputError, instead, nearest

REQUIRED = "required"
"""Stands in `reads` for a default where there is none: the caller must give the parameter."""

INACTIVE_AT_RATIO_1 = frozenset({"ratio", "surrogate", "epsilon", "epsilon_high"})
"""What changes no gradient while every ratio is 1, where all surrogates have the slope -advantage
in the log-probability of a token, and no bound is reached."""

Part = str | Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """One way of computing an algorithm's loss: what every family has."""

    family: ClassVar[Family]
    parts: ClassVar[Mapping[str, str]] = {}

    # the parameters a user may set, with their defaults
    reads: Mapping[str, Any] = field(default_factory=dict)
    # numbers that the formulation fixes, by the name its functions know them by
    constants: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = "GRPOTrainer"  # the stock trainer whose config `settings` belong to
    # the TRL fields that it fixes; a function of the parameters has its formula as docstring
    settings: Mapping[str, Any] = field(default_factory=dict)
    # True: the stock trainer with `settings` computes this; a string: why it does not
    trl: bool | str = ""
    # what to add to a parameter when it is handed to TRL, which means another thing
    trl_offset: Mapping[str, float] = field(default_factory=dict)
    # config fields that only the trainer reads, with their defaults
    trainer_reads: Mapping[str, Any] = field(default_factory=dict)
    differs: str = ""  # one sentence: what differs from the chapter (for the chapter: what to know)
    label: str = ""  # filled in by `formulation`: "grpo (chapter)"

    def parameters(self, user_values: Mapping[str, Any]) -> dict[str, Any]:
        """Check the parameters that a user sets; add the defaults and constants of the row."""
        for name, value in user_values.items():
            if name not in self.reads:
                known = ", ".join(self.reads) or "no parameter"
                hint = nearest(name, self.reads)
                raise InputError(f"{self.label} does not read {name}{hint}; it reads {known}")
            self._check(name, value)
        values = {**self.reads, **user_values}
        for name, value in values.items():
            if value == REQUIRED:
                raise InputError(f"{self.label} needs {name}, which has no default; set it")
        return {**values, **self.constants}

    def _check(self, name: str, value: Any) -> None:
        """Refuse a value that a parameter cannot have."""
        if (name, None) not in PARAMETERS:  # not in the table: only a user's own row reads it
            return
        if value is None and self.reads[name] is None:  # the default, which fits no range
            return
        known = parameter(name, self.family)
        if known.words:  # not a number; what reads it checks it
            return
        if known.choices:
            wanted = instead(str(value), {"choices": known.choices})
        elif isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value):
            wanted = instead(value, {"range": known.range})
        else:
            wanted = "a number"
        if wanted:
            raise InputError(f"{self.label}: {name} must be {wanted}, not {value!r}")

    def fixed(self, user_values: Mapping[str, Any]) -> dict[str, Any]:
        """Return `settings`; those that depend on parameters, for the user's values of these."""
        if not any(map(callable, self.settings.values())):
            return dict(self.settings)
        values = self.parameters(user_values)
        return {k: v(values) if callable(v) else v for k, v in self.settings.items()}


Row = TypeVar("Row", bound=Formulation)


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Formulation):
    """A policy-gradient loss; `trl` True holds at the default kl_estimator."""

    family = "policy_gradient"
    parts: ClassVar[Mapping[str, str]] = {
        "advantage": "advantages",
        "ratio": "surrogates",
        "surrogate": "surrogates",
        "aggregation": "aggregation",
        "kl_penalty": "rewards",
        "value_loss": "value",
    }

    advantage: Part  # the estimator
    ratio: Part  # the likelihood ratio, or "none"
    surrogate: Part  # the per-token loss
    aggregation: Part  # from per-token losses to a number
    # what the denominator spans: "window" is the whole accumulation step, with its `normalizer`
    window: Literal["micro_batch", "window"] = "micro_batch"
    kl: Literal["none", "loss", "reward"] = "none"  # where beta * KL goes; "loss": per token
    kl_sign: Literal["chapter", "code"] = "chapter"  # whose estimators k1, k2, k3 are
    kl_penalty: Part = "none"  # how the KL enters the reward, if that is where it goes
    value_loss: Part = "none"  # the critic's loss, or "none"

    def parameters(self, user_values: Mapping[str, Any]) -> dict[str, Any]:
        """Check and complete as `Formulation` does; `epsilon_high` follows `epsilon` if unset."""
        values = super().parameters(user_values)
        if values.get("epsilon_high", 0) is None:
            values["epsilon_high"] = values["epsilon"]
        if "baseline" in values:
            moving = values["baseline"] == "moving_average"
            if moving == (values["baseline_value"] is None):
                raise InputError(
                    f"{self.label} needs baseline_value if baseline='moving_average', and only then"
                )
        return values

    def chosen(self, values: Mapping[str, Any]) -> "PolicyGradient":
        """Return the row as what `parameters` returned makes it.

        `baseline` replaces its advantage, `importance_cap` its ratio and surrogate.
        """
        row = self
        if "baseline" in values:
            row = replace(row, advantage=BASELINES[values["baseline"]])
        if values.get("importance_cap") is not None:
            row = replace(row, ratio="token_ratio", surrogate="truncated_importance_weight")
        return row

    def differs_in(self, other: "PolicyGradient") -> tuple[str, ...]:
        """Return what of this row another one has otherwise.

        These are its parts, the parameters that both read with other defaults, and what only one
        of their trainers reads.
        """
        names = [*self.parts, "window", "kl"]
        changed = [name for name in names if getattr(self, name) != getattr(other, name)]
        shared = [name for name in self.reads if name in other.reads]
        changed += [name for name in shared if self.reads[name] != other.reads[name]]
        changed += sorted(self.trainer_reads.keys() ^ other.trainer_reads.keys())
        return tuple(changed)


@dataclass(frozen=True, kw_only=True)
class Preference(Formulation):
    """A direct-alignment loss; the mean of what its function returns is minimized."""

    family = "direct_alignment"
    parts: ClassVar[Mapping[str, str]] = {"loss": "preference"}

    loss: Part  # from log-probabilities of completions to losses
    logps: Literal["sum", "mean"] = "sum"  # what those are over the tokens of a completion
    reference: bool = True  # whether the reference policy's are read, too
    # whose log-ratios give KTO's reference point, in a micro-batch
    reference_point: Literal["mismatched", "rejected"] = "mismatched"
    trainer: str = "DPOTrainer"


@dataclass(frozen=True, kw_only=True)
class RewardModel(Formulation):
    """A reward model's loss."""

    family = "reward_model"
    parts: ClassVar[Mapping[str, str]] = {"loss": "reward_models", "aggregation": "aggregation"}

    loss: Part  # of a comparison, or of a token where the model scores tokens
    # from per-token losses to a number; "none": the mean over the comparisons
    aggregation: Part = "none"
    trainer: str = "RewardTrainer"


@dataclass(frozen=True, kw_only=True)
class Distillation(Formulation):
    """A loss of on-policy distillation: from student and teacher at the student's own states."""

    family = "distillation"
    parts: ClassVar[Mapping[str, str]] = {"loss": "distillation", "aggregation": "aggregation"}
    # what rows of policy gradients have and these do not
    surrogate: ClassVar[Part] = "none"
    kl: ClassVar[str] = "none"

    loss: Part  # of a token
    aggregation: Part  # from per-token losses to a number
    window: Literal["micro_batch", "window"] = "micro_batch"  # as in PolicyGradient
    trainer: str = "DistillationTrainer"
    # whether a completion's own text may be the demonstration that its teacher reads
    own_demonstrations: bool = True


@dataclass(frozen=True)
class Algorithm:
    """A row of the table."""

    name: str  # what a config says
    title: str  # what people say
    source: str  # chapter and labels of the equations
    paper: str  # where it was introduced
    chapter: Formulation  # the book's equation, or the paper's where `source` says none is printed
    code: Formulation | str  # what the book's published code computes, or why it is not compared
    trl: Formulation | str  # stock TRL with the closest settings, or why it is not offered
    nearest: str = ""  # the policy-gradient row that it changes least against; none: a root

    @property
    def family(self) -> Family:
        """What kind of loss it is."""
        return self.chapter.family

    @property
    def formulations(self) -> dict[str, Formulation]:
        """The formulations that exist, by name."""
        named = {name: getattr(self, name) for name in FORMULATIONS}
        return {name: row for name, row in named.items() if isinstance(row, Formulation)}


FORMULATIONS = ("chapter", "code", "trl")
