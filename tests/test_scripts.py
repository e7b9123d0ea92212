"""What scripts/setup.sh does, without installing anything."""

import os
import shutil
import subprocess
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


def test_an_old_python_makes_no_environment(setup, tmp_path):
    done = setup()
    assert done.returncode == 1
    assert done.stderr == (
        "error: Python 3.9.2 is too old; set PYTHON to a Python 3.11 or newer.\n"
    )
    assert not (tmp_path / ".venv").exists()
