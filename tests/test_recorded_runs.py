"""Ten recorded steps of stock trainers: faults that no loss on a fixed batch shows move them."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from planted import ON_ONE, ON_TWO, planted

from rlhf_trl.compare.drift import differences as drift
from rlhf_trl.compare.drift import surface
from rlhf_trl.compare.models import quick_and_quiet

SHIPPED = surface.shipped()
QUICK = ("warm-up", "evaluation mean")  # in the default test run


def of(trainer, section=surface.RUNS):
    """The shipped surface with the runs of one trainer, and nothing else that is measured."""
    facts = {name: x for name, x in SHIPPED[section].items() if name.split()[0] == trainer}
    assert len(facts) > 15
    return {**SHIPPED, "losses": {}, "runs": {}, section: facts}


def differences(trainer):
    return list(map(str, drift.check(of(trainer))[0]))


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.promise) for name in ON_ONE],
)
def test_a_planted_fault_moves_a_run(name):
    trainer, *fault = ON_ONE[name]
    with planted(*fault):
        assert any(line.startswith(f"{trainer} ") for line in differences(trainer))


@pytest.mark.promise
@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer"])
def test_nothing_moves_where_nothing_is_planted(trainer):
    assert differences(trainer) == []


@pytest.mark.promise
@pytest.mark.parametrize("name", [*ON_TWO, "nothing"])
def test_a_fault_that_needs_two_processes_moves_a_run_on_two(name, tmp_path):
    trainer = ON_TWO.get(name, ["KTOTrainer"])[0]
    known = of(trainer, surface.RUNS_OF_TWO)
    arguments = [trainer], known["homes"], known["defaults"], tmp_path
    (tmp_path / "arguments").write_bytes(pickle.dumps(arguments))
    script = str(Path(__file__).with_name("planted.py"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([sys.executable, *launcher, script, str(tmp_path), name], check=True)
    runs = json.loads((tmp_path / "runs.json").read_text())
    moved = drift.compare(known, {**known, surface.RUNS_OF_TWO: runs})
    assert [thing.what for thing in moved] == [] if name == "nothing" else moved


def test_a_run_that_cannot_be_made_is_one_difference(monkeypatch):
    def broken(*_):
        raise TypeError("no such argument")

    monkeypatch.setattr(surface, "facts_of_run", broken)
    with quick_and_quiet():
        (line,) = differences("DPOTrainer")
    assert line.startswith("DPOTrainer run: can be made -> TypeError: no such argument")
