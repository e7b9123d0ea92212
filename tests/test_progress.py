"""Which progress bars a run shows, and where."""

import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset, arrow_dataset
from tqdm.auto import tqdm

from rlhf_trl.evaluation import progress
from rlhf_trl.run import train


@pytest.mark.parametrize("shown", [True, False])
def test_bars_of_data_vanish_or_are_not_there(shown, monkeypatch, capsys):
    bars = sys.modules["datasets.utils.tqdm"]
    monkeypatch.setattr(bars, "_hf_datasets_progress_bars_disabled", False)
    monkeypatch.setattr(arrow_dataset, "hf_tqdm", bars.tqdm)
    monkeypatch.setattr(bars, "HF_DATASETS_DISABLE_PROGRESS_BARS", None)  # as the tests have it
    progress.bars_of_data(shown)
    Dataset.from_dict({"x": [*range(9)]}).map(lambda row: row, desc="reading")
    lines = capsys.readouterr().err.split("\r")
    assert any("reading" in line for line in lines) is shown
    assert lines[-1].strip() == ""  # what stays on the screen


@pytest.mark.parametrize(
    ("given", "terminal", "disabled"),
    [({}, True, False), ({}, False, True), ({"disable_tqdm": False}, False, False)],
)
def test_lines_of_the_log_stand_in_place_of_a_bar_where_there_is_no_terminal(
    monkeypatch, given, terminal, disabled
):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    args = SimpleNamespace(disable_tqdm=False, project="p", run_name=None, report_to=[])
    train._decide_settings(SimpleNamespace(trl=args, given=given), train._Start())
    assert args.disable_tqdm is disabled


def test_an_evaluation_is_shown_on_the_bar_of_training_or_vanishes(monkeypatch):
    made = []
    monkeypatch.setattr(progress, "tqdm", lambda **how: made.append(tqdm(**how)) or made[-1])
    bar, state = progress.RewardProgress(), SimpleNamespace(is_world_process_zero=True, max_steps=4)
    bar.on_train_begin(None, state, None)
    bar.on_prediction_step(None, state, None, eval_dataloader=[0, 1])
    assert "evaluating, 1 of 2" in str(bar.training_bar) and not made
    bar.on_evaluate(None, state, None)
    assert "evaluating" not in str(bar.training_bar)
    bar.on_train_end(None, state, None)
    for _ in range(2):
        bar.on_prediction_step(None, state, None, eval_dataloader=[0, 1])
    (evaluating,) = made
    assert (evaluating.n, evaluating.leave) == (2, False)
    bar.on_evaluate(None, state, None)
    assert evaluating.disable  # closed
