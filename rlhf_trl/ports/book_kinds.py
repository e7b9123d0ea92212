"""What the tables of `book_fields` cannot say of a config: a function for each kind, in `FILL`.

Each fills in a `Sheet`: fields that several of the book's become, values that do not carry over,
and what the book's code does without a field for it. The verbs of a `Sheet`:

    write_by_tables  write the algorithm and every field that the tables of `book_fields` cover
    write            write a field that is made of fields of the code
    add              write a field that the code has no field for
    set_note         replace the note (the comment) of a field that is written
    leave_out        say why a field of the code has no counterpart
    refuse           end the translation with one sentence
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_trl.ports.book_fields import RATED_PAIRS, SAVED
from rlhf_trl.ports.comments import Differs, Note
from rlhf_trl.ports.quantities import ROWS, direct_alignment_steps, examples, leaves_micro_batches
from rlhf_trl.ports.sheet import Sheet

_ACEMATH_PROMPT = "Please reason step by step, and check your final answer within \\boxed{}."


# --- policy gradients and distillation: prompts, which the model answers --------------------------


def _policy_gradient(sheet: Sheet) -> None:
    """Fill in a config of recipes/grpo.py or recipes/ppo.py."""
    loss = sheet["loss"]
    row_reads = sheet.write_by_tables(algorithm=loss, source="loss")
    drops_groups = "dynamic_sampling_rounds" in row_reads  # DAPO: those without contrast
    _check_loss_fields(sheet, row_reads)
    if loss == "cispo":
        high = sheet["clip_eps_hi"]
        note = f"weights are held below 1 + {high}, as in the book's code; TRL's own field of that "
        note += f"name is the bound itself and would be {1 + high:g}"
        sheet.set_note("epsilon_high", note)
    if sheet["beta"]:
        sheet.set_note("beta", _kl_note(sheet))
    if "format_reward" in row_reads:  # MaxRL, whose success is a right answer in the right format
        note = "with its partial credit, where all four tags are, as in the book's code"
        sheet.add("correctness_reward", "gym_score", note)
        sheet.add("format_reward", "format")
    elif "correctness_reward" in row_reads:  # DAPO
        sheet.add("correctness_reward", "gym_score", "by which groups have contrast")
    if drops_groups:
        sheet.add("dynamic_sampling_rounds", 0, "groups without contrast are dropped")
    for name in ("l_max", "accuracy_min_reward", "accuracy_max_reward"):
        why = "what the recipe does anyway" if drops_groups else f"not read by {loss}"
        sheet.leave_out(name, why)
    _write_updates(sheet)
    _write_rollouts(sheet, ["gym_score", "format"])
    # in the order of the rewards above; the book's code weighs correctness by 1
    sheet.write("reward_weights", [1.0, sheet["format_weight"]], "format_weight")
    _add_constant_rate(sheet)
    epochs_note: Note = "the book's code goes through its data once"
    if drops_groups:
        epochs_note = _note_on_dropped_groups(sheet)
    sheet.add("num_train_epochs", 1, epochs_note)


def _check_loss_fields(sheet: Sheet, row_reads: Mapping[str, Any]) -> None:
    """Refuse fields of the loss that the recipe has no counterpart for."""
    loss, beta, end, longest = sheet.values("loss beta l_max max_new_tokens")
    if beta and "beta" not in row_reads:
        sheet.refuse(f"beta is {beta}, and {loss} has no KL penalty here; write 0.0")
    if "soft_punish_cache" in row_reads and end != longest:
        why = "and the overlong penalty here ends at the longest completion; write the same number"
        sheet.refuse(f"l_max is {end} and max_new_tokens {longest}, {why}")
    if "soft_punish_cache" in row_reads and (cache := sheet["l_cache"]) > longest:
        sheet.refuse(f"l_cache is {cache}, more than the {longest} of max_new_tokens; write less")
    low, high = sheet.values("accuracy_min_reward accuracy_max_reward")
    if "dynamic_sampling_rounds" in row_reads and (low, high) != (0, 1):
        why = "and dynamic sampling here takes 0 for wrong and 1 for right; remove them"
        sheet.refuse(f"accuracy_min_reward and accuracy_max_reward are {low} and {high}, {why}")


def _kl_note(sheet: Sheet) -> Note:
    """Say which sign the KL of the book's code has."""
    estimator = sheet["kl_estimator"].replace("kl", "k")
    if estimator == "k2":
        return ""
    # In the reward, k1 of the other sign is paid for drift. The other k3 is never negative either,
    # so it still costs, and only its gradient is another.
    is_paid = sheet.row.kl == "reward" and estimator == "k1"
    pays = ", so that the reward pays for drift" if is_paid else ""
    sign = f"{estimator} has the other sign than the KL's in the book's code, and so here"
    return f"{sign}{pays}; formulation chapter has the right one"


def _note_on_dropped_groups(sheet: Sheet) -> Note:
    """Say what becomes of the steps of groups without contrast."""
    rollouts, size, accumulation = sheet.values("num_rollouts train_batch_size batch_acc")
    updates = rollouts / (size * accumulation)
    return Differs(
        "goes through its data once and fills its buffers with groups that have contrast: "
        f"{updates:g} optimizer step{'s' * (updates != 1)} for each of these",
        f"{updates:g} for each group, on what is left of their completions",
    )


def _write_updates(sheet: Sheet) -> None:
    """Write the updates on a buffer; refuse one that the code does not train on as TRL would.

    A buffer of the code is a generation of TRL's: prompts_per_step x num_rollouts completions. It
    must split into whole batches, and these into whole optimizer steps.
    """
    names = "prompts_per_step num_rollouts train_batch_size batch_acc"
    prompts, rollouts, size, accumulation = sheet.values(names)
    if rollouts < 2 and (loss := sheet["loss"]) not in ("reinforce", "ppo"):
        why = f"and {loss} compares the completions of a prompt; write 2 or more"
        sheet.refuse(f"num_rollouts is {rollouts}, {why}")
    if (questions := sheet["data.size"]) < prompts:
        why = f"fewer than the {prompts} of prompts_per_step, so the code trains nothing"
        sheet.refuse(f"data.size is {questions}, {why}; write as many or more")
    batches, completions_over = divmod(prompts * rollouts, size)
    if completions_over:
        sheet.refuse(
            f"a buffer of prompts_per_step {prompts} x num_rollouts {rollouts} completions leaves "
            f"{completions_over} over in batches of train_batch_size {size}, which the code drops "
            "and TRL does not; write a train_batch_size that divides it"
        )
    steps, batches_over = divmod(batches, accumulation)
    if batches_over:
        sheet.refuse(
            f"batch_acc {accumulation} does not divide the {batches} batches of a buffer "
            f"(prompts_per_step {prompts} x num_rollouts {rollouts} / train_batch_size {size}), "
            "so the code ends each buffer with a smaller step, where TRL goes on accumulating; "
            "write a batch_acc that divides them"
        )
    updates = f"{steps} optimizer step{'s' * (steps > 1)}"
    note = f"{batches} batches, so {updates}, as in the book's code"
    if steps > 1 and sheet.row.ratio == "none":  # the loss has no likelihood ratio
        note += "; those after the first are off-policy, and nothing corrects them"
    sheet.write("steps_per_generation", batches, "prompts_per_step num_rollouts", note)


def _write_rollouts(sheet: Sheet, rewards: list[str]) -> None:
    """Write how completions are sampled and rewarded, and the data set of the questions."""
    if not isinstance(sheet["data.specs"], list):
        sheet.refuse("data is missing or has no list of specs; write data: {size: N, specs: [...]}")
    # TRL's `temperature` is also that of the log-probabilities, so it is 1, and the temperature of
    # the samples goes into `generation_kwargs`
    note = "of the log-probabilities; TRL would divide by the sampling temperature there, too"
    sheet.add("temperature", 1.0, note)
    names = "temperature top_p top_k min_p"
    sampling = {name: sheet[name] for name in names.split()}
    note = "the book's code samples with these and scores at 1"
    sheet.write("generation_kwargs", sampling, names, note)
    note = "with use_vllm, TRL would weigh losses by pi at 1 over pi as sampled; the book's code "
    note += "does not"
    sheet.add("vllm_importance_sampling_correction", False, note)
    sheet.add("reward_funcs", rewards)
    size, seed, specs = sheet.values("data.size seed data.specs")
    data = {
        "source": "reasoning_gym",
        "size": size,
        "seed": seed,
        "system_prompt": "deepseek_zero",
        "specs": specs,
    }
    differs = Differs(
        code=f"trains on the first {size} questions of this seed",
        here="one in ten is kept for evaluation and the next one takes its place",
    )
    sheet.write("dataset", data, "data.size data.specs", differs)
    _add_bfloat16(sheet)


def _distillation(sheet: Sheet) -> None:
    """Fill in a config of recipes/distill.py.

    An optimizer step of the code trains on prompts_per_step x num_rollouts completions, of which
    rollout_chunk are a micro-batch.
    """
    names = "prompts_per_step num_rollouts rollout_chunk"
    prompts, rollouts, chunk = sheet.values(names)
    if prompts * rollouts % chunk:
        why = f"which does not divide the {prompts} x {rollouts} completions of a step"
        sheet.refuse(f"rollout_chunk is {chunk}, {why}; write one that does")
    sheet.write_by_tables(algorithm=sheet["loss"], source="loss")
    sheet.write("gradient_accumulation_steps", prompts * rollouts // chunk, names)
    sheet.add("teacher", "live", "as the book's code")  # the student with its weights of the moment
    sheet.add("demonstration", "first", "as the book's code")  # of a prompt's right completions
    # `success_reward_threshold` is 1: another one was refused when the values were read
    note = "a completion with 1 is right, as in the book's code"
    sheet.write("correctness_reward", "gym_score", "success_reward_threshold", note)
    rounds = 100  # of questions, after which the code, too, asks no more
    differs = Differs(
        code=f"asks one question after another until {prompts} have a right answer, "
        f"{rounds * prompts} at most",
        here="questions without one are replaced for so many rounds, and then not learned from",
    )
    sheet.add("dynamic_sampling_rounds", rounds, differs)
    schedule = "constant_with_warmup" if sheet["warmup_ratio"] else "constant"
    sheet.write("lr_scheduler_type", schedule, "warmup_ratio")
    _write_warmup(sheet)
    if sheet["enable_thinking"]:
        sheet.leave_out("enable_thinking", "the chat template's default")
    else:
        sheet.write("chat_template_kwargs", {"enable_thinking": False}, "enable_thinking")
    _write_rollouts(sheet, ["gym_score"])


# --- passes over texts ----------------------------------------------------------------------------


def _direct_alignment(sheet: Sheet) -> None:
    """Fill in a config of recipes/dpo.py, recipes/kto.py or recipes/orpo.py."""
    loss, model, reference = sheet.values("loss model_name ref_model_name")
    # the code takes 0.1 for cdpo, whatever the config says
    smoothing = 0.1 if loss == "cdpo" else sheet["label_smoothing"]
    if smoothing and loss == "dpo_norm":
        sheet.refuse("label_smoothing has no place in dpo_norm here; write 0.0")
    if reference not in (None, model):
        why = "and the recipes take the model itself as the reference; write its name or null"
        sheet.refuse(f"ref_model_name is {reference!r}, {why}")
    algorithm = "cdpo" if smoothing and loss == "dpo" else loss  # DPO with smoothed labels is cDPO
    sheet.write_by_tables(algorithm, source="loss")
    sheet.leave_out("ref_model_name", "the reference is the model itself, as in the book's code")
    if algorithm == "cdpo":
        note = ""
        if loss == "cdpo":
            note = "the book's code has 0.1 for cdpo, whatever the config says"
        sheet.write("label_smoothing", smoothing, "label_smoothing", note)
    # the code takes its default of beta, 0.1, for a beta that is not set, even where it is written
    if loss in ("simpo", "dpo_norm") and sheet["beta"] == 0.1:
        note = f"0.1, which the book's code takes as 2 for {loss}"
        sheet.write("beta", 2.0, "beta", note)
    if loss == "kto":  # which counts completions here, and pairs in the book's code
        size = sheet["batch_size"]
        differs = Differs(
            code=f"trains {size} pairs at a time, whole ones, in another order each epoch",
            here=f"{2 * size} completions, half of them rejected, in one order that parts most "
            "pairs",
        )
        sheet.write("per_device_train_batch_size", 2 * size, "batch_size", differs)
    reader, pairs_note = _pairs_reader(sheet)
    _write_data(sheet, pairs_note, reader=reader, split=sheet["dataset_split"])
    _write_samples(sheet, count="num_prompts", choice="prompt_strategy", file="prompts_file")
    _write_precision(sheet)
    if sheet["bf16"]:
        # how far neighboring numbers of bfloat16 are apart at the size of a text's log-probability
        spacing = "in steps of 2 from 256 nats on and of 8 from 1,024 on"
        if sheet.row.logps == "mean":
            spacing = "in steps of 0.008 between 1 and 2 nats per token"
        differs = Differs(
            code=f"has log-probabilities in bfloat16, {spacing}",
            here="in float32",
        )
        sheet.set_note("bf16", differs)
    _write_linear_schedule(sheet)
    sheet.set_note("lr_scheduler_type", _note_on_end_of_schedule(sheet))
    _drop_needless_last_step_note(sheet)


def _note_on_end_of_schedule(sheet: Sheet) -> Note:
    """Say where the learning rate of direct alignment reaches 0.

    The code's schedule counts the complete steps of an epoch, but the code takes one step more
    where an epoch leaves micro-batches over. With 10 complete steps and some micro-batches in each
    of 3 epochs, its schedule ends after 30 of 33 steps, and the last 3 have rate 0.
    """
    counted = direct_alignment_steps(sheet)
    if counted is None:  # the number of rows is not known
        epochs = sheet["num_epochs"]
        last = f"the last {epochs} steps have" if epochs > 1 else "the last step has"
        return Differs(
            code=f"goes to 0, which {last} where an epoch leaves micro-batches over",
            here="to 0 after the last step",
        )
    scheduled, steps = counted
    if scheduled == steps:
        return "to 0, as in the book's code"
    last = f"the last {steps - scheduled} have" if steps - scheduled > 1 else "the last one has"
    return Differs(
        code=f"reaches 0 after {scheduled} of its {steps} steps, so that {last} rate 0",
        here=f"after {steps}",
    )


def _instruction_tuning(sheet: Sheet) -> None:
    """Fill in a config of recipes/sft.py."""
    sheet.write_by_tables()
    note = "the last turn is trained, as in the book's code"
    split = _first_rows(sheet, "dataset_split", "max_samples")
    _write_data(sheet, note, "max_samples", reader="messages", split=split, turns="last")
    _drop_needless_last_step_note(sheet)
    _write_samples(sheet)
    _write_precision(sheet)
    _write_linear_schedule(sheet)


def _rejection_sampling(sheet: Sheet) -> None:
    """Fill in a config of recipes/rejection_sampling.py.

    It answers questions, scores the answers, selects some, and trains on these; the code's config
    has blocks for the data and the selection.
    """
    strategy, count = sheet.values("selection.strategy selection.top_k")
    eval_limit, limit = sheet.values("eval_max_new_tokens max_new_tokens")
    if eval_limit != limit:
        why = "and evaluation has the limit of sampling here; write the same number"
        sheet.refuse(f"eval_max_new_tokens is {eval_limit} and max_new_tokens {limit}, {why}")
    sheet.write_by_tables()
    sheet.leave_out("eval_max_new_tokens", "evaluation has the limit of max_completion_length")
    sheet.write("strategy", strategy, "selection.strategy")
    if strategy.endswith("overall"):  # chooses among the answers to all prompts
        sheet.write("k", count, "selection.top_k")
    else:
        sheet.leave_out("selection.top_k", "one completion of each prompt is taken")
    path, name, held_split = sheet.values("data.name data.subset data.test_split")
    data = {
        "source": "path",
        "path": path,
        "name": name,
        "reader": "gsm8k",
        "eval_split": held_split,
        "split": _first_rows(sheet, "data.train_split", "data.max_train_samples"),
        "system_prompt": _ACEMATH_PROMPT,
        "eval_size": sheet["data.max_test_samples"],
    }
    names = "data.name data.subset data.train_split data.max_train_samples data.test_split"
    names += " data.max_test_samples"
    sheet.write("dataset", data, names, "the system prompt is that of the book's code")
    sheet.add("ties", "first", "as the book's code")  # which of several answers with equal rewards
    sheet.add("truncation_mode", "keep_end")
    sheet.add("correctness", "number", "for the report and evaluation only")
    _add_bfloat16(sheet)
    sheet.add("chat_template_kwargs", {"enable_thinking": False}, "as the book's code")
    names = "rollout_batch_size num_completions_per_prompt"
    prompts, rollouts = sheet.values(names)
    sheet.write("per_device_eval_batch_size", prompts * rollouts, names, "answers at a time")
    _drop_needless_last_step_note(sheet)
    _add_constant_rate(sheet)
    sheet.add("activation_checkpointing", True, "as the book's code")
    sheet.add("save_strategy", "no", SAVED)
    folder = Path(sheet["output_dir"])
    sheet.write("answers", f"{folder}/answers", "output_dir", "which all strategies share")
    sheet.write("output_dir", f"{folder}/{strategy}", "output_dir")


def _reward_model(sheet: Sheet) -> None:
    """Fill in a config of recipes/reward.py, recipes/orm.py or recipes/prm.py.

    The book has one config class for its three scripts; each reads some of the fields, and those
    that the config's script does not read are left out.
    """
    kind = _kind_of_reward_model(sheet)
    sheet.write_by_tables(algorithm=kind)
    sheet.set_note("model_name_or_path", _head_note(kind))
    _write_reward_schedule(sheet, kind)
    # the code has two fields for the longest text, of which each script reads one
    limit, unread_limit = "max_length", "max_tokens"
    if kind == "prm":
        limit, unread_limit = unread_limit, limit
    longer: Note = "what is longer is left out, as in the book's code"
    if kind == "reward":
        longer = Differs(code="cuts the end of longer texts", here="their pair is left out")
    sheet.write("max_length", sheet[limit], limit, longer)
    _write_reward_data(sheet, kind)
    interval, epochs = sheet.values("eval_interval epochs")
    if sheet["val_ratio"]:
        sheet.write("eval_strategy", "steps" if interval > 0 else "epoch", "eval_interval")
    if sheet["val_ratio"] and interval > 0:
        evaluated: Note = "optimizer steps"
        if epochs > 1:
            evaluated = Differs(
                code=f"evaluates every {interval} optimizer steps and after each epoch",
                here="every so many and after the last epoch",
            )
        sheet.write("eval_steps", interval, "eval_interval", evaluated)
    differs = Differs(
        code="decays all weights at the default of torch",
        here="all but biases and norms",
    )
    sheet.add("weight_decay", 0.01, differs)
    sheet.add("max_grad_norm", 0.0, "the book's code does not clip; 0 turns TRL's clipping off")
    sheet.add("dtype", "float32", "the weights of the book's code")
    sheet.add("bf16", True, "autocast, as in the book's code")
    # `leave_out` passes over a field that a line above is made of, such as max_steps for prm
    for unread in (unread_limit, "max_steps", "rollouts_per_prompt", "eval_interval"):
        sheet.leave_out(unread, f"not read by {kind}")


def _kind_of_reward_model(sheet: Sheet) -> str:
    """Tell which of the three scripts a config is for, by its data set and its own fields."""
    name, rollouts = sheet.values("dataset_name rollouts_per_prompt")
    is_outcome = "rollouts_per_prompt" in sheet.config or "gsm8k" in name.lower()
    is_process = bool({"max_steps", "max_tokens"} & sheet.config.keys())
    is_process |= "prm800k" in name.lower()
    if is_outcome and is_process:
        why = "of an outcome reward model, max_steps, max_tokens and PRM800K of a process one"
        sheet.refuse(f"rollouts_per_prompt and GSM8K are {why}; remove those of either")
    if is_outcome and rollouts != 100:
        why = "and recipes/orm.py takes all of a prompt, 100 in the book's data set; write 100"
        where = "" if "rollouts_per_prompt" in sheet.config else " by default"
        sheet.refuse(f"rollouts_per_prompt is {rollouts}{where}, {why}")
    return "orm" if is_outcome else "prm" if is_process else "reward"


def _head_note(kind: str) -> Differs:
    """Say how the head's weights start: by torch's default in the code, by transformers' here."""
    code = "starts the head evenly within 1 / sqrt(hidden size), with a standard deviation of 0.018"
    here = "normally with the model's initializer_range, 0.02"
    if kind == "prm":
        return Differs(
            code=f"{code} for Qwen3-0.6B's 1,024, and its bias alike",
            here=f"{here} for Qwen3-0.6B, and its bias at 0",
        )
    return Differs(code=f"{code} for Qwen3-0.6B's 1,024", here=f"{here} for Qwen3-0.6B")


def _write_reward_schedule(sheet: Sheet, kind: str) -> None:
    """Write the schedule of a rate that stays constant, after a warm-up if there is one.

    The tables have written the schedule by `lr_scheduler`. That is right for "linear_decay", which
    the process reward model's script does not read, though: its rate is always constant. The code's
    "warmup_only" starts at another rate than TRL's schedule, and is constant without a warm-up.
    """
    is_written_right = kind != "prm" and sheet["lr_scheduler"] == "linear_decay"
    if is_written_right:
        return
    does_not_read = ""
    if kind == "prm" and sheet["lr_scheduler"] != "warmup_only":
        does_not_read = "does not read it for a process reward model"
    if not sheet["warmup_ratio"]:
        note = f"the book's code {does_not_read}" if does_not_read else ""
        sheet.write("lr_scheduler_type", "constant", "lr_scheduler", note)
        return
    code = "warms up from a tenth of the rate"
    if does_not_read:
        code = f"{does_not_read}, {code} and stays there"
    differs = Differs(code=code, here="from 0")
    sheet.write("lr_scheduler_type", "constant_with_warmup", "lr_scheduler", differs)


def _write_reward_data(sheet: Sheet, kind: str) -> None:
    """Write which rows are trained on and which are held out, and how they are read."""
    rows, share, split, name = sheet.values("samples val_ratio dataset_split dataset_name")
    _check_unsliced(sheet, "dataset_split", "samples")
    rows = min(rows, ROWS.get(name, rows))  # no more than a data set of known size has
    held = math.ceil(rows * share)
    data: dict[str, Any] = {"split": f"{split}[:{rows - held}]"}
    if held:
        data |= {"eval_split": f"{split}[{rows - held}:{rows}]", "eval_size": held}
    # The note has two halves: which rows the code takes, and which are taken here.
    holds_out = f" and holds out {held} of them at random" if held else ""
    code = f"shuffles all rows before it takes {rows}{holds_out}"
    here = f"the first {rows} are taken, and the last {held} of them held out"
    sources = "samples val_ratio"
    if kind == "prm":
        reader = "prm800k"
        data |= {"step_separator": "\n<step>\n", "max_steps": sheet["max_steps"]}
        sources += " max_steps"
        code = f"takes the first {rows} rows that have a rated step{holds_out}"
        code += ", and counts the alternatives of a step as further steps"
        here += ", and only the step that was gone on from is one"
    elif kind == "orm":
        reader = "gsm8k_rollouts"
        sources += " rollouts_per_prompt"
    else:
        reader, pairs_note = _pairs_reader(sheet)
        if isinstance(pairs_note, Differs):
            code += f", and {pairs_note.code}"
            here += f", and {pairs_note.here}"
    _write_data(sheet, Differs(code, here), sources, reader=reader, **data)


# --- parts of several kinds -----------------------------------------------------------------------


def _add_bfloat16(sheet: Sheet) -> None:
    """Write the precision of the code where it has no field for it: all in bfloat16."""
    sheet.add("dtype", "bfloat16", "the weights of the book's code")
    sheet.add("bf16", True, "as the book's code computes")
    _add_unfused_adam(sheet)


def _add_unfused_adam(sheet: Sheet) -> None:
    """Write the Adam of the code, which counts where the weights are bfloat16."""
    note = "as the book's code, which rounds to bfloat16 after each operation of Adam; TRL's "
    note += "default, fused, rounds once, and moves toy weights 1 % otherwise in a step, 5 % in 100"
    sheet.add("optim", "adamw_torch", note)


def _write_precision(sheet: Sheet) -> None:
    """Write the type of the weights, by the code's field `bf16`, and their Adam."""
    sheet.write("dtype", "bfloat16" if sheet["bf16"] else "float32", "bf16")
    if sheet["bf16"]:
        _add_unfused_adam(sheet)


def _add_constant_rate(sheet: Sheet) -> None:
    """Write a learning rate without a schedule."""
    sheet.add("lr_scheduler_type", "constant", "the book's code has no schedule")


def _write_linear_schedule(sheet: Sheet) -> None:
    """Write the linear schedule of the book's code with its warm-up."""
    sheet.add("lr_scheduler_type", "linear", "to 0, as in the book's code")
    _write_warmup(sheet)


def _write_warmup(sheet: Sheet) -> None:
    """Write how a warm-up begins, if there is one."""
    if sheet["warmup_ratio"]:
        note = "as in the book's code: W steps, rounded down, the first at the rate / (W + 1)"
        sheet.add("warmup_from_zero", False, note)


def _drop_needless_last_step_note(sheet: Sheet) -> None:
    """Drop the note on an epoch's smaller last step where the number of rows rules one out."""
    count = examples(sheet)
    if count is not None and not leaves_micro_batches(sheet, count):
        sheet.set_note("gradient_accumulation_steps", "")


def _first_rows(sheet: Sheet, split: str, rows: str) -> str:
    """Return a split, or the slice of it that has its first rows."""
    if sheet[rows] is None:
        return sheet[split]
    _check_unsliced(sheet, split, rows)
    return f"{sheet[split]}[:{sheet[rows]}]"


def _check_unsliced(sheet: Sheet, split: str, rows: str) -> None:
    """Refuse a slice, of which no rows can be taken in turn."""
    if "[" in sheet[split]:
        why = f"and rows are taken of it; write the whole split, and how many rows as {rows}"
        sheet.refuse(f"{split} is {sheet[split]!r}, a slice, {why}")


def _write_samples(sheet: Sheet, **names: str) -> None:
    """Write the panels of answers; `names` are our fields that the code calls otherwise."""
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
    """Return which reader makes of a data set what the book's code does, and what it does not.

    The code looks at the first row of the data; a translation loads none, so it goes by the name.
    For reward models the code reads the same data in another way than for direct alignment.
    """
    name = sheet["dataset_name"].lower()
    of_reward_model = sheet.kind == "reward_models"
    if "hh-rlhf" in name:
        code = "makes one message of all that comes before the last answer of chosen"
        if of_reward_model:
            code = "takes each transcript for the answer to an empty question"
        here = "each turn is a message of its own, and sides that part earlier are left out"
        return "hh", Differs(code, here)
    if name in RATED_PAIRS:
        return "ultrafeedback", ""
    if of_reward_model:
        return "book_pairs", Differs("scores whole conversations", "the first answer to a question")
    return "book_pairs", "the chat template is applied, as in the book's code"


FILL: dict[str, Callable[[Sheet], None]] = {
    "policy_gradients": _policy_gradient,
    "distillation": _distillation,
    "direct_alignment": _direct_alignment,
    "instruction_tuning": _instruction_tuning,
    "rejection_sampling": _rejection_sampling,
    "reward_models": _reward_model,
}
