"""The figure and the table of a reward model's run: which panels, and the numbers in them."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from rlhf_trl.errors import InputError
from rlhf_trl.reward_models.report import draw_reward_report

PAIRS = ([3.0, 0.0, 1.0], [1.0, 1.0, 1.0])
RIGHT, GROUPS = [True, False, False, True, True, False], [0, 0, 1, 1, 2, 2]
CANDIDATES = ([5.0, 1.0, 2.0, -1.0, 3.0, 1.0], RIGHT, GROUPS)
PROBABILITIES = ([0.75, 0.25, 0.35, 1.0, 0.65, 0.15], RIGHT, GROUPS)
# the second trace's first error is found one step late, the last trace has none
STEPS = (
    [[0.9, 0.2], [0.8, 0.6, 0.1], [0.95], [0.7, 0.4]],
    [[1, -1], [1, 1, -1], [1], [1, -1]],
    [[1, -1], [1, -1, -1], [1], [1, 1]],
)


@pytest.fixture
def panels(monkeypatch, tmp_path):
    """Draw a report; return its panels by title."""
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))

    def panels(**data):
        draw_reward_report(tmp_path / "report.png", "orm (chapter)", **data)
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
        assert [p.name for p in tmp_path.iterdir()] == ["report.png"]
        assert drawn[-1].get_suptitle() == "orm (chapter)"
        return {axis.get_title(): axis for axis in drawn[-1].axes if axis.axison}

    return panels


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def heights(axis):
    return [[bar.get_height() for bar in bars] for bars in axis.containers]


def test_pairs_have_two_panels(panels):
    found = panels(pairs=PAIRS)
    # sigmoid of 2, -1 and 0: two off by .119 and .731, a tie that is not
    assert list(found) == ["reward by class", f"calibration (error {(0.1192 + 0.7311) / 3:.3f})"]
    assert legend(found["reward by class"]) == ["chosen (3)", "rejected (3)"]


def test_candidates_stand_between_random_and_oracle(panels):
    found = panels(candidates=CANDIDATES)
    assert list(found) == ["score by class", "best of n"]
    assert legend(found["score by class"]) == ["right (3)", "wrong (3)"]
    shares = heights(found["score by class"])
    assert [sum(side) for side in shares] == pytest.approx([1, 1])
    ends = [side[k] for side in shares for k in (0, -1)]
    assert ends == pytest.approx([1 / 3, 1 / 3, 0, 0])  # both -1 and 5 are right
    curves = {line.get_label(): list(line.get_ydata()) for line in found["best of n"].lines}
    assert curves == {"oracle": [0.5, 1], "this model": [0.5, 2 / 3], "random": [0.5, 0.5]}


def test_scores_between_0_and_1_are_probabilities(panels):
    off = [0.25, 0.25, 0.35, 0, 0.35, 0.15]
    found = panels(candidates=PROBABILITIES)
    assert list(found)[1] == f"calibration (error {sum(off) / 6:.3f})"


def test_what_piles_up_at_an_end_is_said(panels):
    low, spread = [-8.0] * 6, [-5.0, 0.0, 3.0, 7.0]
    axis = panels(pairs=(spread + spread + [-2.0, 2.0], low + spread))["reward by class"]
    assert [text.get_text() for text in axis.texts] == ["60% of rejected:\n-8.00 to -7.50"]


def test_steps_have_their_classes_and_their_first_errors(panels):
    found = panels(steps=STEPS)
    confusion, first = found["classes of steps"], found["first error (0.500 found)"]
    assert len(found) == 4
    assert legend(found["probability of good by class"]) == ["bad (3)", "good (5)"]
    off = [2 * 0.075, 0.2, 0.2, 0.6, 0.1, 0.3, 0.6]  # .9 and .95 share a bin
    assert list(found)[1] == f"calibration (error {sum(off) / 8:.3f})"
    assert [t.get_text() for t in confusion.get_xticklabels()] == ["bad", "good"]
    numbers = [text.get_text() for text in confusion.texts]
    assert numbers == ["0.67\n(2)", "0.33\n(1)", "0.20\n(1)", "0.80\n(4)"]
    assert heights(first) == [[0, 2, 2], [0, 1, 1]]  # traces, found
    assert [t.get_text() for t in first.get_xticklabels()] == ["1", "2", "none"]


def test_all_at_once_stays_readable(panels):
    assert len(panels(pairs=PAIRS, candidates=PROBABILITIES)) == 5  # the sixth place is blank
    found = panels(candidates=PROBABILITIES, steps=STEPS)
    assert len(found) == 6 and legend(found["score by class"]) == ["right (3)", "wrong (3)"]
    long = [[0.9] * 40], [[1] * 40], [[1] * 39 + [-1]]
    first = panels(steps=long)["first error (0.000 found)"]
    names = [t.get_text() for t in first.get_xticklabels()]
    assert len(names) <= 14 and names[0] == "1" and names[-1] == "none"


def test_a_single_class_is_drawn_alone(panels):
    found = panels(candidates=([5.0, 1.0], [False, False], [0, 0]))
    assert legend(found["score by class"]) == ["wrong (2)"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "there are no scores to draw"),
        ({"pairs": ([], []), "candidates": ([], [], [])}, "there are no scores to draw"),
        ({"pairs": ([1.0], [math.nan])}, "rejected: number 0 of 1 is nan"),
        ({"candidates": ([1.0, np.inf], [True, False], [0, 0])}, "scores: number 1 of 2 is inf"),
    ],
)
def test_what_cannot_be_drawn_leaves_no_file(tmp_path, data, sentence):
    with pytest.raises(InputError, match=sentence.replace("[", r"\[")):
        draw_reward_report(tmp_path / "report.png", "orm", **data)
    assert not list(tmp_path.iterdir())


def test_coverage_counts_whole_answers(panels):
    found = panels(candidates=([0.9, 0.1, 0.8, 0.3], [1, 0, 1, 0], [0, 0, 1, 1]), selecting=True)
    (axis,) = [axis for title, axis in found.items() if title.startswith("coverage")]
    assert all(n == int(n) for n in axis.get_xticks())
