"""The race: trains, tabulates, draws, and goes on where it was interrupted."""

import json
import math
from pathlib import Path

import pytest

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.run import race

ROOT = Path(__file__).parent.parent


def finished(folder, exact, reward):
    """Write what a run leaves behind."""
    folder.mkdir(parents=True)
    before, after = {"eval_exact_match": 0.4}, {"eval_exact_match": exact}
    summary = {"before": before, "after": after, "train_cpu_seconds": 20.0}
    log = [{"step": 0, "eval_exact_match": 0.4}]
    log += [{"step": n, "reward": reward * n, "clip_ratio/region_mean": 0.01} for n in range(1, 13)]
    log += [{"step": 12, "eval_exact_match": exact}]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "log.json").write_text(json.dumps(log))


def test_the_table_is_mean_and_spread_over_seeds(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for seed, exact in enumerate([0.9, 0.8, 0.7]):
        finished(tmp_path / "grpo" / f"seed-{seed}", exact, reward=0.1)
    main(["race", "--algorithms", "grpo", "--output_dir", str(tmp_path)])  # nothing left to train
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| grpo"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "0.800 ± 0.100"
    # the mean of .1 n over the last ten of twelve steps
    assert math.isclose(float(cells[3].split()[0]), 0.1 * (3 + 12) / 2, abs_tol=1e-3)
    assert cells[4] == "0.010 ± 0.000" and cells[5] == "-"
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "race.json").read_text())
    assert results["grpo"][1]["curve"] == [[0, 0.4], [12, 0.8]]


@pytest.mark.slow
def test_ppo_races_through_its_own_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    small = ["--dataset.size", "40", "--dataset.eval_size", "8", "--max_steps", "4"]
    batch = ["--per_device_train_batch_size", "8", "--num_generations", "4"]
    text = race.race(["ppo"], 1, tmp_path, extra=[*small, *batch])
    assert [line.split()[1] for line in text.splitlines()[2:]] == ["ppo"]
    folder = tmp_path / "ppo" / "seed-0"
    assert (folder / "value_model").exists()
    assert json.loads((folder / "summary.json").read_text())["name"] == "ppo (chapter)"


@pytest.mark.slow
def test_a_race_trains_what_is_missing_and_keeps_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    finished(tmp_path / "grpo" / "seed-0", 0.9, reward=0.1)
    interrupted = tmp_path / "grpo" / ".seed-1.part"
    interrupted.mkdir()
    (interrupted / "half").write_text("")
    small = ["--dataset.size", "40", "--dataset.eval_size", "8", "--max_steps", "2"]
    batch = ["--num_generations", "4", "--per_device_train_batch_size", "8"]
    race.race(["grpo"], 2, tmp_path, extra=small + batch)
    trained = json.loads((tmp_path / "grpo" / "seed-1" / "summary.json").read_text())
    assert (trained["steps"], trained["name"]) == (2, "grpo (chapter)")
    assert not (tmp_path / "grpo" / "seed-1" / "value_model").exists()
    kept = json.loads((tmp_path / "grpo" / "seed-0" / "summary.json").read_text())
    assert kept["after"] == {"eval_exact_match": 0.9}
    assert not interrupted.exists()


def test_runs_with_other_options_are_not_mixed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    finished(tmp_path / "grpo" / "seed-0", 0.9, reward=0.1)
    race.race(["grpo"], 1, tmp_path, extra=["--max_steps", "5"])
    with pytest.raises(InputError, match="runs with other options"):
        race.race(["grpo"], 1, tmp_path, extra=["--max_steps", "6"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--algorithms", "grpo,grop"], "did you mean 'grpo'?"),
        (["--algorithms", "grpo", "--config", "no.yaml"], "no.yaml is not a file"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        main(["race", *words, "--output_dir", str(tmp_path)])
    assert part in str(stop.value.code)


@pytest.mark.parametrize(
    ("algorithm", "recipe"),
    [
        ("grpo", "grpo"),
        ("ppo", "ppo"),
        ("simpo", "dpo"),
        ("kto", "kto"),
        ("orpo", "orpo"),
        (None, "sft"),
        ("reward", "reward"),
        ("kwise", "reward"),
        ("orm", "orm"),
        ("prm", "prm"),
    ],
)
def test_every_algorithm_has_its_recipe(algorithm, recipe):
    assert race.recipe_of(algorithm) == f"recipes/{recipe}.py"
    assert (ROOT / race.recipe_of(algorithm)).is_file()


def test_a_race_of_preferences_shows_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, pairs in (
        ("dpo", {"eval_rewards/margins": 1, "eval_rewards/accuracies": 0.75}),
        ("sft_chosen", {}),
    ):
        finished(tmp_path / name / "seed-0", 0.9, reward=0.1)
        summary = json.loads((tmp_path / name / "seed-0" / "summary.json").read_text())
        summary["after"] |= pairs
        (tmp_path / name / "seed-0" / "summary.json").write_text(json.dumps(summary))
    lines = race.race(["dpo", "sft_chosen"], 1, tmp_path).splitlines()
    assert lines[0] == (
        "| algorithm | exact match | sampled | pair accuracy | log p chosen | log p rejected | "
        "CPU s |"
    )
    assert lines[2].split(" | ")[:4] == ["| dpo", "0.900", "-", "0.750"]
    assert lines[3].split(" | ")[:4] == ["| sft_chosen", "0.900", "-", "-"]


def test_a_race_of_reward_models_shows_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, metric in (("orm", "eval_auc"), ("prm", "eval_first_error")):
        folder = tmp_path / name / "seed-0"
        finished(folder, 0.9, reward=0.1)
        for file in ("summary.json", "log.json"):
            text = (folder / file).read_text().replace("eval_exact_match", "eval_best_of_n")
            (folder / file).write_text(text)
        summary = json.loads((folder / "summary.json").read_text())
        summary["after"][metric] = 0.75
        (folder / "summary.json").write_text(json.dumps(summary))
    lines = race.race(["orm", "prm"], 1, tmp_path).splitlines()
    assert lines[0] == "| algorithm | first error | AUC | best of n | CPU s |"
    assert lines[2:] == ["| orm | - | 0.750 | 0.900 | 20.0 |", "| prm | 0.750 | - | 0.900 | 20.0 |"]
    results = json.loads((tmp_path / "race.json").read_text())
    assert results["prm"][0]["curve"] == [[0, 0.4], [12, 0.9]]
