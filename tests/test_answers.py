"""Reading answers and comparing them: what `number` and `math` say beside what a person would."""

import threading
import time
from pathlib import Path

import pytest
from datasets import Dataset

from rlhf_trl.data import math_answers
from rlhf_trl.data.number_answers import read_number
from rlhf_trl.errors import InputError
from rlhf_trl.rewards import loading
from rlhf_trl.rewards.loading import check_all_rewarded, check_right_answers, load_rewards
from rlhf_trl.rewards.verifiers import VERIFIERS

README = Path(__file__).parent.parent / "recipes" / "README.md"

# Right answer, completion, and the verdicts of a person, of number and of math: 1 is right, 0 wrong
# and None a refusal of the right answer.
VERDICTS = [
    ("7", "#### 7", 1, 1, 1),
    ("7", "It is 7.", 1, 1, 0),
    ("7", "7.0", 1, 1, 0),
    ("7", r"\boxed{7}", 1, 1, 1),
    ("7", r"\boxed{+7}", 1, 1, 1),
    ("7", "#### 8", 0, 0, 0),
    ("7", "seven", 1, 0, 0),
    ("-7", r"\boxed{-7}", 1, 1, 1),
    ("-7", "\\boxed{\N{MINUS SIGN}7}", 1, 1, 1),
    ("-7", r"\boxed{7}", 0, 0, 0),
    ("1,200", r"\boxed{1200}", 1, 1, 1),
    ("1200", r"\boxed{1{,}200}", 1, 1, 1),
    ("1200", r"\boxed{1 200}", 1, 0, 1),
    ("1200", r"\boxed{200}", 0, 0, 0),
    ("1 000", r"\boxed{1000}", 1, None, 1),
    ("1 000", r"\boxed{0}", 0, None, 0),
    ("1 000", "so 5 times 0", 0, None, 0),
    ("1/2", r"\boxed{0.5}", 1, None, 1),
    ("1/2", r"\boxed{\frac12}", 1, None, 1),
    ("1/2", r"\boxed{2}", 0, None, 0),
    ("1/2", "The answer is 2", 0, None, 0),
    (r"\frac{1}{2}", r"\boxed{1/2}", 1, None, 1),
    (r"\frac{1}{2}", r"\boxed{2}", 0, None, 0),
    ("2", "so it is 1/2", 0, 0, 0),
    ("2", r"\boxed{\frac{1}{2}}", 0, 0, 0),
    ("2", r"\frac{1}{2}", 0, 0, 0),
    ("2", "The answer is $2$", 1, 1, 1),
    ("2", "which makes 2", 1, 1, 0),
    ("3 4/5", r"\boxed{3.8}", 1, None, 1),
    ("3 4/5", r"\boxed{\frac{19}{5}}", 1, None, 1),
    ("3 4/5", r"\boxed{5}", 0, None, 0),
    ("3 4/5", r"\boxed{\frac{4}{5}}", 0, None, 0),
    ("10^5", r"\boxed{100000}", 1, None, 1),
    ("10^5", r"\boxed{5}", 0, None, 0),
    ("5", r"\boxed{10^5}", 0, 0, 0),
    ("5", "it is 10^5", 0, 0, 0),
    ("1/3", r"\boxed{0.333333}", 1, None, 1),
    ("0.333333", r"\boxed{\frac13}", 1, 0, 1),
    ("1/3", r"\boxed{0.33}", 0, None, 0),
    ("3.14", r"\boxed{3.14}", 1, 1, 1),
    ("3.14", "3.1400001", 1, 1, 0),
    ("3.14", r"\boxed{3.15}", 0, 0, 0),
    ("6.626e-34", r"\boxed{6.626e-34}", 1, 1, 1),
    ("6.626e-34", r"\boxed{6.626 \times 10^{-34}}", 1, 0, 1),
    ("6.626e-34", r"\boxed{0}", 0, 0, 0),
    ("6.626e-34", r"\boxed{6.6e-34}", 0, 0, 0),
    ("0", r"\boxed{1e-9}", 0, 0, 0),
    ("0", r"\boxed{0.0}", 1, 1, 1),
    ("9007199254740993", r"\boxed{9007199254740993}", 1, 1, 1),
    ("9007199254740993", r"\boxed{9007199254740992}", 0, 0, 0),
    ("6.02e23", r"\boxed{602000000000000000000000}", 1, 1, 0),
    ("1e400", r"\boxed{1e401}", 0, 0, 0),
    ("1234567", r"\boxed{1234568}", 0, 0, 0),
    (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", 1, None, 1),
    (r"2\sqrt{2}", r"\boxed{2}", 0, None, 0),
    ("2", r"\sqrt{2}", 0, 0, 0),
    ("2x", r"\boxed{2}", 0, None, 0),
    ("2x", r"\boxed{x+x}", 1, None, 1),
    ("2", r"\boxed{2x}", 0, 0, 0),
    ("x = 5", r"\boxed{5}", 1, 1, 1),
    ("5", r"\boxed{x = 5}", 1, 1, 1),
    ("5", r"\boxed{x^5}", 0, 0, 0),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1, None, 1),
    ("y = 2x+3", r"\boxed{y = 3+2x}", 1, None, 1),
    ("x^2 = 4", r"\boxed{4}", 0, None, 0),
    ("x^2 = 4", r"\boxed{x = \pm 2}", 1, None, 0),
    ("5!", r"\boxed{120}", 1, None, 1),
    ("5!", r"\boxed{5}", 0, None, 0),
    (r"2\pi", r"\boxed{2π}", 1, None, 1),
    (r"\pi", r"\boxed{3.14}", 0, None, 0),
    (r"\log_2 8", r"\boxed{3}", 1, None, 1),
    (r"\{1,2\}", r"\boxed{2, 1}", 1, None, 1),
    (r"\{1,2\}", r"\boxed{\{1,3\}}", 0, None, 0),
    ("(1,2)", r"\boxed{(1,2)}", 1, None, 1),
    ("(1,2)", r"\boxed{(2,1)}", 0, None, 0),
    ("(1,2)", r"\boxed{1,2}", 0, None, 1),
    ("[1,2)", r"\boxed{(1,2)}", 0, None, 0),
    ("[1,2]", r"\boxed{1 \le x \le 2}", 1, None, 0),
    ("5 cm", r"\boxed{5\text{ cm}}", 1, 1, 1),
    ("5 cm", r"\boxed{5}", 1, 1, 1),
    ("5 cm", r"\boxed{5 m}", 0, 1, 1),
    ("5 cm", r"\boxed{50 mm}", 1, 0, 0),
    (r"50\%", r"\boxed{50\%}", 1, 1, 1),
    (r"50\%", r"\boxed{0.5}", 1, 0, 1),
    (r"50\%", r"\boxed{50}", 0, 1, 1),
    (r"90^\circ", r"\boxed{90}", 1, 1, 1),
    (r"\$5.50", r"\boxed{5.5}", 1, 1, 1),
    ("2 million", r"\boxed{2}", 0, None, None),
    ("2", "2 million", 0, 1, 0),
    ("Evelyn", r"\boxed{\text{Evelyn}}", 1, None, 1),
    ("Evelyn", r"\boxed{Edward}", 0, None, 0),
    (r"\text{(C)}", r"\boxed{C}", 1, None, 1),
    ("yes", r"\boxed{Yes}", 1, None, 1),
    ("hello", r"\boxed{hello}", 1, None, 1),
    ("hello", r"\boxed{olleh}", 0, None, 0),
    ("hello", "<answer>olleh</answer>", 0, None, 0),
    ("no", r"\boxed{on}", 0, None, 1),
    ("ab", r"\boxed{ba}", 1, None, 1),
    ("5", "<answer>5</answer>", 1, 1, 1),
    ("1/2", "<answer>1/2</answer>", 1, None, 1),
    ("5", "<answer>5</answer>, and not 4", 1, 0, 1),
    ("5", r"\boxed{4} or \boxed{5}", 0, 1, 1),
    ("5", r"\boxed{5}", 1, 1, 1),
    ("5", r"\boxed{5", 0, 0, 0),
    ("5", "", 0, 0, 0),
    ("5", "**5**", 1, 1, 0),
    ("5", "#### **5**", 1, 1, 1),
    ("5", "#### 5 apples", 1, 1, 1),
    ("5", "3 or 5", 0, 1, 0),
    ("5", "3 + 2 = 5", 1, 1, 0),
    (r"0.\overline{3}", r"\boxed{1/3}", 1, None, None),
    ("Ann has 12.\n#### 10", "#### 10", 1, 1, 1),
    ("The answer is 5", r"\boxed{5}", 1, 1, None),
    ("It takes 3 steps, so 5.", r"\boxed{5}", 1, None, None),
    ("It takes 3 steps, so 5.", r"\boxed{3}", 0, None, None),
    ("sqrt(2)", r"\boxed{2}", 0, None, 0),
    ("sqrt(2)", r"\boxed{\sqrt2}", 1, None, 1),
    ("1:2", r"\boxed{1:2}", 1, None, 1),
    ("1.000.000", r"\boxed{1000000}", 1, None, None),
]
# For completions on which one of the two differs from a person: where README.md says so.
DIFFERENCES = {
    "seven": "number words (seven)",
    r"\boxed{5 m}": "5 m is 5 cm",
    r"\boxed{50 mm}": "50 mm is not",
    r"\boxed{50}": "50% is 50",
    r"\boxed{4} or \boxed{5}": "of two boxed answers the last counts",
    r"\boxed{1 200}": "spaced thousands in a completion",
    r"\boxed{\frac13}": "reads no fractions",
    r"\boxed{0.5}": "percentages as parts of 1",
    r"\boxed{6.626 \times 10^{-34}}": r"powers of ten with `\times`",
    "2 million": "2 million",
    "3 or 5": "3 or 5",
    "<answer>5</answer>, and not 4": "and not 4",
    "7.0": "an answer that is not marked is none (7.0",
    "It is 7.": "It is 7.",
    "which makes 2": "an answer that is not marked",
    "3.1400001": "an answer that is not marked",
    "**5**": "an answer that is not marked",
    "3 + 2 = 5": "an answer that is not marked",
    r"\boxed{602000000000000000000000}": "decimals have 15 digits",
    r"\boxed{x = \pm 2}": "x^2 = 4 is not x = ±2",
    r"\boxed{1,2}": "(1,2) is 1,2",
    r"\boxed{on}": "no is on, as ab is ba",
    r"\boxed{1 \le x \le 2}": "an interval is not an inequality",
}


def verdict(name, right, text):
    try:
        return VERIFIERS[name]([text], [right])[0]
    except InputError:
        return None


@pytest.mark.parametrize(("right", "text", "person", "by_number", "by_math"), VERDICTS)
def test_what_number_and_math_say_of_an_answer(right, text, person, by_number, by_math):
    assert verdict("number", right, text) == by_number
    assert verdict("math", right, text) == by_math
    if by_number not in (person, None) or by_math not in (person, None):
        assert DIFFERENCES[text] in README.read_text(encoding="utf-8")


def test_the_table_of_verdicts_is_large_and_holds_every_difference():
    assert len(VERDICTS) >= 100
    assert {text for _, text, *_ in VERDICTS} >= DIFFERENCES.keys()


def test_rows_to_which_no_reward_applies_are_refused():
    empty = {"answer": ["7", None, None], "solution": [None, "8", None]}
    rows = Dataset.from_dict({"prompt": ["p0", "p1", "p2"], **empty})
    with pytest.raises(InputError) as error:
        check_all_rewarded(["number"], rows)
    assert "number would not apply to 2 of 3 training rows, of which answer is" in str(error.value)
    assert "leave these rows out, or add a reward" in str(error.value)
    with pytest.raises(InputError, match="1 of 3 training rows, of which answer and solution is"):
        check_all_rewarded(["number", "contains:solution"], rows)
    for names in (["number", "format"], ["number", "mine.reward"]):
        check_all_rewarded(names, rows)
    check_all_rewarded(["number"], rows.select([0]))


@pytest.mark.parametrize("right", ["1/2", r"\frac{1}{2}", "3 4/5", "10^5", "1 000"])
def test_number_refuses_a_right_answer_that_is_not_one_number_by_its_prompt(right):
    rows = Dataset.from_dict(
        {"prompt": ["p0", "What is half?", "p2"], "answer": ["7", right, None], "id": [0, 1, 2]}
    )
    with pytest.raises(InputError) as error:
        check_right_answers(["exact_match", "number"], rows)
    sentence = str(error.value)
    assert "number cannot use 1 of 3 right answers" in sentence
    assert f"{right!r} (prompt 'What is half?'), is not one number; write math" in sentence
    check_right_answers(["number:id", "math"], rows, None)
    [reward] = load_rewards(["number"], None, ["answer"])
    with pytest.raises(InputError) as error:
        reward(completions=["7", "2"], prompts=["p0", "p1"], answer=["7", right])
    assert f"{right!r} (prompt 'p1') is not one number; write math" in str(error.value)


@pytest.mark.parametrize("right", ["", "?", "2 million", r"0.\overline{3}", "It is 5 or 6"])
def test_math_refuses_a_right_answer_that_it_cannot_read(right):
    rows = Dataset.from_dict({"prompt": ["p0", "p1"], "answer": ["7", right]})
    with pytest.raises(InputError, match="math cannot use 1 of 2 right answers") as error:
        check_right_answers(["math"], rows)
    assert f"{right!r} (prompt 'p1'), is no mathematics" in str(error.value)
    with pytest.raises(InputError, match="is no mathematics"):
        VERIFIERS["math"](["7"], [right])


def test_math_without_its_extra(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the extra math.*scripts/setup.sh math"):
        load_rewards(["math"], None, ["answer"])
    load_rewards(["number"], None, ["answer"])


def test_math_works_in_a_thread_and_stops_in_time(monkeypatch, caplog):
    texts, right = [r"\boxed{\frac{1}{2}}", r"\boxed{3}"], ["0.5", "4"]
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(VERIFIERS["math"](texts, right)))
    thread.start()
    thread.join(60)
    assert scores == VERIFIERS["math"](texts, right) == [1, 0]
    assert not [r for r in caplog.records if "Timeout is disabled" in r.getMessage()]
    monkeypatch.setattr(math_answers, "COMPARING_SECONDS", 1)
    started = time.monotonic()
    assert VERIFIERS["math"]([r"\boxed{1000000!}"], ["5"]) == [0]
    assert time.monotonic() - started < 4


def test_numbers_are_compared_as_they_are_written():
    reward = VERIFIERS["number"]
    large = 2**63 - 1
    assert reward([str(large), str(large - 1)], [large, large]) == [1, 0]
    assert reward(["0", "6.6260701e-34", "6.627e-34"], ["6.62607e-34"] * 3) == [0, 1, 0]
    assert reward(["1e999999999999", "1e99999999999999999999999"], ["1"] * 2) == [0, 0]
    assert read_number("1e99999999999999999999999") is None
    # 1e-6 of what is above 1 is no room for another amount
    assert reward(["1234567", "1234567.5"], ["1234567.5"] * 2) == [0, 1]


def test_large_answers_to_tasks_of_numbers_are_exact():
    texts = [
        f"<answer>{text}</answer>" for text in ("9007199254740992", "9007199254740993", "1e400")
    ]
    answers = ["9007199254740993"] * 3
    assert VERIFIERS["exact_match"](texts, answers, ["products"] * 3) == [0, 1, 0]
