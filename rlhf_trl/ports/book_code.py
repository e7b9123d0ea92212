"""A config of the book's published code, as one for this project's recipes.

What a table of `book_fields` says of a field is done by `Sheet.move`; what its line cannot say
(several fields that become one, values that do not carry over) is here, a function for each kind of
config.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.ports.book_fields import DEFAULTS, RATED_PAIRS, note_of
from rlhf_trl.ports.comments import Differs, Note
from rlhf_trl.ports.explain import explain_book
from rlhf_trl.ports.sheet import Sheet
from rlhf_trl.ports.trl_config import is_of_trl, read_trl
from rlhf_trl.run.yaml_loader import read_yaml


def translate(
    path: str | Path, output: str | Path = "THIS_FILE", command: str | None = None
) -> str:
    """Translate a YAML config of the book's code for a recipe, whose command has the `output`.

    So is one of a `command` of TRL: see `trl_config`. A field that the code does not have, a value
    that is not one, and what does not carry over are an InputError.
    """
    values = read_yaml(path)
    if command is not None or is_of_trl(values):
        return read_trl(path, values, command).text(output)
    return read_book(path, values, output).text()


def explain(path: str | Path, command: str | None = None) -> str:
    """Return a table of a translation, field by field, and of what is trained on both sides."""
    values = read_yaml(path)
    if command is not None or is_of_trl(values):
        return read_trl(path, values, command).explained()
    return explain_book(read_book(path, values))


def read_book(path: str | Path, values: dict[str, Any], output: str | Path = "THIS_FILE") -> Sheet:
    """Return the values of a config of the book's code beside their translation."""
    for block in ("data", "selection"):
        inside = values.pop(block, None)
        inside = inside if isinstance(inside, dict) else {}
        values |= {f"{block}.{name}": value for name, value in inside.items()}
    sheet = Sheet(path, values, _kind(path, values), output)
    _FILL[sheet.kind](sheet)
    sheet.check()
    return sheet


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
    drops = "dynamic_sampling_rounds" in reads
    if beta and "beta" not in reads:
        sheet.refuse(f"beta is {beta}, and {loss} has no KL penalty here; write 0.0")
    if "soft_punish_cache" in reads and end != longest:
        why = "and the overlong penalty here ends at the longest completion; write the same number"
        sheet.refuse(f"l_max is {end} and max_new_tokens {longest}, {why}")
    if drops and (low_reward, high_reward) != (0, 1):
        why = "and dynamic sampling here takes 0 for wrong and 1 for right; remove them"
        names = "accuracy_min_reward and accuracy_max_reward"
        sheet.refuse(f"{names} are {low_reward} and {high_reward}, {why}")
    if loss == "cispo":
        note = f"weights are held below 1 + {high}, as in the book's code; TRL's own field of that "
        note += f"name is the bound itself and would be {1 + high:g}"
        sheet.write("epsilon_high", high, "clip_eps_hi", note)
    if beta:
        sheet.write("beta", beta, "beta", _kl_note(sheet))
    if "format_reward" in reads:
        note = "with its partial credit, where all four tags are, as in the book's code"
        sheet.fix(correctness_reward=("gym_score", note), format_reward="format")
    elif "correctness_reward" in reads:
        sheet.fix(correctness_reward=("gym_score", "by which groups have contrast"))
    if drops:
        sheet.fix(dynamic_sampling_rounds=(0, "groups without contrast are dropped"))
    for name in ("l_max", "accuracy_min_reward", "accuracy_max_reward"):
        sheet.leave_out(name, "what the recipe does anyway" if drops else f"not read by {loss}")
    _write_updates(sheet)
    _write_rollouts(sheet, ["gym_score", "format"])
    sheet.write("reward_weights", [1.0, sheet["format_weight"]], "format_weight")
    sheet.fix(lr_scheduler_type=("constant", "the book's code has no schedule"))
    note: Note = "the book's code goes through its data once"
    if drops:
        rollouts, size, accumulation = sheet.values("num_rollouts train_batch_size batch_acc")
        updates = f"{rollouts / (size * accumulation):g}"
        note = Differs(
            "goes through its data once and fills its buffers with groups that have contrast: "
            f"{updates} optimizer steps for each of these",
            f"{updates} for each group, on what is left of their completions",
        )
    sheet.fix(num_train_epochs=(1, note))


def _kl_note(sheet: Sheet) -> Note:
    """Say which sign the KL of the book's code has."""
    estimator = sheet["kl_estimator"].replace("kl", "k")
    if estimator == "k2":
        return ""
    pays = ", so that the reward pays for drift" if sheet.row.kl == "reward" else ""
    sign = f"{estimator} has the other sign than the KL's in the book's code, and so here"
    if estimator == "k3":
        pays = ""
    return f"{sign}{pays}; formulation chapter has the right one"


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
    updates = f"{steps} optimizer step{'s' * (steps > 1)}"
    note = f"{batches} batches, so {updates}, as in the book's code"
    if steps > 1 and sheet.row.ratio == "none":
        note += "; those after the first are off-policy, and nothing corrects them"
    sheet.write("steps_per_generation", batches, "prompts_per_step num_rollouts", note)


def _write_rollouts(sheet: Sheet, rewards: list[str]) -> None:
    """Write how completions are sampled and rewarded, to which questions."""
    if not isinstance(sheet["data.specs"], list):
        sheet.refuse("data is missing or has no list of specs; write data: {size: N, specs: [...]}")
    names = "temperature top_p top_k min_p"
    sampling = {name: sheet[name] for name in names.split()}
    note = "of the log-probabilities; TRL would divide by the sampling temperature there, too"
    sheet.fix(temperature=(1.0, note))
    note = "the book's code samples with these and scores at 1"
    sheet.write("generation_kwargs", sampling, names, note)
    note = "with use_vllm, TRL would weigh losses by pi at 1 over pi as sampled; the book's code "
    note += "does not"
    sheet.fix(vllm_importance_sampling_correction=(False, note), reward_funcs=rewards)
    size, seed, specs = sheet.values("data.size seed data.specs")
    data = {"source": "reasoning_gym", "size": size, "seed": seed}
    data |= {"system_prompt": "deepseek_zero", "specs": specs}
    differs = Differs(
        f"trains on the first {size} questions of this seed",
        "one in ten is kept for evaluation and the next one takes its place",
    )
    sheet.write("dataset", data, "data.size data.specs", differs)
    sheet.fix(**_HALF)


def _distillation(sheet: Sheet) -> None:
    """Fill in a config of recipes/distill.py."""
    names = "prompts_per_step num_rollouts rollout_chunk"
    prompts, rollouts, chunk = sheet.values(names)
    if prompts * rollouts % chunk:
        why = f"which does not divide the {prompts} x {rollouts} completions of a step"
        sheet.refuse(f"rollout_chunk is {chunk}, {why}; write one that does")
    sheet.move(sheet["loss"], "loss")
    sheet.write("gradient_accumulation_steps", prompts * rollouts // chunk, names)
    sheet.fix(teacher=("live", "as the book's code"), demonstration=("first", "as the book's code"))
    note = "a completion with 1 is right, as in the book's code"
    sheet.write("correctness_reward", "gym_score", "success_reward_threshold", note)
    note = Differs(
        f"asks one question after another until {prompts} have a right answer, {100 * prompts} at "
        "most",
        "questions without one are replaced for so many rounds, and then not learned from",
    )
    sheet.fix(dynamic_sampling_rounds=(100, note))
    schedule = "constant_with_warmup" if sheet["warmup_ratio"] else "constant"
    sheet.write("lr_scheduler_type", schedule, "warmup_ratio")
    _write_warmup(sheet)
    if sheet["enable_thinking"]:
        sheet.leave_out("enable_thinking", "the chat template's default")
    else:
        sheet.write("chat_template_kwargs", {"enable_thinking": False}, "enable_thinking")
    _write_rollouts(sheet, ["gym_score"])


_HALF = {
    "dtype": ("bfloat16", "the weights of the book's code"),
    "bf16": (True, "as the book's code computes"),
}


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
    sheet.leave_out("ref_model_name", "the reference is the model itself, as in the book's code")
    if name == "cdpo":
        note = "the book's code has 0.1 for cdpo, whatever the config says" * (loss == "cdpo")
        sheet.write("label_smoothing", smoothing, "label_smoothing", note)
    if loss in ("simpo", "dpo_norm") and sheet["beta"] == 0.1:
        note = f"0.1, which the book's code takes as 2 for {loss}"
        sheet.write("beta", 2.0, "beta", note)
    if loss == "kto":
        size = sheet["batch_size"]
        note = Differs(
            f"trains {size} pairs at a time, whole ones, in another order each epoch",
            f"{2 * size} completions, half of them rejected, in one order that parts most pairs",
        )
        sheet.write("per_device_train_batch_size", 2 * size, "batch_size", note)
    _write_last_step(sheet, "max_samples", "batch_size", "gradient_accumulation_steps")
    reader, note = _pairs_reader(sheet)
    _write_data(sheet, note, reader=reader, split=sheet["dataset_split"])
    _write_samples(sheet, count="num_prompts", choice="prompt_strategy", file="prompts_file")
    _write_precision(sheet)
    _write_schedule(sheet)


def _write_precision(sheet: Sheet) -> None:
    """Write dtype and bf16, which the log-probabilities of the book's code have, too."""
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    if sheet["bf16"]:
        steps = "in steps of 2 from 256 nats on and of 8 from 1,024 on"
        if sheet.row.logps == "mean":
            steps = "in steps of 0.008 between 1 and 2 nats per token"
        differs = Differs(f"has log-probabilities in bfloat16, {steps}", "in float32")
        sheet.write("bf16", True, "bf16", differs)


def _write_schedule(sheet: Sheet) -> None:
    """Write the linear schedule of the book's code with its warm-up."""
    sheet.fix(lr_scheduler_type=("linear", "to 0, as in the book's code"))
    _write_warmup(sheet)


def _write_warmup(sheet: Sheet) -> None:
    """Write how a warm-up begins, if there is one."""
    if sheet["warmup_ratio"]:
        note = "as in the book's code: W steps, rounded down, the first at the rate / (W + 1)"
        sheet.fix(warmup_from_zero=(False, note))


def _write_last_step(sheet: Sheet, rows: str, size: str, accumulation: str) -> None:
    """Take back what is said of an epoch's last step where a known number of rows leaves none."""
    count, batch, steps = sheet.values(f"{rows} {size} {accumulation}")
    if count is not None and -(-count // batch) % steps == 0:
        sheet.write("gradient_accumulation_steps", steps, accumulation)


def _instruction_tuning(sheet: Sheet) -> None:
    """Fill in a config of recipes/sft.py."""
    sheet.move()
    split, rows = sheet.values("dataset_split max_samples")
    split += f"[:{rows}]" * bool(rows)
    note = "the last turn is trained, as in the book's code"
    _write_data(sheet, note, "max_samples", reader="messages", split=split, turns="last")
    _write_last_step(sheet, "max_samples", "batch_size", "gradient_accumulation_steps")
    _write_samples(sheet)
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    _write_schedule(sheet)


def _rejection_sampling(sheet: Sheet) -> None:
    """Fill in a config of recipes/rejection_sampling.py."""
    strategy, count, asked, longest = sheet.values(
        "selection.strategy selection.top_k eval_max_new_tokens max_new_tokens"
    )
    if asked != longest:
        why = "and evaluation has the limit of sampling here; write the same number"
        sheet.refuse(f"eval_max_new_tokens is {asked} and max_new_tokens {longest}, {why}")
    sheet.move()
    sheet.leave_out("eval_max_new_tokens", "evaluation has the limit of max_completion_length")
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
    names += " data.max_test_samples"
    sheet.write("dataset", data, names, "the system prompt is that of the book's code")
    sheet.fix(ties=("first", "as the book's code"), truncation_mode="keep_end")
    sheet.fix(correctness=("number", "for the report and evaluation only"), **_HALF)
    sheet.fix(chat_template_kwargs=({"enable_thinking": False}, "as the book's code"))
    names = "rollout_batch_size num_completions_per_prompt"
    prompts, rollouts = sheet.values(names)
    sheet.write("per_device_eval_batch_size", prompts * rollouts, names, "answers at a time")
    rows = "selection.top_k" if strategy.endswith("overall") else "data.max_train_samples"
    _write_last_step(sheet, rows, "train_batch_size", "batch_acc")
    sheet.fix(lr_scheduler_type=("constant", "the book's code has no schedule"))
    sheet.fix(activation_checkpointing=(True, "as the book's code"))
    sheet.fix(save_strategy=("no", note_of(sheet.kind, "save_checkpoint")))
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
        note = Differs("warms up from a tenth of the rate", "from 0")
        sheet.write("lr_scheduler_type", "constant_with_warmup", "lr_scheduler", note)
    limit, other = ("max_tokens", "max_length") if steps else ("max_length", "max_tokens")
    longer: Note = "what is longer is left out, as in the book's code"
    if kind == "reward":
        longer = Differs("cuts the end of longer texts", "their pair is left out")
    sheet.write("max_length", sheet[limit], limit, longer)
    rows, share, interval, split = sheet.values("samples val_ratio eval_interval dataset_split")
    held = math.ceil(rows * share)
    data: dict[str, Any] = {"split": f"{split}[:{rows - held}]"}
    if held:
        data |= {"eval_split": f"{split}[{rows - held}:{rows}]", "eval_size": held}
        sheet.write("eval_strategy", "steps" if interval > 0 else "epoch", "eval_interval")
    if held and interval > 0:
        sheet.write("eval_steps", interval, "eval_interval", "optimizer steps")
    taken = f"shuffles all rows before it takes {rows}"
    kept = f"the first {rows} are taken, and the last {held} of them held out"
    if steps:
        data |= {"step_separator": "\n<step>\n", "max_steps": sheet["max_steps"]}
        taken = f"takes the first {rows} rows that have a rated step"
        kept += ", and only the step that was gone on from is one"
    if held:
        taken += f" and holds out {held} of them at random"
    if steps:
        taken += ", and counts the alternatives of a step as further steps"
    reader, of_pairs = _pairs_reader(sheet)
    if isinstance(of_pairs, Differs) and kind == "reward":
        taken, kept = f"{taken}, and {of_pairs.code}", f"{kept}, and {of_pairs.here}"
    readers = {"orm": "gsm8k_rollouts", "prm": "prm800k", "reward": reader}
    sources = "samples val_ratio" + " max_steps" * steps + " rollouts_per_prompt" * outcomes
    _write_data(sheet, Differs(taken, kept), sources, reader=readers[kind], **data)
    note = Differs("decays all weights at the default of torch", "all but biases and norms")
    sheet.fix(weight_decay=(0.01, note))
    sheet.fix(max_grad_norm=(0.0, "the book's code does not clip; 0 turns TRL's clipping off"))
    sheet.fix(dtype=("float32", "the weights of the book's code"))
    sheet.fix(bf16=(True, "autocast, as in the book's code"))
    for unread in (other, "max_steps", "rollouts_per_prompt", "eval_interval"):
        sheet.leave_out(unread, f"not read by {kind}")


def _write_samples(sheet: Sheet, **names: str) -> None:
    """Write the panels of answers."""
    names = {"every": "every"} | names | {n: n for n in ("temperature", "top_p", "max_tokens")}
    block = {to: value for to, n in names.items() if (value := sheet[f"sample_{n}"]) is not None}
    sources = [f"sample_{name}" for name in names.values()]
    if sheet["sample_every"] > 0:
        note: Note = ""
        if "file" not in block:
            note = Differs("asks prompts of a list of its own", "those of the data set")
        sheet.write("samples", block, " ".join(sources), note)
    for name in sources:
        sheet.leave_out(name, "the recipe has no panels, or prompts of its own, unless asked")


def _write_data(sheet: Sheet, note: Note = "", sources: str = "", **block: Any) -> None:
    """Write a data set of the hub."""
    block = {"source": "path", "path": sheet["dataset_name"], **block}
    sheet.write("dataset", block, f"dataset_name dataset_split {sources}", note)


def _pairs_reader(sheet: Sheet) -> tuple[str, Note]:
    """Return which reader makes of a data set what the book's code does, and what it does not."""
    name, alone = sheet["dataset_name"].lower(), sheet.kind == "reward_models"
    if "hh-rlhf" in name:
        code = "makes one message of all that comes before the last answer of chosen"
        if alone:
            code = "takes each transcript for the answer to an empty question"
        here = "each turn is a message of its own, and sides that part earlier are left out"
        return "hh", Differs(code, here)
    if name in RATED_PAIRS:
        return "ultrafeedback", ""
    if alone:
        return "book_pairs", Differs("scores whole conversations", "the first answer to a question")
    return "book_pairs", "the chat template is applied, as in the book's code"


_FILL: dict[str, Callable[[Sheet], None]] = {
    "policy_gradients": _policy_gradient,
    "distillation": _distillation,
    "direct_alignment": _direct_alignment,
    "instruction_tuning": _instruction_tuning,
    "rejection_sampling": _rejection_sampling,
    "reward_models": _reward_model,
}
