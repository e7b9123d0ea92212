"""Reward-model trainers against the public function, against stock TRL, and by hand."""

import math

import pytest
import torch
from datasets import Dataset
from direct_alignment_cases import message
from policy_gradient_cases import checkpoint
from reward_model_cases import (
    DATA,
    INVARIANT,
    ROWS,
    Reference,
    build,
    flipped,
    margins,
    measured,
    move,
    settings,
)
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)
from trl import RewardConfig, RewardTrainer

from rlhf_trl.compare.measure import accumulate, batches
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers.reward_models import TokenCollator

TOLERANCE = 1e-5
WEIGHTS = [2.0, 0.5, 1.0]
TOKENS = [case for case in ROWS if case[0] in ("orm", "prm")]


def agrees(found, tolerance=TOLERANCE):
    assert found.relative_error <= tolerance
    assert math.isclose(found.trainer.loss, found.reference.loss, rel_tol=tolerance)
    assert found.reference.gradient.norm() > 1e-2


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("name", "which"), ROWS)
def test_gradient_is_that_of_the_public_function(name, which, side, accumulation):
    trainer = build(name, which, gradient_accumulation_steps=accumulation)
    if side == "left":
        tokens = (name, which) in TOKENS
        collate = trainer.data_collator
        trainer.data_collator = TokenCollator(0, "left") if tokens else flipped(collate)
    batch = next(batches(trainer))
    first = batch["attention_mask"][:, 0]
    assert bool(first.all()) == (side == "right") and not batch["attention_mask"].all()
    agrees(measured(trainer, Reference(name, which), DATA[name](16)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_margin_and_centring(accumulation):
    rows = margins(16)
    config = {"center_rewards_coefficient": 0.3, "gradient_accumulation_steps": accumulation}
    trainer = build("reward", rows=rows, **config)
    agrees(measured(trainer, Reference("reward", "chapter", center_rewards_coefficient=0.3), rows))


def test_class_weights():
    rows = DATA["prm"](16)
    trainer = build("prm", "code", class_weights=WEIGHTS)
    agrees(measured(trainer, Reference("prm", "code", class_weights=torch.tensor(WEIGHTS)), rows))
    plain = measured(build("prm", "code"), Reference("prm", "code"), rows)
    weighted = measured(trainer, Reference("prm", "code"), rows)
    assert plain.relative_error < TOLERANCE < 0.1 < weighted.relative_error


@pytest.mark.parametrize("how", ["tokenizer", "config"])
@pytest.mark.parametrize(("name", "which"), ROWS)
def test_padding_with_the_end_of_sequence_token(name, which, how):
    tokenizer, config = build_tokenizer(), {}
    if how == "tokenizer":
        tokenizer.pad_token = tokenizer.eos_token
    else:
        config = {"pad_token": tokenizer.eos_token}
    trainer = build(name, which, tokenizer=tokenizer, **config)
    # a comparison model then reads the score one token early, before the end of the text
    reference = Reference(name, which, before_end=True)
    agrees(measured(trainer, reference, DATA[name](16)))


@pytest.mark.parametrize("with_margin", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bradley_terry_is_that_of_the_stock_trainer(with_margin, accumulation):
    rows = margins(16) if with_margin else DATA["reward"](16)
    more = {"gradient_accumulation_steps": accumulation, "center_rewards_coefficient": 0.2}
    config = RewardConfig(**settings(**more))
    stock = RewardTrainer(
        checkpoint(),
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=build_tokenizer(),
    )
    move(stock.model)
    theirs, _ = accumulate(stock, batches(stock))
    trainer = build("reward", rows=rows, **more)
    ours, _ = accumulate(trainer, batches(trainer))
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    difference = (ours.gradient - theirs.gradient).norm()
    assert difference <= 1e-6 * theirs.gradient.norm() and theirs.gradient.norm() > 1e-2


@pytest.mark.parametrize(("name", "which"), ROWS)
def test_which_forms_depend_on_how_rows_are_divided(name, which):
    once = build(name, which, per_device_train_batch_size=8)
    twice = build(name, which, gradient_accumulation_steps=2)
    one, two = (accumulate(each, batches(each))[0] for each in (once, twice))
    apart = float((one.gradient - two.gradient).norm() / one.gradient.norm())
    print(f"{name} {which}: {apart:.1e}")
    if (name, which) in INVARIANT:
        assert apart <= TOLERANCE
    else:
        assert 0.02 < apart < 0.5


def test_the_code_takes_no_margin():
    trainer = build("reward", "code", rows=margins(16))
    agrees(measured(trainer, Reference("reward", "code"), DATA["reward"](16)))


# --- by hand: <|bos|> 1, <|user|> 2, <|assistant|> 3, <|end|> 5, newline 7, a 73, b 74, c 75, d 76


ASKED = [1, 2, 73, 74, 5, 3]  # the prompt "ab"
NO = -100


def told(words):
    return message("assistant", words)


@pytest.mark.parametrize(
    ("finished", "label", "ids", "labels"),
    [
        (True, True, [75, 76, 5], [1, 1, 1]),
        (True, False, [75, 76, 5], [0, 0, 0]),
        (False, False, [75, 76], [0, 0]),
    ],
)
@pytest.mark.parametrize("conversational", [True, False])
def test_an_outcome_row_by_hand(finished, label, ids, labels, conversational):
    row = {"prompt": "ab", "completion": "cd", "label": label, "finished": finished}
    if conversational:
        row |= {"prompt": message("user", "ab"), "completion": told("cd")}
    start = ASKED if conversational else [73, 74]
    found = build("orm", rows=[row]).train_dataset[0]
    assert found == {"input_ids": start + ids, "labels": [NO] * len(start) + labels}


@pytest.mark.parametrize(
    ("which", "labels"), [("code", [2, NO, 1, NO, 0]), ("chapter", [1, NO, NO, NO, 0])]
)
@pytest.mark.parametrize("conversational", [True, False])
def test_a_process_row_by_hand(which, labels, conversational):
    row = {"prompt": "ab", "completions": ["", "c", "d"], "labels": [1, 0, -1]}
    if conversational:
        row["prompt"] = message("user", "ab")
    start = ASKED if conversational else [73, 74]
    found = build("prm", which, rows=[row]).train_dataset[0]
    assert found == {
        "input_ids": [*start, 7, 75, 7, 76, 7],  # an empty step, c, d, and a newline behind each
        "labels": [NO] * len(start) + labels,
    }


@pytest.mark.parametrize("conversational", [True, False])
def test_comparisons_by_hand(conversational):
    start = ASKED if conversational else [73, 74]
    say = told if conversational else str
    prompt = message("user", "ab") if conversational else "ab"
    row = {"prompt": prompt, "chosen": say("cd"), "rejected": say("d")}
    found = build("reward", rows=[row]).train_dataset[0]
    assert found["chosen_ids"] == [*start, 75, 76, 5] and found["rejected_ids"] == [*start, 76, 5]
    row = {"prompt": prompt, "ranked": [say("cd"), say("d"), say("")]}
    found = build("kwise", rows=[row]).train_dataset[0]
    assert found["ranked_ids"] == [[*start, 75, 76, 5], [*start, 76, 5], [*start, 5]]


# --- input that cannot work ----------------------------------------------------------------------


@pytest.mark.parametrize("name", DATA)
def test_rows_that_are_all_too_long(name):
    says = r"max_length: all 5 rows of the (train|eval) data set have more than 9 tokens, .*raise"
    rows = [row for row in DATA[name](40) if len(row["prompt"][0]["content"]) > 5]
    with pytest.raises(InputError, match=says):
        build(name, rows=rows[:5], max_length=9)


def test_rows_that_are_too_long_are_counted():
    rows = DATA["orm"](16)
    longest = max(len(r["prompt"][0]["content"] + r["completion"][0]["content"]) for r in rows)
    trainer = build("orm", rows=rows, held_out=rows[:4], max_length=3 + longest)
    assert 0 < trainer.left_out["train"] < 16 and trainer.left_out["eval"] <= 4
    assert len(trainer.train_dataset) == 16 - trainer.left_out["train"]


def tokenizer_of_pieces(merged, dropped):
    """A tokenizer of single characters that may merge a full stop with a newline, or drop it."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    letters = [*"<|>_abcdefghijklmnopqrstuvwxyz.\n", ".\n"]
    merges = [(".", "\n")] if merged else []
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(letters)}, merges))
    backend.decoder = decoders.Fuse()
    if dropped:
        backend.normalizer = normalizers.Replace("\n", "")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="|", pad_token="_")


def steps(tokenizer, *words):
    row = {"prompt": "ab", "completions": list(words), "labels": [1] * len(words)}
    return build("prm", rows=[row], tokenizer=tokenizer)


def test_a_separator_that_the_tokenizer_merges_with_a_step():
    tokenizer = tokenizer_of_pieces(merged=True, dropped=False)
    assert steps(tokenizer, "ab", "c").train_dataset[0]["labels"].count(1) == 2
    says = r"step_separator: the tokenizer merges '\\n' with the end of the step 'ab\.' into"
    with pytest.raises(InputError, match=says):
        steps(tokenizer, "ab.", "c")


def test_a_separator_that_the_tokenizer_drops():
    tokenizer = tokenizer_of_pieces(merged=False, dropped=True)
    with pytest.raises(InputError, match=r"step_separator: '\\n' is no token of this tokenizer"):
        steps(tokenizer, "ab", "c")


def head(folder, auto, labels, bias=True):
    """A folder with a model that has a head of so many labels."""
    config = AutoConfig.from_pretrained(checkpoint(), num_labels=labels)
    config.token_classification_bias = bias
    model = auto.from_pretrained(checkpoint(), config=config)
    model.save_pretrained(folder)
    return str(folder)


TOKEN, SEQUENCE = AutoModelForTokenClassification, AutoModelForSequenceClassification


@pytest.mark.parametrize(
    ("name", "auto", "labels"),
    [("orm", TOKEN, 3), ("prm", TOKEN, 2), ("reward", SEQUENCE, 2), ("kwise", SEQUENCE, 2)],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_a_head_that_does_not_fit(tmp_path, name, auto, labels, loaded):
    model = head(tmp_path, auto, labels)
    if loaded:
        model = auto.from_pretrained(model)
    with pytest.raises(InputError, match=r"num_labels.*(choose|name) another|name a") as stop:
        build(name, "chapter", model=model)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize(
    ("name", "which", "given"),
    [
        ("reward", "cahpter", {}),
        ("kwise", "trl", {}),
        ("orm", "trl", {}),
        ("kwise", "chapter", {"algorithm": "kwice"}),
        ("kwise", "chapter", {"algorithm": "orm"}),
        ("orm", "chapter", {"algorithm": "reward"}),
        ("prm", "chapter", {"step_separator": None}),
        ("prm", "chapter", {"step_separator": ""}),
        ("prm", "chapter", {"step_split": "(a"}),
        ("prm", "chapter", {"step_split": "(a)|b"}),
    ],
)
def test_a_choice_that_does_not_exist(name, which, given):
    with pytest.raises(InputError) as stop:
        build(name, which, given=given)
    sentence = str(stop.value)
    assert "\n" not in sentence and (not given or str(*given.values()) in sentence)


@pytest.mark.parametrize("had", [True, False])
def test_a_head_whose_bias_would_be_lost_or_new(tmp_path, had):
    folder = head(tmp_path, TOKEN, 3, bias=had)
    with pytest.raises(InputError, match="head_bias"):
        build("prm", "code", model=folder, head_bias=not had)
    assert (build("prm", "code", model=folder, head_bias=had).model.score.bias is not None) == had
