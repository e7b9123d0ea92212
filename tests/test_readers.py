"""Published data sets: every fixture row through its reader, against examples written by hand."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from rlhf_trl.data.files import read
from rlhf_trl.data.readers import BLANK, READERS, UNANSWERED

HUB = Path(__file__).parent / "fixtures" / "hub-rows"  # two rows in the form of each, own words
COOK = "\n\nHuman: How do I boil an egg?\n\nAssistant: Put it in boiling water."


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


MATH = system(  # as in the book's code
    "Solve the math problem step by step. End with exactly one line in the form #### <number>. Do "
    "not write anything after that line."
)
MARBLES = user("Ann has 3 bags of 4 marbles and loses 2. How many are left?")
OTTO = [
    system("You are Otto, a shy bot."),
    user("What is your name?"),
    bot("Otto."),
    user("Louder!"),
]
BY_HAND = {
    ("hh", "hh"): (
        [
            {
                "prompt": [
                    user("How do I boil an egg?"),
                    bot("Put it in boiling water."),
                    user("How long?"),
                ],
                "chosen": [bot("About eight minutes.")],
                "rejected": [bot("I do not know.")],
            }
        ],
        {BLANK: 1},  # the second row, whose rejected answer is empty
    ),
    ("gsm8k", "gsm8k"): (
        [
            {
                "prompt": [MARBLES],
                "answer": "10",
                "solution": "Ann has 3*4 = 12 marbles.\nShe keeps 12-2 = 10.\n#### 10",
                "task": "gsm8k",
            },
            {
                "prompt": [user("A car costs $1,000 and a bike a fifth of it. What do both cost?")],
                "answer": "1200",
                "solution": "The bike costs 1000/5 = 200.\nBoth cost 1000+200 = 1,200.\n#### 1,200",
                "task": "gsm8k",
            },
        ],
        {},
    ),
    ("gsm8k_rollouts", "gsm8k_rollouts"): (
        [
            {"prompt": [MATH, prompt], "completion": [bot(text)], "label": label}
            for prompt, text, label in (
                (MARBLES, "<think>\n12 - 2\n</think>\n\n#### 10", True),
                (MARBLES, "<think>\n7 - 2\n</think>\n\n#### 5", False),
                (user("What is 2 + 3?"), "<think>\nAdd\n</think>\n\n#### 5", True),
                (user("What is 2 + 3?"), "#### 5 apples", False),
            )
        ],
        {},
    ),
    ("prm800k_phase1", "prm800k"): (
        [
            {
                "prompt": "Problem: What is 2 + 3 times 2?\nReasoning trace:\n",
                # without the alternative "Add first"; the labeler's own step instead of "it is 10"
                "completions": [
                    "Multiply first: 3 times 2 is 6.",
                    "Now 2 + 6 is 8.",
                    "# Answer\n\n8",
                ],
                "labels": [1, 1, 1],
            }
        ],
        {},
    ),
    ("prm800k_phase2", "prm800k"): (
        [
            {
                "prompt": "Problem: What is half of 10?\nReasoning trace:\n",
                "completions": ["Halve it.", "# Answer\n\n4"],  # the error that was found
                "labels": [0, -1],
            }
        ],
        {},
    ),
    ("ultrafeedback", "ultrafeedback"): (
        [
            {
                "prompt": [user("Name a fruit that is yellow.")],
                "chosen": [bot("A ripe banana is yellow.")],
                "rejected": [bot("The sky.")],
                "margin": 3.0,
            },
            {
                "prompt": [user("Say hello twice.")],
                "chosen": [bot("Hello. Hello.")],
                "rejected": [bot("Hello.")],
                "margin": 0.0,
            },
        ],
        {},
    ),
    ("ultrafeedback_h4", "ultrafeedback"): (
        [
            {
                "prompt": [user("Name a river.")],
                "chosen": [bot("The Elbe.")],
                "rejected": [bot("A mountain.")],
                "margin": 5.0,
            },
            {
                "prompt": [user("Count to two.")],
                "chosen": [bot("1, 2")],
                "rejected": [bot("2")],
                "margin": 0.0,
            },
        ],
        {},
    ),
    ("no_robots", "messages"): (
        [
            {
                "prompt": [user("Write one word that rhymes with tree.")],
                "completion": [bot("Bee.")],
                "messages": [user("Write one word that rhymes with tree."), bot("Bee.")],
            },
            {
                "prompt": OTTO,
                "completion": [bot("OTTO!")],
                "messages": [*OTTO, bot("OTTO!")],
            },
        ],
        {},
    ),
    ("tulu", "messages"): (
        [
            {
                "prompt": [user("Hi")],
                "completion": [bot("Hello!")],
                "messages": [user("Hi"), bot("Hello!")],
            }
        ],
        {UNANSWERED: 1},
    ),
}


def fixture(name):
    return str(HUB / f"{name}.jsonl")


def made(tmp_path, rows, reader, suffix=".jsonl"):
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(path)
    found, dropped = read(str(path), reader=reader)
    return list(found), dropped


@pytest.mark.parametrize(("name", "reader"), BY_HAND, ids=lambda key: key)
def test_published_rows_become_the_examples_written_by_hand(name, reader):
    found, dropped = read(fixture(name), reader=reader)
    assert (list(found), dropped) == BY_HAND[name, reader]


def test_the_readers_are_those_that_the_fixtures_are_for():
    assert {reader for _, reader in BY_HAND} == set(READERS)
    assert {f"{name}.jsonl" for name, _ in BY_HAND} == {path.name for path in HUB.iterdir()}
