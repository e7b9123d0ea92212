"""Selections of rejection sampling, worked out by hand."""

import pytest
import torch

from rlhf_trl import random_k_overall, random_per_prompt, top_k_overall, top_per_prompt
from rlhf_trl.errors import InputError

# chapter 9, eq:rs_example_matrix; places from 0
CHAPTER = [
    [0.7, 0.3, 0.5, 0.2],
    [0.4, 0.8, 0.6, 0.5],
    [0.9, 0.3, 0.4, 0.7],
    [0.2, 0.5, 0.8, 0.6],
    [0.5, 0.4, 0.3, 0.6],
]
RIGHT = [[0, 1, 1], [0, 0, 0], [1, 0, 1], [1, 1, 1]]  # a verifier's


@pytest.mark.parametrize("rewards", [CHAPTER, torch.tensor(CHAPTER)])
def test_the_chapters_example(rewards):
    assert top_per_prompt(rewards) == [(0, 0), (1, 1), (2, 0), (3, 2), (4, 3)]
    # .9, then .8 twice, then .7 twice: the chapter's order is that of the data
    first = top_k_overall(rewards, 5, ties="first")
    assert first == [(2, 0), (1, 1), (3, 2), (0, 0), (2, 3)]
    assert set(top_k_overall(rewards, 5)) == set(first)


def test_equal_rewards_are_told_apart_by_the_seed_or_by_their_place():
    assert top_per_prompt(RIGHT, ties="first") == [(0, 1), (1, 0), (2, 0), (3, 0)]
    assert top_k_overall(RIGHT, 4, ties="first") == [(0, 1), (0, 2), (2, 0), (2, 2)]
    right = {(i, j) for i, row in enumerate(RIGHT) for j, reward in enumerate(row) if reward}
    seen = set()
    for seed in range(50):
        chosen = top_k_overall(RIGHT, 4, seed)
        assert chosen == top_k_overall(RIGHT, 4, seed)
        assert len({*chosen}) == 4 and {*chosen} <= right
        seen |= {*chosen}
        each = top_per_prompt(RIGHT, seed)
        assert [i for i, _ in each] == [0, 1, 2, 3]
        assert all(RIGHT[i][j] == max(RIGHT[i]) for i, j in each)
    assert seen == right  # every right answer has its chance
    assert {top_per_prompt(RIGHT, seed)[1][1] for seed in range(50)} == {0, 1, 2}


def test_the_controls_take_as_many_whatever_the_rewards():
    for seed in range(20):
        each, overall = random_per_prompt(RIGHT, seed), random_k_overall(RIGHT, 5, seed)
        assert [i for i, _ in each] == [0, 1, 2, 3] and {j for _, j in each} <= {0, 1, 2}
        assert len({*overall}) == 5
        zeros = [[0.0] * 3] * 4
        assert (each, overall) == (random_per_prompt(zeros, seed), random_k_overall(zeros, 5, seed))
    assert len(random_k_overall(RIGHT, 99)) == len(top_k_overall(RIGHT, 99)) == 12


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: top_per_prompt([[1, 2], [1]]), "rewards must have shape (M, N)"),
        (lambda: top_per_prompt(torch.ones(3)), "rewards must have shape (M, N)"),
        (lambda: top_per_prompt([]), "rewards must have shape (M, N)"),
        (lambda: random_per_prompt([[], []]), "at least one for each prompt"),
        (lambda: top_k_overall([[float("nan")]], 1), "rewards must be finite"),
        (lambda: top_k_overall([[1.0]], 0), "k must be a whole number of 1 or more, not 0"),
        (lambda: random_k_overall([[1.0]], True), "k must be a whole number"),
        (lambda: top_per_prompt([[1.0]], ties="last"), "ties must be random or first, not 'last'"),
    ],
)
def test_what_is_no_selection_is_said_in_one_sentence(call, sentence):
    with pytest.raises(InputError) as error:
        call()
    assert sentence in str(error.value) and "\n" not in str(error.value)
