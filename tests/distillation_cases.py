"""A distillation trainer on fixed completions, and teachers for it."""

import tempfile
from functools import cache

import torch
from datasets import Dataset
from policy_gradient_cases import LIMIT, WORDS, checkpoint, completion, right, shaped
from transformers import AutoModelForCausalLM

from rlhf_trl.algorithms import ALGORITHMS, formulation, names
from rlhf_trl.compare.models import drifted, trainer_fields
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.distillation import BookDistillationConfig, BookDistillationTrainer

ROWS = [(name, which) for name in names("distillation") for which in ALGORITHMS[name].formulations]


@cache
def teacher(seed=5):
    """The folder of another model with the same tokenizer."""
    folder = tempfile.mkdtemp()
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    model.load_state_dict(drifted(model.state_dict(), 0.3, seed))
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def build(name, which="chapter", *, model=None, answer=completion, **config):
    own = {"teacher_models": [teacher()]}
    if name == "sdpo":
        own = {"correctness_reward": "right", "dynamic_sampling_rounds": 0, "teacher": "start"}
        own |= {"demonstration_template": "\n{demonstration}"}
    defaults = {
        **trainer_fields(),
        **{"algorithm": name, "formulation": which},
        **{"num_generations": 4, "per_device_train_batch_size": 8},
        **{"max_completion_length": LIMIT, "reward_weights": [1.0, 0.5]},
    }
    rows = [{"prompt": [{"role": "user", "content": word}], "word": word} for word in WORDS]
    built = BookDistillationTrainer(
        model or checkpoint(),
        [right, shaped],
        BookDistillationConfig(**{**defaults, **own, **config}),
        Dataset.from_list(rows),
        processing_class=build_tokenizer(),
    )
    if answer is not None:
        fix_completions(built, answer)
    return built


def alone(model, prompt, completion):
    """Logits before each completion token, from a forward of one text without any padding."""
    ids = torch.tensor([prompt + completion])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1]


def unpadded(ids, mask):
    return [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]


def settings(name, which):
    return {"kl_top_k": 20} if "kl_top_k" in formulation(name, which).reads else {}
