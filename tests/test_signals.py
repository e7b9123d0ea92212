"""Runs that get a signal or meet an error: what is saved, said and returned, and how they go on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from two_processes import on_processes

from rlhf_trl.errors import InputError
from rlhf_trl.output import whole_checkpoints
from rlhf_trl.run.claiming import claim
from rlhf_trl.run.signals import COPIES

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts"))

STEPS = 12
RUN = [
    *["--dataset.size", 64, "--dataset.eval_size", 8, "--max_steps", STEPS, "--eval_steps", 4],
    *["--num_generations", 4, "--per_device_train_batch_size", 8],
]
# The whole of a run without its imports: a recipe that sleeps and says so.
ASLEEP = """
import sys, time
from rlhf_trl.run.launch import recipe
from rlhf_trl.run.signals import signals
def main():
    signals.training = "training" in sys.argv
    print("asleep", flush=True)
    for _ in range(200):
        time.sleep(0.05)
    print("awake", flush=True)
recipe(main)
"""


def differences(one, other):
    """Return the files of model, evaluations and record that two runs do not have alike."""
    from kill_test import differences

    return [name for name in differences(one, other) if not name.startswith("checkpoint-")]


@pytest.fixture(autouse=True, scope="module")
def _nothing_ignored():
    """Let signals arrive, whatever a shell in the background or `nohup` left ignored."""
    usual = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
    usual[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def asleep(tmp_path):
    """Start a recipe that only sleeps, behind the words of a command; return what kills it."""
    script, started = tmp_path / "asleep.py", []
    script.write_text(ASLEEP)

    def start(*words, before=(), **options):
        command = [*before, sys.executable, str(script), *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        started.append(process)
        assert process.stdout.readline() == "asleep\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_before_the_first_step_a_signal_ends_a_run_at_once(asleep, number):
    process = asleep()
    process.send_signal(number)
    printed, _ = process.communicate(timeout=5)
    assert process.returncode == 128 + number
    assert printed == (
        f"stopped by {number.name} before the first step; no checkpoint was saved, so "
        "--resume_from_checkpoint auto begins again\n"
    )


def test_a_second_interrupt_ends_a_run_at_once_and_a_copy_does_not(asleep):
    process = asleep("training")
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT: stopping at the next step boundary\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    time.sleep(COPIES + 0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=5)
    assert process.returncode == 130
    assert printed.startswith("ended at once by a second Ctrl-C; no checkpoint was saved")


def test_what_the_parent_ignores_stays_ignored(asleep):
    process = asleep(before=["nohup"], stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=5)[0].startswith("stopped by SIGTERM")


# What starts a worker and waits, under the name of a launcher or another; words: name, variable.
PARENT = "import subprocess, sys\nsubprocess.run(sys.argv[1:])\n"


@pytest.mark.parametrize(
    ("name", "variable", "ends"),
    [
        ("accelerate", "ACCELERATE_MIXED_PRECISION", True),
        ("torchrun", "TORCHELASTIC_RUN_ID", True),
        ("accelerate", "ANOTHER", False),
        ("shell", "ACCELERATE_MIXED_PRECISION", False),
    ],
)
def test_a_worker_ends_with_its_launcher_and_no_other_parent(
    asleep, tmp_path, monkeypatch, name, variable, ends
):
    (tmp_path / name).write_text(PARENT)
    monkeypatch.setenv(variable, "no")
    parent = asleep(before=[sys.executable, str(tmp_path / name)])
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    worker = int(children.read_text())
    parent.kill()
    parent.wait(timeout=5)
    if ends:
        # the pipe closes once the worker has ended, too
        assert parent.stdout.read().startswith("stopped by SIGTERM before the first step; ")
    else:
        time.sleep(0.3)
        os.kill(worker, signal.SIGKILL)  # still there
        assert parent.stdout.read() == ""


def test_handlers_are_of_recipes_only_and_gone_afterwards():
    from rlhf_trl.run import launch, signals

    def dispositions():
        return [signal.getsignal(number) for number in signals.HANDLED]

    before, inside = dispositions(), []
    launch.recipe(lambda: inside.extend(dispositions()))
    assert dispositions() == before
    assert not set(inside) & set(before) and len(set(inside)) == 1


def test_a_folder_belongs_to_one_run_until_that_is_killed(tmp_path):
    program = "from rlhf_trl.run.claiming import claim; import sys, time; claim(sys.argv[1], None)"
    program += "; print('holds it', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds it\n"
    for resume in (None, "auto"):
        with pytest.raises(InputError, match=f"in use by another run .process {process.pid} on"):
            claim(str(tmp_path / "run"), resume)
    process.kill()
    process.communicate()
    assert claim(str(tmp_path / "run"), None) is None
    assert claim(str(tmp_path / "run"), "auto") is None  # of the same process


@pytest.fixture
def unstopped(run, tmp_path_factory):
    """Return the folder of a run that nothing ends early; those with the same words share it."""

    def unstopped(*words):
        if words not in MADE:
            MADE[words], _ = run("grpo", "grpo", *words, folder=tmp_path_factory.mktemp("a") / "b")
        return MADE[words]

    return unstopped


MADE = {}
JUDGED = [*RUN, "--reward_funcs", "failing.fails", "--reward_weights", 1]


def test_a_signalled_run_saves_a_step_boundary_and_goes_on_from_it(
    run, unstopped, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("SIGNALS_AT", "6")
    monkeypatch.setenv("SIGNAL", str(int(signal.SIGUSR1)))
    folder = tmp_path / "stopped"
    with pytest.raises(SystemExit) as stop:
        run("grpo", "grpo", *JUDGED, folder=folder)
    assert stop.value.code == 128 + signal.SIGUSR1
    assert capfd.readouterr().out.splitlines()[-1] == (
        f"stopped by SIGUSR1 at step 7; {folder}/checkpoint-7 is kept; "
        "--resume_from_checkpoint auto goes on from there"
    )
    assert list(whole_checkpoints(folder)) == [7]  # although save_strategy is no
    monkeypatch.delenv("SIGNALS_AT")
    run("grpo", "grpo", *JUDGED, "--resume_from_checkpoint", "auto", folder=folder)
    assert differences(unstopped(*JUDGED), folder) == []


@pytest.mark.parametrize(
    ("at", "words"),
    [
        pytest.param(6, (), id="a step"),
        pytest.param(8, (), id="an evaluation", marks=pytest.mark.promise),
        pytest.param(6, ("--num_iterations", 2), id="anew", marks=pytest.mark.promise),
    ],
)
def test_a_reward_that_raises_costs_no_step(
    run, refused, unstopped, tmp_path, monkeypatch, at, words
):
    monkeypatch.setenv("FAILS_AT", str(at))
    folder = tmp_path / "failed"
    sentence = refused("grpo", "grpo", *JUDGED, *words, folder=folder)
    assert "'failing.fails' raised RuntimeError: the judge is gone" in sentence
    assert sentence.endswith(
        f"{folder}/checkpoint-{at} is kept; --resume_from_checkpoint auto goes on from there."
    )
    monkeypatch.delenv("FAILS_AT")
    run("grpo", "grpo", *JUDGED, *words, "--resume_from_checkpoint", "auto", folder=folder)
    assert differences(unstopped(*JUDGED, *words), folder) == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(GRPOTrainer, "_compute_loss", id="memory"),
        pytest.param(Trainer, "log", id="tracker", marks=pytest.mark.promise),
    ],
)
def test_an_error_inside_a_generation_costs_no_step(
    run, unstopped, tmp_path, monkeypatch, owner, name
):
    # a generation lasts six micro-batches, and a step two of them
    words = [*RUN, "--num_iterations", 3, "--steps_per_generation", 2]
    words += ["--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 4]
    method, calls = getattr(owner, name), []

    def failing(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        if self.state.global_step == 5:
            calls.append(name)
        if len(calls) == (2 if name == "_compute_loss" else 1):
            raise MemoryError("it is full")
        return result

    monkeypatch.setattr(owner, name, failing)
    folder = tmp_path / "failed"
    with pytest.raises(MemoryError) as caught:
        run("grpo", "grpo", *words, folder=folder)
    assert f"{folder}/checkpoint-5 is kept" in caught.value.__notes__[0]
    monkeypatch.undo()
    run("grpo", "grpo", *words, "--resume_from_checkpoint", "auto", folder=folder)
    assert differences(unstopped(*words), folder) == []


SIGNALLED = [
    *["--config", "configs/tiny/grpo.yaml", "--disable_tqdm", "--max_steps", 6, "--eval_steps", 3],
    *["--save_strategy", "steps", "--save_steps", 4, "--per_device_train_batch_size", 8],
    *["--dataset.size", 64, "--dataset.eval_size", 8, "--num_generations", 4],
]
# Forwards SIGUSR1, too.
FORWARDED = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGUSR1"}


def job(home, output_dir, phase=None, itself=None, forked=True, resume=False):
    """Write down what signalled.py is to do in a folder of its own."""
    home.mkdir(parents=True)
    words = [*map(str, SIGNALLED), "--output_dir", str(output_dir)]
    words += ["--resume_from_checkpoint", "auto"] if resume else []
    content = {"words": words, "phase": phase, "itself": itself, "forked": forked}
    (home / "job.json").write_text(json.dumps(content))
    return home


def forked(processes, home, *args, **kwargs):
    """Do a job in forks, where TRL has been imported; return exit codes and what was printed."""
    job(home, *args, **kwargs)
    ended, printed = on_processes(processes, "signalled.py", home, 300)
    assert ended, printed
    return [(home / f"code.{rank}").read_text() for rank in range(processes)], printed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run that nobody stops, on that many processes."""
    made = {}

    def whole(processes):
        if processes not in made:
            home = tmp_path_factory.mktemp("whole")
            made[processes] = home / "run"
            codes, printed = forked(processes, home / "job", home / "run")
            assert set(codes) == {"0"}, printed
        return made[processes]

    return whole


def all_differences(one, other):
    """Return the files of two runs that are not alike, in their last checkpoint, too."""
    from kill_test import differences

    return differences(one, other)


@pytest.mark.multiprocess
@pytest.mark.promise
def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(tmp_path):
    folder = tmp_path / "run"
    codes, printed = forked(2, tmp_path / "job", folder, "step", itself=signal.SIGHUP)
    assert codes == ["129", "129"]
    assert printed.count("stopped by SIGHUP at step 3; ") == 1  # it came in the second step
    assert list(whole_checkpoints(folder)) == [3]


def accelerate(processes, home, env=None, before=()):
    """Launch a job with accelerate in a session of its own; return the process once all wait."""
    config = {1: "cpu", 2: "cpu_2proc"}[processes]
    command = [*before, sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command += ["--config_file", f"configs/accelerate/{config}.yaml", "tests/signalled.py", home]
    clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**clean, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **(env or {})},
        stdout=(home / "log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    waiting = [home / f"waiting.{rank}" for rank in range(processes)]
    until = time.time() + 200
    while not all(path.exists() and path.read_text() for path in waiting):
        assert process.poll() is None and time.time() < until, (home / "log").read_text()
        time.sleep(0.05)
    return process, [int(path.read_text()) for path in waiting]


def sent(number, target, process, workers):
    """Send a signal to what it is for."""
    if target == "group":
        os.killpg(process.pid, number)
    else:
        for victim in {"launcher": [process.pid], "worker": workers[-1:]}.get(target, workers):
            os.kill(victim, number)


def has_ended(number):
    """Return whether a process is gone, or only waits to be counted."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
TARGETS = ("launcher", "worker", "workers", "group")
PHASES = ("step", "generation", "evaluation", "saving")
CELLS = [(name, target) for name in NAMES for target in TARGETS] + [("SIGKILL", "launcher")]


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "target"), CELLS)
def test_every_signal_saves_and_the_resumed_run_is_identical(
    name, target, phase, processes, whole, tmp_path
):
    number, folder = signal.Signals[name], tmp_path / "run"
    home = job(tmp_path / "stopped", folder, phase, forked=False)
    process, workers = accelerate(processes, home, FORWARDED)
    # the launcher of one dies of a signal; that of two handles it, and ends with 1
    dies = name == "SIGKILL" or (processes == 1 and target in ("launcher", "group"))
    sent(number, target, process, workers)
    if dies:  # which its workers learn of then
        process.wait(60)
    (home / "sent").touch()
    code = process.wait(60)
    until = time.time() + 30
    while not all(map(has_ended, workers)) and time.time() < until:
        time.sleep(0.05)
    log = (home / "log").read_text()
    assert all(map(has_ended, workers)), log
    assert code == (-number if dies else 1), log
    first = "SIGTERM" if dies and target == "launcher" else name  # by which workers learn of it
    codes = {(home / f"code.{rank}").read_text() for rank in range(processes)}
    assert codes == {str(128 + signal.Signals[first])}, log
    saved = max(whole_checkpoints(folder))
    assert saved < 6 and log.count(f"stopped by {first} at step {saved}; ") == 1
    codes, printed = forked(processes, tmp_path / "resumed", folder, resume=True)
    assert set(codes) == {"0"} and f"resuming from {folder}/checkpoint-{saved}" in printed
    assert all_differences(whole(processes), folder) == []


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_behind_nohup_outlives_its_shell(processes, tmp_path):
    home = job(tmp_path / "job", tmp_path / "run", "step", forked=False)
    kept = {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1"}
    process, workers = accelerate(processes, home, kept, before=["nohup"])
    for number in (process.pid, *workers):
        os.kill(number, signal.SIGHUP)
    (home / "sent").touch()
    assert process.wait(100) == 0, (home / "log").read_text()
