"""The calls of reward functions in a recipe: timed by a watcher, on copies, and without traces."""

import faulthandler
import json
import marshal
import os
import signal
import subprocess
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError, Stopped
from rlhf_trl.rewards import watcher
from rlhf_trl.rewards.surroundings import Surroundings

STDERR = 2  # its file descriptor


class TimeIsUp(BaseException):
    """Raised inside a reward function, which may catch every Exception."""


@dataclass
class Call:
    """One call of a reward function, while it goes on."""

    entry: dict[str, Any]  # what the watcher needs of it: number, deadline ... (`Calls._entry`)
    batch: dict[str, Any]  # prompts and completions
    is_coroutine: bool
    is_late: bool = False
    fault: str = ""  # what it did to the process, such as "called os._exit(1)"
    changed: tuple[str, ...] = ()  # names of settings that it has left changed


class Calls:
    """The calls of a run's reward functions on one process, several at once if they are async.

    The running calls stand in the file `.reward-call-RANK` of the run's folder, for the watcher and
    the next start: one line of JSON, the list of their entries; then, marshalled, their batches by
    number.
    """

    def __init__(self, args: Any, limit: float):
        """Open the file, replace `os._exit` and handle the watcher's signal; `close` undoes it all.

        `args` are the config of the trainer. `limit` is how many seconds a call may take; 0: any.
        """
        self._process = os.getpid()
        self._before = Surroundings()  # settings and random states before the running calls
        self._folder, self._rank = Path(args.output_dir), args.process_index
        self._limit = limit or float("inf")
        self._running: dict[int, Call] = {}  # by number
        self._count = 0  # of all calls so far
        self._watcher: subprocess.Popen[bytes] | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = file_of(args)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # a function that calls os._exit would end the run at once, even as a success: raise instead
        self._exit = os._exit
        os._exit = self._exit_unless_called
        # A late call gets SIGUSR2 from the watcher. The handler raises in it, so that the run ends
        # with a checkpoint. Python runs handlers in the main thread only; and one of several
        # processes cannot save a checkpoint by itself, so there the watcher ends the run.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._late_calls_raise = args.world_size == 1 and in_main_thread
        if self._late_calls_raise:
            self._handler_before = signal.signal(signal.SIGUSR2, self._on_time_up)
        # faulthandler prints the stack first, which shows where the call hangs; with `chain`, it
        # then calls the handler
        faulthandler.register(signal.SIGUSR2, STDERR, chain=self._late_calls_raise)
        if not faulthandler.is_enabled():
            faulthandler.enable(STDERR)

    def close(self) -> None:
        """Undo what `__init__` did, and end the watcher."""
        os._exit = self._exit
        faulthandler.unregister(signal.SIGUSR2)
        if self._late_calls_raise:
            signal.signal(signal.SIGUSR2, self._handler_before)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
        self._running.clear()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def begin(self, name: str, sample: dict[str, Any], is_coroutine: bool) -> Call:
        """Note that a call begins, and have the watcher time it.

        Args:
            name: of the reward function.
            sample: the arguments of the call.
            is_coroutine: whether the function is one, so that the call runs in another thread.
        """
        self._count += 1
        entry = self._entry(name, sample.get("trainer_state"))
        batch = {key: plain(sample.get(key)) for key in ("prompts", "completions")}
        if not self._running:  # calls that run at once are compared with one state, before them all
            self._before = Surroundings()
        call = Call(entry, batch, is_coroutine)
        self._running[self._count] = call
        self._write()
        has_ended = self._watcher is not None and self._watcher.poll() is not None
        if self._watcher is None or has_ended:
            # without the user's settings and packages (-I, -S), so that it starts at once
            command = [sys.executable, "-I", "-S", watcher.__file__, str(self._process), self._path]
            # the pipe closes when this process ends: so the watcher learns of it
            self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE)
        return call

    def _entry(self, name: str, state: Any) -> dict[str, Any]:
        """Return what the watcher reads of a call; `state` is the trainer's, or None.

        Its `if_late` and `if_dead` are the errors that the watcher prints if the call takes too
        long, or if the process dies during the call.
        """
        about = {"function": name, "rank": self._rank}
        if state is not None:
            about["step"] = state.global_step
        step = f"step-{about['step']}-" if "step" in about else ""
        batch_file = f"{self._folder}/reward-batch-{step}rank-{self._rank}.json"
        place = described(about)
        return {
            "number": self._count,
            "about": about,
            "batch_file": batch_file,
            "deadline": time.monotonic() + self._limit,  # by a clock that all processes share
            # seconds between the signal and the kill: to raise TimeIsUp, or just print the stack
            "grace": 4.0 if self._late_calls_raise else 0.5,
            "if_late": f"reward function {name!r} took more than {self._limit:g} seconds{place}; "
            f"its batch is in {batch_file}; let it end sooner, or raise reward_timeout (0: no "
            "limit).",
            "if_dead": f"the process ended inside reward function {name!r}{place}; its batch is in "
            f"{batch_file}; fix it, then --resume_from_checkpoint auto goes on.",
        }

    def end(self, call: Call) -> None:
        """Note that a call has ended; if none is running now, restore the settings they changed."""
        if not self.is_here():
            os.write(STDERR, b"error: a reward function has forked, and its child returned\n")
            self._exit(1)
        if self._running.pop(call.entry["number"], None) is None:
            return  # a coroutine that ends after `close`
        self._write()
        if not self._running:  # until then, a running call may still need what it has changed
            call.changed = self._before.restore()

    def check(self, call: Call) -> None:
        """Refuse side effects of a call that has ended: late, a fault, settings, random states."""
        if call.is_late:
            raise InputError(call.entry["if_late"])
        fault, remedy = call.fault, "return rewards, or raise an exception"
        if not fault and call.changed:
            fault, remedy = f"changed {' and '.join(call.changed)}", "let it undo what it changes"
        # generators, like settings, are compared only when no call is running
        if not fault and not self._running and (seeded := self._before.seeded()):
            fault = f"seeded {' and '.join(seeded)}, which training draws from"
            remedy = "use a generator of its own, such as random.Random(0) or torch.Generator()"
        if fault:
            about = call.entry["about"]
            name, place = about["function"], described(about)
            raise InputError(f"reward function {name!r} {fault}{place}; {remedy}.")

    def is_here(self) -> bool:
        """Return whether this is the process of the run, and not one that it has forked."""
        return os.getpid() == self._process

    def _write(self) -> None:
        """Write the running calls to the file; its last bytes may be those of a longer one."""
        entries = json.dumps([call.entry for call in self._running.values()])
        batches = {number: call.batch for number, call in self._running.items()}
        os.pwrite(self._file, entries.encode() + b"\n" + marshal.dumps(batches), 0)

    def _on_time_up(self, *_: Any) -> None:
        """Raise, in the main thread, an exception that ends a late call.

        A plain function runs in this thread, and `in_call` catches `TimeIsUp`. A coroutine runs in
        a thread of TRL's, while the main thread waits for it: an `InputError` here ends the run.
        """
        for call in list(self._running.values()):  # a copy, as another thread may end a call
            if time.monotonic() < call.entry["deadline"]:
                continue
            call.is_late = True
            if not call.is_coroutine:
                raise TimeIsUp
            call.entry["deadline"] = float("inf")  # so that the watcher lets the run end by itself
            self._write()
            self._before.restore()
            raise InputError(call.entry["if_late"])

    def _exit_unless_called(self, code: int) -> None:
        """End this process as `os._exit` does, unless a reward function asks for it."""
        if not (self._running and self.is_here()):  # a process that a function has forked may end
            self._exit(code)
        for call in self._running.values():
            call.fault = f"called os._exit({code})"
        raise SystemExit(code)


_calls: Calls | None = None


@contextmanager
def watched(args: Any, limit: float) -> Iterator[None]:
    """Watch the calls of reward functions in the block; say in which one an earlier run died.

    `args` are the config of the trainer. `limit` is how many seconds a call may take; 0: any.
    """
    global _calls
    path = file_of(args)
    entries = watcher.entries_of(path.read_bytes()) if path.exists() else []
    for entry in entries:  # a run removes its file at its end: that one died during these calls
        about = entry["about"]
        print(
            f"the run before died inside reward function {about['function']!r}{described(about)}",
            flush=True,
        )
    _calls = Calls(args, limit)
    try:
        yield
    finally:
        _calls.close()
        _calls = None


def file_of(args: Any) -> Path:
    """Return the file of a process in which its running calls stand."""
    return Path(args.output_dir, f".reward-call-{args.process_index}")


@contextmanager
def in_call(name: str, sample: dict[str, Any], is_coroutine: bool) -> Iterator[dict[str, Any]]:
    """Yield copies of a reward function's arguments, with which the block calls it.

    In a recipe, the function must return in time, and must not end the process or leave changes
    behind. A late plain function is ended by `TimeIsUp`, raised inside it; a late coroutine, which
    runs in another thread, ends with the run.

    Raises:
        InputError: the function did what it must not. Exceptions that it raises pass through.
    """
    calls = _calls
    if calls is None or not calls.is_here():  # outside of a recipe, or in a forked process
        yield sample
        return
    call = calls.begin(name, sample, is_coroutine)
    try:
        yield {key: copied(value) for key, value in sample.items()}
    except Stopped:  # the run's own SystemExit, after a signal
        raise
    except TimeIsUp:  # `is_late` is set, for which `check` below raises
        pass
    except SystemExit as stop:
        # the os._exit of this module raises it, too, and has set the fault by then
        call.fault = call.fault or f"called sys.exit({stop.code!r})"
    except KeyboardInterrupt:  # raised by the function: Ctrl-C raises none in a recipe
        call.fault = "raised KeyboardInterrupt"
    except CancelledError:
        if call.is_late:  # the run is ending, and cancels what its event loop still runs
            raise
        call.fault = "raised CancelledError"
    finally:
        calls.end(call)
    calls.check(call)  # raises if anything was caught above


def described(about: dict[str, Any]) -> str:
    """Return the step and the rank of a call, for a sentence."""
    step = f" at step {about['step']}" if "step" in about else ""
    return f"{step} on rank {about['rank']}"


def copied(value: Any) -> Any:
    """Return a deep copy of a list, down to its texts and numbers; other values as they are."""
    if not isinstance(value, list):
        return value
    try:
        return marshal.loads(marshal.dumps(value))  # ten times as fast, but only for plain values
    except ValueError:
        return _copied_containers(value)


def _copied_containers(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied_containers(part) for part in value]
    if isinstance(value, dict):
        return {key: _copied_containers(part) for key, part in value.items()}
    return value


def plain(value: Any) -> Any:
    """Return a value that marshal can write: itself, or what it looks like as a text."""
    try:
        marshal.dumps(value)
    except ValueError:
        return repr(value)
    return value
