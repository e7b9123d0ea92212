"""Every field of TRL's GRPO, RLOO, SFT, DPO, KTO, ORPO, CPO and Reward configs, in three lists.

A field in LOSS_FIELDS that a config sets, and that the chosen formulation neither reads nor fixes
to the same value, is an error.
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

    baseline baseline_decay baseline_value class_weights cliprange_value correctness_reward
    dynamic_sampling_rounds format_reward gamma gamma_beta_ratio importance_cap kl_estimator lam
    nll_weight soft_punish_cache vf_coef whiten_advantages
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

NEUTRAL_FIELDS = _fields(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs
    activation_offloading adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size
    batch_eval_metrics bf16 bf16_full_eval cache_implementation chat_template_kwargs
    chat_template_path data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_kwargs dataset_num_proc
    dataset_text_field ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
    ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm
    do_eval do_predict do_train ds3_gather_for_generation enable_jit_checkpoint eos_token
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_packing
    eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
    full_determinism generate_during_eval generation_kwargs gradient_accumulation_steps
    gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
    hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_for_metrics include_num_input_tokens_seen is_encoder_decoder label_names
    learning_rate length_column_name liger_kernel_config load_best_model_at_end local_rank
    log_completions log_completions_hub_repo log_level log_level_replica log_multimodal
    log_on_each_node log_unique_prompts logging_first_step logging_nan_inf_filter logging_steps
    logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs
    num_completions_to_print num_train_epochs optim optim_args optim_target_modules output_dir
    packing packing_strategy pad_to_multiple_of pad_token padding_free padding_value
    parallelism_config per_device_eval_batch_size per_device_train_batch_size
    precompute_ref_batch_size precompute_ref_log_probs prediction_loss_only project push_to_hub
    remove_unused_columns repetition_penalty report_to restore_callback_states_from_checkpoint
    resume_from_checkpoint run_name save_on_each_node save_only_model save_steps save_strategy
    save_total_limit seed shuffle_dataset skip_memory_metrics tf32 top_k top_p torch_compile
    torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id train_sampling_strategy
    transformers_continuous_batching_config trust_remote_code use_cache use_cpu
    use_liger_kernel use_transformers_continuous_batching use_transformers_paged use_vllm
    vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_max_model_length
    vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
    vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size warmup_steps
    weight_decay
    """
)
"""Fields that never touch a loss: sampling, data, logging, the rest of TrainingArguments."""
