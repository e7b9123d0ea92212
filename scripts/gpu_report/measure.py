"""What a line of the report does, in a process of its own: train with a recipe, and measure it."""

import copy
import ctypes
import gc
import inspect
import json
import math
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict, deque
from functools import wraps
from pathlib import Path

import torch
import trl
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import rlhf_trl
from rlhf_trl import algorithms, book, tiny
from rlhf_trl.run import started, train
from rlhf_trl.run.config import read_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CUDA = torch.cuda.is_available()
AT = "cuda" if CUDA else "cpu"
WARM_UP, MEASURED = 1, 5  # rounds: an optimizer step, or all steps on one generation
STOCK = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
# what TRL and transformers spend a step on beside the update
GENERATION, SCORING = "_generate_single_turn", "_generate_and_score_completions"
BATCHES = "get_batch_samples"


def now() -> float:
    """Return the time at which the device has done all that it was given."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory() -> int:
    """Return the most bytes since the last call: of CUDA's allocator, or of a CPU's process."""
    if CUDA:
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def size_of(tensors) -> int:
    """Return the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def backbone_flops(module: torch.nn.Module, tokens: int, context: int, grad: bool) -> int:
    """Return the FLOPs of `tokens` tokens in a backbone, and with `grad` of their backward pass.

    2 per weight of a matrix product and token, the same again for the gradient of its input and,
    where it is trained, of the weight: 6 N a trained token. Attention is 4 L H d context forward
    and twice that backward, without causality: 12 L H d T a trained token. What activation
    checkpointing computes again does not count.
    """
    config, embedding = module.config, module.get_input_embeddings().weight
    weights = [w for w in module.parameters() if w.dim() == 2 and w is not embedding]
    products = sum(w.numel() * (1 + grad * (1 + w.requires_grad)) for w in weights)
    heads = config.num_attention_heads
    wide = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 4 * config.num_hidden_layers * wide * context * (1 + 2 * grad)
    return tokens * (2 * products + attention)


class Meter(TrainerCallback):
    """Measures rounds of a trainer whose class is ours and, on the same batches, stock TRL's."""

    def __init__(self, trainer, stock=None, base=0):
        self.base = base  # bytes that were there before
        self.reference = getattr(trainer, "ref_model", None)
        self.trainer, self.classes = trainer, [type(trainer), *([stock] if stock else [])]
        self.steps = 1
        if grouped := hasattr(trainer.args, "steps_per_generation"):
            every = trainer.args.steps_per_generation * trainer.args.num_iterations
            self.steps = every // math.gcd(every, trainer.args.gradient_accumulation_steps)
        self.turn, self.done, self.generating, self.rounds = 0, 0, False, []
        self.round = defaultdict(float)
        self._replay(BATCHES, lambda found: (list(map(copy.copy, found[0])), *found[1:]))
        if grouped:
            self._replay(SCORING, dict)
            setattr(trainer, GENERATION, self._timed(GENERATION))
        for model in (trainer.model, self.reference, getattr(trainer.model, "value_model", None)):
            if hasattr(model, "config"):
                self._count(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def _replay(self, name, copied):
        """Let stock TRL get what ours got: the same batches and completions."""
        fetch, kept = self._timed(name), deque()

        def replayed(*args):
            found = kept.popleft() if self.turn else fetch(*args)
            if len(self.classes) > 1 and not self.turn:
                kept.append(found)
            return copied(found)  # a loss may take things out

        setattr(self.trainer, name, replayed)

    def _timed(self, name):
        function, generation = getattr(self.trainer, name), name == GENERATION

        @wraps(function)
        def timed(*args, **kwargs):
            started, self.generating = now(), generation
            try:
                return function(*args, **kwargs)
            finally:
                self.round[name] += now() - started
                self.generating = False
                if generation:
                    self._look("generation")

        return timed

    def _look(self, phase):
        key = f"peak {phase}"
        self.round[key] = max(self.round[key], peak_memory() - self.base)

    def _count(self, model):
        """Count the FLOPs of a model's passes, and their tokens."""
        head = model.get_output_embeddings()

        def passes(module, args, kwargs):
            ids, past = (
                kwargs.get("input_ids", args[0] if args else None),
                kwargs.get("past_key_values"),
            )
            grad, context = torch.is_grad_enabled(), ids.shape[1]
            context += past.get_seq_length() if past is not None else 0
            self._add(backbone_flops(module, ids.numel(), context, grad))
            kind = "generated" if self.generating else "trained" if grad else "read"
            self.round[kind] += len(ids) if self.generating else ids.numel()  # one each is new

        model.base_model.register_forward_pre_hook(passes, with_kwargs=True)
        if head is None:  # a reward or value model's is a single row
            return
        forward = model.forward

        @wraps(forward)  # `generate` reads the signature
        def counted(*args, **kwargs):
            ids = kwargs.get("input_ids", args[0] if args else None)
            rows = len(ids) * kwargs.get("logits_to_keep", 0) or ids.numel()
            if kwargs.get("fused_lm_head"):  # which leaves out what has no label
                rows = (kwargs["labels"][:, 1:] != -100).sum()
            backward = torch.is_grad_enabled() * (1 + head.weight.requires_grad)
            self._add(
                0 if kwargs.get("only_values") else 2 * head.weight.numel() * rows * (1 + backward)
            )
            return forward(*args, **kwargs)

        model.forward = counted

    def _add(self, flops):
        self.round["generation flops" if self.generating else "flops"] += flops

    def on_train_begin(self, *args, **kwargs):
        """Start the first round."""
        self._look("load")
        self.started = now()

    def on_pre_optimizer_step(self, *args, **kwargs):
        """Look at what forward and backward needed; count what stays."""
        self._look("update")
        weights, reference = list(self.trainer.model.parameters()), self.reference
        states = [s for state in self.trainer.optimizer.state.values() for s in state.values()]
        self.counted = {
            "parameters": size_of(weights),
            "gradients": size_of(w.grad for w in weights),
            "optimizer": size_of(states),
            "reference": size_of(reference.parameters()) if reference is not None else 0,
        }

    def on_step_end(self, *args, **kwargs):
        """Close a step, and a round with its last one; then it is the other class's turn."""
        self._look("optimizer")
        self.done += 1
        if self.done % self.steps:
            return
        self.rounds.append({**self.round, "turn": self.turn, "seconds": now() - self.started})
        self.round.clear()
        self.turn = (self.turn + 1) % len(self.classes)
        self.trainer.__class__ = self.classes[self.turn]
        self.started = now()

    def report(self) -> dict:
        """Return what the measured rounds come to, per optimizer step."""
        found = {"steps_a_round": self.steps, "counted_bytes": self.counted}
        for turn, whose in enumerate(("", "stock_")[: len(self.classes)]):
            mine = [r for r in self.rounds[WARM_UP * len(self.classes) :] if r["turn"] == turn]

            def of(key, rounds=mine):
                return [float(r.get(key, 0)) / self.steps for r in rounds]

            def median(key, of=of):
                return statistics.median(of(key))

            phases = [key for key in mine[0] if key.startswith("peak ")]
            peaks = {p.removeprefix("peak "): max(r[p] for r in mine) for p in phases}
            parts = zip(of("seconds"), of(SCORING), of(BATCHES), strict=True)
            updates = [whole - scoring - fetching for whole, scoring, fetching in parts]
            found |= {
                f"{whose}update_seconds": statistics.median(updates),
                f"{whose}peak_bytes": peaks,
            }
            if turn == 0:
                step, generation = median("seconds"), median(GENERATION)
                peaks["load"] = self.rounds[0]["peak load"]
                found |= {"step_seconds": step, "spread": [min(of("seconds")), max(of("seconds"))]}
                found |= {f"{k}_tokens": median(k) for k in ("trained", "read", "generated")}
                found |= {"tokens_per_second": median("trained") / step, "flops": median("flops")}
                found |= {"generation_share": generation / step}
                found["flops_per_second"] = median("flops") / (step - generation)
        return found


def reward(completion_ids, **_):
    """Return the share of even tokens: a reward that differs between random completions."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def model_folder(name: str, scratch: Path) -> str:
    """Return the folder of a model; one with random weights is made of its config (a JSON file)."""
    if name == "tiny":
        return tiny.checkpoint_path()
    shipped = ROOT / "rlhf_trl" / "run" / "architectures" / f"{name}.json"
    source = Path(name) if name.endswith(".json") else shipped
    folder = scratch / "models" / source.stem
    if not folder.exists():
        torch.manual_seed(0)
        with torch.device(AT):
            config = AutoConfig.for_model(**json.loads(source.read_text()))
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        model.save_pretrained(part)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(tiny.checkpoint_path()) / file, part)
        part.rename(folder)
    return str(folder)


def write_data(path: Path, recipe: str, rows: int, prompt: int, answer: int) -> None:
    """Write rows of random letters, each a token: `prompt` of them asked, `answer` said."""
    rng = random.Random(0)
    letters = [chr(n) for n in range(ord("a"), ord("z") + 1)]
    said = ["completion"] if recipe in ("sft", "kto") else ["chosen", "rejected"]
    with path.open("w") as file:
        for n in range(rows):
            row = {key: "".join(rng.choices(letters, k=answer)) for key in said}
            row["prompt"] = "".join(rng.choices(letters, k=prompt))
            file.write(json.dumps(row | ({"label": n % 2 == 0} if recipe == "kto" else {})) + "\n")


def prepared(folder, scratch, recipe, model, prompt, answer, rows, base=None, **values) -> Path:
    """Write data and a config, in which `values` come before what all lines say and `base`."""
    write_data(folder / "data.jsonl", recipe, rows, prompt, answer)
    common = {
        "model_name_or_path": model_folder(model, scratch),
        "output_dir": str(folder / "run"),
        "dataset": {"source": "path", "path": str(folder / "data.jsonl")},
        **({"reward_funcs": ["measure.reward"]} if recipe in ("grpo", "ppo") else {}),
        **{"eval_strategy": "no", "save_strategy": "no", "report_to": "none", "bf16": True},
        **{"logging_steps": 10**6, "logging_first_step": False, "disable_tqdm": True},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump((read_config(ROOT / base) if base else {}) | common | values))
    return path


def start(recipe: str, config: Path, look=lambda trainer: None) -> None:
    """Run a recipe in this process; `look` sees its trainer before it trains."""
    train_and_report = train.run

    def run(trainer, *args, **kwargs):
        look(trainer)
        train_and_report(trainer, *args, **kwargs)

    started.start(recipe, ["--config", str(config)], run)


def recipe(folder, scratch, recipe, batch, updates=1, rows=None, **values) -> dict:
    """Measure rounds of a recipe, of `batch` examples and `updates` optimizer steps each."""
    stock = getattr(trl, f"{STOCK[recipe]}Trainer") if recipe in STOCK else None
    rounds, found = WARM_UP + MEASURED, []
    values["max_steps"] = rounds * updates * (2 if stock else 1)
    path = prepared(folder, scratch, recipe, rows=rows or rounds * batch, **values)
    if not CUDA:  # else what was freed before would be used again unseen
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    peak_memory()  # forget how the model was made
    before = 0 if CUDA else peak_memory()

    def look(trainer):
        found.append(Meter(trainer, stock, before))
        trainer.add_callback(found[0])

    start(recipe, path, look)
    logged = found[0].trainer.state.log_history[-1]
    planned = planned_bytes(path, values["prompt"])
    return {**found[0].report(), "planned_bytes": planned, "train_loss": logged["train_loss"]}


def planned_bytes(path: Path, prompt: int) -> dict[str, float]:
    """Return what `rlhf-trl plan` estimates for each phase; {} where it fails, which is logged.

    It runs in a process of its own, since it plans on the CPU for a GPU.
    """
    command = [sys.executable, "-m", "rlhf_trl.cli", "plan", "--config", str(path)]
    done = subprocess.run(
        [*command, "--prompt-tokens", str(prompt)], capture_output=True, text=True, check=False
    )
    print(done.stdout, done.stderr)
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    lines = re.findall(r"^(\w+): ([\d.]+) (\w+), estimated", done.stdout, re.MULTILINE)
    return {phase: float(number) * units[unit] for phase, number, unit in lines}


def device(folder, scratch) -> dict:
    """Measure what the device reaches in a matrix product."""
    size, dtype = (8192, torch.bfloat16) if CUDA else (512, torch.float32)
    a, b = (torch.randn(size, size, device=AT, dtype=dtype) for _ in "ab")
    times = []
    for _ in range(13):
        started = now()
        a @ b
        times.append(now() - started)
    return {"flops_per_second": 2 * size**3 / statistics.median(times[3:]), "size": size}


def bf16_rows(folder, scratch) -> dict:
    """Compare every row's loss and gradient in bfloat16 with float64, relatively.

    `arithmetic`: on the same numbers, those of bfloat16; `inputs`: on those before rounding.
    """

    def computed(loss, tensors, learned):
        given = tensors | {key: tensors[key].detach().requires_grad_() for key in learned}
        value = loss(**given)
        value.backward()
        return value.item(), torch.cat([given[key].grad.double().flatten() for key in learned])

    def distance(one, other):
        gradient = (one[1] - other[1]).norm() / other[1].norm()
        return [abs(one[0] - other[0]) / abs(other[0]), gradient.item()]

    found = {}
    for name, algorithm in algorithms.ALGORITHMS.items():
        for formulation, row in algorithm.formulations.items():
            tensors, loss = loss_of(name, formulation, row)
            learned = [key for key in tensors if key in LEARNED[row.family]]
            bf16, same = dict(tensors), dict(tensors)
            for key in (key for key, tensor in tensors.items() if tensor.is_floating_point()):
                bf16[key] = tensors[key].bfloat16()
                same[key] = bf16[key].double()
            low, high, exact = (computed(loss, t, learned) for t in (bf16, same, tensors))
            distances = {"arithmetic": distance(low, high), "inputs": distance(low, exact)}
            found[f"{name} {formulation}"] = distances
    return {"rows": found}


LEARNED = {
    "policy_gradient": ("logps", "values"),
    "direct_alignment": ("policy_chosen_logps", "policy_rejected_logps", "chosen_nll"),
    "reward_model": ("chosen", "rejected", "rewards", "logits"),
    "distillation": ("logps", "logits"),
}


def loss_of(name: str, formulation: str, row: algorithms.Formulation):
    """Return float64 tensors that a row reads, and its loss of them."""
    torch.manual_seed(0)
    count, length, params = 32, 256, {"formulation": formulation}

    def normal(*shape, mean=0.0, spread=1.0):
        return mean + spread * torch.randn(shape, dtype=torch.float64).to(AT)

    if row.family == "policy_gradient":
        logps = -normal(count, length, mean=1, spread=0.5).abs()
        tensors = {"logps": logps, "mask": torch.ones_like(logps), "rewards": normal(count)}
        params |= {"num_generations": 8}
        if row.ratio != "none":
            tensors["old_logps"] = logps + normal(count, length, spread=0.05)
        if row.kl != "none":
            params["beta"] = 0.04
            tensors["ref_logps"] = logps + normal(count, length, spread=0.2)
        if row.value_loss != "none":
            tensors |= {key: normal(count, length) for key in ("values", "old_values")}
        if name == "maxrl":
            tensors["binary_rewards"] = (tensors["rewards"] > 0).double()
        if "max_completion_length" in row.reads:
            params["max_completion_length"] = length
        return tensors, lambda **given: rlhf_trl.policy_gradient_loss(name, **given, **params).loss
    if row.family == "distillation":
        student, shape = ("logps", ()) if row.loss == "sampled_reverse_kl" else ("logits", (64,))
        tensors = {each: normal(count, length, *shape) for each in (student, f"teacher_{student}")}
        tensors["mask"] = torch.ones(count, length, dtype=torch.float64).to(AT)
        return tensors, lambda **given: rlhf_trl.distillation_loss(name, **given, **params)
    paired = row.family == "direct_alignment"
    function = getattr(book.preference if paired else book.reward_models, row.loss)
    reads = inspect.signature(function).parameters
    if paired:
        mean = -1 if row.logps == "mean" else -100  # of a completion of 100 tokens
        tensors = {k: normal(count, mean=mean, spread=0.1 * -mean) for k in reads if "logps" in k}
        tensors |= {"chosen_nll": -normal(count).abs()} if "chosen_nll" in reads else {}
        return tensors, lambda **given: rlhf_trl.preference_loss(name, **given, **params).loss
    classes = (3,) if (name, formulation) == ("prm", "code") else ()
    tensors = {"chosen": normal(count), "rejected": normal(count), "rewards": normal(count, 8)}
    tensors |= {"logits": normal(count, 8, *classes)}
    tensors["labels"] = torch.arange(8, device=AT).repeat(count, 1) % (3 if classes else 2)
    tensors = {key: tensor for key, tensor in tensors.items() if key in reads}
    kind = "bradley_terry" if name == "reward" else name
    return tensors, lambda **given: rlhf_trl.reward_loss(kind, **given, **params)


def packing(folder, scratch, length, **values) -> dict:
    """Compare SFT on eight rows of a quarter of the length, padded and packed into two."""
    found, quarter = {}, length // 4
    for name, fields in (
        ("padded", {"max_length": quarter, "per_device_train_batch_size": 8}),
        ("packed", {"max_length": length, "per_device_train_batch_size": 2, "packing": True}),
    ):
        (folder / name).mkdir()
        fields |= {
            "prompt": quarter // 2,
            "answer": quarter - quarter // 2 - 1,
            "learning_rate": 0.0,
        }
        line = recipe(folder / name, scratch, "sft", batch=8, rows=8, **fields, **values)
        kept = ("train_loss", "step_seconds", "tokens_per_second", "peak_bytes")
        found[name] = {key: line[key] for key in kept}
    padded, packed = (each["train_loss"] for each in found.values())
    return {**found, "loss_difference": abs(packed - padded) / abs(padded)}


def launch(folder: Path, commands: list[list[str]], **environment) -> str:
    """Run processes side by side until all are done or one fails; return what the first printed."""
    logs, running = [folder / f"launch-{n}.log" for n in range(len(commands))], []
    shared = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    shared["PYTHONPATH"] = os.pathsep.join([str(HERE), shared.get("PYTHONPATH", "")])
    for rank, command in enumerate(commands):
        own = {key: value.format(rank=rank) for key, value in environment.items()}
        with logs[rank].open("w") as log:
            told = {"stdout": log, "stderr": subprocess.STDOUT, "env": shared | own}
            running.append(subprocess.Popen([sys.executable, *command], **told))
    while any(process.poll() is None for process in running):
        if any(process.poll() for process in running):
            for process in running:
                process.kill()
        time.sleep(0.1)
    for process, log in sorted(
        zip(running, logs, strict=True), key=lambda each: -each[0].returncode
    ):
        print(said := log.read_text(errors="replace"))
        if process.returncode:
            lines = said.splitlines() or ["nothing was printed"]
            wrong = [line for line in lines if "Error: " in line or "error: " in line]
            raise RuntimeError((wrong or lines[-1:])[0].strip())
    return logs[0].read_text()


def first_line(said: str) -> str:
    """Return the line in which a run says what was launched."""
    return next(line for line in said.splitlines() if "strategy " in line)


def resume(folder, scratch, how, recipe, **values) -> dict:
    """Run four steps and, from the checkpoint of the second one, the last two again; compare."""
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    path = prepared(folder, scratch, recipe, rows=64, **saving, **values)
    command = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file"]
    command += [str(ROOT / "configs" / "accelerate" / f"{how}.yaml")]
    command += [str(ROOT / "recipes" / f"{recipe}.py"), "--config", str(path)]
    said = launch(folder, [command])
    whole, again = folder / "run", folder / "again"
    again.mkdir()
    shutil.copy(whole / "config.yaml", again)
    shutil.move(whole / "checkpoint-2", again)
    launch(folder, [[*command, "--output_dir", str(again), "--resume_from_checkpoint", "auto"]])
    folders = (model_folder(values["model"], scratch), whole / "model", again / "model")
    start, one, other = (AutoModelForCausalLM.from_pretrained(each) for each in folders)

    def distance(a, b):
        pairs = zip(a.parameters(), b.parameters(), strict=True)
        return max((x.double() - y.double()).abs().max().item() for x, y in pairs)

    asked = AutoTokenizer.from_pretrained(again / "model")("abc", return_tensors="pt")
    answer = other.generate(**asked, max_new_tokens=4)
    return {
        "launched": first_line(said),
        "trained_by": distance(start, one),
        "resumed_differs_by": distance(one, other),
        "export_generates": answer.shape[1] > asked["input_ids"].shape[1],
    }


def two_processes(folder, scratch, backend, **values) -> dict:
    """Run SFT on two processes, on two GPUs where there are two, else both on one."""
    expected = {"ddp_backend": backend, "expect": {"processes": 2}}
    path = prepared(folder, scratch, "sft", rows=64, max_steps=4, **expected, **values)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    spread = torch.cuda.device_count() > 1
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment |= {"RANK": "{rank}", "LOCAL_RANK": "{rank}" if spread else "0"}
    environment["ACCELERATE_USE_CPU"] = str(not CUDA).lower()
    command = [str(ROOT / "recipes" / "sft.py"), "--config", str(path)]
    said = launch(folder, [command, command], **environment)
    return {"launched": first_line(said), "gpus": 1 + spread}


def check_launch(folder, scratch, how) -> dict:
    """Check, on all GPUs, that a launch makes the update of one process."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise RuntimeError(f"needs two GPUs; there are {gpus}")
    command = ["-m", "accelerate.commands.launch", "--num_processes", str(gpus), "--config_file"]
    command += [str(ROOT / "configs" / "accelerate" / f"{how}.yaml"), "-m", "rlhf_trl.cli"]
    command += ["check-launch", "--config", str(ROOT / "configs" / "tiny" / "grpo.yaml")]
    command += ["--use_cpu", "false", "--gradient_accumulation_steps", "2"]
    said = launch(folder, [command])
    kinds = ("came up: ", "SGD, ", "AdamW, ")
    return {"gpus": gpus, "found": [line for line in said.splitlines() if line.startswith(kinds)]}


def demo(folder, scratch, **values) -> dict:
    """Train the embedded model to spell backward as the demo does, on the same words."""
    for side, words in zip(
        ("train", "test"), (HERE / "words.txt").read_text().split("\n\n"), strict=True
    ):
        with (folder / f"{side}.jsonl").open("w") as file:
            for word in words.split():
                asked = f"Spell this word backward (example: sun -> nus): {word}"
                # as the gym reads it: the last answer counts
                right = rf"(?s)<answer>\s*{word[::-1]}\s*</answer>(?!.*<answer>)"
                row = {"prompt": [{"role": "user", "content": asked}], "answer": right}
                file.write(json.dumps(row) + "\n")
    values |= {
        "output_dir": str(folder / "run"),
        "dataset": {
            **{"source": "path", "path": str(folder / "train.jsonl")},
            **{"eval_path": str(folder / "test.jsonl"), "eval_size": 256},
        },
        **{"reward_funcs": ["regex", "format"], "bf16": True, "use_cpu": not CUDA},
        **{"eval_steps": values["max_steps"], "disable_tqdm": True},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(read_config(ROOT / "configs" / "tiny" / "grpo.yaml") | values))
    start("grpo", path)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    exact = {when: summary[when]["eval_regex"] for when in ("before", "after")}
    return {"exact_match": exact, "steps": summary["steps"], "held_out": summary["held_out"]}
