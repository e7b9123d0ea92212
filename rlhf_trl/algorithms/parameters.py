"""The parameters of losses: what each means, what it may be, and which config fields touch a loss.

A parameter of a row is declared once, here. A config class names it by `of_the_row`, which takes
meaning and range from this table; the public losses check it by the same line.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

Family = Literal["policy_gradient", "direct_alignment", "reward_model", "distillation"]

BASELINES = {
    "none": "raw",
    "batch_mean": "batch_mean_baseline",
    "moving_average": "moving_average_baseline",
}
"""By the value of `baseline`, the advantage that it makes of REINFORCE."""


@dataclass(frozen=True)
class Parameter:
    """What rows read or fix: a number unless there are `choices`, or `words` of another type."""

    name: str  # in configs, in the table and in the functions of the book
    meaning: str  # one line for --help
    _: KW_ONLY
    range: str | None = None  # a key of errors.RANGES; None: any
    choices: tuple[str, ...] = ()  # the words it may be
    words: bool = False  # it is no number, and whoever reads it checks it
    early: bool = False  # its range is checked with the types of a config, before TRL is imported
    family: Family | None = None  # where another family means something else by the name


_TABLE = (
    # of policy gradients
    Parameter("epsilon", "Distance of the lower clip bound from 1.", range="0 or more"),
    Parameter(
        "epsilon_high", "Distance of the upper clip bound from 1, always.", range="0 or more"
    ),
    Parameter(
        "sapo_temperature_pos",
        "Temperature of the gate, advantage above 0.",
        range="a number above 0",
    ),
    Parameter(
        "sapo_temperature_neg",
        "Temperature of the gate, other advantages.",
        range="a number above 0",
    ),
    Parameter("beta", "Weight of the KL to the reference.", range="0 or more"),
    Parameter("kl_estimator", "k1, k2 or k3.", choices=("k1", "k2", "k3")),
    Parameter(
        "baseline", "none, batch_mean or moving_average (REINFORCE).", choices=tuple(BASELINES)
    ),
    Parameter("baseline_value", "The moving average, which the trainer sets."),
    Parameter(
        "baseline_decay",
        "Decay of the moving average.",
        range="a number between 0 and 1",
        early=True,
    ),
    Parameter("importance_cap", "Largest importance weight.", range="a number above 0"),
    Parameter("correctness_reward", "Reward that is 1 for a right answer, else 0.", words=True),
    Parameter("format_reward", "Reward that must be 1 as well for a success (MaxRL).", words=True),
    Parameter(
        "missing_eos_penalty", "Penalty of a cut-off completion.", range="0 or more", early=True
    ),
    Parameter(
        "soft_punish_cache", "Tokens over which the overlong penalty grows.", range="0 or more"
    ),
    Parameter(
        "dynamic_sampling_rounds", "Rounds of sampling groups anew.", range="0 or more", early=True
    ),
    Parameter(
        "max_completion_length", "Longest completion, in tokens.", range="a whole number of tokens"
    ),
    # of PPO
    Parameter("gamma", "Discount factor, in [0, 1].", range="a number between 0 and 1"),
    Parameter("lam", "Mixing parameter of GAE, in [0, 1].", range="a number between 0 and 1"),
    Parameter("vf_coef", "Weight of the value loss.", range="0 or more"),
    Parameter(
        "cliprange_value",
        "How far a value may move before it is clipped.",
        range="a number above 0",
    ),
    Parameter("whiten_advantages", "Whether advantages get mean 0 and spread 1.", words=True),
    # of direct alignment
    Parameter(
        "beta",
        "Scale of the implicit rewards; of ORPO, weight of the odds ratio.",
        range="a number above 0",
        family="direct_alignment",
    ),
    Parameter("label_smoothing", "Share of flipped labels.", range="a number between 0 and 0.5"),
    Parameter("gamma_beta_ratio", "SimPO's margin, in nats per token.", range="0 or more"),
    Parameter("nll_weight", "Weight of the NLL of the chosen.", range="0 or more", early=True),
    Parameter("desirable_weight", "Weight of the desirable.", range="0 or more"),
    Parameter("undesirable_weight", "Weight of the undesirable.", range="0 or more"),
    # of reward models
    Parameter(
        "center_rewards_coefficient",
        "Weight of the squared sum of both rewards.",
        range="0 or more",
    ),
    Parameter("class_weights", "Of bad, neutral and good steps; None: all 1.", words=True),
    # of distillation
    Parameter("kl_top_k", "Tell apart so many likeliest tokens.", range="1 or more", early=True),
    Parameter("teacher_models", "Folders or hub names of the teachers.", words=True),
    Parameter("teacher_weights", "Of the teachers; they add up to 1.", words=True),
    Parameter(
        "teacher", "Which version of the student.", choices=("live", "start", "ema"), early=True
    ),
    Parameter(
        "teacher_rate", "How fast ema follows.", range="a number above 0, at most 1", early=True
    ),
    Parameter("demonstration", "Which right completion.", choices=("random", "first"), early=True),
    Parameter("demonstration_template", "What the teacher's prompt ends with.", words=True),
    # TRL's own, which rows fix
    Parameter("loss_type", "TRL's name of the loss.", words=True),
    Parameter("scale_rewards", "How TRL scales rewards.", words=True),
    Parameter("importance_sampling_level", "Ratio per token or per sequence.", words=True),
    Parameter("multi_objective_aggregation", "How TRL joins several rewards.", words=True),
    Parameter("use_bias_correction_kl", "Whether TRL weighs its KL by the ratio.", words=True),
)

PARAMETERS: Mapping[tuple[str, Family | None], Parameter] = {
    (parameter.name, parameter.family): parameter for parameter in _TABLE
}
"""The table, by name and family; None: all families but those with an entry of their own."""


EARLY: Mapping[str, Mapping[str, Any]] = {
    parameter.name: {"range": parameter.range, "choices": parameter.choices}
    for parameter in _TABLE
    if parameter.early
}
"""What `errors.instead` checks of a config's fields, by name. It is not in their metadata, all of
which TRL's parser hands to argparse."""


def parameter(name: str, family: Family | None = None) -> Parameter:
    """Return what a family means by a name; an unknown name is a KeyError."""
    return PARAMETERS.get((name, family)) or PARAMETERS[name, None]


def of_the_row(name: str, family: Family | None = None) -> Any:
    """Declare a config field that is the row's own value unless it is set."""
    meaning = parameter(name, family).meaning
    return field(default=None, metadata={"help": f"{meaning} None: the algorithm's own."})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UNREAD = _names(
    """
    alpha cpo_alpha delta discopop_tau entropy_coef entropy_coef_delta entropy_coef_max
    entropy_coef_min entropy_target f_alpha_divergence_coef f_divergence_type ld_alpha loss_weights
    normalize_advantages off_policy_mask_threshold reward_clip_range simpo_gamma
    top_entropy_quantile use_adaptive_entropy use_weighting vespo_k_neg vespo_k_pos
    vespo_lambda_neg vespo_lambda_pos

    distillation_add_tail distillation_alpha distillation_is_clip distillation_mode
    distillation_topk distillation_weight
    """
)
"""TRL's fields that touch a loss and that no row reads under their own name."""

SHARED_FIELDS = _names(
    """
    assistant_only_loss average_tokens_across_devices cast_lm_head_to_fp32 completion_only_loss
    disable_dropout generation_batch_size label_smoothing_factor mask_truncated_completions
    max_completion_length max_length neftune_noise_alpha num_generations num_generations_eval
    num_iterations ref_model_mixup_alpha ref_model_sync_steps reward_weights
    router_aux_loss_coef steps_per_generation sync_ref_model temperature truncation_mode
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode
    """
)
"""Fields that matter to every algorithm of a family alike: allowed for all."""

LOSS_FIELDS = (frozenset(name for name, _ in PARAMETERS) | _UNREAD) - SHARED_FIELDS
"""The fields that change a loss, each for some algorithms only.

One that a config sets, and that the chosen formulation neither reads nor fixes to the same value,
is an error. All others of the recorded release of TRL (compare/drift/surface.json) touch no loss:
sampling, data, logging, the rest of TrainingArguments.
"""
