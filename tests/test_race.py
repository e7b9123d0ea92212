"""The race: trains, tabulates, draws, and goes on where it was interrupted; from any folder."""

import json
import math
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from rlhf_trl.cli import main
from rlhf_trl.data.gym import GymData, GymTasks, Spec
from rlhf_trl.data.prompt_keys import fingerprint, prompt_key
from rlhf_trl.errors import InputError
from rlhf_trl.run import folders, race
from rlhf_trl.run.config import read_config
from rlhf_trl.run.folders import home
from rlhf_trl.run.stages import stage_of

SPELL = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
SEEN = {"seen": 1536, "seen_kind": "completions"}


def finished(folder, exact, reward=0.1, conditions=None, **more):
    """Write what a run leaves behind, under which conditions, and more of the last evaluation."""
    before, after = {"eval_exact_match": 0.4}, {"eval_exact_match": exact, **more}
    summary = {"before": before, "after": after, "train_cpu_seconds": 20.0, "model_step": 12}
    summary |= {"questions": 256, "questions_fingerprint": "of these", **SEEN, **(conditions or {})}
    log = [{"step": 0, "eval_exact_match": 0.4}]
    log += [{"step": n, "reward": reward * n, "clip_ratio/region_mean": 0.01} for n in range(1, 13)]
    log += [{"step": 12, "eval_exact_match": exact}]
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "log.json").write_text(json.dumps(log))


def test_the_table_is_mean_and_spread_over_seeds(tmp_path, monkeypatch, capsys, stand_in):
    monkeypatch.chdir(tmp_path)
    started = stand_in(lambda folder, _: finished(folder, 0.9 - int(folder.name[-1]) / 10))
    monkeypatch.setenv("COLUMNS", "120")
    command = ["race", "--algorithms", "grpo"]
    main(command)
    capsys.readouterr()
    main(command)  # nothing left to train
    assert [folder[-6:] for folder, _ in started] == ["seed-0", "seed-1", "seed-2"]
    assert [options["--seed"] for _, options in started] == ["0", "1", "2"]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("grpo"))
    cells = re.split("  +", row)
    assert cells[1] == "0.800 ± 0.100"
    # the mean of .1 n over the last ten of twelve steps
    assert math.isclose(float(cells[3].split()[0]), 0.1 * (3 + 12) / 2, abs_tol=1e-3)
    assert cells[4] == "0.010 ± 0.000" and cells[5] == "-"
    done = tmp_path / "outputs" / "race"
    assert (done / "race.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((done / "race.json").read_text())
    assert results["grpo"][1]["curve"] == [[0, 0.4], [12, 0.8]]


@pytest.mark.slow
@pytest.mark.promise
def test_ppo_races_through_its_own_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["--dataset.size", "40", "--dataset.eval_size", "8", "--max_steps", "4"]
    batch = ["--per_device_train_batch_size", "8", "--num_generations", "4"]
    lines = race.race(["ppo"], 1, tmp_path, extra=[*small, *batch])
    assert [line["algorithm"] for line in lines] == ["ppo"]
    folder = tmp_path / "ppo" / "seed-0"
    assert (folder / "value_model").exists()
    assert json.loads((folder / "summary.json").read_text())["name"] == "ppo (chapter)"


@pytest.mark.slow
def test_a_race_trains_what_is_missing_and_keeps_what_is_there(tmp_path, monkeypatch, stand_in):
    monkeypatch.chdir(tmp_path)
    small = ["--dataset.size", "40", "--dataset.eval_size", "8", "--max_steps", "2"]
    batch = ["--num_generations", "4", "--per_device_train_batch_size", "8"]
    start = subprocess.Popen
    words = GymTasks(GymData(specs=[SPELL], size=1, eval_size=8)).held_out
    questions = fingerprint(prompt_key(row["prompt"]) for row in words)
    conditions = {"questions": 8, "questions_fingerprint": questions}
    stand_in(lambda folder, _: finished(folder, 0.9, conditions=conditions))
    race.race(["grpo"], 1, tmp_path, extra=small + batch)
    monkeypatch.setattr(subprocess, "Popen", start)
    interrupted = tmp_path / "grpo" / "seed-1"  # before its first checkpoint
    interrupted.mkdir()
    (interrupted / "asked.json").write_text("{}")
    (interrupted / "output.txt").write_text("what it had printed\n")
    race.race(["grpo"], 2, tmp_path, extra=small + batch)
    trained = json.loads((tmp_path / "grpo" / "seed-1" / "summary.json").read_text())
    assert (trained["steps"], trained["name"]) == (2, "grpo (chapter)")
    assert not (tmp_path / "grpo" / "seed-1" / "value_model").exists()
    kept = json.loads((tmp_path / "grpo" / "seed-0" / "summary.json").read_text())
    assert kept["after"] == {"eval_exact_match": 0.9}
    assert (interrupted / "output.txt").read_text().startswith("what it had printed\n")
    config = read_config(tmp_path / "grpo" / "seed-1" / "config.yaml")
    assert config["output_dir"] == str(tmp_path / "grpo" / "seed-1")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config, and the base that it extends."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("learning_rate: 1.0e-3\nmax_steps: 4\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nmax_steps: 8\n")
    return tmp_path / "mine.yaml"


def test_runs_with_other_options_are_not_mixed(tmp_path, config, stand_in):
    started = stand_in(lambda folder, _: finished(folder, 0.9))
    folder, options = tmp_path / "race", {"config": str(config)}
    race.race(["grpo"], 1, folder, **options, extra=["--max_steps", "5"])
    for change in ({"extra": ["--max_steps", "6"]}, {}, {"iterations": 2}):
        with pytest.raises(InputError, match=r"grpo/seed-0 holds a run with other settings \(opt"):
            race.race(["grpo"], 2, folder, **options, **change)
    assert len(started) == 1
    # others may stand beside it
    race.race(["gspo"], 1, folder, **options, extra=["--max_steps", "6"])


@pytest.mark.parametrize(
    ("iterations", "extra"), [(1, []), (2, []), (1, ["--num_iterations", "3"])]
)
def test_updates_per_generation_are_those_of_the_race(tmp_path, stand_in, iterations, extra):
    started = stand_in(lambda folder, _: finished(folder, 0.9))
    race.race(["gspo", "grpo"], 1, tmp_path / "race", iterations=iterations, extra=extra)
    wanted = extra[-1] if extra else str(iterations)
    (_, gspo), (_, grpo) = started
    assert gspo["--num_iterations"] == wanted  # its config has 2
    assert grpo.get("--num_iterations", "1") == wanted


def test_a_run_is_not_reused_after_its_config_was_edited(tmp_path, config, stand_in):
    started = stand_in(lambda folder, _: finished(folder, 0.9))
    folder, options = tmp_path / "race", {"config": str(config)}
    race.race(["grpo"], 1, folder, **options)
    config.with_name("base.yaml").write_text("learning_rate: 1.0e-3\nmax_steps: 5\n")
    race.race(["grpo"], 1, folder, **options)  # what the config has itself counts
    assert len(started) == 1
    config.with_name("base.yaml").write_text("learning_rate: 2.0e-3\n")
    with pytest.raises(InputError, match=r"other settings \(learning_rate\)"):
        race.race(["grpo"], 2, folder, **options)
    assert len(started) == 1
    (folder / "grpo" / "seed-0" / "asked.json").unlink()
    with pytest.raises(InputError, match=r"other settings \(unknown ones\)"):
        race.race(["grpo"], 2, folder, **options)


def test_a_config_edited_during_the_race_is_found(tmp_path, config, stand_in):
    def leave(folder, options):
        finished(folder, 0.9)
        config.write_text("extends: base.yaml\nmax_steps: 9\n")

    stand_in(leave)
    with pytest.raises(InputError, match=r"seed-0 holds a run with other settings \(max_steps\)"):
        race.race(["grpo"], 2, tmp_path / "race", config=str(config))
    assert not (tmp_path / "race" / "race.json").exists()


def test_a_finished_run_names_its_own_folder(tmp_path, config, stand_in):
    stand_in(lambda folder, _: finished(folder, 0.9))
    race.race(["grpo"], 2, tmp_path / "race", config=str(config))
    for seed in (0, 1):
        folder = tmp_path / "race" / "grpo" / f"seed-{seed}"
        assert read_config(folder / "config.yaml") == {"output_dir": str(folder), "seed": seed}


def test_final_numbers_are_those_of_the_model_that_is_kept(tmp_path, config, stand_in):
    def leave(folder, options):
        finished(folder, 0.9)
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "model_step": 3}))

    stand_in(leave)
    race.race(["grpo"], 1, tmp_path / "race", config=str(config))
    results = json.loads((tmp_path / "race" / "race.json").read_text())
    assert results["grpo"][0]["reward"] == pytest.approx(0.1 * (1 + 2 + 3) / 3)


def test_a_band_is_drawn_where_all_seeds_were_measured():
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    race.draw_band(axis, [[[0, 0.2], [5, 0.4], [9, 0.6]], [[0, 0.4], [9, 1.0]]], "orm")
    (line,) = axis.lines
    assert line.get_xdata().tolist() == [0, 9]
    assert line.get_ydata().tolist() == pytest.approx([0.3, 0.8])


def test_each_algorithm_has_a_panel_of_its_own_before_the_others(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    monkeypatch.setattr(race, "write_whole", lambda path, write: write(path))
    curves = {name: [[0, 0.5], [1, 0.9 + n / 100]] for n, name in enumerate("abcdef")}
    results = {name: [{"curve": curve}] for name, curve in curves.items()}
    race.draw(tmp_path / "race.png", results)
    panels = {axis.get_title(): axis for axis in drawn[0].axes if axis.axison}
    assert [*panels] == [*"abcdef"]
    for n, (name, axis) in enumerate(panels.items()):
        assert sorted(line.get_label() for line in axis.lines) == [*"abcdef"]
        colored = [line for line in axis.lines if line.get_color() != "lightgray"]
        assert [line.get_label() for line in colored] == [name] == [axis.lines[-1].get_label()]
        assert colored[0].get_ydata().tolist() == pytest.approx([0.5, 0.9 + n / 100])
        assert all(step == int(step) for step in axis.get_xticks())


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--algorithms", "grpo,grop"], "did you mean 'grpo'?"),
        (["--algorithms", "grpo", "--config", "no.yaml"], "grpo: no.yaml is not a file; name a"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(tmp_path)
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
        ("reward", "reward"),
        ("kwise", "reward"),
        ("orm", "orm"),
        ("prm", "prm"),
        ("opd", "distill"),
        ("sdpo", "distill"),
    ],
)
def test_every_algorithm_has_its_recipe(algorithm, recipe):
    stage = stage_of(algorithm)
    assert stage.script == f"recipes/{recipe}.py"
    assert (home() / stage.script).is_file()


def test_a_wheel_holds_recipes_and_configs_and_an_editable_install_has_them_beside(tmp_path):
    assert home() == Path(__file__).parent.parent
    module = tmp_path / "rlhf_trl" / "run" / "folders.py"
    module.parent.mkdir(parents=True)
    shutil.copy(folders.__file__, module)
    found = runpy.run_path(str(module))["home"]
    assert found() == tmp_path
    (tmp_path / "rlhf_trl" / "recipes").mkdir()
    assert found() == tmp_path / "rlhf_trl"
    listed = tomllib.loads((home() / "pyproject.toml").read_text())["tool"]["setuptools"]
    there = {path.parent for path in (home() / "rlhf_trl").rglob("__init__.py")}
    packages = {".".join(path.relative_to(home()).parts) for path in there}
    assert set(listed["packages"]) == packages | set(listed["package-dir"])


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ([], "; num_iterations is 2 (1 with --on_policy)"),
        (["--on_policy"], "; num_iterations is 1 (2 without --on_policy)"),
        (["--num_iterations", "3"], ""),
    ],
)
def test_a_race_says_what_its_columns_are(
    tmp_path, monkeypatch, capsys, stand_in, options, updates
):
    monkeypatch.chdir(tmp_path)
    stand_in(lambda folder, _: finished(folder, 0.9))
    main(["race", "--algorithms", "grpo", "--seeds", "1", *options])
    legend = (
        "exact match: share of right greedy answers to held-out questions; "
        "start: exact match before training (reward models: best of n); "
        "reward: mean of the training completions, last 10 logged steps; "
        "clipped: share of ratios outside the clip range, all of training; "
        f"seen: what training learned from{updates}"
    )
    below = [legend, "", "race.md, race.json and race.png are in outputs/race"]
    assert capsys.readouterr().out.splitlines()[-3:] == below
    assert Path("outputs/race/race.md").read_text().endswith(f" |\n\n{legend}\n")


def test_a_race_of_preferences_shows_pairs(tmp_path, monkeypatch, stand_in):
    monkeypatch.chdir(tmp_path)
    pairs = {"dpo": {"eval_rewards/margins": 1, "eval_pair_accuracy": 0.75}, "sft_chosen": {}}
    stand_in(lambda folder, _: finished(folder, 0.9, **pairs[folder.parent.name]))
    race.race(["dpo", "sft_chosen"], 1, tmp_path)
    lines = (tmp_path / "race.md").read_text().splitlines()
    assert lines[0] == (
        "| algorithm | exact match | sampled | pair accuracy | log p chosen | log p rejected | "
        "start | questions | seen | CPU s |"
    )
    assert lines[2].split(" | ")[:4] == ["| dpo", "0.900", "-", "0.750"]
    assert lines[3].split(" | ")[:4] == ["| sft_chosen", "0.900", "-", "-"]


def test_a_race_of_reward_models_shows_what_was_measured(tmp_path, monkeypatch, stand_in):
    monkeypatch.chdir(tmp_path)
    metrics = {"orm": {"eval_auc": 0.75}, "prm": {"eval_first_error": 0.75}}

    def leave(folder, options):
        finished(folder, 0.9, **metrics[folder.parent.name])
        for file in (folder / "summary.json", folder / "log.json"):
            file.write_text(file.read_text().replace("eval_exact_match", "eval_best_of_n"))

    stand_in(leave)
    race.race(["orm", "prm"], 1, tmp_path)
    lines = (tmp_path / "race.md").read_text().splitlines()
    assert lines[0] == (
        "| algorithm | first error | AUC | best of n | start | questions | seen | CPU s |"
    )
    end = "0.900 | 0.400 | 256 | 1536 completions | 20.0 |"
    assert lines[2:4] == [f"| orm | - | 0.750 | {end}", f"| prm | 0.750 | - | {end}"]
    results = json.loads((tmp_path / "race.json").read_text())
    assert results["prm"][0]["curve"] == [[0, 0.4], [12, 0.9]]


def test_what_a_run_started_from_and_has_seen_stands_beside_its_result(tmp_path, stand_in):
    seen = {"dpo": (6356, "pairs"), "sft_chosen": (6400, "answers")}

    def leave(folder, options):
        number, kind = seen[folder.parent.name]
        conditions = {"questions": 512, "seen": number, "seen_kind": kind}
        finished(folder, 0.9, conditions=conditions)

    stand_in(leave)
    lines = race.race(["dpo", "sft_chosen"], 2, tmp_path)
    assert [(line["start"], line["questions"], line["seen"]) for line in lines] == [
        ("0.400 ± 0.000", "512", "6356 pairs"),
        ("0.400 ± 0.000", "512", "6400 answers"),
    ]


@pytest.mark.parametrize(
    ("algorithms", "extra", "told"),
    [
        ("grpo,dpo", [], "dataset.eval_size is 256 for grpo and 512 for dpo; runs that are"),
        ("grpo,dpo", [], "cannot be ranked, so add --dataset.eval_size 256, or race them apart"),
        ("dpo,orpo,grpo", [], "dataset.eval_size is 512 for dpo and 256 for grpo"),
        ("grpo,grpo_chain_sum", ["--dataset.eval_size=256"], "dataset.specs is "),
    ],
)
def test_other_questions_are_refused_before_anything_is_trained(
    tmp_path, stand_in, algorithms, extra, told
):
    started = stand_in(lambda folder, _: finished(folder, 0.9))
    with pytest.raises(InputError) as stop:
        race.race(algorithms.split(","), 1, tmp_path, extra=extra)
    assert told in str(stop.value) and "\n" not in str(stop.value)
    assert not started
    if "specs" not in told:  # what it tells to add
        race.race(algorithms.split(","), 1, tmp_path, extra=["--dataset.eval_size", "256"])
        assert len(started) == len(algorithms.split(","))


def test_runs_tested_on_other_questions_of_a_file_are_not_ranked(tmp_path, config, stand_in):
    config.write_text("dataset: {source: path, path: mine.jsonl, eval_size: 9}\n")

    def leave(folder, options):
        finished(folder, 0.9, conditions={"questions_fingerprint": folder.parent.name})

    stand_in(leave)
    told = r"grpo/seed-0 was tested on 256 questions and gspo/seed-0 on others \(256\), so that"
    with pytest.raises(InputError, match=told):
        race.race(["grpo", "gspo"], 1, tmp_path / "race", config=str(config))
    assert not (tmp_path / "race" / "race.md").exists()


def test_a_run_that_does_not_say_what_it_was_tested_on_is_refused(tmp_path, config, stand_in):
    stand_in(lambda folder, _: finished(folder, 0.9))
    race.race(["grpo"], 1, tmp_path / "race", config=str(config))
    path = tmp_path / "race" / "grpo" / "seed-0" / "summary.json"
    summary = json.loads(path.read_text())
    del summary["questions_fingerprint"]
    path.write_text(json.dumps(summary))
    with pytest.raises(InputError, match=r"seed-0 holds a run of an older version, whose summary"):
        race.race(["grpo"], 1, tmp_path / "race", config=str(config))


@pytest.mark.parametrize("words", [[], ["--traceback"]])
def test_a_run_that_fails_in_a_race_is_shown_whole_with_traceback(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    printed = "KeyError: 'deep'\\nerror: the key is wrong.\\n"
    fail = ["sh", "-c", f'printf "{printed}"; exit 1']
    start = subprocess.Popen
    monkeypatch.setattr(
        "rlhf_trl.run.jobs.subprocess.Popen", lambda _, **options: start(fail, **options)
    )
    with pytest.raises(SystemExit, match=r"^error: .* failed: error: the key is wrong"):
        main(["race", "--algorithms", "grpo", "--seeds", "1", *words])
    assert ("KeyError: 'deep'" in capsys.readouterr().err) == bool(words)
