"""What differs between the updates of a launch and of its reference, and what explains it.

Nothing is guessed: the first SGD step is fitted by the gradients of every rank's every micro-batch,
and a fault is named where the coefficients are those that it makes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_trl.compare.measure import fit
from rlhf_trl.compare.windows.policy import CRITIC

Weights = Mapping[str, Tensor]  # by name, in float32
TOLERANCES = {"no": 1e-4, "bf16": 0.1, "fp16": 0.1}
"""Largest relative difference that is the same: DeepSpeed holds bf16 weights, DDP autocasts."""

NOISE = 1e-9  # of squared gradients, which are the same up to float32's rounding
UNFITTED = 0.05  # share of a change up to which its fit says anything
POLICY, VALUE_MODEL, MODEL = "policy", "value model", "model"


@dataclass(frozen=True)
class Difference:
    """How far two changes of one part of the weights are apart."""

    part: str  # policy, value model, or model where there is no other
    apart: float  # norm of the difference / norm of the reference's change
    ratio: float  # of the launch's change to the reference's, along the latter
    cosine: float
    worst: str  # the parameter whose changes differ most
    verdict: str  # same, scaled or different

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.verdict == "same" and self.cosine == 0:
            return "same, since neither moves it"
        return f"scaled by {self.ratio:.3g}" if self.verdict == "scaled" else self.verdict


def parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of parameters by part: policy and value model, or the whole model."""
    critic = [name for name in names if CRITIC in name]
    if not critic:
        return {MODEL: list(names)}
    return {POLICY: [name for name in names if CRITIC not in name], VALUE_MODEL: critic}


def flat(weights: Weights, names: Sequence[str]) -> Tensor:
    """Return (N,) some parameters, flattened, in float64."""
    return torch.cat([weights[name].double().flatten() for name in names])


def compare(
    launched: Weights, reference: Weights, weights: Weights, tolerance: float
) -> list[Difference]:
    """Compare two changes of the weights, part by part.

    Args:
        launched: by the launch.
        reference: by the reference.
        weights: what was changed, whose rounding limits what can be told; {}: no rounding.
        tolerance: up to which relative difference changes are the same.
    """
    differences = []
    for part, names in parts([*reference]).items():
        ours, theirs = flat(launched, names), flat(reference, names)
        size = float(theirs.norm())
        gap = float((ours - theirs).norm())
        apart = gap / size if size else float(gap > 0)
        ratio = float(ours @ theirs) / size**2 if size else 1.0
        limit = tolerance
        if weights and size:
            limit = max(limit, 2**-23 * float(flat(weights, names).norm()) / size)
        off_line = float((ours - ratio * theirs).norm())
        verdict = "different"
        if apart <= limit:
            verdict = "same"
        elif off_line <= 3 * limit * float(ours.norm()):
            verdict = "scaled"
        cosine = float(torch.cosine_similarity(ours, theirs, dim=0))
        gaps = {name: float((launched[name] - reference[name]).norm()) for name in names}
        worst = max(gaps, key=lambda name: gaps[name])
        differences.append(Difference(part, apart, ratio, cosine, worst, verdict))
    return differences


class Fit(NamedTuple):
    """How a launch weighs each rank's micro-batches, relative to the reference."""

    ratios: Tensor  # (ranks, accumulation); 1: as the reference does
    unfitted: float  # share of the launch's change that no weights of micro-batches make
    foreign: float  # share of the reference's


def fitted(launched: Tensor, reference: Tensor, columns: Tensor) -> Fit:
    """Fit two gradients, (N,), by those of micro-batches, (N, ranks, accumulation)."""
    flat_columns = columns.flatten(1)
    ours, unfitted = fit(flat_columns, launched, NOISE)
    theirs, foreign = fit(flat_columns, reference, NOISE)
    contribution = flat_columns.norm(dim=0) * theirs.abs()
    is_seen = contribution > 1e-3 * contribution.max().clamp(min=1e-30)
    # what the reference itself does not see, such as a batch without gradient, tells nothing
    ratios = torch.where(is_seen, ours / torch.where(is_seen, theirs, torch.ones_like(theirs)), 1.0)
    return Fit(ratios.view(columns.shape[1:]), unfitted, foreign)


@dataclass(frozen=True)
class Step:
    """The first SGD step of a part of the weights, in a launch and in its reference."""

    launched: Tensor  # (N,) the gradient with which it stepped
    reference: Tensor  # (N,)
    columns: Tensor  # (N, ranks, accumulation) gradients of the micro-batches
    tokens: Tensor  # (ranks, accumulation) trained tokens of these
    norms: tuple[float | None, float | None]  # of both whole gradients before they were clipped
    clips_at: float  # to which norm; 0: they are not

    def explanation(self, part: str, is_whole: bool, tolerance: float) -> str | None:
        """Return what explains how the launch's step differs, or None where nothing does.

        `is_whole` says whether the part is the whole model, whose norm is clipped.
        """
        limit = max(30 * tolerance, 0.01)
        clipped = self._clipped_by_rank() if is_whole else None
        if clipped is not None:
            fit = fitted(self.launched, self.reference, self.columns)
            is_fitted = max(fit.unfitted, fit.foreign) <= UNFITTED
            differs = not _alike(fit.ratios, 1.0, limit)
            if is_fitted and differs and _alike(fit.ratios, clipped, limit):
                factors = ", ".join(f"{factor:.3g}" for factor in clipped.flatten())
                return f"each rank clips its own gradient: relative weights {factors}"
        factors = [self._clip_factor(norm) for norm in self.norms]
        unclipped = fitted(self.launched / factors[0], self.reference / factors[1], self.columns)
        return explain(unclipped, self.tokens, part, limit)

    def _clip_factor(self, norm: float | None) -> float:
        """Return what clipping multiplies a gradient of some norm by."""
        return min(1.0, self.clips_at / norm) if norm and self.clips_at else 1.0

    def _clipped_by_rank(self) -> Tensor | None:
        """Return the (ranks, 1) ratios to expect where each rank clips its own gradient."""
        _, norm = self.norms
        if not norm or not self.clips_at:
            return None
        weights, _ = fit(self.columns.flatten(1), self.reference, NOISE)
        factor = self._clip_factor(norm)
        shares = (self.columns.flatten(1) * weights / factor).view(self.columns.shape)
        of_ranks = self.columns.shape[1] * shares.sum(2)
        return (self.clips_at / of_ranks.norm(dim=0)).clamp(max=1.0)[:, None] / factor


def tokens_of(batch: Mapping[str, Any]) -> float:
    """Return how many tokens of a micro-batch are trained; 1 where its loss counts examples."""
    if "completion_ids" in batch and "completion_mask" in batch:
        return float(batch["completion_mask"].sum())
    if "labels" in batch and torch.is_tensor(batch["labels"]) and batch["labels"].dim() == 2:
        return float((batch["labels"][:, 1:] != -100).sum())
    return 1.0


def explain(fit: Fit, tokens: Tensor, part: str, limit: float) -> str | None:
    """Return what explains a fit, in a sentence, or None where all weights are 1.

    Args:
        fit: of the update.
        tokens: (ranks, accumulation) trained tokens of the micro-batches.
        part: of the model.
        limit: up to which ratios are alike.
    """
    ratios = fit.ratios
    ranks, accumulation = ratios.shape
    if fit.foreign > UNFITTED:
        return (
            f"the launch trains the {part} on other micro-batches than the reference, "
            f"{fit.foreign:.1%} of whose change they cannot make"
        )
    if fit.unfitted > UNFITTED:
        return (
            f"no weights of the {ranks} x {accumulation} micro-batches make this change of the "
            f"{part}: {fit.unfitted:.1%} of it is left"
        )
    if bool((ratios.abs() <= limit).all()):
        return f"the {part} is left out: it gets nothing of any micro-batch"
    if _alike(ratios, 1.0, limit):
        return None
    if bool((tokens != tokens[0, 0]).any()):
        of_ranks = tokens.sum(1, keepdim=True)
        ratios_by_normalizer = {
            "rank": of_ranks.mean() / of_ranks,
            "micro-batch": tokens.mean() / tokens,
        }
        for whose, expected in ratios_by_normalizer.items():
            if _alike(ratios, expected, limit):
                return f"local token counts: each {whose} divides by its own tokens"
    return _dropped(ratios, limit) or _scaled(ratios, limit) or _listed(ratios)


def _alike(ratios: Tensor, expected: Tensor | float, limit: float) -> bool:
    """Return whether ratios, (ranks, accumulation), are those expected, up to `limit`."""
    return bool(((ratios - expected).abs() <= limit * (1 + ratios.abs())).all())


def _dropped(ratios: Tensor, limit: float) -> str | None:
    """Name the micro-batches whose weight is 0."""
    is_dropped = ratios.abs() <= limit
    if not bool(is_dropped.any()):
        return None
    ranks, accumulation = ratios.shape
    rest = ratios[~is_dropped]
    weight = ""
    if bool(((rest - 1).abs() > limit).any()):
        weight = f"; the others count {_range(rest)} times"
    of_all_ranks, of_rank = is_dropped.all(0), is_dropped.all(1)
    if bool(of_rank.any()) and bool((is_dropped == of_rank[:, None]).all()):
        return f"rank {_numbers(of_rank)} is dropped{weight}"
    if bool((is_dropped == of_all_ranks).all()):
        which = _numbers(of_all_ranks, 1)
        return f"micro-batch {which} of {accumulation} is dropped on every rank{weight}"
    places = [
        f"micro-batch {_numbers(is_dropped[rank], 1)} of {accumulation} of rank {rank}"
        for rank in range(ranks)
        if bool(is_dropped[rank].any())
    ]
    return f"{' and '.join(places)} dropped{weight}"


def _scaled(ratios: Tensor, limit: float) -> str | None:
    """Name one weight of all micro-batches."""
    weight = float(ratios.mean())
    if not _alike(ratios, weight, limit):
        return None
    ranks, accumulation = ratios.shape
    for count, what in (
        (ranks, "ranks"),
        (accumulation, "micro-batches"),
        (ranks * accumulation, "micro-batches of all ranks"),
    ):
        if count > 1 and abs(weight * count - 1) <= 2 * limit:
            return f"averaged twice over the {count} {what}: every weight is {weight:.3g}"
        if count > 1 and abs(weight / count - 1) <= 2 * limit:
            return f"summed over the {count} {what}, not averaged: every weight is {weight:.3g}"
    return f"every micro-batch counts {weight:.3g} times"


def _listed(ratios: Tensor) -> str:
    rows = "; ".join(
        f"rank {rank}: " + ", ".join(f"{weight:.3g}" for weight in row.tolist())
        for rank, row in enumerate(ratios)
    )
    return f"micro-batches count otherwise: {rows}"


def _numbers(chosen: Tensor, first: int = 0) -> str:
    return ", ".join(str(int(place) + first) for place in chosen.nonzero().flatten())


def _range(weights: Tensor) -> str:
    low, high = float(weights.min()), float(weights.max())
    return f"{low:.3g}" if high - low < 0.01 * abs(high) else f"{low:.3g} to {high:.3g}"
