"""The help of a recipe: short, quick, and what TRL's own classes say."""

import importlib
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rlhf_trl import cli
from rlhf_trl.run.config import load_config
from rlhf_trl.run.help import FieldHelp, _field_lines
from rlhf_trl.run.stages import STAGES

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.py"))
QUICKLY = """
import runpy, sys
sys.argv = ["recipes/{0}.py", "--help"]
try:
    runpy.run_path("recipes/{0}.py", run_name="__main__")
except SystemExit as end:
    print(end.code, sorted({{"torch", "trl", "transformers"}} & set(sys.modules)))
"""


def lines_of(text):
    """Return what a help says of each field, by its name."""
    return dict(re.findall(r"^  --(\S+) +(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_help_of_a_recipe_fits_on_two_screens_and_imports_no_torch(recipe):
    command = [sys.executable, "-c", QUICKLY.format(recipe)]
    how = {"env": {**os.environ, "COLUMNS": "120"}, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, check=True, **how)
    *told, end = done.stdout.splitlines()
    assert end == "0 []"
    assert len(told) <= 106
    assert max(map(len, told)) <= 120
    first = told.index("this recipe's fields:")
    assert first < told.index(next(line for line in told if line.startswith("TRL's fields that")))
    assert {"dataset.path", "learning_rate", "output_dir"} <= lines_of(done.stdout).keys()
    bare = re.compile(r"  --\S+ +\S.* = (\(required\)|\S+)$")  # without words
    assert not [line for line in told[first + 1 : told.index("", first)] if bare.match(line)]


@pytest.mark.parametrize("recipe", ["grpo", "rejection_sampling"])
@pytest.mark.parametrize("more", [[], ["all"]])
def test_train_shows_its_options_and_then_those_of_a_recipe(recipe, more, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--config", "x", recipe, "--help", *more])
    assert not end.value.code
    shown = capsys.readouterr().out
    assert shown.startswith("usage: rlhf-trl train ") and "--processes PROCESSES" in shown
    monkeypatch.setattr(sys, "argv", [f"recipes/{recipe}.py"])
    with pytest.raises(SystemExit):
        STAGES[recipe].load(["--help", *more])
    fields = capsys.readouterr().out.partition("\n")[2]  # without the usage of the script
    assert len(fields.splitlines()) > 80 and shown.endswith(fields)


def test_train_without_a_recipe_shows_its_own_options_alone(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    assert "this recipe's fields" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_the_words_of_a_field_wrap_and_none_is_cut(width):
    choices = "reinforce|rloo|grpo|drgrpo|gspo|cispo|cispo_window|sapo|dapo|dapo_per_prompt|maxrl"
    comment = "one of the algorithms whose names and equations `rlhf-trl algorithms` tells you"
    for kind in ("str", choices):
        first, *more = _field_lines("algorithm", FieldHelp(kind, "grpo", comment), width)
        assert first.startswith(f"  --algorithm                   {kind[:30]}")
        assert more and all(len(line) <= width for line in (first, *more))
        assert all(line.startswith(" " * 34) and line[34] != " " for line in more)
        text = " ".join([first, *map(str.strip, more)]).replace("| ", "|")
        assert text.split() == ["--algorithm", kind, "=", "grpo", *comment.split()]


@pytest.fixture
def told(monkeypatch, capsys):
    """Return what the help of a recipe says of each field."""

    def told(recipe, trl, *words):
        monkeypatch.setattr(sys, "argv", [f"recipes/{recipe}.py"])
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit):
            load_config(STAGES[recipe].part("fields"), trl, ["--help", *words])
        return lines_of(capsys.readouterr().out)

    return told


def test_a_field_is_told_with_its_type_choices_default_and_one_line(told):
    grpo = told("grpo", "rlhf_trl.trainers.policy_gradient.BookGRPOConfig")
    assert grpo["dataset.size"].split(maxsplit=3) == ["int", "=", "2000", "training rows"]
    assert grpo["dataset.source"].startswith("reasoning_gym|path = reasoning_gym ")
    assert grpo["dataset.specs"].startswith("list = (required) ")
    assert grpo["samples.choice"].startswith("fixed|round_robin = round_robin ")
    assert grpo["expect.strategy"].startswith("none|ddp|fsdp|deepspeed = null ")
    assert grpo["algorithm"].startswith("reinforce|rloo|grpo|drgrpo|gspo|cispo|cispo_window|sapo|")
    assert re.match(r"float = 0\.2 \(grpo\) +Distance of the lower clip bound", grpo["epsilon"])
    assert grpo["num_generations"].startswith("int = 8 ")
    assert "vllm_mode" not in grpo


@pytest.mark.parametrize(
    ("recipe", "trl"),
    [
        ("sft", "trl.SFTConfig"),
        ("ppo", "rlhf_trl.trainers.ppo.BookPPOConfig"),
        ("orpo", "rlhf_trl.trainers.orpo.BookORPOConfig"),
        ("prm", "rlhf_trl.trainers.reward_models.BookTokenRewardConfig"),
    ],
)
def test_help_all_has_every_field_and_default_that_the_classes_have(told, recipe, trl):
    from trl import ModelConfig

    shown = told(recipe, trl, "all")
    module, _, name = trl.rpartition(".")
    classes = (getattr(importlib.import_module(module), name), ModelConfig)
    taken = {field.name: field for cls in classes for field in fields(cls) if field.init}
    assert taken.keys() - shown.keys() == {
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    }
    numbers = {
        name: field.default
        for name, field in taken.items()
        if type(field.default) in (int, float) and name in shown
    }
    for name, default in numbers.items():
        kind, _, said = shown[name].split()[:3]
        assert kind in ("int", "float", "int|float") and float(said) == default, name
    assert len(numbers) > 20
