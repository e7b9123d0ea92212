"""What a training spends its time on, and when it will be done."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from math import ceil
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from rlhf_trl.run.durations import PHASES, readable, shares

TIMED = {"_generate": "generation", "_calculate_rewards": "scoring"}
"""By the trainer's method, the phase of a step that it is; the rest of a step is "update".

TRL's own profiling measures some of these, and hands them to wandb, mlflow and trackio alone.
"""
FIRST_STEPS = 10  # after these, and after a tenth of all, a run says when it will be done
SHORTEST = 20  # steps of a run that says so


class TrainingTime(TrainerCallback, ExportableState):
    """Seconds of training up to now, with those before the checkpoint that a run goes on from.

    Checkpoints hold them: in `trainer_state.json`, as transformers keeps what callbacks know.
    """

    def __init__(self, trainer: Any, evaluates: bool):
        """Begin to measure.

        Args:
            trainer: about to train.
            evaluates: whether the run ends with an evaluation.
        """
        self._args, self._evaluates = trainer.args, evaluates
        self._samples_anew = getattr(trainer, "_rounds", 0) > 0  # of dynamic sampling
        # whether groups without contrast, of which there may be more and more, shorten the update
        self._may_shrink = getattr(trainer, "skips", False) and not self._samples_anew
        self._before = Counter(_of_checkpoint(trainer.args.resume_from_checkpoint))
        self._phases: Counter[str] = Counter()  # seconds of this start
        self._started = self._mark = time.time()
        self._cpu_started = time.process_time()
        self._ended: dict[str, float] | None = None  # seconds, once training has
        self._step_began: float | None = None  # while a step runs
        self._spans: list[float] = []  # seconds of each step, with what else was done meanwhile
        self._last: dict[str, float] = {}  # seconds of the newest evaluation, and saving
        self._after = 0.0  # seconds of the evaluation after training
        self._is_said = False
        for method, phase in TIMED.items():
            if hasattr(trainer, method):
                setattr(trainer, method, self._timed(getattr(trainer, method), phase))

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Return a method of the trainer that also adds to a phase the seconds that it takes."""

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            try:
                return method(*args, **kwargs)
            finally:
                if self._step_began is not None:  # and not in an evaluation
                    self._phases[phase] += time.time() - began

        return timed

    def so_far(self) -> dict[str, float]:
        """Return the `seconds` and this process's `cpu_seconds`, and the seconds of each phase.

        The first two stand still when training ends; an evaluation after it is of the phases.
        """
        seconds = self._ended or self._clocks()
        return dict(self._before + Counter(seconds) + self._phases)

    def _clocks(self) -> dict[str, float]:
        return {
            "seconds": time.time() - self._started,
            "cpu_seconds": time.process_time() - self._cpu_started,
        }

    def phases(self) -> dict[str, float]:
        """Return the seconds of all phases, in their order; what is none of them is "other"."""
        sums = Counter(self.so_far())
        known = sum(sums[name] for name in PHASES)
        sums["other"] = sums["seconds"] + self._after - known
        return {name: round(sums[name], 2) for name in PHASES if sums[name] >= 0.01}

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": self.so_far()}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a place in the state, which one of a checkpoint of an earlier version lacks."""
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self._mark = time.time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note when a step begins."""
        self._step_began = time.time()
        self._timed_before = self._phases["generation"] + self._phases["scoring"]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count as the update what of the step was neither generation nor scoring."""
        if self._step_began is not None:
            timed = self._phases["generation"] + self._phases["scoring"] - self._timed_before
            self._phases["update"] += time.time() - self._step_began - timed
        self._step_began = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say when the run will be done, once enough steps have been seen."""
        self._spans.append(self._lap())
        tenth = ceil(state.max_steps / 10)
        if len(self._spans) in (min(FIRST_STEPS, tenth), tenth) and state.max_steps >= SHORTEST:
            self._say(state, done=state.global_step - 1)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an evaluation; the first one tells what those to come will take."""
        is_first = "evaluation" not in self._last
        self._last["evaluation"] = seconds = self._lap()
        self._phases["evaluation"] += seconds
        if self._ended is not None:
            self._after += seconds
        elif is_first and self._is_said:
            self._say(state, done=state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the saving of a checkpoint."""
        self._last["saving"] = seconds = self._lap()
        self._phases["saving"] += seconds

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock of training."""
        self._ended = self._clocks()
        self._lap()

    def _lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._mark = self._mark, time.time()
        return self._mark - before

    def _say(self, state: Any, done: int) -> None:
        """Print when the run will be done, and what its steps take.

        Args:
            state: of the trainer.
            done: the last step that has been evaluated and saved where that was to be.
        """
        self._is_said = True
        args, last = self._args, self._last
        evaluations = _times_left(args.eval_strategy, state.eval_steps, state, done)
        if args.eval_strategy == IntervalStrategy.NO and self._evaluates:
            evaluations = 1  # with which a run ends all the same
        saves = _times_left(args.save_strategy, state.save_steps, state, done)
        step = self._seconds_of_step()
        steps_left = state.max_steps - state.global_step
        most = steps_left * step
        most += evaluations * last.get("evaluation", 0.0) + saves * last.get("saving", 0.0)
        durations = [most]
        if self._may_shrink:  # to no update at all
            phases = self._phases_of_steps()
            update = step * phases["update"] / sum(phases.values())
            durations = [most - steps_left * update, most]
        if state.is_world_process_zero:
            left = " to ".join(map(readable, durations))
            ends = [time.localtime(time.time() + seconds) for seconds in durations]
            until = " to ".join(time.strftime("%H:%M:%S", end) for end in ends)
            tqdm.write(
                f"step {state.global_step} of {state.max_steps}: about {left} left, "
                f"until {until} ({'; '.join(self._reasons(step, evaluations))})"
            )
            sys.stdout.flush()

    def _phases_of_steps(self) -> dict[str, float]:
        """Return the seconds of the phases that make a step."""
        return {name: self._phases[name] for name in ("generation", "scoring", "update")}

    def _reasons(self, step: float, evaluations: int) -> list[str]:
        """Return what the time that is left is made of: steps, and evaluations to come."""
        reasons = [f"steps of {readable(step)}"]
        if self._phases["generation"]:
            reasons[0] += f": {shares(self._phases_of_steps())}"
        if self._may_shrink:
            reasons.append("the update is shorter the fewer groups have contrast")
        elif self._samples_anew:
            reasons.append("longer where more groups are sampled anew")
        if evaluations and "evaluation" in self._last:
            seconds = readable(self._last["evaluation"])
            reasons.append(f"evaluations of {seconds}, {evaluations} to come")
        elif evaluations:
            reasons.append("without evaluations, as none has been made yet")
        return reasons

    def _seconds_of_step(self) -> float:
        """Return the mean of the later half of the steps, or of whole generations in it.

        The first ones warm up, and groups without contrast may already become more.
        """
        cycle = 1
        if hasattr(self._args, "steps_per_generation"):  # each generation is learned from so often
            updates = self._args.num_iterations * self._args.steps_per_generation
            cycle = ceil(updates / self._args.gradient_accumulation_steps)
        later_half = ceil(len(self._spans) / 2)
        count = later_half // cycle * cycle or min(cycle, len(self._spans))
        return sum(self._spans[-count:]) / count


def _of_checkpoint(checkpoint: str | None) -> dict[str, float]:
    """Return what a checkpoint keeps of `TrainingTime`; {} without one, or of an old one."""
    if checkpoint is None:
        return {}
    state = json.loads(Path(checkpoint, "trainer_state.json").read_text())
    return state["stateful_callbacks"].get(TrainingTime.__name__, {}).get("attributes", {})


def _times_left(strategy: Any, every: int, state: Any, done: int) -> int:
    """Return how often what a strategy says will be done after the step `done`, at the end, too."""
    if strategy == IntervalStrategy.STEPS:
        return ceil(state.max_steps / every) - done // every
    if strategy == IntervalStrategy.EPOCH:
        return max(1, ceil(state.num_train_epochs - state.epoch))
    return 0
