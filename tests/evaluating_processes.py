"""Trainers of every kind with held-out rows that fill neither batches nor processes.

As a script it evaluates all of them and writes the metrics; it takes a folder, and is launched on
two processes.
"""

import json
import sys
from pathlib import Path

import direct_alignment_cases as alignment
import distillation_cases
import policy_gradient_cases
import ppo_cases
import pytest
import reward_model_cases as reward_models
from datasets import Dataset
from policy_gradient_cases import WORDS, checkpoint, drift

from rlhf_trl.compare.models import trainer_fields
from rlhf_trl.run.config_types import recipe_defaults
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.sft import BookSFTConfig, BookSFTTrainer

HELD_OUT = 9
PAIRS = alignment.pairs(40)[-HELD_OUT:]
LOSS = [
    ("dpo", "chapter"),
    ("dpo", "trl"),
    ("ipo", "chapter"),
    ("simpo", "chapter"),
    ("kto", "chapter"),
    ("kto", "code"),
    ("kto", "trl"),
    ("orpo", "chapter"),
    ("orpo", "trl"),
    ("reward", "chapter"),
    ("kwise", "chapter"),
    ("orm", "chapter"),
    ("orm", "code"),
    ("prm", "chapter"),
    ("prm", "code"),
    ("sft", "padded"),
    ("sft", "packed"),
]
ANSWERS = [("grpo", "chapter"), ("ppo", "chapter"), ("opd", "chapter"), ("sdpo", "chapter")]
CASES = LOSS + ANSWERS
LIKE_OTHERS = [("ipo", "chapter"), ("kto", "code"), ("prm", "code"), *ANSWERS[::3]]
PARAMS = [
    pytest.param(case, marks=[pytest.mark.promise] if case in LIKE_OTHERS else []) for case in CASES
]
# of the clock; sampled answers are drawn batch by batch, so others with other batches
NOT_COMPARED = ("runtime", "per_second", "preparation_time", "epoch")
DRAWN = "eval_sampled_"


def supervised(packing, rows=PAIRS, **config):
    """Return a trainer that is evaluated on the chosen completions of pairs."""
    data = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    fields = {**trainer_fields(), "max_length": 40, "packing": packing, **config}
    return BookSFTTrainer(
        checkpoint(),
        BookSFTConfig(**recipe_defaults(BookSFTConfig), **fields),
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data),
        processing_class=build_tokenizer(),
    )


def build(name, which, **config):
    """Return a trainer away from where it started, with its held-out rows."""
    if (name, which) in ANSWERS:
        trainer = answering(name, **config)
    elif name == "sft":
        trainer = supervised(which == "packed", **config)
    elif name in reward_models.DATA:
        rows = reward_models.DATA[name](40)[-HELD_OUT:]
        return reward_models.build(name, which, held_out=rows, **config)
    else:
        trainer = alignment.build(name, which, rows=PAIRS, **config)
        trainer.eval_dataset = trainer.train_dataset
    drift(trainer.model, 0.05, 97)
    return trainer


def answering(name, **config):
    """Return a policy-gradient trainer that answers held-out prompts and scores with rewards."""
    if name == "ppo":
        trainer = ppo_cases.build(**config)
    elif name == "grpo":
        trainer = policy_gradient_cases.build("grpo", **config)
    else:
        trainer = distillation_cases.build(name, **config)
    trainer.held_out = [
        {"prompt": [{"role": "user", "content": word}], "word": word} for word in WORDS[:HELD_OUT]
    ]
    trainer.scores = {}
    return trainer


def evaluated(trainer, size):
    """Return the metrics of a trainer with `size` examples a batch and process."""
    trainer.args.per_device_eval_batch_size = size
    trainer._eval_dataloaders = {}
    metrics = trainer.evaluate()
    return {
        key: value
        for key, value in metrics.items()
        if not key.endswith(NOT_COMPARED) and not key.startswith(DRAWN)
    }


def main():
    """Evaluate all trainers on the processes that were launched."""
    import torch.distributed

    distillation_cases.teacher()  # before the processes know of each other: each writes its own
    found = {"-".join(case): evaluated(build(*case), 4) for case in CASES}
    assert torch.distributed.get_world_size() == 2
    path = Path(sys.argv[1]) / f"metrics.{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
