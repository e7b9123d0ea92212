"""Several runs as jobs: their order, their time, and that nothing outlives who started them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_trl.errors import InputError
from rlhf_trl.run import jobs, launching
from rlhf_trl.run.jobs import Job, do_all

PROGRAM = """
import subprocess, sys
from pathlib import Path
from rlhf_trl.run import jobs, launching

start, folder = subprocess.Popen, Path(sys.argv[1])
# a launcher that leaves a signal to its worker, which takes a moment to save, as a recipe does
worker = '''
import ctypes, os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    open(sys.argv[1], "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
open(sys.argv[1] + ".started", "w").close()
time.sleep(60)
'''
launcher = '''
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
'''
def stand_in(command, **options):
    saved = command[command.index("--output_dir") + 1] + "/saved"
    return start([sys.executable, "-c", launcher, worker, saved], **options)
subprocess.Popen = stand_in
(folder / "a.yaml").write_text("seed: 0")
words = ["--config", str(folder / "a.yaml")]
jobs.do_all([jobs.Job(folder / name, "recipes/grpo.py", words) for name in "ab"], 2)
"""


@pytest.fixture
def config(tmp_path):
    """The first words of a job."""
    (tmp_path / "a.yaml").write_text("seed: 0\n")
    return ["--config", str(tmp_path / "a.yaml"), "--seed", "0"]


def until(condition, seconds=20):
    """Wait for a condition; return whether it came."""
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_runs_save_and_end_with_who_started_them(tmp_path, number):
    started = [tmp_path / name / "saved.started" for name in "ab"]
    saved = [tmp_path / name / "saved" for name in "ab"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        # what runs in the background of a shell ignores SIGINT, and so would its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert until(lambda: all(path.exists() for path in started))
        process.send_signal(number)
        printed, _ = process.communicate(timeout=30)
    if number == signal.SIGKILL:  # nobody is left to wait for them
        assert until(lambda: all(path.exists() for path in saved))
        return
    assert all(path.exists() for path in saved)
    assert process.returncode == 128 + number
    name = signal.Signals(number).name
    assert printed == f"stopped by {name}; the same command goes on from what is saved\n"


def test_a_job_waits_for_those_that_it_reads(tmp_path, config, monkeypatch, stand_in, capsys):
    running, most = set(), []

    def leave(folder, options):
        running.add(folder.name)
        most.append({*running})

    started = stand_in(leave)
    ended = jobs._ended

    def watched(runs):
        done = ended(runs)
        running.difference_update(run.job.folder.name for run in done)
        return done

    monkeypatch.setattr(jobs, "_ended", watched)
    a, b, c, d = (tmp_path / name for name in "abcd")
    reads = {a: [], b: [a], c: [], d: [b, c]}
    do_all([Job(folder, "r", config, after) for folder, after in reads.items()], 2)
    assert sorted(folder[-1] for folder, _ in started) == [*"abcd"]
    assert {"a", "b"} not in most and {"a", "c"} in most
    assert [{"d"}] == [names for names in most if "d" in names]
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert all("less than a minute left" in line for line in lines[:-1])
    assert lines[-1].endswith("the last line")


def test_the_time_left_is_that_of_jobs_of_the_same_kind(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    waiting = [Job(Path("x"), "r", (), kind="slow"), Job(Path("y"), "r", (), kind="new")]
    state = jobs._Jobs(waiting, 5, 3, seconds={"slow": [600.0], "fast": [0.0, 120.0]})
    # 600 s of the slow one; a new kind takes the mean of all three, 240 s
    assert state.time_left(1) == "about 14 min left"
    assert state.time_left(2) == "about 7 min left"
    state.running.append(jobs._Running(waiting.pop(), None, 100.0 - 240.0, 0))
    assert state.time_left(1) == "about 10 min left"


def test_what_a_run_took_is_added_up_over_its_starts(tmp_path, config, stand_in):
    stand_in(lambda folder, options: None)
    job = Job(tmp_path / "a", "r", config)
    do_all([job])
    (tmp_path / "a" / "learning_curve.png").unlink()  # as if it had been stopped
    (tmp_path / "a" / "model").rmdir()
    (tmp_path / "a" / "cost.json").write_text(
        '{"cpu_seconds": 7.5, "peak_memory_bytes": 1, "starts": 1}'
    )
    do_all([job])
    cost = json.loads((tmp_path / "a" / "cost.json").read_text())
    assert cost["starts"] == 2
    assert 7.5 <= cost["cpu_seconds"] < 8.5 and cost["peak_memory_bytes"] > 100_000
    assert (tmp_path / "a" / "output.txt").read_text() == "the last line\n" * 2


def test_a_failure_starts_nothing_more_and_names_its_own_output(tmp_path, config, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "output.txt").write_text("error: of an earlier start\n")
    start, commands = subprocess.Popen, []

    def fail(command, **options):
        commands.append(command)
        return start(["sh", "-c", "echo broken; exit 3"], **options)

    monkeypatch.setattr(subprocess, "Popen", fail)
    order = [Job(tmp_path / name, "r", config) for name in "ab"]
    with pytest.raises(InputError, match=r"--seed 0 failed: broken$"):
        do_all(order)
    assert len(commands) == 1 and not (tmp_path / "b").exists()


def test_a_stopped_run_with_a_checkpoint_is_not_gone_on_with_otherwise(
    tmp_path, config, monkeypatch, stand_in
):
    started = stand_in(lambda folder, options: None)
    job = Job(tmp_path / "a", "r", config)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "asked.json").write_text(json.dumps({**jobs.request(job), "seed": 3}))
    monkeypatch.setattr(jobs, "whole_checkpoints", lambda folder: {4: folder / "checkpoint-4"})
    with pytest.raises(InputError, match=r"a holds a run with other settings \(seed\); restore"):
        do_all([job])
    assert not started
    monkeypatch.setattr(jobs, "whole_checkpoints", lambda folder: {})  # nothing to lose
    do_all([job])
    assert started[0][1]["--resume_from_checkpoint"] == "auto"
    assert json.loads((tmp_path / "a" / "asked.json").read_text()) == jobs.request(job)


def test_the_launcher_config_can_be_chosen(tmp_path, config, monkeypatch):
    start, environments, configs = subprocess.Popen, [], []

    def noted(command, env, **options):
        environments.append(env.get("OMP_NUM_THREADS"))
        configs.append(Path(command[command.index("--config_file") + 1]).name)
        return start(["true"], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(jobs, "is_done", lambda job: False)
    do_all([Job(tmp_path / "a", "r", config)])
    chosen = tmp_path / "mine.yaml"
    chosen.write_text("distributed_type: NO")
    do_all([Job(tmp_path / "a", "r", config)], accelerate=str(chosen))
    assert (configs, environments) == (["cpu.yaml", "mine.yaml"], ["1", None])
    with pytest.raises(InputError, match=r"--accelerate: no.yaml is not a file"):
        do_all([], accelerate="no.yaml")
    chosen.write_text("distributed_type: multi")
    with pytest.raises(InputError, match=r"mine.yaml: distributed_type is .multi.; write one of"):
        do_all([], accelerate=str(chosen))


def test_signals_are_those_of_before_afterwards(tmp_path, config, stand_in):
    stand_in(lambda folder, options: None)
    before = [signal.getsignal(number) for number in launching.STOPPING]
    do_all([Job(tmp_path / "a", "r", config)])
    assert [signal.getsignal(number) for number in launching.STOPPING] == before
    assert os.getpgid(0) == os.getpgrp()
