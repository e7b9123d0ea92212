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

    entry: dict[str, Any]  # for the watcher: number, deadline and so on (see `Calls._entry`)
    batch: dict[str, Any]  # prompts and completions
    is_coroutine: bool
    is_late: bool = False
    fault: str = ""  # what it did to the process
    changed: tuple[str, ...] = ()  # settings that were not as before


class Calls:
    """The calls of a run's reward functions on one process, several at once if they are async.

    Those that go on stand in the file `.reward-call-RANK` of the run's folder, for the watcher and
    the next start: a line of JSON about each of them, then their batches, by number, marshalled.
    """

    def __init__(self, args: Any, limit: float):
        """Open the file and replace what a function must not reach; `close` undoes it all.

        `args` are those of the run, and `limit` is in seconds; 0: none.
        """
        self._process = os.getpid()
        self._before = Surroundings()  # settings of the process, before all the calls that go on
        self._folder, self._rank = Path(args.output_dir), args.process_index
        self._limit = limit or float("inf")
        self._current: dict[int, Call] = {}  # those that go on, by number
        self._count = 0  # of all calls so far
        self._watcher: subprocess.Popen[bytes] | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = file_of(args)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        # so that os._exit in a function raises: it would end the run at once, even as a success
        self._exit = os._exit
        os._exit = self._exit_unless_called
        # Only a process that is alone saves something when it is interrupted; another is killed.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_interrupted = args.world_size == 1 and in_main_thread
        if self._is_interrupted:
            self._handler = signal.signal(signal.SIGUSR2, self._on_time_up)  # the one before
        # the watcher sends the signal: the stack is printed, which shows where the call hangs, and
        # `chain` then calls the handler
        faulthandler.register(signal.SIGUSR2, STDERR, chain=self._is_interrupted)
        if not faulthandler.is_enabled():
            faulthandler.enable(STDERR)

    def close(self) -> None:
        """Undo what `__init__` did, and end the watcher."""
        os._exit = self._exit
        faulthandler.unregister(signal.SIGUSR2)
        if self._is_interrupted:
            signal.signal(signal.SIGUSR2, self._handler)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
        self._current.clear()
        os.close(self._file)
        self._path.unlink(missing_ok=True)

    def begin(self, name: str, sample: dict[str, Any], is_coroutine: bool) -> Call:
        """Take note of a call, and have the watcher time it.

        Args:
            name: of the reward function.
            sample: the arguments of the call.
            is_coroutine: whether it runs in another thread.
        """
        self._count += 1
        entry = self._entry(name, sample.get("trainer_state"))
        batch = {key: plain(sample.get(key)) for key in ("prompts", "completions")}
        if not self._current:  # the first of calls that go on at once, which are compared together
            self._before = Surroundings()
        self._current[self._count] = call = Call(entry, batch, is_coroutine)
        self._write()
        if self._watcher is None or self._watcher.poll() is not None:  # there is none, or no longer
            # without the user's settings and packages (-I, -S), so that it starts at once
            command = [sys.executable, "-I", "-S", watcher.__file__, str(self._process), self._path]
            # the end of this pipe tells it that this process has ended
            self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE)
        return call

    def _entry(self, name: str, state: Any) -> dict[str, Any]:
        """Return what the watcher reads of a call; `state` is the trainer's, or None."""
        about = {"function": name, "rank": self._rank}
        about |= {} if state is None else {"step": state.global_step}
        step = f"step-{about['step']}-" if "step" in about else ""
        batch_file = f"{self._folder}/reward-batch-{step}rank-{self._rank}.json"
        place = described(about)
        return {
            "number": self._count,
            "about": about,
            "batch_file": batch_file,
            "deadline": time.monotonic() + self._limit,  # by a clock that all processes share
            # seconds from the signal to the end: to raise TimeIsUp, or just to print the stack
            "grace": 4.0 if self._is_interrupted else 0.5,
            "if_late": f"reward function {name!r} took more than {self._limit:g} seconds{place}; "
            f"its batch is in {batch_file}; let it end sooner, or raise reward_timeout (0: no "
            "limit).",
            "if_dead": f"the process ended inside reward function {name!r}{place}; its batch is in "
            f"{batch_file}; fix it, then --resume_from_checkpoint auto goes on.",
        }

    def end(self, call: Call) -> None:
        """Take note that a call has ended; after the last one, bring back what has changed."""
        if not self.is_here():
            os.write(STDERR, b"error: a reward function has forked, and its child returned\n")
            self._exit(1)
        if self._current.pop(call.entry["number"], None) is None:
            return  # a coroutine that ends after `close`
        self._write()
        if not self._current:  # earlier, others may still use what they have changed
            call.changed = self._before.bring_back()

    def check(self, call: Call) -> None:
        """Refuse what a call that has ended did beside its rewards."""
        if call.is_late:
            raise InputError(call.entry["if_late"])
        fault, remedy = call.fault, "return rewards, or raise an exception"
        if not fault and call.changed:
            fault, remedy = f"changed {' and '.join(call.changed)}", "let it undo what it changes"
        # generators, too, are compared after the last of the calls that went on at once
        if not fault and not self._current and (seeded := self._before.seeded()):
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
        entries = json.dumps([call.entry for call in self._current.values()])
        batches = {number: call.batch for number, call in self._current.items()}
        os.pwrite(self._file, entries.encode() + b"\n" + marshal.dumps(batches), 0)

    def _on_time_up(self, *_: Any) -> None:
        """Raise in the main thread what ends a call that is late.

        A function runs in this thread, where `in_call` catches the exception. A coroutine runs in a
        thread of TRL's, for which this one waits: what is raised here ends the run.
        """
        for call in list(self._current.values()):  # another thread may end one
            if time.monotonic() < call.entry["deadline"]:
                continue
            call.is_late = True
            if not call.is_coroutine:
                raise TimeIsUp
            call.entry["deadline"] = float("inf")  # so that the watcher lets the run end by itself
            self._write()
            self._before.bring_back()
            raise InputError(call.entry["if_late"])

    def _exit_unless_called(self, code: int) -> None:
        """End this process as `os._exit` does, unless a reward function asks for it."""
        if not (self._current and self.is_here()):  # one that it has forked may end
            self._exit(code)
        for call in self._current.values():
            call.fault = f"called os._exit({code})"
        raise SystemExit(code)


_calls: Calls | None = None


@contextmanager
def watched(args: Any, limit: float) -> Iterator[None]:
    """Watch the calls of reward functions in the block; say in which one an earlier run died.

    `args` are those of the run. `limit` is in seconds; 0: none.
    """
    global _calls
    path = file_of(args)
    for call in watcher.first_line(path.read_bytes()) if path.exists() else ():
        about = call["about"]
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
    """Return the file of a process that names the calls that go on."""
    return Path(args.output_dir, f".reward-call-{args.process_index}")


@contextmanager
def in_call(name: str, sample: dict[str, Any], is_coroutine: bool) -> Iterator[dict[str, Any]]:
    """Yield copies of a reward function's arguments, with which the block calls it.

    In a recipe, the function must end in time, and must not end the process or leave changes
    behind. A plain function that is late ends by `TimeIsUp`, raised inside it; a coroutine runs in
    another thread, and ends with the run.

    Raises:
        InputError: it did otherwise. Exceptions of its own pass through.
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
    except TimeIsUp:  # `check` says so, by `is_late`
        pass
    except SystemExit as stop:
        # os._exit, as replaced here, raises it, too, and has set the fault by then
        call.fault = call.fault or f"called sys.exit({stop.code!r})"
    except KeyboardInterrupt:  # of its own: Ctrl-C raises none in a recipe
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
    """Return a copy of a column, down to its texts and numbers; what is none is returned itself."""
    if not isinstance(value, list):
        return value
    try:
        return marshal.loads(marshal.dumps(value))  # of plain values, ten times as fast
    except ValueError:
        return _copied_containers(value)


def _copied_containers(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied_containers(part) for part in value]
    if isinstance(value, dict):
        return {key: _copied_containers(part) for key, part in value.items()}
    return value


def plain(value: Any) -> Any:
    """Return a value that can be sent: of anything but plain ones, what it looks like."""
    try:
        marshal.dumps(value)
    except ValueError:
        return repr(value)
    return value
