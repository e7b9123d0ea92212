"""Bad inputs end in one sentence that names what is wrong; the table is in bad_inputs.py."""

import os
import subprocess
import sys

import bad_inputs
import pytest
from conftest import ROOT, cause

CASES = {case.name: case for case in bad_inputs.bad_inputs()}
# what trained something else than was asked for, or did not end, before it was checked
FIRST = """
    grpo: dtype float16
    model: more layers
    model: fewer layers
    model: a weight missing
    model: wider
    grpo: max_steps -5
    grpo: top_p 7
    grpo: top_p 0
    grpo: temperature 1e-30
    grpo: save_total_limit 0
    grpo: save_total_limit -1
    grpo: output_dir None
    grpo: generation_kwargs {'topp': 0.5}
    grpo: top_p 0.9, generation_kwargs {'top_p': 0.5}
    grpo: adapter, lora_alpha -3
    grpo: reward_funcs ['exact_match', 'format'], reward_weights [0, 0]
    model: template that drops the prompt
    model: template that is empty
    model: template that raises
    grpo: learning_rate 1e+30
    model: config that is a list
    model: no tokenizer
    grpo: push_to_hub True
    grpo: load_in_4bit True
    grpo: attn_implementation flash_attention_2
    yaml: lists in lists
    yaml: billion laughs
    data: lists in lists (grpo, rows.json)
    grpo: dataset.size 1000000000
"""


def names():
    return [line.strip() for line in FIRST.strip().splitlines()]


def test_names_are_unique_and_there_are_enough():
    assert len(CASES) == len(bad_inputs.bad_inputs()) >= 214
    assert {*bad_inputs.KNOWN} <= {*CASES} and len(bad_inputs.KNOWN) <= len(CASES) * 0.05


@pytest.mark.parametrize("name", names())
def test_what_was_accepted_or_hidden_in_a_traceback(name, tmp_path):
    ending = bad_inputs.run(CASES[name], tmp_path)
    assert ending.kind == "sentence", ending
    assert bad_inputs.is_right(CASES[name], ending), ending.text


@pytest.mark.parametrize("name", ["model: pickle", "model: pickle in a zip"])
def test_a_malicious_pickle_is_refused_and_not_run(name, tmp_path):
    ending = bad_inputs.run(CASES[name], tmp_path)
    assert ending.kind == "sentence", ending
    assert "model_name_or_path: 'model' cannot be loaded (Weights only load failed" in ending.text
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.promise
@pytest.mark.parametrize("name", CASES)
def test_a_bad_input(name, tmp_path):
    ending = bad_inputs.run(CASES[name], tmp_path)
    right = ending.kind == "sentence" and bad_inputs.is_right(CASES[name], ending)
    assert right == (name not in bad_inputs.KNOWN), ending
    assert ending.kind not in ("traceback", "no end"), ending


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("config", ["one_gpu", "ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_a_launch_for_gpus_without_one(config, tmp_path):
    case = bad_inputs.BadInput(name=config, word="", changes={"use_cpu": bad_inputs.REMOVED})
    argv = bad_inputs.prepare(case, tmp_path)
    accelerate = ["--config_file", f"{ROOT}/configs/accelerate/{config}.yaml"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *accelerate]
    done = subprocess.run(
        [*command, str(ROOT / "recipes" / "grpo.py"), *argv],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
        | {"CUDA_VISIBLE_DEVICES": ""},  # one that is there is hidden
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.strip("= ")]  # by torchrun, too
    assert "error: " in told[-1] or "error: " in told[-2], cause(done.stderr)
    assert not (tmp_path / "out" / "model").exists()
