"""Rejection sampling end to end on the embedded model."""

import json
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trl import ModelConfig

from rlhf_trl.data.gym import GymData, GymTasks, Spec
from rlhf_trl.rollouts import sampling
from rlhf_trl.rollouts.generate import SAMPLED, Completion
from rlhf_trl.run import rejection_sampling
from rlhf_trl.trainers.sft import BookSFTTrainer

ROOT = Path(__file__).parent.parent
SMALL = [
    *["--dataset.size", 12, "--dataset.eval_size", 4, "--num_generations", 4, "--max_steps", 2],
    *["--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 16, "--eval_steps", 2],
]
TASKS = GymTasks(GymData([Spec("spell_backward")], size=7, eval_size=1))


@pytest.fixture
def sampled(run, tmp_path, monkeypatch):
    """Run the recipe on shared rollouts; return folder, output, and what its trainer was given."""

    def sampled(*words, config="rejection_sampling", folder="out"):
        given = []
        build = BookSFTTrainer.__init__

        def keep(self, *args, **kwargs):
            given.append(kwargs)
            build(self, *args, **kwargs)

        monkeypatch.setattr(BookSFTTrainer, "__init__", keep)
        rollouts = ["--answers", tmp_path / "answers"]
        try:
            found = run(
                *("rejection_sampling", config, *SMALL, *rollouts, *words), folder=tmp_path / folder
            )
        finally:
            monkeypatch.setattr(BookSFTTrainer, "__init__", build)
        return *found, given

    return sampled


def never(*_, **__):
    raise AssertionError("answers are sampled again")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_strategies_share_answers_and_train_on_what_they_select(sampled, tmp_path, monkeypatch):
    folder, out, (given,) = sampled()
    kept = contents(tmp_path / "answers")
    assert sorted(name.partition("-")[0] for name in kept) == ["answers", "rewards"]
    scored = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert len(scored) == 12 * 4
    groups = [scored[n : n + 4] for n in range(0, 48, 4)]
    told = json.loads((folder / "selection.json").read_text())
    right = [[row["label"] for row in group] for group in groups]
    assert right == [[row["scores"]["reward"] == 1 for row in group] for group in groups]
    assert right == [
        [row["completion"].endswith(f"<answer>{row['answer']}</answer>") for row in group]
        for group in groups
    ]
    assert (told["answers"], told["selected"], told["prompts_covered"]) == (48, 12, 12)
    assert told["share_right"] == pytest.approx(sum(map(sum, right)) / 48)
    assert told["decidable"] == pytest.approx(sum(0 < sum(row) < 4 for row in right) / 12)
    # the best is right wherever any is
    assert told["selected_right"] == pytest.approx(sum(map(any, right)) / 12)
    assert told["coverage"]["1"] == told["random_coverage"]["4"] == told["selected_right"]
    assert f"decidable {told['decidable']:.4g}" in out
    assert (folder / "reward_report.png").read_bytes().startswith(b"\x89PNG")
    assert len(given["train_dataset"]) == 12
    assert json.loads((folder / "summary.json").read_text())["seen_kind"] == "answers"

    other = ["--strategy", "random_k_overall", "--k", 5, "--correctness", "exact_match"]
    monkeypatch.setattr(rejection_sampling, "sample_completions", never)
    second, _, (given,) = sampled(*other, folder="second")
    assert contents(tmp_path / "answers") == kept  # byte for byte
    assert len(given["train_dataset"]) == 5
    assert json.loads((second / "selection.json").read_text())["selected"] == 5


def test_answers_survive_a_crash_while_they_are_scored(sampled, refused, tmp_path, monkeypatch):
    (tmp_path / "full_rewards.py").write_text(
        "import os\n"
        "def length(completions, **_):\n"
        "    if 'READY' not in os.environ:\n"
        "        raise MemoryError('full')\n"
        "    return [len(c[0]['content']) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--reward_funcs", "full_rewards.length", "--resume_from_checkpoint", "auto"]
    with pytest.raises(SystemExit) as stop:
        sampled(*words)
    assert "raised MemoryError: full" in str(stop.value.code)
    (answers,) = contents(tmp_path / "answers")
    monkeypatch.setattr(rejection_sampling, "sample_completions", never)
    monkeypatch.setenv("READY", "yes")
    folder, _, _ = sampled(*words)
    assert len(contents(tmp_path / "answers")) == 2 and answers in contents(tmp_path / "answers")
    told = json.loads((folder / "selection.json").read_text())
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert all(row["scores"]["reward"] == len(row["completion"]) for row in lines)
    assert told["prompts_covered"] == 12  # of the gym's questions it is known what is right


def test_no_end_is_put_behind_an_answer_that_was_cut_off(sampled):
    folder, _, (given,) = sampled("--max_completion_length", 8)
    tokenizer = given["processing_class"]
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    cut = {row["completion"] for row in lines if not row["finished"]}
    rows = list(given["train_dataset"])
    assert cut
    ended = 0
    for row in rows:
        ids = [
            i for i, counts in zip(row["input_ids"], row["completion_mask"], strict=True) if counts
        ]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert (ids[-1] == tokenizer.eos_token_id) == (text not in cut)
        ended += text not in cut
    told = json.loads((folder / "selection.json").read_text())
    assert told["selected_cut_off"] == len(rows) - ended > 0


def test_what_the_answers_depend_on_is_in_their_names(sampled, tmp_path, monkeypatch):
    monkeypatch.setattr(rejection_sampling.train, "run", lambda *_, **__: None)

    def answers():
        return {path.name for path in (tmp_path / "answers").glob("answers-*")}

    sampled()
    for n, word in enumerate(["--seed 1", "--temperature 0.7", "--num_generations 2"], 2):
        sampled(*word.split(), folder=f"out-{n}")
        assert len(answers()) == n
    sampled("--reward_funcs", "gym_score", folder="other-reward")
    assert len(answers()) == 4
    assert len([*(tmp_path / "answers").glob("rewards-*")]) == 5


def test_each_round_samples_from_the_newest_model(sampled, tmp_path, monkeypatch, refused):
    asked = []
    sample = rejection_sampling.sample_completions

    def noted(model, *args, **kwargs):
        asked.append(model.model_name_or_path)
        return sample(model, *args, **kwargs)

    monkeypatch.setattr(rejection_sampling, "sample_completions", noted)
    folder, _, given = sampled("--rounds", 3)
    models = [str(folder / f"round-{n}" / "model") for n in (1, 2)]
    assert asked == ["tiny", *models]
    assert [each["model"] for each in given][1:] == models
    before = [json.loads((f / "summary.json").read_text())["before"] for f in (folder,)]
    after = json.loads((folder / "round-2" / "summary.json").read_text())["after"]
    assert before == [after]  # a round starts where the one before ended
    # what was interrupted in the last round goes on there
    (folder / "summary.json").unlink()
    _, _, given = sampled("--rounds", 3, "--resume_from_checkpoint", "auto")
    assert len(given) == 1 and len(asked) == 3
    (folder / "summary.json").unlink()
    words = ["--rounds", 3, "--resume_from_checkpoint", "auto", "--learning_rate", 1e-5]
    with pytest.raises(SystemExit, match="round-1 was run with another learning_rate"):
        sampled(*words)


def test_any_number_of_processes_samples_the_same(monkeypatch):
    model = ModelConfig(model_name_or_path="tiny")
    args = SimpleNamespace(
        **{"per_device_eval_batch_size": 6, "max_completion_length": 20, "process_index": 0},
        **{"world_size": 1, "device": torch.device("cpu"), "seed": 0, "model_init_kwargs": None},
    )
    rows = TASKS.train
    how = {"count": 3, "seed": 5, "sampling": SAMPLED, "dealt": True}
    sample = partial(sampling.sample_completions, model, **how)
    alone = sample(SimpleNamespace(**vars(args)), rows)
    assert len({one.text for one in alone[0]}) > 1
    shares = []
    monkeypatch.setattr(sampling, "gather_object", lambda mine: shares.append(mine) or mine)
    for process in range(3):
        args.model_init_kwargs = None
        sample(SimpleNamespace(**vars(args) | {"process_index": process, "world_size": 3}), rows)
    assert [len(share) for share in shares] == [3, 2, 2]
    assert [value for _, value in sorted(chain(*shares))] == alone


def test_rewards_are_the_sum_of_what_applies_to_an_answer():
    def half(completions, **_):
        return [0.5 for _ in completions]

    def seen(completions, finished, word, completion_ids, prompts, **_):
        assert prompts == ["p", "p"] and word == ["w", "w"] and completion_ids == [[1], [2]]
        return [1.0 if end else None for end in finished]

    answers = [[Completion("a", True, [1]), Completion("b", False, [2])]]
    batch = [{"prompt": "p", "word": "w"}]
    assert rejection_sampling._rewards([half, seen], answers, batch, 0) == [[1.5, 0.5]]
    with pytest.raises(ValueError, match="no reward function applied to an answer to prompt 1"):
        rejection_sampling._rewards([seen], answers, batch, 0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rounds", 2, "--use_peft"], "rounds: each round but the first would start from an"),
        (["--completion_only_loss", "false"], "completion_only_loss: false contradicts rejection"),
        (["--reward_aggregate", "min"], "reward_aggregate is min, but there is no reward_model"),
        (["--strategy", "top"], 'strategy is "top"; write one of top_per_prompt'),
    ],
)
def test_mistakes_are_one_sentence(refused, tmp_path, words, sentence):
    strategy = [] if "--strategy" in words else ["--strategy", "top_k_overall"]
    words = [*SMALL, "--answers", tmp_path / "answers", *strategy, *words]
    assert sentence in refused("rejection_sampling", "rejection_sampling", *words)


def test_a_reward_model_or_reward_functions_are_needed(refused, tmp_path):
    base = ROOT / "configs/tiny/rejection_sampling.yaml"
    (tmp_path / "none.yaml").write_text(f"extends: {base}\nreward_funcs: !unset\n")
    words = [*SMALL, "--answers", tmp_path / "answers"]
    sentence = refused("rejection_sampling", tmp_path / "none", *words)
    assert "reward_funcs is empty; name at least one of exact_match" in sentence


def test_a_broken_file_of_answers_is_named(sampled, tmp_path):
    sampled()
    (path,) = (tmp_path / "answers").glob("answers-*")
    path.write_text(path.read_text()[:500])
    with pytest.raises(SystemExit) as stop:
        sampled(folder="again")
    assert f"answers: {path} does not hold 12 lines of JSON; remove it." in str(stop.value.code)


@pytest.mark.promise
@pytest.mark.parametrize("seed", range(3))
def test_selection_is_far_above_its_control(run, tmp_path, seed):
    found = {}
    for strategy in ("top_per_prompt", "random_per_prompt", "top_k_overall", "random_k_overall"):
        words = ["--strategy", strategy, "--seed", seed, "--answers", tmp_path / "answers"]
        config = "rejection_sampling"
        folder, _ = run(config, config, *words, folder=tmp_path / strategy)
        after = json.loads((folder / "summary.json").read_text())["after"]
        found[strategy] = after["eval_exact_match"], after["eval_sampled_exact_match"]
    assert len([*(tmp_path / "answers").iterdir()]) == 2
    assert found["top_per_prompt"][0] >= 0.92
    for kind in ("per_prompt", "k_overall"):
        pairs = zip(found[f"top_{kind}"], found[f"random_{kind}"], strict=True)
        assert all(top - control >= 0.4 for top, control in pairs)
