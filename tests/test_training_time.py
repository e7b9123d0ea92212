"""When a run says that it will be done, and what it says that its time went to."""

import json
from types import SimpleNamespace

import pytest
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from rlhf_trl.run import training_time
from rlhf_trl.run.durations import readable, shares
from rlhf_trl.run.training_time import TrainingTime


class Clock:
    """A clock that stands still but for what a test does."""

    now = 1000.0

    def time(self):
        return self.now

    process_time = time
    localtime = staticmethod(lambda seconds: seconds)
    strftime = staticmethod(lambda form, seconds: f"<{seconds:g}>")


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(training_time, "time", clock)
    return clock


def arguments(**changed):
    """Return what is read of TRL's arguments."""
    values = {
        "resume_from_checkpoint": None,
        "eval_strategy": IntervalStrategy.STEPS,
        "save_strategy": SaveStrategy.NO,
        "gradient_accumulation_steps": 1,
    }
    return SimpleNamespace(**values | changed)


class Run:
    """A training whose parts take the seconds that a test says."""

    def __init__(self, clock, args, steps, generates=True, evaluates=True, skips=False, rounds=0):
        self.clock, self.args = clock, args
        self.state = SimpleNamespace(
            global_step=0,
            max_steps=steps,
            eval_steps=25,
            save_steps=10,
            num_train_epochs=1,
            epoch=0.0,
            is_world_process_zero=True,
            stateful_callbacks={},
        )
        self.trainer = SimpleNamespace(args=args, skips=skips, _rounds=rounds)
        if generates:
            self.trainer._generate = lambda seconds: self.pass_time(seconds)
            self.trainer._calculate_rewards = lambda seconds: self.pass_time(seconds)
        self.time = TrainingTime(self.trainer, evaluates)
        self.tell("on_train_begin")

    def pass_time(self, seconds):
        self.clock.now += seconds

    def tell(self, event):
        getattr(self.time, event)(self.args, self.state, None)

    def step(self, update, generation=0, scoring=0, between=0):
        self.tell("on_step_begin")
        if generation:
            self.trainer._generate(generation)
            self.trainer._calculate_rewards(scoring)
        self.pass_time(update)
        self.tell("on_optimizer_step")
        self.pass_time(between)
        self.state.global_step += 1
        self.tell("on_step_end")

    def evaluate(self, seconds):
        if hasattr(self.trainer, "_generate"):
            self.trainer._generate(seconds / 2)  # which is of no step
            seconds /= 2
        self.pass_time(seconds)
        self.tell("on_evaluate")


def test_a_run_says_after_ten_steps_and_after_a_tenth_when_it_will_be_done(clock, capsys):
    run = Run(clock, arguments(), steps=200)
    run.evaluate(8)
    run.step(30, generation=20, scoring=10)  # warms up, and does not count
    for _ in range(8):
        run.step(2, generation=1, scoring=1)
    assert capsys.readouterr().out == ""
    run.step(2, generation=1, scoring=1)
    first = capsys.readouterr().out
    # 190 steps of 4 s and the evaluations after 25, 50, ... 200
    assert first.startswith("step 10 of 200: about 13 min 44 s left, until ")
    assert f"until <{clock.now + 190 * 4 + 8 * 8:g}> (steps of 4.0 s: " in first
    assert first.endswith("evaluations of 8.0 s, 8 to come)\n")
    for _ in range(9):
        run.step(2, generation=1, scoring=1)
    assert capsys.readouterr().out == ""
    run.step(2, generation=1, scoring=1)
    assert capsys.readouterr().out.startswith("step 20 of 200: about 13 min 4 s left, ")
    for _ in range(80):
        run.step(2, generation=1, scoring=1)
    assert capsys.readouterr().out == ""


def test_where_groups_without_contrast_are_skipped_it_says_a_range(clock, capsys):
    run = Run(clock, arguments(), steps=200, skips=True)
    run.evaluate(8)
    for _ in range(10):
        run.step(3, generation=1, scoring=1)
    line = capsys.readouterr().out
    # 190 steps of 5 s, or of 2 s without any update, and eight evaluations
    least, most = 190 * 2 + 8 * 8, 190 * 5 + 8 * 8
    assert f": about {readable(least)} to {readable(most)} left, until " in line
    assert f"until <{clock.now + least:g}> to <{clock.now + most:g}> (" in line
    assert "update 60 %; the update is shorter the fewer groups have contrast; " in line


def test_where_groups_are_sampled_anew_it_may_take_longer(clock, capsys):
    run = Run(clock, arguments(), steps=20, skips=True, rounds=2)
    for _ in range(2):
        run.step(3, generation=1, scoring=1)
    line = capsys.readouterr().out
    assert "about 1 min 30 s left" in line and "; longer where more groups are sampled anew" in line


def test_evaluations_count_from_the_first_one_on(clock, capsys):
    run = Run(clock, arguments(), steps=50, generates=False)
    for _ in range(5):
        run.step(2)
    said = capsys.readouterr().out
    assert "step 5 of 50: about 1 min 30 s left" in said
    assert "without evaluations, as none has been made yet" in said
    for _ in range(20):
        run.step(2)
    run.evaluate(6)
    said = capsys.readouterr().out  # 25 steps of 2 s and one evaluation
    assert "step 25 of 50: about 56 s left" in said and "evaluations of 6.0 s, 1 to come" in said
    for _ in range(25):
        run.step(2)
    run.evaluate(6)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("strategy", "evaluates", "evaluations"),
    [
        (IntervalStrategy.NO, True, 1),  # at the end all the same
        (IntervalStrategy.NO, False, 0),
        (IntervalStrategy.STEPS, True, 3),  # after 25, 50 and, at the end, 60
        (IntervalStrategy.EPOCH, True, 1),
    ],
)
def test_an_evaluation_at_the_end_counts(clock, capsys, strategy, evaluates, evaluations):
    run = Run(clock, arguments(eval_strategy=strategy), steps=60, evaluates=evaluates)
    run.evaluate(10)
    for _ in range(6):
        run.step(1)
    left = readable(54 + 10 * evaluations)
    assert f"about {left} left" in capsys.readouterr().out


def test_checkpoints_count_once_one_has_been_saved(clock, capsys):
    args = arguments(eval_strategy=IntervalStrategy.NO, save_strategy=SaveStrategy.STEPS)
    run = Run(clock, args, steps=200, evaluates=False)
    for _ in range(10):
        run.step(1)
    assert "about 3 min 10 s left" in capsys.readouterr().out
    run.pass_time(5)
    run.tell("on_save")
    for _ in range(10):
        run.step(1)
    # 180 steps, and checkpoints of 5 s at 20, 30, ... 200
    assert "about 4 min 35 s left" in capsys.readouterr().out


def test_steps_that_use_one_generation_count_together(clock, capsys):
    # each generation is learned from in four optimizer steps
    several = {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2}
    run = Run(clock, arguments(eval_strategy=IntervalStrategy.NO, **several), 100, evaluates=False)
    for number in range(10):
        run.step(1, generation=8 * (number % 4 == 0))
    # of the later five steps, the last four have one generation: 12 s, 3 s each
    assert "about 4 min 30 s left" in capsys.readouterr().out


def test_a_short_run_says_nothing(clock, capsys):
    run = Run(clock, arguments(), steps=19)
    for _ in range(19):
        run.step(1)
    assert capsys.readouterr().out == ""


def test_the_phases_add_up_to_training_and_the_evaluation_after_it(clock):
    run = Run(clock, arguments(), steps=4)
    run.evaluate(10)
    for _ in range(4):
        run.step(3, generation=5, scoring=2, between=1)
    run.pass_time(6)
    run.tell("on_save")
    run.tell("on_train_end")
    run.pass_time(100)  # what is no training
    run.time._lap()
    run.evaluate(10)
    assert run.time.phases() == {
        "generation": 20,
        "scoring": 8,
        "update": 12,
        "evaluation": 20,
        "saving": 6,
        "other": 4,
    }
    assert run.time.so_far()["seconds"] == 60


def test_a_resumed_run_adds_to_what_its_checkpoint_says(clock, tmp_path):
    before = Run(clock, arguments(), steps=4)
    before.step(3, generation=5, scoring=2)
    kept = {"stateful_callbacks": {"TrainingTime": before.time.state()}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(kept))
    after = Run(clock, arguments(resume_from_checkpoint=str(tmp_path)), steps=4)
    after.step(3, generation=5, scoring=2)
    after.tell("on_train_end")
    assert after.time.phases() == {"generation": 10, "scoring": 4, "update": 6}
    assert after.time.so_far()["seconds"] == 20
    older = {"seconds": 7.0, "cpu_seconds": 7.0}  # a checkpoint that does not know of phases
    kept["stateful_callbacks"]["TrainingTime"]["attributes"] = older
    (tmp_path / "trainer_state.json").write_text(json.dumps(kept))
    older = Run(clock, arguments(resume_from_checkpoint=str(tmp_path)), steps=4)
    older.step(2)
    older.tell("on_train_end")
    assert older.time.phases() == {"update": 2, "other": 7}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_a_duration_has_its_largest_units(seconds, text):
    assert readable(seconds) == text


def test_shares_leave_out_what_is_nearly_nothing():
    assert (
        shares({"generation": 60, "scoring": 0.1, "update": 40}) == "generation 60 %, update 40 %"
    )
    assert shares({}) == ""


def test_a_run_leaves_its_phases_in_the_summary_and_runs_shows_them(run, tmp_path, capfd):
    from rlhf_trl.cli import main

    folder = tmp_path / "outputs" / "a"
    words = ["--dataset.size", 64, "--dataset.eval_size", 8, "--max_steps", 2]
    words += ["--num_generations", 4, "--per_device_train_batch_size", 8]
    run("grpo", "grpo", *words, folder=folder)
    summary = json.loads((folder / "summary.json").read_text())
    phases = summary["time"]
    assert {"generation", "update", "evaluation"} <= phases.keys()
    assert phases.keys() <= {*training_time.PHASES} and min(phases.values()) >= 0
    assert summary["train_seconds"] <= sum(phases.values()) + 0.05
    main(["runs", str(tmp_path / "outputs")])
    printed = capfd.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith(str(folder)))
    assert f"{readable(sum(phases.values()))} (" in line and "generation" in line
