"""Optimizer steps of the book's published code, told anew in plain torch.

Read off the code's train.py, rollout.py, loss.py, data.py and utils.py at the revision that
golden/book_configs.yaml names; nothing here imports rlhf_trl. Each sequence goes through the model
on its own, without padding. Models are float64, so that what is compared is not rounding.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from book_loops import BookConfig
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Answer:
    """A completion to a question of the gym, as token ids and as a text without special tokens."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    text: str
    entry: tuple[tuple[str, Any], ...]  # the question's, with the right answer

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What tells it from others."""
        return self.prompt_ids, self.completion_ids


# --- the steps ------------------------------------------------------------------------------------


class Stepper:
    """Adam on one or more models, as the loops use it: accumulate, clip, step."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        rate: float,
        clip: float | None,
        accumulation: int,
        weight_decay: float = 0.0,
        mean_of_leftovers: bool = False,
        decays_norms: bool = True,
    ):
        self.models = models
        self.parameters = [p for model in models for p in model.parameters()]
        self.accumulation = accumulation
        self.mean_of_leftovers = mean_of_leftovers  # which no loop of the code takes
        self.clip = clip
        kinds = [[p for p in self.parameters if (p.dim() > 1) == wide] for wide in (True, False)]
        decays = [weight_decay, weight_decay if decays_norms else 0.0]
        rows = zip(kinds, decays, strict=True)
        given = [{"params": kind, "weight_decay": decay} for kind, decay in rows]
        self.optimizer = torch.optim.AdamW(given, lr=rate)
        self.after: list[Weights] = []  # the weights after each step

    def train(
        self, losses: Sequence[Callable[[], Tensor]], rates: Sequence[float] = ()
    ) -> list[Weights]:
        """Step on the losses of micro-batches, each computed when its turn comes.

        `rates` are the learning rates by step, from 0, where they are not all the same.
        """
        leftover = len(losses) % self.accumulation
        for number, loss in enumerate(losses, 1):
            is_left = number > len(losses) - leftover
            divisor = leftover if is_left and self.mean_of_leftovers else self.accumulation
            (loss() / divisor).backward()
            if number % self.accumulation and number < len(losses):
                continue
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            for group in self.optimizer.param_groups if len(rates) else ():
                group["lr"] = rates[len(self.after)]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.after.append(self.weights())
        return self.after

    def weights(self) -> Weights:
        """Return a copy of the weights, by model and name."""
        named = {}
        for number, model in enumerate(self.models):
            for name, weight in model.named_parameters():
                named[f"{number}.{name}"] = weight.detach().clone()
        return named


def logps_of(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return (T,) log-probabilities of a completion's tokens."""
    ids = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


# --- policy gradients -----------------------------------------------------------------------------


@cache
def _task(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)


def correctness(answer: Answer, task: str = "spell_backward") -> float:
    """Return the gym's score, which gives partial credit."""
    from reasoning_gym.utils import extract_answer

    return float(_task(task).score_answer(extract_answer(answer.text), dict(answer.entry)))


def tags(answer: Answer) -> float:
    """Return a quarter for each of the four tags."""
    wanted = ("<think>", "</think>", "<answer>", "</answer>")
    return sum(0.25 for tag in wanted if tag in answer.text)


def overlong(config: BookConfig, answer: Answer) -> float:
    """Return DAPO's penalty: 0, then down to -1 over the last `l_cache` tokens before `l_max`."""
    length = len(answer.completion_ids)
    limit, cache_length = config["l_max"], config["l_cache"]
    free = limit - cache_length
    if length <= free:
        return 0.0
    return (free - length) / cache_length if length <= limit else -1.0


def rewards(config: BookConfig, answers: Sequence[Answer]) -> Tensor:
    """Return (B,) rewards; for MaxRL the product that it takes for a success."""
    right = torch.tensor([correctness(answer) for answer in answers], dtype=torch.float32).double()
    form = torch.tensor([tags(answer) for answer in answers], dtype=torch.float64)
    if config["loss"] == "maxrl":
        return right * (form == 1)
    total = right + 0.5 * form  # format_weight's default
    if config["loss"] == "dapo":
        total = total + torch.tensor([overlong(config, answer) for answer in answers])
    return total


def advantages(loss: str, group: Tensor) -> Tensor:
    """Return (G,) advantages of a group's rewards."""
    mean = group.mean()
    if loss == "reinforce":
        return group
    if loss == "drgrpo":
        return group - mean
    if loss == "rloo":
        return (group - mean) * len(group) / (len(group) - 1)
    if loss == "maxrl":
        return (group - mean) / mean if mean > 0 else torch.zeros_like(group)
    return (group - mean) / (group.std() + 1e-8)


def token_kl(estimator: str, logps: Tensor, reference: Tensor) -> Tensor:
    """Return (T,) estimates as the code takes them: k1 and k3 with the other sign."""
    gap = logps - reference
    return {"kl1": -gap, "kl2": gap**2 / 2, "kl3": gap.expm1() - gap}[estimator]


def has_contrast(config: BookConfig, group: Sequence[Answer]) -> bool:
    """Tell whether DAPO trains on a group: not all are wholly wrong, and not all wholly right."""
    scores = [correctness(answer) for answer in group]
    low, high = config["accuracy_min_reward"], config["accuracy_max_reward"]
    return any(score != low for score in scores) and any(score != high for score in scores)


def policy_gradient_steps(
    config: BookConfig,
    policy: torch.nn.Module,
    groups: Sequence[Sequence[Answer]],
    batches: Sequence[Sequence[Answer]],
    reference: torch.nn.Module | None = None,
) -> list[Weights]:
    """Return the weights after each optimizer step of one phase, for all losses but PPO's.

    `groups` are the phase's answers by question, `batches` the micro-batches in their order. One
    without answers adds nothing to its step. A config with beta needs a `reference`.
    """
    loss, beta = config["loss"], config["beta"]
    weights: dict[Any, Tensor] = {}
    old: dict[Any, Tensor] = {}
    base: dict[Any, Tensor] = {}
    for group in groups:
        earned = rewards(config, group)
        for number, answer in enumerate(group):
            with torch.no_grad():
                old[answer.key] = logps_of(policy, *answer.key)
                if beta:
                    base[answer.key] = logps_of(reference, *answer.key)
            if beta and loss in ("reinforce", "rloo"):
                kl = token_kl(config["kl_estimator"], old[answer.key], base[answer.key])
                earned[number] -= beta * kl.mean()
        for answer, advantage in zip(group, advantages(loss, earned), strict=True):
            weights[answer.key] = advantage

    def token_losses(answer: Answer) -> Tensor:
        logps = logps_of(policy, *answer.key)
        losses = -surrogate(config, logps, old[answer.key], weights[answer.key])
        if beta and loss not in ("reinforce", "rloo"):
            losses = losses + beta * token_kl(config["kl_estimator"], logps, base[answer.key])
        return losses

    def batch_loss(batch: Sequence[Answer]) -> Tensor:
        if not batch:
            return torch.zeros((), dtype=torch.float64, requires_grad=True)
        losses = [token_losses(answer) for answer in batch]
        if loss == "dapo":
            return torch.cat(losses).mean()
        return torch.stack([each.mean() for each in losses]).mean()

    stepper = Stepper([policy], config["lr"], config["max_norm"], config["batch_acc"])
    return stepper.train([lambda batch=batch: batch_loss(batch) for batch in batches])


def surrogate(config: BookConfig, logps: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return (T,) of what a loss makes larger."""
    loss = config["loss"]
    if loss in ("reinforce", "rloo", "maxrl"):
        return logps * advantage
    low, high = 1 - config.fields.get("clip_eps_lo", 0.2), 1 + config.fields.get("clip_eps_hi", 0.2)
    ratio = (logps - old).exp()
    if loss == "cispo":
        return ratio.clamp(low, high).detach() * advantage * logps
    if loss == "sapo":
        heat = config["sapo_temp_pos"] if advantage > 0 else config["sapo_temp_neg"]
        return torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
    if loss == "gspo":
        ratio = (logps - old).mean().exp().expand_as(logps)
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


class Critic(torch.nn.Module):
    """A copy of the policy whose head gives one number: (T + 1,) values of a sequence."""

    def __init__(self, policy: torch.nn.Module, head: Tensor):
        super().__init__()
        self.backbone = deepcopy(policy.model)
        self.head = torch.nn.Linear(head.shape[1], 1, bias=False, dtype=head.dtype)
        self.head.weight.data.copy_(head)

    def forward(self, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """Return (T,) values of the states before a completion's tokens."""
        ids = torch.tensor([[*prompt, *completion]])
        hidden = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0]
        return self.head(hidden[len(prompt) - 1 : -1]).squeeze(-1)


def ppo_steps(
    config: BookConfig,
    policy: torch.nn.Module,
    critic: Critic,
    answers: Sequence[Answer],
    batches: Sequence[Sequence[Answer]],
) -> list[Weights]:
    """Return the weights (policy 0, critic 1) after each optimizer step of PPO on one phase."""
    gamma, lam = config["gamma"], config["lam"]
    low, high = 1 - config["clip_eps_lo"], 1 + config["clip_eps_hi"]
    old: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}
    for answer, reward in zip(answers, rewards(config, answers), strict=True):
        with torch.no_grad():
            values = critic(*answer.key)
            logps = logps_of(policy, *answer.key)
        estimates = torch.zeros_like(values)
        following, running = 0.0, 0.0
        for t in reversed(range(len(values))):
            is_last = t == len(values) - 1
            target = reward if is_last else gamma * following
            running = target - values[t] + (0.0 if is_last else gamma * lam * running)
            estimates[t], following = running, values[t]
        old[answer.key] = logps, values, estimates

    def token_losses(answer: Answer) -> Tensor:
        logps, before, advantage = old[answer.key]
        ratio = (logps_of(policy, *answer.key) - logps).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        values = critic(*answer.key)
        held = before + (values - before).clamp(-config["clip_eps_val"], config["clip_eps_val"])
        target = advantage + before
        errors = torch.maximum((target - values) ** 2, (target - held) ** 2) / 2
        return config["vf_coef"] * errors - surrogate

    def batch_loss(batch: Sequence[Answer]) -> Tensor:
        return torch.stack([token_losses(answer).mean() for answer in batch]).mean()

    stepper = Stepper([policy, critic], config["lr"], config["max_norm"], config["batch_acc"])
    return stepper.train([lambda batch=batch: batch_loss(batch) for batch in batches])


# --- pairs and conversations ----------------------------------------------------------------------


def encode(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a templated question, and those that the answer adds."""
    asked = [{"role": "user", "content": question}]
    whole = [*asked, {"role": "assistant", "content": answer}]
    how: dict[str, Any] = {"tokenize": False}
    start = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **how)
    text = tokenizer.apply_chat_template(whole, add_generation_prompt=False, **how)
    first = tokenizer(start, add_special_tokens=False)["input_ids"]
    return first, tokenizer(text, add_special_tokens=False)["input_ids"][len(first) :]


Row = tuple[str, str]  # question, answer
Pair = tuple[str, str, str]  # question, chosen answer, rejected answer


def summed(model: torch.nn.Module, tokenizer: Any, row: Row) -> tuple[Tensor, int]:
    """Return the log-probability of an answer, and the number of its tokens."""
    first, rest = encode(tokenizer, *row)
    return logps_of(model, first, rest).sum(), len(rest)


def log_ratio(
    policy: torch.nn.Module, reference: torch.nn.Module, tokenizer: Any, row: Row
) -> Tensor:
    """Return log pi(answer) - log pi_ref(answer)."""
    with torch.no_grad():
        base = summed(reference, tokenizer, row)[0]
    return summed(policy, tokenizer, row)[0] - base


def pair_loss(
    config: BookConfig,
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    tokenizer: Any,
    pairs: Sequence[Pair],
) -> Tensor:
    """Return the mean over pairs of the loss of DPO or one of its relatives."""
    loss, beta = config["loss"], config["beta"]

    def of(row: Row) -> Tensor:
        total, length = summed(policy, tokenizer, row)
        if loss == "simpo":
            return total / length
        ratio = log_ratio(policy, reference, tokenizer, row)
        return ratio / length if loss == "dpo_norm" else ratio

    chosen = torch.stack([of((asked, good)) for asked, good, _ in pairs])
    rejected = torch.stack([of((asked, bad)) for asked, _, bad in pairs])
    margin = chosen - rejected
    if loss == "ipo":
        return ((margin - 1 / (2 * beta)) ** 2).mean()
    if loss == "simpo":
        return -F.logsigmoid(beta * (margin - config["gamma"])).mean()
    if loss == "apo_zero":
        return (torch.sigmoid(beta * rejected) - torch.sigmoid(beta * chosen)).mean()
    if loss == "apo_down":
        return (torch.sigmoid(beta * chosen) - torch.sigmoid(beta * margin)).mean()
    return -F.logsigmoid(beta * margin).mean()


def orpo_loss(
    policy: torch.nn.Module, tokenizer: Any, beta: float, pairs: Sequence[Pair]
) -> Tensor:
    """Return the mean over pairs of the chosen answer's NLL and the odds ratio's part."""

    def mean(asked: str, answer: str) -> Tensor:
        total, length = summed(policy, tokenizer, (asked, answer))
        return total / length

    def log_odds(logp: Tensor) -> Tensor:
        logp = logp.clamp(max=-1e-6)
        return logp - (-logp.expm1()).log()

    chosen = torch.stack([mean(asked, good) for asked, good, _ in pairs])
    rejected = torch.stack([mean(asked, bad) for asked, _, bad in pairs])
    return (-chosen - beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))).mean()


def kto_loss(
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    tokenizer: Any,
    beta: float,
    chosen: Sequence[Row],
    rejected: Sequence[Row],
) -> Tensor:
    """Return the sum of two means; the reference point is the rejected answers' mean, at least 0.

    The code rolls the rejected ones by one pair first, which their mean does not see.
    """
    wanted = torch.stack([log_ratio(policy, reference, tokenizer, row) for row in chosen])
    unwanted = torch.stack([log_ratio(policy, reference, tokenizer, row) for row in rejected])
    point = unwanted.detach().mean().clamp(min=0)
    losses = (
        1 - torch.sigmoid(beta * (wanted - point)),
        1 - torch.sigmoid(beta * (point - unwanted)),
    )
    return losses[0].mean() + losses[1].mean()


def row_steps(
    config: BookConfig,
    policy: torch.nn.Module,
    losses: Sequence[Callable[[], Tensor]],
    rates: Sequence[float],
    mean_of_leftovers: bool = False,
) -> list[Weights]:
    """Return the weights after each step of direct alignment or SFT on micro-batches' losses."""
    rate = "lr" if config.folder == "instruction_tuning" else "learning_rate"
    stepper = Stepper(
        [policy],
        config[rate],
        config["max_grad_norm"],
        config["gradient_accumulation_steps"],
        config["weight_decay"],
        mean_of_leftovers,
    )
    return stepper.train(losses, rates)


def sft_steps(
    config: BookConfig,
    policy: torch.nn.Module,
    tokenizer: Any,
    batches: Sequence[Sequence[Row]],
    rates: Sequence[float],
    over_the_step: bool = False,
) -> list[Weights]:
    """Return the weights after each step of SFT: the mean over a micro-batch's answer tokens.

    `over_the_step` takes it over those of all micro-batches of a step, which the code does not.
    """
    accumulation = config["gradient_accumulation_steps"]
    counts = [sum(len(encode(tokenizer, *row)[1]) for row in batch) for batch in batches]

    def batch_loss(number: int) -> Tensor:
        rows = [logps_of(policy, *encode(tokenizer, *row)) for row in batches[number]]
        total = -torch.cat(rows).sum()
        if not over_the_step:
            return total / counts[number]
        first = number - number % accumulation
        return total * accumulation / sum(counts[first : first + accumulation])

    losses = [lambda n=n: batch_loss(n) for n in range(len(batches))]
    return row_steps(config, policy, losses, rates)


def reward_steps(
    config: BookConfig,
    critic: Critic,
    tokenizer: Any,
    batches: Sequence[Sequence[Pair]],
    rates: Sequence[float],
    **ours: bool,
) -> list[Weights]:
    """Return the weights after each step of the preference reward model, which clips nothing.

    `ours` are options of `Stepper`, none of which the code has.
    """

    def score(asked: str, answer: str) -> Tensor:
        first, rest = encode(tokenizer, asked, answer)
        hidden = critic.backbone(input_ids=torch.tensor([[*first, *rest]]), use_cache=False)
        return critic.head(hidden.last_hidden_state[0, -1]).squeeze(-1)

    def batch_loss(batch: Sequence[Pair]) -> Tensor:
        margins = [score(asked, good) - score(asked, bad) for asked, good, bad in batch]
        return -F.logsigmoid(torch.stack(margins)).mean()

    accumulation = config["grad_accum_steps"]
    stepper = Stepper([critic], config["lr"], None, accumulation, 0.01, **ours)
    return stepper.train([lambda batch=batch: batch_loss(batch) for batch in batches], rates)


class TokenCritic(torch.nn.Module):
    """A backbone whose head gives each token one logit (outcomes) or three (steps)."""

    def __init__(self, policy: torch.nn.Module, head: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.backbone = deepcopy(policy.model)
        labels, width = head.shape
        self.head = torch.nn.Linear(width, labels, bias=bias is not None, dtype=head.dtype)
        self.head.weight.data.copy_(head)
        if bias is not None:
            self.head.bias.data.copy_(bias)

    def forward(self, ids: Sequence[int]) -> Tensor:
        """Return (T, labels) logits."""
        hidden = self.backbone(input_ids=torch.tensor([list(ids)]), use_cache=False)
        return self.head(hidden.last_hidden_state[0])


def outcome_ids(
    tokenizer: Any, system: str, question: str, answer: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of a question under the code's system prompt, and of an answer."""
    asked = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    start = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    first = tokenizer(start, add_special_tokens=False)["input_ids"]
    rest = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    return first, rest


def trace_ids(
    tokenizer: Any, problem: str, steps: Sequence[str], separator: str
) -> tuple[list[int], list[int]]:
    """Return the token ids of a trace, and the places of the last token of each step."""
    ids = tokenizer(f"Problem: {problem}\nReasoning trace:\n", add_special_tokens=False)[
        "input_ids"
    ]
    places = []
    for step in steps:
        ids = ids + tokenizer(step + separator, add_special_tokens=False)["input_ids"]
        places.append(len(ids) - 1)
    return ids, places


Labeled = tuple[Sequence[int], Sequence[int], Sequence[int]]  # ids, places and their labels


def token_reward_steps(
    config: BookConfig,
    critic: TokenCritic,
    batches: Sequence[Sequence[Labeled]],
    rates: Sequence[float],
    **ours: bool,
) -> list[Weights]:
    """Return the weights after each step of an outcome or process reward model.

    The loss is the mean over all labeled tokens of a micro-batch: with one logit the cross-entropy
    of right and wrong, with three that of the classes. `ours` are options of `Stepper`.
    """

    def batch_loss(batch: Sequence[Labeled]) -> Tensor:
        logits = torch.cat([critic(ids)[list(places)] for ids, places, _ in batch])
        labels = torch.tensor([label for _, _, row in batch for label in row])
        if logits.shape[1] == 1:
            right = labels.to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits[:, 0], right)
        return F.cross_entropy(logits, labels)

    accumulation = config["grad_accum_steps"]
    stepper = Stepper([critic], config["lr"], None, accumulation, 0.01, **ours)
    return stepper.train([lambda batch=batch: batch_loss(batch) for batch in batches], rates)


def selected_steps(
    config: BookConfig,
    policy: torch.nn.Module,
    batches: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]],
    over_the_step: bool = False,
    mean_of_leftovers: bool = False,
) -> list[Weights]:
    """Return the weights after each step of rejection sampling's fine-tuning.

    `batches` hold prompts and selected answers as token ids. The loss is the mean over the answers'
    tokens of a micro-batch; `over_the_step` takes that of all of a step, which the code does not.
    """
    accumulation = config["batch_acc"]
    counts = [sum(len(answer) for _, answer in batch) for batch in batches]

    def batch_loss(number: int) -> Tensor:
        total = -torch.cat([logps_of(policy, *row) for row in batches[number]]).sum()
        if not over_the_step:
            return total / counts[number]
        first = number - number % accumulation
        step = counts[first : first + accumulation]
        return total * len(step) / sum(step)

    losses = [lambda n=n: batch_loss(n) for n in range(len(batches))]
    stepper = Stepper(
        [policy],
        config["lr"],
        config["max_norm"],
        accumulation,
        mean_of_leftovers=mean_of_leftovers,
    )
    return stepper.train(losses)


def distillation_steps(
    config: BookConfig,
    model: torch.nn.Module,
    groups: Sequence[Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]]],
) -> list[Weights]:
    """Return the weights after one step of self-distillation.

    `groups` hold, for each question that has a right answer, the prompt, the prompt that shows the
    first right answer, and the completion, as token ids. The student's likeliest tokens and one
    bucket for all others are held against the model itself, which reads the longer prompt.
    """
    count = config["kl_top_k"]

    def divergences(
        prompt: Sequence[int], shown: Sequence[int], completion: Sequence[int]
    ) -> Tensor:
        def logits(first: Sequence[int]) -> Tensor:
            ids = torch.tensor([[*first, *completion]])
            return model(input_ids=ids, use_cache=False).logits[0, len(first) - 1 : -1]

        student = logits(prompt).softmax(-1)
        with torch.no_grad():
            teacher = logits(shown).softmax(-1)
        places = student.topk(count).indices
        p, q = student.gather(-1, places), teacher.gather(-1, places)
        p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
        q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
        return (p * (p.log() - q.log())).sum(-1)

    def group_loss(group: Sequence[Any]) -> Tensor:
        return torch.cat([divergences(*row) for row in group]).mean()

    stepper = Stepper([model], config["lr"], config["max_norm"], len(groups))
    return stepper.train([lambda group=group: group_loss(group) for group in groups])
