"""What a row makes of a config: its own fields checked, fixed and filled in, for every family."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from rlhf_trl.algorithms.formulations import REQUIRED, Formulation
from rlhf_trl.algorithms.parameters import LOSS_FIELDS, Family
from rlhf_trl.algorithms.table import formulation as find
from rlhf_trl.errors import InputError, instead

Row = TypeVar("Row", bound=Formulation)


class FieldError(InputError):
    """An error about one config field, whose place in a file the caller may know."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field} {message}.")
        self.field, self.message = field, message


def resolve(
    row: Formulation, given: Mapping[str, Any], others: Mapping[str, Formulation] | None = None
) -> dict[str, Any]:
    """Return the value of every config field that a row fixes or reads.

    `others` might be chosen in its place, for the error message.

    Returns:
        What the row fixes; for what it reads the given value, or its default (maybe `REQUIRED`).
    """
    reads = {**row.reads, **row.trainer_reads}
    settings = row.fixed({name: given[name] for name in row.reads if name in given})
    for name, value in given.items():
        if name in reads:
            continue
        if name in settings:
            fixed = settings[name]
            ways = ((value, fixed), ([value], fixed), (value, [fixed]))
            if not any(_same(*pair) for pair in ways):
                raise FieldError(
                    name,
                    f"is {value!r}, which contradicts {row.label} and its {name}: {fixed!r}; "
                    "remove it or choose another algorithm",
                )
        elif name in LOSS_FIELDS:
            readers = ", ".join(
                other
                for other, row_of in (others or {}).items()
                if name in {**row_of.reads, **row_of.trainer_reads}
            )
            instead = f", or choose one that reads it: {readers}" if readers else ""
            raise FieldError(name, f"is not read by {row.label}; remove it{instead}")
    return {**{name: given.get(name, default) for name, default in reads.items()}, **settings}


def _same(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


@dataclass(frozen=True)
class Resolved(Generic[Row]):
    """A row for one config: what a trainer computes."""

    algorithm: str  # the row's name
    formulation: str  # "chapter", "code" or "trl"
    row: Row  # the formulation, as the config makes it
    parameters: dict[str, Any]  # all that its loss reads, and its constants
    args: Any  # a copy of the config with the row's values in every field that it fixes or reads

    @property
    def label(self) -> str:
        """The name for people: "grpo (chapter)"."""
        return self.row.label


class RowConfig:
    """Mixin of a TRL config whose loss fields belong to a row; None means the row's own value."""

    family: ClassVar[Family]

    @classmethod
    def resolve(cls, args: Any, algorithm: str | Resolved, formulation: str) -> Resolved:
        """Read a row for a config of this class, before anything is loaded.

        The config is not changed; an algorithm that was resolved before is returned as it is.
        """
        if isinstance(algorithm, Resolved):
            return algorithm
        if not isinstance(args, cls):
            raise InputError(f"args must be a {cls.__name__}, not a {type(args).__name__}.")
        base = next(c for c in cls.__mro__ if c.__module__.startswith("trl."))
        stock = {f.name: f.default for f in fields(base)}
        for f in fields(args):
            value = getattr(args, f.name)
            if f.name not in stock and (wanted := instead(value, f.metadata)):
                raise FieldError(f.name, f"is {value!r}; write {wanted}")
        row = find(algorithm, formulation, cls.family)
        args.check_for(row)
        known = {f.name: f.default for f in fields(args)}
        reads = {**row.reads, **row.trainer_reads}
        given = {
            name: value
            for name, default in known.items()
            if (value := getattr(args, name)) is not None and (name in reads or value != default)
        }
        values = resolve(row, given)
        for name, value in values.items():
            if value == REQUIRED:
                raise InputError(f"{row.label} needs {name}, which has no default; set it.")
        args = copy(args)
        for name in known.keys() & (LOSS_FIELDS | values.keys()):
            setattr(args, name, values.get(name, stock.get(name)))
        parameters = {n: v for n in row.reads if (v := values.get(n)) is not None}
        resolved = Resolved(algorithm, formulation, row, args.parameters(row, parameters), args)
        return args.checked(resolved)

    def check_for(self, row: Formulation) -> None:
        """Refuse a row that is not trained with this config."""

    def parameters(self, row: Formulation, given: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of the row's loss."""
        return row.parameters(given)

    def checked(self, resolved: Resolved) -> Resolved:
        """Return what was resolved, or refuse what could not be computed or resumed later."""
        return resolved
