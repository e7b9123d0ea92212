"""The reward-model recipes end to end on the embedded model, and their bad input."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import cause
from safetensors.torch import load_file

from rlhf_trl.run.config import read_config
from rlhf_trl.tiny import checkpoint_path

ROOT = Path(__file__).parent.parent
STEPS = [
    *["--max_steps", 4, "--eval_steps", 2, "--save_strategy", "steps", "--save_steps", 2],
    *["--per_device_train_batch_size", 8, "--per_device_eval_batch_size", 8],
]
GYM = ["--dataset.size", 24, "--dataset.eval_size", 6, "--dataset.candidates", 4]
SAMPLED = ["--dataset.samples_per_prompt", 4]
WORDS = {  # recipe and options of a small run, by config
    "reward": ("reward", [*STEPS, *GYM, *SAMPLED]),
    "kwise": ("reward", [*STEPS, *GYM]),
    "orm": ("orm", [*STEPS, *GYM, *SAMPLED]),
    "prm": ("prm", [*STEPS, *GYM]),
    "prm_sampled": ("prm", [*STEPS, *GYM, *SAMPLED]),
}
SCORES = {
    "reward": {"score"},
    "kwise": {"score"},
    "orm": {"mean", "last"},
    "prm": {"min", "last", "product"},
    "prm_sampled": {"min", "last", "product"},
}
SHORT = ["--max_steps", 2, "--save_strategy", "no", "--eval_strategy", "no"]
SILENT = [*SHORT, "--eval_on_start", "false"]


def weights(folder, name="model.safetensors"):
    return (folder / "model" / name).read_bytes()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(question="sun", answer="nus"):
    return [{"role": "user", "content": question}], [{"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def cache():
    return {}


@pytest.fixture
def finished(run, cache, tmp_path_factory):
    """Return folder and output of a small run of a config; it happens once in this module."""

    def finished(config):
        if config not in cache:
            recipe, words = WORDS[config]
            folder = tmp_path_factory.mktemp(config) / "out"
            cache[config] = run(recipe, config, *words, folder=folder)
        return cache[config]

    return finished


@pytest.fixture
def small(run, tmp_path):
    """Run a config with small settings in a folder of its own."""

    def small(config, *words, name="out"):
        recipe, settings = WORDS[config]
        return run(recipe, config, *settings, *words, folder=tmp_path / name)

    return small


@pytest.fixture
def no(refused):
    """Return the sentence with which a small run of a config ends that must not succeed."""

    def no(config, *words, settings=None, **kwargs):
        recipe, small = WORDS[config]
        return refused(recipe, config, *(small if settings is None else settings), *words, **kwargs)

    return no


def written(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def from_file(path, *more):
    return ["--dataset.source", "path", "--dataset.path", path, *STEPS, *more]


def halves(count):
    """Train on the first half of a file's rows and hold out the second."""
    sides = {"split": f"train[:{count // 2}]", "eval_split": f"train[{count // 2}:]"}
    return [word for key, value in sides.items() for word in (f"--dataset.{key}", value)]


# --- what a run leaves behind


def test_scores_are_those_of_the_model_that_is_kept(small):
    # most answers are wrong, so what right ones get falls, and that of step 2 is the best
    best = ["--load_best_model_at_end", "--metric_for_best_model", "eval_right_mean"]
    folder, _ = small("orm", *best)
    told = json.loads((folder / "summary.json").read_text())
    right = [row["scores"]["mean"] for row in lines(folder / "scores.jsonl") if row["label"]]
    mean = sum(right) / len(right)
    assert mean == pytest.approx(told["after"]["eval_right_mean"], abs=1e-6)
    last = json.loads((folder / "evaluations" / "step-000004.json").read_text())["metrics"]
    assert mean > last["eval_right_mean"] + 1e-3 and told["model_step"] == 2


SEEN = {"reward": "pairs", "kwise": "ranked lists", "orm": "answers"}
HEADLINES = {
    "reward": "pair accuracy ",
    "kwise": "pair accuracy ",
    "orm": "AUC ",
    "prm": "first error found ",
    "prm_sampled": "first error found ",
}


@pytest.mark.parametrize("config", WORDS)
def test_what_a_run_leaves_and_says(finished, config):
    folder, out = finished(config)
    formulation = "code" if config.startswith("prm") else "chapter"
    algorithm = config.removesuffix("_sampled")
    assert out.splitlines()[0].startswith(f"{algorithm} ({formulation}) on cpu, 1 process")
    assert out.splitlines()[-1].startswith(HEADLINES[config]), out.splitlines()[-1]
    steps = sorted(path.stem for path in (folder / "evaluations").iterdir())
    assert steps == ["step-000000", "step-000002", "step-000004"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["name"] == f"{algorithm} ({formulation})"
    assert summary["seen_kind"] == SEEN.get(config, "traces")
    # all are tested on the words of one data set, and a race can rank them
    first = json.loads((finished("reward")[0] / "summary.json").read_text())
    tested = ("questions", "questions_fingerprint")
    assert [summary[key] for key in tested] == [first[key] for key in tested]
    wanted = {"eval_loss", "eval_auc", "eval_best_of_n", "eval_random_of_n", "eval_oracle_of_n"}
    wanted |= {"eval_first_error"} if algorithm == "prm" else set()
    wanted |= {"eval_pair_accuracy"} if config in ("reward", "kwise") else set()
    assert wanted <= summary["before"].keys() == summary["after"].keys()
    for name in ("learning_curve.png", "reward_report.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    log = json.loads((folder / "log.json").read_text())
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4]
    start = load_file(Path(checkpoint_path()) / "model.safetensors")
    now = load_file(folder / "model" / "model.safetensors")
    assert start.keys() <= now.keys() and "score.weight" in now
    moved = {name: float((now[name] - weight).abs().max()) for name, weight in start.items()}
    assert min(moved.values()) > 1e-5 and max(moved.values()) < 0.1
    assert summary["after"]["eval_loss"] < summary["before"]["eval_loss"]
    said = json.loads((folder / "model" / "reward_model.json").read_text())
    assert (said["algorithm"], said["formulation"]) == (algorithm, formulation)
    assert said["num_labels"] == (3 if algorithm == "prm" else 1)
    assert said["step_separator"] == ("\n" if algorithm == "prm" else None)
    sides = {path.name for path in folder.glob("samples-*.jsonl")}
    train = {"samples-train.jsonl"} if config in ("reward", "orm", "prm_sampled") else set()
    assert sides == {"samples-held-out.jsonl"} | train
    assert read_config(folder / "config.yaml")["algorithm"] == algorithm


@pytest.mark.parametrize("config", WORDS)
def test_the_scores_of_the_last_evaluation_are_those_of_the_metrics(finished, config):
    folder, _ = finished(config)
    rows = lines(folder / "scores.jsonl")
    held_out = lines(folder / "samples-held-out.jsonl")
    assert [row["completion"] for row in rows] == [row["completion"] for row in held_out]
    assert len(rows) == 6 * 4 and all(row["scores"].keys() == SCORES[config] for row in rows)
    text = [row["completion"][-1]["content"] for row in rows]
    right = [
        f"<answer>{row['answer']}</answer>" in each for row, each in zip(rows, text, strict=True)
    ]
    assert [row["label"] for row in rows] == right and any(right) and not all(right)
    key = {"orm": "mean", "kwise": "score", "reward": "score"}.get(config, "min")
    after = json.loads((folder / "summary.json").read_text())["after"]
    groups = [rows[n : n + 4] for n in range(0, 24, 4)]
    best = [max(group, key=lambda row: row["scores"][key])["label"] for group in groups]
    assert after["eval_best_of_n"] == pytest.approx(sum(best) / 6)
    assert after["eval_oracle_of_n"] == pytest.approx(
        sum(any(row["label"] for row in group) for group in groups) / 6
    )


@pytest.mark.parametrize("config", ["reward", "orm", "prm"])
def test_evaluation_does_not_change_training(finished, small, config):
    plain, out = small(config, "--eval_strategy", "no", "--eval_on_start", "false")
    assert weights(plain) == weights(finished(config)[0])
    steps = [path.stem for path in (plain / "evaluations").iterdir()]
    assert steps == ["step-000004"]  # once, at the end
    assert out.splitlines()[-1].startswith(HEADLINES[config])


def test_the_stock_trainer_computes_the_chapters_bradley_terry(finished, small):
    stock, out = small("reward", "--formulation", "trl")
    assert out.splitlines()[0].startswith("reward (trl)")
    assert weights(stock) == weights(finished("reward")[0])
    assert '"formulation": "trl"' in (stock / "model" / "reward_model.json").read_text()


def test_the_chapters_process_model_has_two_classes(run, tmp_path):
    path = tmp_path / "chapter.yaml"
    base = ROOT / "configs" / "tiny" / "prm.yaml"
    path.write_text(f"extends: {base}\nformulation: chapter\nclass_weights: !unset\n")
    folder, out = run("prm", path.with_suffix(""), *WORDS["prm"][1], *SHORT)
    assert out.splitlines()[0].startswith("prm (chapter)")
    assert '"num_labels": 1' in (folder / "model" / "reward_model.json").read_text()
    head = load_file(folder / "model" / "model.safetensors")
    assert head["score.weight"].shape[0] == 1
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert 0 <= after["eval_step_accuracy"] <= 1


@pytest.mark.parametrize(
    ("config", "formulation"),
    [("kwise", "trl"), ("kwise", "code"), ("orm", "trl"), ("prm", "trl"), ("reward", "book")],
)
def test_a_formulation_that_there_is_not(no, config, formulation):
    assert f"{config} has no formulation {formulation!r}" in no(
        config, "--formulation", formulation
    )


@pytest.mark.parametrize(("config", "other"), [("orm", "prm"), ("prm", "orm"), ("reward", "orm")])
def test_another_recipes_algorithm(no, config, other):
    sentence = no(config, "--algorithm", other)
    assert f'algorithm is "{other}"; write one of' in sentence


# --- resume, LoRA, trackers, processes

RESUME = ["--resume_from_checkpoint", "auto"]


@pytest.mark.parametrize("config", ["reward", "kwise", "orm", "prm"])
def test_stopped_and_resumed_is_bit_identical(finished, small, monkeypatch, tmp_path, config):
    whole, _ = finished(config)
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped, ignore=shutil.ignore_patterns("checkpoint-4", "model"))
    (stopped / "evaluations" / "step-000004.json").unlink()
    (stopped / "scores.jsonl").unlink()

    def never(*args, **kwargs):
        raise AssertionError("sampled again")

    monkeypatch.setattr("rlhf_trl.rollouts.sampling.sample_completions", never)
    resumed, out = small(config, *RESUME, name="stopped")
    assert "resuming from" in out and out.count("changed since") == 1  # output_dir
    assert weights(whole) == weights(resumed)
    for name in ("scores.jsonl", "evaluations/step-000004.json", "model/reward_model.json"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()


def test_samples_of_other_questions_are_refused(finished, no, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(finished("orm")[0], stopped)
    shutil.rmtree(stopped / "checkpoint-4")
    resume = [*RESUME, "--resume_changed", "dataset"]
    for change in (["--dataset.size", 23], ["--dataset.samples_per_prompt", 3]):
        sentence = no("orm", *change, *resume, folder=stopped)
        assert "samples-train.jsonl does not hold" in sentence and "--output_dir" in sentence
    with (stopped / "samples-train.jsonl").open("a") as file:
        file.write('{"prompt": "half a li')
    assert "samples-train.jsonl" in no("orm", *resume, folder=stopped)


LORA = ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"]


def test_the_wrong_task_type_is_refused(no):
    for config, wrong, right in (("orm", "SEQ_CLS", "TOKEN_CLS"), ("reward", "CAUSAL_LM", "SEQ")):
        sentence = no(config, *LORA, "--lora_task_type", wrong)
        assert f"lora_task_type is {wrong}" in sentence and right in sentence


POLICY = [
    *["--dataset.size", 40, "--dataset.eval_size", 4, "--max_steps", 2, "--num_generations", 4],
    *["--per_device_train_batch_size", 16, "--learning_rate", "1e-4", "--eval_strategy", "no"],
    *["--reward_weights", 1.0],
]


@pytest.mark.parametrize(
    "config",
    ["reward", *(pytest.param(c, marks=pytest.mark.promise) for c in ("orm", "prm"))],
)
def test_lora_resumes_and_its_adapter_is_a_reward(run, small, tmp_path, config):
    whole, _ = small(config, *LORA, "--eval_strategy", "no", name="whole")
    told = json.loads((whole / "model" / "adapter_config.json").read_text())
    assert told["task_type"] == ("SEQ_CLS" if config == "reward" else "TOKEN_CLS")
    adapter = load_file(whole / "model" / "adapter_model.safetensors")
    heads = [tensor for name, tensor in adapter.items() if "score" in name]
    assert heads and any("lora_B" in n and bool(t.any()) for n, t in adapter.items())
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped, ignore=shutil.ignore_patterns("checkpoint-4", "model"))
    resumed, _ = small(config, *LORA, "--eval_strategy", "no", *RESUME, name="stopped")
    name = "adapter_model.safetensors"
    assert weights(whole, name) == weights(resumed, name)
    reward = ["--reward_funcs", "[]", "--reward_model", whole / "model"]
    folder, _ = run("grpo", "grpo", *POLICY, *reward, folder=tmp_path / "policy")
    assert rewards(folder)[0]["rewards/reward_model/std"] > 0


def rewards(folder):
    log = json.loads((folder / "log.json").read_text())
    return [entry for entry in log if "rewards/reward_model/mean" in entry]


def test_wandb_offline(small, monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    small("prm", *SHORT, "--report_to", "wandb")
    assert wandb.run.offline
    logged = set(wandb.run.summary.keys())
    wandb.finish()
    assert {"eval/first_error", "eval/auc", "train/loss", "train/accuracy"} <= logged


@pytest.mark.multiprocess
def test_two_processes_sample_the_answers_that_one_samples(launch, finished, tmp_path):
    whole, _ = finished("orm")
    recipe, words = WORDS["orm"]
    words = [*words, "--per_device_train_batch_size", 4]
    config = ["--config", "configs/tiny/orm.yaml", "--output_dir", tmp_path / "out"]
    accelerate = ["--config_file", "configs/accelerate/cpu_2proc.yaml"]
    done = launch(accelerate, recipe, *map(str, [*config, *words]))
    assert done.returncode == 0, cause(done.stdout)
    assert "orm (chapter) on cpu, 2 processes, strategy ddp" in done.stdout
    two = tmp_path / "out"
    summary = json.loads((two / "summary.json").read_text())
    assert (summary["steps"], summary["processes"]) == (4, 2)
    before = json.loads((whole / "summary.json").read_text())["before"]
    for key in ("eval_auc", "eval_best_of_n", "eval_right_mean", "eval_wrong_mean"):
        assert summary["before"][key] == pytest.approx(before[key], abs=1e-6)
    scores = [lines(folder / "scores.jsonl") for folder in (two, whole)]
    for ours, theirs in zip(*scores, strict=True):
        assert ours["completion"] == theirs["completion"]
        assert ours["scores"] == pytest.approx(theirs["scores"], abs=1e-5)  # "chapter" is invariant


# --- a trained model as the reward

AGGREGATES = {
    "reward": [None],
    "kwise": [None],
    "orm": ["mean", "last"],
    "prm": ["min", "last", "product"],
}


@pytest.mark.parametrize("config", AGGREGATES)
def test_every_kind_is_a_reward_in_grpo(finished, run, tmp_path, config):
    reward = ["--reward_funcs", "[]", "--reward_model", finished(config)[0] / "model"]
    found = set()
    for name in AGGREGATES[config]:
        more = ["--reward_aggregate", name] if name else []
        folder, _ = run("grpo", "grpo", *POLICY, *reward, *more, folder=tmp_path / str(name))
        logged = rewards(folder)
        assert len(logged) == 2 and all(entry["reward_std"] > 0 for entry in logged)
        found.add(logged[0]["rewards/reward_model/mean"])
    assert len(found) == len(AGGREGATES[config])  # the first completions are the same


def test_a_bradley_terry_model_is_a_reward_in_ppo(finished, run, tmp_path):
    reward = ["--reward_funcs", "[]", "--reward_model", finished("reward")[0] / "model"]
    folder, _ = run("ppo", "ppo", *POLICY, *reward, folder=tmp_path / "policy")
    assert all(entry["rewards/reward_model/std"] > 0 for entry in rewards(folder))


def test_a_reward_model_that_cannot_be_one(finished, refused, tmp_path):
    def told(*words):
        return refused("grpo", "grpo", *POLICY, "--reward_funcs", "[]", *words)

    model = finished("orm")[0] / "model"
    sentence = told("--reward_model", model, "--reward_aggregate", "min")
    assert "reward_aggregate: 'min' is not a score of" in sentence and "mean or last" in sentence
    sentence = told("--reward_model", ROOT / "rlhf_trl" / "tiny" / "checkpoint")
    assert "lacks score.weight" in sentence or "num_labels" in sentence
    sentence = told("--reward_model", "nobody/reward")
    assert "'nobody/reward' is neither a reward model's folder here nor a hub model" in sentence
    folder = tmp_path / "changed"
    shutil.copytree(finished("reward")[0] / "model", folder)
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in told("--reward_model", folder)


def test_an_aggregate_without_a_reward_model_is_refused(refused):
    for recipe in ("grpo", "ppo"):
        words = [*POLICY[:-2], "--reward_aggregate", "min"]
        sentence = refused(recipe, recipe, *words)
        assert "reward_aggregate" in sentence and "reward_model" in sentence
    sentence = refused("grpo", "grpo", *POLICY[:-2], "--reward_model_strips_think")
    assert "reward_model_strips_think is true, but there is no reward_model" in sentence


# --- local files

PLAIN = [f"word{n} " * (n % 3 + 1) for n in range(16)]
CHAT = [answered("w" * (n % 5 + 1) + "abcd"[n // 4], "r" * (n % 3 + 1)) for n in range(16)]


def test_pairs_with_a_margin_and_centering(run, tmp_path):
    rows = [
        {"prompt": p, "chosen": a, "rejected": answered("", "b" * (n + 1))[1], "margin": n / 4}
        for n, (p, a) in enumerate(CHAT)
    ]
    path = written(tmp_path, rows)
    centered = ["--center_rewards_coefficient", 0.01]
    words = from_file(path, *halves(16), *SHORT, *centered)
    losses = []
    for name in ("with", "without"):
        mapping = [] if name == "with" else ["--dataset.columns", "{margin: none}"]
        if mapping:
            for row in rows:
                del row["margin"]
            written(tmp_path, rows)
        folder, out = run("reward", "reward", *words, folder=tmp_path / name)
        losses.append(json.loads((folder / "log.json").read_text())[0]["eval_loss"])
        assert out.splitlines()[-1].startswith("pair accuracy ")
        assert not (folder / "scores.jsonl").exists()
        assert (folder / "reward_report.png").exists()
    assert losses[0] > losses[1] + 0.1  # margins of 1.9 on average


def test_texts_after_messages_are_the_assistants(run, tmp_path):
    folders = []
    for name in ("texts", "messages"):
        rows = [
            {"prompt": p, "chosen": a, "rejected": answered("", "b" * (n + 1))[1]}
            for n, (p, a) in enumerate(CHAT)
        ]
        if name == "texts":
            rows = [
                {
                    "prompt": row["prompt"],
                    **{k: row[k][0]["content"] for k in ("chosen", "rejected")},
                }
                for row in rows
            ]
        path = written(tmp_path, rows)
        folders.append(
            run("reward", "reward", *from_file(path, *SILENT), folder=tmp_path / name)[0]
        )
    assert weights(folders[0]) == weights(folders[1])


def test_ranked_lists_of_plain_text(run, tmp_path):
    rows = [{"prompt": p, "ranked": ["right", "rite", f"no{n}"]} for n, p in enumerate(PLAIN)]
    path = written(tmp_path, rows)
    words = from_file(path, *halves(16), "--dataset.eval_size", 5, *SHORT)
    _, out = run("reward", "kwise", *words)
    assert out.splitlines()[-1].startswith("pair accuracy ")


def test_outcomes_flat_and_grouped_and_those_of_another_run(finished, run, tmp_path):
    samples = finished("orm")[0] / "samples-train.jsonl"
    held_out = finished("orm")[0] / "samples-held-out.jsonl"
    more = ["--dataset.eval_path", held_out, "--dataset.eval_size", 5]
    words = from_file(samples, *more, *SHORT)
    flat, out = run("orm", "orm", *words, folder=tmp_path / "flat")
    assert out.splitlines()[-1].startswith("AUC ")
    assert len(lines(flat / "scores.jsonl")) == 5 * 4
    rows = lines(samples)
    grouped = [
        {
            "prompt": rows[n]["prompt"],
            "completions": [row["completion"] for row in rows[n : n + 4]],
            "rewards": [float(row["label"]) for row in rows[n : n + 4]],
        }
        for n in range(0, len(rows), 4)
    ]
    words = from_file(written(tmp_path, grouped), *SILENT)
    mapping = ["--dataset.columns", "{labels: rewards}"]
    second, _ = run("orm", "orm", *words, *mapping, folder=tmp_path / "grouped")
    assert all(row["finished"] for row in rows)
    assert weights(flat) == weights(second)


def test_traces_of_a_file(run, tmp_path):
    rows = [
        {"prompt": p, "completions": ["so", "then"], "labels": [1, (n % 3) - 1]}
        for n, p in enumerate(PLAIN)
    ]
    path = written(tmp_path, rows)
    words = from_file(path, *halves(16), *SHORT, "--dataset.step_separator", "\n\n")
    folder, out = run("prm", "prm", *words, folder=tmp_path / "traces")
    assert out.splitlines()[-1].startswith("first error found ")
    assert not (folder / "scores.jsonl").exists()
    said = json.loads((folder / "model" / "reward_model.json").read_text())
    assert said["step_separator"] == "\n\n"


# --- bad input

OUTCOMES = [{"prompt": "a", "completion": "b", "label": n % 2 == 0} for n in range(8)]
TRACES = [{"prompt": "a", "completions": ["b", "c"], "labels": [1, -1]} for _ in range(8)]
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"} for _ in range(8)]
BAD_FILES = {
    "one class of what is short enough": (
        "orm",
        [{**OUTCOMES[0], "completion": "b" * 70}] * 4 + OUTCOMES[1:2] * 4,
        "without the 4 rows of more than 64 tokens every label is the same",
        "raise max_length",
    ),
    "messages and texts": (
        "orm",
        [*OUTCOMES, {**OUTCOMES[0], "prompt": answered()[0]}],
        "prompt is messages in row 9",
        "a text in the first training row",
    ),
    "some with a margin": (
        "reward",
        [*PAIRS, {**PAIRS[0], "margin": 1.0}],
        "line 1, ",
        "margin is None, which is not a number",
    ),
    "some unfinished": (
        "orm",
        [*OUTCOMES, {**OUTCOMES[0], "finished": False}],
        "finished is None, which is neither boolean",
        "",
    ),
    "a label that is none": ("orm", [*OUTCOMES, {**OUTCOMES[0], "label": 2}], "label is 2", "true"),
    **{f"nothing ({name})": (name, [], "has no rows", "") for name in ("reward", "orm", "prm")},
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(no, tmp_path, name):
    config, rows, *parts = BAD_FILES[name]
    sentence = no(config, settings=from_file(written(tmp_path, rows), *SILENT))
    assert all(part in sentence for part in parts), sentence


BAD = {
    "all over-long pairs": ("reward", ["--max_length", 4], ["max_length: all", "raise max_length"]),
    "all over-long lists": ("kwise", ["--max_length", 4], ["max_length: all", "raise max_length"]),
    "all over-long answers": ("orm", ["--max_length", 4], ["max_length: all", "raise max_length"]),
    "all over-long traces": ("prm", ["--max_length", 4], ["max_length: all", "raise max_length"]),
    "no separator": ("prm", ["--dataset.step_separator", ""], ["step_separator: ''", "no token"]),
    "no data's": ("prm", ["--step_split", "x"], ["step_split", "write dataset.step_split"]),
    "a pattern that is none": ("prm", ["--dataset.step_split", "("], ["not a regular expression"]),
    "a pattern that cuts nothing": ("prm", ["--dataset.step_split", "x"], ["does not cut"]),
    "errors of sampled traces": (
        "prm_sampled",
        ["--dataset.errors", 0.5],
        ["dataset.errors is not read with dataset.traces: sampled", "synthetic"],
    ),
    "lists of pairs": (
        "reward",
        ["--dataset.list_length", 3],
        ["dataset.list_length is not read with algorithm: reward", "kwise"],
    ),
    "pairs of lists": ("kwise", ["--dataset.pairs", "offline"], ["dataset.pairs is not read with"]),
    "samples of made traces": (
        "prm",
        [*SAMPLED, "--dataset.candidates", 0],
        ["dataset.samples_per_prompt is not read with dataset.traces: synthetic"],
    ),
    "sampled from nobody": (
        "prm",
        ["--dataset.sampled_from", "tiny", "--dataset.candidates", 0],
        ["dataset.sampled_from is not read with dataset.candidates: 0"],
    ),
    "sampled from what is not there": (
        "orm",
        ["--dataset.sampled_from", "outputs/no/model"],
        ["error: dataset.sampled_from: there is no folder 'outputs/no/model'"],
    ),
    "one candidate": ("orm", ["--dataset.candidates", 1], ["dataset.candidates is 1", "0 (none)"]),
    "long lists": ("kwise", ["--dataset.list_length", 9], ["dataset.list_length", "kinds of"]),
    "no language model": ("orm", ["--model_name_or_path", "tiny_untrained"], ["starts from a"]),
    "no rows": ("orm", ["--max_samples", 0], ["max_samples is 0; write 1 or more"]),
    "weights of two classes": (
        "prm",
        ["--class_weights", 1, 2],
        ["class_weights", "not 3 numbers"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(no, name):
    config, words, parts = BAD[name]
    sentence = no(config, *words)
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize("key", ["path", "split", "eval_path", "columns.prompt"])
def test_keys_of_files_are_refused_where_data_are_made(no, key):
    sentence = no("orm", f"--dataset.{key}", "x")
    assert f"dataset.{key.split('.')[0]} is not read with dataset.source: reasoning_gym" in sentence


@pytest.mark.parametrize("key", ["size", "seed", "samples_per_prompt", "candidates", "traces"])
def test_keys_of_made_data_are_refused_with_files(no, tmp_path, key):
    settings = from_file(written(tmp_path, TRACES), f"--dataset.{key}", "sampled")
    if key != "traces":
        settings[-1] = 4
    sentence = no("prm", settings=settings)
    assert f"dataset.{key} is not read with dataset.source: path" in sentence


def test_a_reward_model_as_the_start(finished, no):
    start = ["--model_name_or_path", finished("prm")[0] / "model"]
    assert "is a classifier, which writes no answers" in no("prm", *start)
    sentence = no("orm", *start, "--dataset.sampled_from", "tiny")
    assert "num_labels" in sentence and "model_name_or_path" in sentence


def test_nothing_to_evaluate_on(no, run, tmp_path):
    path, none = written(tmp_path, OUTCOMES), ["--dataset.eval_size", 0]
    sentence = no("orm", settings=from_file(path))
    assert "eval_strategy is steps, but no row is held out" in sentence
    sentence = no("orm", settings=from_file(path, "--dataset.eval_path", path, *none))
    assert "dataset.eval_size is 0; write 1 or more" in sentence
    folder, out = run("orm", "orm", *from_file(path, *SILENT), folder=tmp_path / "without")
    assert "nothing is held out, so nothing was evaluated" in out.splitlines()[-1]
    assert json.loads((folder / "summary.json").read_text())["after"] == {}
    assert not (folder / "reward_report.png").exists()


@pytest.mark.parametrize("config", ["kwise", "orm", "prm"])
def test_without_candidates_only_the_rows_are_judged(run, tmp_path, config):
    recipe, words = WORDS[config]
    words = [*words, *SHORT, "--dataset.candidates", 0, "--per_device_eval_batch_size", 5]
    folder, out = run(recipe, config, *words, folder=tmp_path / "none")
    assert out.splitlines()[-1].startswith("loss " if config == "orm" else HEADLINES[config])
    assert not (folder / "scores.jsonl").exists()
    assert (folder / "reward_report.png").exists() == (config != "orm")
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert "eval_loss" in after and "eval_auc" not in after


def test_neutral_steps_are_no_second_class_where_nothing_is_learned_from_them(refused, tmp_path):
    config = tmp_path / "chapter.yaml"
    base = ROOT / "configs" / "tiny" / "prm.yaml"
    config.write_text(f"extends: {base}\nformulation: chapter\nclass_weights: !unset\n")
    path = written(tmp_path, [{**TRACES[0], "labels": [0, 1]}] * 8)
    sentence = refused("prm", config.with_suffix(""), *from_file(path))
    assert "every label that is not neutral of" in sentence and "is 1" in sentence
    path = written(tmp_path, [{**TRACES[0], "labels": [0, 0]}] * 8)
    sentence = refused("prm", config.with_suffix(""), *from_file(path), folder=tmp_path / "b")
    assert "has no label that is not neutral" in sentence


@pytest.mark.promise
@pytest.mark.parametrize(
    ("recipe", "config", "kind"),
    [
        ("grpo", "grpo_reward", "reward"),
        ("grpo", "grpo_orm", "orm"),
        ("grpo", "grpo_prm", "prm"),
        ("ppo", "ppo_reward", "reward"),
    ],
)
def test_every_kind_of_reward_model_teaches(run, tmp_path, recipe, config, kind):
    trained, _ = run(kind, kind, folder=tmp_path / "reward")
    words = ["--reward_model", trained / "model"]
    folder, _ = run(recipe, config, *words, folder=tmp_path / "policy")
    summary = json.loads((folder / "summary.json").read_text())
    for metric in ("eval_exact_match", "eval_sampled_exact_match"):
        assert summary["after"][metric] >= summary["before"][metric] + 0.15
