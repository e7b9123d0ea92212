"""The book's published code, recorded: formulation "code" gives the same numbers."""

import json
from pathlib import Path

import pytest
import torch

from rlhf_trl import (
    distillation_loss,
    policy_gradient_loss,
    preference_loss,
    random_k_overall,
    random_per_prompt,
    top_k_overall,
    top_per_prompt,
)
from rlhf_trl.algorithms import formulation, names
from rlhf_trl.book import kl

GOLDEN = Path(__file__).parent / "golden"
POLICY_GRADIENT = json.loads((GOLDEN / "policy_gradient.json").read_text())
KL = json.loads((GOLDEN / "kl.json").read_text())
PREFERENCE = json.loads((GOLDEN / "preference.json").read_text())
DISTILLATION = json.loads((GOLDEN / "distillation.json").read_text())
SELECTION = json.loads((GOLDEN / "selection.json").read_text())

OUR_NAME = {
    "clip_eps_lo": "epsilon",
    "clip_eps_hi": "epsilon_high",
    "clip_eps_val": "cliprange_value",
    "sapo_temp_pos": "sapo_temperature_pos",
    "sapo_temp_neg": "sapo_temperature_neg",
}
WITHOUT_RATIO = ("reinforce", "rloo", "maxrl")


def float64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def assert_close(actual, expected, relative):
    expected = float64(expected)
    torch.testing.assert_close(
        actual.detach(), expected, rtol=0, atol=relative * expected.abs().max().item() or 1e-300
    )


@pytest.mark.parametrize(
    "case", POLICY_GRADIENT, ids=[f"{i}-{c['algorithm']}" for i, c in enumerate(POLICY_GRADIENT)]
)
def test_policy_gradient_case(case):
    inputs = {name: float64(v) for name, v in case["inputs"].items() if v is not None}
    if case["algorithm"] in WITHOUT_RATIO:
        del inputs["old_logps"]
    learned = [inputs[name].requires_grad_() for name in ("logps", "values") if name in inputs]
    params = {OUR_NAME.get(name, name): value for name, value in case["params"].items()}

    result = policy_gradient_loss(case["algorithm"], formulation="code", **inputs, **params)
    gradients = torch.autograd.grad(result.loss, learned)

    # the recording ran PPO's advantages through float32
    relative = 1e-5 if case["algorithm"] == "ppo" else 1e-9
    expected = case["expected"]
    assert_close(result.loss, expected["loss"], relative)
    assert_close(result.advantages, expected["advantages"], relative)
    assert_close(gradients[0], expected["grad_logps"], relative)
    if case["algorithm"] == "ppo":
        assert_close(gradients[1], expected["grad_values"], relative)


@pytest.mark.parametrize("case", KL, ids=[f"{i}-{c['estimator']}" for i, c in enumerate(KL)])
def test_kl_case(case):
    logps = float64(case["inputs"]["logps"]).requires_grad_()
    ref_logps, mask = (float64(case["inputs"][name]) for name in ("ref_logps", "mask"))

    per_token = kl.in_code(getattr(kl, case["estimator"]))(logps, ref_logps) * mask
    mean = (per_token.sum(1) / mask.sum(1)).mean()
    (gradient,) = torch.autograd.grad(mean, logps)

    assert_close(per_token, case["expected"]["per_token"], 1e-9)
    assert_close(mean, case["expected"]["sequence_mean"], 1e-9)
    assert_close(gradient, case["expected"]["grad_logps"], 1e-9)


@pytest.mark.parametrize(
    "case", PREFERENCE, ids=[f"{i}-{c['algorithm']}" for i, c in enumerate(PREFERENCE)]
)
def test_preference_case(case):
    name = case["algorithm"]
    inputs = {key: float64(v) for key, v in case["inputs"].items() if v is not None}
    learned = [inputs[f"policy_{w}_logps"].requires_grad_() for w in ("chosen", "rejected")]
    if name == "orpo":  # recorded with the likelihood of the response itself
        inputs["chosen_nll"] = -inputs["policy_chosen_logps"]

    result = preference_loss(name, formulation="code", **inputs, **case["params"])
    gradients = torch.autograd.grad(result.loss, learned)

    # the recording ran ORPO's odds through float32
    relative = 1e-6 if name == "orpo" else 1e-9
    expected = case["expected"]
    assert_close(result.loss, expected["loss"], relative)
    assert_close(gradients[0], expected["grad_policy_chosen_logps"], relative)
    assert_close(gradients[1], expected["grad_policy_rejected_logps"], relative)
    averaged = formulation(name, "code").logps == "mean"
    assert averaged == case["length_normalized"]


@pytest.mark.parametrize("case", DISTILLATION)
def test_distillation_case(case):  # a prompt's completions, each with one token of the prompt
    student = float64(case["student"]).requires_grad_()
    teacher, mask = float64(case["teacher"]), float64(case["mask"])
    loss = distillation_loss(
        "sdpo",
        formulation="code",
        logits=student[:, :-1],
        teacher_logits=teacher[:, :-1],
        mask=mask,
        kl_top_k=case["top_k"],
    )
    (gradient,) = torch.autograd.grad(loss, student)
    assert_close(loss, case["loss"], 1e-9)
    assert_close(gradient, case["grad"], 1e-9)


@pytest.mark.parametrize("case", SELECTION)
def test_selection_case(case):  # recorded with top_k 7 and seed 42
    records = case["records"]
    rewards = [record["rewards"] for record in records]
    found = {
        "top_per_prompt": top_per_prompt(rewards, ties="first"),
        "top_k_overall": top_k_overall(rewards, 7, ties="first"),
        "random_per_prompt": random_per_prompt(rewards, seed=42),
        "random_k_overall": random_k_overall(rewards, 7, seed=42),
    }
    for strategy, pairs in found.items():
        texts = [[records[i]["question"], records[i]["completions"][j]] for i, j in pairs]
        assert texts == case[strategy]


@pytest.mark.parametrize(
    ("family", "cases"), [("direct_alignment", PREFERENCE), ("policy_gradient", POLICY_GRADIENT)]
)
def test_every_algorithm_of_the_books_code_is_recorded(family, cases):
    assert {case["algorithm"] for case in cases} == {*names(family, "code")}
