"""Two processes distill like one on the same completions."""

import pytest
import torch
from distillation_processes import CASES, train
from launchers import hold


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_processes_train_like_one(case, two_processes):
    first, second = (torch.load(two_processes / f"{'-'.join(case)}.{rank}") for rank in (0, 1))
    assert torch.equal(first, second)
    weights, before = train(*case, processes=1)
    assert float((weights - before).abs().max()) > 1e-3
    apart = float((first - weights).abs().max())
    assert apart <= 1e-6
    if case[2] == "start":
        hold("processes", *case[:2], apart)
