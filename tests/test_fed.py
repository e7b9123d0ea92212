"""The marks of `preview` against the labels of stock TRL's trainers, token by token."""

import pytest
from conftest import ROOT
from datasets import Dataset
from own_model import conversations, judged, preferences, prompts, write_lines
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from rlhf_trl.run.preview_report import report

COUNT = 8  # rows


def shown(monkeypatch, own_model, tmp_path, stage, rows, *words):
    """Return what `preview` shows of rows for a recipe: (tokens, whether each is trained)."""
    monkeypatch.setattr("rlhf_trl.run.preview_report.SHOWN", COUNT)
    path = write_lines(tmp_path / "rows.jsonl", rows)
    config = str(ROOT / "configs" / "own" / f"{stage}.yaml")
    options = ["--model_name_or_path", str(own_model), "--use_cpu", "--eval_strategy", "no"]
    options += ["--dataset.path", str(path), "--dataset.eval_size", "null", *words]
    found = report(config, options)
    return [[(text.ids, text.trained) for text in example] for example in found.examples]


def stock(trainer_class, config_class, own_model, tmp_path, rows, **settings):
    """Return one of TRL's trainers on rows."""
    extra = {"reward_funcs": settings.pop("rewards")} if "rewards" in settings else {}
    model = str(own_model)
    if trainer_class is RewardTrainer:
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    args = config_class(str(tmp_path / "stock"), use_cpu=True, report_to=[], **settings)
    return trainer_class(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(own_model),
        **extra,
    )


def collated(trainer):
    """Return the batch that a trainer's collator makes of each of its examples."""
    columns = trainer.train_dataset.column_names
    rows = [{name: row[name] for name in columns} for row in trainer.train_dataset]
    return [trainer.data_collator([row]) for row in rows]


def by_hand(batch, mask):
    """Return (tokens, trained) of the texts in a batch."""
    return [
        (ids.tolist(), trained.bool().tolist())
        for ids, trained in zip(batch["input_ids"], mask, strict=True)
    ]


def split(row):
    """Return a conversation as a prompt and its last answer."""
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


SFT = {
    "last": ([], {"completion_only_loss": True}, split),
    "cut": (["--max_length", "60"], {"completion_only_loss": True, "max_length": 60}, split),
    "all": (
        ["--dataset.turns", "all"],
        {"assistant_only_loss": True, "completion_only_loss": False},
        lambda row: {"messages": row["messages"]},
    ),
    "packed": (
        ["--packing", "true", "--max_length", "150"],
        {"completion_only_loss": True, "packing": True, "max_length": 150},
        split,
    ),
}


@pytest.mark.parametrize("name", SFT)
def test_marks_of_supervised_fine_tuning(name, monkeypatch, own_model, tmp_path):
    words, settings, stock_row = SFT[name]
    rows = conversations()[:COUNT]
    rows[1]["messages"] = rows[1]["messages"][:2]  # of another length
    found = shown(monkeypatch, own_model, tmp_path, "sft", rows, *words)
    stock_rows = [stock_row(row) for row in rows]
    trainer = stock(SFTTrainer, SFTConfig, own_model, tmp_path, stock_rows, **settings)
    expected = [by_hand(batch, batch["labels"] != -100) for batch in collated(trainer)]
    assert sorted(found) == sorted(expected)  # what is cut comes first in the preview
    trained = [sum(marks) for example in expected for _, marks in example]
    assert any(trained) and not any(all(marks) for example in found for _, marks in example)
    if name == "packed":
        assert len(found) < COUNT


def test_marks_of_pairs(monkeypatch, own_model, tmp_path):
    rows = preferences()[:COUNT]
    found = shown(monkeypatch, own_model, tmp_path, "dpo", rows)
    trainer = stock(DPOTrainer, DPOConfig, own_model, tmp_path, rows)
    expected = []
    for batch in collated(trainer):
        lengths = batch["attention_mask"].sum(1).tolist()
        texts = by_hand(batch, batch["completion_mask"])
        expected.append(
            [(ids[:n], marks[:n]) for (ids, marks), n in zip(texts, lengths, strict=True)]
        )
    assert found == expected
    assert {len(example) for example in found} == {2}


def test_marks_of_pairs_of_which_the_sides_are_kept_apart(monkeypatch, own_model, tmp_path):
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = preferences()[:COUNT]
    found = shown(monkeypatch, own_model, tmp_path, "orpo", rows)
    trainer = stock(ORPOTrainer, ORPOConfig, own_model, tmp_path, rows, max_length=1024)
    expected = [
        [
            (row[f"{side}_input_ids"], [label != -100 for label in row[f"{side}_labels"]])
            for side in ("chosen", "rejected")
        ]
        for row in trainer.train_dataset
    ]
    assert found == expected


def test_marks_of_labeled_answers(monkeypatch, own_model, tmp_path):
    rows = judged()[:COUNT]
    found = shown(monkeypatch, own_model, tmp_path, "kto", rows)
    trainer = stock(KTOTrainer, KTOConfig, own_model, tmp_path, rows)
    expected = [by_hand(batch, batch["completion_mask"]) for batch in collated(trainer)]
    assert sorted(found) == sorted(expected)  # in another order: labels are interleaved


def test_the_last_token_of_a_judged_text_is_marked(monkeypatch, own_model, tmp_path):
    rows = preferences()[:COUNT]
    found = shown(monkeypatch, own_model, tmp_path, "reward", rows)
    trainer = stock(RewardTrainer, RewardConfig, own_model, tmp_path, rows)
    expected = []
    for batch in collated(trainer):
        lengths = batch["attention_mask"].sum(1).tolist()
        expected.append(
            [
                (ids[:n].tolist(), [False] * (n - 1) + [True])
                for ids, n in zip(batch["input_ids"], lengths, strict=True)
            ]
        )
    assert found == expected


def test_prompts_are_those_that_the_stock_trainer_answers(monkeypatch, own_model, tmp_path):
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in prompts()[:COUNT]]
    reward = ["--reward_funcs", "contains", "--max_completion_length", "8"]
    found = shown(monkeypatch, own_model, tmp_path, "grpo", rows, *reward)
    settings = {"num_generations": 2, "per_device_train_batch_size": 2 * COUNT}
    settings |= {"max_completion_length": 8, "shuffle_dataset": False, "bf16": False}
    trainer = stock(
        *(GRPOTrainer, GRPOConfig, own_model, tmp_path, rows),
        rewards=lambda completions, **_: [0.0] * len(completions),
        **settings,
    )
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    texts = zip(batch["prompt_ids"], batch["prompt_mask"].bool(), strict=True)
    expected = {tuple(ids[mask].tolist()) for ids, mask in texts}
    assert {tuple(ids) for ((ids, _),) in found} == expected
    # the loss is over sampled tokens alone
    assert not any(any(marks) for ((_, marks),) in found)
    assert batch["completion_mask"].shape == batch["completion_ids"].shape
