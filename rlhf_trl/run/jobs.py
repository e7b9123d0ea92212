"""Several runs of recipes: started in the order of what they read, and gone on with where stopped.

Beside what a run itself leaves, its folder then holds what it was asked for (`asked.json`), what it
printed (`output.txt`) and what it took (`cost.json`).
"""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError, Stopped
from rlhf_trl.output import ASKED, COST, PRINTED, finished, whole_checkpoints, write_json
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.differences import differences
from rlhf_trl.run.folders import home
from rlhf_trl.run.launching import (
    POLL,
    accelerate_file,
    calling_on_stop,
    launch_command,
    signal_group,
    start,
    wait_for_group,
)
from rlhf_trl.run.options import join_options


@dataclass(frozen=True)
class Job:
    """A run that is to be done."""

    folder: Path  # the run's, its output_dir
    recipe: str  # its script, below `home()`
    words: Sequence[str]  # its options, which begin with --config and a path
    after: Sequence[Path] = ()  # folders of the runs that it reads
    kind: str = ""  # jobs of one kind take about as long


@dataclass
class _Running:
    """A run in a process group of its own."""

    job: Job
    process: subprocess.Popen[bytes]
    started: float  # `time.monotonic()`
    printed_before: int  # bytes that earlier starts had printed

    def printed(self) -> str:
        """Return what this start has printed."""
        content = (self.job.folder / PRINTED).read_bytes()[self.printed_before :]
        return content.decode(errors="replace")


@dataclass
class _Jobs:
    """What is being done, and how long it took."""

    waiting: list[Job]
    total: int  # of all, also of those that were done before
    done: int  # of these
    running: list[_Running] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of finished ones, by kind
    signal: int | None = None  # that told this process to stop
    failure: InputError | None = None  # of the first run that failed

    @property
    def may_start(self) -> bool:
        """Whether nothing speaks against starting another job."""
        return self.signal is None and self.failure is None

    def ready(self) -> Job | None:
        """Return the first job all of whose inputs are there."""
        unfinished = {job.folder for job in self.waiting} | {run.job.folder for run in self.running}
        return next((job for job in self.waiting if not unfinished & {*job.after}), None)

    def time_left(self, side_by_side: int) -> str:
        """Estimate it from the jobs that are done: those of the same kind, else all."""
        known = [second for seconds in self.seconds.values() for second in seconds]
        now, left = time.monotonic(), 0.0
        for job in [*self.waiting, *(run.job for run in self.running)]:
            seconds = self.seconds.get(job.kind, known)
            left += sum(seconds) / len(seconds)
        left -= sum(now - run.started for run in self.running)
        minutes = max(left, 0.0) / side_by_side / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"

    def note_end(self, run: _Running, side_by_side: int) -> None:
        """Print how a run that has ended did, or note why it failed."""
        error = _failure_of(run)
        if error is not None:
            if not self.signal:  # a run that was told to stop has not failed
                self.failure = self.failure or error
            return
        seconds = time.monotonic() - run.started
        self.seconds.setdefault(run.job.kind, []).append(seconds)
        self.done += 1
        lines = run.printed().splitlines() or ["done"]
        line = f"[{self.done}/{self.total}] {run.job.folder}: {lines[-1]}"
        if self.waiting or self.running:
            line += f" ({self.time_left(side_by_side)})"
        print(line, flush=True)


def do_all(jobs: Sequence[Job], side_by_side: int = 1, accelerate: str | None = None) -> None:
    """Do the jobs that are not done, `side_by_side` at once; those that were stopped go on.

    A signal (SIGTERM, Ctrl-C, SIGHUP, SIGUSR1) is passed on to the runs, which save and end. If
    this process is killed, the runs do the same. If a run fails, no other job is started.

    Args:
        jobs: in an order in which a job stands after those that it reads.
        side_by_side: how many run at the same time.
        accelerate: the config to launch with; None: configs/accelerate/cpu.yaml, and each run on
            one thread.

    Raises:
        InputError: a run failed, or a folder holds a run with other settings.
        Stopped: a signal came.
    """
    if side_by_side < 1:
        raise InputError(f"--jobs is {side_by_side}; write 1 or more.")
    if accelerate is not None and not Path(accelerate).is_file():
        raise InputError(f"--accelerate: {accelerate} is not a file; name one as in configs/.")
    if accelerate is not None:
        from rlhf_trl.run.accelerate_files import check_accelerate_file

        check_accelerate_file(Path(accelerate))
    waiting = [job for job in jobs if not is_done(job)]
    state = _Jobs(waiting, total=len(jobs), done=len(jobs) - len(waiting))

    def pass_on(number: int) -> None:
        """Note the first signal that tells this process to stop, and have all runs stop."""
        if state.signal is None:
            state.signal = number
            for run in state.running:
                signal_group(run.process.pid, signal.SIGTERM)

    with calling_on_stop(pass_on):
        while state.running or (state.waiting and state.may_start):
            while state.may_start and len(state.running) < side_by_side:
                job = state.ready()
                if job is None:  # all that wait read a run that is not done yet
                    break
                state.waiting.remove(job)
                state.running.append(_start(job, accelerate))
                if state.signal:  # it came before the run was in the list
                    signal_group(state.running[-1].process.pid, signal.SIGTERM)
            for run in _ended(state.running):
                state.note_end(run, side_by_side)
            time.sleep(POLL if state.running else 0)
    if state.signal:
        name = signal.Signals(state.signal).name
        print(f"stopped by {name}; the same command goes on from what is saved", flush=True)
        raise Stopped(128 + state.signal)  # the exit status that shells give to it
    if state.failure:
        raise state.failure
    for job in jobs:
        is_done(job)  # called for its error: a config may have been edited while the jobs ran


def request(job: Job) -> dict[str, Any]:
    """Return what a run computes: recipe, options and resolved config.

    The folder of another run's model stands for the request of that run.
    """
    _, config, *options = job.words
    resolved: list[Any] = []
    for word in options:
        request_file = Path(word).parent / ASKED
        resolved.append(json.loads(request_file.read_text()) if request_file.is_file() else word)
    return {**read_config(config), "recipe": job.recipe, "options": resolved}


def is_done(job: Job) -> bool:
    """Tell whether a run is finished; refuse a folder that holds a run with other settings.

    A run that was stopped before its first checkpoint has nothing to lose, and begins again.
    """
    folder = job.folder
    for place in (folder, *folder.parents):
        if place.is_file():
            raise InputError(f"--output_dir: {place} is a file; name a folder.")
    request_file = folder / ASKED
    if not finished(folder) and not whole_checkpoints(folder):
        return False
    before = json.loads(request_file.read_text()) if request_file.exists() else {}
    now = request(job)
    if before != now:
        changed = [*differences(before, now)] if before else ["unknown ones"]
        raise InputError(
            f"{folder} holds a run with other settings ({', '.join(changed)}); restore them, move "
            "that folder away, or name another --output_dir."
        )
    return finished(folder)


def _start(job: Job, accelerate: str | None) -> _Running:
    """Start a run in a process group of its own, or go on with it from its newest checkpoint."""
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(job.folder / ASKED, request(job))
    options = ["--output_dir", str(job.folder), "--disable_tqdm", "true"]
    options += ["--resume_from_checkpoint", "auto"]  # without a checkpoint, the run begins anew
    config = accelerate or accelerate_file("cpu")
    # with a traceback, so that `_failure_of` has it to show
    words = [*join_options(job.words, options), "--traceback"]
    command = launch_command([str(home() / job.recipe), *words], config)
    one_thread = {} if accelerate else {"OMP_NUM_THREADS": "1"}
    with (job.folder / PRINTED).open("ab") as printed:
        printed_before = printed.tell()
        process = start(
            command,
            env={**os.environ, **one_thread},
            stdin=subprocess.DEVNULL,  # runs side by side would share the terminal
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    return _Running(job, process, time.monotonic(), printed_before)


def _ended(running: list[_Running]) -> list[_Running]:
    """Take the runs that have ended out of the list, write what they took, and return them.

    The workers of a launcher that was told to stop are waited for.
    """
    ended = []
    for run in [*running]:
        pid, status, used = os.wait4(run.process.pid, os.WNOHANG)
        if pid == 0:
            continue
        run.process.returncode = os.waitstatus_to_exitcode(status)
        wait_for_group(pid)
        _add_cost(run.job.folder, used)
        running.remove(run)
        ended.append(run)
    return ended


def _add_cost(folder: Path, used: resource.struct_rusage) -> None:
    """Add what a start took, of the processes that ended before their launcher, to `cost.json`."""
    before = {"cpu_seconds": 0.0, "peak_memory_bytes": 0, "starts": 0}
    if (folder / COST).is_file():
        before = json.loads((folder / COST).read_text())
    cost = {
        "cpu_seconds": round(before["cpu_seconds"] + used.ru_utime + used.ru_stime, 2),
        "peak_memory_bytes": max(before["peak_memory_bytes"], used.ru_maxrss * 1024),
        "starts": before["starts"] + 1,
    }
    write_json(folder / COST, cost)


def _failure_of(run: _Running) -> InputError | None:
    """Return why a run failed, with what it printed as the cause; None where it did not."""
    if run.process.returncode == 0:
        return None
    words = " ".join(run.job.words)
    error = InputError(f"{words} failed: {failure_in(run.printed())}")
    # shown by --traceback
    error.__cause__ = RuntimeError(f"what the run printed:\n{run.printed()}")
    return error


def failure_in(printed: str) -> str:
    """Return the line of a failed run's output that says why it failed, else the last one."""
    lines = [line for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return next(iter([*errors, *lines[-1:]]), "no output")
