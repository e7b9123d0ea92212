"""What a line of the report does, in a process of its own: train with a recipe, and measure it."""

import copy
import json
import os
import random
import runpy
import shutil
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
from rlhf_trl.trainers.policy_gradient import updates_per_generation

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WARM_UP, MEASURED = 1, 5  # rounds: an optimizer step, or all steps on one generation
STOCK = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
UNSET = "!unset"


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
            self._add(forward_flops(module, ids.numel(), context, grad), ids.numel(), grad)

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
    path.write_text(yaml.safe_dump(values, sort_keys=False).replace(f"'{UNSET}'", UNSET))
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
        base: a config to extend.
        **values: for the config.
    """
    memory = Memory()
    import trl

    stock = getattr(trl, f"{STOCK[recipe]}Trainer") if recipe in STOCK else None
    rounds = WARM_UP + MEASURED
    config = {
        **({"extends": str(ROOT / base)} if base else {}),
        **common(recipe, model_folder(model, scratch), folder),
        "max_steps": rounds * updates * (2 if stock else 1),
        **values,
    }
    if base:
        config["dataset"] |= {"eval_size": UNSET, "reader": UNSET, "split": UNSET}
    write_data(folder / "data.jsonl", recipe, rounds * batch, prompt, answer)
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
