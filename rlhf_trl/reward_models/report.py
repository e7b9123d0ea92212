"""The figure of a reward model's scores."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_trl.errors import InputError
from rlhf_trl.output import write_lines, write_whole
from rlhf_trl.reward_models import metrics

SCORES = "scores.jsonl"  # of a run: every candidate, and how it was scored
CANDIDATE_COLUMNS = ("prompt", "completion", "answer", "task", "label", "finished")
COLORS = {
    **dict.fromkeys(("chosen", "right", "good"), "tab:green"),
    **dict.fromkeys(("rejected", "wrong", "bad"), "tab:red"),
    "neutral": "tab:gray",
}


Panel = Callable[[Any], None]  # draws on a matplotlib axis


def write_candidates(
    folder: Path, rows: Iterable[Mapping[str, Any]], scores: Iterable[Mapping[str, float]]
) -> None:
    """Write labeled answers with their scores by name, for `rlhf-trl best-of-n`."""
    lines = []
    for row, own_scores in zip(rows, scores, strict=True):
        line = {name: row[name] for name in CANDIDATE_COLUMNS if name in row}
        lines.append({**line, "scores": own_scores})
    write_lines(folder / SCORES, lines)


def draw_reward_report(
    path: str | Path,
    title: str,
    *,
    pairs: tuple[Any, Any] | None = None,
    candidates: tuple[Any, Any, Sequence[int]] | None = None,
    steps: tuple[Sequence[Sequence[float]], Sequence[Any], Sequence[Any]] | None = None,
    selecting: bool = False,
) -> None:
    """Draw a PNG with panels for what is given: pairs, candidates or steps of traces.

    Scores of candidates that all lie between 0 and 1 are taken for probabilities of being right,
    and get a calibration unless `steps` has one.

    Args:
        path: of the PNG.
        title: above the panels.
        pairs: rewards of chosen and of rejected completions, (N,) each.
        candidates: scores, labels (whether an answer is right) and prompt ids, (N,) each.
        steps: for each trace, of each of its steps: the probability of "good", the predicted class
            and the true class.
        selecting: whether the scores select answers; their `coverage` replaces a calibration.

    Raises:
        InputError: there is nothing to draw.
    """
    panels: list[Panel] = []
    if pairs is not None and len(pairs[0]):
        panels += _panels_of_pairs(*pairs)
    if candidates is not None and len(candidates[0]):
        panels += _panels_of_candidates(*candidates, selecting=selecting, calibrated=steps is None)
    if steps is not None:
        _, _, classes_of_traces = steps
        if any(map(len, classes_of_traces)):  # at least one trace has steps
            panels += _panels_of_steps(*steps)
    if not panels:
        raise InputError(f"{path}: there are no scores to draw; evaluate on at least one row.")
    from matplotlib.figure import Figure

    columns = 2 if len(panels) in (2, 4) else 3  # 2 columns leave no place empty, 3 would
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.suptitle(title)
    for axis, draw in zip(axes.flat, panels, strict=False):
        draw(axis)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    write_whole(path, lambda p: figure.savefig(p, dpi=130))


def _panels_of_pairs(chosen: Any, rejected: Any) -> list[Panel]:
    """Return the panels of pairs: distribution and calibration."""
    sides = {"chosen": np.asarray(chosen), "rejected": np.asarray(rejected)}
    fit = metrics.pair_calibration(chosen, rejected)
    return [
        partial(_distribution, label="reward", sides=sides),
        partial(_calibration, event="the first of two wins", fit=fit),
    ]


def _panels_of_candidates(
    scores: Any, labels: Any, groups: Sequence[int], selecting: bool, calibrated: bool
) -> list[Panel]:
    """Return the panels of candidates: distribution, coverage or calibration, best-of-n.

    A calibration is drawn if `calibrated` asks for one and all scores lie between 0 and 1, so that
    they may be probabilities.
    """
    scores, labels = metrics.finite(scores, "scores"), np.asarray(labels, bool)
    sides = {"right": scores[labels], "wrong": scores[~labels]}
    panels = [partial(_distribution, label="score", sides=sides)]
    if selecting:
        panels.append(partial(_coverage, scores=scores, labels=labels, groups=groups))
    elif calibrated and scores.min() >= 0 and scores.max() <= 1:
        fit = metrics.calibration(scores, labels)
        panels.append(partial(_calibration, event="right", fit=fit))
    # with labels as scores, a right candidate is chosen; with equal scores, any candidate
    scores_by_curve = {"oracle": labels, "this model": scores, "random": np.zeros(len(labels))}
    sizes = metrics.budgets(groups)
    curves = {
        name: metrics.ranking_by_budget(scores_of_curve, labels, groups, sizes)
        for name, scores_of_curve in scores_by_curve.items()
    }
    panels.append(partial(_best_of_n, curves=curves))
    return panels


def _panels_of_steps(
    probabilities: Sequence[Sequence[float]], predicted: Sequence[Any], labels: Sequence[Any]
) -> list[Panel]:
    """Return the panels of traces: distribution, calibration, confusion, first bad steps."""
    good = np.concatenate([np.asarray(trace) for trace in probabilities])
    guess = np.concatenate([np.asarray(trace) for trace in predicted])
    true = np.concatenate([np.asarray(trace) for trace in labels])
    sides = {name: good[true == value] for value, name in metrics.STEP_CLASSES.items()}
    fit = metrics.calibration(good, true == 1)
    share_found = metrics.step_metrics(predicted, labels)["first_error"]
    return [
        partial(_distribution, label="probability of good", sides=sides),
        partial(_calibration, event="good", fit=fit),
        partial(_confusion, guess=guess, true=true),
        partial(_first_error, predicted=predicted, true=labels, share_found=share_found),
    ]


def _distribution(axis: Any, label: str, sides: Mapping[str, np.ndarray]) -> None:
    """Draw a histogram of the scores of each class; write how many pile up in the outer bins.

    `sides` has the scores (N,) of each class, by its name.
    """
    sides = {name: values for name, values in sides.items() if len(values)}
    edges = np.histogram_bin_edges(np.concatenate(list(sides.values())), 30)
    for name, values in sides.items():
        weights = np.full(len(values), 1 / len(values))
        style = {"color": COLORS[name], "alpha": 0.5, "label": f"{name} ({len(values)})"}
        shares, _, _ = axis.hist(values, edges, weights=weights, **style)
        outer_bins = ((0, 0.1, "left"), (len(shares) - 1, 0.9, "right"))
        for bin, x, side in outer_bins:  # the text of the first bin stands at the left
            if shares[bin] > 0.3:
                text = f"{shares[bin]:.0%} of {name}:\n{edges[bin]:.2f} to {edges[bin + 1]:.2f}"
                place = {"transform": axis.transAxes, "ha": side, "fontsize": "small"}
                axis.text(x, 0.5, text, color=COLORS[name], **place)
    axis.set(xlabel=label, ylabel="share of its class", title=f"{label} by class")
    axis.legend(fontsize="small")


def _calibration(axis: Any, event: str, fit: metrics.Calibration) -> None:
    """Draw how often what gets probability p happens; a dot is the larger, the fuller its bin."""
    sizes = 10 + 190 * fit.counts / fit.counts.max()
    axis.plot([0, 1], [0, 1], ":", color="tab:gray")
    axis.plot(fit.mean_probability, fit.mean_outcome, "-", color="tab:blue", alpha=0.5)
    axis.scatter(fit.mean_probability, fit.mean_outcome, sizes, color="tab:blue")
    axis.set(xlabel=f"predicted: {event}", ylabel="happened", xlim=(-0.05, 1.05))
    axis.set(ylim=(-0.05, 1.05), title=f"calibration (error {fit.error:.3f})")


def _best_of_n(axis: Any, curves: dict[str, dict[int, float]]) -> None:
    """Draw how often the chosen one of n is right, between the oracle and a random choice.

    `curves` has {n: share} by name, in the order "oracle", "this model", "random".
    """
    for (name, curve), style in zip(curves.items(), ("--", "o-", ":"), strict=True):
        color = "tab:blue" if name == "this model" else "tab:gray"
        axis.plot(list(curve), list(curve.values()), style, color=color, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(curve), map(str, curve))  # all curves have the same n
    axis.set(xlabel="n", ylabel="chosen one is right", ylim=(0, 1.02), title="best of n")
    axis.legend(fontsize="small")


def _coverage(axis: Any, scores: np.ndarray, labels: np.ndarray, groups: Sequence[int]) -> None:
    """Draw the share of prompts with a right one among their n best, and among a random n."""
    equal_scores = np.zeros(len(labels))  # with which the choice is random
    for name, values, style in (("best", scores, "o-"), ("random", equal_scores, ":")):
        curve = metrics.coverage(values, labels, groups)
        axis.plot(list(curve), list(curve.values()), style, label=name)
    hits = metrics.ranking_metrics(scores, labels, groups).get("top1_accuracy")
    # prompts are decidable if they have right and wrong candidates
    title = "" if hits is None else f"; best one right: {hits:.3f} of decidable prompts"
    axis.set(xlabel="n", ylabel="prompts with a right one among n", ylim=(0, 1.02))
    axis.set_title(f"coverage{title}", fontsize="small")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize="small")


def _confusion(axis: Any, guess: np.ndarray, true: np.ndarray) -> None:
    """Draw what the steps of each true class (a row) are predicted as: share and number."""
    classes = {v: name for v, name in metrics.STEP_CLASSES.items() if v in true or v in guess}
    counts = np.array([[np.sum((true == t) & (guess == g)) for g in classes] for t in classes])
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axis.imshow(share, cmap="Blues", vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(share):
        color = "white" if value > 0.6 else "black"
        text = f"{value:.2f}\n({counts[row, column]})"
        axis.text(column, row, text, ha="center", va="center", color=color)
    axis.set_xticks(range(len(classes)), classes.values())
    axis.set_yticks(range(len(classes)), classes.values())
    axis.set(xlabel="predicted", ylabel="true", title="classes of steps")


def _first_error(
    axis: Any, predicted: Sequence[Any], true: Sequence[Any], share_found: float
) -> None:
    """Draw, by the place of the first bad step, how many traces have it there, and are found.

    `predicted` and `true` are the classes of each trace's steps. A trace is found if its first step
    predicted as bad is the right one; `share_found` of all traces are.
    """
    traces_with_steps = [pair for pair in zip(predicted, true, strict=True) if len(pair[1])]
    predicted_places = [metrics.first_bad(classes) for classes, _ in traces_with_steps]
    true_places = [metrics.first_bad(classes) for _, classes in traces_with_steps]
    last = max((place for place in true_places if place is not None), default=-1)
    places = [*range(last + 1), None]  # None: no bad step
    right = [p for p, t in zip(predicted_places, true_places, strict=True) if p == t]
    traces = [true_places.count(place) for place in places]
    hits = [right.count(place) for place in places]
    names = ["none" if place is None else str(place + 1) for place in places]
    axis.bar(names, traces, color="lightgray", label="traces")
    axis.bar(names, hits, color="tab:blue", label="found")
    # about a dozen ticks, the last one at "none"
    ticks = [*range(0, len(places) - 1, 1 + len(places) // 12), len(places) - 1]
    axis.set_xticks(ticks, [names[i] for i in ticks])
    axis.set(xlabel="true first bad step", ylabel="traces")
    axis.set(title=f"first error ({share_found:.3f} found)")
    axis.legend(fontsize="small")
