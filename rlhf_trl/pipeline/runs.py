"""`rlhf-trl runs`: a line for each run in a folder, and two runs side by side."""

import json
import sys
from datetime import datetime
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import tables
from rlhf_trl.evaluation.measured import HEADLINES, read_evaluations
from rlhf_trl.output import numbered
from rlhf_trl.pipeline.lineage import Run, is_run, leftovers, runs_in
from rlhf_trl.pipeline.sizes import readable, size_of
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.config_types import show
from rlhf_trl.run.differences import differences
from rlhf_trl.run.durations import readable as readable_duration
from rlhf_trl.run.durations import shares
from rlhf_trl.run.folders import configs_of
from rlhf_trl.run.resuming import RESUMING

SHOWN = 40  # steps of two curves that are printed, at most
TRAINING = ("reward", "loss")  # what curves show of training where nothing was evaluated


def describe(run: Run) -> dict[str, Any]:
    """Return what a line shows of a run, for programs.

    `time` is the seconds of each phase of `durations.PHASES`, null of a run of an earlier version;
    `before` and `after` are of the first metric of `HEADLINES` that was measured, null if none was;
    `date` is when it ended, or, if it has not, when it began.
    """
    ends = [run.summary.get("before") or {}, run.summary.get("after") or {}]
    if not run.summary:
        measured = [evaluation["metrics"] for evaluation in _evaluations(run).values()]
        ends = [*measured[:1], *measured[-1:]]  # neither, if nothing was measured
    key = next((key for key in HEADLINES if any(f"eval_{key}" in end for end in ends)), None)
    values = [end.get(f"eval_{key}") for end in ends] or [None]
    steps = run.summary.get("steps")
    if steps is None:
        steps = max([0, *numbered(run.folder, "checkpoint-"), *_evaluations(run)])
    dated = run.folder / ("summary.json" if run.summary else "config.yaml")
    return {
        "run": str(run.folder),
        "state": run.state,
        "algorithm": run.algorithm,
        "steps": steps,
        "seed": run.summary.get("seed", run.config.get("seed")),
        "metric": HEADLINES.get(key),
        "before": values[0],
        "after": values[-1],
        "time": run.summary.get("time"),
        "bytes": size_of(run.folder),
        "date": datetime.fromtimestamp(dated.stat().st_mtime).isoformat(" ", "minutes"),
    }


def listing(folder: Path) -> dict[str, Any]:
    """Return what is known of the runs in a folder, and what deletions have left there."""
    described = [describe(run) for run in runs_in(folder)]
    return {
        "folder": str(folder),
        "runs": described,
        "bytes": sum(entry["bytes"] for entry in described),
        "leftovers": [str(path) for path in leftovers(folder)],
    }


def table(content: dict[str, Any]) -> str:
    """Write what `listing` returns: a line for each run, the total, and what is left over."""
    lines = []
    for entry in content["runs"]:
        ends = [entry[key] for key in ("before", "after") if entry[key] is not None]
        result = " -> ".join(f"{value:.3f}" for value in ends)
        shown = {key: str(entry[key]) for key in ("run", "state", "algorithm", "steps", "seed")}
        shown["before -> after"] = f"{entry['metric']} {result}" if ends else "-"
        phases = entry["time"] or {}
        total = readable_duration(sum(phases.values()))
        shown["time"] = f"{total} ({shares(phases)})" if phases else "-"
        lines.append({**shown, "size": readable(entry["bytes"]), "date": entry["date"]})
    count = len(lines)
    parts = [f"{count} {'run' if count == 1 else 'runs'}, {readable(content['bytes'])}"]
    if lines:
        parts.insert(0, tables.text(lines, width=sys.maxsize))  # each run on one line
    if content["leftovers"]:
        left = ", ".join(content["leftovers"])
        parts.append(
            f"left by a deletion that was ended: {left}; rlhf-trl runs {content['folder']} "
            "--delete --yes removes it"
        )
    return "\n\n".join(parts)


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return the fields that differ between two runs as they ended, and a curve of both.

    `changes` are those that a resume changed, of each run and by the step that it went on from. The
    curve is of the first metric that both have measured in evaluation, else in training; its
    `points` are step and both values, null where one was not measured.
    """
    for folder in (first, second):
        if not is_run(folder):
            raise InputError(f"--compare: {folder} is not the folder of a run; name two runs.")
    runs = [Run(first), Run(second)]
    settings = [_settings(run) for run in runs]
    changed = differences(*[[*by_step.values()][-1] for by_step in settings])
    curves = [curves_of(run) for run in runs]
    keys = [f"eval_{key}" for key in HEADLINES] + list(TRAINING)
    key = next((key for key in keys if key in curves[0] and key in curves[1]), None)
    one, other = [curve.get(key, {}) for curve in curves]
    points = [[step, one.get(step), other.get(step)] for step in sorted(one.keys() | other.keys())]
    return {
        "runs": [str(first), str(second)],
        "fields": changed,
        "changes": [_changes(by_step) for by_step in settings],
        "metric": key,
        "points": points,
    }


def _settings(run: Run) -> dict[int, dict[str, Any]]:
    """Return what a run was configured with, by the step after which it followed that.

    Fields that say nothing about the training are left out.
    """
    settings = {}
    for step, path in configs_of(run.folder).items():
        config = read_config(path)
        settings[step] = {
            key: value for key, value in config.items() if key not in ("output_dir", *RESUMING)
        }
    return settings


def _changes(settings: dict[int, dict[str, Any]]) -> dict[int, dict[str, tuple[Any, Any]]]:
    """Return the fields that changed after a step, with both values, by step."""
    changes = {}
    for before, step in pairwise(settings):
        changed = differences(settings[before], settings[step])
        if changed:
            changes[step] = changed
    return changes


def comparison(compared: dict[str, Any]) -> str:
    """Write a comparison as text; of long curves, evenly spread steps and the last one."""
    first, second = compared["runs"]
    count = len(compared["fields"])
    parts = [f"{first} and {second} differ in {count} {'field' if count == 1 else 'fields'}"]
    if count:
        fields = [
            {"field": key, "first": _shown(old), "second": _shown(new)}
            for key, (old, new) in compared["fields"].items()
        ]
        parts.append(tables.side_by_side(fields))
    for name, changes in zip(compared["runs"], compared["changes"], strict=True):
        parts += [_resumed(name, step, changed) for step, changed in changes.items()]
    points = compared["points"]
    if not points:
        return "\n\n".join([*parts, "no metric was measured in both"])
    every = ceil(len(points) / SHOWN)
    shown = [point for n, point in enumerate(points) if n % every == 0 or n == len(points) - 1]
    lines = []
    for step, *values in shown:
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        lines.append({"step": str(step), "first": cells[0], "second": cells[1]})
    return "\n\n".join([*parts, f"{compared['metric']} by step", tables.text(lines)])


def _resumed(name: str, step: int, changed: dict[str, tuple[Any, Any]]) -> str:
    """Say with which settings a run went on after a step."""
    texts = [f"{key}: {_shown(old)} -> {_shown(new)}" for key, (old, new) in changed.items()]
    sentence = f"{name} was resumed after step {step} with {'; '.join(texts)}"
    return "\n".join(tables.wrapped(sentence))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def _evaluations(run: Run) -> dict[int, dict[str, Any]]:
    return read_evaluations(run.folder / "evaluations")


def curves_of(run: Run) -> dict[str, dict[int, float]]:
    """Return, by metric, its values by step: of evaluations, and of the log of training."""
    entries = [{"step": step, **end["metrics"]} for step, end in _evaluations(run).items()]
    log = run.folder / "log.json"
    if log.is_file():  # it has ended
        entries += json.loads(log.read_text(encoding="utf-8"))
    curves: dict[str, dict[int, float]] = {}
    for entry in entries:
        for key, value in entry.items():
            if isinstance(value, int | float):
                curves.setdefault(key, {})[entry["step"]] = value
    return curves
