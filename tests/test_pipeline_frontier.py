"""What is said of reward over KL: every sentence on data that make it true, and that do not."""

import pytest
from pipeline_folder import COURSES, make_folder

from rlhf_trl.pipeline.frontier import (
    at_kl,
    change,
    over_optimization,
    penalty_against_stopping,
)
from rlhf_trl.pipeline.results import Answers, Point, Sample, read_results

PENALTY = COURSES["grpo_beta"]


def answers(*gold, proxy=0.0, kl=0.0):
    """One sample to each question, with its gold."""
    samples = [[Sample("text", True, 1, proxy, value, kl, kl)] for value in gold]
    return Answers(["question"] * len(gold), [None] * len(gold), samples)


def said(tmp_path, courses, seeds=3):
    results = read_results(make_folder(tmp_path / "out", courses, seeds))
    return over_optimization(results), penalty_against_stopping(results)


def test_a_change_is_one_of_more_than_two_standard_errors():
    """Differences 1, 1, 1, 0: mean .75, error .25, so 3 errors; 1, 1, 0, 0: .5 and .289, 1.7."""
    assert change(answers(0, 0, 0, 0), answers(1, 1, 1, 0), "gold") == 1
    assert change(answers(1, 1, 1, 0), answers(0, 0, 0, 0), "gold") == -1
    assert change(answers(0, 0, 0, 0), answers(1, 1, 0, 0), "gold") == 0
    assert change(answers(0, 0, 0, None), answers(1, 1, 1, 1), "gold") == 1  # of three, no error
    assert change(answers(None, 0), answers(1, 1), "gold") == 0  # of one, nothing is known


def test_over_optimization_is_told_with_its_numbers(tmp_path):
    (sentence,), _ = said(tmp_path, {"grpo": COURSES["grpo"]})
    assert sentence == (
        "GRPO: gold peaks at KL 0.60 (0.50) and ends at 0.00 (KL 23.83), below the reference's "
        "0.30, while the proxy rises from 0.99 at the peak to 4.28 (the reference has -1.01), in 3 "
        "of 3 seeds: over-optimization."
    )


def test_no_over_optimization_is_told_where_gold_does_not_fall(tmp_path):
    course = [(10, 0.9, 0.6, 1.1), (20, 1.0, 0.75, 2.5), (60, 1.3, 0.85, 3.5)]
    (sentence,), _ = said(tmp_path, {"grpo": course})
    assert sentence.startswith("GRPO: gold ends at 0.8")
    assert "above the reference's 0.30 and not clearly below its highest" in sentence
    assert sentence.endswith(
        "while the proxy rises (from -1.01 to 3.46), in 3 of 3 seeds: no over-optimization up to "
        "there."
    )


def test_a_fall_of_gold_with_the_proxy_is_no_over_optimization(tmp_path):
    course = [(10, 0.6, 0.7, 2.0), (20, 3.0, 0.4, 1.0), (60, 9.0, 0.05, -3.0)]
    (sentence,), _ = said(tmp_path, {"grpo": course})
    assert "the proxy falls from 1.9" in sentence or "the proxy falls from 2.0" in sentence
    assert sentence.endswith(
        "no over-optimization, since the proxy does not rise while gold falls."
    )


def test_seeds_that_differ_are_counted_apart(tmp_path):
    good = [(10, 0.9, 0.6, 1.1), (60, 1.3, 0.85, 3.5)]
    sentences, _ = said(tmp_path, lambda seed: {"grpo": good if seed == 1 else COURSES["grpo"]})
    assert len(sentences) == 2
    assert sentences[0].endswith("in 2 of 3 seeds: over-optimization.")
    assert sentences[1].endswith("in 1 of 3 seeds: no over-optimization up to there.")


def test_nothing_is_said_without_gold_or_checkpoints(tmp_path):
    for name, options in {"a": {"gold": None}, "b": {"checkpoints": False}}.items():
        results = read_results(make_folder(tmp_path / name, seeds=1, **options))
        assert over_optimization(results) == penalty_against_stopping(results) == []


def test_numbers_between_checkpoints_lie_on_a_line():
    kls, golds = (0.0, 1.0, 4.0, 2.0), (0.2, 0.6, 0.0, 0.5)
    points = [Point(n, answers(golds[n], kl=kls[n])) for n in range(4)]
    assert at_kl(points, 0.25, "gold") == pytest.approx(0.3)
    assert at_kl(points, 3.0, "gold") == pytest.approx(0.2)  # where it is first reached
    assert at_kl(points, 4.0, "gold") == 0
    assert at_kl(points, 4.1, "gold") is None
    assert at_kl(points[:1], 0.0, "gold") is None
    equal = [Point(n, answers(golds[n], kl=1.0)) for n in range(2)]
    assert at_kl(equal, 1.0, "gold") == pytest.approx(0.2)


def test_a_penalty_that_beats_early_stopping(tmp_path):
    _, (sentence,) = said(tmp_path, {"grpo": COURSES["grpo"], "grpo_beta": PENALTY})
    assert sentence.startswith("GRPO, penalty (beta 0.3) ends at KL 1.29 with proxy 2.37 and gold")
    # the line from (.6, 1.0) to (3.7, 2.0) at 1.29, and that from .5 to .35
    assert "; GRPO, stopped at that KL, has 1.21 and 0.47 (differences 1.1" in sentence
    assert sentence.endswith(
        "the penalty beats early stopping on both in 3 of 3 seeds, on the proxy in 3, on gold in 3."
    )


def test_a_penalty_that_does_not(tmp_path):
    courses = {"grpo": COURSES["grpo"], "grpo_beta": [(60, 1.3, 0.1, 2.4)]}
    _, (sentence,) = said(tmp_path, courses)
    assert sentence.endswith("on both in 0 of 3 seeds, on the proxy in 3, on gold in 0.")


def test_a_penalty_beyond_the_curve_is_not_compared(tmp_path):
    courses = {"grpo": COURSES["grpo"], "grpo_beta": [(60, 60.0, 0.1, 2.4)]}
    _, (sentence,) = said(tmp_path, courses)
    assert sentence == (
        "GRPO, penalty (beta 0.3): GRPO never has its KL, so they cannot be compared."
    )
    far_in_one = lambda seed: courses if seed == 0 else {**courses, "grpo_beta": PENALTY}  # noqa: E731
    _, (sentence,) = said(tmp_path / "other", far_in_one)
    assert sentence.endswith(
        "in 2 of 2 seeds, on the proxy in 2, on gold in 2; in 1 it never has that KL."
    )


def test_what_else_differs_from_the_run_without_penalty_is_told(tmp_path):
    folder = make_folder(tmp_path / "out")
    config = folder / "grpo_beta" / "seed-0" / "config.yaml"
    config.write_text(config.read_text().replace("0.0001", "0.001"))
    (sentence,) = penalty_against_stopping(read_results(folder))
    assert sentence.endswith("on gold in 3; they differ in learning_rate, too.")


def test_a_run_on_another_reward_model_is_not_compared(tmp_path):
    folder = make_folder(tmp_path / "out")
    config = folder / "grpo_beta" / "seed-0" / "config.yaml"
    config.write_text(config.read_text().replace("/rm/", "/another/"))
    assert penalty_against_stopping(read_results(folder)) == []
