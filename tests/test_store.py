"""The record of rollouts: every completion once, as the loss saw it, whatever happens to a run."""

import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT
from policy_gradient_cases import build, is_right
from store_cases import KINDS, check, record, rows_of
from test_policy_gradient_features import with_result

from rlhf_trl import manifests
from rlhf_trl.errors import InputError
from rlhf_trl.output import RECORD
from rlhf_trl.rollouts.store import Rollouts, Store
from rlhf_trl.tiny.tokenizer import build_tokenizer

# the rows by their losses; PPO with one update has its advantages from the loss itself
CASES = [
    *[(*kind, 2, 10) for kind in KINDS if kind[1] == "chapter"],
    *[("grpo", "trl", 1, 1), ("reinforce", "code", 2, 1), ("dapo", "replaced", 1, 1)],
    *[("grpo", "chapter", 1, 1), ("ppo", "chapter", 1, 10), ("ppo", "code", 1, 1)],
]
SMALL = [
    *["--dataset.size", 40, "--dataset.eval_size", 8, "--num_generations", 4],
    *["--per_device_train_batch_size", 8, "--max_steps", 4, "--eval_steps", 2],
]
SAVING = ["--save_strategy", "steps", "--save_steps", 2]
AUTO = ["--resume_from_checkpoint", "auto"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_generation_stands_once_as_the_loss_saw_it(case, tmp_path):
    check(case, tmp_path / RECORD, record(*case, tmp_path))


def test_replaced_groups_are_marked(tmp_path):
    said = []

    def answer(prompt_ids, index, call):
        # first all are right; then, of four prompts, every other one has contrast; then all have
        prompts = list(dict.fromkeys(p for c, p, _ in said if c == call))
        known = prompts.index(prompt_ids) if prompt_ids in prompts else len(prompts)
        contrast = call == 2 or (call == 1 and known % 2 == 0)
        ids = with_result(prompt_ids, index, call, index > 1 if contrast else True)
        said.append((call, prompt_ids, ids))
        return ids

    config = {"per_device_train_batch_size": 16, "max_steps": 1, "dynamic_sampling_rounds": 8}
    trainer = build("dapo", answer=answer, **config)
    trainer.rollouts = Store(tmp_path, Rollouts(), {})
    trainer.train()
    trainer.rollouts.close()
    kept, replaced = rows_of(tmp_path / RECORD), rows_of(tmp_path / RECORD, "train-replaced")
    assert (len(said), len(kept), len(replaced)) == (16 + 16 + 8, 16, 16 + 8)
    decode = build_tokenizer().decode
    texts = [decode(ids, skip_special_tokens=True) for _, _, ids in said]
    assert sorted(texts) == sorted(row["completion"] for row in kept + replaced)
    assert {row["rewards"]["right"] for row in replaced} == {1.0}
    assert {(row["generation"], row["advantage"], row["finished"]) for row in replaced} == {
        (0, None, 1)
    }
    assert [row["tokens"] for row in replaced[:16]] == [len(ids) for _, _, ids in said[:16]]
    assert all(is_right(ids) for _, _, ids in said[:16])


def counts(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = connection.execute(
            "SELECT split, generation, COUNT(*) FROM rollouts GROUP BY split, generation"
        )
        return {(split, number): count for split, number, count in found}


def contents(path):
    """All that is recorded but what the run was given."""
    with closing(sqlite3.connect(path)) as connection:
        rollouts = connection.execute("SELECT * FROM rollouts ORDER BY 1, 2, 3").fetchall()
        return rollouts, connection.execute("SELECT * FROM prompts ORDER BY id").fetchall()


def test_a_run_records_training_evaluation_and_panels(run):
    folder, _ = run("grpo", "grpo", *SMALL, "--samples.every", 2, "--samples.count", 3)
    expected = {("train", number): 8 for number in range(4)}
    for how in ("greedy", "sampled"):
        expected |= {(f"eval-{how}", step): 8 for step in (0, 2, 4)}
        expected |= {(f"samples-{how}", step): 3 for step in (0, 2, 4)}
    assert counts(folder / RECORD) == expected
    assert not list(folder.glob(f"{RECORD}-*"))  # what WAL keeps beside it
    answers = json.loads((folder / "evaluations" / "step-000004.json").read_text())
    for how in ("greedy", "sampled"):
        rows = [row for row in rows_of(folder / RECORD, f"eval-{how}") if row["step"] == 4]
        assert [row["completion"] for row in rows] == [a[how] for a in answers["answers"]]
        infix = "" if how == "greedy" else "sampled_"
        means = {name: sum(row["rewards"][name] for row in rows) / 8 for name in rows[0]["rewards"]}
        means |= {"reward": sum(row["reward"] for row in rows) / 8}
        means |= {"length": sum(row["tokens"] for row in rows) / 8}
        means |= {"cut_off": 1 - sum(row["finished"] for row in rows) / 8}
        told = {name: answers["metrics"][f"eval_{infix}{name}"] for name in means}
        assert told == pytest.approx(means)
    panel = json.loads((folder / "samples" / "step-000002.json").read_text())
    rows = [row for row in rows_of(folder / RECORD, "samples-greedy") if row["step"] == 2]
    assert [row["completion"] for row in rows] == [each["greedy"] for each in panel]
    with closing(sqlite3.connect(folder / RECORD)) as connection:
        facts = dict(connection.execute("SELECT * FROM run"))
    assert facts["name"] == "grpo (chapter)" and facts["seed"] == "0"
    assert json.loads(facts["given"])["dataset"]["size"] == 40


def test_sampled_data_are_recorded(run):
    words = ["--dataset.size", 12, "--dataset.eval_size", 4, "--max_steps", 1]
    words += ["--dataset.pairs", "on_policy", "--dataset.samples_per_prompt", 4]
    folder, _ = run("dpo", "dpo", *words, "--per_device_train_batch_size", 2)
    for side in ("train", "held-out"):
        kept = (folder / f"samples-{side}.jsonl").read_text().splitlines()
        kept = [json.loads(line) for line in kept]
        rows = rows_of(folder / RECORD, f"data-{side}")
        assert [row["completion"] for row in rows] == [
            each["completion"][0]["content"] for each in kept
        ]
        assert [row["rewards"]["exact_match"] for row in rows] == [each["label"] for each in kept]
        assert [row["group_id"] for row in rows] == [n // 4 for n in range(len(kept))]
    assert counts(folder / RECORD)["eval-greedy", 0] == 4


def test_off_keeps_none_and_every_keeps_some(run, tmp_path, refused):
    folder, _ = run("grpo", "grpo", *SMALL, "--rollouts", "off", folder=tmp_path / "off")
    assert not list(folder.glob("rollouts*"))
    folder, _ = run("grpo", "grpo", *SMALL, "--rollouts.every", 3, folder=tmp_path / "some")
    kept = counts(folder / RECORD)
    assert [number for split, number in kept if split == "train"] == [0, 3]
    assert ("eval-greedy", 2) in kept
    assert "rollouts is" in refused("grpo", "grpo", "--rollouts", "on")


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [pytest.param(1, marks=pytest.mark.promise), 3])
def test_a_resumed_run_repeats_and_misses_nothing(run, iterations, monkeypatch, tmp_path):
    # a checkpoint inside a generation, whose rollouts belong to it
    words = [*SMALL, *SAVING, "--num_iterations", iterations, "--samples.every", 1]
    whole, _ = run("grpo", "grpo", *words, folder=tmp_path / "whole")
    folder = tmp_path / "killed"
    run("grpo", "grpo", *words, folder=folder)
    for path in [folder / "checkpoint-4", folder / "model"]:
        shutil.rmtree(path)
    (folder / "summary.json").unlink()
    before = contents(folder / RECORD)
    left, rewind = [], Store.rewind

    def rewound(store, *args):
        rewind(store, *args)
        left.extend(counts(store.path))

    monkeypatch.setattr(Store, "rewind", rewound)
    _, out = run("grpo", "grpo", *words, *AUTO, folder=folder)
    assert "checkpoint-2" in out
    assert left == [
        *[(f"eval-{how}", step) for how in ("greedy", "sampled") for step in (0, 2)],
        *[(f"samples-{how}", step) for how in ("greedy", "sampled") for step in (0, 1, 2)],
        *[("train", number) for number in range(2 if iterations == 1 else 1)],
    ]
    assert contents(folder / RECORD) == contents(whole / RECORD) == before
    assert sorted({g for s, g in counts(folder / RECORD) if s == "train"}) == [
        *range(4 if iterations == 1 else 2)
    ]


def test_what_a_checkpoint_builds_on_is_written_before_it(run, monkeypatch):
    found, thin, write = [], Store._thin, manifests.write_manifest

    def slowly(store, connection):
        time.sleep(0.2)
        thin(store, connection)

    def manifest(folder, *args, **kwargs):
        found.append({g for s, g in counts(folder.parent / RECORD) if s == "train"})
        write(folder, *args, **kwargs)

    monkeypatch.setattr(Store, "_thin", slowly)
    monkeypatch.setattr(manifests, "write_manifest", manifest)
    run("grpo", "grpo", *SMALL, *SAVING, "--eval_strategy", "no")
    assert found == [{0, 1}, {0, 1, 2, 3}]


def test_going_back_keeps_what_is_deleted(run):
    folder, _ = run("grpo", "grpo", *SMALL, *SAVING)
    before = contents(folder / RECORD)
    back = ["--resume_from_checkpoint", folder / "checkpoint-2"]
    run("grpo", "grpo", *SMALL, *SAVING, *back, "--temperature", 2)
    assert contents(folder / "earlier-1" / RECORD) == before
    now = contents(folder / RECORD)
    assert now[0] != before[0] and len(now[0]) == len(before[0])
    assert [row for row in now[0] if row[3] < 2] == [row for row in before[0] if row[3] < 2]


def test_a_start_without_a_checkpoint_begins_anew(run):
    words = [*SMALL, "--lr_scheduler_type", "constant"]
    folder, _ = run("grpo", "grpo", *words)
    before = contents(folder / RECORD)[0]
    (folder / "summary.json").unlink()
    run("grpo", "grpo", *words, "--max_steps", 2, *AUTO)
    assert contents(folder / RECORD)[0] == [r for r in before if r[3] <= 2 - (r[0] == "train")]


# --- the file ------------------------------------------------------------------------------------


def generation(store, number, split="train", text="x", count=2):
    samples = [("question", text, 1, True, None)] * count
    store.write(split, number, (number, 0.5), samples, {"right": [1.0] * count})


def test_texts_and_numbers_come_back_as_they_were(tmp_path):
    texts = ["</script><b>", "a\0b", "'; DROP TABLE rollouts; --", "äß🙂\u2028", "", '\n\t\\"']
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "zwei ü"}]
    store = Store(tmp_path, Rollouts(), {})
    nan = float("nan")
    prompts = [*texts, chat, chat[:1]]
    completions = [*reversed(texts), chat[1:], chat]
    ended = [True, False] * 4
    samples = list(zip(prompts, completions, range(8), ended, [0.5] * 8, strict=True))
    rewards = {"a": [0.1, None, nan, 1, 2, 3, 4, 5], 'it\'s "b"': [True] * 8}
    store.write("train", 0, (7, 0.25), samples, rewards, [-1 / 3] * 8, 2)
    store.close()
    rows = rows_of(tmp_path / RECORD)
    assert [row["prompt"] for row in rows] == [*texts, json.dumps(chat, ensure_ascii=False), "one"]
    assert [row["completion"] for row in rows[:7]] == [*reversed(texts), "zwei ü"]
    assert json.loads(rows[7]["completion"]) == chat
    assert [row["rewards"]["a"] for row in rows] == [0.1, None, None, 1, 2, 3, 4, 5]
    assert {row["rewards"]['it\'s "b"'] for row in rows} == {1.0}
    assert {row["advantage"] for row in rows} == {-1 / 3}
    assert [row["group_id"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [row["finished"] for row in rows] == [1, 0] * 4


def test_a_full_file_is_thinned_evenly(tmp_path, capfd):
    def fill(store, first, last):
        for number in range(first, last):
            generation(store, number, text=str(number) * 2000)
            generation(store, number, split="train-replaced")
        generation(store, last, split="eval-greedy")
        store.close()

    cap = Rollouts(cap=0.0002)
    fill(Store(tmp_path, cap, {}), 0, 100)
    kept = [number for split, number in counts(tmp_path / RECORD) if split == "train"]
    step = kept[1]
    assert step in (2, 4, 8) and kept == [*range(0, 100, step)]
    assert (tmp_path / RECORD).stat().st_size < 1.1 * 0.0002e9
    assert ("eval-greedy", 100) in counts(tmp_path / RECORD)
    said = capfd.readouterr().out.splitlines()
    assert said[-1] == (
        f"{tmp_path / RECORD} has reached 0.0002 GB: it keeps 1 in {step} generations of training"
    )
    # a resumed run goes on as thinly
    store = Store(tmp_path, Rollouts(), {})
    store.rewind(60, 60)
    fill(store, 60, 100)
    kept = [number for split, number in counts(tmp_path / RECORD) if split == "train"]
    assert kept == [*range(0, 100, step)]


def test_a_file_that_only_evaluations_fill_takes_no_more(tmp_path, capfd):
    store = Store(tmp_path, Rollouts(cap=0.00005), {})
    for step in range(9):
        generation(store, step, split="eval-greedy", text="long" * 3000)
        store.flush()
    store.close()
    assert 1 < len(counts(tmp_path / RECORD)) < 5
    assert capfd.readouterr().out.count("it keeps nothing more") == 1


def test_a_full_queue_blocks_and_nothing_is_lost(tmp_path, monkeypatch):
    gate, opened = threading.Event(), sqlite3.connect

    def slowly(*args, **kwargs):
        gate.wait(30)
        return opened(*args, **kwargs)

    monkeypatch.setattr("rlhf_trl.rollouts.store.sqlite3.connect", slowly)
    store = Store(tmp_path, Rollouts(), {})

    def produce():
        for number in range(50):
            generation(store, number)

    thread = threading.Thread(target=produce)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and store._jobs.full()
    gate.set()
    thread.join(30)
    store.close()
    assert len(counts(tmp_path / RECORD)) == 50


def test_only_its_thread_opens_the_file(tmp_path, monkeypatch):
    callers, opened = [], sqlite3.connect

    def connect(*args, **kwargs):
        callers.append(threading.current_thread().name)
        return opened(*args, **kwargs)

    monkeypatch.setattr("rlhf_trl.rollouts.store.sqlite3.connect", connect)
    store = Store(tmp_path, Rollouts(), {})
    store.rewind(0, 0)
    store.flush()
    assert not callers and not list(tmp_path.iterdir())  # nothing to do yet
    generation(store, 0)
    store.flush()
    store.rewind(0, 0)
    store.close()
    assert callers == ["rollouts"]


def test_what_is_queued_is_written_when_a_run_fails(tmp_path):
    script = (
        "import sys; from rlhf_trl.rollouts.store import Rollouts, Store\n"
        "store = Store(sys.argv[1], Rollouts(), {})\n"
        "for n in range(40):\n"
        "    store.write('train', n, (n, 0.0), [('p', 'c', 1, True, None)], {})\n"
        "raise RuntimeError('as runs do')"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "RuntimeError: as runs do"
    assert len(counts(tmp_path / RECORD)) == 40


def test_a_disk_that_fills_up_stops_the_run(refused, monkeypatch, tmp_path):
    write, soft_hard = Store.write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(store, split, number, *args, **kwargs):
        if split == "train" and number == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, soft_hard[1]))
        return write(store, split, number, *args, **kwargs)

    monkeypatch.setattr(Store, "write", limited)
    try:
        sentence = refused("grpo", "grpo", *SMALL, "--max_steps", 50, "--eval_steps", 50)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    assert sentence.startswith("error: rollouts: ") and "cannot be written" in sentence
    # what was recorded before is whole
    assert counts(tmp_path / "out" / RECORD)["eval-greedy", 0] == 8


@pytest.mark.parametrize("how", ["a folder in its place", "another file"])
def test_a_file_that_cannot_be_written_stops_the_run(how, tmp_path):
    if how == "another file":
        (tmp_path / RECORD).write_text("mine " * 1000)
    else:
        (tmp_path / RECORD).mkdir()
    store = Store(tmp_path, Rollouts(), {})
    with pytest.raises(InputError, match=r"rollouts: .* cannot be written .* or write off"):
        store.rewind(0, 0)
    with pytest.raises(InputError, match="cannot be written"):
        generation(store, 0)
    if how == "another file":
        assert (tmp_path / RECORD).read_text() == "mine " * 1000


@pytest.mark.parametrize(
    ("kind", "journal"), [("nfs4", "delete"), ("fuse.sshfs", "delete"), ("ext4", "wal")]
)
def test_a_network_file_system_gets_another_journal(tmp_path, monkeypatch, kind, journal):
    mounts = [("/", "ext4"), (str(tmp_path.parent), kind), ("/proc", "proc")]
    found = [SimpleNamespace(mountpoint=where, fstype=what) for where, what in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    store = Store(tmp_path, Rollouts(), {})
    generation(store, 0)
    store.flush()
    with closing(sqlite3.connect(tmp_path / RECORD)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (journal,)
        assert len(connection.execute("SELECT * FROM rollouts").fetchall()) == 2
    store.close()
