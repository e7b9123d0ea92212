"""The figures of a pipeline: reward over KL, and how rewards and KLs are distributed."""

import math
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from rlhf_trl.output import write_whole
from rlhf_trl.pipeline.lineage import Run
from rlhf_trl.pipeline.results import Point, Results
from rlhf_trl.pipeline.runs import curves_of

COLORS = {"right": "tab:blue", "wrong": "tab:orange", "gold unknown": "tab:gray"}
# What the curves of all runs show, with their labels.
PANELS = {
    "eval_exact_match": "exact match, held out",
    "eval_pair_accuracy": "pair accuracy, held out",
    "reward": "reward in training",
    "loss": "loss in training",
    "kl": "KL, as logged",
    "grad_norm": "gradient norm",
}
TICKS = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
)  # nats


def draw_frontier(path: Path, results: Results) -> None:
    """Draw gold and proxy over KL: runs with checkpoints as curves, ends of others as points.

    A thin line is a seed, the thick one the mean of the seeds step by step, and a star its end; the
    bars at a point are standard deviations over seeds.
    """
    from matplotlib.figure import Figure

    labels = {"gold": f"gold: {results.gold}, sampled", "proxy": "proxy: the reward model's score"}
    shown = [name for name in labels if _has(results, name)]
    figure = Figure(figsize=(8, 1.4 + 3.2 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots(max(1, len(shown)), 1, sharex=True, squeeze=False)[:, 0]
    curves = results.with_curve()
    others = [name for name in results.models if name not in curves]
    for axis, name in zip(axes, shown, strict=False):  # one panel stays empty if none is shown
        for number, stage in enumerate(curves):
            _draw_curve(axis, results, stage, name, color=f"C{number}")
        for number, stage in enumerate(others):
            _draw_end(axis, results, stage, name, number + len(curves))
        axis.set_ylabel(labels[name])
        axis.grid(alpha=0.25)
    _scale_by_root(axes[-1])
    reference = results.title(results.reference)
    axes[-1].set_xlabel(f"KL to {reference}, nats per answer, on a square-root scale")
    handles, titles = axes[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside lower center", ncols=2, fontsize="small")
    _save(path, figure)


def _scale_by_root(axis: Any) -> None:
    """Give the KL a square-root scale: most of what is of interest happens at a small one."""
    # slightly negative KLs are rounding; the negative left end keeps the marks at 0 whole
    axis.set_xscale("function", functions=(_root, _square))
    highest = axis.get_xlim()[1]
    axis.set_xlim(-0.0002 * highest, highest)
    ticks = [0.0]
    for tick in TICKS:  # those that leave room for their numbers
        if tick <= highest and math.sqrt(tick) - math.sqrt(ticks[-1]) > 0.07 * math.sqrt(highest):
            ticks.append(tick)
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter("{x:g}")


def _root(x: Any) -> Any:
    """Return the square root, of what is below 0 with the other sign."""
    return np.sign(x) * np.sqrt(np.abs(x))


def _square(x: Any) -> Any:
    """Undo `_root`."""
    return np.sign(x) * np.square(x)


def _has(results: Results, name: str) -> bool:
    """Return whether some model has a number."""
    return any(np.isfinite(answers.mean(name)) for answers in results.answers.values())


def _draw_curve(axis: Any, results: Results, stage: str, name: str, color: str) -> None:
    """Draw a number over KL for the checkpoints of each seed, and the mean of the seeds."""

    def line(points: list[Point]) -> tuple[list[float], list[float]]:
        return [p.answers.mean("kl") for p in points], [p.answers.mean(name) for p in points]

    curves = [results.curve(stage, seed) for seed in results.seeds]
    for points in curves:
        axis.plot(*line(points), color=color, alpha=0.35, linewidth=0.8)
    shared = set.intersection(*({point.step for point in points} for points in curves))
    lines = [line([point for point in points if point.step in shared]) for points in curves]
    mean = np.mean(lines, axis=0)
    axis.plot(*mean, "o-", color=color, markersize=4, label=results.title(stage))
    axis.plot(*mean[:, -1], "*", color=color, markersize=12)


def _draw_end(axis: Any, results: Results, stage: str, name: str, number: int) -> None:
    """Draw the end of a run as a point: the mean over seeds, with bars for their spread."""
    values = np.array([[end.mean("kl"), end.mean(name)] for end in results.ends(stage)])
    spread = values.std(0, ddof=1) if len(values) > 1 else (None, None)
    kl, value = values.mean(0)
    axis.errorbar(
        kl,
        value,
        xerr=spread[0],
        yerr=spread[1],
        fmt="sD^vPXd"[number % 7],
        color=f"C{number}",
        capsize=3,
        markersize=6,
        label=results.title(stage),
    )


def draw_distributions(path: Path, results: Results) -> None:
    """Draw histograms of proxy and KL, right and wrong answers apart: a row for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 1.35 * len(results.models)), layout="constrained")
    axes = figure.subplots(len(results.models), 2, sharex="col", squeeze=False)
    pooled = [_pooled(results, stage) for stage in results.models]
    bins = {  # those of the KL are equally wide on its square-root scale
        "proxy": _edges(np.concatenate([values["proxy"] for values in pooled])),
        "kl": _square(_edges(_root(np.concatenate([values["kl"] for values in pooled])))),
    }
    for row, stage, values in zip(axes, results.models, pooled, strict=True):
        for axis, (name, edges) in zip(row, bins.items(), strict=True):
            _draw_histogram(axis, values[name], values["gold"], edges)
            axis.set_yticks([])
        title = fill(results.title(stage), 22)
        row[0].set_ylabel(title, rotation=0, ha="right", va="center")
    axes[-1, 0].set_xlabel("proxy: the reward model's score")
    axes[-1, 1].set_xlabel("KL, nats per answer, on a square-root scale")
    _scale_by_root(axes[-1, 1])
    by_label = {}  # a model may have right answers only, or wrong ones
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            by_label[label] = handle
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=3)
    _save(path, figure)


def _edges(values: np.ndarray) -> np.ndarray:
    """Return the edges of 50 bins of equal width over the values that apply."""
    return np.histogram_bin_edges(values[np.isfinite(values)], 50)


def _pooled(results: Results, stage: str) -> dict[str, np.ndarray]:
    """Return the numbers of all samples of a model, of all seeds."""
    return {
        name: np.concatenate([answers.values(name).ravel() for answers in results.ends(stage)])
        for name in ("proxy", "gold", "kl")
    }


def _draw_histogram(axis: Any, values: np.ndarray, gold: np.ndarray, bins: Any) -> None:
    """Draw a histogram, right and wrong answers on top of each other."""
    belongs = {"right": gold > 0.5, "wrong": gold <= 0.5, "gold unknown": ~np.isfinite(gold)}
    parts = {kind: values[these & np.isfinite(values)] for kind, these in belongs.items()}
    kinds = [kind for kind, part in parts.items() if part.size]
    if kinds:
        colors = [COLORS[kind] for kind in kinds]
        axis.hist([parts[kind] for kind in kinds], bins, stacked=True, color=colors, label=kinds)


def draw_training(path: Path, results: Results) -> None:
    """Draw what all runs logged over their steps: a panel for each kind of number."""
    from matplotlib.figure import Figure

    curves = {  # of each run, by stage and seed
        (stage, seed): curves_of(Run(results.run(stage, seed)))
        for stage in results.stages
        for seed in results.seeds
    }
    keys = {key for of_run in curves.values() for key in of_run}
    panels = [key for key in PANELS if key in keys]
    figure = Figure(figsize=(9, 1 + 2.4 * max(1, len(panels))), layout="constrained")
    axes = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
    by_label = {}
    for axis, key in zip(axes, panels, strict=False):
        for (stage, _), of_run in curves.items():
            if key not in of_run:
                continue
            points = of_run[key]
            (line,) = axis.plot(
                list(points),
                list(points.values()),
                ".-" if len(points) < 30 else "-",
                color=f"C{list(results.stages).index(stage)}",
                linewidth=1,
                alpha=0.8,
            )
            by_label.setdefault(results.title(stage), line)
        axis.set_ylabel(PANELS[key])
        axis.grid(alpha=0.25)
        if key == "grad_norm":
            axis.set_yscale("log")
    axes[-1].set_xlabel("step")
    figure.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=2)
    _save(path, figure)


def _save(path: Path, figure: Any) -> None:
    write_whole(path, lambda part: figure.savefig(part, dpi=130))
