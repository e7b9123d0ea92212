"""Which printed algorithm a config or a trainer computes, and what to change to get another.

The losses are measured with the user's fields, and with those changed, on the fixed batches, which
bring their own prompts, completions, rewards, model and schedule.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from typing import Any

from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, Formulation, formulation
from rlhf_trl.compare.matrix import Matrix, Result
from rlhf_trl.compare.measure import Book
from rlhf_trl.compare.models import quick_and_quiet, trainer_fields
from rlhf_trl.compare.rows import Row, fields_for_batches
from rlhf_trl.compare.subjects import Subject, side_of
from rlhf_trl.compare.trainers import POLICY
from rlhf_trl.compare.windows.batches import GROUP, LIMIT, ROWS, PolicyBatch
from rlhf_trl.errors import InputError


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
        fields |= {"num_generations": GROUP, "per_device_train_batch_size": ROWS}
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
    return {"max_completion_length": LIMIT} if "max_completion_length" in row.reads else {}


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
