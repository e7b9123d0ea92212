"""Check cells of this launch, healthy ones or with a fault planted in it; write the reports.

Launch it on several processes with a folder and the name of a function of this file that returns
cells (`four`).
"""

import contextlib
import os
import pickle
import sys
import time
from pathlib import Path
from unittest.mock import patch

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from torch.nn.parallel import DistributedDataParallel

from rlhf_trl.compare.launch.check_launch import judge_cells, read_subject, train_cells
from rlhf_trl.compare.launch.report import Cell
from rlhf_trl.models import load_quietly

LIMIT = float(os.environ.get("CHECK_LIMIT", 300))
SEEDS = 100
CONFIGS = ("grpo", "dapo", "ppo", "dpo", "reward")
ACCUMULATIONS = (1, 2, 4)


def cell(name, folder, *words, seed=0):
    """Return a cell of one of the tiny configs, with options."""
    config = f"configs/tiny/{name}.yaml"
    model = folder / "model"
    subject, _ = read_subject(["--config", config, *map(str, words)], model)
    return Cell(subject, str(model), seed)


def accumulated(name, folder, steps, *words):
    """Return a cell with so many micro-batches; PPO's config would use a generation four times."""
    if name == "ppo":
        words = ("--steps_per_generation", steps, *words)
    return cell(name, folder, "--gradient_accumulation_steps", steps, *words)


def four(folder):
    """The cells of the default test run."""
    return {
        "dapo 2": (accumulated("dapo", folder, 2), None),
        "ppo 2": (accumulated("ppo", folder, 2), None),
        "dpo 1": (accumulated("dpo", folder, 1), None),
        "grpo 4, the first micro-batch dropped": (
            accumulated("grpo", folder, 4),
            lambda: dropped([0]),
        ),
    }


def grid(folder):
    """Every trainer at every accumulation, and generations that outlast an optimizer step."""
    cells = {
        f"{name} {steps}": (accumulated(name, folder, steps), None)
        for name in CONFIGS
        for steps in ACCUMULATIONS
    }
    words = ("--gradient_accumulation_steps", 2, "--steps_per_generation", 4)
    for name in ("grpo", "dapo", "ppo"):
        cells[f"{name} 2 of 4"] = (cell(name, folder, *words), None)
    cells["grpo 2, clipped"] = (accumulated("grpo", folder, 2, "--max_grad_norm", 0.1), None)
    return cells


def bf16(folder):
    """Some of the grid in bfloat16."""
    return {f"{name} 2": (accumulated(name, folder, 2, "--bf16", "true"), None) for name in CONFIGS}


def configs(folder):
    """Every config of configs/tiny that trains and does not sample before, and some options."""
    sampling = ("rejection_sampling", "rejection_sampling_reward")
    names = sorted(path.stem for path in Path("configs/tiny").glob("*.yaml"))
    cells = {name: (cell(name, folder), None) for name in names if name not in ("base", *sampling)}
    for name, *words in (
        ("grpo", "--use_peft", "true"),  # whose dropout would differ from process to process
        ("grpo", "--formulation", "trl", "--loss_type", "bnpo"),
        ("ppo", "--value_model", "head", "--steps_per_generation", 1),  # whose weights begin at 0
        ("opd", "--teacher_models", "tiny", "tiny", "--teacher_weights", 0.3, 0.7),
    ):
        cells[" ".join(map(str, [name, *words]))] = (cell(name, folder, *words), None)
    return cells


def seeds(folder):
    """A healthy launch, often."""
    subject = accumulated("dapo", folder, 2).subject
    model = str(folder / "model")
    return {f"dapo 2, seed {seed}": (Cell(subject, model, seed), None) for seed in range(SEEDS)}


# --- faults --------------------------------------------------------------------------------------


def place(accelerator):
    """Return how many-th call of `backward` this is, from 0."""
    accelerator.calls = getattr(accelerator, "calls", -1) + 1
    return accelerator.calls


@contextlib.contextmanager
def dropped(micro_batches, ranks=(0, 1), accumulation=4):
    """Let some micro-batches of a window give no gradient."""
    backward = accelerate.Accelerator.backward

    def dropping(self, loss, **kwargs):
        if self.process_index in ranks and place(self) % accumulation in micro_batches:
            loss = 0 * loss  # with its graph, since the last one joins the processes
        backward(self, loss, **kwargs)

    with patch.object(accelerate.Accelerator, "backward", dropping):
        yield


@contextlib.contextmanager
def scaled(factor):
    """Let the loss count otherwise."""
    backward = accelerate.Accelerator.backward

    def scaling(self, loss, **kwargs):
        backward(self, loss * factor, **kwargs)

    with patch.object(accelerate.Accelerator, "backward", scaling):
        yield


@contextlib.contextmanager
def last_window_dropped():
    """Let the third optimizer step do nothing."""
    step = AcceleratedOptimizer.step

    def stepping(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls != 3:
            step(self, closure)

    with patch.object(AcceleratedOptimizer, "step", stepping):
        yield


@contextlib.contextmanager
def other_weights():
    """Let rank 1 have other weights once they have been shared."""
    initialize = DistributedDataParallel.__init__

    def moved(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        if os.environ["RANK"] == "1":
            with torch.no_grad():
                next(iter(self.parameters())).add_(0.01)

    with patch.object(DistributedDataParallel, "__init__", moved):
        yield


@contextlib.contextmanager
def same_samples():
    """Let every rank read what is for the first one."""
    initialize = BatchSamplerShard.__init__

    def first(self, sampler, num_processes=1, process_index=0, **kwargs):
        initialize(self, sampler, num_processes=num_processes, process_index=0, **kwargs)

    with patch.object(BatchSamplerShard, "__init__", first):
        yield


@contextlib.contextmanager
def local_counts():
    """Let each rank take its own count of tokens for that of all."""
    original = accelerate.Accelerator.reduce

    def local(self, tensor, reduction="sum", scale=1.0):
        if tensor.dtype == torch.int64:  # counts
            return tensor * self.num_processes
        return original(self, tensor, reduction, scale)

    with patch.object(accelerate.Accelerator, "reduce", local):
        yield


@contextlib.contextmanager
def no_value_model():
    """Let the optimizer pass over the value model."""
    from rlhf_trl.trainers.ppo import BookPPOTrainer

    original = BookPPOTrainer.create_optimizer

    def create(self, model=None):
        optimizer = original(self, model)
        del optimizer.param_groups[self._policy_groups :]
        return optimizer

    with patch.object(BookPPOTrainer, "create_optimizer", create):
        yield


@contextlib.contextmanager
def clipped_by_rank():
    """Let each rank clip its own gradient before the mean over ranks is taken."""
    initialize = DistributedDataParallel.__init__

    def alone(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        self.require_backward_grad_sync = False

    def clip(self, parameters, max_norm, norm_type=2):
        parameters = [p for p in parameters if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        for p in parameters:
            torch.distributed.all_reduce(p.grad)
            p.grad /= self.num_processes
        return norm

    with (
        patch.object(DistributedDataParallel, "__init__", alone),
        patch.object(accelerate.Accelerator, "clip_grad_norm_", clip),
    ):
        yield


@contextlib.contextmanager
def other_optimizer():
    """Let another optimizer step where SGD was asked for."""
    initialize = AcceleratedOptimizer.__init__

    def swapped(self, optimizer, *args, **kwargs):
        if isinstance(optimizer, torch.optim.SGD):
            optimizer = torch.optim.AdamW(optimizer.param_groups)
        initialize(self, optimizer, *args, **kwargs)

    with patch.object(AcceleratedOptimizer, "__init__", swapped):
        yield


def faults(folder):
    """Every fault, each in a cell of its own."""
    four_batches = accumulated("grpo", folder, 4).subject
    model = str(folder / "model")

    def grpo():
        return Cell(four_batches, model)

    def other(name, steps, *words):
        return accumulated(name, folder, steps, *words)

    return {
        "first": (grpo(), lambda: dropped([0])),
        "all but the last": (grpo(), lambda: dropped([0, 1, 2])),
        "of one rank": (grpo(), lambda: dropped([1], ranks=[1])),
        "a rank": (grpo(), lambda: dropped([0, 1, 2, 3], ranks=[1])),
        "last window": (grpo(), last_window_dropped),
        "averaged twice": (grpo(), lambda: scaled(1 / 4)),
        "summed": (grpo(), lambda: scaled(2)),
        "other weights": (grpo(), other_weights),
        "same samples": (grpo(), same_samples),
        "local counts": (other("dapo", 2), local_counts),
        "local counts of SFT": (
            other("sft", 2, "--average_tokens_across_devices", "false"),
            contextlib.nullcontext,
        ),
        "no value model": (other("ppo", 2), no_value_model),
        "clipped by rank": (other("grpo", 2, "--max_grad_norm", 0.1), clipped_by_rank),
        "other optimizer": (grpo(), other_optimizer),
    }


@contextlib.contextmanager
def stuck():
    """Let rank 1 sleep where rank 0 waits for its gradients."""
    backward = accelerate.Accelerator.backward

    def late(self, loss, **kwargs):
        if self.process_index == 1:
            time.sleep(600)
        backward(self, loss, **kwargs)

    with patch.object(accelerate.Accelerator, "backward", late):
        yield


def hang(folder):
    """A launch that never ends."""
    return {"hang": (accumulated("grpo", folder, 1), stuck)}


@contextlib.contextmanager
def adam_on_the_cpu():
    """Let accelerate put DeepSpeed's Adam in SGD's place although it is told not to."""
    prepare = accelerate.Accelerator._prepare_deepspeed

    def forced(self, *args, **kwargs):
        config = self.state.deepspeed_plugin.deepspeed_config
        config.pop("zero_force_ds_cpu_optimizer", None)
        return prepare(self, *args, **kwargs)

    with patch.object(accelerate.Accelerator, "_prepare_deepspeed", forced):
        yield


def swapped(folder):
    """SGD and AdamW where the optimizer is offloaded by a plain YAML."""
    words = ("--optim", "adamw_torch")
    return {
        "healthy": (accumulated("grpo", folder, 2, *words), None),
        "SGD replaced": (accumulated("grpo", folder, 2, *words), adam_on_the_cpu),
    }


def main():
    """Train all cells on the processes that were launched, and judge them in the first one."""
    load_quietly()
    results = Path(sys.argv[1])
    wanted = sys.argv[2] if len(sys.argv) > 2 else "four"
    rank = os.environ["RANK"]
    folder = results / f"rank-{rank}"
    cells = globals()[wanted](folder)
    for number, (planned, fault) in enumerate(cells.values()):
        # in front of the DDP hooks of a rank that is slower
        with (fault or contextlib.nullcontext)():
            train_cells([planned], folder / str(number), LIMIT)
    if rank == "0":
        reports = judge_cells([planned for planned, _ in cells.values()], folder, LIMIT)
        text = pickle.dumps(dict(zip(cells, reports, strict=True)))
        (results / "reports.pickle").write_bytes(text)


if __name__ == "__main__":
    main()
