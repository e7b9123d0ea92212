"""Runs of an older commit go on, are evaluated, chatted with and used as rewards.

`golden/older_run` was written by commit b0b114e (2026-11-22), unedited but for figures and cards
that are left out: `start` is a Qwen3 of one layer of 8 with the embedded tokenizer; the runs were
made beside it, with

    recipes/grpo.py --config configs/tiny/grpo.yaml --output_dir grpo --model_name_or_path start \
        --max_steps 4 --learning_rate 0.01 --save_strategy steps --save_steps 2 --eval_strategy no \
        --load_best_model_at_end false --use_cpu true --dataset.size 16 --dataset.eval_size 4 \
        --num_generations 4 --per_device_train_batch_size 8 --gradient_accumulation_steps 1 \
        --max_completion_length 6

and alike for dpo and reward (4 examples a step, `--dataset.pairs offline`, for the latter
`--dataset.candidates 0`). `grpo`, `dpo` and `reward` are what a run leaves that is killed after its
checkpoint of step 2: the later files are taken away. `grpo-done` and `reward-done` are whole,
without checkpoints. `expected` holds what the same commit came to: the weights after step 4, and
what `rlhf-trl evaluate grpo-done --json` printed.
"""

import json
import os
import runpy
import shutil
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_trl import cli
from rlhf_trl.output import MANIFEST

ROOT = Path(__file__).parent.parent
OLDER = Path(__file__).parent / "golden" / "older_run"


@pytest.fixture
def older(tmp_path, monkeypatch):
    """Return a copy of the older runs, in which the current folder is."""
    shutil.copytree(OLDER, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def recipe(monkeypatch, capfd):
    """Run a recipe in the current folder; return what it printed."""

    def recipe(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words), "--disable_tqdm"])
        capfd.readouterr()
        runpy.run_path(str(ROOT / "recipes" / f"{name}.py"), run_name="__main__")
        return capfd.readouterr().out

    return recipe


@pytest.mark.parametrize("name", ["grpo", "dpo", "reward"])
def test_a_checkpoint_goes_on_as_it_did_then(name, older, recipe):
    recipe(name, "--config", f"{name}/config.yaml", "--resume_from_checkpoint", "auto")
    assert (older / name / "checkpoint-4" / MANIFEST).exists()
    # the checkpoint says nothing of what it was made from
    summary = json.loads((older / name / "summary.json").read_text())
    weights = sha256((OLDER / "start" / "model.safetensors").read_bytes()).hexdigest()
    assert summary["made_from"] == [
        {"role": "model_name_or_path", "path": "start", "sha256": weights}
    ]
    ours = load_file(older / name / "model" / "model.safetensors")
    theirs = load_file(OLDER / "expected" / f"{name}.safetensors")
    before = load_file(OLDER / name / "checkpoint-2" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, weight in theirs.items():
        torch.testing.assert_close(ours[key], weight, rtol=0, atol=1e-4)
    moved = max((theirs[key] - before[key]).abs().max() for key in theirs if key in before)
    assert moved > 1e-3


def test_its_config_starts_a_run(older, recipe):
    recipe("grpo", "--config", "grpo/config.yaml", "--output_dir", "again")
    again = load_file(older / "again" / "model" / "model.safetensors")
    for key, weight in load_file(OLDER / "expected" / "grpo.safetensors").items():
        torch.testing.assert_close(again[key], weight, rtol=0, atol=1e-4)


def test_it_is_evaluated_as_it_was_then(older, capfd):
    cli.main(["evaluate", "grpo-done", "--json"])
    ours = json.loads(capfd.readouterr().out)["models"]["grpo-done"]
    theirs = json.loads((OLDER / "expected" / "evaluate.json").read_text())["models"]["grpo-done"]
    assert ours.keys() >= theirs.keys()
    for metric, numbers in theirs.items():
        assert ours[metric]["value"] == pytest.approx(numbers["value"], abs=1e-6), metric


def test_it_answers_as_it_did_then(older, monkeypatch, capfd):
    read, write = os.pipe()
    os.write(write, b"Spell cat backward.\n")
    os.close(write)
    with os.fdopen(read) as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        cli.main(["chat", "grpo-done"])
    assert "greedy   O'd:ek\n" in capfd.readouterr().out


def test_its_reward_model_is_a_reward(older, recipe):
    words = ["--output_dir", "judged", "--max_steps", 1, "--save_strategy", "no"]
    words += [
        "--reward_model",
        "reward-done/model",
        "--reward_funcs",
        "[]",
        "--reward_weights",
        "[1.0]",
    ]
    recipe("grpo", "--config", "grpo/config.yaml", *words)
    log = json.loads((older / "judged" / "log.json").read_text())
    assert any(line.get("rewards/reward_model/mean") for line in log)
