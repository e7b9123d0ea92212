"""Train every reward-model row for three SGD steps and evaluate; write weights and evaluations.

Launch it with configs/accelerate/cpu_2proc.yaml and a folder as its only argument.
"""

import sys
from pathlib import Path

import torch
from reward_model_cases import DATA, ROWS, build, outcomes

ROWS = [case for case in ROWS if case not in [("reward", "code"), ("reward", "trl")]]  # as chapter


def candidates():
    """Eleven completions of four prompts: they fill neither the batches nor the processes."""
    rows = outcomes(40)[-11:]
    return [{**row, "prompt": rows[n // 3]["prompt"]} for n, row in enumerate(rows)]


def train(name, which, processes):
    """Return the weights after three steps of two micro-batches, and two evaluations.

    `before` is of the first weights on 16 held-out rows, which fill the batches; `after` of the
    last weights on 13, which do not.
    """
    rows = DATA[name](48)[32:]
    evaluating = {"candidates": candidates(), "per_device_eval_batch_size": 2}
    # another trainer: one that is evaluated first is not wrapped for several processes any more
    first = build(name, which, held_out=rows, **evaluating)
    before = {"metrics": first.evaluate(), **first.judged}
    trainer = build(
        name,
        which,
        count=32,
        held_out=rows[:13],
        train_sampling_strategy="random",
        per_device_train_batch_size=8 // processes,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.002 if name == "prm" else 0.02,
        lr_scheduler_type="constant",
        max_steps=3,
        max_grad_norm=0.0,
        **evaluating,
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    after = {"metrics": trainer.evaluate(), **trainer.judged}
    return {"weights": weights, "before": before, "after": after}


def main():
    """Run all rows on the processes that were launched."""
    import torch.distributed

    for name, which in ROWS:
        found = train(name, which, processes=2)
        assert torch.distributed.get_world_size() == 2
        torch.save(found, Path(sys.argv[1]) / f"{name}-{which}.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main()
