"""Tokenized preference data: what is too long is cut or dropped, and KTO's examples are ordered."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rlhf_trl.data.arrow import cells, differing, table
from rlhf_trl.data.examples import LISTED
from rlhf_trl.errors import InputError

ATTEMPTS = 100  # orders tried before there are said to be too few different prompts


def shortened(
    prompt: list[int], completions: Sequence[list[int]], max_length: int | None, rule: str
) -> tuple[list[int], list[list[int]]] | None:
    """Shorten a prompt and its completions so that each fits into `max_length` with the prompt.

    Args:
        prompt: token ids.
        completions: token ids of each completion.
        max_length: tokens of prompt and completion at most; None: no limit.
        rule: what goes if they are too long: "cut_prompt" (the prompt's first tokens),
            "cut_completion" (the completions' last tokens) or "drop" (everything).

    Returns:
        The prompt and the completions; None where the rule leaves no prompt or no completion.
    """
    longest = max(map(len, completions))
    if max_length is None or len(prompt) + longest <= max_length:
        return prompt, list(completions)
    if rule == "cut_prompt" and longest < max_length:
        return prompt[longest - max_length :], list(completions)
    if rule == "cut_completion" and len(prompt) < max_length:
        return prompt, [ids[: max_length - len(prompt)] for ids in completions]
    return None


def fit(
    dataset: Any, sides: Sequence[str], max_length: int | None, rule: str
) -> tuple[Any, dict[str, list[int]]]:
    """Shorten or drop over-long rows of a tokenized data set, then drop pairs without contrast.

    Args:
        dataset: rows with `prompt_ids` and the columns `sides`.
        sides: the columns of completions, such as "chosen_ids" and "rejected_ids".
        max_length: tokens of prompt and completion at most.
        rule: see `shortened`.

    Returns:
        The rows that are left, and the numbers, from 0, of those cut or dropped, by reason.
    """
    if not hasattr(dataset, "select"):
        raise InputError(
            "dataset: a streamed data set cannot be counted or ordered; load it whole."
        )
    options = {"sides": list(sides), "max_length": max_length, "rule": rule}
    # of a row's completions, the longest one decides whether it is too long
    longest_sides = np.max([lengths(dataset, side) for side in sides], axis=0)
    row_lengths = lengths(dataset, "prompt_ids") + longest_sides
    numbers: dict[str, list[int]] = {"cut": [], "over-long": [], "identical": []}
    for number in np.flatnonzero(row_lengths > (max_length or np.inf)).tolist():
        # shortened by the rule, a row may have no prompt or no completion
        is_dropped = _shortened_row(dataset[number], **options) is None
        numbers["over-long" if is_dropped else "cut"].append(number)
    kept = sorted({*range(len(dataset))} - {*numbers["over-long"]})
    if len(kept) < len(dataset):
        dataset = dataset.select(kept)
    if numbers["cut"]:
        dataset = dataset.map(_shorten, batched=True, fn_kwargs=options, desc="Cutting long rows")
    if len(sides) == 2:  # pairs
        different = differing(dataset, *sides)  # the rows whose two completions are not the same
        if len(different) < len(dataset):
            rows = zip(kept, *(cells(dataset, side) for side in sides), strict=True)
            numbers["identical"] = [number for number, *texts in rows if texts[0] == texts[1]]
            dataset = different
    if not len(dataset):
        dropped = ("over-long", "identical")
        reasons = ", ".join(f"{len(numbers[why])} {why}" for why in dropped if numbers[why])
        raise InputError(
            f"dataset: no row is left ({reasons}, with max_length {max_length} and "
            f"overlong: {rule}); raise max_length or choose another rule."
        )
    return dataset, numbers


def rows_named(numbers: Sequence[int]) -> str:
    """Name the first of rows by their numbers from 1, as in " (rows 1, 3, ...)"."""
    more = ", ..." if len(numbers) > LISTED else ""
    return f" (rows {', '.join(str(number + 1) for number in numbers[:LISTED])}{more})"


def lengths(dataset: Any, name: str) -> np.ndarray:
    """Return the lengths of the lists in a column, (N,)."""
    return pc.list_value_length(table(dataset.select_columns([name]))[name]).to_numpy()


def beyond_limit(dataset: Any, args: Any) -> tuple[list[int], list[int]]:
    """Return the numbers of demonstrations that `max_length` leaves out, and that lose their end.

    Args:
        dataset: tokenized rows of `input_ids` and `labels`, none of them cut.
        args: an `SFTConfig`. A row is left out if no token to train on is within its limit, and
            loses its end if some are; with `truncation_mode: keep_end`, none does.
    """
    if args.max_length is None:
        return [], []
    keeps_end = args.truncation_mode == "keep_end"
    within = slice(-args.max_length, None) if keeps_end else slice(args.max_length)
    longer = np.flatnonzero(lengths(dataset, "input_ids") > args.max_length)
    left_out, cut_off = [], []
    labels_of_longer = cells(dataset.select(longer).select_columns(["labels"]), "labels")
    for number, labels in zip(longer.tolist(), labels_of_longer, strict=True):
        if all(label == -100 for label in labels[within]):
            left_out.append(number)
        elif not keeps_end:
            cut_off.append(number)
    return left_out, cut_off


def _shortened_row(
    row: dict[str, Any], sides: list[str], max_length: int | None, rule: str
) -> dict[str, list[int]] | None:
    """Return the ids of a row, shortened; None where `shortened` is None."""
    fitting = shortened(row["prompt_ids"], [row[side] for side in sides], max_length, rule)
    if fitting is None:
        return None
    prompt, completions = fitting
    return {"prompt_ids": prompt, **dict(zip(sides, completions, strict=True))}


def _shorten(batch: dict[str, list[Any]], **options: Any) -> dict[str, list[Any]]:
    """Return a batch of rows shortened; `options` are further arguments of `_shortened_row`."""
    names = ("prompt_ids", *options["sides"])
    rows = zip(*(batch[name] for name in names), strict=True)
    short_rows = [_shortened_row(dict(zip(names, row, strict=True)), **options) for row in rows]
    return {name: [row[name] for row in short_rows] for name in names}


def kto_order(
    labels: Sequence[bool],
    prompts: Sequence[Sequence[int]],
    batch: int,
    seed: int,
    interleave: bool = True,
) -> list[int]:
    """Return an order of unpaired examples, as indices, whose neighbors never share a prompt.

    The two labels are spread evenly; with equally many of both, they alternate. For KTO's reference
    point, TRL combines each prompt with the completion of its neighbor: the example before it in
    the batch, or the last one for the first. The last example is left out if it would make a batch
    of its own.

    Args:
        labels: (N,) whether each example is desirable.
        prompts: (N,) token ids of their prompts.
        batch: examples per device and batch.
        seed: of the order.
        interleave: False: all desirable before all undesirable, to show what goes wrong then.

    Raises:
        InputError: a label or a neighbor is missing, or too few prompts differ.
    """
    rng = random.Random(seed)
    desirable = [i for i, label in enumerate(labels) if label]
    undesirable = [i for i, label in enumerate(labels) if not label]
    if not (desirable and undesirable):
        raise InputError(
            f"dataset: label is {str(bool(desirable)).lower()} in all {len(labels)} examples; KTO "
            "needs both desirable and undesirable ones."
        )
    if batch < 2:
        raise InputError(
            "per_device_train_batch_size is 1, and KTO's reference point needs another example in "
            "the batch; write 2 or more."
        )
    prompt_hashes = [hash(tuple(ids)) for ids in prompts]
    for _ in range(ATTEMPTS):  # swapping neighbors may fail in one order and work in another
        rng.shuffle(desirable)
        rng.shuffle(undesirable)
        indices = spread([desirable, undesirable]) if interleave else desirable + undesirable
        if len(indices) % batch == 1:  # alone in its batch, it would have no neighbor
            indices.pop()
        order = _Order(indices, labels, prompt_hashes, batch)
        if order.separate():
            return order.examples
    raise InputError(
        "dataset: too few different prompts for KTO, which compares each example with the "
        f"completion of another prompt in its batch of {batch}; add prompts or change "
        "per_device_train_batch_size."
    )


def spread(groups: Sequence[Sequence[int]]) -> list[int]:
    """Merge lists so that each is spread evenly; the items of a list keep their order."""
    merged = [
        ((k + 0.5) / len(items), group, item)
        for group, items in enumerate(groups)
        for k, item in enumerate(items)
    ]
    return [item for _, _, item in sorted(merged)]


@dataclass
class _Order:
    """An order of examples in batches, in which examples of one prompt must not be neighbors."""

    examples: list[int]  # their indices in order; `separate` changes the list in place
    labels: Sequence[bool]  # by index
    prompt_hashes: Sequence[int]  # by index
    batch: int  # examples of a batch, in which the first and the last are neighbors, too

    def separate(self) -> bool:
        """Swap examples of one label until no neighbors share a prompt; tell whether it worked."""
        count = len(self.examples)
        for place in range(count):
            others = ((place + step) % count for step in range(1, count))
            if self._clashes(place) and not any(self._swap(place, other) for other in others):
                return False
        return True

    def _neighbor(self, place: int, step: int) -> int:
        """Return the place `step` places further in the same batch; its end leads to its start."""
        first = place - place % self.batch
        size = min(self.batch, len(self.examples) - first)
        return first + (place - first + step) % size

    def _clashes(self, place: int) -> bool:
        """Tell whether the example at a place shares its prompt with the one before it."""
        before = self.examples[self._neighbor(place, -1)]
        return self.prompt_hashes[self.examples[place]] == self.prompt_hashes[before]

    def _swap(self, place: int, other: int) -> bool:
        """Swap the examples at two places, if that leaves no clash; tell whether it did.

        Examples of different labels are not swapped, so that the labels stay spread.
        """
        examples = self.examples
        if self.labels[examples[place]] != self.labels[examples[other]]:
            return False
        examples[place], examples[other] = examples[other], examples[place]
        # the places of both examples, and the places after them, may clash now
        touched = (place, self._neighbor(place, 1), other, self._neighbor(other, 1))
        if any(self._clashes(touched_place) for touched_place in touched):
            examples[place], examples[other] = examples[other], examples[place]  # swap back
            return False
        return True


def rotated(dataset: Any, batch: int) -> Any:
    """Add `KL_completion_ids`: the completion of the example before, in each batch per device.

    The first example of a batch gets the completion of the last.
    """

    def rotate(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions, prompts = rows["completion_ids"], rows["prompt_ids"]
        before = [*prompts[-1:], *prompts[:-1]]
        if any(a == b for a, b in zip(prompts, before, strict=True)):
            raise InputError("dataset: two neighbors share a prompt; order them with kto_order.")
        return {"KL_completion_ids": [*completions[-1:], *completions[:-1]]}

    options = {"batched": True, "batch_size": batch, "desc": "Adding completions for the KL"}
    return dataset.map(rotate, **options, load_from_cache_file=False)
