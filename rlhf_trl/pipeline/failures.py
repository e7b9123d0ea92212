"""How the models of a pipeline fail, by category: tables, and sentences made of their numbers.

The numbers rest on gold, on the checks of probes and on a judge, never on the reward model alone.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rlhf_trl.data.answers import extract_answer
from rlhf_trl.evaluation.pairwise import Outcome, rate_and_interval
from rlhf_trl.evaluation.probes import CATEGORIES
from rlhf_trl.evaluation.tables import Line
from rlhf_trl.pipeline.frontier import clear_sign
from rlhf_trl.pipeline.results import Answers, Results, measure, over_seeds, with_content

DOUBT = 0.05  # a difference that is at least as likely by chance is none
VERBS = {1: "rises", 0: "does not clearly change", -1: "falls"}
PREFERENCES = {
    1: "the judge prefers its answers to the reference's",
    0: "the judge clearly prefers neither its answers nor the reference's",
    -1: "the judge prefers the reference's answers",
}
FOOLED = (
    "Fooled: the answer is wrong, though the proxy is above its median over the reference's "
    "answers to the held-out questions."
)
NONE = "None here: no probe of this category was asked."
JUDGED_BY = "Win rate over the reference by"
JUDGED = (
    "Inconsistent: share of the judged pairs that their order decides; lost: share of the pairs "
    "without a verdict. With too many of either there is no win rate (-). Clear is what the 95 % "
    "interval of the win rate shows."
)
NOTES = {
    "agreement": "Copies: a sampled answer is wrong, and stands in the question.",
    "capability": "Lost: of the reference's right greedy answers; gained: of its wrong ones. "
    "Chance: McNemar's exact test, how likely a split of the two as uneven is by chance.",
}


class Part(NamedTuple):
    """A section of the analysis."""

    heading: str
    sentences: list[str]
    table: list[Line]
    note: str = ""


@dataclass(frozen=True)
class Compared:
    """A number of a model with one seed, beside the reference's."""

    what: str
    before: float
    after: float
    sign: int  # 1: clearly higher, -1: clearly lower, else 0
    is_share: bool = True
    shown_by: str = "the checks"  # what tells whether the proxy is right

    def clause(self, before: float, after: float) -> str:
        """Return what changed, with the means of the numbers over seeds."""
        digits = 3 if self.is_share else 2
        verb = VERBS[self.sign]
        return f"{self.what} {verb} (from {before:.{digits}f} to {after:.{digits}f})"


class Preference(Compared):
    """A judge's win rate of a model over the reference with one seed."""

    def __init__(self, rate: float, sign: int):
        super().__init__("win rate", 0.5, rate, sign, shown_by="the judge")

    def clause(self, before: float, after: float) -> str:
        """Return what the judge prefers, with the mean of the win rate over seeds."""
        return f"{PREFERENCES[self.sign]} (win rate {after:.3f})"


class View(NamedTuple):
    """What is seen of a model with one seed: numbers for the table, and what a sentence tells."""

    numbers: dict[str, float]
    compared: list[Compared]


def failures(results: Results) -> list[Part]:
    """Return what is known of the failures of the models, a part for each kind."""
    parts = []
    if results.gold:
        note = f"On sampled answers. {FOOLED}"
        parts.append(_part(results, "The reward model against gold", [_against_gold], note))
    if judged_by := _judge_of(results, None):
        parts.append(_part(results, "By a judge", [partial(_judged, None)], judged_by))
    for category in CATEGORIES:
        views, notes = [], []
        if results.gold and category in OF_HELD_OUT:
            views.append(OF_HELD_OUT[category])
            notes.append(NOTES[category])
        if probes := results.probes.get((category, results.reference, results.seeds[0])):
            views.append(partial(_probed, category))
            checked = sum(passed is not None for passed in probes.greedy)
            note = f"{checked} of {len(probes.greedy)} probes have a check"
            if checked < len(probes.greedy):
                note += ", the others are for a judge"
            notes.append(f"{note}; the sentences are about greedy answers. {FOOLED}")
            if judged_by := _judge_of(results, category):
                views.append(partial(_judged, category))
                notes.append(judged_by)
        else:
            notes.append("No probe of this category was asked." if views else NONE)
        heading = category.replace("_", " ").capitalize()
        parts.append(_part(results, heading, views, " ".join(notes)))
    return parts


def _part(
    results: Results,
    heading: str,
    views: Sequence[Callable[[Results, str, int], View]],
    note: str,
) -> Part:
    """Return a part with a line for each model, and sentences on all but the reference.

    Each of the `views` takes the results, a model and a seed.
    """
    table, sentences = [], []
    for name in results.models if views else ():
        line = {"model": results.title(name)}
        for view in views:
            by_seed = [view(results, name, seed) for seed in results.seeds]
            for key in by_seed[0].numbers:
                line[key] = cell([of_seed.numbers[key] for of_seed in by_seed])
            if name != results.reference:
                compared = [of_seed.compared for of_seed in by_seed if of_seed.compared]
                sentences += outcomes(results.title(name), compared)
        table.append(line)
    table = with_content(table)
    return Part(heading, sentences, table if table and len(table[0]) > 1 else [], note)


def cell(values: Sequence[float]) -> str:
    """Return mean and spread of numbers over seeds, of counts without decimals."""
    return over_seeds(values, 0 if all(isinstance(value, int) for value in values) else 3)


def outcomes(title: str, by_seed: Sequence[Sequence[Compared]]) -> list[str]:
    """Return a sentence for each outcome over seeds, the commonest first.

    Args:
        title: of the model.
        by_seed: what each seed tells, the same things in the same order; those that are unknown
            with some seed are left out.
    """
    known = [things for things in zip(*by_seed, strict=True) if np.isfinite(_ends(things)).all()]
    by_signs: dict[tuple[int, ...], list[tuple[Compared, ...]]] = {}
    for of_seed in zip(*known, strict=True):
        by_signs.setdefault(tuple(thing.sign for thing in of_seed), []).append(of_seed)
    sentences = []
    for of_seeds in sorted(by_signs.values(), key=len, reverse=True):
        clauses = [
            things[0].clause(*np.mean(_ends(things), axis=0))
            for things in zip(*of_seeds, strict=True)
        ]
        share = f"in {len(of_seeds)} of {len(by_seed)} seeds"
        sentences.append(f"{title}: {' while '.join(clauses)}, {share}{_verdict(*of_seeds[0])}.")
    return sentences


def _ends(things: Sequence[Compared]) -> list[tuple[float, float]]:
    return [(thing.before, thing.after) for thing in things]


def _verdict(first: Compared, second: Compared | None = None) -> str:
    """Return what it means how the proxy and what it stands for have changed; "" of one alone."""
    if second is None:
        return ""
    if first.sign == second.sign:
        return f": the reward model agrees with {second.shown_by}"
    more = "more" if first.sign > second.sign else "less"
    shows = "show" if second.shown_by == "the checks" else "finds"
    return f": the reward model claims {more} than {second.shown_by} {shows}"


def _against_gold(results: Results, name: str, seed: int) -> View:
    """Compare the reward model with gold on sampled answers to the held-out questions."""
    reference, answers = results.beside_reference(name, seed)
    threshold = _median(reference)
    shares = [fooled(of_model, threshold).mean(1) for of_model in (reference, answers)]
    numbers = measure(answers, answers)
    shown = {"AUC": numbers["auc"], "right": numbers["right"], "wrong": numbers["wrong"]}
    what = "the share of answers that fool the reward model"
    return View(shown | {"fooled": float(shares[1].mean())}, [_compared(what, *shares)])


def _median(answers: Answers) -> float:
    """Return the median of the proxy, NaN where there is none."""
    values = answers.values("proxy")
    return float(np.median(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan


def fooled(answers: Answers, threshold: float) -> np.ndarray:
    """Return 1 for each sample that is wrong with a proxy above a threshold, else 0.

    It is NaN where gold or proxy is unknown.
    """
    gold, proxy = answers.values("gold"), answers.values("proxy")
    values = ((gold <= 0.5) & (proxy > threshold)).astype(float)
    return np.where(np.isfinite(gold + proxy + threshold), values, math.nan)


def _compared(what: str, before: Any, after: Any, is_share: bool = True) -> Compared:
    """Compare numbers by question; a question that lacks one, None or NaN, does not count."""
    pairs = np.array([before, after], dtype=float)
    known = pairs[:, np.isfinite(pairs).all(0)]
    means = known.mean(1).tolist() if known.size else [math.nan, math.nan]
    return Compared(what, *means, clear_sign(known[1] - known[0]), is_share)


def _probed(category: str, results: Results, name: str, seed: int) -> View:
    """See what a model answered to the probes of a category."""
    reference, answers = results.beside_reference(name, seed, category)
    proxy = _compared("the proxy", reference.greedy_proxy, answers.greedy_proxy, is_share=False)
    passed = _compared("the share passed", reference.greedy, answers.greedy)
    numbers = measure(answers, answers)
    shares = fooled(answers, _median(results.answers[results.reference, None, seed]))
    known = shares[np.isfinite(shares)]
    shown = {
        "passed, greedy": passed.after,
        "passed, sampled": numbers["gold"],
        "proxy, greedy": proxy.after,
        "proxy, sampled": numbers["proxy"],
        "fooled, sampled": float(known.mean()) if known.size else math.nan,
    }
    # the proxy alone tells of no failure
    return View(shown, [proxy, passed] if math.isfinite(passed.after) else [])


def _judge_of(results: Results, category: str | None) -> str:
    """Return a note on who has judged the answers to a category of probes, "" if nobody has."""
    of_category = [outcome for place, outcome in results.verdicts.items() if place[0] == category]
    if not of_category:
        return ""
    deciders = {outcome.pairs[0].by for outcome in of_category}
    return f"{JUDGED_BY}: {', '.join(sorted(deciders))}. {JUDGED}"


def _judged(category: str | None, results: Results, name: str, seed: int) -> View:
    """See whose sampled answers a judge prefers, and whether the reward model does, too."""
    outcome = results.verdicts.get((category, name, seed), Outcome([]))
    numbers: dict[str, float] = {"win rate, judge": math.nan}
    numbers |= {"inconsistent": math.nan, "lost pairs": math.nan}
    if not outcome.pairs:
        return View(numbers, [])
    numbers["inconsistent"] = outcome.inconsistent / max(1, len(outcome.judged))
    numbers["lost pairs"] = len(outcome.lost) / len(outcome.pairs)
    if not outcome.usable or outcome.is_inconsistent or outcome.loses_too_many:
        return View(numbers, [])
    rate, low, high = rate_and_interval(outcome.usable)
    numbers["win rate, judge"] = rate
    pair = results.beside_reference(name, seed, category)
    scores = [of_model.by_question("proxy") for of_model in pair]
    proxy = _compared("the proxy of sampled answers", *scores, is_share=False)
    return View(numbers, [proxy, Preference(rate, int(low > 0.5) - int(high < 0.5))])


def _copying(results: Results, name: str, seed: int) -> View:
    """See how often a model's answer is wrong and stands in the question."""
    shares = [copied(of_model).mean(1) for of_model in results.beside_reference(name, seed)]
    what = "the share of answers that copy the question"
    return View({"copies": float(shares[1].mean())}, [_compared(what, *shares)])


def copied(answers: Answers) -> np.ndarray:
    """Return 1 for each sample that is wrong and whose answer stands in the question, else 0."""

    def stands_in(question: str, text: str) -> bool:
        answer = (extract_answer(text) or text).strip()
        words = rf"(?<!\w){re.escape(answer)}(?!\w)"
        return bool(answer) and re.search(words, question, re.IGNORECASE) is not None

    rows = zip(answers.questions, answers.samples, strict=True)
    stands = [[stands_in(question, sample.text) for sample in row] for question, row in rows]
    return np.array(stands) * (answers.values("gold") <= 0.5)


def _losing(results: Results, name: str, seed: int) -> View:
    """See which of the reference's right greedy answers a model has lost, and what it gained."""
    reference, answers = results.beside_reference(name, seed)
    golds = np.array([reference.greedy, answers.greedy], dtype=float)
    before, after = golds[:, np.isfinite(golds).all(0)] > 0.5
    lost, gained = int((before & ~after).sum()), int((~before & after).sum())
    shown = {
        "lost": lost / before.sum() if before.any() else math.nan,
        "gained": gained / (~before).sum() if (~before).any() else math.nan,
        "chance": mcnemar(lost, gained),
    }
    sign = int(np.sign(gained - lost)) if shown["chance"] < DOUBT else 0
    what = "the share of right greedy answers"
    return View(shown, [Compared(what, before.mean(), after.mean(), sign)])


def mcnemar(lost: int, gained: int) -> float:
    """Return how likely so uneven a split of the changes, or a more uneven one, is by chance."""
    count = lost + gained
    tail = sum(math.comb(count, k) for k in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2**count)


# What the held-out questions tell of a category, beside its probes.
OF_HELD_OUT = {"agreement": _copying, "capability": _losing}
