"""What a run loads of the package: the code of its own family and kind of data, and of no other."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from pathlib import Path
from rlhf_trl.run.stages import STAGES
stage = STAGES[sys.argv[1]]
stage.load(["--config", f"configs/tiny/{sys.argv[1]}.yaml"])
stage.part("run")
stage.part("trainer")
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "rlhf_trl" and getattr(module, "__file__", None):
        print(name, len(Path(module.__file__).read_text().splitlines()))
"""
OF_FILES = {"files", "columns", "readers", "pair_files", "prompt_files"}
OF_TEXTS = {"number_answers", "math_answers", "judgment_blocks", "judgments", "demonstrations"}
NEVER = {
    "cards",
    "losses.checked",
    "manifests",
    "on_deepspeed",
    "policies",
    "rewards.by_path",
    "rewards.faults",
    "rewards.from_model",
    "run.chat_templates",
    "run.claiming",
    "run.command_words",
    "run.config_faults",
    "evaluation.progress",
    "evaluation.recorded_later",
    "checkpoints",
    "rollouts.decode",
    "rollouts.sharing",
    "evaluation.report",
    "rollouts.sampling",
    "rollouts.store",
    "run.early_checkpoints",
    "run.failures",
    "run.finish",
    "run.folders",
    "run.generation_kwargs",
    "run.help",
    "run.intervals",
    "run.origins",
    "run.processes",
    "run.resuming",
    "run.tied_weights",
    "synced_reference",
    "trainers.reference_cache",
}
GRPO = {"algorithms.policy_gradients", "losses.policy_gradients", "run.policy_gradients"}
DPO = {"algorithms.direct_alignment", "losses.preferences", "run.preferences"}


@pytest.mark.parametrize(
    ("stage", "own", "other", "other_data", "most"),
    [
        ("grpo", GRPO, DPO | NEVER, OF_FILES | OF_TEXTS | {"pairs", "made", "steps"}, 8_000),
        ("dpo", DPO, GRPO | NEVER, OF_FILES | OF_TEXTS | {"made", "steps"}, 7_200),
    ],
)
def test_a_run_on_gym_tasks_loads_nothing_of_another_kind(stage, own, other, other_data, most):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, stage], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = dict(line.split() for line in done.stdout.splitlines() if line.startswith("rlhf_trl"))
    needed = {f"rlhf_trl.{name}" for name in own | {"run.train", "data.blocks"}}
    assert needed <= lines.keys()
    unneeded = other | {f"data.{kind}" for kind in other_data}
    assert not {f"rlhf_trl.{name}" for name in unneeded} & lines.keys()
    for name in unneeded:  # under a name of today
        assert (ROOT / "rlhf_trl" / f"{name.replace('.', '/')}.py").is_file()
    assert sum(map(int, lines.values())) <= most


def test_a_row_is_found_without_the_rows_of_other_families():
    program = """
import sys
from rlhf_trl import algorithms
assert algorithms.formulation("dpo", "chapter", algorithms.Preference).label == "dpo (chapter)"
assert algorithms.names("direct_alignment")[0] == "dpo"
modules = {"policy_gradients", "direct_alignment", "reward_models", "distillation"}
print({name for name in modules if f"rlhf_trl.algorithms.{name}" in sys.modules})
print([*algorithms.ALGORITHMS][:2], len(algorithms.ALGORITHMS) == len({*algorithms.ALGORITHMS}))
print("nothing" in algorithms.ALGORITHMS)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded, first, has_unknown = done.stdout.splitlines()
    assert loaded == "{'direct_alignment'}"
    assert first == "['reinforce', 'rloo'] True"  # in the order of the table all the same
    assert has_unknown == "False"
