"""Checkpoints: saved whole before older ones go, refused where weights have diverged, gone on from.

The functions take a trainer of this package; it imports them when it saves or resumes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import rotate_checkpoints

from rlhf_trl import manifests, output
from rlhf_trl.errors import Diverged


def save(trainer: Any, save_stock: Callable[[Any], None], trial: Any) -> None:
    """Save a checkpoint, then its manifest, then push it, and only then delete older ones.

    `save_stock` is TRL's own method; `trial` is None, or that of a search for hyperparameters.
    """
    args = trainer.args
    folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
    if getattr(args, "refuse_non_finite", False):
        check_finite(trainer)
    if args.should_save:  # one of this step, if there is any, is about to be overwritten
        (folder / output.MANIFEST).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    trainer._save_state(folder)  # before the random state is saved, which it may move
    with patch.object(args, "save_total_limit", None):  # so that TRL deletes none yet
        save_stock(trial)
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        facts = {"world_size": args.world_size, "save_only_model": args.save_only_model}
        if hasattr(trainer, "skips"):
            facts["skip_zero_advantage"] = trainer.skips
        manifests.write_manifest(folder, trainer.save_checksums, **trainer.told, **facts)
    trainer.accelerator.wait_for_everyone()
    if args.push_to_hub:  # TRL's own push did nothing, as there was no manifest yet
        trainer._push_from_checkpoint(str(folder))
    if args.should_save and args.save_total_limit:
        _delete_older(trainer, folder.parent, args.save_total_limit)


def _delete_older(trainer: Any, folder: Path, limit: int) -> None:
    """Delete all but the newest checkpoints, so many, once one of these is on the disk."""
    newest = sorted(output.numbered(folder, "checkpoint-").items())[-limit:]
    whole = [path for _, path in newest if (path / output.MANIFEST).exists()]
    _sync(whole[0])  # the oldest has long been written: there is nothing to wait for
    rotate_checkpoints(str(folder), limit, trainer.state.best_model_checkpoint)


def _sync(folder: Path) -> None:
    """Wait until a folder's files are on the disk, so that a loss of power cannot undo them."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_finite(trainer: Any) -> None:
    """Stop a run that has diverged, on all processes, before its weights are saved."""
    trained = (weight for weight in trainer.model.parameters() if weight.requires_grad)
    # what this process holds of a weight that FSDP or ZeRO-3 has shared out
    mine = (getattr(w, "_local_tensor", getattr(w, "ds_tensor", w)) for w in trained)
    is_bad = not all(weight.isfinite().all() for weight in mine)
    any_is_bad = trainer.accelerator.gather(torch.tensor([is_bad], device=trainer.args.device))
    if any_is_bad.any():
        raise Diverged(
            f"the weights are no longer finite at step {trainer.state.global_step}, so they are "
            f"not saved: training has diverged; {last_good(trainer.args)}."
        )


def last_good(args: Any) -> str:
    """Return where a run that has diverged can go on."""
    whole = output.whole_checkpoints(Path(args.output_dir))
    last = f"the last good step is {max(whole)}" if whole else "no good step was saved"
    return f"{last}; lower learning_rate"


def follow_schedule(scheduler: Any) -> None:
    """Set the learning rates that a schedule has where it stands: base_lr * factor(last_epoch).

    A schedule without such a factor stays as it is: it knows nothing of a run's length.
    """
    if not isinstance(scheduler, LambdaLR):
        return
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    scheduler._last_lr = [base * factor(scheduler.last_epoch) for base, factor in rates]
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate
