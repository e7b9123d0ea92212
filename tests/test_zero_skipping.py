"""Under ZeRO-2 and 3, two processes leave out completions without advantage, each its own."""

import pytest
from test_zero import ACCELERATE, check  # noqa: F401 - how the script is launched
from zero_skipping import STAGES

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.promise]


def test_two_steps_are_those_of_one_process_that_reads_all(two_processes):
    check("skipping", STAGES["skipping"], two_processes)
