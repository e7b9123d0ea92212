"""Run a script on two processes that are forked where TRL has been imported already.

They meet the environment that `accelerate launch` with configs/accelerate/cpu_2proc.yaml gives.
"""

import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
TRAINERS = (file.stem for file in (HERE.parent / "rlhf_trl" / "trainers").glob("[a-z]*.py"))
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([f"rlhf_trl.trainers.{name}" for name in TRAINERS])


def _run(script, folder, rank, port):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in names.items()})
    with open(folder / f"log.{rank}", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(HERE.parent)
    sys.path.insert(0, str(HERE))
    sys.argv = [str(script), str(folder)]
    runpy.run_path(str(script), run_name="__main__")


def on_two_processes(script, folder, timeout):
    """Run a script of this folder; return whether both ended well, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [(HERE / script, folder, rank, port) for rank in (0, 1)]
    both = [FORKS.Process(target=_run, args=words) for words in given]
    for process in both:
        process.start()
    end = time.time() + timeout
    while any(process.exitcode is None for process in both):
        if time.time() > end or any(process.exitcode for process in both):
            break  # what one waits for, the other may never do
        time.sleep(0.05)
    for process in both:
        process.join(timeout=5)
        process.kill()
        process.join()
    printed = "".join((folder / f"log.{rank}").read_text() for rank in (0, 1))
    return [process.exitcode for process in both] == [0, 0], printed
