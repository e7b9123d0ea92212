"""Recorded losses and metrics tell: their values are no neutral ones, and planted faults show."""

import json

import pytest
from planted import ON_LOSSES, planted

from rlhf_trl.compare.drift import differences as drift
from rlhf_trl.compare.drift import surface
from rlhf_trl.compare.models import quick_and_quiet

SHIPPED = surface.shipped()
OF_WINDOWS = ("batch", "columns")
REASONS = {
    (
        "GRPOTrainer loss_type=grpo entropy_coef=0.1 use_adaptive_entropy=true",
        "entropy_target a tenth",
    ): "the entropy is below both",
    # the beginning of a case, what changed: why the loss stays as it is
    ("SDPOTrainer", "success_reward_threshold a tenth"): "no sum of rewards lies in between",
    (
        "GRPOTrainer loss_type=grpo batch=sampler vllm_importance_sampling_mode=sequence_truncate",
        "vllm_importance_sampling_clip_max mirror",
    ): "TRL refuses it: the upper bound would be below the lower one",
}


def is_numeric(value):
    numbers = value if isinstance(value, list) else [value]
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers)


def other_values(value):
    """What changed, and the new value: numbers a tenth larger, or mirrored; counts one larger."""
    if isinstance(value, list):
        for place, number in enumerate(value):
            yield "a tenth", [*value[:place], 1.1 * number, *value[place + 1 :]]
        yield "mirror", [number / sum(map(abs, value)) for number in value]
    elif isinstance(value, int):
        yield "one more", value + 1
    else:
        yield "a tenth", 1.1 * value
        # of a share the other share, of a factor its inverse
        yield "mirror", 1 - value if 0 < value < 1 else 1 / value


def variants():
    """Every recorded case with one of its numbers changed: the case, what changed, the new case."""
    for case in SHIPPED["losses"]:
        for name, value in surface.settings(case).items():
            is_neutral = value in (0.0, 1.0)  # a field that is off has no value to tell
            if name in OF_WINDOWS or not is_numeric(value) or is_neutral:
                continue
            old = f"{name}={json.dumps(value, separators=(',', ':'))}"
            assert old in case
            for how, other in other_values(value):
                new = f"{name}={json.dumps(other, separators=(',', ':'))}"
                yield case, f"{name} {how}", case.replace(old, new)


def same(old, new):
    """As `drift` sees it: within 1e-4, or 1e-6 near 0; no error is the same."""
    tolerance = surface.TOLERANCE
    return isinstance(new, list) and all(
        abs(x - y) <= tolerance * max(abs(x), abs(y), 0.01) for x, y in zip(old, new, strict=True)
    )


@pytest.mark.promise
def test_another_value_is_another_loss():
    changed = list(variants())
    assert len(changed) > 80
    with quick_and_quiet():
        new_cases = [new_case for *_, new_case in changed]
        losses = surface._losses(new_cases, SHIPPED["homes"], SHIPPED["defaults"])["losses"]
    unmoved = []
    for case, what, new_case in changed:
        new = losses[new_case]
        if isinstance(new, str) or same(SHIPPED["losses"][case], new):
            unmoved.append((case, what))
    reasons = {
        (case, what)
        for case, what in unmoved
        for start, field in REASONS
        if case.startswith(start) and what == field
    }
    assert [one for one in unmoved if one not in reasons] == []
    assert len(reasons) == len(REASONS)


@pytest.mark.promise
@pytest.mark.parametrize("name", ON_LOSSES)
def test_a_planted_fault_moves_a_loss(name):
    trainer, *fault = ON_LOSSES[name]
    losses = {case: x for case, x in SHIPPED["losses"].items() if case.startswith(trainer)}
    known = {**SHIPPED, "losses": losses, surface.RUNS: {}, surface.RUNS_OF_TWO: {}}
    with planted(*fault):
        moved = drift.check(known)[0]
    assert any(thing.what.startswith(trainer) for thing in moved)


def test_a_metric_that_moves_is_named_with_the_first_case_of_an_unmoved_loss():
    cases = [f"DPOTrainer a={number}" for number in range(3)]
    accuracies = {case: {"accuracy": 0.5, "margin": None} for case in cases}
    recorded = {"losses": {case: [1.0, 2.0] for case in cases}, "metrics": accuracies}
    installed = {
        "losses": recorded["losses"] | {cases[0]: [1.1, 2.0]},
        "metrics": {case: {"accuracy": 0.25, "margin": None} for case in cases},
    }
    (moved,) = drift._moved_metrics(recorded, installed)
    assert moved.what == "DPOTrainer metric accuracy, a=1 and 1 more"
    assert (moved.recorded, moved.found) == (0.5, 0.25)


def test_a_run_that_moves_is_named_by_its_first_fact():
    recorded = {"DPOTrainer rows": [1, 2], "DPOTrainer loss": [0.5], "KTOTrainer loss": [0.5]}
    installed = recorded | {"DPOTrainer rows": [1, 3], "DPOTrainer loss": [0.6]}
    sections = {surface.RUNS: recorded}, {surface.RUNS: installed}
    (moved,) = drift._moved_runs(surface.RUNS, *sections, [])
    assert moved.what == "DPOTrainer rows, value 2 of 2 (and loss)"
    assert (moved.recorded, moved.found) == (2, 3)
