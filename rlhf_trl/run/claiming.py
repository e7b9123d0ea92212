"""The output folder of a run, claimed once, and the whole checkpoint there to go on from."""

import shutil
from pathlib import Path

from rlhf_trl.errors import InputError
from rlhf_trl.manifests import checkpoint_fault
from rlhf_trl.output import (
    ASKED,
    COST,
    JUDGED,
    LOCK,
    PRINTED,
    RECORD,
    finished,
    hold,
    numbered,
    whole_checkpoints,
)


def claim(output_dir: str, resume: str | None) -> str | None:
    """Check that a run may write to `output_dir`, and return the checkpoint to resume from.

    The checkpoint is `resume` or, with `auto`, the newest whole one, if any; damaged ones are
    skipped with a message. Without `resume`, the folder has to be empty.
    """
    folder = Path(output_dir)
    _check_writable(folder, output_dir)
    hold(folder)
    if resume is None:
        _check_empty(folder, output_dir)
        return None
    for path in [*folder.glob(".*.part*"), *folder.glob(".*.old")]:  # what a killed write left
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if resume == "auto":
        return _newest_checkpoint(folder, output_dir)
    fault = checkpoint_fault(resume)
    if fault:
        raise InputError(f"resume_from_checkpoint: {resume!r} {fault}; name a whole one.")
    if _holds_files(folder) and Path(resume).resolve().parent != folder.resolve():
        raise InputError(
            f"output_dir: {output_dir!r} already holds files, and {resume!r} belongs to a run "
            "in another folder; go on in that one, or name an empty one with --output_dir."
        )
    return resume


def _check_writable(folder: Path, output_dir: str) -> None:
    """Make the folder, which `output_dir` names, and try to write to it."""
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"output_dir: {output_dir!r} is a file; name a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a byte 0 in its name
        reason = getattr(error, "strerror", error)
        raise InputError(
            f"output_dir: {output_dir!r} cannot be written ({reason}); name another."
        ) from error


def _check_empty(folder: Path, output_dir: str) -> None:
    """Refuse a folder that holds something, and say how to go on with a run there."""
    if not _holds_files(folder):
        return
    content, remedy = "files", ""
    if whole_checkpoints(folder):
        content = "a run"
        remedy = "continue it with --resume_from_checkpoint auto, or "
    elif finished(folder):
        content = "a finished run without a checkpoint"
    elif _begun(folder):
        content = "a run without a checkpoint"
        remedy = "start it anew there with --resume_from_checkpoint auto, or "
    raise InputError(
        f"output_dir: {output_dir!r} already holds {content}; {remedy}write elsewhere "
        "with --output_dir."
    )


def _newest_checkpoint(folder: Path, output_dir: str) -> str | None:
    """Return the newest whole checkpoint; None where a run has none yet, or the folder is empty."""
    for _, checkpoint in sorted(numbered(folder, "checkpoint-").items(), reverse=True):
        fault = checkpoint_fault(checkpoint)
        if fault is None:
            return str(checkpoint)
        print(f"skipped {checkpoint}, which {fault}", flush=True)
    if not _begun(folder):
        raise InputError(
            f"resume_from_checkpoint: {output_dir!r} holds files but neither a whole checkpoint "
            "nor the config.yaml of a run; write elsewhere with --output_dir."
        )
    if _holds_files(folder) and not finished(folder):
        print(f"{output_dir} holds no checkpoint: the run begins again at step 0", flush=True)
    return None


def _holds_files(folder: Path) -> bool:
    return any(path.name not in (LOCK, ASKED, PRINTED, COST) for path in folder.iterdir())


def _begun(folder: Path) -> bool:
    """Return whether a run has begun in a folder, even if it has not written its config yet."""
    # how names begin of what a run writes before config.yaml; ".": of what a killed write leaves
    early_names = (".", "samples-", "answers", RECORD, JUDGED, "round-", "reward-batch-")
    early_names += (ASKED, PRINTED, COST)
    has_only_early = all(path.name.startswith(early_names) for path in folder.iterdir())
    return has_only_early or (folder / "config.yaml").exists()
