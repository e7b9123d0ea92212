"""Direct alignment (chapter 8): one row per algorithm, its parts by name.

A row reads a reference unless it says otherwise. `code` and `trl` say what they change in their own
algorithm's `chapter`, and nothing else. Chapters of DPO's kind say what they change in a base.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_trl.algorithms.formulations import Algorithm, Preference

ROWS: dict[str, Algorithm] = {}
"""The rows of this family, in the order in which they are shown."""

_SUMS = "The loss is the same; its training script adds up log-probabilities in the model's dtype."


def _two_loss_weights(values: Mapping[str, Any]) -> list[float]:
    """[2 (1 - label_smoothing), -(1 - 2 label_smoothing)]"""
    return [2 * (1 - values["label_smoothing"]), -(1 - 2 * values["label_smoothing"])]


def _larger_by_1(row: Preference) -> Preference:
    """Return a row of APO as TRL computes it."""
    return replace(
        row,
        constants={"offset": 1.0},
        trl=True,
        trainer_reads={},
        differs="The loss is larger by 1, which no gradient sees.",
    )


def _simpo_gamma(values: Mapping[str, Any]) -> float:
    """beta * gamma_beta_ratio"""
    return values["beta"] * values["gamma_beta_ratio"]


_OF_PAIRS = Preference(
    loss="dpo",
    logps="sum",
    reads={"beta": 0.1},
    trl=True,
    trainer_reads={"nll_weight": 0.0},
)
"""What the rows of DPO's kind have in common."""

_DPO = replace(
    _OF_PAIRS,
    settings={"loss_type": ["sigmoid"]},
    differs="beta is how strongly the policy is held to the reference.",
)
ROWS["dpo"] = Algorithm(
    name="dpo",
    title="DPO",
    source="chapter 8, eq:dpo_core",
    paper="arXiv:2305.18290",
    chapter=_DPO,
    code=replace(_DPO, differs=_SUMS),
    trl=replace(_DPO, trainer_reads={}, differs="Nothing."),
)

_CDPO = replace(
    _OF_PAIRS,
    loss="cdpo",
    reads={"beta": 0.1, "label_smoothing": 0.1},
    settings={"loss_type": ["sigmoid", "robust"], "loss_weights": _two_loss_weights},
    differs="This is the paper's equation; label_smoothing is the share of flipped labels.",
)
ROWS["cdpo"] = Algorithm(
    name="cdpo",
    title="cDPO",
    source="chapter 8 prints no equation",
    paper="Mitchell 2023, ericmitchell.ai/cdpo.pdf",
    chapter=_CDPO,
    code=replace(_CDPO, differs=_SUMS + " It fixes label_smoothing at 0.1."),
    trl=replace(
        _CDPO,
        trainer_reads={},
        differs="Nothing, with two losses that add up to this one.",
    ),
)

_IPO = replace(
    _OF_PAIRS,
    loss="ipo",
    settings={"loss_type": ["ipo"]},
    trl="TRL averages the log-probabilities over the tokens of a completion",
    differs="This is the paper's equation on summed log-probabilities; beta is its tau.",
)
ROWS["ipo"] = Algorithm(
    name="ipo",
    title="IPO",
    source="chapter 8 prints no equation",
    paper="arXiv:2310.12036",
    chapter=_IPO,
    code=replace(_IPO, differs=_SUMS),
    trl=replace(
        _IPO,
        logps="mean",
        trl=True,
        trainer_reads={},
        differs="Log-probabilities are averaged over the tokens of a completion, not summed.",
    ),
)

_SIMPO = Preference(
    loss="simpo",
    logps="mean",
    reference=False,
    reads={"beta": 2.0, "gamma_beta_ratio": 0.5},
    trainer="CPOTrainer",
    settings={"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": _simpo_gamma},
    trl=True,
    trainer_reads={"nll_weight": 0.0},
    differs="The paper's margin gamma is beta * gamma_beta_ratio, and so is TRL's simpo_gamma.",
)
ROWS["simpo"] = Algorithm(
    name="simpo",
    title="SimPO",
    source="chapter 8 prints no equation",
    paper="arXiv:2405.14734",
    chapter=_SIMPO,
    code=replace(_SIMPO, differs=_SUMS + " Its config calls the ratio gamma."),
    trl="CPOTrainer is not the trainer that the recipe builds on; compare shows it",
)

_ORPO = Preference(
    loss="orpo",
    logps="mean",
    reference=False,
    reads={"beta": 0.1},
    trainer="ORPOTrainer",
    trl="TRL's likelihood of the chosen text covers the prompt and weighs all its tokens alike",
    differs="This is the paper's equation; chosen_nll is the response's mean, beta is its lambda.",
)
ROWS["orpo"] = Algorithm(
    name="orpo",
    title="ORPO",
    source="chapter 8 prints no equation",
    paper="arXiv:2403.07691",
    chapter=_ORPO,
    code=replace(
        _ORPO,
        constants={"max_logp": -1e-6},
        differs="Mean log-probabilities are held at -1e-6 at most, so that odds are finite.",
    ),
    trl=replace(
        _ORPO,
        trl=True,
        differs="chosen_nll is the mean over all tokens of the chosen texts, prompts included.",
    ),
)

_KTO = Preference(
    loss="kto",
    logps="sum",
    reads={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    trainer="KTOTrainer",
    settings={"loss_type": "kto"},
    trl=True,
    differs="This is the paper's equation: one mean over all examples, wanted or not.",
)
ROWS["kto"] = Algorithm(
    name="kto",
    title="KTO",
    source="chapter 8 prints no equation",
    paper="arXiv:2402.01306",
    chapter=_KTO,
    code=replace(
        _KTO,
        constants={"class_means": True},
        reference_point="rejected",
        trl=(
            "TRL takes one mean over both classes (twice the weights agree where there are as "
            "many of each) and z from mismatched pairs"
        ),
        differs=(
            "The sum of the mean over the chosen and the mean over the rejected; z is from the "
            "rejected completions of the micro-batch, each with its own prompt."
        ),
    ),
    trl=replace(
        _KTO,
        differs=(
            "Nothing; its z pairs each prompt with its neighbor's completion in the batch of a "
            "device."
        ),
    ),
)

_DPO_NORM = replace(
    _OF_PAIRS,
    logps="mean",
    reads={"beta": 2.0},
    settings={"loss_type": ["sigmoid_norm"]},
    differs="This is the paper's equation: DPO on mean log-probabilities.",
)
ROWS["dpo_norm"] = Algorithm(
    name="dpo_norm",
    title="DPO-Norm",
    source="chapter 8 prints no equation",
    paper="arXiv:2411.15124",
    chapter=_DPO_NORM,
    code=replace(_DPO_NORM, differs=_SUMS),
    trl=replace(_DPO_NORM, trainer_reads={}, differs="Nothing."),
)

_APO_ZERO = replace(
    _OF_PAIRS,
    loss="apo_zero",
    settings={"loss_type": ["apo_zero"]},
    trl="TRL's loss is larger by 1, with the same gradient",
    differs="This is the paper's equation.",
)
ROWS["apo_zero"] = Algorithm(
    name="apo_zero",
    title="APO-zero",
    source="chapter 8 prints no equation",
    paper="arXiv:2408.06266",
    chapter=_APO_ZERO,
    code=replace(_APO_ZERO, differs=_SUMS),
    trl=_larger_by_1(_APO_ZERO),
)

_APO_DOWN = replace(
    _OF_PAIRS,
    loss="apo_down",
    settings={"loss_type": ["apo_down"]},
    trl="TRL's loss is larger by 1, with the same gradient",
    differs="This is the paper's equation.",
)
ROWS["apo_down"] = Algorithm(
    name="apo_down",
    title="APO-down",
    source="chapter 8 prints no equation",
    paper="arXiv:2408.06266",
    chapter=_APO_DOWN,
    code=replace(_APO_DOWN, differs=_SUMS),
    trl=_larger_by_1(_APO_DOWN),
)
