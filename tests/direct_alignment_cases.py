"""Direct-alignment trainers on fixed ragged pairs, and the public function on the same batch."""

import torch
from datasets import Dataset
from policy_gradient_cases import checkpoint, drawn
from transformers import AutoModelForCausalLM

from rlhf_trl import preference_loss
from rlhf_trl.algorithms import ALGORITHMS, formulation, names
from rlhf_trl.compare.models import trainer_fields
from rlhf_trl.run.config_types import recipe_defaults
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.direct_alignment import (
    BookDPOConfig,
    BookDPOTrainer,
    BookKTOConfig,
    BookKTOTrainer,
)
from rlhf_trl.trainers.orpo import BookORPOConfig, BookORPOTrainer

NAMES = names("direct_alignment")
ROWS = [(name, which) for name in NAMES for which in ALGORITHMS[name].formulations]
REFERENCE = [case for case in ROWS if formulation(*case).reference]


def text(least, most, *key):
    rng = drawn(*key)
    return "".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randint(least, most)))


def message(role, content):
    return [{"role": role, "content": content}]


def pairs(count):
    return [
        {
            "prompt": message("user", text(3, 9, "prompt", n)),
            "chosen": message("assistant", text(1, 12, "chosen", n)),
            "rejected": message("assistant", text(1, 12, "rejected", n)),
        }
        for n in range(count)
    ]


def build(name, which="chapter", *, count=16, rows=None, peft=None, model=None, **config):
    """Return a trainer of the family on fixed pairs; KTO takes the same number of examples."""
    trainer, config_class = {
        "kto": (BookKTOTrainer, BookKTOConfig),
        "orpo": (BookORPOTrainer, BookORPOConfig),
    }.get(name, (BookDPOTrainer, BookDPOConfig))
    defaults = {
        **trainer_fields(),
        **recipe_defaults(config_class),
        "algorithm": name,
        "formulation": which,
        "per_device_train_batch_size": 4,
        "max_length": 64,
    }
    return trainer(
        model or checkpoint(),
        args=config_class(**{**defaults, **config}),
        train_dataset=Dataset.from_list(rows or pairs(count)),
        processing_class=build_tokenizer(),
        peft_config=peft,
    )


# --- the oracle ----------------------------------------------------------------------------------


def logps(model, ids, attention, mask):
    """Return (R,) summed log-probabilities of the tokens under the mask, and their number."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float()
    tokens = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (tokens * mask[:, 1:]).sum(1), mask[:, 1:].sum(1)


def completions(batch):
    """Return [(ids, attention, mask)] of the chosen and the rejected (or all, for KTO)."""
    if "chosen_labels" in batch:
        return [
            (
                batch[f"{side}_input_ids"],
                batch[f"{side}_attention_mask"],
                (batch[f"{side}_labels"] != -100).long(),
            )
            for side in ("chosen", "rejected")
        ]
    keys = ("input_ids", "attention_mask", "completion_mask")
    if "label" in batch:
        wanted = batch["label"].bool()
        return [tuple(batch[key][which] for key in keys) for which in (wanted, ~wanted)]
    return list(zip(*(batch[key].chunk(2) for key in keys), strict=True))


class Reference:
    """The public function on a plain forward of the same micro-batches."""

    def __init__(self, name, which, nll_weight=0.0, **params):
        self.name, self.which, self.params = name, which, params
        self.row, self.nll_weight = formulation(name, which), nll_weight
        self.ref = AutoModelForCausalLM.from_pretrained(checkpoint())

    def given(self, plain, batch):
        given = {}
        for side, parts in zip(("chosen", "rejected"), completions(batch), strict=True):
            for who, model in (("policy", plain), ("ref", self.ref)):
                if who == "ref" and not self.row.reference:
                    continue
                total, length = logps(model, *parts)
                mean = self.row.logps == "mean"
                given[f"{who}_{side}_logps"] = total / length if mean else total
                if (who, side) == ("policy", "chosen"):
                    self.nll = -total / length
        return given

    def call(self, plain, batch):
        given = self.given(plain, batch)
        if self.name == "kto" and self.which == "code":
            # the book's code: of the rejected completions with their own prompts
            for who in ("policy", "ref"):
                given[f"{who}_kl_logps"] = given[f"{who}_rejected_logps"].detach()
        elif self.name == "kto":
            keys = ("KL_input_ids", "KL_attention_mask", "KL_completion_mask")
            for who, model in (("policy", plain), ("ref", self.ref)):
                given[f"{who}_kl_logps"] = logps(model, *(batch[key] for key in keys))[0]
        if self.name == "orpo":
            given["chosen_nll"] = self.nll
            if self.which == "trl":  # over all tokens of the chosen texts, prompts included
                ids, attention, _ = completions(batch)[0]
                total, length = logps(plain, ids, attention, attention)
                given["chosen_nll"] = -total.sum() / length.sum()
        loss = preference_loss(self.name, formulation=self.which, **given, **self.params).loss
        return loss + self.nll_weight * self.nll.mean() if self.nll_weight else loss

    def __call__(self, plain, window):
        return sum(self.call(plain, batch) for batch in window) / len(window)
