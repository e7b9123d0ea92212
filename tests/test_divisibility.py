"""Batches that do not come out even are refused as TRL refuses them, with values that do."""

import random
import re

import pytest
import trl
import yaml

from rlhf_trl.errors import InputError
from rlhf_trl.run.divisibility import check_packing, unfilled_step
from rlhf_trl.run.plan import launched_with
from rlhf_trl.run.stages import STAGES

BASE = {
    "algorithm": "grpo",
    "model_name_or_path": "tiny",
    "dataset": {"source": "reasoning_gym", "specs": [{"name": "spell_backward"}]},
    "reward_funcs": ["exact_match"],
}


def drawn(rng):
    """Return processes, and batch sizes of which about half go together."""
    values = {
        "per_device_train_batch_size": rng.randint(1, 8),
        "gradient_accumulation_steps": rng.randint(1, 6),
        "num_generations": rng.choice([2, 3, 4, 8]),
        "per_device_eval_batch_size": rng.randint(1, 12),
        "eval_strategy": rng.choice(["no", "no", "no", "steps"]),
    }
    if rng.random() < 0.4:
        values["steps_per_generation"] = rng.randint(1, 8)
    if rng.random() < 0.3:
        values["generation_batch_size"] = rng.choice([rng.randint(1, 64), 16, 48, 96])
    if rng.random() < 0.3:
        values["num_generations_eval"] = rng.randint(2, 8)
    return rng.choice([1, 1, 2, 3, 4, 8]), values


def is_taken_by_trl(processes, values):
    """Tell whether TRL's own config class takes these."""
    with launched_with(processes):
        try:
            trl.GRPOConfig(**values, eval_steps=1, use_cpu=True, report_to="none")
        except ValueError:
            return False
    return True


def refusal(processes, values, path):
    """Return why a run of so many processes is refused; "" where it is not."""
    path.write_text(yaml.safe_dump({**BASE, **values, "eval_steps": 1}))
    with launched_with(processes):
        try:
            STAGES["grpo"].load(["--config", str(path), "--use_cpu", "true"])
        except InputError as error:
            return str(error)
    return ""


def check(seed, folder):
    """Compare what is said of a drawn config with TRL, and take the advice until there is none."""
    rng = random.Random(seed)
    processes, values = drawn(rng)
    for _ in range(3):  # training's batch and evaluation's may both be at fault
        sentence = refusal(processes, values, folder / "drawn.yaml")
        assert is_taken_by_trl(processes, values) == (not sentence), (processes, values)
        if {"generation_batch_size", "steps_per_generation"} <= values.keys():
            assert "can not be both configured" in sentence
            return
        if not sentence:
            return
        if sentence.endswith("; raise the batch."):  # to more than one completion
            return
        advice = re.search(r": (\w+) is .*; write (?:one of )?([\d, ]*\d)", sentence)
        key = advice[1]
        advised = [{**values, key: int(number)} for number in advice[2].split(", ")]
        of_evaluation = key == "per_device_eval_batch_size"
        for other in advised:
            alone = other if of_evaluation else {**other, "eval_strategy": "no"}
            assert is_taken_by_trl(processes, alone), (processes, alone)
        values = rng.choice(advised)
    raise AssertionError(f"still refused: {sentence}")


def test_a_run_is_refused_where_trl_refuses_it(tmp_path):
    for seed in range(20):
        check(seed, tmp_path)


@pytest.mark.promise
def test_a_run_is_refused_where_trl_refuses_it_500_times(tmp_path):
    for seed in range(500):
        check(seed, tmp_path)


def test_num_generations_that_do_for_evaluation_are_advised_where_there_are_some(tmp_path):
    values = {"per_device_train_batch_size": 12, "num_generations": 5, "eval_strategy": "steps"}
    sentence = refusal(1, {**values, "per_device_eval_batch_size": 4}, tmp_path / "x.yaml")
    assert "write one of 2, 4, or change the batch." in sentence


def test_ppo_may_sample_one_answer_to_a_prompt_but_needs_two_at_once(tmp_path):
    path = tmp_path / "ppo.yaml"
    ppo = {**BASE, "algorithm": "ppo", "per_device_train_batch_size": 1}
    path.write_text(yaml.safe_dump({**ppo, "num_generations": 1}))
    with pytest.raises(InputError, match="generates a single completion but needs 2; raise per"):
        STAGES["ppo"].load(["--config", str(path), "--use_cpu", "true"])


def test_packed_rows_need_a_length():
    check_packing(trl.SFTConfig(packing=True, max_length=8, use_cpu=True, bf16=False))
    check_packing(trl.SFTConfig(packing=False, max_length=None, use_cpu=True, bf16=False))
    with pytest.raises(InputError, match="packing: true fills rows of max_length tokens"):
        check_packing(trl.SFTConfig(packing=True, max_length=None, use_cpu=True, bf16=False))


@pytest.mark.parametrize(
    ("examples", "sentences"),
    [
        (128, []),
        (100, ["an epoch's last step has 36 of 64 pairs; one of 64, 128 of them fill it"]),
        (10, ["an epoch's last step has 10 of 64 pairs; 64 of them fill it"]),
    ],
)
def test_an_epoch_whose_last_step_is_smaller_is_named(examples, sentences):
    assert list(unfilled_step(examples, 64, "pairs")) == sentences
