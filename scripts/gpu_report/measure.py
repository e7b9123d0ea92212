"""What a line of the report does, in a process of its own: train with a recipe, and measure it."""

import copy
import inspect
import json
import os
import random
import runpy
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import wraps
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from rlhf_trl import algorithms, losses, tiny
from rlhf_trl.run import train
from rlhf_trl.run.config import read_config
from rlhf_trl.trainers.policy_gradient import updates_per_generation

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WARM_UP, MEASURED = 1, 5  # rounds: an optimizer step, or all steps on one generation
STOCK = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}


class Memory:
    """Peak memory between two looks: of CUDA's allocator, or of the process on a CPU."""

    def __init__(self):
        self.cuda, self.base = torch.cuda.is_available(), 0
        self.base = self.peak()

    def peak(self) -> int:
        """Return the largest number of bytes since the last look."""
        if self.cuda:
            found = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return found
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").open())
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        return 1024 * int(status["VmHWM"].split()[0]) - self.base


def forward_flops(module: torch.nn.Module, tokens: int, context: int, grad: bool) -> int:
    """Return the FLOPs of `tokens` tokens in a backbone, and with `grad` of their backward pass.

    2 per weight of a matrix product and token, the same again for the gradient of its input and,
    where it is trained, of the weight: 6 N a trained token. Attention is 4 L H d context forward
    and twice that backward, without causality: 12 L H d T a trained token. Recomputation under
    activation checkpointing does not count.
    """
    embedding = module.get_input_embeddings().weight
    weights = [w for w in module.parameters() if w.dim() == 2 and w is not embedding]
    products = sum(w.numel() * (1 + grad * (1 + w.requires_grad)) for w in weights)
    config = module.config
    wide = config.num_hidden_layers * config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return tokens * (2 * products + 4 * wide * context * (1 + 2 * grad))


class Meter(TrainerCallback):
    """Measures rounds of a trainer whose class is ours and, on the same batches, stock TRL's."""

    def __init__(self, trainer, stock, memory):
        self.trainer, self.memory = trainer, memory
        self.classes = [type(trainer), *([stock] if stock else [])]
        grouped = hasattr(trainer.args, "steps_per_generation")
        self.steps = updates_per_generation(trainer.args) if grouped else 1
        self.turn, self.doing, self.done, self.kept, self.rounds = 0, "update", 0, [], []
        self.now = defaultdict(float)
        self._replay("get_batch_samples", copy_batches)
        if grouped:
            self._replay("_generate_and_score_completions", dict)
            trainer._generate_single_turn = self._timed(trainer._generate_single_turn, "generation")
        models = [trainer.model, getattr(trainer, "ref_model", None)]
        models.append(getattr(trainer.model, "value_model", None))
        for model in filter(lambda each: hasattr(each, "config"), models):
            self._count(model.get_base_model() if hasattr(model, "get_base_model") else model)

    def _replay(self, name, copied):
        """Let stock TRL get what ours got: the same batches and completions."""
        fetch, kept = self._timed(getattr(self.trainer, name), name), []

        def replayed(*args):
            if self.turn == 0:
                kept.append(fetch(*args))
                return copy_of(kept[-1])
            return copy_of(kept.pop(0))

        def copy_of(found):
            if len(self.classes) == 1:
                kept.clear()
            return (copied(found[0]), *found[1:]) if isinstance(found, tuple) else copied(found)

        setattr(self.trainer, name, replayed)

    def _timed(self, function, name):
        @wraps(function)
        def timed(*args, **kwargs):
            before, self.doing = self.doing, name
            started = self._time()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[name] += self._time() - started
                self.doing = before
                if name == "generation":
                    self._look("generation")

        return timed

    def _time(self):
        if self.memory.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _look(self, phase):
        self.now[f"peak {phase}"] = max(self.now[f"peak {phase}"], self.memory.peak())

    def _count(self, model):
        """Count the FLOPs of a model's passes, and the tokens that are trained."""
        backbone, head = model.base_model, model.get_output_embeddings()

        def passes(module, args, kwargs):
            ids = kwargs.get("input_ids", args[0] if args else None)
            past, grad = kwargs.get("past_key_values"), torch.is_grad_enabled()
            context = ids.shape[1] + (past.get_seq_length() if past is not None else 0)
            tokens = len(ids) if self.doing == "generation" else ids.numel()  # one is new
            self._add(forward_flops(module, ids.numel(), context, grad), tokens, grad)

        backbone.register_forward_pre_hook(passes, with_kwargs=True)
        if head is None:  # a reward or value model's is one row
            return
        forward, size = model.forward, head.weight.numel()

        @wraps(forward)
        def counted(*args, **kwargs):
            if not kwargs.get("only_values"):
                ids, grad = kwargs.get("input_ids", args[0] if args else None), torch.is_grad_enabled()
                rows = ids.numel()
                if kwargs.get("fused_lm_head"):  # which leaves out what is not trained
                    rows = (kwargs["labels"][:, 1:] != -100).sum()
                elif kwargs.get("logits_to_keep"):
                    rows = len(ids) * kwargs["logits_to_keep"]
                backward = grad * (1 + head.weight.requires_grad)
                self._add(2 * size * rows * (1 + backward), 0, grad)
            return forward(*args, **kwargs)

        model.forward = counted

    def _add(self, flops, tokens, grad):
        generating = self.doing == "generation"
        self.now["generation flops" if generating else "flops"] += flops
        self.now["generated" if generating else "trained" if grad else "read"] += tokens

    def on_train_begin(self, *args, **kwargs):
        """Start the first round."""
        self._look("load")
        self.loaded = self.now.pop("peak load")
        self.started = self._time()

    def on_pre_optimizer_step(self, *args, **kwargs):
        """Look at what forward and backward needed; count what stays."""
        self._look("update")
        model, optimizer = self.trainer.model, self.trainer.optimizer
        weights = list(model.parameters())
        reference = getattr(self.trainer, "ref_model", None)
        states = [s for state in optimizer.state.values() for s in state.values()]
        self.counted = {
            "parameters": size_of(weights),
            "reference": size_of(reference.parameters()) if reference is not None else 0,
            "gradients": size_of(w.grad for w in weights if w.grad is not None),
            "optimizer": size_of(s for s in states if isinstance(s, torch.Tensor)),
        }

    def on_step_end(self, *args, **kwargs):
        """Close a step, and a round with its last one; then it is the other class's turn."""
        self._look("optimizer")
        self.done += 1
        if self.done % self.steps:
            return
        ended = self._time()
        self.rounds.append({**self.now, "turn": self.turn, "seconds": ended - self.started})
        self.now.clear()
        self.turn = (self.turn + 1) % len(self.classes)
        self.trainer.__class__ = self.classes[self.turn]
        self.started = self._time()

    def report(self) -> dict:
        """Return what the measured rounds come to, per optimizer step."""
        rounds = self.rounds[WARM_UP * len(self.classes) :]
        ours, stock = ([r for r in rounds if r["turn"] == turn] for turn in (0, 1))
        scoring = "_generate_and_score_completions"

        def of(some, key):
            return [float(r.get(key, 0)) / self.steps for r in some]

        def update(some):
            pairs = zip(of(some, "seconds"), of(some, scoring), strict=True)
            return statistics.median(seconds - made for seconds, made in pairs)

        seconds = of(ours, "seconds")
        step, trained = statistics.median(seconds), statistics.median(of(ours, "trained"))
        found = {
            "step_seconds": step,
            "spread": [min(seconds), max(seconds)],
            "trained_tokens": trained,
            "tokens_per_second": trained / step,
            "generation_share": statistics.median(of(ours, "generation")) / step,
            "update_seconds": update(ours),
            "flops": statistics.median(of(ours, "flops")),
            "generated_tokens": statistics.median(of(ours, "generated")),
            "peak_bytes": {"load": self.loaded, **peaks(ours)},
            "counted_bytes": self.counted,
            "steps_a_round": self.steps,
        }
        found["flops_per_second"] = found["flops"] / (step - statistics.median(of(ours, "generation")))
        if stock:
            found |= {"stock_update_seconds": update(stock), "stock_peak_bytes": peaks(stock)}
        return found


def peaks(rounds):
    """Return the largest peak of every phase."""
    names = dict.fromkeys(key for r in rounds for key in r if key.startswith("peak "))
    return {name.removeprefix("peak "): max(r.get(name, 0) for r in rounds) for name in names}


def size_of(tensors) -> int:
    """Return the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def copy_batches(batches):
    """Return copies of batches, from which a loss may take things out."""
    return [copy.copy(batch) for batch in batches]


def reward(completion_ids, **_):
    """Return the share of even tokens: a reward that differs between random completions."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def model_folder(name: str, scratch: Path) -> str:
    """Return the folder of a model with random weights, made of its config where it is missing."""
    if name == "tiny":
        return tiny.checkpoint_path()
    folder = scratch / "models" / Path(name).stem
    if not (folder / "config.json").exists():
        source = Path(name) if name.endswith(".json") else HERE / f"{name}.json"
        kind = json.loads(source.read_text())
        config = AutoConfig.for_model(**kind)
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        model.save_pretrained(part)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(tiny.checkpoint_path()) / file, part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    return str(folder)


def text(rng: random.Random, tokens: int) -> str:
    """Return a text of so many tokens of the embedded tokenizer, which reads letter by letter."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=tokens))


def write_data(path: Path, recipe: str, rows: int, prompt: int, answer: int) -> None:
    """Write rows of random letters: `prompt` tokens asked and `answer` tokens answered."""
    rng = random.Random(0)
    with path.open("w") as file:
        for n in range(rows):
            row = {"prompt": text(rng, prompt)}
            if recipe in ("dpo", "reward"):
                row |= {"chosen": text(rng, answer), "rejected": text(rng, answer)}
            elif recipe in ("sft", "kto"):
                row["completion"] = text(rng, answer)
                row |= {"label": n % 2 == 0} if recipe == "kto" else {}
            file.write(json.dumps(row) + "\n")


def write_config(folder: Path, values: dict) -> Path:
    """Write a config for a recipe."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def common(recipe: str, model: str, folder: Path) -> dict:
    """Return what the config of every line says."""
    rewards = {"reward_funcs": ["measure.reward"]} if recipe in ("grpo", "ppo") else {}
    return {
        "model_name_or_path": model,
        "output_dir": str(folder / "run"),
        "dataset": {"source": "path", "path": str(folder / "data.jsonl")},
        **rewards,
        **{"eval_strategy": "no", "save_strategy": "no", "report_to": "none"},
        **{"logging_steps": 10**6, "logging_first_step": False, "disable_tqdm": True, "bf16": True},
    }


@contextmanager
def watched(look):
    """Let `look(trainer)` see the trainer of a recipe before it trains."""
    original = train.run

    def run(trainer, *args, **kwargs):
        look(trainer)
        return original(trainer, *args, **kwargs)

    train.run = run
    try:
        yield
    finally:
        train.run = original


def start(recipe: str, config: Path, *words: str, look=lambda trainer: None) -> None:
    """Run a recipe in this process."""
    sys.argv = [recipe, "--config", str(config), *words]
    with watched(look):
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
        except SystemExit as error:
            raise RuntimeError(error.code) from error


def recipe(
    folder: Path,
    scratch: Path,
    recipe: str,
    model: str,
    prompt: int,
    answer: int,
    batch: int,
    updates: int = 1,
    base: str | None = None,
    rows: int | None = None,
    **values,
) -> dict:
    """Measure rounds of a recipe.

    Args:
        folder: of the line.
        scratch: where models are.
        recipe: its name.
        model: see `model_folder`.
        prompt: tokens of a prompt.
        answer: tokens of a completion.
        batch: examples (prompts) of an optimizer step (a generation).
        updates: optimizer steps of a round.
        base: a config whose settings hold where nothing else is said.
        rows: of the data; None: what the rounds take.
        **values: for the config.
    """
    memory = Memory()
    import trl

    stock = getattr(trl, f"{STOCK[recipe]}Trainer") if recipe in STOCK else None
    rounds = WARM_UP + MEASURED
    config = {
        **(read_config(ROOT / base) if base else {}),
        **common(recipe, model_folder(model, scratch), folder),
        "max_steps": rounds * updates * (2 if stock else 1),
        **values,
    }
    write_data(folder / "data.jsonl", recipe, rows or rounds * batch, prompt, answer)
    found = {}

    def look(trainer):
        found["meter"] = meter = Meter(trainer, stock, memory)
        found["trainer"] = trainer
        trainer.add_callback(meter)

    start(recipe, write_config(folder, config), look=look)
    loss = found["trainer"].state.log_history[-1]["train_loss"]
    return {**found["meter"].report(), "train_loss": loss}


def device(folder: Path, scratch: Path) -> dict:
    """Measure what the device reaches in a matrix product: the ceiling of the utilization."""
    cuda = torch.cuda.is_available()
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a, b = (torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=dtype) for _ in "ab")
    times = []
    for _ in range(13):
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {"flops_per_second": 2 * size**3 / statistics.median(times[3:]), "size": size}


def bf16_rows(folder: Path, scratch: Path) -> dict:
    """Compare every row's loss and gradient in bfloat16 with float64.

    Twice: on the numbers as bfloat16 has them (what the arithmetic loses), and on those before they
    were rounded (what bfloat16 inputs lose). Losses differ relatively, gradients by the norm of the
    difference over the norm.
    """
    at = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name, algorithm in algorithms.ALGORITHMS.items():
        for formulation in algorithm.formulations:
            exact, learned, loss = loss_of_row(name, formulation, at)
            rounded = {k: t.bfloat16() if t.is_floating_point() else t for k, t in exact.items()}
            ways = (exact, {k: as_double(t) for k, t in rounded.items()}, rounded)
            results = []
            for tensors in ways:
                for key in learned:
                    tensors[key] = tensors[key].detach().requires_grad_()
                value = loss(**tensors)
                value.backward()
                gradient = torch.cat([tensors[key].grad.double().flatten() for key in learned])
                results.append((value.item(), gradient))
            right, same, bf16 = results
            found[f"{name} {formulation}"] = {
                "arithmetic": differences(bf16, same),
                "inputs": differences(bf16, right),
            }
    return {"rows": found}


def as_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point numbers in float64."""
    return tensor.double() if tensor.is_floating_point() else tensor


def differences(one, other) -> list[float]:
    """Return the relative difference of losses and of gradients."""
    loss = abs(one[0] - other[0]) / max(abs(other[0]), 1e-12)
    return [loss, ((one[1] - other[1]).norm() / other[1].norm().clamp(min=1e-30)).item()]


def loss_of_row(name: str, formulation: str, at: str):
    """Return float64 tensors that a row reads, which of them are learned, and its loss of them."""
    torch.manual_seed(0)
    row = algorithms.ALGORITHMS[name].formulations[formulation]
    count, length = 32, 256

    def logps(*shape, mean=-1.0, spread=0.5):
        return (mean + spread * torch.randn(*shape, dtype=torch.float64)).clamp(max=-1e-3).to(at)

    if row.family == "policy_gradient":
        tensors = {"logps": logps(count, length), "mask": torch.ones(count, length, device=at)}
        tensors["rewards"] = torch.rand(count, dtype=torch.float64).to(at)
        params = {"num_generations": 8}
        if row.ratio != "none":
            tensors["old_logps"] = tensors["logps"] + 0.05 * logps(count, length, mean=0, spread=1)
        if "beta" in row.reads and row.kl != "none":
            params["beta"] = 0.04
            tensors["ref_logps"] = tensors["logps"] + 0.2 * logps(count, length, mean=0, spread=1)
        if "max_completion_length" in row.reads:
            params["max_completion_length"] = length
        if row.value_loss != "none":
            values = torch.rand(2, count, length, dtype=torch.float64).to(at)
            tensors["values"], tensors["old_values"] = values.unbind()
        if name == "maxrl":
            tensors["binary_rewards"] = (torch.arange(count, device=at) % 3 == 0).double()
        learned = [key for key in ("logps", "values") if key in tensors]

        def loss(**given):
            more = {**params, "formulation": formulation}
            return losses.policy_gradient_loss(name, **given, **more).loss

        return tensors, learned, loss

    module = losses.book.preference if row.family == "direct_alignment" else losses.book.reward_models
    names = inspect.signature(losses._function(module, row.loss)).parameters
    if row.family == "direct_alignment":
        scale = 1 if row.logps == "mean" else 100
        tensors = {
            key: logps(count, mean=-1.0, spread=0.2) * (1 if key == "chosen_nll" else scale)
            for key in names
            if key.endswith(("_logps", "_nll"))
        }
        learned = [k for k in tensors if k.startswith(("policy_chosen", "policy_rej", "chosen_nll"))]

        def loss(**given):
            return losses.preference_loss(name, **given, formulation=formulation).loss

        return tensors, learned, loss

    shape = (count, 8, 3) if "class_weights" in names and formulation == "code" else (count, 8)
    made = {key: torch.randn(shape, dtype=torch.float64).to(at) for key in ("rewards", "logits")}
    made |= {key: torch.randn(count, dtype=torch.float64).to(at) for key in ("chosen", "rejected")}
    made["labels"] = torch.arange(count * 8, device=at).reshape(count, 8) % (len(shape) if len(shape) == 3 else 2)
    tensors = {key: tensor for key, tensor in made.items() if key in names}
    learned = [key for key in tensors if key != "labels"]
    kind = {"reward": "bradley_terry"}.get(name, name)
    return tensors, learned, lambda **given: losses.reward_loss(kind, **given, formulation=formulation)


def packing(folder: Path, scratch: Path, model: str, length: int, **values) -> dict:
    """Compare SFT on rows of a quarter of the length, padded and packed: loss and time of a step."""
    found = {}
    for name, packed in (("padded", False), ("packed", True)):
        part = folder / name
        part.mkdir()
        more = {**values, "packing": packed, "per_device_train_batch_size": 2 if packed else 8}
        arguments = {"prompt": length // 8, "answer": length // 4 - length // 8 - 1, "batch": 8}
        arguments |= {"rows": 8, "max_length": length if packed else length // 4}
        arguments |= {"learning_rate": 0.0, "gradient_accumulation_steps": 1}
        line = recipe(part, scratch, "sft", model, **arguments, **more)
        kept = ("train_loss", "step_seconds", "tokens_per_second", "peak_bytes")
        found[name] = {key: line[key] for key in kept}
    loss = [found[name]["train_loss"] for name in ("padded", "packed")]
    return {**found, "loss_difference": abs(loss[1] - loss[0]) / abs(loss[0])}


def launch(folder: Path, config: Path, how: str, recipe: str, *words: str) -> str:
    """Run a recipe through accelerate on one process; return what it printed."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    command += ["--config_file", str(ROOT / "configs" / "accelerate" / f"{how}.yaml")]
    command += [str(ROOT / "recipes" / f"{recipe}.py"), "--config", str(config), *words]
    return finished(subprocess.Popen(command, env=environment(), **PIPED))


PIPED = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a launch, which finds the reward function here."""
    clean = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    return {**clean, "PYTHONPATH": os.pathsep.join([str(HERE), clean["PYTHONPATH"]]), **more}


def finished(process: subprocess.Popen) -> str:
    """Wait for a launch; return its output, or raise the line that says why it failed."""
    said = process.communicate()[0]
    print(said)
    if process.returncode:
        lines = [line for line in said.splitlines() if "Error" in line or "error: " in line]
        raise RuntimeError((lines or said.splitlines()[-1:])[0])
    return said


def resume(
    folder: Path, scratch: Path, model: str, how: str, recipe: str, prompt: int, answer: int, **values
) -> dict:
    """Run four steps and, from the checkpoint of the second one, the last two again; compare."""
    config = common(recipe, model_folder(model, scratch), folder) | {"max_steps": 4, **values}
    config |= {"save_strategy": "steps", "save_steps": 2}
    write_data(folder / "data.jsonl", recipe, 64, prompt, answer)
    path, whole, again = write_config(folder, config), folder / "run", folder / "again"
    first = launch(folder, path, how, recipe)
    again.mkdir()
    shutil.copy(whole / "config.yaml", again)
    shutil.move(whole / "checkpoint-2", again)
    words = ("--output_dir", str(again), "--resume_from_checkpoint", "auto")
    launch(folder, path, how, recipe, *words)
    one, other = (AutoModelForCausalLM.from_pretrained(run / "model") for run in (whole, again))
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    difference = max((a.double() - b.double()).abs().max().item() for a, b in pairs)
    tokenizer = AutoTokenizer.from_pretrained(again / "model")
    said = other.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4)
    return {
        "launched": next(line for line in first.splitlines() if " process" in line),
        "resumed_identical": difference == 0.0,
        "largest_difference": difference,
        "exported_generates": said.shape[1] > 3,
    }


def two_processes(
    folder: Path, scratch: Path, model: str, backend: str, prompt: int, answer: int, **values
) -> dict:
    """Run SFT on two processes, on two GPUs where there are two, else both on one."""
    config = common("sft", model_folder(model, scratch), folder)
    config |= {"max_steps": 4, "ddp_backend": backend, "expect": {"processes": 2}, **values}
    write_data(folder / "data.jsonl", "sft", 64, prompt, answer)
    path = write_config(folder, config)
    spread = torch.cuda.device_count() > 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    if not torch.cuda.is_available():
        shared["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, str(ROOT / "recipes" / "sft.py"), "--config", str(path)]
    started = time.time()
    processes = [
        subprocess.Popen(
            command,
            env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank if spread else 0)),
            **PIPED,
        )
        for rank in range(2)
    ]
    said = [finished(process) for process in processes]
    return {
        "launched": next(line for line in said[0].splitlines() if " process" in line),
        "gpus": 2 if spread else 1,
        "run_seconds": time.time() - started,
    }


def demo(folder: Path, scratch: Path, model: str = "tiny", **values) -> dict:
    """Train the embedded model to spell backward as the demo does, on the same words."""
    ask = "Spell this word backward (example: sun -> nus): "
    sides = (HERE / "words.txt").read_text().split("\n\n")
    for name, words in zip(("data", "held_out"), sides, strict=True):
        rows = [
            {
                "prompt": [{"role": "user", "content": ask + word}],
                # the gym's rule: the last answer counts
                "answer": rf"(?s)<answer>\s*{word[::-1]}\s*</answer>(?!.*<answer>)",
            }
            for word in words.split()
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "extends": str(ROOT / "configs" / "tiny" / "grpo.yaml"),
        **common("grpo", "tiny", folder),
        "reward_funcs": ["regex", "format"],
        **{"eval_strategy": "steps", "eval_steps": 100, "use_cpu": not torch.cuda.is_available()},
        **values,
    }
    config["dataset"] |= {"eval_path": str(folder / "held_out.jsonl"), "eval_size": 256}
    start("grpo", write_config(folder, config))
    summary = json.loads((folder / "run" / "summary.json").read_text())
    exact = {when: summary[when]["eval_regex"] for when in ("before", "after")}
    return {"exact_match": exact, "steps": summary["steps"], "held_out": summary["held_out"]}
