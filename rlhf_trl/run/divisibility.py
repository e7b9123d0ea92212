"""Batches that do not come out even: the sentence about them, with the nearest values that do."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rlhf_trl.errors import InputError
from rlhf_trl.run.config_types import one_of, show


class Unfit(NamedTuple):
    """A field whose value does not go with the other batch sizes."""

    key: str
    sentence: str  # without the key, which comes before it


def unfit_batch(values: Mapping[str, Any], processes: int) -> Unfit | None:
    """Return what TRL's GRPOConfig refuses in the batch sizes of a run; None: nothing.

    TRL says less: not which values would do.

    Args:
        values: the config's for fields of GRPOConfig, or else their defaults; all others than
            `num_generations` are above 0.
        processes: over which the batches are spread.
    """
    at_once = values["per_device_train_batch_size"] * processes
    batch, steps = values["generation_batch_size"], values["steps_per_generation"]
    product = "generation_batch_size"
    if batch is not None and steps is not None:
        return None  # TRL takes one of the two, and says so
    if batch is not None and batch % at_once:
        whole = math.lcm(at_once, max(values["num_generations"], 1))
        return Unfit(
            "generation_batch_size",
            f"is {batch}, which {_product(values, processes)} = {at_once} completions at once do "
            f"not divide; write {one_of(_nearest(batch, whole))}.",
        )
    if batch is None:
        key = "steps_per_generation" if steps else "gradient_accumulation_steps"
        batch = at_once * values[key]
        product = f"{_product(values, processes)} x {key} {values[key]}"
    generations = values["num_generations"]
    if generations < 1 or batch % generations:
        divisors = [n for n in range(2, batch + 1) if batch % n == 0]  # TRL wants 2 or more
        # where none does for evaluation, that is a fault of its own
        fitting = [n for n in divisors if not _unfit_evaluation(values, processes, n)] or divisors
        remedy = f"write {one_of(fitting)}, or change the batch" if fitting else "raise the batch"
        return Unfit(
            "num_generations",
            f"is {show(generations)}, which does not divide the generation batch of {batch} "
            f"({product}); {remedy}.",
        )
    return _unfit_evaluation(values, processes, generations)


def _unfit_evaluation(
    values: Mapping[str, Any], processes: int, num_generations: int
) -> Unfit | None:
    """Return what GRPOConfig refuses in evaluation's batch, were this the `num_generations`."""
    if getattr(values["eval_strategy"], "value", values["eval_strategy"]) == "no":
        return None
    size = values["per_device_eval_batch_size"]
    group = values["num_generations_eval"] or num_generations
    if size * processes % group == 0:
        return None
    key = "num_generations_eval" if values["num_generations_eval"] else "num_generations"
    fitting = _nearest(size, group // math.gcd(group, processes))
    return Unfit(
        "per_device_eval_batch_size",
        f"is {size}, and {key} {group} does not divide its {size} x {processes} "
        f"process{'es' * (processes > 1)}; write {one_of(fitting)}.",
    )


def _product(values: Mapping[str, Any], processes: int) -> str:
    """Return how the completions of a micro-batch on all processes come about."""
    size = values["per_device_train_batch_size"]
    return f"per_device_train_batch_size {size} x {processes} process{'es' * (processes > 1)}"


def _nearest(number: int, divisor: int) -> list[int]:
    """Return the multiples of `divisor` (above 0) just below and just above a number."""
    below = number // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple > 0]


def check_packing(args: Any) -> None:
    """Refuse packing into rows of no length, which TRL notices once it has loaded the model."""
    if getattr(args, "packing", False) and args.max_length is None:
        raise InputError(
            "packing: true fills rows of max_length tokens, and max_length is null; write how many."
        )


def unfilled_step(examples: int, batch: int, noun: str) -> Iterable[str]:
    """Yield the sentence about an epoch whose last optimizer step learns from fewer examples."""
    if rest := examples % batch:
        fitting = one_of(_nearest(examples, batch))
        yield f"an epoch's last step has {rest} of {batch} {noun}; {fitting} of them fill it"
