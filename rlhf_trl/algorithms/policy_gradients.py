"""Policy gradients (chapter 6): one row per algorithm, its parts by name.

A row without `kl_penalty` or `value_loss` has none. `code` and `trl` say what they change in their
own algorithm's `chapter`, and nothing else; so does a variant of another algorithm. Chapters that
have much in common say what they change in a base, which is no algorithm.
"""

from dataclasses import replace
from typing import Any

from rlhf_trl.algorithms.formulations import REQUIRED, Algorithm, PolicyGradient

ROWS: dict[str, Algorithm] = {}
"""The rows of this family, in the order in which they are shown."""


def grpo_fields(
    loss_type: str, scale_rewards: str = "group", importance_sampling_level: str = "token"
) -> dict[str, Any]:
    """Spell out the fields of GRPOConfig that decide its loss."""
    return {
        "loss_type": loss_type,
        "scale_rewards": scale_rewards,
        "importance_sampling_level": importance_sampling_level,
        "multi_objective_aggregation": "sum_then_normalize",
        "use_bias_correction_kl": False,
    }


def _in_code(row: PolicyGradient) -> PolicyGradient:
    """Return a row of standardized rewards as the book's code computes it."""
    return replace(
        row,
        kl_sign="code",
        constants={"std_epsilon": 1e-8},
        trl="TRL adds 1e-4 to the standard deviation, and its KL has the right sign",
        differs=(
            "k1 and k3 have the other sign, and 1e-8 is added to the standard deviation, so that "
            "rounding alone can give a group of equal rewards advantages of about 1."
        ),
    )


def _in_trl(row: PolicyGradient, **changes: Any) -> PolicyGradient:
    """Return a row as stock GRPOTrainer computes it: its KL is k3, and our own fields are gone."""
    fixed = {
        "reads": {name: default for name, default in row.reads.items() if name != "kl_estimator"},
        "constants": {"std_epsilon": 1e-4, "kl_estimator": "k3"},
        "trainer_reads": {},
        "trl": True,
        "differs": "Nothing.",
    }
    return replace(row, **{**fixed, **changes})


_PLAIN = PolicyGradient(
    advantage="raw",
    ratio="none",
    surrogate="log_prob_weighting",
    aggregation="sequence_sum",
    window="micro_batch",
    kl="reward",
    kl_penalty="summed_kl_penalty",
    settings=grpo_fields(loss_type="grpo", scale_rewards="none"),
    trainer_reads={"missing_eos_penalty": None},
)
"""REINFORCE without a baseline: what the rows that weigh log-probabilities have in common."""

_REINFORCE = replace(
    _PLAIN,
    advantage="batch_mean_baseline",
    reads={
        "baseline": "batch_mean",
        "baseline_value": None,
        "importance_cap": None,
        "beta": 0.0,
        "kl_estimator": "k1",
    },
    trl="TRL has no plain REINFORCE: it centers rewards in their group and refuses groups of one",
    trainer_reads={"baseline_decay": 0.9, "missing_eos_penalty": None},
    differs="The chapter also lists a mean over the tokens; the derived equation sums, as here.",
)
ROWS["reinforce"] = Algorithm(
    name="reinforce",
    title="REINFORCE",
    source="chapter 6, eq:REINFORCE_with_baseline",
    paper="Williams 1992, doi:10.1007/BF00992696",
    chapter=_REINFORCE,
    code=replace(
        _REINFORCE,
        advantage="raw",
        aggregation="sequence_mean",
        kl_sign="code",
        kl_penalty="averaged_kl_penalty",
        reads={"beta": 0.0, "kl_estimator": "k3"},
        trainer_reads={"missing_eos_penalty": None},
        differs="No baseline, and a mean over the tokens of a sequence instead of a sum.",
    ),
    trl="TRL has no plain REINFORCE: it centers rewards in groups and refuses groups of one",
)

_RLOO = replace(
    _PLAIN,
    advantage="leave_one_out",
    reads={"importance_cap": None, "beta": 0.0, "kl_estimator": "k1"},
    trl="GRPOTrainer has neither the leave-one-out factor K/(K-1) nor the sum over tokens",
    differs="The sum over tokens is as derived; TRL's own RLOOTrainer agrees while on-policy.",
)
ROWS["rloo"] = Algorithm(
    name="rloo",
    title="RLOO",
    source="chapter 6, eq:RLOO_baseline and eq:RLOO_advantage_alt",
    paper="arXiv:2402.14740",
    nearest="reinforce",
    chapter=_RLOO,
    code=replace(
        _RLOO,
        aggregation="sequence_mean",
        kl_sign="code",
        kl_penalty="averaged_kl_penalty",
        reads={"beta": 0.0, "kl_estimator": "k3"},
        trl="GRPOTrainer's centered rewards lack the leave-one-out factor K/(K-1)",
        differs="A mean over the tokens of a sequence instead of a sum.",
    ),
    trl=replace(
        _RLOO,
        ratio="product_ratio",
        surrogate="clipped_ratio",
        aggregation="sequence_mean",
        reads={"epsilon": 0.2, "epsilon_high": None, "beta": 0.0},
        constants={"kl_estimator": "k1"},
        trainer="RLOOTrainer",
        settings={"normalize_advantages": False, "reward_clip_range": None},
        trl=True,
        trainer_reads={},
        differs=(
            "The ratio of the whole completion's probability is clipped; its gradient is the "
            "chapter's while on-policy."
        ),
    ),
)

_PPO = PolicyGradient(
    advantage="gae",
    ratio="token_ratio",
    surrogate="clipped_ratio",
    aggregation="sequence_mean",
    window="micro_batch",
    kl="reward",
    kl_penalty="per_token_kl_penalty",
    value_loss="clipped_value_loss",
    reads={
        "epsilon": 0.2,
        "epsilon_high": None,
        "gamma": 1.0,
        "lam": 0.95,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "beta": 0.0,
        "kl_estimator": "k1",
    },
    settings=grpo_fields(loss_type="grpo", scale_rewards="none"),
    trl="TRL removed PPO and its value heads in 1.13",
    trainer_reads={"whiten_advantages": False, "missing_eos_penalty": None},
    differs="The critic's loss joins the policy's under one mean; whitening is off by default.",
)
ROWS["ppo"] = Algorithm(
    name="ppo",
    title="PPO",
    source="chapter 6, eq:PPO_EQN_EXPANDED and eq:GAE_DFN",
    paper="arXiv:1707.06347",
    nearest="grpo",
    chapter=_PPO,
    code=replace(
        _PPO,
        kl_sign="code",
        kl_penalty="averaged_kl_penalty",
        reads=_PPO.reads
        | {"lam": 0.98, "cliprange_value": 0.4, "vf_coef": 0.5, "kl_estimator": "k3"},
        trainer_reads={"missing_eos_penalty": None},
        differs="The KL is averaged over the completion and taken from the last reward.",
    ),
    trl="TRL removed PPO and its value heads in 1.13",
)

_ON_GROUPS = PolicyGradient(
    advantage="group_standardized",
    ratio="token_ratio",
    surrogate="clipped_ratio",
    aggregation="sequence_mean",
    window="micro_batch",
    kl="loss",
    reads={"epsilon": 0.2, "epsilon_high": None, "beta": 0.0, "kl_estimator": "k3"},
    constants={"std_epsilon": 1e-4},
    trl=True,
    trainer_reads={"missing_eos_penalty": None},
)
"""What the rows that standardize rewards in their group have in common."""

_GRPO = replace(
    _ON_GROUPS,
    settings=grpo_fields(loss_type="grpo"),
    differs="The printed equation divides by the bare standard deviation; its listing adds 1e-4.",
)
ROWS["grpo"] = Algorithm(
    name="grpo",
    title="GRPO",
    source="chapter 6, eq:GRPO_token and eq:GRPO_ADV",
    paper="arXiv:2402.03300",
    chapter=_GRPO,
    code=_in_code(_GRPO),
    trl=_in_trl(_GRPO),
)

_DRGRPO = replace(
    _ON_GROUPS,
    advantage="group_centered",
    aggregation="fixed_length",
    reads={**_ON_GROUPS.reads, "max_completion_length": REQUIRED},
    constants={},
    settings=grpo_fields(loss_type="dr_grpo", scale_rewards="none"),
    differs="The length L_max is max_completion_length, a constant of the whole training.",
)
ROWS["drgrpo"] = Algorithm(
    name="drgrpo",
    title="Dr. GRPO",
    source="chapter 6, eq:DrGRPO_ADV and eq:loss_fixed_length",
    paper="arXiv:2503.20783",
    nearest="grpo",
    chapter=_DRGRPO,
    code=replace(
        _DRGRPO,
        aggregation="sequence_mean",
        kl_sign="code",
        reads=_ON_GROUPS.reads,
        settings=grpo_fields(loss_type="grpo", scale_rewards="none"),
        trl="equal while beta is 0; TRL's KL has the right sign",
        differs="Only the advantage changes against GRPO: each sequence keeps its mean.",
    ),
    trl=_in_trl(_DRGRPO),
)

_GSPO = replace(
    _ON_GROUPS,
    ratio="sequence_ratio",
    settings=grpo_fields(loss_type="grpo", importance_sampling_level="sequence"),
    differs=(
        "Clipping works on whole sequences, so useful bounds are far smaller than GRPO's. As in"
        " GRPO, 1e-4 is added to the standard deviation."
    ),
)
ROWS["gspo"] = Algorithm(
    name="gspo",
    title="GSPO",
    source="chapter 6, eq:GSPO_ratio and eq:GSPO_objective",
    paper="arXiv:2507.18071",
    nearest="grpo",
    chapter=_GSPO,
    code=_in_code(_GSPO),
    trl=_in_trl(_GSPO),
)

_CISPO = replace(
    _ON_GROUPS,
    surrogate="clipped_importance_weight",
    aggregation="per_prompt",
    reads={**_ON_GROUPS.reads, "epsilon_high": 0.4},
    settings=grpo_fields(loss_type="cispo"),
    trl="TRL bounds the weight from above only, and divides by the tokens of the window",
    trl_offset={"epsilon_high": 1.0},
    differs=(
        "Each prompt counts the same, and each token of its completions, as in the equation; "
        "the chapter's summary of losses prints no normalizer. As in GRPO, 1e-4 is added to the"
        " standard deviation."
    ),
)
ROWS["cispo"] = Algorithm(
    name="cispo",
    title="CISPO",
    source="chapter 6, eq:CISPO_objective and eq:CISPO_ratio",
    paper="arXiv:2506.13585",
    nearest="grpo",
    chapter=_CISPO,
    code=replace(
        _CISPO,
        aggregation="sequence_mean",
        kl_sign="code",
        constants={"std_epsilon": 1e-8},
        trl="TRL bounds the weight from above only and counts each token the same",
        differs=(
            "A mean over the tokens of each sequence, not of a prompt; rounding alone can give "
            "a group of equal rewards advantages of about 1."
        ),
    ),
    trl=_in_trl(
        _CISPO,
        aggregation="token_mean",
        window="window",
        reads={"epsilon_high": 0.4, "beta": 0.0},
        constants={"std_epsilon": 1e-4, "kl_estimator": "k3", "epsilon": 1.0},
        differs=(
            "No lower bound, and a mean over all tokens of an average window; TRL's own "
            "epsilon_high is 1 + epsilon_high."
        ),
    ),
)

_CISPO_WINDOW = replace(
    _CISPO,
    aggregation="token_mean",
    window="window",
    trl="TRL bounds the weight from above only",
    differs=(
        "CISPO with one mean over all tokens of the accumulation window, as in DAPO. As in "
        "GRPO, 1e-4 is added to the standard deviation."
    ),
)
ROWS["cispo_window"] = Algorithm(
    name="cispo_window",
    title="CISPO over the window",
    source="chapter 6, eq:CISPO_ratio, eq:loss_per_token",
    paper="arXiv:2506.13585",
    nearest="cispo",
    chapter=_CISPO_WINDOW,
    code="the book's code is cispo's",
    trl="stock TRL is cispo's",
)

_SAPO = replace(
    _ON_GROUPS,
    surrogate="soft_gate",
    reads={
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "beta": 0.0,
        "kl_estimator": "k3",
    },
    settings=grpo_fields(loss_type="sapo"),
    differs=(
        "The chapter prints no equation; this is the paper's. As in GRPO, 1e-4 is added to the "
        "standard deviation."
    ),
)
ROWS["sapo"] = Algorithm(
    name="sapo",
    title="SAPO",
    source="chapter 6, Further Reading (prose)",
    paper="arXiv:2511.20347",
    nearest="grpo",
    chapter=_SAPO,
    code=_in_code(_SAPO),
    trl=_in_trl(_SAPO),
)

_DAPO = replace(
    _ON_GROUPS,
    aggregation="token_mean",
    window="window",
    kl="none",
    reads={"epsilon": 0.2, "epsilon_high": 0.28},
    settings=grpo_fields(loss_type="dapo"),
    trainer_reads={
        "correctness_reward": REQUIRED,
        "soft_punish_cache": 128,
        "dynamic_sampling_rounds": 8,
        "missing_eos_penalty": None,
    },
    differs=(
        "TRL's window is the real one only if steps_per_generation is the accumulation. As in "
        "GRPO, 1e-4 is added to the standard deviation."
    ),
)
ROWS["dapo"] = Algorithm(
    name="dapo",
    title="DAPO",
    source="chapter 6, eq:loss_per_token and Further Reading (prose)",
    paper="arXiv:2503.14476",
    nearest="grpo",
    chapter=_DAPO,
    code=replace(
        _DAPO,
        window="micro_batch",
        constants={"std_epsilon": 1e-8},
        settings=grpo_fields(loss_type="bnpo"),
        trl="TRL adds 1e-4 to the standard deviation, not 1e-8",
        differs=(
            "The mean over tokens is taken in each micro-batch; 1e-8 is added to the std, so "
            "that rounding alone can give a group of equal rewards advantages of about 1."
        ),
    ),
    trl=_in_trl(
        _DAPO,
        kl="loss",
        reads={**_DAPO.reads, "beta": 0.0},
        differs="No dynamic sampling, no overlong penalty; a KL can be added.",
    ),
)

_DAPO_PER_PROMPT = replace(
    _DAPO,
    aggregation="per_prompt",
    window="micro_batch",
    trl="TRL divides by the tokens of the window",
    differs=(
        "Each prompt counts the same, and each token of its completions. As in GRPO, 1e-4 is "
        "added to the standard deviation."
    ),
)
ROWS["dapo_per_prompt"] = Algorithm(
    name="dapo_per_prompt",
    title="DAPO per prompt",
    source="not in the book; the equation of DAPO's paper",
    paper="arXiv:2503.14476",
    nearest="dapo",
    chapter=_DAPO_PER_PROMPT,
    code="the book's code is dapo's",
    trl="stock TRL is dapo's",
)

_MAXRL = replace(
    _PLAIN,
    advantage="maxrl",
    kl="none",
    kl_penalty="none",
    reads={"importance_cap": None},
    constants={"partial_credit": False},
    trl="TRL divides centered rewards by their standard deviation, never by their mean",
    trainer_reads={"correctness_reward": REQUIRED, "format_reward": None},
    differs="The chapter prints no equation; this is the paper's, with whole-sequence scores.",
)
ROWS["maxrl"] = Algorithm(
    name="maxrl",
    title="MaxRL",
    source="not in the book; its published code has it",
    paper="arXiv:2602.02710",
    nearest="reinforce",
    chapter=_MAXRL,
    code=replace(
        _MAXRL,
        aggregation="sequence_mean",
        reads={},
        constants={"partial_credit": True},
        differs="A mean over the tokens of a sequence, not a sum; a success may count in part.",
    ),
    trl="TRL divides centered rewards by their standard deviation, never by their mean",
)
