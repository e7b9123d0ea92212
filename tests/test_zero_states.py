"""Two processes under ZeRO-1, 2 and 3 hold the bytes that `rlhf-trl plan` plans."""

import json

import pytest
import torch
from transformers import AutoConfig

from rlhf_trl.run import fake_models, shares
from rlhf_trl.tiny import checkpoint_path

ACCELERATE = "zero3"  # the script takes itself to the other stages

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.promise]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_each_process_holds_the_planned_optimizer(strategy, two_processes):
    config = AutoConfig.from_pretrained(checkpoint_path())
    model = fake_models.new_model(config, "fused", torch.float32)
    weights = fake_models.weights_of(model, "adamw_torch")
    launch = shares.Launch(processes=2, strategy=strategy)
    planned = shares.per_process(weights, launch, computes_in_bf16=False)["optimizer"]
    for rank in (0, 1):
        held = json.loads((two_processes / f"held.{rank}.json").read_text())[strategy]
        # the plan also counts the gradients of the masters, which are there until the step is over
        live = held["averages"] + 2 * held["masters"]
        # each parameter's shares are filled up to one length: a number of 16 bytes at most
        assert abs(live - planned) <= 16 * len([*model.parameters()])
