"""The reference model of a run in 8 or 4 bits, while its policy stays whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from trl.trainer import grpo_trainer

from rlhf_trl.errors import InputError
from rlhf_trl.models import UNTRAINED
from rlhf_trl.quantized import quantized_options
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.launch import launched_for

KEY = "reference_quantization"


@contextmanager
def quantized_reference(loaded: Loaded[Any, Any]) -> Iterator[None]:
    """Let TRL's trainer quantize its reference model, and that alone, while it loads it.

    The trainer has one `quantization_config` for policy and reference. It loads first the policy,
    then the reference by the same function, from what the policy's config names.
    """
    _check(loaded)
    load = grpo_trainer.create_model_from_path
    sources: list[str] = []  # in the order in which they were loaded

    def load_and_quantize(source: str, *rest: Any, **options: Any) -> Any:
        """Load as TRL does, what comes second in fewer bits."""
        sources.append(source)
        if len(sources) == 2:
            method, device = loaded.own.reference_quantization, loaded.trl.device
            options |= quantized_options(method, source, KEY, device)
        return load(source, *rest, **options)

    with patch.object(grpo_trainer, "create_model_from_path", load_and_quantize):
        yield
    if len(sources) != 2:
        raise InputError(
            f"{KEY}: this TRL loaded {len(sources)} models where a policy and its reference were "
            "expected; install the versions of constraints.txt."
        )


def _check(loaded: Loaded[Any, Any]) -> None:
    """Refuse a reference that does not exist, is no model of its own, or has to change."""
    args, model = loaded.trl, loaded.model
    reason = ""
    if not args.beta:
        reason = "beta is 0, so there is no reference model; raise beta"
    elif model.use_peft:
        reason = "with use_peft the reference is the policy without its adapter; remove one"
    elif args.sync_ref_model:
        reason = "sync_ref_model changes the weights of the reference; remove one"
    elif model.model_name_or_path == UNTRAINED:
        reason = f"{UNTRAINED} has no reference that could be loaded; name another model"
    elif launched_for() or args.fsdp or args.deepspeed_plugin:
        reason = "DeepSpeed and FSDP would share out what is quantized; launch without"
    if reason:
        remedy = "" if reason.endswith("remove one") else f", or remove {KEY}"
        raise InputError(f"{KEY} is {loaded.own.reference_quantization}, but {reason}{remedy}.")
