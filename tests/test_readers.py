"""Published data sets: every fixture row through its reader, against examples written by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset
from own_model import write_lines

from rlhf_trl.data.blocks import AnswersToLearn, FileData, MixedFile
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.files import read
from rlhf_trl.data.judgment_blocks import AnswersFile, RankedFile, RewardPairsFile, TracesFile
from rlhf_trl.data.judgments import load_outcomes, load_pairs_or_ranked, load_traces
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.readers import BLANK, OPENED, PARTED, READERS, UNANSWERED, UNRATED, check_reader
from rlhf_trl.errors import InputError

HUB = Path(__file__).parent / "fixtures" / "hub-rows"  # two rows in the form of each, own words
COOK = "\n\nHuman: How do I boil an egg?\n\nAssistant: Put it in boiling water."


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def called(name, **arguments):
    """Return a call of a tool, as chat templates read it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, parameter, **more):
    """Return a tool with one parameter, a text, as chat templates read it."""
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, **more, "parameters": parameters}}


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
    ("pairs_of_texts", "book_pairs"): (
        [
            {
                "prompt": [user("Name a tree.")],
                "chosen": [bot("An oak.")],
                "rejected": [bot("A stone.")],
            },
            {
                "prompt": [user("Say hi.")],
                "chosen": [bot("Hi!")],
                "rejected": [bot("Human: no.")],
            },
        ],
        {},
    ),
    ("pairs_of_turns", "book_pairs"): (
        [
            {  # the first answer, where `ultrafeedback` would leave the row out
                "prompt": [user("Name a tree.")],
                "chosen": [bot("An oak.")],
                "rejected": [bot("A stone.")],
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
    ("alpaca", "alpaca"): (
        [
            {
                "prompt": [user("Name the larger number.\n3 and 8")],
                "completion": [bot("8")],
            },
            {"prompt": [user("Name a bird.")], "completion": [bot("A wren.")]},
        ],
        {BLANK: 1},
    ),
    ("alpaca_pairs", "alpaca"): (
        [
            {
                "prompt": [
                    system("Be brief."),
                    user("Capital of Italy?"),
                    bot("Rome."),
                    user("And of France?"),
                ],
                "chosen": [bot("Paris.")],
                "rejected": [bot("Berlin.")],
            },
            {
                "prompt": [user("Add.\n1 and 1")],
                "chosen": [bot("2")],
                "rejected": [bot("3")],
            },
        ],
        {},
    ),
    ("sharegpt", "sharegpt"): (
        [
            {
                "prompt": [
                    system("You know towns."),
                    user("Is it raining in Bern?"),
                    bot("") | {"tool_calls": [called("weather", town="Bern")]},
                    {"role": "tool", "content": '{"rain": true}'},
                ],
                "completion": [bot("Yes, it is.")],
                "tools": [tool("weather", "town", description="of a town")],
            },
            {
                "prompt": [user("Hi"), bot("Hello!"), user("Bye")],
                "completion": [bot("See you.")],
                "tools": None,
            },
        ],
        {OPENED: 1, UNANSWERED: 1},
    ),
    ("sharegpt_pairs", "sharegpt"): (
        [
            {
                "prompt": [user("Name a fish."), bot("Cod."), user("Another.")],
                "chosen": [bot("Pike.")],
                "rejected": [bot("Oak.")],
            }
        ],
        {},
    ),
    ("openai", "openai"): (
        [
            {
                "prompt": [
                    user("What is tea?"),
                    bot("") | {"tool_calls": [{"id": "call_1"} | called("price", of="tea")]},
                    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
                ],
                "completion": [bot("It is 2.")],
                "tools": [tool("price", "of")],
            },
            {
                "prompt": [system("Be kind."), user("Hello")],
                "completion": [bot("Hi.")],
                "tools": None,
            },
        ],
        {},
    ),
    ("openai_pairs", "openai"): (
        [
            {
                "prompt": [user("Name a metal.")],
                "chosen": [bot("Tin.")],
                "rejected": [bot("Wool.")],
            }
        ],
        {},
    ),
    ("orca_pairs", "dpo_pairs"): (
        [
            {
                "prompt": [system("Answer in one word."), user("Name a gas.")],
                "chosen": [bot("Neon.")],
                "rejected": [bot("Neon is a gas, and so is argon.")],
            },
            {
                "prompt": [user("Name a star.")],
                "chosen": [bot("Vega.")],
                "rejected": [bot("Mars.")],
            },
        ],
        {},
    ),
    ("nested_pairs", "dpo_pairs"): (
        [
            {
                "prompt": [user("Name a month.")],
                "chosen": [bot("May.")],
                "rejected": [bot("Monday.")],
            }
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


# --- forms that are known by their columns, and what is wrong with a row of one


DETECTED = {
    "alpaca": ("alpaca", load_demonstrations),
    "alpaca_pairs": ("alpaca", load_preferences),
    "sharegpt": ("sharegpt", load_demonstrations),
    "sharegpt_pairs": ("sharegpt", load_preferences),
    "openai": ("openai", load_demonstrations),
    "openai_pairs": ("openai", load_preferences),
    "orca_pairs": ("dpo_pairs", load_preferences),
    "nested_pairs": ("dpo_pairs", load_preferences),
}


def loaded(load, path, **given):
    """Return the examples of a file for supervised fine-tuning or for preferences."""
    if load is load_demonstrations:
        return load(AnswersToLearn(path=str(path), **given), "right")
    return load(FileData(path=str(path), **given))


@pytest.mark.parametrize("name", DETECTED)
def test_a_form_is_known_by_its_columns(name):
    reader, load = DETECTED[name]
    data = loaded(load, fixture(name))
    expected, dropped = BY_HAND[name, reader]
    assert list(data.train) == expected
    assert {why: count for why, count in data.dropped.items() if count} == dropped
    (note,) = data.notes
    assert f"{name}.jsonl is read by dataset.reader: {reader} (it has " in note


FAULTY_TURNS = {
    "an unknown speaker": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]},
        "the speaker of conversations[1] is 'narrator', which is no one of human, user, ",
    ),
    "a turn without a text": (
        {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "b"}]},
        "the text of conversations[0] is None, which is no text; the reader sharegpt",
    ),
    "a call that is not JSON": (
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": "b"},
            ]
        },
        "conversations[1] is 'b', which is no JSON; the reader sharegpt",
    ),
    "a history that is no list of pairs": (
        {"instruction": "a", "output": "b", "history": [["c"]]},
        "history[0] is ['c'], which is no list of a question and its answer; the reader alpaca",
    ),
    "an output that is no text": (
        {"instruction": "a", "output": None},
        "output is None, which is no text; the reader alpaca",
    ),
    "a weight of OpenAI's": (
        {
            "messages": [user("a"), bot("b") | {"weight": 0}, user("c"), bot("d")],
            "parallel_tool_calls": True,
        },
        "messages[1] has weight 0, which is not read; remove the weights",
    ),
}


@pytest.mark.parametrize("name", FAULTY_TURNS)
def test_a_faulty_row_of_a_known_form_is_named(name, tmp_path):
    row, part = FAULTY_TURNS[name]
    good = json.loads(json.dumps(row))
    texts = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    texts |= {"output": "b", "history": [], "messages": [user("a"), bot("b")]}
    good |= {key: texts[key] for key in row if key in texts}
    path = write_lines(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(InputError) as error:
        loaded(load_demonstrations, path)
    assert f"dataset: {path}, line 2: {part}" in str(error.value)
    assert "skip_bad: 1" in str(error.value)


# --- columns of other names


def renamed(tmp_path, name, **names):
    """Return a file with the rows of a fixture, whose columns have other names."""
    rows = map(json.loads, Path(fixture(name)).read_text().splitlines())
    rows = [{names.get(key, key): cell for key, cell in row.items()} for row in rows]
    return write_lines(tmp_path / "renamed.jsonl", rows)


@pytest.mark.parametrize(
    ("name", "reader", "load", "names"),
    [
        ("sharegpt", "sharegpt", load_demonstrations, {"conversations": "dialog", "tools": "api"}),
        ("alpaca_pairs", "alpaca", load_preferences, {"chosen": "better", "rejected": "worse"}),
    ],
)
def test_columns_map_what_a_reader_reads(tmp_path, name, reader, load, names):
    path = renamed(tmp_path, name, **names)
    data = loaded(load, path, reader=reader, columns=names)
    assert list(data.train) == BY_HAND[name, reader][0]
    with pytest.raises(InputError, match=f"as in {{{next(iter(names))}: THEIRS}}"):
        loaded(load, path, reader=reader)


def test_columns_map_what_a_reader_reads_and_what_it_makes(tmp_path):
    path = renamed(tmp_path, "hh", chosen="good", rejected="bad")
    names = {"chosen": "good", "rejected": "bad", "completion": "rejected"}
    data = loaded(load_demonstrations, path, reader="hh", columns=names)
    assert data.train[0]["completion"] == [bot("I do not know.")]


def test_messages_about_columns_say_how_a_reader_takes_them(tmp_path):
    path = renamed(tmp_path, "sharegpt_pairs", conversations="dialog")
    wanted = r"dataset\.reader: sharegpt and dataset\.columns: {conversations: dialog}"
    rows = [{"dialog": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    only = write_lines(tmp_path / "only.jsonl", rows)
    with pytest.raises(InputError, match=wanted):
        loaded(load_demonstrations, only)
    with pytest.raises(InputError, match=r"or name a reader of it \(sharegpt\)"):
        loaded(load_demonstrations, only, columns={"conversations": "dialog"})
    with pytest.raises(InputError, match=r"conversations: dialogue renames nothing; .*'dialog'"):
        loaded(load_preferences, path, reader="sharegpt", columns={"conversations": "dialogue"})


# --- mixtures


def numbered(tmp_path, name, count, **more):
    rows = [{"prompt": f"{name} {n}", "completion": f"{n}", **more} for n in range(count)]
    return str(write_lines(tmp_path / f"{name}.jsonl", rows))


@pytest.mark.parametrize(
    ("counts", "weights", "limit", "sizes"),
    [
        ((600, 500, 40), (1, 0.5, 0.1), None, (400, 200, 40)),  # the third file decides
        ((600, 500, 400), (1, 2, 1), 200, (50, 100, 50)),
        ((300, 300, 300), (1, 1, 1), 100, (34, 33, 33)),
    ],
)
def test_a_mixture_has_the_shares_of_its_weights(tmp_path, counts, weights, limit, sizes):
    paths = [numbered(tmp_path, name, n) for name, n in zip("abc", counts, strict=True)]
    mix = [MixedFile(p, w) for p, w in zip(paths[1:], weights[1:], strict=True)]
    data = loaded(load_demonstrations, paths[0], mix=mix, limit=limit, eval_size=20)
    names = [row["prompt"][0] for row in data.train]
    held_out = Counter(row["prompt"][0] for row in data.held_out)
    assert sum(held_out.values()) == 20
    shares = [names.count(name) / len(names) for name in "abc"]
    wanted = [weight / sum(weights) for weight in weights]
    assert all(abs(one - other) <= 0.01 for one, other in zip(shares, wanted, strict=True))
    taken = [names.count(name) for name in "abc"]
    if limit:
        assert sorted(taken) == sorted(sizes)
    else:  # less what is held out of the file that decides
        assert taken[2] == 40 - held_out["c"]
    quarter = names[: len(names) // 4]  # spread evenly
    assert abs(quarter.count("a") / len(quarter) - wanted[0]) < 0.05
    assert not {row["prompt"] for row in data.held_out} & {row["prompt"] for row in data.train}
    assert "mixture: " in data.notes[0] and "c.jsonl" in data.notes[0]


def test_files_of_several_forms_are_mixed(tmp_path):
    mix = [MixedFile(fixture(name)) for name in ("openai", "alpaca")]
    mix.append(MixedFile(fixture("hh"), weight=0.5, reader="hh"))  # its chosen answer is learned
    data = loaded(load_demonstrations, fixture("no_robots"), mix=mix)
    by_answer = {row["completion"][0]["content"]: row for row in data.train}
    assert set(by_answer) == {
        *("Bee.", "OTTO!", "It is 2.", "Hi.", "8", "A wren.", "About eight minutes.")
    }
    assert by_answer["It is 2."]["tools"] == [tool("price", "of")]
    assert by_answer["Bee."]["tools"] is None and by_answer["Bee."]["prompt"][0]["role"] == "user"
    assert data.dropped[BLANK] == 2
    places = [f"line 3 of {fixture('alpaca')}", f"line 2 of {fixture('hh')}"]
    assert data.first_places(BLANK) == f" ({', '.join(places)})"


def test_a_mixture_of_texts_and_messages_is_refused(tmp_path):
    mix = [MixedFile(fixture("alpaca"))]
    with pytest.raises(
        InputError, match=r"alpaca.jsonl: completion is messages .* a text in the first"
    ):
        loaded(load_demonstrations, numbered(tmp_path, "a", 5), mix=mix)
    mix = [MixedFile(numbered(tmp_path, "b", 5), weight=1e-3)]
    with pytest.raises(InputError, match=r"no example of .*b\.jsonl is in a mixture of 5"):
        loaded(load_demonstrations, numbered(tmp_path, "a", 5), mix=mix)


def test_a_limit_takes_the_first_rows(tmp_path):
    data = loaded(load_demonstrations, numbered(tmp_path, "a", 9), limit=4)
    assert [row["prompt"] for row in data.train] == ["a 0", "a 1", "a 2", "a 3"]


# --- quirks that the fixtures do not have


def transcripts(chosen, rejected):
    return {"chosen": COOK + chosen, "rejected": COOK + rejected}


def test_a_name_starts_a_turn_only_behind_a_blank_line(tmp_path):
    text = "\nHuman: and\nAssistant: are no turns, nor is Human: here, or\n\nHumans: or\n\nHuman:x"
    rows = [transcripts(*(f"\n\nHuman: How?\n\nAssistant: {end}{text}" for end in "ab"))]
    (found,), dropped = made(tmp_path, rows, "hh")
    assert found["chosen"] == [bot("a" + text)] and found["rejected"] == [bot("b" + text)]
    assert found["prompt"][2:] == [user("How?")] and dropped == {}


def test_transcripts_that_cannot_be_pairs_are_counted(tmp_path):
    good = transcripts("\n\nHuman: How?\n\nAssistant: a", "\n\nHuman: How?\n\nAssistant: b")
    rows = [
        transcripts("\n\nHuman: How?\n\nAssistant: a", "\n\nHuman: Why?\n\nAssistant: a"),
        transcripts("\n\nHuman: How?\n\nAssistant: a", ""),  # one goes on for longer
        good,
        transcripts("\n\nHuman: How?", "\n\nHuman: Why?"),
        transcripts("\n\nHuman: How?\n\nAssistant: a", "\n\nHuman: How?\n\nAssistant:"),
        transcripts("\n\nHuman:\n\nAssistant: a", "\n\nHuman:\n\nAssistant: b"),
        good,
    ]
    found, dropped = made(tmp_path, rows, "hh")
    assert [row["rejected"] for row in found] == [[bot("b")]] * 2
    assert dropped == {PARTED: 2, UNANSWERED: 1, BLANK: 2}


@pytest.mark.parametrize(
    ("end", "number"),
    [("1,234,567", "1234567"), ("-3", "-3"), ("0.5", "0.5"), (" 7 \n", "7"), (".25", ".25")],
)
def test_numbers_of_gsm8k(tmp_path, end, number):
    rows = [{"question": " q ", "answer": f"a <<1+1=2>>2 and <<2>>2\n#### {end}"}]
    (found,), _ = made(tmp_path, rows, "gsm8k")
    assert (found["answer"], found["prompt"]) == (number, [user("q")])
    assert found["solution"] == f"a 2 and 2\n#### {end}".strip()


def test_blank_rollouts_are_counted_one_by_one(tmp_path):
    rows = [{"prompt": "q", "completions": ["a", " ", "c"], "rewards": [True, 0, 0.0]}]
    found, dropped = made(tmp_path, rows, "gsm8k_rollouts")
    assert [(row["completion"][0]["content"], row["label"]) for row in found] == [
        ("a", True),
        ("c", False),
    ]
    assert dropped == {BLANK: 1}


def step(*rated, human=None, chosen=None):
    each = [{"text": text, "rating": rating, "flagged": None} for text, rating in rated]
    human = human and {"text": human, "rating": None}
    return {"completions": each or None, "human_completion": human, "chosen_completion": chosen}


def solved(*steps, problem=" 1 + 1? "):
    return {"question": {"problem": problem}, "label": {"steps": list(steps)}}


TRAJECTORIES = {
    "the chosen one, not the first": ([step(("a", -1), ("b ", 1), chosen=1)], [("b", 1)]),
    "a neutral step": ([step(("a", 0), chosen=0), step(("b", 1), chosen=0)], [("a", 0), ("b", 1)]),
    "an error is the end": (
        [step(("a", 1), chosen=0), step(("x", 1), ("b", -1), ("c", -1)), step(("d", 1), chosen=0)],
        [("a", 1), ("b", -1)],
    ),
    "nothing is chosen, nothing is wrong": (
        [step(("a", 1), chosen=0), step(("b", 1), ("c", None))],
        [("a", 1)],
    ),
    "a chosen step without a rating is the end": (
        [step(("a", 1), chosen=0), step(("b", None), chosen=0), step(("c", 1), chosen=0)],
        [("a", 1)],
    ),
    "no completions": ([step(("a", 1), chosen=0), step()], [("a", 1)]),
    "the labeler's own first": ([step(human="h "), step(("b", -1))], [("h", 1), ("b", -1)]),
    "an empty step": ([step((" ", 1), chosen=0), step(("b", 1), chosen=0)], [("b", 1)]),
}


@pytest.mark.parametrize("name", TRAJECTORIES)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trajectories(tmp_path, name, suffix):
    steps, expected = TRAJECTORIES[name]
    rows = [solved(*steps), solved(step(("a", None))), solved(step(("z", 1), chosen=0))]
    found, dropped = made(tmp_path, rows, "prm800k", suffix)
    texts, labels = ([pair[n] for pair in expected] for n in (0, 1))
    prompt = "Problem: 1 + 1?\nReasoning trace:\n"
    assert found[0] == {"prompt": prompt, "completions": texts, "labels": labels}
    assert (len(found), dropped) == (2, {UNRATED: 1})


def test_scores_of_openbmb_become_ranked_lists(tmp_path):
    scores = {"a": 1, "b": 9, "c": 5.5}
    answers = [{"response": t, "overall_score": s, "model": "m"} for t, s in scores.items()]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"instruction": "q", "completions": answers, "source": "x"}))
    config = RankedFile(path=str(path), reader="ultrafeedback", list_length=3)
    (found,) = load_pairs_or_ranked(config, None, None).train
    ranked = [[bot(text)] for text in "bca"]
    assert found == {"prompt": [user("q")], "ranked": ranked}


def test_ties_are_dropped_where_the_margin_is_read():
    config = {"path": fixture("ultrafeedback_h4"), "reader": "ultrafeedback"}
    read_it = load_pairs_or_ranked(RewardPairsFile(**config), None, None)
    assert read_it.train["margin"][:] == [5.0] and read_it.dropped["a tie: margin is 0"] == 1
    without = load_preferences(FileData(**config))
    assert (len(without.train), "margin" in without.train.column_names) == (2, False)


def test_system_messages_and_other_keys(tmp_path):
    whole = [system("s"), user("a"), bot("b")]
    rows = [{"messages": [{**message, "name": None} for message in whole]}]
    (found,), _ = made(tmp_path, rows, "messages")
    assert found == {"prompt": whole[:2], "completion": whole[2:], "messages": whole}
    rows = [{"messages": [bot("alone")]}, {"messages": whole}, {"messages": []}]
    found, dropped = made(tmp_path, rows, "messages")
    assert len(found) == 1 and sum(dropped.values()) == 2


# --- where they lie


def test_both_phases_of_prm800k_load_together(tmp_path):
    for phase in (1, 2):
        text = (HUB / f"prm800k_phase{phase}.jsonl").read_text()
        (tmp_path / f"phase{phase}.jsonl").write_text(text)
    first, second = (BY_HAND[f"prm800k_phase{n}", "prm800k"][0] for n in (1, 2))
    found, dropped = read(str(tmp_path), reader="prm800k")
    assert (list(found), dropped) == ([*first, *second], {})
    assert list(read(str(tmp_path), "train[1:]", reader="prm800k")[0]) == second
    assert list(read(str(tmp_path), count=1, reader="prm800k")[0]) == first
    with pytest.raises(InputError, match="Couldn't cast array"):  # why they are read as lines
        read(str(tmp_path))


def test_prm800k_of_the_hub_is_its_two_files(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "datasets--tasksource--PRM800K"
    (home / "snapshots" / "abc").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    for phase, split in ((1, "train"), (2, "train"), (1, "test"), (2, "test")):
        text = (HUB / f"prm800k_phase{phase if split == 'train' else 1}.jsonl").read_text()
        (home / "snapshots" / "abc" / f"phase{phase}_{split}.jsonl").write_text(text)
    first, second = (BY_HAND[f"prm800k_phase{n}", "prm800k"][0] for n in (1, 2))
    name = "tasksource/PRM800K"
    for split, rows in {
        "train": [*first, *second],
        "train[1:]": second,
        "test": [*first, *first],
        "train[1:]+test[:1]": [*second, *first],
    }.items():
        assert list(read(name, split, reader="prm800k")[0]) == rows
    with pytest.raises(InputError, match="nobody/none cannot be read at split 'train'"):
        read("nobody/none", reader="prm800k")


def test_configs_of_a_data_set(tmp_path):
    entries = ""
    for name in ("main", "socratic"):
        rows = [{"question": name, "answer": "#### 1"}]
        (tmp_path / name).mkdir()
        Dataset.from_list(rows).to_parquet(tmp_path / name / "train-0.parquet")
        entries += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/*\n"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    for name in ("main", "socratic"):
        (row,), _ = read(str(tmp_path), name=name, reader="gsm8k")
        assert row["prompt"] == [user(name)]
    with pytest.raises(InputError, match=r"'main', 'socratic'.* dataset.name where it has"):
        read(str(tmp_path), reader="gsm8k")
    with pytest.raises(InputError, match=r"gsm8k.jsonl is a file, which has no configs; remove it"):
        read(fixture("gsm8k"), name="main")


# --- rows of something else

BROKEN = {
    "hh": ({"chosen": COOK}, "rejected is None, which is no text"),
    "hh, turns": ({"chosen": "Hi", "rejected": COOK}, "chosen is 'Hi', which is no transcript"),
    "gsm8k": ({"question": "q", "answer": 3}, "answer is 3, which is no text"),
    "gsm8k, words": (
        {"question": "q", "answer": "#### two"},
        "answer is '#### two', which is no text that ends with '#### ' and a number",
    ),
    "gsm8k_rollouts": (
        {"prompt": "q", "completions": ["a", "b"], "rewards": [1]},
        r"rewards is \[1.*\], which is no list of 2 numbers",
    ),
    "gsm8k_rollouts, shares": (
        {"prompt": "q", "completions": ["a"], "rewards": [0.5]},
        r"rewards is \[0.5\], which is no list of 0 and 1",
    ),
    "prm800k": ({"question": {"problem": "p"}}, "label is None, which is no mapping with steps"),
    "prm800k, rating": (
        solved(step(("a", 2), chosen=0)),
        r"a rating of label.steps\[0\] is 2, which is no -1, 0 or 1",
    ),
    "prm800k, place": (
        solved(step(("a", 1), chosen=1)),
        r"label.steps\[0\].chosen_completion is 1, which is no place of",
    ),
    "ultrafeedback": (
        {
            "chosen": [user("q"), bot("a")],
            "rejected": [user("q"), bot("b")],
            "chosen-rating": None,
            "rejected-rating": 1.0,
        },
        "chosen-rating is None, which is no number",
    ),
    "messages": (
        {"messages": [{"role": "user", "content": None}]},
        r"messages is \[.*\], which is no list of messages with role and content",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_of_something_else_is_named(tmp_path, name):
    row, part = BROKEN[name]
    reader = name.partition(",")[0]
    sound = next(file for file, whose in BY_HAND if whose == reader)
    rows = [json.loads(line) for line in Path(fixture(sound)).read_text().splitlines()]
    if reader == "gsm8k" and not isinstance(row["answer"], str):
        rows = [{**row, "answer": 3}]  # a column has one type
    with pytest.raises(InputError, match=part) as found:
        made(tmp_path, [*rows, row], reader)
    place = f"{tmp_path}/rows.jsonl, line {len(rows) + 1}: "
    if reader == "gsm8k" and not isinstance(row["answer"], str):
        place = f"2 rows of {tmp_path}/rows.jsonl are bad: line 1, line 2 ("
    assert place in str(found.value)
    assert "\n" not in str(found.value)


def test_data_sets_and_readers_that_do_not_fit(tmp_path):
    with pytest.raises(InputError, match=r"dataset: .*hh.jsonl has no column question but .*gsm8k"):
        read(fixture("hh"), reader="gsm8k")
    with pytest.raises(InputError, match=r"reader is 'gsm8' \(did you mean 'gsm8k'\?\)"):
        read(fixture("gsm8k"), reader="gsm8")
    with pytest.raises(
        InputError, match=r"makes no example of the 1 rows of .*not the assistant's"
    ):
        made(tmp_path, [{"messages": [user("Bye")]}], "messages")
    (tmp_path / "rows.jsonl").write_text('{"question": \n')
    with pytest.raises(InputError, match=r"rows.jsonl, line 1: the line is .* which is no JSON"):
        read(str(tmp_path / "rows.jsonl"), reader="prm800k")


def test_a_recipe_refuses_a_reader_of_other_shapes():
    loads = {
        "hh": [(AnswersFile, lambda c: load_outcomes(c, None, None), "pairs or prompts")],
        "gsm8k": [(FileData, load_preferences, "prompts or prompt/completion")],
        "prm800k": [(AnswersFile, lambda c: load_outcomes(c, None, None), "traces")],
        "gsm8k_rollouts": [
            (TracesFile, lambda c: load_traces(c, None, None), "outcomes or unpaired"),
            (RewardPairsFile, lambda c: load_pairs_or_ranked(c, None, None), "outcomes"),
        ],
    }
    for reader, cases in loads.items():
        for block, load, shapes in cases:
            with pytest.raises(InputError, match=f"reader: {reader} makes {shapes}.* trains on"):
                load(block(path="nowhere.jsonl", reader=reader))
    check_reader("messages", "messages")
    check_reader(None, "pairs")


# --- runs

SHORT = ("--max_steps", 5, "--save_steps", 5, "--logging_steps", 1, "--max_length", 256)
RUNS = {  # recipe, reader, fixture, more; what was left out
    "dpo": ("hh", "hh", (), f"left out 1 rows: {BLANK}"),
    "reward": ("ultrafeedback", "ultrafeedback", (), "left out 1 rows: a tie: margin is 0"),
    "orm": ("gsm8k_rollouts", "gsm8k_rollouts", (), None),
    "prm": ("prm800k", "", ("--dataset.step_separator", "\n<step>\n"), None),
    "kto": ("gsm8k_rollouts", "gsm8k_rollouts", (), None),
}


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_trains_on_what_a_reader_makes(run, own_model, tmp_path, recipe):
    reader, name, more, left_out = RUNS[recipe]
    path = fixture(name) if name else tmp_path / "both"
    if not name:
        path.mkdir()
        for file in HUB.glob("prm800k*"):
            (path / file.name).write_text(file.read_text())
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"algorithm: {recipe}\nformulation: {'code' if recipe == 'prm' else 'chapter'}\n"
        f"model_name_or_path: {own_model}\noutput_dir: unused\nuse_cpu: true\nbf16: false\n"
        f"per_device_train_batch_size: 2\nlearning_rate: 1.0e-3\neval_strategy: 'no'\n"
        f"dataset:\n  source: path\n  path: {path}\n  reader: {reader}\n"
    )
    folder, out = run(recipe, config.with_suffix(""), *SHORT, *more)
    state = json.loads((folder / "checkpoint-5" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert left_out is None or left_out in out
    if recipe == "reward":  # -log sigmoid(0 - 3), as the head is near 0 at the start
        assert losses[0] == pytest.approx(3.0486, abs=0.5)
        code = ["--formulation", "code", "--output_dir", tmp_path / "code"]
        _, out = run(recipe, config.with_suffix(""), *SHORT, *code)
        state = json.loads((tmp_path / "code/checkpoint-5/trainer_state.json").read_text())
        assert state["log_history"][0]["loss"] == pytest.approx(0.6931, abs=0.2)  # no margin
        assert "a tie" not in out


def test_an_empty_turn_in_a_conversation_leaves_the_row_out(tmp_path):
    turns = [("human", "dog"), ("gpt", " "), ("human", "again"), ("gpt", "dog")]
    conversation = [{"from": speaker, "value": text} for speaker, text in turns]
    rows = [{"conversations": conversation}, {"conversations": conversation[2:]}]
    examples, dropped = made(tmp_path, rows, "sharegpt")
    assert dropped == {BLANK: 1}
    assert [example["completion"][-1]["content"] for example in examples] == ["dog"]


def test_a_column_of_images_is_refused(tmp_path):
    row = {"instruction": "<image> what?", "output": "a cat", "images": ["x.png"]}
    with pytest.raises(InputError, match=r"has a column images, and only texts are trained here"):
        made(tmp_path, [row], "alpaca")
