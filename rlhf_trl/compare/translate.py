"""A config of the book's published code, as one for this project's recipes.

The tables say what becomes of each field; `DEFAULTS` has them with the values that the code uses
where a config is silent. What a line of a table cannot say (several fields that become one, values
that do not carry over) is in the function of the kind of config.
"""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlhf_trl import algorithms
from rlhf_trl.book.selection import STRATEGIES
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.run.yaml_loader import dump_yaml, read_yaml

WIDTH = 100

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
_SAVED, _PLACED = "the model at the end is saved in any case", "accelerate places the models"
NOTES = {
    **{f"{of}device_id": _PLACED for of in ("", "model_", "ref_model_")},
    **dict.fromkeys(("device", "val_model_device_id", "reward_model_device_id"), _PLACED),
    "wandb_entity": "set WANDB_ENTITY in the shell",
    **{"save_model": _SAVED, "save_checkpoint": _SAVED, "use_wandb": "write report_to: wandb"},
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


def translate(path: str | Path, output: str | Path = "THIS_FILE") -> str:
    """Translate a YAML config of the book's code for a recipe, whose command has the `output`.

    A field that the code does not have, a value that is not one, and what does not carry over are
    an InputError.
    """
    given = read_yaml(path)
    for block in ("data", "selection"):
        inside = given.pop(block, None)
        inside = inside if isinstance(inside, dict) else {}
        given |= {f"{block}.{name}": value for name, value in inside.items()}
    sheet = _Sheet(path, given, _kind(path, given), output)
    _FILL[sheet.kind](sheet)
    return sheet.text()


def write_translation(path: str | Path, output: str | Path) -> None:
    """Translate a config into a new file; one that is there already is an InputError."""
    text = translate(path, output)
    if Path(output).exists():
        raise InputError(f"--output: {output} exists; name a new file.")
    write_whole(output, lambda part: part.write_text(text, encoding="utf-8"))


def _kind(path: Any, given: Mapping[str, Any]) -> str:
    """Tell what a config is for by its loss, else by the fields that it has."""
    kinds = ("policy_gradient", "direct_alignment", "distillation")
    losses = {name: kind for kind in kinds for name in algorithms.names(kind, "code")}
    if (loss := given.get("loss")) is not None:
        if loss not in losses:
            hint = nearest(loss, losses)
            raise InputError(f"{path}: loss is {loss!r}{hint}; write one of {', '.join(losses)}.")
        return losses[loss].replace("gradient", "gradients")
    known = {kind: len(given.keys() & fields.keys()) for kind, fields in DEFAULTS.items()}
    most = [kind for kind, count in known.items() if count == max(known.values())]
    if len(most) > 1:
        what = f"a config of the book's code: its fields fit {', '.join(most)} alike"
        raise InputError(f"{path}: this is not {what}; write those of one, such as its loss.")
    return most[0]


class _Sheet:
    """A config in the making: the book's on one side, the lines of the new one on the other."""

    def __init__(self, path: Any, given: dict[str, Any], kind: str, output: Any):
        self.path, self.given, self.kind, self.output = path, given, kind, output
        self.table = DEFAULTS[kind]
        self.lines: dict[str, tuple[Any, str]] = {}
        self.left_out: dict[str, str] = {}
        self.row: Any = None
        for name, value in given.items():
            if name not in self.table:
                hint = nearest(name, self.table)
                self.refuse(f"{name} is not a field of the book's code{hint}; remove it")
            self._check_type(name, value)
        for name, (fits, says) in CHECKS.items():
            if name in self.table and not fits(self[name]):
                self.refuse(f"{name} is {self[name]!r}{says}")

    def _check_type(self, name: str, value: Any) -> None:
        kind = NULLABLE.get(name, type(self.table[name]))
        if kind is type(None) or (value is None and name in NULLABLE):
            return
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            self.refuse(f"{name} is {value!r}; write {words[kind]}")

    def refuse(self, why: str) -> NoReturn:
        """Stop with one sentence about the file."""
        raise InputError(f"{self.path}: {why}.")

    def __getitem__(self, name: str) -> Any:
        """Return what the code would use."""
        return self.given.get(name, self.table[name])

    def values(self, names: str) -> list[Any]:
        """Return what the code would use for several fields."""
        return [self[name] for name in names.split()]

    def write(self, to: str, value: Any, sources: str = "", note: str = "") -> None:
        """Write a field of the new config, with what it comes from and why it is what it is."""
        names = sources.split()
        self.left_out = {n: why for n, why in self.left_out.items() if n not in names}
        origins = [n if n in self.given else f"{n} (the code's default)" for n in names]
        origins = [] if origins == [to] else origins
        self.lines[to] = (value, ": ".join(part for part in (", ".join(origins), note) if part))

    def fix(self, **values: Any) -> None:
        """Write fields that the code has no field for, a value or a value with its note."""
        for to, value in values.items():
            self.write(to, *((value[0], "", value[1]) if isinstance(value, tuple) else (value,)))

    def leave_out(self, name: str, why: str) -> None:
        """Say that a field of the config has no counterpart."""
        if self.given.get(name) is not None:
            self.left_out[name] = why

    def move(self, algorithm: str | None = None, source: str = "") -> Mapping[str, Any]:
        """Write the row and every field that its line suffices for; return what the row reads."""
        reads: dict[str, Any] = {}
        if algorithm:
            self.row = algorithms.formulation(algorithm, "code")
            reads = {**self.row.reads, **self.row.trainer_reads}
            self.write("algorithm", algorithm, source)
            self.write("formulation", "code", note=self.row.differs)
        for name in self.table:
            to = OF_KIND.get(self.kind, TO).get(name, "")
            if algorithm and to in algorithms.LOSS_FIELDS - set(reads):
                self.leave_out(name, f"not read by {algorithm}")
            elif to and (value := self[name]) is not None:
                self.write(to, CONVERT.get(name, lambda v: v)(value), name, NOTES.get(name, ""))
            elif not to and name in NOTES:
                self.leave_out(name, NOTES[name])
        if "wandb_project" in self.table:
            self.write("report_to", "wandb" if self["wandb_project"] else "none", "wandb_project")
        if "output_dir" not in self.table:
            self.fix(output_dir=(f"outputs/{Path(self.path).stem}", "the code saves nothing"))
        return reads

    def text(self) -> str:
        """Return the YAML, whose loss has numbers that it can have."""
        reads = self.row.reads if self.row else ()
        try:
            if read := {to: value for to, (value, _) in self.lines.items() if to in reads}:
                self.row.parameters(read)
        except InputError as error:
            self.refuse(str(error))
        stage = stage_of_config({key: value for key, (value, _) in self.lines.items()}, self.path)
        parts = [
            f"# {Path(self.path).name} of the book's published code, for one process:\n"
            "# accelerate launch --config_file configs/accelerate/one_gpu.yaml "
            f"{stage.script} --config {self.output}\n"
        ]
        for to, (value, comment) in self.lines.items():
            body = dump_yaml({to: value})
            one_line = f"{body.rstrip()} # {comment}\n" if comment else body
            if body.count("\n") > 1 or len(one_line) > WIDTH:
                one_line = _wrapped(comment) + body
            parts.append(one_line)
        parts += ["# left out:\n"] * bool(self.left_out)
        parts += [_wrapped(f"  {name}: {why}") for name, why in self.left_out.items()]
        return "".join(parts)


def _wrapped(text: str) -> str:
    how = {"break_long_words": False, "break_on_hyphens": False}
    indent = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(text, WIDTH - 2, subsequent_indent=indent, **how)
    return "".join(f"# {line}\n" for line in lines)


def _policy_gradient(sheet: _Sheet) -> None:
    """Fill in a config of recipes/grpo.py or recipes/ppo.py."""
    loss, beta, high, end, longest = sheet.values("loss beta clip_eps_hi l_max max_new_tokens")
    low_reward, high_reward = sheet.values("accuracy_min_reward accuracy_max_reward")
    reads = sheet.move(loss, "loss")
    rounds = reads.get("dynamic_sampling_rounds")
    if beta and "beta" not in reads:
        sheet.refuse(f"beta is {beta}, and {loss} has no KL penalty here; write 0.0")
    if "soft_punish_cache" in reads and end != longest:
        why = "and the overlong penalty here ends at the longest completion; write the same number"
        sheet.refuse(f"l_max is {end} and max_new_tokens {longest}, {why}")
    if rounds and (low_reward, high_reward) != (0, 1):
        why = "and dynamic sampling here takes 0 for wrong and 1 for right; remove them"
        names = "accuracy_min_reward and accuracy_max_reward"
        sheet.refuse(f"{names} are {low_reward} and {high_reward}, {why}")
    if loss == "cispo":
        note = f"weights are held below 1 + {high}, as in the code; TRL's own field of that name is"
        sheet.fix(epsilon_high=(high, f"{note} the bound itself and would be {1 + high:g}"))
    if beta:
        note = "the code's k1 and k3 have the other sign than the KL's (k1 in the reward pays for"
        sheet.fix(beta=(beta, f"{note} drift); formulation chapter has the right one"))
    if "correctness_reward" in reads:
        sheet.fix(correctness_reward=("gym_score", "what the code takes for right"))
    if "format_reward" in reads:
        sheet.fix(format_reward=("format", "all four tags, too, make a success"))
    if rounds:
        note = "most rounds; the code samples until its buffer is full"
        sheet.fix(dynamic_sampling_rounds=(rounds, note))
    for name in ("l_max", "accuracy_min_reward", "accuracy_max_reward"):
        sheet.leave_out(name, "what the recipe does anyway" if rounds else f"not read by {loss}")
    _write_updates(sheet)
    _write_rollouts(sheet, ["gym_score", "format"])
    sheet.write("reward_weights", [1.0, sheet["format_weight"]], "format_weight")
    sheet.fix(lr_scheduler_type=("constant", "the code has no schedule"))
    sheet.fix(num_train_epochs=(1, "the code goes through its data once"))


def _write_updates(sheet: _Sheet) -> None:
    """Write the updates on a buffer; refuse one that the code does not train on as TRL would."""
    names = "prompts_per_step num_rollouts train_batch_size batch_acc"
    prompts, rollouts, size, accumulation = sheet.values(names)
    batches, over = divmod(prompts * rollouts, size)
    if over:
        why = f"leaves {over} over in batches of train_batch_size {size}, which the code drops and"
        what = f"a buffer of prompts_per_step {prompts} x num_rollouts {rollouts} completions"
        sheet.refuse(f"{what} {why} TRL does not; write a train_batch_size that divides it")
    steps, over = divmod(batches, accumulation)
    if over:
        what = f"batch_acc {accumulation} does not divide the {batches} batches of a buffer"
        why = "so the code ends each buffer with a smaller step, where TRL goes on accumulating"
        sheet.refuse(f"{what}, {why}; write a batch_acc that divides them")
    if rollouts < 2 and (loss := sheet["loss"]) not in ("reinforce", "ppo"):
        why = f"and {loss} compares the completions of a prompt; write 2 or more"
        sheet.refuse(f"num_rollouts is {rollouts}, {why}")
    note = f"{batches} batches, so {steps} optimizer step{'s' * (steps > 1)}, as in the code"
    if steps > 1 and sheet.row.ratio == "none":
        note += "; those after the first are off-policy, and nothing corrects them"
    sheet.write("steps_per_generation", batches, "prompts_per_step num_rollouts", note)


def _write_rollouts(sheet: _Sheet, rewards: list[str]) -> None:
    """Write how completions are sampled and rewarded, to which questions."""
    if not isinstance(sheet["data.specs"], list):
        sheet.refuse("data is missing or has no list of specs; write data: {size: N, specs: [...]}")
    sampling = {name: sheet[name] for name in ("temperature", "top_p", "top_k", "min_p")}
    note = "of the log-probabilities; TRL would divide by the sampling temperature there, too"
    sheet.fix(temperature=(1.0, note))
    note = "the code samples with these and scores at 1"
    sheet.write("generation_kwargs", sampling, " ".join(sampling), note)
    note = "with use_vllm, TRL would weigh losses by pi at 1 over pi as sampled; the code does not"
    sheet.fix(vllm_importance_sampling_correction=(False, note), reward_funcs=rewards)
    data = {"source": "reasoning_gym", "size": sheet["data.size"], "seed": sheet["seed"]}
    data |= {"system_prompt": "deepseek_zero", "specs": sheet["data.specs"]}
    note = "the code's system prompt; one question in ten is for evaluation and never trained on"
    sheet.fix(dataset=(data, note), **_HALF)


def _distillation(sheet: _Sheet) -> None:
    """Fill in a config of recipes/distill.py."""
    names = "prompts_per_step num_rollouts rollout_chunk"
    prompts, rollouts, chunk = sheet.values(names)
    if prompts * rollouts % chunk:
        why = f"which does not divide the {prompts} x {rollouts} completions of a step"
        sheet.refuse(f"rollout_chunk is {chunk}, {why}; write one that does")
    sheet.move(sheet["loss"], "loss")
    sheet.write("gradient_accumulation_steps", prompts * rollouts // chunk, names)
    sheet.fix(teacher=("live", "as the code"), demonstration=("first", "as the code"))
    sheet.fix(correctness_reward=("gym_score", "a completion with 1 is right, as in the code"))
    schedule = "constant_with_warmup" if sheet["warmup_ratio"] else "constant"
    sheet.write("lr_scheduler_type", schedule, "warmup_ratio")
    if not sheet["enable_thinking"]:
        sheet.write("chat_template_kwargs", {"enable_thinking": False}, "enable_thinking")
    _write_rollouts(sheet, ["gym_score"])


_HALF = {"dtype": ("bfloat16", "the code's weights"), "bf16": (True, "as the code computes")}
_MEAN = "a step's loss is the mean over its tokens, the code's that of its micro-batches' means"


def _direct_alignment(sheet: _Sheet) -> None:
    """Fill in a config of recipes/dpo.py, recipes/kto.py or recipes/orpo.py."""
    loss, model, reference = sheet.values("loss model_name ref_model_name")
    smoothing = 0.1 if loss == "cdpo" else sheet["label_smoothing"]
    if smoothing and loss == "dpo_norm":
        sheet.refuse("label_smoothing has no place in dpo_norm here; write 0.0")
    if reference not in (None, model):
        why = "and the recipes take the model itself as the reference; write its name or null"
        sheet.refuse(f"ref_model_name is {reference!r}, {why}")
    name = "cdpo" if smoothing and loss == "dpo" else loss
    sheet.move(name, "loss")
    if name == "cdpo":
        note = "the code has 0.1 for cdpo, whatever the config says" if loss == "cdpo" else ""
        sheet.fix(label_smoothing=(smoothing, note))
    if loss in ("simpo", "dpo_norm") and sheet["beta"] == 0.1:
        sheet.fix(beta=(2.0, f"0.1, which the code takes as 2 for {loss}"))
    if loss == "kto":
        note = "the code counts pairs, the recipe the two completions of each"
        sheet.fix(per_device_train_batch_size=(2 * sheet["batch_size"], note))
    _write_data(sheet, reader="ultrafeedback", split=sheet["dataset_split"])
    _write_samples(sheet, count="num_prompts", choice="prompt_strategy", file="prompts_file")
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    sheet.fix(lr_scheduler_type=("linear", "to 0, as the code's"))


def _instruction_tuning(sheet: _Sheet) -> None:
    """Fill in a config of recipes/sft.py."""
    sheet.move()
    split, rows = sheet.values("dataset_split max_samples")
    split += f"[:{rows}]" * bool(rows)
    _write_data(sheet, "as in the code", reader="messages", split=split, turns="last")
    sheet.fix(max_length=(sheet["max_length"], "what is longer loses its end"))
    _write_samples(sheet)
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    sheet.fix(lr_scheduler_type=("linear", f"to 0, as the code's; {_MEAN}"))


def _rejection_sampling(sheet: _Sheet) -> None:
    """Fill in a config of recipes/rejection_sampling.py."""
    strategy, count, asked, longest = sheet.values(
        "selection.strategy selection.top_k eval_max_new_tokens max_new_tokens"
    )
    if asked != longest:
        why = "and evaluation has the limit of sampling here; write the same number"
        sheet.refuse(f"eval_max_new_tokens is {asked} and max_new_tokens {longest}, {why}")
    sheet.move()
    sheet.write("strategy", strategy, "selection.strategy")
    if strategy.endswith("overall"):
        sheet.write("k", count, "selection.top_k")
    else:
        sheet.leave_out("selection.top_k", "one completion of each prompt is taken")
    names = "data.name data.subset data.train_split data.max_train_samples data.test_split"
    path, name, split, rows, held = sheet.values(names)
    data = {"source": "path", "path": path, "name": name, "reader": "gsm8k", "eval_split": held}
    prompt = r"Please reason step by step, and check your final answer within \boxed{}."
    data |= {"split": split + f"[:{rows}]" * bool(rows), "system_prompt": prompt}
    data |= {"eval_size": sheet["data.max_test_samples"]}
    sheet.fix(dataset=(data, "the system prompt is the code's"), ties=("first", "as the code"))
    sheet.fix(correctness=("number", "for the report and evaluation only"), **_HALF)
    sheet.fix(chat_template_kwargs=({"enable_thinking": False}, "as the code"))
    names = "rollout_batch_size num_completions_per_prompt"
    prompts, rollouts = sheet.values(names)
    sheet.write("per_device_eval_batch_size", prompts * rollouts, names, "answers at a time")
    sheet.fix(lr_scheduler_type=("constant", f"the code has no schedule; {_MEAN}"))
    sheet.fix(activation_checkpointing=(True, "as the code"), save_strategy=("no", _SAVED))
    home = Path(sheet["output_dir"])
    sheet.write("answers", f"{home}/answers", "output_dir", "which all strategies share")
    sheet.write("output_dir", f"{home}/{strategy}", "output_dir")


def _reward_model(sheet: _Sheet) -> None:
    """Fill in a config of recipes/reward.py, recipes/orm.py or recipes/prm.py."""
    given, name, rollouts = sheet.given, *sheet.values("dataset_name rollouts_per_prompt")
    outcomes = "rollouts_per_prompt" in given or "gsm8k" in name.lower()
    steps = bool({"max_steps", "max_tokens"} & given.keys()) or "prm800k" in name.lower()
    if outcomes and steps:
        why = "of an outcome reward model, max_steps, max_tokens and PRM800K of a process one"
        sheet.refuse(f"rollouts_per_prompt and GSM8K are {why}; remove those of either")
    if outcomes and rollouts != 100:
        why = "and recipes/orm.py takes all of a prompt, 100 in the book's data set; write 100"
        where = "" if "rollouts_per_prompt" in given else " by default"
        sheet.refuse(f"rollouts_per_prompt is {rollouts}{where}, {why}")
    kind = "orm" if outcomes else "prm" if steps else "reward"
    sheet.move(kind)
    if sheet["lr_scheduler"] == "warmup_only":
        note = "the code's warmup starts at a tenth of the rate, TRL's at 0"
        sheet.fix(lr_scheduler_type=("constant_with_warmup", note))
    limit = "max_tokens" if steps else "max_length"
    note = "what is longer is left out" + ", which the code cuts" * (kind == "reward")
    sheet.write("max_length", sheet[limit], limit, note)
    rows, share, interval, split = sheet.values("samples val_ratio eval_interval dataset_split")
    held = round(rows * share)
    data: dict[str, Any] = {"split": f"{split}[:{rows - held}]"}
    if held:
        data |= {"eval_split": f"{split}[{rows - held}:{rows}]", "eval_size": held}
        sheet.write("eval_strategy", "steps" if interval > 0 else "epoch", "eval_interval")
    if held and interval > 0:
        sheet.write("eval_steps", interval, "eval_interval", "optimizer steps")
    note = "the code shuffles before it cuts"
    if steps:
        data |= {"step_separator": "\n<step>\n", "max_steps": sheet["max_steps"]}
        note += ", and takes alternatives of a step for further steps"
    readers = {"orm": "gsm8k_rollouts", "prm": "prm800k", "reward": "ultrafeedback"}
    _write_data(sheet, note, reader=readers[kind], **data)
    sheet.fix(weight_decay=(0.01, "of torch's AdamW, which the code leaves as it is"))
    sheet.fix(max_grad_norm=(0.0, "the code does not clip; 0 turns TRL's clipping off"))
    sheet.fix(dtype=("float32", "the code's weights"), bf16=(True, "autocast, as in the code"))


def _write_samples(sheet: _Sheet, **names: str) -> None:
    """Write the panels of answers."""
    names = {"every": "every"} | names | {n: n for n in ("temperature", "top_p", "max_tokens")}
    block = {to: value for to, n in names.items() if (value := sheet[f"sample_{n}"]) is not None}
    note = "of prompts of the data set, where the code has a list of its own"
    if sheet["sample_every"] > 0:
        sheet.fix(samples=(block, note * ("file" not in block)))


def _write_data(sheet: _Sheet, note: str = "", **block: Any) -> None:
    """Write a data set of the hub; pairs that are not UltraFeedback's are taken as they are."""
    name = sheet["dataset_name"]
    if block["reader"] == "ultrafeedback" and "ultrafeedback" not in name:
        del block["reader"]
    block = {"source": "path", "path": name, **block}
    sheet.write("dataset", block, "dataset_name dataset_split", note)


_FILL: dict[str, Callable[[_Sheet], None]] = {
    "policy_gradients": _policy_gradient,
    "distillation": _distillation,
    "direct_alignment": _direct_alignment,
    "instruction_tuning": _instruction_tuning,
    "rejection_sampling": _rejection_sampling,
    "reward_models": _reward_model,
}
