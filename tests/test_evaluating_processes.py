"""Two processes measure what one measures, where the rows do not fill them."""

import json

import pytest
from evaluating_processes import PARAMS, build, evaluated


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", PARAMS, ids="-".join)
def test_two_processes_measure_what_one_does(case, two_processes):
    paths = [two_processes / f"metrics.{rank}.json" for rank in (0, 1)]
    first, second = (json.loads(path.read_text())["-".join(case)] for path in paths)
    assert first == second
    assert first == pytest.approx(evaluated(build(*case), 9), rel=1e-6, abs=1e-6)
