"""What every metric of a run has to be: plain torch and transformers over the run's own record.

The record is what a run leaves or starts from: `rollouts.sqlite`, the held-out and training rows
with their labels, and the model at each step. Nothing here calls a loss, a metric or a reader of
rlhf_trl. Models and sums are float64; a run's own numbers are float32.
"""

import json
import math
import re
import sqlite3
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import torch.nn.functional as F
from reasoning_gym.composite import DatasetSpec
from torch.nn.utils import get_total_norm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

SHORT = 11  # DAPO's max_completion_length
CACHE = 4  # its soft_punish_cache
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass
class Run:
    """A finished run: its folder, what it printed, its trainer, and the rows it was given."""

    folder: Path
    printed: str
    trainer: Any
    data: Any
    options: dict[str, str]

    @cached_property
    def log(self):
        return json.loads((self.folder / "log.json").read_text())

    @cached_property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @cached_property
    def evaluations(self):
        paths = sorted((self.folder / "evaluations").glob("step-*.json"))
        return {
            int(path.stem.removeprefix("step-")): json.loads(path.read_text()) for path in paths
        }

    @cached_property
    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.folder / "model")

    @cached_property
    def rollouts(self):
        """The rows of the record by split and generation."""
        connection = sqlite3.connect(self.folder / "rollouts.sqlite")
        connection.row_factory = sqlite3.Row
        rows = defaultdict(list)
        query = "SELECT * FROM rollouts JOIN prompts ON id = prompt_id ORDER BY generation, sample"
        for row in connection.execute(query):
            rows[row["split"], row["generation"]].append(dict(row))
        connection.close()
        return rows

    def model(self, step, auto=AutoModelForCausalLM, part=""):
        """The model after a step, in float64."""
        folder = self.folder / (f"checkpoint-{step}" if step else "start") / part
        return auto.from_pretrained(folder, dtype=torch.float64).eval()

    def tokens(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, prompt):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.tokens(
            self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def answer_ids(self, completion, finished=True):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        return self.tokens(text) + [self.tokenizer.eos_token_id] * bool(finished)

    def recorded_ids(self, row):
        """Prompt and completion of a row of the record, whose count of tokens must be right."""
        answer = self.answer_ids(row["completion"], row["finished"])
        assert len(answer) == row["tokens"]
        return self.prompt_ids(row["prompt"]), answer


def mean(values):
    values = [float(value) for value in values]
    return sum(values) / len(values)


def spread(values):
    """The standard deviation with n - 1."""
    return torch.tensor([float(value) for value in values], dtype=torch.float64).std().item()


def share(conditions):
    return mean(map(bool, conditions))


def padded(rows):
    """Ids and mask of texts, padded on the right."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def logits_of(model, texts):
    """For each prompt with its completion, (T, V) logits before the completion's tokens."""
    ids, mask = padded([prompt + answer for prompt, answer in texts])
    logits = model(input_ids=ids, attention_mask=mask).logits
    return [
        row[len(prompt) - 1 : len(prompt) + len(answer) - 1]
        for row, (prompt, answer) in zip(logits, texts, strict=True)
    ]


def picked(logits, ids):
    """(T,) log-probabilities of tokens."""
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def logps_of(model, texts):
    logits = logits_of(model, texts)
    return [picked(row, answer) for row, (_, answer) in zip(logits, texts, strict=True)]


def entropies(logits):
    logps = logits.log_softmax(-1)
    return -(logps.exp() * logps).sum(-1)


def mean_over_tokens(rows):
    """The mean of (T,) rows of several texts over all of their tokens."""
    return torch.cat(list(rows)).mean()


def top1(logits, ids):
    return (logits.argmax(-1) == torch.tensor(ids)).double()


def norm(loss, *models):
    """The norm of the gradient of a loss."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return get_total_norm([gradient for gradient in gradients if gradient is not None]).item()


def updated(loss, *models):
    return {"loss": loss.item(), "grad_norm": norm(loss, *models)}


def flops(model, texts):
    """What transformers counts for a step: 6 for each parameter and token, with padding."""
    embedding = model.get_input_embeddings().weight
    own = {id(p): p.numel() for p in model.parameters() if p is not embedding}
    return 6 * sum(own.values()) * padded(texts)[0].numel()


# ---- answers to the gym's questions


def right_answer(prompt):
    """The question is to spell the word at its end backward."""
    return prompt.rpartition(" ")[2][::-1]


def final(text):
    answers = ANSWER.findall(text)
    return answers[-1].strip() if answers else None


GYM = reasoning_gym.create_dataset("spell_backward", size=1, seed=0)


def scores_by_hand(prompt, text):
    right, answer = right_answer(prompt), final(text)
    return {
        "exact_match": float(answer == right),
        "format": sum(tag in text for tag in TAGS) / 4,
        "gym_score": float(GYM.score_answer(answer, {"answer": right})),
    }


def penalties(tokens, finished, missing_eos):
    overlong = -min(max((tokens - (SHORT - CACHE)) / CACHE, 0), 1)
    return {"overlong_penalty": overlong, "missing_eos_penalty": 0 if finished else -missing_eos}


def passed_over(questions):
    """How many of the gym's entries are left out among the training questions of seed 0."""
    config = {"min_word_len": 3, "max_word_len": 8}  # of configs/tiny/base.yaml
    spec = DatasetSpec("spell_backward", 1.0, config)
    entries = reasoning_gym.create_dataset("composite", size=11600, seed=0, datasets=[spec])
    missing, left_out = list(questions), 0
    for entry in entries:
        if not missing:
            return left_out
        if entry["question"] == missing[0]:
            missing.pop(0)
        else:
            left_out += 1
    raise AssertionError(f"not in the gym's order: {missing}")


def scored(run, rows):
    """The scores of recorded completions by name, of which a reward model's may be one."""
    scores = [scores_by_hand(row["prompt"], row["completion"]) for row in rows]
    if folder := run.options.get("reward_model"):
        auto = AutoModelForSequenceClassification
        model = auto.from_pretrained(folder, dtype=torch.float64).eval()
        with torch.no_grad():
            texts = [run.recorded_ids(row) for row in rows]
            values = last_outputs(model, [prompt + answer for prompt, answer in texts])
        for of_row, value in zip(scores, values.tolist(), strict=True):
            of_row["reward_model"] = value
    return scores


def rewarded(row, scores, weights, missing_eos=None):
    """Rewards of a recorded completion by name, their weighted sum, and that with penalties."""
    rewards = {name: scores[name] for name in weights}
    rewards["reward"] = sum(weight * scores[name] for name, weight in weights.items())
    if missing_eos is not None:
        of_row = penalties(row["tokens"], row["finished"], missing_eos)
        total = rewards["reward"] + sum(of_row.values())
        rewards |= of_row | {"reward_with_penalties": total}
    return rewards


def answered(run, step, weights=None, missing_eos=None):
    """Metrics of the answers to held-out questions, greedy and sampled."""
    metrics = {}
    for how in ("greedy", "sampled"):
        rows = run.rollouts[f"eval-{how}", step]
        scores = scored(run, rows)
        if weights:  # beside every score of the gym
            pairs = zip(rows, scores, strict=True)
            scores = [own | rewarded(row, own, weights, missing_eos) for row, own in pairs]
        infix = "" if how == "greedy" else "sampled_"
        texts = [run.recorded_ids(row) for row in rows]
        for name in scores[0]:
            metrics[f"eval_{infix}{name}"] = mean(score[name] for score in scores)
        metrics[f"eval_{infix}length"] = mean(len(answer) for _, answer in texts)
        metrics[f"eval_{infix}cut_off"] = share(not row["finished"] for row in rows)
        asked = [(row["prompt"], row["completion"]) for row in rows]
        shown = run.evaluations[step]["answers"]
        assert [(row["question"], row[how]) for row in shown] == asked
        assert [row["answer"] for row in shown] == [right_answer(row["prompt"]) for row in rows]
        if how == "greedy":  # the answers are those of this step's model
            logits = logits_of(run.model(step), texts)
            for row, (_, answer) in zip(logits, texts, strict=True):
                assert row[:, : len(run.tokenizer)].argmax(-1).tolist() == answer
    return metrics


# ---- policy gradients and distillation


class Rollout:
    """A generation of training, read by the models of three steps."""

    def __init__(self, run, number, updates=1):
        self.run, self.rows = run, run.rollouts["train", number]
        self.texts = [run.recorded_ids(row) for row in self.rows]
        self.at = number * updates  # steps before it
        self.size = int(run.options.get("num_generations", 1))

    def groups(self, values):
        values = list(values)
        return [values[n : n + self.size] for n in range(0, len(values), self.size)]

    def generated(self, weights, missing_eos=None):
        """What is logged once for a generation."""
        tokens = [row["tokens"] for row in self.rows]
        ended = [row["tokens"] for row in self.rows if row["finished"]] or [0]
        pairs = zip(self.rows, scored(self.run, self.rows), strict=True)
        rewards = [rewarded(row, scores, weights, missing_eos) for row, scores in pairs]
        for row, by_hand in zip(self.rows, rewards, strict=True):
            recorded = {"reward": row["reward"], **json.loads(row["rewards"])}
            close(recorded, by_hand)
        metrics = {
            "num_tokens": self.tokens_until(),
            "completions/mean_length": mean(tokens),
            "completions/min_length": min(tokens),
            "completions/max_length": max(tokens),
            "completions/clipped_ratio": share(not row["finished"] for row in self.rows),
            "completions/mean_terminated_length": mean(ended),
            "completions/min_terminated_length": min(ended),
            "completions/max_terminated_length": max(ended),
            "reward": mean(row["reward"] for row in rewards),
            "reward_std": spread(row["reward"] for row in rewards),
        }
        for name in weights:
            metrics[f"rewards/{name}/mean"] = mean(row[name] for row in rewards)
            metrics[f"rewards/{name}/std"] = spread(row[name] for row in rewards)
        if missing_eos is not None:
            for name in ("overlong_penalty", "missing_eos_penalty", "reward_with_penalties"):
                metrics[name] = mean(row[name] for row in rewards)
        self.learned = [list(row.values())[-1] for row in rewards]
        if self.size > 1:
            groups = self.groups(self.learned)
            metrics["frac_reward_zero_std"] = share(len(set(group)) == 1 for group in groups)
        return metrics

    def tokens_until(self):
        number = self.rows[0]["generation"]
        splits = ("train", "train-replaced")
        rows = [
            row
            for (split, generation), rows in self.run.rollouts.items()
            if split in splits and generation <= number
            for row in rows
        ]
        return sum(len(text) for row in rows for text in self.run.recorded_ids(row))

    def standardized(self):
        """(B,) advantages of GRPO, in the float32 of the run."""
        groups = torch.tensor(self.learned).view(-1, self.size)
        centered = groups - groups.mean(1, keepdim=True)
        return centered / (groups.std(1, keepdim=True) + 1e-4)

    def equal(self, advantages):
        groups = self.groups(self.learned)
        alike = [len(set(group)) == 1 for group in groups]
        largest = [row.abs().max().item() for row in advantages[torch.tensor(alike)]]
        return {
            "equal_rewards/frac_groups": share(alike),
            "equal_rewards/max_advantage": max(largest, default=0.0),
        }

    def replaced(self, without_contrast):
        """Metrics of dynamic sampling with one round."""
        gone = self.run.rollouts["train-replaced", self.rows[0]["generation"]]
        right = self.groups(final(r["completion"]) == right_answer(r["prompt"]) for r in self.rows)
        lost = self.groups(final(r["completion"]) == right_answer(r["prompt"]) for r in gone)
        assert all(map(without_contrast, lost))
        return {
            "dynamic_sampling/rounds": float(bool(gone)),
            "dynamic_sampling/discarded_groups": len(gone) / self.size,
            "dynamic_sampling/left_without_contrast": sum(map(without_contrast, right)),
        }


def clip_metrics(ratios, advantages, epsilon, epsilon_high):
    """What GRPOTrainer counts of (T,) ratios and advantages."""
    pairs = list(zip(ratios, advantages, strict=True))
    low = [((r < 1 - epsilon) & (a < 0)).double() for r, a in pairs]
    high = [((r > 1 + epsilon_high) & (a > 0)).double() for r, a in pairs]
    both = [a + b for a, b in zip(low, high, strict=True)]
    return {
        "clip_ratio/low_mean": mean_over_tokens(low),
        "clip_ratio/high_mean": mean_over_tokens(high),
        "clip_ratio/region_mean": mean_over_tokens(both),
        "clip_ratio/low_min": min(row.mean() for row in low),
        "clip_ratio/high_max": max(row.mean() for row in high),
    }


def clipped(ratio, advantage, epsilon, epsilon_high):
    held = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.min(ratio * advantage, held * advantage)


def grpo_step(run, step, weights):
    """GRPO with two updates a generation and a KL term."""
    epsilon, beta = float(run.options["epsilon"]), float(run.options["beta"])
    rollout = Rollout(run, (step - 1) // 2, updates=2)
    generated = rollout.generated(weights)
    advantages = rollout.standardized()
    generated |= rollout.equal(advantages)
    model = run.model(step - 1)
    logits = logits_of(model, rollout.texts)
    logps = [picked(x, a) for x, (_, a) in zip(logits, rollout.texts, strict=True)]
    with torch.no_grad():
        old = logps_of(run.model(rollout.at), rollout.texts)
        reference = logps_of(run.model(0), rollout.texts)
    ratios = [(new - before).exp() for new, before in zip(logps, old, strict=True)]
    kls = [(r - p).exp() - (r - p) - 1 for p, r in zip(logps, reference, strict=True)]
    advantages = advantages.flatten().double()
    losses = [
        (clipped(ratio, advantage, epsilon, epsilon) + beta * kl).mean()
        for ratio, advantage, kl in zip(ratios, advantages, kls, strict=True)
    ]
    per_token = [a.expand_as(r) for a, r in zip(advantages, ratios, strict=True)]
    metrics = updated(torch.stack(losses).mean(), model)
    metrics |= clip_metrics(ratios, per_token, epsilon, epsilon)
    metrics["kl"] = mean_over_tokens(kls)
    metrics["entropy"] = mean_over_tokens(map(entropies, logits))
    return metrics | (generated if step - 1 == rollout.at else {})


def reward_model_step(run, step, weights):
    """GRPO with one update a generation and without a KL term."""
    rollout = Rollout(run, step - 1)
    metrics = rollout.generated(weights)
    advantages = rollout.standardized()
    metrics |= rollout.equal(advantages)
    model = run.model(step - 1)
    logits = logits_of(model, rollout.texts)
    logps = [picked(x, a) for x, (_, a) in zip(logits, rollout.texts, strict=True)]
    ratios = [(row - row.detach()).exp() for row in logps]
    pairs = list(zip(ratios, advantages.flatten().double(), strict=True))
    losses = [-(ratio * advantage).mean() for ratio, advantage in pairs]
    metrics |= updated(torch.stack(losses).mean(), model)
    per_token = [advantage.expand_as(ratio) for ratio, advantage in pairs]
    metrics |= clip_metrics(ratios, per_token, 0.2, 0.2)
    metrics["entropy"] = mean_over_tokens(map(entropies, logits))
    return metrics


def dapo_step(run, step, weights):
    """DAPO with one update a generation: every ratio is 1."""
    rollout = Rollout(run, step - 1)
    metrics = rollout.generated(weights, float(run.options["missing_eos_penalty"]))
    metrics |= rollout.replaced(lambda right: len(set(right)) == 1)
    advantages = rollout.standardized()
    metrics |= rollout.equal(advantages)
    model = run.model(step - 1)
    logits = logits_of(model, rollout.texts)
    logps = [picked(x, a) for x, (_, a) in zip(logits, rollout.texts, strict=True)]
    ratios = [(row - row.detach()).exp() for row in logps]
    advantages = advantages.flatten().double()
    per_token = [a.expand_as(r) for a, r in zip(advantages, ratios, strict=True)]
    pairs = zip(ratios, per_token, strict=True)
    metrics |= updated(mean_over_tokens(-ratio * advantage for ratio, advantage in pairs), model)
    metrics |= clip_metrics(ratios, per_token, 0.2, 0.28)
    metrics["entropy"] = mean_over_tokens(map(entropies, logits))
    return metrics


def values_of(model, texts):
    """(T,) values of the state before each token of the completions."""
    return [
        row[len(prompt) - 1 : -1, 0]
        for row, (prompt, _) in zip(
            outputs_of(model, [p + a for p, a in texts]), texts, strict=True
        )
    ]


def gae(reward, values, gamma, lam):
    deltas = [
        (reward if t == len(values) - 1 else 0)
        + gamma * (values[t + 1] if t + 1 < len(values) else 0)
        - values[t]
        for t in range(len(values))
    ]
    discounted = [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
        for t in range(len(values))
    ]
    return torch.tensor(discounted, dtype=torch.float64)


def ppo_step(run, step, weights):
    """PPO with two updates a generation."""
    gamma, lam, weight = 1.0, 0.8, 0.5  # of configs/tiny/ppo.yaml
    clip, epsilon = float(run.options["cliprange_value"]), float(run.options["epsilon"])
    rollout = Rollout(run, (step - 1) // 2, updates=2)
    generated = rollout.generated(weights)
    critic_class = AutoModelForSequenceClassification
    with torch.no_grad():
        old = logps_of(run.model(rollout.at), rollout.texts)
        old_values = values_of(run.model(rollout.at, critic_class, "value_model"), rollout.texts)
    learned = zip(rollout.learned, old_values, strict=True)
    advantages = [gae(reward, values, gamma, lam) for reward, values in learned]
    returns = [a + v for a, v in zip(advantages, old_values, strict=True)]
    variance = torch.cat(advantages).var(correction=0)
    generated |= {
        "advantages/mean": mean_over_tokens(advantages),
        "advantages/std": variance.sqrt(),
        "returns/mean": mean_over_tokens(returns),
        "val/explained_variance": 1 - variance / torch.cat(returns).var(correction=0),
    }
    model, critic = run.model(step - 1), run.model(step - 1, critic_class, "value_model")
    logits = logits_of(model, rollout.texts)
    logps = [picked(x, a) for x, (_, a) in zip(logits, rollout.texts, strict=True)]
    values = values_of(critic, rollout.texts)
    ratios = [(new - before).exp() for new, before in zip(logps, old, strict=True)]
    errors, value_losses, losses = [], [], []
    for n, value in enumerate(values):
        held = old_values[n] + (value - old_values[n]).clamp(-clip, clip)
        errors.append((value - returns[n]) ** 2 / 2)
        value_losses.append(torch.max(errors[n], (held - returns[n]) ** 2 / 2))
        policy = clipped(ratios[n], advantages[n], epsilon, epsilon)
        losses.append((policy + weight * value_losses[n]).mean())
    metrics = updated(torch.stack(losses).mean(), model, critic)
    metrics |= clip_metrics(ratios, advantages, epsilon, epsilon)
    decided = [(a > b).double() for a, b in zip(value_losses, errors, strict=True)]
    moved = [(new - before) ** 2 / 2 for new, before in zip(logps, old, strict=True)]
    metrics |= {
        "entropy": mean_over_tokens(map(entropies, logits)),
        "loss/value_avg": mean_over_tokens(value_losses),
        "val/clipfrac_avg": mean_over_tokens(decided),
        "policy/approxkl_avg": mean_over_tokens(moved),
    }
    return metrics | (generated if step - 1 == rollout.at else {})


def opd_step(run, step, weights):
    """OPD on sampled tokens, which sums over each completion."""
    rollout = Rollout(run, step - 1)
    metrics = rollout.generated(weights)
    model = run.model(step - 1)
    teacher = AutoModelForCausalLM.from_pretrained(
        run.options["teacher_models"], dtype=torch.float64
    )
    logits = logits_of(model, rollout.texts)
    logps = [picked(x, a) for x, (_, a) in zip(logits, rollout.texts, strict=True)]
    with torch.no_grad():
        taught = logps_of(teacher, rollout.texts)
    gaps = [(p - q).detach() for p, q in zip(logps, taught, strict=True)]
    losses = [(gap * p).sum() for gap, p in zip(gaps, logps, strict=True)]
    metrics |= updated(torch.stack(losses).mean(), model)
    metrics["teacher/kl"] = mean_over_tokens(gaps)
    metrics["entropy"] = mean_over_tokens(map(entropies, logits))
    return metrics


def with_tail(logps):
    rest = 1 - logps.exp().sum(-1, keepdim=True)
    return torch.cat([logps, rest.clamp(min=1e-7).log()], -1)


def sdpo_step(run, step, weights):
    """SDPO as the code has it: the first right completion, the 20 likeliest tokens and the rest."""
    rollout = Rollout(run, step - 1)
    metrics = rollout.generated(weights) | rollout.replaced(lambda right: not any(right))
    model, teacher = run.model(step - 1), run.model(0)
    shown, prompts = [], []
    for group in rollout.groups(rollout.rows):
        right = [r for r in group if final(r["completion"]) == right_answer(r["prompt"])]
        hint = right[0]["completion"] if right else None
        shown += [hint] * len(group)
        ends = "" if hint is None else f"\n{hint}"
        prompts += [run.prompt_ids(row["prompt"] + ends) for row in group]
    own = [hint == row["completion"] for hint, row in zip(shown, rollout.rows, strict=True)]
    metrics["teacher/demonstrated"] = share(hint is not None for hint in shown)
    metrics["teacher/own_demonstration"] = share(own)
    logits = logits_of(model, rollout.texts)
    hinted = [(prompt, a) for prompt, (_, a) in zip(prompts, rollout.texts, strict=True)]
    with torch.no_grad():
        taught = logits_of(teacher, hinted)
    losses = []
    for student, other, hint in zip(logits, taught, shown, strict=True):
        p, places = student.log_softmax(-1).topk(20)
        q = with_tail(other.log_softmax(-1).gather(-1, places))
        p = with_tail(p)
        losses.append((p.exp() * (p - q)).sum(-1) * (hint is not None))
    of_prompts = [mean_over_tokens(group) for group in rollout.groups(losses)]
    metrics |= updated(torch.stack(of_prompts).mean(), model)
    metrics["entropy"] = mean_over_tokens(map(entropies, logits))
    return metrics


# ---- preferences


def pair_texts(run, rows, side):
    return [(run.prompt_ids(row["prompt"]), run.answer_ids(row[side])) for row in rows]


def preferred(better, worse):
    """The share of pairs whose first is higher, a tie as one half."""
    return mean((b > w) + (b == w) / 2 for b, w in zip(better, worse, strict=True))


def of_sides(logits, texts):
    """Log-probabilities, logits and token accuracy of one side."""
    logps = [picked(x, a) for x, (_, a) in zip(logits, texts, strict=True)]
    right = [top1(x, a) for x, (_, a) in zip(logits, texts, strict=True)]
    return logps, mean_over_tokens(x.mean(-1) for x in logits), mean_over_tokens(right)


def dpo(run, rows, step, prefix="", training=False):
    """DPO's metrics of rows, by the model of a step."""
    beta, model = 3.0, run.model(step)
    texts = {side: pair_texts(run, rows, side) for side in ("chosen", "rejected")}
    with torch.no_grad():
        reference = run.model(0)
        references = {
            side: torch.stack([row.sum() for row in logps_of(reference, texts[side])])
            for side in texts
        }
    logits = {side: logits_of(model, texts[side]) for side in texts}
    logps, metrics, rewards = {}, {}, {}
    for side in texts:
        rows_of_logps, mean_logits, accuracy = of_sides(logits[side], texts[side])
        logps[side] = torch.stack([row.sum() for row in rows_of_logps])
        rewards[side] = beta * (logps[side] - references[side])
        metrics[f"logps/{side}"] = logps[side].mean()
        metrics[f"logits/{side}"] = mean_logits
        metrics[f"rewards/{side}"] = rewards[side].mean()
        if side == "chosen":
            metrics["mean_token_accuracy"] = accuracy
    loss = -F.logsigmoid(rewards["chosen"] - rewards["rejected"]).mean()
    higher = (rewards["chosen"] > rewards["rejected"]).double()
    metrics |= {
        "entropy": mean_over_tokens(map(entropies, [*logits["chosen"], *logits["rejected"]])),
        "rewards/margins": (rewards["chosen"] - rewards["rejected"]).mean(),
        "rewards/accuracies": higher.mean(),
        "pair_accuracy": preferred(rewards["chosen"], rewards["rejected"]),
    }
    seen = [prompt + answer for side in texts for prompt, answer in texts[side]]
    return finished(metrics, loss, [model], seen, prefix, training)


def finished(metrics, loss, models, texts, prefix, training):
    """Add loss, gradient and tokens; name the metrics of an evaluation."""
    if training:
        return metrics | updated(loss, *models) | {"num_tokens": sum(map(len, texts))}
    metrics |= {"loss": loss, "num_tokens": 0}
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def orpo(run, rows, step, prefix="", training=False):
    """ORPO's metrics of rows."""
    beta, model = 0.1, run.model(step)
    sides = ("chosen", "rejected")
    texts = [pair_texts(run, rows, side) for side in sides]
    both = [*texts[0], *texts[1]]
    ids, mask = padded([prompt + answer for prompt, answer in both])
    logits = model(input_ids=ids, attention_mask=mask).logits
    rows_of_logps = [
        picked(row[len(prompt) - 1 : len(prompt) + len(answer) - 1], answer)
        for row, (prompt, answer) in zip(logits, both, strict=True)
    ]
    sums = torch.stack([row.sum() for row in rows_of_logps]).chunk(2)
    means = torch.stack([row.mean() for row in rows_of_logps]).chunk(2)
    odds = [m - torch.log1p(-m.exp()) for m in means]
    ratio = F.logsigmoid(odds[0] - odds[1])
    loss = -means[0].mean() - beta * ratio.mean()
    metrics = {
        "nll_loss": -means[0].mean(),
        "log_odds_ratio": ratio.mean(),
        "log_odds_chosen": (odds[0] - odds[1]).mean(),
        "rewards/margins": beta * (means[0] - means[1]).mean(),
        "rewards/accuracies": (means[0] > means[1]).double().mean(),
        "pair_accuracy": preferred(*means),
    }
    of_tokens = logits[:, :-1].mean(-1).chunk(2)
    masks = mask[:, 1:].chunk(2)
    for n, side in enumerate(sides):
        metrics[f"logps/{side}"] = sums[n].mean()
        metrics[f"rewards/{side}"] = beta * means[n].mean()
        # in training ORPOTrainer's mean takes padding in, too
        counted = torch.ones_like(masks[n]) if training else masks[n]
        metrics[f"logits/{side}"] = (of_tokens[n] * counted).sum() / counted.sum()
    metrics = finished(metrics, loss, [model], [], prefix, training)
    metrics.pop(f"{prefix}num_tokens")  # ORPOTrainer counts none
    return metrics


def kto(run, dataset, step, prefix="", training=False):
    """KTO's metrics of its rows, which have completions of other prompts for the KL."""
    beta, model, reference = 0.1, run.model(step), run.model(0)
    rows = list(dataset)
    texts = [(run.prompt_ids(row["prompt"]), run.answer_ids(row["completion"])) for row in rows]
    assert [(row["prompt_ids"], row["completion_ids"]) for row in rows] == texts
    others = [(row["prompt_ids"], row["KL_completion_ids"]) for row in rows]
    known = {tuple(answer): tuple(prompt) for prompt, answer in texts}
    assert all(known[tuple(answer)] != tuple(prompt) for prompt, answer in others)
    with torch.no_grad():
        gaps = [
            (p.sum() - q.sum())
            for p, q in zip(logps_of(model, others), logps_of(reference, others), strict=True)
        ]
        kl = torch.stack(gaps).mean().clamp(min=0)
        references = torch.stack([row.sum() for row in logps_of(reference, texts)])
    logits = logits_of(model, texts)
    wanted = torch.tensor([bool(row["label"]) for row in rows])
    logps = torch.stack([picked(x, a).sum() for x, (_, a) in zip(logits, texts, strict=True)])
    rewards = beta * (logps - references)
    signs = torch.where(wanted, 1, -1)
    loss = (1 - torch.sigmoid(signs * (rewards - beta * kl))).mean()
    metrics = {"kl": kl, "entropy": mean_over_tokens(map(entropies, logits))}
    for side, chosen in (("chosen", wanted), ("rejected", ~wanted)):
        mine = [x.mean(-1) for x, wanted_row in zip(logits, chosen, strict=True) if wanted_row]
        metrics[f"logits/{side}"] = mean_over_tokens(mine)
        metrics[f"logps/{side}"] = logps[chosen].mean()
        metrics[f"rewards/{side}"] = rewards[chosen].mean()
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    seen = [prompt + answer for prompt, answer in texts]
    return finished(metrics, loss, [model], seen, prefix, training)


# ---- reward models


def outputs_of(model, texts):
    """(L, K) outputs of the head after each token."""
    ids, mask = padded(texts)
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    outputs = model.score(hidden)
    return [row[: len(text)] for row, text in zip(outputs, texts, strict=True)]


def whole_ids(run, prompt, completion, finished=True):
    """A text as a comparison model reads it: prompt, turn of the assistant, and its end."""
    return run.prompt_ids(prompt) + run.answer_ids(completion, finished)


def last_outputs(model, texts):
    return torch.stack([row[-1, 0] for row in outputs_of(model, texts)])


def compared(run, rows, step, prefix="", training=False):
    """Metrics of pairs, or of ranked lists."""
    model = run.model(step, AutoModelForSequenceClassification)
    ranked = "ranked" in rows[0]
    lists = [row["ranked"] if ranked else [row["chosen"], row["rejected"]] for row in rows]
    texts = [
        whole_ids(run, row["prompt"], answer)
        for row, answers in zip(rows, lists, strict=True)
        for answer in answers
    ]
    rewards = last_outputs(model, texts).view(len(rows), -1)
    size = rewards.shape[1]
    losses = [
        rewards[:, k:].logsumexp(1) - rewards[:, k]  # of two: -log sigmoid(r_c - r_r)
        for k in range(size)
    ]
    metrics = {}
    pairs = [pair for row in rewards.tolist() for pair in pairwise(row)]
    better, worse = zip(*pairs, strict=True)
    if not ranked:
        metrics = {
            "min_reward": rewards.min(),
            "mean_reward": rewards.mean(),
            "max_reward": rewards.max(),
            "accuracy": share(b > w for b, w in pairs),
        }
        if training:
            metrics["margin"] = mean(b - w for b, w in pairs)
    if not training:
        metrics |= {
            "pair_accuracy": preferred(better, worse),
            "margin": mean(b - w for b, w in pairs),
            "chosen_mean": mean(better),
            "rejected_mean": mean(worse),
            "calibration_error": calibration_error(pairs),
            **ranking(run, model, step),
        }
        for kind in sorted({row["kind"] for row in rows}) if "kind" in rows[0] else ():
            mine = [pair for pair, row in zip(pairs, rows, strict=True) if row["kind"] == kind]
            metrics[f"pair_accuracy_{kind}"] = preferred(*zip(*mine, strict=True))
    return finished(metrics, sum(losses).mean(), [model], texts, prefix, training)


def calibration_error(pairs):
    """Over ten bins of P(the first wins), each pair in both orders."""
    bins = defaultdict(list)
    for better, worse in pairs:
        p = 1 / (1 + math.exp(worse - better))
        for probability, won in ((p, 1), (1 - p, 0)):
            bins[min(int(10 * probability), 9)].append((probability, won))
    total = sum(map(len, bins.values()))
    return sum(
        len(rows) / total * abs(mean(p for p, _ in rows) - mean(won for _, won in rows))
        for rows in bins.values()
    )


def candidate_score(run, outputs, row, places):
    """What a candidate is worth to a model: its pooled, mean or worst output."""
    algorithm = run.trainer.reader.algorithm
    if algorithm == "orm":
        return outputs[places, 0].sigmoid().mean().item()
    if algorithm == "prm":
        return outputs[places].softmax(-1)[:, 2].min().item()
    return outputs[-1, 0].item()


def candidate_ids(run, row):
    """The text of a candidate, and where its outputs are read."""
    algorithm = run.trainer.reader.algorithm
    completion = row["completion"]
    text = completion if isinstance(completion, str) else completion[0]["content"]
    if algorithm == "prm":
        split = r"(?<=\w)(?=\w*</answer>)"  # of configs/tiny/prm.yaml
        steps = [step for step in re.split(split, text) if step.strip()]
        return step_ids(run, row["prompt"], steps)
    prompt = run.prompt_ids(row["prompt"])
    ids = prompt + run.answer_ids(text, row["finished"])
    return ids, list(range(len(prompt), len(ids)))


def step_ids(run, prompt, steps):
    ids, places = run.prompt_ids(prompt), []
    for step in steps:
        ids = ids + run.tokens(f"{step}\n")
        places.append(len(ids) - 1)
    return ids, places


def ranking(run, model, step):
    """How well scores tell right from wrong candidates."""
    rows = list(run.data.candidates)
    read = [candidate_ids(run, row) for row in rows]
    with torch.no_grad():
        outputs = outputs_of(model, [ids for ids, _ in read])
    scores = [
        candidate_score(run, output, row, places)
        for output, row, (_, places) in zip(outputs, rows, read, strict=True)
    ]
    prompts = defaultdict(list)
    for row, score in zip(rows, scores, strict=True):
        text = row["prompt"][-1]["content"]
        label = final(row["completion"][0]["content"]) == right_answer(text)
        assert label == bool(row["label"])
        prompts[text].append((score, label))
    if step == max(run.evaluations):
        lines = (run.folder / "scores.jsonl").read_text().splitlines()
        kept = [next(iter(json.loads(line)["scores"].values())) for line in lines]
        close(dict(enumerate(kept)), dict(enumerate(scores)))
    every = [pair for group in prompts.values() for pair in group]
    both = [group for group in prompts.values() if len({label for _, label in group}) == 2]
    return {
        "auc": auc(every),
        "pairwise_accuracy": mean(map(auc, both)),
        "top1_accuracy": mean(map(best_is_right, both)),
        "best_of_n": mean(map(best_is_right, prompts.values())),
        "random_of_n": mean(share(label for _, label in group) for group in prompts.values()),
        "oracle_of_n": share(any(label for _, label in group) for group in prompts.values()),
        "right_mean": mean(score for score, label in every if label),
        "wrong_mean": mean(score for score, label in every if not label),
    }


def same(score, other):
    """Whether two scores are equal: float32 may see a tie where float64 does not."""
    return math.isclose(score, other, rel_tol=1e-7)


def auc(group):
    right = [score for score, label in group if label]
    wrong = [score for score, label in group if not label]
    return mean(0.5 if same(r, w) else float(r > w) for r in right for w in wrong)


def best_is_right(group):
    best = max(score for score, _ in group)
    return share(label for score, label in group if same(score, best))


def judged(run, rows, step, prefix="", training=False):
    """Metrics of the outcome model: every token of a completion is right or wrong."""
    model = run.model(step, AutoModelForTokenClassification)
    read = [candidate_ids(run, row) for row in rows]
    outputs = outputs_of(model, [ids for ids, _ in read])
    losses, right = [], []
    for output, row, (_, places) in zip(outputs, rows, read, strict=True):
        logits, label = output[places, 0], float(row["label"])
        text = row["completion"][0]["content"]
        assert bool(label) == (final(text) == right_answer(row["prompt"][-1]["content"]))
        target = torch.full_like(logits, label)
        losses.append(F.binary_cross_entropy_with_logits(logits, target))
        right += ((logits > 0).double() == label).tolist()
    metrics = {"accuracy": mean(right)}
    if not training:
        metrics |= ranking(run, model, step)
    texts = [ids for ids, _ in read]
    return finished(metrics, torch.stack(losses).mean(), [model], texts, prefix, training)


def traced(run, rows, step, prefix="", training=False):
    """Metrics of the process model: every step is bad, neutral or good."""
    model = run.model(step, AutoModelForTokenClassification)
    read = [step_ids(run, row["prompt"], row["completions"]) for row in rows]
    outputs = outputs_of(model, [ids for ids, _ in read])
    logits = [output[places] for output, (_, places) in zip(outputs, read, strict=True)]
    labels = [list(row["labels"]) for row in rows]
    weights = torch.tensor(json.loads(run.options["class_weights"]), dtype=torch.float64)
    true = [label for row in labels for label in row]
    target = torch.tensor(true) + 1
    loss = F.cross_entropy(torch.cat(logits), target, weight=weights)
    classes = [[int(x.argmax()) - 1 for x in row] for row in logits]
    guessed = [guess for row in classes for guess in row]
    right = [guess == label for guess, label in zip(guessed, true, strict=True)]
    metrics = {"accuracy": share(right)}
    if not training:
        first = [(row.index(-1) if -1 in row else None) for row in labels]
        first_guess = [(row.index(-1) if -1 in row else None) for row in classes]
        metrics |= {
            "step_accuracy": share(right),
            "step_majority": max(true.count(value) for value in (-1, 0, 1)) / len(true),
            "first_error": share(a == b for a, b in zip(first, first_guess, strict=True)),
            "first_error_trivial": max(first.count(value) for value in set(first)) / len(first),
            **ranking(run, model, step),
        }
        for value, name in ((-1, "bad"), (0, "neutral"), (1, "good")):
            if value in true:
                of_class = [ok for ok, label in zip(right, true, strict=True) if label == value]
                metrics[f"recall_{name}"] = share(of_class)
    texts = [ids for ids, _ in read]
    return finished(metrics, loss, [model], texts, prefix, training)


# ---- supervised fine-tuning and rejection sampling


def demonstrated(run, rows, step, prefix="", training=False):
    """Metrics of supervised fine-tuning on completions."""
    if "input_ids" in rows[0]:
        cuts = [(row["input_ids"], row["completion_mask"].index(1)) for row in rows]
        texts = [(ids[:cut], ids[cut:]) for ids, cut in cuts]
    else:
        texts = pair_texts(run, rows, "completion")
    model = run.model(step)
    logits = logits_of(model, texts)
    logps, _, accuracy = of_sides(logits, texts)
    metrics = {
        "entropy": mean_over_tokens(map(entropies, logits)),
        "mean_token_accuracy": accuracy,
    }
    seen = [prompt + answer for prompt, answer in texts]
    return finished(metrics, -mean_over_tokens(logps), [model], seen, prefix, training)


def sampled_answers(run):
    """The texts of all answers to each question, which the run has kept."""
    (path,) = Path(run.options["answers"]).glob("answers-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def selection(run, answers):
    """The numbers of `selection.json`: of the best answer to each prompt by exact match."""
    questions, right, ends = [], [], []
    for row in run.data.train:
        ids, mask = row["input_ids"], row["completion_mask"]
        prompt, answer = ids[: mask.index(1)], ids[mask.index(1) :]
        questions.append(run.tokenizer.decode(prompt, skip_special_tokens=True))
        text = run.tokenizer.decode(answer, skip_special_tokens=True)
        right.append(final(text) == right_answer(questions[-1]))
        ends.append(answer[-1] == run.tokenizer.eos_token_id)
    labels = [
        [final(answer[0]) == right_answer(question) for answer in row]
        for question, row in zip(questions, answers, strict=True)
    ]
    count = len(labels[0])
    shares = [mean(row) for row in labels]
    both = [value for value in shares if 0 < value < 1]
    chances = {
        str(n): mean(1 - comb(row.count(False), n) / comb(count, n) for row in labels)
        for n in range(1, count + 1)
    }
    return {
        "answers": len(labels) * count,
        "prompts": len(labels),
        "selected": len(right),
        "prompts_covered": len(set(questions)),
        "selected_cut_off": ends.count(False),
        "share_right": mean(shares),
        "selected_right": share(right),
        "decidable": len(both) / len(labels),
        "decidable_hit_rate": 1.0,  # the score is whether it is right
        "decidable_random_rate": mean(both),
        "coverage": dict.fromkeys(chances, share(any(row) for row in labels)),
        "random_coverage": chances,
    }


def number(value):
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def close(actual, expected, relative=2e-5, absolute=2e-6):
    """Compare all names, and all numbers to the rounding of float32."""
    unknown, missing = actual.keys() - expected.keys(), expected.keys() - actual.keys()
    assert not unknown, f"logged, and recomputed by no oracle: {unknown}"
    assert not missing, f"recomputed, and logged by no run: {missing}"
    wrong = {
        name: (actual[name], number(expected[name]))
        for name in actual
        if not math.isclose(
            actual[name], number(expected[name]), rel_tol=relative, abs_tol=absolute
        )
    }
    assert not wrong, wrong
