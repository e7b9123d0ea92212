"""Two processes with micro-batches of like cost have the gradient of one batch that holds all."""

import pytest
import torch
from rebalanced_processes import CASES, COUNT, build, gradient
from test_rebalanced import NOISE, apart


@pytest.mark.multiprocess
@pytest.mark.promise
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_processes_have_the_gradient_of_one(case, two_processes):
    first, second = (torch.load(two_processes / f"{'-'.join(case)}.{rank}") for rank in (0, 1))
    assert torch.equal(first, second)
    whole = gradient(build(*case, per_device_train_batch_size=COUNT))
    assert apart(first, whole) < NOISE.get(case[0], 1e-6)
