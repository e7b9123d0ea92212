"""Sampling in which every answer has random numbers of its own, whatever else is in its batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from typing_extensions import override


class OwnDraws(LogitsProcessor):
    """Leave only the token that an answer's own random number draws, for `generate` to take.

    `torch.multinomial` gives the sequences of a batch numbers of one stream, so that an answer
    depends on how many others are beside it. Here it depends on its seed and on its prompt alone.
    """

    def __init__(self, seeds: Sequence[Sequence[int]], max_new_tokens: int):
        """Take the seed of each sequence of the batch, one or more numbers of at least 0."""
        numbers = [np.random.default_rng(seed).random(max_new_tokens) for seed in seeds]
        self._steps = iter(torch.tensor(np.stack(numbers, axis=1)))  # (B,) for each token, in [0,1)

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits (B, V), -inf but for the tokens that are drawn."""
        numbers = next(self._steps).to(scores.device).unsqueeze(1)
        # float64: in float32, the sums over a large vocabulary would lose its unlikely tokens
        cumulative = scores.double().softmax(-1).cumsum(-1)
        # the last sum is 1 but for rounding; the first that exceeds the number is its token's
        tokens = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
