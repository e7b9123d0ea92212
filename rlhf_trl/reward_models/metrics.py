"""What the scores of a reward model are worth: plain functions of scores, labels and prompts.

Every result is a finite Python float. A number that the input does not define (an AUC without a
wrong candidate, a recall of a class that does not occur) is left out of the dictionary, all of them
where there is no input. Scores that are not finite, labels outside their set and lengths that
differ are an `InputError` of every function.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from rlhf_trl.errors import InputError
from rlhf_trl.reward_models.accuracy import pair_accuracy

SIZES = (1, 2, 4, 8)
STEP_CLASSES = {-1: "bad", 0: "neutral", 1: "good"}


class Calibration(NamedTuple):
    """How often outcomes of predicted probability happen, in the bins that are not empty."""

    mean_probability: np.ndarray  # (bins,)
    mean_outcome: np.ndarray  # (bins,)
    counts: np.ndarray  # (bins,)
    error: float


def pair_metrics(chosen: Any, rejected: Any) -> dict[str, float]:
    """Return how well the rewards (N,) of both sides separate preference pairs.

    pair_accuracy: see there; margin = mean(r_c - r_r); chosen_mean and rejected_mean;
    calibration_error: the error of `pair_calibration`.
    """
    chosen, rejected = finite(chosen, "chosen"), finite(rejected, "rejected")
    _same_length(chosen=chosen, rejected=rejected)
    if not len(chosen):
        return {}
    return {
        "pair_accuracy": pair_accuracy(chosen, rejected),
        "margin": float(np.mean(chosen - rejected)),
        "chosen_mean": float(np.mean(chosen)),
        "rejected_mean": float(np.mean(rejected)),
        "calibration_error": pair_calibration(chosen, rejected).error,
    }


def pair_calibration(chosen: Any, rejected: Any) -> Calibration:
    """Return `calibration` of p = sigmoid(r_c - r_r), the probability that the first of two wins.

    Each of the N > 0 pairs counts in both orders, (p, won) and (1 - p, lost). In one order every
    outcome would be "won", and the error would be nothing but the mean of 1 - p.
    """
    chosen, rejected = finite(chosen, "chosen"), finite(rejected, "rejected")
    _same_length(chosen=chosen, rejected=rejected)
    p = (1 + np.tanh((chosen - rejected) / 2)) / 2  # the sigmoid, without overflow
    return calibration(np.concatenate([p, 1 - p]), np.repeat([True, False], len(p)))


def calibration(probabilities: Any, outcomes: Any, bins: int = 10) -> Calibration:
    """Return how often outcomes of predicted probability p happen, in bins of p of equal width.

    error = sum_k n_k / N |mean p in bin k - mean outcome in bin k|

    Bin k holds k / bins <= p < (k + 1) / bins; the last bin holds p = 1, too. Both arguments are
    (N,): the probabilities of N events, and whether each event happened. Empty bins are left out.
    """
    probabilities = finite(probabilities, "probabilities")
    outcomes = truth(outcomes, "outcomes")
    _same_length(probabilities=probabilities, outcomes=outcomes)
    if not len(probabilities):
        raise InputError("calibration: there are no probabilities; pass at least one.")
    if probabilities.min() < 0 or probabilities.max() > 1:
        raise InputError(
            f"calibration: probabilities run from {probabilities.min():.3g} to "
            f"{probabilities.max():.3g}; pass the sigmoid of logits, not the logits."
        )
    bin_of = np.minimum((probabilities * bins).astype(int), bins - 1)
    counts = np.bincount(bin_of, minlength=bins)
    filled = counts > 0
    counts = counts[filled]
    mean_probability = np.bincount(bin_of, probabilities, bins)[filled] / counts
    mean_outcome = np.bincount(bin_of, outcomes, bins)[filled] / counts
    error = np.sum(counts * np.abs(mean_probability - mean_outcome)) / len(probabilities)
    return Calibration(mean_probability, mean_outcome, counts, float(error))


def prompt_groups(prompts: Sequence[Any]) -> list[int]:
    """Return an id for each of N prompts, (N,): equal prompts have equal ids, counted from 0."""
    ids: dict[str, int] = {}
    return [ids.setdefault(repr(prompt), len(ids)) for prompt in prompts]


def budgets(groups: Sequence[Hashable]) -> list[int]:
    """Return 1, 2, 4, ... up to the number of candidates that every prompt has; (N,) ids."""
    fewest = min(Counter(_ids(groups)).values(), default=0)
    return [2**k for k in range(fewest.bit_length())]


def ranking_metrics(scores: Any, labels: Any, groups: Sequence[Hashable]) -> dict[str, float]:
    """Return how well scores tell right from wrong candidates, over all and within prompts.

    - auc = P(s_right > s_wrong) + 1/2 P(s_right = s_wrong) over all candidates (Mann-Whitney)
    - pairwise_accuracy = the same within a prompt, mean over the prompts with right and wrong ones
    - top1_accuracy = P(the best scored is right), mean over the prompts with right and wrong ones
    - best_of_n = P(the best scored is right), mean over all prompts
    - random_of_n = share of a prompt's candidates that are right, mean over all prompts
    - oracle_of_n = share of prompts with a right candidate
    - right_mean, wrong_mean = mean scores of right and of wrong candidates

    Of candidates that share the best score, each is chosen with equal probability. Scores, labels
    (whether a candidate is right) and groups (its prompt's id) are (N,), in any order.
    """
    scores, labels, candidates_of_prompts = _candidates(scores, labels, groups)
    if not candidates_of_prompts:
        return {}
    metrics = {}
    if labels.any() and not labels.all():
        metrics["auc"] = _auc(scores, labels)
    best_is_right = []  # the probability, of each prompt
    share_right = []  # of each prompt
    pairwise = []  # the accuracy, of each prompt with right and wrong candidates
    for indices in candidates_of_prompts:
        own_scores, own_labels = scores[indices], labels[indices]
        is_best = own_scores == own_scores.max()  # several, if they share the best score
        best_is_right.append(own_labels[is_best].mean())
        share_right.append(own_labels.mean())
        if 0 < share_right[-1] < 1:
            pairwise.append(_auc(own_scores, own_labels))
    best = np.array(best_is_right)
    share = np.array(share_right)
    if pairwise:
        metrics["pairwise_accuracy"] = float(np.mean(pairwise))
        metrics["top1_accuracy"] = float(best[(share > 0) & (share < 1)].mean())
    metrics["best_of_n"] = float(best.mean())
    metrics["random_of_n"] = float(share.mean())
    metrics["oracle_of_n"] = float((share > 0).mean())
    if labels.any():
        metrics["right_mean"] = float(scores[labels].mean())
    if not labels.all():
        metrics["wrong_mean"] = float(scores[~labels].mean())
    return metrics


def _auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the Mann-Whitney statistic, divided by n_right n_wrong; ties have their mean rank."""
    _, level, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[level]  # from 1; equal scores share the mean
    right, wrong = int(labels.sum()), int((~labels).sum())
    return float((ranks[labels].sum() - right * (right + 1) / 2) / (right * wrong))


def ranking_by_budget(
    scores: Any, labels: Any, groups: Sequence[Hashable], sizes: Sequence[int] = SIZES
) -> dict[int, float]:
    """Return best-of-n for several n: how often the best scored of n candidates is right.

    sum_k [C(c_k, n) - C(c_{k-1}, n)] / C(N, n) m_k, mean over prompts

    This is the exact mean over all subsets of n of a prompt's N candidates; of candidates that
    share the best score, each is chosen with equal probability. Here k numbers the distinct scores
    of the prompt from the lowest, c_k counts the candidates with at most the k-th score, and m_k is
    the share of right ones among the candidates with exactly the k-th score. C(c_k, n) subsets have
    no score above the k-th; C(c_{k-1}, n) of them have only lower scores. The difference is the
    number of subsets whose best score is the k-th.

    With the labels as scores, the result is the oracle's curve; with equal scores, it is that of a
    random choice.

    Args:
        scores, labels, groups: as in `ranking_metrics`.
        sizes: the values of n. A size that exceeds the candidates of some prompt is left out; one
            below 1 is an InputError.
    """
    scores, labels, candidates_of_prompts = _candidates(scores, labels, groups)

    def probability_right(indices: np.ndarray, n: int) -> float:
        """Return the probability that the best of n is right, for one prompt's candidates."""
        _, level, counts = np.unique(scores[indices], return_inverse=True, return_counts=True)
        share_right = np.bincount(level, labels[indices]) / counts  # m_k
        up_to_level = [0, *np.cumsum(counts)]  # c_0 = 0, c_1, ..., N
        subsets = [math.comb(int(c), n) for c in up_to_level]  # C(c_0, n) = 0, ..., C(N, n)
        return sum(
            (subsets[k + 1] - subsets[k]) / subsets[-1] * share
            for k, share in enumerate(share_right)
        )

    curve = {}
    for n in _possible(sizes, candidates_of_prompts):
        probabilities = [probability_right(indices, n) for indices in candidates_of_prompts]
        curve[n] = float(np.mean(probabilities))
    return curve


def coverage(scores: Any, labels: Any, groups: Sequence[Hashable]) -> dict[int, float]:
    """Return {n: the share of prompts with a right candidate among their n best scored}.

    Several candidates may share the lowest score among the n best; then it is drawn which of them
    belong to the n. Let m candidates of a prompt have this score, c of them right, and let k of the
    m be drawn. If a candidate with a higher score is right, the probability of a right one among
    the n best is 1; else it is 1 - C(m - c, k) / C(m, k). The result is the mean over prompts.

    n runs from 1 to the number of candidates that every prompt has. The arguments are those of
    `ranking_metrics`; with equal scores, the result is that of a random choice.
    """
    scores, labels, candidates_of_prompts = _candidates(scores, labels, groups)

    def probability_of_right(indices: np.ndarray, n: int) -> float:
        """Return the probability of a right one among the n best of one prompt's candidates."""
        own_scores, is_right = scores[indices], labels[indices]
        lowest = np.sort(own_scores)[-n]  # of the n best
        is_better = own_scores > lowest
        if is_right[is_better].any():
            return 1.0
        tied_right = is_right[own_scores == lowest]
        tied, tied_wrong = len(tied_right), int((~tied_right).sum())  # m, m - c
        drawn = n - int(is_better.sum())  # k
        # C(m - c, k) is 0 if more are drawn than are wrong
        return 1 - math.comb(tied_wrong, drawn) / math.comb(tied, drawn)

    fewest = min(map(len, candidates_of_prompts), default=0)
    curve = {}
    for n in range(1, fewest + 1):
        probabilities = [probability_of_right(indices, n) for indices in candidates_of_prompts]
        curve[n] = float(np.mean(probabilities))
    return curve


def majority_by_budget(
    answers: Sequence[str | None],
    labels: Any,
    groups: Sequence[Hashable],
    sizes: Sequence[int] = SIZES,
    *,
    seed: int = 0,
    draws: int = 1000,
) -> dict[int, float]:
    """Return {n: how often the most frequent of n answers is right}.

    The result is the mean over the subsets of n of a prompt's candidates, then over prompts. If
    several answers of a subset are the most frequent, they count equally. An answer counts by the
    share of the subset's candidates with this answer that are right.

    Args:
        answers: (N,) the answers of the candidates; None: a candidate without an answer, which
            votes for itself alone and never counts as right.
        labels, groups: as in `ranking_metrics`.
        sizes: as in `ranking_by_budget`.
        seed: of the random subsets.
        draws: if a prompt has at most this many subsets of n (8 candidates always have), the mean
            is over all of them and exact; else it is over this many random ones.
    """
    no_scores = np.zeros(len(answers))  # `_candidates` checks scores; here are none
    _, labels, candidates_of_prompts = _candidates(no_scores, labels, groups)
    random = np.random.default_rng(seed)

    def majority_is_right(subset: Sequence[int]) -> float:
        """Return the mean over the most frequent answers of a subset of candidates."""
        votes: dict[Hashable, list[bool]] = {}  # {answer: whether each of its candidates is right}
        for index in subset:
            if answers[index] is None:  # a key of its own, unequal to all answers, which are texts
                votes["none", index] = [False]
            else:
                votes.setdefault(answers[index], []).append(bool(labels[index]))
        most = max(map(len, votes.values()))
        # of each most frequent answer: the share of its candidates that are right
        shares = [sum(rights) / most for rights in votes.values() if len(rights) == most]
        return sum(shares) / len(shares)

    def mean_of_prompt(indices: np.ndarray, n: int) -> float:
        """Return the mean over the subsets of n of a prompt's candidates."""
        if math.comb(len(indices), n) <= draws:
            subsets = combinations(indices, n)
        else:
            subsets = (random.choice(indices, n, replace=False) for _ in range(draws))
        return float(np.mean([majority_is_right(subset) for subset in subsets]))

    curve = {}
    for n in _possible(sizes, candidates_of_prompts):
        curve[n] = float(np.mean([mean_of_prompt(indices, n) for indices in candidates_of_prompts]))
    return curve


def step_metrics(
    predicted: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return how well a process reward model classifies steps and finds the first bad one.

    - step_accuracy = share of all steps whose class is the true one
    - step_majority = the same for always guessing the most frequent true class
    - recall_c = share of the steps of class c (bad -1, neutral 0, good 1) that are predicted as c
    - first_error = share of traces in which the first step predicted as bad is the first bad one,
      or in which no step is bad and none is predicted as bad
    - first_error_trivial = the same for the best constant guess: always none, or always step k

    Both arguments hold the classes -1, 0 or 1 of each trace. A trace without steps is left out, and
    so is the recall of a class that does not occur in `labels` (in the binary form, of neutral).
    """
    _same_length(predicted=predicted, labels=labels)
    guesses = [_classes(trace, f"predicted of trace {i}") for i, trace in enumerate(predicted)]
    truths = [_classes(trace, f"labels of trace {i}") for i, trace in enumerate(labels)]
    for i, (guess, true) in enumerate(zip(guesses, truths, strict=True)):
        _same_length(**{f"predicted of trace {i}": guess, f"labels of trace {i}": true})
    # leave out traces without steps, which are empty in both
    guesses = [trace for trace in guesses if len(trace)]
    truths = [trace for trace in truths if len(trace)]
    if not truths:
        return {}
    all_guesses, all_true = np.concatenate(guesses), np.concatenate(truths)
    metrics = {
        "step_accuracy": float(np.mean(all_guesses == all_true)),
        "step_majority": max(Counter(all_true.tolist()).values()) / len(all_true),
    }
    for value, name in STEP_CLASSES.items():
        in_class = all_true == value
        if in_class.any():
            metrics[f"recall_{name}"] = float(np.mean(all_guesses[in_class] == value))
    guessed_errors = [first_bad(trace) for trace in guesses]
    true_errors = [first_bad(trace) for trace in truths]
    hits = [guess == true for guess, true in zip(guessed_errors, true_errors, strict=True)]
    metrics["first_error"] = sum(hits) / len(hits)
    # the best constant guess is the most frequent place, where None is a place, too
    metrics["first_error_trivial"] = max(Counter(true_errors).values()) / len(true_errors)
    return metrics


def first_bad(trace: Sequence[int]) -> int | None:
    """Return the index of the first step of class -1 in a trace of classes, or None."""
    return next((k for k, value in enumerate(trace) if value == -1), None)


def finite(values: Any, name: str) -> np.ndarray:
    """Return a list, array or tensor of N finite numbers as float64, (N,)."""
    if hasattr(values, "detach"):  # a tensor, maybe in bfloat16 or on a GPU
        values = values.detach().double().cpu().numpy()
    values = np.asarray(values, dtype=float)
    if values.ndim != 1:
        raise InputError(f"{name} have the shape {values.shape}; pass one number each, (N,).")
    if not np.isfinite(values).all():
        i = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"{name}: number {i} of {len(values)} is {values[i]}; pass finite numbers, and look "
            "for a training that diverged."
        )
    return values


def truth(values: Any, name: str) -> np.ndarray:
    """Return a list, array or tensor of N truth values (true, false, 1, 0) as booleans, (N,)."""
    numbers = finite(values, name)
    if not np.isin(numbers, (0, 1)).all():
        wrong = numbers[~np.isin(numbers, (0, 1))][0]
        raise InputError(f"{name} hold {wrong:g}; write true or false (1 or 0).")
    return numbers.astype(bool)


def _classes(values: Any, name: str) -> np.ndarray:
    classes = np.asarray(values)
    if classes.dtype == bool or not np.isin(classes, list(STEP_CLASSES)).all():
        raise InputError(f"{name} are {classes.tolist()}; write -1, 0 or 1 for each step.")
    return classes


def _same_length(**named: Any) -> None:
    if len(set(map(len, named.values()))) > 1:
        counts = ", ".join(f"{name}: {len(values)}" for name, values in named.items())
        raise InputError(f"the numbers of entries differ ({counts}); pass as many of each.")


def _candidates(
    scores: Any, labels: Any, groups: Sequence[Hashable]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return scores and labels, checked, and for each prompt the indices of its candidates."""
    scores, labels = finite(scores, "scores"), truth(labels, "labels")
    _same_length(scores=scores, labels=labels, groups=groups)
    indices: dict[Hashable, list[int]] = {}
    for i, group in enumerate(_ids(groups)):
        indices.setdefault(group, []).append(i)
    return scores, labels, [np.array(of_prompt) for of_prompt in indices.values()]


def _ids(groups: Any) -> Sequence[Hashable]:
    return groups.tolist() if hasattr(groups, "tolist") else groups


def _possible(sizes: Sequence[int], candidates_of_prompts: list[np.ndarray]) -> list[int]:
    """Return the sizes for which every prompt has enough candidates."""
    if any(n < 1 for n in sizes):
        raise InputError(f"sizes {list(sizes)}: best-of-n needs n of 1 or more.")
    fewest = min(map(len, candidates_of_prompts), default=0)
    return [n for n in sizes if n <= fewest]
