"""Rejection sampling end to end on the embedded model."""

import importlib
import json
import shutil
import sys
from functools import partial
from hashlib import blake2b, sha256
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from trl import ModelConfig

from rlhf_trl import cli
from rlhf_trl.data import columns
from rlhf_trl.data.files import Examples
from rlhf_trl.data.gym import GymData, GymTasks, Spec
from rlhf_trl.rollouts import sampling
from rlhf_trl.rollouts.generate import SAMPLED, Completion
from rlhf_trl.run import rejection_sampling
from rlhf_trl.tiny import checkpoint_path
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


def test_evaluate_does_what_the_run_says_and_gets_its_numbers(sampled, capfd):
    folder, out, _ = sampled("--reward_funcs", "exact_match", "format")
    (line,) = [line for line in out.splitlines() if line.strip().startswith("evaluate it:")]
    words = line.split("rlhf-trl ")[1].split()
    assert words[:2] == ["evaluate", "tiny"]
    cli.main([*words, "--json", "--answers", str(folder / "answers.jsonl")])
    told = json.loads(capfd.readouterr().out)["models"]
    summary = json.loads((folder / "summary.json").read_text())
    for model, when in zip(told.values(), ("before", "after"), strict=True):
        numbers = {name: each["value"] for name, each in model.items()}
        assert summary[when].items() <= numbers.items()
        # the reward is the sum of the two functions, as in the selection
        total = numbers["eval_exact_match"] + numbers["eval_format"]
        assert numbers["eval_reward"] == pytest.approx(total, abs=1e-9)


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
    how = {"count": 3, "seed": 5, "sampling": SAMPLED, "share_batches": True}
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


ASKED = [{"role": "user", "content": "Say it."}]


@pytest.fixture
def rolled_out(tmp_path, monkeypatch):
    """Sample two made-up answers to each prompt, score them; return rewards and times sampled."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sampled = []

    def sample(model, args, rows, count, *_, **__):
        sampled.append(rows)
        return [[Completion("a", True, [5]), Completion("aaa", True, [5, 6])] for _ in rows]

    monkeypatch.setattr(rejection_sampling, "sample_completions", sample)

    def rolled_out(rows=({"prompt": ASKED},), rewards=("scores.length",), reuse=False, **model):
        for name in ("scores", "scale"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        own = SimpleNamespace(
            llm_judge=None,
            **{"answers": str(tmp_path / "answers"), "reuse_answers": reuse, "num_generations": 2},
            **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "correctness": None},
            **{"max_completion_length": 8, "reward_funcs": list(rewards), "reward_model": None},
            **{"reward_aggregate": None, "reward_model_strips_think": False},
            chat_template_kwargs={},
        )
        args = SimpleNamespace(
            output_dir="",
            **{"per_device_eval_batch_size": 8, "process_index": 0, "world_size": 1, "seed": 0},
            model_init_kwargs=None,
        )
        model = ModelConfig(**{"model_name_or_path": "tiny"} | model)
        loaded = SimpleNamespace(own=own, trl=args, model=model)
        data = Examples(Dataset.from_list(list(rows)), None, None, {})
        rollouts, _ = rejection_sampling.roll_out(loaded, data, None)
        return rollouts.rewards, len(sampled)

    return rolled_out


SCORES = (
    "from functools import partial\n"
    "from scale import SIGN, weighted\n"
    "length = partial(weighted, sign=SIGN)\n"
)
SCALE = (
    "SIGN = {sign}\n"
    "def weighted(completions, sign, **_):\n"
    "    return [sign * float(len(c[0]['content'])) for c in completions]\n"
)


@pytest.mark.parametrize("room", ["data", "reward_models", "rewards"])
def test_kept_rewards_are_of_the_code_that_computes_them(room, rolled_out, tmp_path, monkeypatch):
    (tmp_path / "scores.py").write_text(
        "def length(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    package = shutil.copytree(ROOT / "rlhf_trl", tmp_path / "rlhf_trl")
    monkeypatch.setattr(columns, "__file__", str(package / "data" / "columns.py"))
    rolled_out()
    rolled_out()
    assert len(list(tmp_path.glob("answers/*rewards-*"))) == 1
    with next((package / room).glob("*.py")).open("a") as file:
        file.write("# changed\n")
    rolled_out()
    assert len(list(tmp_path.glob("answers/*rewards-*"))) == 2


def test_rewards_of_an_edited_helper_are_scored_anew(rolled_out, tmp_path, capfd):
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "scale.py").write_text(SCALE.format(sign="+1"))
    assert rolled_out() == ([[1, 3]], 1)
    kept = contents(tmp_path / "answers")
    assert rolled_out() == ([[1, 3]], 1)
    assert contents(tmp_path / "answers") == kept
    (tmp_path / "scale.py").write_text(SCALE.format(sign="-1"))
    assert rolled_out() == ([[-1, -3]], 1)  # of the same answers
    # what cannot be told from another is never kept
    unclear = SCALE.format(sign="2") + "LINES = (n for n in range(3))\n"
    (tmp_path / "scale.py").write_text(unclear)
    kept = contents(tmp_path / "answers")
    capfd.readouterr()
    assert rolled_out() == ([[2, 6]], 1)
    assert contents(tmp_path / "answers") == kept
    line = "their rewards are not kept for another run: the module 'scale' holds what cannot be"
    assert line in capfd.readouterr().out


def test_rewards_of_other_answers_are_scored_anew(rolled_out, tmp_path):
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "scale.py").write_text(SCALE.format(sign="+1"))
    rolled_out()
    (path,) = (tmp_path / "answers").glob("answers-*")
    path.write_text(path.read_text().replace("aaa", "aaaa"))
    assert rolled_out() == ([[1, 4]], 1)


@pytest.fixture
def adapter(tmp_path):
    """Return a function that writes an adapter's folder, whose base has one file, and its name."""

    def adapter(base_weights):
        base, folder = tmp_path / "base", tmp_path / "adapter"
        base.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        (base / "model.safetensors").write_text(base_weights)
        config = {"base_model_name_or_path": str(base)}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return str(folder)

    return adapter


def test_whatever_sampling_reads_is_in_the_name_of_the_answers(rolled_out, tmp_path, adapter):
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "scale.py").write_text(SCALE.format(sign="+1"))
    tools = [{"type": "function", "function": {"name": "add"}}]
    changes = [
        {},
        {"rows": [{"prompt": ASKED, "chat_template_kwargs": {"enable_thinking": True}}]},
        {"rows": [{"prompt": ASKED, "chat_template_kwargs": {"enable_thinking": False}}]},
        {"rows": [{"prompt": ASKED, "tools": json.dumps(tools)}]},
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"attn_implementation": "eager"},
        {"model_name_or_path": adapter("one")},
    ]
    for number, change in enumerate(changes, 1):
        assert rolled_out(**change)[1] == number
    for change in changes:
        assert rolled_out(**change)[1] == len(changes)  # all are kept
    adapter("another")
    assert rolled_out(**changes[-1])[1] == len(changes) + 1


def test_answers_of_an_earlier_version_are_reused_on_demand_only(rolled_out, tmp_path, capfd):
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "scale.py").write_text(SCALE.format(sign="+1"))
    # the name as it was once made
    digest = blake2b(digest_size=16)
    for path in sorted(path for path in Path(checkpoint_path()).rglob("*") if path.is_file()):
        digest.update(path.name.encode() + blake2b(path.read_bytes()).digest())
    what = {
        "model": digest.hexdigest(),
        "prompts": sha256(json.dumps(ASKED).encode()).hexdigest(),
        "how": [2, 1.0, 1.0, 0, None, 8, 0, "float32"],
        "also": [8, {}],
    }
    key = sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
    path = tmp_path / "answers" / f"answers-{key}.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps([["b", True, [7]], ["bb", True, [7, 8]]]) + "\n")
    assert rolled_out(reuse=True) == ([[1, 2]], 0)
    assert f"answers: {path} is reused, as reuse_answers says" in capfd.readouterr().out
    assert rolled_out() == ([[1, 3]], 1)
    assert f"answers: {path} is of an earlier version" in capfd.readouterr().out
    assert rolled_out(reuse=True) == ([[1, 3]], 1)  # what has its own name now goes first
    assert capfd.readouterr().out == ""


def test_a_resumed_run_is_not_trained_on_another_selection(sampled, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    score = (
        "def length(completions, **_):\n"
        "    return [{} * len(c[0]['content']) for c in completions]\n"
    )
    saving = ["--reward_funcs", "signed.length", "--save_strategy", "steps", "--save_steps", 1]
    (tmp_path / "signed.py").write_text(score.format("+1"))
    sampled(*saving, "--max_steps", 1)
    (tmp_path / "signed.py").write_text(score.format("-1"))
    monkeypatch.delitem(sys.modules, "signed")
    with pytest.raises(SystemExit) as stop:
        sampled(*saving, "--resume_from_checkpoint", "auto")
    assert "the train rows are not those of" in str(stop.value.code)


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
