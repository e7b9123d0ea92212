"""Tables as Markdown and as text that fits the terminal."""

from rlhf_trl.evaluation.tables import (
    markdown,
    mean_and_spread,
    side_by_side,
    text,
    that_fit,
)

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


def test_a_later_column_may_fit_where_an_earlier_one_does_not():
    lines, left_out = that_fit(LINES, width=20)
    assert lines == [
        {"name": "a", "score": "0.500", "n": "3"},
        {"name": "longer", "score": "-", "n": "-"},
    ]
    assert left_out == ["why"]
    assert that_fit(LINES, width=57) == (LINES, [])  # 6 + 2 + 5 + 2 + 39 + 2 + 1 characters
    assert that_fit(LINES, width=56)[1] == ["n"]


def test_cells_wrap_where_columns_are_compared():
    lines = [
        {"": "right", "tiny": "0.5 ± 0.1", "outputs/my-long-name": "0.9 ± 0.1  (+0.4 ± 0.1)"},
        {"": "length", "tiny": "-", "outputs/my-long-name": "3.0 ± 0.0  (+1.0 ± 0.0)"},
    ]
    assert side_by_side(lines, width=42).splitlines() == [
        "        tiny       outputs/my-long-name",
        "right   0.5 ± 0.1  0.9 ± 0.1  (+0.4 ± 0.1)",
        "length  -          3.0 ± 0.0  (+1.0 ± 0.0)",
    ]
    assert side_by_side(lines, width=41).splitlines() == [
        "        tiny       outputs/my-",
        "                   long-name",
        "right   0.5 ± 0.1  0.9 ± 0.1",
        "                   (+0.4 ± 0.1)",
        "length  -          3.0 ± 0.0",
        "                   (+1.0 ± 0.0)",
    ]
    assert side_by_side(lines, width=24).splitlines() == [
        "        tiny",
        "right   0.5 ± 0.1",
        "length  -",
        "",
        "        outputs/my-",
        "        long-name",
        "right   0.9 ± 0.1",
        "        (+0.4 ± 0.1)",
        "length  3.0 ± 0.0",
        "        (+1.0 ± 0.0)",
    ]


def test_mean_and_spread():
    assert mean_and_spread([0.5]) == "0.500"
    assert mean_and_spread([1.0, 3.0], 1) == "2.0 ± 1.4"
