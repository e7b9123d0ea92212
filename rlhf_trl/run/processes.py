"""What processes of a launcher need: an end together with it, and a store of their own."""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl
LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun", "torch", "deepspeed"}


def end_with_launcher() -> None:
    """Have Linux send this process SIGTERM when its launcher dies, without which it trains on.

    Where no launcher started it, nothing changes: a run behind nohup outlives its shell.
    """
    launcher = os.getppid()
    try:
        words = Path(f"/proc/{launcher}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except FileNotFoundError:  # the parent has died already: take it for a launcher, and end below
        words = ["torchrun"]
    # its first words, as in `python -m accelerate.commands.launch` or `python .../bin/torchrun`
    if not LAUNCHERS & {Path(word).name.partition(".")[0] for word in words[:5]}:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died before the signal was asked for, so none will come
        os.kill(os.getpid(), signal.SIGTERM)


def shared_store(rank: int, key: str, value: str) -> Any:
    """Return a store on the first process: torch's own ends with the launcher, which may die.

    It is a `TCPStore`, in which `key` has a `value` before any other process connects.
    """
    from accelerate.utils import broadcast_object_list
    from torch.distributed import TCPStore

    host, store = os.environ["MASTER_ADDR"], None
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)  # 0: any free port
        store.set(key, value)
    (port,) = broadcast_object_list([store and store.port])
    return store or TCPStore(host, port, is_master=False)
