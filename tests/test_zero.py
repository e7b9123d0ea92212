"""ZeRO-2 and ZeRO-3 on two CPU processes train like one process, and every recipe runs there."""

import json

import pytest
import torch
from launchers import hold
from safetensors.torch import load_file
from zero import RUNS, STAGES, STEPS, train

from rlhf_trl.tiny import checkpoint_path

ACCELERATE = "zero3"  # the script takes itself to the other stages

# KTO's reference point is a mean over the completions of all devices, of which there is one here
APART = {"kto": 1e-2}

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.promise]


def change(found):
    return torch.cat([(found["after"][k] - found["before"][k]).flatten() for k in found["before"]])


def check(name, stages, folder):
    one = train(name, processes=1)
    moved = change(one)
    assert (one["stage"], one["optimizer"]) == (None, "SGD")
    assert float(moved.norm()) > 0.1  # so that there is something to agree on
    for stage in stages:
        first, second = (torch.load(folder / f"{name}-{stage}.{rank}") for rank in (0, 1))
        assert (first["stage"], first["wrapper"]) == (stage, "DeepSpeedEngine")
        assert first["optimizer"] == "SGD"
        assert "2 processes, strategy deepspeed, float32, sgd; " in first["line"]
        for key, weight in one["before"].items():
            assert torch.equal(first["before"][key], weight), key
            assert torch.equal(first["after"][key], second["after"][key]), key
        apart = float((change(first) - moved).norm() / moved.norm())
        print(f"{name}, stage {stage}: {apart:.1e}")
        if name != "skipping":  # the page has a line for each trainer
            hold("zero", name, f"ZeRO-{stage}", apart)
        assert apart < APART.get(name, 2e-5)


@pytest.mark.parametrize("name", STAGES)
def test_two_steps_of_every_trainer_are_those_of_one_process(name, two_processes):
    check(name, STAGES[name], two_processes)


def saved(folder):
    weights = load_file(folder / "model" / "model.safetensors")
    return {k: v for k, v in weights.items() if "score" not in k}


@pytest.mark.parametrize("name", RUNS)
def test_recipes_run_to_their_end_under_zero_3(name, two_processes):
    printed = torch.load(two_processes / "printed.0")[name]
    optimizer = "sgd" if name == "dpo" else "adamw_torch_fused"
    assert f"on cpu, 2 processes, strategy deepspeed, float32, {optimizer}; " in printed
    summary = json.loads((two_processes / name / "summary.json").read_text())
    assert (summary["steps"], summary["processes"]) == (STEPS, 2)
    start = load_file(f"{checkpoint_path()}/model.safetensors")
    after = saved(two_processes / name)
    assert after.keys() <= start.keys()
    moved = max(float((after[k] - start[k]).abs().max()) for k in after)
    assert 0 < moved < 0.01


def test_a_value_head_is_saved_with_the_backbone_that_it_shares(two_processes):
    value = load_file(two_processes / "ppo" / "value_model" / "model.safetensors")
    policy = load_file(two_processes / "ppo" / "model" / "model.safetensors")
    assert value.keys() == {"score.weight", *policy.keys() - {"lm_head.weight"}}
    assert all(torch.equal(value[k], policy[k]) for k in value.keys() & policy.keys())
    assert float(value["score.weight"].abs().max()) > 0  # where it starts


def test_answers_and_model_of_a_whole_run_are_those_of_one_process(run, two_processes):
    words = RUNS["dpo"][1].replace("train_batch_size 4", "train_batch_size 8").split()
    folder, _ = run("dpo", "dpo", *words)
    for side in ("train", "held-out"):
        answers = (folder / f"samples-{side}.jsonl").read_text()
        assert len(answers.splitlines()) > 4
        assert (two_processes / "dpo" / f"samples-{side}.jsonl").read_text() == answers
    one, two = saved(folder), saved(two_processes / "dpo")
    start = load_file(f"{checkpoint_path()}/model.safetensors")
    assert max(float((one[k] - start[k]).abs().max()) for k in one) > 1e-4
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-7


def test_a_swapped_optimizer_is_named_or_refused(two_processes):
    printed = torch.load(two_processes / "printed.1")
    assert "strategy deepspeed, float32, DeepSpeedCPUAdam; " in printed["adamw"]
    assert "optim is sgd" in printed["sgd"] and "DeepSpeedCPUAdam in its place" in printed["sgd"]
    assert "zero_force_ds_cpu_optimizer: false" in printed["sgd"]


@pytest.mark.promise
def test_offloaded_adam_is_adamw(launch, run, tmp_path):
    """Needs a C++ compiler, and two minutes for the first build of DeepSpeed's Adam."""
    words = RUNS["orpo"][1].split()
    config = tmp_path / "offload.yaml"
    with open("configs/accelerate/zero2.yaml") as file:
        config.write_text(file.read().replace("optimizer_device: none", "optimizer_device: cpu"))
    two = tmp_path / "two"
    given = ["--config", "configs/tiny/orpo.yaml", "--output_dir", str(two)]
    done = launch(["--config_file", config, "--num_processes", "2"], "orpo", *given, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "strategy deepspeed, float32, DeepSpeedCPUAdam; " in done.stdout
    one, _ = run("orpo", "orpo", *words, "--per_device_train_batch_size", 8)
    start = load_file(f"{checkpoint_path()}/model.safetensors")
    one, two = saved(one), saved(two)
    moved = sum(float((one[k] - start[k]).square().sum()) for k in one) ** 0.5
    apart = sum(float((one[k] - two[k]).square().sum()) for k in one) ** 0.5
    print(f"{apart / moved:.1e} apart")
    assert moved > 0.01 and apart < 1e-3 * moved
