"""`rlhf-trl chat`: the engine, and the terminal around it, driven as a person drives it."""

import copy
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
from conftest import ROOT
from named_models import make_adapter, make_reward_model
from transformers import AutoTokenizer

from rlhf_trl import cli
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rollouts.generate import Completion
from rlhf_trl.run import chat as engine
from rlhf_trl.run import chat_page
from rlhf_trl.run.chat import Chat
from rlhf_trl.tiny import checkpoint_path

QUESTION = "Spell this word backward (example: sun -> nus): "
TAGGED = "<think></think><answer>{}</answer>"


@pytest.fixture(scope="module")
def tiny():
    return Chat(["tiny"])


def greedy(chat, text):
    return [answer.text for answer in chat.ask(text) if answer.method == "greedy"]


@pytest.mark.parametrize(("word", "right"), [("hello", "olleh"), ("rack", "kcar")])
def test_a_bare_word_is_asked_as_in_training(tiny, word, right):
    assert tiny.frame == (QUESTION, "")
    assert greedy(tiny, word) == greedy(tiny, QUESTION + word) == [TAGGED.format(right)]


def test_each_prompt_starts_anew_for_the_speller_unless_history_is_asked_for(tiny, monkeypatch):
    assert not tiny.history
    list(tiny.ask("hello"))
    assert tiny.turns == {}
    asked = []

    def reply(prompt, sampling, streamer):
        asked.append([message["content"] for message in prompt])
        return Completion(f"answer {len(asked)}", True), {}

    monkeypatch.setattr(tiny.policies[0], "reply", reply)
    monkeypatch.setattr(tiny, "history", True)
    monkeypatch.setattr(tiny, "turns", {})
    assert [a.text for word in ("one", "two") for a in tiny.ask(word)] == [
        f"answer {n}" for n in (1, 2, 3, 4)
    ]
    # greedy and sampled are asked alike, and the greedy answer is what is gone on from
    assert asked[0] == asked[1] == [QUESTION + "one"]
    assert asked[2] == asked[3] == [QUESTION + "one", "answer 1", QUESTION + "two"]


def test_questions_have_a_frame_only_if_many_begin_alike():
    words = [f"{chr(97 + n)}{n}" for n in range(20)]
    framed = [f"Add: {word} now. Write the sum." for word in words]
    assert engine._frame(framed) == ("Add: ", " now. Write the sum.")
    assert engine._frame([f"What is {n}?" for n in range(100, 130)]) == ("What is ", "?")
    assert engine._frame(framed[:19]) == engine._frame([*framed, "Subtract"]) == ("", "")


def test_two_models_an_adapter_and_a_score(tmp_path, monkeypatch):
    adapter = str(make_adapter(tmp_path / "adapter", scale=0.3))
    judge = str(make_reward_model(tmp_path / "judge"))
    loads = []
    monkeypatch.setattr(
        engine, "load_reward_model", lambda *words: loads.append(words) or load_reward_model(*words)
    )
    chat = Chat([adapter, "tiny"], reward_model=judge, temperature=0.01)
    assert len(loads) == 1  # one for both
    answers = list(chat.ask("hello"))
    assert [(a.policy, a.method) for a in answers] == [
        (model, how) for model in (adapter, "tiny") for how in ("greedy", "sampled")
    ]
    # so cold, both are the same; and the adapter says something else
    assert answers[2].text == answers[3].text == TAGGED.format("olleh") != answers[0].text
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    score = load_reward_model(judge, tokenizer, chat.policies[0].args)
    said = [[{"role": "assistant", "content": answers[2].text}]]
    prompts = [[{"role": "user", "content": QUESTION + "hello"}]]
    (expected,) = score(prompts=prompts, completions=said, completion_ids=[[]], finished=[True])
    assert answers[2].score == pytest.approx(expected, abs=1e-6)


def test_settings_are_those_of_the_runs_config(tmp_path, own_model):
    rows = [{"messages": [said("user", f"Q: {n}?"), said("assistant", "A")]} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["output_dir: out", "max_completion_length: 3", f"model_name_or_path: {own_model}"]
    lines += ["dataset:", "  source: path", f"  path: {tmp_path}/rows.jsonl"]
    lines += ["  system_prompt: Be brief."]
    (tmp_path / "config.yaml").write_text("\n".join(lines) + "\n")
    (tmp_path / "model").symlink_to(own_model)
    chat = Chat([str(tmp_path)])
    asked = []
    policy = chat.policies[0]
    policy.reply, reply = lambda p, *a: asked.append(p) or reply(p, *a), policy.reply
    answers = list(chat.ask("7"))
    assert asked[0] == [said("system", "Be brief."), said("user", "Q: 7?")]
    assert chat.history and chat.sampled.temperature == 1.0
    ids = [reply(asked[0], chat.sampled, None)[0].ids for _ in range(3)]
    assert max(map(len, ids)) <= 3
    list(chat.ask("8"))
    assert asked[2] == [*asked[0], said("assistant", answers[0].text), said("user", "Q: 8?")]
    # of no run: nothing is put around what is typed
    assert Chat([str(own_model)]).frame == ("", "")


def own_run(folder, own_model, algorithm, rows, **settings):
    """The folder of a run on rows of one's own, without the training."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"output_dir": "out", "max_completion_length": 3, "use_cpu": True, **settings}
    config["model_name_or_path"] = str(own_model)
    config |= {"algorithm": algorithm} if algorithm else {}
    config["dataset"] = {"source": "path", "path": str(folder / "rows.jsonl")}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    (folder / "model").symlink_to(own_model)
    return str(folder)


def test_a_run_of_rejection_sampling_is_asked_as_it_sampled(tmp_path, own_model, monkeypatch):
    rows = [{"prompt": [said("user", f"Q: {n}?")], "answer": "1"} for n in range(30)]
    settings = {"strategy": "top_per_prompt", "reward_funcs": ["exact_match"], "temperature": 0.4}
    settings |= {"top_p": 0.9, "top_k": 7, "min_p": 0.01, "chat_template_kwargs": {"mood": "glad"}}
    chat = Chat([own_run(tmp_path / "run", own_model, None, rows, **settings)])
    assert chat.sampled == (0.4, 0.9, 7, 0.01)
    policy = chat.policies[0]
    policy.processing_class.chat_template = "{{ mood }}: {{ messages[-1]['content'] }}"
    asked = []
    generate = policy.model.generate
    keep = lambda **given: asked.append(given["input_ids"]) or generate(**given)  # noqa: E731
    monkeypatch.setattr(policy.model, "generate", keep)
    list(chat.ask("7"))
    assert [policy.processing_class.decode(ids[0]) for ids in asked] == ["glad: Q: 7?"] * 2
    assert Chat([str(tmp_path / "run")], temperature=0.2).sampled == (0.2, 0.9, 7, 0.01)


def test_system_messages_of_rows_are_told_and_sent(tmp_path, own_model, monkeypatch, capsys):
    def rows(*systems):
        talk = [said("user", "Hi"), said("assistant", "Ho")]
        return [
            {"messages": [*([said("system", system)] if system else []), *talk]}
            for system in systems
        ]

    def told(name, *systems):
        chat = Chat([own_run(tmp_path / name, own_model, None, rows(*systems))])
        asked = []
        reply = lambda prompt, *_: asked.append(prompt) or (Completion("yes", True), {})  # noqa: E731
        monkeypatch.setattr(chat.policies[0], "reply", reply)
        list(chat.ask("Hello"))
        first = asked[0][0]
        monkeypatch.setattr("builtins.input", lambda _: next(iter(())))
        with pytest.raises(StopIteration):
            engine.talk(chat)
        lines = capsys.readouterr().out.splitlines()
        return first["content"] if first["role"] == "system" else None, lines[:-1]

    sent = "all rows of the run have a system message; it is sent: 'Be brief.'"
    assert told("one", "Be brief.", "Be brief.") == ("Be brief.", [sent])
    sent = "3 of 4 rows of the run have a system message; the commonest of 2 is sent: 'Be brief.'"
    assert told("some", None, "Be kind.", "Be brief.", "Be brief.") == ("Be brief.", [sent])
    none = "1 of 3 rows of the run have a system message; none is sent"
    assert told("few", "Be brief.", None, None) == (None, [none])
    assert told("none", None, None) == (None, [])


def said(role, content):
    return {"role": role, "content": content}


def test_what_does_not_fit_is_refused_before_anything_is_answered(tiny):
    with pytest.raises(InputError, match=r"has 10005 tokens .* has a context of 256"):
        next(tiny.ask("a" * 10_000))


def test_a_name_that_is_none_ends_in_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"error: there is no folder .*/none; name a run"):
        cli.main(["chat", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"error: .* is a reward model, which writes no answers"):
        cli.main(["chat", str(make_reward_model(tmp_path / "judge"))])

    for temperature in ("-1", "0", "nan"):
        with pytest.raises(SystemExit, match=rf"error: --temperature is {temperature}; write a nu"):
            cli.main(["chat", "tiny", "--temperature", temperature])


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, *words):
        self.at, child = pty.openpty()
        command = [sys.executable, "-m", "rlhf_trl.cli", "chat", *words]
        env = {**os.environ, "TERM": "dumb", "PYTHONPATH": str(ROOT)}
        given = {"stdin": child, "stdout": child, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            command, **given, env=env, cwd=ROOT, start_new_session=True, preexec_fn=_own_terminal
        )
        os.close(child)
        self.text = ""

    def read(self, seconds):
        if select.select([self.at], [], [], seconds)[0]:
            self.text += os.read(self.at, 65536).decode(errors="replace").replace("\r", "")

    def until(self, pattern):
        """Return what was shown up to a pattern."""
        end = time.time() + 60
        while not (found := re.search(pattern, self.text)):
            assert time.time() < end, self.text[-2000:]
            self.read(0.5)
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown

    def type(self, text):
        time.sleep(0.2)  # as nobody is faster
        for first in range(0, len(text), 200):  # a terminal takes only so much at a time
            os.write(self.at, text[first : first + 200].encode())
            self.read(0.02)


def _own_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C typed there is a signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which is ignored behind a shell's `&`


@pytest.fixture
def opened():
    found = []

    def opened(*words):
        found.append(Terminal(*words))
        return found[0]

    yield opened
    for terminal in found:
        terminal.process.kill()
        terminal.process.wait()


@pytest.mark.promise
def test_after_the_demo_words_are_answered_backwards(run, opened):
    folder, _ = run("grpo", "grpo")
    terminal = opened(str(folder))
    for word in ("hello", "ocean", "table"):
        terminal.until("> $")
        terminal.type(f"{word}\n")
        terminal.until(rf"greedy   {re.escape(TAGGED.format(word[::-1]))}\n.*sampled  .*\n")
    terminal.until("> $")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0


def test_a_terminal_with_two_models_of_which_one_does_not_end(opened):
    terminal = opened("tiny", "tiny_untrained", "--max_completion_length", "200")
    terminal.until(r"temperature 1; prompts start anew; Ctrl-D ends\n> ")
    for word in ("hello", "rack", "taborin"):
        terminal.type(f"{word}\n")
        shown = terminal.until(r"tiny_untrained  sampled  [^>]*\n> |\n> $")
        assert f"tiny            greedy   {TAGGED.format(word[::-1])}\n" in shown
        assert shown.count("sampled  ") == 2
    terminal.type("\n")
    assert terminal.until(r"> $").strip() == ">"  # nothing was asked
    terminal.type("a" * 10_000 + "\n")
    terminal.until(r"error: the longest prompt has 10005 tokens .*\n> ")
    terminal.type("half a word")
    terminal.until(r"half a word$")  # the line is being edited: a signal finds it waiting
    terminal.type("\x03")
    terminal.until(r"stopped; Ctrl-D ends\n> ")
    terminal.type("hello\n")
    terminal.until(r"tiny_untrained  greedy   ")
    terminal.type("\x03")  # it writes 200 tokens, and has begun to
    shown = terminal.until(r"stopped; Ctrl-D ends\n> ")
    assert "sampled" not in shown
    terminal.type("rack\n")
    terminal.until(r"tiny            greedy   " + re.escape(TAGGED.format("kcar")))
    terminal.until(r"sampled  [\s\S]*sampled  [\s\S]*\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0


def test_the_page_needs_gradio(monkeypatch):
    monkeypatch.setattr(chat_page, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"error: --ui: gradio is not installed; run scripts/s"):
        cli.main(["chat", "tiny", "--ui"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--port", "7860"], "--port is read with --ui only; add --ui, or remove it."),
        (["--ui", "--port", "0"], "--port is 0; write a number from 1 to 65535."),
        (["--ui", "--port", "65536"], "--port is 65536; write a number from 1 to 65535."),
    ],
)
def test_a_port_is_one_of_the_page(words, sentence):
    with pytest.raises(SystemExit, match=f"error: {re.escape(sentence)}"):
        cli.main(["chat", "tiny", *words])


def test_another_model_takes_the_place_of_the_last_one(tmp_path):
    judge = str(make_reward_model(tmp_path / "judge"))
    chat = Chat(["tiny", "tiny_untrained"], reward_model=judge, temperature=0.01, history=True)
    first, _ = chat.policies
    list(chat.ask("hello"))
    with pytest.raises(InputError, match="tiny is here already; name another model"):
        chat.replace("tiny")
    with pytest.raises(InputError, match="there is no folder nowhere/at/all"):
        chat.replace("nowhere/at/all")
    assert [policy.name for policy in chat.policies] == ["tiny", "tiny_untrained"] and chat.turns
    copied = tmp_path / "copied"
    shutil.copytree(checkpoint_path(), copied)
    chat.replace(str(copied))
    assert chat.policies[0] is first and not chat.turns
    answers = list(chat.ask("hello"))
    assert [answer.policy for answer in answers] == ["tiny", "tiny", str(copied), str(copied)]
    assert answers[2].text == answers[0].text and answers[2].score == answers[0].score is not None


def test_a_turn_of_the_page_comes_piece_by_piece_and_ends_in_answers_and_scores(tmp_path):
    judge = str(make_reward_model(tmp_path / "judge"))
    chat = Chat(["tiny", "tiny_untrained"], reward_model=judge, temperature=0.01)
    told = [copy.deepcopy(said) for said in chat_page.turn(chat, "hello")]
    expected = {"tiny": [], "tiny_untrained": []}
    for answer in chat.ask("hello"):
        below = f"\n({answer.method}, score {answer.score:.4f})"
        expected[answer.policy].append(answer.text + below)
    assert told[-1] == expected
    assert told[-1]["tiny"][0].startswith(TAGGED.format("olleh") + "\n(greedy, score ")
    # what is written stays: each text only grows, and the models answer one after the other
    assert len(told) >= 4
    for before, after in pairwise(told):
        assert all(len(before[name]) <= len(after[name]) for name in expected)


def test_a_turn_that_is_left_stops_the_writing(tiny, monkeypatch):
    written = []

    def reply(prompt, sampling, streamer):
        for number in range(10_000):
            written.append(number)
            streamer.on_finalized_text("word ")
            time.sleep(0.001)

    monkeypatch.setattr(tiny.policies[0], "reply", reply)
    turn = chat_page.turn(tiny, "hello")
    assert next(turn)["tiny"][0].startswith("word ")
    turn.close()
    count = len(written)
    time.sleep(0.05)
    assert len(written) == count < 1000


def test_a_turn_that_does_not_fit_says_so_and_other_faults_are_raised(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "turns", {"tiny": [said("user", "one")]})
    (told,) = chat_page.turn(tiny, "a" * 10_000)
    assert re.match(r"error: the longest prompt has 10\d+ tokens", told["tiny"][0])
    assert told["tiny"][0].endswith(" What was said is forgotten.") and not tiny.turns

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tiny.policies[0], "reply", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(chat_page.turn(tiny, "hello"))


def test_a_system_prompt_comes_first_and_does_not_undo_what_was_said(tiny, monkeypatch):
    asked = []
    reply = lambda prompt, *_: asked.append(prompt) or (Completion("yes", True), {})  # noqa: E731
    monkeypatch.setattr(tiny.policies[0], "reply", reply)
    for name, value in (("history", True), ("turns", {}), ("system", "Be brief.")):
        monkeypatch.setattr(tiny, name, value)
    list(tiny.ask("one"))
    tiny.system = "Be long."
    list(tiny.ask("two"))
    one, two = said("user", QUESTION + "one"), said("user", QUESTION + "two")
    assert asked[0] == [said("system", "Be brief."), one]
    assert asked[2] == [said("system", "Be long."), one, said("assistant", "yes"), two]
