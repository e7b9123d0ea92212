"""Train PPO for three SGD steps on fixed completions; write the weights to a folder.

Launch it with configs/accelerate/cpu_2proc.yaml and the folder as its only argument.
"""

import itertools
import sys
from pathlib import Path

from ppo_cases import build, unsettle

GENERATION = 24  # completions

PLAIN = {"gradient_checkpointing": False, "num_iterations": 1, "value_model": "separate"}
CASES = {
    f"{kind}{', checkpointing' * checkpointing}, {iterations} iterations": {
        "gradient_checkpointing": checkpointing,
        "num_iterations": iterations,
        "value_model": kind,
        "beta": 0.1,
    }
    for kind, checkpointing, iterations in itertools.product(
        ("separate", "head"), (False, True), (1, 2)
    )
} | {
    "whitened": {**PLAIN, "whiten_advantages": True, "num_iterations": 2},
    "code": {**PLAIN, "formulation": "code", "beta": 0.1, "num_iterations": 2},
    "value learning rate and warm-up": {
        **PLAIN,
        "value_learning_rate": 0.05,
        "value_warmup_steps": 2,
    },
}


def train(case, processes):
    """Return the weights of policy and value model after three steps, and what was logged."""
    trainer = build(
        gradient_accumulation_steps=2,
        per_device_train_batch_size=GENERATION // 2 // processes,
        optim="sgd",
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_steps=3,
        max_grad_norm=0.0,
        logging_strategy="steps",
        logging_steps=1,
        **CASES[case],
    )
    unsettle(trainer)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, [e for e in trainer.state.log_history if "loss" in e]


def main():
    """Run all cases on the processes that were launched."""
    import torch.distributed

    for number, case in enumerate(CASES):
        weights, logs = train(case, processes=2)
        assert torch.distributed.get_world_size() == 2
        rank = torch.distributed.get_rank()
        torch.save({"weights": weights, "logs": logs}, Path(sys.argv[1]) / f"{number}.{rank}")


if __name__ == "__main__":
    main()
