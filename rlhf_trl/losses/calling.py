"""How a row's parts are called: by the names of their arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.algorithms import Part


def look_up(module: ModuleType, part: Part) -> Callable[..., Tensor]:
    """Look a part of a row up among the book's functions, unless it is a function already."""
    return part if callable(part) else getattr(module, part)


def call(
    function: Callable[..., Tensor], params: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Tensor:
    """Call a function with those parameters and tensors that its arguments name."""
    known = {**params, **tensors}
    names = inspect.signature(function).parameters
    return function(**{name: known[name] for name in names if name in known})


def promoted(
    tensors: Mapping[str, Tensor], first: str, learned: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Bring all to the precision of the first, float32 at least; cut gradients but of `learned`.

    Without `learned` all keep their gradients.
    """
    precision = torch.promote_types(tensors[first].dtype, torch.float32)
    results = {name: tensor.to(precision) for name, tensor in tensors.items()}
    if learned is not None:
        for name in results.keys() - set(learned):
            results[name] = results[name].detach()
    return results
