"""Identities: what to change in one side's gradient so that it becomes the other's.

Every loss here has a gradient sum_{i,t} w_{i,t} grad y_{i,t}, y being log-probabilities of tokens
or scores; the two sides differ in w. Each identity is one change of w in closed form, worked out
from the two equations and not by calling the other side. One after the other they must bring the
gradients together, up to the residual that is printed; one alone shows how much its term matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.compare.pairs import Micro, PairView
from rlhf_trl.compare.policy import View
from rlhf_trl.tiny.model import END


@dataclass
class Terms:
    """The derivative of a loss in log-probabilities, taken apart."""

    view: Any  # `View`, or `DistillationView`, whose derivative is that in logits, (B, T, V)
    surrogate: Tensor  # (B, T) the part of the policy gradient
    kl: Tensor  # (B, T) the part of beta * KL
    norm: Tensor  # (B, 1) the weight that the aggregation gives to a token
    beta: float  # the weight of the KL


@dataclass
class PairTerms:
    """The derivative of a loss in what a model puts out: weights (R, S) per micro-batch."""

    view: PairView
    weights: list[Tensor]


@dataclass(frozen=True)
class Identity:
    """One change: the term of the equation that differs, and what to do, in words and symbols."""

    term: str
    says: str
    # changes a `Terms` or `PairTerms` in place; None where only arguments or temperature change
    apply: Callable[[Any], None] | None = None
    # changes what the left side's function is given, before it is called
    arguments: Callable[[View, dict[str, Any]], dict[str, Any]] | None = None
    # log-probabilities are taken at the trainer's temperature
    temperature: bool = False


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
    """Exchange the aggregation; L_i is the length of completion i, B the number of completions."""

    def apply(terms: Terms) -> None:
        factor = terms.view.token_weight(right) / terms.view.token_weight(left)
        terms.surrogate, terms.kl = terms.surrogate * factor, terms.kl * factor
        terms.norm = terms.norm * factor

    return Identity("normalizer", f"weigh each token by {_NORMS[right]}, not {_NORMS[left]}", apply)


def _surrogate(term: str, says: str, change: Callable[[View, Tensor], Tensor]) -> Identity:
    """Change the part of the policy gradient, (B, T): `change` gets it behind the view."""

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

    The weight is w = pi_old / pi_sampler, as TRL's `vllm_importance_sampling_correction` has it.

    Args:
        mode: TRL's `vllm_importance_sampling_mode`: "token_" or "sequence_" for whose ratio it is,
            then "truncate" to clamp it to the bounds or "mask" to make it 0 outside of them.
        low: the lower bound.
        high: the upper bound.
    """
    of_completion, masks = mode.startswith("sequence"), mode.endswith("mask")

    def change(view: View, surrogate: Tensor) -> Tensor:
        log_ratio = view.sampler_log_ratio  # (B, T), 0 where the mask is 0
        weight = (log_ratio.sum(1, keepdim=True) if of_completion else log_ratio).exp()
        if masks:
            return surrogate * (weight * ((weight >= low) & (weight <= high)))
        return surrogate * weight.clamp(low, high)

    bounds = f"[{low:g}, {high:g}]"
    rule = f"w, or by 0 outside {bounds}" if masks else f"w, bounded to {bounds}"
    unit = "completion" if of_completion else "token"
    says = f"multiply each token by {rule}, w = pi_old / pi_sampler of the {unit}"
    return _surrogate("sampler", says, change)


def _kl(slope: Callable[[View], Tensor], says: str) -> Identity:
    def apply(terms: Terms) -> None:
        terms.kl = terms.beta * terms.norm * slope(terms.view) * terms.view.mask

    return Identity("KL", says, apply)


CODE_K3 = _kl(
    lambda view: torch.expm1(view.ref_log_ratio),
    "the KL's derivative is exp(l) - 1, not 1 - exp(-l), with l = log pi - log pi_ref",
)


def chapter_k3(wrong: str) -> Identity:
    """Put k3 in the place of another estimator."""
    return _kl(
        lambda view: -torch.expm1(-view.ref_log_ratio),
        f"the KL's derivative is 1 - exp(-l), not {wrong}, with l = log pi - log pi_ref",
    )


BIAS_CORRECTED_K3 = _kl(
    lambda view: view.ratio * view.ref_log_ratio,  # k3 + dk3 = l
    "k3 is multiplied by rho: its derivative becomes rho (k3 + dk3)",
)


def weight_bound(low: float, high: float, new_high: float) -> Identity:
    """Put an upper bound alone in the place of CISPO's two."""
    return _surrogate(
        "bounds of the weight",
        f"the weight is min(rho, {new_high:g}), not clip(rho, {low:g}, {high:g})",
        lambda view, old: old * view.ratio.clamp(max=new_high) / view.ratio.clamp(low, high),
    )


def _clipped(of_completion: bool) -> Callable[[View, Tensor], Tensor]:
    """Multiply by the ratio of tokens, or of whole completions, where the clip does not hold."""

    def change(view: View, old: Tensor) -> Tensor:
        log_ratio = (view.logps - view.old_logps) * view.mask
        ratio = (log_ratio.sum(1, keepdim=True) if of_completion else log_ratio).exp()
        # a surrogate's derivative is -A times something positive
        outside = torch.where(old < 0, ratio > 1.2, ratio < 0.8)
        return old * ratio * (~outside).to(ratio)

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
    """Take a KL from the rewards by hand.

    The rewards are those of the generation, so the KL is that of the policy which generated.

    Args:
        estimate: "averaged", the mean over a completion's tokens of k3 with the sign of the book's
            code, exp(l) - 1 - l with l = log pi - log pi_ref, or "summed", the sum of k1 = l.
        beta: its weight; None: the one among the left side's arguments.
    """

    def arguments(view: View, left: dict[str, Any]) -> dict[str, Any]:
        """Return the left side's arguments, the penalty in `rewards` and none that make a KL."""
        changed = dict(left)
        # with a weight of its own it belongs to rows whose left side has no `beta` to take out
        weight = changed.pop("beta", 0.0) if beta is None else beta
        log_ratio = view.old_logps - view.ref_logps
        if estimate == "averaged":
            per_token = torch.expm1(log_ratio) - log_ratio
            penalty = (per_token * view.mask).sum(1) / view.lengths.squeeze(1)
        else:
            penalty = (log_ratio * view.mask).sum(1)
        changed["rewards"] = left["rewards"] - weight * penalty
        # The book's function refuses arguments that it does not read, as these without a KL. Of the
        # rows with this identity PPO alone, which has values, still reads old_logps for its ratio.
        unread = ["ref_logps", "kl_estimator"]
        if "values" not in left:
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
    """Sum over the vocabulary in place of the sampled token, or put what is unlikely together."""

    def apply(terms: Terms) -> None:
        terms.surrogate = terms.norm * terms.view.slope(top_k)

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


# --- pairs ---------------------------------------------------------------------------------------


def _micro(term: str, says: str, change: Callable[[Micro, Tensor, int], Tensor]) -> Identity:
    """Change the weights of each micro-batch, (R, S); the number is how many there are."""

    def apply(terms: PairTerms) -> None:
        parts = terms.view.micro
        terms.weights = [
            change(part, weight, len(parts))
            for part, weight in zip(parts, terms.weights, strict=True)
        ]

    return Identity(term, says, apply)


def _of_pairs(part: Micro, factor: Tensor) -> Tensor:
    """Return a factor of each pair, (R / 2, 1), for both of its completions, (R, 1)."""
    scale = torch.ones_like(part.lengths)
    scale[part.chosen] = scale[~part.chosen] = factor
    return scale


def cdpo_to(loss: str, beta: float, smoothing: float) -> Identity:
    """Turn cDPO's slope in m into that of "dpo", or "robust", which subtracts the flipped loss."""
    says = {
        "dpo": "s(-m) / ((1 - e) s(-m) - e s(m)), m = beta (d_c - d_r), s = sigmoid",
        "robust": "(k + f) / ((k - f) (1 - 2e)), k = (1 - e) s(-m), f = e s(m)",
    }

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        right, wrong = (torch.sigmoid(sign * part.margins(beta)) for sign in (-1, 1))
        kept, flipped = (1 - smoothing) * right, smoothing * wrong
        new = {"dpo": right, "robust": (kept + flipped) / (1 - 2 * smoothing)}
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
    """Exchange the margin over beta that SimPO subtracts."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        mean = (part.outputs * part.mask).sum(1, keepdim=True) / part.lengths
        ahead = mean[part.chosen] - mean[~part.chosen]
        factor = torch.sigmoid(beta * (right - ahead)) / torch.sigmoid(beta * (left - ahead))
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
    wanted = part.chosen.double().mean()
    return torch.where(part.chosen.unsqueeze(1), wanted, 1 - wanted)


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
