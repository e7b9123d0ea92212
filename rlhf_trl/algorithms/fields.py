"""The fields of TRL's GRPO, RLOO, SFT, DPO, KTO, ORPO, CPO and Reward configs that touch a loss.

A field in LOSS_FIELDS that a config sets, and that the chosen formulation neither reads nor fixes
to the same value, is an error. All others of the recorded release (compare/surface.json) never
touch a loss: sampling, data, logging, the rest of TrainingArguments.
"""


def _fields(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOSS_FIELDS = _fields(
    """
    alpha beta center_rewards_coefficient cpo_alpha delta desirable_weight discopop_tau
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon
    epsilon_high f_alpha_divergence_coef f_divergence_type importance_sampling_level
    label_smoothing ld_alpha loss_type loss_weights multi_objective_aggregation
    normalize_advantages off_policy_mask_threshold reward_clip_range sapo_temperature_neg
    sapo_temperature_pos scale_rewards simpo_gamma top_entropy_quantile undesirable_weight
    use_adaptive_entropy use_bias_correction_kl use_weighting vespo_k_neg vespo_k_pos
    vespo_lambda_neg vespo_lambda_pos

    distillation_add_tail distillation_alpha distillation_is_clip distillation_mode
    distillation_topk distillation_weight

    baseline baseline_decay baseline_value class_weights cliprange_value correctness_reward
    demonstration demonstration_template dynamic_sampling_rounds format_reward gamma
    gamma_beta_ratio importance_cap kl_estimator kl_top_k lam missing_eos_penalty nll_weight
    soft_punish_cache teacher teacher_models teacher_rate teacher_weights vf_coef whiten_advantages
    """
)
"""Fields that change a loss, each for some algorithms only: TRL's, then this package's own."""

SHARED_FIELDS = _fields(
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
