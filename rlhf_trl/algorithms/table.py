"""The table: one row per algorithm, what it is made of, and what TRL computes with which settings.

A formulation names functions of `rlhf_trl.book` (a callable may stand in their place). `chapter` is
the equation as the book prints it, or the paper's where the book prints none; `code` is what the
book's published code computes; `trl` is the stock trainer with the settings that come closest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf_trl.algorithms.formulations import (
    FORMULATIONS,
    INACTIVE_AT_RATIO_1,
    REQUIRED,
    Algorithm,
    Distillation,
    Family,
    Formulation,
    PolicyGradient,
    Preference,
    RewardModel,
)
from rlhf_trl.errors import InputError, nearest

_CLIP = {"epsilon": 0.2, "epsilon_high": None}
_CLIP_HIGHER = {"epsilon": 0.2, "epsilon_high": 0.28}
_CLIP_WEIGHT = {"epsilon": 0.2, "epsilon_high": 0.4}
_GATE = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
_CORRECTION = {"importance_cap": None}
_KL1 = {"beta": 0.0, "kl_estimator": "k1"}
_KL3 = {"beta": 0.0, "kl_estimator": "k3"}
_LENGTH = {"max_completion_length": REQUIRED}
_PENALTY = {"missing_eos_penalty": None}
_STD_SAYS = " As in GRPO, 1e-4 is added to the standard deviation."


def _trl(loss_type: str, scale_rewards: str = "group", level: str = "token") -> dict[str, Any]:
    """Spell out the fields of GRPOConfig that decide its loss."""
    return {
        "loss_type": loss_type,
        "scale_rewards": scale_rewards,
        "importance_sampling_level": level,
        "multi_objective_aggregation": "sum_then_normalize",
        "use_bias_correction_kl": False,
    }


_REINFORCE = PolicyGradient(
    advantage="batch_mean_baseline",
    ratio="none",
    surrogate="log_prob_weighting",
    aggregation="sequence_sum",
    kl="reward",
    kl_penalty="summed_kl_penalty",
    reads={"baseline": "batch_mean", "baseline_value": None} | _CORRECTION | _KL1,
    settings=_trl("grpo", "none"),
    trl="TRL has no plain REINFORCE: it centers rewards in their group and refuses groups of one",
    trainer_reads={"baseline_decay": 0.9} | _PENALTY,
    differs="The chapter also lists a mean over the tokens; the derived equation sums, as here.",
)
_RLOO = replace(
    _REINFORCE,
    advantage="leave_one_out",
    reads=_CORRECTION | _KL1,
    trl="GRPOTrainer has neither the leave-one-out factor K/(K-1) nor the sum over tokens",
    trainer_reads=_PENALTY,
    differs="The sum over tokens is as derived; TRL's own RLOOTrainer agrees while on-policy.",
)
_PPO = PolicyGradient(
    advantage="gae",
    ratio="token_ratio",
    surrogate="clipped_ratio",
    aggregation="sequence_mean",
    kl="reward",
    kl_penalty="per_token_kl_penalty",
    value_loss="clipped_value_loss",
    reads=_CLIP | {"gamma": 1.0, "lam": 0.95, "cliprange_value": 0.2, "vf_coef": 0.1} | _KL1,
    settings=_trl("grpo", "none"),
    trl="TRL removed PPO and its value heads in 1.13",
    trainer_reads={"whiten_advantages": False} | _PENALTY,
    differs="The critic's loss joins the policy's under one mean; whitening is off by default.",
)
_GRPO = PolicyGradient(
    advantage="group_standardized",
    ratio="token_ratio",
    surrogate="clipped_ratio",
    aggregation="sequence_mean",
    kl="loss",
    reads=_CLIP | _KL3,
    constants={"std_epsilon": 1e-4},
    settings=_trl("grpo"),
    trl=True,
    trainer_reads=_PENALTY,
    differs="The printed equation divides by the bare standard deviation; its listing adds 1e-4.",
)
_DRGRPO = replace(
    _GRPO,
    advantage="group_centered",
    aggregation="fixed_length",
    reads=_CLIP | _KL3 | _LENGTH,
    constants={},
    settings=_trl("dr_grpo", "none"),
    differs="The length L_max is max_completion_length, a constant of the whole training.",
)
_GSPO = replace(
    _GRPO,
    ratio="sequence_ratio",
    settings=_trl("grpo", level="sequence"),
    differs="Clipping works on whole sequences, so useful bounds are far smaller than GRPO's."
    + _STD_SAYS,
)
_CISPO = replace(
    _GRPO,
    surrogate="clipped_importance_weight",
    aggregation="per_prompt",
    reads=_CLIP_WEIGHT | _KL3,
    settings=_trl("cispo"),
    trl="TRL bounds the weight from above only, and divides by the tokens of the window",
    trl_offset={"epsilon_high": 1.0},
    differs="Each prompt counts the same, and each token of its completions, as in the equation; "
    f"the chapter's summary of losses prints no normalizer.{_STD_SAYS}",
)
_CISPO_WINDOW = replace(
    _CISPO,
    aggregation="token_mean",
    window="window",
    trl="TRL bounds the weight from above only",
    differs="CISPO with one mean over all tokens of the accumulation window, as in DAPO."
    + _STD_SAYS,
)
_SAPO = replace(
    _GRPO,
    surrogate="soft_gate",
    reads=_GATE | _KL3,
    settings=_trl("sapo"),
    differs=f"The chapter prints no equation; this is the paper's.{_STD_SAYS}",
)
_DAPO = replace(
    _GRPO,
    aggregation="token_mean",
    window="window",
    kl="none",
    reads=_CLIP_HIGHER,
    settings=_trl("dapo"),
    trainer_reads={
        "correctness_reward": REQUIRED,
        "soft_punish_cache": 128,
        "dynamic_sampling_rounds": 8,
    }
    | _PENALTY,
    differs="TRL's window is the real one only if steps_per_generation is the accumulation."
    + _STD_SAYS,
)
_MAXRL = replace(
    _REINFORCE,
    advantage="maxrl",
    kl="none",
    kl_penalty="none",
    reads=_CORRECTION,
    trl="TRL divides centered rewards by their standard deviation, never by their mean",
    trainer_reads={"correctness_reward": REQUIRED, "format_reward": None},
    differs="The chapter prints no equation; this is the paper's, with whole-sequence scores.",
)

_CRITIC = {"gamma": 1.0, "lam": 0.98, "cliprange_value": 0.4, "vf_coef": 0.5}  # the code's
_CODE_KL = {"kl_sign": "code", "kl_penalty": "averaged_kl_penalty", "reads": _KL3}

# What the code and stock TRL change in every row that standardizes rewards in their group.
_CODE = {
    "kl_sign": "code",
    "constants": {"std_epsilon": 1e-8},
    "trl": "TRL adds 1e-4 to the standard deviation, and its KL has the right sign",
    "differs": "The KL has the other sign, and 1e-8 is added to the standard deviation, so that "
    "rounding alone can give a group of equal rewards advantages of about 1.",
}
_STOCK = {
    "constants": {"std_epsilon": 1e-4, "kl_estimator": "k3"},
    "trl": True,
    "trainer_reads": {},
    "differs": "Nothing.",
}
_BETA = {"beta": 0.0}


def _two_loss_weights(values: Mapping[str, Any]) -> list[float]:
    """[2 (1 - label_smoothing), -(1 - 2 label_smoothing)]"""
    return [2 * (1 - values["label_smoothing"]), -(1 - 2 * values["label_smoothing"])]


def _simpo_gamma(values: Mapping[str, Any]) -> float:
    """beta * gamma_beta_ratio"""
    return values["beta"] * values["gamma_beta_ratio"]


_DPO = Preference(
    loss="dpo",
    reads={"beta": 0.1},
    settings={"loss_type": ["sigmoid"]},
    trl=True,
    trainer_reads={"nll_weight": 0.0},
    differs="beta is how strongly the policy is held to the reference.",
)
_CDPO = replace(
    _DPO,
    loss="cdpo",
    reads={"beta": 0.1, "label_smoothing": 0.1},
    # TRL's sigmoid ignores label_smoothing; robust subtracts the flipped loss, and this sum adds it
    settings={"loss_type": ["sigmoid", "robust"], "loss_weights": _two_loss_weights},
    differs="This is the paper's equation; label_smoothing is the share of flipped labels.",
)
_IPO = replace(
    _DPO,
    loss="ipo",
    settings={"loss_type": ["ipo"]},
    trl="TRL averages the log-probabilities over the tokens of a completion",
    differs="This is the paper's equation on summed log-probabilities; beta is its tau.",
)
_DPO_NORM = replace(
    _DPO,
    logps="mean",
    reads={"beta": 2.0},
    settings={"loss_type": ["sigmoid_norm"]},
    differs="This is the paper's equation: DPO on mean log-probabilities.",
)
_SIMPO = Preference(
    loss="simpo",
    logps="mean",
    reference=False,
    reads={"beta": 2.0, "gamma_beta_ratio": 0.5},
    trainer="CPOTrainer",
    trainer_reads={"nll_weight": 0.0},
    settings={"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": _simpo_gamma},
    trl=True,
    differs="The paper's margin gamma is beta * gamma_beta_ratio, and so is TRL's simpo_gamma.",
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
_KTO = Preference(
    loss="kto",
    reads={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    trainer="KTOTrainer",
    settings={"loss_type": "kto"},
    trl=True,
    differs="This is the paper's equation: one mean over all examples, wanted or not.",
)
_APO_ZERO = replace(
    _DPO,
    loss="apo_zero",
    settings={"loss_type": ["apo_zero"]},
    trl="TRL's loss is larger by 1, with the same gradient",
    differs="This is the paper's equation.",
)
_APO_DOWN = replace(_APO_ZERO, loss="apo_down", settings={"loss_type": ["apo_down"]})
_ONE_MORE = {
    "constants": {"offset": 1.0},
    "trl": True,
    "trainer_reads": {},
    "differs": "The loss is larger by 1, which no gradient sees.",
}

_REWARD = RewardModel(
    loss="bradley_terry_margin",
    reads={"center_rewards_coefficient": None},
    trl=True,
    differs="Margin (Llama 2) and centering (arXiv:2312.09244) are off unless they are given.",
)
_ORM = RewardModel(
    loss="outcome",
    aggregation="sequence_mean",
    trl="TRL has no outcome reward model",
    differs="Each completion counts the same; the chapter also prints a loss of the mean logit.",
)
_PRM = RewardModel(
    loss="outcome",
    aggregation="sequence_sum",
    trl="TRL removed its PRMTrainer in 1.14",
    differs="Steps are right or wrong (0, 1), and a solution's steps are summed.",
)

_OPD = Distillation(
    loss="sampled_reverse_kl",
    aggregation="sequence_sum",
    trl="TRL compares the whole vocabulary, and averages over the tokens of the window",
    trainer_reads={"teacher_models": REQUIRED, "teacher_weights": None},
    differs="Its expected gradient at the visited states is that of the summed reverse KL.",
)


def _top_k(values: Mapping[str, Any]) -> int | None:
    """kl_top_k"""
    return values["kl_top_k"]


_TOP_K = {"reads": {"kl_top_k": 20}}
_SDPO = Distillation(
    loss="reverse_kl",
    aggregation="sequence_sum",
    reads={"kl_top_k": None},
    trainer="SDPOTrainer",
    trl="TRL averages over the tokens of each completion",
    trainer_reads={
        "correctness_reward": REQUIRED,
        "format_reward": None,
        "teacher": "live",
        "teacher_rate": 0.05,
        "demonstration": "random",
        "demonstration_template": "\n\nCorrect solution:\n\n{demonstration}\n\n"
        "Correctly solve the original question.",
        "dynamic_sampling_rounds": 100,
    },
    own_demonstrations=False,
    differs="This is the paper's equation, over the whole vocabulary unless kl_top_k is given. "
    "A demonstration is never the completion's own text.",
)

_ROWS = (
    Algorithm(
        *("reinforce", "REINFORCE", "chapter 6, eq:REINFORCE_with_baseline"),
        paper="Williams 1992, doi:10.1007/BF00992696",
        chapter=_REINFORCE,
        code=replace(
            _REINFORCE,
            advantage="raw",
            aggregation="sequence_mean",
            **_CODE_KL,
            trainer_reads=_PENALTY,
            differs="No baseline, and a mean over the tokens of a sequence instead of a sum.",
        ),
        trl="TRL has no plain REINFORCE: it centers rewards in groups and refuses groups of one",
    ),
    Algorithm(
        *("rloo", "RLOO", "chapter 6, eq:RLOO_baseline and eq:RLOO_advantage_alt"),
        paper="arXiv:2402.14740",
        nearest="reinforce",
        chapter=_RLOO,
        code=replace(
            _RLOO,
            aggregation="sequence_mean",
            **_CODE_KL,
            trl="GRPOTrainer's centered rewards lack the leave-one-out factor K/(K-1)",
            differs="A mean over the tokens of a sequence instead of a sum.",
        ),
        trl="RLOOTrainer is not the trainer that the recipe builds on; compare shows it",
    ),
    Algorithm(
        *("ppo", "PPO", "chapter 6, eq:PPO_EQN_EXPANDED and eq:GAE_DFN", "arXiv:1707.06347"),
        nearest="grpo",
        chapter=_PPO,
        code=replace(
            _PPO,
            **_CODE_KL | {"reads": _CLIP | _CRITIC | _KL3},
            trainer_reads=_PENALTY,
            differs="The KL is averaged over the completion and taken from the last reward.",
        ),
        trl="TRL removed PPO and its value heads in 1.13",
    ),
    Algorithm(
        *("grpo", "GRPO", "chapter 6, eq:GRPO_token and eq:GRPO_ADV", "arXiv:2402.03300"),
        chapter=_GRPO,
        code=replace(_GRPO, **_CODE),
        trl=replace(_GRPO, **_STOCK, reads=_CLIP | _BETA),
    ),
    Algorithm(
        *("drgrpo", "Dr. GRPO", "chapter 6, eq:DrGRPO_ADV and eq:loss_fixed_length"),
        paper="arXiv:2503.20783",
        nearest="grpo",
        chapter=_DRGRPO,
        code=replace(
            _DRGRPO,
            aggregation="sequence_mean",
            kl_sign="code",
            reads=_CLIP | _KL3,
            settings=_trl("grpo", "none"),
            trl="equal while beta is 0; TRL's KL has the right sign",
            differs="Only the advantage changes against GRPO: each sequence keeps its mean.",
        ),
        trl=replace(_DRGRPO, **_STOCK, reads=_CLIP | _BETA | _LENGTH),
    ),
    Algorithm(
        *("gspo", "GSPO", "chapter 6, eq:GSPO_ratio and eq:GSPO_objective", "arXiv:2507.18071"),
        nearest="grpo",
        chapter=_GSPO,
        code=replace(_GSPO, **_CODE),
        trl=replace(_GSPO, **_STOCK, reads=_CLIP | _BETA),
    ),
    Algorithm(
        *("cispo", "CISPO", "chapter 6, eq:CISPO_objective and eq:CISPO_ratio", "arXiv:2506.13585"),
        nearest="grpo",
        chapter=_CISPO,
        code=replace(
            _CISPO,
            **_CODE
            | {
                "trl": "TRL bounds the weight from above only and counts each token the same",
                "differs": "A mean over the tokens of each sequence, not of a prompt; rounding "
                "alone can give a group of equal rewards advantages of about 1.",
            },
            aggregation="sequence_mean",
        ),
        trl=replace(
            _CISPO_WINDOW,
            **_STOCK
            | {
                # a ratio is never below 0, so a lower bound of 1 - 1 is none
                "constants": _STOCK["constants"] | {"epsilon": 1.0},
                "differs": "No lower bound, and a mean over all tokens of an average window; TRL's "
                "own epsilon_high is 1 + epsilon_high.",
            },
            reads={"epsilon_high": 0.4} | _BETA,
        ),
    ),
    Algorithm(
        *("cispo_window", "CISPO over the window", "chapter 6, eq:CISPO_ratio, eq:loss_per_token"),
        paper="arXiv:2506.13585",
        nearest="cispo",
        chapter=_CISPO_WINDOW,
        code="the book's code is cispo's",
        trl="stock TRL is cispo's",
    ),
    Algorithm(
        *("sapo", "SAPO", "chapter 6, Further Reading (prose)", "arXiv:2511.20347"),
        nearest="grpo",
        chapter=_SAPO,
        code=replace(_SAPO, **_CODE),
        trl=replace(_SAPO, **_STOCK, reads=_GATE | _BETA),
    ),
    Algorithm(
        *("dapo", "DAPO", "chapter 6, eq:loss_per_token and Further Reading (prose)"),
        paper="arXiv:2503.14476",
        nearest="grpo",
        chapter=_DAPO,
        code=replace(
            _DAPO,
            window="micro_batch",
            constants={"std_epsilon": 1e-8},
            settings=_trl("bnpo"),
            trl="TRL adds 1e-4 to the standard deviation, not 1e-8",
            differs="The mean over tokens is taken in each micro-batch; 1e-8 is added to the std, "
            "so that rounding alone can give a group of equal rewards advantages of about 1.",
        ),
        trl=replace(
            _DAPO,
            **_STOCK | {"differs": "No dynamic sampling, no overlong penalty; a KL can be added."},
            kl="loss",
            reads=_CLIP_HIGHER | _BETA,
        ),
    ),
    Algorithm(
        *("dapo_per_prompt", "DAPO per prompt", "not in the book; the equation of DAPO's paper"),
        paper="arXiv:2503.14476",
        nearest="dapo",
        chapter=replace(
            _DAPO,
            aggregation="per_prompt",
            window="micro_batch",
            trl="TRL divides by the tokens of the window",
            differs=f"Each prompt counts the same, and each token of its completions.{_STD_SAYS}",
        ),
        code="the book's code is dapo's",
        trl="stock TRL is dapo's",
    ),
    Algorithm(
        *("maxrl", "MaxRL", "not in the book; its published code has it", "arXiv:2602.02710"),
        nearest="reinforce",
        chapter=_MAXRL,
        code=replace(
            _MAXRL,
            aggregation="sequence_mean",
            reads={},
            differs="A mean over the tokens of a sequence instead of a sum.",
        ),
        trl="TRL divides centered rewards by their standard deviation, never by their mean",
    ),
    Algorithm(
        *("dpo", "DPO", "chapter 8, eq:dpo_core", "arXiv:2305.18290"),
        chapter=_DPO,
        code=replace(_DPO, differs="Nothing."),
        trl=replace(_DPO, trainer_reads={}, differs="Nothing."),
    ),
    Algorithm(
        *("cdpo", "cDPO", "chapter 8 prints no equation"),
        paper="Mitchell 2023, ericmitchell.ai/cdpo.pdf",
        chapter=_CDPO,
        code=replace(_CDPO, differs="Nothing; its training script fixes label_smoothing at 0.1."),
        trl=replace(
            _CDPO, trainer_reads={}, differs="Nothing, with two losses that add up to this one."
        ),
    ),
    Algorithm(
        *("ipo", "IPO", "chapter 8 prints no equation", "arXiv:2310.12036"),
        chapter=_IPO,
        code=replace(_IPO, differs="Nothing."),
        trl=replace(
            _IPO,
            logps="mean",
            trl=True,
            trainer_reads={},
            differs="Log-probabilities are averaged over the tokens of a completion, not summed.",
        ),
    ),
    Algorithm(
        *("simpo", "SimPO", "chapter 8 prints no equation", "arXiv:2405.14734"),
        chapter=_SIMPO,
        code=replace(_SIMPO, differs="Nothing; its config calls the ratio gamma."),
        trl="CPOTrainer is not the trainer that the recipe builds on; compare shows it",
    ),
    Algorithm(
        *("orpo", "ORPO", "chapter 8 prints no equation", "arXiv:2403.07691"),
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
    ),
    Algorithm(
        *("kto", "KTO", "chapter 8 prints no equation", "arXiv:2402.01306"),
        chapter=_KTO,
        code=replace(
            _KTO,
            loss="kto_class_means",
            trl="TRL takes one mean over both classes (twice the weights agree where "
            "there are as many of each) and z from mismatched pairs",
            differs="The sum of the mean over the chosen and the mean over the rejected; its "
            "training script takes z from the rejected completions of their own prompts.",
        ),
        trl=replace(
            _KTO,
            differs="Nothing; its z pairs each prompt with its neighbor's completion in the batch "
            "of a device.",
        ),
    ),
    Algorithm(
        *("dpo_norm", "DPO-Norm", "chapter 8 prints no equation", "arXiv:2411.15124"),
        chapter=_DPO_NORM,
        code=replace(_DPO_NORM, differs="Nothing."),
        trl=replace(_DPO_NORM, trainer_reads={}, differs="Nothing."),
    ),
    Algorithm(
        *("apo_zero", "APO-zero", "chapter 8 prints no equation", "arXiv:2408.06266"),
        chapter=_APO_ZERO,
        code=replace(_APO_ZERO, differs="Nothing."),
        trl=replace(_APO_ZERO, **_ONE_MORE),
    ),
    Algorithm(
        *("apo_down", "APO-down", "chapter 8 prints no equation", "arXiv:2408.06266"),
        chapter=_APO_DOWN,
        code=replace(_APO_DOWN, differs="Nothing."),
        trl=replace(_APO_DOWN, **_ONE_MORE),
    ),
    Algorithm(
        *(
            "reward",
            "Bradley-Terry reward model",
            "chapter 5, eq:rewardmodeling1 and eq:rewardmodelingmargin",
        ),
        paper="arXiv:2203.02155",
        chapter=_REWARD,
        code=replace(
            _REWARD, loss="bradley_terry", reads={}, differs="No margin and no centering."
        ),
        trl=replace(_REWARD, differs="Nothing; the margin is a column of the data set."),
    ),
    Algorithm(
        *("kwise", "K-wise reward model", "chapter 5, eq:kwise_rm", "arXiv:2301.11270"),
        chapter=RewardModel(
            loss="plackett_luce",
            trl="TRL compares pairs only",
            differs="With two completions this is Bradley-Terry.",
        ),
        code="the book's code compares pairs only",
        trl="TRL compares pairs only",
    ),
    Algorithm(
        *("orm", "Outcome reward model", "chapter 5, eq:orm_token_loss", "arXiv:2110.14168"),
        chapter=_ORM,
        code=replace(
            _ORM,
            aggregation="token_mean",
            differs="Each token of the batch counts the same; the score of the last one is the "
            "answer's.",
        ),
        trl="TRL has no outcome reward model",
    ),
    Algorithm(
        *("prm", "Process reward model", "chapter 5, eq:prm_loss", "arXiv:2305.20050"),
        chapter=_PRM,
        code=replace(
            _PRM,
            loss="process",
            aggregation="token_mean",
            trainer_reads={"class_weights": None},
            differs="Steps are bad, neutral or good (0, 1, 2), and each step counts the same.",
        ),
        trl="TRL removed its PRMTrainer in 1.14",
    ),
    Algorithm(
        *("opd", "On-policy distillation", "chapter 12, eq:opd_kl_advantage and eq:opd_reverse_kl"),
        paper="arXiv:2306.13649",
        chapter=_OPD,
        code="the book's code has self-distillation (sdpo) only",
        trl=replace(
            _OPD,
            loss="reverse_kl",
            aggregation="token_mean",
            window="window",
            trl=True,
            differs="The divergence over the whole vocabulary, averaged over all tokens.",
        ),
    ),
    Algorithm(
        *("sdpo", "SDPO", "chapter 12 prints no equation", "arXiv:2601.20802"),
        chapter=_SDPO,
        code=replace(
            _SDPO,
            **_TOP_K,
            aggregation="per_prompt",
            own_demonstrations=True,
            differs="The student's 20 likeliest tokens and one bucket; each prompt counts the same "
            "and each token of its completions. Its demonstration is the first right one, for "
            "that one itself, too.",
        ),
        trl=replace(
            _SDPO,
            **_TOP_K,
            aggregation="sequence_mean",
            own_demonstrations=True,
            settings={
                "distillation_mode": "topk_logits",
                "distillation_topk": _top_k,
                "distillation_add_tail": True,
                "distillation_alpha": 1.0,
                "distillation_is_clip": None,
            },
            trl=True,
            differs="As the code, but each completion counts the same.",
        ),
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}


def algorithm(name: str) -> Algorithm:
    """Return the row of an algorithm, such as "grpo"; an unknown one is an InputError."""
    if name not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise InputError(f"unknown algorithm {name!r}{nearest(name, ALGORITHMS)}; known: {known}")
    return ALGORITHMS[name]


@dataclass(frozen=True)
class Nearest:
    """The row that an algorithm is closest to, and what tells the two apart."""

    name: str
    differs_in: tuple[str, ...]  # fields of the row, of its parameters and of its trainer

    @property
    def inactive_at_ratio_1(self) -> tuple[str, ...]:
        """Those that change no gradient while every ratio is 1: one update per generation."""
        return tuple(name for name in self.differs_in if name in INACTIVE_AT_RATIO_1)

    @property
    def same_at_ratio_1(self) -> bool:
        """Whether nothing else differs, so that the two then train alike."""
        return self.inactive_at_ratio_1 == self.differs_in


def nearest_row(algorithm_name: str, formulation_name: str = "chapter") -> Nearest | None:
    """Return what a formulation is closest to; None for a root, or where that row has none."""
    row = algorithm(algorithm_name)
    if not row.nearest:
        return None
    form = row.formulations.get(formulation_name)
    other = ALGORITHMS[row.nearest].formulations.get(formulation_name)
    if not (isinstance(form, PolicyGradient) and isinstance(other, PolicyGradient)):
        return None
    return Nearest(row.nearest, form.differs_in(other))


def names(family: Family, having: str = "chapter") -> list[str]:
    """Return a family's algorithms that have this formulation, in the order of the table."""
    rows = ALGORITHMS.items()
    return [name for name, row in rows if row.family == family and having in row.formulations]


def of_recipe(recipe: str) -> list[str]:
    """Return the identifiers of the algorithms that a script of recipes/ trains."""
    return [name for name, row in ALGORITHMS.items() if row.recipe == recipe]


def formulation(
    algorithm_name: str, formulation_name: str, family: Family | None = None
) -> Formulation:
    """Return one formulation of an algorithm."""
    row = algorithm(algorithm_name)
    if family and row.family != family:
        wanted, known = family.replace("_", "-"), ", ".join(names(family))
        raise InputError(f"{algorithm_name} is not a {wanted} algorithm; those are {known}")
    if formulation_name not in row.formulations:
        known = ", ".join(row.formulations)
        why = nearest(formulation_name, FORMULATIONS)
        if formulation_name in FORMULATIONS:
            why = f": {getattr(row, formulation_name)}"
        raise InputError(
            f"{algorithm_name} has no formulation {formulation_name!r}{why}; it has {known}"
        )
    label = f"{algorithm_name} ({formulation_name})"
    return replace(row.formulations[formulation_name], label=label)
