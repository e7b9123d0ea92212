"""How a recipe ends with an error: a sentence, told once for all processes."""

import json
import os
import re
import select
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from rlhf_trl.errors import InputError, end
from rlhf_trl.run.signals import signals

# How Python, the libraries in Rust and torch (in its own words) say that one cannot write a file.
UNWRITABLE = (
    "No space left|Read-only file system|File name too long|File too large|quota exceeded|"
    "inline_container|PytorchStreamWriter|iostream error"
)
WAIT = 5.0  # seconds in which the first process of a machine may say what all of them met


def report(error: BaseException, with_traceback: bool) -> None:
    """End this process with a sentence; return only if the caller is to raise the error again.

    An `InputError` becomes its sentence alone, and so does the error of a disk that is full or
    cannot be written. A `ValueError` of a library keeps its traceback, and its message is repeated
    as the last line. `with_traceback` keeps the traceback of all. The sentence ends with what the
    failed run has saved.

    Of several processes, all but the first wait before they report an error: if the first one meets
    the same error, it reports it, and the launcher ends the others.
    """
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # of this machine
    if isinstance(error, KeyboardInterrupt):
        if is_first:
            print(
                "\ninterrupted; --resume_from_checkpoint auto goes on from the last checkpoint, or "
                "begins again at step 0 if none was saved"
            )
        sys.exit(130)
    if not is_first:
        time.sleep(WAIT)
    if isinstance(error, InputError):
        _end(str(error), with_traceback)  # does not return, here and below
    message = " ".join(str(error).split())
    if re.search(UNWRITABLE, message):  # by its words: tokenizers raises a plain Exception
        _end(
            f"a file could not be written ({message}); checkpoints saved before are whole: make "
            "room, then --resume_from_checkpoint auto goes on.",
            with_traceback,
        )
    if isinstance(error, BrokenPipeError) and not _is_read(1):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be printed
        _end(
            "what read the output has ended, as `| head` does; write it to a file (`> log.txt`), "
            "then --resume_from_checkpoint auto goes on.",
            with_traceback,
        )
    if type(error).__module__.startswith("wandb"):
        _end(
            f"report_to: wandb cannot be used ({message.rstrip('.')}); run `wandb login`, set "
            "WANDB_MODE=offline, or write report_to: none.",
            with_traceback,
        )
    if isinstance(error, ValueError):
        _end(message, with_traceback=True)
    if signals.saved_note:
        error.add_note(signals.saved_note)


def _is_read(file: int) -> bool:
    """Tell whether what is written to an open file can arrive: a pipe may have no reader left."""
    looking = select.poll()
    looking.register(file, select.POLLOUT)
    return not any(event & select.POLLERR for _, event in looking.poll(0))


def _end(sentence: str, with_traceback: bool) -> NoReturn:
    """End this process as `errors.end` does, and of several processes at the end of all output.

    The launcher of several prints a traceback of its own after they have ended; torch has a file
    whose message it puts at the end of that.
    """
    sentence = f"{sentence} {signals.saved_note}".rstrip()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None or not _handed_on(f"error: {sentence}", Path(path)):
        end(sentence, with_traceback)
    if with_traceback:
        traceback.print_exc()
    sys.exit(1)


def _handed_on(sentence: str, path: Path) -> bool:
    """Write an error to the launcher's file unless the machine's first process has told one."""
    message = {"message": f"\n{sentence}", "timestamp": int(time.time())}
    file_of_first = path.parent.parent / "0" / path.name
    try:
        if not file_of_first.exists():
            path.write_text(json.dumps(message), encoding="utf-8")
    except OSError:  # such as a full disk; the launcher could not read half a file
        path.unlink(missing_ok=True)
        return False
    return True
