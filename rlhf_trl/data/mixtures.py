"""Mixtures of several files: examples of one kind, in the shares that weights ask for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.columns import TEMPLATE, check_alike
from rlhf_trl.data.examples import SIDES, Examples
from rlhf_trl.data.fitting import spread
from rlhf_trl.data.readers import check_reader
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

CHATS = ("prompt", *SIDES, "messages")  # columns that may hold messages


def with_other_files(
    config: FileData,
    train: "Dataset",
    dropped: Mapping[str, Sequence[str]],
    shapes: Sequence[str],
    read: Callable[[FileData, str, str, str], tuple["Dataset", Mapping[str, Sequence[str]]]],
) -> tuple["Dataset", np.ndarray, dict[str, list[str]]]:
    """Return the examples of all files of a mixture, the file of each, and the rows that make none.

    Args:
        config: the block.
        train: the examples of `config.path`.
        dropped: where the rows stand that were left out there, by reason.
        shapes: what the reader of a file, if it has one, may make.
        read: takes a block, and the path and split to read and the field of the block that names
            them; returns the examples, and where the rows stand that make none.
    """
    parts = [(train, dropped)]
    for number, file in enumerate(config.mix):
        check_reader(file.reader, *shapes)
        block = replace(config, reader=file.reader, columns=file.columns, name=file.name)
        parts.append(read(block, file.path, file.split, f"mix.{number}.path"))
    paths = [config.path, *(file.path for file in config.mix)]
    left_out: dict[str, list[str]] = {}
    for path, (_, places_by_reason) in zip(paths, parts, strict=True):
        for reason, places in places_by_reason.items():
            left_out.setdefault(reason, []).extend(f"{place} of {path}" for place in places)
    datasets = [part for part, _ in parts]
    files = np.repeat(np.arange(len(datasets)), [len(part) for part in datasets])
    return _joined(datasets, paths), files, left_out


def mixed(
    config: FileData, data: Examples, keys: np.ndarray, files: np.ndarray, most: int | None
) -> np.ndarray:
    """Leave the training examples that have the shares of a mixture; return their `keys`.

    Args:
        config: the block.
        data: the examples, N of them to train on.
        keys: (N,) hashes of the prompts to train on.
        files: (N,) which file each is of, from 0.
        most: examples of the mixture; None: as many as there are.
    """
    paths = [config.path, *(file.path for file in config.mix)]
    weights = [1.0, *(file.weight for file in config.mix)]
    places = [np.flatnonzero(files == number) for number in range(len(paths))]
    sizes = _share_sizes([len(p) for p in places], weights, most)
    shares = []
    for path, size, places_of_file in zip(paths, sizes, places, strict=True):
        if not size:
            raise InputError(
                f"dataset.mix: no example of {path} is in a mixture of {sum(sizes)} with these "
                "weights; raise its weight, or add examples to the others."
            )
        shares.append(
            f"{size} of {len(places_of_file)} examples of {path} ({size / sum(sizes):.1%})"
        )
    data.notes.append(f"mixture: {', '.join(shares)}")
    chosen = spread([p[:size] for p, size in zip(places, sizes, strict=True)])
    data.train = data.train.select(chosen)
    return keys[chosen]


def _joined(parts: Sequence["Dataset"], paths: Sequence[str]) -> "Dataset":
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


def _share_sizes(counts: Sequence[int], weights: Sequence[float], most: int | None) -> list[int]:
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
