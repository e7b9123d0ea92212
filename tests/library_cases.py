"""The same script on TRL's trainers and on ours: data, classes, and what a run leaves behind."""

import random
from typing import NamedTuple

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from policy_gradient_cases import checkpoint
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import rlhf_trl
from rlhf_trl.tiny.tokenizer import build_tokenizer

OURS = {
    "grpo": (rlhf_trl.BookGRPOTrainer, rlhf_trl.BookGRPOConfig),
    "rloo": (rlhf_trl.BookRLOOTrainer, rlhf_trl.BookRLOOConfig),
    "dpo": (rlhf_trl.BookDPOTrainer, rlhf_trl.BookDPOConfig),
    "kto": (rlhf_trl.BookKTOTrainer, rlhf_trl.BookKTOConfig),
    "orpo": (rlhf_trl.BookORPOTrainer, rlhf_trl.BookORPOConfig),
    "reward": (rlhf_trl.BookRewardTrainer, rlhf_trl.BookRewardConfig),
    "sft": (rlhf_trl.BookSFTTrainer, rlhf_trl.BookSFTConfig),
}
STOCK = {
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "sft": (trl.SFTTrainer, trl.SFTConfig),
}
CLOCKS = ("runtime", "per_second", "step_time")  # what no two runs log alike


def length(completions, **kwargs):
    """Return the length of each completion in characters."""
    return [float(len(text)) for text in completions]


def shares(completions, answer):
    """Return how much of a completion stands in the answer; it takes no other keyword."""
    return [
        sum(c in right for c in text) / 5 for text, right in zip(completions, answer, strict=True)
    ]


def examples(kind, count=16):
    """Return rows of random letters in the columns that a trainer reads."""
    rng = random.Random(1)

    def word(least, most):
        return "".join(rng.choice("abcdefghij") for _ in range(rng.randint(least, most)))

    pairs = [
        {"prompt": word(3, 14), "chosen": word(1, 12), "rejected": word(1, 12)}
        for _ in range(count)
    ]
    if kind in ("grpo", "rloo"):
        return [{"prompt": pair["prompt"], "answer": pair["chosen"]} for pair in pairs]
    if kind == "sft":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    if kind == "kto":
        sides = ["chosen" if n % 3 else "rejected" for n in range(count)]
        return [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair, side in zip(pairs, sides, strict=True)
        ]
    return pairs


class Trained(NamedTuple):
    """What a run of four steps logs and ends with."""

    trainer: object
    logs: list[dict]
    weights: dict[str, torch.Tensor]


def train(
    kind,
    ours,
    folder,
    *,
    stream=False,
    lora=False,
    fields=None,
    rows=None,
    resume=None,
    prepare=None,
    **arguments,
):
    """Train four steps and evaluate twice; `ours` in formulation trl.

    `prepare` is called with the trainer before it trains.
    """
    trainer_class, config_class = (OURS if ours else STOCK)[kind]
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
    }
    if kind in ("grpo", "rloo"):
        per_device = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
        settings |= {**per_device, "num_generations": 4, "max_completion_length": 6}
        arguments.setdefault("reward_funcs", length)
    if ours and kind != "sft":
        settings["formulation"] = "trl"
    if lora:
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        arguments["peft_config"] = LoraConfig(task_type=task, target_modules=["q_proj", "v_proj"])
    rows = rows or examples(kind)
    training = Dataset.from_list(rows)
    torch.manual_seed(0)
    trainer = trainer_class(
        model=checkpoint(),
        args=config_class(**{**settings, **(fields or {})}),
        train_dataset=training.to_iterable_dataset() if stream else training,
        eval_dataset=Dataset.from_list(rows[:8]),
        **{"processing_class": build_tokenizer(), **arguments},
    )
    if prepare:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    logs = [
        {key: value for key, value in line.items() if not key.endswith(CLOCKS)}
        for line in trainer.state.log_history
    ]
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return Trained(trainer, logs, weights)
