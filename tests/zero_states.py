"""Take a step of AdamW under ZeRO-1, 2 and 3 and write down what each process holds: see test_*."""

import json
import os
import sys
from pathlib import Path

import direct_alignment_cases as alignment
import policy_gradient_cases as policy
import reward_model_cases as reward_models
from datasets import Dataset
from trl import SFTConfig

from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.sft import BookSFTTrainer


def bytes_held(stage):
    """Return the bytes of master weights and of Adam's two averages that this process holds."""
    os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen"]} for row in alignment.pairs(count=4)
    ]
    trainer = BookSFTTrainer(
        policy.checkpoint(),
        SFTConfig(**reward_models.settings(optim="adamw_torch", max_steps=1)),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
    )
    trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    averages = masters = 0
    for weight, state in optimizer.state.items():  # of this process's flat share of each group
        averages += state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
        masters += weight.nbytes
    return {"averages": averages, "masters": masters}


def main():
    """Go through the stages; ZeRO-3 last, as models are loaded for it from then on."""
    import deepspeed

    # no operator is compiled, which takes a minute and is not needed here
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    held = {f"zero{stage}": bytes_held(stage) for stage in (1, 2, 3)}
    Path(sys.argv[1], f"held.{os.environ['RANK']}.json").write_text(json.dumps(held))


if __name__ == "__main__":
    main()
