"""Two processes train like one on the same pairs, where the formulation allows it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from direct_alignment_processes import ROWS, train
from policy_gradient_cases import checkpoint, drift
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    command = [
        *[sys.executable, "-m", "accelerate.commands.launch"],
        *["--config_file", "configs/accelerate/cpu_2proc.yaml"],
        *["tests/direct_alignment_processes.py", str(folder)],
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
    if case in APART:
        assert 1e-6 < apart < APART[case]
    else:
        assert apart <= 1e-6
