"""Some ten steps of stock trainers: order of rows, schedule, optimizer, evaluation, resuming, logs.

What the recorded losses hold still, a run moves: two epochs, warm-up and decay, weight decay,
accumulation, packing, an evaluation set that batches do not divide, and a resume in the middle.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from rlhf_trl.compare.measure import UNSTABLE
from rlhf_trl.compare.models import policy_folder
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.tiny.tokenizer import build_tokenizer

STEPS, RESUMED_AT = 10, 5
# 11 micro-batches: the last accumulation window of an epoch is not full
ROWS = "ant bee cat cow crow deer dog dove duck eel elk fish fly fox frog goat hare hen lamb lion"
ROWS += " lynx moth"
EVAL_ROWS = "mole newt owl ox pig rat seal"

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 2,
    "max_steps": STEPS,
    "learning_rate": 0.02,
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "adam_epsilon": 0.01,  # at the default, Adam makes steps of what is rounding
    "max_grad_norm": 0.5,
    "eval_strategy": "steps",
    "eval_steps": RESUMED_AT,
    "save_strategy": "steps",
    "save_steps": RESUMED_AT,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "model_init_kwargs": {"dtype": "float32"},
}
"""The fields of all runs."""

OWN: dict[str, dict[str, Any]] = {
    "SFTTrainer": {
        "packing": True,
        "eval_packing": False,
        "max_length": 24,
        "label_smoothing_factor": 0.3,
        "warmup_steps": 0.25,  # of 10 steps, rounded up
    },
    "DPOTrainer": {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.35]},
    "KTOTrainer": {
        "desirable_weight": 1.3,
        "max_steps": -1,
        "num_train_epochs": 1.5,  # 9 steps
        "logging_first_step": True,
        "logging_steps": 2,
    },
    "GRPOTrainer": {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "num_generations_eval": 2,
        "max_completion_length": 4,
        "num_iterations": 2,
        "top_entropy_quantile": 0.3,
        "beta": 0.1,
        "reward_weights": [0.7, 0.45],
    },
}
"""The trainers that run, and what else their configs set: values whose mirror is another one."""

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ ending or '' }}"
    "{% if add_generation_prompt %}={% endif %}"
)
"""A chat template that reads a value of a row's `chat_template_kwargs`."""


class Recorder(TrainerCallback):
    """Notes what a run does, and ends it in the middle if it is to be resumed."""

    def __init__(self, stops_at: int | None):
        self.stops_at = stops_at
        self.facts: dict[str, list[Any]] = defaultdict(list)

    def on_train_begin(self, args, state, control, **kwargs):
        """Note how many parameters each group of the optimizer decays, and by what."""
        for group in kwargs["optimizer"].param_groups:
            count = sum(p.numel() for p in group["params"])
            self.facts["parameters of a group"] += [count, float(group["weight_decay"])]

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Note the learning rate that the optimizer is about to use."""
        groups = kwargs["optimizer"].param_groups
        self.facts["learning rate in use"] += [float(group["lr"]) for group in groups]

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Note every metric that does not depend on the machine."""
        for name, value in (logs or {}).items():
            if not any(part in name for part in UNSTABLE):
                # TRL logs None where a metric has no value
                self.facts[name].append(None if value is None else float(f"{value:.6g}"))

    def on_step_end(self, args, state, control, **kwargs):
        """End the run in the middle."""
        if state.global_step == self.stops_at:
            control.should_training_stop = True


def facts_of(
    trainer: str, classes: tuple[type, type], fields: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return what a run does, by names such as "SFTTrainer rows": a list each, in the run's order.

    Args:
        trainer: a key of OWN.
        classes: that trainer and its config.
        fields: values of config fields that the run does not set itself.
        folder: where it writes, the same one on all processes.
    """
    facts: dict[str, list[Any]] = defaultdict(list)
    for stops_at in (RESUMED_AT, None):
        recorder = Recorder(stops_at)
        output_dir = folder / trainer
        built = _build(trainer, classes, {**fields, "output_dir": str(output_dir)}, recorder)
        start = [p.detach().clone() for p in built.model.parameters()]
        resumed = None if stops_at else str(output_dir / f"checkpoint-{RESUMED_AT}")
        built.train(resume_from_checkpoint=resumed)
        moved = sum((p - q).norm() for p, q in zip(built.model.parameters(), start, strict=True))
        recorder.facts["weights moved by"].append(float(f"{float(moved):.6g}"))
        for name, values in recorder.facts.items():
            facts[f"{trainer} {name}"] += values
    return dict(facts)


def _build(
    trainer: str, classes: tuple[type, type], fields: Mapping[str, Any], recorder: Recorder
) -> Any:
    """Return a stock trainer whose batches a recorder notes."""
    trainer_class, config_class = classes
    # a folder, from which TRL makes the reference, too
    arguments = {"model": policy_folder(), "processing_class": build_tokenizer()}
    arguments["processing_class"].chat_template = TEMPLATE
    if trainer == "GRPOTrainer":
        arguments["reward_funcs"] = [_share_of_vowels, _length_of_some]
    built = trainer_class(
        args=config_class(**{**fields, **COMMON, **OWN[trainer]}),
        train_dataset=Dataset.from_list([_row(trainer, word) for word in ROWS.split()]),
        eval_dataset=Dataset.from_list([_row(trainer, word) for word in EVAL_ROWS.split()]),
        callbacks=[recorder],
        **arguments,
    )
    built.remove_callback(PrinterCallback)
    if trainer == "GRPOTrainer":
        end = built.processing_class.eos_token_id
        # those of long prompts are cut off before they end
        fix_completions(built, lambda prompt, index, call: [*prompt[index:], end][:4])
    compute_loss = built.compute_loss

    def noted(model, inputs, *args, **kwargs):
        if model.training:
            # one number a micro-batch: another order, row or padding makes another
            tokens = inputs["prompt_ids"] if trainer == "GRPOTrainer" else inputs["input_ids"]
            places = tokens.new_tensor(range(1, tokens.shape[1] + 1))
            recorder.facts["rows"].append(int((tokens * places).sum()))
        loss = compute_loss(model, inputs, *args, **kwargs)
        if len(recorder.facts["rows"]) == 6 and trainer == "DPOTrainer":
            return 0 * loss + torch.nan  # not logged by default; its gradient is 0
        return loss

    built.compute_loss = noted
    return built


def _row(trainer: str, word: str) -> dict[str, Any]:
    """Return a row of the data: a word, read backward."""
    if trainer == "GRPOTrainer":
        return {"prompt": word}
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": word}],
        "chat_template_kwargs": {"ending": word[0]},
    }
    answers = {"chosen": word[::-1], "rejected": word}
    if trainer != "DPOTrainer":
        answers = {"completion": word[::-1]}
    if trainer == "KTOTrainer":
        row["label"] = word < "duck"
    for side, text in answers.items():
        row[side] = [{"role": "assistant", "content": text}]
    return row


def _share_of_vowels(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    """Reward: ties are frequent, and the answers to some prompts all have 0."""
    return [
        0.0 if "o" in prompt else sum(letter in "aeiou" for letter in text) / (len(text) + 1)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def _length_of_some(
    prompts: list[str], completions: list[str], **kwargs: Any
) -> list[float | None]:
    """Reward that has no value for some prompts."""
    return [
        None if len(prompt) > 3 else float(len(text)) * ("o" not in prompt)
        for prompt, text in zip(prompts, completions, strict=True)
    ]
