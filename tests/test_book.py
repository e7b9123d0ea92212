"""Every equation against numbers worked out by hand, and the properties it is chosen for."""

import math

import pytest
import torch

from rlhf_trl.book import advantages, aggregation, kl, rewards, surrogates, value
from rlhf_trl.errors import InputError

NAN = float("nan")


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def equal(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=atol)


# --- advantages ---------------------------------------------------------------------------------


def test_raw_is_the_reward():
    equal(advantages.raw(f64([1.0, -2.0])), [1.0, -2.0])


def test_batch_mean_baseline():
    # mean of 0, 1, 5 is 2
    equal(advantages.batch_mean_baseline(f64([0.0, 1.0, 5.0])), [-2.0, -1.0, 3.0])


def test_moving_average_baseline():
    equal(advantages.moving_average_baseline(f64([0.0, 1.0]), 0.25), [-0.25, 0.75])
    # 0.9 * 0.5 + 0.1 * 2
    assert advantages.moving_average(0.5, f64([1.0, 3.0]), 0.9) == pytest.approx(0.65, abs=1e-15)


def test_leave_one_out():
    # prompt 1: 0 - (1+2)/2, 1 - (0+2)/2, 2 - (0+1)/2; prompt 2: 4 - (4+1)/2, ...
    actual = advantages.leave_one_out(f64([0.0, 1.0, 2.0, 4.0, 4.0, 1.0]), 3)
    equal(actual, [-1.5, 0.0, 1.5, 1.5, 1.5, -3.0])


def test_group_centered():
    actual = advantages.group_centered(f64([0.0, 1.0, 2.0, 4.0]), 2)
    equal(actual, [-0.5, 0.5, -1.0, 1.0])


def test_group_standardized():
    # 0, 1, 2 has mean 1 and, with n - 1, standard deviation 1; 0, 0, 3 has mean 1 and sqrt(3)
    actual = advantages.group_standardized(f64([0.0, 1.0, 2.0, 0.0, 0.0, 3.0]), 3, std_epsilon=0.5)
    wide = math.sqrt(3) + 0.5
    equal(actual, [-1 / 1.5, 0.0, 1 / 1.5, -1 / wide, -1 / wide, 2 / wide])


def test_group_standardized_default_epsilon_is_the_listings():
    # 0 and 1: mean 1/2, standard deviation 1/sqrt(2)
    equal(advantages.group_standardized(f64([0.0, 1.0]))[1], 0.5 / (math.sqrt(0.5) + 1e-4))


def test_group_standardized_of_equal_rewards_is_zero_but_for_rounding():
    equal(advantages.group_standardized(f64([0.5, 0.5]), std_epsilon=1e-8), [0.0, 0.0])
    # six float32 numbers of .3: the mean is 2^-25 below, the standard deviation sqrt(6/5) of that
    rewards, unit = torch.full((6,), 0.3), 2.0**-25
    for epsilon, stated in ((1e-8, 0.7), (1e-4, 3e-4)):
        found = advantages.group_standardized(rewards, 6, epsilon)
        expected = unit / (unit * math.sqrt(6 / 5) + epsilon)
        assert found.tolist() == pytest.approx([expected] * 6, rel=1e-4)
        assert expected == pytest.approx(stated, rel=0.01)
    # two such groups: torch's standard deviation is 0, and the mean is as far off
    found = advantages.group_standardized(torch.full((12,), 0.3), 6, 1e-8)
    assert found.tolist() == pytest.approx([unit / 1e-8] * 12, rel=1e-4)


def test_maxrl():
    # success rate 1/4: a success gets (1 - 1/4)/(1/4) = 3, a failure -1; never solved: 0; solved: 0
    actual = advantages.maxrl(f64([0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]), 4)
    equal(actual, [-1.0, -1.0, 3.0, -1.0] + [0.0] * 8)


def test_maxrl_refuses_rewards_that_are_not_binary():
    with pytest.raises(InputError, match="only 0 and 1"):
        advantages.maxrl(f64([0.5, 1.0]))


def test_maxrl_takes_partial_credit_if_told():
    # mean 0.5: (0.25 - 0.5) / 0.5, (0.75 - 0.5) / 0.5; a group without any is 0
    actual = advantages.maxrl(f64([0.25, 0.75, 0, 0]), 2, partial_credit=True)
    assert actual.tolist() == [-0.5, 0.5, 0, 0]


def test_gae():
    # gamma 1/2, lambda 1/2. Sequence 1: delta_2 = 8 - 3 = 5; delta_1 = 1 + 3/2 - 2 = 1/2, A_1 = 1/2
    # + 5/4; delta_0 = 0 + 2/2 - 1 = 0, A_0 = 7/16. Sequence 2 ends after one token: 8 - 4.
    token_rewards = f64([[0.0, 1.0, 8.0], [8.0, 0.0, 0.0]])
    values = f64([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    mask = f64([[1, 1, 1], [1, 0, 0]])
    actual = advantages.gae(token_rewards, values, mask, gamma=0.5, lam=0.5)
    equal(actual, [[7 / 16, 1.75, 5.0], [4.0, 0.0, 0.0]])


def test_gae_without_decay_is_return_minus_value():
    token_rewards, values = f64([[1.0, 2.0, 4.0]]), f64([[0.5, 0.25, 0.125]])
    actual = advantages.gae(token_rewards, values, f64([[1, 1, 1]]), gamma=1.0, lam=1.0)
    equal(actual, [[6.5, 5.75, 3.875]])


def test_gae_steps_over_masked_tokens():
    values, token_rewards = f64([[1.0, 2.0]]), f64([[0.5, 4.0]])
    dense = advantages.gae(token_rewards, values, f64([[1, 1]]), gamma=0.9, lam=0.8)
    gaps = advantages.gae(
        f64([[NAN, 0.5, math.inf, 4.0, NAN]]),
        f64([[7.0, 1.0, NAN, 2.0, -math.inf]]),
        f64([[0, 1, 0, 1, 0]]),
        gamma=0.9,
        lam=0.8,
    )
    assert torch.equal(gaps[:, [1, 3]], dense)
    assert torch.equal(gaps[:, [0, 2, 4]], torch.zeros(1, 3, dtype=torch.float64))


BASELINES = [
    lambda r: advantages.batch_mean_baseline(r),
    lambda r: advantages.leave_one_out(r, 4),
    lambda r: advantages.group_centered(r, 4),
    lambda r: advantages.group_standardized(r, 4),
]


@pytest.mark.parametrize("estimate", BASELINES)
def test_a_constant_added_to_all_rewards_changes_nothing(estimate):
    sample = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(estimate(sample + 3.0), estimate(sample), rtol=0, atol=1e-12)
    assert not torch.allclose(estimate(2 * sample + sample**2), estimate(sample))


@pytest.mark.parametrize("estimate", BASELINES[1:])
def test_groups_do_not_see_each_other(estimate):
    sample = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7])
    torch.testing.assert_close(estimate(sample[order]), estimate(sample)[order], rtol=0, atol=0)
    changed = sample.clone()
    changed[:4] += f64([1.0, 0.0, 2.0, 0.0])
    torch.testing.assert_close(estimate(changed)[4:], estimate(sample)[4:], rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.1, 7.0])
def test_standardized_advantages_forget_the_scale(scale):
    sample = f64([0.0, 1.0, 1.0, 3.0])
    scaled = advantages.group_standardized(sample * scale, std_epsilon=0.0)
    torch.testing.assert_close(scaled, advantages.group_standardized(sample, std_epsilon=0.0))


@pytest.mark.parametrize(
    ("estimate", "size"),
    [
        (advantages.leave_one_out, 4),
        (advantages.group_centered, 4),
        (advantages.group_standardized, 4),
        (advantages.maxrl, 4),
        (advantages.leave_one_out, 1),
        (advantages.group_standardized, 1),
    ],
)
def test_groups_that_do_not_fit_are_refused(estimate, size):
    with pytest.raises(InputError, match=r"num_generations=4 does|at least 2 completions"):
        estimate(torch.zeros(6, dtype=torch.float64), size)


# --- ratios and surrogates ----------------------------------------------------------------------

LN2 = math.log(2)


def test_token_ratio():
    equal(surrogates.token_ratio(f64([[0.0, -LN2]]), f64([[-LN2, 0.0]])), [[2.0, 0.5]])


def test_sequence_ratio_is_the_geometric_mean():
    # ratios 2 and 8: sqrt(16) = 4; one token of ratio 1/2; no token at all: 1
    ratio = surrogates.sequence_ratio(
        f64([[LN2, 3 * LN2], [-LN2, NAN], [NAN, NAN]]),
        torch.zeros(3, 2, dtype=torch.float64),
        f64([[1, 1], [1, 0], [0, 0]]),
    )
    equal(ratio, [[4.0], [0.5], [1.0]])


def test_log_prob_weighting():
    equal(surrogates.log_prob_weighting(f64([[-2.0, -3.0]]), f64([[0.5]])), [[1.0, 1.5]])


def value_and_slope(function, at):
    """The value of a per-token loss and its derivative, for each token."""
    at = f64([at]).requires_grad_()
    losses = function(at)
    (slope,) = torch.autograd.grad(losses.sum(), at)
    return losses.detach(), slope


def test_clipped_ratio_in_its_six_regions():
    # bounds 0.8 and 1.3; the slope is -A where the objective is not clipped
    ratios = [0.5, 1.0, 2.0]
    losses, slope = value_and_slope(
        lambda r: surrogates.clipped_ratio(r, f64([[2.0]]), 0.2, 0.3), ratios
    )
    equal(losses, [[-1.0, -2.0, -2.6]])
    equal(slope, [[-2.0, -2.0, 0.0]])
    losses, slope = value_and_slope(
        lambda r: surrogates.clipped_ratio(r, f64([[-2.0]]), 0.2, 0.3), ratios
    )
    equal(losses, [[1.6, 2.0, 4.0]])
    equal(slope, [[0.0, 2.0, 2.0]])


def test_clipped_importance_weight_keeps_a_gradient_everywhere():
    # weights 0.8, 1, 1.3; loss -w A logp, slope -w A
    logps, ratio = [-1.0, -2.0, -3.0], f64([[0.5, 1.0, 2.0]])
    losses, slope = value_and_slope(
        lambda x: surrogates.clipped_importance_weight(x, ratio * x / x, f64([[2.0]]), 0.2, 0.3),
        logps,
    )
    equal(losses, [[1.6, 4.0, 7.8]])
    equal(slope, [[-1.6, -2.0, -2.6]])


def test_truncated_importance_weight_has_no_lower_bound():
    logps, ratio = [-1.0, -2.0, -3.0], f64([[0.5, 1.0, 4.0]])
    losses, slope = value_and_slope(
        lambda x: surrogates.truncated_importance_weight(x, ratio * x / x, f64([[2.0]]), 3.0), logps
    )
    equal(losses, [[1.0, 4.0, 18.0]])
    equal(slope, [[-1.0, -2.0, -6.0]])


def test_soft_gate():
    # ratio 1: sigmoid(0) 4/tau A = 2 A / tau, slope 4 sigmoid'(0) A = A. Ratio 1 + ln(3)/tau:
    # sigmoid = 3/4, slope 4 (3/4)(1/4) A = 3/4 A
    ln3 = math.log(3)
    losses, slope = value_and_slope(
        lambda r: surrogates.soft_gate(r, f64([[1.5]]), 2.0, 4.0), [1.0, 1.0 + ln3 / 2]
    )
    equal(losses, [[-1.5, -2.25]])
    equal(slope, [[-1.5, -1.125]])
    losses, slope = value_and_slope(
        lambda r: surrogates.soft_gate(r, f64([[-1.5]]), 2.0, 4.0), [1.0, 1.0 + ln3 / 4]
    )
    equal(losses, [[0.75, 1.125]])
    equal(slope, [[1.5, 1.125]])


def test_soft_gate_is_float64_clean():
    losses, _ = value_and_slope(lambda r: surrogates.soft_gate(r, f64([[-1.0]]), 1.0, 1.05), [1.0])
    equal(losses, [[2 / 1.05]], atol=1e-15)


def test_on_policy_all_ratio_surrogates_are_the_plain_policy_gradient():
    def slope(surrogate):
        logps = f64([[-0.5, -1.5], [-1.0, -0.1]]).requires_grad_()
        old, weight = logps.detach(), f64([[0.7], [-1.2]])
        token = surrogates.token_ratio(logps, old)
        sequence = surrogates.sequence_ratio(logps, old, torch.ones(2, 2, dtype=torch.float64))
        losses = surrogate(logps, token, sequence, weight)
        return torch.autograd.grad(losses.expand(2, 2).sum(), logps)[0]

    plain = f64([[-0.7, -0.7], [1.2, 1.2]])
    for surrogate in (
        lambda x, t, s, a: surrogates.log_prob_weighting(x, a),
        lambda x, t, s, a: surrogates.clipped_ratio(t, a, 0.2, 0.2),
        lambda x, t, s, a: surrogates.clipped_ratio(s, a, 0.2, 0.2),
        lambda x, t, s, a: surrogates.clipped_importance_weight(x, t, a, 0.2, 0.2),
        lambda x, t, s, a: surrogates.truncated_importance_weight(x, t, a, 2.0),
        lambda x, t, s, a: surrogates.soft_gate(t, a, 1.0, 1.05),
    ):
        torch.testing.assert_close(slope(surrogate), plain, rtol=0, atol=1e-15)


# --- value --------------------------------------------------------------------------------------


def test_lambda_returns():
    equal(value.lambda_returns(f64([[1.0, -1.0]]), f64([[0.5, 0.5]])), [[1.5, -0.5]])


def test_value_loss():
    losses, slope = value_and_slope(lambda v: value.value_loss(v, f64([[1.0, 1.0]])), [3.0, 1.0])
    equal(losses, [[2.0, 0.0]])
    equal(slope, [[2.0, 0.0]])


def test_clipped_value_loss_takes_the_worse_of_the_two():
    # old 0, range 1. V = 3, G = 0: clipped 1, loss max(9, 1)/2. V = 3, G = 4: max(1, 9)/2, and the
    # clipped one has no slope. V = 1/2, G = 2: inside the range
    losses, slope = value_and_slope(
        lambda v: value.clipped_value_loss(v, torch.zeros_like(v), f64([[0.0, 4.0, 2.0]]), 1.0),
        [3.0, 3.0, 0.5],
    )
    equal(losses, [[4.5, 4.5, 1.125]])
    equal(slope, [[3.0, 0.0, -1.5]])


# --- aggregation --------------------------------------------------------------------------------

LOSSES = [[1.0, 2.0, 6.0], [4.0, NAN, math.inf]]
MASK = [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("aggregate", "expected", "slope"),
    [
        # (9/3 + 4)/2; each token 1/(2 |a_i|)
        (aggregation.sequence_mean, 3.5, [[1 / 6] * 3, [1 / 2, 0, 0]]),
        # (9 + 4)/2
        (aggregation.sequence_sum, 6.5, [[1 / 2] * 3, [1 / 2, 0, 0]]),
        # 13/4
        (aggregation.token_mean, 3.25, [[1 / 4] * 3, [1 / 4, 0, 0]]),
        # 13/(2 * 10)
        (
            lambda x, m, n=None: aggregation.fixed_length(x, m, 10, n),
            0.65,
            [[0.05] * 3, [0.05, 0, 0]],
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_aggregation(aggregate, expected, slope, dtype):
    losses, mask = f64(LOSSES).requires_grad_(), torch.tensor(MASK).to(dtype)
    result = aggregate(losses, mask)
    equal(result.detach(), expected)
    equal(torch.autograd.grad(result, losses)[0], slope)


@pytest.mark.parametrize(
    ("aggregate", "normalizer"),
    [
        (aggregation.sequence_mean, 2),
        (aggregation.sequence_sum, 2),
        (aggregation.token_mean, 4),
        (lambda x, m, n=None: aggregation.fixed_length(x, m, 10, n), 2),
    ],
)
def test_micro_batches_with_a_normalizer_add_up_to_the_window(aggregate, normalizer):
    losses, mask = f64(LOSSES), f64(MASK)
    parts = [aggregate(losses[i : i + 1], mask[i : i + 1], normalizer) for i in range(2)]
    torch.testing.assert_close(sum(parts), aggregate(losses, mask), rtol=0, atol=1e-15)


def test_aggregation_spreads_one_loss_per_sequence_over_its_tokens():
    per_sequence, mask = f64([[3.0], [5.0]]), f64(MASK)
    equal(aggregation.sequence_mean(per_sequence, mask), 4.0)
    equal(aggregation.token_mean(per_sequence, mask), (3 * 3 + 5) / 4)


def test_a_sequence_without_tokens_adds_nothing_but_counts():
    losses, mask = f64([[2.0, 4.0], [NAN, NAN]]), f64([[1, 1], [0, 0]])
    equal(aggregation.sequence_mean(losses, mask), 1.5)
    equal(aggregation.token_mean(losses, mask), 3.0)
    equal(aggregation.token_mean(losses, torch.zeros(2, 2)), 0.0)


# --- rewards ------------------------------------------------------------------------------------


def test_kl_penalties():
    # KL per token 1, 2 | 4: sums 3 and 4, means 1.5 and 4; beta 0.1
    reward, per_token, mask = f64([1.0, 2.0]), f64([[1.0, 2.0], [4.0, NAN]]), f64([[1, 1], [1, 0]])
    equal(rewards.summed_kl_penalty(reward, per_token, mask, 0.1), [0.7, 1.6])
    equal(rewards.averaged_kl_penalty(reward, per_token, mask, 0.1), [0.85, 1.6])
    equal(rewards.per_token_kl_penalty(reward, per_token, mask, 0.1), [[-0.1, 0.8], [1.6, 0.0]])


def test_at_last_token_finds_the_last_token_that_counts():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    equal(
        rewards.at_last_token(f64([5.0, 7.0, 9.0]), mask),
        [[0.0, 5.0, 0.0], [0.0, 0.0, 7.0], [0.0, 0.0, 0.0]],
    )


def test_overlong_penalty():
    # limit 100, cache 20: free up to 80, half way at 90, full from 100 on
    lengths = f64([10.0, 80.0, 81.0, 90.0, 100.0, 130.0])
    actual = rewards.overlong_penalty(lengths, 100, 20)
    equal(actual, [0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    assert rewards.overlong_penalty(torch.tensor([90]), 100, 20).tolist() == [-0.5]


@pytest.mark.parametrize("cache", [0, 101])
def test_overlong_penalty_refuses_an_impossible_cache(cache):
    with pytest.raises(InputError, match="soft_punish_cache must lie between 1 and"):
        rewards.overlong_penalty(f64([1.0]), 100, cache)


def test_has_contrast():
    # all wrong, all right, mixed, all half right: the last is neither extreme
    correctness = f64([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.5, 0.5])
    assert rewards.has_contrast(correctness, 2).tolist() == [False, False, True, True]
    assert rewards.has_contrast(correctness, 2, highest=0.5).tolist() == [False, True, True, False]


# --- KL estimators, against the sum over the whole vocabulary ------------------------------------

LOGITS = [0.3, -1.1, 0.9, 0.2, -0.4]
REF_LOGITS = [-0.2, -0.5, 0.4, 0.9, -1.0]


def softmax(logits):
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


P, Q = softmax(LOGITS), softmax(REF_LOGITS)
EXACT_KL = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
CHI2 = sum(p * p / q for p, q in zip(P, Q, strict=True)) - 1
HALF_SQUARE = sum(p * math.log(p / q) ** 2 for p, q in zip(P, Q, strict=True)) / 2
code_k1, code_k2, code_k3 = map(kl.in_code, (kl.k1, kl.k2, kl.k3))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (kl.k1, EXACT_KL),
        (kl.k2, HALF_SQUARE),
        (kl.k3, EXACT_KL),
        (code_k1, -EXACT_KL),
        (code_k2, HALF_SQUARE),
        (code_k3, CHI2 - EXACT_KL),
    ],
)
def test_mean_of_a_kl_estimator(estimator, expected):
    every_token = estimator(f64(P).log().unsqueeze(0), f64(Q).log().unsqueeze(0))
    assert (f64(P) * every_token).sum().item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    ("estimator", "expected"), [(kl.k1, EXACT_KL), (kl.k2, HALF_SQUARE), (kl.k3, EXACT_KL)]
)
def test_sampled_estimate_is_within_its_monte_carlo_error(estimator, expected):
    drawn = torch.multinomial(f64(P), 200_000, True, generator=torch.Generator().manual_seed(0))
    samples = estimator(f64(P).log()[drawn], f64(Q).log()[drawn])
    error = samples.std().item() / math.sqrt(len(samples))
    assert abs(samples.mean().item() - expected) < 4 * error < 0.01


def mean_gradient(estimator):
    """The gradient that sampled tokens give on average: weights fixed, gradient through logps."""
    logits = f64(LOGITS).requires_grad_()
    per_token = estimator(logits.log_softmax(0).unsqueeze(0), f64(Q).log().unsqueeze(0))
    return torch.autograd.grad((f64(P) * per_token).sum(), logits)[0]


# by hand: d KL(p||q) / d logit_j = p_j (log(p_j/q_j) - KL), d KL(q||p) / d logit_j = p_j - q_j
REVERSE = [p * (math.log(p / q) - EXACT_KL) for p, q in zip(P, Q, strict=True)]
FORWARD = [p - q for p, q in zip(P, Q, strict=True)]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (kl.k1, [0.0] * 5),
        (kl.k2, REVERSE),
        (kl.k3, FORWARD),
        (code_k1, [0.0] * 5),
        (code_k2, REVERSE),
    ],
)
def test_mean_gradient_of_a_kl_estimator(estimator, expected):
    equal(mean_gradient(estimator), expected, atol=1e-14)


def test_mean_gradient_of_the_codes_k3_is_another_one():
    # d/dlogit_j of sum_x p_x (p_x/q_x) with the first p_x fixed: p_j (p_j/q_j - sum_x p_x^2/q_x)
    expected = [p * (p / q - CHI2 - 1) for p, q in zip(P, Q, strict=True)]
    equal(mean_gradient(code_k3), expected, atol=1e-14)


def test_k3_times_the_ratio_has_the_gradient_of_k2():
    def corrected(logps, ref_logps):
        return torch.exp(logps - logps.detach()) * kl.k3(logps, ref_logps)

    equal(mean_gradient(corrected), REVERSE, atol=1e-14)
