"""The output folder of a run: what is in it, locked for one process, and files written whole."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

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


def finished(folder: Path) -> bool:
    """Return whether a run has written all that it leaves at its end."""
    return all((folder / name).exists() for name in FINISHED.split())
