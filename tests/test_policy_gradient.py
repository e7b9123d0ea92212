"""The policy-gradient trainer against the public function, TRL itself and its own promises."""

import hashlib
import random
from functools import cache

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from rlhf_trl import policy_gradient_loss
from rlhf_trl.algorithms import ALGORITHMS, formulation
from rlhf_trl.compare.measure import accumulate, batches, fix_completions, measure, plain_copy
from rlhf_trl.tiny.model import build_model
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.policy_gradient import PolicyGradientConfig, PolicyGradientTrainer

NAMES = [name for name in ALGORITHMS if name != "ppo"]
ROWS = [(name, which) for name in NAMES for which in ALGORITHMS[name].formulations]
END, LIMIT, CACHE = 5, 12, 4
WORDS = ["sun", "tree", "river", "stone", "cloud", "light", "green", "house", "mouse", "bread"]
WEIGHTS = (1.0, 0.5)


def drawn(*key):
    """A random generator for this key, the same in every process."""
    return random.Random(hashlib.sha256(repr(key).encode()).hexdigest())


def completion(prompt_ids, index, call):
    """Ragged completions of 1 to LIMIT tokens; the longest are cut off."""
    rng = drawn(prompt_ids, index, call)
    length = rng.randint(1, LIMIT)
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


def own_fields(name, which):
    row = formulation(name, which)
    return {k: v for k, v in OWN.get(name, {}).items() if k in row.trainer_reads}


def build(name, which="chapter", *, model=None, trainer=PolicyGradientTrainer, **config):
    """A trainer on ten prompts with two rewards and fixed completions."""
    if trainer is PolicyGradientTrainer:
        config = own_fields(name, which) | config
    defaults = {
        "output_dir": "/nonexistent",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": LIMIT,
        "reward_weights": list(WEIGHTS),
    }
    rows = [{"prompt": [{"role": "user", "content": word}], "word": word} for word in WORDS]
    config_class = trainer.__init__.__annotations__.get("config_class", PolicyGradientConfig)
    built = trainer(
        model=model or checkpoint(),
        reward_funcs=[right, shaped],
        args=config_class(**{**defaults, **config}),
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
        **({"algorithm": name, "formulation": which} if trainer is PolicyGradientTrainer else {}),
    )
    fix_completions(built, completion)
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
        if name == "dapo" and which != "trl":
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

    def __init__(self, trainer, name, which, beta):
        self.trainer, self.name, self.which, self.beta = trainer, name, which, beta
        self.row = formulation(name, which)
        self.ref = AutoModelForCausalLM.from_pretrained(checkpoint())
        self.old = None  # the policy that generated; None: this one

    def call(self, plain, batch, normalizer=None):
        given, row, name = {}, self.row, self.name
        if "max_completion_length" in row.reads:
            given["max_completion_length"] = LIMIT
        rewards = rewards_of(name, self.which, batch)
        with torch.no_grad():
            ref = plain_logps(self.ref, batch) if self.beta else None
            old = plain_logps(self.old, batch) if self.old else None
        logps = plain_logps(plain, batch)
        if self.beta:
            given |= {"beta": self.beta, "ref_logps": ref}
        if row.ratio != "none" or (row.kl == "reward" and self.beta):
            given["old_logps"] = old
        if name == "maxrl":
            given["binary_rewards"] = successes_of(batch)
        if name == "reinforce" and self.which == "chapter":
            given |= {"baseline": "moving_average", "baseline_value": self.batch_mean(batch)}
        return policy_gradient_loss(
            name,
            formulation=self.which,
            logps=logps,
            mask=batch["completion_mask"],
            rewards=rewards,
            num_generations=4,
            normalizer=normalizer,
            **given,
        ).loss

    def batch_mean(self, batch):
        """The mean over the whole generation batch, of which this is a part."""
        slices = self.trainer._buffered_inputs
        slices = slices if any(s["completion_ids"] is batch["completion_ids"] for s in slices) else [batch]
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
        if self.row.window == "window":
            normalizer = None
            args = self.trainer.args
            if self.which == "trl":  # the average window of the generation
                share = args.gradient_accumulation_steps / args.steps_per_generation
                parts = [
                    (b["completion_mask"].sum() / (b["num_items_in_batch"] * share)) for b in window
                ]
                return sum(
                    self.call(plain, b, b["num_items_in_batch"] * share) for b in window
                )
            return self.call(plain, joined(window), normalizer)
        return sum(self.call(plain, batch) for batch in window) / len(window)


def drift(model, scale, seed):
    """Move the policy, as optimizer steps would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += scale * parameter.std() * noise if parameter.dim() > 1 else 0


@pytest.fixture
def in_order(monkeypatch):
    """Keep groups together in micro-batches, so that the public function can be called on them."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


# accumulation, steps per generation, iterations, drift
SCHEDULES = [
    (1, 1, 1, 0.0),
    (1, 4, 1, 0.02),
    (1, 1, 2, 0.15),
    (2, 1, 1, 0.02),
    (2, 2, 1, 0.0),
    (2, 4, 1, 0.15),
    (2, 2, 2, 0.02),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("name", "which"), ROWS)
def test_gradient_is_the_public_functions(name, which, schedule, in_order):
    accumulation, per_generation, iterations, scale = schedule
    reads_beta = "beta" in formulation(name, which).reads
    for beta in (0.0, 0.1) if reads_beta else (0.0,):
        trainer = build(
            name,
            which,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=per_generation,
            num_iterations=iterations,
            beta=beta,
            per_device_train_batch_size=8,
        )
        drift(trainer.model, 0.05, 99)  # away from the reference policy
        reference = Reference(trainer, name, which, beta)
        source = batches(trainer)
        windows = max(1, per_generation * iterations // accumulation)
        errors = []
        for number in range(windows):
            if number == 0:
                reference.old = plain_copy(trainer) if windows > 1 else None
            else:
                drift(trainer.model, scale, number)
            result = measure(trainer, source, reference)
            assert result.reference.gradient.norm() > 1e-3
            errors.append(result.relative_error)
            assert result.trainer.loss == pytest.approx(result.reference.loss, rel=1e-4, abs=1e-5)
        assert max(errors) <= 1e-5, errors
