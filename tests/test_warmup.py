"""The learning rates of the book's code, against its rule worked out here."""

import json
from pathlib import Path

import pytest
from own_model import write_lines

CONFIG = Path(__file__).parent.parent / "configs" / "own" / "dpo"
ROWS = [{"prompt": w, "chosen": w[::-1], "rejected": w} for w in ("abc", "bcd", "cde", "def")] * 5


def rates(run, tmp_path, schedule, *words):
    path = write_lines(tmp_path / "pairs.jsonl", ROWS)
    given = ["--model_name_or_path", "tiny", "--dataset.path", path, "--dataset.eval_size", 1]
    given += ["--use_cpu", "--report_to", "none", *words]
    given += ["--lr_scheduler_type", schedule, "--learning_rate", 1e-4, "--logging_steps", 1]
    folder, _ = run("dpo", CONFIG, *given)
    log = json.loads((folder / "log.json").read_text())
    return [entry["learning_rate"] / 1e-4 for entry in log if "learning_rate" in entry]


@pytest.mark.parametrize("schedule", ["linear", "constant_with_warmup"])
def test_the_first_step_has_a_rate_above_zero(run, tmp_path, schedule):
    words = ["--max_steps", 9, "--warmup_steps", 0.4, "--warmup_from_zero", "false"]
    expected = [1 / 4, 2 / 4, 3 / 4]  # W = int(3.6)
    if schedule == "linear":
        expected += [(9 - done) / (9 - 3) for done in range(3, 9)]
    else:
        expected += [1] * 6
    assert rates(run, tmp_path, schedule, *words) == pytest.approx(expected)


def test_another_schedule_has_no_such_warm_up(refused, tmp_path):
    words = ["--warmup_from_zero", "false", "--lr_scheduler_type", "cosine"]
    path = write_lines(tmp_path / "pairs.jsonl", ROWS)
    words += ["--model_name_or_path", "tiny", "--dataset.path", path, "--dataset.eval_size", 1]
    sentence = refused("dpo", CONFIG, *words, "--use_cpu")
    assert "warmup_from_zero: false is read with lr_scheduler_type linear or" in sentence
