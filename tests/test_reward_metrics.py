"""What scores are worth: hand-worked numbers, and enumeration where there are too many."""

import json
import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import pytest
import torch

from rlhf_trl.errors import InputError
from rlhf_trl.reward_models.metrics import (
    budgets,
    calibration,
    coverage,
    majority_by_budget,
    pair_metrics,
    prompt_groups,
    ranking_by_budget,
    ranking_metrics,
    step_metrics,
)

# Three prompts, mixed up: one with both kinds and a tie, one all wrong, one all right.
SCORES = [0.5, 2.0, 1.0, 2.0, -1.0, 3.0, 0.0, 7.0]
LABELS = [False, True, True, False, False, False, True, True]
GROUPS = [7, 7, 7, 7, 2, 2, 4, 4]


def candidates(seed, prompts=6, size=6, levels=4):
    """Random candidates with many ties, and prompts that are all right or all wrong."""
    random = np.random.default_rng(seed)
    labels = random.random((prompts, size)) < np.linspace(0, 1, prompts)[:, None]
    groups = np.repeat(np.arange(prompts), size)
    order = random.permutation(prompts * size)
    scores = random.integers(0, levels, prompts * size).astype(float)
    return scores[order], labels.ravel()[order], groups[order]


def test_pair_metrics_by_hand():
    # differences 2, -1, 0, 3
    found = pair_metrics([3.0, 0.0, 1.0, 5.0], [1.0, 1.0, 1.0, 2.0])
    assert found["pair_accuracy"] == (1 + 0 + 0.5 + 1) / 4
    assert found["margin"] == 1.0
    assert found["chosen_mean"] == 2.25 and found["rejected_mean"] == 1.25
    # sigmoid: 2 -> .8808, -1 -> .2689, 3 -> .9526; with both orders each of these six stands alone
    # in its bin and is off by its own (or 1 minus its own) value; the tie is off by 0 twice.
    off = [1 - 0.880797, 1 - 0.268941, 1 - 0.952574]
    assert found["calibration_error"] == pytest.approx(2 * sum(off) / 8, abs=1e-6)


def test_calibrated_rewards_have_no_calibration_error():
    # a difference of log 3 says .75, and three of four pairs are ordered that way
    gap = math.log(3)
    found = pair_metrics([gap, gap, gap, 0.0], [0.0, 0.0, 0.0, gap])
    assert found["pair_accuracy"] == 0.75
    assert found["calibration_error"] == pytest.approx(0, abs=1e-12)
    # twice as sure is wrong by .9 - .75 on either side
    found = pair_metrics([2 * gap, 2 * gap, 2 * gap, 0.0], [0.0, 0.0, 0.0, 2 * gap])
    assert found["calibration_error"] == pytest.approx(0.15, abs=1e-12)


def test_pair_metrics_ignore_a_common_shift_and_survive_extremes():
    random = np.random.default_rng(0)
    chosen, rejected = random.normal(size=(2, 50))
    plain, shifted = pair_metrics(chosen, rejected), pair_metrics(chosen + 5, rejected + 5)
    for key in ("pair_accuracy", "margin", "calibration_error"):
        assert shifted[key] == pytest.approx(plain[key], abs=1e-9)
    assert pair_metrics([1e6, -1e6], [-1e6, 1e6])["calibration_error"] == 0.5


def test_tensors_of_any_dtype_are_read():
    chosen = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    assert pair_metrics(chosen, torch.tensor([0.0, 3.0]))["pair_accuracy"] == 0.5
    found = ranking_metrics(torch.tensor(SCORES), torch.tensor(LABELS), torch.tensor(GROUPS))
    assert found == ranking_metrics(SCORES, LABELS, GROUPS)
    assert budgets(torch.tensor([3, 5, 3, 3, 5, 3, 5, 5])) == [1, 2, 4]
    assert budgets([3, 5, 3, 3, 5, 3, 5]) == [1, 2] and budgets([]) == []


def test_calibration_by_hand():
    confidence, outcome, counts, error = calibration(
        [0.05, 0.0, 0.62, 0.68, 0.92, 1.0], [True, False, True, False, True, True]
    )
    assert np.allclose(confidence, [0.025, 0.65, 0.96])
    assert np.allclose(outcome, [0.5, 0.5, 1.0]) and counts.tolist() == [2, 2, 2]
    assert error == pytest.approx((2 * 0.475 + 2 * 0.15 + 2 * 0.04) / 6)
    assert calibration([0.2, 0.7], [False, True], bins=1)[3] == pytest.approx(0.05)


def test_ranking_metrics_by_hand():
    found = ranking_metrics(SCORES, LABELS, GROUPS)
    # right 2 1 0 7 against wrong .5 2 -1 3: wins 2.5 + 2 + 1 + 4 of 16
    assert found["auc"] == 9.5 / 16
    # prompt 7 alone has both: right 2 and 1 against wrong .5 and 2: .5 + 1 + 1 + 0 of 4
    assert found["pairwise_accuracy"] == 2.5 / 4
    assert found["top1_accuracy"] == 0.5
    assert found["best_of_n"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["random_of_n"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert found["oracle_of_n"] == pytest.approx(2 / 3)
    assert found["right_mean"] == 2.5 and found["wrong_mean"] == 1.125


@pytest.mark.parametrize("seed", range(3))
def test_ranking_metrics_are_the_double_loop(seed):
    scores, labels, groups = candidates(seed)
    rows = list(zip(scores, labels, groups, strict=True))

    def auc(rows):
        right, wrong = ([s for s, y, _ in rows if y == side] for side in (True, False))
        wins = [(r > w) + (r == w) / 2 for r in right for w in wrong]
        return sum(wins) / len(wins)

    found = ranking_metrics(scores, labels, groups)
    assert found["auc"] == pytest.approx(auc(rows), abs=1e-12)
    by_prompt = [[row for row in rows if row[2] == g] for g in sorted(set(groups))]
    mixed = [rows for rows in by_prompt if len({y for _, y, _ in rows}) == 2]
    assert 0 < len(mixed) < len(by_prompt)
    assert found["pairwise_accuracy"] == pytest.approx(np.mean([auc(rows) for rows in mixed]))
    share = [np.mean([y for s, y, _ in rows if s == max(rows)[0]]) for rows in mixed]
    assert found["top1_accuracy"] == pytest.approx(np.mean(share))


def test_ranks_alone_matter():
    scores, labels, groups = candidates(1)
    plain, mapped = (ranking_metrics(s, labels, groups) for s in (scores, np.exp(scores) - 9))
    for key in ("auc", "pairwise_accuracy", "top1_accuracy", "best_of_n"):
        assert mapped[key] == plain[key]
    turned = ranking_metrics(-scores, labels, groups)
    assert turned["auc"] == pytest.approx(1 - plain["auc"])
    assert turned["pairwise_accuracy"] == pytest.approx(1 - plain["pairwise_accuracy"])


@pytest.mark.parametrize("seed", range(3))
def test_best_of_n_is_the_mean_over_all_subsets(seed):
    scores, labels, groups = candidates(seed)
    found = ranking_by_budget(scores, labels, groups, (1, 2, 4, 6))
    for n in (1, 2, 4, 6):
        expected = []
        for group in set(groups):
            chosen = []
            for subset in combinations(np.flatnonzero(groups == group), n):
                best = max(scores[i] for i in subset)
                tied = [bool(labels[i]) for i in subset if scores[i] == best]
                chosen.append(Fraction(sum(tied), len(tied)))
            expected.append(sum(chosen) / len(chosen))
        assert found[n] == pytest.approx(float(sum(expected) / len(expected)), abs=1e-12)
    metrics = ranking_metrics(scores, labels, groups)
    assert found[6] == pytest.approx(metrics["best_of_n"])
    assert found[1] == pytest.approx(metrics["random_of_n"])


def test_best_of_n_has_its_two_bounds_in_it():
    scores, labels, groups = candidates(2)
    oracle = ranking_by_budget(labels, labels, groups, (1, 2, 6))
    assert oracle[6] == ranking_metrics(scores, labels, groups)["oracle_of_n"]
    constant = ranking_by_budget(np.zeros(len(labels)), labels, groups, (1, 2, 6))
    assert constant[1] == pytest.approx(constant[2]) == pytest.approx(constant[6])
    # one right of four: two draws miss it with probability 3/4 2/3
    assert ranking_by_budget([0, 0, 1, 0], [0, 0, 1, 0], [1] * 4, (2,)) == {2: 0.5}
    # sizes that not every prompt has are left out
    assert list(ranking_by_budget(SCORES, LABELS, GROUPS)) == [1, 2]


def test_majority_by_hand():
    answers = ["a", "a", "b", None]
    labels = [False, False, True, True]  # what has no answer is never right
    found = majority_by_budget(answers, labels, [0] * 4, (1, 2, 3, 4))
    assert found[1] == 1 / 4
    # a a: 0; a b: 1/2, twice; a none: 0, twice; b none: 1/2
    assert found[2] == pytest.approx(1.5 / 6)
    # a a b: 0; a a none: 0; a b none, twice: 1/3
    assert found[3] == pytest.approx((2 / 3) / 4)
    assert found[4] == 0
    assert majority_by_budget([None, None], [True, True], [0, 0], (1, 2)) == {1: 0, 2: 0}
    # two without an answer do not outvote one answer together
    assert majority_by_budget([None, None, "a"], [0, 0, 1], [0] * 3, (3,)) == {3: 1 / 3}


def test_majority_over_draws_is_near_the_enumeration_and_repeats():
    random = np.random.default_rng(3)
    answers = [str(a) for a in random.integers(0, 3, 20)]
    labels = [a == "1" for a in answers]
    groups = [0] * 10 + [1] * 10
    exact = []
    for group in (range(10), range(10, 20)):
        shares = []
        for subset in combinations(group, 4):
            votes = Counter(answers[i] for i in subset)
            tied = [a for a, n in votes.items() if n == max(votes.values())]
            shares.append(tied.count("1") / len(tied))
        exact.append(sum(shares) / len(shares))
    whole = majority_by_budget(answers, labels, groups, (4,))[4]
    assert whole == pytest.approx(np.mean(exact), abs=1e-12)  # 210 subsets
    drawn = majority_by_budget(answers, labels, groups, (4,), draws=200)[4]
    assert drawn != whole and drawn == pytest.approx(whole, abs=0.1)
    assert drawn == majority_by_budget(answers, labels, groups, (4,), draws=200)[4]
    assert drawn != majority_by_budget(answers, labels, groups, (4,), draws=200, seed=1)[4]


def test_step_metrics_by_hand():
    labels = [[1, 1, -1], [1, 0], [1, -1, -1], [1, 1], []]
    predicted = [[1, 1, -1], [1, 1], [-1, -1, 1], [1, 1], []]
    found = step_metrics(predicted, labels)
    assert found["step_accuracy"] == (3 + 1 + 1 + 2) / 10
    assert found["step_majority"] == 0.6
    assert found["recall_bad"] == 2 / 3
    assert found["recall_neutral"] == 0 and found["recall_good"] == 5 / 6
    # the third trace is bad from step 1, not 0; the second and the fourth have none
    assert found["first_error"] == 3 / 4 and found["first_error_trivial"] == 2 / 4


def test_the_best_constant_guess_may_be_a_step():
    labels = [[-1, 1], [-1, -1], [-1, 1], [1, -1], [1, 1]]
    found = step_metrics(labels, labels)
    assert found["first_error_trivial"] == 3 / 5
    assert found["first_error"] == found["step_accuracy"] == 1
    assert "recall_neutral" not in found  # the binary form has none
    assert found["recall_bad"] == found["recall_good"] == 1
    blind = step_metrics([[1]] * 4, [[1], [1], [-1], [-1]])
    assert blind["first_error"] == blind["first_error_trivial"] == 0.5


def test_what_is_not_defined_is_left_out():
    assert pair_metrics([], []) == {} == ranking_metrics([], [], []) == step_metrics([], [])
    assert step_metrics([[]], [[]]) == {}
    assert ranking_by_budget([], [], []) == {} == majority_by_budget([], [], [])
    right = ranking_metrics([1.0, 2.0], [True, True], [0, 0])
    assert right == {"best_of_n": 1, "random_of_n": 1, "oracle_of_n": 1, "right_mean": 1.5}
    apart = ranking_metrics([1.0, 2.0], [True, False], [0, 1])  # no prompt has both
    assert apart["auc"] == 0 and "pairwise_accuracy" not in apart and "top1_accuracy" not in apart
    assert "recall_bad" not in step_metrics([[1, -1]], [[1, 1]])
    every = [right, apart, pair_metrics([1.0], [2.0]), step_metrics([[0]], [[1]])]
    for found in every:
        json.dumps(found, allow_nan=False)
        assert all(type(value) is float for value in found.values())


def test_prompts_are_told_apart_by_their_text():
    chat = [{"role": "user", "content": "x"}]
    assert prompt_groups(["x", "y", "x", chat, list(chat)]) == [0, 1, 0, 2, 2]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: pair_metrics([1.0, math.nan], [0.0, 0.0]), "chosen: number 1 of 2 is nan"),
        (lambda: pair_metrics([1.0], [0.0, 0.0]), "chosen: 1, rejected: 2"),
        (lambda: pair_metrics([[1.0]], [[0.0]]), "the shape (1, 1)"),
        (lambda: ranking_metrics([math.inf], [True], [0]), "scores: number 0 of 1 is inf"),
        (lambda: ranking_metrics([1.0], [2], [0]), "labels hold 2; write true or false"),
        (lambda: ranking_metrics([1.0], [True], [0, 0]), "groups: 2"),
        (lambda: ranking_by_budget([1.0], [True], [0], [0]), "needs n of 1 or more"),
        (lambda: majority_by_budget(["a"], [True, False], [0, 0]), "labels: 2"),
        (lambda: calibration([], []), "there are no probabilities"),
        (lambda: calibration([1.5], [True]), "pass the sigmoid"),
        (lambda: step_metrics([[1]], [[1], [1]]), "predicted: 1, labels: 2"),
        (lambda: step_metrics([[1]], [[1, 1]]), "labels of trace 0: 2"),
        (lambda: step_metrics([[1], [2]], [[1], [1]]), "predicted of trace 1 are [2]; write -1, 0"),
        (lambda: step_metrics([[True]], [[1]]), "predicted of trace 0 are [True]"),
    ],
)
def test_bad_input_is_one_sentence(call, sentence):
    with pytest.raises(InputError) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_coverage_by_hand_and_over_all_orders_of_ties():
    # of 3, 2, 2, 1 the right ones are a 2 and the 1: the best is wrong, the second right in half
    assert coverage([3, 2, 2, 1], [0, 1, 0, 1], [0] * 4) == {1: 0.0, 2: 0.5, 3: 1.0, 4: 1.0}
    # one right among four of equal scores: n / 4
    assert coverage([0] * 4, [0, 0, 1, 0], [0] * 4) == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    scores, labels, groups = candidates(3, prompts=4, size=5, levels=3)
    found = coverage(scores, labels, groups)
    for n in range(1, 6):
        shares = []
        for prompt in sorted({*groups}):
            mine = [i for i, group in enumerate(groups) if group == prompt]
            orders = [sorted(order, key=lambda i: -scores[i])[:n] for order in permutations(mine)]
            shares.append(np.mean([any(labels[i] for i in best) for best in orders]))
        assert found[n] == pytest.approx(np.mean(shares))
    assert coverage([], [], []) == {}
