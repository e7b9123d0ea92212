"""rlhf_trl/compare/launchers.md holds what tests measure, and tells every exception."""

import re

import launchers
import pytest
import test_direct_alignment_processes as alignment
import test_policy_gradient_processes as policy
from reward_model_cases import INVARIANT
from reward_model_cases import ROWS as REWARD_MODELS

from rlhf_trl.algorithms import ALGORITHMS

NOT_TRAINED = {("rloo", "trl")}  # RLOOTrainer's, which no recipe starts


def test_every_row_and_formulation_is_there_and_every_exception_is_told():
    cells = launchers.read()["processes"]
    assert cells.keys() == ALGORITHMS.keys()
    apart = set()
    for name, row in cells.items():
        there = {which for which, cell in row.items() if cell != "none"}
        assert there == {*ALGORITHMS[name].formulations}, name
        assert {(name, which) for which, cell in row.items() if cell == "-"} <= NOT_TRAINED
        measured = {which: cell for which, cell in row.items() if re.match(r"\d", cell)}
        apart |= {(name, which) for which in measured}
    expected = {case[:2] for case in policy.APART} | {*alignment.APART}
    expected |= {case for case in REWARD_MODELS if case not in INVARIANT}
    assert apart == expected
    told = re.findall(r"^- (\w+) \(", launchers.PAGE.read_text(), re.MULTILINE)
    assert told == sorted({name for name, _ in apart})


def test_a_measurement_that_the_page_does_not_tell_is_a_failure(monkeypatch):
    monkeypatch.delenv("RLHF_TRL_LAUNCHERS", raising=False)
    launchers.hold("processes", "grpo", "chapter", 9e-7)
    launchers.hold("zero", "grpo", "ZeRO-2", 1e-5)
    launchers.hold("processes", "dapo", "code", 1.3e-3)
    for wrong in (("grpo", "chapter", 2e-6), ("dapo", "code", 1e-2), ("dapo", "code", 1e-7)):
        with pytest.raises(AssertionError):
            launchers.hold("processes", *wrong)
    with pytest.raises(KeyError):
        launchers.hold("processes", "unknown", "chapter", 0.0)
