"""Identities: what to change in one side's gradient so that it becomes the other's.

Every loss here has a gradient sum_{i,t} w_{i,t} grad y_{i,t}, y being log-probabilities of tokens
or scores; the two sides differ in w. Each identity is one change of w in closed form, worked out
from the two equations and not by calling the other side. Applied one after the other they must
bring the gradients together: the residual that is left is printed, and one alone shows how much
its term of the equation matters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_trl.compare.pairs import Micro, PairView
from rlhf_trl.compare.policy import GROUP, View


@dataclass
class Terms:
    """The derivative of a loss in log-probabilities, taken apart.

    Attributes:
        view: the window.
        surrogate: (B, T) the part of the policy gradient.
        kl: (B, T) the part of beta * KL.
        norm: (B, 1) the weight that the aggregation gives to a token.
        beta: the weight of the KL.
    """

    view: View
    surrogate: Tensor
    kl: Tensor
    norm: Tensor
    beta: float


@dataclass
class PairTerms:
    """The derivative of a loss in what a model puts out, per micro-batch.

    Attributes:
        view: the window.
        weights: (R, S) each.
    """

    view: PairView
    weights: list[Tensor]


@dataclass(frozen=True)
class Identity:
    """One change.

    Attributes:
        term: the term of the equation that differs.
        says: what to do, in words and symbols.
        apply: changes a `Terms` or `PairTerms` in place; None where only arguments or the
            temperature change.
        arguments: changes what the left side's function is given, before it is called.
        temperature: log-probabilities are taken at the trainer's temperature.
    """

    term: str
    says: str
    apply: Callable[[Any], None] | None = None
    arguments: Callable[[View, dict[str, Any]], dict[str, Any]] | None = None
    temperature: bool = False


_NORMS = {
    "sequence_sum": "1/B",
    "sequence_mean": "1/(B L_i)",
    "fixed_length": "1/(B L_max)",
    "token_mean": "1/(tokens of the window)",
    "token_mean_micro_batch": "1/(micro-batches x tokens of the micro-batch)",
    "token_mean_trl": "1/(tokens of the generation x accumulation / steps_per_generation)",
}


def normaliser(left: str, right: str) -> Identity:
    """Exchange the aggregation; L_i is the length of completion i, B the number of completions."""

    def apply(terms: Terms) -> None:
        factor = terms.view.norm(right) / terms.view.norm(left)
        terms.surrogate, terms.kl = terms.surrogate * factor, terms.kl * factor
        terms.norm = terms.norm * factor

    return Identity("normaliser", f"weigh each token by {_NORMS[right]}, not {_NORMS[left]}", apply)


def std_epsilon(left: float, right: float) -> Identity:
    """Exchange the constant that is added to the standard deviation s of a group's rewards."""

    def apply(terms: Terms) -> None:
        spread = terms.view.group_std
        terms.surrogate = terms.surrogate * (spread + left) / (spread + right)

    return Identity(
        "standard deviation",
        f"multiply advantages by (s + {left:g}) / (s + {right:g})",
        apply,
    )


def standardised(epsilon: float = 1e-4) -> Identity:
    """Divide centred rewards by their standard deviation."""

    def apply(terms: Terms) -> None:
        terms.surrogate = terms.surrogate / (terms.view.group_std + epsilon)

    return Identity("advantage", f"divide advantages by s + {epsilon:g}", apply)


def _kl(slope: Callable[[View], Tensor], says: str) -> Identity:
    def apply(terms: Terms) -> None:
        terms.kl = terms.beta * terms.norm * slope(terms.view) * terms.view.mask

    return Identity("KL", says, apply)


def code_k3() -> Identity:
    """Give the KL of the loss the code's sign: l = log pi - log pi_ref, k3 = exp(l) - 1 - l."""
    return _kl(
        lambda view: torch.expm1(view.logps - view.ref_logps),
        "the KL's derivative is exp(l) - 1, not 1 - exp(-l), with l = log pi - log pi_ref",
    )


def _chapter_k3(view: View) -> tuple[Tensor, Tensor]:
    log_ratio = view.logps - view.ref_logps
    return torch.expm1(-log_ratio) + log_ratio, -torch.expm1(-log_ratio)


def chapter_k3(wrong: str) -> Identity:
    """Put k3 in the place of another estimator."""
    return _kl(
        lambda view: _chapter_k3(view)[1],
        f"the KL's derivative is 1 - exp(-l), not {wrong}, with l = log pi - log pi_ref",
    )


def bias_corrected_k3() -> Identity:
    """Multiply k3 by the likelihood ratio, which is differentiated too."""

    def slope(view: View) -> Tensor:
        value, derivative = _chapter_k3(view)
        return view.ratio * (value + derivative)

    return _kl(slope, "k3 is multiplied by rho: its derivative becomes rho (k3 + dk3)")


def weight_bound(low: float | None, high: float, new_high: float) -> Identity:
    """Exchange the bounds of CISPO's weights; None: no lower bound."""

    def apply(terms: Terms) -> None:
        ratio = terms.view.ratio
        terms.surrogate = terms.surrogate * ratio.clamp(max=new_high) / ratio.clamp(low, high)

    return Identity(
        "bounds of the weight",
        f"the weight is min(rho, {new_high:g}), not clip(rho, {low:g}, {high:g})",
        apply,
    )


def factor(value: float, says: str) -> Identity:
    """Multiply the whole gradient by a number."""

    def apply(terms: Terms) -> None:
        terms.surrogate, terms.kl = terms.surrogate * value, terms.kl * value
        terms.norm = terms.norm * value

    return Identity("scale", says, apply)


def _kept(ratio: Tensor, surrogate: Tensor) -> Tensor:
    # a surrogate's derivative is -A times something positive
    outside = torch.where(surrogate < 0, ratio > 1.2, ratio < 0.8)
    return (~outside).to(ratio)


def clipped_token_ratio() -> Identity:
    """Weigh each token by its likelihood ratio, 0 where PPO's clip is active."""

    def apply(terms: Terms) -> None:
        ratio = terms.view.ratio
        terms.surrogate = terms.surrogate * ratio * _kept(ratio, terms.surrogate)

    return Identity("ratio", "multiply each token by rho, or 0 where the clip holds", apply)


def clipped_whole_ratio() -> Identity:
    """Weigh each completion by the ratio of its whole probability, 0 where the clip is active."""

    def apply(terms: Terms) -> None:
        view = terms.view
        whole = ((view.logps - view.old_logps) * view.mask).sum(1, keepdim=True).exp()
        terms.surrogate = terms.surrogate * whole * _kept(whole, terms.surrogate)

    return Identity(
        "ratio",
        "multiply each completion by the product of its rho, or 0 where the clip holds",
        apply,
    )


def kl_in_reward(estimate: str, beta: float | None = None) -> Identity:
    """Take a KL from the rewards by hand: "averaged" code-signed k3, or "summed" k1."""

    def arguments(view: View, given: dict[str, Any]) -> dict[str, Any]:
        weight = given.pop("beta", 0.0) if beta is None else beta
        unread = ["ref_logps", "kl_estimator"]
        unread += [] if "values" in given else ["old_logps"]  # PPO's ratio still reads it
        for name in unread:
            given.pop(name, None)
        log_ratio = view.old_logps - view.ref_logps
        if estimate == "averaged":
            per_token = torch.expm1(log_ratio) - log_ratio
            penalty = (per_token * view.mask).sum(1) / view.lengths.squeeze(1)
        else:
            penalty = (log_ratio * view.mask).sum(1)
        return given | {"rewards": given["rewards"] - weight * penalty}

    if estimate == "averaged":
        says = "rewards lose beta times the mean of exp(l) - 1 - l, with l = log pi - log pi_ref"
    else:
        says = f"rewards lose {beta} times the sum of log pi - log pi_ref"
    return Identity("KL", says, arguments=arguments)


def no_baseline() -> Identity:
    """Leave the rewards as they are."""
    return Identity(
        "baseline",
        "the advantage is the reward itself",
        arguments=lambda view, given: given | {"baseline": "none"},
    )


def at_temperature() -> Identity:
    """Take every log-probability from logits divided by the temperature."""
    return Identity(
        "temperature", "take log-probabilities from logits / temperature", temperature=True
    )


GROUP_FACTOR = GROUP / (GROUP - 1)
"""K/(K-1) of the leave-one-out baseline."""


# --- pairs ---------------------------------------------------------------------------------------


def _micro(term: str, says: str, change: Callable[[Micro, Tensor, int], Tensor]) -> Identity:
    def apply(terms: PairTerms) -> None:
        parts = terms.view.micro
        terms.weights = [
            change(part, weight, len(parts))
            for part, weight in zip(parts, terms.weights, strict=True)
        ]

    return Identity(term, says, apply)


def _by_pair(term: str, says: str, factor: Callable[[Micro], Tensor]) -> Identity:
    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        scale = torch.ones_like(part.lengths)
        scale[part.chosen] = scale[~part.chosen] = factor(part)
        return weights * scale

    return _micro(term, says, change)


def without_smoothing(beta: float, smoothing: float) -> Identity:
    """Turn cDPO's slope in m = beta (d_c - d_r) into DPO's."""

    def factor(part: Micro) -> Tensor:
        up, down = torch.sigmoid(-part.margins(beta)), torch.sigmoid(part.margins(beta))
        return up / ((1 - smoothing) * up - smoothing * down)

    return _by_pair(
        "label smoothing",
        "multiply each pair by s(-m) / ((1 - e) s(-m) - e s(m)), m = beta (d_c - d_r), s = sigmoid",
        factor,
    )


def robust(beta: float, smoothing: float) -> Identity:
    """Turn cDPO's slope into that of robust DPO, which subtracts the flipped loss."""

    def factor(part: Micro) -> Tensor:
        kept = (1 - smoothing) * torch.sigmoid(-part.margins(beta))
        flipped = smoothing * torch.sigmoid(part.margins(beta))
        return (kept + flipped) / (kept - flipped) / (1 - 2 * smoothing)

    return _by_pair(
        "label smoothing",
        "multiply each pair by (k + f) / ((k - f) (1 - 2e)), k = (1 - e) s(-m), f = e s(m)",
        factor,
    )


def averaged_ipo(beta: float) -> Identity:
    """Turn IPO on sums of log-probabilities into IPO on their means."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        target = 1 / (2 * beta)
        pair = (part.margins(1.0, mean=True) - target) / (part.margins(1.0) - target)
        scale = torch.ones_like(part.lengths)
        scale[part.chosen] = scale[~part.chosen] = pair
        return weights * scale / part.lengths

    return _micro(
        "length",
        "multiply each completion by (m_mean - 1/(2 beta)) / (m_sum - 1/(2 beta)) / L_i",
        change,
    )


def simpo_margin(beta: float, left: float, right: float) -> Identity:
    """Exchange the margin over beta that SimPO subtracts."""

    def factor(part: Micro) -> Tensor:
        mean = (part.outputs * part.mask).sum(1, keepdim=True) / part.lengths
        ahead = mean[part.chosen] - mean[~part.chosen]
        return torch.sigmoid(beta * (right - ahead)) / torch.sigmoid(beta * (left - ahead))

    return _by_pair("margin", f"the margin over beta is {right:g}, not {left:g}", factor)


def plus_chosen_nll(weight: float) -> Identity:
    """Add the negative log-likelihood of the chosen, averaged over their tokens."""

    def change(part: Micro, weights: Tensor, count: int) -> Tensor:
        tokens = part.mask * part.chosen.unsqueeze(1)
        return weights - weight * tokens / tokens.sum() / count

    return _micro("likelihood", f"add {weight:g} times the chosen's mean -log p per token", change)


def orpo_nll_of_everything() -> Identity:
    """Let ORPO's likelihood term cover prompts, with one mean over all tokens."""

    def change(part: Micro, weights: Tensor, count: int) -> Tensor:
        chosen = part.chosen.unsqueeze(1)
        pairs = chosen.sum()
        text = part.text * chosen
        return weights + (part.mask * chosen / part.lengths / pairs - text / text.sum()) / count

    return _micro(
        "likelihood",
        "-log p is one mean over all tokens of the chosen texts, prompts included, not a mean per "
        "response",
        change,
    )


def kto_one_mean(weight: float = 1.0) -> Identity:
    """Take one mean over all examples where the code adds the means of the two classes."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        wanted = part.chosen.double().mean()
        share = torch.where(part.chosen.unsqueeze(1), wanted, 1 - wanted)
        return weights * weight * share

    return _micro(
        "normaliser", f"multiply each class by {weight:g} times its share of the batch", change
    )


def two_class_means() -> Identity:
    """Add the means of the two classes where the paper takes one mean over all examples."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        wanted = part.chosen.double().mean()
        return weights / torch.where(part.chosen.unsqueeze(1), wanted, 1 - wanted)

    return _micro("normaliser", "divide each class by its share of the batch", change)


def tokens_of_the_batch() -> Identity:
    """Take one mean over all completion tokens where each completion has its own."""

    def change(part: Micro, weights: Tensor, _: int) -> Tensor:
        return weights * part.lengths * len(part.lengths) / part.mask.sum()

    return _micro("normaliser", "weigh each token by 1/(tokens of the micro-batch)", change)


def tokens_of_the_window() -> Identity:
    """Take one mean over the tokens of the window where each micro-batch has its own."""

    def apply(terms: PairTerms) -> None:
        parts = terms.view.micro
        tokens = [part.mask.sum() for part in parts]
        pairs = zip(tokens, terms.weights, strict=True)
        terms.weights = [w * len(parts) * count / sum(tokens) for count, w in pairs]

    return Identity("normaliser", "weigh each token by 1/(tokens of the window)", apply)
