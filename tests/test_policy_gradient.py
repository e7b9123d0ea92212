"""The policy-gradient trainer's gradients against the public function, and against TRL's."""

from collections import defaultdict
from itertools import chain
from statistics import fmean, stdev

import pytest
import torch
from comparison import Comparison, measure, plain_copy
from policy_gradient_cases import (
    ROWS,
    Reference,
    build,
    completions_of,
    drawn,
    drift,
    is_right,
    is_shaped,
    joined,
    plain_logps,
    right,
)
from trl import GRPOConfig, GRPOTrainer

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare.measure import Measured, accumulate, batches, flat_gradient


@pytest.fixture
def in_order(monkeypatch):
    """Keep groups together in micro-batches, so that the public function can be called on them."""
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)


MILD, HEAVY = 0.05, 0.3
# accumulation, steps per generation, iterations, drift
SCHEDULES = [
    (1, 1, 1, 0.0),
    (1, 4, 1, MILD),
    (1, 1, 2, HEAVY),
    (2, 1, 1, MILD),
    (4, 1, 2, 0.0),
    (2, 2, 1, 0.0),
    (2, 4, 1, HEAVY),
    (2, 2, 2, MILD),
]


# accumulation over a generation, over part of one, and a second use of it
FEWER = [(1, 1, 2, HEAVY), (2, 1, 1, MILD), (2, 4, 1, HEAVY)]


def scheduled():
    """All schedules for one row of each class, the fewer for the others.

    What a schedule can break is where the loss is normalized, whether there is a ratio to the
    policy that generated, and where the KL stands; the rows of a class are alike in these.
    """
    seen = set()
    for name, which in ROWS:
        row = formulation(name, which)
        alike = row.window, row.ratio != "none", row.kl
        yield from ((name, which, s) for s in (FEWER if alike in seen else SCHEDULES))
        seen.add(alike)


@pytest.mark.parametrize(("name", "which", "schedule"), list(scheduled()), ids=str)
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
            if not result.reference.gradient.norm():  # MaxRL: a micro-batch without a success
                assert not result.trainer.gradient.norm()
                continue
            errors.append(result.relative_error)
            assert result.trainer.loss == pytest.approx(result.reference.loss, rel=1e-4, abs=1e-5)
        assert len(errors) >= windows / 2 and max(errors) <= 1e-5, errors


def test_the_drifts_are_mild_and_heavy():
    spans = {}
    for scale in (MILD, HEAVY):
        trainer = build("grpo", num_iterations=2)
        source, before = batches(trainer), plain_copy(trainer)
        accumulate(trainer, source)
        drift(trainer.model, scale, 1)
        _, [batch] = accumulate(trainer, source)
        with torch.no_grad():
            log_ratio = plain_logps(plain_copy(trainer), batch) - plain_logps(before, batch)
        ratio = log_ratio.exp()[batch["completion_mask"].bool()]
        spans[scale] = ratio.min(), ratio.max()
        outside = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
        assert (0 < outside < 0.1) if scale == MILD else (0.5 < outside < 1)
    assert spans[HEAVY][0] < 0.5 and spans[HEAVY][1] > 2


@pytest.mark.parametrize("name", ["reinforce", "rloo", "maxrl"])
def test_a_capped_importance_weight_corrects_the_drift(name, in_order):
    trainer = build(name, num_iterations=2, importance_cap=1.3)
    source = batches(trainer)
    reference = Reference(trainer, name, "chapter", importance_cap=1.3)
    reference.old = plain_copy(trainer)
    assert measure(trainer, source, reference).relative_error <= 1e-5
    drift(trainer.model, HEAVY, 1)
    assert measure(trainer, source, reference).relative_error <= 1e-5
    reference.params = {"importance_cap": 1e6}
    assert trainer._step == 2
    trainer._step = 1
    assert measure(trainer, source, reference).relative_error > 0.01


@pytest.mark.parametrize(("name", "which"), [r for r in ROWS if r[1] != "trl"])
def test_shuffled_micro_batches_add_up_to_the_generation(name, which):
    # token means per micro-batch depend on who shares one: the only row that must not add up
    trainer = build(name, which, gradient_accumulation_steps=4, per_device_train_batch_size=4)
    reference = Reference(trainer, name, which)

    def whole(plain, window):
        order = sorted(
            ((tuple(ids.tolist()), i) for i, ids in enumerate(joined(window)["prompt_ids"])),
        )
        whole = joined(window)
        return reference.call(plain, {k: v[[i for _, i in order]] for k, v in whole.items()})

    result = measure(trainer, batches(trainer), whole)
    if (name, which) == ("dapo", "code"):
        assert 0.95 < result.cosine < 0.9999
    else:
        assert result.relative_error <= 1e-5


def test_windows_of_one_generation_have_their_own_token_counts():
    trainer = build("dapo", steps_per_generation=4, per_device_train_batch_size=4)
    source = batches(trainer)
    counts = []
    for _ in range(4):
        _, [batch] = accumulate(trainer, source)
        counts.append(int(batch["completion_mask"].sum()))
    assert trainer._window_tokens.tolist() == counts
    assert len(set(counts)) > 1  # where TRL divides all four by the same average


# accumulation, steps per generation, iterations
TORN = [(1, 4, 1), (2, 4, 2), (4, 2, 1)]


@pytest.mark.parametrize(("accumulation", "per_generation", "iterations"), TORN)
def test_each_prompt_counts_the_same_in_shuffled_windows(accumulation, per_generation, iterations):
    trainer = build(
        "cispo",
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=iterations,
        per_device_train_batch_size=4,
    )
    source, plain = batches(trainer), plain_copy(trainer)
    count = max(1, per_generation * iterations // accumulation)
    windows = [accumulate(trainer, source) for _ in range(count)]
    rows = []  # by window: the prompts and completions
    for _, window in windows:
        whole = joined(window)
        prompts = zip(whole["prompt_ids"], whole["prompt_mask"], strict=True)
        prompts = [tuple(ids[mask.bool()].tolist()) for ids, mask in prompts]
        rows.append(list(zip(prompts, completions_of(whole), strict=True)))
    assert any(len(set(prompts)) > 1 for prompts in [[p for p, _ in part] for part in rows])
    tokens, rewards = defaultdict(int), defaultdict(list)
    for prompt, ids in list(chain(*rows))[: 4 * max(per_generation, accumulation)]:
        tokens[prompt] += len(ids)
        rewards[prompt].append(is_right(ids) + 0.5 * is_shaped(ids))
    assert all(len(each) == 4 for each in rewards.values()) and len(set(tokens.values())) > 1
    for (side, window), part in zip(windows, rows, strict=True):
        logps = plain_logps(plain, joined(window))
        plain.zero_grad()
        loss = 0.0  # on-policy: every weight is 1
        for (prompt, ids), of_tokens in zip(part, logps, strict=True):
            group = rewards[prompt]
            reward = is_right(ids) + 0.5 * is_shaped(ids)
            advantage = (reward - fmean(group)) / (stdev(group) + 1e-4)
            loss = loss - advantage * of_tokens[: len(ids)].sum() / tokens[prompt]
        (loss / (len(part) / 4)).backward()
        reference = Measured(0.0, flat_gradient(plain))
        assert Comparison(side, reference).relative_error <= 1e-5


# --- stock TRL by settings -----------------------------------------------------------------------

GRPO = {"loss_type": "grpo", "scale_rewards": "group", "use_bias_correction_kl": False}
RAGGED = {0: 9, 1: 4, 2: 6, 3: 2}


def ragged(prompt_ids, index, call):
    """Four completions of 9, 4, 6 and 2 tokens."""
    rng = drawn("ragged", prompt_ids, index, call)
    return [*(rng.randrange(7, 119) for _ in range(RAGGED[index] - 1)), 5]


def against_stock(ours, stock, *, off_policy, scale=None, **both):
    """Compare the gradients of two trainers on the same batch, after the same drift."""
    sides = []
    for how in (ours, stock):
        config = {**both, **how}
        if off_policy:
            config["num_iterations"] = 2
        trainer = build(per_device_train_batch_size=4, answer=ragged, **config)
        trainer.model.requires_grad_(True)
        source = batches(trainer)
        drift(trainer.model, 0.05, 99)
        side, _ = accumulate(trainer, source)
        if off_policy:
            drift(trainer.model, scale or HEAVY, 1)
            side, _ = accumulate(trainer, source)
        sides.append(side)
    return Comparison(*sides)


def stock(**config):
    return {"name": "stock", "which": (GRPOTrainer, GRPOConfig), **config}


def plain_rewards(scale):
    def reward(completion_ids, **kwargs):
        return [scale * r for r in right(completion_ids)]

    return {"rewards": [reward], "reward_weights": [1.0]}


EQUAL = {
    "GRPO": ({"name": "grpo"}, stock(**GRPO)),
    "GRPO with KL": ({"name": "grpo", "beta": 0.1}, stock(**GRPO, beta=0.1)),
    "Dr. GRPO": ({"name": "drgrpo"}, stock(loss_type="dr_grpo", scale_rewards="none")),
    "Dr. GRPO, code": (
        {"name": "drgrpo", "which": "code"},
        stock(loss_type="grpo", scale_rewards="none"),
    ),
    "GSPO": ({"name": "gspo"}, stock(**GRPO, importance_sampling_level="sequence")),
    "SAPO": ({"name": "sapo"}, stock(loss_type="sapo")),
    "CISPO without lower bound": (
        {"name": "cispo", "epsilon": 1.0},
        stock(loss_type="cispo", epsilon_high=1.4),
    ),
    "CISPO, trl": ({"name": "cispo", "which": "trl"}, stock(loss_type="cispo", epsilon_high=1.4)),
    "DAPO": (
        {"name": "dapo", "soft_punish_cache": 1},
        stock(loss_type="dapo", epsilon_high=0.28),
    ),
}


@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("case", EQUAL)
def test_stock_trl_is_equal_by_settings(case, off_policy):
    ours, theirs = EQUAL[case]
    assert against_stock(ours, theirs, off_policy=off_policy).relative_error <= 1e-6


def test_rloo_of_the_code_is_stock_grpo_with_a_weight_on_policy():
    weight = {"rewards": [right], "reward_weights": [1.0]}
    ours = {"name": "rloo", "which": "code", **weight}
    theirs = stock(loss_type="grpo", scale_rewards="none", **weight | {"reward_weights": [4 / 3]})
    assert against_stock(ours, theirs, off_policy=False).relative_error <= 1e-6
    off = against_stock(ours, theirs, off_policy=True)
    assert off.relative_error > 0.05


def stock_rloo(off_policy):
    """TRL's RLOOTrainer on the same batch."""
    from trl import RLOOConfig, RLOOTrainer

    trainer = build(
        "stock",
        (RLOOTrainer, RLOOConfig),
        per_device_train_batch_size=4,
        answer=None,
        beta=0.0,
        num_iterations=1 + off_policy,
    )
    calls = iter(range(9))

    def generate(prompt_ids, images, multimodal_fields):
        call = next(calls)
        return [ragged(tuple(ids), i, call) for i, ids in enumerate(prompt_ids)]

    trainer._generate_single_turn = generate
    source = batches(trainer)
    drift(trainer.model, 0.05, 99)
    side, _ = accumulate(trainer, source)
    if off_policy:
        drift(trainer.model, HEAVY, 1)
        side, _ = accumulate(trainer, source)
    return side


def our_rloo(off_policy):
    same = {"name": "rloo"}
    return against_stock(same, same, off_policy=off_policy).trainer


def test_rloo_of_the_chapter_is_stock_rloo_on_policy_only():
    assert Comparison(our_rloo(False), stock_rloo(False)).relative_error <= 1e-6
    assert Comparison(our_rloo(True), stock_rloo(True)).cosine < 0.9


def test_trls_bias_corrected_kl_is_k2_on_policy():
    theirs = stock(**GRPO | {"use_bias_correction_kl": True}, beta=1.0)
    k2 = {"name": "grpo", "beta": 1.0, "kl_estimator": "k2"}
    assert against_stock(k2, theirs, off_policy=False).relative_error <= 1e-6
    k3 = k2 | {"kl_estimator": "k3"}
    assert against_stock(k3, theirs, off_policy=False).relative_error > 1e-3


# Ours, stock, and what TRL's gradient is to the book's off-policy: cosine and norm ratio. All but
# the last belong to this batch.
UNEQUAL = {
    "Dr. GRPO, code for chapter": (
        {"name": "drgrpo"},
        {"name": "drgrpo", "which": "code"},
        0.903,
        2.165,
    ),
    "TRL's default for GRPO": ({"name": "grpo"}, stock(), 0.903, 1.056),
    "TRL's default loss for GSPO": (
        {"name": "gspo"},
        stock(importance_sampling_level="sequence"),
        0.902,
        1.083,
    ),
    "CISPO with the bound copied": (
        {"name": "cispo"},
        stock(loss_type="cispo", epsilon_high=0.4),
        0.983,
        0.452,
    ),
    "CISPO with the bound unset": ({"name": "cispo"}, stock(loss_type="cispo"), 0.983, 0.226),
    "a temperature of 0.6": ({"name": "grpo"}, stock(**GRPO, temperature=0.6), 0.959, 1.593),
    "a std epsilon of 1e-4 at reward scale 1e-3": (
        {"name": "grpo", "which": "code", **plain_rewards(1e-3)},
        stock(**GRPO, **plain_rewards(1e-3)),
        1.0,
        0.833,
    ),
}


@pytest.mark.parametrize("case", UNEQUAL)
def test_stock_trl_differs_without_them(case):
    ours, theirs, cosine, ratio = UNEQUAL[case]
    found = against_stock(ours, theirs, off_policy=True)
    assert found.cosine == pytest.approx(cosine, abs=0.005)
    assert 1 / found.norm_ratio == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(("bound", "weight"), [(0.4, 0.4), (None, 0.2)])
def test_trls_cispo_bound_is_absolute(bound, weight):
    # on-policy every weight is 1, so an absolute bound below 1 scales the whole gradient
    theirs = stock(loss_type="cispo", epsilon_high=bound)
    found = against_stock({"name": "cispo"}, theirs, off_policy=False)
    assert 1 / found.norm_ratio == pytest.approx(weight, rel=1e-5)
