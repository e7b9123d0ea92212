"""A PPO trainer on fixed completions, its value model away from its start at 0."""

import torch
from datasets import Dataset
from policy_gradient_cases import (
    LIMIT,
    WEIGHTS,
    WORDS,
    checkpoint,
    completion,
    drift,
    right,
    shaped,
)

from rlhf_trl.compare.models import trainer_fields
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.ppo import BookPPOConfig, BookPPOTrainer


def build(
    *,
    formulation="chapter",
    model=None,
    answer=completion,
    peft_config=None,
    optimizers=(None, None),
    **config,
):
    """A trainer on fifty prompts with two rewards; both models drifted from where they started."""
    defaults = {
        **trainer_fields(),
        "formulation": formulation,
        "num_generations": 1,
        "per_device_train_batch_size": 8,
        "max_completion_length": LIMIT,
        "reward_weights": list(WEIGHTS),
    }
    words = [first + second for first in WORDS for second in WORDS[:5]]
    rows = [{"prompt": [{"role": "user", "content": word}], "word": word} for word in words]
    trainer = BookPPOTrainer(
        model=model or checkpoint(),
        reward_funcs=[right, shaped],
        args=BookPPOConfig(**{**defaults, **config}),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        peft_config=peft_config,
        optimizers=optimizers,
    )
    if answer is not None:
        fix_completions(trainer, answer)
    return trainer


def unsettle(trainer, scale=0.05, seed=99):
    """Move policy and value model, as optimizer steps would."""
    drift(trainer.model, scale, seed)
    weight = score(trainer)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        weight += 0.1 * torch.randn(weight.shape, generator=generator)


def score(trainer):
    """The weight that turns a hidden state into a value."""
    value_model = trainer._policy.value_model
    return getattr(value_model, "score", value_model).weight
