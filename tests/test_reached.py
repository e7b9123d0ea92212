"""What a reward's results depend on: every change of it changes the hash, and nothing else does."""

import importlib
import os
import subprocess
import sys
from functools import partial, wraps

import pytest

from rlhf_trl.data.reached import reached
from rlhf_trl.rewards.loading import load_rewards

REWARD = {
    "pack/rewards.py": "from . import near\n\n\ndef reward(completions, **_):\n"
    "    from lazy_one import weight\n\n    return [near.sign() * weight() for _ in completions]\n",
    "pack/near.py": "import far_one as other\n\n\ndef sign():\n    return other.SIGN * TABLE['a']\n"
    "\n\nimport json\nfrom pathlib import Path\n\n"
    "TABLE = json.loads(Path(__file__).with_name('table.json').read_text())\n",
    "pack/table.json": '{"a": 1}',
    "far_one.py": "SIGN = 1\n",
    "lazy_one.py": "def weight():\n    return LOADED[0]\n\n\nLOADED = [1]\n",
    "unrelated_one.py": "SIGN = 1\n",
}
MODULES = ("pack", "far_one", "lazy_one", "unrelated_one")


def forget():
    importlib.invalidate_caches()
    for name in list(sys.modules):
        if name.partition(".")[0] in MODULES:
            del sys.modules[name]


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Write the modules of a reward, some of them otherwise, and return its hash."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which edits within a second outlive

    def hashed(edits=None):
        for name, content in (REWARD | (edits or {})).items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        forget()
        (function,) = load_rewards(["pack.rewards.reward"], None, ["answer"])
        return reached(function)

    yield hashed
    forget()


@pytest.mark.parametrize("name", [name for name in REWARD if not name.startswith("unrelated")])
def test_whatever_a_reward_reaches_counts(hashed, name):
    before = hashed()
    assert hashed() == before
    assert hashed({name: REWARD[name].replace("1", "-1") + " \n"}) != before
    assert hashed({"unrelated_one.py": "SIGN = -1\n"}) == before


def test_another_process_finds_the_same(hashed, tmp_path):
    before = hashed()
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from rlhf_trl.data.reached import reached\n"
        "from rlhf_trl.rewards.loading import load_rewards\n"
        "print(reached(*load_rewards(['pack.rewards.reward'], None, ['answer'])))\n"
    )
    env = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert run.stdout.strip() == before, run.stderr


def scaled(sign):
    def reward(completions, **_):
        return [sign for _ in completions]

    return reward


def with_sign(function, sign):
    @wraps(function)
    def signed(completions, **_):
        return [sign * value for value in function(completions)]

    return signed


def by_keyword(completions, sign=1, **_):
    return [sign for _ in completions]


class Scale:
    def __init__(self, sign):
        self.sign = sign

    def __call__(self, completions, **_):
        return [self.sign for _ in completions]


@pytest.mark.parametrize(
    "make", [scaled, partial(with_sign, by_keyword), lambda s: partial(by_keyword, sign=s), Scale]
)
def test_the_values_that_a_reward_holds_count(make):
    assert reached(make(1)) == reached(make(1)) != reached(make(-1))


def test_what_cannot_be_hashed_is_named(hashed):
    drawn = {"far_one.py": "SIGN = 1\nOPEN = (n for n in range(3))\n"}
    with pytest.raises(ValueError, match="the module 'far_one' holds what cannot be hashed"):
        hashed(drawn)
