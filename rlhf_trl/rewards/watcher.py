"""A process beside a run: ends it where a reward function hangs, and says in which one it died.

It runs as a script, `watcher.py PARENT FILE`, without torch or this package, so that it is there in
20 ms, and ends with its parent, the end of whose pipe is its input. In the file, `calls.Calls`
keeps the calls that go on.
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
    """Interrupt a call when its time is up, then kill the parent; tell of a parent that died.

    Args:
        parent: the process id of the run.
        file: the descriptor of the file in which it keeps the calls that go on.
        ended: is set when the run's end of the pipe is closed.
    """
    interrupted: set[int] = set()
    # The pipe alone does not tell that the parent has ended: a process that it has forked may keep
    # the pipe open. An orphan gets another parent.
    while not ended.wait(POLL) and os.getppid() == parent:
        for call in first_line(os.pread(file, LONGEST, 0)):
            late = time.monotonic() - call["deadline"]
            if late > 0 and call["number"] not in interrupted:
                interrupted.add(call["number"])
                write_batch(call, file)
                os.kill(parent, signal.SIGUSR2)
            if late > call["grace"]:  # still there: the signal did not end it
                sentence = f"{call['if_late']} --resume_from_checkpoint auto goes on."
                try:
                    tell(sentence, os.environ.get("TORCHELASTIC_ERROR_FILE"))
                finally:
                    os.kill(parent, signal.SIGKILL)
                return
    # a parent takes calls that end out of the file: it died inside of these
    for call in first_line(os.pread(file, LONGEST, 0)):
        write_batch(call, file)
        tell(call["if_dead"], None)  # the launcher may be done with the process


def first_line(content: bytes) -> list[dict[str, Any]]:
    """Return what is told of the calls that go on."""
    try:
        return json.loads(content.partition(b"\n")[0])
    except ValueError:  # it is being written
        return []


def write_batch(call: dict[str, Any], file: int) -> None:
    """Write the batch of a call as JSON, whole or not at all; the run ends in any case."""
    path = call["batch_file"]
    with suppress(OSError, EOFError, KeyError, TypeError, ValueError):
        content = os.pread(file, os.fstat(file).st_size, 0)
        batch = marshal.loads(content.partition(b"\n")[2])[call["number"]]
        with open(f"{path}.part", "w", encoding="utf-8") as stream:
            json.dump(call["about"] | batch, stream, indent=1, default=repr)
        os.replace(f"{path}.part", path)


def tell(sentence: str, last: str | None) -> None:
    """Print an error, or write it where the launcher of several processes reads its last words."""
    if last is None:
        os.write(2, f"error: {sentence}\n".encode())
        return
    with open(last, "w", encoding="utf-8") as stream:
        json.dump({"message": f"\nerror: {sentence}", "timestamp": int(time.time())}, stream)


def set_at_end_of_input(ended: threading.Event) -> None:
    """Wait until the parent ends, which writes nothing."""
    sys.stdin.buffer.read()
    ended.set()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    ended = threading.Event()
    threading.Thread(target=set_at_end_of_input, args=(ended,), daemon=True).start()
    watch(int(sys.argv[1]), os.open(sys.argv[2], os.O_RDONLY), ended)
    os._exit(0)  # although the thread reads
