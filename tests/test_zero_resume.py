"""A run under ZeRO that is stopped and resumed ends bit-identical to one that was not."""

import sqlite3
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from zero_resume import RUNS, STAGES

from rlhf_trl.tiny import checkpoint_path

ACCELERATE = "zero3"  # the script takes itself to ZeRO-2
TIMEOUT = 3000

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.promise]


def tensors(value):
    """Return all tensors and numbers of nested containers, in their order."""
    if isinstance(value, dict):
        return [item for key in value for item in tensors(value[key])]
    if isinstance(value, list | tuple):
        return [item for part in value for item in tensors(part)]
    return [value] if isinstance(value, torch.Tensor | int | float) else []


def optimizer_states(folder):
    """Return the optimizer's state of both processes after the last step."""
    files = sorted((folder / "checkpoint-4").rglob("*optim_states.pt"))
    assert len(files) == 2
    states = [torch.load(file, weights_only=False, map_location="cpu") for file in files]
    return tensors([state["optimizer_state_dict"] for state in states])


def rollouts(folder):
    columns = "split, generation, sample, step, group_id, completion, reward, advantage, rewards"
    with closing(sqlite3.connect(folder / "rollouts.sqlite")) as connection:
        return connection.execute(f"SELECT {columns} FROM rollouts ORDER BY 1, 2, 3").fetchall()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", RUNS)
def test_two_steps_and_two_more_are_four(name, stage, two_processes):
    whole, again = (two_processes / f"{name}-{stage}-{kind}" for kind in ("4", "2+2"))
    models = ["model", "value_model"] if name == "ppo" else ["model"]
    start = load_file(f"{checkpoint_path()}/model.safetensors")
    for model in models:
        one, other = (load_file(folder / model / "model.safetensors") for folder in (whole, again))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        shared = one.keys() & start.keys()
        assert max(float((one[key] - start[key]).abs().max()) for key in shared) > 1e-5
    ours, theirs = optimizer_states(whole), optimizer_states(again)
    assert len(ours) == len(theirs) > 4
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    if name in ("grpo", "ppo"):
        assert rollouts(whole) == rollouts(again) != []
    scores = name == "reward"
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    loaded, report = auto.from_pretrained(again / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.isfinite(loaded(input_ids=torch.tensor([[1, 7, 8]])).logits).all()
