"""What starts `accelerate launch` on a recipe, and ends with it; `rlhf-trl train`."""

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config_files import read_config, value_at
from rlhf_trl.run.folders import home
from rlhf_trl.run.options import read_options
from rlhf_trl.run.processes import PR_SET_PDEATHSIG
from rlhf_trl.run.shipped import config_file, existing_config, names, shipped_file
from rlhf_trl.run.signals import Signals, say
from rlhf_trl.run.stages import STAGES, stage_of, stage_of_config
from rlhf_trl.run.yaml_loader import read_yaml

POLL = 0.1  # seconds between two looks at processes
PATIENCE = 600.0  # seconds for a run to save and end once its launcher has ended
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def train(
    stage: str,
    config: str | None,
    words: Sequence[str] = (),
    accelerate: str | None = None,
    processes: int | None = None,
) -> int:
    """Launch a recipe, print the command first, and return its exit code once all has ended.

    Args:
        stage: the name of the recipe.
        config: the path of a config, or the name of one that ships (`tiny/grpo`); None is refused.
        words: further options of the recipe.
        accelerate: path or name (`zero2`) of accelerate's config; None: that of the machine.
        processes: how many; None: those of accelerate's config, or one for each GPU.
    """
    _check_named(stage, config)
    if processes is not None and processes < 1:
        raise InputError(f"--processes is {processes}; write 1 or more.")
    path = existing_config(config, "--config")
    if words and not words[0].startswith("-"):  # which would be a second word of --config
        raise InputError(f"{words[0]!r} belongs to no option; write --key value.")
    options = ["--config", str(path), *words]
    values = read_options(options)
    algorithm = values.get("algorithm")
    row = ALGORITHMS.get(algorithm) if isinstance(algorithm, str) else None
    if row is not None and not STAGES[stage].trains(row):
        right = stage_of(algorithm).name
        raise InputError(f"algorithm: {algorithm} is of the recipe {right}; write train {right}.")
    if accelerate is None:
        launch_file, processes = _config_for_machine(values, str(path), processes)
    else:
        launch_file = _named_config(accelerate, processes)
        if processes is None:
            _check_room(launch_file, values)
    options += _options_for_launch(values, launch_file)
    script = str(home() / STAGES[stage].script)
    command = launch_command([script, *options], launch_file, processes)
    print(shlex.join(command), flush=True)
    return _run(command, Path(str(values.get("output_dir", ""))))


def _check_named(stage: str, config: str | None) -> None:
    """Refuse a recipe that there is not, and one without a config, or the other way round."""
    if stage in STAGES and config is not None:
        return
    if stage in STAGES:
        shipped = f"tiny/{stage}"
        if shipped not in names():
            shipped = f"tiny/{STAGES[stage].algorithms()[0]}"
        raise InputError(
            f"train {stage}: --config is missing; name a file, or one that ships, such as "
            f"{shipped}; `rlhf-trl configs` lists them."
        )
    if config is None and config_file(stage).is_file():
        right = stage_of_config(read_config(config_file(stage)), stage).name
        raise InputError(
            f"{stage} is a config; write its recipe before it: train {right} --config {stage}."
        )
    near, known = nearest(stage, STAGES), ", ".join(STAGES)
    raise InputError(f"there is no recipe {stage!r}{near}; known: {known}.")


def _options_for_launch(values: Mapping[str, Any], accelerate: Path) -> list[str]:
    """Return further options of a recipe, whose config and command line have these values.

    A file of a shipped config is named by its whole path, since it is named from the project's
    folder; two processes on a CPU would look for a GPU without `use_cpu`.
    """
    options = []
    panel_file = value_at(values, ("samples", "file"))
    shipped = shipped_file(str(panel_file))
    if shipped is not None:
        options += ["--samples.file", str(shipped)]
    if accelerate.stem == "cpu_2proc" and values.get("use_cpu") is None:
        options += ["--use_cpu", "true"]
    return options


def launch_command(
    words: Sequence[str], accelerate: str | Path, processes: int | None = None
) -> list[str]:
    """Return the words of `accelerate launch` for a script with its options, which are `words`."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    if shutil.which("accelerate") == str(Path(sys.executable).with_name("accelerate")):
        launcher = ["accelerate", "launch"]  # this environment's
    count = [] if processes is None else ["--num_processes", str(processes)]
    return [*launcher, "--quiet", "--config_file", str(accelerate), *count, *words]


def accelerate_file(name: str) -> Path:
    """Return the path of one of the configs of accelerate that ship."""
    return home() / "configs" / "accelerate" / f"{name}.yaml"


def _named_config(accelerate: str, processes: int | None) -> Path:
    """Return a config of accelerate by path or by the name of a shipped one; refuse a faulty one.

    `processes` are those asked for beside it.
    """
    from rlhf_trl.run.accelerate_files import check_accelerate_file

    path = config_file(accelerate)
    if not path.is_file():
        path = config_file(f"accelerate/{accelerate}")
    if not path.is_file():
        known = [name.partition("/")[2] for name in names() if name.startswith("accelerate/")]
        raise InputError(
            f"--accelerate: {accelerate} is neither a file nor a config that ships"
            f"{nearest(accelerate, known)}; known: {', '.join(known)}."
        )
    check_accelerate_file(path, processes)
    details = value_at(read_yaml(path), ("deepspeed_config", "deepspeed_config_file"))
    if details is not None and not Path(details).is_file():
        raise InputError(
            f"{path}: deepspeed_config_file: {details} is not in this folder; write "
            f"`rlhf-trl configs copy accelerate/{path.stem} mine.yaml`, and --accelerate mine.yaml."
        )
    return path


def _check_room(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a config of accelerate that launches more processes than this machine has GPUs.

    For a run on the CPU, whose config and command line have these `values`: than it has cores.
    """
    launched = read_yaml(path)
    kind = launched.get("distributed_type")
    if kind in ("NO", False) or launched.get("num_machines", 1) != 1:  # a bare NO is False
        return
    on_cpu = values.get("use_cpu") is True or launched.get("use_cpu") or kind == "MULTI_CPU"
    on_cpu = on_cpu or path.stem == "cpu_2proc"
    asked, there = launched.get("num_processes", 1), _cores() if on_cpu else _gpus()
    if asked > max(there, 1):
        remedy = f"add --processes {there}" if there else "leave --accelerate out to train on it"
        raise InputError(
            f"{path} launches {asked} processes, and this machine has "
            f"{there or 'no'} {'core' if on_cpu else 'GPU'}{'s' * (there > 1)}; {remedy}."
        )


def _config_for_machine(
    values: Mapping[str, Any], config: str, processes: int | None
) -> tuple[Path, int | None]:
    """Return a config of accelerate for what a run asks for and what the machine has.

    Args:
        values: those of the run's config and command line.
        config: its path.
        processes: how many are asked for; None: one for each GPU.

    Returns:
        The path, and how many processes to launch; None: as many as the path says.
    """
    strategy = value_at(values, ("expect", "strategy"), "none")
    if strategy in ("fsdp", "deepspeed"):
        kinds = {"fsdp": "fsdp2", "deepspeed": "zero1, zero2 or zero3"}
        raise InputError(f"{config} expects {strategy}; add --accelerate {kinds[strategy]}.")
    processes = processes or value_at(values, ("expect", "processes"))
    gpus = 0 if values.get("use_cpu") is True else _gpus()
    if gpus:
        processes = processes or gpus
        name = "one_gpu" if processes == 1 else "ddp"
    else:
        name = "cpu" if processes in (None, 1) else "cpu_2proc"
    count = processes if name in ("ddp", "cpu_2proc") else None
    return accelerate_file(name), count


def _cores() -> int:
    """Return how many cores of the CPU this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> int:
    """Return how many accelerators torch sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _run(command: Sequence[str], folder: Path) -> int:
    """Run a launch; return its exit code, or that of a signal, once all its processes have ended.

    The first signal has the processes save and end, as a scheduler's does; a second ends them. What
    is kept then in the run's `folder` is said last, below the traceback of torch's launcher.
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            _tell(f"{_name(number)}: the run saves and ends; a second one ends it at once")
            signal_group(process.pid, signal.SIGTERM)
        else:
            _kill(process.pid)

    process = start(command, env=os.environ)
    with calling_on_stop(stop):
        code = process.wait()
        wait_for_group(process.pid)
    if received:
        at_once = " at once" * (len(received) > 1)
        kept = Signals(folder=folder).kept()
        _tell(f"interrupted{at_once} by {_name(received[0])}; {kept}")
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _name(number: int) -> str:
    """Return what a user calls a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _tell(sentence: str) -> None:
    """Print a sentence, in a terminal below the progress bar that may be open there."""
    say("\n" * os.isatty(1) + sentence)


def start(
    command: Sequence[str], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start a launch in a process group of its own, which ends when this process dies.

    `options` are further ones of `subprocess.Popen`.
    """
    return subprocess.Popen(
        command,
        # torch's launcher would end processes that save for more than 30 s
        env={"PET_SHUTDOWN_TIMEOUT": f"{PATIENCE:.0f}", **env},
        start_new_session=True,  # signals reach it through this process alone
        preexec_fn=_end_with_parent,
        **options,
    )


_prctl: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


def _end_with_parent() -> None:
    """Have the launcher be ended when this process dies; its worker then saves and ends."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def calling_on_stop(stop: Callable[[int], None]) -> Iterator[None]:
    """In the block, call `stop` with the number of each signal that tells this process to stop."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop(number)

    before = {}
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_group(group: int, number: int) -> bool:
    """Send a signal (0: none) to a process group; return whether there is any process in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _kill(launcher: int) -> None:
    """End a launcher, and what it has started, at once: torch's workers have their own groups."""
    try:
        started = psutil.Process(launcher).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    signal_group(launcher, signal.SIGKILL)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started)


def wait_for_group(group: int) -> None:
    """Wait for what a launcher that has ended left behind; end what does not end in `PATIENCE`.

    A launcher that was told to stop ends before its workers do.
    """
    until = time.monotonic() + PATIENCE
    while signal_group(group, 0) and time.monotonic() < until:
        time.sleep(POLL)
    signal_group(group, signal.SIGKILL)
