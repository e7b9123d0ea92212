"""Two processes keep one record, in which every completion of both stands once."""

import pytest
import torch
from store_cases import check
from store_processes import CASES

from rlhf_trl.output import RECORD


def check_both(case, folder):
    folder = folder / "-".join(map(str, case))
    seen = [each for rank in (0, 1) for each in torch.load(folder / f"seen.{rank}")]
    check(case, folder / RECORD, seen)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_processes_keep_one_record(case, two_processes):
    check_both(case, two_processes)
