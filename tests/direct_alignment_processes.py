"""Train every direct-alignment row for a few SGD steps on fixed pairs; write the weights.

Launch it with configs/accelerate/cpu_2proc.yaml and a folder as its only argument.
"""

import sys
from pathlib import Path

import torch
from direct_alignment_cases import ROWS, build
from policy_gradient_cases import drift

# squared sums of log-probabilities have large gradients, KTO's sigmoids small ones
RATES = {("ipo", "chapter"): 1e-4, ("ipo", "code"): 1e-4}
RATES |= {("kto", which): 2.0 for which in ("chapter", "code", "trl")}


def train(name, which, processes):
    """Return the weights after steps of two micro-batches.

    The chapter takes three; code and trl share its loop over steps, so one shows their difference,
    except KTO's, whose reference point is clamped to 0 at first.
    """
    trainer = build(
        name,
        which,
        count=32,
        per_device_train_batch_size=8 // processes,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=RATES.get((name, which), 0.02),
        lr_scheduler_type="constant",
        max_steps=3 if which == "chapter" or name == "kto" else 1,
        max_grad_norm=0.0,
    )
    drift(trainer.model, 0.05, 99)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def main():
    """Run all rows on the processes that were launched."""
    import torch.distributed

    for name, which in ROWS:
        weights = train(name, which, processes=2)
        assert torch.distributed.get_world_size() == 2
        torch.save(weights, Path(sys.argv[1]) / f"{name}-{which}.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main()
