"""`policy_gradient_loss`, against loops over tokens, against TRL's own loss, and its refusals."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlhf_trl
from rlhf_trl import policy_gradient_loss
from rlhf_trl.algorithms import ALGORITHMS, formulation, names, nearest_row
from rlhf_trl.errors import InputError
from rlhf_trl.losses.policy_gradients import surrogate_loss

NAMES = names("policy_gradient")
ROWS = [(name, which) for name in NAMES for which in ALGORITHMS[name].formulations]
WITHOUT_RATIO = ("reinforce", "rloo", "maxrl")
LENGTHS = (6, 4, 1, 5, 2, 3)


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def batch(name, seed=0, drift=0.4, size=6, tokens=6, dtype=torch.float64):
    """A ragged batch of two groups of three, with what the algorithm reads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale, shape=(size, tokens)):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    logps = -draw(1.0).abs()
    inputs = {
        "logps": logps,
        "mask": (torch.arange(tokens) < torch.tensor(LENGTHS[:size])[:, None]).to(dtype),
        "rewards": draw(1.0, (size,)),
        "num_generations": size // 2,
    }
    if name not in WITHOUT_RATIO:
        inputs["old_logps"] = logps + draw(drift)
    if name == "ppo":
        inputs["old_values"] = draw(1.0)
        inputs["values"] = inputs["old_values"] + draw(0.5)
    if name == "maxrl":
        inputs["binary_rewards"] = f64([0, 1, 1, 0, 0, 1])[:size]
    for key, tensor in inputs.items():
        inputs[key] = tensor.to(dtype) if isinstance(tensor, torch.Tensor) else tensor
    return inputs


def learned(inputs):
    """Make fresh leaves of what is trained; return the inputs and the leaves."""
    leaves = {k: inputs[k].clone().requires_grad_() for k in ("logps", "values") if k in inputs}
    return inputs | leaves, list(leaves.values())


def run(name, which, inputs, **params):
    """Return the result and its gradients with respect to logps (and values)."""
    inputs, leaves = learned(inputs)
    if "max_completion_length" in formulation(name, which).reads:
        params = {"max_completion_length": 8} | params
    result = policy_gradient_loss(name, formulation=which, **inputs, **params)
    return result, torch.autograd.grad(result.loss, leaves)


# --- the chapter, in loops -----------------------------------------------------------------------


def mean(numbers):
    return sum(numbers) / len(numbers)


def clip(x, low, high):
    return torch.clamp(x, low, high)


def kl_of(estimator, logp, ref):
    r = ref - logp
    return {"k1": -r, "k2": r * r / 2, "k3": torch.exp(r) - 1 - r}[estimator]


def clipped(ratio, advantage, low, high):
    return -torch.minimum(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def loops(name, x, beta, estimator):
    """The chapter's loss, one token at a time; returns the loss and the advantages."""
    size = len(x["rewards"])
    tokens = [[t for t in range(x["mask"].shape[1]) if x["mask"][i, t]] for i in range(size)]
    logp, ref = x["logps"], x.get("ref_logps")
    old = x.get("old_logps", logp.detach())
    reward = x["rewards"].tolist()

    def token_kl(i, t, logp=logp):
        return kl_of(estimator, logp[i, t], ref[i, t])

    # rewards, with the KL of the rollout in them
    if name in ("reinforce", "rloo") and beta:
        for i in range(size):
            reward[i] -= beta * sum(token_kl(i, t, old).item() for t in tokens[i])

    # advantages
    groups = [range(g, g + x["num_generations"]) for g in range(0, size, x["num_generations"])]
    advantage = [None] * size
    for group in groups:
        for i in group:
            others = [reward[j] for j in group if j != i]
            all_of_them = [reward[j] for j in group]
            centered = reward[i] - mean(all_of_them)
            if name == "reinforce":
                advantage[i] = reward[i] - mean(reward)
            elif name == "rloo":
                advantage[i] = reward[i] - mean(others)
            elif name == "drgrpo":
                advantage[i] = centered
            elif name == "maxrl":
                wins = mean([x["binary_rewards"][j].item() for j in group])
                advantage[i] = (x["binary_rewards"][i].item() - wins) / wins if wins else 0.0
            elif name != "ppo":
                squares = sum((r - mean(all_of_them)) ** 2 for r in all_of_them)
                advantage[i] = centered / (math.sqrt(squares / (len(group) - 1)) + 1e-4)
    per_token = torch.zeros_like(logp).detach()
    for i in range(size):
        for t in tokens[i]:
            if name != "ppo":
                per_token[i, t] = advantage[i]
                continue
            for later in [s for s in tokens[i] if s >= t]:
                last = later == tokens[i][-1]
                paid = (reward[i] if last else 0.0) - (
                    beta * token_kl(i, later, old).item() if beta else 0.0
                )
                ahead = 0.0 if last else x["old_values"][i, later + 1].item()
                delta = paid + 0.9 * ahead - x["old_values"][i, later].item()
                per_token[i, t] += (0.9 * 0.8) ** (later - t) * delta

    # losses
    def token_loss(i, t):
        a, ratio = per_token[i, t], torch.exp(logp[i, t] - old[i, t])
        if name in WITHOUT_RATIO:
            return -a * logp[i, t]
        if name == "gspo":
            ratio = torch.exp(mean([logp[i, s] - old[i, s] for s in tokens[i]]))
        if name.startswith("cispo"):
            loss = -clip(ratio, 0.8, 1.4).detach() * a * logp[i, t]
        elif name == "sapo":
            tau = 1.0 if a > 0 else 1.05
            loss = -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * a
        else:
            loss = clipped(ratio, a, 0.2, 0.28 if name.startswith("dapo") else 0.2)
        if name == "ppo":
            v, v_old = x["values"][i, t], x["old_values"][i, t]
            near, target = clip(v, v_old - 0.3, v_old + 0.3), v_old + a
            loss = loss + 0.7 * torch.maximum((v - target) ** 2, (near - target) ** 2) / 2
        elif beta:
            loss = loss + beta * token_kl(i, t)
        return loss

    losses = [[token_loss(i, t) for t in tokens[i]] for i in range(size)]
    if name in WITHOUT_RATIO:
        loss = mean([sum(row) for row in losses])
    elif name == "drgrpo":
        loss = mean([sum(row) / 8 for row in losses])
    elif name in ("cispo_window", "dapo"):
        loss = mean([loss for row in losses for loss in row])
    elif name in ("cispo", "dapo_per_prompt"):
        loss = mean([mean([loss for i in group for loss in losses[i]]) for group in groups])
    else:
        loss = mean([mean(row) for row in losses])
    return loss, per_token if name == "ppo" else f64(advantage)


PPO_PARAMS = {"gamma": 0.9, "lam": 0.8, "cliprange_value": 0.3, "vf_coef": 0.7}
IN_LOOPS = [*names("policy_gradient", "code"), "cispo_window", "dapo_per_prompt"]
CASES = [(name, 0.0, "k3") for name in IN_LOOPS] + [
    (name, 0.3, estimator)
    for name in IN_LOOPS
    if formulation(name, "chapter").kl != "none"
    for estimator in ("k1", "k2", "k3")
]


@pytest.mark.parametrize(("name", "beta", "estimator"), CASES)
@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
def test_chapter_equals_loops_over_tokens(name, beta, estimator, drift):
    inputs = batch(name, drift=drift)
    params = PPO_PARAMS if name == "ppo" else {}
    if beta:
        params = {**params, "beta": beta, "kl_estimator": estimator}
        inputs["ref_logps"] = inputs["logps"] + 0.5 * inputs["logps"].sin()
    if drift == 0.0:
        inputs.pop("old_logps", None)
    elif beta and name in WITHOUT_RATIO:
        inputs["old_logps"] = inputs["logps"] + drift * inputs["logps"].cos()
    result, actual = run(name, "chapter", inputs, **params)

    inputs, leaves = learned(inputs)
    loss, advantages = loops(name, inputs, beta, estimator)
    expected = torch.autograd.grad(loss, leaves)

    torch.testing.assert_close(result.advantages, advantages, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


# --- single numbers, by hand ---------------------------------------------------------------------

LN2 = math.log(2)


def test_grpo_by_hand():
    # rewards 0 and 2: mean 1, std sqrt(2). Ratios 2 | 2 and 1/2, bounds 0.5 and 1.5
    a = 1 / (math.sqrt(2) + 1e-4)
    result, (gradient,) = run(
        "grpo",
        "chapter",
        {
            "logps": f64([[0.0, -9.0], [0.0, -LN2]]),
            "old_logps": f64([[-LN2, -9.0], [-LN2, 0.0]]),
            "mask": f64([[1, 0], [1, 1]]),
            "rewards": f64([0.0, 2.0]),
        },
        epsilon=0.5,
    )
    # -A = a: max(2a, 1.5a) = 2a. A = a: -1.5a (clipped) and -a/2 (at the bound, both agree)
    assert result.loss.item() == pytest.approx((2 * a + (-1.5 * a - 0.5 * a) / 2) / 2, abs=1e-15)
    assert gradient[0].tolist() == pytest.approx([a, 0.0], abs=1e-15)
    assert gradient[1, 0].item() == 0.0


def test_cispo_counts_each_prompt_the_same():
    # rewards 0 and 2 of both prompts: advantages -a and a. Ratios 4, 1 and 1/4, 1: weights 1.4, 1
    # and .8, 1. Four tokens of the first prompt, two of the second; log pi is -1 everywhere.
    a = 1 / (math.sqrt(2) + 1e-4)
    inputs = {
        "logps": f64([[-1.0] * 3] * 4),
        "old_logps": f64([[-1 - 2 * LN2, -1, -1], [-1 + 2 * LN2, -1, -1], *[[-1.0] * 3] * 2]),
        "mask": f64([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]]),
        "rewards": f64([0.0, 2.0, 0.0, 2.0]),
        "num_generations": 2,
    }
    result, (gradient,) = run("cispo", "chapter", inputs)
    assert result.loss.item() == pytest.approx((a * (-1.4 + 2.8) / 4 + a * 0 / 2) / 2, abs=1e-15)
    expected = [1.4 * a / 8, -0.8 * a / 8, -a / 8, -a / 8, a / 4, -a / 4]
    assert gradient[inputs["mask"].bool()].tolist() == pytest.approx(expected, abs=1e-15)
    window, (gradient,) = run("cispo_window", "chapter", inputs)
    assert window.loss.item() == pytest.approx(a * 1.4 / 6, abs=1e-15)
    assert gradient[:, 0].tolist() == pytest.approx([1.4 * a / 6, -0.8 * a / 6, a / 6, -a / 6])


def test_tokens_of_a_prompt_that_stand_elsewhere():
    inputs = batch("cispo")
    _, (whole,) = run("cispo", "chapter", inputs)
    counted = {"prompt_tokens": f64([11, 11, 11, 10, 10, 10])}
    for half in (slice(0, 3), slice(3, 6)):  # the first and the last tokens of all completions
        part = {
            k: v[:, half] if k in ("logps", "old_logps", "mask") else v for k, v in inputs.items()
        }
        _, (gradient,) = run("cispo", "chapter", part | counted)
        torch.testing.assert_close(gradient, whole[:, half], rtol=1e-14, atol=0)
    # micro-batches that tear prompts apart: two completions each, of three a prompt
    row = formulation("cispo", "chapter")
    numbers, leaf = row.parameters({}), inputs["logps"].clone().requires_grad_()
    advantages = run("cispo", "chapter", inputs)[0].advantages
    for rows in torch.tensor([5, 0, 1, 3, 2, 4]).split(2):
        loss = surrogate_loss(
            row,
            numbers,
            logps=leaf[rows],
            mask=inputs["mask"][rows],
            advantages=advantages[rows],
            old_logps=inputs["old_logps"][rows],
            num_generations=3,
            prompt_tokens=counted["prompt_tokens"][rows],
        )
        (loss / 3).backward()
    torch.testing.assert_close(leaf.grad, whole, rtol=1e-14, atol=1e-17)


def test_reinforce_by_hand_with_each_baseline():
    inputs = {
        "logps": f64([[-1.0, -2.0], [-4.0, -8.0]]),
        "mask": f64([[1, 1], [1, 0]]),
        "rewards": f64([1.0, 2.0]),
    }
    # none: (3 * 1 + 4 * 2)/2. Mean 1.5: (3 * -0.5 + 4 * 0.5)/2. Moving average 3: (3*-2 + 4*-1)/2
    for params, loss in [
        ({"baseline": "none"}, 5.5),
        ({}, 0.25),
        ({"baseline": "batch_mean"}, 0.25),
        ({"baseline": "moving_average", "baseline_value": 3.0}, -5.0),
    ]:
        assert run("reinforce", "chapter", inputs, **params)[0].loss.item() == loss
    # the code: no baseline, (1.5 * 1 + 4 * 2)/2
    assert run("reinforce", "code", inputs)[0].loss.item() == 4.75


def test_kl_in_the_reward_by_hand():
    # log pi - log pi_ref = 1 and 2: k1 sums to 3, and the code's averages to -1.5
    inputs = {
        "logps": f64([[-1.0, -1.0]]),
        "ref_logps": f64([[-2.0, -3.0]]),
        "mask": f64([[1, 1]]),
        "rewards": f64([1.0]),
    }
    chapter, _ = run("reinforce", "chapter", inputs, beta=0.1, baseline="none")
    assert chapter.advantages.item() == pytest.approx(0.7, abs=1e-15)
    code, _ = run("reinforce", "code", inputs, beta=0.1, kl_estimator="k1")
    assert code.advantages.item() == pytest.approx(1.15, abs=1e-15)
    ppo = {**inputs, "values": f64([[0.0, 0.0]]), "old_values": f64([[0.0, 0.0]])}
    chapter, _ = run("ppo", "chapter", ppo, beta=0.1, lam=1.0)
    assert chapter.advantages.tolist()[0] == pytest.approx([0.7, 0.8], abs=1e-15)
    code, _ = run("ppo", "code", ppo, beta=0.1, lam=1.0, kl_estimator="k1")
    assert code.advantages.tolist()[0] == pytest.approx([1.15, 1.15], abs=1e-15)


@pytest.mark.parametrize("name", ["reinforce", "rloo", "maxrl"])
def test_importance_cap_weights_the_tokens(name):
    inputs = batch(name)
    plain, (plain_gradient,) = run(name, "chapter", inputs)
    on_policy, (gradient,) = run(name, "chapter", inputs, importance_cap=2.0)
    torch.testing.assert_close(on_policy.loss, plain.loss)
    torch.testing.assert_close(gradient, plain_gradient)
    old = inputs["logps"] - 1.5 * (5 * inputs["logps"]).cos()
    _, (gradient,) = run(name, "chapter", inputs | {"old_logps": old}, importance_cap=2.0)
    ratio = (inputs["logps"] - old).exp()
    assert (ratio > 2).any() and (ratio < 2).any()
    torch.testing.assert_close(gradient, plain_gradient * ratio.clamp(max=2.0))


# --- properties of every row ---------------------------------------------------------------------


@pytest.mark.parametrize(("name", "which"), ROWS)
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_stands_on_masked_positions_never_matters(name, which, filler):
    inputs = batch(name)
    params = {}
    if formulation(name, which).kl != "none":
        inputs["ref_logps"], params["beta"] = inputs["logps"] - 0.3, 0.1
        inputs.setdefault("old_logps", inputs["logps"] + 0.1)
    clean, clean_gradients = run(name, which, inputs, **params)
    dirty = {
        key: torch.where(inputs["mask"].bool(), tensor, filler)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and key != "mask"
        else tensor
        for key, tensor in inputs.items()
    }
    result, found = run(name, which, dirty, **params)
    assert torch.equal(result.loss, clean.loss)
    assert torch.equal(result.advantages, clean.advantages)
    for gradient, expected in zip(found, clean_gradients, strict=True):
        assert torch.equal(gradient, expected)
        assert (gradient[inputs["mask"] == 0] == 0).all()


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_groups_may_stand_in_any_order(name, which):
    inputs = batch(name)
    order = torch.tensor([3, 4, 5, 0, 1, 2])
    swapped = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    result, found = run(name, which, inputs)
    other, other_found = run(name, which, swapped)
    torch.testing.assert_close(other.loss, result.loss, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(other.advantages, result.advantages[order], rtol=1e-14, atol=1e-15)
    for gradient, expected in zip(other_found, found, strict=True):
        torch.testing.assert_close(gradient, expected[order], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(("name", "which"), [row for row in ROWS if row[0] != "maxrl"])
def test_no_old_logps_means_on_policy(name, which):
    inputs, params = batch(name), {}
    if name in WITHOUT_RATIO:  # these read them for the KL of the rollout only
        inputs["ref_logps"], params["beta"] = inputs["logps"] - 0.3, 0.1
    given, given_gradients = run(name, which, inputs | {"old_logps": inputs["logps"]}, **params)
    inputs.pop("old_logps", None)
    absent, absent_gradients = run(name, which, inputs, **params)
    assert torch.equal(given.loss, absent.loss)
    assert all(map(torch.equal, given_gradients, absent_gradients))
    assert given_gradients[0].abs().max() > 0


@pytest.mark.parametrize(("name", "which"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_that_of_logps(name, which, dtype):
    result, found = run(name, which, batch(name, dtype=dtype))
    assert result.loss.dtype == result.advantages.dtype == found[0].dtype == dtype
    assert not result.advantages.requires_grad
    assert result.loss.shape == ()


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_integer_and_boolean_masks_and_rewards_will_do(name, which):
    inputs = batch(name) | {"rewards": f64([0, 1, 1, 2, 0, 1])}
    expected, _ = run(name, which, inputs)
    inputs |= {"mask": inputs["mask"].bool(), "rewards": inputs["rewards"].long()}
    assert torch.equal(run(name, which, inputs)[0].loss, expected.loss)


@pytest.mark.parametrize(("name", "which"), [r for r in ROWS if formulation(*r).window == "window"])
def test_window_rows_add_up_over_micro_batches(name, which):
    inputs = batch(name)
    whole, (expected,) = run(name, which, inputs)
    tokens = int(inputs["mask"].sum())
    parts = []
    for half in (slice(0, 3), slice(3, 6)):
        part = {k: v[half] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        parts.append(run(name, which, part, normalizer=tokens))
    assert sum(p.loss for p, _ in parts).item() == pytest.approx(whole.loss.item(), abs=1e-14)
    torch.testing.assert_close(torch.cat([g for _, (g,) in parts]), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("name", "which"), [r for r in ROWS if r[0] != "reinforce"])
def test_only_a_mean_over_tokens_depends_on_the_micro_batches(name, which):
    inputs = batch(name)
    halves = [
        run(name, which, {k: v[h] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})
        for h in (slice(0, 3), slice(3, 6))
    ]
    apart = mean([result.loss.item() for result, _ in halves])
    whole = run(name, which, inputs)[0].loss.item()
    per_token = formulation(name, which).aggregation == "token_mean"
    assert (apart == pytest.approx(whole, rel=1e-13, abs=1e-14)) != per_token


def test_num_generations_none_is_one_group():
    inputs = batch("grpo")
    whole, _ = run("grpo", "chapter", inputs | {"num_generations": None})
    assert torch.equal(
        whole.advantages, run("grpo", "chapter", inputs | {"num_generations": 6})[0].advantages
    )
    assert not torch.allclose(whole.advantages, run("grpo", "chapter", inputs)[0].advantages)


def test_the_rollouts_tensors_carry_no_gradient():
    inputs = batch("grpo")
    inputs["logps"] = inputs["logps"].requires_grad_()
    # the same tensor as old_logps, not detached: still ratio 1 with a gradient
    result = policy_gradient_loss("grpo", **inputs | {"old_logps": inputs["logps"]})
    assert torch.autograd.grad(result.loss, inputs["logps"])[0].abs().max() > 0


# --- against the loss inside the installed TRL ----------------------------------------------------


def trl_loss(row, inputs, advantages, params, weights=None):
    """Call _compute_loss of a stock trainer on given log-probabilities, with the row's settings."""
    import trl

    offset = row.trl_offset.get("epsilon_high", 0.0)
    args = {
        "delta": None, "steps_per_generation": 1,
        "use_bias_correction_kl": row.settings.get("use_bias_correction_kl"),
        "sapo_temperature_pos": params.get("sapo_temperature_pos"),
        "sapo_temperature_neg": params.get("sapo_temperature_neg"),
    }  # fmt: skip
    nothing = {"gather": lambda x: x, "reduce": lambda x, reduction: x, "num_processes": 1}
    trainer = SimpleNamespace(
        **{name: row.settings.get(name) for name in ("loss_type", "importance_sampling_level")},
        args=SimpleNamespace(**args), accelerator=SimpleNamespace(**nothing),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            inputs["logps"], torch.zeros_like(inputs["logps"]), None),
        _metrics={"train": _Metrics()}, beta=params.get("beta", 0.0),
        epsilon_low=params.get("epsilon", 0.2),
        epsilon_high=params.get("epsilon_high", params.get("epsilon", 0.2)) + offset,
        max_completion_length=8, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True, aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
    )  # fmt: skip
    ids, mask = torch.zeros_like(inputs["mask"], dtype=torch.long), inputs["mask"]
    batch = {
        "prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": inputs["old_logps"],
        "ref_per_token_logps": inputs.get("ref_logps"), "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights,
        "old_logps": (inputs["old_logps"] * mask).sum(1),
    }  # fmt: skip
    return getattr(trl, row.trainer)._compute_loss(trainer, None, batch)


class _Metrics(dict):
    def __missing__(self, key):
        return self.setdefault(key, [])


STOCK = [row for row in ROWS if formulation(*row).trl is True]


@pytest.mark.parametrize(("name", "which"), STOCK)
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("drift", [0.1, 1.0])
def test_rows_that_say_so_equal_trl(name, which, beta, drift):
    row, inputs = formulation(name, which), batch(name, drift=drift)
    if row.ratio != "none":
        inputs.setdefault("old_logps", inputs["logps"] + drift * inputs["logps"].sin())
    params = {n: 0.3 for n in ("epsilon", "epsilon_high") if n in row.reads}
    if name == "sapo":  # exact in float32, to which TRL rounds them
        params |= {"sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.25}
    if beta and row.kl == "loss":
        params["beta"] = beta
        inputs["ref_logps"] = inputs["logps"] - 0.4 * inputs["logps"].cos()
    result, (gradient,) = run(name, which, inputs, **params)

    inputs["logps"] = inputs["logps"].clone().requires_grad_()
    expected = trl_loss(row, inputs, result.advantages, params)
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-14)
    expected_gradient = torch.autograd.grad(expected, inputs["logps"])[0]
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dapo"])
@pytest.mark.parametrize("per_token", [True, False])
def test_token_weights_enter_where_trl_has_its_vllm_ratio(name, per_token):
    row, inputs = formulation(name, "trl"), batch(name)
    inputs["ref_logps"] = inputs["logps"] - 0.4 * inputs["logps"].cos()
    weights = inputs["logps"].sin().exp() if per_token else inputs["rewards"].exp()[:, None]
    advantages = inputs["rewards"]
    given = {k: inputs[k] for k in ("mask", "old_logps", "ref_logps")}
    loss = surrogate_loss(
        row,
        row.parameters({"beta": 0.2}),
        logps=inputs["logps"],
        advantages=advantages,
        token_weights=weights,
        **given,
    )
    high = {"epsilon_high": row.reads["epsilon_high"] or 0.2}
    expected = trl_loss(row, inputs, advantages, {"beta": 0.2} | high, weights)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)


def test_stock_rows_are_these():
    equal = {"grpo", "drgrpo", "gspo", "sapo", "dapo"}
    assert {name for name, which in STOCK if which == "chapter" and name in IN_LOOPS} == equal
    assert {name for name, which in STOCK if which == "trl" and name in IN_LOOPS} == {
        *equal, "cispo", "rloo",
    }  # fmt: skip


# --- refusals ------------------------------------------------------------------------------------

ZEROS = torch.zeros(6, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "which", "change", "says"),
    [
        (
            "grpo",
            "chapter",
            {"values": ZEROS},
            "grpo (chapter) does not read values; it reads old_",
        ),
        ("grpo", "chapter", {"binary_rewards": ZEROS[0]}, "does not read binary_rewards"),
        ("grpo", "chapter", {"ref_logps": ZEROS}, "does not read ref_logps unless beta is given"),
        ("grpo", "chapter", {"beta": 0.1}, "grpo (chapter) needs ref_logps for beta=0.1"),
        ("grpo", "chapter", {"normalizer": 3}, "normalized over the micro-batch"),
        ("cispo", "chapter", {"normalizer": 3}, "normalized over the micro-batch"),
        ("grpo", "chapter", {"prompt_tokens": ZEROS[0]}, "does not read prompt_tokens; it reads"),
        ("cispo", "chapter", {"prompt_tokens": ZEROS[0] + 5}, "at least the tokens of each"),
        ("cispo", "chapter", {"prompt_tokens": ZEROS}, "prompt_tokens must have shape (6,)"),
        ("grpo", "chapter", {"gamma": 0.9}, "does not read gamma"),
        ("grpo", "trl", {"kl_estimator": "k3"}, "does not read kl_estimator"),
        ("dapo", "chapter", {"ref_logps": ZEROS}, "dapo (chapter) does not read ref_logps; it"),
        ("dapo", "chapter", {"normalizer": 0}, "normalizer must be a number above 0, not 0"),
        ("dapo", "code", {"normalizer": 3}, "does not read normalizer"),
        ("reinforce", "chapter", {"old_logps": ZEROS}, "old_logps unless importance_cap is given"),
        ("reinforce", "code", {"old_logps": ZEROS}, "reinforce (code) does not read old_logps; it"),
        ("maxrl", "code", {"old_logps": ZEROS}, "does not read old_logps; it reads binary_rewards"),
        ("maxrl", "chapter", {"binary_rewards": None}, "needs binary_rewards for its advantages"),
        ("ppo", "chapter", {"values": None}, "ppo (chapter) needs values for its critic"),
        ("ppo", "chapter", {"old_values": None}, "needs old_values for its critic"),
        ("rloo", "chapter", {"num_generations": 1}, "at least 2 completions per prompt"),
        ("grpo", "chapter", {"num_generations": 4}, "divide the batch of 6, not 4"),
        ("grpo", "chapter", {"num_generations": 0}, "divide the batch of 6, not 0"),
        ("grpo", "chapter", {"rewards": ZEROS}, "rewards must have shape (6,) to go with logps"),
        ("grpo", "chapter", {"mask": ZEROS[:, :5]}, "mask must have shape (6, 6)"),
        ("grpo", "chapter", {"mask": ZEROS + 0.5}, "mask must hold only 0 and 1"),
        ("grpo", "chapter", {"logps": ZEROS[0]}, "logps must have shape (B, T), not (6,)"),
        ("grpo", "chapter", {"logps": ZEROS.long()}, "not torch.int64"),
        ("grpo", "chapter", {"rewards": [0.0] * 6}, "rewards must be a torch tensor, not list"),
        ("grpo", "chapter", {"rewards": ZEROS[0] / 0}, "rewards must be finite"),
        ("grpp", "chapter", {}, "unknown algorithm 'grpp'"),
        ("maxrl", "trl", {}, "maxrl has no formulation 'trl': TRL divides centered rewards by"),
    ],
)
def test_refusals_say_what_is_wrong(name, which, change, says):
    inputs = batch(name) | change
    with pytest.raises(InputError) as error:
        policy_gradient_loss(name, formulation=which, **inputs)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_beta_zero_on_purpose_may_come_with_a_reference():
    inputs = batch("grpo")
    plain, _ = run("grpo", "chapter", inputs)
    swept, _ = run("grpo", "chapter", inputs | {"ref_logps": inputs["logps"] - 1}, beta=0.0)
    assert torch.equal(plain.loss, swept.loss)


def test_a_new_row_needs_one_function_at_most(monkeypatch):
    def unclipped(ratio, advantages, sharpness):
        return -(ratio**sharpness) * advantages

    grpo = ALGORITHMS["grpo"]
    mine = replace(grpo.chapter, surrogate=unclipped, reads={"sharpness": 2.0}, kl="none")
    row = replace(grpo, name="mine", chapter=mine, code="nothing is published", trl="TRL clips")
    monkeypatch.setitem(ALGORITHMS, "mine", row)
    inputs = batch("grpo") | {"mask": torch.ones(6, 6, dtype=torch.float64)}
    result, _ = run("mine", "chapter", inputs, sharpness=3.0)
    ratio = (inputs["logps"] - inputs["old_logps"]).exp()
    torch.testing.assert_close(result.loss, -(ratio**3 * result.advantages[:, None]).mean())
    with pytest.raises(
        InputError, match="mine has no formulation 'trl': TRL clips; it has chapter"
    ):
        run("mine", "trl", inputs)


def test_public_names():
    public = {"policy_gradient_loss", "PolicyGradientLoss"}
    public |= {"preference_loss", "PreferenceLoss", "reward_loss", "distillation_loss"}
    public |= {"top_per_prompt", "top_k_overall", "random_per_prompt", "random_k_overall"}
    public |= {"exact_match", "number_reward", "math_reward", "regex_reward", "contains_reward"}
    public |= {"format_reward"}
    trainers = (
        "GRPO",
        "RLOO",
        "PPO",
        "Distillation",
        "DPO",
        "KTO",
        "ORPO",
        "Reward",
        "TokenReward",
        "SFT",
    )
    public |= {f"Book{name}{part}" for name in trainers for part in ("Trainer", "Config")}
    assert set(rlhf_trl.__all__) == public <= set(dir(rlhf_trl))
    stub = Path(rlhf_trl.__file__).with_suffix(".pyi").read_text()  # what type checkers read
    assert sorted(re.findall(r" as (\w+)", stub)) == sorted(public)
    with pytest.raises(AttributeError, match="no attribute 'policy_loss'"):
        _ = rlhf_trl.policy_loss


# --- what tells a row from its nearest one


def gradient_by_row(name, which, on_policy, beta):
    """Return d loss / d logps of a row on eight completions of two prompts; (8, 5)."""
    noise = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    row = formulation(name, which)
    logps = (-2 + 0.3 * drawn(8, 5)).requires_grad_()
    mask = (torch.arange(5) < torch.tensor([5, 3, 4, 1, 2, 5, 5, 3])[:, None]).double()
    old = logps.detach() + (0 if on_policy else 0.4 * drawn(8, 5))
    reads = {**row.reads}
    given = {"rewards": drawn(8), "mask": mask, "num_generations": 4, "old_logps": old}
    if "beta" in reads:
        given |= {"beta": beta, "ref_logps": logps.detach() + 0.2 * drawn(8, 5)}
    if (
        row.advantage == "maxrl"
    ):  # which reads no old log-probabilities, neither for a ratio nor a KL
        given["binary_rewards"] = (given["rewards"] > 0).double()
        del given["old_logps"]
    if row.value_loss != "none":
        del given["num_generations"]
        given |= {"values": drawn(8, 5), "old_values": drawn(8, 5)}
    if "max_completion_length" in reads:
        given["max_completion_length"] = 8
    result = policy_gradient_loss(name, logps=logps, formulation=which, **given)
    (gradient,) = torch.autograd.grad(result.loss, logps)
    return gradient


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("name", "which"),
    [(name, which) for name in names("policy_gradient") for which in ALGORITHMS[name].formulations],
)
def test_a_row_is_its_nearest_one_at_ratio_1_only_where_the_table_says_so(name, which, beta):
    near = nearest_row(name, which)
    if near is None:
        assert name in ("reinforce", "grpo") or (name, which) == ("rloo", "trl")
        return
    for on_policy in (True, False):
        mine = gradient_by_row(name, which, on_policy, beta)
        other = gradient_by_row(near.name, which, on_policy, beta)
        same = bool((mine - other).norm() <= 1e-10 * other.norm())
        assert same == (on_policy and near.same_at_ratio_1)


def test_gspo_and_sapo_are_grpo_at_ratio_1_and_nothing_else_is():
    same = {
        (name, which)
        for name in names("policy_gradient")
        for which in ALGORITHMS[name].formulations
        if (near := nearest_row(name, which)) and near.same_at_ratio_1
    }
    forms = ("chapter", "code", "trl")
    assert same == {(name, which) for name in ("gspo", "sapo") for which in forms} | {
        ("cispo", "code")  # whose mean is GRPO's there
    }
    assert nearest_row("cispo").inactive_at_ratio_1 == ("surrogate", "epsilon_high")
