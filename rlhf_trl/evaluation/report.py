"""What a run shows at its end: table, learning curve, warnings, last line, and what comes next."""

import math
import os
import shutil
import sys
from itertools import cycle
from pathlib import Path
from shlex import quote
from typing import Any

from rlhf_trl.evaluation.measured import HEADLINES
from rlhf_trl.evaluation.standstill import ROUNDING
from rlhf_trl.output import RECORD, numbered, write_whole
from rlhf_trl.rollouts.store import trained_with

SAMPLES_SHOWN = 5
# What the learning curve shows of evaluations on an axis from 0 to 1.
SHARES = (
    ("exact_match", "o-", "exact match, greedy"),
    ("sampled_exact_match", "s--", "exact match, sampled"),
    ("gym_score", ":", "gym's own score, greedy"),
    ("pair_accuracy", "-.", "pair accuracy"),
    ("first_error", "-.", "first error found"),
    ("auc", "--", "AUC"),
    ("best_of_n", "o-", "best of n"),
)
WARM = ("tab:orange", "tab:red", "tab:brown", "tab:pink")  # colors of that axis
# What the table of a run without held-out examples shows of its training.
TRAINING = (
    "reward",
    "loss",
    "pair_accuracy",
    "logps/",
    "mean_token_accuracy",
    "completions/mean_length",
)


def untaught(log: list[dict], folder: Path) -> list[str]:
    """Return what a run's log and record say of rewards that taught nothing, a sentence for each.

    `Watch` needs ten logged steps; this tells of a whole run, however short.
    """
    sentences = []
    if _always(log, "frac_reward_zero_std", 1.0):
        sentences.append(
            "all groups had equal rewards in every logged step, so nothing was learned from rewards"
        )
    elif _always(log, "reward_std", 0.0):
        sentences.append(
            "all completions had equal rewards in every logged step, so rewards preferred none"
        )
    zero = _always(log, "rewards/exact_match/mean", 0.0)
    # with tags in any completion, the answers were merely wrong
    if zero and not trained_with(folder / RECORD, "<answer>"):
        sentences.append(
            f"no completion in {RECORD} had <answer> tags, which exact_match reads, so it was 0 "
            "for all; ask for them in dataset.system_prompt, or name another reward"
        )
    return sentences


def _always(log: list[dict], key: str, value: float) -> bool:
    """Return whether a metric was logged, and was never anything but `value`."""
    logged = [entry[key] for entry in log if entry.get(key) is not None]
    return bool(logged) and all(math.isclose(x, value, abs_tol=ROUNDING) for x in logged)


def table(evaluations: dict[int, dict[str, Any]]) -> str:
    """Return the before/after table: every score, then sample answers side by side.

    Each evaluation, by its step, has `metrics` and `answers` (see `answer_lines`). Questions that
    were not asked both times (a run may go on with other data) have no sample.
    """
    ends = _ends(evaluations)
    names = {
        key: key.removeprefix("eval_").replace("_", " ")
        for end in ends.values()
        for key in end["metrics"]
    }
    width = max(24, *map(len, names.values()))
    lines = [" " * width + "".join(f"{f'step {step}':>12}" for step in ends)]
    for key, name in names.items():
        cells = ""
        for end in ends.values():
            # AUC and its like are not defined where only one class is left
            value = end["metrics"].get(key)
            cells += f"{'-':>12}" if value is None else f"{value:12.3f}"
        lines.append(f"{name:{width}}{cells}")
    answers = {  # by step and question
        step: {answer["question"]: answer for answer in end["answers"]}
        for step, end in ends.items()
    }
    first, last = answers[min(answers)], answers[max(answers)]
    questions = [question for question in last if question in first][:SAMPLES_SHOWN]
    if questions:
        lines += ["", "greedy answers to held-out questions"]
    for question in questions:
        right = last[question]["answer"]
        note = "" if right is None else f"   (right: {right})"
        lines.append(f"  {question}{note}")
        for step in answers:
            lines.append(f"    step {step:<6} {answers[step][question]['greedy']!r}")
    return "\n".join(lines)


def _ends(evaluations: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the first and the last evaluation by step, which may be the same one."""
    return {step: evaluations[step] for step in (min(evaluations), max(evaluations))}


def learning_curve(path: Path, log: list[dict], evaluations: dict[int, dict], title: str) -> None:
    """Draw reward (or loss) per step and exact match per evaluation into a PNG.

    Where completions are compared in pairs, log-probabilities of the chosen and of the rejected
    stand below, each on its own scale: on the training batches (pale) and on the held-out pairs.
    """
    from matplotlib.figure import Figure

    key = "reward" if any("reward" in entry for entry in log) else "loss"
    sides = {}
    if any("logps/chosen" in entry for entry in log):
        sides = {"chosen": "tab:green", "rejected": "tab:red"}
    figure = Figure(figsize=(7, 9 if sides else 4), layout="constrained")
    top, *below = figure.subplots(1 + len(sides), 1, squeeze=False)[:, 0]
    dot = "." if len(_points(log, key)[0]) < 30 else ""  # a line of a single point is not visible
    top.plot(*_points(log, key), f"{dot}-", color="tab:blue", label=f"training {key}")
    if any("reward_with_penalties" in entry for entry in log):  # a run with penalties
        points = _points(log, "reward_with_penalties")
        top.plot(*points, f"{dot}:", color="tab:blue", label="training reward with penalties")
    top.set(xlabel="optimizer step", ylabel=key, title=title)
    measured = [{"step": step, **end["metrics"]} for step, end in evaluations.items()]
    if not _draw_shares(top, measured):  # nothing between 0 and 1: in the unit of the key
        for name, style in ((key, "o-"), (f"sampled_{key}", "s--")):
            points = _points(measured, f"eval_{name}")
            top.plot(*points, style, color="tab:orange", label=f"held-out {name}")
    for axis, (side, color) in zip(below, sides.items(), strict=True):
        # without evaluations no points: an empty curve
        points = _points(log, f"eval_logps/{side}") if evaluations else ((), ())
        axis.plot(*_points(log, f"logps/{side}"), f"{dot}-", color=color, alpha=0.4)
        axis.plot(*points, "o-", color=color, label=f"log-probability, {side}")
        axis.set(xlabel="optimizer step", ylabel=f"{side}, nats")
    for axis in figure.axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    if evaluations:
        figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    write_whole(path, lambda p: figure.savefig(p, dpi=130))


def _draw_shares(left: Any, measured: list[dict]) -> bool:
    """Draw what was measured of SHARES on an axis of its own; return whether there was anything.

    `left` is the axis of the training curve, and `measured` a line of metrics for each evaluation.
    With two axes, the labels of each get the color of its lines.
    """
    curves = []
    for name, style, label in SHARES:
        steps, values = _points(measured, f"eval_{name}")
        if steps:
            curves.append((steps, values, style, label))
    if not curves:
        return False
    right = left.twinx()
    for curve, color in zip(curves, cycle(WARM), strict=False):
        steps, values, style, label = curve
        right.plot(steps, values, style, color=color, label=label)
    right.set(ylabel="held out", ylim=(0, 1.02))
    for axis, color in ((left, "tab:blue"), (right, WARM[0])):
        axis.yaxis.label.set_color(color)
        axis.tick_params(axis="y", colors=color)
    return True


def _points(log: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a metric, where it was logged."""
    logged = [entry for entry in log if entry.get(key) is not None]
    return [entry["step"] for entry in logged], [entry[key] for entry in logged]


def training_metrics(log: list[dict]) -> dict[int, dict[str, Any]]:
    """Return the first and the last log of training with a headline, in the form of evaluations.

    The Trainer's last log, its summary, has no loss. TRL adds to it what was measured since the
    log before, if anything, so that it may have a headline or none.
    """
    logged = [entry for entry in log if entry.keys() & HEADLINES.keys()]
    return {
        entry["step"]: {
            "metrics": {key: value for key, value in entry.items() if key.startswith(TRAINING)},
            "answers": [],
        }
        for entry in (logged[:1] + logged[-1:])
    }


def headline(evaluations: dict[int, dict], tasks: set[str], seed: int) -> str:
    """Return the last line of a run: its first and last value of the most telling metric.

    Args:
        evaluations: by step; or, if nothing is held out, `training_metrics`, whose names do not
            begin with "eval_".
        tasks: the gym's tasks whose questions were asked.
        seed: of the run.
    """
    if not evaluations:
        return f"trained with seed {seed}; nothing is held out or logged"
    # of the first and the last evaluation, or of the only one
    ends = [end["metrics"] for end in _ends(evaluations).values()]
    measured = ends[0].keys() & ends[-1].keys()
    is_held_out = any(key.startswith("eval_") for key in measured)
    prefix = "eval_" if is_held_out else ""
    # the last resort is the share of answers cut off, which every evaluation by answering has
    names = {f"{prefix}{key}": name for key, name in {**HEADLINES, "cut_off": "cut off"}.items()}
    key = next(key for key in names if key in measured)
    values = " -> ".join(f"{end[key]:.3f}" for end in ends)
    count = len(evaluations[max(evaluations)]["answers"])
    noun = "words" if tasks == {"spell_backward"} else "questions"  # a question there is a word
    conditions = f"seed {seed}"
    if count:
        conditions = f"greedy, {count} held-out {noun}, seed {seed}"
    elif not is_held_out:
        conditions = f"of training; seed {seed}"
    line = f"{names[key]} {values} ({conditions})"
    return line if is_held_out else f"{line}; nothing is held out, so nothing was evaluated"


def next_steps(folder: str, start: str, steps: int, prompt: Any, adapter: bool) -> str:
    """Return what can be done with a run, a line for each.

    Args:
        folder: the run's.
        start: the model that it started from.
        steps: optimizer steps that it took.
        prompt: an example of what to ask its model; None for a reward model's.
        adapter: whether it has left an adapter.
    """
    command, run, model = command_line(), quote(folder), f"{folder}/model"
    lines = {}
    if prompt is None:
        lines["learn from it"] = (
            f"as in configs/tiny/grpo_reward.yaml, with --reward_model {quote(model)}"
        )
        if Path(folder, "scores.jsonl").exists():
            lines["compare it"] = f"{command} best-of-n {run}"
    else:
        lines["talk to it"] = f"{command} chat {run}"
        lines["evaluate it"] = f"{command} evaluate {quote(start)} {run}"
        if adapter:
            lines["merge it"] = f"{command} merge {run}"
        load = f"answer = pipeline('text-generation', {model!r}, do_sample=False)"
        lines["in Python"] = f"from transformers import pipeline; {load}; print(answer({prompt!r}))"
    if numbered(Path(folder), "checkpoint-"):
        lines["train on"] = (
            "the same command with --resume_from_checkpoint auto, and "
            f"--max_steps {2 * steps} in place of {steps}; the learning rate then follows the "
            "longer schedule"
        )
    else:
        lines["train on"] = "possible after a run with --save_strategy steps"
    return "\n".join(f"  {f'{name}:':15}{line}" for name, line in lines.items())


def command_line() -> str:
    """Return what to type for this installation's `rlhf-trl`, whether it is on the PATH or not."""
    installed = Path(sys.executable).with_name("rlhf-trl")
    if not installed.is_file():
        return f"{quote(_short_path(sys.executable))} -m rlhf_trl.cli"
    on_path = shutil.which("rlhf-trl")
    if on_path and Path(on_path).samefile(installed):
        return "rlhf-trl"
    return quote(_short_path(str(installed)))


def _short_path(path: str) -> str:
    """Return a path as it is reached from here, where it lies below, or else from the root."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative
