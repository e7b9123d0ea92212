"""The output folder of a run: claimed once, written whole, resumed only from whole checkpoints."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from rlhf_trl.errors import InputError

# What a run leaves at a step, up to its number, and what it leaves at its end.
BY_STEP = "checkpoint- config-from-step- evaluations/step- samples/step- completions/completions_"
AT_END = "model value_model log.json summary.json learning_curve.png scores.jsonl reward_report.png"


def write_whole(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: object) -> None:
    """Write `content` as JSON, whole or not at all."""
    write_whole(path, lambda p: p.write_text(json.dumps(content, indent=2) + "\n"))


def replace_folder(path: str | Path, write: Callable[[Path], None], main_process: bool) -> None:
    """Let all processes write a folder beside `path`; the main one puts it in place, whole."""
    path = Path(path)
    part, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    write(part)
    if main_process:
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
        shutil.rmtree(old, ignore_errors=True)


def claim(output_dir: str, resume: str | None) -> str | None:
    """Check that a run may write to `output_dir`, and return the checkpoint to resume from.

    Args:
        output_dir: the run's folder; made if it does not exist.
        resume: None, `auto` (the newest whole checkpoint in `output_dir`, if any) or a checkpoint.

    Raises:
        InputError: the folder is a file, cannot be written, holds another run (than that of the
            checkpoint), or the checkpoint is missing or incomplete.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output_dir: {output_dir!r} is a file; name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"output_dir: {output_dir!r} cannot be written ({error.strerror}); name another with "
            "--output_dir."
        ) from error
    if resume is None:
        if any(folder.iterdir()):
            raise InputError(
                f"output_dir: {output_dir!r} already holds files; continue that run with "
                "--resume_from_checkpoint auto, or write elsewhere with --output_dir."
            )
        return None
    if resume != "auto":
        if fault := checkpoint_fault(resume):
            raise InputError(f"resume_from_checkpoint: {resume!r} {fault}; name a whole one.")
        if any(folder.iterdir()) and Path(resume).resolve().parent != folder.resolve():
            raise InputError(
                f"output_dir: {output_dir!r} already holds files, and {resume!r} belongs to a run "
                "in another folder; go on in that one, or name an empty one with --output_dir."
            )
        return resume
    faults = []
    for _, checkpoint in sorted(numbered(folder, "checkpoint-").items(), reverse=True):
        fault = checkpoint_fault(checkpoint)
        if fault is None:
            return str(checkpoint)
        faults.append(f"{checkpoint.name} {fault}")
    if any(folder.iterdir()):
        raise InputError(
            f"resume_from_checkpoint: {output_dir!r} holds files but no whole checkpoint "
            f"({'; '.join(faults) or 'no checkpoint-N folder'}); write elsewhere with --output_dir."
        )
    return None


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Return what is called `prefix` and a number (and an ending), by that number."""
    start = len(str(folder / prefix))
    found = {str(path)[start:].partition(".")[0]: path for path in folder.glob(f"{prefix}*")}
    return {int(number): p for number, p in found.items() if number.isdigit()}


def step_of(checkpoint: str | Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"]


def set_aside(folder: Path, step: int) -> None:
    """Move what a run left after `step`, from where it is about to go on, to `earlier-N` beside.

    So neither its results nor its later checkpoints pass for those of the run that goes on.
    """
    later = [
        path
        for prefix in BY_STEP.split()
        for number, path in numbered(folder, prefix).items()
        if number > step or (number == step and path.suffix == ".yaml")
    ]
    later += [path for name in AT_END.split() if (path := folder / name).exists()]
    if not later:
        return
    aside = folder / f"earlier-{max(numbered(folder, 'earlier-'), default=0) + 1}"
    for path in later:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    if (folder / "config.yaml").exists():
        shutil.copy(folder / "config.yaml", aside)
    print(f"what this run left after step {step} before is now in {aside}", flush=True)


def checkpoint_fault(checkpoint: str | Path) -> str | None:
    """Return what keeps a checkpoint from being resumed (missing or cut-off file), or None.

    transformers writes a checkpoint in place, so a killed save leaves half of one; and it starts a
    fresh optimizer without a word where that file is missing.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "is not a folder"
    try:
        step_of(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return "has no readable trainer_state.json"
    for file in folder.glob("*.json"):
        try:
            json.loads(file.read_text())
        except ValueError:
            return f"has a cut-off {file.name}"
    if fault := weights_fault(folder):
        return fault
    if not any(folder.glob("rng_state*.pth")):
        return "has no rng_state*.pth"
    # DeepSpeed and FSDP keep the optimizer in shards of their own.
    if not _sharded(folder):
        for name in ("optimizer.pt", "scheduler.pt"):
            if not (folder / name).exists():
                return f"has no {name} (was it saved with save_only_model?)"
    for file in [*folder.glob("*.pt"), *folder.glob("*.pth")]:
        if not zipfile.is_zipfile(file):
            return f"has a cut-off {file.name}"
    return None


def weights_fault(folder: Path) -> str | None:
    """Return what is wrong with the model weights in a folder (missing, cut off), or None."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not weights and not _sharded(folder):
        return "has no model weights"
    for index in folder.glob("*.safetensors.index.json"):
        for shard in set(json.loads(index.read_text())["weight_map"].values()):
            if not (folder / shard).exists():
                return f"lacks the shard {shard}"
    for file in folder.glob("*.safetensors"):
        if not _whole_safetensors(file):
            return f"has a cut-off {file.name}"
    return None


def _sharded(folder: Path) -> bool:
    return any(folder.glob("global_step*")) or any(folder.glob("pytorch_model_fsdp_*"))


def _whole_safetensors(file: Path) -> bool:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return False
    ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)
