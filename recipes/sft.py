"""Supervised fine-tuning (chapter 4) on TRL's SFTTrainer; rebuilds the embedded warm start.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/sft.py \
    --config configs/tiny/sft.yaml
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_trl.data.gym import GymData, GymTasks
from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe


@dataclass
class Run:
    """The fields of this recipe beside TRL's SFTConfig and ModelConfig."""

    dataset: GymData
    demonstrator: Literal["imperfect", "right"] = "imperfect"
    max_completion_length: int = 64  # of the answers that evaluation generates
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "SFTConfig")
    own, args, model = loaded.own, loaded.trl, loaded.model

    from datasets import Dataset
    from trl import get_peft_config, get_quantization_config

    from rlhf_trl.data.made import demonstrations
    from rlhf_trl.models import load_tokenizer, prepare_model
    from rlhf_trl.run import train
    from rlhf_trl.trainers.sft import AnsweringSFTTrainer

    train.begin(loaded, "sft")
    tasks = GymTasks(own.dataset)
    tokenizer = load_tokenizer(model, args)

    trainer = AnsweringSFTTrainer(
        model=prepare_model(model, args),
        args=args,
        train_dataset=Dataset.from_list(
            demonstrations(tasks.train, own.demonstrator, own.dataset.seed)
        ),
        eval_dataset=Dataset.from_list(demonstrations(tasks.held_out, "right")),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.max_completion_length = own.max_completion_length
    train.run(trainer, loaded, tasks, "sft")


if __name__ == "__main__":
    recipe(main)
