"""Steps: where a completion is cut, and the labels of its letters, worked out by hand."""

import pytest

from rlhf_trl.data.steps import LETTERS, check_step_split, label_steps, split_steps
from rlhf_trl.errors import InputError

HEAD = "<think></think><answer>"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (f"{HEAD}nus</answer>", [f"{HEAD}n", "u", "s", "</answer>"]),
        (f"{HEAD}</answer>", [f"{HEAD}</answer>"]),
        (f"{HEAD}nu", [f"{HEAD}nu"]),  # cut off
        ("nus", ["nus"]),
        ("", []),
        ("<think></think>nu</answer>", ["<think></think>n", "u", "</answer>"]),
        (f"{HEAD}nu</answer>!", [f"{HEAD}n", "u", "</answer>!"]),
    ],
)
def test_letters(text, steps):
    assert split_steps(text, LETTERS) == steps


def test_lines():
    assert split_steps("one\n\n two\nthree\n", r"\n+") == ["one", " two", "three"]
    assert split_steps("\n\n", r"\n+") == []


@pytest.mark.parametrize(
    ("answer", "text", "labels"),
    [
        ("nus", f"{HEAD}nus</answer>", [1, 1, 1, 1]),
        ("nus", f"{HEAD}nsu</answer>", [1, -1, -1, -1]),  # u stands at a right place too late
        ("nus", f"{HEAD}sun</answer>", [-1, -1, -1, -1]),
        ("nus", f"{HEAD}nu</answer>", [1, 1, -1]),  # stops too early
        ("nus", f"{HEAD}nusu</answer>", [1, 1, 1, -1, -1]),
        ("nus", f"{HEAD}nuus</answer>", [1, 1, 0, 1, -1]),  # a repeat, and so not the answer
        ("nus", f"{HEAD}nuuus</answer>", [1, 1, 0, 0, 1, -1]),
        ("nus", f"{HEAD}nuss</answer>", [1, 1, 1, 0, -1]),
        ("nus", f"{HEAD}nuun</answer>", [1, 1, 0, -1, -1]),
        ("nuS", f"{HEAD}nus</answer>", [1, 1, -1, -1]),  # case counts
        ("llab", f"{HEAD}llab</answer>", [1, 1, 1, 1, 1]),  # a double letter is no repeat
        ("llab", f"{HEAD}lllab</answer>", [1, 1, 0, 1, 1, -1]),
        ("nus", f"{HEAD}</answer>", [-1]),
        ("nus", f"{HEAD}nus", [-1]),
        ("nus", "nus", [-1]),
        ("nus", "", []),
        ("nus", "<think></think>nus</answer>", [-1, -1, -1, -1]),
        ("nus", f"{HEAD}nus</answer>!", [1, 1, 1, -1]),
        ("nu", f"{HEAD}nu</answer>nu</answer>", [1, 1, -1, -1, -1]),
        ("nus", f"x{HEAD}nus</answer>", [-1, -1, -1, -1]),
    ],
)
def test_labels(answer, text, labels):
    assert label_steps(split_steps(text, LETTERS), answer, "spell_backward") == labels


def test_a_step_may_have_several_letters():
    assert label_steps([f"{HEAD}nu", "s", "</answer>"], "nus", "spell_backward") == [1, 1, 1]
    assert label_steps([f"{HEAD}n", "ns", "</answer>"], "nus", "spell_backward") == [1, -1, -1]


def test_other_tasks_are_refused():
    with pytest.raises(InputError, match="the steps of task 'chain_sum' have no rule") as found:
        label_steps(["1"], "1", "chain_sum")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("pattern", "part"),
    [("(", "is not a regular expression"), (r"(\n)+", "capturing"), ("[", "dataset.step_split")],
)
def test_patterns_that_cut_nothing(pattern, part):
    with pytest.raises(InputError, match=part) as found:
        check_step_split(pattern)
    assert "\n" not in str(found.value)
    check_step_split(LETTERS)
