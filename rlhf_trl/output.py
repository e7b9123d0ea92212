"""The output folder of a run: claimed once, written whole, resumed only from whole checkpoints."""

import fcntl
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError, safe_open

from rlhf_trl.errors import InputError

MANIFEST = "manifest.json"  # put into a checkpoint last; without it, there is no checkpoint
LOCK = ".lock"  # names the process that writes to a folder
# What a command that does several runs keeps in the folder of each, before anything else is there.
ASKED, PRINTED, COST = "asked.json", "output.txt", "cost.json"
RECORD = "rollouts.sqlite"  # of rollouts; resuming deletes what came after the checkpoint from it
JUDGED = "judge.sqlite"  # what a judge has replied

# What a run leaves at a step, up to its number, and what it leaves at its end.
BY_STEP = "checkpoint- config-from-step- evaluations/step- samples/step- completions/completions_"
AT_END = """
    model merged value_model log.json summary.json learning_curve.png scores.jsonl reward_report.png
    selection.json model-int8 model-int8_bitsandbytes model-nf4
"""
# What a finished run has: the first and the last thing that it writes at its end, and its summary.
FINISHED = "model summary.json learning_curve.png"


def write_whole(path: str | Path, write: str | Callable[[Path], Any]) -> None:
    """Write a temporary file beside `path` with `write`, a function or a text; then rename it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        if isinstance(write, str):
            temporary.write_text(write, encoding="utf-8")
        else:
            write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: object) -> None:
    """Write `content` as JSON, whole or not at all."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_lines(path: str | Path, rows: Iterable[object], **options: Any) -> None:
    """Write each row as a line of JSON, all or none of them."""
    write_whole(path, "".join(f"{json.dumps(row, **options)}\n" for row in rows))


def read_lines(path: str | Path) -> list[Any]:
    """Return what stands in the lines of a file of JSON: other ends of lines are in its texts."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n") if line]


def replace_folder(
    path: str | Path, write: Callable[[str], Any], main_process: bool, wait: Callable[[], Any]
) -> None:
    """Write a folder on all processes beside `path`; then the main one moves it to `path`.

    `wait` returns once all processes have called it, so all find the whole folder afterwards.
    """
    path = Path(path)
    part, old = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.old")
    write(str(part))
    wait()
    if main_process:
        if path.exists():
            os.replace(path, old)
        os.replace(part, path)
        shutil.rmtree(old, ignore_errors=True)
    wait()


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


_held: list[TextIO] = []  # closing a file would release its lock


def hold(folder: Path) -> None:
    """Lock a folder for this process until it ends, in whichever way; refuse a locked one.

    A lock of `lockf` belongs to this process alone: a child that outlives it does not keep the
    lock, and the process itself may lock the folder again.
    """
    stream = (folder / LOCK).open("a+", encoding="utf-8")  # "a": the text names the holder, if any
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        stream.seek(0)
        raise InputError(
            f"output_dir: {str(folder)!r} is in use by another run ({stream.read() or 'unknown'}); "
            "wait until it has ended, or write elsewhere with --output_dir."
        ) from error
    except OSError:  # a file system without locks: the run goes on unprotected
        return
    _held.append(stream)
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}")
    stream.flush()


def _holds_files(folder: Path) -> bool:
    return any(path.name not in (LOCK, ASKED, PRINTED, COST) for path in folder.iterdir())


def _begun(folder: Path) -> bool:
    """Return whether a run has begun in a folder, even if it has not written its config yet."""
    # how names begin of what a run writes before config.yaml; ".": of what a killed write leaves
    early_names = (".", "samples-", "answers", RECORD, JUDGED, "round-", "reward-batch-")
    early_names += (ASKED, PRINTED, COST)
    has_only_early = all(path.name.startswith(early_names) for path in folder.iterdir())
    return has_only_early or (folder / "config.yaml").exists()


def numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Return {number: path} of the paths named `prefix`, number and perhaps a suffix."""
    start = len(str(folder / prefix))
    paths = {}
    for path in folder.glob(f"{prefix}*"):
        number = str(path)[start:].partition(".")[0]
        if number.isdigit():
            paths[int(number)] = path
    return paths


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run whose saving was completed, by step."""
    saved = numbered(folder, "checkpoint-")
    return {step: path for step, path in saved.items() if (path / MANIFEST).exists()}


def step_of(checkpoint: str | Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"]


def finished(folder: Path) -> bool:
    """Return whether a run has written all that it leaves at its end."""
    return all((folder / name).exists() for name in FINISHED.split())


def set_aside(folder: Path, step: int) -> None:
    """Move what a run wrote after `step`, from which it resumes now, to its folder `earlier-N`.

    Then old results and later checkpoints are not mistaken for those of the resumed run.
    """
    later = _written_after(folder, step)
    if not later:
        return
    went_back = any((path / MANIFEST).exists() for path in later)  # to an older checkpoint
    aside = folder / f"earlier-{max(numbered(folder, 'earlier-'), default=0) + 1}"
    for path in later:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, target)
    to_copy = [folder / "config.yaml"]
    # Resuming deletes rollouts after `step` from the record. They are a few after a kill, and are
    # made again; but they may be many if the user went back: then a copy keeps them.
    if went_back:
        to_copy += folder.glob(f"{RECORD}*")
    for path in to_copy:
        if path.exists():
            shutil.copy(path, aside)
    print(f"what this run left after step {step} before is now in {aside}", flush=True)


def _written_after(folder: Path, step: int) -> list[Path]:
    """Return what a run wrote after a step, and at its end."""
    later = []
    for prefix in BY_STEP.split():
        for number, path in numbered(folder, prefix).items():
            # config-from-step-N.yaml is written after step N, everything else numbered N before
            if number > step or (number == step and path.suffix == ".yaml"):
                later.append(path)
    at_end = [folder / name for name in AT_END.split()]
    return later + [path for path in at_end if path.exists()]


def write_manifest(checkpoint: Path, checksums: bool, **facts: Any) -> None:
    """Write the manifest of a checkpoint: the names and sizes of its files, and `facts`.

    With `checksums`, read the files again for a CRC-32 of each (about 0.5 s per GiB), which finds
    damage as well as a cryptographic hash does, in half the time. Without them, a bit that flips
    on the disk goes unnoticed.
    """
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            checksum = _crc32(path) if checksums else None
            files[str(path.relative_to(checkpoint))] = (path.stat().st_size, checksum)
    # converted by JSON as when it is read (tuples, keys), so that `read_manifest` has the same sum
    content = json.loads(json.dumps({**facts, "files": files}, default=str))
    write_json(checkpoint / MANIFEST, {**content, "crc32": _sum_of(content)})


def read_manifest(checkpoint: str | Path) -> dict[str, Any]:
    """Return what `write_manifest` wrote; a ValueError says that it is damaged."""
    content = json.loads((Path(checkpoint) / MANIFEST).read_text())
    if content.pop("crc32") != _sum_of(content):
        raise ValueError(MANIFEST)
    return content


def _sum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def checkpoint_fault(checkpoint: str | Path) -> str | None:
    """Return what keeps a checkpoint from being resumed (missing or damaged file), or None.

    transformers writes a checkpoint in place, so a killed save leaves half of one; and it starts a
    fresh optimizer without a word where that file is missing.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "is not a folder"
    if not (folder / MANIFEST).exists():
        return f"has no {MANIFEST}, which is written last, so it is not whole"
    name = MANIFEST  # the file that is being read, for the error below
    try:
        manifest = read_manifest(folder)
        if manifest["save_only_model"]:
            return "has no optimizer, since it was saved with save_only_model"
        for name, (size, checksum) in manifest["files"].items():
            path = folder / name
            if not path.exists():
                return f"lacks {name}"
            if path.stat().st_size != size:
                return f"has a cut-off {name}"
            if checksum is not None and _crc32(path) != checksum:
                return f"has a damaged {name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"has a damaged {name}"
    return None


def weights_fault(folder: Path) -> str | None:
    """Return what is wrong with the model weights in a folder (missing, cut off), or None."""
    # the last two are what DeepSpeed and FSDP save
    kinds = ("*.safetensors", "pytorch_model*.bin", "global_step*", "pytorch_model_fsdp_*")
    if not any(path for kind in kinds for path in folder.glob(kind)):
        return "has no model weights"
    for index in folder.glob("*.safetensors.index.json"):
        for shard in set(json.loads(index.read_text())["weight_map"].values()):
            if not (folder / shard).exists():
                return f"lacks the shard {shard}"
    for file in folder.glob("*.safetensors"):
        try:
            safe_open(file, "numpy")  # reads the header, which says how long the file has to be
        except (OSError, SafetensorError):
            return f"has a cut-off {file.name}"
    return None
