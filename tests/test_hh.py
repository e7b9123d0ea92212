"""Pairs in the form of HH-RLHF, in every recipe that can learn from them."""

import json
from pathlib import Path

import pytest
from conftest import ROOT

from rlhf_trl.run.preview import preview

PAIRS = Path(__file__).parent / "fixtures" / "hh-pairs" / "ten.jsonl"
RECIPES = {  # what each trains on, beside the prompt
    "reward": {"chosen", "rejected"},
    "sft": {"completion"},
    "dpo": {"chosen", "rejected"},
    "orpo": {"chosen", "rejected"},
    "kto": {"completion"},
    "grpo": set(),
    "ppo": set(),
    "rejection_sampling": set(),
}


def words(own_model, **more):
    options = {"path": PAIRS, "reader": "hh", "eval_size": 2, **more}
    named = [word for key, value in options.items() for word in (f"--dataset.{key}", str(value))]
    return ["--model_name_or_path", str(own_model), "--use_cpu", *named]


def by_hand():
    """Return the last question of each pair, and its chosen answer, read without the package."""
    rows = []
    for line in PAIRS.read_text().splitlines():
        chosen = json.loads(line)["chosen"]
        question, _, answer = chosen.rpartition("\n\nAssistant: ")
        rows.append((question.rpartition("\n\nHuman: ")[2], answer))
    return rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_pairs_are_what_each_recipe_trains_on(recipe, own_model):
    config = str(ROOT / "configs" / "own" / f"{recipe}.yaml")
    numbers = preview(config, words(own_model))
    train, held_out = numbers["train"], numbers["held_out"]
    answers_to_a_prompt = 2 if recipe == "kto" else 1
    assert (train["prompts"], held_out["prompts"]) == (8, 2)
    assert (train["rows"], held_out["rows"]) == (8 * answers_to_a_prompt, 2 * answers_to_a_prompt)
    assert train["tokens"].keys() - {"prompt", "prompt and answer"} == RECIPES[recipe]
    assert numbers["overlap"] == 0 and numbers["left_out"] == {}
    halves = [preview(config, words(own_model, slice=part)) for part in (":50%", "50%:")]
    assert sum(half["train"]["prompts"] for half in halves) == 8
    assert all(half["held_out"] == held_out for half in halves)


def test_a_demonstration_is_the_chosen_answer():
    from rlhf_trl.data.blocks import AnswersToLearn
    from rlhf_trl.data.demonstrations import load_demonstrations

    data = load_demonstrations(AnswersToLearn(path=str(PAIRS), reader="hh"), "right")
    rows = [(row["prompt"][-1]["content"], row["completion"][0]["content"]) for row in data.train]
    assert rows == by_hand()
    assert [len(prompt) for prompt in data.train["prompt"]] == [1, 1, 3, 1, 1, 1, 3, 1, 1, 1]
    mapped = AnswersToLearn(path=str(PAIRS), reader="hh", columns={"completion": "rejected"})
    assert load_demonstrations(mapped, "right").train[4]["completion"][0]["content"] == "Banana."


@pytest.mark.promise
def test_ten_pairs_train_a_reward_model_and_the_policies_of_a_pipeline(own_model, run, tmp_path):
    judge = tmp_path / "reward"
    small = ("--bf16", "false", "--max_steps", 2, "--save_strategy", "no", "--logging_steps", 1)
    learned = {  # recipe, its further options
        "reward": (),
        "sft": (),
        "dpo": (),
        "ppo": ("--max_completion_length", 8),
        "grpo": ("--max_completion_length", 8),
        "rejection_sampling": ("--max_completion_length", 8, "--num_generations", 4),
    }
    for recipe, more in learned.items():
        part = ":50%" if recipe == "reward" else "50%:"
        if recipe in ("ppo", "grpo", "rejection_sampling"):
            more = (*more, "--reward_funcs", "[]", "--reward_model", str(judge))
        if recipe in ("ppo", "grpo"):
            more = (*more, "--num_generations", 2, "--per_device_train_batch_size", 2)
        options = (*words(own_model, slice=part), *small, *more)
        config = ROOT / "configs" / "own" / recipe
        folder, out = run(recipe, config, *options, folder=tmp_path / recipe)
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["steps"], summary["held_out"]) == (2, 2), out
