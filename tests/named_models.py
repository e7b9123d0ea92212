"""Models as they lie in folders, made of the embedded one without any training."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rlhf_trl.tiny import checkpoint_path


async def brief(completions, trainer_state, log_metric, **columns):
    """A reward function as TRL calls them; it applies to answers of even length only."""
    log_metric("asked", len(columns["question"]) + trainer_state.global_step)
    texts = [completion[-1]["content"] for completion in completions]
    return [1 / (1 + len(text)) if len(text) % 2 == 0 else None for text in texts]


def make_adapter(folder, base=None, scale=0.02, **options):
    """Save a LoRA adapter whose weights are random, so that it says other things than its base.

    The options are those of `LoraConfig`; whatever else they train is changed as much.
    """
    base = str(base or checkpoint_path())
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(**{"r": 4, "target_modules": "all-linear"} | options),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # which begin as 0
            torch.nn.init.normal_(parameter, std=scale)
        elif parameter.requires_grad and "lora_A" not in name and "embedding_B" not in name:
            parameter.data += scale * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def add_a_token(folder):
    """Let the tokenizer in a folder have a token more, for which no model has a row."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|further|>"])
    tokenizer.save_pretrained(folder)


def make_reward_model(folder):
    """Save a sequence classifier with one label and a random head."""
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint_path(), num_labels=1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint_path()).save_pretrained(folder)
    return folder
