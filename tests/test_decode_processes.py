"""On two processes, too, prompts that are read once leave a run as it is."""

import pytest
import torch


@pytest.mark.promise
@pytest.mark.multiprocess
def test_two_processes_end_with_the_same_weights(two_processes):
    runs = [torch.load(path) for path in sorted(two_processes.glob("[Ne]*.[01]"))]
    assert len(runs) == 4
    assert all(torch.equal(weights, runs[0]) for weights in runs[1:])
