"""One step on ragged examples, with micro-batches of like cost and with a single one of them all.

As a script, on two processes: launch it with configs/accelerate/cpu_2proc.yaml and a folder.
"""

import sys
from pathlib import Path

import direct_alignment_cases
import reward_model_cases
import torch
from policy_gradient_cases import drawn, drift
from transformers import TrainerCallback

COUNT, MICRO_BATCHES = 32, 4
CASES = [
    ("dpo", "chapter"),
    ("reward", "chapter"),
    ("ipo", "chapter"),
    ("simpo", "chapter"),
    ("kwise", "chapter"),
    ("orm", "chapter"),
]
ONE_STEP = {
    "max_length": 128,
    "optim": "sgd",
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "max_steps": 1,
    "max_grad_norm": 0.0,
}


def tokens(*key):
    """Return 5 to 90 letters, most of them few: a tenth of the texts is long."""
    rng = drawn(*key)
    length = rng.randint(60, 90) if rng.random() < 0.1 else rng.randint(5, 20)
    return "".join(rng.choice("abcdefghijklmnop") for _ in range(length))


def ragged(name):
    message = direct_alignment_cases.message
    made = []
    for n in range(COUNT):
        row = {"prompt": message("user", f"word {n}")}
        if name == "kwise":
            row["ranked"] = [message("assistant", tokens(n, k)) for k in range(3)]
        elif name == "orm":
            row |= {"completion": message("assistant", tokens(n)), "label": bool(n % 2)}
        else:
            row["chosen"] = message("assistant", tokens(n, "chosen"))
            row["rejected"] = message("assistant", tokens(n, "rejected"))
        made.append(row)
    return made


def build(name, which="chapter", **config):
    cases = direct_alignment_cases
    if name in ("reward", "kwise", "orm", "prm"):
        cases = reward_model_cases
    return cases.build(name, which, rows=ragged(name), **{**ONE_STEP, **config})


def rebalanced(processes=1):
    """Return the settings of micro-batches of like cost."""
    share = COUNT // MICRO_BATCHES
    return {
        "train_sampling_strategy": "batch_rebalance",
        "per_device_train_batch_size": share,
        "gradient_accumulation_steps": MICRO_BATCHES // processes,
    }


class Gradient(TrainerCallback):
    """Keeps the gradient of an optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = sorted(model.named_parameters())
        self.value = torch.cat([p.grad.flatten().double() for _, p in named if p.requires_grad])


def gradient(trainer):
    """Train, and return the gradient of the last optimizer step."""
    drift(trainer.model, 0.05, 99)
    kept = Gradient()
    trainer.add_callback(kept)
    trainer.train()
    return kept.value


def main():
    """Take the step on the processes that were launched."""
    import torch.distributed

    for name, which in CASES:
        of_all = gradient(build(name, which, **rebalanced(processes=2)))
        rank = torch.distributed.get_rank()
        torch.save(of_all, Path(sys.argv[1]) / f"{name}-{which}.{rank}")


if __name__ == "__main__":
    main()
