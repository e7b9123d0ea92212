"""No held-out prompt is trained on, however it is written, and in whichever turn."""

import json
from unicodedata import normalize

import pytest

from rlhf_trl.data.blocks import AnswersToLearn, FileData
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.gym import is_held_out
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.prompt_keys import fingerprint, prompt_key
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError

TRAINED = "to evaluate on: the prompt is trained on"


def talk(*texts, system=None):
    """Return turns of user and assistant, after a system message."""
    first = [] if system is None else [{"role": "system", "content": system}]
    roles = [("user", "assistant")[n % 2] for n in range(len(texts))]
    turns = zip(roles, texts, strict=True)
    return first + [{"role": role, "content": text} for role, text in turns]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def learned(tmp_path):
    """Load conversations to train on, and others to evaluate on, as demonstrations."""

    def load(train, held_out, turns, **block):
        path = written(tmp_path / "train.jsonl", [{"messages": one} for one in train])
        if held_out:
            rows = [{"messages": one} for one in held_out]
            block["eval_path"] = written(tmp_path / "held-out.jsonl", rows)
        return load_demonstrations(AnswersToLearn(path=path, turns=turns, **block), "right")

    return load


def test_no_turn_that_is_trained_on_is_held_out(learned):
    train = [talk(f"question {n}", "yes", "why?", "so") for n in range(8)]
    held_out = [talk(f"question {n}", "no") for n in range(11)]
    # the answer to the first question is context with `last`, and trained on with `all`
    kept = {"last": list(range(11)), "all": [8, 9, 10]}
    for turns, numbers in kept.items():
        data = learned(train, held_out, turns)
        prompts = [prompt[0]["content"] for prompt in data.held_out["prompt"]]
        assert prompts == [f"question {n}" for n in numbers]
        assert data.dropped[TRAINED] == 11 - len(numbers)
    # with `all`, evaluation reads the first answer of a held-out conversation, too
    longer = [talk("question 0", "no"), talk("new", "no", "why?", "so")]
    data = learned(longer, [*train, talk("NEW", "yes")], "all")
    assert [prompt[0]["content"] for prompt in data.held_out["prompt"]] == [
        f"question {n}" for n in range(1, 8)
    ]
    assert data.dropped[TRAINED] == 2


def test_the_last_answer_is_held_out_by_all_turns_before_it(learned):
    train = [talk("a", "b", "c", "d")]
    held_out = [
        talk("a", "b", "c", "other answer"),
        talk("A ", "b", "c", "d"),
        talk("a", "x", "c", "d"),
        talk("c", "d"),
    ]
    data = learned(train, held_out, "last")
    assert [one["prompt"] for one in data.held_out] == [held_out[2][:-1], held_out[3][:-1]]
    assert data.dropped[TRAINED] == 2


def test_with_all_turns_conversations_that_begin_alike_are_on_one_side(learned):
    train = [talk(f"q{n % 10}", f"a{n}", f"then {n}", "b") for n in range(30)]
    train += [talk(f" Q{n} ", "a") for n in range(10)]
    data = learned(train, None, "all", eval_size=3)
    trained = {prompt[0]["content"].strip().lower() for prompt in data.train["prompt"]}
    held_out = {prompt[0]["content"].strip().lower() for prompt in data.held_out["prompt"]}
    assert (len(trained), len(held_out), trained & held_out) == (7, 3, set())
    assert (len(data.train), len(data.held_out)) == (28, 12)


def test_a_greeting_of_the_assistant_makes_no_two_prompts_the_same(learned):
    hello = [{"role": "assistant", "content": "hello"}]
    train = [hello + talk("a", "b", "c", "d")]
    data = learned(train, [hello + talk("a", "b"), hello + talk("e", "f")], "all")
    assert [one["prompt"][-1]["content"] for one in data.held_out] == ["e"]


# What is the same question: names in other code points, other white space, another system prompt.
NAMES = ["Zoë", "José", "Dvořák", "Ångström", "한국", "Ελένη ή"]
REWRITTEN = {
    "composed and decomposed": lambda text: normalize("NFD", text),
    "white space": lambda text: text.replace(" ", "  "),
    "new lines": lambda text: "\n" + text.replace(" ", "\n"),
    "letter case": str.upper,
}


@pytest.mark.parametrize("kind", ["texts", "messages"])
@pytest.mark.parametrize("way", REWRITTEN)
def test_a_prompt_written_in_another_way_is_the_same(tmp_path, way, kind):
    def rows(texts):
        prompts = texts if kind == "texts" else [talk(text) for text in texts]
        return [{"prompt": p, "chosen": "c", "rejected": f"r{n}"} for n, p in enumerate(prompts)]

    texts = [normalize("NFC", f"Who is {name} ?") for name in NAMES]
    others = [REWRITTEN[way](text) for text in texts]
    assert all(one != other for one, other in zip(texts, others, strict=True))
    train = written(tmp_path / "train.jsonl", rows(texts))
    held_out = rows([*others, "Who is Zoe ?"])  # without the dots it is somebody else
    config = FileData(train, eval_path=written(tmp_path / "held-out.jsonl", held_out))
    data = load_preferences(config)
    assert data.held_out["prompt"][:] == [held_out[-1]["prompt"]]
    assert data.dropped[TRAINED] == 6
    both = written(tmp_path / "both.jsonl", [*rows(texts), *rows(others)])
    data = load_preferences(FileData(both, eval_size=2))
    assert (len(data.train), len(data.held_out)) == (8, 4)


def test_the_same_question_under_another_system_prompt_is_the_same(tmp_path):
    train = [{"prompt": talk(f"question {n}", system="Be brief.")} for n in range(20)]
    held_out = [{"prompt": talk(f"question {n}", system="Be kind.")} for n in range(21)]
    held_out[0]["prompt"] = held_out[0]["prompt"][1:]  # and under none
    path = written(tmp_path / "held-out.jsonl", held_out)
    data = load_prompts(FileData(written(tmp_path / "train.jsonl", train), eval_path=path))
    assert [row["prompt"] for row in data.held_out] == [held_out[20]["prompt"]]
    assert data.dropped[TRAINED] == 20


def test_where_only_the_system_speaks_its_text_is_the_prompt(tmp_path):
    rows = [{"prompt": [{"role": "system", "content": f"Write about {n}."}]} for n in range(9)]
    data = load_prompts(FileData(written(tmp_path / "all.jsonl", rows), eval_size=2))
    assert (len(data.train), len(data.held_out)) == (7, 2)


def test_what_differs_in_nothing_that_counts_cannot_be_held_out(tmp_path):
    rows = [{"prompt": talk("Go on.", system=f"The text is {n}.")} for n in range(9)]
    told = r"has 1 different prompts \(system text, letter case and white space aside\), and 1 held"
    with pytest.raises(InputError, match=told):
        load_prompts(FileData(written(tmp_path / "all.jsonl", rows), eval_size=1))


def test_a_question_of_the_gym_is_on_one_side_however_it_is_written():
    questions = [f"What is the name of number {n} in Zoë's list ?" for n in range(200)]
    sides = []
    for rewrite in (str, *REWRITTEN.values()):
        entries = [
            {"question": rewrite(text), "metadata": {"source_dataset": "gcd"}} for text in questions
        ]
        sides.append([is_held_out(entry) for entry in entries])
    assert 5 < sum(sides[0]) < 40
    assert sides == sides[:1] * 5


@pytest.mark.parametrize(("one", "other"), [("What is 2² + 1?", "What is 22 + 1?"), ("½", "1⁄2")])
def test_signs_that_only_look_alike_make_other_prompts(one, other):
    assert normalize("NFKC", one) == normalize("NFKC", other)
    assert prompt_key(one) != prompt_key(other)


def test_the_fingerprint_is_that_of_the_set_of_questions():
    assert fingerprint(["b", "a", "b"]) == fingerprint(["a", "b"])
    assert fingerprint(["a", "b"]) != fingerprint(["a", "c"])
    assert fingerprint(["a", "b"]) != fingerprint(["ab"])
