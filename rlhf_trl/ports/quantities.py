"""How much a run trains: by the loops of the book's code, and by those of the translation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_trl.ports.sheet import Sheet

ROWS = {
    "HuggingFaceH4/no_robots": 9500,
    "argilla/ultrafeedback-binarized-preferences-cleaned": 60917,
    "openai/gsm8k": 7473,
}
"""Rows of the training splits of the book's data sets, where its configs take them whole."""
UNKNOWN = "as many as there are rows"
# Where a run is counted in passes over examples: the code's names of three fields, the examples of
# a micro-batch, the micro-batches of an optimizer step, and the passes.
PASS_FIELDS = {
    "direct_alignment": ("batch_size", "gradient_accumulation_steps", "num_epochs"),
    "instruction_tuning": ("batch_size", "gradient_accumulation_steps", "num_epochs"),
    "rejection_sampling": ("train_batch_size", "batch_acc", "num_epochs"),
    "reward_models": ("batch_size", "grad_accum_steps", "epochs"),
}


@dataclass(frozen=True)
class Quantity:
    """One quantity of a run on both sides; a text where no number is known."""

    name: str
    code: int | str  # of the config that is translated, the book's code's or TRL's
    here: int | str  # of ours

    @property
    def differs(self) -> bool:
        """Whether the two sides differ."""
        return self.code != self.here


def quantities(sheet: Sheet, here: Mapping[str, Any] | None = None) -> list[Quantity]:
    """Return how much a config of the book's code trains, and how much one of ours does.

    `here` has the values of ours, by default those of the translation.
    """
    if here is None:
        here = {name: line.value for name, line in sheet.lines.items()}
    if sheet.kind == "policy_gradients":
        return _of_buffers(sheet, here)
    if sheet.kind == "distillation":
        return _of_distillation(sheet, here)
    if sheet.kind == "reward_models" and here["algorithm"] == "prm":
        # Its rows are cut and packed by their steps, so that neither side's number of examples is
        # known before the data are.
        return [_per_step(sheet, "batch_size", "grad_accum_steps", here, "packed traces")]
    return _of_passes(sheet, here)


def _per_step(
    sheet: Sheet, size: str, accumulation: str, here: Mapping[str, Any], what: str
) -> Quantity:
    """Return the examples of an optimizer step; `size` and `accumulation` are the code's fields."""
    code = sheet[size] * sheet[accumulation]
    if here.get("algorithm") == "kto":  # which counts completions, two of each pair
        code *= 2
    ours = here["per_device_train_batch_size"] * here["gradient_accumulation_steps"]
    return Quantity(f"{what} per optimizer step", code, ours)


def _of_buffers(sheet: Sheet, here: Mapping[str, Any]) -> list[Quantity]:
    """Count what the buffers of a policy gradient hold; TRL calls a buffer a generation.

    The code's loader drops the last questions that fill no buffer, as TRL does, hence `//`.
    """
    code_prompts = sheet["prompts_per_step"]
    code_completions = code_prompts * sheet["num_rollouts"]
    code_completions_per_update = sheet["train_batch_size"] * sheet["batch_acc"]
    code_updates = code_completions // code_completions_per_update
    code_buffers = sheet["data.size"] // code_prompts
    code_steps: int | str = code_buffers * code_updates
    if here["algorithm"] == "dapo":
        # The code fills its buffers with groups whose rewards differ. Only a run tells how many
        # there are, so a text stands in place of the number of steps.
        steps_per_group = sheet["num_rollouts"] / code_completions_per_update
        code_steps = f"{steps_per_group:g} for each group with contrast"
    code_tokens = code_buffers * code_completions * sheet["max_new_tokens"]

    here_completions = here["steps_per_generation"] * here["per_device_train_batch_size"]
    here_prompts = here_completions // here["num_generations"]
    here_updates = here["steps_per_generation"] // here["gradient_accumulation_steps"]
    here_buffers = here["dataset"]["size"] // here_prompts * here["num_train_epochs"]
    here_tokens = here_buffers * here_completions * here["max_completion_length"]
    return [
        _per_step(sheet, "train_batch_size", "batch_acc", here, "completions"),
        Quantity("prompts per buffer", code_prompts, here_prompts),
        Quantity("completions per buffer", code_completions, here_completions),
        Quantity("optimizer steps per buffer", code_updates, here_updates),
        Quantity("buffers", code_buffers, here_buffers),
        Quantity("optimizer steps", code_steps, here_buffers * here_updates),
        Quantity("generated tokens at most", code_tokens, here_tokens),
    ]


def _of_distillation(sheet: Sheet, here: Mapping[str, Any]) -> list[Quantity]:
    """Count the steps of distillation, each on a buffer of its own."""
    names = "prompts_per_step num_rollouts num_steps max_new_tokens"
    prompts, rollouts, steps, longest = sheet.values(names)
    code_tokens = steps * prompts * rollouts * longest
    completions = here["per_device_train_batch_size"] * here["gradient_accumulation_steps"]
    here_tokens = here["max_steps"] * completions * here["max_completion_length"]
    return [
        Quantity("completions per optimizer step", prompts * rollouts, completions),
        Quantity("prompts per optimizer step", prompts, completions // here["num_generations"]),
        Quantity("optimizer steps", steps, here["max_steps"]),
        _warmup(sheet, here, steps, here["max_steps"]),
        Quantity("trained tokens at most", code_tokens, here_tokens),
    ]


def _of_passes(sheet: Sheet, here: Mapping[str, Any]) -> list[Quantity]:
    """Count the steps of passes over examples, where the number of examples is known.

    At the end of a pass, micro-batches may be left that do not fill an optimizer step. TRL makes a
    smaller step of them; the code does so for some kinds of config, and drops them for others.
    """
    size_field, accumulation_field, epochs_field = PASS_FIELDS[sheet.kind]
    of_completions = here.get("algorithm") == "kto"  # two of each pair
    what = "completions" if of_completions else "examples"
    counted = [_per_step(sheet, size_field, accumulation_field, here, what)]
    count = examples(sheet)
    if count is None:
        return [*counted, Quantity("examples", UNKNOWN, UNKNOWN)]

    complete, smaller = _steps_of_a_pass(sheet, count)
    # instruction tuning drops the micro-batches that an epoch leaves
    code_steps = complete if sheet.kind == "instruction_tuning" else complete + smaller
    here_examples = 2 * count if of_completions else count
    here_batches = math.ceil(here_examples / here["per_device_train_batch_size"])
    here_steps = math.ceil(here_batches / here["gradient_accumulation_steps"])
    code_passes, here_passes = sheet[epochs_field], here["num_train_epochs"]
    counted += [
        Quantity("examples in a pass", count, count),
        Quantity("optimizer steps in a pass", code_steps, here_steps),
        Quantity("optimizer steps", code_steps * code_passes, here_steps * here_passes),
    ]
    scheduled = code_steps  # the steps of a pass of which the warm-up is a share
    if sheet.kind == "direct_alignment":  # whose schedule counts complete steps alone
        scheduled = complete
        if smaller:  # otherwise all steps are complete, and this line would repeat the one above
            name = "optimizer steps at a rate above 0"
            counted.append(Quantity(name, complete * code_passes, here_steps * here_passes))
    if "warmup_ratio" in sheet.table:
        counted.append(_warmup(sheet, here, scheduled * code_passes, here_steps * here_passes))
    # `count` counts pairs, of two texts each; for KTO as well, which the code trains on pairs
    is_paired = sheet.kind == "direct_alignment" or here.get("algorithm") == "reward"
    longest = count * here["max_length"] * (2 if is_paired else 1)
    tokens = Quantity("tokens at most", longest * code_passes, longest * here_passes)
    return [*counted, tokens]


def _steps_of_a_pass(sheet: Sheet, count: int) -> tuple[int, int]:
    """Return the complete and the smaller optimizer steps (0 or 1) of a pass of the code."""
    size_field, accumulation_field, _ = PASS_FIELDS[sheet.kind]
    size = sheet[size_field]
    batches = math.ceil(count / size)
    if sheet.kind == "reward_models" and count > size:  # an incomplete batch is left out
        batches = count // size
    complete, batches_left = divmod(batches, sheet[accumulation_field])
    return complete, int(batches_left > 0)


def leaves_micro_batches(sheet: Sheet, count: int) -> bool:
    """Tell whether a pass of the code over `count` examples ends with an incomplete step."""
    return _steps_of_a_pass(sheet, count)[1] > 0


def direct_alignment_steps(sheet: Sheet) -> tuple[int, int] | None:
    """Return the steps that the code schedules, and those that it takes; None: not known."""
    count = examples(sheet)
    if count is None:
        return None
    complete, smaller = _steps_of_a_pass(sheet, count)
    epochs = sheet["num_epochs"]
    return complete * epochs, (complete + smaller) * epochs


def examples(sheet: Sheet) -> int | None:
    """Return the examples of a pass, if no row is left out; None: the config does not say."""
    if sheet.kind == "rejection_sampling":
        if sheet["selection.strategy"].endswith("overall"):
            return sheet["selection.top_k"]
        return _at_most(sheet["data.max_train_samples"], sheet["data.name"])
    if sheet.kind == "reward_models":
        rows = _at_most(sheet["samples"], sheet["dataset_name"])
        rows -= math.ceil(rows * sheet["val_ratio"])
        is_outcome = sheet.lines["algorithm"].value == "orm"
        return rows * sheet["rollouts_per_prompt"] if is_outcome else rows
    return _at_most(sheet["max_samples"], sheet["dataset_name"])


def _at_most(limit: int | None, dataset: str) -> int | None:
    """Return how many rows of a data set are taken with a limit; None: the config does not say."""
    known = ROWS.get(dataset)
    if limit is None or known is None:
        return limit or known
    return min(limit, known)


def _warmup(sheet: Sheet, here: Mapping[str, Any], code_steps: int, here_steps: int) -> Quantity:
    """Return the steps of the warm-up, a share of all."""
    here_share = here_steps * here["warmup_steps"]
    rounds_up = here.get("warmup_from_zero", True)
    here_warmup = math.ceil(here_share) if rounds_up else int(here_share)
    return Quantity("warm-up steps", int(code_steps * sheet["warmup_ratio"]), here_warmup)
