"""What a recipe does when it is told to end: at once before its first step, else at a boundary.

A handler runs in the main thread between two lines of Python; while a run trains, it only notes the
signal, and `stopping.Stop` ends the run. Nothing here needs torch.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlhf_trl import output
from rlhf_trl.errors import Stopped

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
COPIES = 2.0  # seconds within which a launcher may forward the Ctrl-C that came directly, too
exit_at_once = os._exit  # kept from here: while rewards are called, `rewards.calls` replaces it
SET_BY_LAUNCHERS = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}


@dataclass
class Signals:
    """What this process was told by signals, and what it needs to know to answer them."""

    received: int | None = None  # the first, of any process once all have agreed to stop
    training: bool = False  # from the first step on; then a signal waits for a boundary
    folder: Path | None = None  # the run's, once it is known
    saved_note: str = ""  # what a run that failed has saved, in a sentence
    interrupted: float = math.inf  # when the first SIGINT came

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle, in the block, the signals that the parent did not have this process ignore."""
        vars(self).update(vars(Signals()))  # nothing is left of an earlier run in this process
        before = {}
        if threading.current_thread() is threading.main_thread():  # others cannot
            for number in HANDLED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, self._handle)
            if sys.platform == "linux" and SET_BY_LAUNCHERS & os.environ.keys():
                from rlhf_trl.run.processes import end_with_launcher

                end_with_launcher()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def begin(self, folder: Path) -> None:
        """Take note of a run's folder; end here if a signal came after the last step before it."""
        self.folder, self.training = folder, False
        if self.received is not None:
            self.end(f"before the first step; {self.kept()}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal, and end here unless the run trains; a second Ctrl-C ends at once.

        A SIGINT within `COPIES` seconds of the first one is no second Ctrl-C.
        """
        if number == signal.SIGINT:
            if time.monotonic() - self.interrupted >= COPIES:
                say(f"ended at once by a second Ctrl-C; {self.kept()}")
                exit_at_once(128 + number)
            self.interrupted = min(self.interrupted, time.monotonic())
        if self.received is not None:
            return
        self.received = number
        if not self.training:
            self.end(f"before the first step; {self.kept()}")
        say(f"{signal.Signals(number).name}: stopping at the next step boundary")

    def end(self, where: str) -> NoReturn:
        """End this process with a sentence and the exit code of the signal, 128 + its number."""
        assert self.received is not None
        say(f"stopped by {signal.Signals(self.received).name} {where}")
        raise Stopped(128 + self.received)

    def kept(self) -> str:
        """Return what the run has saved, and how to go on."""
        saved = output.whole_checkpoints(self.folder) if self.folder else {}
        if not saved:
            return "no checkpoint was saved, so --resume_from_checkpoint auto begins again"
        return f"{saved[max(saved)]} is kept; --resume_from_checkpoint auto goes on from there"


def say(sentence: str) -> None:
    """Print a sentence, once for all processes; a handler must not use a stream that is in use."""
    if os.environ.get("RANK", "0") == "0":
        os.write(1, f"{sentence}\n".encode())


signals = Signals()
"""Of this process: what the handlers noted, and what the training has to know."""
