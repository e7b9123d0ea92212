"""`rlhf-trl runs`: a line for each run, and two runs side by side."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_folders import SEVEN, content, write_run, write_seven

from rlhf_trl.cli import main
from rlhf_trl.output import hold
from rlhf_trl.pipeline.sizes import readable, size_of

ROOT = Path(__file__).parent.parent
OLDER = Path(__file__).parent / "golden" / "older_run"


@pytest.fixture
def runs(tmp_path, monkeypatch, capsys):
    """In an empty folder, return what `rlhf-trl runs` prints."""
    monkeypatch.chdir(tmp_path)

    def runs(*words):
        main(["runs", *words])
        return capsys.readouterr().out

    return runs


def test_each_run_has_a_line_and_all_have_a_total(runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TZ", "UTC")
    write_seven()
    for path in Path("outputs").glob("*/summary.json"):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    head, *lines, empty, total = runs().splitlines()
    assert head.split("  ")[0] == "run" and empty == "" and len(lines) == 7
    sizes, algorithms = {}, []
    for line in lines:
        name, state, algorithm, steps, seed, result, time, size, date = [
            cell.strip() for cell in line.split("  ") if cell.strip()
        ]
        assert (state, steps, seed) == ("finished", "20", "0")
        assert time == "-"  # an earlier version has not measured it
        assert result == "exact match 0.250 -> 0.750"
        assert date.startswith("2023-11-14 22:")
        algorithms.append(algorithm)
        sizes[name] = sum(map(len, content(name).values()))
        assert size == f"{sizes[name]} B" if sizes[name] < 1000 else "1.0 kB"
    assert [*sizes] == [f"outputs/{name}" for name in sorted(SEVEN)]
    assert algorithms == ["dpo", "grpo", "ppo", "rejection_sampling", "reward", "sft", "reward"]
    assert total == f"7 runs, {sum(sizes.values()) / 1000:.1f} kB"


def test_a_run_is_running_while_a_process_holds_it_then_stopped_or_finished(runs):
    write_run("outputs/a")
    write_run("outputs/b")
    Path("outputs/b/summary.json").unlink()
    program = "import sys, pathlib; from rlhf_trl.output import hold; "
    program += "[hold(pathlib.Path(path)) for path in sys.argv[1:]]; print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "outputs/a", "outputs/b"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        process.stdout.readline()
        states = [run["state"] for run in json.loads(runs("--json"))["runs"]]
        assert states == ["running", "running"]
        process.kill()
    assert [run["state"] for run in json.loads(runs("--json"))["runs"]] == ["finished", "stopped"]
    hold(Path("outputs/b"))  # looking has not kept it


def test_a_run_that_has_not_ended_is_told_by_what_it_has_measured(runs):
    write_run("outputs/a")
    for name in ("summary.json", "evaluations/step-000020.json"):
        Path("outputs/a", name).unlink()
    shutil.rmtree("outputs/a/checkpoint-20")
    (run,) = json.loads(runs("--json"))["runs"]
    assert (run["steps"], run["before"], run["after"], run["seed"]) == (10, 0.25, 0.5, 0)
    shutil.rmtree("outputs/a/evaluations")
    (run,) = json.loads(runs("--json"))["runs"]
    assert (run["metric"], run["before"], run["after"]) == (None, None, None)
    assert "  -  " in runs()


def test_older_runs_are_listed(runs):
    shutil.copytree(OLDER, "older")
    listed = json.loads(runs("older", "--json"))["runs"]
    lines = {run["run"]: (run["algorithm"], run["steps"], run["seed"]) for run in listed}
    assert lines == {
        "older/dpo": ("dpo", 2, 0),
        "older/grpo": ("grpo", 2, 0),
        "older/grpo-done": ("grpo", 4, 0),
        "older/reward": ("reward", 2, 0),
        "older/reward-done": ("reward", 4, 0),
    }


def test_two_runs_are_compared_by_config_and_curve(runs):
    write_run("outputs/a")
    sources = {"reward_model": "outputs/a/model"}
    write_run("outputs/b", "ppo", sources)
    Path("outputs/b/evaluations/step-000010.json").unlink()
    assert runs("--compare", "outputs/a", "outputs/b").splitlines() == [
        "outputs/a and outputs/b differ in 2 fields",
        "",
        "field         first  second",
        "algorithm     grpo   ppo",
        "reward_model  unset  outputs/a/model",
        "",
        "eval_exact_match by step",
        "",
        "step  first  second",
        "0     0.25   0.25",
        "10    0.5    -",
        "20    0.75   0.75",
    ]
    compared = json.loads(runs("--compare", "outputs/a", "outputs/b", "--json"))
    assert compared["fields"]["algorithm"] == ["grpo", "ppo"]
    assert compared["points"][1] == [10, 0.5, None]


def test_resumed_runs_are_compared_by_what_they_ended_with(runs):
    first, second = (write_run(f"outputs/{name}") for name in "ab")
    given = yaml.safe_load((first / "config.yaml").read_text())
    given["dataset"]["eval_size"] = 4
    later = {**given, "resume_from_checkpoint": "auto", "learning_rate": 0.001}
    (first / "config-from-step-10.yaml").write_text(yaml.safe_dump(later))
    (first / "config-from-step-5.yaml").write_text(yaml.safe_dump(given))
    moved = {**yaml.safe_load((second / "config.yaml").read_text()), "output_dir": "elsewhere"}
    (second / "config-from-step-10.yaml").write_text(yaml.safe_dump(moved))
    shown = runs("--compare", "outputs/a", "outputs/b").partition("\n\neval_exact_match")[0]
    assert shown.splitlines() == [
        "outputs/a and outputs/b differ in 2 fields",
        "",
        "field              first  second",
        "dataset.eval_size  4      unset",
        "learning_rate      0.001  unset",
        "",
        "outputs/a was resumed after step 5 with dataset.eval_size: unset -> 4",
        "",
        "outputs/a was resumed after step 10 with learning_rate: unset -> 0.001",
    ]
    compared = json.loads(runs("--compare", "outputs/a", "outputs/b", "--json"))
    assert compared["changes"] == [
        {"5": {"dataset.eval_size": ["unset", 4]}, "10": {"learning_rate": ["unset", 0.001]}},
        {},
    ]


def test_curves_of_training_are_compared_where_nothing_was_evaluated(runs):
    for name in "ab":
        write_run(f"outputs/{name}")
        shutil.rmtree(f"outputs/{name}/evaluations")
    log = [{"step": step, "reward": step / 100, "loss": 1} for step in range(1, 101)]
    Path("outputs/a/log.json").write_text(json.dumps(log))
    log = [{"step": 2, "reward": 0.5}, {"step": 3, "train_runtime": 1}]
    Path("outputs/b/log.json").write_text(json.dumps(log))
    out = runs("--compare", "outputs/a", "outputs/b")
    assert out.startswith("outputs/a and outputs/b differ in 0 fields\n\nreward by step\n")
    points = [line.split() for line in out.splitlines()[5:]]
    # of 100 steps every third one, and the last
    assert points[0] == ["1", "0.01", "-"] and points[1] == ["4", "0.04", "-"]
    assert points[-1] == ["100", "1", "-"] and len(points) == 34
    compared = json.loads(runs("--compare", "outputs/a", "outputs/b", "--json"))
    assert compared["points"][1] == [2, 0.02, 0.5] and len(compared["points"]) == 100
    Path("outputs/a/log.json").unlink()
    out = runs("--compare", "outputs/a", "outputs/b")
    assert out.endswith("\n\nno metric was measured in both\n")


def test_only_runs_are_compared(runs):
    write_run("outputs/a")
    with pytest.raises(SystemExit, match="--compare: outputs/a/model is not the folder of a run;"):
        runs("--compare", "outputs/a", "outputs/a/model")


def test_sizes_are_those_of_the_files_and_not_of_what_links_lead_to(tmp_path):
    (tmp_path / "big").write_bytes(bytes(5000))
    (tmp_path / "run" / "inner").mkdir(parents=True)
    (tmp_path / "run" / "inner" / "file").write_bytes(bytes(70))
    (tmp_path / "run" / "link").symlink_to(tmp_path / "big")
    assert size_of(tmp_path / "run") == 70 + len(str(tmp_path / "big"))
    shown = [readable(size) for size in (0, 999, 1000, 12_345, 999_949, 10**9, 5 * 10**15)]
    assert shown == ["0 B", "999 B", "1.0 kB", "12.3 kB", "999.9 kB", "1.0 GB", "5000.0 TB"]


def test_the_command_needs_neither_torch_nor_transformers(tmp_path):
    write_run(tmp_path / "outputs" / "a")
    program = (
        "import sys; from rlhf_trl.cli import main; main(['runs']); main(['runs', '--tree']); "
        "print({'torch', 'transformers', 'trl'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("\nset()\n")
