"""What a row makes of a config: its own fields checked, fixed and filled in, for every family."""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic

from rlhf_trl.algorithms.formulations import REQUIRED, Formulation, Row
from rlhf_trl.algorithms.parameters import EARLY, LOSS_FIELDS
from rlhf_trl.algorithms.table import formulation as find
from rlhf_trl.algorithms.table import names
from rlhf_trl.errors import InputError, instead


class FieldError(InputError):
    """An error about one config field, whose place in a file the caller may know."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field} {message}.")
        self.field, self.message = field, message


def resolve(
    row: Formulation,
    user_values: Mapping[str, Any],
    others: Mapping[str, Formulation],
    passing: Collection[str] = (),
) -> dict[str, Any]:
    """Return the value of every config field that a row fixes or reads.

    Args:
        row: the formulation that a config chooses.
        user_values: the fields that the user sets, with their values.
        others: formulations by algorithm that might be chosen in its place: what an error message
            names, and what decides whether a contradiction of `passing` fields is accepted.
        passing: fields of stock TRL, which may be given although the row does not read them. They
            may also contradict what it fixes, if they contradict no other row of its trainer less.

    Returns:
        What the row fixes; for what it reads the given value, or its default (maybe `REQUIRED`).
    """
    reads = {**row.reads, **row.trainer_reads}
    settings = row.fixed({name: user_values[name] for name in row.reads if name in user_values})
    if passing:  # what contradicts replaces what the row fixes, unless another row is nearer
        clashing = contradicted(row, user_values)
        rivals = [other for other in others.values() if other.trainer == row.trainer]
        if all(len(contradicted(other, user_values)) >= len(clashing) for other in rivals):
            settings |= {name: user_values[name] for name in clashing}
    for name, value in user_values.items():
        if name in reads:
            continue
        if name in settings and not _fits(value, settings[name]):
            fit = [n for n, other in others.items() if _fits(value, other.settings.get(name))]
            remedy = f"write algorithm: {' or '.join(fit)}" if fit else "choose another algorithm"
            clash = f"contradicts {row.label} and its {name}: {settings[name]!r}"
            raise FieldError(name, f"is {value!r}, which {clash}; remove it, or {remedy}")
        if name in LOSS_FIELDS - settings.keys() and name not in passing:
            readers = [
                n for n, other in others.items() if name in (*other.reads, *other.trainer_reads)
            ]
            remedy = f", or choose one that reads it: {', '.join(readers)}" if readers else ""
            raise FieldError(name, f"is not read by {row.label}; remove it{remedy}")
    return {**{name: user_values.get(name, default) for name, default in reads.items()}, **settings}


def contradicted(row: Formulation, values: Mapping[str, Any]) -> list[str]:
    """Return the fields that a row fixes and a config has otherwise, as far as they matter."""
    reads = {n: v for n in row.reads if (v := values.get(n)) is not None and (v or n != "beta")}
    settings = row.fixed(reads)
    if "beta" not in reads:  # without a KL, it decides nothing
        settings.pop("use_bias_correction_kl", None)
    return [n for n, fixed in settings.items() if n in values and not _fits(values[n], fixed)]


def _fits(value: Any, fixed: Any) -> bool:
    """Tell whether a field says what a row fixes; a list of one is the same as what it holds."""
    value, fixed = _alone(value), _alone(fixed)
    return value == fixed and isinstance(value, bool) == isinstance(fixed, bool)


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@dataclass(frozen=True)
class Resolved(Generic[Row]):
    """A row for one config: what a trainer computes."""

    algorithm: str | None  # the row's name; None: TRL's own loss, which is none of a row
    formulation: str  # "chapter", "code" or "trl"
    row: Row  # the formulation, as the config makes it
    parameters: dict[str, Any]  # all that its loss reads, and its constants
    args: Any  # the config, with the row's values in every field that it fixes or reads

    @property
    def label(self) -> str:
        """The name for people: "grpo (chapter)"."""
        return self.row.label


@dataclass
class RowConfig:
    """Mixin of a TRL config whose loss fields belong to a row; None means the row's own value.

    In formulation "trl" they mean what TRL means by them: those that the algorithm fixes are set
    where they are None, and without an algorithm None is TRL's default.
    """

    kind: ClassVar[type[Formulation]]
    default_row: ClassVar[str]

    algorithm: str | None = field(
        default=None,
        metadata={"help": "Name of a row. None: the trainer's first; in formulation trl, no row."},
    )
    formulation: str = field(
        default="chapter",
        metadata={"help": "Whose equation: chapter, code, or trl for TRL's own loss."},
    )

    @classmethod
    def resolve(cls, args: Any) -> Resolved:
        """Read the row of a config, before anything is loaded, and fill in the fields it decides.

        What is filled in counts as not given if the config is resolved again. A config of TRL's own
        class stays as it is: its loss is TRL's, that of the row, if any, whose settings it has.
        """
        stock_class = next(c for c in cls.__mro__ if c.__module__.startswith("trl."))  # TRL's own
        if not isinstance(args, cls):
            if not isinstance(args, stock_class):
                wanted = f"{cls.__name__} or {stock_class.__name__}"
                raise InputError(f"args must be a {wanted}, not a {type(args).__name__}.")
            return cls._of_stock(args, stock_class.__name__.replace("Config", "Trainer"))
        stock = {f.name: _default(f) for f in fields(stock_class)}  # TRL's fields, its defaults
        for f in fields(args):  # ours are checked here, TRL's by TRL
            value = getattr(args, f.name)
            rules = {**f.metadata, **EARLY.get(f.name, {})}  # ranges and choices
            if f.name not in stock and (wanted := instead(value, rules)):
                raise FieldError(f.name, f"is {value!r}; write {wanted}")
        is_stock = args.formulation == "trl"
        algorithm = args.algorithm or (None if is_stock else cls.default_row)
        row = find(algorithm, args.formulation, cls.kind) if algorithm else cls._stock_row()
        args.check_for(row)
        user_values = args._set_by_user(row)
        others = {n: find(n, args.formulation) for n in names(cls.kind.family, args.formulation)}
        values = resolve(row, user_values, others, passing=stock if is_stock else ())
        if missing := [name for name, value in values.items() if value == REQUIRED]:
            raise InputError(f"{row.label} needs {missing[0]}, which has no default; set it.")
        # in formulation "trl", fields that no row reads are TRL's, and keep what the user writes
        filled_in = {**stock, **user_values, **values} if is_stock else {**stock, **values}
        decided = LOSS_FIELDS | values.keys()
        args._fill_in(filled_in, decided, user_values=user_values.keys())
        if clashing := contradicted(row, values):  # only in formulation trl: a loss without a row
            algorithm, row = None, replace(row, label=f"{row.label} but for {', '.join(clashing)}")
        parameters = {n: values[n] for n in row.reads if values.get(n) is not None}
        parameters = args.parameters(row, parameters)
        return args.checked(Resolved(algorithm, args.formulation, row, parameters, args))

    def _set_by_user(self, row: Formulation) -> dict[str, Any]:
        """Return the fields that the user sets; those that an earlier call filled in are not."""
        reads = {**row.reads, **row.trainer_reads}
        filled_in = getattr(self, "_filled", {})
        user_values = {}
        for f in fields(self):
            value = getattr(self, f.name)
            was_filled_in = f.name in filled_in and value == filled_in[f.name]
            # what the row does not read, and is as by default, need not be the user's
            is_set = value is not None and (f.name in reads or value != _default(f))
            if is_set and not was_filled_in:
                user_values[f.name] = value
        return user_values

    def _fill_in(
        self, values: Mapping[str, Any], decided: Collection[str], user_values: Collection[str]
    ) -> None:
        """Set the fields that the row decides, to None where nothing has a value for them.

        Those that are not the user's are noted, so that the next call tells them apart.
        """
        decided = {f.name for f in fields(self)} & set(decided)
        for name in decided:
            setattr(self, name, values.get(name))
        vars(self)["_filled"] = {name: getattr(self, name) for name in decided - set(user_values)}

    @classmethod
    def _stock_row(cls, algorithm: str | None = None) -> Formulation:
        """Return TRL's own loss, all of whose fields are TRL's."""
        row = find(algorithm or cls.default_row, "trl", cls.kind)
        own = {"reads": {}, "trainer_reads": {}, "settings": {}, "trl_offset": {}}
        return replace(row, **own, label=row.label if algorithm else f"{row.trainer} (trl)")

    @classmethod
    def _of_stock(cls, args: Any, trainer: str) -> Resolved:
        """Return what a config of TRL's own class computes, named after the row it is, if any."""
        rows = [n for n in names(cls.kind.family, "trl") if find(n, "trl").trainer == trainer]
        algorithm = next((n for n in rows if not contradicted(find(n, "trl"), vars(args))), None)
        return Resolved(algorithm, "trl", cls._stock_row(algorithm), {}, args)

    def check_for(self, row: Formulation) -> None:
        """Refuse a row that is not trained with this config."""

    def parameters(self, row: Formulation, user_values: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of the row's loss."""
        return row.parameters(user_values)

    def checked(self, resolved: Resolved) -> Resolved:
        """Return what was resolved, or refuse what could not be computed or resumed later."""
        return resolved


def _default(declared: Field) -> Any:
    return declared.default if declared.default_factory is MISSING else declared.default_factory()
