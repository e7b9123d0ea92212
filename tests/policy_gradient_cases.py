"""A policy-gradient trainer on a fixed batch, and the public function on the same batch."""

import hashlib
import random
from functools import cache

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from rlhf_trl import policy_gradient_loss
from rlhf_trl.algorithms import ALGORITHMS, formulation, names
from rlhf_trl.compare.models import trainer_fields
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.run.config_types import recipe_defaults
from rlhf_trl.tiny.model import build_model
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.policy_gradient import BookGRPOConfig, BookGRPOTrainer

NAMES = [name for name in names("policy_gradient") if name != "ppo"]
ROWS = [(name, which) for name in NAMES for which in ALGORITHMS[name].formulations]
ROWS.remove(("rloo", "trl"))  # which is RLOOTrainer's
END, LIMIT, CACHE = 5, 12, 4
WORDS = ["sun", "tree", "river", "stone", "cloud", "light", "green", "house", "mouse", "bread"]
WEIGHTS = (1.0, 0.5)


def drawn(*key):
    """A random generator for this key, the same in every process."""
    return random.Random(hashlib.sha256(repr(key).encode()).hexdigest())


def completion(prompt_ids, index, call):
    """Ragged completions of 1 to LIMIT tokens; the longest are cut off."""
    rng = drawn(prompt_ids, index, call)
    length = min(rng.randint(1, LIMIT + 2), LIMIT)
    ids = [rng.randrange(7, 119) for _ in range(length)]
    return ids if length == LIMIT else [*ids[:-1], END]


def is_right(ids):
    return float(drawn("right", tuple(ids)).random() < 0.5)


def is_shaped(ids):
    return drawn("shaped", tuple(ids)).choice([0.25, 1.0, 1.0])


def right(completion_ids, **kwargs):
    return [is_right(ids) for ids in completion_ids]


def shaped(completion_ids, **kwargs):
    return [is_shaped(ids) for ids in completion_ids]


@cache
def checkpoint():
    """A folder with an untrained model, from which trainers load policy and reference."""
    import tempfile

    folder = tempfile.mkdtemp()
    model = build_model(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5  # a distribution further from uniform
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


OWN = {
    "dapo": {
        "correctness_reward": "right",
        "soft_punish_cache": CACHE,
        "dynamic_sampling_rounds": 0,
    },
    "maxrl": {"correctness_reward": "right", "format_reward": "shaped"},
}
OWN["dapo_per_prompt"] = OWN["dapo"]


def own_fields(name, which):
    row = formulation(name, which)
    return {k: v for k, v in OWN.get(name, {}).items() if k in row.trainer_reads}


def build(
    name,
    which="chapter",
    *,
    model=None,
    answer=completion,
    rewards=None,
    peft_config=None,
    **config,
):
    """A trainer on ten prompts with two rewards and fixed completions; "stock" is TRL's own."""
    ours = name != "stock"
    trainer, config_class = which if not ours else (BookGRPOTrainer, BookGRPOConfig)
    if ours:
        row = {"algorithm": name, "formulation": which}
        config = {**recipe_defaults(BookGRPOConfig), **row, **own_fields(name, which), **config}
    defaults = {
        **trainer_fields(),
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": LIMIT,
        "reward_weights": list(WEIGHTS),
    }
    rows = [{"prompt": [{"role": "user", "content": word}], "word": word} for word in WORDS]
    built = trainer(
        model=model or checkpoint(),
        reward_funcs=rewards or [right, shaped],
        args=config_class(**{**defaults, **config}),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        peft_config=peft_config,
    )
    if answer is not None:
        fix_completions(built, answer)
    return built


# --- the oracle: log-probabilities of a plain forward, rewards from the ids ----------------------


def plain_logps(model, batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    tokens = batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=attention).logits[:, -tokens - 1 : -1]
    logps = torch.log_softmax(logits.float(), -1)
    return logps.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def completions_of(batch):
    pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def rewards_of(name, which, batch):
    rewards = []
    for ids in completions_of(batch):
        reward = WEIGHTS[0] * is_right(ids) + WEIGHTS[1] * is_shaped(ids)
        if name in ("dapo", "dapo_per_prompt") and which != "trl":
            over = len(ids) - (LIMIT - CACHE)
            reward -= min(max(over / CACHE, 0), 1)
        rewards.append(reward)
    return torch.tensor(rewards)


def successes_of(batch):
    return torch.tensor([is_right(i) * (is_shaped(i) == 1) for i in completions_of(batch)])


def widened(batch, tokens):
    """Pad the completions of a micro-batch to a number of tokens."""
    more = tokens - batch["completion_ids"].shape[1]
    pad = torch.nn.functional.pad
    keys = ("completion_ids", "completion_mask")
    return {k: pad(v, (0, more)) if k in keys else v for k, v in batch.items()}


def joined(window):
    """Concatenate micro-batches (of one generation, so that prompts have one width)."""
    tokens = max(batch["completion_ids"].shape[1] for batch in window)
    window = [widened(batch, tokens) for batch in window]
    prompt = max(batch["prompt_ids"].shape[1] for batch in window)
    pad = torch.nn.functional.pad
    for batch in window:
        for key in ("prompt_ids", "prompt_mask"):
            batch[key] = pad(batch[key], (prompt - batch[key].shape[1], 0))
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return {key: torch.cat([batch[key] for batch in window]) for key in keys}


class Reference:
    """The public function on a plain forward of the same micro-batches."""

    def __init__(self, trainer, name, which, beta=0.0, **params):
        self.trainer, self.name, self.which, self.beta = trainer, name, which, beta
        self.params = params
        self.row = formulation(name, which)
        self.ref = AutoModelForCausalLM.from_pretrained(checkpoint())
        self.old = None  # the policy that generated; None: this one

    def call(self, plain, batch, normalizer=None):
        given, row, name = dict(self.params), self.row, self.name
        if "max_completion_length" in row.reads:
            given["max_completion_length"] = LIMIT
        rewards = rewards_of(name, self.which, batch)
        with torch.no_grad():
            ref = plain_logps(self.ref, batch) if self.beta else None
            old = plain_logps(self.old, batch) if self.old else None
        logps = plain_logps(plain, batch)
        if self.beta:
            given |= {"beta": self.beta, "ref_logps": ref}
        if row.ratio != "none" or "importance_cap" in given or (row.kl == "reward" and self.beta):
            given["old_logps"] = old
        if name == "maxrl":
            given["binary_rewards"] = successes_of(batch)
        if name == "reinforce" and self.which == "chapter":
            given |= {"baseline": "moving_average", "baseline_value": self.batch_mean(batch)}
        return policy_gradient_loss(
            name,
            formulation=self.which,
            logps=logps,
            mask=batch["completion_mask"] * batch.get("tool_mask", 1),  # of groups with contrast
            rewards=rewards,
            num_generations=4,
            normalizer=normalizer,
            **given,
        ).loss

    def batch_mean(self, batch):
        """The mean over the whole generation batch, of which this is a part."""
        slices = self.trainer._buffered_inputs
        if not any(part["completion_ids"] is batch["completion_ids"] for part in slices):
            slices = [batch]
        found = []
        for part in slices:
            rewards = rewards_of(self.name, self.which, part)
            if self.beta:
                with torch.no_grad():
                    old = plain_logps(self.old or self.now, part)
                    kl = (old - plain_logps(self.ref, part)) * part["completion_mask"]
                rewards = rewards - self.beta * kl.sum(1)
            found.append(rewards)
        return torch.cat(found).mean().item()

    def __call__(self, plain, window):
        self.now = plain
        if self.row.window == "window" and self.which == "trl":  # TRL's average window
            args = self.trainer.args
            share = args.gradient_accumulation_steps / args.steps_per_generation
            return sum(self.call(plain, b, b["num_items_in_batch"] * share) for b in window)
        if self.row.window == "window":
            return self.call(plain, joined(window))
        return sum(self.call(plain, batch) for batch in window) / len(window)


def drift(model, scale, seed):
    """Move the policy, as optimizer steps would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += scale * parameter.std() * noise if parameter.dim() > 1 else 0
