"""Reward functions that misbehave: how soon a run ends, with which code, and what it says."""

import asyncio
import json
import os
import re
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import misbehaving_rewards
import pytest
import torch
from misbehaving_rewards import CASES, LIMIT, ROOT, STEP, forked, last_sentence, launched, text_of
from two_processes import FORKS

from rlhf_trl.errors import InputError
from rlhf_trl.rewards import surroundings
from rlhf_trl.rewards.calls import watched
from rlhf_trl.rewards.checked import checked

sys.path.append(str(ROOT / "scripts"))

TEXTS = ["first", "second", "third"]
# The process goes on, or ends by a sentence of its own.
HERE = [name for name, case in CASES.items() if case.code == 1]
DYING = ["counts_in_c", "reads_nowhere", "aborts", "is_killed", "exits_in_c", "exits_at_once_in_c"]


def batch():
    """Return the arguments of a call, anew."""
    return {
        "prompts": [[{"role": "user", "content": f"{text}?"}] for text in TEXTS],
        "completions": [[{"role": "assistant", "content": text}] for text in TEXTS],
        "completion_ids": [[1, 2], [3], []],
        "answer": ["a", "b", "c"],
        "trainer_state": SimpleNamespace(global_step=STEP),
    }


def args_of(folder):
    return SimpleNamespace(output_dir=str(folder), process_index=0, world_size=1)


def called(name, arguments):
    """Call a reward function, a coroutine as TRL does: in a thread of its own."""
    result = checked(getattr(misbehaving_rewards, name), name)
    if not asyncio.iscoroutinefunction(result):
        return result(**arguments)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(result(**arguments), loop).result()


@pytest.mark.filterwarnings("ignore:Exception in thread")
@pytest.mark.parametrize("name", HERE)
def test_a_reward_that_misbehaves_ends_in_a_sentence_and_leaves_no_trace(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr(surroundings, "PORTIONS", surroundings.PORTIONS[:20])  # 0.05 s
    torch.manual_seed(1)
    torch.rand(2000)
    here, threads, gradients = os.getcwd(), torch.get_num_threads(), torch.is_grad_enabled()
    arguments, said = batch(), CASES[name].said.replace("8 completions", "3 completions")
    said = said.replace("7 values", "2 values").replace(f"than {LIMIT} s", "than 0.3 s")
    started = time.time()
    with watched(args_of(tmp_path), 0.3):
        if said:
            with pytest.raises(InputError, match=said):
                called(name, arguments)
        else:
            assert called(name, arguments) == misbehaving_rewards.good(batch()["completions"])
    assert time.time() - started < 3
    assert arguments == batch()
    assert os.getcwd() == here and threads == torch.get_num_threads()
    assert torch.is_grad_enabled() == gradients and torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    late = "took more than" in said
    assert {path.name for path in tmp_path.iterdir()} == (
        {f"reward-batch-step-{STEP}-rank-0.json"} if late else set()
    )


def call_in_a_fork(name, folder):
    """Do what a run does with a call that ends this process."""
    with open(folder.with_suffix(".log"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with watched(args_of(folder), 0.3):
        called(name, batch())
    sys.exit(5)


@pytest.mark.parametrize("name", DYING)
def test_a_process_that_dies_in_a_reward_is_told_of_at_once_and_at_the_next_start(
    name, tmp_path, capfd
):
    folder = tmp_path / "run"
    process = FORKS.Process(target=call_in_a_fork, args=(name, folder))
    process.start()
    process.join(15)
    assert process.exitcode == CASES[name].code
    log = folder.with_suffix(".log")
    until = time.time() + 5
    said = CASES[name].said.replace(f"than {LIMIT} s", "than 0.3 s")
    said = said.replace(r"misbehaving_rewards\.", "")
    while not re.search(said, log.read_text()) and time.time() < until:
        time.sleep(0.05)  # the watcher outlives it for a moment
    *shown, last = log.read_text().splitlines()
    assert re.search(said, last) and "rank 0" in last
    crashed = process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT)
    if crashed or name == "counts_in_c":  # the stack tells where
        assert any(f"in {name}" in line for line in shown)
    content = json.loads((folder / f"reward-batch-step-{STEP}-rank-0.json").read_text())
    assert content == {
        "function": name,
        "step": STEP,
        "rank": 0,
        "prompts": batch()["prompts"],
        "completions": batch()["completions"],
    }
    for told in (f"the run before died inside reward function '{name}' at step 2 on rank 0\n", ""):
        with watched(args_of(folder), 0.3):
            assert capfd.readouterr().out == told


def test_outside_recipes_a_reward_gets_what_it_is_given():
    arguments, passed = batch(), []
    checked(lambda **columns: passed.append(columns) or [1, 2, 3], "mine")(**arguments)
    assert passed[0]["completions"] is arguments["completions"]
    with pytest.raises(SystemExit):
        called("exits_with_0", arguments)


def test_a_signal_that_ends_a_run_is_not_blamed_on_the_reward(tmp_path):
    from rlhf_trl.run.signals import signals

    def mine(**columns):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    with signals.handled(), watched(args_of(tmp_path), 3), pytest.raises(SystemExit) as stop:
        checked(mine, "mine")(**batch())
    assert stop.value.code == 128 + signal.SIGTERM


def test_a_child_that_a_reward_forks_may_end_and_a_killed_watcher_comes_again(tmp_path):
    from rlhf_trl.rewards import calls

    def mine(completions, **columns):
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return [1.0] * len(completions)

    with watched(args_of(tmp_path), 0.3):
        assert checked(mine, "mine")(**batch()) == [1.0] * 3
        first = calls._calls._watcher
        first.kill()
        first.wait()
        with pytest.raises(InputError, match=r"took more than 0\.3 seconds"):
            called("sleeps", batch())
    assert calls._calls is None


@pytest.mark.parametrize("worse", [partial(time.sleep, 1e6), sys.exit, partial(os.chdir, "/")])
def test_a_reward_that_raises_is_asked_again_with_the_same_care(worse, tmp_path):
    def mine(completions, **columns):
        if len(completions) == 1:
            worse()
        raise ValueError("no reason")

    here = os.getcwd()
    with watched(args_of(tmp_path), 0.3), pytest.raises(InputError, match="ValueError: no reason"):
        checked(mine, "mine")(**batch())
    assert os.getcwd() == here


def test_a_coroutine_that_is_left_writes_nothing_when_the_run_is_over(tmp_path):
    class Never:
        def __await__(self):
            yield

    async def waits(**columns):
        await Never()

    started = checked(waits, "waits")(**batch())
    with watched(args_of(tmp_path), 5):
        started.send(None)
        assert "waits" in (tmp_path / ".reward-call-0").read_text(errors="replace")
    (tmp_path / "other").write_text("of another run")
    with (tmp_path / "other").open("r+"):  # may have the same descriptor
        started.close()
    assert (tmp_path / "other").read_text() == "of another run"


def test_several_coroutines_at_once_and_objects_that_are_called(tmp_path):
    class Judge:
        async def __call__(self, completions, **columns):
            await asyncio.sleep(0.05)
            return [len(text_of(completion)) for completion in completions]

    async def both(functions):
        return await asyncio.gather(*(function(**batch()) for function in functions))

    async def other(**columns):
        await asyncio.sleep(0.1)
        return torch.tensor([1.0, 0.0, 1.0])

    functions = [checked(Judge(), "judge"), checked(other, "other")]
    with watched(args_of(tmp_path), 5):
        assert asyncio.run(both(functions)) == [[5, 6, 5], [1.0, 0.0, 1.0]]


WORDS = ["--dataset.size", 64, "--dataset.eval_size", 8, "--max_steps", 12, "--eval_steps", 4]
WORDS += ["--num_generations", 4, "--per_device_train_batch_size", 8, "--reward_weights", 1]


@pytest.mark.promise
def test_a_reward_that_hangs_costs_no_step(run, refused, tmp_path, monkeypatch):
    from kill_test import differences

    words = [*WORDS, "--reward_funcs", "failing.fails"]
    whole, _ = run("grpo", "grpo", *words, folder=tmp_path / "whole")
    monkeypatch.setenv("HANGS_AT", "6")
    folder = tmp_path / "hung"
    sentence = refused("grpo", "grpo", *words, "--reward_timeout", 1, folder=folder)
    assert "'failing.fails' took more than 1 seconds at step 6 on rank 0; " in sentence
    assert f"{folder}/checkpoint-6 is kept" in sentence
    monkeypatch.delenv("HANGS_AT")
    run("grpo", "grpo", *words, "--resume_from_checkpoint", "auto", folder=folder)
    assert [n for n in differences(whole, folder) if not n.startswith("checkpoint-")] == []


@pytest.mark.promise
@pytest.mark.parametrize("name", ["changes_completions", "changes_prompts_and_columns", "draws"])
def test_what_a_reward_does_to_its_copies_changes_no_run(run, tmp_path, monkeypatch, name):
    from kill_test import differences

    words = [*WORDS, "--reward_funcs", f"misbehaving_rewards.{name}"]
    folders = []
    for rank in ("0", "9"):  # it misbehaves, or does not
        monkeypatch.setenv("MISBEHAVES_ON", rank)
        folders.append(run("grpo", "grpo", *words, folder=tmp_path / rank)[0])
    different = differences(*folders)
    assert ("rollouts" in str(different)) == (name == "draws")
    assert different == [] or name == "draws"
    with closing(sqlite3.connect(folders[0] / "rollouts.sqlite")) as record:
        texts = {text for (text,) in record.execute("SELECT completion FROM rollouts")}
    assert "perfect" not in texts and len(texts) > 9


RUNS = [(name, 1, 0) for name in CASES]
RUNS += [(name, 2, rank) for name, case in CASES.items() if case.on_two for rank in (0, 1)]


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "processes", "rank"), RUNS)
def test_every_run_ends_in_time_in_a_sentence(name, processes, rank, tmp_path):
    if processes == 1:
        seconds, code, printed = forked(name, tmp_path)
    else:
        seconds, code, printed = launched(name, rank, tmp_path)
    case = CASES[name]
    assert re.search(case.said, last_sentence(printed)), printed
    if not case.said:
        assert code == 0
        return
    assert code == (case.code if processes == 1 else 1)
    assert seconds < (LIMIT + 10 if "took more than" in case.said else 30)
    assert len(re.findall("error: (a )?reward function|error: the process", printed)) == 1
