"""scripts/gpu_report.py in its dry form: lines in processes of their own, and what they measure."""

import importlib.metadata
import importlib.util
import json
import os
import resource
import signal
import sys
import time

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_trl import algorithms, tiny
from rlhf_trl.run.versions import versions

SPEC = importlib.util.spec_from_file_location("gpu_report", ROOT / "scripts" / "gpu_report.py")
gpu_report = sys.modules["gpu_report"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_report)

import measure  # noqa: E402

Line = gpu_report.Line


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Run the dry form of given lines, or of all; return report.json."""

    def report(*words, lines=None):
        if lines is not None:
            monkeypatch.setattr(gpu_report, "lines", lambda: lines)
        given = ("--device", "cpu", "--model", "tiny", "--out", str(tmp_path), *words)
        gpu_report.main(list(given))
        return json.loads((tmp_path / "report.json").read_text())

    return report


def test_lines_of_the_dry_form_have_the_figures_that_a_hand_counts(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # which a machine may lack
    names = ["sft 0.6b 512 full", "grpo 0.6b 512 full", "bf16 rows"]
    done = report("--only", *names)["lines"]
    assert {name: line["status"] for name, line in done.items()} == dict.fromkeys(names, "ok"), done
    sft, grpo = done[names[0]], done[names[1]]
    # 4 conversations of 16 + 15 tokens and an end; 2 prompts x 8 completions of 16 + 16 tokens
    assert (sft["trained_tokens"], grpo["trained_tokens"]) == (4 * 32, 16 * 32)
    assert (sft["generated_tokens"], grpo["generated_tokens"]) == (0, 16 * 16)
    assert sft["tokens_per_second"] == pytest.approx(128 / sft["step_seconds"])
    # two layers of 4 d d + 3 d f weights, attention over 32 tokens; the head sees 16 of each 32
    d, f, vocabulary = 96, 288, 120
    layers = 2 * (4 * d * d + 3 * d * f)
    assert sft["flops"] == 128 * (6 * layers + 12 * 2 * d * 32) + 64 * 6 * d * vocabulary
    # the head sees completions, some of which end early
    rows = (grpo["flops"] - 512 * (6 * layers + 12 * 2 * d * 32)) / (6 * d * vocabulary)
    assert 16 <= rows <= 256
    assert 0 < grpo["generation_share"] < 1 and sft["generation_share"] == 0
    for line in (sft, grpo):
        assert line["spread"][0] <= line["step_seconds"] <= line["spread"][1]
        assert line["stock_update_seconds"] > 0 and line["update_seconds"] > 0
    rows = done["bf16 rows"]["rows"]
    assert len(rows) == sum(len(a.formulations) for a in algorithms.ALGORITHMS.values())
    # to the nearest of bfloat16's eight bits: a relative error of at most 2^-8
    assert max(row["arithmetic"][1] for row in rows.values()) < 2**-8
    assert max(row["arithmetic"][0] for row in rows.values()) < 1e-3
    page = (tmp_path / "report.md").read_text()
    assert all(f"\n| {name} | " in page for name in [*names[:2], "grpo chapter"])


@pytest.mark.promise
def test_the_demo_of_the_report_learns_from_the_readmes_number_on(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # which a machine may lack
    exact = report("--only", "demo autocast")["lines"]["demo autocast"]["exact_match"]
    assert abs(exact["before"] - 0.477) < 0.03  # the README's, in float32
    assert exact["after"] > exact["before"] + 0.1


def sleepy(folder, scratch):
    """Leave a mark; the first time, sleep until killed."""
    marks = scratch.parent / "marks"
    marks.write_text(marks.read_text() + "sleepy\n" if marks.exists() else "sleepy\n")
    if marks.read_text().count("\n") == 1:
        (scratch.parent / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    return {"woke": True}


def wait_for(condition):
    until = time.time() + 60
    while not condition():
        assert time.time() < until
        time.sleep(0.02)


def test_a_report_that_is_killed_goes_on_where_it_was(report, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "sleepy", sleepy, raising=False)
    lines = [Line("first", 1, "device"), Line("second", 1, "sleepy"), Line("third", 1, "device")]
    if (process := os.fork()) == 0:
        report(lines=lines)
        os._exit(0)
    wait_for((tmp_path / "pid").exists)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    before = json.loads((tmp_path / "report.json").read_text())["lines"]
    assert list(before) == ["first"]
    line = int((tmp_path / "pid").read_text())
    wait_for(lambda: not os.path.exists(f"/proc/{line}") or " Z " in status_of(line))
    after = report(lines=lines)["lines"]
    assert list(after) == ["first", "second", "third"]
    assert after["first"] == before["first"] and after["second"]["woke"]
    assert report(lines=lines)["lines"] == after


def test_a_line_that_waits_for_ever_is_stopped(report, monkeypatch):
    monkeypatch.setattr(measure, "sleepy", sleepy, raising=False)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: 100 * now())  # so that five minutes are three seconds
    done = report(lines=[Line("stuck", 0.1, "sleepy"), Line("next", 1, "device")])["lines"]
    assert done["stuck"]["error"].startswith("stopped after 3")
    assert [line["status"] for line in done.values()] == ["failed", "ok"]


def status_of(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read()
    except FileNotFoundError:
        return " Z "


def test_a_line_that_runs_out_of_memory_is_a_line_with_its_error(report, tmp_path, monkeypatch):
    def on_the_gpu(folder, scratch):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20.00 GiB.")

    def on_the_cpu(folder, scratch):
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        torch.empty(2**34, dtype=torch.uint8)

    def by_the_kernel(folder, scratch):
        os.kill(os.getpid(), signal.SIGKILL)

    for function in (on_the_gpu, on_the_cpu, by_the_kernel):
        monkeypatch.setattr(measure, function.__name__, function, raising=False)
    names = ["on_the_gpu", "on_the_cpu", "by_the_kernel", "device"]
    lines = [*(Line(name, 1, name) for name in names), Line("sharded", 1, "device", gpu=True)]
    done = report(lines=lines)["lines"]
    said = [done[name].get("error", "") for name in names]
    assert said[0] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."
    assert said[1].startswith("RuntimeError: ") and "can't allocate memory" in said[1]
    assert said[2:] == ["killed by signal 9", ""]
    assert [line["status"] for line in done.values()] == [*["failed"] * 3, "ok", "needs a GPU"]
    assert f"- on_the_gpu: {said[0]}\n" in (tmp_path / "report.md").read_text()
    assert report(lines=lines)["lines"] == done
    again = report("--retry", lines=lines)["lines"]
    assert again["device"] == done["device"] and again["on_the_gpu"]["status"] == "failed"


def test_a_budget_stops_a_line_and_names_what_is_left(report, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "sleepy", sleepy, raising=False)
    monkeypatch.setattr(gpu_report, "CPU_MINUTES", 0)
    lines = [Line("first", 1, "device"), Line("second", 1, "sleepy"), Line("third", 1, "device")]
    started = time.time()
    found = report("--budget", "2s", lines=lines)
    assert time.time() - started < 20
    assert (list(found["lines"]), found["left_out"]) == (["first"], ["second", "third"])
    assert "left out for lack of time: second, third" in capsys.readouterr().out
    found = report(lines=lines)
    assert (list(found["lines"]), found["left_out"]) == (["first", "second", "third"], [])


def test_a_report_of_another_machine_is_not_mixed_with_this_one(report, tmp_path):
    there = {"about": {"device": "cuda", "gpu": "NVIDIA H200"}, "lines": {}}
    (tmp_path / "report.json").write_text(json.dumps(there))
    with pytest.raises(SystemExit, match="is a report of cuda; name another folder with --out"):
        report("--only", "device")


def test_a_line_that_does_not_exist_is_an_error(report, capsys):
    with pytest.raises(SystemExit):
        report("--only", "sft 512")
    assert "--only sft 512 is no line; --list names them" in capsys.readouterr().err


def test_peak_memory_is_what_weights_gradients_and_adam_take(report, tmp_path):
    d, f, layers, vocabulary, heads = 512, 2048, 6, 120, 8
    config = {
        "model_type": "qwen3",
        "hidden_size": d,
        "intermediate_size": f,
        "head_dim": d // heads,
    }
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
    config |= {"num_key_value_heads": heads, "tie_word_embeddings": True, "eos_token_id": 5}
    (tmp_path / "own.json").write_text(json.dumps(config))
    values = {"recipe": "sft", "prompt": 4, "answer": 3, "batch": 1, "dtype": "bfloat16"}
    values |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": 8}
    values |= {"model": "tiny", "activation_checkpointing": False}
    lines = [Line("memory", 1, "recipe", values)]
    for _ in range(3):  # leaves free memory in this process, which those forked from it could reuse
        held = [torch.ones(2**20) for _ in range(64)]
        del held[::2], held
    line = report("--model", str(tmp_path / "own.json"), lines=lines)["lines"]["memory"]
    assert line["status"] == "ok", line
    # a norm before attention and before the MLP, on queries and on keys, and one at the end
    weights = layers * (4 * d * d + 3 * d * f + 2 * d + 2 * d // heads) + vocabulary * d + d
    counted = line["counted_bytes"]
    assert (counted["parameters"], counted["gradients"]) == (2 * weights, 2 * weights)
    assert counted["optimizer"] == pytest.approx(4 * weights, rel=1e-4)  # and a step each
    planned = line["planned_bytes"]["update"]  # and the activations of seven tokens
    assert sum(counted.values()) < planned < 1.1 * sum(counted.values())
    # libraries take some tens of megabytes, too
    assert 8 * weights < line["peak_bytes"]["optimizer"] < 8 * weights + 100e6
    assert line["peak_bytes"]["load"] < line["peak_bytes"]["optimizer"] - 5 * weights


@pytest.mark.parametrize("grad", [True, False])
def test_flops_are_those_that_torch_counts(grad):
    model = AutoModelForCausalLM.from_pretrained(
        tiny.checkpoint_path(), attn_implementation="eager"
    )
    count, length = 3, 40
    ids = torch.arange(count * length).reshape(count, length) % 113
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
        logits = model(input_ids=ids, use_cache=False).logits
        if grad:
            logits.float().logsumexp(-1).sum().backward()
    head = (6 if grad else 2) * model.lm_head.weight.numel() * count * length
    mine = measure.backbone_flops(model.model, count * length, length, grad) + head
    assert mine == pytest.approx(counter.get_total_flops(), rel=1e-4)  # rotary angles are the rest


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-0.6b", 596_049_920), ("qwen3-1.7b", 1_720_574_976), ("olmo-2-0425-1b", 1_484_916_736)],
)
def test_the_models_have_the_size_of_those_they_stand_for(name, parameters):
    values = json.loads((ROOT / "rlhf_trl" / "run" / "architectures" / f"{name}.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    assert model.num_parameters() == parameters


def test_a_library_that_is_missing_has_no_version(monkeypatch):
    real = importlib.metadata.distributions
    there = {"reasoning_gym": lambda **_: iter(())}
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda name: there.get(name, real)(name=name)
    )
    found = versions()
    assert found["reasoning_gym"] is None and found["torch"] == torch.__version__


def test_the_words_are_those_of_the_demo():
    from rlhf_trl.data.gym import GymData, GymTasks, Spec

    spec = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
    tasks = GymTasks(GymData([spec], size=2000, seed=0, eval_size=256, eval_seed=1000))
    text = (ROOT / "scripts" / "gpu_report" / "words.txt").read_text()
    for rows, words in zip((tasks.train, tasks.held_out), text.split("\n\n"), strict=True):
        asked = [f"Spell this word backward (example: sun -> nus): {w}" for w in words.split()]
        assert [row["question"] for row in rows] == asked
