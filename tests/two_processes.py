"""Run a script on one or two processes that are forked where TRL has been imported already.

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


def run_script(script, folder, rank, port, processes):
    names = {"ACCELERATE_USE_CPU": "true"}
    if processes > 1:
        names |= {"RANK": rank, "LOCAL_RANK": rank}
        names |= {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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
    return on_processes(2, script, folder, timeout)


def on_processes(processes, script, folder, timeout):
    """Run a script of this folder; return whether all ended well, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = [(HERE / script, folder, rank, port, processes) for rank in range(processes)]
    started = [FORKS.Process(target=run_script, args=words) for words in given]
    for process in started:
        process.start()
    end = time.time() + timeout
    while any(process.exitcode is None for process in started):
        if time.time() > end or any(process.exitcode for process in started):
            break  # what one waits for, the other may never do
        time.sleep(0.05)
    for process in started:
        process.join(timeout=5)
        process.kill()
        process.join()
    printed = "".join((folder / f"log.{rank}").read_text() for rank in range(processes))
    return all(process.exitcode == 0 for process in started), printed
