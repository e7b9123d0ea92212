"""Micro-batches of like cost have the gradient of equal ones; other losses are refused by name."""

import pytest
import torch
from direct_alignment_cases import build as build_pairs
from rebalanced_processes import (
    CASES,
    COUNT,
    MICRO_BATCHES,
    ONE_STEP,
    build,
    gradient,
    ragged,
    rebalanced,
)
from reward_model_cases import build as build_rewards
from transformers import TrainerCallback

from rlhf_trl.errors import InputError

NOISE = {"ipo": 5e-6}  # what equal micro-batches differ by: its squares of sums are large


def apart(first, second):
    return float((first - second).norm() / second.norm())


class Sizes(TrainerCallback):
    """Keeps how many pairs each micro-batch has."""

    def __init__(self, trainer):
        self.sizes = []
        step = trainer.training_step

        def counted(model, inputs, *args, **kwargs):
            self.sizes.append(len(inputs["input_ids"]) // 2)
            return step(model, inputs, *args, **kwargs)

        trainer.training_step = counted


LONG = [pytest.param(case, marks=pytest.mark.promise) for case in CASES[2:]]


@pytest.mark.parametrize("case", [*CASES[:2], *LONG], ids="-".join)
def test_gradient_of_one_batch_that_holds_all(case):
    trainer = build(*case, **rebalanced())
    whole = gradient(build(*case, per_device_train_batch_size=COUNT))
    assert apart(gradient(trainer), whole) < NOISE.get(case[0], 1e-6)


def test_sizes_differ_and_the_logged_loss_is_the_mean_over_pairs():
    trainer = build("dpo", **rebalanced())
    sizes = Sizes(trainer).sizes
    trainer.train()
    assert len(sizes) == MICRO_BATCHES
    assert sum(sizes) == COUNT
    assert max(sizes) > 1.5 * min(sizes)
    whole = build("dpo", per_device_train_batch_size=COUNT)
    whole.train()
    losses = [t.state.log_history[-1]["train_loss"] for t in (trainer, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_formulation_trl_takes_the_plain_mean_of_micro_batches():
    rows = ragged("dpo")
    for row in rows:  # transformers' sampler reads no more of them than this column
        row["length"] = max(len(row[side][0]["content"]) for side in ("chosen", "rejected"))
    settings = {"rows": rows, "remove_unused_columns": False, **ONE_STEP}
    stock = build_pairs("dpo", "trl", **settings, **rebalanced())
    whole = build_pairs("dpo", "trl", **settings, per_device_train_batch_size=COUNT)
    distance = apart(gradient(stock), gradient(whole))
    print(f"{distance:.2f}")
    assert distance > 0.1


def test_the_order_is_drawn_by_the_seed():
    orders = []
    for seed in (1, 1, 2):
        trainer = build("reward", seed=seed, **rebalanced())
        sampler = trainer._get_train_sampler()
        sampler.effective_batch_size = COUNT // 2  # so that the order decides who is together
        orders.append([*sampler])
    assert orders[0] == orders[1] != orders[2]


REFUSED = [
    (build_pairs, "kto", "chapter"),
    (build_pairs, "orpo", "chapter"),
    (build_rewards, "prm", "chapter"),
    (build_rewards, "prm", "code"),
    (build_rewards, "orm", "code"),
]


@pytest.mark.parametrize(("make", "name", "which"), REFUSED)
def test_losses_that_depend_on_the_neighbors_are_refused(make, name, which):
    with pytest.raises(InputError, match=rf"train_sampling_strategy: .* {name} \({which}\)"):
        make(name, which, train_sampling_strategy="batch_rebalance")


def test_fewer_examples_than_micro_batches():
    trainer = build_pairs(
        "dpo",
        count=6,
        train_sampling_strategy="batch_rebalance",
        gradient_accumulation_steps=8,
        max_steps=1,
    )
    with pytest.raises(InputError, match=r"makes 8 micro-batches .* 6 examples"):
        trainer.train()


def test_a_resumed_run_ends_as_one_that_was_never_stopped(tmp_path):
    config = {
        "train_sampling_strategy": "batch_rebalance",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,  # an epoch has eight
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
    }
    whole = build("dpo", output_dir=str(tmp_path), save_strategy="steps", save_steps=5, **config)
    whole.train()
    for step in (5, 10):
        resumed = build("dpo", output_dir=str(tmp_path / "again"), **config)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
