"""Whether runs that are resumed end as one that was never stopped, at every step.

Launch it with configs/accelerate/cpu_2proc.yaml and the folder for what it finds.
"""

import json
import shutil
import sys
from pathlib import Path

import policy_gradient_cases
import ppo_cases
import torch
from peft import LoraConfig

STEPS = 12
# num_iterations, steps_per_generation, gradient_accumulation_steps
GRID = {
    f"{n}-{steps}-{window}": {
        "num_iterations": n,
        "steps_per_generation": steps,
        "gradient_accumulation_steps": window,
    }
    for n in (1, 3)
    for steps in (1, 4)
    for window in (1, 2)
}
LORA = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SYNCED = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2}
CASES = {
    **GRID,
    "lora": {"peft_config": LORA, "num_iterations": 2, "steps_per_generation": 2},
    "workers": {"dataloader_num_workers": 2, "steps_per_generation": 2},
    "moving average": {"name": "reinforce", "baseline": "moving_average"},
    "stream": {"name": "dapo", "dynamic_sampling_rounds": 2, "num_generations": 2},
    # ten prompts are two generations, so that four steps are an epoch
    "epochs": {"num_generations": 2, "per_device_train_batch_size": 5, "steps_per_generation": 2},
    "ppo": {"name": "ppo", "num_iterations": 3, "steps_per_generation": 2, "num_generations": 1},
    "synced": {**SYNCED, "num_iterations": 2},
}


def resumed_at(folder, steps, spoil=lambda saved: None, name="grpo", **config):
    """Return, for every step, whether a run resumed there ends as one that was never stopped.

    `spoil` does something to each checkpoint before.
    """
    config = {
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "answer": None,  # generated
        **config,
    }
    cases = ppo_cases if name == "ppo" else policy_gradient_cases
    build = cases.build if name == "ppo" else lambda **given: cases.build(name, **given)
    saving = {"save_strategy": "steps", "save_steps": 1}
    whole = build(output_dir=str(folder), **config, **saving)
    whole.train()
    found = {}
    for step in steps:
        spoil(saved := folder / f"checkpoint-{step}")
        resumed = build(output_dir=str(folder / "again"), **config)
        resumed.train(resume_from_checkpoint=str(saved))
        models = (each.accelerator.unwrap_model(each.model) for each in (whole, resumed))
        pairs = zip(*(model.state_dict().values() for model in models), strict=True)
        found[step] = all(torch.equal(a, b) for a, b in pairs)
    return found


def main():
    """Resume all cases at every step on the processes that were launched."""
    import torch.distributed

    folder = Path(sys.argv[1])
    for name, config in CASES.items():
        found = resumed_at(folder / "runs", range(1, STEPS), **config)
        rank = torch.distributed.get_rank()
        (folder / f"{name}.{rank}").write_text(json.dumps(found))
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder / "runs")
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
