"""Tampering with TRL flips the verdicts it concerns, and no others."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tampering
import torch

from rlhf_trl.compare.matrix import Matrix
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.rows import ROWS
from rlhf_trl.compare.windows.batches import BATCHES
from rlhf_trl.errors import InputError

BATCH = {batch.name: batch for batch in BATCHES}


def edited(monkeypatch, owner, name, old, new):
    """Replace a method by its own source with one change."""
    import inspect
    import textwrap

    method = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) >= 1, f"{old!r} is not in {name}"
    space = dict(vars(inspect.getmodule(method)))
    space["__class__"] = owner
    source = re.sub(r"super\(\)", f"super({owner.__name__}, self)", source.replace(old, new, 1))
    exec(compile(source, f"<edited {name}>", "exec"), space)
    monkeypatch.setattr(owner, name, space[name])


GRPO_LOSS = "trl.GRPOTrainer._compute_loss"
TAMPERINGS = {
    "sign of the surrogate": (
        GRPO_LOSS,
        "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)",
        "per_token_loss = torch.min(per_token_loss1, per_token_loss2)",
        {"grpo", "drgrpo", "gspo", "dapo"},
    ),
    "a detach": (
        GRPO_LOSS,
        "torch.clamp(coef_1, max=self.epsilon_high).detach()",
        "torch.clamp(coef_1, max=self.epsilon_high)",
        {"cispo_window"},
    ),
    "normalizer of dr_grpo": (
        GRPO_LOSS,
        "(per_token_loss.size(0) * self.max_completion_length)",
        "(per_token_loss.size(0) * self.max_completion_length + 1)",
        {"drgrpo"},
    ),
    "normalizer of dapo": (
        GRPO_LOSS,
        'inputs["num_items_in_batch"].clamp(min=1.0)',
        "mask.sum().clamp(min=1.0)",
        {"cispo_window", "dapo"},
    ),
    "epsilon of the standard deviation": (
        "trl.GRPOTrainer._generate_and_score_completions",
        "std_rewards + 1e-4",
        "std_rewards + 1e-2",
        {"grpo", "gspo", "cispo_window", "sapo", "dapo"},
    ),
    "clipped from above only": (
        GRPO_LOSS,
        "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
        "torch.clamp(coef_1, max=1 + self.epsilon_high)",
        {"grpo", "drgrpo", "gspo", "dapo"},
    ),
    "sapo's temperatures exchanged": (
        GRPO_LOSS,
        "advantages > 0, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg",
        "advantages > 0, self.args.sapo_temperature_neg, self.args.sapo_temperature_pos",
        {"sapo"},
    ),
    "rewards of the reward model exchanged": (
        "trl.RewardTrainer.compute_loss",
        "rewards_chosen - rewards_rejected).mean()",
        "rewards_rejected - rewards_chosen).mean()",
        {"reward", "kwise"},
    ),
    "DPO's mask shifted by one": (
        "trl.DPOTrainer._compute_loss",
        'inputs["input_ids"].masked_fill(completion_mask == 0, -100)',
        'inputs["input_ids"].masked_fill(completion_mask.roll(1, 1) == 0, -100)',
        {"dpo", "cdpo", "ipo", "dpo_norm", "apo_zero", "apo_down"},
    ),
    "IPO's target": (
        "trl.DPOTrainer._compute_loss",
        "(ipo_delta - 1 / (2 * self.beta)) ** 2",
        "(ipo_delta - 1 / self.beta) ** 2",
        {"ipo"},
    ),
    "KTO without a reference point": (
        "trl.KTOTrainer._compute_loss",
        "self.accelerator.gather_for_metrics(kl).mean().clamp(min=0)",
        "self.accelerator.gather_for_metrics(kl).mean().clamp(min=0) * 0",
        {"kto"},
    ),
    "KTO's reference point not clamped": (
        "trl.KTOTrainer._compute_loss",
        ".mean().clamp(min=0)",
        ".mean()",
        {"kto"},
    ),
}


def clean_rows():
    """One row per algorithm whose sides are equal, stock TRL on the right."""
    rows = {}
    for row in ROWS:
        if row.right.label.startswith("TRL") and row.algorithm != "kl":
            rows.setdefault(row.algorithm, row)
    pick = {"grpo": "", "cispo_window": "no lower bound", "rloo": "beta 0", "ipo": "on averages"}
    pick["opd"] = "whole vocabulary"
    for row in ROWS:
        stock = row.right.label.startswith("TRL") and row.left.label != "code"
        if stock and pick.get(row.algorithm) == row.variant:
            rows[row.algorithm] = row
    never = ("orpo", "sft", "cispo", "dapo_per_prompt")
    return [row for row in rows.values() if row.algorithm not in never]


WINDOWS = [BATCH["clipped"], BATCH["accumulation"]]


@pytest.fixture(scope="module")
def clean():
    """All clean rows, measured before anything is changed."""
    matrix = Matrix()
    matrix.run(clean_rows(), WINDOWS)
    return matrix


def broken(matrix, rows):
    found = set()
    for result in matrix.run(rows, WINDOWS):
        usual = ["differs"] if result.row.algorithm == "rloo" else ["equal", "both zero"]
        if result.verdict not in usual or not result.explained:
            found.add(result.row.algorithm)
    return found


def test_nothing_is_found_where_nothing_was_changed(clean):
    assert broken(clean, clean_rows()) == set()


@pytest.mark.parametrize("case", TAMPERINGS)
def test_tampering_flips_those_verdicts_and_no_others(case, clean, monkeypatch):
    import trl

    place, old, new, concerned = TAMPERINGS[case]
    _, owner, name = place.split(".")
    edited(monkeypatch, getattr(trl, owner), name, old, new)
    # the rows of that trainer, and one of another as the control
    own = [row for row in clean_rows() if row.right.trainer == owner]
    control = next(row for row in clean_rows() if row.right.trainer != owner)
    matrix = Matrix()
    matrix._windows = clean._windows
    books = {repr(row.left) for row in own}
    matrix._measured = {key: side for key, side in clean._measured.items() if key[0] in books}
    assert broken(matrix, [*own, control]) == concerned


COLLATORS = {
    "chosen and rejected": ("dpo", "dpo_trainer", "DataCollatorForPreference", "chosen_ids"),
    "margins": ("reward", "reward_trainer", "DataCollatorForPreference", "margin"),
    "labels": ("kto", "kto_trainer", "DataCollatorForUnpairedPreference", "label"),
}


@pytest.mark.parametrize("what", COLLATORS)
def test_a_collator_that_changes_the_data_is_found_out(what, monkeypatch):
    from importlib import import_module

    algorithm, module, name, column = COLLATORS[what]
    collator = getattr(import_module(f"trl.trainer.{module}"), name)
    collate = collator.torch_call

    def changed(self, examples):
        examples = [dict(each) for each in examples]
        for each in examples:
            if column == "chosen_ids":
                each["chosen_ids"], each["rejected_ids"] = each["rejected_ids"], each["chosen_ids"]
            elif column in each:
                each[column] = not each[column] if column == "label" else -each[column]
        return collate(self, examples)

    monkeypatch.setattr(collator, "torch_call", changed)
    rows = [row for row in ROWS if row.algorithm == algorithm]
    rows = [row for row in rows if what != "margins" or row.variant == "margin"]
    with pytest.raises(InputError, match=f"does not collate the fixed data as it is: {what}"):
        Matrix().run(rows, [BATCH["ragged"]])


def spoiled(method, change):
    """Return a method whose result, or what it is given first, is changed."""

    def changed(self, *args, **kwargs):
        return change(method, self, *args, **kwargs)

    return changed


# our trainers: algorithm, class, method, and what is done in its place
FAULTS = {
    "the values at generation are forgotten": (
        *("ppo", "ppo.BookPPOTrainer", "_rollout_values"),
        lambda old, self, output: 0 * old(self, output),
    ),
    "the teacher reads no demonstration": (
        *("sdpo", "distillation.BookDistillationTrainer", "_hinted"),
        lambda old, self, prompt, hint: prompt,
    ),
    "the teacher is surer": (
        *("opd", "distillation.BookDistillationTrainer", "_taught"),
        lambda old, self, model, inputs: [1.5 * each for each in old(self, model, inputs)],
    ),
    "a list is ranked the other way": (
        *("kwise", "reward_models.BookRewardTrainer", "_ranking_loss"),
        lambda old, self, model, inputs: turned(old(self, model, inputs)),
    ),
    "a right completion is a wrong one": (
        *("orm", "reward_models.BookTokenRewardTrainer", "labeled"),
        lambda old, self, tokenizer, row: old(self, tokenizer, row | {"label": not row["label"]}),
    ),
    "a step ends one token early": (
        *("prm", "reward_models.BookTokenRewardTrainer", "labeled"),
        lambda old, self, tokenizer, row: earlier(*old(self, tokenizer, row)),
    ),
    "SFT averages over each micro-batch": (
        *("sft", "sft.BookSFTTrainer", "compute_loss"),
        lambda old, self, model, inputs, **_: old(self, model, inputs) / 2,
    ),
}


def turned(found):
    loss, *rest = found
    return -loss, *rest


def earlier(text, labels):
    return replace(text, places=[place - 1 for place in text.places]), labels


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_our_trainers_is_found(fault, monkeypatch):
    from importlib import import_module

    algorithm, place, name, change = FAULTS[fault]
    module, owner = place.split(".")
    cls = getattr(import_module(f"rlhf_trl.trainers.{module}"), owner)
    rows = [row for row in ROWS if row.algorithm == algorithm and row.right.label == owner][:1]
    batch = BATCH["extreme" if algorithm == "ppo" else "accumulation"]
    wrong = "differs" if algorithm != "sft" else "equal"
    if algorithm != "sft":
        assert Matrix().run(rows, [batch])[0].verdict == "equal"
    monkeypatch.setattr(cls, name, spoiled(getattr(cls, name), change))
    try:
        found = Matrix().run(rows, [batch])[0]
    except InputError as error:  # other labels than those made by hand
        assert "changed the token ids" in str(error)
    else:
        assert found.verdict == wrong, found


CUTS = {  # who cuts over-long examples, what is done instead, whose row, what is said
    "the end is kept": (
        "trl.trainer.dpo_trainer.DataCollatorForPreference.torch_call",
        *("slice(None, self.max_length)", "slice(-self.max_length, None)"),
        *("dpo", "TRL sigmoid", "token ids that are in no text"),
    ),
    "mismatched pairs stay whole": (
        "trl.trainer.kto_trainer.DataCollatorForUnpairedPreference.torch_call",
        *("if self.max_length is not None:", "if self.max_length and not prefix:"),
        *("kto", "TRL kto", "the mismatched pairs of the KL"),
    ),
    "over-long pairs stay": (
        "trl.trainer.reward_trainer.RewardTrainer._prepare_dataset",
        *("if args.max_length is not None:", "if False:"),
        *("reward", "TRL RewardTrainer", "token ids that are in no text"),
    ),
    "our prompts lose their end": (
        "rlhf_trl.trainers.direct_alignment.BookDPOTrainer._prepare_dataset",
        *("args.overlong", "'cut_completion'"),
        *("dpo", "BookDPOTrainer", "token ids that are in no text"),
    ),
}


@pytest.mark.parametrize("what", CUTS)
def test_over_long_examples_that_are_cut_otherwise_are_found_out(what, monkeypatch):
    from importlib import import_module

    place, old, new, algorithm, right, says = CUTS[what]
    module, owner, name = place.rsplit(".", 2)
    rows = [r for r in ROWS if r.algorithm == algorithm and r.right.label == right]
    rows = [r for r in rows if "over_long" in r.batches]
    assert len(rows) == 1
    edited(monkeypatch, getattr(import_module(module), owner), name, old, new)
    with pytest.raises(InputError, match=f"does not collate the fixed data as it is: {says}"):
        Matrix().run(rows, [BATCH["over_long"]])


def test_a_shuffle_that_tears_rows_apart_is_found_out(monkeypatch):
    from trl.trainer import grpo_trainer

    from rlhf_trl.compare.windows.order import _check_shuffle

    _check_shuffle.cache_clear()
    monkeypatch.setattr(
        grpo_trainer,
        "shuffle_sequence_dict",
        lambda batch: {name: t[torch.randperm(len(t))] for name, t in batch.items()},
    )
    with pytest.raises(InputError, match="tears the rows of a batch apart"):
        Matrix().run([row for row in ROWS if row.algorithm == "grpo"], [BATCH["mild"]])
    _check_shuffle.cache_clear()


PLANTED = {change.what: change for change in tampering.CHANGES}
FOUND = {
    what: (one, other)
    for line in (Path(__file__).parents[1] / "rlhf_trl/compare/tampering.md").open(encoding="utf-8")
    if line.count(" | ") == 4
    for what, _, _, one, other in [line.strip("| \n").split(" | ")]
    if what in PLANTED
}


def test_the_table_has_every_planted_fault_and_compare_or_drift_finds_it():
    assert FOUND.keys() == PLANTED.keys() and len(FOUND) == len(tampering.CHANGES) >= 100
    assert [what for what, found in FOUND.items() if set(found) == {"not found"}] == []
    known = [what for what, change in PLANTED.items() if change.known]
    assert len(known) >= 20


QUICK = [
    "tokens of tools count",
    "the sampler's ratio is dropped",
    "dapo's mean is per prompt",
    "KTO loses the last of an odd class",
    "ORPO sums log-probabilities",
]


@pytest.mark.parametrize(
    "what",
    [*QUICK, *(pytest.param(w, marks=pytest.mark.promise) for w in PLANTED if w not in QUICK)],
)
def test_a_planted_fault_is_found_where_the_table_says(what, untouched):
    change, (one, other) = PLANTED[what], FOUND[what]
    with quick_and_quiet():
        assert (tampering.by_compare(change, untouched) or "not found") == one
        assert (tampering.by_drift(change, untouched) or "not found") == other


@pytest.fixture(scope="module")
def untouched():
    """Windows and functions of the book that no change has touched."""
    return Matrix()
