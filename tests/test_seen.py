"""What a run has learned from, against what its trainer is handed step by step."""

import direct_alignment_cases
import policy_gradient_cases
import pytest
from datasets import Dataset

from rlhf_trl.run.seen import examples_seen

PAIRS = Dataset.from_list(direct_alignment_cases.pairs(1))
PROMPTS = Dataset.from_list([{"prompt": "p", "chosen": "a column that a reward reads"}])


def pairs_handed(trainer, monkeypatch):
    """Train, and return the number of pairs in each micro-batch."""
    counts = []
    training_step = trainer.training_step

    def counting(model, inputs, *args, **kwargs):
        counts.append(len(inputs["input_ids"]) // 2)  # chosen and rejected, one below the other
        return training_step(model, inputs, *args, **kwargs)

    monkeypatch.setattr(trainer, "training_step", counting)
    trainer.train()
    return counts


def test_pairs_count_in_every_epoch_and_short_batches_by_their_length(monkeypatch):
    # ten pairs in micro-batches of 4, 4 and 2; two of them make a step, the third one by itself
    config = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5}
    trainer = direct_alignment_cases.build("ipo", count=10, **config)
    assert pairs_handed(trainer, monkeypatch) == [4, 4, 2, 4, 4, 2, 4, 4]
    seen = [examples_seen(trainer, PAIRS, step) for step in range(1, 6)]
    assert seen == [(8, "pairs"), (10, "pairs"), (18, "pairs"), (20, "pairs"), (28, "pairs")]


def test_pairs_that_fill_no_batch_are_not_seen_where_they_are_dropped(monkeypatch):
    config = {"per_device_train_batch_size": 4, "max_steps": 3, "dataloader_drop_last": True}
    trainer = direct_alignment_cases.build("ipo", count=10, **config)
    assert pairs_handed(trainer, monkeypatch) == [4, 4, 4]
    assert [examples_seen(trainer, PAIRS, step)[0] for step in (1, 2, 3)] == [4, 8, 12]


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        # a generation of 8 for one step
        ({}, [8, 16, 24, 32, 40, 48]),
        # one of 8, learned from twice
        ({"num_iterations": 2}, [8, 8, 16, 16, 24, 24]),
        # one of 16 in two batches, learned from twice
        ({"num_iterations": 2, "steps_per_generation": 2}, [8, 16, 16, 16, 24, 32]),
        # the same two batches make one step
        ({"gradient_accumulation_steps": 2}, [16, 32, 48, 64, 80, 96]),
    ],
)
def test_a_completion_counts_once_however_often_it_is_learned_from(config, seen, monkeypatch):
    generated = []

    def answer(prompt_ids, index, call):
        number = len(generated)
        generated.append([7 + number // 100, 7 + number % 100, policy_gradient_cases.END])
        return generated[-1]  # no two are the same

    trainer = policy_gradient_cases.build("grpo", answer=answer, max_steps=6, **config)
    completions = []
    compute_loss = trainer._compute_loss

    def recording(model, inputs):
        completions.append({tuple(ids) for ids in inputs["completion_ids"].tolist()})
        return compute_loss(model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", recording)
    trainer.train()
    batches = trainer.args.gradient_accumulation_steps
    so_far = [len(set().union(*completions[: step * batches])) for step in range(1, 7)]
    assert so_far == seen
    assert [examples_seen(trainer, PROMPTS, step) for step in range(1, 7)] == [
        (number, "completions") for number in seen
    ]
