"""Reward-model trainers on fixed ragged rows, and the public function on one text at a time.

The oracle writes every text out by hand, runs it through the model alone and without padding, and
reads the score at the places that the chapter names. It knows nothing of the package's encoding,
collators or pooling.
"""

from copy import deepcopy

import torch
from comparison import Comparison
from datasets import Dataset
from direct_alignment_cases import message, pairs, text
from policy_gradient_cases import checkpoint, drawn, drift

from rlhf_trl import reward_loss
from rlhf_trl.compare.measure import Measured, accumulate, batches, flat_gradient
from rlhf_trl.compare.models import trainer_fields
from rlhf_trl.run.config_types import recipe_defaults
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.reward_models import (
    BookRewardConfig,
    BookRewardTrainer,
    BookTokenRewardConfig,
    BookTokenRewardTrainer,
)

ROWS = [
    ("reward", "chapter"),
    ("reward", "code"),
    ("reward", "trl"),
    ("kwise", "chapter"),
    ("orm", "chapter"),
    ("orm", "code"),
    ("prm", "chapter"),
    ("prm", "code"),
]
# a mean over the tokens, or steps, of a micro-batch depends on how the rows are divided
INVARIANT = [case for case in ROWS if case not in [("orm", "code"), ("prm", "code")]]
SEPARATOR, SPLIT = "\n", r"(?<=\w)(?=\w*</answer>)"
END = "<|end|>"


def margins(count):
    return [{**row, "margin": n / 4 - 0.5} for n, row in enumerate(pairs(count))]


def ranked(count, length=4):
    return [
        {
            "prompt": message("user", text(3, 9, "prompt", n)),
            "ranked": [message("assistant", text(1, 12, "ranked", n, k)) for k in range(length)],
        }
        for n in range(count)
    ]


def outcomes(count):
    return [
        {
            "prompt": message("user", text(3, 9, "prompt", n)),
            "completion": message("assistant", text(1, 12, "completion", n)),
            "label": drawn("label", n).random() < 0.5,
            "finished": n % 3 != 0,
        }
        for n in range(count)
    ]


def processes(count):
    rows = []
    for n in range(count):
        rng = drawn("steps", n)
        labels = [rng.choice([-1, 0, 1]) for _ in range(rng.randint(2, 5))]
        if n == 1:
            labels = [0] * len(labels)  # nothing that a binary loss could learn
        rows.append(
            {
                "prompt": message("user", text(3, 9, "prompt", n)),
                "completions": [text(1, 5, "step", n, k) for k in range(len(labels))],
                "labels": labels,
            }
        )
    return rows


DATA = {"reward": pairs, "kwise": ranked, "orm": outcomes, "prm": processes}


def settings(**config):
    defaults = {
        **trainer_fields(),
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "max_length": 64,
    }
    return {**defaults, **config}


def build(
    name,
    which="chapter",
    *,
    count=16,
    rows=None,
    held_out=None,
    model=None,
    tokenizer=None,
    peft=None,
    candidates=(),
    **config,
):
    """Return a trainer of the family on fixed rows, with a head that says something."""
    steps = {"step_separator": SEPARATOR, "step_split": SPLIT} if name == "prm" else {}
    trainer, config_class = {
        "reward": (BookRewardTrainer, BookRewardConfig),
        "kwise": (BookRewardTrainer, BookRewardConfig),
    }.get(name, (BookTokenRewardTrainer, BookTokenRewardConfig))
    row = {"algorithm": name, "formulation": which}
    built = trainer(
        model or checkpoint(),
        config_class(**settings(**recipe_defaults(config_class) | row | steps | config)),
        train_dataset=Dataset.from_list(rows or DATA[name](count)),
        eval_dataset=None if held_out is None else Dataset.from_list(held_out),
        processing_class=tokenizer or build_tokenizer(),
        peft_config=peft,
    )
    built.candidates = candidates
    move(built.model)
    return built


def move(model):
    """Move the weights (not under an adapter) and the head, so that scores differ by about 1."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        drift(model, 0.05, 99)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "score" in key and parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise if parameter.dim() > 1 else 0.5 * noise)


def flipped(collate):
    """Let a collator's batch be padded on the left."""

    def left(rows):
        batch = collate(rows)
        for n, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            for key in ("input_ids", "attention_mask"):
                batch[key][n] = batch[key][n].roll(-length)
        return batch

    return left


# --- the oracle ----------------------------------------------------------------------------------


def ids(words):
    return build_tokenizer()(words, add_special_tokens=False)["input_ids"]


def asked(row):
    return f"<|bos|><|user|>{row['prompt'][0]['content']}{END}<|assistant|>"


def texts(name, row):
    """Return (ids, places, labels) of each text of a row; no label: the place of the one score."""
    if name in ("reward", "kwise"):
        sides = row["ranked"] if name == "kwise" else [row["chosen"], row["rejected"]]
        written = [ids(asked(row) + side[0]["content"] + END) for side in sides]
        return [(each, [len(each) - 1], None) for each in written]
    found, places = ids(asked(row)), []
    start = len(found)
    if name == "orm":
        found = found + ids(row["completion"][0]["content"] + END * row["finished"])
        places = list(range(start, len(found)))
        return [(found, places, [int(row["label"])] * len(places))]
    for step in row["completions"]:
        found = found + ids(step) + ids(SEPARATOR)
        places.append(len(found) - 1)
    return [(found, places, list(row["labels"]))]


def outputs(model, found, places):
    """Return the head's outputs (places, labels) on a text alone, without padding."""
    hidden = model.model(input_ids=torch.tensor([found])).last_hidden_state[0, places]
    bias = model.score.bias
    return hidden @ model.score.weight.T + (0 if bias is None else bias)


class Reference:
    """The public function on the rows of each micro-batch, text by text."""

    def __init__(self, name, which, *, before_end=False, **params):
        self.name, self.which, self.params = name, which, params
        self.shift = -1 if before_end else 0  # where the score is read, if not at the very end

    def call(self, model, rows):
        name, which = self.name, self.which
        written = [each for row in rows for each in texts(name, row)]
        if name in ("reward", "kwise"):
            scores = torch.stack(
                [outputs(model, t, [p[0] + self.shift])[0, 0] for t, p, _ in written]
            ).view(len(rows), -1)
            if name == "kwise":
                return reward_loss("kwise", rewards=scores, formulation=which)
            given = {"chosen": scores[:, 0], "rejected": scores[:, 1]}
            if "margin" in rows[0]:
                given["margin"] = torch.tensor([row["margin"] for row in rows])
            return reward_loss("bradley_terry", formulation=which, **given, **self.params)
        logits = [outputs(model, t, p) for t, p, _ in written]
        labels = [torch.tensor(labels) for _, _, labels in written]
        if name == "prm" and which == "code":
            labels = [each + 1 for each in labels]
        else:
            logits = [each.squeeze(1) for each in logits]
            if name == "prm":
                labels = [torch.where(y == 0, -100, (y > 0).long()) for y in labels]
        pad = torch.nn.utils.rnn.pad_sequence
        return reward_loss(
            name,
            logits=pad(logits, batch_first=True),
            labels=pad(labels, batch_first=True, padding_value=-100),
            formulation=which,
            **self.params,
        )

    def __call__(self, model, window):
        return sum(self.call(model, rows) for rows in window) / len(window)


def measured(trainer, reference, rows):
    """Measure the first accumulation window of a trainer that takes its rows in order."""
    plain = deepcopy(trainer.model)
    ours, window = accumulate(trainer, batches(trainer))
    size = trainer.args.per_device_train_batch_size
    parts = [rows[i * size : (i + 1) * size] for i in range(len(window))]
    loss = reference(plain, parts)
    loss.backward()
    return Comparison(ours, Measured(float(loss.detach()), flat_gradient(plain)))
