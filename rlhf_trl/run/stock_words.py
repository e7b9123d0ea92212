"""The words that TRL takes for its own loss fields, at some of which it looks in a step only."""

import re
from dataclasses import Field, fields
from typing import Any

from rlhf_trl.algorithms import FieldError
from rlhf_trl.errors import nearest

FIELDS = (
    "loss_type",
    "scale_rewards",
    "importance_sampling_level",
    "multi_objective_aggregation",
)


def check_stock_words(args: Any) -> None:
    """Refuse a word that TRL does not know, in a config of TRL's class or of one derived from it.

    A row fixes these fields. This is for a loss that is none of a row, where they are the user's.
    """
    stock_class = next(c for c in type(args).__mro__ if c.__module__.startswith("trl."))
    for declared in fields(stock_class):
        known = _words(declared) if declared.name in FIELDS else []
        value = getattr(args, declared.name)
        for word in value if isinstance(value, list) else [value]:
            if known and isinstance(word, str) and word not in known:
                remedy = f"write one of {', '.join(known)}{nearest(word, known)}"
                raise FieldError(declared.name, f"is {word!r}, which TRL does not know; {remedy}")


def _words(declared: Field) -> list[str]:
    """Return the choices of TRL's field; where it has none, what its help has in quotes."""
    if choices := declared.metadata.get("choices"):
        return list(choices)
    text = declared.metadata["help"]
    if declared.name == "loss_type":  # words of other fields follow the list
        text = text.partition("values are")[2].partition(".")[0]
    # no quote is looked for in front of a word, as one of TRL's lacks it
    return list(dict.fromkeys(re.findall(r"(\w+)'(?!\w)", text)))
