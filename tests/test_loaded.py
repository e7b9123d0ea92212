"""What a run loads of the package: the code of its own kind of data, and of no other."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from pathlib import Path
from rlhf_trl.run.stages import STAGES
stage = STAGES[sys.argv[1]]
stage.load(["--config", f"configs/tiny/{sys.argv[1]}.yaml"])
stage.part("run")
stage.part("trainer")
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "rlhf_trl" and getattr(module, "__file__", None):
        print(name, len(Path(module.__file__).read_text().splitlines()))
"""
OF_FILES = {"files", "columns", "readers", "pair_files", "prompt_files"}


@pytest.mark.parametrize(
    ("stage", "other_kinds", "most"),
    [
        ("grpo", OF_FILES | {"pairs", "made", "demonstrations", "judgments", "steps"}, 9_600),
        ("dpo", OF_FILES | {"demonstrations", "judgments"}, 10_250),
    ],
)
def test_a_run_on_gym_tasks_loads_no_loader_of_another_kind(stage, other_kinds, most):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, stage], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = dict(line.split() for line in done.stdout.splitlines() if line.startswith("rlhf_trl"))
    assert {"rlhf_trl.run.train", "rlhf_trl.data.blocks", "rlhf_trl.losses"} <= lines.keys()
    assert not {f"rlhf_trl.data.{kind}" for kind in other_kinds} & lines.keys()
    assert sum(map(int, lines.values())) <= most
