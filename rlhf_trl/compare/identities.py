"""Identities: what to change in one side's gradient so that it becomes the other's.

Every loss here has a gradient sum_{i,t} w_{i,t} grad y_{i,t}, y being log-probabilities of tokens
or scores; the two sides differ in w. Each identity is one change of w in closed form, worked out
from the two equations and not by calling the other side. One after the other they must bring the
gradients together, up to the residual that is printed; one alone shows how much its term matters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.compare.windows.offline import Micro
from rlhf_trl.compare.windows.policy import View
from rlhf_trl.compare.windows.terms import Identity, PairTerms, Terms
from rlhf_trl.tiny.model import END

_NORMS = {
    "sequence_sum": "1/B",
    "sequence_mean": "1/(B L_i)",
    "fixed_length": "1/(B L_max)",
    "token_mean": "1/(tokens of the window)",
    "token_mean_micro_batch": "1/(micro-batches x tokens of the micro-batch)",
    "per_prompt": "1/(prompts x tokens of the prompt's completions)",
    "token_mean_trl": "1/(tokens of the generation x accumulation / steps_per_generation)",
}


def normalizer(left: str, right: str) -> Identity:
    """Replace one aggregation by another; each is a key of _NORMS.

    There L_i is the length of completion i, and B is the number of completions.
    """

    def apply(terms: Terms) -> None:
        factor = terms.view.token_weight(right) / terms.view.token_weight(left)
        terms.surrogate = terms.surrogate * factor
        terms.kl = terms.kl * factor
        terms.token_weight = terms.token_weight * factor

    return Identity("normalizer", f"weigh each token by {_NORMS[right]}, not {_NORMS[left]}", apply)


def _surrogate(term: str, says: str, change: Callable[[View, Tensor], Tensor]) -> Identity:
    """Return an identity that changes the policy gradient's part of the derivative.

    `change` takes the view and that part, (B, T), and returns the new part.
    """

    def apply(terms: Terms) -> None:
        terms.surrogate = change(terms.view, terms.surrogate)

    return Identity(term, says, apply)


def std_epsilon(left: float, right: float) -> Identity:
    """Exchange the constant that is added to the standard deviation s of a group's rewards."""
    return _surrogate(
        "standard deviation",
        f"multiply advantages by (s + {left:g}) / (s + {right:g})",
        lambda view, old: old * (view.group_std + left) / (view.group_std + right),
    )


STANDARDIZED = _surrogate(
    "advantage",
    "divide advantages by s + 0.0001",
    lambda view, old: old / (view.group_std + 1e-4),
)

SPREAD_OF_THE_BATCH = _surrogate(
    "standard deviation",
    "multiply advantages by (s + 0.0001) / (s of all rewards + 0.0001)",
    lambda view, old: old * (view.group_std + 1e-4) / (view.rewards.std() + 1e-4),
)

FINISHED_ONLY = _surrogate(
    "mask",
    "completions without an end token have no weight",
    lambda view, old: old * (view.ids == END).any(1, keepdim=True),
)


def sampler_weight(mode: str, low: float, high: float) -> Identity:
    """Weigh by how much likelier the policy finds tokens or completions than the sampler did.

    The weight is w = pi_old / pi_sampler, as in TRL's `vllm_importance_sampling_correction`.

    Args:
        mode: TRL's `vllm_importance_sampling_mode`. It begins with "token_" or "sequence_", which
            says what w is a ratio of; then "truncate" clamps w to the bounds, and "mask" makes it 0
            outside of them.
        low: the lower bound.
        high: the upper bound.
    """
    of_completion = mode.startswith("sequence")
    masks = mode.endswith("mask")

    def change(view: View, surrogate: Tensor) -> Tensor:
        log_ratio = view.sampler_log_ratio  # (B, T), 0 where the mask is 0
        weight = (log_ratio.sum(1, keepdim=True) if of_completion else log_ratio).exp()
        if masks:
            is_within = (weight >= low) & (weight <= high)
            return surrogate * (weight * is_within)
        return surrogate * weight.clamp(low, high)

    bounds = f"[{low:g}, {high:g}]"
    rule = f"w, or by 0 outside {bounds}" if masks else f"w, bounded to {bounds}"
    unit = "completion" if of_completion else "token"
    says = f"multiply each token by {rule}, w = pi_old / pi_sampler of the {unit}"
    return _surrogate("sampler", says, change)


def _kl(slope: Callable[[View], Tensor], says: str) -> Identity:
    """Return an identity that replaces the KL's part; `slope` gives its derivative, (B, T)."""

    def apply(terms: Terms) -> None:
        terms.kl = terms.beta * terms.token_weight * slope(terms.view) * terms.view.mask

    return Identity("KL", says, apply)


CODE_K3 = _kl(
    lambda view: torch.expm1(view.ref_log_ratio),
    "the KL's derivative is exp(l) - 1, not 1 - exp(-l), with l = log pi - log pi_ref",
)


def chapter_k3(wrong: str) -> Identity:
    """Replace the derivative of another estimator, written as `wrong`, by that of k3."""
    return _kl(
        lambda view: -torch.expm1(-view.ref_log_ratio),
        f"the KL's derivative is 1 - exp(-l), not {wrong}, with l = log pi - log pi_ref",
    )


BIAS_CORRECTED_K3 = _kl(
    lambda view: view.ratio * view.ref_log_ratio,  # k3 + dk3 = l
    "k3 is multiplied by rho: its derivative becomes rho (k3 + dk3)",
)


def weight_bound(low: float, high: float, new_high: float) -> Identity:
    """Replace CISPO's two bounds of the weight, `low` and `high`, by an upper bound alone."""
    return _surrogate(
        "bounds of the weight",
        f"the weight is min(rho, {new_high:g}), not clip(rho, {low:g}, {high:g})",
        lambda view, old: old * view.ratio.clamp(max=new_high) / view.ratio.clamp(low, high),
    )


def _clipped(of_completion: bool) -> Callable[[View, Tensor], Tensor]:
    """Return a change of the surrogate: times the clipped ratio of tokens, or of completions.

    Where the ratio is clipped it has no gradient: the factor is 0.
    """

    def change(view: View, old: Tensor) -> Tensor:
        log_ratio = (view.logps - view.old_logps) * view.mask
        ratio = (log_ratio.sum(1, keepdim=True) if of_completion else log_ratio).exp()
        # The derivative is -A times something positive. A clip only ends a move in the advantage's
        # direction: up where A is positive, down where it is negative.
        is_clipped = torch.where(old < 0, ratio > 1.2, ratio < 0.8)
        return old * ratio * (~is_clipped).to(ratio)

    return change


CLIPPED_TOKEN_RATIO = _surrogate(
    "ratio", "multiply each token by rho, or 0 where the clip holds", _clipped(of_completion=False)
)

CLIPPED_WHOLE_RATIO = _surrogate(
    "ratio",
    "multiply each completion by the product of its rho, or 0 where the clip holds",
    _clipped(of_completion=True),
)


def kl_in_reward(estimate: str, beta: float | None = None) -> Identity:
    """Subtract a KL penalty from the rewards by hand, in place of the book's function.

    The penalty is that of the policy which generated, since the rewards belong to its completions.

    Args:
        estimate: "averaged", the mean over a completion's tokens of k3 with the sign of the book's
            code, exp(l) - 1 - l with l = log pi - log pi_ref; or "summed", the sum of k1 = l.
        beta: the penalty's weight, given with "summed", for a left side without a KL. None, with
            "averaged": the `beta` among the left side's arguments, whose own KL is replaced.
    """

    def arguments(view: View, left: dict[str, Any]) -> dict[str, Any]:
        """Return the left side's arguments with a penalty in the rewards, and without a KL."""
        changed = dict(left)
        weight = changed.pop("beta", 0.0) if beta is None else beta
        log_ratio = view.old_logps - view.ref_logps
        if estimate == "averaged":
            per_token = torch.expm1(log_ratio) - log_ratio
            penalty = (per_token * view.mask).sum(1) / view.lengths.squeeze(1)  # (B,)
        else:
            penalty = (log_ratio * view.mask).sum(1)
        changed["rewards"] = left["rewards"] - weight * penalty
        # the book's function refuses arguments that it does not read: without a KL, those of the KL
        unread = ["ref_logps", "kl_estimator"]
        is_ppo = "values" in left  # whose ratio reads old_logps; the other rows here have no ratio
        if not is_ppo:
            unread.append("old_logps")
        for name in unread:
            changed.pop(name, None)
        return changed

    if estimate == "averaged":
        says = "rewards lose beta times the mean of exp(l) - 1 - l, with l = log pi - log pi_ref"
    else:
        says = f"rewards lose {beta} times the sum of log pi - log pi_ref"
    return Identity("KL", says, arguments=arguments)


def vocabulary(top_k: int | None = None) -> Identity:
    """Sum the divergence over the vocabulary; with `top_k` all unlikelier tokens count as one."""

    def apply(terms: Terms) -> None:
        terms.surrogate = terms.token_weight * terms.view.slope(top_k)

    says = "the derivative in a logit is p (l - sum of p l), l = log p - log q"
    if top_k is not None:
        says = f"all but the {top_k} likeliest tokens share one l = log p - log q, of their sums"
    return Identity("vocabulary", says, apply)


NO_BASELINE = Identity(
    "baseline",
    "the advantage is the reward itself",
    arguments=lambda _, old: old | {"baseline": "none"},
)

AT_TEMPERATURE = Identity(
    "temperature", "take log-probabilities from logits / temperature", temperature=True
)


def _micro(term: str, says: str, change: Callable[[Micro, Tensor, int], Tensor]) -> Identity:
    """Return an identity that changes the derivative of each micro-batch.

    `change` takes the micro-batch, its weights (the derivative in its outputs, (R, S)) and the
    number of micro-batches, and returns the new weights.
    """

    def apply(terms: PairTerms) -> None:
        parts = terms.view.micro
        terms.weights = [
            change(part, weight, len(parts))
            for part, weight in zip(parts, terms.weights, strict=True)
        ]

    return Identity(term, says, apply)


def _of_pairs(part: Micro, factor: Tensor) -> Tensor:
    """Return for each completion, (R, 1), the factor of its pair, of which there are (R / 2, 1)."""
    scale = torch.ones_like(part.lengths)
    scale[part.chosen] = scale[~part.chosen] = factor
    return scale


def cdpo_to(loss: str, beta: float, smoothing: float) -> Identity:
    """Turn cDPO's derivative in the margin m into that of another loss.

    Args:
        loss: "dpo", or "robust": there the loss of the flipped label is subtracted, and the whole
            divided by 1 - 2e.
        beta: of all these losses.
        smoothing: e, the share of flipped labels.
    """
    says = {
        "dpo": "s(-m) / ((1 - e) s(-m) - e s(m)), m = beta (d_c - d_r), s = sigmoid",
        "robust": "(k + f) / ((k - f) (1 - 2e)), k = (1 - e) s(-m), f = e s(m)",
    }

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        margins = part.margins(beta)
        of_label = torch.sigmoid(-margins)  # minus the derivative of -log sigmoid(m)
        of_flipped_label = torch.sigmoid(margins)  # the derivative of -log sigmoid(-m)
        kept = (1 - smoothing) * of_label
        flipped = smoothing * of_flipped_label
        new = {"dpo": of_label, "robust": (kept + flipped) / (1 - 2 * smoothing)}
        return weights * _of_pairs(part, new[loss] / (kept - flipped))

    return _micro("label smoothing", f"multiply each pair by {says[loss]}", change)


def averaged_ipo(beta: float) -> Identity:
    """Turn IPO on sums of log-probabilities into IPO on their means."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        target = 1 / (2 * beta)
        factor = (part.margins(1.0, mean=True) - target) / (part.margins(1.0) - target)
        return weights * _of_pairs(part, factor) / part.lengths

    says = "multiply each completion by (m_mean - 1/(2 beta)) / (m_sum - 1/(2 beta)) / L_i"
    return _micro("length", says, change)


def simpo_margin(beta: float, left: float, right: float) -> Identity:
    """Replace `left`, the margin over beta that SimPO subtracts, by `right`."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        means = (part.outputs * part.mask).sum(1, keepdim=True) / part.lengths
        gap = means[part.chosen] - means[~part.chosen]
        factor = torch.sigmoid(beta * (right - gap)) / torch.sigmoid(beta * (left - gap))
        return weights * _of_pairs(part, factor)

    return _micro("margin", f"the margin over beta is {right:g}, not {left:g}", change)


def plus_chosen_nll(weight: float) -> Identity:
    """Add the negative log-likelihood of the chosen, averaged over their tokens."""

    def change(part: Micro, weights: Tensor, count: int) -> Tensor:
        tokens = part.mask * part.chosen.unsqueeze(1)
        return weights - weight * tokens / tokens.sum() / count

    return _micro("likelihood", f"add {weight:g} times the chosen's mean -log p per token", change)


def _nll_of_everything(part: Micro, weights: Tensor, count: int) -> Tensor:
    chosen = part.chosen.unsqueeze(1)
    text = part.text * chosen
    mean = part.mask * chosen / part.lengths / chosen.sum()
    return weights + (mean - text / text.sum()) / count


ORPO_NLL_OF_EVERYTHING = _micro(
    "likelihood",
    "-log p is one mean over all tokens of the chosen texts, prompts included, not a mean per "
    "response",
    _nll_of_everything,
)


def _class_share(part: Micro) -> Tensor:
    """Return the share of the batch that each completion's class has, (R, 1)."""
    chosen_share = part.chosen.double().mean()
    return torch.where(part.chosen.unsqueeze(1), chosen_share, 1 - chosen_share)


def kto_one_mean(weight: float = 1.0) -> Identity:
    """Take one mean over all examples where the code adds the means of the two classes."""
    times = "" if weight == 1 else f"{weight:g} times "
    says = f"multiply each class by {times}its share of the batch"
    return _micro("normalizer", says, lambda part, w, _: w * weight * _class_share(part))


TWO_CLASS_MEANS = _micro(
    "normalizer",
    "divide each class by its share of the batch",
    lambda part, w, _: w / _class_share(part),
)

TOKENS_OF_THE_BATCH = _micro(
    "normalizer",
    "weigh each token by 1/(tokens of the micro-batch)",
    lambda part, w, _: w * part.lengths * len(part.lengths) / part.mask.sum(),
)


def _of_the_window(terms: PairTerms) -> None:
    tokens = [part.mask.sum() for part in terms.view.micro]
    pairs = zip(tokens, terms.weights, strict=True)
    terms.weights = [w * len(tokens) * count / sum(tokens) for count, w in pairs]


TOKENS_OF_THE_WINDOW = Identity(
    "normalizer", "weigh each token by 1/(tokens of the window)", _of_the_window
)
