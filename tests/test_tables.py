"""Tables as Markdown and as text that fits the terminal."""

from rlhf_trl.evaluation.tables import markdown, mean_and_spread, text

LINES = [
    {"name": "a", "score": "0.500", "why": "a reason longer than what shares a line", "n": "3"},
    {"name": "longer", "score": "-", "why": "-", "n": "-"},
]


def test_markdown():
    assert markdown(LINES).splitlines() == [
        "| name | score | why | n |",
        "| --- | --- | --- | --- |",
        "| a | 0.500 | a reason longer than what shares a line | 3 |",
        "| longer | - | - | - |",
    ]


def test_columns_that_do_not_fit_stand_below():
    assert text(LINES, width=60).splitlines() == [
        "name    score  why                                      n",
        "a       0.500  a reason longer than what shares a line  3",
        "longer  -      -                                        -",
    ]
    assert text(LINES, [["first"], ["second"]], width=30).splitlines() == [
        "name    score",
        "a       0.500",
        "    why: a reason longer than",
        "      what shares a line",
        "    n: 3",
        "    first",
        "longer  -",
        "    second",
    ]


def test_the_first_column_stands_whatever_its_width():
    assert text([{"name": "longer", "n": "3"}], width=5).splitlines()[:2] == ["name", "longer"]


def test_mean_and_spread():
    assert mean_and_spread([0.5]) == "0.500"
    assert mean_and_spread([1.0, 3.0], 1) == "2.0 ± 1.4"
