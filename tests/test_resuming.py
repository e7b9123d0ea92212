"""Exact resume at every step, and what a checkpoint must hold for it."""

import json
import math
import os
import pickle
import shutil

import ppo_cases
import pytest
import torch
from policy_gradient_cases import LIMIT, build, checkpoint
from resuming import CASES, STEPS, SYNCED, resumed_at
from transformers import AutoModelForCausalLM, TrainerCallback

from rlhf_trl.checkpoints import follow_schedule

TIMEOUT = 3600  # seconds for all cases on two processes


def test_resumed_inside_a_generation_is_bit_identical(tmp_path):
    # a generation lasts 6 optimizer steps
    config = {"num_iterations": 3, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    # DAPO counts the tokens of its accumulation windows as well
    config |= {"name": "dapo", "max_completion_length": LIMIT}
    assert resumed_at(tmp_path, (1, 5, 6, 9), **config) == {1: True, 5: True, 6: True, 9: True}


def test_resumed_with_lora_and_workers_that_load_data(tmp_path):
    config = {**CASES["lora"], **CASES["workers"], "num_iterations": 2, "max_steps": 6}
    assert resumed_at(tmp_path, (3, 4), **config) == {3: True, 4: True}


@pytest.mark.promise
@pytest.mark.parametrize("name", CASES)
def test_resumed_at_every_step_is_bit_identical(name, tmp_path):
    found = resumed_at(tmp_path, range(1, STEPS), **CASES[name])
    assert len(found) == 11 and all(found.values())


@pytest.mark.promise
@pytest.mark.multiprocess
def test_resumed_at_every_step_on_two_processes(two_processes):
    for name in CASES:
        for rank in (0, 1):
            found = json.loads((two_processes / f"{name}.{rank}").read_text())
            assert len(found) == 11 and all(found.values()), name


def spoiled(**changes):
    def spoil(saved):
        file = saved / "policy_gradient_state_0.pt"
        state = torch.load(file, weights_only=True)
        torch.save({**state, **{k: change(state[k]) for k, change in changes.items()}}, file)

    return spoil


def older(name):
    """Bring back what the first checkpoint holds under a name."""

    def spoil(saved):
        path = saved.parent / "checkpoint-1" / name
        (shutil.copytree if path.is_dir() else shutil.copy)(
            path, saved / name, **({"dirs_exist_ok": True} if path.is_dir() else {})
        )

    return spoil


INSIDE = {"num_iterations": 3, "steps_per_generation": 4}
WINDOW = {"name": "dapo", "gradient_accumulation_steps": 2, "max_completion_length": LIMIT}
FORGOTTEN = {
    "step": (spoiled(step=lambda _: 0), INSIDE),
    "buffer": (spoiled(buffered_inputs=lambda _: None), INSIDE),
    "world size": (spoiled(world_size=lambda _: 2), INSIDE),
    "window": (spoiled(window_tokens=lambda n: [2 * t for t in n]), {**INSIDE, **WINDOW}),
    "baseline": (spoiled(carried=lambda c: {**c, "baseline_value": 0.0}), CASES["moving average"]),
    "stream": (spoiled(carried=lambda c: {**c, "stream_position": 0}), CASES["stream"]),
    "random state": (older("rng_state.pth"), CASES["1-1-1"]),
    "optimizer": (older("optimizer.pt"), CASES["ppo"]),
    "value model": (older("value_model"), CASES["ppo"]),
    "reference": (older("synced_reference.pt"), SYNCED),
}


@pytest.mark.parametrize(
    "what",
    [
        *["step", "buffer", "world size", "reference"],
        *(pytest.param(w, marks=pytest.mark.promise) for w in list(FORGOTTEN)[3:9]),
    ],
)
def test_what_a_checkpoint_must_hold(what, tmp_path):
    spoil, config = FORGOTTEN[what]
    assert resumed_at(tmp_path, [5], spoil, **{**config, "max_steps": 8}) == {5: False}


def test_a_synced_reference_is_kept(tmp_path):
    assert resumed_at(tmp_path, [3], **SYNCED, max_steps=6) == {3: True}
    # which is another one than the model was begun with
    kept = torch.load(tmp_path / "checkpoint-3" / "synced_reference.pt", weights_only=True)
    begun = AutoModelForCausalLM.from_pretrained(checkpoint()).state_dict()
    assert not all(torch.equal(kept[name], weight) for name, weight in begun.items())


class Rates(TrainerCallback):
    """Keeps the learning rates of every step that is taken, by parameter group."""

    def __init__(self):
        self.by_step = {}

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.by_step[state.global_step] = [group["lr"] for group in optimizer.param_groups]


def rates_of(folder, max_steps, start=None, critic=False, **config):
    config |= {"output_dir": str(folder), "max_steps": max_steps, "learning_rate": 1e-3}
    config |= {"save_strategy": "steps", "save_steps": 2}
    if critic:
        trainer = ppo_cases.build(value_learning_rate=3e-3, value_warmup_steps=3, **config)
    else:
        trainer = build("grpo", **config)
    rates = Rates()
    trainer.add_callback(rates)
    checkpoint = start and str(folder / f"checkpoint-{start}")
    trainer.train(resume_from_checkpoint=checkpoint)
    return rates.by_step


@pytest.mark.parametrize("start", [2, 4])
def test_a_longer_run_follows_its_schedule_from_the_first_step(start, tmp_path):
    linear = {"lr_scheduler_type": "linear"}
    before = rates_of(tmp_path, 4, **linear)
    assert [rate for rate, *_ in before.values()] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    after = rates_of(tmp_path, 8, start, **linear)
    assert list(after) == list(range(start, 8))
    for step, rates in after.items():
        assert rates == pytest.approx([1e-3 * (8 - step) / 8] * len(rates), rel=1e-12), step


def test_a_longer_run_follows_another_shape_and_its_warm_up(tmp_path):
    rates_of(tmp_path, 4, lr_scheduler_type="linear")
    changed = {"lr_scheduler_type": "cosine", "warmup_steps": 3}
    after = rates_of(tmp_path, 8, 2, **changed)
    expected = [1e-3 * 2 / 3]
    expected += [1e-3 * (1 + math.cos(math.pi * (step - 3) / 5)) / 2 for step in range(3, 8)]
    assert [rate for rate, *_ in after.values()] == pytest.approx(expected, rel=1e-12)


def test_a_longer_run_keeps_the_rates_of_policy_and_value_model_apart(tmp_path):
    rates_of(tmp_path, 2, critic=True, lr_scheduler_type="linear")
    after = rates_of(tmp_path, 6, 2, critic=True, lr_scheduler_type="linear")
    for step, rates in after.items():
        left = (6 - step) / 6
        policy = 0 if step < 3 else 1e-3 * left
        assert (rates[0], rates[-1]) == pytest.approx((policy, 3e-3 * left)), step


def test_a_schedule_that_did_not_change_is_resumed_to_the_bit(tmp_path):
    config = {"lr_scheduler_type": "cosine", "warmup_steps": 1}
    whole = rates_of(tmp_path, 4, **config)
    assert rates_of(tmp_path, 4, 2, **config) == {step: whole[step] for step in (2, 3)}


def test_a_schedule_that_knows_no_length_stays_where_it_was():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    follow_schedule(schedule)
    assert optimizer.param_groups[0]["lr"] == 0.25


class Executed:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_nothing_that_a_checkpoint_holds_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {**SYNCED, "max_steps": 2, "output_dir": str(tmp_path / "run")}
    build("grpo", save_strategy="steps", save_steps=1, **config).train()
    saved = tmp_path / "run" / "checkpoint-1"
    files = [path for path in saved.iterdir() if path.suffix in (".pt", ".pth", ".bin")]
    assert len(files) == 6
    for file in files:
        whole = file.read_bytes()
        torch.save({"x": Executed()}, file)
        trainer = build("grpo", **config)
        if file.name == "training_args.bin":  # is not read
            trainer.train(resume_from_checkpoint=str(saved))
        else:
            with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
                trainer.train(resume_from_checkpoint=str(saved))
        assert not (tmp_path / "executed").exists()
        file.write_bytes(whole)
