"""The loss of a policy-gradient row in three steps, without any check.

A trainer takes them one by one: `shaped_rewards` where it has the log-probabilities,
`estimate_advantages` on the rewards of all processes, and `surrogate_loss` on each micro-batch.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlhf_trl import book
from rlhf_trl.algorithms import PolicyGradient
from rlhf_trl.book.aggregation import masked
from rlhf_trl.losses.calling import call, look_up


def shaped_rewards(
    row: PolicyGradient,
    params: Mapping[str, Any],
    *,
    rewards: Tensor,
    mask: Tensor,
    logps: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """Step 1: take beta * KL from the rewards, where the row has its KL there.

    Row and parameters are what `PolicyGradient.chosen` and `parameters` returned, the tensors those
    of `policy_gradient_loss`. The KL is that of `old_logps`, or else of `logps`. The result is (B,)
    as the rewards are, or (B, T) if the row penalizes each token.
    """
    if row.kl != "reward" or not params["beta"]:
        return rewards
    rollout_logps = (logps if old_logps is None else old_logps).detach()
    per_token = kl_estimate(row, params, rollout_logps, ref_logps, mask)
    penalize = look_up(book.rewards, row.kl_penalty)
    return call(penalize, params, {"rewards": rewards, "kl": per_token, "mask": mask})


def estimate_advantages(
    row: PolicyGradient,
    params: Mapping[str, Any],
    *,
    rewards: Tensor,
    mask: Tensor | None = None,
    old_values: Tensor | None = None,
    binary_rewards: Tensor | None = None,
    num_generations: int | None = None,
) -> Tensor:
    """Step 2: turn rewards into advantages, (B,) or (B, T), detached.

    The rewards are what step 1 returned, gathered over all processes if they are (B,). `mask` and
    `old_values`, (B, T), are for advantages per token.
    """
    estimate = look_up(book.advantages, row.advantage)  # `call` hands it what its arguments name
    tensors = {"rewards": rewards, "num_generations": num_generations, "mask": mask}
    if "token_rewards" in inspect.signature(estimate).parameters:
        assert mask is not None, "an advantage per token needs the mask"
        per_token = rewards if rewards.dim() == 2 else book.rewards.at_last_token(rewards, mask)
        tensors["token_rewards"] = per_token
    tensors |= {"old_values": old_values, "binary_rewards": binary_rewards}
    return call(estimate, params, tensors).detach()


def surrogate_loss(
    row: PolicyGradient,
    params: Mapping[str, Any],
    *,
    logps: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    token_weights: Tensor | None = None,
    num_generations: int | None = None,
    prompt_tokens: Tensor | None = None,
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """Step 3: the scalar loss of a micro-batch, from its advantages, (B,) or (B, T).

    Args:
        logps: (B, T), and so are the mask, old_logps, ref_logps, values and old_values, all of them
            as `policy_gradient_loss` takes them.
        returns: (B, T) targets of the critic; None: advantages + old_values, which holds for
            advantages that are not whitened.
        token_weights: (B, T) or (B, 1) constants on the surrogate, not on KL or critic, such as
            the learner-to-sampler weights of chapter 6, eq:ppo_tis.
        num_generations: completions of each prompt, for a mean over the tokens of a prompt.
        prompt_tokens: (B,) for each completion, the tokens of all completions of its prompt; None:
            counted from `mask`, in which those of a prompt are neighbors.
        normalizer: what the aggregation divides by; None: counted from `mask`.
    """
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else masked(advantages, mask)
    logps = masked(logps, mask)
    old_logps = logps.detach() if old_logps is None else masked(old_logps, mask)
    tensors = {"logps": logps, "old_logps": old_logps, "mask": mask, "advantages": advantages}
    if row.ratio != "none":
        tensors["ratio"] = call(look_up(book.surrogates, row.ratio), params, tensors)
    # (B, T) losses, to which KL and critic are added; `call` hands over what arguments name
    losses = call(look_up(book.surrogates, row.surrogate), params, tensors)
    if token_weights is not None:
        losses = losses * masked(token_weights, mask)
    if row.kl == "loss" and params["beta"]:
        losses = losses + params["beta"] * kl_estimate(row, params, logps, ref_logps, mask)
    if row.value_loss != "none":
        assert values is not None and old_values is not None, "a critic is trained on its values"
        old_values = masked(old_values, mask)
        if returns is None:
            returns = book.value.lambda_returns(advantages, old_values)
        critic = {"old_values": old_values}
        critic |= {"values": masked(values, mask), "returns": masked(returns, mask)}
        critic_losses = call(look_up(book.value, row.value_loss), params, critic)
        losses = losses + params["vf_coef"] * critic_losses
    tensors |= {"losses": losses, "normalizer": normalizer}
    tensors |= {"num_generations": num_generations, "prompt_tokens": prompt_tokens}
    return call(look_up(book.aggregation, row.aggregation), params, tensors)


def kl_estimate(
    row: PolicyGradient,
    params: Mapping[str, Any],
    logps: Tensor,
    ref_logps: Tensor | None,
    mask: Tensor,
) -> Tensor:
    """Return the KL estimate per token, (B, T), in the row's sign; 0 on masked positions."""
    assert ref_logps is not None, "a KL is against a reference"
    estimate = look_up(book.kl, params["kl_estimator"])
    if row.kl_sign == "code":
        estimate = book.kl.in_code(estimate)
    return estimate(masked(logps, mask), masked(ref_logps, mask))
