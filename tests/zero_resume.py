"""Run recipes under ZeRO-2 and ZeRO-3: four steps, and again from the checkpoint of the second.

Launch it with configs/accelerate/zero3.yaml on two processes and a folder as its only argument.
"""

import contextlib
import io
import os
import runpy
import shutil
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

STAGES = (2, 3)  # from the lowest: once a process has known ZeRO-3, models are loaded for it
SAVING = "--max_steps 4 --save_strategy steps --save_steps 2 --eval_strategy no"
SAVING += " --eval_on_start false --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
SAVING += " --disable_tqdm --dataset.eval_size 8 --max_completion_length 8"
RUNS = {  # options beside these
    "sft": "--dataset.size 64 --model_name_or_path tiny --warmup_steps 0 --lr_scheduler_type linear"
    " --lr_scheduler_kwargs null",
    "dpo": "--dataset.size 96",
    "reward": "--dataset.size 96 --dataset.candidates 0",
    "grpo": "--dataset.size 64 --num_generations 4",
    "ppo": "--dataset.size 64 --steps_per_generation 2",
}


def run(name, folder, *words):
    """Run a recipe in this process."""
    config = ["--config", f"configs/tiny/{name}.yaml", "--output_dir", str(folder)]
    sys.argv = [name, *config, *SAVING.split(), *RUNS[name].split(), *words]
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(f"recipes/{name}.py", run_name="__main__")


def main():
    """Do all runs on the processes that were launched."""
    folder = Path(sys.argv[1])
    Accelerator.end_training = lambda self: None  # it would part the processes after the first run
    for stage in STAGES:
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
        for name in RUNS:
            whole, again = (folder / f"{name}-{stage}-{kind}" for kind in ("4", "2+2"))
            run(name, whole)
            torch.distributed.barrier()
            if os.environ["RANK"] == "0":
                shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
                if (whole / "rollouts.sqlite").exists():
                    shutil.copy(whole / "rollouts.sqlite", again)
            torch.distributed.barrier()
            run(name, again, "--resume_from_checkpoint", "auto")
            torch.distributed.barrier()


if __name__ == "__main__":
    main()
