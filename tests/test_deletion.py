"""Deleting runs and parts of them: what is refused, and what a killed deletion leaves."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import content, write_model, write_run, write_seven

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.output import LOCK, RECORD
from rlhf_trl.pipeline import deletion

ROOT = Path(__file__).parent.parent
HOLD = """
import sys
from pathlib import Path
from rlhf_trl.output import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def seven(tmp_path, monkeypatch):
    """Seven runs below `outputs`, in the current folder; a checkpoint of one was a start model."""
    monkeypatch.chdir(tmp_path)
    write_seven()
    sources = {"model_name_or_path": "outputs/sft/checkpoint-10"}
    write_run("outputs/late", "grpo", sources, date=1_700_009_000)
    write_model(Path("outputs/grpo/merged"), "merged")
    write_model(Path("outputs/grpo/quantized/int8"), "int8")
    for end in ("-wal", "-shm"):
        Path(f"outputs/ppo/{RECORD}{end}").write_text(end)
    return tmp_path


@pytest.fixture
def delete(seven, capsys):
    """Run `rlhf-trl runs --delete ...`; return what it printed."""

    def delete(*words):
        capsys.readouterr()
        main(["runs", "--delete", *map(str, words)])
        return capsys.readouterr().out

    return delete


def visible(folder="outputs"):
    """Return the files that are not behind a hidden name of a deletion."""
    return {path: data for path, data in content(folder).items() if ".deleted-" not in path}


def below(*paths):
    """Tell which paths are one of these or in one."""
    return lambda path: any(path == one or path.startswith(f"{one}/") for one in paths)


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["outputs/grpo"], ["grpo"]),
        (["outputs/grpo/"], ["grpo"]),
        (["outputs/reward/checkpoint-20"], ["reward/checkpoint-20"]),
        (["outputs/grpo/merged"], ["grpo/merged"]),
        (["outputs/grpo/quantized/int8"], ["grpo/quantized/int8"]),
        ([f"outputs/ppo/{RECORD}"], [f"ppo/{RECORD}{end}" for end in ("", "-wal", "-shm")]),
        # what lies in another one goes with it, and what is named twice goes once
        (["outputs/dpo/checkpoint-10", "outputs/../outputs/dpo", "outputs/dpo"], ["dpo"]),
        # a run goes with all those that were made from it
        (["outputs/weak", "outputs/grpo"], ["weak", "grpo"]),
    ],
)
def test_it_is_deleted_when_that_is_confirmed_and_nothing_else(delete, words, gone):
    before = content("outputs")
    size = sum(len(data) for path, data in before.items() if below(*gone)(path))
    out = delete(*words)
    assert out.endswith(f"would be deleted: {size / 1000:.1f} kB; add --yes to do it\n") or (
        out.endswith(f"would be deleted: {size} B; add --yes to do it\n")
    )
    assert content("outputs") == before
    out = delete(*words, "--yes")
    assert all(f"  outputs/{name}\n" in out for name in gone)
    assert out.splitlines()[-1].startswith("deleted: ")
    assert content("outputs") == {
        path: data for path, data in before.items() if not below(*gone)(path)
    }
    assert not [path for path in Path("outputs").rglob(".*") if path.name != LOCK]


def test_programs_get_the_sizes(delete):
    entries = {
        "paths": [{"path": "outputs/grpo/merged", "bytes": len("{}" + "merged")}],
        "deleted": False,
    }
    assert json.loads(delete("outputs/grpo/merged", "--json")) == entries
    assert json.loads(delete("outputs/grpo/merged", "--yes", "--json")) == {
        **entries,
        "deleted": True,
    }


REFUSED = {
    "a reward model": (
        "outputs/reward",
        "was made from outputs/reward (reward_model, by its path)",
    ),
    "a start model": ("outputs/sft", "was made from outputs/sft ("),
    "a checkpoint": (
        "outputs/sft/checkpoint-10",
        "outputs/late was made from outputs/sft/checkpoint-10 (model_name_or_path, by its path)",
    ),
    "a model": ("outputs/dpo/model", "is what the run outputs/dpo was for; delete the whole run"),
    "its file": ("outputs/dpo/model/model.safetensors", "delete the whole run"),
    "a value model": ("outputs/dpo/value_model", "delete the whole run"),
    "no run": ("outputs/mine", "is no run's folder, nor in one; name a run"),
    "a folder of runs": ("outputs", "is no run's folder, nor in one"),
    "a file": ("outputs/notes.txt", "is no run's folder, nor in one"),
    "another part": ("outputs/dpo/evaluations", "is a part of the run outputs/dpo that stays"),
    "a file of a checkpoint": ("outputs/dpo/checkpoint-10/model.safetensors", "is a part of the"),
    "a model in a checkpoint": ("outputs/dpo/checkpoint-10/inner", "is a part of the run"),
    "a round": ("outputs/dpo/round-1", "is a part of the run outputs/dpo that stays"),
    "a model of a round": ("outputs/dpo/round-1/model", "is a part of the run outputs/dpo"),
    "nothing": ("outputs/dqo", "there is nothing; name a run, or in one a checkpoint-N"),
    "a link": ("outputs/link", "is a link; name what it leads to"),
    "a link that leads nowhere": ("outputs/dangling", "is a link"),
    "a run around another": ("outputs/outer", "holds another run, outputs/outer/inner; move"),
    "outside": ("elsewhere/run", "is not in outputs, where runs that were made from it"),
    "a link to outside": ("outputs/dpo/out/model", "is not in outputs"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_it_is_refused(delete, seven, case, yes):
    write_model(Path("outputs/mine"), "no run's")
    write_model(Path("outputs/dpo/value_model"), "values")
    write_model(Path("outputs/dpo/checkpoint-10/inner"), "inner")
    write_run("outputs/dpo/round-1")
    Path("outputs/notes.txt").write_text("mine")
    write_run("outputs/outer")
    write_run("outputs/outer/inner")
    write_run("elsewhere/run")
    Path("outputs/link").symlink_to(seven / "outputs" / "dpo")
    Path("outputs/dangling").symlink_to(seven / "nothing")
    Path("outputs/dpo/out").symlink_to(seven / "elsewhere" / "run")
    before = content(".")
    path, part = REFUSED[case]
    with pytest.raises(SystemExit) as stop:
        # a good one beside it stays, too
        delete("outputs/weak/checkpoint-10", path, *yes)
    sentence = stop.value.code
    assert sentence.startswith("error: ") and part in sentence and "\n" not in sentence
    assert content(".") == before


def test_a_moved_model_is_known_by_its_hash(delete):
    shutil.move("outputs/reward", "outputs/archive")
    with pytest.raises(SystemExit) as stop:
        delete("outputs/archive", "--yes")
    assert stop.value.code == (
        "error: outputs/ppo was made from outputs/archive (reward_model, by its hash), which "
        "therefore stays; delete that run first."
    )
    # a copy of it may go while the path holds it
    shutil.copytree("outputs/archive", "outputs/reward")
    delete("outputs/archive", "--yes")
    # a model that was trained anew at the path is not what they were made from, but named by them
    shutil.copytree("outputs/reward", "outputs/archive")
    Path("outputs/reward/model/model.safetensors").write_text("anew")
    for name, how in (("archive", "hash"), ("reward", "path")):
        with pytest.raises(SystemExit) as stop:
            delete(f"outputs/{name}", "--yes")
        assert f"outputs/{name} (reward_model, by its {how})" in stop.value.code


def test_an_older_run_is_enough_to_refuse(delete):
    """Such a run has its config only, which may name the folder of a run."""
    summary = Path("outputs/ppo/summary.json")
    summary.write_text(summary.read_text().replace("made_from", "other"))
    config = Path("outputs/ppo/config.yaml")
    config.write_text(config.read_text().replace("outputs/reward/model", "outputs/reward"))
    delete("outputs/rejection", "--yes")
    with pytest.raises(SystemExit, match=r"outputs/ppo was made from outputs/reward \(reward_mod"):
        delete("outputs/reward")


def test_the_folder_must_hold_all_runs(seven):
    with pytest.raises(SystemExit, match="outputs/sft is a run's folder; before --delete, name"):
        main(["runs", "outputs/sft", "--delete", "outputs/sft"])
    with pytest.raises(SystemExit, match="write one of --tree, --compare and --delete"):
        main(["runs", "--tree", "--delete", "outputs/sft"])
    with pytest.raises(SystemExit, match="--yes is read with --delete only"):
        main(["runs", "--yes"])


def test_the_current_folder_is_a_run(seven, monkeypatch):
    monkeypatch.chdir("outputs/dpo")
    main(["runs", "..", "--delete", ".", "--yes"])
    assert not (seven / "outputs" / "dpo").exists()


@pytest.mark.parametrize("path", ["grpo", "grpo/checkpoint-10", "grpo/merged", f"grpo/{RECORD}"])
def test_a_running_run_is_refused_with_all_its_parts(delete, path):
    before = content("outputs")
    run = Path("outputs/grpo")
    with holding(run) as process, pytest.raises(SystemExit) as stop:
        delete(f"outputs/{path}", "--yes")
    assert stop.value.code.startswith(f"error: outputs/grpo is in use (process {process.pid} on ")
    assert visible().keys() == before.keys()
    delete(f"outputs/{path}", "--yes")  # the lock has ended with its process
    assert not Path(f"outputs/{path}").exists()


def holding(run):
    """A process that writes to a run's folder, as long as the block lasts."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_run_that_begins_during_the_check_is_refused(seven, monkeypatch):
    targets = deletion.targets

    def then_held(*words):
        wanted = targets(*words)
        holders.append(holding("outputs/grpo"))
        return wanted

    holders = []
    monkeypatch.setattr(deletion, "targets", then_held)
    with pytest.raises(InputError, match=r"outputs/grpo is in use"):
        deletion.delete(Path("outputs"), ["outputs/grpo"], True)
    with holders[0]:
        assert Path("outputs/grpo/model").is_dir()


def test_nothing_is_deleted_while_a_run_begins_that_has_not_said_what_it_is_made_from(delete):
    Path("outputs/new/seed-0").mkdir(parents=True)
    in_use = pytest.raises(SystemExit, match=r"error: outputs/new/seed-0 is in use \(process")
    with holding(Path("outputs/new/seed-0")), in_use:
        delete("outputs/dpo", "--yes")
    delete("outputs/dpo", "--yes")


def test_what_cannot_be_renamed_or_looked_into_is_one_sentence(delete, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    before = content("outputs")
    for owner, name, part in (
        (os, "rename", r"outputs/dpo cannot be renamed \(Permission denied\), so it and what"),
        (Path, "iterdir", r"outputs cannot be read \(Permission denied\); name a folder"),
    ):
        with monkeypatch.context() as patches:
            patches.setattr(owner, name, refuse)
            with pytest.raises(SystemExit, match=part):
                delete("outputs/dpo", "--yes")
    assert content("outputs") == before


TARGETS = ["weak", "grpo", f"ppo/{RECORD}", "dpo/checkpoint-10"]
RENAMES = 2 + 3 + 1  # a database has two more files


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(RENAMES))
def test_a_deletion_killed_at_a_rename_leaves_nothing_half(delete, monkeypatch, number, after):
    before, renamed = content("outputs"), []
    rename = os.rename

    def killing(old, new):
        if len(renamed) == number and not after:
            raise Killed
        rename(old, new)
        renamed.append(str(old))
        if len(renamed) == number + 1 and after:
            raise Killed

    with monkeypatch.context() as patches, pytest.raises(Killed):
        patches.setattr(os, "rename", killing)
        delete(*(f"outputs/{name}" for name in TARGETS), "--yes")
    assert len(renamed) == number + after
    nothing_half_is_left(before, renamed, delete)
    # the youngest run first, so that none is there without what it was made from
    assert Path("outputs/weak").exists() or not Path("outputs/grpo").exists()


@pytest.mark.parametrize("number", range(3))
def test_a_deletion_killed_while_it_removes_leaves_nothing_half(delete, monkeypatch, number):
    before, removed = content("outputs"), []
    rmtree = shutil.rmtree

    def killing(path, **options):
        if len(removed) == number:
            next(Path(path).rglob("*.safetensors")).unlink()  # it had begun
            raise Killed
        removed.append(path)
        rmtree(path, **options)

    with monkeypatch.context() as patches, pytest.raises(Killed):
        patches.setattr(shutil, "rmtree", killing)
        delete(*(f"outputs/{name}" for name in TARGETS), "--yes")
    files = [f"outputs/ppo/{RECORD}{end}" for end in ("", "-wal", "-shm")]
    directories = [f"outputs/{name}" for name in TARGETS if RECORD not in name]
    nothing_half_is_left(before, [*files, *directories], delete)


def nothing_half_is_left(before, renamed, delete):
    """Check that what was renamed is no longer there, all else whole, and leftovers can go.

    Args:
        before: all files below `outputs`, before the deletion.
        renamed: paths.
        delete: runs the command.
    """
    gone = below(*(path.removeprefix("outputs/") for path in renamed))
    expected = {path: data for path, data in before.items() if not gone(path)}
    assert visible() == expected
    hidden = {str(path) for path in Path("outputs").rglob(".deleted-*")}
    # what SQLite kept beside a database that is gone
    orphans = set()
    if not Path(f"outputs/ppo/{RECORD}").exists():
        orphans = {str(path) for path in Path("outputs/ppo").glob(f"{RECORD}-*")}
    lines = delete().splitlines()
    assert {line.rpartition("  ")[2] for line in lines[:-1]} == hidden | orphans
    delete("--yes")
    assert content("outputs") == {
        path: data for path, data in expected.items() if f"outputs/{path}" not in orphans
    }


def test_leftovers_are_named_and_hidden_names_are_not_taken_twice(delete, monkeypatch, capsys):
    for _ in range(2):
        with monkeypatch.context() as patches:
            patches.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
            with pytest.raises(SystemExit, match=r"\.deleted-dpo.* could not be removed; see its"):
                delete("outputs/dpo", "--yes")
        write_run("outputs/dpo", "dpo")
    names = ["outputs/.deleted-dpo", "outputs/.deleted-dpo-2"]
    main(["runs", "--json"])
    assert json.loads(capsys.readouterr().out)["leftovers"] == names
    main(["runs"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"left by a deletion that was ended: {', '.join(names)}; rlhf-trl runs outputs --delete "
        "--yes removes it"
    )
    with pytest.raises(SystemExit, match="is no run's folder, nor in one"):
        delete(names[0])
    size = sum(len(data) for name in names for data in content(name).values())
    assert delete("--yes").endswith(f"deleted: {size / 1000:.1f} kB\n")
    assert delete("--yes") == "nothing is left by a deletion that was ended\n"
    assert not any(map(os.path.exists, names)) and Path("outputs/dpo").exists()
