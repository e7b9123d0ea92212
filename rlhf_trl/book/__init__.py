"""The equations of the book as pure functions: tensors in, tensors out, nothing else."""

from rlhf_trl.book import (
    advantages,
    aggregation,
    distillation,
    kl,
    preference,
    reward_models,
    rewards,
    surrogates,
    value,
)
