"""What runs on DeepSpeed need of its own classes: for checkpoints, and for weights shared out."""

import os
from contextlib import AbstractContextManager
from typing import Any

import torch


def allow_in_checkpoints() -> None:
    """Let resuming unpickle the classes that DeepSpeed's checkpoints hold, and no others."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    safe: list[Any] = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    torch.serialization.add_safe_globals(safe)
    os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")


def gathered(model: Any) -> AbstractContextManager[None]:
    """Gather weights of which each process may hold a part, so that a block may change them."""
    from deepspeed import zero

    return zero.GatheredParameters(model.parameters(), modifier_rank=0)
