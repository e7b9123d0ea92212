"""Every row, one and two updates, logged each and every tenth step, on one and two processes."""

import pytest
from store_cases import GRID, check, record
from test_store_processes import check_both

from rlhf_trl.output import RECORD

pytestmark = pytest.mark.promise


@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_every_generation_stands_once(case, tmp_path):
    check(case, tmp_path / RECORD, record(*case, tmp_path))


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", GRID, ids=lambda case: "-".join(map(str, case)))
def test_every_generation_stands_once_on_two_processes(case, two_processes):
    check_both(case, two_processes)
