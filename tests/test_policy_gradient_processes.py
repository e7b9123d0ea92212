"""Two processes train like one on the same completions, where the formulation allows it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from policy_gradient_processes import CASES, train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    command = [
        *[sys.executable, "-m", "accelerate.commands.launch"],
        *["--config_file", "configs/accelerate/cpu_2proc.yaml"],
        *["tests/policy_gradient_processes.py", str(folder)],
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    paths = [str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", "")]
    env |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]]),
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


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
    if case in APART:
        assert 1e-6 < apart < APART[case]
    else:
        assert apart <= 1e-6
