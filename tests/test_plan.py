"""The planned bytes against live ones."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from rlhf_trl import cli
from rlhf_trl.errors import InputError
from rlhf_trl.run import fake_models, plan, shares
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.fake_models import Texts
from rlhf_trl.run.shares import Launch
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.trainers import value_model

ROOT = Path(__file__).parent.parent


class Live:
    """What a trainer's first micro-batch saves, seen by hooks around its own training step."""

    def __init__(self, monkeypatch):
        self.saved = None
        original = Trainer.training_step

        def training_step(trainer, model, inputs, *rest):
            if self.saved is not None:
                return original(trainer, model, inputs, *rest)
            owned = {
                t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]
            }
            kept = []

            def pack(tensor):
                kept.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = original(trainer, model, inputs, *rest)
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}
            self.saved = sum(s.nbytes() for at, s in storages.items() if at not in owned)
            self.parameters = fake_models.size_of([*model.parameters()])
            self.trainer = trainer
            return loss

        monkeypatch.setattr(Trainer, "training_step", training_step)
        self.shapes = []
        forward_of = torch.nn.Module.__call__

        def call(module, *args, **kwargs):
            if torch.is_grad_enabled() and isinstance(kwargs.get("input_ids"), torch.Tensor):
                self.shapes.append(tuple(kwargs["input_ids"].shape))
            return forward_of(module, *args, **kwargs)

        monkeypatch.setattr(torch.nn.Module, "__call__", call)


# few examples, so that making them does not take longer than the step
SMALL = ["--dataset.size", "128", "--dataset.eval_size", "8", "--disable_tqdm", "true"]
SHORT_WORDS = ["--dataset.specs", "[{name: spell_backward, config: {max_word_len: 5}}]"]


@pytest.mark.promise
@pytest.mark.parametrize("second_shape", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "name", ["grpo", "ppo", "dpo", "orpo", "kto", "sft", "reward", "prm", "orm"]
)
def test_activations_are_those_that_the_live_trainer_saves(
    name, checkpointed, second_shape, monkeypatch, tmp_path
):
    words = ["--activation_checkpointing", str(checkpointed).lower()]
    if second_shape:
        words += ["--per_device_train_batch_size", "24", *SHORT_WORDS]
    check_activations(name, words, monkeypatch, tmp_path)


def check_activations(name, words, monkeypatch, tmp_path):
    """Train a step of a tiny config; the plan's activations of its shapes are within 5 %."""
    config = str(ROOT / "configs" / "tiny" / f"{name}.yaml")
    stage = stage_of_config(read_config(config))
    words = ["--config", config, "--output_dir", str(tmp_path / "run"), "--max_steps", "1", *words]
    words += ["--save_strategy", "no", "--load_best_model_at_end", "false"]
    live = Live(monkeypatch)
    loaded = stage.load([*words, *SMALL, "--eval_strategy", "no", "--eval_on_start", "false"])
    stage.part("run")(loaded, stage.part("trainer"), **stage.options)
    monkeypatch.undo()
    rows, tokens = live.shapes[0]
    planned_run = plan.Plan(
        stage=stage, loaded=loaded, launch=Launch(), texts=Texts(rows=rows, tokens=tokens)
    )
    sizes = {line.what: line.size for line in planned_run.lines}
    planned = sum(size for what, size in sizes.items() if "activations" in what)
    if name == "orpo":  # its loss keeps the log-probabilities of the whole vocabulary
        planned += sizes["logits of the update"]
    print(f"{name}: {rows} x {tokens} tokens, {planned / live.saved:.4f} of the live bytes")
    assert planned == pytest.approx(live.saved, rel=0.05)
    of_trained = [what for what in sizes if what.endswith("weights") and "reference" not in what]
    assert sum(sizes[what] for what in of_trained) == live.parameters


class Casts(TorchDispatchMode):
    """Counts the bytes in bfloat16 to which parameters are cast that are trained."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if "_to_copy" in str(function) and out.dtype == torch.bfloat16:
            trained = isinstance(args[0], torch.nn.Parameter) and args[0].requires_grad
            self.bytes += out.nbytes if trained else 0
        return out


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("head", ["fused", "logits", "text"])
def test_copies_of_autocast_are_those_that_a_forward_pass_makes(head, lora):
    config = AutoConfig.from_pretrained(checkpoint_path())
    adapter = LoraConfig(r=4, target_modules="all-linear") if lora else None
    model = fake_models.new_model(config, head, torch.float32, adapter)
    with Casts() as casts:
        texts = Texts(rows=2, tokens=8)
        fake_models.activations(model, head, texts, in_bf16=True, checkpointed=True)
    assert fake_models.autocast_copies(model, head) == casts.bytes > 0


def test_a_checkpointed_float32_model_needs_room_for_autocasts_copies(capsys):
    words = ["plan", "--config", str(ROOT / "configs/book/reward.yaml"), "--model_name_or_path"]
    cli.main([*words, str(fake_models.ARCHITECTURES / "qwen3-0.6b.json")])
    found = capsys.readouterr().out
    # 28 layers of 1024 x (2048 + 1024 + 1024) + 2048 x 1024 + 3 x 1024 x 3072 weights, and a head
    assert re.search(r"reward model: weights in bfloat16 +840\.00 MiB +update", found)
    measured = 10787670016 / 2**30  # on a GPU: scripts/gpu_report/h200.md
    planned = float(re.search(r"update: ([\d.]+) GiB", found)[1])
    assert planned == pytest.approx(measured, rel=0.02)


# --- states ---------------------------------------------------------------------------------------


def architecture(name):
    return json.loads((fake_models.ARCHITECTURES / f"{name}.json").read_text())


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("lora", [False, True])
def test_states_are_those_of_a_live_model(optim, lora):
    config = AutoConfig.from_pretrained(checkpoint_path())
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if lora else None
    planned = fake_models.weights_of(
        fake_models.new_model(config, "fused", torch.float32, adapter), optim
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float32)
    if lora:
        model = get_peft_model(model, adapter)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained) if optim == "adamw_torch" else torch.optim.SGD(trained)
    model(torch.zeros((1, 4), dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values() if s is not None]
    assert planned.optimizer_bytes == sum(t.nbytes for t in states)
    assert planned.trained_bytes == sum(p.grad.nbytes for p in trained)
    everything = sum(p.nbytes for p in model.parameters())
    assert planned.trained_bytes + planned.frozen_bytes == everything


@pytest.mark.promise
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b"])
@pytest.mark.parametrize("kind", ["full", "lora", "value head"])
def test_states_are_those_of_a_large_model_on_the_meta_device(name, kind):
    """Backward and AdamW run there, so that the live gradients and states are counted."""
    config = AutoConfig.for_model(**architecture(name))
    adapter = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    if kind != "lora":
        adapter = None
    planned_model = fake_models.new_model(config, "fused", torch.bfloat16, adapter)
    planned = [fake_models.weights_of(planned_model, "adamw_torch")]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if kind == "lora":
            model = get_peft_model(model, adapter)
        if kind == "value head":
            model.value_model = value_model.head(model)
            head = value_model.head(planned_model)
            planned.append(fake_models.weights_of(head, "adamw_torch"))
        output = model(torch.zeros((1, 4), dtype=torch.long), output_hidden_states=True)
        loss = output.logits.sum()
        if kind == "value head":
            (weight,) = [p for n, p in model.named_parameters() if n.startswith("value_model")]
            loss = loss + (output.hidden_states[-1].float() @ weight.float().T).sum()
        loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()]
    assert sum(w.optimizer_bytes for w in planned) == sum(t.nbytes for t in states)
    assert sum(w.trained_bytes for w in planned) == sum(p.grad.nbytes for p in trained)
    everything = sum(p.nbytes for p in model.parameters())
    assert sum(w.trained_bytes + w.frozen_bytes for w in planned) == everything


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("olmo-2-0425-1b", 1_484_916_736),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_shipped_architectures_have_the_published_numbers(name, numbers):
    config = AutoConfig.for_model(**architecture(name))
    model = fake_models.new_model(config, "logits", torch.bfloat16)
    assert fake_models.weights_of(model, "sgd").trained == numbers


def test_the_books_figures():
    """GiB of weights, gradients and Adam: bfloat16, float32, bfloat16 with a reference."""
    config = AutoConfig.for_model(**architecture("qwen3-0.6b"))
    sizes = []
    for dtype in (torch.bfloat16, torch.float32):
        model = fake_models.new_model(config, "logits", dtype)
        weights = fake_models.weights_of(model, "adamw_torch")
        sizes.append(sum(shares.per_process(weights, Launch(), True).values()))
    sizes.append(sizes[0] + weights.trained * 2)
    assert [round(size / 2**30, 1) for size in sizes] == [4.4, 8.9, 5.6]


def test_8_and_4_bits_by_hand():
    """Bitsandbytes: blocks of 256 numbers (8 bits) and of 64 (4 bits), a scale for each."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(128, 64), torch.nn.Linear(64, 128))
    counted = fake_models.weights_of(model, "adamw_8bit")
    embedding, matrix, bias = 8 * 8192, 2 * (8192 + 4 * 32), 8 * 128
    assert counted.optimizer_bytes == embedding + matrix + bias
    model.requires_grad_(False)
    for nested, scales in ((True, 4 * 128), ("nested", 128 + 4)):
        counted = fake_models.weights_of(model, "sgd", nested)
        assert counted.frozen_bytes == 4 * 8192 + (8192 // 2 + scales) + 4 * 128
        assert (counted.trained, counted.frozen) == (0, 2 * 8192 + 128)


def test_an_architecture_that_does_not_run_on_fake_tensors_is_planned_without_activations(
    monkeypatch, capsys
):
    def forward(*args, **kwargs):
        raise NotImplementedError("a kernel of its own")

    monkeypatch.setattr("transformers.Qwen3Model.forward", forward)
    cli.main(["plan", "--config", str(ROOT / "configs" / "tiny" / "sft.yaml")])
    page = " ".join(capsys.readouterr().out.split())
    assert "policy: weights" in page and "983.25 KiB" in page
    assert "does not run on fake tensors (NotImplementedError: a kernel of its own)" in page
    assert "estimated without policy: activations" in page


# --- shares ---------------------------------------------------------------------------------------

WEIGHTS = shares.Weights(
    trained=1000,
    frozen=0,
    trained_bytes=4000,
    frozen_bytes=0,
    largest_layer=100,
    optimizer_bytes=8000,
)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_zero_2_and_3_are_deepspeeds_own_estimates(processes):
    stage_2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    stage_3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    launch = Launch(processes=processes, strategy="zero2")
    _, needed = stage_2.estimate_zero2_model_states_mem_needs(1000, processes, cpu_offload=False)
    assert sum(shares.per_process(WEIGHTS, launch, True).values()) == needed
    offloading = Launch(processes=processes, strategy="zero2", offloads_optimizer=True)
    _, needed = stage_2.estimate_zero2_model_states_mem_needs(1000, processes, cpu_offload=True)
    assert sum(shares.per_process(WEIGHTS, offloading, True).values()) == needed
    for optimizer, weights in ((False, False), (True, False), (True, True)):
        launch = Launch(
            processes=processes,
            strategy="zero3",
            offloads_optimizer=optimizer,
            offloads_weights=weights,
        )
        _, needed, _ = stage_3.estimate_zero3_model_states_mem_needs(
            1000, 100, processes, cpu_offload=optimizer, cpu_offload_params=weights
        )
        assert sum(shares.per_process(WEIGHTS, launch, True).values()) == needed


@pytest.mark.parametrize(
    ("strategy", "in_bf16", "parts"),
    [
        # float32: 4 bytes a number, Adam 8
        (
            "ddp",
            False,
            {"weights": 4000, "gradients": 4000, "optimizer": 8000, "gradient buckets": 4000},
        ),
        # master weights, their gradients and Adam, 16 bytes a number, by 4 processes
        ("zero1", False, {"weights": 4000, "gradients": 4000, "optimizer": 4000}),
        # in bfloat16 weights and gradients of 2 bytes; the gradients whole, or by 4
        ("zero1", True, {"weights": 2000, "gradients": 2000, "optimizer": 4000}),
        ("zero2", True, {"weights": 2000, "gradients": 500, "optimizer": 4000}),
        # weights by 4, too, and weights and gradients of a layer of 100 numbers
        ("zero3", True, {"weights": 500, "optimizer": 4000, "gathered layers": 400}),
        # all by 4, and two layers of 100 numbers; in bfloat16 masters of 4 bytes are all that is
        # kept, and a layer is gathered in 2
        (
            "fsdp2",
            False,
            {"weights": 1000, "gradients": 1000, "optimizer": 2000, "gathered layers": 800},
        ),
        (
            "fsdp2",
            True,
            {"weights": 1000, "gradients": 1000, "optimizer": 2000, "gathered layers": 400},
        ),
    ],
)
def test_shares_by_hand(strategy, in_bf16, parts):
    launch = Launch(processes=4, strategy=strategy)
    assert shares.per_process(WEIGHTS, launch, computes_in_bf16=in_bf16) == parts


def test_masters_of_weights_that_are_loaded_in_bfloat16_by_hand():
    """Under FSDP 2 accelerate keeps float32 masters, of which Adam's averages take the dtype."""
    loaded_in_bf16 = replace(WEIGHTS, trained_bytes=2000, optimizer_bytes=4000)
    parts = shares.per_process(loaded_in_bf16, Launch(processes=4, strategy="fsdp2"), True)
    expected = {"weights": 1000, "gradients": 1000, "optimizer": 2000, "gathered layers": 400}
    assert parts == expected


def test_a_frozen_model_by_hand():
    """LoRA: 1000 frozen numbers of 2 bytes, 10 trained ones of 4 with Adam's two averages."""
    adapter = shares.Weights(
        trained=10,
        frozen=1000,
        trained_bytes=40,
        frozen_bytes=2000,
        largest_layer=100,
        optimizer_bytes=80,
    )
    ddp = shares.per_process(adapter, Launch(processes=4, strategy="ddp"), True)
    assert ddp == {"weights": 2040, "gradients": 40, "optimizer": 80, "gradient buckets": 40}
    zero3 = shares.per_process(adapter, Launch(processes=4, strategy="zero3"), True)
    assert zero3 == {"weights": 505, "optimizer": 40, "gathered layers": 400}


# --- the command ----------------------------------------------------------------------------------


def test_the_command_plans_for_other_machines(capsys):
    config = str(ROOT / "configs" / "tiny" / "grpo.yaml")
    accelerate = str(ROOT / "configs" / "accelerate" / "zero2.yaml")
    words = "--gpus 4 --gpu-memory 1MiB --prompt-tokens 20 --per_device_train_batch_size 8"
    cli.main(["plan", "--config", config, "--accelerate", accelerate, *words.split()])
    page = capsys.readouterr().out
    assert "4 processes on 1 node, zero2" in page
    assert "32 completions per optimizer step: 8 x 1 accumulated x 4 processes" in page
    assert "does not fit into 1.00 MiB" in page
    assert page.count(" saves ") == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--gpu-memory 80", "--gpu-memory is '80'; write a number with its unit, such as 80GB."),
        ("--gpus 3 --nodes 2", "3 processes do not spread over 2 nodes"),
        ("--gpus 0", "--gpus is 0; write 1 or more."),
        ("--accelerate nowhere.yaml", "--accelerate nowhere.yaml cannot be read"),
        ("--accelerate {faulty}", 'faulty.yaml: num_processes is "two"; write 1 or more'),
        ("--model_name_or_path owner/unknown", "config.json is enough for a plan"),
        ("--optim adafactor", "the state of adafactor is not known here"),
        ("--use_peft --load_in_8bit", "load_in_8bit cannot be planned"),
        ("--accelerate {zero3} --use_peft --load_in_4bit", "name configs/accelerate/ddp.yaml"),
        ("--gpus 3 --num_generations 7", "does not divide the generation batch of"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_sentence(words, sentence, tmp_path):
    config = str(ROOT / "configs" / "tiny" / "grpo.yaml")
    faulty = tmp_path / "faulty.yaml"
    faulty.write_text("{distributed_type: MULTI_GPU, num_processes: two}")
    words = words.format(zero3=ROOT / "configs" / "accelerate" / "zero3.yaml", faulty=faulty)
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--config", config, *words.split()])
    error = str(end.value.code)  # which Python prints, with exit code 1
    assert error.startswith("error:") and sentence in error and "\n" not in error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "write either --config FILE or --table"),
        ("--table --config x.yaml", "write either --config FILE or --table"),
        ("--table --gpus 2", "plan --table reads --text-tokens alone"),
        ("--table --bf16 false", "plan --table reads --text-tokens alone"),
    ],
)
def test_a_table_is_of_no_config(words, sentence):
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", *words.split()])
    assert sentence in str(end.value.code)


def test_the_table_has_a_cell_for_each_model_and_method(monkeypatch):
    monkeypatch.setattr(plan, "MODELS", (checkpoint_path(),))
    head, _, row, *_ = plan.planned_table(64).splitlines()
    assert [cell.strip() for cell in head.strip("| ").split("|")] == ["model", *plan.METHODS]
    assert row.count(" + ") == len(plan.METHODS)


def test_offload_is_read_from_deepspeeds_own_file(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    launch = shares.read_launch("configs/accelerate/zero2_offload.yaml", 4, None)
    assert (launch.strategy, launch.processes, launch.offloads_optimizer) == ("zero2", 4, True)
    assert not launch.offloads_weights
    monkeypatch.chdir(tmp_path)  # the path of the JSON file counts from the folder of the launch
    with pytest.raises(InputError, match=r"zero2_offload\.json cannot be read"):
        shares.read_launch(str(ROOT / "configs/accelerate/zero2_offload.yaml"), 4, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--accelerate zero3.yaml --expect.strategy fsdp", "name configs/accelerate/fsdp2.yaml"),
        ("--gpus 4 --expect.processes 8", "expects 8 processes and 4 are planned; write --gpus 8"),
        ("--accelerate zero3.yaml --gpus 4 --expect.processes 4", None),
        ("--gpus 4 --expect.processes 4 --expect.strategy fsdp", None),  # no file, no strategy
    ],
)
def test_a_launch_that_the_config_does_not_expect_is_refused(words, sentence, capsys):
    folder = ROOT / "configs"
    words = words.replace("zero3.yaml", str(folder / "accelerate" / "zero3.yaml"))
    command = ["plan", "--config", str(folder / "tiny" / "grpo.yaml"), *words.split()]
    if sentence is None:
        cli.main(command)
        assert "4 processes" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert sentence in str(end.value.code)


def config_name(path):
    return f"{path.parent.name}/{path.stem}"


PLANNED = [
    path
    for folder in ("tiny", "own", "book")
    for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))
    if path.name != "base.yaml"  # only extended, never run
    # whose model an earlier run makes
    and not str(read_config(path).get("model_name_or_path")).startswith("outputs/")
]
SCALE = sorted((ROOT / "configs" / "scale").glob("*.yaml"))


@pytest.mark.promise
@pytest.mark.parametrize("path", PLANNED, ids=config_name)
def test_every_config_is_planned(path):
    before = time.process_time()
    page = plan.planned_page(str(path), [])
    assert time.process_time() - before < 15
    assert "update: " in page and "optimizer step" in page
    missing = re.findall("found by: not planned: (.*) is neither", page)
    assert all(name.startswith("outputs/") for name in missing)  # an earlier run makes it


def head_of(path):
    """Return what a config of configs/scale says of itself, in one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


@pytest.mark.promise
@pytest.mark.parametrize("path", SCALE, ids=config_name)
def test_configs_for_many_gpus_need_what_their_comment_says(path):
    head = head_of(path)
    (accelerate,) = re.findall(r"configs/accelerate/\w+\.yaml", head)
    (count, memory) = re.search(r"(\d+) x (\d+) GB|one GPU with (\d+) GB", head).groups()[:2]
    processes = read_config(path)["expect"]["processes"]
    assert processes == int(count or 1)
    memory = memory or re.search(r"with (\d+) GB", head)[1]
    before = time.process_time()
    launch = shares.read_launch(str(ROOT / accelerate), None, None, processes)
    size = plan.read_memory(f"{memory}GB")
    needed = plan.make_plan(str(path), [], launch, (256, 1024), size).needed
    assert time.process_time() - before < 15
    assert f"Planned: {needed / 2**30:.1f} GiB of each GPU's {size / 2**30:.1f}." in head
    assert needed < 0.95 * size


@pytest.mark.parametrize("path", SCALE, ids=config_name)
def test_configs_for_many_gpus_say_their_batch(path):
    values = read_config(path)
    size = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    said = re.search(r"(\d+) (?:completions|pairs|examples) per optimizer step\.", head_of(path))
    assert int(said[1]) == size * values["expect"]["processes"]


@pytest.mark.parametrize(
    ("recipe", "examples", "steps"),
    [
        ("sft", 26, 12),  # 7 micro-batches of 4, so 2 steps in each of 6 epochs
        ("sft", 85, 36),  # 22 micro-batches
        ("sft", 3, 6),  # 1 micro-batch
        ("grpo", 9, 12),  # 2 generations of 4 prompts; one fills 2 windows, and is used twice
    ],
)
def test_steps_count_the_short_last_one_of_each_epoch(recipe, examples, steps):
    config = {
        "num_train_epochs": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
    }
    if recipe == "grpo":
        config |= {
            "num_train_epochs": 1.5,
            "num_generations": 8,
            "steps_per_generation": 8,
            "num_iterations": 2,
        }
    words = [word for name, value in config.items() for word in (f"--{name}", str(value))]
    stage = stage_of_config(read_config(ROOT / "configs" / "own" / f"{recipe}.yaml"), recipe)
    loaded = stage.load(
        ["--config", str(ROOT / "configs" / "own" / f"{recipe}.yaml"), "--use_cpu", *words]
    )
    texts = Texts(rows=4, tokens=8)
    asked = plan.Plan(stage=stage, loaded=loaded, launch=Launch(), texts=texts)
    assert plan.steps_to_come(asked, examples) == steps
