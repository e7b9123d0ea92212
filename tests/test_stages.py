"""The registry of stages: one row for each recipe, and the stage that a config is for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.errors import InputError
from rlhf_trl.run.config import read_config
from rlhf_trl.run.stages import STAGES, stage_of, stage_of_config

ROOT = Path(__file__).parent.parent
CONFIGS = {
    "sft": "sft",
    "rejection_sampling": "rejection_sampling",
    "simpo": "dpo",
    "opd": "distill",
}
RECIPES = {path.stem: path for path in (ROOT / "recipes").glob("*.py")}


def test_every_recipe_is_a_stage_and_launches_itself():
    assert STAGES.keys() == RECIPES.keys()
    for name, path in RECIPES.items():
        last = ast.parse(path.read_text()).body[-1]
        assert ast.unparse(last.body[0]) == f"STAGES['{name}'].launch()"
        assert f"recipes/{name}.py" in path.read_text()


@pytest.mark.parametrize("name", STAGES)
def test_the_parts_of_a_stage_exist_and_belong_together(name):
    import trl
    from trl.experimental import orpo

    stage = STAGES[name]
    fields = stage.part("fields")
    assert callable(stage.part("run"))
    assert f"recipes/{name}.py" in fields.__doc__
    if stage.trainer is None:
        assert stage.config is None and stage.hook == ""
        return
    config, trainer = stage.part("config"), stage.part("trainer")
    stock = getattr(trl, stage.stock, None) or getattr(orpo, stage.stock)
    assert issubclass(trainer, stock) and trainer.__name__ == stage.trainer_name
    assert config.__name__ in fields.__doc__
    if hasattr(trainer, "config_class"):
        assert trainer.config_class is config
    assert (ROOT / stage.hook.partition(",")[0]).is_file()
    assert (stage.examples is None) == (stage.makes != "policy")
    if stage.examples:
        assert callable(stage.part("examples"))


def test_every_row_has_one_stage_and_every_stage_without_rows_has_its_keys():
    for name, row in ALGORITHMS.items():
        assert [stage.name for stage in STAGES.values() if stage.trains(row)] == [
            stage_of(name).name
        ]
    for stage in STAGES.values():
        assert bool(stage.algorithms()) != bool(stage.known_by), stage.name


def test_a_config_tells_its_stage_by_its_algorithm_or_its_keys():
    folder = ROOT / "configs" / "tiny"
    for config, wanted in CONFIGS.items():
        assert stage_of_config(read_config(folder / f"{config}.yaml")).name == wanted
    assert stage_of_config({"dataset": {}, "strategy": "top_per_prompt"}).name == (
        "rejection_sampling"
    )
    judge = {"answers": "answers.jsonl", "base_url": "http://localhost", "model": "judge"}
    with pytest.raises(InputError, match=r"^mine\.yaml names no algorithm, and has the keys of no"):
        stage_of_config(judge, "mine.yaml")


def test_the_registry_is_imported_without_torch():
    code = "import sys, rlhf_trl.run.stages; print(sorted({'torch', 'trl'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_config_of_trl_is_known_by_its_data():
    with pytest.raises(InputError, match=r"^mine\.yaml: dataset_name .* `rlhf-trl translate mine"):
        stage_of_config({"dataset_name": "trl-lib/Capybara", "max_length": 64}, "mine.yaml")
