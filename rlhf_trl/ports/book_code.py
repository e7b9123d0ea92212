"""A config of the book's published code, as one for this project's recipes.

What a table of `book_fields` says of a field is done by `Sheet.move`; what its line cannot say
(several fields that become one, values that do not carry over) is here, a function for each kind of
config.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.ports.book_fields import DEFAULTS, SAVED
from rlhf_trl.ports.sheet import Sheet
from rlhf_trl.ports.trl_config import is_of_trl, translate_trl
from rlhf_trl.run.yaml_loader import read_yaml


def translate(
    path: str | Path, output: str | Path = "THIS_FILE", command: str | None = None
) -> str:
    """Translate a YAML config of the book's code for a recipe, whose command has the `output`.

    So is one of a `command` of TRL: see `trl_config.translate_trl`. A field that the code does not
    have, a value that is not one, and what does not carry over are an InputError.
    """
    given = read_yaml(path)
    if command is not None or is_of_trl(given):
        return translate_trl(path, given, command, output)
    for block in ("data", "selection"):
        inside = given.pop(block, None)
        inside = inside if isinstance(inside, dict) else {}
        given |= {f"{block}.{name}": value for name, value in inside.items()}
    sheet = Sheet(path, given, _kind(path, given), output)
    _FILL[sheet.kind](sheet)
    return sheet.text()


def write_translation(path: str | Path, output: str | Path, command: str | None = None) -> None:
    """Translate a config into a new file; one that is there already is an InputError."""
    text = translate(path, output, command)
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


def _policy_gradient(sheet: Sheet) -> None:
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


def _write_updates(sheet: Sheet) -> None:
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


def _write_rollouts(sheet: Sheet, rewards: list[str]) -> None:
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


def _distillation(sheet: Sheet) -> None:
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


def _direct_alignment(sheet: Sheet) -> None:
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


def _instruction_tuning(sheet: Sheet) -> None:
    """Fill in a config of recipes/sft.py."""
    sheet.move()
    split, rows = sheet.values("dataset_split max_samples")
    split += f"[:{rows}]" * bool(rows)
    _write_data(sheet, "as in the code", reader="messages", split=split, turns="last")
    sheet.fix(max_length=(sheet["max_length"], "what is longer loses its end"))
    _write_samples(sheet)
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    sheet.fix(lr_scheduler_type=("linear", f"to 0, as the code's; {_MEAN}"))


def _rejection_sampling(sheet: Sheet) -> None:
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
    sheet.fix(activation_checkpointing=(True, "as the code"), save_strategy=("no", SAVED))
    home = Path(sheet["output_dir"])
    sheet.write("answers", f"{home}/answers", "output_dir", "which all strategies share")
    sheet.write("output_dir", f"{home}/{strategy}", "output_dir")


def _reward_model(sheet: Sheet) -> None:
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


def _write_samples(sheet: Sheet, **names: str) -> None:
    """Write the panels of answers."""
    names = {"every": "every"} | names | {n: n for n in ("temperature", "top_p", "max_tokens")}
    block = {to: value for to, n in names.items() if (value := sheet[f"sample_{n}"]) is not None}
    note = "of prompts of the data set, where the code has a list of its own"
    if sheet["sample_every"] > 0:
        sheet.fix(samples=(block, note * ("file" not in block)))


def _write_data(sheet: Sheet, note: str = "", **block: Any) -> None:
    """Write a data set of the hub; pairs that are not UltraFeedback's are taken as they are."""
    name = sheet["dataset_name"]
    if block["reader"] == "ultrafeedback" and "ultrafeedback" not in name:
        del block["reader"]
    block = {"source": "path", "path": name, **block}
    sheet.write("dataset", block, "dataset_name dataset_split", note)


_FILL: dict[str, Callable[[Sheet], None]] = {
    "policy_gradients": _policy_gradient,
    "distillation": _distillation,
    "direct_alignment": _direct_alignment,
    "instruction_tuning": _instruction_tuning,
    "rejection_sampling": _rejection_sampling,
    "reward_models": _reward_model,
}
