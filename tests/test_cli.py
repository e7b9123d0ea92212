"""The `rlhf-trl` command: what it prints is in the installed sources."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trl

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.cli import main

TRAINER = Path(trl.__file__).parent / "trainer" / "grpo_trainer.py"
ROOT = Path(__file__).parent.parent


def test_the_table_has_a_line_for_every_formulation(capsys):
    main(["algorithms"])
    lines = capsys.readouterr().out.splitlines()
    for name in ALGORITHMS:
        assert [line.split()[1] for line in lines if line.startswith(name + " ")] == [
            "chapter",
            "code",
            "trl",
        ]


def test_json_says_what_the_rows_are_made_of(capsys):
    main(["algorithms", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    cispo = rows["cispo"]["formulations"]
    assert cispo["chapter"]["surrogate"] == "clipped_importance_weight"
    assert cispo["chapter"]["normalised_over"] == "window"
    assert cispo["code"]["aggregation"] == "sequence_mean"
    assert cispo["chapter"]["trl_settings"]["loss_type"] == "cispo"
    assert rows["maxrl"]["formulations"]["trl"].startswith("TRL divides")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_place_named_exists(capsys, name):
    main(["algorithms", name])
    text = capsys.readouterr().out
    assert "no counterpart" not in text
    ours = re.findall(r"(\w+): (\w+).*\n +.*\n +(rlhf_trl/book/\w+\.py):(\d+)", text)
    assert len(ours) >= 4
    for _, function, file, line in ours:
        assert f"def {function}(" in (ROOT / file).read_text().splitlines()[int(line) - 1]


def test_trls_own_lines_are_the_ones_meant(capsys):
    main(["algorithms", "cispo"])
    line = re.search(r"grpo_trainer\.py:(\d+), weight", capsys.readouterr().out)[1]
    source = TRAINER.read_text().splitlines()
    assert "clamped_ratios" in source[int(line) - 1]


def test_an_unknown_name_is_one_sentence():
    command = [sys.executable, "-m", "rlhf_trl.cli", "algorithms", "cipso"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("error: unknown algorithm 'cipso' (did you mean 'cispo'?)")
