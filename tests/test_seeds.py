"""Every seed of the project: its value arrives, and another one gives something else."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import direct_alignment_cases
import policy_gradient_cases
import pytest
import reward_model_cases
import torch
from trl import DPOConfig, ModelConfig

from rlhf_trl import random_k_overall, random_per_prompt, top_k_overall, top_per_prompt
from rlhf_trl.data import judgments as reward_tasks
from rlhf_trl.data import made
from rlhf_trl.data import pairs as preference_tasks
from rlhf_trl.data.blocks import GymData, OfflinePairs, SampledPairs, Spec
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.data.judgment_blocks import (
    RankedLists,
    SampledAnswers,
    SampledRewardPairs,
    SyntheticTraces,
)
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.steps import LETTERS
from rlhf_trl.models import prepare_model
from rlhf_trl.rollouts import sampling
from rlhf_trl.rollouts.generate import SAMPLED
from rlhf_trl.rollouts.sampling import Completion
from rlhf_trl.run import preferences, race, reward_models
from rlhf_trl.tiny import checkpoint_path

ROOT = Path(__file__).parent.parent
SPELL = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
GYM = {"specs": [SPELL], "size": 30, "eval_size": 30}
ROWS = GymTasks(GymData(**GYM)).train


@pytest.fixture
def same_questions(monkeypatch):
    """Let seeds choose no questions, so that what is made of them shows its own seed."""

    def tasks(config):
        return GymTasks(replace(config, seed=0, eval_seed=1000))

    for module in (preference_tasks, reward_tasks):
        monkeypatch.setattr(module, "GymTasks", tasks)


# --- seed and eval_seed of a data set: one side each ---------------------------------------------


def outcomes(rows, count, side, kinds=99):
    """Stand in for sampling: right and wrong answers of so many kinds."""
    found = []
    for row in rows:
        for n in range(count):
            kind = n % kinds
            text = f"<answer>{row['answer'] if n % 2 else 'no' * kind}</answer>" + " " * kind
            completion = [{"role": "assistant", "content": text}]
            found.append({"prompt": row["prompt"], "completion": completion, "label": n % 2 == 1})
    return found


def on_policy(**seeds):
    config = SampledRewardPairs(**GYM, samples_per_prompt=8, candidates=0, **seeds)
    return reward_tasks.load_pairs_or_ranked(config, None, outcomes)


SIDES = {
    "questions": lambda **seeds: GymTasks(GymData(**GYM, **seeds)),
    "offline pairs": lambda **seeds: load_preferences(OfflinePairs(**GYM, **seeds)),
    "mixed pairs": lambda **seeds: load_preferences(
        SampledPairs(**GYM, pairs="mixed", **seeds), sample=partial(outcomes, kinds=1)
    ),
    "ranked lists": lambda **seeds: reward_tasks.load_pairs_or_ranked(
        RankedLists(**GYM, list_length=3, candidates=0, **seeds), None, outcomes
    ),
    "traces": lambda **seeds: reward_tasks.load_traces(
        SyntheticTraces(**GYM, step_split=LETTERS, candidates=0, **seeds), None, outcomes
    ),
}


@pytest.mark.parametrize("name", SIDES)
def test_each_side_of_a_data_set_has_its_own_seed(name, same_questions):
    seeds = ((0, 1000), (0, 1000), (7000, 1000), (0, 9000))  # see GymData
    found = [SIDES[name](seed=seed, eval_seed=eval_seed) for seed, eval_seed in seeds]
    first, again, train, held_out = ((list(each.train), list(each.held_out)) for each in found)
    assert first == again
    assert first[0] != train[0] and first[1] == train[1]
    assert first[0] == held_out[0] and first[1] != held_out[1]


# --- every other one -----------------------------------------------------------------------------


def evaluation(seed):
    trainer = policy_gradient_cases.build(
        "grpo",
        model=checkpoint_path(),
        answer=None,
        seed=seed,
        per_device_eval_batch_size=32,
        max_completion_length=20,
    )
    answers = trainer.answer(ROWS)
    assert [one["greedy"] for one in answers] == greedy(trainer)
    return [one["sampled"] for one in answers]


def greedy(trainer):
    """The answers under a third seed, on which greedy ones do not depend."""
    trainer.args.seed = 99
    return [one["greedy"] for one in trainer.answer(ROWS)]


def dynamic_sampling(seed):
    trainer = policy_gradient_cases.build("dapo", seed=seed, dynamic_sampling_rounds=1)
    return [row["word"] for row in trainer._fresh(8)]


def order_of_prompts(seed):
    trainer = policy_gradient_cases.build("grpo", seed=seed)
    return [row["word"] for batch in trainer.get_train_dataloader() for row in batch]


def order_of_kto(seed):
    return direct_alignment_cases.build("kto", seed=seed).train_dataset["prompt_ids"][:]


def untrained_model(seed):
    model = ModelConfig(model_name_or_path="tiny_untrained")
    return prepare_model(model, SimpleNamespace(seed=seed)).lm_head.weight.tolist()


def head_of(name):
    def head(seed):
        torch.manual_seed(5)
        return reward_model_cases.build(name, seed=seed).model.score.weight.tolist()

    return head


def sampled(seed, share_batches=False):
    args = SimpleNamespace(
        device=torch.device("cpu"),
        process_index=0,
        world_size=1,
        per_device_eval_batch_size=60,
        max_completion_length=20,
        model_init_kwargs=None,
    )
    model = ModelConfig(model_name_or_path="tiny", dtype="float32")
    return sampling.sample_completions(model, args, ROWS, 2, seed, SAMPLED, share_batches)


PER_PROMPT = ("top", top_per_prompt), ("random", random_per_prompt)
OVERALL = ("top k", top_k_overall), ("random k", random_k_overall)
SEEDS = {
    "demonstrations": lambda seed: made.demonstrations(ROWS, "imperfect", seed),
    "demonstrations of copying": lambda seed: made.demonstrations(ROWS, "hinted", seed),
    "sampled answers": sampled,
    "sampled answers that processes share": lambda seed: sampled(seed, share_batches=True),
    **{f"selection {name}": partial(select, [[0, 1, 1, 1]] * 9) for name, select in PER_PROMPT},
    **{f"selection {name}": partial(select, [[0, 1, 1, 1]] * 9, 5) for name, select in OVERALL},
    "on-policy pairs of a reward model": lambda seed: list(on_policy(seed=seed).train),
    "evaluation": evaluation,
    "dynamic sampling": dynamic_sampling,
    "order of prompts": order_of_prompts,
    "order of KTO's examples": order_of_kto,
    "untrained model": untrained_model,
    **{f"head of a model of kind {name}": head_of(name) for name in ("reward", "orm", "prm")},
}


@pytest.mark.parametrize("name", SEEDS)
def test_another_seed_gives_something_else(name, same_questions, monkeypatch):
    monkeypatch.setattr(reward_model_cases, "move", lambda model: None)  # heads stay as drawn
    draw = SEEDS[name]
    assert draw(3) == draw(3) != draw(4)


# --- where another place hands it over -----------------------------------------------------------


def sampling_of_pairs(seed):
    data = SampledPairs(**GYM, seed=seed)
    own = SimpleNamespace(dataset=data, max_samples=None, rollouts="off")
    return preferences.prepare_preferences, own


def sampling_of_answers(seed):
    data = SampledAnswers(**GYM, seed=seed)
    own = SimpleNamespace(dataset=data, max_samples=None, algorithm="orm", rollouts="off")
    return reward_models.prepare_rewards, own


@pytest.mark.parametrize("prepare", [sampling_of_pairs, sampling_of_answers])
def test_a_data_sets_seed_is_that_of_its_sampling(prepare, tmp_path, same_questions, monkeypatch):
    """The seed arrives at the sampling, and pairs made of equal samples differ by it, too."""
    model, found = ModelConfig(model_name_or_path="tiny", dtype="float32"), []
    for seed in (3, 4):
        seeds = []

        def sample(model, args, rows, count, seed, sampling, seeds=seeds):
            seeds.append(seed)
            given = outcomes(rows, count, None)
            texts = [Completion(row["completion"][0]["content"], True) for row in given]
            return [texts[i : i + count] for i in range(0, len(texts), count)]

        folder = tmp_path / str(seed)
        folder.mkdir()
        args = DPOConfig(output_dir=str(folder), use_cpu=True, bf16=False)
        args.max_completion_length = 20
        function, own = prepare(seed)
        monkeypatch.setattr(sampling, "sample_completions", sample)
        found.append(list(function(own, args, model)[0].train))
        assert seeds == [seed, seed]
    assert (found[0] != found[1]) == (prepare is sampling_of_pairs)


class Stop(Exception):
    """Ends a run that has shown what was to be seen."""


def test_the_sft_recipe_demonstrates_with_the_data_sets_seed(run, monkeypatch):
    def demonstrations(rows, kind, seed):
        raise Stop(kind, seed)

    monkeypatch.setattr(made, "demonstrations", demonstrations)
    with pytest.raises(Stop, match=r"\('imperfect', 5\)"):
        run("sft", "sft", "--dataset.seed", 5)


def test_every_run_of_a_race_gets_its_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    asked = []

    def do_all(to_do, jobs):
        asked.extend(to_do)
        raise Stop

    monkeypatch.setattr(race, "do_all", do_all)
    with pytest.raises(Stop):
        race.race(["grpo", "dpo"], 3, tmp_path, extra=["--dataset.eval_size", "256"])
    assert {job.folder.name for job in asked} == {"seed-0", "seed-1", "seed-2"}
    for job in asked:
        assert job.words.count("--seed") == 1
        assert job.folder.name == f"seed-{job.words[job.words.index('--seed') + 1]}"


def test_a_runs_seed_is_that_of_its_trainer(run):
    small = ["--dataset.size", 20, "--dataset.eval_size", 4, "--max_steps", 1]
    batch = ["--per_device_train_batch_size", 8, "--num_generations", 4]
    folder, _ = run("grpo", "grpo", *small, *batch, "--seed", 7)
    assert json.loads((folder / "summary.json").read_text())["seed"] == 7
    assert torch.load(folder / "model" / "training_args.bin", weights_only=False).seed == 7
