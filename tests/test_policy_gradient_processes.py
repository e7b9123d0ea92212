"""Two processes train like one on the same completions, where the formulation allows it."""

import pytest
import torch
from launchers import hold
from policy_gradient_processes import CASES, train

from rlhf_trl.manifests import checkpoint_fault, read_manifest

# a token mean per micro-batch depends on which rows share one: how far apart the weights may end
APART = {("dapo", "code", ""): 5e-3}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_processes_train_like_one(case, two_processes):
    name = "-".join(map(str, case))
    first, second = (torch.load(two_processes / f"{name}.{rank}") for rank in (0, 1))
    assert torch.equal(first["weights"], second["weights"])
    weights, carried = train(*case[:2], processes=1, variant=case[2])
    assert first["carried"] == second["carried"] == pytest.approx(carried)
    if case[2] == "dynamic sampling":
        assert carried["stream_position"] > 0
    apart = float((first["weights"] - weights).abs().max())
    print(f"{name}: {apart:.1e}")
    if not case[2]:
        hold("processes", *case[:2], apart)
    if case in APART:
        assert 1e-6 < apart < APART[case]
    else:
        assert apart <= 1e-6


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_resumed_inside_a_generation(two_processes):
    ends = [each for rank in (0, 1) for each in torch.load(two_processes / f"resumed.{rank}")]
    assert all(torch.equal(end, ends[0]) for end in ends)
    checkpoint = two_processes / "run" / "checkpoint-4"
    assert checkpoint_fault(checkpoint) is None
    manifest = read_manifest(checkpoint)
    assert manifest["world_size"] == 2
    assert {"rng_state_1.pth", "policy_gradient_state_1.pt"} < manifest["files"].keys()
