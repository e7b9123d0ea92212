"""The loss of an algorithm on plain tensors: a row of the table, read over the book's functions.

`policy_gradient_loss` is the whole of it. A trainer takes the same three steps one by one:
`shaped_rewards` where it has the log-probabilities, `estimate_advantages` on the rewards of all
processes, `surrogate_loss` on each micro-batch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlhf_trl import algorithms, book
from rlhf_trl.algorithms import Formulation, Part
from rlhf_trl.book.aggregation import masked
from rlhf_trl.errors import InputError


@dataclass(frozen=True)
class PolicyGradientLoss:
    """What `policy_gradient_loss` returns.

    Attributes:
        loss: the scalar to minimise; differentiable in `logps` (and `values`).
        advantages: (B,), or (B, T) where each token has its own; constants.
    """

    loss: Tensor
    advantages: Tensor


def policy_gradient_loss(
    algorithm: str,
    *,
    logps: Tensor,
    mask: Tensor,
    rewards: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    binary_rewards: Tensor | None = None,
    num_generations: int | None = None,
    normalizer: Tensor | float | None = None,
    formulation: str = "chapter",
    **params: Any,
) -> PolicyGradientLoss:
    """Compute the loss of a policy-gradient algorithm on one batch.

    What stands on masked positions never matters, not even a NaN. The result has the precision of
    `logps`: float64 in, float64 out.

    Args:
        algorithm: "reinforce", "rloo", "ppo", "grpo", "drgrpo", "gspo", "cispo", "sapo", "dapo" or
            "maxrl".
        logps: (B, T) log-probabilities of the completion tokens under the policy, in nats.
        mask: (B, T) 1 on tokens that count, 0 elsewhere.
        rewards: (B,) rewards of the completions.
        old_logps: (B, T) log-probabilities at rollout time; None: on-policy.
        ref_logps: (B, T) log-probabilities under the reference policy, with `beta`.
        values: (B, T) values of the critic that is trained (PPO).
        old_values: (B, T) values at rollout time (PPO).
        binary_rewards: (B,) 1 for a success, 0 for a failure (MaxRL).
        num_generations: completions per prompt, standing next to each other; None: the batch is one
            group.
        normalizer: tokens of the whole accumulation window, for a formulation that is normalised
            over it; None: those of this mask.
        formulation: "chapter", "code" or "trl".
        **params: the parameters that the formulation reads, under TRL's names where it has one.
            `epsilon_high` always means an upper bound of 1 + epsilon_high.

    Returns:
        The loss and the advantages.

    Raises:
        InputError: if the algorithm, the formulation or a parameter does not exist; if a tensor or
            a parameter is given that the formulation does not read, or one that it needs is not; if
            a shape or a value is impossible.
    """
    row = algorithms.formulation(algorithm, formulation)
    numbers = row.parameters(params)
    row = row.chosen(numbers)
    tensors = {
        "old_logps": old_logps,
        "ref_logps": ref_logps,
        "values": values,
        "old_values": old_values,
        "binary_rewards": binary_rewards,
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    _check_reads(row, numbers, set(tensors), beta_given="beta" in params)
    _check_window(row, normalizer)
    tensors |= {"logps": logps, "mask": mask, "rewards": rewards}
    tensors = _prepared(row.label, tensors)
    _check_groups(row.label, num_generations, len(tensors["rewards"]))

    def take(*names: str) -> dict[str, Tensor]:
        return {name: tensors[name] for name in names if name in tensors}

    shaped = shaped_rewards(
        row, numbers, **take("rewards", "mask", "logps", "old_logps", "ref_logps")
    )
    advantages = estimate_advantages(
        row,
        numbers,
        rewards=shaped,
        num_generations=num_generations,
        **take("mask", "old_values", "binary_rewards"),
    )
    loss = surrogate_loss(
        row,
        numbers,
        advantages=advantages,
        normalizer=normalizer,
        **take("logps", "mask", "old_logps", "ref_logps", "values", "old_values"),
    )
    return PolicyGradientLoss(loss, advantages)


def shaped_rewards(
    row: Formulation,
    params: Mapping[str, Any],
    *,
    rewards: Tensor,
    mask: Tensor,
    logps: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """Step 1: take beta * KL from the rewards, where the row has its KL there.

    Args:
        row: the formulation, as `Formulation.chosen` returned it.
        params: its parameters, as `Formulation.parameters` returned them.
        rewards: (B,) rewards of the completions.
        mask: (B, T) 1 on tokens that count.
        logps: (B, T) log-probabilities under the policy, in nats.
        old_logps: (B, T) log-probabilities at rollout time, whose KL it is; None: `logps`.
        ref_logps: (B, T) log-probabilities under the reference policy.

    Returns:
        (B,) rewards, or (B, T) if the row penalises each token.
    """
    if row.kl != "reward" or not params["beta"]:
        return rewards
    rollout_logps = (logps if old_logps is None else old_logps).detach()
    per_token = _kl(row, params, masked(rollout_logps, mask), masked(ref_logps, mask))
    penalise = _function(book.rewards, row.kl_penalty)
    return _call(penalise, params, {"rewards": rewards, "kl": per_token, "mask": mask})


def estimate_advantages(
    row: Formulation,
    params: Mapping[str, Any],
    *,
    rewards: Tensor,
    mask: Tensor | None = None,
    old_values: Tensor | None = None,
    binary_rewards: Tensor | None = None,
    num_generations: int | None = None,
) -> Tensor:
    """Step 2: turn rewards into advantages.

    Args:
        row: the formulation, as `Formulation.chosen` returned it.
        params: its parameters, as `Formulation.parameters` returned them.
        rewards: what step 1 returned, gathered over all processes if it is (B,).
        mask: (B, T) 1 on tokens that count, for advantages per token.
        old_values: (B, T) values at rollout time, for advantages per token.
        binary_rewards: (B,) successes, if the row reads them instead of the rewards.
        num_generations: completions per prompt; None: the batch is one group.

    Returns:
        (B,) or (B, T) advantages, detached.
    """
    estimate = _function(book.advantages, row.advantage)
    tensors = {"rewards": rewards, "num_generations": num_generations, "mask": mask}
    if "token_rewards" in inspect.signature(estimate).parameters:
        per_token = rewards if rewards.dim() == 2 else book.rewards.at_last_token(rewards, mask)
        tensors["token_rewards"] = per_token
    tensors |= {"old_values": old_values, "binary_rewards": binary_rewards}
    return _call(estimate, params, tensors).detach()


def surrogate_loss(
    row: Formulation,
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
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """Step 3: the loss of a micro-batch, given its advantages.

    Args:
        row: the formulation, as `Formulation.chosen` returned it.
        params: its parameters, as `Formulation.parameters` returned them.
        logps: (B, T) log-probabilities under the policy, in nats.
        mask: (B, T) 1 on tokens that count.
        advantages: (B,) or (B, T).
        old_logps: (B, T) log-probabilities at rollout time; None: on-policy.
        ref_logps: (B, T) log-probabilities under the reference policy, if the row's loss has a KL.
        values: (B, T) values of the critic, if the row has one.
        old_values: (B, T) values at rollout time, if the row has a critic.
        returns: (B, T) targets of the critic; None: advantages + old_values, which holds for
            advantages that are not whitened.
        token_weights: (B, T) or (B, 1) constants on the surrogate, not on KL or critic, such as
            the learner-to-sampler weights of chapter 6, eq:ppo_tis.
        normalizer: what the aggregation divides by; None: counted from `mask`.

    Returns:
        The scalar loss.
    """
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else masked(advantages, mask)
    logps = masked(logps, mask)
    old_logps = logps.detach() if old_logps is None else masked(old_logps, mask)
    tensors = {"logps": logps, "old_logps": old_logps, "mask": mask, "advantages": advantages}
    if row.ratio != "none":
        tensors["ratio"] = _call(_function(book.surrogates, row.ratio), params, tensors)
    losses = _call(_function(book.surrogates, row.surrogate), params, tensors)
    if token_weights is not None:
        losses = losses * masked(token_weights, mask)
    if row.kl == "loss" and params["beta"]:
        losses = losses + params["beta"] * _kl(row, params, logps, masked(ref_logps, mask))
    if row.value_loss != "none":
        old_values = masked(old_values, mask)
        if returns is None:
            returns = book.value.lambda_returns(advantages, old_values)
        critic = {"values": masked(values, mask), "old_values": old_values}
        critic["returns"] = masked(returns, mask)
        critic_losses = _call(_function(book.value, row.value_loss), params, critic)
        losses = losses + params["vf_coef"] * critic_losses
    tensors |= {"losses": losses, "normalizer": normalizer}
    return _call(_function(book.aggregation, row.aggregation), params, tensors)


def _function(module: ModuleType, part: Part) -> Callable[..., Tensor]:
    """Look a part of a row up among the book's functions, unless it is a function already."""
    return part if callable(part) else getattr(module, part)


def _call(
    function: Callable[..., Tensor], params: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Tensor:
    """Call a function with those parameters and tensors that it names."""
    known = {**params, **tensors}
    names = inspect.signature(function).parameters
    return function(**{name: known[name] for name in names if name in known})


def _kl(row: Formulation, params: Mapping[str, Any], logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return the KL estimate per token, (B, T), in the row's sign."""
    prefix = "code_" if row.kl_sign == "code" else ""
    return getattr(book.kl, prefix + params["kl_estimator"])(logps, ref_logps)


def _check_reads(
    row: Formulation, params: Mapping[str, Any], given: set[str], beta_given: bool
) -> None:
    """Refuse optional tensors that the row does not read, and ask for those it needs."""
    reads: dict[str, str] = {}
    needs: dict[str, str] = {}
    penalty = row.kl != "none" and params["beta"] > 0
    if row.ratio != "none" or (row.kl == "reward" and beta_given):
        reads["old_logps"] = "old_logps"
    if row.kl != "none" and beta_given:
        reads["ref_logps"] = "ref_logps"
    if penalty:
        needs["ref_logps"] = f"beta={params['beta']}"
    if row.value_loss != "none":
        needs |= {"values": "its critic", "old_values": "its critic (on-policy: values.detach())"}
    advantage = _function(book.advantages, row.advantage)
    if "binary_rewards" in inspect.signature(advantage).parameters:
        needs["binary_rewards"] = "its advantages"
    for name in sorted(given - reads.keys() - needs.keys()):
        hint = ""
        if name == "ref_logps" and row.kl != "none":
            hint = " unless beta is given"
        if name == "old_logps" and "importance_cap" in params:
            hint = " unless importance_cap is given"
        known = ", ".join(sorted(reads.keys() | needs.keys())) or "none of the optional tensors"
        raise InputError(f"{row.label} does not read {name}{hint}; it reads {known}")
    for name, why in needs.items():
        if name not in given:
            raise InputError(f"{row.label} needs {name} for {why}")


def _check_window(row: Formulation, normalizer: Tensor | float | None) -> None:
    """Refuse a normalizer that is not a positive number, or that the row does not divide by."""
    if normalizer is None:
        return
    if row.window != "window":
        raise InputError(
            f"{row.label} does not read normalizer: it is normalised over the micro-batch"
        )
    scalar = isinstance(normalizer, Tensor) and normalizer.dim() == 0
    if not (scalar or isinstance(normalizer, Real)) or not normalizer > 0:
        raise InputError(f"{row.label}: normalizer must be a number above 0, not {normalizer!r}")


def _check_groups(label: str, num_generations: int | None, batch: int) -> None:
    """Refuse a group size that does not divide the batch."""
    if num_generations is None:
        return
    if not isinstance(num_generations, int) or num_generations < 1 or batch % num_generations:
        raise InputError(
            f"{label}: num_generations must be a whole number that divides the batch of {batch}, "
            f"not {num_generations!r}"
        )


def _prepared(label: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check types, shapes and the mask; bring all to one precision; cut old tensors' gradients."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{label}: {name} must be a torch tensor, not {type(tensor).__name__}")
    logps, mask = tensors["logps"], tensors["mask"]
    if logps.dim() != 2 or not logps.is_floating_point() or 0 in logps.shape:
        raise InputError(
            f"{label}: logps must hold floating-point numbers of shape (B, T), "
            f"not {logps.dtype} of shape {tuple(logps.shape)}"
        )
    for name, tensor in tensors.items():
        shape = logps.shape[:1] if name in ("rewards", "binary_rewards") else logps.shape
        if tensor.shape != shape:
            raise InputError(
                f"{label}: {name} must have shape {tuple(shape)} to go with logps of shape "
                f"{tuple(logps.shape)}, not {tuple(tensor.shape)}"
            )
    if not ((mask == 0) | (mask == 1)).all():
        raise InputError(f"{label}: mask must hold only 0 and 1")
    for name, tensor in tensors.items():
        if tensor.shape == mask.shape and not tensor[mask.bool()].isfinite().all():
            raise InputError(f"{label}: {name} must be finite on the tokens that count")
    broken = (~tensors["rewards"].isfinite()).nonzero().flatten().tolist()
    if broken:
        raise InputError(f"{label}: rewards must be finite, but those of rows {broken} are not")
    precision = torch.promote_types(logps.dtype, torch.float32)
    prepared = {name: tensor.to(precision) for name, tensor in tensors.items()}
    learned = ("logps", "values")
    return {name: t if name in learned else t.detach() for name, t in prepared.items()}
