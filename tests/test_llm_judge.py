"""The reward `llm_judge`: grades by a server on loopback, in recipes and alone."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing

import pytest
from judge_server import by_gold, serving
from safetensors.torch import load_file

from rlhf_trl import cli
from rlhf_trl.errors import InputError
from rlhf_trl.rewards import judge
from rlhf_trl.rewards.llm_judge import llm_judge

ALONE = ["--reward_weights", 1.0, "--reward_funcs"]  # one reward
SMALL = ["--dataset.size", 64, "--dataset.eval_size", 16, "--per_device_train_batch_size", 32]
SMALL += ["--max_steps", 4, "--eval_strategy", "no", "--rollouts", "off"]


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-a-key-that-no-file-may-hold")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def block(server, **fields):
    return {"base_url": server.url, "model": "stub", **fields}


def options(server, *words):
    """Return the options of a GRPO run that learns from the judge alone."""
    of_judge = ["--llm_judge.base_url", server.url, "--llm_judge.model", "stub"]
    return [*ALONE, "llm_judge", *SMALL, *of_judge, *words]


def graded(reward, *words, log=None):
    """Call a reward on pairs of a word and how it was spelled backward."""
    prompts = [[{"role": "user", "content": f"Spell this word backward: {a}"}] for a, _ in words]
    answers = [f"<think></think><answer>{b}</answer>" for _, b in words]
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    metrics = {} if log is None else log
    call = reward(prompts=prompts, completions=completions, log_metric=metrics.__setitem__)
    return asyncio.run(call)


def replies_in(folder):
    with closing(sqlite3.connect(folder / "judge.sqlite")) as database:
        return database.execute("SELECT COUNT(*) FROM replies").fetchone()[0]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def test_grades_become_rewards_and_nothing_is_sent_twice(tmp_path):
    words = [("abc", "cba"), ("abc", "abc"), ("abc", "cba"), ("xyz", "zyx")]
    with serving() as server:
        reward = llm_judge(block(server), str(tmp_path))
        assert graded(reward, *words) == [1.0, 0.0, 1.0, 1.0]
        assert len(server.bodies) == 3
        assert "number from 1 (worst) to 10 (best)" in server.bodies[0]["messages"][0]["content"]
        again = llm_judge(block(server), str(tmp_path))  # as of a resumed run
        assert graded(again, *words, ("new", "new")) == [1.0, 0.0, 1.0, 1.0, 0.0]
        assert len(server.bodies) == 4
        # another judge, another question
        graded(llm_judge(block(server, request={"temperature": 1}), str(tmp_path)), words[0])
        assert len(server.bodies) == 5
    # what is not the folder of a run is left alone
    with serving() as server:
        assert graded(llm_judge(block(server), str(tmp_path / "none")), *words)[0] == 1.0
    assert not (tmp_path / "none").exists()


def test_a_grade_on_a_scale_becomes_a_share_of_it(tmp_path):
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("From {worst} to {best}: {answer} {prompt}")
    grades = iter(["-1", "0", "0.5", "1", "2", "[[A]]", "x"])
    with serving(lambda shown: next(grades)) as server:
        fields = {"scale": [-1.0, 1.0], "rubric": str(rubric), "parallel": 1}
        reward = llm_judge(block(server, **fields), str(tmp_path))
        metrics = {}
        words = [("a", f"{number}") for number in range(7)]
        # what is off the scale or no number counts as the worst, and is logged
        assert graded(reward, *words, log=metrics) == [0.0, 0.5, 0.75, 1.0, 0.0, 0.0, 0.0]
        assert metrics == {"llm_judge/unreadable": pytest.approx(3 / 7)}
        assert "From -1 to 1: <<<answer" in server.bodies[0]["messages"][0]["content"]


def test_a_judge_that_gives_no_grades_ends_the_run(tmp_path):
    with serving(lambda shown: "good") as server:
        reward = llm_judge(block(server), str(tmp_path))
        words = [("abc", str(number)) for number in range(20)]
        with pytest.raises(InputError, match=r"20 of 20 replies hold no grade from 1 to 10, such"):
            graded(reward, *words)


def test_one_request_more_than_the_cap_ends_the_run(tmp_path):
    with serving() as server:
        reward = llm_judge(block(server, cap=3), str(tmp_path))
        graded(reward, ("a", "a"), ("b", "b"))
        with pytest.raises(InputError, match=r"2 requests were sent, and 2 more would exceed .* 3"):
            graded(reward, ("a", "a"), ("c", "c"), ("d", "d"))
        graded(reward, ("a", "a"), ("c", "c"))
        assert len(server.bodies) == 3


def test_the_server_dies_and_the_resumed_run_sends_nothing_twice(
    run, refused, tmp_path, monkeypatch
):
    """What was paid for is kept, and the end is that of a run that nothing happened to."""
    monkeypatch.setattr(judge, "RETRIES", 0)
    alive = []  # questions that it answers before it dies; None: it lives

    def fault(handler, text, shown):
        if alive and len(handler.server.times) > alive[0]:
            handler.server.times.pop(text)
            handler.send(503, {"error": {"message": "no longer here"}})
            return False
        return None

    with serving() as server:
        whole, _ = run("grpo", "grpo", *options(server), folder=tmp_path / "whole")
        questions = {*server.times}
    with serving(fault=fault) as server:
        words = options(server, "--save_strategy", "steps", "--save_steps", 1)
        alive.append(len(questions) - 20)
        sentence = refused("grpo", "grpo", *words)
        assert "no longer here" in sentence and "goes on" in sentence
        answered = sum(server.times.values())
        assert answered == alive[0]
        alive.clear()
        folder, _ = run("grpo", "grpo", *words, "--resume_from_checkpoint", "auto")
        assert {*server.times} == questions
        assert set(server.times.values()) == {1}  # each once
    assert replies_in(folder) == len(questions)
    after = weights(folder)
    for name, tensor in weights(whole).items():
        assert tensor.equal(after[name])
    assert not [
        path for path in folder.rglob("*") if path.is_file() and b"sk-a-key" in path.read_bytes()
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--reward_funcs", "llm_judge"], "llm_judge needs a block llm_judge with base_url"),
        (["--llm_judge.base_url", "http://127.0.0.1/v1", "--llm_judge.model", "m"],
         "llm_judge is written but not used"),
        (["--reward_funcs", "llm_judge", "--llm_judge.model", "m"],
         "llm_judge.base_url is missing"),
        (["--reward_funcs", "llm_judge", "--llm_judge.base_url", "http://127.0.0.1/v1",
          "--llm_judge.model", "m", "--llm_judge.modle", "m"], "did you mean 'model'?"),
        (["--reward_funcs", "llm_judge", "--llm_judge.base_url", "http://127.0.0.1/v1",
          "--llm_judge.model", "m", "--llm_judge.cap", 0], "cap is 0; write 1 or more"),
        (["--reward_funcs", "llm_judge", "--llm_judge.base_url", "ftp://127.0.0.1",
          "--llm_judge.model", "m"], "base_url is not the address of an API"),
        (["--reward_funcs", "llm_judge", "--llm_judge.base_url", "http://127.0.0.1/v1",
          "--llm_judge.model", "m", "--llm_judge.scale", 10, 1], "scale is [10.0, 1.0]; write"),
    ],
)  # fmt: skip
def test_a_block_that_says_nothing_sensible_is_refused(refused, words, sentence):
    assert sentence in refused("grpo", "grpo", *SMALL, "--reward_weights", 1.0, *words)


@pytest.mark.promise
def test_grpo_learns_from_the_judge_as_from_the_verifier(run, tmp_path, capfd):
    """One in ten grades is noise; the end is within .1 of the verifier's."""
    exact, _ = run("grpo", "grpo", *ALONE, "exact_match", folder=tmp_path / "exact")

    def fault(handler, text, shown):
        if handler.server.chance(text) < 0.1:
            return f"[[{1 + round(9 * handler.server.chance(text, 'grade'))}]]"
        return None

    with serving(by_gold, fault) as server:
        words = ["--llm_judge.base_url", server.url, "--llm_judge.model", "stub"]
        judged, _ = run("grpo", "grpo", *ALONE, "llm_judge", *words, folder=tmp_path / "judged")
        sent = len(server.bodies)
        assert {*server.times.values()} == {1}
        capfd.readouterr()
        cli.main(["evaluate", str(judged), "--answers", str(tmp_path / "a.jsonl"), "--json"])
        (numbers,) = json.loads(capfd.readouterr().out)["models"].values()
        assert len(server.bodies) == sent  # what the run's own evaluation asked
    assert replies_in(judged) == sent
    ends = [
        json.loads((folder / "summary.json").read_text())["after"] for folder in (exact, judged)
    ]
    assert ends[0]["eval_exact_match"] > 0.9
    assert ends[1]["eval_exact_match"] == pytest.approx(ends[0]["eval_exact_match"], abs=0.1)
    assert numbers["eval_llm_judge"]["value"] == ends[1]["eval_llm_judge"]


@pytest.mark.promise
def test_a_judge_slower_than_reward_timeout_ends_the_run(refused):
    def fault(handler, text, shown):
        time.sleep(0.5)

    with serving(fault=fault) as server:
        sentence = refused("grpo", "grpo", *options(server), "--reward_timeout", 1)
    assert "reward function 'llm_judge' took more than 1 seconds at step 0" in sentence


def test_the_help_shows_the_block(run, capfd):
    with pytest.raises(SystemExit):
        run("grpo", "grpo", "--help")
    assert "--llm_judge.base_url" in capfd.readouterr().out
