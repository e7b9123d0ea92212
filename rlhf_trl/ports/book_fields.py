"""The fields of the book's published code: what becomes of each in a config here.

`DEFAULTS` has them with the values that the code uses where a config is silent.
"""

from collections.abc import Callable
from typing import Any

from rlhf_trl.book.selection import STRATEGIES
from rlhf_trl.ports.comments import Differs, Note

_WANDB = {"wandb_entity": None, "wandb_project": None, "wandb_run_name": None}
_PAIRS = "argilla/ultrafeedback-binarized-preferences-cleaned"
RATED_PAIRS = (_PAIRS, "huggingfaceh4/ultrafeedback_binarized")
"""Data sets of the reader `ultrafeedback`, in small letters."""
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
chat_template_source>chat_template_fallback clip_eps_lo>epsilon clip_eps_hi>epsilon_high
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
# What the comment of a field adds, or why it is left out; of one kind under "kind/field".
SAVED = "the model at the end is saved in any case"
_PLACED = "accelerate places the models"
_END = Differs(
    "does not train the end of an answer where the tokenizer pads with it (not Qwen3's)",
    "it is always trained",
)
_LAST_STEP = Differs(
    "divides the last, smaller step of an epoch by gradient_accumulation_steps, too",
    "by the micro-batches that it has",
)
NOTES: dict[str, Note] = {
    # where it runs, what it writes
    **dict.fromkeys(("device", "device_id", "model_device_id", "ref_model_device_id"), _PLACED),
    **dict.fromkeys(("val_model_device_id", "reward_model_device_id"), _PLACED),
    "wandb_entity": "set WANDB_ENTITY in the shell",
    "use_wandb": "write report_to: wandb",
    "save_model": SAVED,
    "save_checkpoint": SAVED,
    "log_every": Differs("does not read it and logs every step", "steps between logs"),
    "eval_every": "the book's code does not read it; nothing is evaluated there or here",
    "freeze_backbone": "the whole model is trained, as in the book's code with false",
    "skip_demo": "no demo follows the training here",
    # sampling
    "rollout_batch_size": "TRL generates the whole buffer at once",
    "num_rollouts": "completions per prompt",
    "max_new_tokens": _END,
    "rejection_sampling/max_new_tokens": Differs(
        "puts an end of turn behind an answer that this limit cut, and trains it",
        "such an answer is trained as it is",
    ),
    "max_prompt_len": Differs("cuts longer prompts", "prompts are not cut"),
    "max_reprompt_len": Differs("cuts longer prompts of the teacher", "prompts are not cut"),
    "eval_temperature": "the book's code answers greedily whatever it says, and so is done here",
    "score_batch_size": "per_device_eval_batch_size is for both",
    "eval_batch_size": "per_device_eval_batch_size is for both",
    "sample_do_sample": Differs("has one answer a prompt", "a greedy and a sampled one"),
    "sample_max_input_tokens": Differs("cuts longer prompts", "prompts of panels are not cut"),
    # losses
    "l_cache": "tokens before the limit, over which the penalty grows",
    "direct_alignment/gamma": "a ratio to beta; TRL's simpo_gamma is beta x gamma",
    "vf_coef": Differs(
        "starts the critic's head at random in bfloat16, so that the first values have about 0.6 "
        "times the size of the hidden states",
        "it starts in float32 at 0, and so do the values",
    ),
    # updates
    "train_batch_size": "completions per process",
    "instruction_tuning/batch_size": Differs(
        "averages over the tokens of each micro-batch, then over the micro-batches of a step",
        "over all tokens of the step: in a micro-batch with twice as many as another, a token "
        "weighs half as much there and the same here",
    ),
    "rejection_sampling/train_batch_size": Differs(
        "averages over the tokens of each micro-batch, then over the micro-batches of a step",
        "over all tokens of the step: in a micro-batch with twice as many as another, a token "
        "weighs half as much there and the same here",
    ),
    "direct_alignment/gradient_accumulation_steps": _LAST_STEP,
    "rejection_sampling/batch_acc": _LAST_STEP,
    "instruction_tuning/gradient_accumulation_steps": Differs(
        "drops the micro-batches that are left at the end of an epoch",
        "they make one more, smaller step",
    ),
    "grad_accum_steps": Differs(
        "leaves out the last incomplete micro-batch of an epoch, and divides a smaller last step "
        "by grad_accum_steps, too",
        "both are trained, the step divided by the micro-batches that it has",
    ),
    "weight_decay": Differs("decays all weights", "all but biases and norms"),
    "warmup_ratio": "a share of all steps",
    "reward_models/warmup_ratio": Differs(
        "rounds a share of all steps down", "up: one step more, unless it is whole"
    ),
    # data
    "direct_alignment/max_length": Differs(
        "keeps the last tokens of each text by itself, even of an answer that is longer",
        "both texts of a pair lose the same first tokens of their prompt, and a pair with an "
        "answer of this length is dropped",
    ),
    "instruction_tuning/max_length": "what is longer loses its end, as in the book's code",
    "max_seq_length": "what is longer loses its start, as in the book's code",
    "chat_template_source": "where the tokenizer has no template, as in the book's code",
    "max_samples": "the first so many pairs",
    "truncation_mode": "the book's code does not read it, whatever it says",
}


def note_of(kind: str, name: str) -> Note:
    """Return what a comment adds to a field of that kind of config; "": nothing."""
    return NOTES.get(f"{kind}/{name}", NOTES.get(name, ""))


OFF = {"warmup_ratio": 0.0, "weight_decay": 0.0}
"""Values of fields at which there is nothing to note."""

MEANINGS = {
    # data
    "data.specs": "reasoning-gym tasks: name, weight and config of each",
    "data.size": "questions in a pass over the data",
    "data.name": "data set of the hub",
    "data.subset": "its config",
    "data.train_split": "split whose questions are answered and trained on",
    "data.test_split": "split of the evaluation",
    "data.max_train_samples": "use the first so many questions",
    "data.max_test_samples": "evaluate on the first so many questions",
    "dataset_name": "data set of the hub",
    "dataset_split": "its split",
    "max_samples": "use the first so many rows",
    "samples": "rows to take, held-out ones among them",
    "val_ratio": "share of them to hold out",
    "rollouts_per_prompt": "answers of a question to take (outcome reward model)",
    "max_steps": "steps of an example; longer traces become several (process reward model)",
    # model
    "model_name": "model to train",
    "model_id": "model to start the reward model from",
    "ref_model_name": "reference model; null: the model itself",
    "reward_model_name": "model that scores the answers",
    "chat_template_source": "whose chat template to take where the tokenizer has none",
    "freeze_backbone": "train the head alone",
    # loss
    "loss": "name of the algorithm",
    "beta": "weight of the KL to the reference",
    "direct_alignment/beta": "scale of the implicit rewards; of ORPO, weight of the odds ratio",
    "kl_estimator": "estimator of the KL",
    "clip_eps_lo": "distance of the lower clip bound from 1",
    "clip_eps_hi": "distance of the upper clip bound from 1",
    "clip_eps_val": "how far a value may move before it is clipped",
    "gamma": "discount factor of GAE",
    "direct_alignment/gamma": "SimPO's margin over beta",
    "lam": "mixing parameter of GAE",
    "vf_coef": "weight of the value loss",
    "sapo_temp_pos": "temperature of SAPO's gate, advantage above 0",
    "sapo_temp_neg": "temperature of SAPO's gate, other advantages",
    "l_cache": "tokens over which DAPO's overlong penalty grows",
    "l_max": "length at which it is whole",
    "accuracy_min_reward": "correctness of a wrong answer, for DAPO's filter",
    "accuracy_max_reward": "correctness of a right answer, for DAPO's filter",
    "format_weight": "weight of the reward for the four tags",
    "label_smoothing": "share of flipped labels",
    "kl_top_k": "likeliest tokens whose probabilities are compared",
    "success_reward_threshold": "score from which an answer is a demonstration",
    # sampling
    "temperature": "of the sampled answers",
    "top_p": "share of the probability to sample from",
    "top_k": "sample from so many likeliest tokens",
    "min_p": "least share of the likeliest token's probability",
    "repetition_penalty": "penalty on tokens that came before",
    "max_new_tokens": "longest answer, in tokens",
    "max_prompt_len": "longest prompt of the student, in tokens",
    "max_reprompt_len": "longest prompt of the teacher, in tokens",
    "enable_thinking": "whether the chat template lets the model think",
    "prompts_per_step": "prompts of a buffer",
    "num_rollouts": "answers to each prompt",
    "num_completions_per_prompt": "answers to each prompt",
    "rollout_batch_size": "prompts that are answered at a time",
    "score_batch_size": "answers that are scored at a time",
    "selection.strategy": "which answers are trained on",
    "selection.top_k": "how many, of the strategies over all prompts",
    # updates
    "lr": "learning rate",
    "learning_rate": "learning rate",
    "warmup_ratio": "share of all steps over which the rate grows",
    "lr_scheduler": "linear_decay to 0, or warmup_only",
    "weight_decay": "of AdamW",
    "max_norm": "largest norm of the gradient",
    "max_grad_norm": "largest norm of the gradient",
    "num_steps": "optimizer steps",
    "num_epochs": "passes over the data",
    "epochs": "passes over the data",
    "batch_size": "examples of a micro-batch",
    "train_batch_size": "answers of a micro-batch",
    "rollout_chunk": "answers of a micro-batch",
    "batch_acc": "micro-batches of an optimizer step",
    "grad_accum_steps": "micro-batches of an optimizer step",
    "gradient_accumulation_steps": "micro-batches of an optimizer step",
    "max_length": "longest example, in tokens",
    "max_seq_length": "longest example, in tokens",
    "max_tokens": "longest example, in tokens (process reward model)",
    "max_prompt_length": "longest prompt, in tokens",
    "max_completion_length": "longest answer, in tokens",
    "truncation_mode": "which end of a longer example stays",
    "bf16": "weights and computation in bfloat16",
    "gradient_checkpointing": "compute activations again instead of keeping them",
    "seed": "of data, sampling and initial weights",
    # evaluation and output
    "eval_every": "steps between evaluations",
    "eval_interval": "optimizer steps between evaluations; 0: at the end of an epoch",
    "eval_temperature": "of the answers in evaluation",
    "eval_max_new_tokens": "longest answer in evaluation, in tokens",
    "eval_batch_size": "questions that are evaluated at a time",
    "sample_every": "steps between panels of sampled answers; 0: none",
    "sample_num_prompts": "prompts of a panel",
    "sample_prompt_strategy": "how its prompts are chosen",
    "sample_prompts_file": "file of its prompts",
    "sample_do_sample": "sample its answers",
    "sample_temperature": "of its answers",
    "sample_top_p": "share of the probability to sample its answers from",
    "sample_max_tokens": "longest answer of a panel, in tokens",
    "sample_max_input_tokens": "longest prompt of a panel, in tokens",
    "output_dir": "folder of what is written",
    "save_model": "save the model at the end",
    "save_checkpoint": "save the model at the end",
    "log_every": "steps between logs",
    "wandb_entity": "account of Weights & Biases",
    "wandb_project": "project there; null: no logs",
    "wandb_run_name": "name of the run there",
    "use_wandb": "write logs to Weights & Biases",
    "skip_demo": "score no example after training",
    # machine
    **dict.fromkeys(
        ("device", "device_id", "model_device_id", "ref_model_device_id", "val_model_device_id"),
        "where a model is",
    ),
    "reward_model_device_id": "where a model is",
}
"""What the book's code means by a field; of one kind under "kind/field"."""


def meaning_of(kind: str, name: str) -> str:
    """Return what the book's code means by a field of that kind of config."""
    return MEANINGS.get(f"{kind}/{name}") or MEANINGS[name]


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
