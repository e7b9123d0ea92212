"""How a launch ends that waits for ever, with every rank's stack, or that is told to end."""

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlhf_trl.errors import Stopped
from rlhf_trl.run.launch import world_size
from rlhf_trl.run.signals import HANDLED, say

GRACE = 3.0  # seconds in which all ranks of a machine write their stacks


def end_on_signals() -> None:
    """End with a sentence on a signal that the parent did not have this process ignore.

    The sentence of `run.signals` would tell of checkpoints.
    """
    answered = [number for number in HANDLED if signal.getsignal(number) != signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for later in answered:  # a launcher forwards the Ctrl-C that came directly, too
            signal.signal(later, signal.SIG_IGN)
        say(f"stopped by {signal.Signals(number).name} before anything was found")
        raise Stopped(128 + number)

    for number in answered:
        signal.signal(number, end)


@contextmanager
def watched(limit: float) -> Iterator[None]:
    """End the process if a block takes more than `limit` seconds.

    The first rank of a machine then prints the stacks of all its ranks, and which waits where.
    """
    ended = threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    folder = Path(tempfile.gettempdir(), f"rlhf_trl-stacks-{os.getppid()}")  # of this launcher

    def watch() -> None:
        if ended.wait(limit):
            return
        frame = sys._current_frames()[main_thread]
        folder.mkdir(exist_ok=True)
        text = f"{place_of(frame)}\n{''.join(traceback.format_stack(frame))}"
        rank = os.environ["RANK"]
        part = folder / f".{rank}"
        part.write_text(text)
        part.rename(folder / rank)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _report(folder, limit)
        else:
            time.sleep(2 * GRACE)
        os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _report(folder: Path, limit: float) -> None:
    """Print the stacks that the ranks have written, and end with the places they wait at."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    until = time.monotonic() + GRACE
    while time.monotonic() < until and len([*folder.glob("[0-9]*")]) < local:
        time.sleep(0.1)
    places = []
    for file in sorted(folder.glob("[0-9]*"), key=lambda file: int(file.name)):
        place, _, stack = file.read_text().partition("\n")
        print(f"rank {file.name}:\n{stack}", file=sys.stderr)
        places.append(f"rank {file.name} waits in {place}")
        file.unlink()
    folder.rmdir()
    print(
        f"error: no end after {limit:g} s: {'; '.join(places)}; see the stacks above, or raise "
        "--limit.",
        file=sys.stderr,
        flush=True,
    )


def place_of(frame: FrameType) -> str:
    """Return where a stack stands: its innermost call, and the innermost outside torch."""
    stack = traceback.extract_stack(frame)
    innermost = stack[-1]
    place = f"{innermost.name} ({Path(innermost.filename).name}:{innermost.lineno})"
    for line in reversed(stack):
        if f"{os.sep}torch{os.sep}" not in line.filename:
            if line is not innermost:
                place += f", called by {line.name} ({Path(line.filename).name}:{line.lineno})"
            break
    return place
