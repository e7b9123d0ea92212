"""Train on TRL's trainers and on ours in formulation trl, on two processes; both log alike."""

import sys
from pathlib import Path

import torch
from library_cases import train

RUNS = [
    ("grpo", {"num_iterations": 2, "beta": 0.1}),
    ("dpo", {"max_length": 12}),
    ("kto", {}),
    ("reward", {}),
]


def main(folder):
    """Compare the runs on this process."""
    for kind, fields in RUNS:
        stock, ours = (
            train(kind, mine, folder / f"{kind}-{mine}", fields=fields) for mine in (False, True)
        )
        assert stock.trainer.accelerator.num_processes == 2
        assert ours.logs == stock.logs, (kind, ours.logs, stock.logs)
        for name, weight in stock.weights.items():
            assert torch.equal(ours.weights[name], weight), (kind, name)
        print(kind, "same")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
