"""`rlhf-trl check-launch`: a healthy launch makes the update of one process; faults are named."""

import os
import pickle
import re
import resource
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, cause
from launch_cells import ACCUMULATIONS, CONFIGS, SEEDS

from rlhf_trl.compare.launch import faults as launch_faults
from rlhf_trl.compare.launch import inputs as launch_inputs
from rlhf_trl.compare.launch.faults import Step

STRATEGIES = {  # config -> strategy, stage, where the optimizer and the parameters are
    "cpu_2proc": ("ddp", None, "none", "none"),
    "zero1": ("deepspeed", 1, "none", "none"),
    "zero2": ("deepspeed", 2, "none", "none"),
    "zero3": ("deepspeed", 3, "none", "none"),
    "zero2_offload": ("deepspeed", 2, "cpu", "none"),
    "zero3_offload": ("deepspeed", 3, "cpu", "cpu"),
}


def read(folder):
    return pickle.loads((folder / "reports.pickle").read_bytes())


def launched(words, *, config="cpu_2proc", processes=2, **environment):
    """Launch something on CPUs; return the finished process, its output as text."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command += ["--config_file", str(config if os.sep in str(config) else path_of(config))]
    command += ["--num_processes", str(processes)]
    path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    clean |= {"PYTHONPATH": os.pathsep.join(path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    clean["PATH"] = os.pathsep.join([str(ROOT / ".venv" / "bin"), clean["PATH"]])
    return subprocess.run(
        [*command, *map(str, words)],
        cwd=ROOT,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
        check=False,
    )


def path_of(config):
    return f"configs/accelerate/{config}.yaml"


def checked(folder, cells, **options):
    """Return the reports of some cells of launch_cells.py."""
    done = launched(["tests/launch_cells.py", folder, cells], **options)
    assert done.returncode == 0, cause(done.stdout)
    return read(folder)


def largest(report):
    return max(d.apart for found in report.differences.values() for d in found)


# --- the default test run: one launch


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_launch_makes_the_update_of_one_process_or_is_caught(two_processes):
    *healthy, planted = read(two_processes).values()
    assert len(healthy) == 3
    for report in healthy:
        assert report.is_same, report.text
        assert largest(report) < 1e-4
        assert (report.came_up.processes, report.came_up.strategy) == (2, "ddp")
    assert {d.part for d in healthy[1].differences["SGD, one step"]} == {"policy", "value model"}
    assert not planted.is_same
    assert planted.faults == ["micro-batch 1 of 4 is dropped on every rank"]


# --- the fit, on gradients made by hand: 2 ranks x 2 micro-batches of 3 orthogonal weights and one

COLUMNS = torch.eye(4, dtype=torch.float64).view(4, 2, 2)
COUNTS = torch.tensor([[10.0, 30.0], [20.0, 40.0]])


def named(weights, *, tokens=None, columns=COLUMNS, norms=(None, None), clips_at=0.0):
    """Return what a step is said to be in which micro-batches have these weights in place of 1."""
    launched_step = (columns * torch.tensor(weights, dtype=torch.float64)).sum((1, 2))
    step = Step(
        launched=launched_step,
        reference=columns.sum((1, 2)),
        columns=columns,
        tokens=torch.ones(2, 2) if tokens is None else tokens,
        norms=norms,
        clips_at=clips_at,
    )
    return step.explanation("model", is_whole=True, tolerance=1e-4)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([[1, 1], [1, 1]], None),
        ([[0, 1], [0, 1]], "micro-batch 1 of 2 is dropped on every rank"),
        ([[1, 1], [1, 0]], "micro-batch 2 of 2 of rank 1 dropped"),
        ([[0, 0], [1, 1]], "rank 0 is dropped"),
        ([[0, 0], [2, 2]], "rank 0 is dropped; the others count 2 times"),
        ([[0, 0], [0, 0]], "the model is left out: it gets nothing of any micro-batch"),
        ([[0.5] * 2] * 2, "averaged twice over the 2 ranks: every weight is 0.5"),
        ([[4, 4], [4, 4]], "summed over the 4 micro-batches of all ranks, not averaged: "),
        ([[3, 3], [3, 3]], "every micro-batch counts 3 times"),
        ([[1, 2], [1, 1]], "micro-batches count otherwise: rank 0: 1, 2; rank 1: 1, 1"),
    ],
)
def test_weights_have_a_name(weights, sentence):
    said = named(weights)
    assert said is None if sentence is None else said.startswith(sentence)


def test_local_token_counts_have_a_name():
    # of 100 tokens, rank 0 has 40: it divides by 40, not by half of 100
    by_rank = [[1.25, 1.25], [50 / 60, 50 / 60]]
    said = named(by_rank, tokens=COUNTS)
    assert said == "local token counts: each rank divides by its own tokens"
    by_micro_batch = [[2.5, 25 / 30], [1.25, 25 / 40]]
    said = named(by_micro_batch, tokens=COUNTS)
    assert said == "local token counts: each micro-batch divides by its own tokens"


def test_clipping_has_a_name():
    # whole gradient: (3, 3, 4, 4), norm 7.07, clipped to 5; ranks': (6, 6) and (8, 8)
    columns = COLUMNS * torch.tensor([3.0, 3.0, 4.0, 4.0]).view(4, 1, 1)
    norm = 50**0.5
    step = Step(
        # (6, 6) / 8.49 * 5 of rank 0, (8, 8) / 11.3 * 5 of rank 1; each counts half
        launched=torch.full((4,), 5 / 8**0.5).double(),
        reference=torch.tensor([3.0, 3.0, 4.0, 4.0]).double() * 5 / norm,
        columns=columns,
        tokens=torch.ones(2, 2),
        norms=(norm, norm),
        clips_at=5.0,
    )
    said = step.explanation("model", is_whole=True, tolerance=1e-4)
    # 1.77 / 2.12 and 1.77 / 2.83
    assert said.startswith("each rank clips its own gradient: relative weights 0.833, 0.625")
    # one norm is half the other: a scale that both clips have taken away
    halved = Step(
        launched=step.reference,
        reference=step.reference,
        columns=columns,
        tokens=torch.ones(2, 2),
        norms=(norm / 2, norm),
        clips_at=1.0,
    )
    said = halved.explanation("model", is_whole=True, tolerance=1e-4)
    assert said == "averaged twice over the 2 ranks: every weight is 0.5"


def test_changes_are_the_same_scaled_or_different():
    reference = {"a": torch.tensor([3.0, 0.0]), "value_model.b": torch.tensor([4.0])}

    def verdicts(a, b):
        changes = {"a": torch.tensor(a), "value_model.b": torch.tensor(b)}
        found = launch_faults.compare(changes, reference, {}, tolerance=1e-4)
        return [(d.part, d.text) for d in found]

    assert verdicts([3.0001, 0.0], [4.0]) == [("policy", "same"), ("value model", "same")]
    assert verdicts([6.0, 0.0], [4.0])[0] == ("policy", "scaled by 2")
    assert verdicts([3.0, 0.003], [2.0]) == [
        ("policy", "different"),
        ("value model", "scaled by 0.5"),
    ]
    # what float32 cannot hold is no difference: weights of norm 1000 have steps of about 1e-4
    weights = {"a": torch.tensor([1000.0, 0.0]), "value_model.b": torch.tensor([1.0])}
    changes = {"a": torch.tensor([3.0, 0.0001]), "value_model.b": torch.tensor([4.0])}
    found = launch_faults.compare(changes, reference, weights, tolerance=1e-5)
    assert found[0].verdict == "same"


# --- the whole grid


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("config", STRATEGIES)
def test_every_trainer_under_every_launcher(config, tmp_path):
    reports = checked(tmp_path, "grid", config=config)
    assert len(reports) == len(CONFIGS) * len(ACCUMULATIONS) + 4
    for name, report in reports.items():
        up = report.came_up
        came_up = (up.strategy, up.stage, up.offload_optimizer, up.offload_parameters)
        assert came_up == STRATEGIES[config], name
        assert up.accumulation == int(re.match(r"\w+ (\d)", name)[1])
        assert report.is_same, f"{name}: {report.text}"
        assert largest(report) < 1e-4


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("config", ["cpu_2proc", "zero2", "zero3"])
def test_bfloat16_under_every_launcher(config, tmp_path):
    for name, report in checked(tmp_path, "bf16", config=config).items():
        print(name, f"{largest(report):.1e}")
        assert report.is_same, f"{name}: {report.text}"
        assert largest(report) < 0.1


@pytest.mark.promise
@pytest.mark.multiprocess
def test_every_tiny_config_is_checked_as_it_stands(tmp_path):
    reports = checked(tmp_path, "configs")
    assert len(reports) > 40
    for name, report in reports.items():
        assert report.is_same, f"{name}: {report.text}"
        compared = [d for differences in report.differences.values() for d in differences]
        assert min(d.cosine for d in compared) > 0.9999, name  # 0: a part that nothing moves


@pytest.mark.promise
@pytest.mark.multiprocess
def test_a_healthy_launch_never_names_a_fault(tmp_path):
    reports = checked(tmp_path, "seeds")
    assert len(reports) == SEEDS
    assert not [report.text for report in reports.values() if not report.is_same]


NAMES = {
    "first": "micro-batch 1 of 4 is dropped on every rank",
    "all but the last": "micro-batch 1, 2, 3 of 4 is dropped on every rank",
    "of one rank": "micro-batch 2 of 4 of rank 1 dropped",
    "a rank": "rank 1 is dropped",
    "last window": "optimizer step 3 of 3 changes nothing: its window is lost",
    "averaged twice": "averaged twice over the 4 micro-batches: every weight is 0.25",
    "summed": "summed over the 2 ranks, not averaged: every weight is 2",
    "other weights": "rank 1 starts with other weights than rank 0",
    "same samples": "rank 1 trains on the same samples as rank 0",
    "local counts": "local token counts: each rank divides by its own tokens",
    "local counts of SFT": "local token counts: each rank divides by its own tokens",
    "no value model": "the value model is left out: it gets nothing of any micro-batch",
    "clipped by rank": "each rank clips its own gradient: relative weights ",
    "other optimizer": "AdamW steps in place of SGD",
}


@pytest.mark.promise
@pytest.mark.multiprocess
def test_every_planted_fault_is_named(tmp_path):
    reports = checked(tmp_path, "faults")
    assert reports.keys() == NAMES.keys()
    for fault, report in reports.items():
        assert not report.is_same, fault
        assert report.faults[0].startswith(NAMES[fault]), f"{fault}: {report.text}"


@pytest.mark.promise
@pytest.mark.multiprocess
def test_an_optimizer_that_offloading_replaces_is_named(tmp_path):
    """Needs a C++ compiler, and two minutes for the first build of DeepSpeed's Adam."""
    config = tmp_path / "offload.yaml"
    text = (ROOT / path_of("zero2")).read_text()
    config.write_text(text.replace("optimizer_device: none", "optimizer_device: cpu"))
    reports = checked(tmp_path / "cells", "swapped", config=config)
    assert reports["healthy"].is_same, reports["healthy"].text
    assert "DeepSpeedCPUAdam, first moment" in reports["healthy"].differences
    replaced = reports["SGD replaced"]
    assert replaced.faults[0] == "DeepSpeedCPUAdam steps in place of SGD"
    (difference,) = replaced.differences["SGD, one step"]
    assert difference.verdict == "different"


# --- the command

CHECK = ["-m", "rlhf_trl.cli", "check-launch"]
TINY = ["--config", "configs/tiny/grpo.yaml"]


@pytest.mark.promise
@pytest.mark.multiprocess
def test_the_command_says_that_all_is_the_same_within_a_minute():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = launched([*CHECK, *TINY, "--gradient_accumulation_steps", 2])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[0].startswith("check-launch: configs/tiny/grpo.yaml; ")
    assert "came up: 2 processes on cpu, strategy ddp, accumulation 2, SGD" in done.stdout
    for what in ("SGD, one step", "SGD, 3 steps", "AdamW, first moment"):
        assert f"\n{what}, model: same (relative difference " in done.stdout
    assert "fault" not in done.stdout
    # of the processor, on a machine that may be busy: two cores spend up to twice that in a minute
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 60


def ended_with(sentence, *words, **options):
    """Check that a launch ends with a sentence, told once."""
    done = launched([*CHECK, *words], **options)
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("error: ") == 1, done.stdout
    assert f"error: {sentence}" in done.stdout


@pytest.mark.promise
@pytest.mark.multiprocess
def test_what_cannot_be_checked_is_one_sentence(tmp_path):
    nothing = "nothing to compare; launch with --num_processes 2 or more."
    ended_with(nothing, *TINY, config="cpu", processes=1)
    typo = tmp_path / "typo.yaml"
    typo.write_text(f"extends: {ROOT}/configs/tiny/grpo.yaml\nlearning_rat: 1\n")
    ended_with(f"{typo}: learning_rat is not a known key", "--config", typo)
    ended_with("--limit is 0; write a number of seconds above 0.", *TINY, "--limit", 0)
    ended_with("FSDP cannot run on a CPU", *TINY, config="fsdp2")
    ended_with(
        "DeepSpeed builds an extension on its first start, and no-compiler is not on PATH",
        *TINY,
        config="zero2",
        CXX="no-compiler",
    )
    sampled = ["--config", "configs/tiny/rejection_sampling.yaml"]
    ended_with("configs/tiny/rejection_sampling.yaml samples answers before it trains", *sampled)


def test_a_signal_ends_a_check_with_a_sentence_that_tells_of_no_checkpoint():
    program = (
        "import os, signal; from rlhf_trl.compare.launch.watch import end_on_signals; "
        "end_on_signals(); os.kill(os.getpid(), signal.SIGTERM); print('not ended')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 128 + 15
    assert done.stdout == "stopped by SIGTERM before anything was found\n"


@pytest.mark.promise
@pytest.mark.multiprocess
def test_a_launch_that_hangs_ends_with_every_stack(tmp_path):
    words = ["tests/launch_cells.py", tmp_path, "hang"]
    done = launched(words, CHECK_LIMIT="20")
    assert done.returncode == 1
    assert "error: no end after 20 s: rank 0 waits in " in done.stdout
    assert re.search(r"; rank 1 waits in late \(launch_cells.py:\d+\); see", done.stdout)
    assert done.stdout.count("rank 0:\n") == done.stdout.count("rank 1:\n") == 1
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in running.stdout


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["llama", "olmo2", "mistral", "phi3", "qwen3_moe", "gemma3_text"])
def test_a_small_model_has_the_architecture_of_the_config(kind, tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model(kind).save_pretrained(tmp_path)  # without weights, which nobody reads
    done = launched([*CHECK, *TINY, "--model_name_or_path", tmp_path])
    assert done.returncode == 0, done.stdout
    assert f"; a {kind} of " in done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("opt", "a opt of "),  # whose dropout is above 0
        ("gpt2", "the embedded model, with random weights: "),
    ],
    ids=["opt", "gpt2"],
)
def test_a_small_model_does_not_depend_on_what_shares_its_batch(kind, note, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.for_model(kind).save_pretrained(tmp_path / "original")
    given = {"model_name_or_path": str(tmp_path / "original")}
    line = launch_inputs.small_model(given, tmp_path / "small")
    assert line.startswith(note)
    assert ("its positions count padding" in line) == (kind == "gpt2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small").train()
    ids, mask = torch.tensor([[0, 0, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 1]])
    alone, padded = model(ids[:, 2:]).logits[0, -1], model(ids, mask).logits[0, -1]
    torch.testing.assert_close(alone, padded)
