"""What scripts/setup.sh does, without installing anything."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("scripts/setup.sh", "constraints.txt", "pyproject.toml")


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def setup(tmp_path):
    """Run setup.sh in a copy of the project whose system has an old Python."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    old = written(
        tmp_path / "old-python",
        '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\n[ "$1" != -c ]\n',
    )

    def setup(*extras):
        return subprocess.run(
            [str(tmp_path / "scripts" / "setup.sh"), *extras],
            env={**os.environ, "PYTHON": str(old)},
            capture_output=True,
            text=True,
            check=False,
        )

    return setup


def test_an_old_system_python_does_not_matter_where_the_environment_is_there(setup, tmp_path):
    # its own Python, which pretends to install
    written(tmp_path / ".venv/bin/python", '#!/bin/sh\necho "$@" >>"$(dirname "$0")/calls"\n')
    calls = tmp_path / ".venv" / "bin" / "calls"
    first = setup("test")
    assert (first.returncode, first.stderr) == (0, "")
    assert "--constraint constraints.txt torch --editable .[test]" in calls.read_text()
    calls.unlink()
    for extras in (("test",), ()):  # complete: nothing is left to do
        done = setup(*extras)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not calls.exists()


@pytest.mark.parametrize(("slips", "least", "most"), [(0.0, 0.0, 0.0), (0.6, 0.55, 0.65)])
def test_sums_in_words_count_right_and_end_right_but_for_the_slips(tmp_path, slips, least, most):
    path = tmp_path / "new" / "sums.jsonl"
    words = [str(path), "--count", "800", "--slips", str(slips)]
    subprocess.run([sys.executable, str(ROOT / "scripts" / "word_sums.py"), *words], check=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 800
    wrong = 0
    for row in rows:
        first, *events = re.findall(r"(\w+) (\d)", row["question"])
        counts, lines = [int(first[1])], []
        for verb, change in events:
            sign = "+" if verb in ("buys", "finds", "gets") else "-"
            counts.append(counts[-1] + int(sign + change))
            sum_ = f"{counts[-2]}{sign}{change}"
            lines.append(f"{sum_}=<<{sum_}={counts[-1]}>>{counts[-1]}")
        *steps, end = row["answer"].split("\n")
        assert steps == lines and 1 <= len(lines) <= 2 and min(counts) >= 0
        assert end in (f"#### {counts[-1]}", f"#### {counts[-2]}")
        wrong += end != f"#### {counts[-1]}"
    assert least <= wrong / 800 <= most


def test_an_old_python_makes_no_environment(setup, tmp_path):
    done = setup()
    assert done.returncode == 1
    assert done.stderr == (
        "error: Python 3.9.2 is too old; set PYTHON to a Python 3.11 or newer.\n"
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.promise
def test_killed_runs_end_as_if_they_had_never_been_stopped():
    done = subprocess.run(
        [sys.executable, "scripts/kill_test.py", "--short"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all: 3 identical" in done.stdout
