"""Tasks and rewards: what is drawn, what is held out, and what every broken input says."""

import asyncio
import hashlib
import json
import subprocess
import sys
from datetime import date
from types import SimpleNamespace

import pytest

from rlhf_trl.data.gym import GymData, GymTasks, Spec
from rlhf_trl.data.number_answers import read_number
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.checked import checked
from rlhf_trl.rewards.loading import load_rewards
from rlhf_trl.rewards.verifiers import exact_match, format_reward, task_metrics

SPELL = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
SUM = Spec("chain_sum", config={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1})


@pytest.fixture(scope="module")
def tasks():
    return GymTasks(GymData(specs=[SPELL], size=300, eval_size=64))


def said(text):
    return [{"role": "assistant", "content": text}]


def test_sizes_and_columns(tasks):
    assert (len(tasks.train), len(tasks.held_out)) == (300, 64)
    row = tasks.train[0]
    word = row["question"].rsplit(" ", 1)[1]
    assert row["answer"] == word[::-1]
    assert row["prompt"] == [{"role": "user", "content": row["question"]}]
    assert 3 <= len(word) <= 8


def test_held_out_words_never_occur_in_training_whatever_the_seeds(tasks):
    other = GymTasks(GymData(specs=[SPELL], size=2000, seed=9, eval_size=128, eval_seed=9))
    train = {r["question"].lower() for r in tasks.train + other.train}
    held = [r["question"].lower() for r in tasks.held_out + other.held_out]
    assert not train & set(held)
    assert len({r["question"].lower() for r in other.held_out}) == 128
    assert tasks.passed_over > 0
    for question in held:  # the rule as documented, spelled out independently
        assert int(hashlib.sha256(question.encode()).hexdigest(), 16) % 10 == 0


def terms(question):
    """The signed terms of a sum in any order, read from the question's text."""
    signed = question.split(":")[1].replace("=", "").replace("- ", "-").replace("+ ", "+")
    return tuple(sorted(int(term) for term in signed.split()))


def test_no_held_out_sum_is_a_training_sum_in_another_order():
    sums = GymTasks(GymData(specs=[SUM], size=3200))
    assert terms("What is: 4 - 1 + 0 =") == terms("What is: 0 + 4 - 1 =") == (-1, 0, 4)
    held = [terms(row["question"]) for row in sums.held_out]
    assert not {terms(row["question"]) for row in sums.train} & set(held)
    assert len({row["question"] for row in sums.held_out}) == 256
    assert len(set(held)) == 125  # as recipes/README.md says


def test_other_tasks_are_split_by_the_text_of_the_question():
    specs = [Spec("gcd"), Spec("products"), Spec("basic_arithmetic")]
    mixed = GymTasks(GymData(specs=specs, size=300, eval_size=60))
    for rows, held_out in ((mixed.train, False), (mixed.held_out, True)):
        for row in rows:
            digest = hashlib.sha256(row["question"].strip().lower().encode()).hexdigest()
            assert (int(digest, 16) % 10 == 0) == held_out


def test_drawing_is_deterministic_and_depends_on_the_seed(tasks):
    again = GymTasks(GymData(specs=[SPELL], size=300, eval_size=64))
    other = GymTasks(GymData(specs=[SPELL], size=300, seed=1, eval_size=64))
    assert [r["answer"] for r in again.train] == [r["answer"] for r in tasks.train]
    assert [r["answer"] for r in other.train] != [r["answer"] for r in tasks.train]
    assert [r["answer"] for r in other.held_out] == [r["answer"] for r in tasks.held_out]


def test_mixture_follows_the_weights():
    mixed = GymTasks(
        GymData(specs=[Spec("spell_backward", 3.0, SPELL.config), SUM], size=400, eval_size=40)
    )
    share = sum(r["task"] == "spell_backward" for r in mixed.train) / 400
    assert abs(share - 0.75) < 0.09  # four standard errors
    assert {r["task"] for r in mixed.held_out} == {"spell_backward", "chain_sum"}


def test_system_prompts():
    own = GymTasks(GymData(specs=[SPELL], size=2, eval_size=2, system_prompt="Be brief."))
    assert own.train[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    zero = GymTasks(GymData(specs=[SPELL], size=2, eval_size=2, system_prompt="deepseek_zero"))
    assert "<think>" in zero.train[0]["prompt"][0]["content"]
    assert len(zero.train[0]["prompt"]) == 2


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (GymData(specs=[Spec("spel_backward")]), ["dataset.specs.0.name", "'spell_backward'?"]),
        (
            GymData(specs=[SPELL, Spec("chain_sum", config={"min_term": 2})]),
            ["dataset.specs.1.config.min_term", "did you mean 'min_terms'?"],
        ),
        (GymData(specs=[]), ["dataset.specs is empty"]),
        (GymData(specs=[SPELL, SPELL]), ["names a task twice"]),
        (
            GymData(specs=[Spec("chain_sum", config={"min_terms": 5, "max_terms": 2})]),
            ["refused", "chain_sum", "max_terms must be >= min_terms"],
        ),
        (
            GymData(specs=[Spec("chain_sum", config={**SUM.config, "max_terms": 2})]),
            ["dataset.eval_size", "held-out questions for the 256 asked"],
        ),
    ],
)
def test_bad_data_blocks_say_what_where_and_the_remedy(data, parts):
    with pytest.raises(InputError) as error:
        GymTasks(data)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_exact_match_is_string_equality_of_the_last_answer():
    texts = [
        "<answer>nus</answer>",
        "<answer> nus </answer>",
        "<answer>Nus</answer>",  # case counts
        "<answer>nuss</answer>",
        "nus",
        "<answer>sun</answer><answer>nus</answer>",
    ]
    scores = exact_match([said(t) for t in texts], ["nus"] * 6, ["spell_backward"] * 6)
    assert scores == [1, 1, 0, 0, 0, 1]


def test_numbers_match_however_they_are_written():
    texts = ["<answer>7</answer>", "<answer>+07.0</answer>", "<answer>70</answer>"]
    assert exact_match(texts, ["7"] * 3, ["chain_sum"] * 3) == [1, 1, 0]
    assert exact_match(["<answer>007</answer>"], ["7"], ["spell_backward"]) == [0]


@pytest.mark.parametrize(
    "task", ["basic_arithmetic", "chain_sum", "gcd", "lcm", "leg_counting", "products"]
)
def test_answers_that_are_numbers_are_compared_as_numbers(task):
    rows = GymTasks(GymData(specs=[Spec(task)], size=5, eval_size=5)).train
    for row in rows:
        other = f"<answer>{float(row['answer']):+09.2f}</answer>"  # +00042.00
        wrong = f"<answer>{float(row['answer']) + 1:+09.2f}</answer>"
        assert exact_match([other, wrong], [row["answer"]] * 2, [row["task"]] * 2) == [1, 0]


def test_format_counts_a_quarter_per_tag():
    texts = ["<think></think><answer>x</answer>", "<answer>x</answer>", "</think>", "x"]
    assert format_reward([said(t) for t in texts]) == [1.0, 0.5, 0.25, 0.0]


def test_gym_score_can_be_hacked_where_exact_match_cannot(tasks):
    row = tasks.train[0]
    longer = said(f"<answer>{row['answer']}zz</answer>")
    columns = {"answer": [row["answer"]], "task": [row["task"]], "id": [row["id"]]}
    scores = {n: f(completions=[longer], **columns)[0] for n, f in task_metrics(tasks).items()}
    # 1/n added n times: 1.0 exactly loses .2, the rounding error just below or above 1 does not
    assert scores["exact_match"] == 0
    assert scores["gym_score"] >= 0.8


def test_rewards_by_name_and_by_dotted_path(tasks, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, **kwargs):\n    return [-len(c) for c in completions]\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    functions = load_rewards(["exact_match", "my_rewards.brevity"], tasks)
    assert [f.__name__ for f in functions] == ["exact_match", "brevity"]
    assert functions[1](completions=["abc"]) == [-3]
    for name, part in [
        ("exact_mach", "did you mean 'exact_match'?"),
        ("my_rewards.brevit", "cannot be imported"),
        ("no_such_module.f", "cannot be imported"),
        ("my_rewards.number", "not callable"),
    ]:
        with pytest.raises(InputError, match="reward_funcs") as error:
            load_rewards([name], tasks)
        assert part in str(error.value)
    with pytest.raises(InputError, match="reward_funcs is empty"):
        load_rewards([], tasks)


OLD_PLACE = {  # what rlhf_trl.data.verifiers had, and what the package calls it
    "exact_match": "exact_match",
    "number": "number_reward",
    "math": "math_reward",
    "regex": "regex_reward",
    "contains": "contains_reward",
    "format_reward": "format_reward",
}


def test_the_old_place_of_the_verifiers_warns_once_and_has_the_same_functions(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import rlhf_trl\n"
        f"from rlhf_trl.data.verifiers import {', '.join(OLD_PLACE)}\n"
        f"assert [{', '.join(OLD_PLACE)}] == "
        f"[{', '.join(f'rlhf_trl.{name}' for name in OLD_PLACE.values())}]\n"
        "print(number.__name__, math.__name__, regex.__name__, contains.__name__)\n"
        "print(number(['so 7.0'], answer=['7']), contains(['so 7'], answer=['8']))\n"
    )
    run = subprocess.run([sys.executable, str(mine)], capture_output=True, text=True, timeout=120)
    # under these names a trainer logs them, as `reward_funcs` does
    assert run.stdout == "number math regex contains\n[1.0] [0.0]\n", run.stderr
    assert run.stderr.count("FutureWarning") == 1
    assert f"{mine}:2: FutureWarning: rlhf_trl.data.verifiers goes with the next" in run.stderr
    assert "from rlhf_trl import exact_match" in run.stderr


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Ann has <<3*4=12>>12 and keeps 10.\n#### 10", 10),
        ("#### 1,200", 1200),
        ("#### 5 apples", 5),
        ("#### -0.5\nThat is all, for 3 people.", -0.5),
        ("#### 3 or 4", None),  # two answers are none
        ("#### \n", None),
        (r"The sum is 7, so \boxed{8} or \boxed{9}. #### 10", 9),
        (r"\boxed{x = 12 \text{ of } 2}", None),  # what follows the unit is a second number
        (r"\boxed{\$1{,}234.50}", 1234.5),
        (r"\boxed{10\,000}", 10000),
        (r"\boxed{90^\circ}", 90),
        (r"\boxed{12\text{ cm}}", 12),
        (r"\boxed{\frac{1}{2}}", None),
        (r"\boxed{\sqrt{2}}", None),
        (r"it is 4, \boxed{4", None),  # cut off
        ("3 and 1,234,567.", 1234567),
        ("1,2000", 2000),
        ("10-12", 12),
        ("so x=-3", -3),
        ("that is \N{MINUS SIGN}3", -3),
        ("f(2)-3", 3),
        ("about .5 of it", 0.5),
        ("6e2 grams of H2O", 600),
        ("seven", None),
        ("", None),
    ],
)
def test_the_number_that_a_text_gives_as_its_answer(text, value):
    assert read_number(text) == value


def test_answers_are_compared_as_numbers_patterns_and_parts():
    names = ["number", "regex:pattern", "contains:part"]
    columns = {
        "answer": ["1,200", 7, "#### -2", None],
        "pattern": ["^so", "(?i)SEVEN|7$", "2$", None],
        "part": ["1", "even", "-2 ", None],
    }
    texts = ["so 1200.0000005", "it is seven, 7.00001", "#### 2", "4"]
    rewards = load_rewards(names, None, columns)
    scores = [reward(completions=texts, prompts=texts, **columns) for reward in rewards]
    assert scores == [[1, 0, 0, None], [1, 1, 1, None], [1, 1, 0, None]]
    assert scores == [r(completions=[said(t) for t in texts], **columns) for r in rewards]
    assert [reward.__name__ for reward in rewards] == names
    # on one's own data the tag must hold the text of the column, as it is
    [same] = load_rewards(["exact_match"], None, ["answer"])
    texts = ["<answer>7</answer>", "<answer> 7.0</answer>", "7"]
    assert same(completions=texts, answer=[7, "7", "7"]) == [1, 0, 0]
    assert same(completions=texts[:2], answer=[7.0, 7.5]) == [1, 0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("number", ["'number' reads the column 'answer'", "rewards get solution", "number:COLUMN"]),
        ("number:prompt", ["'number:prompt' reads the column 'prompt'", "rewards get solution"]),
        ("regex:solutions", ["'solutions'", "did you mean 'solution'?"]),
        ("gym_score", ["reasoning-gym", "number"]),
        ("format:solution", ["format reads no column"]),
        ("numbr", ["did you mean 'number'?"]),
    ],
)
def test_verifiers_that_cannot_read_the_data(name, parts):
    with pytest.raises(InputError, match="reward_funcs") as error:
        load_rewards([name], None, ["prompt", "solution"])
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("name", "answer", "parts"),
    [
        ("number", "seven", ["'seven' holds no number", "number:COLUMN"]),
        ("regex", "(7", ["'(7' is not a regular expression", "regex:COLUMN"]),
        ("contains", " ", ["empty"]),
        ("contains", date(2026, 1, 2), ["'2026-01-02', a date;", "own"]),
        ("exact_match", ["7", "seven"], ["a list;", "own"]),
    ],
)
def test_right_answers_that_are_none_are_refused(name, answer, parts):
    [reward] = load_rewards([name], None, ["answer"])
    with pytest.raises(InputError) as error:
        reward(completions=["7"], answer=[answer])
    assert all(part in str(error.value) for part in parts), str(error.value)


BATCH = {
    "prompts": [[{"role": "user", "content": "p0"}], [{"role": "user", "content": "p1"}]],
    "completions": [said("good"), said("bad")],
    "trainer_state": SimpleNamespace(global_step=7),
}


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        ([1.0, float("nan")], ["'mine'", "nan", "step 7", "'p1'", "'bad'", "finite"]),
        ([float("inf"), 0], ["inf", "'p0'", "'good'"]),
        (1.0, ["1.0", "list of 2 numbers"]),
        (None, ["None", "list of 2 numbers"]),
        (["a", "b"], ["'a'", "finite number"]),
        ([1.0], ["1 values for 2 completions"]),
    ],
)
def test_broken_reward_results(result, parts):
    with pytest.raises(InputError) as error:
        checked(lambda **_: result, "pkg.mine".rpartition(".")[2])(**BATCH)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_reward_that_raises_names_the_sample():
    def mine(completions, **_):
        return [1 / (c[0]["content"] != "bad") for c in completions]

    with pytest.raises(InputError) as error:
        checked(mine, "mine")(**BATCH)
    for part in ("'mine'", "ZeroDivisionError", "step 7", "'p1'", "'bad'"):
        assert part in str(error.value)


def batch_of(*texts):
    return {"prompts": [f"p{n}" for n in range(len(texts))], "completions": list(texts)}


def raises_at_the_end(completions, **_):
    for place in range(len(completions)):
        if place == len(completions) - 1:
            raise ValueError("the end")
    return [0.0] * len(completions)


def raises_at_a_bad_end(completions, **_):
    if completions[-1].startswith("bad"):
        raise ValueError("bad")
    return [0.0] * len(completions)


def raises_where_bad(completions, **_):
    for text in completions:
        if text.startswith("bad"):
            raise ValueError("bad")
    return [0.0] * len(completions)


def raises_in_large_batches(completions, **_):
    raise ValueError(f"{len(completions)} are too many")


@pytest.mark.parametrize(
    ("function", "texts", "where"),
    [
        (raises_where_bad, ["a", "bad 1", "bad 2"], "(prompt 'p1', completion 'bad 1');"),
        (raises_where_bad, ["a", "b", "bad"], "(prompt 'p2', completion 'bad');"),
        (raises_at_a_bad_end, ["bad 1", "b", "bad 2"], "(prompt 'p2', completion 'bad 2');"),
        (
            raises_at_the_end,
            ["a", "b", "c"],
            "in a batch of 3 that begins with prompt 'p0' and completion 'a';",
        ),
        (
            raises_in_large_batches,
            ["a", "b"],
            "in a batch of 2 that begins with prompt 'p0' and completion 'a';",
        ),
        (raises_at_the_end, ["a"], "(prompt 'p0', completion 'a');"),
    ],
)
def test_a_reward_that_raises_names_a_completion_only_where_it_is_to_blame(function, texts, where):
    with pytest.raises(InputError) as error:
        checked(function, "mine")(**batch_of(*texts))
    assert where in str(error.value)


def test_the_text_of_an_exception_is_joined_into_one_line(tmp_path, monkeypatch):
    def mine(completions, **_):
        raise ValueError("first line\n  second line\n\nthird line")

    with pytest.raises(InputError, match="ValueError: first line second line third line at "):
        checked(mine, "mine")(**BATCH)
    (tmp_path / "raising_module.py").write_text("raise ValueError('one\\ntwo')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"\(ValueError: one two at raising_module.py, line 1\)"):
        load_rewards(["raising_module.mine"], None, ["answer"])


BROKEN = """import json


def helper(text):
    return json.loads(text)  # line 5


def mine(completions, **columns):
    return [helper(c) for c in completions]


async def waiting(completions, **columns):
    raise KeyError(completions[0])  # line 13
"""


def test_a_reward_that_raises_names_the_line_of_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text(BROKEN)
    (tmp_path / "broken_module.py").write_text("import json\n\njson.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    mine, waiting = load_rewards(
        ["broken_rewards.mine", "broken_rewards.waiting"], None, ["answer"]
    )
    with pytest.raises(InputError, match=r" at broken_rewards.py, line 5 \(prompt None"):
        mine(completions=["x"])
    with pytest.raises(InputError, match=r"KeyError: 'x' at broken_rewards.py, line 13 \("):
        asyncio.run(waiting(completions=["x"]))
    with pytest.raises(InputError, match=r"imported from here \(.* at broken_module.py, line 3\);"):
        load_rewards(["broken_module.mine"], None, ["answer"])
    with pytest.raises(InputError, match=r"no keyword arguments \(prompt None") as error:
        checked(abs, "mine")(completions=["x"])  # no line of the user's
    assert ", line" not in str(error.value)


def test_none_for_some_samples_is_allowed():
    assert checked(lambda **_: [None, 1], "mine")(**BATCH) == [None, 1]


def test_async_rewards_are_checked_too():
    async def mine(completions, **_):
        return [0.0, float("nan")]

    with pytest.raises(InputError, match="nan"):
        asyncio.run(checked(mine, "mine")(**BATCH))


def test_rows_are_plain_data(tasks):
    assert json.loads(json.dumps(tasks.held_out[0])) == tasks.held_out[0]
