"""The reference model that sync_ref_model moves, in checkpoints."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rlhf_trl.errors import InputError

FILE = "synced_reference.pt"


def save(trainer: Any, folder: Path) -> None:
    """Write it to a checkpoint; all processes call it."""
    weights = trainer.accelerator.get_state_dict(trainer.ref_model)
    if trainer.args.should_save:
        torch.save(weights, folder / FILE)


def load(trainer: Any, folder: Path) -> None:
    """Bring it back to where it was at a checkpoint."""
    if trainer.is_fsdp_enabled:
        raise InputError(
            "resume_from_checkpoint: the reference model that sync_ref_model moves is not "
            "brought back where FSDP shares it out; start anew, or use DeepSpeed."
        )
    weights = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    reference = trainer.accelerator.unwrap_model(trainer.ref_model)
    all_weights_here = nullcontext()
    if trainer.is_deepspeed_enabled:
        from rlhf_trl import on_deepspeed

        all_weights_here = on_deepspeed.gathered(reference)
    with all_weights_here:
        reference.load_state_dict(weights)
