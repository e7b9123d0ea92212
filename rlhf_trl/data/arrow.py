"""Reading the columns of data sets as Arrow holds them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


def table(dataset: "Dataset") -> "pa.Table":
    """Return the Arrow table of a data set; nothing is copied if its rows are neighbors."""
    return dataset.with_format("arrow")[:]


def cells(dataset: "Dataset", name: str) -> Iterator[Any]:
    """Iterate over the cells of a column, without holding all of them."""
    for batch in dataset.select_columns([name]).iter(1000):
        yield from batch[name]


def differing(dataset: "Dataset", *sides: str) -> "Dataset":
    """Leave out the examples whose two sides are the same."""
    options = {"input_columns": list(sides), "batched": True, "desc": "Dropping identical pairs"}
    different = dataset.filter(lambda a, b: [x != y for x, y in zip(a, b, strict=True)], **options)
    return different if len(different) < len(dataset) else dataset
