"""PPO on two processes trains like PPO on one, with every kind of value model."""

import pytest
import torch
from launchers import hold
from ppo_cases import build, unsettle
from ppo_processes import CASES, train

# of whole generations; what is averaged over micro-batches depends on who shares one
METRICS = ("val/explained_variance", "returns/mean", "advantages/mean", "advantages/std")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_like_one(case, two_processes):
    number = list(CASES).index(case)
    first, second = (torch.load(two_processes / f"{number}.{rank}") for rank in (0, 1))
    weights, logs = train(case, processes=1)
    start = build(**CASES[case])
    unsettle(start)
    start = dict(start.model.named_parameters())
    moved = {"policy": 0.0, "value": 0.0}
    for name, weight in weights.items():
        assert torch.equal(first["weights"][name], second["weights"][name])
        apart = float((first["weights"][name] - weight).abs().max())
        assert apart <= 1e-6, name
        hold("processes", "ppo", CASES[case].get("formulation", "chapter"), apart)
        side = "value" if "value_model" in name else "policy"
        moved[side] = max(moved[side], float((weight - start[name]).detach().abs().max()))
    assert moved["policy"] > 1e-4 and moved["value"] > 1e-4, moved
    for ours, theirs in zip(logs, first["logs"], strict=True):
        for metric in METRICS:
            assert (metric in ours) == (metric in theirs)
            if metric in ours and CASES[case]["num_iterations"] > 1:
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4), metric
