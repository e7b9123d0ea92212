"""`rlhf-trl train`: what it launches, from any folder, and how that ends."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rlhf_trl.cli import main
from rlhf_trl.run import launching
from rlhf_trl.run.accelerate_files import check_accelerate_file

ROOT = Path(__file__).parent.parent
# A launcher of one process: its child, of the same group, saves for a little after a SIGTERM.
LAUNCHER = """
import signal, subprocess, sys
program = '''
import os, signal, sys, time
def end(number, frame):
    time.sleep(0.4)
    open("checkpoint-7/manifest.json", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
os.mkdir("checkpoint-7")
open("began", "w").close()
time.sleep(60)
'''
def end(number, frame):
    raise RuntimeError("a launcher of several ends so")
worker = subprocess.Popen([sys.executable, "-c", program])
signal.signal(signal.SIGTERM, end)
try:
    worker.wait()
finally:
    worker.wait()
"""


@pytest.fixture
def launched(monkeypatch, tmp_path, capsys):
    """In an empty folder, return the command that `rlhf-trl train` starts, without starting it."""
    commands = []
    monkeypatch.setattr(launching, "_run", lambda command, folder: commands.append(command) or 0)
    monkeypatch.setattr(launching, "_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)

    def launched(*words):
        main(["train", *words])
        printed = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {capsys.readouterr().out}"],
            capture_output=True,
            text=True,
            check=True,
        )
        (command,) = commands
        commands.clear()
        assert printed.stdout.splitlines() == command  # a shell reads what is printed as these
        return command

    return launched


def parts(command):
    """Return accelerate's config, the number of processes (None: not said), script and options."""
    place = command.index("--config_file")
    config, rest = Path(command[place + 1]), command[place + 2 :]
    count = None
    if rest[0] == "--num_processes":
        count, rest = int(rest[1]), rest[2:]
    return config, count, Path(rest[0]), rest[1:]


def test_a_shipped_config_is_launched_by_name_from_any_folder(launched):
    config, count, script, options = parts(launched("grpo", "--config", "tiny/grpo"))
    assert config.samefile(ROOT / "configs/accelerate/cpu.yaml") and count is None
    assert script.samefile(ROOT / "recipes/grpo.py")
    assert options[0] == "--config" and len(options) == 2
    assert Path(options[1]).samefile(ROOT / "configs/tiny/grpo.yaml")
    same = launched("grpo", "--config", "configs/tiny/grpo.yaml")  # as the README writes it
    assert parts(same)[3] == options


def test_a_file_comes_before_a_shipped_config_and_options_are_passed_on(launched):
    Path("tiny").mkdir()
    Path("tiny/grpo").write_text("output_dir: 'a b'\n")
    words = ["--dataset.size=5", "--reward_funcs", "format", "exact_match"]
    command = launched("grpo", "--config", "tiny/grpo", *words, "--traceback")
    assert parts(command)[3] == ["--config", "tiny/grpo", *words, "--traceback"]


@pytest.mark.parametrize(
    ("gpus", "words", "name", "count", "more"),
    [
        (0, ["tiny/dpo"], "cpu", None, []),
        (0, ["tiny/dpo", "--processes", "2"], "cpu_2proc", 2, []),
        (0, ["own/dpo", "--processes", "2"], "cpu_2proc", 2, ["--use_cpu", "true"]),
        (1, ["own/dpo"], "one_gpu", None, []),
        (4, ["own/dpo"], "ddp", 4, []),
        (4, ["own/dpo", "--processes", "2"], "ddp", 2, []),
        (4, ["own/dpo", "--processes", "1"], "one_gpu", None, []),
        (4, ["tiny/dpo"], "cpu", None, []),  # it says use_cpu: true
        (4, ["tiny/dpo", "--use_cpu", "false"], "ddp", 4, ["--use_cpu", "false"]),
        (4, ["own/dpo", "--use_cpu", "true"], "cpu", None, ["--use_cpu", "true"]),
        (8, ["scale/dpo_zero3", "--accelerate", "zero3"], "zero3", None, []),
    ],
)
def test_the_machine_decides_how_it_is_launched(
    launched, monkeypatch, gpus, words, name, count, more
):
    monkeypatch.setattr(launching, "_gpus", lambda: gpus)
    config, processes, _, options = parts(launched("dpo", "--config", *words))
    assert (config.stem, processes, options[2:]) == (name, count, more)


@pytest.mark.parametrize(
    ("gpus", "config", "words", "sentence"),
    [
        (
            0,
            "own/dpo",
            ["ddp"],
            "ddp.yaml launches 8 processes, and this machine has no GPU; leave",
        ),
        (1, "own/dpo", ["zero3"], "and this machine has 1 GPU; add --processes 1."),
        (1, "own/dpo", ["zero3", "--processes", "1"], None),
        (8, "own/dpo", ["fsdp2"], None),
        (8, "tiny/dpo", ["ddp"], "and this machine has 4 cores; add --processes 4."),  # use_cpu
        (0, "own/dpo", ["cpu_2proc"], None),
        (0, "own/dpo", ["cpu"], None),
    ],
)
def test_more_processes_than_the_machine_has_room_for_are_launched_only_where_asked_for(
    launched, monkeypatch, gpus, config, words, sentence
):
    monkeypatch.setattr(launching, "_gpus", lambda: gpus)
    monkeypatch.setattr(launching, "_cores", lambda: 4)
    words = ["dpo", "--config", config, "--accelerate", *words]
    if sentence is None:
        assert parts(launched(*words))[0].stem == words[4]
    else:
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            launched(*words)


@pytest.mark.parametrize("kind", ["NO", "'NO'", "MULTI_GPU"])
def test_one_process_is_launched_without_a_gpu(launched, monkeypatch, kind):
    monkeypatch.setattr(launching, "_gpus", lambda: 0)
    Path("mine.yaml").write_text(f"{{distributed_type: {kind}, num_processes: 1}}")
    launched("dpo", "--config", "own/dpo", "--accelerate", "mine.yaml")


def test_a_file_that_a_shipped_config_names_is_named_by_its_whole_path(launched):
    _, _, _, options = parts(launched("sft", "--config", "book/sft"))
    assert options[2] == "--samples.file"
    assert Path(options[3]).samefile(ROOT / "configs/book/sft_prompts.txt")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpro", "--config", "tiny/grpo"], "there is no recipe 'gpro' (did you mean 'grpo'?)"),
        (
            ["grpo"],
            "train grpo: --config is missing; name a file, or one that ships, such as tiny/grpo",
        ),
        (
            ["tiny/dpo"],
            "tiny/dpo is a config; write its recipe before it: train dpo --config tiny/dpo.",
        ),
        (["distill"], "--config is missing; name a file, or one that ships, such as tiny/opd;"),
        (["grpo", "--config", "tiny/dpo"], "algorithm: dpo is of the recipe dpo; write train dpo."),
        (
            ["sft", "--config", "tiny/sft", "seed=1"],
            "'seed=1' belongs to no option; write --key val",
        ),
        (["grpo", "--config", "tiny/grpoo"], "(did you mean 'tiny/grpo'?); `rlhf-trl configs`"),
        (["grpo", "--config", "tiny/grpo", "--processes", "0"], "--processes is 0; write 1"),
        (["dpo", "--config", "tiny/dpo", "--accelerate", "zerro2"], "(did you mean 'zero2'?)"),
        (["dpo", "--config", "scale/dpo_zero3"], "expects deepspeed; add --accelerate zero1"),
        (
            ["dpo", "--config", "tiny/dpo", "--accelerate", "zero2_offload"],
            "rlhf-trl configs copy accelerate/zero2_offload mine.yaml",
        ),
        (["dpo", "--config", "tiny/dpo", "--max_steps", "1", "--max_steps", "2"], "more than once"),
    ],
)
def test_what_cannot_be_launched_is_told_in_a_sentence(launched, words, sentence):
    with pytest.raises(SystemExit) as stop:
        launched(*words)
    assert str(stop.value).startswith("error: ") and sentence in str(stop.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_processes: two", 'num_processes is "two"; write 1 or more.'),
        ("num_processes: '2'", 'num_processes is "2"; write 1 or more.'),
        ("num_processes: 0", "num_processes is 0; write 1 or more."),
        (
            "num_process: 2",
            "num_process is not a key of accelerate's (did you mean 'num_processes'",
        ),
        ("distributed_type: multi-gpu", "MULTI_NEURON (did you mean 'MULTI_GPU'?)."),
        ("distributed_type: null", "distributed_type is null; write one of NO, MULTI_CPU, "),
        ("mixed_precision: bf61", "write one of no, fp8, fp16, bf16 (did you mean 'bf16'?)."),
        ("mixed_precision: no", 'mixed_precision is false; write "no", with the quotes.'),
        ("gpu_ids: 0", 'gpu_ids is 0; write "0", with the quotes.'),
        ("use_cpu: cpu", 'use_cpu is "cpu"; write true or false.'),
        ("compute_environment: CLOUD", "write one of LOCAL_MACHINE, AMAZON_SAGEMAKER"),
        ("a: b: c", ", line 2: mapping values are not allowed here."),
    ],
)
def test_an_accelerate_file_that_would_end_in_a_traceback_is_refused(launched, text, sentence):
    usual = "" if text.startswith("distributed_type") else "distributed_type: MULTI_GPU"
    Path("mine.yaml").write_text(f"{usual}\n{text}\n")
    with pytest.raises(SystemExit) as stop:
        launched("dpo", "--config", "tiny/dpo", "--accelerate", "mine.yaml")
    assert str(stop.value).startswith("error: mine.yaml") and sentence in str(stop.value)


@pytest.mark.parametrize(
    "text",
    [
        "{distributed_type: NO, num_processes: many}",  # --processes stands in its place
        "{distributed_type: MULTI_GPU, mixed_precision: BF16, gpu_ids: null, num_processes: 2}",
        "{distributed_type: DEEPSPEED, mixed_precision: null, main_process_port: '0'}",
        "{compute_environment: AMAZON_SAGEMAKER, ec2_instance_type: ml.p3.2xlarge}",
    ],
)
def test_an_accelerate_file_that_accelerate_reads_is_launched_with(launched, text):
    Path("mine.yaml").write_text(text)
    words = ["--config", "tiny/dpo", "--accelerate", "mine.yaml", "--processes", "2"]
    assert parts(launched("dpo", *words))[:2] == (Path("mine.yaml"), 2)


def test_all_accelerate_files_that_ship_are_launched_with():
    for path in (ROOT / "configs/accelerate").glob("*.yaml"):
        check_accelerate_file(path)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_the_exit_code_of_a_launch_is_passed_on(program, code):
    assert launching._run([sys.executable, "-c", program], Path("run")) == code


@pytest.fixture
def running(tmp_path):
    """Return what starts a launcher as `rlhf-trl train` does, and waits until it trains."""
    program = (
        "import pathlib, signal, sys; from rlhf_trl.run.launching import _run; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # ignored in the background
        "sys.exit(_run([sys.executable, '-c', sys.argv[1]], pathlib.Path()))"
    )

    def running(launcher):
        process = subprocess.Popen(
            [sys.executable, "-c", program, launcher],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        until = time.monotonic() + 60
        while not (tmp_path / "began").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        return process

    return running


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_ends_all_processes_which_save_first(running, number, name):
    process = running(LAUNCHER)
    os.killpg(process.pid, number)  # as a terminal does
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    first, *_, before_last, last = printed.splitlines()
    assert first == f"{name}: the run saves and ends; a second one ends it at once"
    assert before_last == "RuntimeError: a launcher of several ends so"
    assert last == (  # what was saved meanwhile is known
        f"interrupted by {name}; checkpoint-7 is kept; --resume_from_checkpoint auto goes on from "
        "there"
    )
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert LAUNCHER.split()[-1] not in left.stdout and "time.sleep(0.4)" not in left.stdout


def test_a_second_signal_ends_processes_at_once_that_have_groups_of_their_own(running):
    launcher = LAUNCHER.replace("program])", "program], start_new_session=True)")
    process = running(launcher.replace("time.sleep(0.4)", "time.sleep(50)"))
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline().startswith("SIGTERM: the run saves and ends; ")
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=20)  # the pipe closes when all have ended
    assert process.returncode == 143
    assert printed.splitlines()[-1].startswith("interrupted at once by SIGTERM; no checkpoint was")


@pytest.mark.promise
@pytest.mark.multiprocess
def test_two_processes_train_a_copied_config_from_another_folder_and_ctrl_c_ends_them(tmp_path):
    run = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}
    command = [sys.executable, "-m", "rlhf_trl.cli"]
    subprocess.run([*command, "configs", "copy", "tiny/grpo", "mine.yaml"], check=True, **run)
    command += ["train", "grpo", "--config", "mine.yaml", "--processes", "2"]
    command += ["--max_steps", "5000", "--disable_tqdm", "true", "--eval_strategy", "no"]
    with (tmp_path / "printed").open("w") as printed:
        how = {"stdout": printed, "stderr": subprocess.STDOUT, "start_new_session": True}
        # as from a terminal: a shell has what it starts in the background ignore the signal
        how["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, **run, **how)
    until = time.monotonic() + 300
    while "step 10 of 5000" not in (tmp_path / "printed").read_text():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    last = (tmp_path / "printed").read_text().splitlines()[-1]
    (kept,) = tmp_path.glob("outputs/grpo/checkpoint-*")
    assert last.startswith(f"interrupted by Ctrl-C; {kept.relative_to(tmp_path)} is kept; --resume")
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "mine.yaml" not in left.stdout
