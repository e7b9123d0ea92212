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


@dataclass(frozen=True)
class Quantity:
    """One quantity of a run on both sides; a text where no number is known."""

    name: str
    code: int | str
    here: int | str

    @property
    def differs(self) -> bool:
        """Whether the two sides differ."""
        return self.code != self.here


def quantities(sheet: Sheet, here: Mapping[str, Any] | None = None) -> list[Quantity]:
    """Return the quantities of a config of the book's code, and of one of ours.

    `here` has the values of ours, by default those of the translation.
    """
    if here is None:
        here = {name: line.value for name, line in sheet.lines.items()}
    if sheet.kind == "policy_gradients":
        return _of_buffers(sheet, here)
    if sheet.kind == "distillation":
        return _of_distillation(sheet, here)
    if sheet.kind == "reward_models" and here["algorithm"] == "prm":
        return [_per_step(sheet, "batch_size", "grad_accum_steps", here, "packed traces")]
    return _of_examples(sheet, here)


def _per_step(
    sheet: Sheet, size: str, accumulation: str, here: Mapping[str, Any], what: str
) -> Quantity:
    own = here["per_device_train_batch_size"] * here["gradient_accumulation_steps"]
    code = sheet[size] * sheet[accumulation]
    if here.get("algorithm") == "kto":  # which counts completions, two of each pair
        code *= 2
    return Quantity(f"{what} per optimizer step", code, own)


def _of_buffers(sheet: Sheet, here: Mapping[str, Any]) -> list[Quantity]:
    """Count what a policy gradient's buffers hold; TRL calls one a generation."""
    code_prompts = sheet["prompts_per_step"]
    code_completions = code_prompts * sheet["num_rollouts"]
    code_completions_per_update = sheet["train_batch_size"] * sheet["batch_acc"]
    code_updates = code_completions // code_completions_per_update
    code_buffers = sheet["data.size"] // code_prompts
    code_steps: int | str = code_buffers * code_updates
    if here["algorithm"] == "dapo":
        # the code fills its buffers with groups whose rewards differ; only a run tells their number
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
    names = "prompts_per_step num_rollouts num_steps max_new_tokens"
    prompts, rollouts, steps, longest = sheet.values(names)
    completions = here["per_device_train_batch_size"] * here["gradient_accumulation_steps"]
    trained = steps * prompts * rollouts * longest
    own = here["max_steps"] * completions * here["max_completion_length"]
    return [
        Quantity("completions per optimizer step", prompts * rollouts, completions),
        Quantity("prompts per optimizer step", prompts, completions // here["num_generations"]),
        Quantity("optimizer steps", steps, here["max_steps"]),
        Quantity("warm-up steps", *_warmup(sheet, here, steps, steps)),
        Quantity("trained tokens at most", trained, own),
    ]


def _of_examples(sheet: Sheet, here: Mapping[str, Any]) -> list[Quantity]:
    """Count the steps of passes over examples."""
    size, accumulation, epochs = {
        "direct_alignment": ("batch_size", "gradient_accumulation_steps", "num_epochs"),
        "instruction_tuning": ("batch_size", "gradient_accumulation_steps", "num_epochs"),
        "rejection_sampling": ("train_batch_size", "batch_acc", "num_epochs"),
        "reward_models": ("batch_size", "grad_accum_steps", "epochs"),
    }[sheet.kind]
    twice = 1 + (here.get("algorithm") == "kto")
    what = "completions" if twice == 2 else "examples"
    found = [_per_step(sheet, size, accumulation, here, what)]
    count = _examples(sheet, here)
    if count is None:
        return [*found, Quantity("examples", UNKNOWN, UNKNOWN)]

    whole = math.ceil(count / sheet[size])
    if sheet.kind == "reward_models" and count > sheet[size]:  # an incomplete batch is left out
        whole = count // sheet[size]
    own_whole = math.ceil(twice * count / here["per_device_train_batch_size"])
    complete = whole // sheet[accumulation]
    steps = math.ceil(whole / sheet[accumulation])
    if sheet.kind == "instruction_tuning":  # an epoch's incomplete step is dropped
        steps = complete
    own_steps = math.ceil(own_whole / here["gradient_accumulation_steps"])
    passes, own_passes = sheet[epochs], here["num_train_epochs"]
    found += [
        Quantity("examples in a pass", count, count),
        Quantity("optimizer steps in a pass", steps, own_steps),
        Quantity("optimizer steps", steps * passes, own_steps * own_passes),
    ]
    if "warmup_ratio" in sheet.table:
        # the schedule of the direct alignment counts complete steps alone
        scheduled = steps if sheet.kind == "reward_models" else complete
        warmup = _warmup(sheet, here, scheduled * passes, own_steps * own_passes)
        found.append(Quantity("warm-up steps", *warmup))
    texts = 2 if sheet.kind == "direct_alignment" or here.get("algorithm") == "reward" else 1
    longest = here["max_length"]
    found.append(
        Quantity(
            "tokens at most",
            count * passes * texts * longest,
            count * own_passes * texts * longest,
        )
    )
    return found


def _examples(sheet: Sheet, here: Mapping[str, Any]) -> int | None:
    """Return the examples of a pass, if no row is left out; None: the config does not say."""
    if sheet.kind == "rejection_sampling":
        questions = sheet["data.max_train_samples"] or ROWS.get(sheet["data.name"])
        return here.get("k", questions)
    if sheet.kind == "reward_models":
        rows = sheet["samples"]
        rows -= math.ceil(rows * sheet["val_ratio"])
        return rows * sheet["rollouts_per_prompt"] if here["algorithm"] == "orm" else rows
    known = ROWS.get(sheet["dataset_name"])
    asked = sheet["max_samples"]
    return min(asked, known) if asked and known else asked or known


def _warmup(sheet: Sheet, here: Mapping[str, Any], steps: int, own_steps: int) -> tuple[int, int]:
    """Return the steps of the warm-up on both sides."""
    share = sheet["warmup_ratio"]
    own = own_steps * here["warmup_steps"]
    rounds_up = here.get("warmup_from_zero", True)
    return int(steps * share), math.ceil(own) if rounds_up else int(own)
