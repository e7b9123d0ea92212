"""The KL page against closed forms and numbers worked out by hand."""

import math
import time

import pytest
import torch

from rlhf_trl.compare.pages.kl_page import (
    ESTIMATORS,
    MEASURED,
    figure,
    measure_kl,
    page,
    table,
    toy,
)


def random_world(seed, vocabulary=4, scale=0.8):
    generator = torch.Generator().manual_seed(seed)
    shape = (vocabulary + 1, vocabulary)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.fixture(scope="module")
def worlds():
    """Toy policies, and all that is measured of them."""
    found = []
    for world in (toy(), random_world(0), random_world(1)):
        rows = measure_kl(*world)
        keys = [(r.estimator, r.placement, r.ratio, r.policy, r.tokens) for r in rows]
        assert len(set(keys)) == len(rows)
        found.append((world, dict(zip(keys, rows, strict=True))))
    return found


def row(rows, name, placement, ratio="none", policy="on", tokens=1):
    return rows[name, placement, ratio, policy, tokens]


def closed_form(policy, reference):
    """KL, reverse KL and chi2 of the first token, and the gradients of all three."""
    logits = policy[-1].clone().requires_grad_()
    p, q = logits.softmax(0), reference[-1].softmax(0)
    values = (p * (p / q).log()).sum(), (q * (q / p).log()).sum(), (p * p / q).sum() - 1
    return [(v.item(), torch.autograd.grad(v, logits, retain_graph=True)[0]) for v in values]


def assert_gradient(found, mean, exact):
    """The row is that of a mean gradient, the exact one being known."""
    assert found.expected == pytest.approx(mean.norm().item(), abs=1e-12)
    assert found.exact == pytest.approx(exact.norm().item(), abs=1e-12)
    assert found.bias == pytest.approx((mean - exact).norm().item(), abs=1e-12)
    cosine = torch.cosine_similarity(mean.flatten(), exact.flatten(), 0).item()
    assert found.cosine == pytest.approx(cosine, abs=1e-10)
    assert found.norm_ratio == pytest.approx((mean.norm() / exact.norm()).item(), abs=1e-10)


# --- two tokens, by hand: pi = (1/2, 1/2), pi_ref = (1/4, 3/4), mu = (2/3, 1/3) -------------------

LN2, LN23 = math.log(2), math.log(2 / 3)  # log pi/pi_ref of the two tokens


@pytest.fixture(scope="module")
def coin():
    def logits(first, second):
        return torch.tensor([[first, second]] * 3, dtype=torch.float64).log()

    rows = measure_kl(logits(1, 1), logits(1, 3), logits(2, 1), tokens=(1,))
    return {(r.estimator, r.placement, r.ratio, r.policy, r.tokens): r for r in rows}


def test_a_coin_by_hand_as_a_number(coin):
    exact = (LN2 + LN23) / 2
    k1 = row(coin, "k1", "value")
    assert (k1.expected, k1.exact, k1.bias) == pytest.approx((exact, exact, 0), abs=1e-15)
    assert k1.variance == pytest.approx(((LN2 - LN23) / 2) ** 2, abs=1e-15)
    k2 = row(coin, "k2", "value")
    assert k2.expected == pytest.approx((LN2**2 + LN23**2) / 4, abs=1e-15)
    # code k3 = pi/pi_ref - 1 - log: 2 - 1 - ln 2 and 2/3 - 1 - ln(2/3)
    assert row(coin, "code k3", "value").expected == pytest.approx(1 / 3 - exact, abs=1e-15)
    # mu weighs the two tokens 2:1; times pi/mu = 3/4 and 3/2 they weigh the same again
    off = row(coin, "k1", "value", policy="off")
    assert off.expected == pytest.approx((2 * LN2 + LN23) / 3, abs=1e-15)
    for ratio in ("token", "sequence"):
        assert row(coin, "k1", "value", ratio, "off").expected == pytest.approx(exact, abs=1e-15)


def test_a_coin_by_hand_as_gradients(coin):
    # grad log pi is (1/2, -1/2) after the first token, the opposite after the second, so every
    # gradient is c (1, -1) with length |c| sqrt(2)
    def gradient(at_first, at_second, weights):
        """Mean and variance for the factors of grad log pi after the two tokens."""
        c = at_first / 2, -at_second / 2
        mean = sum(w * x for w, x in zip(weights, c, strict=True))
        return mean, 2 * sum(w * (x - mean) ** 2 for w, x in zip(weights, c, strict=True))

    on, off = (1 / 2, 1 / 2), (2 / 3, 1 / 3)
    exact = gradient(LN2, LN23, on)[0]
    # k3 = pi_ref/pi - 1 + log pi/pi_ref, its slope 1 - pi_ref/pi
    k3 = 1 / 2 - 1 + LN2, 3 / 2 - 1 + LN23
    cases = [
        ("k1", "loss", "none", "on", gradient(1, 1, on)),
        ("k2", "loss", "none", "on", gradient(LN2, LN23, on)),
        ("k3", "loss", "none", "on", gradient(1 / 2, -1 / 2, on)),
        ("k3", "loss", "token", "on", gradient(1 / 2 + k3[0], -1 / 2 + k3[1], on)),
        ("k3", "loss", "token", "off", gradient(3 / 4 * LN2, 3 / 2 * LN23, off)),
        ("k3", "reward", "none", "on", gradient(*k3, on)),
        ("k3", "reward", "none", "off", gradient(*k3, off)),
        ("k1", "reward", "sequence", "off", gradient(3 / 4 * LN2, 3 / 2 * LN23, off)),
        ("code k3", "loss", "none", "on", gradient(2 - 1, 2 / 3 - 1, on)),
        ("code k1", "reward", "none", "on", gradient(-LN2, -LN23, on)),
    ]
    for name, placement, ratio, policy, (mean, variance) in cases:
        found = row(coin, name, placement, ratio, policy)
        label = (name, placement, ratio, policy)
        assert found.expected == pytest.approx(abs(mean) * 2**0.5, abs=1e-15), label
        assert found.bias == pytest.approx(abs(mean - exact) * 2**0.5, abs=1e-15), label
        assert found.variance == pytest.approx(variance, abs=1e-15), label
        if mean:
            assert found.cosine == pytest.approx(math.copysign(1, mean * exact)), label
            assert found.component == pytest.approx(mean / exact), label
        else:
            assert (found.cosine, found.component) == (None, 0)


# --- what the page says, for several policies ----------------------------------------------------


def test_one_token_against_the_closed_forms(worlds):
    for (policy, reference, _), rows in worlds:
        (kl, forward), (_, reverse), (chi2, chi2_gradient) = closed_form(policy, reference)
        means = {"k1": kl, "k3": kl, "code k1": -kl, "code k3": chi2 - kl}
        for name, mean in means.items():
            found = row(rows, name, "value")
            assert (found.expected, found.exact) == pytest.approx((mean, kl), abs=1e-12)
        assert abs(row(rows, "k2", "value").bias) > 1e-3
        for name, placement, ratio, mean in [
            ("k2", "loss", "none", forward),
            ("k3", "loss", "none", reverse),
            ("k3", "loss", "token", forward),
            ("code k3", "loss", "none", chi2_gradient / 2),
            ("k1", "reward", "none", forward),
            ("k3", "reward", "none", forward - reverse),
            ("code k1", "reward", "none", -forward),
            ("code k3", "reward", "none", chi2_gradient / 2 - forward),
        ]:
            assert_gradient(row(rows, name, placement, ratio), mean, forward)


def sequence_kl(policy, reference, tokens, fixed_states):
    """KL of sequences, by recursion; `fixed_states`: no gradient through where tokens lead."""
    p, q = policy.softmax(-1), reference.softmax(-1)
    own = (p * (p / q).log()).sum(-1)
    value = torch.zeros(len(policy), dtype=torch.float64)
    for _ in range(tokens):
        move = p.detach() if fixed_states else p
        value = own + move @ value[:-1]
    return value[-1]


def test_three_tokens(worlds):
    for (policy, reference, _), rows in worlds:
        logits = policy.clone().requires_grad_()
        kl = sequence_kl(logits, reference, 3, False)
        (exact,) = torch.autograd.grad(kl, logits)
        for name in ("k1", "k3"):
            found = row(rows, name, "value", tokens=3)
            assert (found.expected, found.exact) == pytest.approx((kl.item(),) * 2, abs=1e-12)
        assert_gradient(row(rows, "k1", "reward", tokens=3), exact, exact)
        assert_gradient(row(rows, "code k1", "reward", tokens=3), -exact, exact)
        # E[k grad log pi] = grad E[k] - E[grad k]
        loss, reward = (row(rows, "k3", place, tokens=3) for place in ("loss", "reward"))
        assert reward.bias == pytest.approx(loss.expected, abs=1e-12)
        # in the loss a token does not answer for the KL of the tokens after it
        per_token = sequence_kl(logits, reference, 3, True)
        (held,) = torch.autograd.grad(per_token, logits)
        assert per_token.item() == pytest.approx(kl.item())
        for name, ratio in (("k2", "none"), ("k3", "token")):
            assert_gradient(row(rows, name, "loss", ratio, tokens=3), held, exact)
        assert row(rows, "k2", "loss", tokens=3).bias > 0.01


@pytest.mark.parametrize("tokens", [1, 3])
def test_on_policy_identities(worlds, tokens):
    for _, rows in worlds:
        for name in ("k1", "code k1"):
            found = row(rows, name, "loss", tokens=tokens)
            assert found.expected < 1e-14 < found.variance and found.cosine is None
        # the same mean and the same variance: it is the same gradient in each sample
        k2 = row(rows, "k2", "loss", tokens=tokens)
        corrected = row(rows, "k3", "loss", "token", tokens=tokens)
        for field in ("expected", "bias", "variance", "cosine"):
            assert getattr(k2, field) == pytest.approx(getattr(corrected, field), abs=1e-12)
        for by, places in MEASURED.items():
            for place in places:
                signs = [row(rows, f"{s}k2", *place, by, tokens) for s in ("", "code ")]
                assert signs[0].expected == pytest.approx(signs[1].expected, abs=1e-14)
                assert signs[0].variance == pytest.approx(signs[1].variance, abs=1e-14)


def test_off_policy_only_a_ratio_is_right(worlds):
    right = [("k1", "value"), ("k3", "value"), ("k1", "loss"), ("k3", "loss"), ("k1", "reward")]
    for _, rows in worlds:
        for name, place in right:
            assert abs(row(rows, name, place, "none", "off").bias) > 1e-3
            assert abs(row(rows, name, place, "token", "off").bias) < 1e-12
            assert abs(row(rows, name, place, "none", "off", 3).bias) > 1e-3
            token = row(rows, name, place, "token", "off", 3)
            assert abs(token.bias) > 1e-4
            if place != "loss":
                whole = row(rows, name, place, "sequence", "off", 3)
                assert abs(whole.bias) < 1e-12 and whole.variance > token.variance
        plain = [r for r in rows.values() if (r.policy, r.ratio) == ("off", "none")]
        assert len(plain) == 2 * 3 * 6 and min(abs(r.bias) for r in plain) > 1e-4
    toy_rows = worlds[0][1]
    assert all(row(toy_rows, "k1", "loss", "none", "off", t).cosine < -0.8 for t in (1, 3))


def test_k2_and_k3_in_the_reward_can_point_the_wrong_way():
    places = torch.arange(30, dtype=torch.float64).reshape(6, 5)
    reference = torch.sin(2.3 * places)
    policy = reference + 0.6 * torch.cos(1.7 * places + 0.5)
    rows = measure_kl(policy, reference, reference, tokens=(1,))
    cosines = {
        r.estimator: r.cosine
        for r in rows
        if (r.placement, r.policy) == ("reward", "on") and not r.estimator.endswith("k1")
    }
    assert len(cosines) == 4 and max(cosines.values()) < -0.5
    small = measure_kl(reference + 0.01 * (policy - reference), reference, reference, tokens=(1,))
    lengths = [r.norm_ratio for r in small if (r.placement, r.policy) == ("reward", "on")]
    assert sorted(round(x, 2) for x in lengths) == [0, 0, 0, 0, 1, 1]


# --- the page ------------------------------------------------------------------------------------


def test_the_page_holds_both_tables_and_takes_less_than_two_seconds():
    start = time.process_time()
    text = page("somewhere.png")
    assert time.process_time() - start < 2
    assert "(somewhere.png)" in text
    lines = text.splitlines()
    # three estimators with the chapter's sign, two with the code's, at two lengths, twice
    assert len([line for line in lines if line.startswith(("| 1 |", "| 3 |"))]) == 20
    widths = {line.count("|") for line in lines if line.startswith("|")}
    assert widths == {2 + 4 + 1, 2 + 8 + 1}
    assert page("somewhere.png") == text


def test_the_table_shows_mean_spread_cosine_length_and_noise(coin):
    lines = table([r for r in coin.values() if r.policy == "on"]).splitlines()
    assert lines[0].startswith("| tokens | estimator | value | in the loss |")
    assert len(lines) == 2 + len(ESTIMATORS)
    # KL = (ln 2 + ln 2/3)/2 = 0.144, spread (ln 2 - ln 2/3)/2 = 0.549. The exact gradient has
    # c = (ln 2 - ln 2/3)/4 = ln 3 / 4; k1 in the loss has c = 1/2 or -1/2, and mean 0
    assert lines[2].startswith(f"| 1 | k1 | 0.144 ± 0.55 | - / 0.00 / {2 / math.log(3):.1f} |")
    # k3 in the loss: c = 1/4 in both samples
    assert f"| 1.00 / {1 / math.log(3):.2f} / 0.0 |" in lines[4]


def test_the_figure_is_a_png(tmp_path, coin):
    figure(list(coin.values()), tmp_path / "kl.png")
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["kl.png"]
