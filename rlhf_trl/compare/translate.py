"""A config of the book's published code, as one for this project's recipes.

The code has three kinds of config. Each is a table below: one line per field, with the value that
the code uses where the config is silent, the field it becomes, and what the comment says. What a
line cannot say (several fields that become one, values that do not carry over) is in the function
of its kind.
"""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.run.race import recipe_of
from rlhf_trl.run.yaml_loader import dump_yaml, read_yaml

WIDTH = 100


@dataclass(frozen=True)
class _Field:
    """What becomes of a field of the book's code."""

    default: Any  # what the code uses where the config is silent
    to: str = ""  # the field it becomes; "": see `note`
    # what the comment adds; without `to`, why the field is left out, or "" if the function of its
    # kind reads it
    note: str = ""
    convert: Callable[[Any], Any] | None = None  # from its value to the new one; None: as it is
    optional: bool = False  # whether it may be null


def _read(note: str = "", **defaults: Any) -> dict[str, _Field]:
    """Return fields that a function reads, or, with a note, that are left out."""
    return {name: _Field(default, note=note) for name, default in defaults.items()}


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_SAMPLING = "the code samples with these and scores at 1"
_PLACED = "accelerate places the models"
_TRACKED = "TRL's trackers read the shell: set WANDB_PROJECT and WANDB_ENTITY there"
_HUB = {"dataset_name": "argilla/ultrafeedback-binarized-preferences-cleaned"}
_COMPLETIONS = "completions per process"

_POLICY_GRADIENT = {
    **_read(loss="grpo", data=None, l_max=512, accuracy_min_reward=0.0, accuracy_max_reward=1.0),
    **_read(format_weight=0.5, temperature=0.6, top_p=0.95, top_k=20, min_p=0.0),
    **_read(prompts_per_step=4),
    "model_name": _Field("Qwen/Qwen3-1.7B", "model_name_or_path"),
    "clip_eps_lo": _Field(0.2, "epsilon"),
    "clip_eps_hi": _Field(0.2, "epsilon_high"),
    "clip_eps_val": _Field(0.2, "cliprange_value"),
    "gamma": _Field(0.99, "gamma"),
    "lam": _Field(0.95, "lam"),
    "vf_coef": _Field(0.1, "vf_coef"),
    "sapo_temp_pos": _Field(1.0, "sapo_temperature_pos"),
    "sapo_temp_neg": _Field(1.05, "sapo_temperature_neg"),
    "l_cache": _Field(256, "soft_punish_cache", "tokens before the limit, over which it grows"),
    "beta": _Field(0.0, "beta"),
    "kl_estimator": _Field("kl3", "kl_estimator", convert=lambda name: name.replace("kl", "k")),
    "max_new_tokens": _Field(512, "max_completion_length"),
    "num_rollouts": _Field(8, "num_generations", "completions per prompt"),
    "train_batch_size": _Field(2, "per_device_train_batch_size", _COMPLETIONS),
    "batch_acc": _Field(4, "gradient_accumulation_steps"),
    "lr": _Field(5e-6, "learning_rate"),
    "max_norm": _Field(1.0, "max_grad_norm"),
    "seed": _Field(42, "seed"),
    "wandb_run_name": _Field(None, "run_name"),
    "wandb_project": _Field(None, "project"),
    "wandb_entity": _Field(None, note=_TRACKED),
    "rollout_batch_size": _Field(8, note="TRL generates the whole buffer at once"),
    **_read(_PLACED, model_device_id=0, device="auto", ref_model_device_id=0),
    **_read(_PLACED, val_model_device_id=0),
}

_DIRECT_ALIGNMENT = {
    **_read(loss="dpo", ref_model_name=None, dataset_split="train", **_HUB),
    **_read(max_prompt_length=None, max_completion_length=None),
    "model_name": _Field("allenai/OLMo-2-0425-1B-SFT", "model_name_or_path"),
    "beta": _Field(0.1, "beta"),
    "gamma": _Field(0.5, "gamma_beta_ratio", "a ratio to beta; TRL's simpo_gamma is beta x gamma"),
    "label_smoothing": _Field(0.0, "label_smoothing"),
    "max_samples": _Field(1000, "max_samples", "the first so many pairs", optional=True),
    "max_length": _Field(512, "max_length", "what is longer loses the start of its prompt"),
    "truncation_mode": _Field("keep_end", note="the code does not read it"),
    "learning_rate": _Field(5e-7, "learning_rate"),
    "num_epochs": _Field(1, "num_train_epochs"),
    "batch_size": _Field(4, "per_device_train_batch_size", "pairs per process"),
    "gradient_accumulation_steps": _Field(4, "gradient_accumulation_steps"),
    "warmup_ratio": _Field(0.1, "warmup_steps", "below 1 it is a share of all steps", float),
    "weight_decay": _Field(0.0, "weight_decay"),
    "max_grad_norm": _Field(1.0, "max_grad_norm"),
    "gradient_checkpointing": _Field(True, "activation_checkpointing"),
    "bf16": _Field(True, "bf16"),
    "log_every": _Field(10, "logging_steps"),
    "output_dir": _Field("./outputs", "output_dir"),
    "save_model": _Field(
        False,
        "save_strategy",
        "the model at the end is saved in any case",
        lambda save: "epoch" if save else "no",
    ),
    "seed": _Field(42, "seed"),
    "wandb_run_name": _Field(None, "run_name"),
    "wandb_project": _Field(None, "project"),
    "wandb_entity": _Field(None, note=_TRACKED),
    "eval_every": _Field(100, note="the code's training never evaluates"),
    "device": _Field("auto", note=_PLACED),
    **_read(sample_every=25, sample_max_tokens=128, sample_num_prompts=3, sample_prompts_file=None),
    **_read(sample_prompt_strategy="round_robin", sample_temperature=0.7, sample_top_p=0.9),
    "sample_do_sample": _Field(True, note="panels have a greedy and a sampled answer"),
    "sample_max_input_tokens": _Field(512, note="prompts of panels are not cut"),
}

_SCHEDULES = {"linear_decay": "linear", "warmup_only": "constant_with_warmup"}

_REWARD_MODEL = {
    "model_id": _Field("Qwen/Qwen3-0.6B-Base", "model_name_or_path"),
    **_read(
        **_HUB, dataset_split="train", samples=5000, freeze_backbone=False, rollouts_per_prompt=32
    ),
    **_read(max_steps=20, max_tokens=5500, val_ratio=0.1, eval_interval=25),
    "max_length": _Field(512, "max_length", "longer pairs are left out, which the code cuts"),
    "batch_size": _Field(2, "per_device_train_batch_size", "pairs per process"),
    "grad_accum_steps": _Field(8, "gradient_accumulation_steps"),
    "epochs": _Field(2, "num_train_epochs"),
    "lr": _Field(5e-5, "learning_rate"),
    "warmup_ratio": _Field(0.1, "warmup_steps", "below 1 it is a share of all steps", float),
    "lr_scheduler": _Field("linear_decay", "lr_scheduler_type", "", _SCHEDULES.get),
    "seed": _Field(123, "seed"),
    **_read(_PLACED, device="cuda", device_id=0),
    "use_wandb": _Field(True, note=_TRACKED),
    "skip_demo": _Field(False, note="TRL shows no demo after training"),
}


def translate(path: str | Path, output: str | Path = "THIS_FILE") -> str:
    """Translate a YAML config of the book's code for a recipe, whose command has the `output`.

    A field that the code does not have, a value that is not one, and what does not carry over are
    an InputError.
    """
    given = read_yaml(path)
    loss = given.get("loss")
    kinds = {
        "policy_gradient": (_POLICY_GRADIENT, _policy_gradient),
        "direct_alignment": (_DIRECT_ALIGNMENT, _direct_alignment),
    }
    known = {name: kind for kind in kinds for name in algorithms.names(kind, "code")}
    if loss is None and "model_id" in given:
        table, fill = _REWARD_MODEL, _reward_model
    elif loss in known:
        table, fill = kinds[known[loss]]
    elif loss is not None:
        hint = nearest(loss, known)
        raise InputError(f"{path}: loss is {loss!r}{hint}; write one of {', '.join(known)}.")
    else:
        raise InputError(
            f"{path}: this is not a config of the book's code: it has neither loss, as those of "
            "policy gradients and direct alignment have, nor model_id, as those of reward models "
            "have."
        )
    sheet = _Sheet(path, given, table, output)
    fill(sheet)
    return sheet.text()


def write_translation(path: str | Path, output: str | Path) -> None:
    """Translate a config into a new file; one that is there already is an InputError."""
    text = translate(path, output)
    if Path(output).exists():
        raise InputError(f"--output: {output} exists; name a new file.")
    write_whole(output, lambda part: part.write_text(text, encoding="utf-8"))


class _Sheet:
    """A config in the making: the book's on one side, the lines of the new one on the other."""

    def __init__(self, path: Any, given: dict[str, Any], table: dict[str, _Field], output: Any):
        self.path, self.given, self.table, self.output = path, given, table, output
        self.header: list[str] = []
        self.lines: dict[str, tuple[Any, str]] = {}
        self.left_out: dict[str, str] = {}
        for name, value in given.items():
            if name not in table:
                hint = nearest(name, table)
                self.refuse(f"{name} is not a field of the book's code{hint}; remove it")
            self._check(name, value, table[name])

    def _check(self, name: str, value: Any, rule: _Field) -> None:
        kind = type(rule.default)
        if rule.default is None or (value is None and rule.optional):
            return
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            self.refuse(f"{name} is {value!r}; write {_KINDS[kind]}")

    def refuse(self, why: str) -> NoReturn:
        """Stop with one sentence about the file."""
        raise InputError(f"{self.path}: {why}.")

    def __getitem__(self, name: str) -> Any:
        """Return what the code would use."""
        return self.given.get(name, self.table[name].default)

    def write(self, to: str, value: Any, *sources: str, note: str = "") -> None:
        """Write a field of the new config, with what it comes from and why it is what it is."""
        origins = [n if n in self.given else f"{n} (the code's default)" for n in sources]
        origins = [] if origins == [to] else origins
        self.lines[to] = (value, ": ".join(part for part in (", ".join(origins), note) if part))

    def leave_out(self, name: str, why: str) -> None:
        """Say that a field of the config has no counterpart."""
        if self.given.get(name) is not None:
            self.left_out[name] = why

    def move(self, algorithm: str, source: str = "") -> Mapping[str, Any]:
        """Write the command, the row, and every field that its line suffices for.

        Returns what the row reads; what no other loss fields become is left out.
        """
        row = self.row = algorithms.formulation(algorithm, "code")
        reads = {**row.reads, **row.trainer_reads}
        self.header += [
            f"{Path(self.path).name} of the book's published code, for one process:",
            "accelerate launch --config_file configs/accelerate/one_gpu.yaml "
            f"{recipe_of(algorithm)} --config {self.output}",
        ]
        self.write("algorithm", algorithm, *([source] if source else []))
        self.write("formulation", "code", note=row.differs)
        for name, rule in self.table.items():
            value = self[name]
            if rule.to in algorithms.LOSS_FIELDS - set(reads):
                self.leave_out(name, f"not read by {algorithm}")
            elif rule.to and value is not None:
                new = rule.convert(value) if rule.convert else value
                self.write(rule.to, new, name, note=rule.note)
            elif rule.note:
                self.leave_out(name, rule.note)
        return reads

    def text(self) -> str:
        """Return the YAML, whose loss has numbers that it can have."""
        try:
            self.row.parameters(
                {to: v for to, (v, _) in self.lines.items() if to in self.row.reads}
            )
        except InputError as error:
            raise InputError(f"{self.path}: {error}.") from error
        parts = [f"# {line}\n" for line in self.header]
        for to, (value, comment) in self.lines.items():
            body = dump_yaml({to: value})
            one_line = f"{body.rstrip()} # {comment}\n"
            if not comment:
                parts.append(body)
            elif body.count("\n") == 1 and len(one_line) <= WIDTH:
                parts.append(one_line)
            else:
                parts += [*(f"# {line}\n" for line in _wrapped(comment)), body]
        if self.left_out:
            parts.append("# left out:\n")
            for name, why in self.left_out.items():
                parts += [f"# {line}\n" for line in _wrapped(f"  {name}: {why}")]
        return "".join(parts)


def _wrapped(text: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text, WIDTH - 2, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


# --- policy gradients ----------------------------------------------------------------------------


def _policy_gradient(sheet: _Sheet) -> None:
    """Fill in a config of recipes/grpo.py or recipes/ppo.py."""
    loss = sheet["loss"]
    row = algorithms.formulation(loss, "code")
    _check_buffer(sheet)
    _check_losses(sheet, {**row.reads, **row.trainer_reads})
    reads = sheet.move(loss, "loss")
    _write_loss(sheet, reads)
    _write_rollouts(sheet, row)
    sheet.write("lr_scheduler_type", "constant", note="the code has no schedule")
    sheet.write("num_train_epochs", 1, note="the code goes through its data once")
    sheet.write("dtype", "bfloat16", note="the code's weights")
    sheet.write("bf16", True, note="as the code computes")
    _write_tracker(sheet)
    sheet.write("output_dir", f"outputs/{Path(sheet.path).stem}", note="the code saves nothing")


def _check_buffer(sheet: _Sheet) -> None:
    """Refuse a buffer that the code does not train on as TRL would."""
    names = ("prompts_per_step", "num_rollouts", "train_batch_size", "batch_acc")
    prompts, rollouts, size, accumulation = map(sheet.__getitem__, names)
    for name in names:
        if sheet[name] < 1:
            sheet.refuse(f"{name} is {sheet[name]}; write 1 or more")
    buffer = prompts * rollouts
    if buffer % size:
        sheet.refuse(
            f"a buffer of prompts_per_step {prompts} x num_rollouts {rollouts} = {buffer} "
            f"completions leaves {buffer % size} over in batches of train_batch_size {size}, which "
            "the code drops and TRL does not; write a train_batch_size that divides it"
        )
    if buffer // size % accumulation:
        sheet.refuse(
            f"batch_acc {accumulation} does not divide the {buffer // size} batches of a buffer, "
            "so the code ends each buffer with a smaller step, where TRL goes on accumulating; "
            "write a batch_acc that divides them"
        )
    if rollouts < 2 and sheet["loss"] not in ("reinforce", "ppo"):
        sheet.refuse(
            f"num_rollouts is {rollouts}, and {sheet['loss']} compares the completions of a "
            "prompt; write 2 or more"
        )


def _check_losses(sheet: _Sheet, reads: Mapping[str, Any]) -> None:
    """Refuse settings of a loss that the recipe does not have."""
    loss = sheet["loss"]
    if sheet["beta"] and "beta" not in reads:
        sheet.refuse(f"beta is {sheet['beta']}, and {loss} has no KL penalty here; write 0.0")
    if sheet["kl_estimator"] not in ("kl1", "kl2", "kl3"):
        sheet.refuse(f"kl_estimator is {sheet['kl_estimator']!r}; write kl1, kl2 or kl3")
    if "soft_punish_cache" in reads and sheet["l_max"] != sheet["max_new_tokens"]:
        sheet.refuse(
            f"l_max is {sheet['l_max']} and max_new_tokens {sheet['max_new_tokens']}, and "
            "the overlong penalty here ends at the longest completion; write the same number"
        )
    bounds = sheet["accuracy_min_reward"], sheet["accuracy_max_reward"]
    if "correctness_reward" in reads and "format_reward" not in reads and bounds != (0, 1):
        sheet.refuse(
            f"accuracy_min_reward and accuracy_max_reward are {bounds[0]} and {bounds[1]}, and "
            "dynamic sampling here takes 0 for wrong and 1 for right; remove them"
        )


def _write_loss(sheet: _Sheet, reads: Mapping[str, Any]) -> None:
    """Say what the numbers of the loss mean, and name the rewards that it reads."""
    loss, high = sheet["loss"], sheet["clip_eps_hi"]
    if loss == "cispo":
        note = (
            f"weights are held below 1 + {high}, as in the code; TRL's own field of that name is "
            f"the bound itself and would be {1 + high:g}"
        )
        sheet.write("epsilon_high", high, "clip_eps_hi", note=note)
    if sheet["beta"]:
        note = (
            "the code's k1 and k3 have the other sign than the KL's (k1 in the reward pays for "
            "drift); formulation chapter has the right one"
        )
        sheet.write("beta", sheet["beta"], "beta", note=note)
    if "correctness_reward" in reads:
        sheet.write("correctness_reward", "gym_score", note="what the code takes for right")
    if "format_reward" in reads:
        sheet.write("format_reward", "format", note="all four tags, too, make a success")
    if "dynamic_sampling_rounds" in reads:
        note = "most rounds; the code samples until its buffer is full"
        sheet.write("dynamic_sampling_rounds", reads["dynamic_sampling_rounds"], note=note)
    anyway = "what the recipe does anyway"
    for name in ("l_max", "accuracy_min_reward", "accuracy_max_reward"):
        sheet.leave_out(
            name, anyway if "dynamic_sampling_rounds" in reads else f"not read by {loss}"
        )


def _write_rollouts(sheet: _Sheet, row: algorithms.PolicyGradient) -> None:
    """Write how completions are sampled and rewarded, and how often each buffer is trained on."""
    size, accumulation = sheet["train_batch_size"], sheet["batch_acc"]
    buffer = sheet["prompts_per_step"] * sheet["num_rollouts"]
    steps = buffer // size // accumulation
    note = (
        f"{buffer} completions in batches of {size} are {buffer // size}, so {steps} optimizer "
        f"step{'s' * (steps > 1)} per buffer, as in the code"
    )
    if steps > 1 and row.ratio == "none":
        note += "; those after the first are off-policy, and nothing corrects them"
    sources = ("prompts_per_step", "num_rollouts")
    sheet.write("steps_per_generation", buffer // size, *sources, note=note)
    names = ("temperature", "top_p", "top_k", "min_p")
    sampling = {name: sheet[name] for name in names}
    note = "of the log-probabilities; TRL would divide by the sampling temperature there, too"
    sheet.write("temperature", 1.0, note=note)
    sheet.write("generation_kwargs", sampling, *names, note=_SAMPLING)
    sheet.write("reward_funcs", ["gym_score", "format"], note="the code's rewards")
    sheet.write("reward_weights", [1.0, sheet["format_weight"]], "format_weight")

    data = sheet["data"]
    if not isinstance(data, dict) or not isinstance(data.get("specs"), list):
        sheet.refuse("data is missing or has no list of specs; write data: {size: N, specs: [...]}")
    for name in data.keys() - {"specs", "size"}:
        sheet.refuse(f"data.{name} is not a field of the book's code; remove it")
    block = {
        "source": "reasoning_gym",
        "size": data.get("size", 3000),
        "seed": sheet["seed"],
        "system_prompt": "deepseek_zero",
        "specs": data["specs"],
    }
    note = (
        "the code's system prompt; one question in ten is kept for evaluation and never trained on"
    )
    sheet.write("dataset", block, "data", note=note)


# --- direct alignment ----------------------------------------------------------------------------


def _direct_alignment(sheet: _Sheet) -> None:
    """Fill in a config of recipes/dpo.py, recipes/kto.py or recipes/orpo.py."""
    loss = sheet["loss"]
    smoothing = 0.1 if loss == "cdpo" else sheet["label_smoothing"]
    if smoothing and loss == "dpo_norm":
        sheet.refuse("label_smoothing has no place in dpo_norm here; write 0.0")
    name = "cdpo" if smoothing and loss == "dpo" else loss
    if sheet["ref_model_name"] not in (None, sheet["model_name"]):
        sheet.refuse(
            f"ref_model_name is {sheet['ref_model_name']!r}, and the recipes take the model itself "
            "as the reference; write its name or null"
        )
    for limit in ("max_prompt_length", "max_completion_length"):
        if sheet[limit] is not None:
            sheet.refuse(
                f"{limit} is {sheet[limit]}, and the recipes cut by max_length only; shorten the "
                "data and remove it"
            )
    if sheet["max_samples"] is not None and sheet["max_samples"] < 1:
        sheet.refuse(f"max_samples is {sheet['max_samples']}; write 1 or more")
    _check_share(sheet, "warmup_ratio")
    sheet.move(name, "loss")
    if name == "cdpo":
        note = "the code has 0.1 for cdpo, whatever the config says" if loss == "cdpo" else ""
        sheet.write("label_smoothing", smoothing, "label_smoothing", note=note)
    if loss in ("simpo", "dpo_norm") and sheet["beta"] == 0.1:
        sheet.write("beta", 2.0, "beta", note=f"0.1, which the code takes as 2 for {loss}")
    if loss == "kto":
        note = "the code counts pairs, the recipe the two completions of each"
        sheet.write("per_device_train_batch_size", 2 * sheet["batch_size"], "batch_size", note=note)
    _write_data(sheet, {"split": sheet["dataset_split"]}, "dataset_name", "dataset_split")
    if sheet["sample_every"] > 0:
        _write_samples(sheet)
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    sheet.write("lr_scheduler_type", "linear", note="to 0, as the code's")
    _write_tracker(sheet)


def _write_samples(sheet: _Sheet) -> None:
    """Write the panels of answers."""
    names = {"every": "every", "count": "num_prompts", "choice": "prompt_strategy"}
    names |= {to: to for to in ("temperature", "top_p", "max_tokens")}
    if sheet["sample_prompt_strategy"] not in ("fixed", "round_robin"):
        sheet.refuse(
            f"sample_prompt_strategy is {sheet['sample_prompt_strategy']!r}, and panels have none "
            "such; write fixed or round_robin"
        )
    note = "of prompts of the data set, where the code has a list of its own"
    if sheet["sample_prompts_file"] is not None:
        names["file"], note = "prompts_file", ""
    block = {to: sheet[f"sample_{name}"] for to, name in names.items()}
    sheet.write("samples", block, *(f"sample_{name}" for name in names.values()), note=note)


# --- reward models -------------------------------------------------------------------------------


def _reward_model(sheet: _Sheet) -> None:
    """Fill in a config of recipes/reward.py; configs/book has those of outcomes and steps."""
    signs = {"rollouts_per_prompt": "orm", "max_steps": "prm", "max_tokens": "prm"}
    for sign, kind in signs.items():
        if sign in sheet.given:
            sheet.refuse(
                f"{sign} makes this the config of the {algorithms.algorithm(kind).title.lower()}; "
                f"configs/book/{kind}.yaml is the book's, for recipes/{kind}.py"
            )
    if "max_length" not in sheet.given:
        sheet.refuse(
            "a config without max_length is an outcome reward model's in the book's code; "
            "configs/book/orm.yaml is the book's, for recipes/orm.py; for a preference reward "
            "model, write max_length"
        )
    if sheet["lr_scheduler"] not in _SCHEDULES:
        known = " or ".join(_SCHEDULES)
        sheet.refuse(f"lr_scheduler is {sheet['lr_scheduler']!r}; write {known}")
    if sheet["freeze_backbone"]:
        sheet.refuse(
            "freeze_backbone is true, and recipes/reward.py trains the whole model; write false"
        )
    rows, share, interval = sheet["samples"], sheet["val_ratio"], sheet["eval_interval"]
    if rows < 1:
        sheet.refuse(f"samples is {rows}; write 1 or more")
    _check_share(sheet, "warmup_ratio")
    _check_share(sheet, "val_ratio")
    sheet.move("reward")
    if sheet["lr_scheduler"] == "warmup_only":
        note = "the code's warmup starts at a tenth of the rate, TRL's at 0"
        sheet.write("lr_scheduler_type", "constant_with_warmup", "lr_scheduler", note=note)
    held, split = round(rows * share), sheet["dataset_split"]
    block = {"split": f"{split}[:{rows - held}]"}
    if held:
        block |= {"eval_split": f"{split}[{rows - held}:{rows}]", "eval_size": held}
        sheet.write("eval_strategy", "steps" if interval > 0 else "epoch", "eval_interval")
    if held and interval > 0:
        sheet.write("eval_steps", interval, "eval_interval", note="optimizer steps")
    sources = ("dataset_name", "dataset_split", "samples", "val_ratio")
    _write_data(sheet, block, *sources, note="the code shuffles before it cuts")
    sheet.write("weight_decay", 0.01, note="of torch's AdamW, which the code leaves as it is")
    sheet.write("max_grad_norm", 0.0, note="the code does not clip; 0 turns TRL's clipping off")
    sheet.write("dtype", "float32", note="the code's weights")
    sheet.write("bf16", True, note="as the code computes")
    sheet.write("output_dir", f"outputs/{Path(sheet.path).stem}", note="the code saves nothing")


# --- what both have ------------------------------------------------------------------------------


def _check_share(sheet: _Sheet, name: str) -> None:
    """Refuse a share that is none; from 1 on, TRL would take it for a number of steps or rows."""
    if not 0 <= sheet[name] < 1:
        sheet.refuse(f"{name} is {sheet[name]}; write a number from 0 to below 1")


def _write_tracker(sheet: _Sheet) -> None:
    sheet.write("report_to", "wandb" if sheet["wandb_project"] else "none", "wandb_project")


def _write_data(sheet: _Sheet, split: dict[str, Any], *sources: str, note: str = "") -> None:
    """Write the data set; the code reads UltraFeedback and what looks like it."""
    name = sheet["dataset_name"]
    reader = {"reader": "ultrafeedback"} if "ultrafeedback" in name else {}
    block = {"source": "path", "path": name, **reader, **split}
    sheet.write("dataset", block, *sources, note=note)
