"""The table: one row per algorithm, what it is made of, and what TRL computes with which settings.

A formulation names functions of `rlhf_trl.book` (a callable may stand in their place). `chapter` is
the equation as the book prints it, or the paper's where the book prints none; `code` is what the
book's published code computes; `trl` is the stock trainer with the settings that come closest. The
rows of each family stand in a module of their own; here they are looked up, family by family.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from rlhf_trl.algorithms.formulations import (
    FORMULATIONS,
    INACTIVE_AT_RATIO_1,
    Algorithm,
    Formulation,
    PolicyGradient,
    Row,
)
from rlhf_trl.algorithms.parameters import Family
from rlhf_trl.errors import InputError, nearest

MODULES: dict[Family, str] = {
    "policy_gradient": "policy_gradients",
    "direct_alignment": "direct_alignment",
    "reward_model": "reward_models",
    "distillation": "distillation",
}
"""Which module of this package holds the rows of a family, in the order of the table."""


class Table(MutableMapping[str, Algorithm]):
    """The rows by name. Those of a family are imported when it, or a row of it, is asked for."""

    def __init__(self) -> None:
        self._families: dict[Family, dict[str, Algorithm]] = {}

    def family(self, family: Family) -> dict[str, Algorithm]:
        """Return the rows of a family, in its order."""
        if family not in self._families:
            module = import_module(f"rlhf_trl.algorithms.{MODULES[family]}")
            self._families[family] = dict(module.ROWS)
        return self._families[family]

    def _home(self, name: str) -> dict[str, Algorithm]:
        """Return the rows of the family that has this one; those that are imported come first."""
        for family in (*self._families, *MODULES):
            if name in self.family(family):
                return self.family(family)
        raise KeyError(name)

    def __getitem__(self, name: str) -> Algorithm:
        return self._home(name)[name]

    def __setitem__(self, name: str, row: Algorithm) -> None:
        self.family(row.family)[name] = row

    def __delitem__(self, name: str) -> None:
        del self._home(name)[name]

    def __iter__(self) -> Iterator[str]:
        for family in MODULES:
            yield from self.family(family)

    def __len__(self) -> int:
        return sum(len(self.family(family)) for family in MODULES)


ALGORITHMS = Table()


def algorithm(name: str) -> Algorithm:
    """Return the row of an algorithm, such as "grpo"; an unknown one is an InputError."""
    if name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise InputError(f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)}; known: {known}")
    return ALGORITHMS[name]


@dataclass(frozen=True)
class Nearest:
    """The row that an algorithm is closest to, and what tells the two apart."""

    name: str
    differs_in: tuple[str, ...]  # fields of the row, of its parameters and of its trainer

    @property
    def inactive_at_ratio_1(self) -> tuple[str, ...]:
        """Those that change no gradient while every ratio is 1: one update per generation."""
        return tuple(name for name in self.differs_in if name in INACTIVE_AT_RATIO_1)

    @property
    def same_at_ratio_1(self) -> bool:
        """Whether nothing else differs, so that the two then train alike."""
        return self.inactive_at_ratio_1 == self.differs_in


def nearest_row(algorithm_name: str, formulation_name: str = "chapter") -> Nearest | None:
    """Return what a formulation is closest to; None for a root, or where that row has none."""
    row = algorithm(algorithm_name)
    if not row.nearest:
        return None
    form = row.formulations.get(formulation_name)
    other = ALGORITHMS[row.nearest].formulations.get(formulation_name)
    if not (isinstance(form, PolicyGradient) and isinstance(other, PolicyGradient)):
        return None
    return Nearest(row.nearest, form.differs_in(other))


def names(family: Family, having: str = "chapter") -> list[str]:
    """Return a family's algorithms that have this formulation, in the order of the table."""
    return [name for name, row in ALGORITHMS.family(family).items() if having in row.formulations]


def formulation(algorithm_name: str, formulation_name: str, kind: type[Row] = Formulation) -> Row:
    """Return one formulation of an algorithm; one of another kind is an InputError."""
    family = getattr(kind, "family", None)  # the base class stands for rows of any family
    if family:
        ALGORITHMS.family(family)  # is imported, so that the name is looked for there first
    row = algorithm(algorithm_name)
    if family and row.family != family:
        wanted, known = family.replace("_", "-"), ", ".join(names(family))
        raise InputError(f"{algorithm_name} is not a {wanted} algorithm; those are {known}")
    if formulation_name not in row.formulations:
        known = ", ".join(row.formulations)
        why = nearest(formulation_name, FORMULATIONS)
        if formulation_name in FORMULATIONS:
            why = f": {getattr(row, formulation_name)}"
        raise InputError(
            f"{algorithm_name} has no formulation {formulation_name!r}{why}; it has {known}"
        )
    form: Any = row.formulations[formulation_name]  # of this kind, since its family is
    return replace(form, label=f"{algorithm_name} ({formulation_name})")
