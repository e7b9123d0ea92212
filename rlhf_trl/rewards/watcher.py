"""A process beside a run: ends it where a reward function hangs, and says in which one it died.

It runs as a script without torch or this package, so that it is there in 20 ms, and ends with its
parent. It reads marshalled pairs: the number of a call, and what begins (a dict, see
`calls.Calls.begin`) or None where that call has ended.
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


def read(calls: dict[int, dict[str, Any]], ended: threading.Event) -> None:
    """Keep in `calls` those that go on, by number; set `ended` once the parent is gone."""
    with suppress(EOFError):
        while True:
            number, call = marshal.load(sys.stdin.buffer)
            if call is None:
                calls.pop(number, None)
            else:
                calls[number] = {**call, "since": time.monotonic(), "interrupted": False}
    ended.set()


def watch(calls: dict[int, dict[str, Any]], ended: threading.Event, parent: int) -> None:
    """Interrupt a call when its time is up, then kill the parent; tell of a parent that died."""
    # a process that the parent has forked may keep the pipe open
    while not ended.wait(POLL) and os.getppid() == parent:
        for call in list(calls.values()):
            late = time.monotonic() - call["since"] - call["limit"]
            if late > 0 and not call["interrupted"]:
                call["interrupted"] = True
                write_batch(call)
                os.kill(parent, signal.SIGUSR2)
            if late > call["grace"]:
                tell(call["if_it_hangs"], os.environ.get("TORCHELASTIC_ERROR_FILE"))
                os.kill(parent, signal.SIGKILL)
                return
    for call in calls.values():
        write_batch(call)
        tell(call["if_it_dies"], None)  # the launcher may be done with the process


def write_batch(call: dict[str, Any]) -> None:
    """Write the batch of a call, whole."""
    path = call["batch_file"]
    with open(f"{path}.part", "w", encoding="utf-8") as stream:
        json.dump(call["batch"], stream, indent=1, default=repr)
    os.replace(f"{path}.part", path)


def tell(sentence: str, last: str | None) -> None:
    """Print an error, or write it where the launcher of several processes reads its last words."""
    if last is None:
        os.write(2, f"error: {sentence}\n".encode())
        return
    with open(last, "w", encoding="utf-8") as stream:
        json.dump({"message": f"\nerror: {sentence}", "timestamp": int(time.time())}, stream)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    calls: dict[int, dict[str, Any]] = {}
    ended = threading.Event()
    threading.Thread(target=read, args=(calls, ended), daemon=True).start()
    watch(calls, ended, int(sys.argv[1]))
    os._exit(0)  # although the thread reads
