"""Draws with random numbers of one's own: their distribution, and what they do not depend on."""

import numpy as np
import torch

from rlhf_trl.rollouts import own_draws
from rlhf_trl.rollouts.own_draws import OwnDraws


def drawn(draws, logits):
    return draws(torch.empty(0), logits).argmax(-1).tolist()


def test_tokens_are_drawn_as_often_as_they_are_likely(monkeypatch):
    """With numbers .05, .15, ... in place of random ones, the counts are exact."""
    grid = iter(np.arange(0.05, 1, 0.1))

    class Grid:
        def __init__(self, seed):
            self.number = next(grid)

        def random(self, count):
            return np.full(count, self.number)

    monkeypatch.setattr(own_draws.np.random, "default_rng", Grid)
    draws = OwnDraws([(n,) for n in range(10)], 2)
    logits = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().repeat(10, 1)  # the second is impossible
    assert drawn(draws, logits) == [0] * 5 + [2] * 3 + [3] * 2
    assert drawn(draws, logits.flip(1)) == [0] * 2 + [1] * 3 + [3] * 5


def test_random_ones_follow_the_logits_too():
    logits = torch.tensor([[1.0, -1.0, 0.0, 2.0]])
    draws = OwnDraws([(7, place, 1) for place in range(4000)], 1)
    tokens = drawn(draws, logits.expand(4000, 4))
    shares = torch.bincount(torch.tensor(tokens)) / 4000
    # four standard errors of a share of one half are .03
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.03)


def test_a_sequence_draws_the_same_in_any_batch_and_another_with_another_seed():
    torch.manual_seed(0)
    logits = torch.randn(6, 3, 50)  # of six steps
    seeds = [(3, 0, 1), (3, 1, 1), (3, 0, 2)]
    together = OwnDraws(seeds, 6)
    beside = [drawn(together, step) for step in logits]
    for row, seed in enumerate(seeds):
        alone = OwnDraws([seed], 6)
        assert [drawn(alone, step[row : row + 1])[0] for step in logits] == [
            tokens[row] for tokens in beside
        ]
    same_logits = [OwnDraws([seed], 6) for seed in seeds]
    answers = {tuple(drawn(one, step[:1])[0] for step in logits) for one in same_logits}
    assert len(answers) == 3


def test_the_unlikely_tokens_of_a_large_vocabulary_are_not_lost():
    """Two thirds of 2^20 tokens share a millionth, of which float32 sums would make steps."""
    count = 2**20
    logits = torch.zeros(1, count)
    logits[:, count // 3 :] = -float(np.log(1e6 * 2))
    likely = logits[0].double().softmax(-1)[: count // 3].sum().item()
    for number in (likely + (1 - likely) * 0.25, likely + (1 - likely) * 0.75):
        draws = OwnDraws([(0,)], 1)
        draws._steps = iter([torch.tensor([number], dtype=torch.float64)])
        share = (number - likely) / (1 - likely)
        token = count // 3 + share * (count - count // 3)
        assert abs(drawn(draws, logits)[0] - token) < 50
