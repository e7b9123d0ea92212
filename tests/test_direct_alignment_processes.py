"""Two processes train like one on the same pairs, where the formulation allows it."""

import pytest
import torch
from direct_alignment_processes import ROWS, train
from launchers import hold
from policy_gradient_cases import checkpoint, drift
from transformers import AutoModelForCausalLM

# KTO's mismatched pairs are made within the batch of a device, and TRL's ORPO takes one mean over
# all tokens of such a batch: how far apart the weights may end
APART = {
    ("kto", "chapter"): 1e-2,
    ("kto", "code"): 1e-2,
    ("kto", "trl"): 1e-2,
    ("orpo", "trl"): 1e-2,
}


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS, ids="-".join)
def test_two_processes_train_like_one(case, two_processes):
    name = "-".join(case)
    first, second = (torch.load(two_processes / f"{name}.{rank}") for rank in (0, 1))
    assert torch.equal(first, second)
    weights = train(*case, processes=1)
    start = AutoModelForCausalLM.from_pretrained(checkpoint())
    drift(start, 0.05, 99)
    begun = torch.cat([p.detach().flatten() for _, p in sorted(start.named_parameters())])
    assert float((weights - begun).abs().max()) > 1e-4  # so that there is something to agree on
    apart = float((first - weights).abs().max())
    print(f"{name}: {apart:.1e}")
    hold("processes", *case, apart)
    if case in APART:
        assert 1e-6 < apart < APART[case]
    else:
        assert apart <= 1e-6
