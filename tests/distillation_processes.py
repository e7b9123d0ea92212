"""Train every row of distillation for some SGD steps on fixed completions; write the weights.

Launch it with configs/accelerate/cpu_2proc.yaml and a folder as its only argument.
"""

import sys
from pathlib import Path

import torch
from distillation_cases import ROWS, build
from policy_gradient_cases import drift

CASES = [*((*row, "start") for row in ROWS), ("sdpo", "code", "live"), ("sdpo", "code", "ema")]
GENERATION = 24  # three groups of eight, so that with two processes one group is on both


def train(name, which, teacher, processes):
    """Return the weights after three steps of two micro-batches each."""
    config = {"teacher": teacher} if name == "sdpo" else {}
    trainer = build(
        name,
        which,
        num_generations=8,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=GENERATION // 2 // processes,
        optim="sgd",
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_steps=3,
        max_grad_norm=0.0,
        **config,
    )
    drift(trainer.model, 0.05, 99)
    before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), before


def main():
    """Run all cases on the processes that were launched."""
    import torch.distributed

    for case in CASES:
        weights, _ = train(*case, processes=2)
        rank = torch.distributed.get_rank()
        assert torch.distributed.get_world_size() == 2
        torch.save(weights, Path(sys.argv[1]) / f"{'-'.join(case)}.{rank}")


if __name__ == "__main__":
    main()
