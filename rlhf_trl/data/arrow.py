"""Reading the columns of data sets as Arrow holds them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


def table(dataset: "Dataset") -> "pa.Table":
    """Return the Arrow table of a data set, which is a view where its rows are neighbors."""
    return dataset.with_format("arrow")[:]


def cells(dataset: "Dataset", name: str) -> Iterator[Any]:
    """Iterate over one column, without holding all of it."""
    for batch in dataset.select_columns([name]).iter(1000):
        yield from batch[name]


def differing(dataset: "Dataset", *sides: str) -> "Dataset":
    """Leave out the examples whose two sides are the same."""
    how = {"input_columns": list(sides), "batched": True, "desc": "Dropping identical pairs"}
    kept = dataset.filter(lambda *two: [a != b for a, b in zip(*two, strict=True)], **how)
    return kept if len(kept) < len(dataset) else dataset
