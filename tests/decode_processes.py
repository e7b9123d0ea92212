"""Runs that generate, with prompts read once or by `generate`; as a script, on two processes.

Launch it with configs/accelerate/cpu_2proc.yaml and a folder as its only argument.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from policy_gradient_cases import build
from transformers import GenerationMixin


@dataclass
class Run:
    """What a run leaves behind."""

    weights: torch.Tensor
    prompts_tokenized: int
    generations: int
    generated: int  # of these, by transformers' `generate`


def run(name, once, which="chapter", **config):
    """Train for three steps."""
    settings = {"max_steps": 3, "learning_rate": 1e-3, "temperature": 1.3, **config}
    trainer = build(name, which, answer=None, read_prompts_once=once, **settings)
    tokenized, generations, generated = [], [], []
    template, turn = trainer.processing_class.apply_chat_template, trainer._generate_single_turn
    trainer.processing_class.apply_chat_template = lambda conversation, **kwargs: (
        tokenized.append(len(conversation)) or template(conversation, **kwargs)
    )
    trainer._generate_single_turn = lambda *args: generations.append(1) or turn(*args)
    stock = GenerationMixin._sample

    def sample(*args, **kwargs):
        generated.append(1)
        return stock(*args, **kwargs)

    with patch.object(GenerationMixin, "_sample", sample):
        trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    return Run(weights, sum(tokenized), len(generations), len(generated))


def main():
    """Run both ways on the processes that were launched."""
    import torch.distributed

    for once in (None, "exact"):
        left = run("grpo", once)
        assert left.generated == (0 if once else left.generations)
        rank = torch.distributed.get_rank()
        torch.save(left.weights, Path(sys.argv[1]) / f"{once}.{rank}")


if __name__ == "__main__":
    main()
