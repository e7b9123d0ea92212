"""scripts/launch.slurm with stand-ins for Slurm's commands."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "launch.slurm"
SLURM = {
    # starts the command on each node, hands USR1 on, and ends with the worst of their exit codes
    "srun": """
shift # its one option
for node in $(seq "$SLURM_NNODES"); do
    SLURM_NODEID=$((node - 1)) "$@" &
done
tasks=$(jobs -p)
trap 'kill -USR1 $tasks' USR1
worst=0
for task in $tasks; do
    wait "$task"
    code=$?
    while kill -0 "$task" 2>/dev/null; do
        wait "$task"
        code=$?
    done
    [ "$code" -le "$worst" ] || worst=$code
done
exit "$worst"
""",
    "scontrol": """
echo "$@" >> scontrol.log
[ "$1" != show ] || printf "127.0.0.1\\n127.0.0.1\\n"
""",
    # queues the job and starts it, again whenever it is to be requeued
    "sbatch": """
while true; do
    rm -f scontrol.log
    bash "$@"
    code=$?
    grep -q "^requeue $SLURM_JOB_ID$" scontrol.log || exit "$code"
    echo "requeued after $code"
done
""",
}
# a recipe that ends as one that got the signal does
WAITING = """
trap 'echo "$SAID"; exit $CODE' USR1
touch "started-$SLURM_NODEID"
for i in $(seq 200); do sleep 0.05; done
"""
STOPPED = "stopped by SIGUSR1 at step 3; out/checkpoint-3 is kept"


def write_commands(folder, commands):
    for name, text in commands.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)


def environment(folder, machines, gpus, **more):
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    env |= {"SLURM_NNODES": str(machines), "SLURM_GPUS_ON_NODE": str(gpus)}
    return env | {"SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_ID": "77", **more}


def wait_until(condition, seconds):
    until = time.time() + seconds
    while not condition():
        assert time.time() < until
        time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    """Start the script on machines with so many GPUs; return the process once its runs wait."""
    write_commands(tmp_path, SLURM)
    for name in ("python", "accelerate"):
        text = f'echo {name} "$@" "$PET_SIGNALS_TO_HANDLE"\n{WAITING}'
        write_commands(tmp_path, {f".venv/bin/{name}": text})

    def job(machines, gpus, code, said=""):
        words = ["grpo", "--config", "my own.yaml"]
        process = subprocess.Popen(
            ["bash", SCRIPT, *words],
            cwd=tmp_path,
            env=environment(tmp_path, machines, gpus, CODE=str(code), SAID=said),
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: len([*tmp_path.glob("started-*")]) == machines, 20)
        return process

    return job


def requeued(folder):
    return "requeue 77\n" in (folder / "scontrol.log").read_text()


@pytest.mark.parametrize(
    ("code", "said", "is_requeued"),
    [
        (138, STOPPED, True),
        (138, "stopped by SIGUSR1 before the first step; no checkpoint was saved", True),
        (1, "error: a file could not be written (No space left on device)", False),
        (143, STOPPED.replace("USR1", "TERM"), False),
        (0, "", False),  # the signal came after the last step
    ],
)
def test_a_warned_job_is_queued_again_only_where_its_run_ended_by_that_signal(
    job, tmp_path, code, said, is_requeued
):
    process = job(1, 1, code, said)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode == code
    command = "python recipes/grpo.py --config my own.yaml --resume_from_checkpoint auto"
    assert printed.splitlines() == [f"{command} SIGTERM,SIGINT,SIGHUP,SIGUSR1", said]
    assert requeued(tmp_path) == is_requeued


def test_a_job_on_two_machines_starts_a_launcher_on_each(job, tmp_path):
    process = job(2, 8, 1, STOPPED)
    process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and requeued(tmp_path)
    launched = (
        "accelerate launch --quiet --config_file configs/accelerate/multi_node.yaml "
        "--num_machines 2 --num_processes 16 --machine_rank {} --main_process_ip 127.0.0.1 "
        "--main_process_port 20077 --deepspeed_multinode_launcher standard "
        "recipes/grpo.py --config my own.yaml --resume_from_checkpoint auto "
        "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
    )
    assert {launched.format(0), launched.format(1)} == {*printed.splitlines()} - {STOPPED}


def test_a_job_that_fails_is_not_queued_again(job, tmp_path):
    write_commands(tmp_path, {".venv/bin/python": "touch started-0; exit 3\n"})
    process = job(1, 1, 0)
    assert process.wait(timeout=20) == 3
    assert not requeued(tmp_path)


def test_slurm_warns_the_script_alone_and_early_enough():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 60
    assert "#SBATCH --signal=B:USR1@120" in text.splitlines()
    seconds = int(re.search(r"PET_SHUTDOWN_TIMEOUT:-(\d+)", text)[1])
    assert 30 < seconds < 120  # SIGKILL comes before the time is over


STEPS = 12
RUN = ["--max_steps", str(STEPS), "--eval_strategy", "no", "--eval_on_start", "false"]
RUN += ["--dataset.size", "64", "--dataset.eval_size", "8", "--disable_tqdm", "true"]
RUN += ["--num_generations", "4", "--per_device_train_batch_size", "8"]


@pytest.mark.promise
@pytest.mark.multiprocess
def test_a_run_on_two_machines_that_is_warned_ends_like_one_that_is_not(tmp_path):
    """Each machine is a launcher with one process; they meet on the loopback address."""
    write_commands(tmp_path, SLURM)
    launcher = f"exec {sys.executable} -m accelerate.commands.launch"
    write_commands(tmp_path, {".venv/bin/accelerate": f'shift\n{launcher} "$@"\n'})
    for name in ("recipes", "configs", "rlhf_trl"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = environment(tmp_path, 2, 1, ACCELERATE_CONFIG="configs/accelerate/cpu_2proc.yaml")
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("MASTER_ADDR", "WORLD_SIZE", "ACCELERATE_USE_CPU"):
        env.pop(name, None)
    step = random.randrange(2, STEPS - 2)
    print(f"the signal comes after step {step}")

    def submit(folder, warned):
        """Run the job to its end; the process that Slurm would warn gets USR1 if `warned`."""
        output = tmp_path / f"{folder}.log"
        words = ["grpo", "--config", "configs/tiny/grpo.yaml", "--output_dir", folder, *RUN]
        with output.open("w") as file:
            process = subprocess.Popen(
                ["sbatch", SCRIPT, *words], cwd=tmp_path, env=env, stdout=file, stderr=file
            )
            if warned:
                wait_until(lambda: output.read_text().count("'loss'") >= step, 300)
                children = f"/proc/{process.pid}/task/{process.pid}/children"
                (script,) = Path(children).read_text().split()
                os.kill(int(script), signal.SIGUSR1)
            code = process.wait(timeout=600)
        assert code == 0, output.read_text()[-3000:]
        return load_file(tmp_path / folder / "model" / "model.safetensors"), output.read_text()

    stopped, printed = submit("stopped", warned=True)
    assert printed.count("requeued after 1") == 1
    assert int(re.search(r"stopped by SIGUSR1 at step (\d+);", printed)[1]) < STEPS
    whole, printed = submit("whole", warned=False)
    assert "requeued" not in printed
    assert whole.keys() == stopped.keys()
    assert all(bool((whole[name] == stopped[name]).all()) for name in whole)
