"""Sampling in which every answer has random numbers of its own, whatever else is in its batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor
from typing_extensions import override


class OwnDraws(LogitsProcessor):
    """Let each answer draw its next token with random numbers of its own.

    All other tokens get a logit of -inf, so that `generate` takes the drawn one. By itself it would
    call `torch.multinomial`, whose one stream of numbers serves the whole batch, so that an answer
    depends on how many others are beside it. Here it depends on its seed and its prompt alone.
    """

    def __init__(self, seeds: Sequence[Sequence[int]], max_new_tokens: int):
        """Take the seed of each sequence of the batch, one or more numbers of at least 0."""
        numbers = [np.random.default_rng(seed).random(max_new_tokens) for seed in seeds]
        self._steps = iter(torch.tensor(np.stack(numbers, axis=1)))  # (B,) for each token, in [0,1)

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits (B, V): 0 for each row's drawn token, -inf for all others."""
        numbers = next(self._steps).to(scores.device).unsqueeze(1)
        # float64: in float32, the sums over a large vocabulary would lose its unlikely tokens
        cumulative = scores.double().softmax(-1).cumsum(-1)
        # the drawn token is the first whose cumulative probability exceeds the random number; the
        # last sum, which rounding may leave beside 1, scales the number
        tokens = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
