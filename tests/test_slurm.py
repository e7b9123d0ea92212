"""scripts/slurm.sh with stand-ins for Slurm's commands and for what starts a recipe."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "slurm.sh"
STAND_INS = {
    "srun": 'shift\nSLURM_NODEID=1 exec "$@"\n',  # its one option
    "scontrol": 'echo "$@" >> scontrol.log\n[ "$1" != show ] || printf "first\\nsecond\\n"\n',
    ".venv/bin/python": 'echo python "$@"; . ./waits\n',
    ".venv/bin/accelerate": 'echo accelerate "$@" "$PET_SIGNALS_TO_HANDLE"; . ./waits\n',
    # as a run does that gets the signal
    "waits": "trap 'exit '$CODE USR1\ntouch started\nfor i in $(seq 100); do sleep 0.05; done\n",
}


@pytest.fixture
def job(tmp_path):
    """Start the script on machines with so many GPUs; return the process once its run waits."""
    for name, text in STAND_INS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)

    def job(machines, gpus, code):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
        env |= {"SLURM_NNODES": str(machines), "SLURM_GPUS_ON_NODE": str(gpus)}
        env |= {"SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_ID": "77"}
        words = ["grpo", "--config", "my own.yaml"]
        process = subprocess.Popen(
            ["bash", SCRIPT, *words], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
        )
        until = time.time() + 20
        while not (tmp_path / "started").exists() and time.time() < until:
            time.sleep(0.02)
        return process

    return job


@pytest.mark.parametrize(("code", "requeued"), [(138, True), (0, False)])
def test_a_warned_job_saves_and_is_queued_again_unless_its_run_is_over(
    job, tmp_path, code, requeued
):
    process = job(1, 1, code)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode == code
    assert printed == "python recipes/grpo.py --config my own.yaml --resume_from_checkpoint auto\n"
    assert ("requeue 77" in (tmp_path / "scontrol.log").read_text()) == requeued


def test_a_job_on_two_machines_starts_a_launcher_on_each(job, tmp_path):
    process = job(2, 8, 1)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "requeue 77" in (tmp_path / "scontrol.log").read_text()
    assert re.sub(r"\s+", " ", printed).strip() == (
        "accelerate launch --quiet --config_file configs/accelerate/multi_node.yaml "
        "--num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip first "
        "recipes/grpo.py --config my own.yaml --resume_from_checkpoint auto "
        "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
    )


def test_a_job_that_fails_is_not_queued_again(job, tmp_path):
    (tmp_path / "waits").write_text("exit 3\n")
    (tmp_path / "started").touch()
    process = job(1, 1, 0)
    assert process.wait(timeout=20) == 3
    assert "requeue" not in (tmp_path / "scontrol.log").read_text()


def test_slurm_warns_the_script_alone_and_early_enough():
    text = SCRIPT.read_text()
    assert "#SBATCH --signal=B:USR1@600" in text.splitlines()
    seconds = int(re.search(r"PET_SHUTDOWN_TIMEOUT=(\d+)", text)[1])
    assert 30 < seconds < 600  # SIGKILL comes before the time is over
