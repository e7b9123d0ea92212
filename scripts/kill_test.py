"""Stop runs in every bad way, resume them with `auto`, and compare how they end.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/kill_test.py --kills 4
    ... --processes 2 --kills 2 --runs grpo_3 dpo      # one of the processes is killed, or both
    ... --damage --runs grpo ppo                       # each file of the last checkpoint
    ... --faults --runs grpo                           # a full disk, a read-only one; needs root

A run is killed (SIGKILL) `--kills` times in each phase: at random times, before the first
checkpoint, while one is saved, while older ones are deleted, while the model is exported, while
completions are generated, and twice, the second time after it was resumed. All runs are forks of
this process, which has imported TRL once. Identical means: every file of weights, of the last
checkpoint and of evaluations is the same, byte for byte, as in a run that was never stopped, and so
is every recorded rollout; no generation may be recorded by half.

With `--damage`, each file of the last checkpoint is missing, empty, cut in half, or has a bit
flipped, one at a time: the one before must be taken; told to use exactly that one, a run must say
in one sentence why not. With `--faults`, the disk is full, or cannot be written, from each file on
that a run writes: it must end with one sentence.

Exit code 1 if any run was refused, hung, or ended differently.
"""

import argparse
import ctypes
import errno
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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork

import safetensors.torch
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import GenerationMixin, TokenizersBackend

from rlhf_trl.output import MANIFEST, RECORD
from rlhf_trl.run import preferences, supervised, train  # noqa: F401
from rlhf_trl.run import reward_models as judges  # noqa: F401
from rlhf_trl.run.options import join_options
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
    "ppo": ("ppo", "ppo", "--dataset.size 64 --per_device_train_batch_size 8 --num_iterations 2"),
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
PHASES = ("random", "start", "saving", "rotation", "export", "generation", "twice")
SHORT = {"grpo_3": ["saving"], "ppo": ["export"], "dpo": ["start"]}
GENERATES, WRITES = "kill_test.generate", "kill_test.write"
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", GENERATES, WRITES)
DISK = "disk"
PATIENCE = 120  # seconds, within which a run ends of which a process was killed
READ_ONLY, READ_WRITE = 33, 32  # MS_REMOUNT, with MS_RDONLY and without
LAST = f"checkpoint-{STEPS}"  # of another one, a kill while it is deleted leaves half
COMPARED = rf"(model|value_model|evaluations|{LAST}|{LAST}/value_model)/[^/]+"
NOT_COMPARED = {"training_args.bin", "trainer_state.json", MANIFEST}  # paths and times


def watch(folder: Path, at: int | None, act: Callable[[], None], seen: list[str]) -> None:
    """Note what this process does to files and when it generates; `act` upon event `at`."""
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
        seen.append(f"{phase} {event} {path.removeprefix(str(folder))}")
        if len(seen) - 1 == at:
            act()

    # what no audit event tells of: files that are written by C++ and Rust
    for owner, name, event in (
        (GenerationMixin, "generate", lambda *_, **__: (GENERATES,)),
        (torch, "save", lambda _, path, *__, **___: (WRITES, str(path))),
        (safetensors.torch, "serialize_file", lambda _, path, *__, **___: (WRITES, str(path))),
        (TokenizersBackend, "_save_pretrained", lambda *_, **to: (WRITES, to["save_directory"])),
    ):
        setattr(owner, name, _audited(getattr(owner, name), event))
    sys.addaudithook(hook)


def _audited(function: Callable, event: Callable) -> Callable:
    def audited(*args, **kwargs):
        sys.audit(*event(*args, **kwargs))
        return function(*args, **kwargs)

    return audited


def die(delay: float, whole: bool) -> None:
    """Have this process, or its whole group, killed in `delay` seconds."""
    victim = os.getpid()
    if delay and os.fork():
        return
    time.sleep(delay)
    os.killpg(0, signal.SIGKILL) if whole else os.kill(victim, signal.SIGKILL)
    os._exit(0)


def start(
    name: str,
    folder: Path,
    *words: str,
    processes: int = 1,
    at: int | None = None,
    act: Callable[[], None] = lambda: None,
    rank: int = 0,
) -> int:
    """Start a run as a process group of its own, and return its number.

    Upon event `at` of one of its processes, which has that `rank`, that process does `act`.
    """
    recipe, config, options = RUNS[name]
    if process := os.fork():
        os.setpgid(process, process)
        return process
    log = beside(folder, ".log")

    def work() -> None:
        mine = int(os.environ.get("RANK", 0))
        with open(log, "a") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # errors belong into the log
        given = ["--config", f"configs/tiny/{config}.yaml", "--output_dir", str(folder)]
        sys.argv = [recipe, *join_options(given, COMMON.split(), options.split(), words)]
        seen: list[str] = []
        watch(folder, at if mine == rank else None, act, seen)
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                print(stop.code, flush=True)
                raise
        beside(folder, f".events{mine}").write_text("\n".join(seen))

    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(ROOT)
        if processes == 1:
            work()
        else:  # as accelerate launch does, without its imports
            with open(log, "a") as stream:
                os.dup2(stream.fileno(), 2)
            os.environ["ACCELERATE_USE_CPU"] = "true"
            given = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0}
            given |= {"start_method": "fork", "monitor_interval": 0.1}
            elastic_launch(LaunchConfig(1, 1, processes, run_id=str(folder), **given), work)()
        code = 0
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def beside(folder: Path, ending: str) -> Path:
    """Return the file of what a run said or did, which is not on a disk with faults."""
    home = folder.parent.parent if folder.parent.name == DISK else folder.parent
    return home / (folder.name + ending)


def ended(process: int, patience: float = 600) -> int | str:
    """Wait for a run and return its exit code, below 0 if it was killed."""
    until = time.time() + patience
    while time.time() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "did not end"


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


def resumed(name: str, whole: Path, folder: Path, processes: int = 1) -> str:
    """Resume a run, and say how that ended."""
    again = start(name, folder, "--resume_from_checkpoint", "auto", processes=processes)
    if code := ended(again):
        return f"REFUSED: {code} {said(folder)[-1:]}"
    found = differences(whole, folder)
    return f"DIFFERENT: {', '.join(found)}" if found else "identical"


def said(folder: Path) -> list[str]:
    """Return the lines of a run."""
    return beside(folder, ".log").read_text().strip().splitlines()


def killed(
    name: str, phase: str, whole: Path, seconds: float, folder: Path, rng: random.Random, of: int
) -> str:
    """Kill a run of `of` processes, resume it, and say how that ended."""
    rank, everyone = rng.randrange(of), of == 1 or rng.random() < 0.5
    seen = beside(whole, f".events{rank}").read_text().split("\n")
    anywhere = phase == "twice" or (phase == "random" and not everyone)
    places = [n for n, each in enumerate(seen) if anywhere or each.partition(" ")[0] == phase]
    if phase == "random" and everyone:
        process = start(name, folder, processes=of)
        time.sleep(rng.random() * seconds)
        os.killpg(process, signal.SIGKILL)
        ended(process)
        return resumed(name, whole, folder, of)
    if not places and rank:
        return killed(name, phase, whole, seconds, folder, rng, of)  # the main process does it
    if not places:
        return "never happens"
    at, delay = rng.choice(places), rng.choice((0, 0.005 * rng.random()))
    where = f" (event {at} of {len(seen)}, {1000 * delay:.1f} ms"
    where += f", {'both' if everyone else f'rank {rank}'})" if of > 1 else ")"
    how = {"processes": of, "rank": rank, "act": partial(die, delay, everyone)}
    code = ended(start(name, folder, at=at, **how), PATIENCE)
    if code in (0, "did not end") and not (code == 0 and at > len(seen) - 5):
        return f"FAILED: was to be killed and ended with {code}{where}"
    recorded(folder)
    if phase == "twice":
        at = rng.randrange(len(seen))
        more = ["--resume_from_checkpoint", "auto"]
        if ended(start(name, folder, *more, at=at, **how), PATIENCE) == "did not end":
            return f"FAILED: did not end{where}"
    found = resumed(name, whole, folder, of)
    return found if found == "identical" else found + where


def damaged(name: str, whole: Path, folder: Path, of: int, count: int) -> Iterator[str]:
    """Damage each file of a run's last checkpoint in `count` ways; say how the run ends then."""
    files = sorted(path for path in (whole / LAST).rglob("*") if path.is_file())
    for number, file in enumerate(files):
        content, middle = file.read_bytes(), file.stat().st_size // 2
        flipped = bytes([content[middle] ^ 1]) if content else b""
        ways = {
            "missing": None,
            "empty": b"",
            "half": content[:middle],
            "a bit": content[:middle] + flipped + content[middle + 1 :],
        }
        for place, (way, left) in enumerate(ways.items()):
            if left == content or (number + place) % len(ways) >= count:
                continue
            shutil.copytree(whole, folder)
            target = folder / file.relative_to(whole)
            target.unlink()
            if left is not None:
                target.write_bytes(left)
            where = f" ({target.relative_to(folder)}, {way})"
            that = ["--resume_from_checkpoint", str(folder / LAST)]
            code, lines = ended(start(name, folder, *that, processes=of)), said(folder)
            if code != 1 or not sentence(lines, f"{LAST}' (has|lacks)", of):
                yield f"NOT NOTICED: {code} {lines[-1:]}{where}"
            found = resumed(name, whole, folder, of)
            if found == "identical" and not any(
                f"skipped {folder / LAST}" in x for x in said(folder)
            ):
                found = "NOT NOTICED:"
            yield found if found == "identical" else found + where
            shutil.rmtree(folder)
            beside(folder, ".log").unlink()


def sentence(lines: list[str], says: str, of: int = 1) -> bool:
    """Return whether a run ended with one sentence, on each of its processes."""
    errors = [line for line in lines if line.startswith("error: ")]
    own = of > 1 or not any("Traceback" in line for line in lines)  # else it is the launcher's
    return bool(own and errors and all(re.search(says, line) for line in errors))


def faulty(name: str, whole: Path, disk: Path, phases: Iterable[str], count: int) -> Iterator[str]:
    """Let the disk be full, or read-only, from each file on, and say how the run ends then."""
    places: dict[str, int] = {}
    for number, line in enumerate(beside(whole, ".events0").read_text().split("\n")):
        phase, event, path = line.split(" ", 2)
        # once for each name: in the last checkpoint, and where there is none yet
        if (
            phase in phases
            and event in ("open", WRITES, "os.mkdir", "os.rename")
            and path[:6] != "/root/"
        ):
            places[re.sub(r"\d+", "N", f"{event} {path} ({phase})")] = number

    filler, folder = disk / "filler", disk / "run"

    def fill() -> None:
        with filler.open("wb") as stream:
            free = os.statvfs(disk)
            os.posix_fallocate(stream.fileno(), 0, max(free.f_bavail * free.f_bsize, 1))

    ways = {"full": fill, "read-only": partial(mount, disk, READ_ONLY)}
    for turn, (what, at) in enumerate(places.items()):
        for way, act in list(ways.items())[:: -1 if turn % 2 else 1][:count]:
            code = ended(start(name, folder, at=at, act=act))
            mount(disk, READ_WRITE)
            filler.unlink(missing_ok=True)
            lines, where = said(folder), f" (disk {way} from {what})"
            if code and not sentence(lines, r"cannot be written|could not be written"):
                yield f"NO SENTENCE: {code} {lines[-1:]}{where}"
            if "BUSY" in lines:
                yield "open for writing just then"
            found = resumed(name, whole, folder)
            yield found if found == "identical" else found + where
            shutil.rmtree(folder)
            beside(folder, ".log").unlink()


def mount(disk: Path, flags: int) -> None:
    """Mount 64 MiB of memory as a disk, or mount it again with other flags."""
    libc, size = ctypes.CDLL(None, use_errno=True), b"" if flags else b"size=64m"
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", flags, size):
        if ctypes.get_errno() != errno.EBUSY:
            raise OSError(ctypes.get_errno(), "mount (are you root?)")
        print("BUSY", flush=True)


def main() -> None:
    """Parse the options, stop runs, resume them, report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kills", type=int, default=4, help="of each phase; else, ways at each file"
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--damage", action="store_true", help="damage checkpoints instead")
    parser.add_argument("--faults", action="store_true", help="let writing fail instead")
    parser.add_argument("--short", action="store_true", help="three runs, each killed once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to keep the runs that went wrong")
    args = parser.parse_args()
    base = args.folder or Path(tempfile.mkdtemp())
    base.mkdir(parents=True, exist_ok=True)
    os.environ["HF_DATASETS_CACHE"] = str(base / "datasets")
    if args.faults:
        (base / DISK).mkdir(exist_ok=True)
        mount(base / DISK, 0)
    rng, total = random.Random(args.seed), Counter()
    plan = SHORT if args.short else dict.fromkeys(args.runs, args.phases)
    for name, phases in plan.items():
        whole, counts = base / f"{name}-whole", Counter()
        started = time.time()
        if ended(start(name, whole, processes=args.processes)):
            sys.exit("\n".join([name, *said(whole)[-20:]]))
        seconds = time.time() - started
        for result in results(name, phases, whole, seconds, base, rng, args):
            counts[result.partition(":")[0]] += 1
            if ":" in result:
                print(f"{name}: {result}", flush=True)
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in counts.items())}", flush=True)
        total += counts
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    hours = (used.ru_utime + used.ru_stime) / 3600
    print(f"all: {', '.join(f'{n} {what}' for what, n in total.items())}; {hours:.2f} CPU hours")
    if args.faults:
        ctypes.CDLL(None).umount(str(base / DISK).encode())
    if args.folder is None:
        shutil.rmtree(base, ignore_errors=True)
    sys.exit(any(map(str.isupper, total)))


def results(
    name: str,
    phases: Iterable[str],
    whole: Path,
    seconds: float,
    base: Path,
    rng: random.Random,
    args: argparse.Namespace,
) -> Iterator[str]:
    """Return how runs ended, one after another."""
    if args.damage:
        yield from damaged(name, whole, base / f"{name}-damaged", args.processes, args.kills)
    elif args.faults:
        yield from faulty(name, whole, base / DISK, phases, args.kills)
    else:
        for phase in phases:
            for number in range(1 if args.short else args.kills):
                folder = base / f"{name}-{phase}-{number}"
                result = killed(name, phase, whole, seconds, folder, rng, args.processes)
                yield f"{result} [{folder.name}]" if ":" in result else result
                if ":" not in result:
                    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
