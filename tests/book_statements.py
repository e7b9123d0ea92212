"""Statements that translations of the book's configs make, and a check of each by a number.

`statements` collects them from the translations, so that one that is new has no check and fails;
`CHECKS` has a function for each form of sentence. What the book's code does is told by hand, or by
`book_loops` and `book_steps`, which import nothing of the package.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from book_loops import BookConfig, book_configs, quantities
from book_steps import advantages, kto_loss, surrogate, token_kl
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_trl import (
    distillation_loss,
    policy_gradient_loss,
    preference_loss,
    reward_loss,
    top_per_prompt,
)
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import read_book
from rlhf_trl.ports.book_fields import DEFAULTS
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.yaml_loader import dump_yaml, read_yaml
from rlhf_trl.tiny import checkpoint_path

BOOK = book_configs()


@dataclass(frozen=True)
class Statement:
    """What a comment says, with the config and the field of ours that first say it."""

    text: str
    key: str  # of BOOK
    field: str  # ours, or, of what is left out, the code's


def statements(folder: Path) -> dict[str, Statement]:
    """Return what the comments of all translations say, by their text."""
    found: dict[str, Statement] = {}
    for key in BOOK:
        sheet = sheet_of(key, folder)
        notes = {to: line.note for to, line in sheet.lines.items()}
        notes |= {n: why for n, why in sheet.left_out.items() if sheet.config.get(n) is not None}
        for field, note in notes.items():
            if note:
                found.setdefault(str(note), Statement(str(note), key, field))
    return found


def sheet_of(key: str, folder: Path) -> Any:
    """Return a config of the book with its translation."""
    path = folder / f"{BOOK[key].name}.yaml"
    path.write_text(BOOK[key].text)
    return read_book(path, read_yaml(path))


@dataclass
class Case:
    """A statement to check, with both sides of the config that it is of."""

    match: re.Match[str]
    statement: Statement
    folder: Path

    @property
    def book(self) -> BookConfig:
        """The book's config."""
        return BOOK[self.statement.key]

    @property
    def ours(self) -> dict[str, Any]:
        """The translation's values."""
        sheet = sheet_of(self.statement.key, self.folder)
        return {to: line.value for to, line in sheet.lines.items()}

    def loaded(self, **changes: Any) -> Any:
        """Return what the recipe makes of the translation."""
        path = self.folder / "ours.yaml"
        path.write_text(dump_yaml(self.ours | {"use_cpu": True, "bf16": False} | changes))
        stage = {
            "instruction_tuning": "sft",
            "rejection_sampling": "rejection_sampling",
            "distillation": "distill",
        }.get(self.book.folder)
        if stage is None:
            name = self.ours["algorithm"]
            fits = [key for key, one in STAGES.items() if name in one.algorithms()]
            [stage] = fits
        return STAGES[stage].load(["--config", str(path)])


Check = Callable[[Case], None]
CHECKS: list[tuple[re.Pattern[str], Check]] = []


def says(*patterns: str) -> Callable[[Check], Check]:
    """Register the check of sentences of these forms."""

    def register(check: Check) -> Check:
        CHECKS.extend((re.compile(pattern), check) for pattern in patterns)
        return check

    return register


def check_of(statement: Statement, folder: Path) -> Callable[[], None]:
    """Return the check of a statement; one without any, or with several, fails."""
    fits = [(p.fullmatch(statement.text), check) for p, check in CHECKS]
    fits = [(match, check) for match, check in fits if match]
    assert len(fits) == 1, f"{len(fits)} checks fit: {statement.text}"
    match, check = fits[0]
    return lambda: check(Case(match, statement, folder))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def near(one: float, other: float, rel: float = 1e-6) -> bool:
    return math.isclose(float(one), float(other), rel_tol=rel, abs_tol=1e-9)


# --- against the chapter: losses ------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])


def batch() -> dict[str, Tensor]:
    """Return a group of four completions of 1 to 4 tokens, some of whose ratios are clipped."""
    logps = -torch.rand(4, 4, generator=generator(1), dtype=torch.float64) * 2 - 0.1
    old = logps + 0.3 * torch.randn(4, 4, generator=generator(2), dtype=torch.float64)
    reference = logps + 0.2 * torch.randn(4, 4, generator=generator(3), dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.25, 0.0, 0.5], dtype=torch.float64)
    return {"logps": logps, "old_logps": old, "ref_logps": reference, "rewards": rewards}


def rows_of(tensor: Tensor) -> list[Tensor]:
    """Return the values of each completion that count."""
    return [row[mask.bool()] for row, mask in zip(tensor, MASK, strict=True)]


def policy_gradient_by_hand(config: BookConfig, beta: float, estimator: str) -> Tensor:
    """Return the code's loss on the batch, by its own account."""
    tensors = batch()
    loss = config["loss"]
    rows = {name: rows_of(tensors[name]) for name in ("logps", "old_logps", "ref_logps")}
    rewards = tensors["rewards"].clone()
    in_rewards = loss in ("reinforce", "rloo")
    if beta and in_rewards:
        pairs = zip(rows["old_logps"], rows["ref_logps"], strict=True)
        rewards -= beta * torch.stack([token_kl(estimator, *pair).mean() for pair in pairs])
    losses = []
    for number, advantage in enumerate(advantages(loss, rewards)):
        logps, old, reference = (rows[n][number] for n in ("logps", "old_logps", "ref_logps"))
        one = -surrogate(config, logps, old, advantage)
        if beta and not in_rewards:
            one = one + beta * token_kl(estimator, logps, reference)
        losses.append(one)
    if loss == "dapo":
        return torch.cat(losses).mean()
    return torch.stack([one.mean() for one in losses]).mean()


PG_FIELDS = {
    "clip_eps_lo": "epsilon",
    "clip_eps_hi": "epsilon_high",
    "sapo_temp_pos": "sapo_temperature_pos",
    "sapo_temp_neg": "sapo_temperature_neg",
}


def policy_gradient_here(config: BookConfig, formulation: str, **more: Any) -> float:
    """Return the package's loss on the batch."""
    loss, tensors = config["loss"], batch()
    takes_old = loss not in ("reinforce", "rloo", "maxrl")
    if not (takes_old or more.get("beta")):
        tensors.pop("old_logps")
    if not more.get("beta"):
        tensors.pop("ref_logps")
    given = {PG_FIELDS[n]: v for n, v in config.fields.items() if n in PG_FIELDS}
    if not takes_old:
        given = {}
    if loss == "maxrl":
        tensors["binary_rewards"] = tensors["rewards"]
    if loss == "cispo" and formulation == "chapter":
        more["prompt_tokens"] = None
    group = {} if loss == "reinforce" else {"num_generations": 4}
    more = {name: value for name, value in more.items() if value is not None}
    result = policy_gradient_loss(
        loss, **tensors, mask=MASK, formulation=formulation, **group, **given, **more
    )
    return float(result.loss)


def equal_rewards_far_from_0(scale: float) -> float:
    """Return the largest advantage that rounding gives to a group of equal rewards."""
    values = [k / 100 for k in range(1, 150)]
    groups = [torch.full((8,), value) for value in values]
    return max(((g - g.mean()) / (g.std() + scale)).abs().max().item() for g in groups)


@says(
    r"Against the chapter: k1 and k3 have the other sign, and 1e-8 is added .* about 1\.",
    r"Against the chapter: A mean over the tokens of each sequence, not of a prompt; rounding .*",
    r"Against the chapter: The mean over tokens is taken in each micro-batch; 1e-8 .* about 1\.",
    r"Against the chapter: Only the advantage changes against GRPO: each sequence keeps its mean\.",
    r"Against the chapter: No baseline, and a mean over the tokens of a sequence instead of a .*",
    r"Against the chapter: A mean over the tokens of a sequence instead of a sum\.",
    r"Against the chapter: A mean over the tokens of a sequence, not a sum; a success may count .*",
)
def _policy_gradient_rows(case: Case) -> None:
    config, loss = case.book, case.book["loss"]
    by_hand = policy_gradient_by_hand(config, 0.0, "kl3")
    assert near(policy_gradient_here(config, "code"), by_hand)
    if loss not in ("dapo", "maxrl"):
        for estimator in ("kl1", "kl2", "kl3"):
            here = policy_gradient_here(
                config, "code", beta=0.3, kl_estimator=estimator.replace("kl", "k")
            )
            assert near(here, policy_gradient_by_hand(config, 0.3, estimator))
    if loss == "maxrl":
        with pytest.raises(InputError, match="must hold only 0 and 1"):
            policy_gradient_here(config, "chapter")
    if loss in ("reinforce", "rloo"):  # the chapter's sum is longer than a mean
        assert not near(policy_gradient_here(config, "chapter"), by_hand, 1e-2)
    if "rounding alone" in case.statement.text:
        assert 0.5 < equal_rewards_far_from_0(1e-8) < 3
        assert equal_rewards_far_from_0(1e-4) < 0.01  # TRL's, as in the chapter's rows here


@says(r"Against the chapter: The KL is averaged over the completion and taken from the last rew.*")
def _ppo_kl(case: Case) -> None:
    tensors, values = batch(), torch.zeros(4, 4, dtype=torch.float64)
    more = {"values": values, "old_values": values, "gamma": 1.0, "lam": 1.0, "vf_coef": 0.5}
    more |= {"epsilon": 0.2, "epsilon_high": 0.2, "cliprange_value": 0.4}
    with_kl = policy_gradient_loss(
        "ppo", **tensors, mask=MASK, formulation="code", beta=0.3, kl_estimator="k1", **more
    )
    pairs = zip(rows_of(tensors["old_logps"]), rows_of(tensors["ref_logps"]), strict=True)
    mean = torch.stack([token_kl("kl1", *pair).mean() for pair in pairs])
    tensors["rewards"] = tensors["rewards"] - 0.3 * mean
    tensors.pop("ref_logps")
    without = policy_gradient_loss("ppo", **tensors, mask=MASK, formulation="code", **more)
    assert near(with_kl.loss, without.loss)


def sides() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities of three pairs: policy's and reference's, chosen and rejected."""
    return tuple(-10 * torch.rand(4, 3, generator=generator(4), dtype=torch.float64) - 1)


@says(
    r"Against the chapter: The loss is the same; its training script adds up log-probabilities in "
    r"the model's dtype\.(?P<gamma> Its config calls the ratio gamma\.)?"
)
def _relatives_of_dpo(case: Case) -> None:
    loss = case.book["loss"]
    names = ("policy_chosen_logps", "policy_rejected_logps", "ref_chosen_logps")
    tensors = dict(zip([*names, "ref_rejected_logps"], sides(), strict=True))
    given: dict[str, Any] = {"beta": 0.3}
    if loss == "simpo":
        tensors = {name: tensors[name] / 10 for name in names[:2]}
        given["gamma_beta_ratio"] = case.book["gamma"]
        assert case.match["gamma"] and case.ours["gamma_beta_ratio"] == case.book["gamma"] == 0.5
    both = [
        preference_loss(loss, **tensors, formulation=one, **given).loss
        for one in ("chapter", "code")
    ]
    assert near(*both)
    tokens = -torch.rand(600, generator=generator(5)) - 0.5  # about 600 nats
    in_half = sum(tokens.bfloat16(), torch.tensor(0.0).bfloat16()).item()
    assert abs(in_half - tokens.sum().item()) > 1 > abs(tokens.double().sum() - tokens.sum())


@says(
    r"Against the chapter: The sum of the mean over the chosen and the mean over the rejected; z.*"
)
def _kto_row(case: Case) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float64)
    other = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.05
    chosen, rejected = [("Say sun", "nus"), ("Say tea", "aet")], [("Say sun", "x"), ("Say tea", "")]
    by_hand = kto_loss(model, other, tokenizer(), 0.1, chosen, rejected)
    from book_steps import summed

    def sums(of: Any, rows: Any) -> Tensor:
        return torch.stack([summed(of, tokenizer(), row)[0] for row in rows])

    unwanted = {"policy": sums(model, rejected), "ref": sums(other, rejected)}
    result = preference_loss(
        "kto",
        policy_chosen_logps=sums(model, chosen),
        policy_rejected_logps=unwanted["policy"],
        ref_chosen_logps=sums(other, chosen),
        ref_rejected_logps=unwanted["ref"],
        policy_kl_logps=unwanted["policy"],  # each with its own prompt
        ref_kl_logps=unwanted["ref"],
        formulation="code",
        beta=0.1,
    )
    assert near(result.loss, by_hand.item())


@says(r"Against the chapter: Mean log-probabilities are held at -1e-6 at most, so that odds .*")
def _orpo_row(case: Case) -> None:
    sure = torch.tensor([-1e-9], dtype=torch.float64)
    result = preference_loss(
        "orpo",
        policy_chosen_logps=sure,
        policy_rejected_logps=sure - 1,
        chosen_nll=-sure,
        formulation="code",
        beta=1.0,
    )
    log_odds = (-1e-6 - math.log(-math.expm1(-1e-6))) - (-1.0 - math.log(-math.expm1(-1.0)))
    by_hand = 1e-9 + math.log1p(math.exp(-log_odds))
    assert near(result.loss, by_hand, 1e-3)  # whose sizes are 1e-6


@says(r"Against the chapter: No margin and no centering\.")
def _reward_row(case: Case) -> None:
    chosen, rejected = torch.tensor([1.0, 0.2]), torch.tensor([0.5, 0.4])
    loss = reward_loss("bradley_terry", chosen=chosen, rejected=rejected, formulation="code")
    by_hand = sum(math.log1p(math.exp(-margin)) for margin in (0.5, -0.2)) / 2
    assert near(loss, by_hand)


@says(r"Against the chapter: Each token of the batch counts the same; the score of the last .*")
def _orm_row(case: Case) -> None:
    logits = torch.tensor([[0.3, -0.2, 0.9], [0.1, 2.0, 0.0]])
    labels = torch.tensor([[1, 1, 1], [0, -100, -100]])
    loss = reward_loss("orm", logits=logits, labels=labels, formulation="code")
    counted = [(0.3, 1), (-0.2, 1), (0.9, 1), (0.1, 0)]
    by_hand = sum(math.log1p(math.exp(-x if right else x)) for x, right in counted) / 4
    assert near(loss, by_hand)


@says(r"Against the chapter: Steps are bad, neutral or good \(0, 1, 2\), and each step counts .*")
def _prm_row(case: Case) -> None:
    logits = torch.randn(2, 3, 3, generator=generator(6))
    labels = torch.tensor([[0, 2, 1], [1, -100, -100]])
    loss = reward_loss("prm", logits=logits, labels=labels, formulation="code")
    rows = [(0, 0, 0), (0, 1, 2), (0, 2, 1), (1, 0, 1)]
    by_hand = -sum(logits[i, j].log_softmax(-1)[k] for i, j, k in rows) / 4
    assert near(loss, by_hand)


@says(r"Against the chapter: The student's kl_top_k likeliest tokens and one bucket; .*")
def _sdpo_row(case: Case) -> None:
    student, teacher = torch.randn(2, 4, 4, 9, generator=generator(7), dtype=torch.float64)
    loss = distillation_loss(
        "sdpo",
        logits=student,
        teacher_logits=teacher,
        mask=MASK,
        num_generations=2,
        formulation="code",
        kl_top_k=3,
    )

    def divergence(i: int, j: int) -> Tensor:
        ours, theirs = student[i, j].softmax(-1), teacher[i, j].softmax(-1)
        top = ours.topk(3).indices
        p = torch.cat([ours[top], 1 - ours[top].sum(0, keepdim=True)])
        q = torch.cat([theirs[top], 1 - theirs[top].sum(0, keepdim=True)])
        return (p * (p / q).log()).sum()

    counted = [[j for j in range(4) if MASK[i, j]] for i in range(4)]
    groups = []
    for first in (0, 2):
        tokens = [divergence(i, j) for i in (first, first + 1) for j in counted[i]]
        groups.append(torch.stack(tokens).mean())
    assert near(loss, torch.stack(groups).mean())


# --- sampling, rewards and data -------------------------------------------------------------------


@says(r"the book's code does not train the end of an answer where the tokenizer pads with it .*")
def _end_of_an_answer(case: Case) -> None:
    end, answer = 7, torch.tensor([3, 4, 7])
    padded = torch.cat([answer, torch.tensor([7, 7])])
    assert (padded != end).sum() == 2  # the code's mask, where the padding is the end
    from trl.trainer.utils import pad

    masks = [torch.ones(3), torch.ones(5)]  # TRL's, made of lengths
    assert pad(masks, padding_value=0).sum(1).tolist() == [3, 5]


@says(r"completions per prompt")
def _completions_per_prompt(case: Case) -> None:
    assert case.ours["num_generations"] == case.book["num_rollouts"]
    prompts = case.ours["per_device_train_batch_size"] * (
        case.ours.get("steps_per_generation") or case.ours["gradient_accumulation_steps"]
    )
    assert prompts // case.ours["num_generations"] == case.book["prompts_per_step"]


@says(r"completions per process")
def _completions_per_process(case: Case) -> None:
    args = case.loaded().trl
    assert (
        args.generation_batch_size == args.per_device_train_batch_size * args.steps_per_generation
    )


@says(r"the book's code saves none")
def _saves_none(case: Case) -> None:
    assert sum("save" in name or name == "output_dir" for name in DEFAULTS[case.book.folder]) == 0


@says(r"(\d+) batches, so (\d+) optimizer steps?, as in the book's code(?P<off>; those .*)?")
def _updates(case: Case) -> None:
    rows = case.book.fields["data"]["size"]
    told = quantities(case.book, rows)
    batches, steps = int(case.match[1]), int(case.match[2])
    assert told["completions per phase"] / told["examples per micro-batch"] == batches
    assert told["optimizer steps per phase"] == steps
    args = case.loaded().trl
    assert args.steps_per_generation == batches
    assert batches / args.gradient_accumulation_steps == steps
    if case.match["off"]:  # the loss does not read the policy that sampled
        config, tensors = case.book, batch()
        assert config["loss"] in ("rloo", "maxrl", "reinforce")
        one = surrogate(config, tensors["logps"], tensors["old_logps"], 1.0)
        assert torch.equal(one, surrogate(config, tensors["logps"], tensors["old_logps"] + 1, 1.0))


@says(r"of the log-probabilities; TRL would divide by the sampling temperature there, too")
def _temperature(case: Case) -> None:
    assert case.loaded().trl.temperature == 1.0
    from trl.trainer.utils import selective_log_softmax

    logits = torch.randn(1, 1, 9, generator=generator(8))
    taken = torch.tensor([[2]])
    at = {heat: selective_log_softmax(logits / heat, taken).item() for heat in (1.0, 0.6)}
    assert near(at[1.0], logits.log_softmax(-1)[0, 0, 2].item(), 1e-5)
    assert abs(at[0.6] - at[1.0]) > 0.1


@says(r"the book's code samples with these and scores at 1")
def _sampling(case: Case) -> None:
    told = quantities(case.book, 1000)
    args = case.loaded().trl
    assert args.generation_kwargs == told["sampling"]
    assert args.temperature == told["temperature of log-probabilities"] == 1


@says(r"with use_vllm, TRL would weigh losses by pi at 1 over pi as sampled; the book's code .*")
def _vllm(case: Case) -> None:
    import trl

    assert trl.GRPOConfig.vllm_importance_sampling_correction is True
    assert case.loaded().trl.vllm_importance_sampling_correction is False


@says(
    r"the book's code trains on the first (\d+) questions of this seed; here one in ten is kept .*"
)
def _questions(case: Case) -> None:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    from rlhf_trl.data.gym import GymTasks, is_held_out

    assert int(case.match[1]) == case.book.fields["data"]["size"] == case.ours["dataset"]["size"]
    config = replace(case.loaded().own.dataset, size=300, eval_size=1)
    [spec] = case.book.fields["data"]["specs"]
    told = reasoning_gym.create_dataset(
        "composite", size=400, seed=config.seed, datasets=[DatasetSpec(**spec)]
    )
    asked = [told[n] for n in range(400)]
    share = sum(map(is_held_out, asked)) / 400
    assert 0.05 < share < 0.15
    kept = [entry["question"] for entry in asked if not is_held_out(entry)][:300]
    assert [row["question"] for row in GymTasks(config).train] == kept


@says(r"a completion with 1 is right, as in the book's code")
def _demonstrations(case: Case) -> None:
    assert case.book["success_reward_threshold"] == 1.0
    assert case.ours["correctness_reward"] == "gym_score"
    rewards = torch.tensor([0.99, 1.0, 0.3])
    assert (rewards >= case.book["success_reward_threshold"]).tolist() == [False, True, False]


@says(
    r"the book's code asks one question after another until (\d+) have a right answer, (\d+) at .*"
)
def _polls(case: Case) -> None:
    prompts = case.book["prompts_per_step"]
    assert (int(case.match[1]), int(case.match[2])) == (prompts, 100 * prompts)
    assert case.loaded().trl.dynamic_sampling_rounds == 100


@says(r"by which groups have contrast", r"groups without contrast are dropped")
def _contrast(case: Case) -> None:
    from book_steps import Answer, has_contrast
    from test_book_steps import gym, rollout

    config = gym("dapo")
    trainer = rollout(config, case.folder).trainer
    assert trainer.drops_groups
    assert trainer.reward_func_names[trainer._correctness] == "gym_score"
    entry = (("question", "Spell this word backward: sun"), ("answer", "nus"))
    right, wrong = (Answer((1,), (2,), f"<answer>{text}</answer>", entry) for text in ("nus", "?"))
    groups = ([right, wrong], [right, right])
    assert [has_contrast(config, group) for group in groups] == [True, False]


@says(r"tokens before the limit, over which the penalty grows")
def _overlong(case: Case) -> None:
    from rlhf_trl.book.rewards import overlong_penalty

    limit, grows = case.book["l_max"], case.book["l_cache"]
    lengths = torch.tensor([limit - grows, limit - grows // 2, limit, limit + 5])
    penalties = overlong_penalty(lengths, limit, case.ours["soft_punish_cache"])
    assert penalties.tolist() == [0.0, -0.5, -1.0, -1.0]


@says(r"with its partial credit, where all four tags are, as in the book's code")
def _partial_credit(case: Case) -> None:
    right, form = torch.tensor([0.85, 1.0, 0.7]), torch.tensor([1.0, 0.75, 1.0])
    told = advantages("maxrl", right * (form == 1))
    result = policy_gradient_loss(
        "maxrl",
        logps=torch.zeros(3, 1),
        mask=torch.ones(3, 1),
        rewards=right,
        binary_rewards=right * (form == 1),
        num_generations=3,
        formulation="code",
    )
    assert torch.allclose(result.advantages.flatten().float(), told.float())


@says(
    r"weights are held below 1 \+ ([\d.]+), as in the book's code; TRL's own field .* be ([\d.]+)"
)
def _cispo_bound(case: Case) -> None:
    high, bound = float(case.match[1]), float(case.match[2])
    assert (high, bound) == (case.book["clip_eps_hi"], 1 + case.book["clip_eps_hi"])
    logps = torch.full((2, 1), 1.0, requires_grad=True)
    args = {"logps": logps - 1.0, "old_logps": torch.full((2, 1), -3.0), "mask": torch.ones(2, 1)}
    result = policy_gradient_loss(
        "cispo",
        **args,
        rewards=torch.tensor([1.0, 0.0]),
        num_generations=2,
        formulation="code",
        epsilon=0.2,
        epsilon_high=high,
    )
    result.loss.backward()
    advantage = 1 / math.sqrt(2)  # (1 - 1/2) / std
    assert near(logps.grad[0].item(), -bound * advantage / 2, 1e-4)


@says(r"the book's code goes through its data once")
def _once(case: Case) -> None:
    told = quantities(case.book, case.book.fields["data"]["size"])
    asked = told["prompts per phase"] * told["optimizer steps"] / told["optimizer steps per phase"]
    assert case.book.fields["data"]["size"] - asked < told["prompts per phase"]
    assert case.loaded().trl.num_train_epochs == 1


@says(r"the book's code goes through its data once and fills .*: (\d+) optimizer step for .*")
def _dapo_steps(case: Case) -> None:
    from book_loops import dapo_steps

    assert dapo_steps(case.book, [True, False] * 40) == 40 * int(case.match[1])


@says(r"not read by (\w+)")
def _not_read(case: Case) -> None:
    from rlhf_trl.algorithms import formulation

    row = formulation(case.match[1], "code")
    to = {"kl_estimator": "kl_estimator", "beta": "beta"}.get(case.statement.field)
    assert to not in {**row.reads, **row.trainer_reads}


@says(r"what the recipe does anyway")
def _anyway(case: Case) -> None:
    told = [case.book[name] for name in ("l_max", "accuracy_min_reward", "accuracy_max_reward")]
    assert told == [case.ours["max_completion_length"], 0.0, 1.0]


# --- the critic, precision and the optimizer ------------------------------------------------------


@says(r"the book's code starts the critic's head at random in bfloat16, .* 0\.6 times the size .*")
def _critic(case: Case) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(256, 2048)
    heads = [torch.nn.Linear(2048, 1, bias=False, dtype=torch.bfloat16) for _ in range(64)]
    values = torch.cat([hidden @ head.weight.T.float() for head in heads], dim=1)
    assert abs(values.square().mean().sqrt().item() - 0.6) < 0.05
    from rlhf_trl.trainers.value_model import keep_float32
    from rlhf_trl.value_models import value_classifier

    policy = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=torch.bfloat16)
    head = value_classifier(checkpoint_path(), policy, tokenizer(), False, dtype=policy.dtype).score
    keep_float32(head)
    values = head(hidden[:, :96].bfloat16())
    assert values.dtype == torch.float32 and not values.any()


@says(
    r"the book's code starts the head evenly within 1 / sqrt\(hidden size\), .* of 0\.018 .*0\.02.*"
)
def _reward_heads(case: Case) -> None:
    torch.manual_seed(0)
    there = torch.stack([torch.nn.Linear(1024, 1).weight[0] for _ in range(50)])
    assert abs(there.std().item() - 0.018) < 5e-4 and there.abs().max() <= 1 / 32
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rlhf_trl.reward_models.classifiers import token_classifier

    config = AutoConfig.from_pretrained(checkpoint_path())
    assert config.initializer_range == 0.02  # Qwen3's own, too
    if case.book.name == "preference_rm":
        kind = AutoModelForSequenceClassification
        made = [kind.from_pretrained(checkpoint_path(), num_labels=1).score for _ in range(20)]
    else:
        labels = 3 if case.book.name == "prm" else 1
        made = [
            token_classifier(checkpoint_path(), labels, labels > 1, device_map=None).score
            for _ in range(20)
        ]
    weights = torch.cat([head.weight.flatten() for head in made])
    assert abs(weights.std().item() - 0.02) < 2e-3
    if "bias" in case.statement.text:
        assert not any(head.bias.any() for head in made)
        assert torch.nn.Linear(1024, 3).bias.abs().max() > 0


@says(r"the weights of the book's code")
def _dtype(case: Case) -> None:
    is_reward_model = case.book.folder == "reward_models"
    assert case.ours["dtype"] == ("float32" if is_reward_model else "bfloat16")
    assert case.loaded().model.dtype == case.ours["dtype"]


@says(r"as the book's code computes", r"autocast, as in the book's code")
def _autocast(case: Case) -> None:
    dtype = torch.bfloat16 if case.ours["dtype"] == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), dtype=dtype)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        autocast = model(input_ids=ids).logits
    assert autocast.dtype == torch.bfloat16
    if dtype == torch.bfloat16:  # weights in bfloat16 alone compute the same
        with torch.no_grad():
            assert torch.equal(autocast, model(input_ids=ids).logits)


@says(
    r"as the book's code, which rounds to bfloat16 after each operation of Adam; TRL's default, .*"
)
def _adam(case: Case) -> None:
    import trl

    assert trl.DPOConfig.optim == "adamw_torch_fused" and case.ours["optim"] == "adamw_torch"
    moved = {}
    for how in ("foreach", "fused"):
        numbers = generator(0)
        start = (torch.randn(200_000, generator=numbers) * 0.02).bfloat16()
        weight = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([weight], lr=5e-6, weight_decay=0.0, **{how: True})
        for step in range(100):
            weight.grad = (torch.randn(start.shape, generator=numbers) * 1e-4).bfloat16()
            optimizer.step()
            if step in (0, 99):
                moved[how, step] = weight.detach().float() - start.float()
    apart = [
        ((moved["foreach", step] - moved["fused", step]).norm() / moved["fused", step].norm())
        for step in (0, 99)
    ]
    assert abs(apart[0] - 0.01) < 0.005 and abs(apart[1] - 0.05) < 0.01


@says(r"the book's code has log-probabilities in bfloat16, in steps of (.*); here in float32")
def _steps_of_bfloat16(case: Case) -> None:
    named = {256.0: 2.0, 1024.0: 8.0} if case.match[1].startswith("2 ") else {1.0: 0.0078125}
    for start, step in named.items():
        number = torch.tensor(start, dtype=torch.bfloat16)
        after = torch.nextafter(number, torch.tensor(torch.inf).to(number))
        assert (after - number).item() == step


# --- schedules and batches ------------------------------------------------------------------------


def planned(case: Case) -> tuple[dict[str, Any], Any]:
    """Return what the code's loop makes of a config, and what the recipe's does."""
    from test_book_quantities import Recipe, rows_of

    rows = rows_of(case.statement.key, case.book)
    return quantities(case.book, rows), Recipe(case.book, case.folder)


@says(r"to 0, as in the book's code")
def _to_0(case: Case) -> None:
    told, recipe = planned(case)
    rates = told["learning rates"]
    here = recipe.rates(len(rates))
    assert 0 < here[-1] < rates[0] * 2 and near(here[-1], rates[-1])
    assert near(here[len(here) // 2], rates[len(rates) // 2])


@says(r"as in the book's code: W steps, rounded down, the first at the rate / \(W \+ 1\)")
def _from_first_step(case: Case) -> None:
    told, recipe = planned(case)
    rates, warmup = told["learning rates"], told["warm-up steps"]
    here = recipe.rates(len(rates))
    assert near(here[0], max(rates) / (warmup + 1)) and here.index(max(here)) == warmup
    assert near(here[warmup - 1], rates[warmup - 1])


@says(r"the book's code has no schedule")
def _constant(case: Case) -> None:
    told, recipe = planned(case)
    assert {*told["learning rates"]} == {*recipe.rates(50)} == {case.book["lr"]}


@says(r"the book's code rounds a share of all steps down; here up: one step more, unless .* whole")
def _rounded(case: Case) -> None:
    told, recipe = planned(case)
    steps = len(told["learning rates"])
    exact = steps * case.book["warmup_ratio"]
    assert told["warm-up steps"] == math.floor(exact)
    assert recipe.args.get_warmup_steps(steps) == math.ceil(exact) == told["warm-up steps"] + 1


@says(r"a share of all steps")
def _share(case: Case) -> None:
    assert case.loaded().trl.get_warmup_steps(600) == 600 * case.book["warmup_ratio"]


@says(r"the book's code warms up from a tenth of the rate; here from 0")
def _tenth(case: Case) -> None:
    told, recipe = planned(case)
    assert near(told["learning rates"][0], case.book["lr"] / 10)
    assert recipe.rates(len(told["learning rates"]))[0] == 0.0


@says(r"the book's code does not read it and logs every step; here steps between logs")
def _logs(case: Case) -> None:
    assert case.loaded().trl.logging_steps == case.book["log_every"] == 10


@says(r"the model at the end is saved in any case")
def _saved(case: Case) -> None:
    from test_book_steps import pairs_run

    assert case.loaded().trl.save_strategy == "no"
    folder = pairs_run(case.folder)
    assert (folder / "model" / "model.safetensors").stat().st_size > 100_000


@says(
    r"the book's code averages over the tokens of each micro-batch, then over the micro-batches .*"
)
def _token_weights(case: Case) -> None:
    losses = torch.rand(3, requires_grad=True)
    ((losses[:1].mean() + losses[1:].mean()) / 2).backward()
    assert losses.grad[1] == losses.grad[0] / 2
    losses.grad = None
    losses.mean().backward()
    assert losses.grad[1] == losses.grad[0]


@says(r"the book's code drops the micro-batches that are left .*; here they make one more, .*")
def _dropped_steps(case: Case) -> None:
    told, _ = planned(case)
    batches = math.ceil(9500 / case.book["batch_size"])
    epochs = case.book["num_epochs"]
    complete, left = divmod(batches, case.book["gradient_accumulation_steps"])
    assert left and told["optimizer steps"] == complete * epochs
    args = case.loaded().trl
    assert math.ceil(batches / args.gradient_accumulation_steps) == complete + 1


@says(r"the book's code leaves out the last incomplete micro-batch of an epoch, and divides .*")
def _last_micro_batch(case: Case) -> None:
    odd = quantities(replace(case.book, fields=case.book.fields | {"batch_size": 2}), 4501)
    even = quantities(replace(case.book, fields=case.book.fields | {"batch_size": 2}), 4500)
    assert odd["optimizer steps"] == even["optimizer steps"]
    smaller = replace(case.book, fields=case.book.fields | {"grad_accum_steps": 8})
    share = quantities(smaller, 9 * case.book["batch_size"])["weight of a leftover micro-batch"]
    assert share == 1 / 8
    assert not case.loaded().trl.dataloader_drop_last


@says(r"the book's code decays all weights at the default of torch; here all but biases and norms")
def _decay(case: Case) -> None:
    default = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults["weight_decay"]
    assert default == case.ours["weight_decay"] == 0.01
    from transformers import Trainer

    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    trainer = SimpleNamespace(model=model)
    decayed = Trainer.get_decay_parameter_names(trainer, model)
    left_out = [name for name, _ in model.named_parameters() if name not in decayed]
    assert left_out and all("norm" in name or "bias" in name for name in left_out)


@says(r"the book's code does not clip; 0 turns TRL's clipping off")
def _clip(case: Case) -> None:
    told, recipe = planned(case)
    assert told["gradient norm clipped at"] is None and recipe.args.max_grad_norm == 0


@says(r"optimizer steps")
def _eval_steps(case: Case) -> None:
    assert case.loaded().trl.eval_steps == case.book["eval_interval"]


@says(r"the book's code evaluates every (\d+) optimizer steps and after each epoch; here .*")
def _evaluations(case: Case) -> None:
    args = case.loaded().trl
    assert args.eval_steps == int(case.match[1]) == case.book["eval_interval"]
    assert args.eval_strategy == "steps" and case.book["epochs"] > 1


# --- pairs and conversations ----------------------------------------------------------------------


@says(r"a ratio to beta; TRL's simpo_gamma is beta x gamma")
def _gamma(case: Case) -> None:
    chosen, rejected = torch.tensor([-1.0]), torch.tensor([-1.5])
    beta, ratio = case.ours["beta"], case.ours["gamma_beta_ratio"]
    loss = preference_loss(
        "simpo",
        policy_chosen_logps=chosen,
        policy_rejected_logps=rejected,
        formulation="code",
        beta=beta,
        gamma_beta_ratio=ratio,
    ).loss
    simpo_gamma = beta * ratio  # as TRL's CPOTrainer subtracts it
    assert near(loss, -F.logsigmoid(beta * (chosen - rejected) - simpo_gamma).item())


@says(r"the first so many pairs")
def _first_pairs(case: Case) -> None:
    assert len(pairs_here(case, max_samples=3).train_dataset) == 3


def pairs_here(case: Case, **changes: Any) -> Any:
    """Return the recipe's trainer on sixteen pairs of ragged answers."""
    from test_book_steps import aligned

    _, trained = aligned(case.book.name, case.folder, moved=False, **changes)
    return trained.trainer


@says(r"the book's code keeps the last tokens of each text by itself, .*; here both texts of a .*")
def _cut_pairs(case: Case) -> None:
    from book_steps import encode
    from test_book_steps import pairs

    limit = 14
    data = pairs_here(case, max_length=limit).train_dataset
    kept = 0
    for asked, good, bad in pairs():
        sides = [encode(tokenizer(), asked, answer) for answer in (good, bad)]
        for first, rest in sides:
            there = [*first, *rest][-limit:]  # of a longer answer its end alone
            assert there == rest[-limit:] or len(rest) < limit
        answers = [len(rest) for _, rest in sides]
        kept += max(answers) < limit
    assert 0 < len(data) == kept < len(pairs())
    for row in data:
        longest = max(len(row["chosen_ids"]), len(row["rejected_ids"]))
        assert len(row["prompt_ids"]) + longest <= limit


@says(r"the book's code trains (\d+) pairs at a time, whole ones, .*; here (\d+) completions, .*")
def _kto_batches(case: Case) -> None:
    size = case.book["batch_size"]
    assert (int(case.match[1]), int(case.match[2])) == (size, 2 * size)
    assert case.loaded().trl.per_device_train_batch_size == 2 * size


@says(r"the last turn is trained, as in the book's code")
def _last_turn(case: Case) -> None:
    from book_steps import encode
    from test_book_steps import conversations, pairs

    _, trained = conversations(case.folder)
    row = next(iter(trained.trainer.get_train_dataloader()))
    labels = row["labels"][0][row["labels"][0] != -100].tolist()
    answers = [encode(tokenizer(), asked, good)[1] for asked, good, _ in pairs()]
    assert labels in answers


@says(r"what is longer loses its (end|start), as in the book's code")
def _cut_conversations(case: Case) -> None:
    from test_book_steps import conversations, ids_of, pairs

    mode = case.loaded().trl.truncation_mode
    assert mode == {"end": "keep_start", "start": "keep_end"}[case.match[1]]
    _, trained = conversations(case.folder, "--truncation_mode", mode, max_length=20)
    kept = {tuple(row["input_ids"]) for row in trained.trainer.train_dataset}
    whole = [ids_of(asked, good) for asked, good, _ in pairs()]
    cut = {ids[:20] if case.match[1] == "end" else ids[-20:] for ids in whole}
    assert kept == cut and max(map(len, whole)) > 20


@says(r"what is longer is left out, as in the book's code")
def _left_out(case: Case) -> None:
    limit = case.book["max_tokens" if case.book.name == "prm" else "max_length"]
    assert case.loaded().trl.max_length == limit


@says(r"the book's code cuts the end of longer texts; here their pair is left out")
def _left_out_pairs(case: Case) -> None:
    from test_book_steps import write_pairs

    from rlhf_trl.run.reward_models import prepare_rewards

    data = {"source": "path", "path": write_pairs(case.folder), "reader": "ultrafeedback"}
    loaded = case.loaded(
        model_name_or_path=checkpoint_path(), dataset=data, eval_strategy="no", max_length=24
    )
    examples, own = prepare_rewards(loaded.own, loaded.trl, loaded.model)
    from rlhf_trl.run import train

    trainer = train.build(loaded, STAGES["reward"].part("trainer"), examples, own)
    assert 0 < len(trainer.train_dataset) < 16


@says(r"where the tokenizer has no template, as in the book's code")
def _template(case: Case) -> None:
    loaded = case.loaded()
    assert loaded.own.chat_template_fallback == case.book.fields["chat_template_source"]
    assert loaded.trl.chat_template_path is None  # which would replace any


# --- panels ---------------------------------------------------------------------------------------


@says(r"the book's code asks prompts of a list of its own; here those of the data set")
def _panels(case: Case) -> None:
    assert case.loaded().own.samples.file is None


@says(r"the book's code cuts longer prompts; here prompts of panels are not cut")
def _panel_prompts(case: Case) -> None:
    assert not hasattr(case.loaded().own.samples, "max_input_tokens")


def conversations_here(case: Case) -> Any:
    """Return the recipe's trainer on sixteen conversations."""
    from test_book_steps import conversations

    return conversations(case.folder)[1].trainer


@says(r"the book's code has one answer a prompt; here a greedy and a sampled one")
def _panel_answers(case: Case) -> None:
    from rlhf_trl.rollouts.generate import Sampling

    rows = [{"prompt": [{"role": "user", "content": "Say sun"}]}]
    answers = conversations_here(case).answer(rows, Sampling(0.7, 0.9), 4)
    assert len(answers) == 1 and {"greedy", "sampled"} <= answers[0].keys()


# --- distillation, rejection sampling, and what is left out ---------------------------------------


@says(r"as the book's code")
def _as_the_code(case: Case) -> None:
    field, loaded = case.statement.field, case.loaded()
    if field == "ties":  # the first of equals, as Python's max
        rewards = [[0.1, 0.9, 0.9], [1.0, 1.0, 0.0]]
        told = [(row, max(range(3), key=rewards[row].__getitem__)) for row in range(2)]
        assert top_per_prompt(rewards, ties="first") == told
    elif field == "demonstration":
        assert loaded.trl.demonstration == "first"
    elif field == "teacher":
        assert loaded.trl.teacher == "live"
    elif field == "activation_checkpointing":
        assert loaded.trl.activation_checkpointing is True
    else:
        assert (field, case.ours[field]) == ("chat_template_kwargs", {"enable_thinking": False})


@says(r"the book's code cuts longer prompts(?: of the teacher)?; here prompts are not cut")
def _prompts(case: Case) -> None:
    args = case.loaded().trl
    limits = [name for name in vars(args) if "prompt_len" in name]
    assert [getattr(args, name) for name in limits] == [None] * len(limits)


@says(r"the chat template's default")
def _thinking(case: Case) -> None:
    assert case.book.fields["enable_thinking"] is True
    template = "{% if enable_thinking is defined and not enable_thinking %}x{% endif %}y"
    rows = [{"role": "user", "content": "a"}]
    texts = [
        tokenizer().apply_chat_template(rows, chat_template=template, tokenize=False, **given)
        for given in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    ]
    assert texts == ["y", "y", "xy"] and "chat_template_kwargs" not in case.ours


@says(r"the book's code trains the text of the chat template: with an end of turn .*; here .*")
def _cut_answers(case: Case) -> None:
    from book_steps import encode

    from rlhf_trl.run.rejection_sampling import Rollouts, _example

    ids = tokenizer()("abc", add_special_tokens=False)["input_ids"]
    _, there = encode(tokenizer(), "Say abc", "abc")
    rows = [{"prompt": [{"role": "user", "content": "Say abc"}]}]
    answers = [[SimpleNamespace(ids=ids)]]
    here = _example(Rollouts(rows, answers, [[1.0]], None), tokenizer(), (0, 0))
    learned = here["input_ids"][-sum(here["completion_mask"]) :]
    assert learned == ids and there[: len(ids)] == ids and len(there) > len(ids)


@says(r"the system prompt is that of the book's code")
def _system_prompt(case: Case) -> None:
    words = case.ours["dataset"]["system_prompt"].split()
    assert words[:4] == ["Please", "reason", "step", "by"] and words[-1] == r"\boxed{}."
    assert len(words) == 12


@says(r"for the report and evaluation only")
def _report_only(case: Case) -> None:
    from rlhf_trl.algorithms import LOSS_FIELDS

    assert "correctness" not in LOSS_FIELDS and case.ours["correctness"] == "number"
    rewards = [[0.1, 0.9], [0.7, 0.2]]  # of the reward model alone
    assert top_per_prompt(rewards) == [(0, 1), (1, 0)]


@says(r"answers at a time")
def _answers_at_a_time(case: Case) -> None:
    told = case.book.fields["rollout_batch_size"] * case.book["num_completions_per_prompt"]
    assert case.loaded().trl.per_device_eval_batch_size == told


@says(r"which all strategies share")
def _shared_answers(case: Case) -> None:
    keys = [key for key, config in BOOK.items() if config.folder == "rejection_sampling"]
    sheets = [sheet_of(key, case.folder) for key in keys]
    assert len({sheet.lines["answers"].value for sheet in sheets}) == 1
    assert len({sheet.lines["output_dir"].value for sheet in sheets}) == 4


@says(r"per_device_eval_batch_size is for both")
def _for_both(case: Case) -> None:
    size = case.ours["per_device_eval_batch_size"]
    assert case.loaded().trl.per_device_eval_batch_size == size
    assert case.book.fields["score_batch_size"] != size


@says(r"the book's code answers greedily whatever it says, and so is done here")
def _greedy(case: Case) -> None:
    from rlhf_trl.rollouts.generate import Sampling

    rows = [{"prompt": [{"role": "user", "content": "Say sun"}]}] * 2
    [one, other] = conversations_here(case).answer(rows, Sampling(5.0), 8)
    assert one["greedy"] == other["greedy"]


@says(r"evaluation has the limit of max_completion_length")
def _eval_limit(case: Case) -> None:
    assert case.book.fields["eval_max_new_tokens"] == case.ours["max_completion_length"]


@says(r"the book's code (shuffles all rows before it takes|takes the first) (\d+).*; here the .*")
def _held_out_rows(case: Case) -> None:
    rows, held = case.book["samples"], math.ceil(case.book["samples"] * case.book["val_ratio"])
    assert int(case.match[2]) == rows
    data = case.ours["dataset"]
    assert (data["split"], data["eval_split"]) == (
        f"train[:{rows - held}]",
        f"train[{rows - held}:{rows}]",
    )
    if case.book.name == "prm":
        from rlhf_trl.data.readers import prm800k

        step = {
            "completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}],
            "chosen_completion": 0,
        }
        row = {"question": {"problem": "p"}, "label": {"steps": [step]}}
        made = prm800k(row)
        assert len(step["completions"]) == 2 and len(made["labels"]) == 1


@says(r"accelerate places the models")
def _placed(case: Case) -> None:
    assert case.loaded().trl.device.type == "cpu" and case.statement.field not in case.ours


@says(r"the whole model is trained, as in the book's code with false")
def _whole_model(case: Case) -> None:
    assert case.book.fields["freeze_backbone"] is False
    assert case.loaded().model.use_peft is False


@says(r"write report_to: wandb")
def _report_to(case: Case) -> None:
    assert case.loaded(report_to="wandb").trl.report_to == ["wandb"]


@says(r"no demo follows the training here")
def _no_demo(case: Case) -> None:
    assert "skip_demo" in case.book.fields and "skip_demo" not in case.ours
