"""Rewards with and without penalties: both stand, by the same names, wherever rewards are told."""

import json
import re

import pytest
from policy_gradient_cases import CACHE, END, LIMIT, build, is_right, is_shaped
from store_cases import rows_of

from rlhf_trl import cli
from rlhf_trl.compare.measure import accumulate, batches
from rlhf_trl.output import RECORD
from rlhf_trl.rollouts.generate import Completion
from rlhf_trl.rollouts.page import write_page
from rlhf_trl.run import race

NAMES = ["overlong_penalty", "missing_eos_penalty", "reward_with_penalties"]
PENALTY = 0.5  # of a completion that was cut off


def overlong(tokens, limit=LIMIT, cache=CACHE):
    return -min(max((tokens - (limit - cache)) / cache, 0), 1)


def by_hand(ids):
    """Return reward, both penalties and the reward with them."""
    reward = is_right(ids) + 0.5 * is_shaped(ids)
    penalties = overlong(len(ids)), 0 if ids[-1] == END else -PENALTY
    return reward, *penalties, reward + sum(penalties)


def read(batch):
    pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def test_training_logs_the_reward_and_what_penalties_make_of_it():
    trainer = build("dapo", missing_eos_penalty=PENALTY, per_device_train_batch_size=16)
    _, [batch] = accumulate(trainer, batches(trainer))
    expected = [by_hand(ids) for ids in read(batch)]
    columns = dict(zip(["reward", *NAMES], zip(*expected, strict=True), strict=True))
    assert len(set(columns["missing_eos_penalty"])) == 2
    assert len(set(columns["overlong_penalty"])) > 2
    metrics, table = trainer._metrics["train"], trainer._logs["extra"]
    for name, values in columns.items():
        assert metrics[name] == pytest.approx([sum(values) / 16], abs=1e-6), name
    for name in NAMES:  # of the table of completions, which is not shuffled
        assert sorted(table[name]) == pytest.approx(sorted(columns[name])), name


def test_runs_without_penalties_log_none():
    trainer = build("grpo")
    accumulate(trainer, batches(trainer))
    assert not {*NAMES} & {*trainer._metrics["train"], *trainer._logs["extra"]}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_groups_that_differ_by_a_penalty_alone_are_not_counted_as_equal(mode):
    asked = []

    def right(prompts, **_):
        return [1.0] * len(prompts)

    def answer(prompt_ids, index, call):
        if prompt_ids not in asked:
            asked.append(prompt_ids)
        long = asked.index(prompt_ids) == 2 and index == 3  # one completion of one group
        return [7] * LIMIT if long else [7, END]

    trainer = build("dapo", answer=answer, rewards=[right], reward_weights=[1.0])
    trainer.model.train(mode == "train")
    output = trainer._generate_and_score_completions(
        [trainer.train_dataset[n // 4] for n in range(16)]
    )
    groups = output["advantages"].view(-1, 4)
    assert [bool(group.any()) for group in groups] == [False, False, True, False]
    assert trainer._metrics[mode]["frac_reward_zero_std"] == [0.75]


def test_held_out_answers_have_both():
    trainer = build("dapo", missing_eos_penalty=PENALTY)
    answers = [[7] * LIMIT, [8, 9, END], [10] * (LIMIT - 2) + [END]]
    said = [Completion(text="x", ids=ids, finished=ids[-1] == END) for ids in answers]
    trainer.scores = {}
    scores = trainer.judge([trainer.train_dataset[n] for n in range(3)], said)
    expected = zip(*map(by_hand, answers), strict=True)
    for name, values in zip(["reward", *NAMES], expected, strict=True):
        assert scores[name] == pytest.approx(values), name


def test_a_run_tells_both_everywhere(run, tmp_path, capfd, monkeypatch):
    """log.json, record, evaluations, page, race and `evaluate`, from tokens of the record."""
    words = ["--dataset.size", 40, "--dataset.eval_size", 8, "--num_generations", 4]
    words += ["--per_device_train_batch_size", 8, "--max_steps", 2, "--eval_steps", 2]
    words += ["--missing_eos_penalty", PENALTY, "--dynamic_sampling_rounds", 0]
    words += ["--max_completion_length", 12, "--soft_punish_cache", 8]
    folder, out = run("grpo", "dapo", *words)
    log = json.loads((folder / "log.json").read_text())
    summary = json.loads((folder / "summary.json").read_text())

    def means(split, step):
        rows = [row for row in rows_of(folder / RECORD, split) if row["step"] == step]
        columns = {"reward": [], **{name: [] for name in NAMES}}
        for row in rows:
            reward = row["rewards"]["exact_match"] + 0.5 * row["rewards"]["format"]
            penalties = overlong(row["tokens"], 12, 8), 0 if row["finished"] else -PENALTY
            told = reward, *penalties, reward + sum(penalties)
            for name, value in zip(columns, told, strict=True):
                columns[name].append(value)
                known = row["reward"] if name == "reward" else row["rewards"][name]
                assert known == pytest.approx(value, abs=1e-6)
        assert any(columns["overlong_penalty"])
        return {name: sum(values) / len(values) for name, values in columns.items()}

    for step in (0, 1):
        logged = next(entry for entry in log if entry["step"] == step + 1 and "reward" in entry)
        expected = means("train", step)
        assert {name: logged[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    for how, infix in (("greedy", ""), ("sampled", "sampled_")):
        expected = {f"eval_{infix}{name}": v for name, v in means(f"eval-{how}", 2).items()}
        told = {name: summary["after"][name] for name in expected}
        assert told == pytest.approx(expected, abs=1e-6)
    assert re.search(r"^reward with penalties +-?\d", out, re.MULTILINE)

    write_page([folder], tmp_path / "page.html")
    for name in NAMES:
        assert f'"{name}"' in (tmp_path / "page.html").read_text()

    result = race._result_of(folder)
    (line,) = race.table({"dapo": [result]})
    logged = [entry["reward_with_penalties"] for entry in log if "reward_with_penalties" in entry]
    assert line["with penalties"] == f"{sum(logged) / len(logged):.3f}"

    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    cli.main(["evaluate", str(folder), "--json"])
    told = json.loads(capfd.readouterr().out)["models"][str(folder)]
    for name in NAMES:
        for infix in ("", "sampled_"):
            key = f"eval_{infix}{name}"
            assert told[key]["value"] == pytest.approx(summary["after"][key], abs=1e-6), key


def test_a_race_without_penalties_has_no_such_column():
    run = {"eval_exact_match": 0.5, "reward": 0.5, "train_cpu_seconds": 1.0}
    run |= {"questions": 8, "seen": 160, "seen_kind": "completions"}
    assert "with penalties" not in race.table({"grpo": [run]})[0]
    lines = race.table({"grpo": [run], "dapo": [run | {"reward_with_penalties": 0.25}]})
    assert [line["with penalties"] for line in lines] == ["-", "0.250"]


def test_no_reward_takes_the_name_of_a_penalty(refused, tmp_path, monkeypatch):
    (tmp_path / "mine_of_penalties.py").write_text(
        "def overlong_penalty(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--reward_funcs", "exact_match", "mine_of_penalties.overlong_penalty"]
    words += ["--reward_weights", "1.0", "1.0"]
    assert "'overlong_penalty' is what logs call another number" in refused("grpo", "dapo", *words)
