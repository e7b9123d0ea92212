"""What a run writes down of the models that it was made from."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_folders import sha256, write_model, write_run

from rlhf_trl.manifests import write_manifest
from rlhf_trl.run import origins


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(config, checkpoint=None):
    """What a run with this config writes down."""
    origins.begin_reading(config, "out")
    return origins.made_from(SimpleNamespace(output_dir="out", resume_from_checkpoint=checkpoint))


@pytest.mark.parametrize(
    ("files", "hashed"),
    [
        ({"model.safetensors": b"one"}, b"one"),
        # in the order of their names, and in more than one piece
        ({"b.safetensors": b"2" * 3_000_000, "a.safetensors": b"1"}, b"1" + b"2" * 3_000_000),
        ({"adapter_model.safetensors": b"adapter", "training_args.bin": b"no"}, b"adapter"),
        ({"pytorch_model.bin": b"older"}, b"older"),
    ],
)
def test_a_hash_is_that_of_the_files_with_weights(files, hashed):
    for name, data in files.items():
        Path(name).write_bytes(data)
    Path("tokenizer.json").write_text("{}")
    assert origins.weights_sha256(Path()) == hashlib.sha256(hashed).hexdigest()


def test_a_folder_without_weights_has_none():
    Path("inner").mkdir()
    Path("inner/model.safetensors").write_text("deeper")
    assert origins.weights_sha256(Path()) is None


def test_every_key_that_names_a_local_model_is_written_down():
    write_run("outputs/reward", "reward")
    for name in ("start", "sampler", "first", "second"):
        write_model(Path(name), name)
    Path("empty").mkdir()
    config = {
        "model_name_or_path": "start",
        "reward_model": "outputs/reward",  # a run stands for its model
        "teacher_models": ["first", "owner/name", "second"],
        "value_model_name_or_path": "empty",
        "dataset": {"sampled_from": "sampler", "path": "start"},
        "output_dir": "start",
        "seed": 1,
    }
    assert read(config) == [
        {"role": role, "path": path, "sha256": sha256(weights)}
        for role, path, weights in (
            ("dataset.sampled_from", "sampler", "sampler"),
            ("model_name_or_path", "start", "start"),
            ("reward_model", "outputs/reward/model", "outputs/reward"),
            ("teacher_models", "first", "first"),
            ("teacher_models", "second", "second"),
        )
    ]
    assert read({"model_name_or_path": "tiny", "dataset": None, "reward_model": None}) == []


def test_what_it_was_at_the_start_counts():
    write_model(Path("start"), "before")
    origins.begin_reading({"model_name_or_path": "start"}, "out")
    origins._readings["out"].result(timeout=60)
    write_model(Path("start"), "after")
    args = SimpleNamespace(output_dir="out", resume_from_checkpoint=None)
    assert [origin["sha256"] for origin in origins.made_from(args)] == [sha256("before")]


def test_a_run_that_goes_on_keeps_what_it_was_made_from_and_adds_what_is_new():
    write_model(Path("start"), "start")
    write_model(Path("reward"), "before")
    config = {"model_name_or_path": "start", "reward_model": "reward"}
    before = read(config)
    checkpoint = Path("out/checkpoint-1")
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, True, made_from=before)
    assert read(config, str(checkpoint)) == before
    write_model(Path("reward"), "trained anew")
    new = {"role": "reward_model", "path": "reward", "sha256": sha256("trained anew")}
    assert read(config, str(checkpoint)) == [*before, new]
    write_manifest(checkpoint, True)  # one of an earlier version
    assert read(config, str(checkpoint)) == [before[0], new]


def test_a_checkpoint_says_what_its_run_was_made_from(run, tmp_path):
    """So does the summary; rounds of rejection sampling start where their run did."""
    from rlhf_trl.tiny import checkpoint_path

    words = ["--dataset.size", 8, "--dataset.eval_size", 4, "--num_generations", 2]
    words += ["--model_name_or_path", checkpoint_path(), "--max_completion_length", 20]
    words += [
        "--max_steps",
        1,
        "--eval_strategy",
        "no",
        "--rounds",
        2,
        "--strategy",
        "random_per_prompt",
        "--answers",
        tmp_path / "answers",
    ]
    folder, _ = run("rejection_sampling", "rejection_sampling", *words, "--save_strategy", "steps")
    weights = Path(checkpoint_path(), "model.safetensors").read_bytes()
    origin = {
        "role": "model_name_or_path",
        "path": str(checkpoint_path()),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    for part in (folder, folder / "round-1"):
        summary = json.loads((part / "summary.json").read_text())
        assert summary["made_from"] == [origin]
        (saved,) = part.glob("checkpoint-*/manifest.json")
        assert json.loads(saved.read_text())["made_from"] == [origin]
    assert summary["model_sha256"] != origin["sha256"]
