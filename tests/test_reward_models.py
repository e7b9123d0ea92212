"""Reward-model trainers against the public function, against stock TRL, and by hand."""

import math
from functools import partial

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
    outputs,
    settings,
    texts,
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
from rlhf_trl.reward_models.reader import pad_texts
from rlhf_trl.tiny.tokenizer import build_tokenizer

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
        trainer.data_collator = (
            partial(pad_texts, pad_token_id=0, side="left") if tokens else flipped(collate)
        )
    batch = next(batches(trainer))
    first = batch["attention_mask"][:, 0]
    assert bool(first.all()) == (side == "right") and not batch["attention_mask"].all()
    agrees(measured(trainer, Reference(name, which), DATA[name](16)))


@pytest.mark.parametrize("name", ["reward", "kwise", "orm", "prm"])
def test_batches_as_long_as_a_multiple(name):
    trainer = build(name, pad_to_multiple_of=64)
    batch = next(batches(trainer))
    assert {v.shape[1] for v in batch.values() if hasattr(v, "shape")} == {64}
    assert not batch["attention_mask"][:, -1].any()
    agrees(measured(trainer, Reference(name, "chapter"), DATA[name](16)))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_margin_and_centering(accumulation):
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
    # TRL's comparison model then reads the score one token early, before the end of the text
    reference = Reference(name, which, before_end=which == "trl")
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


def test_ranked_lists_of_unequal_length_are_refused_by_the_trainer():
    rows = DATA["kwise"](8)
    length = len(rows[0]["ranked"])
    shorter = [*rows[:5], {**rows[5], "ranked": rows[5]["ranked"][:2]}, *rows[6:]]
    part = f"row 6 of the {{}} data set ranks 2 completions and row 1 {length}; make all lists"
    with pytest.raises(InputError, match=part.format("train")):
        build("kwise", rows=shorter)
    with pytest.raises(InputError, match=part.format("eval")):
        build("kwise", rows=rows, held_out=shorter)
    read = [{"ranked_ids": [[7, 8]] * len(row["ranked"])} for row in shorter]
    with pytest.raises(InputError, match=part.format("train")):
        build("kwise", rows=read)


# --- evaluation ----------------------------------------------------------------------------------


def alone(trainer, name, rows):
    """Return the outputs on each text of each row, without padding."""
    with torch.no_grad():
        return [
            [outputs(trainer.model, found, places) for found, places, _ in texts(name, row)]
            for row in rows
        ]


def evaluated(name, which, rows, **config):
    trainer = build(name, which, held_out=rows, per_device_eval_batch_size=4, **config)
    expected = alone(trainer, name, rows)
    metrics = trainer.evaluate()
    with torch.no_grad():
        loss = Reference(name, which).call(trainer.model, rows)
    return trainer, expected, metrics, float(loss)


@pytest.mark.parametrize("name", ["reward", "kwise"])
def test_evaluation_of_comparisons(name):
    rows = [{**row, "kind": "ab"[n % 3 == 0]} for n, row in enumerate(DATA[name](13))]
    trainer, expected, metrics, loss = evaluated(name, "chapter", rows)
    expected = [[float(score) for score in row] for row in expected]
    for row, scores in zip(trainer.judged["rows"], expected, strict=True):
        assert row == pytest.approx(scores, abs=1e-5)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    for end, wanted in (("", "ab"), ("_a", "a"), ("_b", "b")):
        mine = [s for s, row in zip(expected, rows, strict=True) if row["kind"] in wanted]
        apart = [s[k] - s[k + 1] for s in mine for k in range(len(s) - 1)]
        right = sum(x > 0 for x in apart) / len(apart)
        assert metrics[f"eval_pair_accuracy{end}"] == pytest.approx(right)
        assert 0 < right < 1
        if not end:
            assert metrics["eval_margin"] == pytest.approx(sum(apart) / len(apart), abs=1e-5)


@pytest.mark.parametrize("which", ["chapter", "code"])
def test_evaluation_of_steps(which):
    rows = DATA["prm"](12)
    _, expected, metrics, loss = evaluated("prm", which, rows)
    right, count, first = 0, 0, 0
    for row, [logits] in zip(rows, expected, strict=True):
        told = [x.argmax().item() - 1 if len(x) == 3 else 1 if x > 0 else -1 for x in logits]
        labels = [y for y in row["labels"] if y or which == "code"]
        told = [t for t, y in zip(told, row["labels"], strict=True) if y or which == "code"]
        right += sum(t == y for t, y in zip(told, labels, strict=True))
        count += len(labels)
        if labels:
            first += [*told, -1].index(-1) == [*labels, -1].index(-1)
    assert metrics["eval_step_accuracy"] == pytest.approx(right / count)
    assert metrics["eval_first_error"] == pytest.approx(first / (12 if which == "code" else 11))
    assert 0 < right < count and first > 0
    if which == "chapter":  # of which the mean over batches is the mean over rows
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_evaluation_of_candidates():
    rows = DATA["orm"](12)
    candidates = [{**row, "prompt": rows[n // 4]["prompt"]} for n, row in enumerate(rows)]
    trainer, _, metrics, loss = evaluated("orm", "chapter", rows, candidates=candidates)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    logits = [each for [each] in alone(trainer, "orm", candidates)]
    scores = [float(x.sigmoid().mean()) for x in logits]
    for found, score, x in zip(trainer.judged["scores"], scores, logits, strict=True):
        last = float(x[-1].sigmoid())
        assert found == pytest.approx({"mean": score, "last": last}, abs=1e-5)
    labels = [row["label"] for row in candidates]
    sides = [[s for s, y in zip(scores, labels, strict=True) if y == which] for which in (1, 0)]
    pairs = [good > bad for good in sides[0] for bad in sides[1]]
    assert metrics["eval_auc"] == pytest.approx(sum(pairs) / len(pairs)) and sum(pairs) > 0
    best = [max(range(4 * g, 4 * g + 4), key=lambda n: scores[n]) for g in range(3)]
    assert metrics["eval_best_of_n"] == pytest.approx(sum(labels[n] for n in best) / 3)


def test_a_last_batch_that_is_dropped_is_not_judged():
    rows = [{**row, "kind": "ab"[n == 4]} for n, row in enumerate(DATA["reward"](5))]
    given = {"per_device_eval_batch_size": 2, "dataloader_drop_last": True}
    trainer = build("reward", held_out=rows, **given)
    metrics = trainer.evaluate()
    assert len(trainer.judged["rows"]) == 4
    assert metrics["eval_pair_accuracy_a"] == metrics["eval_pair_accuracy"]
    assert "eval_pair_accuracy_b" not in metrics


def test_rows_that_were_not_announced_can_be_evaluated():
    metrics = build("reward").evaluate(Dataset.from_list(DATA["reward"](5)))
    assert 0 <= metrics["eval_pair_accuracy"] <= 1


@pytest.mark.parametrize("disable_dropout", [True, False])
def test_the_head_has_no_dropout(disable_dropout):
    trainer = build("prm", "code", disable_dropout=disable_dropout)
    assert not any(m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))
    batch = {k: v for k, v in next(batches(trainer)).items() if k != "labels"}
    first, second = (trainer.model.train()(**batch).logits for _ in range(2))
    assert torch.equal(first, second)


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
    says = r"step_separator: the tokenizer merges '\\n' with the end of 'ab\.' into"
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
        build(name, which, **given)
    sentence = str(stop.value)
    assert "\n" not in sentence and (not given or str(*given.values()) in sentence)


@pytest.mark.parametrize("had", [True, False])
def test_a_head_whose_bias_would_be_lost_or_new(tmp_path, had):
    folder = head(tmp_path, TOKEN, 3, bias=had)
    with pytest.raises(InputError, match="head_bias"):
        build("prm", "code", model=folder, head_bias=not had)
    assert (build("prm", "code", model=folder, head_bias=had).model.score.bias is not None) == had
