"""`rlhf-trl doctor`: what is installed and what the machine has, before a run needs it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from rlhf_trl.run.folders import home
from rlhf_trl.run.launching import accelerate_file, launch_command

GB = 1e9
LIMIT = 120.0  # seconds for the launch of two processes, which takes about ten
TOGETHER = "together: [0, 1]"  # what two processes print that have found each other


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    subject: str
    text: str
    remedy: str = ""  # what to do; "": it is in order
    stops: bool = False  # whether no run can train so

    def __str__(self) -> str:
        """Return the line."""
        words = f"{self.text}; {self.remedy}" if self.remedy else f"ok: {self.text}"
        return f"{self.subject:<15}{words}"


def findings() -> Iterator[Finding]:
    """Look at one thing after the other; the launch of two processes comes last."""
    yield from _versions()
    yield from _gpu()
    yield _disk()
    yield _memory()
    yield _compilers()
    yield _hub()
    yield _two_processes()


def _versions() -> Iterator[Finding]:
    """Hold packages against the ranges of pyproject.toml, and against what is tested.

    An extra that is not installed is not asked for. A wheel does not hold constraints.txt.
    """
    from packaging.requirements import Requirement

    constraints = home() / "constraints.txt"
    pinned = constraints.read_text() if constraints.is_file() else ""
    tested = dict(re.findall("^(.+)==(.+)$", pinned, re.MULTILINE))
    wrong, right, untested, stops = [], [], [], False
    for line in importlib.metadata.requires("rlhf_trl") or ():
        wanted = Requirement(line)
        is_needed = wanted.marker is None
        installed = [*importlib.metadata.distributions(name=wanted.name)]
        version = installed[0].version if installed else None
        if version is None and not is_needed:
            continue
        if version is None or not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"'{wanted.name}{wanted.specifier}'")
            stops |= is_needed
        elif is_needed:
            right.append(f"{wanted.name} {version}")
        if version and tested.get(wanted.name, version) != version:
            untested.append(f"{wanted.name} {version} ({tested[wanted.name]})")
    if wrong:
        remedy = f"{sys.executable} -m pip install {' '.join(wrong)}"
        yield Finding("versions", "out of range or missing", remedy, stops)
    else:
        yield Finding("versions", ", ".join(right))
    if untested:
        remedy = "scripts/setup.sh installs the versions in brackets, which are tested"
        yield Finding("tested with", f"others: {', '.join(untested)}", remedy)


def _gpu() -> Iterator[Finding]:
    """Look for GPUs, and for bf16 on them."""
    import torch

    build = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        memory = f"{free / GB:.0f} of {total / GB:.0f} GB free"
        count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        yield Finding("GPU", f"{count} x {name}, {memory}, {build}")
        if torch.cuda.is_bf16_supported(including_emulation=False):
            yield Finding("bf16", "yes")
        else:
            yield Finding("bf16", "not on this GPU", "write bf16: false, which is true by default")
        return
    if torch.accelerator.is_available():
        yield Finding("GPU", f"{torch.accelerator.current_accelerator()}, {build}")
    elif shutil.which("nvidia-smi"):
        remedy = "install a build of torch for this driver's CUDA (see pytorch.org)"
        yield Finding("GPU", f"there is one (nvidia-smi), and {build} does not see it", remedy)
    else:
        yield Finding("GPU", f"none, so runs are on the CPU, {build}")
    yield Finding(
        "bf16", "no GPU for it; the CPU computes in float32 unless a config says bf16: true"
    )


def _disk() -> Finding:
    """Look at the free space of this folder, and whether it can be written."""
    free = shutil.disk_usage(".").free
    text = f"{free / GB:.0f} GB free in {Path.cwd()}"
    if not os.access(".", os.W_OK):
        return Finding("disk", f"{Path.cwd()} cannot be written", "go to another folder", True)
    if free < 10 * GB:
        remedy = "make room: a checkpoint of 1B parameters takes up to 16 GB"
        return Finding("disk", text, remedy, stops=free < 0.2 * GB)
    return Finding("disk", text)


def _memory() -> Finding:
    """Look at the free memory."""
    import psutil

    free = psutil.virtual_memory().available
    text = f"{free / GB:.0f} GB free"
    if free < 4 * GB:
        remedy = "end other programs: the embedded model takes 1 GB, others more"
        return Finding("memory", text, remedy, stops=free < 0.5 * GB)
    return Finding("memory", text)


def _compilers() -> Finding:
    """Look for what DeepSpeed builds extensions with, for CPUs and for offload."""
    if not [*importlib.metadata.distributions(name="deepspeed")]:
        return Finding("compilers", "not needed, as DeepSpeed is not installed")
    tools = [os.environ.get("CXX", "c++"), "ninja"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        text = f"{' and '.join(missing)} missing, with which DeepSpeed builds extensions"
        return Finding("compilers", text, "install a C++ compiler and ninja, or use no ZeRO on CPU")
    return Finding("compilers", " and ".join(tools))


def _hub() -> Finding:
    """Ask whether the hub can be reached, unless this machine says that it is offline."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "offline (HF_HUB_OFFLINE); models and data come from files")
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except (URLError, OSError) as error:
        remedy = "set HF_HUB_OFFLINE=1 to use what is in the cache, or HF_ENDPOINT to a mirror"
        return Finding("hub", f"{constants.ENDPOINT} is not reached ({error})", remedy)
    return Finding("hub", f"{constants.ENDPOINT} is reached")


def _two_processes() -> Finding:
    """Launch two processes that have to find each other, on GPUs where there are two."""
    import torch

    has_gpus = torch.cuda.device_count() > 1
    config = accelerate_file("ddp" if has_gpus else "cpu_2proc")
    command = launch_command(["-m", "rlhf_trl.run.doctor"], config, processes=2)
    began = time.monotonic()
    try:
        options = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
        done = subprocess.run(command, **options)
        printed, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        printed, errors = "", f"they did not end within {LIMIT:.0f} s"
    if TOGETHER in printed:
        return Finding("two processes", f"found each other, in {time.monotonic() - began:.0f} s")
    last = [line.strip() for line in errors.splitlines() if "rror" in line] or [errors.strip()]
    remedy = "look at the firewall between processes of this machine, MASTER_ADDR and MASTER_PORT"
    return Finding("two processes", f"cannot train together ({last[-1]})", remedy, stops=has_gpus)


def main() -> None:
    """Be one of two processes: find the other one."""
    import torch
    from accelerate import PartialState
    from accelerate.utils import gather_object

    state = PartialState(cpu=torch.cuda.device_count() < 2)
    ranks = gather_object([state.process_index])
    if state.is_main_process:
        print(f"together: {ranks}", flush=True)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
