"""Two processes train and evaluate like one on the same rows, where the formulation allows it."""

import pytest
import torch
from launchers import hold
from reward_model_cases import INVARIANT, build
from reward_model_processes import ROWS, train

SPEED = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
SPEED |= {"eval_model_preparation_time"}


def numbers(value):
    """Return all numbers of nested rows, in their order."""
    if isinstance(value, dict):
        return [n for each in value.values() for n in numbers(each)]
    if isinstance(value, torch.Tensor):
        return value.flatten().tolist()
    if isinstance(value, list | tuple):
        return [n for each in value for n in numbers(each)]
    return [value]


def same_evaluation(one, two):
    assert one["metrics"].keys() == two["metrics"].keys()
    compared = one["metrics"].keys() - SPEED
    assert {k: one["metrics"][k] for k in compared} == pytest.approx(
        {k: two["metrics"][k] for k in compared}, abs=1e-4
    )
    for key in ("rows", "scores"):
        assert numbers(one[key]) == pytest.approx(numbers(two[key]), abs=1e-4)
    assert len(one["scores"]) == 11
    assert len({score["score" if "score" in score else "last"] for score in one["scores"]}) == 11


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS, ids="-".join)
def test_two_processes_train_like_one(case, two_processes):
    name = "-".join(case)
    first, second = (
        torch.load(two_processes / f"{name}.{rank}", weights_only=False) for rank in (0, 1)
    )
    assert torch.equal(first["weights"], second["weights"])
    one = train(*case, processes=1)
    begun = [p.detach().flatten() for _, p in sorted(build(*case).model.named_parameters())]
    moved = float((one["weights"] - torch.cat(begun)).abs().max())
    apart = float((first["weights"] - one["weights"]).abs().max())
    print(f"{name}: {apart:.1e} apart, {moved:.1e} moved")
    hold("processes", *case, apart)
    assert moved > 1e-3  # so that there is something to agree on
    for found in (first, second):
        same_evaluation(one["before"], found["before"])
        kept = [len(found[when]["rows"]) for when in ("before", "after")]
        assert kept == ([0, 0] if case[0] == "orm" else [16, 13])
    if case in INVARIANT:
        assert apart <= 1e-6
        same_evaluation(one["after"], first["after"])
    else:
        assert 1e-5 < apart < 0.3 * moved
