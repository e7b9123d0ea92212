"""Train two steps of every recipe's trainer under ZeRO, then run recipes under ZeRO-3.

Launch it with configs/accelerate/zero3.yaml on two processes and a folder as its only argument.
"""

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path

import direct_alignment_cases as alignment
import distillation_cases as distillation
import policy_gradient_cases as policy
import ppo_cases as ppo
import reward_model_cases as reward_models
import torch
from accelerate import Accelerator
from datasets import Dataset
from policy_gradient_processes import right
from trl import SFTConfig

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.compare.launch.training import whole, whole_weights
from rlhf_trl.errors import InputError
from rlhf_trl.run import launch
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.sft import BookSFTTrainer

BATCH = 16  # completions, pairs or texts of an optimizer step, in two micro-batches
STEPS = 2
# by their gradients, which differ that much
RATES = {"kto": 2.0, "prm": 0.002, "skipping": 0.05}
ALIGNMENT, REWARD_MODELS = ("dpo", "kto", "orpo"), ("reward", "orm", "prm")
SHARED = ("ppo", "sft", *ALIGNMENT, *REWARD_MODELS)  # ZeRO-3, which shares out the weights, too
STAGES = {"grpo": (1, 2, 3), **dict.fromkeys(SHARED, (3,)), "opd": (2,), "sdpo": (2,)}

SMALL = "--max_steps 2 --dataset.eval_size 8 --eval_strategy no"
SMALL += " --eval_on_start false --per_device_train_batch_size 4 --disable_tqdm"
SHORT = f"{SMALL} --dataset.size 16 --max_completion_length 8"
SAMPLED = f"{SMALL} --per_device_eval_batch_size 64"  # several batches of eight questions
RUNS = {  # config and options by recipe; each is a crash or a wait without end if done carelessly
    "dpo": ("dpo", SAMPLED + " --dataset.size 32 --optim sgd --learning_rate 0.01"),
    "kto": ("kto", SHORT),
    "orpo": ("orpo", SHORT),
    "ppo": ("ppo", SHORT + " --value_model head --steps_per_generation 1"),
    "reward": ("reward", SAMPLED + " --dataset.size 16 --dataset.candidates 2"),
    "grpo": ("grpo_reward", SHORT + " --num_generations 4"),
}


def build(name, processes):
    """Return a trainer on fixed rows and fixed completions."""
    config = {
        "per_device_train_batch_size": BATCH // 2 // processes,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "learning_rate": RATES.get(name, 0.02),
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "max_grad_norm": 0.0,
    }
    if name == "grpo":
        return policy.build(name, **config)
    if name == "skipping":  # two processes leave out completions that one reads
        config |= {"num_generations": 4, "skip_zero_advantage": processes > 1}
        return policy.build("grpo", rewards=[right], reward_weights=[1.0], **config)
    if name in ("opd", "sdpo"):
        return distillation.build(name, *list(ALGORITHMS[name].formulations)[:1], **config)
    if name == "ppo":
        return ppo.build(**config)
    if name in ALIGNMENT:
        return alignment.build(name, count=BATCH * STEPS, **config)
    if name in REWARD_MODELS:
        return reward_models.build(name, count=BATCH * STEPS, **config)
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"]}
        for row in alignment.pairs(BATCH * STEPS)
    ]
    return BookSFTTrainer(
        policy.checkpoint(),
        SFTConfig(**reward_models.settings(**config)),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
    )


def train(name, processes):
    """Return the weights before and after the steps, what steps them, and what wraps the model."""
    trainer = build(name, processes)
    if name in REWARD_MODELS and any(p.numel() == 0 for p in trainer.model.parameters()):
        with whole(trainer.model, write=True):
            reward_models.move(trainer.model)  # what `build` could not
    before, _ = whole_weights(trainer.model)
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    model = trainer.accelerator.unwrap_model(trainer.model)
    plugin = trainer.accelerator.state.deepspeed_plugin
    return {
        "before": before,
        "after": whole_weights(model)[0],
        "optimizer": type(optimizer).__name__,
        "stage": plugin.zero_stage if plugin else None,
        "wrapper": type(trainer.model_wrapped).__name__,
        "line": launch.describe_launch(trainer.args, name),
    }


def run(name, folder):
    """Run a recipe in this process; return what it printed."""
    config, words = RUNS[name]
    given = ["--config", f"configs/tiny/{config}.yaml", "--output_dir", str(folder / name)]
    if name == "grpo":
        given += ["--reward_model", str(folder / "reward" / "model")]
    sys.argv = [name, *given, *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(f"recipes/{name}.py", run_name="__main__")
    return out.getvalue()


def offloaded(optim):
    """Return the first line of a run whose optimizer is offloaded, or why there is none."""
    os.environ["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] = "cpu"
    try:
        args = SFTConfig(**reward_models.settings(optim=optim))
        return launch.describe_launch(args, "sft")
    except InputError as error:
        return str(error)
    finally:
        os.environ["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] = "none"


def train_all(stages):
    """Train on the processes that were launched; `stages` are those of each trainer."""
    import deepspeed

    # no operator is compiled, which takes a minute and is not needed here
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    distillation.teacher()  # while each process writes what it is told to
    # from the lowest: once a process has known ZeRO-3, models are loaded for it
    for stage, name in sorted((stage, name) for name, those in stages.items() for stage in those):
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
        found = train(name, processes=2)
        torch.save(found, Path(sys.argv[1]) / f"{name}-{stage}.{os.environ['RANK']}")


def main():
    """Train and run everything on the processes that were launched."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    train_all(STAGES)
    os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "3"
    Accelerator.end_training = lambda self: None  # it would part the processes after the first run
    printed = {name: run(name, folder) for name in RUNS}
    printed["sgd"], printed["adamw"] = offloaded("sgd"), offloaded("adamw_torch")
    torch.save(printed, folder / f"printed.{rank}")


if __name__ == "__main__":
    main()
