"""The fields of the book's published code: what becomes of each in a config here.

`DEFAULTS` has them with the values that the code uses where a config is silent.
"""

from collections.abc import Callable
from typing import Any

from rlhf_trl.book.selection import STRATEGIES

_WANDB = {"wandb_entity": None, "wandb_project": None, "wandb_run_name": None}
_PAIRS = "argilla/ultrafeedback-binarized-preferences-cleaned"
_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "max_new_tokens": 512}
_GYM = {**_WANDB, **_SAMPLING, "data.specs": None, "data.size": 3000, "device": "auto"}
_GYM |= {"model_name": "Qwen/Qwen3-1.7B", "prompts_per_step": 4, "num_rollouts": 8}
_GYM |= {"max_norm": 1.0, "seed": 42, "model_device_id": 0}
_PANELS: dict[str, Any] = {"sample_max_tokens": 128, "sample_max_input_tokens": 512}
_PANELS |= {"sample_temperature": 0.7, "sample_top_p": 0.9, "sample_do_sample": True}
DEFAULTS: dict[str, dict[str, Any]] = {
    "policy_gradients": _GYM
    | dict(loss="grpo", clip_eps_lo=0.2, clip_eps_hi=0.2, clip_eps_val=0.2, gamma=0.99, lam=0.95)
    | dict(vf_coef=0.1, val_model_device_id=0, sapo_temp_pos=1.0, sapo_temp_neg=1.05, l_cache=256)
    | dict(l_max=512, accuracy_min_reward=0.0, accuracy_max_reward=1.0, format_weight=0.5)
    | dict(beta=0.0, kl_estimator="kl3", ref_model_device_id=0, lr=5e-6, train_batch_size=2)
    | dict(batch_acc=4, rollout_batch_size=8),
    "distillation": _GYM
    | dict(loss="sdpo", kl_top_k=100, success_reward_threshold=1.0, repetition_penalty=1.0)
    | dict(max_new_tokens=1024, max_prompt_len=2048, max_reprompt_len=10240, enable_thinking=True)
    | dict(lr=1e-6, warmup_ratio=0.05, rollout_chunk=4, num_steps=200),
    "direct_alignment": _WANDB
    | dict(model_name="allenai/OLMo-2-0425-1B-SFT", ref_model_name=None, loss="dpo", beta=0.1)
    | dict(gamma=0.5, label_smoothing=0.0, dataset_name=_PAIRS, dataset_split="train")
    | dict(max_samples=1000, max_length=512, max_prompt_length=None, max_completion_length=None)
    | dict(truncation_mode="keep_end", learning_rate=5e-7, num_epochs=1, batch_size=4)
    | dict(gradient_accumulation_steps=4, warmup_ratio=0.1, weight_decay=0.0, max_grad_norm=1.0)
    | dict(gradient_checkpointing=True, bf16=True, log_every=10, eval_every=100, sample_every=25)
    | dict(sample_num_prompts=3, sample_prompts_file=None, sample_prompt_strategy="round_robin")
    | _PANELS
    | dict(output_dir="./outputs", save_model=False, seed=42, device="auto"),
    "instruction_tuning": dict(wandb_project=None, wandb_run_name=None)
    | dict(model_name="allenai/OLMo-2-0425-1B", chat_template_source="allenai/OLMo-2-0425-1B-SFT")
    | dict(dataset_name="HuggingFaceH4/no_robots", dataset_split="train", max_samples=None)
    | dict(max_length=2048, lr=5e-6, num_epochs=3, batch_size=4, gradient_accumulation_steps=8)
    | dict(warmup_ratio=0.1, weight_decay=0.0, max_grad_norm=1.0, seed=42, bf16=True)
    | dict(gradient_checkpointing=True, device="auto", model_device_id=0, sample_every=50)
    | _PANELS,
    "rejection_sampling": _WANDB
    | {"data.name": "openai/gsm8k", "data.subset": "main", "data.train_split": "train"}
    | {"data.test_split": "test", "data.max_train_samples": 1000, "data.max_test_samples": 200}
    | {"selection.strategy": "(none)", "selection.top_k": 500, "model_name": "Qwen/Qwen3-1.7B"}
    | _SAMPLING
    | dict(temperature=0.8, num_completions_per_prompt=8, rollout_batch_size=8, score_batch_size=2)
    | dict(reward_model_name="nvidia/AceMath-7B-RM", lr=5e-6, num_epochs=2, train_batch_size=1)
    | dict(batch_acc=8, max_norm=1.0, max_seq_length=1024, eval_temperature=0.0, device="auto")
    | dict(eval_max_new_tokens=512, eval_batch_size=8, seed=42, model_device_id=0)
    | dict(reward_model_device_id=0, output_dir="./rejection_sampling/output")
    | dict(save_checkpoint=False),
    "reward_models": dict(model_id="Qwen/Qwen3-0.6B-Base", freeze_backbone=False, samples=5000)
    | dict(dataset_name=_PAIRS, dataset_split="train", rollouts_per_prompt=32, max_length=512)
    | dict(max_steps=20, max_tokens=5500, batch_size=2, grad_accum_steps=8, epochs=2, lr=5e-5)
    | dict(warmup_ratio=0.1, val_ratio=0.1, eval_interval=25, lr_scheduler="linear_decay", seed=123)
    | dict(device="cuda", device_id=0, use_wandb=True, skip_demo=False),
}
# What each field becomes, another name behind ">"; those that are not here are left out, or read by
# the function of their kind.
_TO = """
seed beta label_smoothing lam vf_coef kl_top_k max_samples max_length gamma weight_decay bf16
learning_rate max_grad_norm gradient_accumulation_steps kl_estimator output_dir repetition_penalty
model_name>model_name_or_path model_id>model_name_or_path reward_model_name>reward_model
chat_template_source>chat_template_path clip_eps_lo>epsilon clip_eps_hi>epsilon_high
clip_eps_val>cliprange_value sapo_temp_pos>sapo_temperature_pos sapo_temp_neg>sapo_temperature_neg
l_cache>soft_punish_cache max_new_tokens>max_completion_length max_seq_length>max_length
num_rollouts>num_generations num_completions_per_prompt>num_generations num_steps>max_steps
batch_size>per_device_train_batch_size train_batch_size>per_device_train_batch_size
rollout_chunk>per_device_train_batch_size batch_acc>gradient_accumulation_steps
grad_accum_steps>gradient_accumulation_steps num_epochs>num_train_epochs epochs>num_train_epochs
lr>learning_rate max_norm>max_grad_norm warmup_ratio>warmup_steps lr_scheduler>lr_scheduler_type
gradient_checkpointing>activation_checkpointing save_model>save_strategy log_every>logging_steps
wandb_run_name>run_name wandb_project>project
"""
TO = {name: to or name for name, _, to in (word.partition(">") for word in _TO.split())}
OF_KIND = {
    "direct_alignment": TO | {"gamma": "gamma_beta_ratio"},
    "instruction_tuning": TO | {"max_samples": ""},
    "rejection_sampling": TO | {n: n for n in ("temperature", "top_p", "top_k", "min_p")},
}
_SCHEDULES = {"linear_decay": "linear", "warmup_only": "constant_with_warmup"}
CONVERT: dict[str, Callable[[Any], Any]] = {
    "kl_estimator": lambda name: name.replace("kl", "k"),
    "lr_scheduler": _SCHEDULES.__getitem__,
    "save_model": lambda save: "epoch" if save else "no",
    "warmup_ratio": float,
}
# What the comment of a field adds, or why it is left out.
SAVED = "the model at the end is saved in any case"
_PLACED = "accelerate places the models"
NOTES = {
    **{f"{of}device_id": _PLACED for of in ("", "model_", "ref_model_")},
    **dict.fromkeys(("device", "val_model_device_id", "reward_model_device_id"), _PLACED),
    "wandb_entity": "set WANDB_ENTITY in the shell",
    **{"save_model": SAVED, "save_checkpoint": SAVED, "use_wandb": "write report_to: wandb"},
    "rollout_batch_size": "TRL generates the whole buffer at once",
    "l_cache": "tokens before the limit, over which it grows",
    "gamma": "a ratio to beta; TRL's simpo_gamma is beta x gamma",
    **{"num_rollouts": "completions per prompt", "train_batch_size": "completions per process"},
    "max_length": "what is longer loses the start of its prompt",
    "max_seq_length": "what is longer loses its end, and in the code its start",
    "max_samples": "the first so many pairs",
    "warmup_ratio": "below 1 it is a share of all steps",
    "truncation_mode": "the code does not read it",
    "eval_every": "the code's training never evaluates",
    "eval_temperature": "the code answers greedily whatever it says",
    **{f"{of}_batch_size": "per_device_eval_batch_size is for both" for of in ("score", "eval")},
    "sample_do_sample": "panels have a greedy and a sampled answer",
    **{f"max_{of}_len": "prompts are not cut" for of in ("prompt", "reprompt")},
    "sample_max_input_tokens": "prompts of panels are not cut",
    "skip_demo": "TRL shows no demo after training",
}
# Which values carry over, and what to say of others.
_SHARE = (lambda v: 0 <= v < 1, "; write a number from 0 to below 1")  # from 1 on, steps or rows
_PICKED = ("fixed", "round_robin")
_UNCUT = (lambda v: v is None, ", and the recipes cut by max_length only; remove it")
_COUNTED = "prompts_per_step num_rollouts train_batch_size batch_acc rollout_chunk samples"
_COUNTED += " max_samples data.max_train_samples data.max_test_samples"
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{name: (lambda v: v is None or v >= 1, "; write 1 or more") for name in _COUNTED.split()},
    **{"warmup_ratio": _SHARE, "val_ratio": _SHARE},
    **{"max_prompt_length": _UNCUT, "max_completion_length": _UNCUT},
    "kl_estimator": (lambda v: v in ("kl1", "kl2", "kl3"), "; write kl1, kl2 or kl3"),
    "lr_scheduler": (lambda v: v in _SCHEDULES, f"; write {' or '.join(_SCHEDULES)}"),
    "selection.strategy": (lambda v: v in STRATEGIES, f"; write {', '.join(STRATEGIES)}"),
    "sample_prompt_strategy": (lambda v: v in _PICKED, f"; write {' or '.join(_PICKED)}"),
    "freeze_backbone": (lambda v: not v, ", and the recipes train the whole model; write false"),
    "success_reward_threshold": (lambda v: v == 1, ", and the recipe takes 1 for right; write 1.0"),
}
NULLABLE = {"max_samples": int, "chat_template_source": str, "data.max_train_samples": int}
