"""ZeRO-2, where test_zero.py has ZeRO-3 only: it shares out less."""

import pytest
from test_zero import ACCELERATE, check  # noqa: F401 - how the script is launched
from zero_2 import STAGES

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.promise]


@pytest.mark.parametrize("name", STAGES)
def test_two_steps_of_every_trainer_are_those_of_one_process(name, two_processes):
    check(name, STAGES[name], two_processes)
