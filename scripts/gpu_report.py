"""Measure everything that needs a GPU, line by line: times, memory, bf16, sharding, resuming.

    python scripts/gpu_report.py --budget 8m            # the most telling lines first
    python scripts/gpu_report.py --device cpu --model tiny   # the dry form, three minutes

Nothing is fetched: weights are random, data are made here. Every line runs in a process of its own,
so one that fails is a line with its error. `report.json` in --out is written whole after each line,
and a line that stands there with the same settings is not run again; `report.md` is its table.
scripts/gpu_report/README.md says what is measured and how to bring the packages to a machine
without network.
"""

import argparse
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import datetime, timezone
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu_report")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # asking for a GPU does not start CUDA here

from rlhf_trl.output import write_json, write_whole  # noqa: E402

PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "deepspeed")
CPU_MINUTES = 0.1  # of a line of the dry form
NEEDS_GPU = "needs a GPU"


@dataclass
class Line:
    """A line: what it is called, about how long it takes on a GPU, and what it runs."""

    name: str
    minutes: float
    function: str  # of measure.py
    arguments: dict = field(default_factory=dict)
    gpu: bool = False  # it has no stand-in on a CPU


BATCH = {512: 8, 2048: 4}  # examples of an optimizer step
PARTS = {512: (256, 256), 2048: (1536, 512)}  # prompt and answer of a policy gradient


def recipe_line(recipe: str, length: int, checkpointing: bool = False, lora: bool = False) -> Line:
    """Return a line on Qwen3-0.6B: a recipe at a length, full or LoRA."""
    name = " ".join([recipe, "0.6b", "lora" if lora else "full", str(length)])
    values = {"model": "qwen3-0.6b", "batch": BATCH[length], "dtype": "bfloat16"}
    values |= {"activation_checkpointing": checkpointing, "learning_rate": 1e-6}
    if lora:
        values |= {"use_peft": True, "lora_target_modules": "all-linear"}
    if recipe in ("grpo", "ppo"):
        prompt, answer = PARTS[length]
        values |= {"num_generations": 8 if recipe == "grpo" else 1, "max_completion_length": answer}
        # 32 completions a generation and an optimizer step, by 8 or 4
        values |= {"per_device_train_batch_size": BATCH[length], "batch": 32}
        values["gradient_accumulation_steps"] = 32 // BATCH[length]
    else:
        prompt = length // 2
        answer = length - prompt - 1  # and the token that ends it
        values |= {"per_device_train_batch_size": BATCH[length], "max_length": length}
        values["gradient_accumulation_steps"] = 1
    if recipe != "sft":
        values["algorithm"] = recipe
    arguments = {"recipe": recipe, "prompt": prompt, "answer": answer, **values}
    minutes = 1.5 if recipe in ("grpo", "ppo") else 0.5
    return Line(name + (" checkpointing" if checkpointing else ""), minutes, "recipe", arguments)


def book_line(recipe: str, model: str, minutes: float, prompt: int, answer: int, **values) -> Line:
    """Return a line on the book's settings, with random weights of the book's model."""
    limit = "max_completion_length" if recipe in ("grpo", "ppo") else "max_length"
    values |= {"recipe": recipe, "base": f"configs/book/{recipe}.yaml", "model": model}
    values |= {"prompt": prompt, "answer": answer, limit: answer if recipe in ("grpo", "ppo") else 2 * (answer + 1)}
    return Line(f"book {recipe}", minutes, "recipe", values)


def lines() -> list[Line]:
    """Return all lines, the most telling first."""
    order = ("sft", "grpo", "dpo", "ppo", "reward", "kto")
    gym = {"reward_weights": [1.0]}
    short = {"model": "qwen3-0.6b", "prompt": 64, "answer": 64, "dtype": "bfloat16"}
    short |= {"per_device_train_batch_size": 8, "activation_checkpointing": False}
    sampled = {"num_generations": 4, "max_completion_length": 64, "algorithm": "grpo"}
    packed = {"model": "qwen3-0.6b", "length": 2048, "dtype": "bfloat16"}
    return [
        Line("device", 0.3, "device"),
        *(recipe_line(recipe, 512) for recipe in order),
        Line("bf16 rows", 0.2, "bf16_rows"),
        Line("demo autocast", 0.5, "demo", {"max_steps": 100}),
        Line("demo bf16 weights", 0.5, "demo", {"max_steps": 100, "dtype": "bfloat16"}),
        book_line("grpo", "qwen3-1.7b", 2.5, 256, 512, batch=4, updates=4, **gym),
        book_line("ppo", "qwen3-1.7b", 2, 256, 512, batch=16, updates=2, **gym),
        book_line("dpo", "olmo2-1b", 2.5, 1024, 1023, batch=64),
        book_line("reward", "qwen3-0.6b", 1, 256, 255, batch=16),
        Line("resume grpo", 1.5, "resume", {"how": "HERE", "recipe": "grpo", **short, **sampled}),
        *(
            Line(f"{how} sft", 1.5, "resume", {"how": how, "recipe": "sft", **short}, gpu=True)
            for how in ("fsdp2", "zero2", "zero3")
        ),
        *(
            Line(f"two processes {name}", 1, "two_processes", {"backend": name, **short}, gpu=True)
            for name in ("nccl", "gloo")
        ),
        Line("packing sdpa", 0.7, "packing", {"attn_implementation": "sdpa", **packed}),
        Line(
            "packing flash",
            *(0.7, "packing", {"attn_implementation": "flash_attention_2", **packed}),
            gpu=True,
        ),
        *(recipe_line(recipe, 2048, checkpointing=True) for recipe in order),
        *(recipe_line(recipe, 2048) for recipe in order),
        *(recipe_line(recipe, 2048, lora=True) for recipe in order),
        *(recipe_line(recipe, 512, lora=True) for recipe in order),
    ]


def settings(line: Line, args: argparse.Namespace) -> dict:
    """Return what a line runs here: the arguments, smaller in the dry form."""
    found = dict(line.arguments)
    if "model" in found and args.model:
        found["model"] = args.model
    if found.get("model") == "tiny":  # whose context is 256 tokens
        for key in ("prompt", "answer", "max_length", "max_completion_length", "length"):
            if key in found:
                found[key] = max(found[key] // 16, 8) + (key == "max_length")
        for key in ("batch", "per_device_train_batch_size"):
            if key in found:
                found[key] = found[key] // 2
    if args.device == "cpu" and "max_steps" in found:
        found["max_steps"] = 10
    if found.get("how") == "HERE":
        found["how"] = {"cpu": "cpu", "cuda": "one_gpu"}[args.device]
    return {"device": args.device, "function": line.function, **found}


def about(device: str) -> dict:
    """Return what the figures come from."""
    found = {"device": device, "machine": platform.machine(), "python": platform.python_version()}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        gpus = [line.split(", ") for line in told.splitlines()] or [["unknown"] * 3]
        found |= {"gpu": gpus[0][0], "gpus": len(gpus), "driver": gpus[0][1], "memory": gpus[0][2]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def preload() -> None:
    """Import what lines need once, before they part; a package that is missing is theirs to tell."""
    try:
        import measure  # noqa: F401

        import rlhf_trl.run.preferences
        import rlhf_trl.run.reward_models
        import rlhf_trl.run.supervised
        import rlhf_trl.trainers.direct_alignment
        import rlhf_trl.trainers.ppo
        import rlhf_trl.trainers.reward_models
        import rlhf_trl.trainers.sft  # noqa: F401
    except ImportError:
        traceback.print_exc()


def work(line: Line, given: dict, folder: Path, scratch: Path) -> None:
    """Run a line in this process, and leave `result.json`."""
    try:
        import measure

        arguments = {k: v for k, v in given.items() if k not in ("device", "function")}
        found = getattr(measure, line.function)(folder=folder, scratch=scratch, **arguments)
        result = {"status": "ok", **found}
    except BaseException as error:
        traceback.print_exc()
        message = " ".join(str(error).split())[:300]
        result = {"status": "failed", "error": f"{type(error).__name__}: {message}"}
    write_json(folder / "result.json", result)


def apart(line: Line, given: dict, scratch: Path, until: float | None) -> dict | None:
    """Run a line in a process of its own; return its result, or None where the time was over."""
    folder = scratch / line.name.replace(" ", "-").replace("/", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.time()
    if (process := os.fork()) == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the report
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        import torch

        if torch.cuda._is_in_bad_fork():  # something started CUDA before: begin afresh
            words = [__file__, "--line", line.name, json.dumps(given), str(folder), str(scratch)]
            os.execv(sys.executable, [sys.executable, *words])
        work(line, given, folder, scratch)
        sys.stdout.flush()
        os._exit(0)
    try:
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            if until is not None and time.time() > until:
                return None
            time.sleep(0.05)
    finally:
        try:
            os.killpg(process, signal.SIGKILL)  # with what it may have launched
        except ProcessLookupError:
            pass
        if "ended" not in locals() or ended[0] == 0:
            os.waitpid(process, 0)
    if (folder / "result.json").exists():
        found = json.loads((folder / "result.json").read_text())
    else:
        code = os.waitstatus_to_exitcode(ended[1])
        said = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        found = {"status": "failed", "error": ": ".join([how, *said])}
    if found["status"] == "ok":
        shutil.rmtree(folder)  # the log of a failed line stays
    return {**found, "seconds": round(time.time() - started, 2)}


def seconds(budget: str) -> float:
    """Return the seconds that `90s`, `8m` or `1h` mean."""
    return float(budget[:-1]) * {"s": 1, "m": 60, "h": 3600}[budget[-1]]


def main(words: list[str] | None = None) -> None:
    """Run the lines that are missing, and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", help="for all lines: tiny, or a config.json; default: each line's")
    parser.add_argument("--only", nargs="+", help="names of lines, with * and ?")
    parser.add_argument("--budget", type=seconds, help="stop in time: 90s, 8m, 1h")
    parser.add_argument("--retry", action="store_true", help="run lines again that failed")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_report"))
    parser.add_argument("--scratch", type=Path, help="for models and runs; default: in --out")
    parser.add_argument("--list", action="store_true", help="say which lines there are")
    args = parser.parse_args(words)
    chosen = [
        line
        for line in lines()
        if not args.only or any(fnmatch(line.name, pattern) for pattern in args.only)
    ]
    if args.list:
        print("\n".join(f"{line.minutes:5.1f} min  {line.name}" for line in chosen))
        return
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    path, scratch = args.out / "report.json", (args.scratch or args.out / "scratch").resolve()
    report = json.loads(path.read_text()) if path.exists() else {"lines": {}}
    report["about"], report["left_out"] = about(args.device), []
    until = time.time() + args.budget if args.budget else None
    preload()
    for line in chosen:
        given = settings(line, args)
        there = report["lines"].get(line.name, {})
        if there.get("settings") == given and not (args.retry and there["status"] == "failed"):
            continue
        need = 60 * (line.minutes if args.device == "cuda" else CPU_MINUTES)
        if until is not None and time.time() + need > until:
            report["left_out"].append(line.name)
            continue
        if line.gpu and args.device == "cpu":
            found = {"status": NEEDS_GPU}
        elif (found := apart(line, given, scratch, until)) is None:
            report["left_out"].append(line.name)
            continue
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        report["lines"][line.name] = {"at": at, "settings": given, **found}
        write_json(path, report)
        print(f"{line.name}: {found['status']} {found.get('error', '')}".rstrip(), flush=True)
    write_json(path, report)
    if report["left_out"]:
        print(f"left out for lack of time: {', '.join(report['left_out'])}")
    print(f"{path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--line"]:
        name, given, folder, scratch = sys.argv[2:]
        wanted = next(line for line in lines() if line.name == name)
        work(wanted, json.loads(given), Path(folder), Path(scratch))
    else:
        main()
