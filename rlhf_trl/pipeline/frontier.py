"""Reward over KL: where gold and proxy part, and whether a penalty is better than stopping early.

Every sentence here is made from a pipeline's numbers, and says the opposite where they do.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rlhf_trl.evaluation.tables import mean_and_spread
from rlhf_trl.pipeline.results import Answers, Point, Results
from rlhf_trl.run.differences import differences

CLEAR = 2  # standard errors by question; what differs by less does not differ here
# Keys in which a run with a penalty may differ from the one without: the penalty itself, and what
# does not change what is learned.
EXPECTED = {"beta", "output_dir", "save_steps", "save_strategy", "eval_steps", "eval_strategy"}


def change(before: Answers, after: Answers, name: str) -> int:
    """Return 1 or -1 if a number is clearly higher or lower than before, else 0.

    That is by more than `CLEAR` standard errors of the difference, question by question.
    """
    return clear_sign(after.by_question(name) - before.by_question(name))


def clear_sign(difference: np.ndarray) -> int:
    """Return 1 or -1 if the mean of differences, one a question, is clearly not 0, else 0."""
    difference = difference[np.isfinite(difference)]
    if difference.size < 2:
        return 0
    error = difference.std(ddof=1) / math.sqrt(difference.size)
    mean = difference.mean()
    return int(np.sign(mean)) if abs(mean) > CLEAR * error else 0


class Course(NamedTuple):
    """How one run went: its points, and the outcome, by which seeds are counted."""

    start: Point  # the reference
    peak: Point  # of gold
    end: Point
    fell: bool  # gold is clearly lower at the end than at its peak
    against_start: int  # of gold at the end: 1 above, -1 below, 0 no clear difference
    proxy: int  # its change: since the peak if gold fell, else since the start

    @property
    def outcome(self) -> tuple[bool, int, int]:
        """What is counted over seeds."""
        return self.fell, self.against_start, self.proxy


def course(points: Sequence[Point]) -> Course:
    """Return how a run went that began with the reference."""
    start, end = points[0], points[-1]
    peak = max(points, key=lambda point: point.answers.mean("gold"))
    fell = change(peak.answers, end.answers, "gold") < 0
    return Course(
        start=start,
        peak=peak,
        end=end,
        fell=fell,
        against_start=change(start.answers, end.answers, "gold"),
        proxy=change((peak if fell else start).answers, end.answers, "proxy"),
    )


def over_optimization(results: Results) -> list[str]:
    """Return a sentence for each run with checkpoints, and each of its outcomes over seeds."""
    sentences = []
    for stage in results.with_curve():
        curves = [results.curve(stage, seed) for seed in results.seeds]
        by_outcome: dict[tuple[bool, int, int], list[Course]] = {}
        for points in curves:
            if len(points) > 2 and points[0].step == 0 and _known(points):
                course_of_seed = course(points)
                by_outcome.setdefault(course_of_seed.outcome, []).append(course_of_seed)
        for courses in sorted(by_outcome.values(), key=len, reverse=True):
            share = f"in {len(courses)} of {len(curves)} seeds"
            sentences.append(f"{results.title(stage)}: {_sentence(courses, share)}")
    return sentences


def _known(points: Sequence[Point]) -> bool:
    """Tell whether gold, proxy and KL of all points are known."""
    names = ("gold", "proxy", "kl")
    return all(math.isfinite(point.answers.mean(name)) for point in points for name in names)


def _sentence(courses: Sequence[Course], share: str) -> str:
    """Return what happened in the runs of some seeds, which all had the same outcome."""

    def mean(place: str, name: str) -> str:
        """Return the mean of a number over seeds at "start", "peak" or "end" of their courses."""
        values = [getattr(of_seed, place).answers.mean(name) for of_seed in courses]
        return f"{np.mean(values):.2f}"

    first = courses[0]
    relation = {1: "above", 0: "not clearly different from", -1: "below"}[first.against_start]
    verb = {1: "rises", 0: "does not clearly change", -1: "falls"}[first.proxy]
    reference = f"{relation} the reference's {mean('start', 'gold')}"
    if not first.fell:
        return (
            f"gold ends at {mean('end', 'gold')} (KL {mean('end', 'kl')}), {reference} and not "
            f"clearly below its highest, {mean('peak', 'gold')}, while the proxy {verb} (from "
            f"{mean('start', 'proxy')} to {mean('end', 'proxy')}), {share}: no over-optimization "
            "up to there."
        )
    verdict = "over-optimization"
    if first.proxy < 1:
        verdict = "no over-optimization, since the proxy does not rise while gold falls"
    return (
        f"gold peaks at KL {mean('peak', 'kl')} ({mean('peak', 'gold')}) and ends at "
        f"{mean('end', 'gold')} (KL {mean('end', 'kl')}), {reference}, while the proxy {verb} from "
        f"{mean('peak', 'proxy')} at the peak to {mean('end', 'proxy')} (the reference has "
        f"{mean('start', 'proxy')}), {share}: {verdict}."
    )


def at_kl(points: Sequence[Point], kl: float, name: str) -> float | None:
    """Return a number where a run first reaches a KL, between checkpoints on a straight line.

    None: it never does.
    """
    for before, after in pairwise(points):
        low, high = before.answers.mean("kl"), after.answers.mean("kl")
        if min(low, high) <= kl <= max(low, high):
            share = (kl - low) / (high - low) if high != low else 0.0
            first, last = before.answers.mean(name), after.answers.mean(name)
            return first + share * (last - first)
    return None


def penalties(results: Results) -> list[tuple[str, str]]:
    """Return the pairs of stages of which the first has a KL penalty and the second has none.

    Both train one algorithm on one reward model, and the checkpoints of the second one answered.
    """
    configs = {name: results.config(name) for name in results.models if name in results.stages}
    pairs = []
    for free in results.with_curve():
        base = configs[free]
        if base.get("beta") or not base.get("reward_model"):  # elsewhere beta is no penalty
            continue
        for penalized, config in configs.items():
            shared = all(config.get(key) == base.get(key) for key in ("algorithm", "reward_model"))
            if shared and config.get("beta"):
                pairs.append((penalized, free))
    return pairs


def penalty_against_stopping(results: Results) -> list[str]:
    """Return a sentence for each penalty: is it better than stopping early at the same KL?"""
    if results.gold is None:
        return []
    return [_compared(results, penalized, free) for penalized, free in penalties(results)]


def _compared(results: Results, penalized: str, free: str) -> str:
    """Return a sentence: does a KL penalty beat stopping a run without one early, at equal KL?

    `penalized` is the stage with the penalty, and `free` the stage without one.
    """
    # (KL, proxy, gold) of each seed: of `penalized` at its end, and of `free` at that KL
    penalty, stopped = [], []
    for seed in results.seeds:
        answers = results.answers[penalized, None, seed]
        numbers = [answers.mean(name) for name in ("kl", "proxy", "gold")]
        points = results.curve(free, seed)
        at_equal_kl = [at_kl(points, numbers[0], name) for name in ("kl", "proxy", "gold")]
        if None not in at_equal_kl:
            penalty.append(numbers)
            stopped.append(at_equal_kl)
    subject = f"{results.title(penalized)} (beta {results.config(penalized)['beta']:g})"
    if not penalty:
        return f"{subject}: {results.title(free)} never has its KL, so they cannot be compared."
    kl, proxy, gold = np.mean(penalty, axis=0)
    _, stopped_proxy, stopped_gold = np.mean(stopped, axis=0)
    gains = (np.array(penalty) - stopped)[:, 1:]  # (seeds, 2): of proxy and gold
    better_proxy, better_gold = (gains > 0).sum(0)
    better_both = (gains > 0).all(1).sum()
    sentence = (
        f"{subject} ends at KL {kl:.2f} with proxy {proxy:.2f} and gold {gold:.2f}; "
        f"{results.title(free)}, stopped at that KL, has {stopped_proxy:.2f} and "
        f"{stopped_gold:.2f} (differences {mean_and_spread(gains[:, 0], 2)} and "
        f"{mean_and_spread(gains[:, 1], 2)}): the penalty beats early stopping on both in "
        f"{better_both} of {len(penalty)} seeds, on the proxy in {better_proxy}, on gold in "
        f"{better_gold}"
    )
    if len(penalty) < len(results.seeds):
        sentence += f"; in {len(results.seeds) - len(penalty)} it never has that KL"
    changed = differences(results.config(free), results.config(penalized)).keys() - EXPECTED
    if changed:
        sentence += f"; they differ in {', '.join(sorted(changed))}, too"
    return sentence + "."
