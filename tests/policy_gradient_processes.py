"""Train every row for a few SGD steps on fixed completions; write the weights to a folder.

Launch it with configs/accelerate/cpu_2proc.yaml and the folder as its only argument.
"""

import sys
from pathlib import Path

import torch
from policy_gradient_cases import ROWS, build, drift

from rlhf_trl.algorithms import formulation

GENERATION = 24  # three groups of eight, so that with two processes one group is on both


def right(completion_ids, word, **columns):
    """Equal rewards in most groups, so that a process may have nothing to learn from."""
    pairs = zip(completion_ids, word, strict=True)
    return [1.0 if len(name) == 5 else float(sum(ids) % 2) for ids, name in pairs]


def train(name, which, processes, variant=""):
    """Return the weights after some steps: two micro-batches each, beta > 0 where there is one.

    The chapter takes three; code and trl share its loop over steps, so one shows their difference.
    """
    config = {"num_generations": 8}
    config |= {"beta": 0.1} if "beta" in formulation(name, which).reads else {}
    if variant == "moving average":
        config |= {"baseline": "moving_average"}
    if variant == "two generations a step":
        config |= {"steps_per_generation": 1, "num_generations": 4}
    if variant == "two updates a generation":
        config |= {"num_iterations": 2}
    if variant == "dynamic sampling":
        # small groups often lack contrast, and odd ones do not always share out evenly
        config |= {"dynamic_sampling_rounds": 2, "num_generations": 3}
    if variant == "nothing to learn":  # two processes leave out what one reads
        config = {"num_generations": 4, "skip_zero_advantage": processes > 1}
        config |= {"rewards": [right], "reward_weights": [1.0]}
    trainer = build(
        name,
        which,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=GENERATION // 2 // processes,
        optim="sgd",
        learning_rate=0.02,
        lr_scheduler_type="constant",
        max_steps=3 if which == "chapter" else 1,
        max_grad_norm=0.0,
        **config,
    )
    drift(trainer.model, 0.05, 99)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    return weights, dict(trainer._carried)


CASES = [
    *[(name, which, "") for name, which in ROWS],
    ("reinforce", "chapter", "moving average"),
    ("dapo", "chapter", "dynamic sampling"),
    ("dapo", "chapter", "two generations a step"),
    ("cispo", "chapter", "two generations a step"),
    ("cispo", "chapter", "two updates a generation"),
    ("dapo_per_prompt", "chapter", "dynamic sampling"),
    ("drgrpo", "chapter", "nothing to learn"),
    ("cispo_window", "chapter", "nothing to learn"),
]


def resumed(folder):
    """Return the weights of a run, and of one resumed inside a generation of 6 optimizer steps."""
    config = {"steps_per_generation": 2, "num_iterations": 3, "per_device_train_batch_size": 4}
    config |= {"max_steps": 6, "learning_rate": 1e-3, "answer": None}
    whole = build("dapo", output_dir=str(folder), save_strategy="steps", save_steps=1, **config)
    again = build("dapo", output_dir=str(folder / "again"), **config)
    whole.train()
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    models = (each.accelerator.unwrap_model(each.model) for each in (whole, again))
    return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]


def main():
    """Run all cases on the processes that were launched."""
    import torch.distributed

    for case in CASES:
        weights, carried = train(*case[:2], processes=2, variant=case[2])
        assert torch.distributed.get_world_size() == 2
        rank = torch.distributed.get_rank()
        file = "-".join(map(str, case)) + f".{rank}"
        torch.save({"weights": weights, "carried": carried}, Path(sys.argv[1]) / file)
    torch.save(resumed(Path(sys.argv[1]) / "run"), Path(sys.argv[1]) / f"resumed.{rank}")


if __name__ == "__main__":
    main()
