"""Reward functions that misbehave, each at one step of a run and on one rank, as CASES tells.

`python tests/misbehaving_rewards.py PROCESSES [NAME ...]` runs the recipe of GRPO with each of them
(on two processes: on either rank) and prints how long after that call all had ended, the exit code
and what was said last. As a script for forks, its word is a folder with words.json.
"""

import asyncio
import ctypes
import itertools
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
STEP = 2  # at which all of them misbehave
LIMIT = 3  # seconds for a call
WORDS = [
    *["--config", "configs/tiny/grpo.yaml", "--disable_tqdm", "--max_steps", 4],
    *["--eval_strategy", "no", "--eval_on_start", "false", "--per_device_train_batch_size", 8],
    *["--num_generations", 4, "--dataset.size", 64, "--dataset.eval_size", 8],
    *["--reward_weights", 1, "--reward_timeout", LIMIT],
]
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Case:
    """One way to misbehave, and how a run with it must end."""

    said: str  # in the last sentence, a regular expression; "": the run must go on
    code: int | None = 1  # None: any but 0; 0 where nothing can change it
    on_two: bool = False  # whether it is tried on two processes, too


CASES: dict[str, Case] = {}


def good(completions):
    """Reward some texts more than others."""
    return [sum(map(ord, text_of(completion))) % 7 / 6 for completion in completions]


def text_of(completion):
    """Return the text of a completion, plain or a message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def is_time(trainer_state):
    """Return whether to misbehave now and here; note when that was."""
    here = os.environ.get("RANK", "0") == os.environ.get("MISBEHAVES_ON", "0")
    if trainer_state.global_step != STEP or not here:
        return False
    if "NOTE" in os.environ:
        Path(os.environ["NOTE"]).write_text(str(time.time()))
    return True


def case(said, **options):
    """Make a reward function and a case of what misbehaves with all that the function gets."""

    def decorate(misbehave):
        CASES[misbehave.__name__] = Case(said, **options)
        if asyncio.iscoroutinefunction(misbehave):

            @wraps(misbehave)
            async def waiting(completions, trainer_state, **columns):
                if is_time(trainer_state):
                    return await misbehave(completions, **columns)
                return good(completions)

            return waiting

        @wraps(misbehave)
        def reward(completions, trainer_state, **columns):
            if is_time(trainer_state):
                return misbehave(completions, **columns)
            return good(completions)

        return reward

    return decorate


late = partial(case, rf"took more than {LIMIT} seconds at step {STEP} on rank \d; its batch is in ")


@late(on_two=True)
def sleeps(completions, **columns):
    """Sleep for good."""
    time.sleep(1e6)


@late()
def computes(completions, **columns):
    """Compute for good."""
    while True:
        pass


@late(on_two=True)
async def awaits(completions, **columns):
    """Wait for good."""
    await asyncio.sleep(1e6)


@late(on_two=True)
async def sleeps_in_a_coroutine(completions, **columns):
    """Sleep for good where it should wait."""
    time.sleep(1e6)


@late(on_two=True)
def backtracks(completions, **columns):
    """Search with a regular expression that takes for ever."""
    return [bool(re.match("(a+)+$", "a" * 60 + "b")) for _ in completions]


@late(code=-signal.SIGKILL, on_two=True)
def counts_in_c(completions, **columns):
    """Count in C for good, where no other thread of Python goes on, and no signal is handled."""
    deque(itertools.count(), maxlen=0)


@late(code=-signal.SIGKILL)
async def counts_in_a_coroutine(completions, **columns):
    """Count in C for good in the thread of coroutines."""
    deque(itertools.count(), maxlen=0)


@late()
def catches_exceptions(completions, **columns):
    """Take the interruption for a failure of one completion."""
    rewards = []
    for _ in completions:
        try:
            time.sleep(1e6)
        except Exception:
            rewards.append(0.0)
    return rewards


@late()
def catches_all(completions, **columns):
    """Catch even what is no Exception, and return."""
    try:
        time.sleep(1e6)
    except:  # noqa: E722
        return good(completions)


@late(code=-signal.SIGKILL)
def catches_all_and_sleeps_on(completions, **columns):
    """Catch even what is no Exception, and go on."""
    while True:
        try:
            time.sleep(1e6)
        except:  # noqa: E722
            continue


@late()
def waits_for_a_lock(completions, **columns):
    """Wait for a lock that nobody gives back."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@late()
def waits_for_a_program(completions, **columns):
    """Wait for another program, which does not end."""
    subprocess.run(["sleep", "1000"], check=True)


@case(r"called sys.exit\(0\)", on_two=True)
def exits_with_0(completions, **columns):
    """End the process as if all were well."""
    sys.exit(0)


@case(r"called sys.exit\('no more'\)")
def exits_with_a_text(completions, **columns):
    """End the process with a sentence."""
    sys.exit("no more")


@case(r"called sys.exit\(3\)")
async def exits_in_a_coroutine(completions, **columns):
    """End the process from the thread of coroutines."""
    sys.exit(3)


@case(r"called os._exit\(0\)", on_two=True)
def exits_at_once(completions, **columns):
    """End the process without any cleaning up."""
    os._exit(0)


@case(r"called os._exit\(0\)")
def exits_and_catches_it(completions, **columns):
    """Catch everything, even the end of the process."""
    try:
        os._exit(0)
    except:  # noqa: E722
        return good(completions)


@case(r"called os._exit\(0\)")
def exits_in_a_thread(completions, **columns):
    """End the process from another thread."""
    thread = threading.Thread(target=os._exit, args=(0,))
    thread.start()
    thread.join()
    return good(completions)


@case("raised KeyboardInterrupt")
def interrupts(completions, **columns):
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


DIED = rf"the process ended inside reward function 'misbehaving_rewards\.\w+' at step {STEP} on "


@case(DIED, code=-signal.SIGSEGV, on_two=True)
def reads_nowhere(completions, **columns):
    """Read from the address 0."""
    ctypes.string_at(0)


@case(DIED, code=-signal.SIGABRT)
def aborts(completions, **columns):
    """End the process as a failed assertion in C does."""
    os.abort()


@case(DIED, code=-signal.SIGKILL)
def is_killed(completions, **columns):
    """End like a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@case(DIED, code=0, on_two=True)
def exits_in_c(completions, **columns):
    """End the process as C does, past Python."""
    LIBC.exit(0)


@case(DIED, code=0)
def exits_at_once_in_c(completions, **columns):
    """End the process past Python, at once."""
    LIBC._exit(0)


@case("has forked, and its child returned", code=0)
def forks(completions, **columns):
    """Return in two processes."""
    if os.fork() == 0:
        time.sleep(0.1)
    return good(completions)


def returns(name, reward, said, **options):
    """Make a case of a function that returns a value for the last completion, else good ones."""

    def wrong(completions, **columns):
        return [*good(completions)[:-1], reward]

    wrong.__name__ = wrong.__qualname__ = name
    globals()[name] = case(said, **options)(wrong)


WRONG = rf"at step {STEP} \(prompt .*, completion .*\); return a finite number"
returns("too_large_an_integer", 10**400, f"returned 10000.* {WRONG}", on_two=True)
returns("an_integer_of_5001_digits", 10**5000, f"of type int that cannot be printed {WRONG}")
returns("no_float32", 1e39, rf"returned 1e\+39 {WRONG}")
returns("no_sum_in_float32", 3e38, rf"returned 3e\+38 {WRONG}", on_two=True)
returns("not_a_number", float("nan"), f"returned nan {WRONG}")
returns("minus_infinity", -np.float64("inf"), f"returned .*-inf.* {WRONG}")
returns("a_complex_number", 1j, f"returned 1j {WRONG}")
returns("a_text", "0.5", f"returned '0.5' {WRONG}")
returns("a_list", [0.5], rf"returned \[0.5\] {WRONG}")
returns("two_in_a_tensor", torch.tensor([0.5, 1.0]), rf"returned tensor\(.* {WRONG}")


@case("returned 7 values for 8 completions", on_two=True)
def one_too_few(completions, **columns):
    """Forget a completion."""
    return good(completions)[1:]


@case("returned <generator object .* for 8 completions")
def a_generator(completions, **columns):
    """Return what has no length."""
    return (reward for reward in good(completions))


@case("returned {0: .* for 8 completions")
def a_dict(completions, **columns):
    """Return rewards by place."""
    return dict(enumerate(good(completions)))


@case("returned None for 8 completions")
def nothing(completions, **columns):
    """Forget to return."""


@case("")
def changes_completions(completions, **columns):
    """Change the completions where they are."""
    rewards = good(completions)
    for completion in completions:
        completion[0]["content"] = "perfect"
    return rewards


@case("")
def changes_prompts_and_columns(completions, prompts, answer, completion_ids, **columns):
    """Change all other lists where they are."""
    rewards = good(completions)
    prompts[0][0]["content"] = "another question"
    for column in (prompts, answer, completion_ids, completions):
        column.clear()
    return rewards


@case("seeded torch, which training draws from", on_two=True)
def seeds_torch(completions, **columns):
    """Seed torch."""
    torch.manual_seed(7)
    return good(completions)


@case("seeded torch, which training draws from")
def seeds_torch_as_the_run_does(completions, **columns):
    """Seed torch with the seed that the run has, too, and draw."""
    torch.manual_seed(torch.initial_seed())
    torch.rand(3)
    return good(completions)


@case("seeded random, which training draws from")
def seeds_python(completions, **columns):
    """Seed Python's own generator, and draw from it."""
    random.seed(7)  # not that of the run, whose state is as fresh
    random.random()
    return good(completions)


@case("seeded numpy.random, which training draws from")
def seeds_numpy(completions, **columns):
    """Seed numpy's generator."""
    np.random.seed(7)
    return good(completions)


@case("")
def draws(completions, **columns):
    """Draw from all generators; seed one where that is undone."""
    random.random(), np.random.rand(1000), torch.rand(2000)
    with torch.random.fork_rng():
        torch.manual_seed(0)
    return good(completions)


@case("changed the current folder", on_two=True)
def changes_folder(completions, **columns):
    """Go to another folder."""
    os.chdir("/")
    return good(completions)


@case("changed the current folder")
def removes_folder(completions, **columns):
    """Go to a folder that is gone."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return good(completions)


@case("changed torch's gradient mode")
def turns_gradients_on(completions, **columns):
    """Turn gradients on in a generation, which has none."""
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return good(completions)


@case("changed torch's default dtype")
def changes_dtype(completions, **columns):
    """Compute in float64."""
    torch.set_default_dtype(torch.float64)
    return good(completions)


@case("changed torch's default device")
def changes_device(completions, **columns):
    """Make tensors elsewhere."""
    torch.set_default_device("meta")
    return good(completions)


@case("changed torch's number of threads")
def changes_threads(completions, **columns):
    """Compute in more threads."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    return good(completions)


@case("raised ValueError: no reason", on_two=True)
def raises(completions, **columns):
    """Raise."""
    raise ValueError("no reason")


@case("raised CancelledError")
async def cancels(completions, **columns):
    """Raise what is no Exception."""
    raise asyncio.CancelledError


def words_for(name, folder):
    """Return the options of a run with one of the functions."""
    words = [*WORDS, "--reward_funcs", f"misbehaving_rewards.{name}", "--output_dir", folder]
    return [str(word) for word in words]


def forked(name, home):
    """Run a case on one process; return seconds from the call to the end, exit code and output."""
    from two_processes import FORKS, run_script

    (home / "words.json").write_text(json.dumps(words_for(name, home / "run")))
    process = FORKS.Process(target=run_script, args=(__file__, home, 0, None, 1))
    process.start()
    process.join(120)
    seconds = time.time() - float((home / "note").read_text())
    time.sleep(0.5)  # the watcher outlives it for a moment
    return seconds, process.exitcode, (home / "log.0").read_text()


def launched(name, rank, home):
    """Run a case on two processes; return seconds from the call to the end, code and output."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command += ["--config_file", "configs/accelerate/cpu_2proc.yaml", "recipes/grpo.py"]
    note = home / "note"
    env = {k: v for k, v in os.environ.items() if k not in ("MASTER_ADDR", "WORLD_SIZE")}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1", "NOTE": str(note)}
    env |= {"MISBEHAVES_ON": str(rank), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *words_for(name, home / "run")],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    seconds = time.time() - float(note.read_text())
    return seconds, done.returncode, done.stdout


def last_sentence(printed):
    """Return the last error that was told, or the last line."""
    lines = [line for line in printed.splitlines() if line.strip(" =")]
    errors = [line for line in lines if "error: " in line]
    return (errors or lines)[-1].strip()


def main():
    """Print the table; or, in a fork, run a recipe."""
    if Path(sys.argv[1]).is_dir():
        os.environ["NOTE"] = str(Path(sys.argv[1], "note"))
        sys.argv = ["grpo", *json.loads(Path(sys.argv[1], "words.json").read_text())]
        runpy.run_path("recipes/grpo.py", run_name="__main__")
        return
    processes, names = int(sys.argv[1]), sys.argv[2:]
    for name, this in CASES.items():
        if (names and name not in names) or (processes == 2 and not this.on_two):
            continue
        for rank in range(processes):
            with tempfile.TemporaryDirectory() as home:
                if processes == 1:
                    seconds, code, printed = forked(name, Path(home))
                else:
                    seconds, code, printed = launched(name, rank, Path(home))
            print(
                f"| {name} | {processes} | {rank} | {seconds:.1f} | {code} | "
                f"{last_sentence(printed)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
