"""The launch guard and the output folder: every refusal is one sentence with a remedy."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import cause, same_environment
from safetensors.torch import save_file
from transformers.training_args import OptimizerNames

from rlhf_trl import manifests, output
from rlhf_trl.errors import InputError
from rlhf_trl.run import launch, resuming
from rlhf_trl.run.claiming import claim
from rlhf_trl.run.config import Loaded, load_config
from rlhf_trl.run.fields.common import Run
from rlhf_trl.run.launch import Expect
from rlhf_trl.run.read_fields import read_fields
from rlhf_trl.tiny.tokenizer import build_tokenizer


def args_with(world_size, **more):
    return SimpleNamespace(world_size=world_size, **more)


def test_what_a_test_does_to_the_environment_is_undone(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    with pytest.raises(RuntimeError), same_environment():
        os.environ["WANDB_PROJECT"] = "speller"  # as a run does
        os.environ["KEPT"] = "changed"
        raise RuntimeError
    assert "WANDB_PROJECT" not in os.environ and os.environ["KEPT"] == "before"


def test_the_cause_of_a_failed_launch_is_shown():
    noise = "W1121 elastic: closing signal SIGTERM\n" * 200
    raised = "[rank1]: Traceback (most recent call last):\n[rank1]:   File x\nKeyError: 'here'\n"
    summary = "Traceback (most recent call last):\nChildFailedError\n"
    assert cause(noise + raised + noise + summary).startswith(raised)
    assert cause("warning\n" + "error: no rows.\n" + noise).startswith("error: no rows.\n")
    assert cause(noise + "killed").endswith("SIGTERM\nkilled")
    assert len(cause(noise * 9)) < 6100


def trainer_with(kind, processes=1, device="cpu", model=None):
    accelerator = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind),
        num_processes=processes,
        device=SimpleNamespace(type=device),
    )
    return SimpleNamespace(accelerator=accelerator, model_wrapped=model)


def refused(match, call, *args):
    with pytest.raises(InputError, match=match):
        call(*args)


def test_several_processes_asked_for_and_one_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    refused("started one, .*cpu_2proc.yaml", launch.check_process_count_asked)
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch.check_process_count_asked()


def test_processes_that_do_not_see_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(
        "2 processes were launched but this one sees 1.*use_cpu",
        launch.check_processes,
        args_with(1),
    )
    launch.check_processes(args_with(2))


def test_expected_processes_and_strategy(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    launch.check_processes(args_with(2), Expect(processes=2, strategy="ddp"))
    refused("expects 4 processes and 2 came up", launch.check_processes, args_with(2), Expect(4))
    refused(
        "strategy fsdp was asked for and ddp came up",
        launch.check_strategy,
        trainer_with("MULTI_GPU", 2),
        Expect(strategy="fsdp"),
    )


def test_a_strategy_that_does_not_exist(tmp_path):
    (tmp_path / "x.yaml").write_text("expect: {strategy: dpp}\n")
    what = 'x.yaml: expect.strategy is "dpp"; write one of none, ddp, fsdp, deepspeed'
    refused(what, read_fields, tmp_path / "x.yaml", [Run])


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_silent_fallback_to_another_strategy(monkeypatch, name):
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    refused(
        f"strategy {name} was asked for and ddp came up on cpu",
        launch.check_strategy,
        trainer_with("MULTI_CPU", 2),
    )
    launch.check_strategy(trainer_with(name.upper(), 2))


def test_wrapper_must_fit_the_strategy():
    plain = torch.nn.Linear(1, 1)
    launch.check_wrapper(trainer_with("NO", model=plain))
    refused(
        "Linear where strategy ddp", launch.check_wrapper, trainer_with("MULTI_CPU", 2, model=plain)
    )

    class DeepSpeedEngine(torch.nn.Module):
        pass

    launch.check_wrapper(trainer_with("DEEPSPEED", 2, model=DeepSpeedEngine()))
    refused("wraps it in FSDPModule", launch.check_wrapper, trainer_with("FSDP", 2, model=plain))


def test_first_line_states_the_batch_arithmetic():
    args = args_with(
        2,
        device=torch.device("cpu"),
        mixed_precision="no",
        deepspeed_plugin=None,
        optim=OptimizerNames.ADAMW_TORCH_FUSED,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        generation_batch_size=64,
        num_generations=8,
        num_iterations=1,
        steps_per_generation=16,
    )
    line = launch.describe_launch(args, "grpo (chapter)")
    assert line == (
        "grpo (chapter) on cpu, 2 processes, strategy ddp, float32, adamw_torch_fused; "
        "8 prompts x 8 completions per generation, 16 completions per optimizer step, "
        "4 optimizer steps per generation"
    )


@pytest.mark.parametrize(
    ("launched", "bf16", "word"),
    [("no", False, "float32"), ("no", True, "bfloat16"), ("bf16", False, "bfloat16")],
)
def test_first_line_states_what_the_accelerator_computes_in(monkeypatch, launched, bf16, word):
    from policy_gradient_cases import build

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    trainer = build("grpo", bf16=bf16)
    names = {"no": "float32", "bf16": "bfloat16"}
    assert names[trainer.accelerator.mixed_precision] == word
    assert f"strategy none, {word}, adamw" in launch.describe_launch(trainer.args, "grpo")


NO_GPU = {"WORLD_SIZE": "1", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.fixture
def settled(monkeypatch):
    """Load a config as under a launch, with or without a GPU."""

    def settled(given="", gpu=False, processes=1, **environment):
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        for name, value in {**NO_GPU, **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
        return launch.cpu_settings(yaml.safe_load(given) or {}, processes)

    return settled


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        ("", {}, (True, False)),
        ("bf16: null", {}, (True, False)),
        ("bf16: true", {}, (True, True)),
        ("use_cpu: true", {"gpu": True}, (True, False)),
        ("", {"gpu": True, "ACCELERATE_USE_CPU": "true"}, (True, False)),
        ("bf16: true", {"ACCELERATE_MIXED_PRECISION": "bf16"}, (True, True)),
        ("use_cpu: true", {"processes": 2}, (True, False)),
    ],
)
def test_on_a_cpu_a_run_is_in_float32_unless_its_config_names_bf16(
    settled, given, environment, found
):
    assert settled(given, **environment) == {"use_cpu": found[0], "bf16": found[1]}


def test_on_a_gpu_nothing_is_decided(settled):
    for environment in ({}, {"processes": 8}, {"ACCELERATE_MIXED_PRECISION": "fp16"}):
        assert settled("fp16: true", gpu=True, **environment) == {}


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        ("", {"processes": 2}, "2 processes .* without a GPU.*use_cpu: true"),
        ("", {"ACCELERATE_USE_CPU": "False"}, "for a GPU .use_cpu: false.*cpu.yaml"),
        ("fp16: true", {}, "fp16 is true .*float32.*bf16: true"),
        ("{fp16: true, use_cpu: true}", {"gpu": True}, "fp16 is true"),
        ("", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16.*cpu.yaml, or write bf16: true"),
        ("fp16: true", {"ACCELERATE_USE_CPU": "true"}, r"fp16 is true .*the CPU \(use_cpu\)"),
        ("use_cpu: false", {"ACCELERATE_USE_CPU": "true"}, "use_cpu is false .* and use_cpu true"),
        ("bf16: false", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision bf16"),
        ("bf16: true", {"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16.*cpu.yaml.$"),
    ],
)
def test_precisions_and_processes_that_need_a_gpu(settled, given, environment, says):
    refused(says, lambda: settled(given, **environment))


def test_a_config_that_names_no_precision_loads_on_a_cpu(monkeypatch, tmp_path):
    for name, value in NO_GPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    config = tmp_path / "own.yaml"
    config.write_text("output_dir: out\nbf16: null\n")
    args = load_config(Expect, "SFTConfig", ["--config", str(config)]).trl
    assert (args.device.type, args.mixed_precision) == ("cpu", "no")
    assert "sft on cpu, 1 process, strategy none, float32, " in launch.describe_launch(args, "sft")


def deepspeed(**config):
    """Arguments of a run in float32 under a DeepSpeed config."""
    plugin = SimpleNamespace(deepspeed_config=config)
    more = {"mixed_precision": "no", "per_device_train_batch_size": 4}
    return args_with(
        1,
        device=torch.device("cpu"),
        optim=OptimizerNames.ADAGRAD,
        gradient_accumulation_steps=1,
        deepspeed_plugin=plugin,
        **more,
    )


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}


def test_first_line_under_a_deepspeed_config_of_ones_own():
    own = deepspeed(bf16={"enabled": True}, fp16={"enabled": False})
    assert "bfloat16, adagrad; " in launch.describe_launch(own, "dpo")
    own = deepspeed(optimizer={"type": "Lion"}, bf16={"enabled": False}, **OFFLOAD)
    assert "float32, Lion; " in launch.describe_launch(own, "dpo")
    own = deepspeed(zero_force_ds_cpu_optimizer=False, **OFFLOAD)
    assert "float32, adagrad; " in launch.describe_launch(own, "dpo")
    refused("optim is adagrad.*offload.*nvme", launch.describe_launch, deepspeed(**OFFLOAD), "dpo")


def test_recipe_turns_an_input_error_into_one_line_and_exit_code_1(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "from rlhf_trl.errors import InputError\nfrom rlhf_trl.run.launch import recipe\n"
        "def main():\n    raise InputError('the key x is wrong; write y.')\nrecipe(main)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: the key x is wrong; write y.\n")


def test_what_a_library_says_in_several_lines_is_one_error_line(capsys):
    def main():
        raise InputError("the model refused:\n  size 3\n\n  size 4; write 3.")

    with pytest.raises(SystemExit) as stop:
        launch.recipe(main)
    assert stop.value.code == "error: the model refused: size 3 size 4; write 3."


def test_an_error_does_not_stick_to_the_progress_bar(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(
        "from tqdm.auto import tqdm\nfrom rlhf_trl.errors import InputError\n"
        "from rlhf_trl.run.launch import recipe\n"
        "bars = [tqdm(total=2)]\ndef main():\n    bars[0].update(1)\n"
        "    raise InputError('a reward is nan.')\nrecipe(main)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert "1/2" in done.stderr and done.stderr.endswith("\nerror: a reward is nan.\n")


def test_a_run_for_deepspeed_names_what_installs_it(monkeypatch):
    launch.check_deepspeed()  # not asked for
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(launch, "find_spec", lambda name: object())
    launch.check_deepspeed()
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    refused("not installed; run scripts/setup.sh deepspeed", launch.check_deepspeed)


BROKEN_ON = """
import os, sys, time
from rlhf_trl.errors import InputError
from rlhf_trl.run import launch
def main():
    if os.environ["RANK"] in sys.argv[1:]:
        raise InputError(f"{len(sys.argv) - 1} processes are wrong.")
    time.sleep(60)  # for the others, as in a collective
launch.recipe(main)
"""


@pytest.mark.parametrize("broken", [["0", "1"], ["1"]])
def test_of_two_processes_one_tells_of_an_error(tmp_path, broken):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN_ON)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", script, *broken],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    sentence = f"error: {len(broken)} processes are wrong."
    assert done.stderr.count(sentence) == 1
    *_, last, rule = done.stderr.splitlines()  # torch draws a line below its report
    assert last == sentence and set(rule) == {"="}
    assert time.monotonic() - started < 50  # nobody waits for the process that is left


# --- the output folder


def test_write_whole_leaves_nothing_behind_when_writing_fails(tmp_path):
    def broken(path):
        path.write_text("half")
        raise RuntimeError

    target = tmp_path / "summary.json"
    output.write_json(target, {"a": 1})
    with pytest.raises(RuntimeError):
        output.write_whole(target, broken)
    assert json.loads(target.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_replace_folder_swaps_whole_folders(tmp_path):
    target, waits = tmp_path / "model", []

    def write(folder):
        os.mkdir(folder)
        (Path(folder) / "w").write_text(text)

    def wait():  # until all processes have written; meanwhile, the old one stays
        waits.append((target / "w").read_text() if target.exists() else None)

    for text in ("one", "two"):
        output.replace_folder(target, write, True, wait)
        assert (target / "w").read_text() == text
    assert waits == [None, "one", "one", "two"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_claim_refuses_what_it_must(tmp_path):
    (tmp_path / "file").write_text("")
    refused("is a file", claim, str(tmp_path / "file"), None)
    refused("cannot be written", claim, "/proc/no/such/place", None)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("{}")
    with pytest.raises(InputError) as caught:
        claim(str(tmp_path / "old"), None)
    assert str(caught.value).endswith("already holds files; write elsewhere with --output_dir.")
    refused("neither a whole checkpoint nor the config", claim, str(tmp_path / "old"), "auto")
    assert claim(str(tmp_path / "new"), None) is None
    assert claim(str(tmp_path / "new"), "auto") is None


@pytest.mark.parametrize(
    ("names", "what", "auto"),
    [
        (["config.yaml", "evaluations/step-000000.json"], "a run without a checkpoint", "anew"),
        (["samples-train.jsonl"], "a run without a checkpoint", "anew"),
        (["config.yaml", "checkpoint-1/optimizer.pt"], "a run without a checkpoint", "anew"),
        (["config.yaml", "checkpoint-1/manifest.json"], "a run", "continue"),
        (["config.yaml", *output.FINISHED.split()], "a finished run without a checkpoint", None),
        (["notes.txt"], "files", None),
    ],
)
def test_a_used_folder_is_refused_with_what_helps_there(tmp_path, names, what, auto):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(InputError) as caught:
        claim(str(tmp_path), None)
    said = str(caught.value)
    assert f"already holds {what}; " in said and said.endswith("elsewhere with --output_dir.")
    assert ("--resume_from_checkpoint auto" in said) == (auto is not None)
    assert auto is None or auto in said


def checkpoint(folder):
    folder.mkdir(parents=True)
    save_file({"w": torch.zeros(8)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"x": torch.zeros(8)}, folder / name)
    (folder / "trainer_state.json").write_text('{"global_step": 9}')
    (folder / "value_model").mkdir()
    (folder / "value_model" / "config.json").write_text("{}")
    manifests.write_manifest(folder, True, save_only_model=False)
    return folder


def test_auto_resumes_from_the_newest_whole_checkpoint(tmp_path, capsys):
    checkpoint(tmp_path / "checkpoint-9")
    half = checkpoint(tmp_path / "checkpoint-10")
    assert claim(str(tmp_path), "auto") == str(half)
    (half / "manifest.json").unlink()  # written last
    assert claim(str(tmp_path), "auto") == str(tmp_path / "checkpoint-9")
    assert "checkpoint-10, which has no manifest.json" in capsys.readouterr().out
    refused("checkpoint-10.*no manifest.json", claim, str(tmp_path), str(half))


def test_where_only_a_start_was_made_a_run_starts_anew(tmp_path, capsys):
    assert claim(str(tmp_path), "auto") is None
    assert capsys.readouterr().out == ""  # the first start, of which there is nothing to say
    for name in (".writable", "samples-train.jsonl", ".model.part", ".summary.part.json"):
        (tmp_path / name).write_text("")
    assert claim(str(tmp_path), "auto") is None
    assert {p.name for p in tmp_path.iterdir()} == {output.LOCK, "samples-train.jsonl"}
    (tmp_path / "config.yaml").write_text("")
    (checkpoint(tmp_path / "checkpoint-1") / "manifest.json").unlink()
    assert claim(str(tmp_path), "auto") is None
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(f"{tmp_path} holds no checkpoint: the run begins again at step 0") == 2


def test_what_a_run_left_after_a_step_is_set_aside_whole(tmp_path, capsys):
    stays = [
        *["checkpoint-20/optimizer.pt", "checkpoint-old/x", "evaluations/step-000020.json"],
        *["samples/step-000005.json", "completions/completions_00020.parquet", "pairs-train.jsonl"],
        *["config-from-step-10.yaml", "runs/events.30", "earlier-9/model/w"],
    ]
    goes = [
        *[
            "checkpoint-100/optimizer.pt",
            "evaluations/step-000021.json",
            "samples/step-100000.json",
        ],
        *["completions/completions_00030.parquet", "config-from-step-20.yaml", "model/w"],
        *["value_model/w", "summary.json", "log.json", "learning_curve.png", "scores.jsonl"],
    ]
    for name in [*stays, *goes, "config.yaml"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    resuming.set_aside(tmp_path, 20)
    for name in goes:
        assert not (tmp_path / name).exists()
        assert (tmp_path / "earlier-10" / name).read_text() == name
    for name in [*stays, "config.yaml", "earlier-10/config.yaml"]:
        assert (tmp_path / name).read_text() == name.removeprefix("earlier-10/")
    assert f"after step 20 before is now in {tmp_path / 'earlier-10'}" in capsys.readouterr().out
    resuming.set_aside(tmp_path, 20)  # nothing is left to move
    assert not (tmp_path / "earlier-11").exists()


def test_each_change_of_the_settings_leaves_a_config_and_so_does_going_back_to_the_first(tmp_path):
    for step, rate in [(2, 1e-3), (4, 1e-3), (6, 1e-4), (8, 1e-3)]:
        saved = tmp_path / f"checkpoint-{step}"
        saved.mkdir()
        (saved / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        args = args_with(1, output_dir=tmp_path, max_steps=9, resume_from_checkpoint=str(saved))
        resuming.keep_config(Loaded(None, args, None, given={"learning_rate": rate}), tmp_path)
    rates = {
        p.stem: yaml.safe_load(p.read_text())["learning_rate"] for p in tmp_path.glob("*.yaml")
    }
    assert rates == {"config": 1e-3, "config-from-step-6": 1e-4, "config-from-step-8": 1e-3}


FILES = [
    *["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"],
    *["value_model/config.json", "manifest.json"],
]


@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_a_checkpoint_is_named(tmp_path, name):
    folder = checkpoint(tmp_path / "checkpoint-1")
    assert manifests.checkpoint_fault(folder) is None
    path, content = folder / name, (folder / name).read_bytes()
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    for damage in (b"", content[:middle], content[:middle] + flipped + content[middle + 1 :]):
        path.write_bytes(damage)
        assert re.search(f"has a (cut-off|damaged) {name}", manifests.checkpoint_fault(folder))
    path.unlink()
    assert re.search(f"(lacks|has no) {name}", manifests.checkpoint_fault(folder))
    path.write_bytes(content)
    assert manifests.checkpoint_fault(folder) is None


def test_damage_that_leaves_a_manifest_readable_is_noticed(tmp_path):
    manifest = checkpoint(tmp_path / "checkpoint-1") / "manifest.json"
    manifest.write_text(manifest.read_text().replace("false", "0"))
    assert manifests.checkpoint_fault(manifest.parent) == "has a damaged manifest.json"


def test_what_cannot_be_written_is_a_sentence_and_other_errors_stay(capsys):
    for save in (
        lambda: build_tokenizer().backend_tokenizer.save("/dev/full"),  # a plain Exception
        lambda: torch.save({"a": 1}, "/dev/full"),  # iostream error
        lambda: torch.save(torch.zeros(100_000), "/dev/full"),
        lambda: Path("/dev/full").write_text("a"),
    ):
        with pytest.raises(SystemExit, match=r"^error: a file could not be written \(.*\); check"):
            launch.recipe(save)
    with pytest.raises(KeyError, match="key"):
        launch.recipe(lambda: {}["key"])
    usage = type("UsageError", (Exception,), {"__module__": "wandb.errors.errors"})

    def track():
        raise usage("No API key configured.")

    with pytest.raises(SystemExit, match=r"^error: report_to: wandb .*configured\); run .* none.$"):
        launch.recipe(track)
    with pytest.raises(SystemExit, match=r"^error: invalid literal"):
        launch.recipe(lambda: int("one"))
    assert "Traceback" in capsys.readouterr().err


def test_an_output_that_nobody_reads_any_more_is_a_sentence():
    program = (
        "from rlhf_trl.run import launch\n"
        "launch.recipe(lambda: [print('x' * 9999, flush=True) for _ in range(99)])"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run.stdout.readline()
    run.stdout.close()
    assert re.fullmatch(r"error: what read the output has ended, .* goes on\.\n", run.stderr.read())
    assert run.wait() == 1
    other, end = os.pipe()
    os.close(other)

    def another_pipe():  # such as a server's
        os.write(end, b"x")

    with pytest.raises(BrokenPipeError):
        launch.recipe(another_pipe)
    os.close(end)


def test_the_option_traceback_shows_where_an_error_comes_from(monkeypatch, capsys):
    def main():
        assert "--traceback" not in sys.argv
        try:
            raise ZeroDivisionError("in a reward")
        except ZeroDivisionError as error:
            raise InputError("a reward raised.") from error

    def full():
        raise OSError("No space left on device")

    for action, sentence in ((main, "^error: a reward raised.$"), (full, "could not be written")):
        for words in ([], ["--traceback"]):
            monkeypatch.setattr(sys, "argv", ["grpo.py", "--config", "x", *words])
            with pytest.raises(SystemExit, match=sentence):
                launch.recipe(action)
            shown = capsys.readouterr().err
            assert ("Traceback" in shown) == bool(words)
            assert ("ZeroDivisionError: in a reward" in shown) == (bool(words) and action is main)


def test_without_checksums_only_sizes_are_compared(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint-1")
    manifests.write_manifest(folder, checksums=False, save_only_model=False)
    (folder / "trainer_state.json").write_text('{"global_step": 8}')
    assert manifests.checkpoint_fault(folder) is None
    (folder / "trainer_state.json").write_text('{"global_step": 10}')
    assert manifests.checkpoint_fault(folder) == "has a cut-off trainer_state.json"
    manifests.write_manifest(folder, True, save_only_model=True)
    assert "save_only_model" in manifests.checkpoint_fault(folder)
