"""What was made from what: `rlhf-trl runs --tree`."""

import json
import shutil
from pathlib import Path

import pytest
from run_folders import config_of, sha256, write_model, write_run, write_seven

from rlhf_trl.cli import main
from rlhf_trl.pipeline.lineage import Run, runs_in

OLDER = Path(__file__).parent / "golden" / "older_run"


@pytest.fixture
def tree(tmp_path, monkeypatch, capsys):
    """In an empty folder, return what `rlhf-trl runs --tree` draws."""
    monkeypatch.chdir(tmp_path)

    def tree(*words):
        main(["runs", "--tree", *words])
        return capsys.readouterr().out

    return tree


def digest(name):
    return sha256(name)[:12]


def test_seven_runs_stand_below_what_they_were_made_from(tree):
    write_seven()
    reward, weak, sft, rejection, dpo, ppo, grpo = [
        digest(f"outputs/{name}")
        for name in ("reward", "weak", "sft", "rejection", "dpo", "ppo", "grpo")
    ]
    assert tree() == (
        f"outputs/reward  reward from tiny, {reward}\n"
        f"    outputs/ppo  ppo from tiny, {ppo}  (reward_model)\n"
        f"    outputs/rejection  rejection_sampling from tiny, {rejection}  (reward_model)\n"
        f"outputs/sft  sft from tiny, {sft}\n"
        f"    outputs/dpo  dpo, {dpo}  (dataset.sampled_from)\n"
        f"    outputs/dpo  dpo, {dpo}  (model_name_or_path)\n"
        f"    outputs/grpo  grpo, {grpo}  (model_name_or_path)\n"
        f"outputs/weak  reward from tiny, {weak}\n"
        f"    outputs/grpo  grpo, {grpo}  (reward_model)\n"
    )


def test_runs_are_drawn_below_those_below_others_once(tree):
    write_run("outputs/a")
    write_run("outputs/b", sources={"model_name_or_path": "outputs/a/checkpoint-10"})
    write_run("outputs/c", sources={"model_name_or_path": "outputs/b/model"})
    write_run("outputs/z")
    sources = {"model_name_or_path": "outputs/b/model", "reward_model": "outputs/z/model"}
    write_run("outputs/d", "ppo", sources)
    write_run("outputs/e", sources={"teacher_models": "outputs/d/model"})
    lines = [line.partition(",")[0] for line in tree().splitlines()]
    assert lines == [
        "outputs/a  grpo from tiny",
        "    outputs/b  grpo",
        "        outputs/c  grpo",
        "        outputs/d  ppo",
        "            outputs/e  grpo from tiny",
        "outputs/z  grpo from tiny",
        "    outputs/d  ppo",
    ]
    assert "(model_name_or_path outputs/a/checkpoint-10)" in tree()


def test_a_reward_model_that_was_trained_anew_is_shown_as_changed(tree):
    write_seven()
    shutil.rmtree("outputs/reward")
    write_run("outputs/reward", "reward", weights="another seed")
    drawn = tree()
    assert f"outputs/reward  reward from tiny, {digest('another seed')}\n" in drawn
    assert f"{digest('outputs/ppo')}  (reward_model, changed since)\n" in drawn
    assert f"{digest('outputs/rejection')}  (reward_model, changed since)\n" in drawn
    assert drawn.count("changed since") == 2  # of all the others nothing has changed


def test_a_model_is_found_by_its_hash_where_its_path_is_gone_or_another(tree):
    write_seven()
    shutil.move("outputs/weak", "outputs/archive/weak")
    assert (
        f"outputs/archive/weak  reward from tiny, {digest('outputs/weak')}\n"
        f"    outputs/grpo  grpo, {digest('outputs/grpo')}  (reward_model outputs/weak/model, gone "
        "since)\n"
    ) in tree()
    write_run("outputs/weak", "reward", weights="another seed")
    assert (
        f"outputs/archive/weak  reward from tiny, {digest('outputs/weak')}\n"
        f"    outputs/grpo  grpo, {digest('outputs/grpo')}  (reward_model outputs/weak/model, "
        "changed since)\n"
    ) in tree()
    shutil.rmtree("outputs/archive")
    shutil.rmtree("outputs/weak")
    assert (
        f"outputs/weak/model\n    outputs/grpo  grpo, {digest('outputs/grpo')}  (reward_model, "
        "gone since)\n"
    ) in tree()


def test_programs_get_paths_and_hashes(tree):
    write_seven()
    Path("outputs/sft/model/model.safetensors").write_text("edited by hand")
    entries = {entry["run"]: entry for entry in json.loads(tree("--json"))}
    assert entries["outputs/sft"] == {
        "run": "outputs/sft",
        "algorithm": "sft",
        "start": "tiny",
        "model_sha256": sha256("outputs/sft"),  # of what it left
        "made_from": [],
    }
    assert entries["outputs/grpo"]["made_from"] == [
        {
            "role": "model_name_or_path",
            "path": "outputs/sft/model",
            "sha256": sha256("outputs/sft"),
            "now": "changed",
            # the summary there names the weights that grpo was made from
            "run": "outputs/sft",
        },
        {
            "role": "reward_model",
            "path": "outputs/weak/model",
            "sha256": sha256("outputs/weak"),
            "now": "unchanged",
            "run": "outputs/weak",
        },
    ]


def test_paths_are_found_from_any_folder(tree, tmp_path, monkeypatch):
    write_seven()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    drawn = tree("../outputs")
    assert "../outputs/reward  reward" in drawn and "since" not in drawn
    assert drawn.count("\n    ") == 6


def test_a_run_of_an_older_version_is_known_by_its_config(tree):
    """Without hashes, so whether a model has changed is not known; a folder's absence is."""
    for name in ("grpo-done", "reward-done", "start"):
        shutil.copytree(OLDER / name, name)
    (drawn,) = [line for line in tree(".").splitlines() if "grpo-done" in line]
    assert drawn == "    grpo-done  grpo  (model_name_or_path)"
    shutil.rmtree("start")
    # it is no longer told from the name of a model on the hub
    assert "grpo-done  grpo from start\n" in tree(".")
    write_run("outputs/reward", "reward")
    write_run("outputs/grpo", "grpo", {"reward_model": "outputs/reward/model"})
    summary = Path("outputs/grpo/summary.json")
    older = json.loads(summary.read_text())
    del older["made_from"], older["model_sha256"]
    summary.write_text(json.dumps(older))
    sources = {"reward_model": "outputs/reward", "teacher_models": ["outputs/x/y", "owner/name"]}
    config = json.dumps(config_of("outputs/grpo", "grpo", sources))
    Path("outputs/grpo/config.yaml").write_text(config)
    (entry,) = [one for one in json.loads(tree("--json")) if one["run"] == "outputs/grpo"]
    assert [(one["role"], one["path"], one["now"], one["run"]) for one in entry["made_from"]] == [
        ("reward_model", "outputs/reward", "unknown", "outputs/reward"),
        ("teacher_models", "outputs/x/y", "gone", None),
    ]


def test_a_run_that_has_not_ended_is_known_by_its_newest_checkpoint(tree):
    write_seven()
    folder = Path("outputs/ppo")
    made_from = json.loads((folder / "summary.json").read_text())["made_from"]
    (folder / "summary.json").unlink()
    (folder / "checkpoint-20" / "manifest.json").write_text(json.dumps({"made_from": made_from}))
    (origin,) = Run(folder).origins
    assert (origin.role, origin.sha256) == ("reward_model", sha256("outputs/reward"))
    shutil.rmtree(folder / "checkpoint-20")  # before, it wrote down nothing
    (origin,) = Run(folder).origins
    assert (origin.role, origin.sha256) == ("reward_model", None)


def test_parts_of_runs_are_no_runs_and_links_are_followed_once(tree, tmp_path):
    write_run("outputs/a/seed-0")
    write_run("outputs/a/seed-0/round-1")
    write_run("outputs/a/seed-0/earlier-1")
    write_run("elsewhere/b")
    Path("outputs/b").symlink_to(tmp_path / "elsewhere" / "b")
    Path("outputs/a/around").symlink_to(tmp_path / "outputs")
    Path("outputs/foreign").mkdir()
    Path("outputs/foreign/config.yaml").write_text("a: 1\n")
    write_model(Path("outputs/model"), "no run's")
    assert [str(run.folder) for run in runs_in(Path("outputs"))] == [
        "outputs/a/seed-0",
        "outputs/b",
    ]


def test_a_folder_that_is_not_there_is_one_sentence(tree):
    with pytest.raises(SystemExit) as stop:
        tree("outputs")
    sentence = "error: outputs: there is no such folder; name one that holds runs."
    assert stop.value.code == sentence
    Path("outputs").mkdir()
    assert tree() == "no runs\n"
