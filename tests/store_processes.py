"""Keep records on two processes; write what each process' loss saw to a folder.

Launch it with configs/accelerate/cpu_2proc.yaml and the folder as its only argument.
"""

import sys
from pathlib import Path

from store_cases import record

CASES = [
    *[("grpo", "chapter", 2, 1), ("dapo", "replaced", 1, 10), ("dapo", "trl", 1, 1)],
    *[("ppo", "chapter", 1, 10), ("ppo", "code", 2, 1)],
]


def main(cases=CASES):
    """Run all cases on the processes that were launched."""
    import torch.distributed

    for case in cases:
        folder = Path(sys.argv[1], "-".join(map(str, case)))
        folder.mkdir(parents=True, exist_ok=True)
        seen = record(*case, folder, processes=2)
        assert torch.distributed.get_world_size() == 2
        torch.save(seen, folder / f"seen.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main()
