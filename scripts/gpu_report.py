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
import contextlib
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
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "gpu_report")]

from rlhf_trl.output import write_json, write_whole  # noqa: E402

PACKAGES = ("torch", "trl", "transformers", "accelerate", "datasets", "peft", "deepspeed")
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
CPU_MINUTES = 0.1  # of a line of the dry form
NEEDS_GPU = "needs a GPU"


PHASES = ("load", "generation", "update", "optimizer")
COLUMNS = ["line", "step, s", "tokens/s", "generation", "memory", "planned", "update, s"]
COLUMNS += ["stock TRL's"]
COLUMNS += ["TFLOP/s", "MFU"]
LEGEND = """Medians (and range) of five rounds after one of warm-up. Tokens: those of forward and
backward, prompts included. Update: forward, backward and optimizer, ours and stock TRL's in
alternation on the same batch. Memory: peak GiB after loading / in generation / in forward and
backward / in the optimizer. Planned: what `rlhf-trl plan` says of generation / forward and
backward (with the optimizer's state). FLOPs: 6 N + 12 L H d T for a trained token, 2 N + 4 L H d T
for one that is only read; nothing for what checkpointing computes again; without generation."""
BF16 = """Errors of loss and gradient: what the arithmetic loses on the same bf16 numbers, and what
rounding the inputs to bf16 loses. A loss near 0 has a large relative error."""
ERRORS = ["arithmetic: loss", "gradient", "inputs: loss", "gradient"]


@dataclass
class Line:
    """A line: what it is called, about how long it takes on a GPU, and what it runs."""

    name: str
    minutes: float
    function: str  # of measure.py
    arguments: dict = field(default_factory=dict)
    gpu: bool = False  # it has no stand-in on a CPU


SAMPLING = ("grpo", "ppo")


def recipe_line(recipe: str, length: int, checkpointing: bool = False, lora: bool = False) -> Line:
    """Return a line on Qwen3-0.6B: a recipe at a length, full or LoRA."""
    kind = ("lora" if lora else "full") + " checkpointing" * checkpointing
    micro = 8 if length == 512 else 4
    values = {"recipe": recipe, "model": "qwen3-0.6b", "dtype": "bfloat16", "learning_rate": 1e-6}
    values |= {"activation_checkpointing": checkpointing, "per_device_train_batch_size": micro}
    values |= {"use_peft": True, "lora_target_modules": "all-linear"} if lora else {}
    values |= {"algorithm": recipe} if recipe != "sft" else {}
    if recipe in SAMPLING:  # 32 completions a generation and an optimizer step
        answer = 256 if length == 512 else 512
        values |= {"num_generations": 8 if recipe == "grpo" else 1, "batch": 32}
        values |= {"gradient_accumulation_steps": 32 // micro, "max_completion_length": answer}
        values |= {"prompt": length - answer, "answer": answer}
    else:
        values |= {"gradient_accumulation_steps": 1, "batch": micro, "max_length": length}
        values |= {"prompt": length // 2, "answer": length // 2 - 1}  # and the token that ends it
    minutes = 1.5 if recipe in SAMPLING else 0.5
    return Line(f"{recipe} 0.6b {length} {kind}", minutes, "recipe", values)


def book_line(recipe: str, model: str, minutes: float, prompt: int, answer: int, **values) -> Line:
    """Return a line on the book's settings, with random weights of the book's model."""
    values |= {"recipe": recipe, "base": f"configs/book/{recipe}.yaml", "model": model}
    return Line(f"book {recipe}", minutes, "recipe", values | {"prompt": prompt, "answer": answer})


def lines() -> list[Line]:
    """Return all lines, the most telling first."""
    order = ("sft", "grpo", "dpo", "ppo", "reward", "kto")
    book = {"max_completion_length": 512, "reward_weights": [1.0]}
    short = {"model": "qwen3-0.6b", "prompt": 64, "answer": 64, "dtype": "bfloat16"}
    short |= {"per_device_train_batch_size": 8, "activation_checkpointing": False}
    short |= {"learning_rate": 1e-3}  # moves weights of bfloat16
    sampled = {"num_generations": 4, "max_completion_length": 64, "algorithm": "grpo"}
    packed = {"model": "qwen3-0.6b", "length": 2048, "dtype": "bfloat16"}
    flash = packed | {"attn_implementation": "flash_attention_2"}
    return [
        Line("device", 0.3, "device"),
        *(recipe_line(recipe, 512) for recipe in order),
        Line("bf16 rows", 0.2, "bf16_rows"),
        Line("demo autocast", 0.5, "demo", {"max_steps": 100}),
        Line("demo bf16 weights", 0.5, "demo", {"max_steps": 100, "dtype": "bfloat16"}),
        book_line("grpo", "qwen3-1.7b", 2.5, 256, 512, batch=4, updates=4, **book),
        book_line("ppo", "qwen3-1.7b", 2, 256, 512, batch=16, updates=2, **book),
        book_line("dpo", "olmo-2-0425-1b", 2.5, 1024, 1023, batch=64, max_length=2048),
        book_line("reward", "qwen3-0.6b", 1, 256, 255, batch=16, max_length=512),
        Line("resume grpo", 2, "resume", {"how": "one_gpu", "recipe": "grpo", **short, **sampled}),
        *(
            Line(f"{how} sft", 2.5, "resume", {"how": how, "recipe": "sft", **short}, gpu=True)
            for how in ("fsdp2", "zero2", "zero3")
        ),
        *(
            Line(f"two processes {name}", 1, "two_processes", {"backend": name, **short}, gpu=True)
            for name in ("nccl", "gloo")
        ),
        *(
            Line(f"check launch {how}", 1, "check_launch", {"how": how}, gpu=True)
            for how in ("fsdp2", "ddp", "zero2", "zero3")
        ),
        Line("packing sdpa", 0.7, "packing", {"attn_implementation": "sdpa", **packed}),
        Line("packing flash", 0.7, "packing", flash, gpu=True),
        *(recipe_line(recipe, 2048, checkpointing=True) for recipe in order),
        *(recipe_line(recipe, 2048) for recipe in order),
        *(recipe_line(recipe, 2048, lora=True) for recipe in order),
        *(recipe_line(recipe, 512, lora=True) for recipe in order),
    ]


def settings(line: Line, args: argparse.Namespace) -> dict:
    """Return what a line runs here: its arguments, smaller in the dry form."""
    found = {"device": args.device, "function": line.function, **line.arguments}
    if args.model and "model" in found:
        found["model"] = args.model
    if found.get("model") == "tiny":  # whose context is 256 tokens
        for key in ("prompt", "answer", "max_length", "max_completion_length", "length"):
            if key in found:
                found[key] = max(found[key] // 16, 8) + (key == "max_length")
        for key in ("batch", "per_device_train_batch_size"):
            if key in found:
                found[key] //= 2
        if "base" in found and "max_length" in found:
            found["gradient_accumulation_steps"] = 2
    if args.device == "cpu":
        found |= {"max_steps": 10} if "max_steps" in found else {}
        found |= {"how": "cpu"} if found.get("how") == "one_gpu" else {}
    return found


def about(device: str) -> dict:
    """Return what the figures come from."""
    found = {"device": device, "machine": platform.machine(), "python": platform.python_version()}
    if device == "cuda" and shutil.which("nvidia-smi"):
        query = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
        told = subprocess.run(query.split(), capture_output=True, text=True, check=False).stdout
        gpus = [line.split(", ") for line in told.splitlines()]
        found |= {"gpu": gpus[0][0], "gpus": len(gpus), "driver": gpus[0][1], "memory": gpus[0][2]}
    there = {name: distributions(name=name) for name in PACKAGES}
    return found | {name: next((each.version for each in of), None) for name, of in there.items()}


def preload() -> None:
    """Import once what lines need, before they part; what is missing is theirs to tell."""
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


def gpu_there() -> bool:
    """Whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available()


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
    ended, limit = (0, 0), started + 60 * max(5, 5 * line.minutes)  # something waits for ever
    try:
        while ended[0] == 0 and time.time() < limit:
            if until is not None and time.time() > until:
                return None
            time.sleep(0.05)
            ended = os.waitpid(process, os.WNOHANG)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # with what it may have launched
        if ended[0] == 0:
            os.waitpid(process, 0)
    if ended[0] == 0:
        found = {"status": "failed", "error": f"stopped after {time.time() - started:.0f} s"}
    elif (folder / "result.json").exists():
        found = json.loads((folder / "result.json").read_text())
    else:
        code = os.waitstatus_to_exitcode(ended[1])
        said = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        found = {"status": "failed", "error": ": ".join([how, *said])}
    for made in [folder] if found["status"] == "ok" else folder.iterdir():
        if made.is_dir():  # the logs of a failed line stay
            shutil.rmtree(made)
    return {**found, "seconds": round(time.time() - started, 2)}


def page(report: dict) -> str:
    """Return the report as Markdown."""
    told, done = report["about"], report["lines"]
    top = next((name for name in PEAKS if name in told.get("gpu", "")), None)
    measured = done.get("device", {}).get("flops_per_second", float("nan"))
    peak = PEAKS.get(top, measured)
    machine = "CPU: the dry form, whose figures say nothing"
    if told["device"] == "cuda":
        machine = "{gpus} x {gpu} ({memory}), driver {driver}".format_map(defaultdict(str, told))
    days = sorted({line["at"][:10] for line in done.values()})
    packages = ", ".join(f"{name} {told[name] or 'missing'}" for name in PACKAGES)
    parts = [
        f"# GPU report, {' to '.join(dict.fromkeys([days[0], days[-1]]))}",
        f"{machine}; Python {told['python']}, {packages}.",
        f"{LEGEND} MFU: of {peak / 1e12:.4g} TFLOP/s ({top or 'this machine'}'s); a matrix product "
        f"reached {measured / 1e12:.4g}.",
        table(COLUMNS),
    ]
    others, failed = [], [f"- {name}: left out for lack of time" for name in report["left_out"]]
    for name, line in done.items():
        if line["status"] != "ok":
            failed.append(f"- {name}: {line.get('error', line['status'])}")
        elif "step_seconds" not in line:
            given = {k: v for k, v in line.items() if k not in ("at", "settings", "status", "rows")}
            others.append(f"- {name}: {json.dumps(given)}")
        else:
            low, high = line["spread"]
            peaks = [line["peak_bytes"].get(phase) for phase in PHASES]
            cells = [name, f"{line['step_seconds']:.3f} ({low:.3f}-{high:.3f})"]
            cells += [f"{line['tokens_per_second']:.0f}", f"{line['generation_share']:.0%}"]
            cells += [" / ".join("-" if m is None else f"{m / 2**30:.2f}" for m in peaks)]
            planned = [line.get("planned_bytes", {}).get(phase) for phase in PHASES[1:3]]
            cells += [" / ".join("-" if m is None else f"{m / 2**30:.2f}" for m in planned)]
            stock = line.get("stock_update_seconds")
            cells += [f"{line['update_seconds']:.3f}", f"{stock:.3f}" if stock else "none"]
            rate = line["flops_per_second"]
            parts[-1] += row_of([*cells, f"{rate / 1e12:.3g}", f"{rate / peak:.1%}"])
    if rows := done.get("bf16 rows", {}).get("rows"):
        parts += ["## bf16 against float64, relative", BF16, table(["row", *ERRORS])]
        for name, row in rows.items():
            found = (*row["arithmetic"], *row["inputs"])
            parts[-1] += row_of([name, *(f"{number:.0e}" for number in found)])
    for title, items in (("The other lines", others), ("Without figures", failed)):
        parts += [f"## {title}", "\n".join(items)] if items else []
    return "\n\n".join(parts) + "\n"


def row_of(cells: list[str]) -> str:
    """Return a row of a table."""
    return f"\n| {' | '.join(cells)} |"


def table(titles: list[str]) -> str:
    """Return the head of a table."""
    return row_of(titles)[1:] + "\n" + "|---" * len(titles) + "|"


def save(report: dict, path: Path) -> None:
    """Write the report and its page, each whole."""
    write_json(path, report)
    text = page(report) if report["lines"] else ""
    write_whole(path.with_suffix(".md"), lambda part: part.write_text(text, encoding="utf-8"))


def seconds(budget: str) -> float:
    """Return the seconds that `90s`, `8m` or `1h` mean."""
    return float(budget[:-1]) * {"s": 1, "m": 60, "h": 3600}[budget[-1]]


def main(words: list[str] | None = None) -> None:
    """Run the lines that are missing, and write the report after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model", help="for all lines: tiny, or a config.json; default: each line's"
    )
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
    if not chosen:
        parser.error(f"--only {' '.join(args.only)} is no line; --list names them")
    if args.list:
        print("\n".join(f"{line.minutes:5.1f} min  {line.name}" for line in chosen))
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a look for GPUs does not start CUDA here
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    path, scratch = args.out / "report.json", (args.scratch or args.out / "scratch").resolve()
    report = json.loads(path.read_text()) if path.exists() else {"lines": {}}
    here = about(args.device)
    for key in ("device", "gpu"):
        if (was := report.get("about", here).get(key)) != here.get(key):
            sys.exit(f"error: {path} is a report of {was}; name another folder with --out.")
    report["about"], report["left_out"] = here, []
    until = time.time() + args.budget if args.budget else None
    preload()
    if args.device == "cuda" and not gpu_there():
        sys.exit("error: PyTorch sees no GPU; the dry form is --device cpu --model tiny.")
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
        at = datetime.now(UTC).isoformat(timespec="seconds")
        report["lines"][line.name] = {"at": at, "settings": given, **found}
        save(report, path)
        print(f"{line.name}: {found['status']} {found.get('error', '')}".rstrip(), flush=True)
    save(report, path)
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
