"""Mixtures of several files: examples of one kind, in the shares that weights ask for."""

from collections.abc import Sequence
from math import floor
from typing import TYPE_CHECKING, Any

from rlhf_trl.data.columns import TEMPLATE, check_alike
from rlhf_trl.data.readers import SIDES
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

CHATS = ("prompt", *SIDES, "messages")  # columns that may hold messages


def joined(parts: Sequence["Dataset"], paths: Sequence[str]) -> "Dataset":
    """Return the examples of several files as one data set, with the columns that all have.

    Examples without tools or arguments of the chat template get empty ones where others have some.

    Args:
        parts: the examples of each file.
        paths: of the files, for errors.
    """
    from datasets import concatenate_datasets

    shared = [name for name in parts[0].column_names if all(name in p.column_names for p in parts)]
    template = [name for name in TEMPLATE if any(name in p.column_names for p in parts)]
    names = list(dict.fromkeys([*shared, *template]))
    completed = [_with_template(part, template).select_columns(names) for part in parts]
    for part, path in zip(completed[1:], paths[1:], strict=True):
        check_alike(part, completed[0][0], path)
    features = completed[0].features.copy()
    for name in names:
        features[name] = _common_feature(name, [part.features[name] for part in completed], paths)
    return concatenate_datasets([part.cast(features) for part in completed])


def _with_template(part: "Dataset", names: Sequence[str]) -> "Dataset":
    """Return a data set with these columns of chat templates, empty ones where it has none."""
    from datasets import Json

    for name in names:
        if name not in part.column_names:
            empty = None if name == "tools" else {}
            part = part.add_column(name, [empty] * len(part), feature=Json())
    return part


def _common_feature(name: str, features: Sequence[Any], paths: Sequence[str]) -> Any:
    """Return the type of a column that has these types in the files."""
    from datasets import Json, List, Value

    if all(feature == features[0] for feature in features):
        return features[0]
    if name in CHATS and not any(isinstance(feature, Value) for feature in features):
        return List(Json())
    other = next(n for n, feature in enumerate(features) if feature != features[0])
    raise InputError(
        f"dataset.mix: the column {name} of {paths[other]} is of another type than that of "
        f"{paths[0]} ({features[other]}, {features[0]}); write the same in both, or rename it with "
        "columns."
    )


def share_sizes(counts: Sequence[int], weights: Sequence[float], most: int | None) -> list[int]:
    """Return how many examples of each file make the largest mixture of these weights.

    No example comes twice, so that the file with the fewest examples for its weight decides.

    Args:
        counts: the examples of each file.
        weights: of the files, in any unit.
        most: examples of the mixture; None: as many as there are.
    """
    total = sum(weights)
    size = min(count * total / weight for count, weight in zip(counts, weights, strict=True))
    whole = floor(size + 1e-9 if most is None else min(size + 1e-9, most))
    exact = [whole * weight / total for weight in weights]
    sizes = [floor(part + 1e-9) for part in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda n: sizes[n] - exact[n])
    for number in by_remainder[: whole - sum(sizes)]:
        sizes[number] += 1
    return sizes


def spread(places_by_file: Sequence[Sequence[int]]) -> list[int]:
    """Merge the places of each file's examples so that all files are spread evenly."""
    merged = [
        ((k + 0.5) / len(places), file, place)
        for file, places in enumerate(places_by_file)
        for k, place in enumerate(places)
    ]
    return [place for _, _, place in sorted(merged)]
