"""The values of a YAML file that belong to several dataclasses, checked without building any."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_trl.run.config import CheckedConfig
from rlhf_trl.run.config_types import Known, fields_of


def read_fields(
    path: str | Path,
    classes: Sequence[Any],
    ignore: Sequence[str] = (),
    words: Mapping[str, Mapping[Any, Any]] | None = None,
) -> dict[str, Any]:
    """Return the checked values of a YAML file whose keys belong to any of several dataclasses.

    Args:
        path: the file.
        classes: the dataclasses; the first that has a field decides its type.
        ignore: keys that may hold anything.
        words: by key, what to read in place of a boolean where the key's type has none, such as
            {"mode": {True: "on", False: "off"}}.
    """
    config = CheckedConfig(path)
    values = config.values
    for key in ignore:
        values.pop(key, None)
    for key, by_boolean in (words or {}).items():
        if isinstance(values.get(key), bool):
            values[key] = by_boolean[values[key]]
    known: Known = {}
    for cls in reversed(classes):  # so that the first class with a field comes last, and decides
        known = {**known, **fields_of(cls)}
    config.refuse_unknown(values, known, path=())
    # check only the fields that the file has, so that no other is refused as missing
    return config.check_block(values, {key: known[key] for key in values}, ())
