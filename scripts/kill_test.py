"""Kill runs, resume them with `auto`, and compare their ends with that of a run never stopped.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/kill_test.py --kills 4

A run is killed (SIGKILL, the whole process group) `--kills` times in each phase: at random times,
before the first checkpoint, while one is saved, while older ones are deleted, while the model is
exported, and while completions are generated. All runs are forks of this process, which has
imported TRL once. Identical means: every file of weights, of the last checkpoint and of evaluations
is the same, byte for byte, and so is every recorded rollout. After a kill, no generation may be
recorded by half. Exit code 1 if any run was refused or ended differently.
"""

import argparse
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork

from transformers import GenerationMixin

from rlhf_trl.output import MANIFEST, RECORD
from rlhf_trl.run import preferences, supervised, train  # noqa: F401
from rlhf_trl.run import reward_models as judges  # noqa: F401
from rlhf_trl.trainers import (  # noqa: F401 - what the runs need, imported once
    direct_alignment,
    orpo,
    policy_gradient,
    ppo,
    reward_models,
    sft,
)

ROOT = Path(__file__).parent.parent
STEPS = 6
COMMON = (
    f"--max_steps {STEPS} --save_strategy steps --save_steps 1 --save_total_limit 2 --eval_steps 3 "
    "--dataset.eval_size 8 --disable_tqdm"
)
POLICY = "--dataset.size 40 --num_generations 4 --per_device_train_batch_size 8"
PAIRS = "--dataset.size 24 --dataset.pairs offline --per_device_train_batch_size 8"
JUDGES = "--dataset.size 24 --per_device_train_batch_size 8 --dataset.candidates 2"
# name: recipe, config, options
RUNS = {
    "grpo": ("grpo", "grpo", POLICY),
    "grpo_3": ("grpo", "grpo", f"{POLICY} --num_iterations 3"),
    "ppo": ("ppo", "ppo", "--dataset.size 40 --per_device_train_batch_size 8 --num_iterations 2"),
    "dapo": ("grpo", "dapo", f"{POLICY} --steps_per_generation 2"),
    "reinforce": (
        *("grpo", "reinforce"),
        "--dataset.size 40 --per_device_train_batch_size 8 --baseline moving_average",
    ),
    "dpo": ("dpo", "dpo", PAIRS),
    "kto": ("kto", "kto", PAIRS),
    "orpo": ("orpo", "orpo", PAIRS),
    "reward": ("reward", "reward", JUDGES),
    "prm": ("prm", "prm", JUDGES),
    "sft": (
        *("sft", "sft"),
        "--dataset.size 48 --per_device_train_batch_size 8 --warmup_steps 1 "
        "--lr_scheduler_kwargs.num_decay_steps 4",
    ),
}
PHASES = ("random", "start", "saving", "rotation", "export", "generation")
SHORT = {"grpo_3": ["saving"], "ppo": ["export"], "dpo": ["start"]}
GENERATES = "kill_test.generate"
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", GENERATES)
LAST = f"checkpoint-{STEPS}"  # of another one, a kill while it is deleted leaves half
COMPARED = rf"(model|value_model|evaluations|{LAST}|{LAST}/value_model)/[^/]+"
NOT_COMPARED = {"training_args.bin", "trainer_state.json", MANIFEST}  # paths and times


def watch(folder: Path, at: int | None, delay: float, seen: list[str]) -> None:
    """Note what this process does to files and when it generates; be killed after event `at`."""
    saved = False

    def hook(event: str, args: tuple) -> None:
        nonlocal saved
        if event == "open":
            changes = isinstance(args[1], str) and args[1][0] in "wxa"
        else:
            changes = event in CHANGES
        # what rmtree deletes is named relative to a folder
        path = str(args[0]) if args else ""
        inside = event == GENERATES or str(folder) in path or (len(args) > 1 and args[1] != -1)
        if not changes or not inside:
            return
        if "rmtree" in event or (event in ("os.remove", "os.rmdir") and str(folder) not in path):
            phase = "rotation"
        elif event == GENERATES:
            phase = "generation"
        elif not saved:
            phase = "start"
        else:
            phase = "saving" if "checkpoint-" in path else "export"
        saved |= event == "os.rename" and str(args[1]).endswith(MANIFEST)
        seen.append(phase)
        if len(seen) - 1 == at:
            die(delay)

    generate = GenerationMixin.generate

    def generated(*args, **kwargs):
        sys.audit(GENERATES)
        return generate(*args, **kwargs)

    GenerationMixin.generate = generated
    sys.addaudithook(hook)


def die(delay: float) -> None:
    """Have the process group killed in `delay` seconds."""
    if delay and os.fork():
        return
    time.sleep(delay)
    os.killpg(0, signal.SIGKILL)


def start(name: str, folder: Path, *words: str, at: int | None = None, delay: float = 0) -> int:
    """Start a run as a process group of its own, and return its number."""
    recipe, config, options = RUNS[name]
    if process := os.fork():
        os.setpgid(process, process)
        return process
    code: object = 1
    try:
        os.setpgid(0, 0)
        with open(folder.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(ROOT)
        given = ["--config", f"configs/tiny/{config}.yaml", "--output_dir", str(folder)]
        sys.argv = [recipe, *given, *COMMON.split(), *options.split(), *words]
        seen: list[str] = []
        watch(folder, at, delay, seen)
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
            print(code, flush=True)
        folder.with_suffix(".events").write_text("\n".join(seen))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if code == 0 else 1)


def ended(process: int) -> int:
    """Wait for a run and return its exit code, below 0 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def recorded(folder: Path) -> str:
    """Return the record of rollouts; check that it is sound and holds whole generations."""
    if not (folder / RECORD).exists():
        return ""
    connection = sqlite3.connect(folder / RECORD)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], folder
    if not connection.execute("SELECT * FROM sqlite_master WHERE name = 'rollouts'").fetchall():
        return ""  # killed before it had any table
    parts = connection.execute(
        "SELECT split, COUNT(*), MAX(sample) + 1 FROM rollouts GROUP BY split, generation"
    ).fetchall()
    assert all(count == last for _, count, last in parts), folder
    sizes = {each for each in parts if each[0] != "train-replaced"}
    assert len(sizes) == len({split for split, _, _ in sizes}), folder
    tables = ("SELECT * FROM rollouts ORDER BY 1, 2, 3", "SELECT * FROM prompts ORDER BY 1")
    found = str([connection.execute(table).fetchall() for table in tables])
    connection.close()
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is compared of a run."""
    return {RECORD: recorded(folder).encode()} | {
        # whether its last call padded is no part of a tokenizer
        name: re.sub(rb'"padding": ({.*?}|null)', b"", path.read_bytes(), flags=re.DOTALL)
        if path.name == "tokenizer.json"
        else path.read_bytes()
        for path in folder.rglob("*")
        if re.fullmatch(COMPARED, name := str(path.relative_to(folder)))
        and path.is_file()
        and path.name not in NOT_COMPARED
    }


def differences(one: Path, other: Path) -> list[str]:
    """Return the files that two runs do not both have alike."""
    a, b = contents(one), contents(other)
    assert any(name.startswith("model/") for name in a)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def killed(name: str, phase: str, whole: Path, seconds: float, folder: Path, rng) -> str:
    """Kill a run, resume it, and say how that ended."""
    seen = whole.with_suffix(".events").read_text().split("\n")
    places = [n for n, each in enumerate(seen) if each == phase]
    if phase == "random":
        process = start(name, folder)
        time.sleep(rng.random() * seconds)
        os.killpg(process, signal.SIGKILL)
        where = ""
    elif places:
        at, delay = rng.choice(places), rng.choice((0, 0.005 * rng.random()))
        process = start(name, folder, at=at, delay=delay)
        where = f" (event {at} of {len(seen)}, {1000 * delay:.1f} ms)"
    else:
        return "never happens"
    code = ended(process)
    if code != -signal.SIGKILL and phase != "random":
        return f"FAILED: was to be killed and ended with {code}{where}"
    recorded(folder)
    if code := ended(start(name, folder, "--resume_from_checkpoint", "auto")):
        last = folder.with_suffix(".log").read_text().strip().splitlines()[-1]
        return f"REFUSED: {code} {last}{where}"
    found = differences(whole, folder)
    return f"DIFFERENT: {', '.join(found)}{where}" if found else "identical"


def main() -> None:
    """Parse the options, kill, resume, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=4, help="of each phase")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--short", action="store_true", help="three runs, each killed once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to keep the runs that went wrong")
    args = parser.parse_args()
    base = args.folder or Path(tempfile.mkdtemp())
    base.mkdir(parents=True, exist_ok=True)
    os.environ["HF_DATASETS_CACHE"] = str(base / "datasets")
    rng, total = random.Random(args.seed), Counter()
    plan = SHORT if args.short else dict.fromkeys(args.runs, args.phases)
    for name, phases in plan.items():
        whole, counts = base / f"{name}-whole", Counter()
        started = time.time()
        if ended(start(name, whole)):
            sys.exit(f"{name}: {whole.with_suffix('.log').read_text()[-2000:]}")
        seconds = time.time() - started
        for phase in phases:
            for number in range(1 if args.short else args.kills):
                folder = base / f"{name}-{phase}-{number}"
                result = killed(name, phase, whole, seconds, folder, rng)
                counts[result.partition(":")[0]] += 1
                if ":" in result:
                    print(f"{folder}: {result}", flush=True)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in counts.items())}", flush=True)
        total += counts
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    hours = (used.ru_utime + used.ru_stime) / 3600
    print(f"all: {', '.join(f'{n} {what}' for what, n in total.items())}; {hours:.2f} CPU hours")
    if args.folder is None:
        shutil.rmtree(base, ignore_errors=True)
    sys.exit(bool(total.keys() - {"identical", "never happens"}))


if __name__ == "__main__":
    main()
