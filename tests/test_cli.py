"""The `rlhf-trl` command: what it prints is in the installed sources."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import trl

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.cli import main

TRAINER = Path(trl.__file__).parent / "trainer" / "grpo_trainer.py"
ROOT = Path(__file__).parent.parent


def test_the_table_has_a_line_for_every_formulation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["algorithms"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "No room here for: surrogate, over, KL, TRL." in lines
    first = lines.index(
        "reinforce        chapter  batch_mean_baseline  none            sequence_sum"
    )
    assert lines[first + 36] == ""  # 12 policy gradients
    for name in ALGORITHMS:
        assert [line.split()[1] for line in lines if line.startswith(name + " ")] == [
            "chapter",
            "code",
            "trl",
        ]


def test_several_algorithms_stand_side_by_side(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["algorithms", "grpo", "gspo", "grpo"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    chapter = text.partition("\nchapter ")[2].partition("\n\n")[0]
    rows = [re.split("  +", line) for line in chapter.splitlines()]
    assert rows[0] == ["", "grpo", "gspo"]
    assert ["ratio *", "token_ratio", "sequence_ratio"] in rows
    assert ["aggregation", "sequence_mean", "sequence_mean"] in rows
    assert ["reads", "epsilon=0.2,", "epsilon=0.2,"] in rows
    main(["algorithms", "kto", "orm", "--json"])
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["kto", "orm"]


def test_a_row_without_a_formulation_says_why_beside_one_that_has_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["algorithms", "grpo", "ppo"])
    last = capsys.readouterr().out.partition("\ntrl ")[2]
    assert re.search(r"^none \* +- +TRL removed PPO and its value heads in 1.13$", last, re.M)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["evalute", "tiny"], "error: unknown command 'evalute' (did you mean 'evaluate'?)"),
        (["Compare"], "error: unknown command 'Compare' (did you mean 'compare'?)"),
        (["algorithms", "GSPO"], "error: unknown algorithm 'GSPO' (did you mean 'gspo'?)"),
    ],
)
def test_a_mistyped_word_is_suggested(words, sentence):
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert str(refused.value.code).startswith(sentence)


def test_the_version_is_told_with_that_of_trl(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rlhf_trl {version('rlhf_trl')}, TRL {trl.__version__}\n"


def test_json_says_what_the_rows_are_made_of(capsys):
    main(["algorithms", "--json"])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    cispo = rows["cispo"]["formulations"]
    assert cispo["chapter"]["surrogate"] == "clipped_importance_weight"
    assert cispo["chapter"]["aggregation"] == "per_prompt"
    assert rows["cispo_window"]["formulations"]["chapter"]["normalized_over"] == "window"
    assert cispo["code"]["aggregation"] == "sequence_mean"
    assert cispo["chapter"]["trl_settings"]["loss_type"] == "cispo"
    assert rows["maxrl"]["formulations"]["trl"].startswith("TRL divides")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_place_named_exists(capsys, name):
    main(["algorithms", name])
    text = capsys.readouterr().out
    assert "no counterpart" not in text
    ours = re.findall(r"(\w+): (\w+).*\n +.*\n +(rlhf_trl/book/\w+\.py):(\d+)", text)
    least = {"policy_gradient": 4, "direct_alignment": 2, "reward_model": 1, "distillation": 4}
    assert len(ours) >= least[ALGORITHMS[name].family]
    for _, function, file, line in ours:
        assert f"def {function}(" in (ROOT / file).read_text().splitlines()[int(line) - 1]


def test_trls_own_lines_are_the_ones_meant(capsys):
    main(["algorithms", "cispo"])
    text = capsys.readouterr().out
    assert "fixes: std_epsilon=0.0001\n" in text
    line = re.search(r"grpo_trainer\.py:(\d+), weight", text)[1]
    source = TRAINER.read_text().splitlines()
    assert "clamped_ratios" in source[int(line) - 1]


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "dpo": ['if loss_type == "sigmoid":'],
        "cdpo": ['if loss_type == "sigmoid":', 'loss_type == "robust":'],
        "ipo": ['loss_type == "ipo":'],
        "simpo": ["logits = logits - gamma_logratios"],
        "orpo": ["log_odds = (policy_chosen_logps - policy_rejected_logps)"],
        "kto": ['if self.loss_type == "kto":'],
        "dpo_norm": ['loss_type == "sigmoid_norm":'],
        "apo_zero": ['loss_type == "apo_zero":'],
        "apo_down": ['loss_type == "apo_down":'],
        "reward": ["logsigmoid(rewards_chosen - rewards_rejected"],
    }.items(),
)
def test_the_other_trainers_own_lines_are_the_ones_meant(capsys, name, meant):
    main(["algorithms", name])
    found = re.findall(r"Trainer: (\S+\.py):(\d+)", capsys.readouterr().out)
    assert len(found) >= len(meant)
    for (file, line), text in zip(found, meant, strict=False):
        source = (Path(trl.__file__).parent / file).read_text().splitlines()
        assert text in source[int(line) - 1]


def test_the_table_says_which_log_probabilities_are_averaged(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["algorithms"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {tuple(line[:2]): line for line in lines if line}
    assert rows["ipo", "chapter"][3:5] == ["sum", "yes"]
    assert rows["ipo", "trl"][3:5] == ["mean", "yes"]
    assert rows["simpo", "code"][3:] == ["mean", "no", "CPOTrainer", "equal"]
    assert rows["prm", "chapter"][2:4] == ["outcome", "sequence_sum"]


def test_json_spells_out_a_setting_that_depends_on_a_parameter(capsys):
    main(["algorithms", "simpo", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    settings = row["formulations"]["chapter"]["trl_settings"]
    assert settings["simpo_gamma"] == "beta * gamma_beta_ratio"


def test_an_unknown_name_is_one_sentence():
    command = [sys.executable, "-m", "rlhf_trl.cli", "algorithms", "cipso"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.startswith("error: unknown algorithm 'cipso' (did you mean 'cispo'?)")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("algorithms --json --json", "--json is given more than once"),
        ("rollouts no-run --output=a --output b", "--output is given more than once"),
        ("race --algorithms nobody --lr 1 --lr 2", "--lr is given more than once"),  # the recipe's
    ],
)
def test_an_option_that_is_repeated_is_refused(words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    assert str(stop.value.code).startswith(f"error: command line: {sentence}")


def test_a_pipe_that_closes_early_ends_quietly():
    command = [sys.executable, "-m", "rlhf_trl.cli", "algorithms"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0
    ) as run:
        run.stdout.close()
        assert run.stderr.read() == b"" and run.wait() == 0


def test_an_evaluation_prints_no_bars_and_no_notice_of_a_missing_gpu(tmp_path):
    words = ["evaluate", "tiny", "--dataset.eval_size", "4", "--answers", str(tmp_path / "a.jsonl")]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_trl.cli", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert "4 held-out prompts" in done.stdout
    assert "Loading weights" not in done.stderr and "Setting accelerator" not in done.stderr


@pytest.mark.parametrize("words", [["merge", "no/folder", "--traceback"], ["merge", "no/folder"]])
def test_commands_take_traceback(words, capsys):
    with pytest.raises(SystemExit, match=r"^error: "):
        main(words)
    assert ("in merge" in capsys.readouterr().err) == ("--traceback" in words)
