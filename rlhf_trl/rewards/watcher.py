"""A process beside a run: ends it where a reward function hangs, and says in which one it died.

It runs as a script, `watcher.py PARENT FILE`, without torch or this package, so that it starts in
20 ms. PARENT is the process of the run, whose death ends this one, too: the standard input is a
pipe from the parent, which then closes. FILE holds the running calls, as `calls.Calls` writes them.
"""

import json
import marshal
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

POLL = 0.25  # seconds
LONGEST = 1 << 20  # bytes of a line about calls


def watch(parent: int, file: int, ended: threading.Event) -> None:
    """Interrupt each late call, and kill a parent that goes on; report calls in which it died.

    Args:
        parent: the process id of the run.
        file: the descriptor of the file in which it keeps its running calls.
        ended: an event that is set when the pipe from the parent closes.
    """
    interrupted: set[int] = set()  # numbers of calls
    # The pipe alone does not tell that the parent has ended: a process that it has forked may keep
    # the pipe open. An orphan gets another parent.
    while not ended.wait(POLL) and os.getppid() == parent:
        for entry in entries_of(os.pread(file, LONGEST, 0)):
            seconds_late = time.monotonic() - entry["deadline"]
            if seconds_late > 0 and entry["number"] not in interrupted:
                interrupted.add(entry["number"])
                write_batch(entry, file)
                os.kill(parent, signal.SIGUSR2)
            if seconds_late > entry["grace"]:  # the signal did not end the call
                sentence = f"{entry['if_late']} --resume_from_checkpoint auto goes on."
                try:
                    report(sentence, os.environ.get("TORCHELASTIC_ERROR_FILE"))
                finally:
                    os.kill(parent, signal.SIGKILL)
                return
    # the parent has ended; it removes calls that end from the file, so it died during these
    for entry in entries_of(os.pread(file, LONGEST, 0)):
        write_batch(entry, file)
        report(entry["if_dead"], error_file=None)  # the launcher may have read its file by now


def entries_of(content: bytes) -> list[dict[str, Any]]:
    """Return the entries of the running calls (see `calls.Calls`), the first line of the file."""
    try:
        return json.loads(content.partition(b"\n")[0])
    except ValueError:  # the parent is writing the file just now
        return []


def write_batch(entry: dict[str, Any], file: int) -> None:
    """Write the prompts and completions of a call to its `batch_file`, as JSON.

    Nothing is written if that fails: the run ends in any case.
    """
    path = entry["batch_file"]
    with suppress(OSError, EOFError, KeyError, TypeError, ValueError):
        content = os.pread(file, os.fstat(file).st_size, 0)
        batch = marshal.loads(content.partition(b"\n")[2])[entry["number"]]
        with open(f"{path}.part", "w", encoding="utf-8") as stream:
            json.dump(entry["about"] | batch, stream, indent=1, default=repr)
        os.replace(f"{path}.part", path)


def report(sentence: str, error_file: str | None) -> None:
    """Print an error, or write it to the file in which torchrun looks for a process's error."""
    if error_file is None:
        os.write(2, f"error: {sentence}\n".encode())
        return
    with open(error_file, "w", encoding="utf-8") as stream:
        json.dump({"message": f"\nerror: {sentence}", "timestamp": int(time.time())}, stream)


def set_at_end_of_input(ended: threading.Event) -> None:
    """Set the event when the parent ends: it writes nothing, so reading returns only then."""
    sys.stdin.buffer.read()
    ended.set()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    ended = threading.Event()
    threading.Thread(target=set_at_end_of_input, args=(ended,), daemon=True).start()
    watch(int(sys.argv[1]), os.open(sys.argv[2], os.O_RDONLY), ended)
    os._exit(0)  # at once, although the thread may still be reading
