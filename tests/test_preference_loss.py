"""`preference_loss`, against numbers worked by hand, its limits, and its refusals."""

import math
from types import SimpleNamespace

import pytest
import torch

from rlhf_trl import preference_loss
from rlhf_trl.algorithms import ALGORITHMS, formulation, names
from rlhf_trl.book import preference
from rlhf_trl.errors import InputError

NAMES = names("direct_alignment")
ROWS = [(name, which) for name in NAMES for which in ALGORITHMS[name].formulations]
PAIRED = [row for row in ROWS if row[0] != "kto"]


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


# two pairs: d_c = 1 and -1, d_r = -2 and 1, so d_c - d_r = 3 and -2
POLICY = {
    "policy_chosen_logps": f64([-4.0, -6.0]),
    "policy_rejected_logps": f64([-7.0, -2.0]),
}
REFERENCE = {"ref_chosen_logps": f64([-5.0, -5.0]), "ref_rejected_logps": f64([-5.0, -3.0])}
# log-ratios 1.5 and -0.5: z = 0.5
MISMATCHED = {"policy_kl_logps": f64([-3.5, -5.5]), "ref_kl_logps": f64([-5.0, -5.0])}


def batch(name, which):
    row = formulation(name, which)
    inputs = dict(POLICY)
    inputs |= REFERENCE if row.reference else {}
    inputs |= MISMATCHED if name == "kto" else {}
    inputs |= {"chosen_nll": f64([4.0, 6.0])} if name == "orpo" else {}
    return inputs


def run(name, which="chapter", inputs=None, **params):
    """Return the result and its gradients with respect to the policy's log-probabilities."""
    inputs = dict(inputs or batch(name, which))
    leaves = [inputs[f"policy_{w}_logps"].clone().requires_grad_() for w in ("chosen", "rejected")]
    inputs |= {"policy_chosen_logps": leaves[0], "policy_rejected_logps": leaves[1]}
    result = preference_loss(name, formulation=which, **inputs, **params)
    return result, torch.autograd.grad(result.loss, leaves)


# --- by hand -------------------------------------------------------------------------------------


def odds(logp):
    p = math.exp(logp)
    return math.log(p / (1 - p))


DPO = -(log_sigmoid(0.1 * 3) + log_sigmoid(0.1 * -2)) / 2
FLIPPED = -(log_sigmoid(0.1 * -3) + log_sigmoid(0.1 * 2)) / 2
ORPO_ODDS = -(log_sigmoid(odds(-4) - odds(-7)) + log_sigmoid(odds(-6) - odds(-2))) / 2
KTO_CHOSEN = [1 - sigmoid(0.1 * (1 - 0.5)), 1 - sigmoid(0.1 * (-1 - 0.5))]
KTO_REJECTED = [1 - sigmoid(0.1 * (0.5 + 2)), 1 - sigmoid(0.1 * (0.5 - 1))]
APO_ZERO = (-sigmoid(0.1) + sigmoid(-0.2) - sigmoid(-0.1) + sigmoid(0.1)) / 2
APO_DOWN = (sigmoid(0.1) - sigmoid(0.3) + sigmoid(-0.1) - sigmoid(-0.2)) / 2

BY_HAND = {
    ("dpo", "chapter"): DPO,
    ("cdpo", "chapter"): 0.9 * DPO + 0.1 * FLIPPED,
    # targets of 1 / 0.2 = 5: (3 - 5)^2 = 4 and (-2 - 5)^2 = 49
    ("ipo", "chapter"): 26.5,
    ("ipo", "trl"): 26.5,
    # log p(c) - log p(r) = 3 and -4, less 0.5, times 2
    ("simpo", "chapter"): -(log_sigmoid(5) + log_sigmoid(-9)) / 2,
    ("orpo", "chapter"): 5 + 0.1 * ORPO_ODDS,
    ("orpo", "trl"): 5 + 0.1 * ORPO_ODDS,
    ("kto", "chapter"): sum(KTO_CHOSEN + KTO_REJECTED) / 4,
    ("kto", "trl"): sum(KTO_CHOSEN + KTO_REJECTED) / 4,
    ("kto", "code"): sum(KTO_CHOSEN) / 2 + sum(KTO_REJECTED) / 2,
    ("dpo_norm", "chapter"): -(log_sigmoid(2 * 3) + log_sigmoid(2 * -2)) / 2,
    ("apo_zero", "chapter"): APO_ZERO,
    ("apo_zero", "trl"): APO_ZERO + 1,
    ("apo_down", "chapter"): APO_DOWN,
    ("apo_down", "trl"): APO_DOWN + 1,
}


@pytest.mark.parametrize(("name", "which"), BY_HAND)
def test_by_hand(name, which):
    assert run(name, which)[0].loss.item() == pytest.approx(BY_HAND[name, which], abs=1e-12)


def test_dpos_gradient_is_the_chapters():
    # eq:dpo_gradient: -beta sigmoid(r_r - r_c) per pair, averaged over two
    _, (chosen, rejected) = run("dpo", beta=0.2)
    expected = [-0.2 * sigmoid(-0.2 * 3) / 2, -0.2 * sigmoid(0.2 * 2) / 2]
    torch.testing.assert_close(chosen, f64(expected), rtol=0, atol=1e-15)
    torch.testing.assert_close(rejected, -f64(expected), rtol=0, atol=1e-15)


def test_implicit_rewards():
    result, _ = run("dpo", beta=0.2)
    assert result.chosen_rewards.tolist() == pytest.approx([0.2, -0.2])
    assert result.rejected_rewards.tolist() == pytest.approx([-0.4, 0.2])
    result, _ = run("simpo")  # no reference: beta 2 times the log-probability
    assert result.chosen_rewards.tolist() == [-8.0, -12.0]
    assert not result.chosen_rewards.requires_grad and result.loss.requires_grad


def test_simpo_is_cpo_trainers_with_the_rows_settings():
    from trl.experimental.cpo import CPOTrainer

    settings = formulation("simpo", "chapter").fixed({"beta": 1.5, "gamma_beta_ratio": 0.4})
    assert settings.pop("cpo_alpha") == 0  # the weight of the likelihood that CPO adds
    accelerator = SimpleNamespace(device="cpu")
    trainer = SimpleNamespace(
        beta=1.5, alpha=0.0, label_smoothing=0.0, accelerator=accelerator, **settings
    )
    losses, *rewards = CPOTrainer.cpo_loss(trainer, *POLICY.values())
    result, _ = run("simpo", beta=1.5, gamma_beta_ratio=0.4)
    assert result.loss.item() == pytest.approx(losses.mean().item(), abs=1e-12)
    for found, expected in zip(
        (result.chosen_rewards, result.rejected_rewards), rewards, strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_orpos_odds_are_orpo_trainers():
    from trl.experimental.orpo import ORPOTrainer

    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    bonus, *rewards = ORPOTrainer.odds_ratio_loss(trainer, *POLICY.values())[:3]
    result, _ = run("orpo", "trl", beta=0.3)
    assert result.loss.item() == pytest.approx(5 - bonus.mean().item(), abs=1e-6)  # TRL: float32
    for found, expected in zip(
        (result.chosen_rewards, result.rejected_rewards), rewards, strict=True
    ):
        torch.testing.assert_close(found.float(), expected)


# --- limits and properties -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "cdpo", "dpo_norm", "simpo"])
def test_without_beta_no_preference_is_learned(name):
    result, gradients = run(name, beta=1e-12)
    assert result.loss.item() == pytest.approx(math.log(2), abs=1e-10)
    assert max(g.abs().max() for g in gradients) < 1e-11


def test_label_smoothing_goes_from_dpo_to_nothing():
    plain, plain_gradients = run("dpo", beta=0.3)
    none, none_gradients = run("cdpo", beta=0.3, label_smoothing=0.0)
    assert none.loss == plain.loss and all(map(torch.equal, none_gradients, plain_gradients))
    half, (chosen, _) = run("cdpo", beta=0.3, label_smoothing=0.5)
    # -0.5 log(s(x) s(-x)), whose gradient is beta (s(x) - 1/2) / 2 on either pair
    expected = [0.3 * (sigmoid(0.9) - 0.5) / 2, 0.3 * (sigmoid(-0.6) - 0.5) / 2]
    torch.testing.assert_close(chosen, f64(expected), rtol=0, atol=1e-15)
    swapped = {
        key.replace("chosen", "x").replace("rejected", "chosen").replace("x", "rejected"): value
        for key, value in batch("cdpo", "chapter").items()
    }
    other, _ = run("cdpo", inputs=swapped, beta=0.3, label_smoothing=0.5)
    assert other.loss.item() == pytest.approx(half.loss.item(), abs=1e-14)


def test_cdpo_is_the_two_losses_that_trl_is_given():
    row, beta, e = formulation("cdpo", "trl"), 0.3, 0.2
    deltas = (3, -2)
    plain = -sum(log_sigmoid(beta * d) for d in deltas) / 2
    robust = sum(-(1 - e) * log_sigmoid(beta * d) + e * log_sigmoid(-beta * d) for d in deltas)
    robust /= 2 * (1 - 2 * e)
    weights = row.fixed({"label_smoothing": e})["loss_weights"]
    result, _ = run("cdpo", "trl", beta=beta, label_smoothing=e)
    assert result.loss.item() == pytest.approx(weights[0] * plain + weights[1] * robust, abs=1e-14)


def test_simpo_without_a_margin_is_dpo_with_a_uniform_reference():
    inputs = POLICY | dict.fromkeys(REFERENCE, f64([-3.0, -3.0]))
    plain, _ = run("dpo_norm", inputs=inputs, beta=2.0)
    simpo, _ = run("simpo", inputs=POLICY, beta=2.0, gamma_beta_ratio=0.0)
    assert simpo.loss.item() == pytest.approx(plain.loss.item(), abs=1e-14)


def test_ktos_reference_point_is_never_negative_and_has_no_gradient():
    policy = f64([-6.0, -5.5]).requires_grad_()
    assert preference.kto_reference_point(policy, f64([-5.0, -5.0])).item() == 0
    inputs = batch("kto", "chapter") | {"policy_kl_logps": policy}
    below, _ = run("kto", inputs=inputs)
    # z = 0 instead of -0.75
    losses = [1 - sigmoid(0.1), 1 - sigmoid(-0.1), 1 - sigmoid(0.2), 1 - sigmoid(-0.1)]
    assert below.loss.item() == pytest.approx(sum(losses) / 4, abs=1e-14)
    above = f64([-3.5, -5.5]).requires_grad_()
    z = preference.kto_reference_point(above, f64([-5.0, -5.0]))
    assert z.item() == 0.5 and not z.requires_grad


def test_ktos_weights_and_classes():
    result, _ = run("kto", desirable_weight=2.0, undesirable_weight=0.5)
    expected = (2 * sum(KTO_CHOSEN) + 0.5 * sum(KTO_REJECTED)) / 4
    assert result.loss.item() == pytest.approx(expected, abs=1e-14)

    uneven = batch("kto", "chapter") | {
        "policy_rejected_logps": f64([-7.0]),
        "ref_rejected_logps": f64([-5.0]),
    }
    chapter, _ = run("kto", inputs=uneven)
    code, _ = run("kto", "code", inputs=uneven)
    assert chapter.loss.item() == pytest.approx((sum(KTO_CHOSEN) + KTO_REJECTED[0]) / 3, abs=1e-14)
    assert code.loss.item() == pytest.approx(sum(KTO_CHOSEN) / 2 + KTO_REJECTED[0], abs=1e-14)

    none = f64([])
    only = uneven | {"policy_rejected_logps": none, "ref_rejected_logps": none}
    for which in ("chapter", "code"):
        result, _ = run("kto", which, inputs=only)
        assert result.loss.item() == pytest.approx(sum(KTO_CHOSEN) / 2, abs=1e-14)


@pytest.mark.parametrize("logp", [-1e-12, -1e-6, -0.5, -0.7, -3.0, -700.0])
def test_log_odds_near_one_and_near_zero(logp):
    exact = {
        # p = 1 - x + x^2/2: 1 - p = x to first order
        -1e-12: -math.log(1e-12),
        -1e-6: -1e-6 - math.log(1e-6 - 5e-13),
        -700.0: -700.0,
    }
    logps = f64([logp]).requires_grad_()
    found = preference.log_odds(logps)
    assert found.item() == pytest.approx(exact.get(logp) or odds(logp), rel=1e-12)
    (gradient,) = torch.autograd.grad(found.sum(), logps)
    assert gradient.item() == pytest.approx(-1 / math.expm1(logp), rel=1e-9)  # 1 / (1 - p)


def test_only_the_code_holds_orpos_odds():
    inputs = POLICY | {"policy_chosen_logps": f64([-1e-9, -6.0]), "chosen_nll": f64([0.0, 0.0])}
    code, (chosen, _) = run("orpo", "code", inputs=inputs)
    held = POLICY | {"policy_chosen_logps": f64([-1e-6, -6.0]), "chosen_nll": f64([0.0, 0.0])}
    assert code.loss.item() == run("orpo", "chapter", inputs=held)[0].loss.item()
    assert chosen[0] == 0
    assert run("orpo", "chapter", inputs=inputs)[0].loss.item() < code.loss.item()


def test_only_the_code_holds_the_odds_of_orpos_rejected():
    for which, logp in (("code", -1e-6), ("chapter", -1e-9)):
        inputs = POLICY | {"policy_rejected_logps": f64([-1e-9, -2.0]), "chosen_nll": f64([0, 0])}
        found, (_, rejected) = run("orpo", which, inputs=inputs, beta=1.0)
        # -log sigmoid(x) = log(1 + e^-x), with the odds p / (1 - p) of both sides
        pairs = ((-4.0, logp), (-6.0, -2.0))
        odds = [[math.log(math.exp(x) / -math.expm1(x)) for x in pair] for pair in pairs]
        expected = sum(math.log1p(math.exp(low - high)) for high, low in odds) / 2
        assert found.loss.item() == pytest.approx(expected, rel=1e-6)
        assert (rejected[0] == 0) == (which == "code")


def test_orpos_likelihood_may_be_one_number():
    whole, _ = run("orpo")
    scalar, _ = run("orpo", inputs=batch("orpo", "chapter") | {"chosen_nll": f64(5.0)})
    assert scalar.loss.item() == pytest.approx(whole.loss.item(), abs=1e-14)


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_the_gradient_is_right(name, which):
    inputs = batch(name, which)
    keys = ("policy_chosen_logps", "policy_rejected_logps")

    def loss(*logps):
        given = inputs | dict(zip(keys, logps, strict=True))
        return preference_loss(name, formulation=which, **given).loss

    assert torch.autograd.gradcheck(loss, [inputs[k].clone().requires_grad_() for k in keys])


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_reference_is_never_trained(name):
    inputs = batch(name, "chapter")
    for key in inputs:
        inputs[key] = inputs[key].clone().requires_grad_()
    preference_loss(name, **inputs).loss.backward()
    trained = {key for key, tensor in inputs.items() if tensor.grad is not None}
    assert trained == {"policy_chosen_logps", "policy_rejected_logps"}


@pytest.mark.parametrize(("name", "which"), ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_that_of_the_policy(name, which, dtype):
    inputs = {k: v.to(dtype) for k, v in batch(name, which).items()}
    result, gradients = run(name, which, inputs)
    assert result.loss.dtype == result.chosen_rewards.dtype == gradients[0].dtype == dtype
    assert result.loss.shape == ()


@pytest.mark.parametrize(("name", "which"), PAIRED)
def test_pairs_are_averaged(name, which):
    inputs = batch(name, which)
    whole = run(name, which, inputs)[0].loss.item()
    apart = [run(name, which, {k: v[i : i + 1] for k, v in inputs.items()})[0] for i in (0, 1)]
    assert sum(result.loss.item() for result in apart) / 2 == pytest.approx(whole, abs=1e-14)


# --- refusals ------------------------------------------------------------------------------------

NAN = float("nan")
REFUSED = {
    "another family": ("grpo", {}, {}, "grpo is not a direct-alignment algorithm; those are dpo, "),
    "a reference it lacks": ("dpo", {"ref_chosen_logps": None}, {}, "needs ref_chosen_logps"),
    "a reference it does not read": (
        "simpo",
        REFERENCE,
        {},
        "simpo (chapter) does not read ref_chosen_logps; it reads policy_chosen_logps, policy_re",
    ),
    "no mismatched pairs": ("kto", {"ref_kl_logps": None}, {}, "kto (chapter) needs ref_kl_logps"),
    "mismatched pairs": (
        "dpo",
        MISMATCHED,
        {},
        "does not read policy_kl_logps; it reads policy_ch",
    ),
    "no likelihood": ("orpo", {"chosen_nll": None}, {}, "orpo (chapter) needs chosen_nll"),
    "a parameter": ("ipo", {}, {"label_smoothing": 0.1}, "does not read label_smoothing"),
    "pairs that are none": (
        "dpo",
        {"policy_rejected_logps": f64([-1.0])},
        {},
        "policy_rejected_logps must have shape (2,) to go with policy_chosen_logps, not (1,)",
    ),
    "per token": (
        "dpo",
        {"policy_chosen_logps": f64([[-1.0, -2.0]])},
        {},
        "policy_chosen_logps must have shape (B,), not (1, 2)",
    ),
    "nothing": ("simpo", {"policy_chosen_logps": f64([])}, {}, "must have shape (B,), not (0,)"),
    "no example": (
        "kto",
        dict.fromkeys([*POLICY, *REFERENCE], f64([])),
        {},
        "there is neither a chosen nor a rejected completion",
    ),
    "a NaN": (
        "dpo",
        {"ref_rejected_logps": f64([-1.0, NAN])},
        {},
        "ref_rejected_logps must be finite, but at positions [1] it is not",
    ),
    "integers": (
        "dpo",
        {"policy_chosen_logps": torch.tensor([-1, -2])},
        {},
        "policy_chosen_logps must hold floating-point numbers, not torch.int64",
    ),
    "a list": ("dpo", {"ref_chosen_logps": [-1.0]}, {}, "must be a torch tensor, not list"),
    "a likelihood of another shape": (
        "orpo",
        {"chosen_nll": f64([1.0, 2.0, 3.0])},
        {},
        "chosen_nll must have shape (2,) or () to go with policy_chosen_logps, not (3,)",
    ),
    "infinite odds": (
        "orpo",
        {"policy_rejected_logps": f64([-1.0, 0.0])},
        {},
        "policy_rejected_logps must be below 0: a probability of 1 has infinite odds",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_sentence(case):
    name, changed, params, says = REFUSED[case]
    inputs = batch(name, "chapter") if name in NAMES else dict(POLICY)
    with pytest.raises(InputError) as error:
        preference_loss(name, **inputs | changed, **params)
    assert says in str(error.value) and "\n" not in str(error.value)
