"""Tokenized preference data: what is too long is cut or dropped, and KTO's examples are ordered."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from rlhf_trl.data.arrow import differing, table
from rlhf_trl.errors import InputError

ATTEMPTS = 100  # orders tried before there are said to be too few different prompts


def shortened(
    prompt: list[int], completions: Sequence[list[int]], max_length: int | None, rule: str
) -> tuple[list[int], list[list[int]]] | None:
    """Make the ids of a prompt, and of completions that all keep it, fit into `max_length` tokens.

    The rule is "cut_prompt" (its first tokens go), "cut_completion" (their last) or "drop". None is
    returned where it leaves no prompt or no completion.
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
) -> tuple[Any, dict[str, int]]:
    """Shorten or drop over-long rows of a tokenized data set, then drop pairs without contrast.

    The rows have `prompt_ids` and the columns `sides`; see `shortened`. The result is the rows that
    are left, and how many were cut or dropped, by reason.
    """
    if not hasattr(dataset, "select"):
        raise InputError(
            "dataset: a streamed data set cannot be counted or ordered; load it whole."
        )
    options = {"sides": list(sides), "max_length": max_length, "rule": rule}
    counts = {"cut": 0, "over-long": 0, "identical": 0}
    prompts, *wholes = (lengths(dataset, name) for name in ("prompt_ids", *sides))
    longest = np.max(wholes, axis=0)
    over = np.flatnonzero(prompts + longest > (max_length or np.inf)).tolist()
    lost = {n for n in over if _short(dataset[n], **options) is None}
    counts["over-long"], counts["cut"] = len(lost), len(over) - len(lost)
    if lost:
        dataset = dataset.select([n for n in range(len(dataset)) if n not in lost])
    if counts["cut"]:
        how = {"batched": True, "fn_kwargs": options, "desc": "Cutting long rows"}
        dataset = dataset.map(_shorten, **how)
    if len(sides) == 2:
        found = differing(dataset, *sides)
        counts["identical"] = len(dataset) - len(found)
        dataset = found
    if not len(dataset):
        reasons = ", ".join(f"{n} {why}" for why, n in counts.items() if n and why != "cut")
        raise InputError(
            f"dataset: no row is left ({reasons}, with max_length {max_length} and "
            f"overlong: {rule}); raise max_length or choose another rule."
        )
    return dataset, counts


def lengths(dataset: Any, name: str) -> np.ndarray:
    """Return the lengths of the lists in a column, (N,)."""
    return pc.list_value_length(table(dataset.select_columns([name]))[name]).to_numpy()


def _short(
    row: dict[str, Any], sides: list[str], max_length: int | None, rule: str
) -> dict[str, list[int]] | None:
    found = shortened(row["prompt_ids"], [row[side] for side in sides], max_length, rule)
    return found and {"prompt_ids": found[0], **dict(zip(sides, found[1], strict=True))}


def _shorten(batch: dict[str, list[Any]], **options: Any) -> dict[str, list[Any]]:
    names = ("prompt_ids", *options["sides"])
    rows = zip(*(batch[name] for name in names), strict=True)
    found = [_short(dict(zip(names, row, strict=True)), **options) for row in rows]
    return {name: [row[name] for row in found] for name in names}


def kto_order(
    labels: Sequence[bool],
    prompts: Sequence[Sequence[int]],
    batch: int,
    seed: int,
    interleave: bool = True,
) -> list[int]:
    """Return an order of unpaired examples whose neighbors never share a prompt.

    The labels are spread evenly: as many of each make them alternate. "Neighbors" are those whose
    completions TRL combines: each example of a batch and the one before it, the first and the last.
    The last example is left out if it would make a batch of its own.

    Args:
        labels: (N,) whether each is desirable.
        prompts: (N,) their token ids.
        batch: examples per device and batch.
        seed: of the order.
        interleave: False: all desirable before all undesirable, to show what goes wrong then.
    """
    rng = random.Random(seed)
    classes = [
        [i for i, label in enumerate(labels) if bool(label) is want] for want in (True, False)
    ]
    if not all(classes):
        raise InputError(
            f"dataset: label is {str(bool(classes[0])).lower()} in all {len(labels)} examples; KTO "
            "needs both desirable and undesirable ones."
        )
    if batch < 2:
        raise InputError(
            "per_device_train_batch_size is 1, and KTO's reference point needs another example in "
            "the batch; write 2 or more."
        )
    keys = [hash(tuple(ids)) for ids in prompts]
    for _ in range(ATTEMPTS):
        places = []
        for side, members in enumerate(classes):
            rng.shuffle(members)
            spread = len(members) if interleave else 1
            first = 0 if interleave else side * len(labels)
            places += [(first + (k + 0.5) / spread, side, i) for k, i in enumerate(members)]
        order = [i for _, _, i in sorted(places)]
        if len(order) % batch == 1:
            order.pop()
        if _separate(order, labels, keys, batch):
            return order
    raise InputError(
        "dataset: too few different prompts for KTO, which compares each example with the "
        f"completion of another prompt in its batch of {batch}; add prompts or change "
        "per_device_train_batch_size."
    )


def _separate(order: list[int], labels: Sequence[bool], keys: list[Any], batch: int) -> bool:
    """Swap examples of one label until no neighbors share a key; tell whether that worked."""

    count = len(order)

    def beside(place: int, step: int) -> int:
        first = place - place % batch
        return first + (place - first + step) % min(batch, count - first)

    def clashes(place: int) -> bool:
        return keys[order[place]] == keys[order[beside(place, -1)]]

    def settles(one: int, other: int) -> bool:
        if labels[order[one]] != labels[order[other]]:
            return False
        order[one], order[other] = order[other], order[one]
        if not any(map(clashes, (one, beside(one, 1), other, beside(other, 1)))):
            return True
        order[one], order[other] = order[other], order[one]
        return False

    return all(
        not clashes(place) or any(settles(place, (place + n) % count) for n in range(1, count))
        for place in range(count)
    )


def rotated(dataset: Any, batch: int) -> Any:
    """Add `KL_completion_ids`: in each batch per device, the completion of the example before."""

    def rotate(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        completions, prompts = rows["completion_ids"], rows["prompt_ids"]
        before = [*prompts[-1:], *prompts[:-1]]
        if any(a == b for a, b in zip(prompts, before, strict=True)):
            raise InputError("dataset: two neighbors share a prompt; order them with kto_order.")
        return {"KL_completion_ids": [*completions[-1:], *completions[:-1]]}

    how = {"batched": True, "batch_size": batch, "desc": "Adding completions for the KL"}
    return dataset.map(rotate, **how, load_from_cache_file=False)
