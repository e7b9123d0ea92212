"""What is compared with what, and why the two differ where they do.

A row holds no verdict and no number: those come from the run. It has the two sides, the identities
that turn the left gradient into the right one (none: they should be equal), the reason, and the
settings that remove the difference.
"""

from dataclasses import dataclass, replace
from typing import Any

from rlhf_trl.algorithms import ALGORITHMS, Algorithm, Formulation
from rlhf_trl.compare import identities as to
from rlhf_trl.compare.measure import Book, Stock
from rlhf_trl.compare.trainers import own_trainer, row_arguments
from rlhf_trl.compare.windows.batches import GROUP, WEIGHTS
from rlhf_trl.compare.windows.pair_examples import MADE
from rlhf_trl.compare.windows.terms import Identity
from rlhf_trl.models import EMBEDDED


@dataclass(frozen=True)
class Row:
    """One comparison: the left side names the algorithm, the right one is held against it."""

    left: Book
    right: Book | Stock
    # from left to right, in this order, as far as a batch calls for them
    identities: tuple[Identity, ...] = ()
    explanation: str = ""  # one sentence for `differs` and `scaled`
    settings: str = ""  # what makes the two equal, or why nothing does; "" for two of the book's
    batches: tuple[str, ...] = ()  # the only batches that it is for; none: all
    with_kl: str = ""  # a further sentence, where a KL plays a part
    variant: str = ""  # what distinguishes it from the algorithm's rows with the same sides
    subject: str = ""  # what it is about, where that is not the algorithm on the left

    @property
    def algorithm(self) -> str:
        """What it is about: a row in the table, or "kl"."""
        return self.subject or self.left.algorithm


_GRPO_FIELDS = ("epsilon", "epsilon_high", "sapo_temperature_pos", "sapo_temperature_neg")
"""Parameters of policy-gradient rows that are fields of GRPOConfig, but for the batch's `beta`."""


def stock(algorithm: str, formulation_name: str = "trl", **changes: Any) -> Stock:
    """Return TRL's trainer, with the settings that the table has for a formulation, as a side.

    Args:
        algorithm: a row of the table.
        formulation_name: whose settings; the chapter's where the row has no such formulation.
        changes: fields that get other values than the table's.
    """
    forms = ALGORITHMS[algorithm].formulations
    row = forms.get(formulation_name, forms["chapter"])
    is_grpo = row.trainer == "GRPOTrainer"
    # no KL, whatever TRL's default is, unless the batch brings a beta
    fields: dict[str, Any] = {"beta": 0.0} if is_grpo else {}
    for name, value in row.reads.items():
        # TRL's CPOTrainer has another field for SimPO's margin: `row.fixed` below has its value
        is_field = name in _GRPO_FIELDS if is_grpo else name != "gamma_beta_ratio"
        if is_field and value is not None:
            fields[name] = value + row.trl_offset.get(name, 0)  # TRL may mean another number
    fields |= row.fixed({}) | changes
    loss = fields.get("loss_type", row.trainer)  # ORPO and reward models have no such field
    label = " + ".join(loss) if isinstance(loss, list) else loss
    return Stock(fields, f"TRL {label}", row.trainer)


_EPS = to.std_epsilon(1e-4, 1e-8)
_EPS_BACK = to.std_epsilon(1e-8, 1e-4)
_EPS_SAYS = "The code adds 1e-8 to the standard deviation, chapter and TRL 1e-4"
_SIGN_SAYS = "The code's KL has the other sign."
_AVERAGE_SAYS = "The code's KL is an average over the tokens, with the other sign."
_NO_SETTING = "none in TRL"
_UNCHANGED = ("on_policy", "mild", "heavy", "ragged", "accumulation", "steps_per_generation")
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_ONE_GENERATION = (*_UNCHANGED[:-1], "extreme")
_TRL_MEAN = to.normalizer("token_mean", "token_mean_trl")
_TRL_DAPO = to.normalizer("sequence_mean", "token_mean_trl")
_OF_PROMPTS = to.normalizer("per_prompt", "token_mean_trl")
_OTHER_K3 = to.chapter_k3("exp(l) - 1")
_WINDOW_SAYS = "TRL divides by the tokens of the window, not of each prompt's completions."
_BOUND = "epsilon_high: 1.4, up to the lower bound and the normalizer"
_ONE_WINDOW = "steps_per_generation: gradient_accumulation_steps"
_SUM_TO_MEAN = to.normalizer("sequence_sum", "sequence_mean")
_AVERAGED_KL = to.kl_in_reward("averaged")
_TRL_RLOO = ("TRL RLOOTrainer", "RLOOTrainer")
_PPO = {"gamma": 1.0, "lam": 0.95, "cliprange_value": 0.2, "vf_coef": 0.1}
_RLOO_WEIGHTS = [weight * GROUP / (GROUP - 1) for weight in WEIGHTS]


def _code(name: str, *steps: Identity, why: str = "", with_kl: str = "", **params: Any) -> Row:
    """Return the row that holds an algorithm's chapter against the book's code.

    `steps` are the identities between the two, none if they are equal; `why` is the explanation.
    """
    return Row(
        left=Book(name, "chapter", params),
        right=Book(name, "code", params),
        identities=steps,
        explanation=why,
        with_kl=with_kl,
    )


def _trl(
    name: str,
    *steps: Identity,
    why: str = "",
    settings: str = "",
    variant: str = "",
    formulation_name: str = "chapter",
    batches: tuple[str, ...] = (),
    **changes: Any,
) -> Row:
    """Return the row that holds a formulation against stock TRL.

    TRL has the settings that the table names for the algorithm, and then the `changes`. `steps` are
    the identities, `why` is the explanation; the other arguments are fields of `Row`.
    """
    return Row(
        left=Book(name, formulation_name),
        right=stock(name, **changes),
        identities=steps,
        explanation=why,
        settings=settings,
        batches=batches,
        variant=variant,
    )


def _group_code(name: str, *steps: Identity, why: str = "") -> Row:
    return _code(name, *steps, _EPS, to.CODE_K3, why=f"{why}{_EPS_SAYS}.", with_kl=_SIGN_SAYS)


def _group_code_trl(name: str) -> Row:
    says = {"why": f"{_EPS_SAYS}.", "settings": _NO_SETTING}
    return replace(
        _trl(name, _EPS_BACK, _OTHER_K3, formulation_name="code", **says), with_kl=_SIGN_SAYS
    )


def _equal_rewards(right: Book | Stock, settings: str) -> Row:
    says = (
        "In float32 the mean of eight rewards of 0.3 is not 0.3; the code divides what is left by "
        "its own size, so that each gets an advantage of 0.71 (chapter and TRL: 0.0003)."
    )
    left, batches = Book("grpo", "code"), ("equal_rewards",)
    return Row(left, right, (_EPS_BACK,), says, settings, batches, variant="equal rewards")


def _sampled(mode: str, ours: bool = False) -> Row:
    """Return the row about TRL's correction for tokens that vLLM sampled.

    Args:
        mode: of the correction, one of _MODES.
        ours: whether the right side is BookGRPOTrainer, which keeps the correction, and not TRL's
            GRPOTrainer.
    """
    low, high = 0.8, 1.2  # many ratios of tokens lie outside, on either side
    fields = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
    }
    row = _trl(
        "grpo",
        to.sampler_weight(mode, low, high),
        why="With vLLM, each loss is weighed by what policy and sampler say of the same tokens.",
        settings="vllm_importance_sampling_correction: false",
        variant=mode,
        batches=("sampler",),
        **fields,
    )
    if not ours:
        return row
    name = "BookGRPOTrainer"
    trainer_arguments = row_arguments("grpo", "chapter")
    right = Stock(fields, label=name, trainer=name, trainer_arguments=trainer_arguments)
    return replace(row, right=right)


POLICY_ROWS = (
    _code(
        "reinforce",
        *(_AVERAGED_KL, to.NO_BASELINE, _SUM_TO_MEAN),
        why="The code has no baseline and a mean over the tokens.",
        with_kl=_AVERAGE_SAYS,
    ),
    _code(
        "rloo",
        *(_AVERAGED_KL, _SUM_TO_MEAN),
        why="The derived equation sums over the tokens, the code takes their mean.",
        with_kl=_AVERAGE_SAYS,
    ),
    Row(
        *(Book("rloo", "trl"), Stock({"beta": 0.0}, *_TRL_RLOO)),
        settings="beta: 0, where no KL is wanted",
        variant="as TRL",
    ),
    Row(
        *(Book("rloo"), Stock({"beta": 0.0}, *_TRL_RLOO), (to.CLIPPED_WHOLE_RATIO,)),
        "Off-policy TRL clips the ratio of the whole completion's probability; the book has none.",
        f"num_iterations: 1, {_ONE_WINDOW}",
        variant="beta 0",
    ),
    Row(
        *(Book("rloo"), Stock({}, *_TRL_RLOO)),
        (to.kl_in_reward("summed", 0.05), to.CLIPPED_WHOLE_RATIO),
        "TRL's RLOOConfig takes 0.05 times the KL from the reward unless told otherwise.",
        "beta: 0, on-policy",
        batches=_UNCHANGED,
        variant="TRL's default",
    ),
    Row(
        Book("rloo", "code"),
        stock("grpo", scale_rewards="none", reward_weights=_RLOO_WEIGHTS),
        (to.CLIPPED_TOKEN_RATIO,),
        "Centered rewards times K/(K-1) are the leave-one-out advantages; off-policy GRPO has a "
        "clipped ratio, the code none.",
        "loss_type: grpo, scale_rewards: none, reward_weights times K/(K-1), on-policy",
        batches=_UNCHANGED,
        variant="as weighted GRPO",
    ),
    _code(
        "ppo",
        _AVERAGED_KL,
        with_kl="The chapter takes the KL from the reward of each token, the code its average, "
        "with the other sign, from the last one.",
        **_PPO,
    ),
    _group_code("grpo"),
    _trl("grpo", settings="loss_type: grpo"),
    _group_code_trl("grpo"),
    _equal_rewards(Book("grpo"), ""),
    _equal_rewards(stock("grpo"), _NO_SETTING),
    Row(
        *(Book("grpo"), Stock({}, "TRL dapo"), (_TRL_DAPO, to.BIAS_CORRECTED_K3)),
        "TRL's default loss_type is dapo: one mean over all tokens instead of one per completion.",
        "loss_type: grpo, use_bias_correction_kl: false",
        with_kl="TRL's default KL is multiplied by the ratio.",
        variant="TRL's default",
    ),
    _trl(
        *("grpo", to.SPREAD_OF_THE_BATCH),
        why="scale_rewards: batch divides by the standard deviation of all rewards of a "
        "generation.",
        settings="scale_rewards: group",
        batches=_ONE_GENERATION,
        variant="scaled by the batch",
        scale_rewards="batch",
    ),
    _trl(
        *("grpo", to.FINISHED_ONLY),
        why="mask_truncated_completions drops completions that were cut off.",
        settings="mask_truncated_completions: false",
        batches=_ONE_GENERATION,
        variant="overlong filtering",
        mask_truncated_completions=True,
    ),
    *(_sampled(mode) for mode in _MODES),
    *(_sampled(mode, ours=True) for mode in _MODES),
    _code(
        "drgrpo",
        *(to.normalizer("fixed_length", "sequence_mean"), to.CODE_K3),
        why="The chapter divides by a fixed length, the code keeps each completion's own.",
        with_kl=_SIGN_SAYS,
    ),
    _trl("drgrpo", settings="loss_type: dr_grpo, scale_rewards: none"),
    _trl(
        *("drgrpo", to.STANDARDIZED),
        why="loss_type: dr_grpo changes the normalizer only; rewards are scaled until "
        "scale_rewards is none.",
        settings="scale_rewards: none",
        variant="rewards still scaled",
        scale_rewards="group",
    ),
    Row(
        *(Book("drgrpo", "code"), stock("drgrpo", "code"), (_OTHER_K3,)),
        settings="loss_type: grpo, scale_rewards: none, beta: 0",
        with_kl=_SIGN_SAYS,
    ),
    _group_code("gspo"),
    _trl("gspo", settings="importance_sampling_level: sequence, loss_type: grpo"),
    _group_code_trl("gspo"),
    _trl(
        *("gspo", _TRL_DAPO),
        why="importance_sampling_level alone leaves TRL's default loss_type, one mean over all "
        "tokens.",
        settings="loss_type: grpo",
        variant="default loss_type",
        loss_type="dapo",
    ),
    _group_code(
        "cispo",
        to.normalizer("per_prompt", "sequence_mean"),
        why="The equation divides by the tokens of all of a prompt's completions, the code by "
        "those of each. ",
    ),
    _trl(
        *("cispo", to.weight_bound(0.8, 1.4, 1.4), _OF_PROMPTS),
        why=f"TRL bounds the weight from above only. {_WINDOW_SAYS}",
        settings="formulation: trl; neither bound nor normalizer is to be had in TRL",
        variant="bound 1 + epsilon_high",
    ),
    Row(
        *(Book("cispo", params={"epsilon": 1.0}), stock("cispo"), (_OF_PROMPTS,), _WINDOW_SAYS),
        "one prompt in each window, or algorithm: cispo_window",
        variant="no lower bound",
    ),
    _trl(
        *("cispo", to.weight_bound(0.8, 1.4, 0.4), _OF_PROMPTS),
        why="TRL's epsilon_high is the bound itself: 0.4 caps every weight at 0.4 instead of 1.4. "
        + _WINDOW_SAYS,
        settings=_BOUND,
        variant="bound copied",
        epsilon_high=0.4,
    ),
    _trl(
        *("cispo", to.weight_bound(0.8, 1.4, 0.2), _OF_PROMPTS),
        why="Without epsilon_high TRL takes epsilon, so that every weight is capped at 0.2. "
        + _WINDOW_SAYS,
        settings=_BOUND,
        variant="bound unset",
        epsilon_high=None,
    ),
    Row(
        *(Book("cispo_window"), stock("cispo"), (to.weight_bound(0.8, 1.4, 1.4), _TRL_MEAN)),
        "TRL bounds the weight from above only.",
        "the lower bound is not to be had in TRL",
        variant="bound 1 + epsilon_high",
    ),
    Row(
        *(Book("cispo_window", params={"epsilon": 1.0}), stock("cispo"), (_TRL_MEAN,)),
        "TRL's window is an average one when one generation feeds several windows.",
        _ONE_WINDOW,
        variant="no lower bound",
    ),
    _group_code("sapo"),
    _trl("sapo", settings="loss_type: sapo"),
    _group_code_trl("sapo"),
    _code(
        "dapo",
        *(to.normalizer("token_mean", "token_mean_micro_batch"), _EPS),
        why="The chapter's mean is over the whole window, the code's over each micro-batch; the "
        "code adds 1e-8 to the standard deviation.",
    ),
    _trl(
        *("dapo", _TRL_MEAN),
        why="TRL divides by the tokens of an average window when one generation feeds several.",
        settings=_ONE_WINDOW,
    ),
    _trl(
        *("dapo", _EPS_BACK),
        why=f"{_EPS_SAYS}.",
        settings="loss_type: bnpo, up to that constant",
        formulation_name="code",
        loss_type="bnpo",
    ),
    _trl("dapo_per_prompt", _OF_PROMPTS, why=_WINDOW_SAYS, settings="one prompt in each window"),
    _trl(
        *("dapo_per_prompt", to.normalizer("per_prompt", "sequence_mean")),
        why="loss_type: grpo divides by the tokens of each completion.",
        settings=_NO_SETTING,
        variant="mean of each completion",
        loss_type="grpo",
    ),
    _code("maxrl", _SUM_TO_MEAN, why="The paper sums over the tokens, the code takes their mean."),
)


_DRIFTS = ("on_policy", "mild", "heavy", "ragged")


def _kl_row(
    variant: str,
    *steps: Identity,
    corrected: bool = False,
    formulation_name: str = "chapter",
    **says: str,
) -> Row:
    """Return the row that holds an estimator of the KL against TRL's k3.

    Args:
        variant: the row's variant, whose first two letters name the estimator: "k1", "k2" or "k3".
        steps: the identities between the two.
        corrected: whether TRL multiplies its k3 by the ratio.
        formulation_name: whose estimator it is, the chapter's or the code's.
        says: explanation and settings, fields of `Row`.
    """
    left = Book("grpo", formulation_name, {"beta": 0.1, "kl_estimator": variant[:2]})
    right = stock("grpo", beta=0.1, use_bias_correction_kl=corrected)
    return Row(left, right, steps, batches=_DRIFTS, variant=variant, subject="kl", **says)


KL_ROWS = (
    _kl_row("k3 in the loss", settings="use_bias_correction_kl: false"),
    _kl_row(
        *("k3, TRL's default", to.BIAS_CORRECTED_K3),
        corrected=True,
        explanation="use_bias_correction_kl multiplies k3 by the ratio, whose derivative counts "
        "even on-policy.",
        settings="use_bias_correction_kl: false",
    ),
    _kl_row(
        *("k2, TRL's default", to.BIAS_CORRECTED_K3),
        corrected=True,
        explanation="k3 times the ratio has k2's gradient on-policy only.",
        settings="on-policy",
    ),
    _kl_row(
        *("k1 in the loss", to.chapter_k3("1")),
        explanation="TRL's loss knows no k1, whose gradient in a loss is 0 in expectation.",
        settings=_NO_SETTING,
    ),
    _kl_row(
        *("k3 of the code", _EPS_BACK, _OTHER_K3),
        formulation_name="code",
        explanation="The code's log-ratio has the other sign, so that its k3 estimates another "
        "divergence; it adds 1e-8 to the standard deviation.",
        settings=_NO_SETTING,
    ),
)


_CDPO = "loss_type: [sigmoid, robust], loss_weights: [2 (1 - e), -(1 - 2e)]"
_SMOOTHED = {"loss_type": ["sigmoid"], "loss_weights": None}
_UNEQUAL = {"desirable_weight": 1.5, "undesirable_weight": 0.6}
_CENTERED = {"center_rewards_coefficient": 0.01}
_ORPO_SAYS = "TRL's likelihood term covers the prompts too and is one mean over all tokens."
_KTO_SAYS = "The code adds the means of the two classes, TRL takes one mean over all examples."


def _sft(label: str, **batches: Any) -> Row:
    return Row(
        *(Book("sft", "code"), Stock({}, label, label.split()[-1]), (to.TOKENS_OF_THE_WINDOW,)),
        "The code takes a mean over the tokens of each micro-batch, TRL over the whole window.",
        "gradient_accumulation_steps: 1",
        **batches,
    )


_ORPO = _trl("orpo", to.ORPO_NLL_OF_EVERYTHING, why=_ORPO_SAYS, settings=_NO_SETTING)


def _over_long(name: str) -> Row:
    row = _ORPO if name == "orpo" else _trl(name)
    return replace(row, settings="max_length", batches=("over_long",), variant="over-long examples")


PAIR_ROWS = (
    _trl("dpo", settings="loss_type: sigmoid"),
    _trl("cdpo", settings=_CDPO),
    _trl(
        *("cdpo", to.cdpo_to("dpo", 0.1, 0.1)),
        why="TRL's sigmoid does not read label_smoothing: this is DPO.",
        settings=_CDPO,
        variant="plain sigmoid",
        **_SMOOTHED,
    ),
    _trl(
        *("cdpo", to.cdpo_to("robust", 0.1, 0.1)),
        why="robust subtracts the loss of the flipped label and rescales; cDPO adds it.",
        settings=_CDPO,
        variant="robust",
        **_SMOOTHED | {"loss_type": ["robust"]},
    ),
    _trl(
        *("ipo", to.averaged_ipo(0.1)),
        why="TRL averages log-probabilities over the tokens of a completion, paper and code sum "
        "them.",
        settings=_NO_SETTING,
    ),
    _trl("ipo", formulation_name="trl", settings="loss_type: ipo", variant="on averages"),
    _trl("simpo", settings="loss_type: simpo, cpo_alpha: 0, simpo_gamma: beta * gamma_beta_ratio"),
    _trl(
        *("simpo", to.plus_chosen_nll(1.0)),
        why="CPOConfig's cpo_alpha is 1 unless told otherwise and adds the chosen's likelihood.",
        settings="cpo_alpha: 0",
        variant="default cpo_alpha",
        cpo_alpha=1.0,
    ),
    _trl(
        *("simpo", to.simpo_margin(2.0, 0.5, 0.25)),
        why="The code's gamma is the margin over beta, TRL's simpo_gamma the margin itself.",
        settings="simpo_gamma: beta * gamma_beta_ratio",
        variant="gamma copied",
        simpo_gamma=0.5,
    ),
    _code("orpo"),
    _ORPO,
    _code(
        *("kto", to.TWO_CLASS_MEANS),
        why="The paper takes one mean over all examples, the code adds the means of the two "
        "classes.",
    ),
    _trl("kto", settings="loss_type: kto"),
    Row(
        *(Book("kto", params=_UNEQUAL), stock("kto", **_UNEQUAL)),
        settings="desirable_weight, undesirable_weight",
        variant="unequal weights",
    ),
    _trl(
        *("kto", to.kto_one_mean()),
        why=_KTO_SAYS,
        settings="desirable_weight: 2, undesirable_weight: 2, on balanced batches",
        formulation_name="code",
    ),
    _trl(
        *("kto", to.kto_one_mean(2.0)),
        why=_KTO_SAYS,
        settings="balanced batches",
        variant="weights doubled",
        formulation_name="code",
        **dict.fromkeys(_UNEQUAL, 2.0),
    ),
    _trl("dpo_norm", settings="loss_type: sigmoid_norm"),
    _trl("apo_zero", settings="loss_type: apo_zero"),
    _trl("apo_down", settings="loss_type: apo_down"),
    _code("reward"),
    _trl("reward", settings="the default"),
    Row(
        *(Book("reward"), replace(stock("reward"), columns=("margin",))),
        settings="a column margin",
        variant="margin",
    ),
    Row(
        *(Book("reward", params=_CENTERED), stock("reward", **_CENTERED)),
        settings="center_rewards_coefficient",
        variant="centering",
    ),
    _trl("kwise", settings="a pair is a list of two", variant="two completions"),
    _code(
        *("orm", to.TOKENS_OF_THE_BATCH),
        why="The chapter averages over each completion first, the code over all tokens of the "
        "batch.",
    ),
    _sft("TRL SFTTrainer"),
    *(_over_long(name) for name in ("dpo", "kto", "simpo", "orpo", "reward")),
    _sft("TRL SFTTrainer", batches=("over_long",), variant="over-long examples"),
)

DISTILLATION_ROWS = (
    _trl(
        *("opd", to.vocabulary(), to.normalizer("sequence_sum", "token_mean")),
        why="The chapter weighs the sampled token, which has the same expected gradient, and sums "
        "over a completion; TRL sums over the vocabulary and averages over the tokens of the "
        "window.",
        settings=_NO_SETTING,
    ),
    _trl(
        "opd", formulation_name="trl", settings="beta: 1, the default", variant="whole vocabulary"
    ),
    _code(
        *("sdpo", to.vocabulary(20), to.normalizer("sequence_sum", "per_prompt")),
        why="The code tells apart the 20 likeliest tokens, and averages over the tokens of a "
        "prompt's completions.",
    ),
    Row(
        *(Book("sdpo", "code"), Book("sdpo", "trl")),
        (to.normalizer("per_prompt", "sequence_mean"),),
        "TRL's experimental SDPOTrainer averages over each completion.",
        variant="as TRL aggregates",
    ),
)


def same_code(row: Algorithm) -> bool:
    """Tell whether chapter and code are one function, so that there is nothing to compare."""
    code, chapter = row.code, row.chapter
    return isinstance(code, Formulation) and replace(code, differs=chapter.differs) == chapter


def fields_for_batches(row: Formulation) -> dict[str, Any]:
    """Return the config fields that our trainer of a formulation needs on the fixed batches."""
    of_any_row = {
        # functions of `windows.completions`
        "correctness_reward": "right",
        "format_reward": "has_format",
        "demonstration": "first",
        "teacher_models": [EMBEDDED],
        # no completion of the batches comes near the penalty, and no group is sampled again
        "soft_punish_cache": 1,
        "dynamic_sampling_rounds": 0,
    }
    needed = {name: value for name, value in of_any_row.items() if name in row.trainer_reads}
    if "soft_punish_cache" in needed:
        needed["max_completion_length"] = 80
    if "vf_coef" in row.reads:  # of PPO, whose batches have the same values on both sides
        needed |= _PPO
    return needed


def _own(name: str, formulation_name: str, row: Formulation) -> Row:
    """Return the row of a formulation and of our trainer for it, which should be equal."""
    trainer = own_trainer(name)
    right = Stock(
        fields_for_batches(row),
        label=trainer,
        trainer=trainer,
        trainer_arguments=row_arguments(name, formulation_name),
    )
    left = Book(name, formulation_name, _PPO if name == "ppo" else {})
    return Row(left, right, batches=_own_batches(name, formulation_name, row))


def _own_batches(name: str, formulation_name: str, row: Formulation) -> tuple[str, ...]:
    """Return the names of the batches on which a formulation is held against our trainer.

    To save time, they are only a few of those that fit its kind of data.
    """
    if (name, formulation_name) == ("ppo", "code"):
        return ("beta",)  # it differs from the chapter in the KL alone, and only this batch has one
    if row.trainer == "GRPOTrainer":
        batches = ["extreme", "tools"]
        if "beta" in row.reads:
            batches.append("beta")
        # In the batch `steps_per_generation` one generation feeds two windows. There formulation
        # trl divides by the tokens of an average window, and REINFORCE's baseline is the mean
        # reward of both windows, but the book's side sees one window only.
        if formulation_name != "trl" and name != "reinforce":
            batches.append("steps_per_generation")
        return tuple(batches)
    if name in MADE or row.family == "distillation":
        return ("accumulation",)
    # how a trainer cuts long examples is the same for all its rows, so one row of each shows it
    if formulation_name == "chapter" and name in ("dpo", "kto", "orpo", "reward"):
        return ("heavy", "accumulation", "over_long")
    return ("heavy", "accumulation")


def _own_rloo(formulation_name: str) -> Row:
    trainer_arguments = row_arguments("rloo", formulation_name)
    right = Stock(
        {"beta": 0.0}, "BookRLOOTrainer", "BookRLOOTrainer", trainer_arguments=trainer_arguments
    )
    batches = ("heavy", "accumulation", "steps_per_generation", "beta")
    return Row(Book("rloo", formulation_name), right, batches=batches)


OWN_ROWS = (
    *(
        _own(name, formulation_name, row)
        for name in ALGORITHMS
        for formulation_name, row in ALGORITHMS[name].formulations.items()
        if (name, formulation_name) != ("orpo", "trl")  # whose likelihood is of the prompt, too
        if (name, formulation_name) != ("rloo", "trl")  # below
        if formulation_name != "code" or not same_code(ALGORITHMS[name])
    ),
    *(_own_rloo(formulation_name) for formulation_name in ALGORITHMS["rloo"].formulations),
    _sft("BookSFTTrainer", batches=("ragged", "accumulation")),
)
"""Our trainers, against the functions that they are to compute."""

ROWS = (*POLICY_ROWS, *KL_ROWS, *PAIR_ROWS, *DISTILLATION_ROWS, *OWN_ROWS)
