"""Train GRPO with the KL's k3 in the sign of the book's code and in the right one: 40 steps each.

python recipes/experiments/2026-11-22-two-faults/kl_sign.py [BETA]
"""

import json
import sys
from pathlib import Path

from rlhf_trl.run.jobs import Job, do_all

ROOT = Path(__file__).parents[3]


def largest_norms(folder: Path, beta: float, steps: int = 40) -> dict[str, float]:
    """Return the largest gradient norm of a run with each sign; a finished run is not repeated."""
    config = str(ROOT / "configs" / "tiny" / "grpo.yaml")
    rest = ["--beta", str(beta), "--kl_estimator", "k3", "--max_steps", str(steps)]
    runs = {sign: folder / f"{sign}-{beta}" for sign in ("code", "chapter")}
    do_all(
        [
            Job(folder, "recipes/grpo.py", ["--config", config, "--formulation", sign, *rest])
            for sign, folder in runs.items()
        ]
    )
    logs = {sign: json.loads((where / "log.json").read_text()) for sign, where in runs.items()}
    return {sign: max(each.get("grad_norm", 0) for each in log) for sign, log in logs.items()}


if __name__ == "__main__":
    beta = float(sys.argv[1]) if len(sys.argv) > 1 else 0.04
    for sign, norm in largest_norms(Path("outputs/kl-sign"), beta).items():
        print(f"beta {beta}, sign of the {sign}: largest gradient norm {norm:.1f}")
