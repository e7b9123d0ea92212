"""Runs of the recipes, in this process or through accelerate, without any network."""

import gc
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

# Before any library reads them.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from two_processes import on_two_processes

from rlhf_trl.run.options import join_options

ROOT = Path(__file__).parent.parent

LONG = (
    *("test_zero", "test_compare", "test_scripts", "test_recipes", "test_gpu_report"),
    *("test_policy_gradient_processes", "test_direct_alignment_processes", "test_ppo_processes"),
)


def pytest_collection_modifyitems(items):
    """Begin with the files that take long, so that none is left for one worker at the end."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Leave what has been imported out of garbage collections, of which each run makes several."""
    gc.collect()
    gc.freeze()


@contextmanager
def same_environment():
    """Undo whatever is done to the environment: a run names its project in WANDB_PROJECT."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_environment():
    with same_environment():
        yield


def cause(output, limit=6000):
    """Return a failed launch's output from its cause on, which launchers bury in their own.

    That is the first line that begins with `error:` or a traceback, whichever process wrote it
    (a launcher may put `[rank0]: ` before it). Of what is longer, the middle is left out.
    """
    lines = output.splitlines(keepends=True)
    signs = ("error: ", "Traceback (most recent call last)")
    starts = (n for n, line in enumerate(lines) if line.rpartition("]: ")[2].startswith(signs))
    found = "".join(lines[next(starts, 0) :])
    if len(found) <= limit:
        return found
    return f"{found[: limit // 2]}\n[...]\n{found[-limit // 2 :]}"


@pytest.fixture
def run(monkeypatch, tmp_path, capfd):
    """Run `recipes/NAME.py --config configs/tiny/CONFIG.yaml ...` here; return (folder, output)."""

    def run(name, config, *words, folder=None):
        folder = folder or tmp_path / "out"
        monkeypatch.chdir(ROOT)
        path = Path("configs/tiny") / f"{config}.yaml"  # an absolute path stays what it is
        argv = ["--config", str(path), "--output_dir", str(folder)]
        options = join_options([*argv, "--disable_tqdm"], [*map(str, words)])
        monkeypatch.setattr(sys, "argv", [name, *options])
        capfd.readouterr()
        runpy.run_path(str(ROOT / "recipes" / f"{name}.py"), run_name="__main__")
        return folder, capfd.readouterr().out

    return run


@pytest.fixture
def refused(run):
    """Return the sentence with which a run ends that must not succeed."""

    def refused(name, config, *words, **kwargs):
        with pytest.raises(SystemExit) as stop:
            run(name, config, *words, **kwargs)
        sentence = str(stop.value.code)
        assert sentence.startswith("error: ") and "\n" not in sentence
        return sentence

    return refused


@pytest.fixture(scope="session")
def own_model(tmp_path_factory):
    """The folder of a small model with its own tokenizer and chat template: see own_model.py."""
    from own_model import make_model

    folder = tmp_path_factory.mktemp("own") / "model"
    make_model(folder)
    return folder


@pytest.fixture
def launch(tmp_path):
    """Run a recipe through `accelerate launch`; return the finished process, output as text."""

    def launch(accelerate, recipe, *words, env=None):
        options = join_options([*words, "--disable_tqdm"])
        command = ["-m", "accelerate.commands.launch", *accelerate, f"recipes/{recipe}.py"]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
        return subprocess.run(
            [sys.executable, *command, *options],
            cwd=ROOT,
            env={**clean, "PATH": path, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )

    return launch


@pytest.fixture
def stand_in(monkeypatch):
    """Let commands that do several runs start a function in place of the recipes.

    The function takes the run's folder and its options. Returned is the list of both, by start.
    """

    def stand_in(leave):
        started = []
        start_process = subprocess.Popen

        def start(command, **options_of_process):
            if "--config_file" not in command:  # no recipe is launched
                return start_process(command, **options_of_process)
            words = command[command.index("--config_file") + 3 :]
            options = dict(zip(words[:-1:2], words[1:-1:2], strict=True))
            folder = Path(options["--output_dir"])
            started.append((str(folder), options))
            config = f"output_dir: {folder}\nseed: {options['--seed']}\n"
            (folder / "config.yaml").write_text(config)
            (folder / "model").mkdir()
            (folder / "learning_curve.png").write_text("")
            leave(folder, options)
            return start_process(["echo", "the last line"], **options_of_process)

        monkeypatch.setattr("rlhf_trl.run.jobs.subprocess.Popen", start)
        return started

    return stand_in


@pytest.fixture(scope="module")
def two_processes(request, tmp_path_factory):
    """The folder in which the script beside a test module, run on two processes, left its results.

    The script of `test_NAME.py` is `NAME.py`; it takes the folder. `ACCELERATE` in the test module
    names a config to launch it with, `TIMEOUT` more than ten minutes.
    """
    folder = tmp_path_factory.mktemp("two")
    script = f"{request.module.__name__.removeprefix('test_')}.py"
    timeout = getattr(request.module, "TIMEOUT", 600)
    if (config := getattr(request.module, "ACCELERATE", None)) is None:
        ended, printed = on_two_processes(script, folder, timeout)
        assert ended, cause(printed)
        return folder
    command = [
        *[sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"],
        *["--config_file", f"configs/accelerate/{config}.yaml", f"tests/{script}", str(folder)],
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]]),
        "ACCELERATE_USE_CPU": "false",  # true would turn ZeRO into DDP
    }
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, cause(done.stderr)
    return folder
