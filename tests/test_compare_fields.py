"""Every field that can change an update: what `compare --require` says when a config sets it."""

from dataclasses import fields

import pytest
import yaml

from rlhf_trl.algorithms import LOSS_FIELDS, SHARED_FIELDS
from rlhf_trl.compare import closest, subjects
from rlhf_trl.compare.closest import distances
from rlhf_trl.compare.matrix import Matrix
from rlhf_trl.compare.subjects import TRAINERS, read_subject
from rlhf_trl.compare.trainers import trainer_classes

# A config that is an algorithm, by its trainer. RLOO and ORPO are equal to no printed equation.
STARTS = {
    "GRPOTrainer": ("grpo", {"loss_type": "grpo"}),
    "DPOTrainer": ("dpo", {"loss_type": "sigmoid"}),
    "KTOTrainer": ("kto", {}),
    "RewardTrainer": ("reward", {}),
    "CPOTrainer": ("simpo", {"loss_type": "simpo", "cpo_alpha": 0.0}),
}
NEVER_EQUAL = {"RLOOTrainer", "ORPOTrainer"}
OTHER_KERNELS = ("use_vllm", "use_liger_kernel")

# Another value of each field with what it makes of the config: another loss ("differs"), one that
# the batches cannot settle ("not known"), or the same for the reason given.
PARAMETER = "a parameter of the algorithm"
OTHER_LOSS = "read by another loss_type only"
OWN = "the batches have their own"
WITH_VLLM = "read with use_vllm only"
ADAPTIVE = "read with use_adaptive_entropy only"
SYNCED = "read with sync_ref_model only"
CHANGED = {
    "average_tokens_across_devices": (
        False,
        "these losses are normalized otherwise",
    ),
    "label_smoothing_factor": (0.1, "for transformers' own loss, which none of these takes"),
    "neftune_noise_alpha": (5.0, "not known"),
    "router_aux_loss_coef": (0.1, "not known"),
    "disable_dropout": (False, "not known"),
    "use_liger_kernel": (True, "not known"),
    "use_vllm": (True, "not known"),
    "cast_lm_head_to_fp32": (True, "the batches' model is in float32"),
    "num_generations": (16, OWN),
    "num_generations_eval": (4, OWN),
    "max_completion_length": (64, OWN),
    "max_length": (64, "the texts of the batches are shorter"),
    "truncation_mode": ("keep_end", "the texts of the batches are shorter"),
    "generation_batch_size": (64, "a schedule that is among the batches"),
    "steps_per_generation": (2, "a schedule that is among the batches"),
    "num_iterations": (2, "a schedule that is among the batches"),
    "reward_weights": ([1.0, 2.0], OWN),
    "temperature": (0.7, "differs"),
    # GRPO's is TRL's default KL, which is not the chapter's
    "beta": (0.3, {"GRPOTrainer": "differs"}, PARAMETER),
    "epsilon": (0.1, PARAMETER),
    "epsilon_high": (0.3, PARAMETER),
    "delta": (2.0, "differs"),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), (2.0, OTHER_LOSS)),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos"), (1.0, OTHER_LOSS)),
    **dict.fromkeys(("vespo_k_neg", "vespo_lambda_neg"), (1.0, OTHER_LOSS)),
    "importance_sampling_level": ("sequence", "differs"),
    "multi_objective_aggregation": ("normalize_then_sum", "differs"),
    "scale_rewards": ("batch", "differs"),
    "loss_type": ("hinge", "differs"),
    "mask_truncated_completions": (True, "differs"),
    "sync_ref_model": (True, {"GRPOTrainer": "beta is 0: no reference is read"}, "not known"),
    "ref_model_mixup_alpha": (0.5, SYNCED),
    "ref_model_sync_steps": (2, SYNCED),
    "top_entropy_quantile": (0.5, "differs"),
    "entropy_coef": (0.1, "differs"),
    "use_adaptive_entropy": (True, "not known"),
    "entropy_coef_min": (0.1, ADAPTIVE),
    "entropy_coef_max": (0.5, ADAPTIVE),
    "entropy_coef_delta": (0.1, ADAPTIVE),
    "entropy_target": (0.5, ADAPTIVE),
    "vllm_importance_sampling_correction": (False, WITH_VLLM),
    "vllm_importance_sampling_mode": ("token_mask", WITH_VLLM),
    "vllm_importance_sampling_clip_max": (2.0, WITH_VLLM),
    "vllm_importance_sampling_clip_min": (0.5, WITH_VLLM),
    "vllm_importance_sampling_cap": (2.0, WITH_VLLM),
    "off_policy_mask_threshold": (0.1, "differs"),
    "use_bias_correction_kl": (False, "beta is 0: there is no KL"),
    "loss_weights": ([0.5], "differs"),
    "ld_alpha": (0.5, "differs"),
    "f_divergence_type": ("js_divergence", "differs"),
    "f_alpha_divergence_coef": (0.7, "read with another f_divergence_type only"),
    "label_smoothing": (0.1, "sigmoid and simpo do not read it", {"CPOTrainer": "differs"}),
    "use_weighting": (True, "differs"),
    "discopop_tau": (0.1, OTHER_LOSS),
    "desirable_weight": (2.0, PARAMETER),
    "undesirable_weight": (2.0, PARAMETER),
    "center_rewards_coefficient": (0.1, PARAMETER),
    "cpo_alpha": (0.5, "differs"),
    "simpo_gamma": (1.0, PARAMETER),
    "alpha": (0.1, "differs"),
}
LOSS_TYPES = {"GRPOTrainer": "bnpo", "KTOTrainer": "apo_zero_unpaired"}


def of(trainer):
    """The fields of a trainer's config that can change an update."""
    known = LOSS_FIELDS | SHARED_FIELDS | set(OTHER_KERNELS)
    return [f.name for f in fields(trainer_classes(trainer)[1]) if f.name in known]


def said(name, trainer):
    """What is expected of a changed field of a trainer, in words."""
    exceptions = {}
    for each in CHANGED[name][1:]:
        exceptions |= each if isinstance(each, dict) else {}
    general = next(each for each in CHANGED[name][1:] if isinstance(each, str))
    return exceptions.get(trainer, general)


def test_there_is_a_value_for_every_field_that_can_change_an_update():
    assert set(STARTS) | NEVER_EQUAL == set(TRAINERS)
    assert {name for trainer in STARTS for name in of(trainer)} == set(CHANGED)
    assert set(subjects.UNSHOWN) <= set(CHANGED) | {"reward_clip_range"}  # RLOO's


@pytest.fixture
def shared(monkeypatch):
    matrix = Matrix()
    monkeypatch.setattr(closest, "Matrix", lambda: matrix)


def found(path, trainer, name):
    algorithm, start = STARTS[trainer]
    value = CHANGED[name][0] if name != "loss_type" else LOSS_TYPES.get(trainer, "hinge")
    path.write_text(yaml.safe_dump({**start, name: value}))
    [asked] = distances(read_subject(path, trainer), [(algorithm, "chapter")])
    if asked.equal:
        return "equal"
    return "not known" if asked.untested else "differs"


def expected(name, trainer):
    words = said(name, trainer)
    return words if words in ("differs", "not known") else "equal"


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        *(("GRPOTrainer", name) for name in ("mask_truncated_completions", "use_vllm", "delta")),
        *(("DPOTrainer", name) for name in ("sync_ref_model", "neftune_noise_alpha", "ld_alpha")),
    ],
)
def test_a_field_that_changes_the_update_is_no_longer_equal(shared, tmp_path, trainer, name):
    assert found(tmp_path / "run.yaml", trainer, name) == expected(name, trainer) != "equal"


@pytest.mark.promise
@pytest.mark.parametrize("trainer", STARTS)
def test_every_field_is_measured_or_refused_or_inert(shared, tmp_path, trainer):
    path, names = tmp_path / "run.yaml", of(trainer)
    answers = {name: found(path, trainer, name) for name in names}
    assert answers == {name: expected(name, trainer) for name in names}


def test_a_config_whose_sampler_is_vllm_is_known_without_the_correction(shared, tmp_path):
    path = tmp_path / "run.yaml"
    off, mode = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    for also, known in (({}, False), ({off: False}, True), ({mode: "token_mask"}, True)):
        path.write_text(yaml.safe_dump({"loss_type": "grpo", "use_vllm": True, **also}))
        [asked] = distances(read_subject(path, "GRPOTrainer"), [("grpo", "chapter")])
        assert asked.equal == known, also


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("generation_kwargs: {temperature: 0.6, top_k: 20}", ("temperature", "top_k")),
        ("{top_p: 0.95, min_p: 0.1}", ("top_p", "min_p")),
        ("{top_p: 1.0, top_k: 0}", ()),
    ],
)
def test_a_sampler_unlike_the_scorer_is_named_with_the_correction(shared, tmp_path, text, named):
    path = tmp_path / "run.yaml"
    fields = {"loss_type": "grpo", "use_vllm": True, **yaml.safe_load(text)}
    for mode, expected in (
        ({}, ("vllm_importance_sampling_correction", *named)),
        ({"vllm_importance_sampling_mode": "sequence_mask"}, ()),
    ):
        path.write_text(yaml.safe_dump(fields | mode))
        [asked] = distances(read_subject(path, "GRPOTrainer"), [("grpo", "chapter")])
        assert asked.untested == expected


def test_a_term_at_the_value_that_turns_it_off_is_none(shared, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{loss_type: grpo, top_entropy_quantile: 1.0, entropy_coef: 0.0}")
    [asked] = distances(read_subject(path, "GRPOTrainer"), [("grpo", "chapter")])
    assert asked.equal
