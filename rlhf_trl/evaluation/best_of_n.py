"""Reward models side by side: how often the candidate that each would choose is right."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_trl.data.answers import completion_text, extract_answer, normalize
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.tables import Line, mean_and_spread
from rlhf_trl.reward_models import metrics
from rlhf_trl.reward_models.report import SCORES as FILE


class Candidate(NamedTuple):
    """A completion that a run scored."""

    prompt: Any
    completion: str
    label: bool  # whether it is right
    answer: str | None  # in the form in which the task compares answers; None: it has none
    scores: dict[str, float]  # by name


class Candidates(NamedTuple):
    """What a run scored: (N,) prompts, completions, labels, answers, and scores by name."""

    prompts: list[Any]
    completions: list[str]
    labels: list[bool]
    answers: list[str | None]
    scores: dict[str, list[float]]


def best_of_n(runs: Sequence[str | Path], seeds: bool = False) -> list[Line]:
    """Return the lines of a table of the candidates that each run's scores choose.

    Rows: a random candidate, the majority of n, each run's scores, the oracle (right if any is).
    Columns: best of n = 1, 2, 4, ... up to the candidates that every prompt has, the AUC over all
    candidates, and the pairwise accuracy within prompts. A best of n is the exact mean over all
    subsets of n candidates; only that of the majority is estimated where these are very many. With
    `seeds`, each folder holds a run per seed, in seed-*, and the table is mean and standard
    deviation over them, each on its own candidates.
    """
    folders = _named(runs)
    if not seeds:
        return _table([_compare(folders)])
    by_run = {  # the folder of each seed, by run
        name: {path.name: path for path in sorted(folder.glob("seed-*"))}
        for name, folder in folders.items()
    }
    for name, seed_folders in by_run.items():
        if not seed_folders:
            problem = f"{folders[name]} holds no seed-* folders"
            raise InputError(f"{problem}; leave --seeds out for a single run.")
    first, *others = by_run
    for name in others:
        if set(by_run[name]) != set(by_run[first]):
            raise InputError(
                f"{folders[first]} holds {', '.join(by_run[first])} and {folders[name]} "
                f"{', '.join(by_run[name])}; name runs with the same seeds."
            )
    compared = []
    for seed in by_run[first]:
        compared.append(_compare({name: by_run[name][seed] for name in by_run}))
    return _table(compared)


def read_candidates(folder: str | Path) -> Candidates:
    """Return what stands in the scores.jsonl of a run.

    Raises:
        InputError: there is no such file, or a line of it is not a scored candidate.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        hint = "; name a finished reward model run"
        if any(Path(folder).glob("seed-*")):
            hint = "; add --seeds, since it holds seeds"
        raise InputError(f"{folder} holds no {FILE}{hint}.")
    candidates = Candidates([], [], [], [], {})
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            candidate = _parsed(line)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: line {number} is not a scored candidate ({type(error).__name__}: "
                f"{error}); evaluate the run again."
            ) from error
        if number == 1:
            candidates.scores.update({name: [] for name in candidate.scores})
        if candidate.scores.keys() != candidates.scores.keys():
            raise InputError(
                f"{path}: line {number} has other scores than line 1; evaluate the run again."
            )
        candidates.prompts.append(candidate.prompt)
        candidates.completions.append(candidate.completion)
        candidates.labels.append(candidate.label)
        candidates.answers.append(candidate.answer)
        for name, score in candidate.scores.items():
            candidates.scores[name].append(score)
    if not candidates.prompts:
        raise InputError(f"{path} is empty; evaluate the run again.")
    return candidates


def _parsed(line: str) -> Candidate:
    """Return the candidate of a line of JSON; whatever is wrong with it is some exception."""
    row = json.loads(line)
    text = completion_text(row["completion"])
    answer = extract_answer(text)
    if answer is not None:
        answer = normalize(row.get("task") or "", answer)
    scores = {name: float(score) for name, score in row["scores"].items()}
    label = row["label"]
    if not isinstance(label, bool) or not scores:
        raise ValueError("its label is not true or false, or it has no scores")
    return Candidate(row["prompt"], text, label, answer, scores)


def _named(runs: Sequence[str | Path]) -> dict[str, Path]:
    """Return the folders by name, or by path where two have the same name."""
    if not runs:
        raise InputError("no run is named; name the folder of at least one.")
    folders = [Path(run) for run in runs]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise InputError(f"a run is named twice ({', '.join(names)}); name each once.")
    return dict(zip(names, folders, strict=True))


def _compare(folders: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return the table's numbers by row and column, of runs that scored the same candidates."""
    runs = {name: read_candidates(folder) for name, folder in folders.items()}
    first_name, *other_names = runs
    first = runs[first_name]
    for name in other_names:
        other = runs[name]
        same_prompts = other.prompts == first.prompts
        same_answers = other.completions == first.completions and other.labels == first.labels
        if not (same_prompts and same_answers):
            raise InputError(
                f"{folders[first_name] / FILE} and {folders[name] / FILE} hold other candidates; "
                "let both runs score the same samples-held-out.jsonl."
            )
    labels = first.labels
    groups = metrics.prompt_groups(first.prompts)
    sizes = metrics.budgets(groups)
    # among equal scores, one is chosen at random
    table = {"random": _row([0.0] * len(labels), labels, groups, sizes)}
    has_votes = any(answer is not None for answer in first.answers)
    if has_votes:
        votes = metrics.majority_by_budget(first.answers, labels, groups, sizes)
        table["majority of n"] = {f"n = {n}": share for n, share in votes.items()}
    for name, run in runs.items():
        for score_name, scores in run.scores.items():
            try:
                table[f"{name} ({score_name})"] = _row(scores, labels, groups, sizes)
            except InputError as error:
                raise InputError(f"{folders[name] / FILE}, {score_name}: {error}") from error
    # the labels as scores choose a right candidate if there is any
    table["oracle"] = _row([float(label) for label in labels], labels, groups, sizes)
    return table


def _row(
    scores: Sequence[float], labels: Sequence[bool], groups: Sequence[int], sizes: Sequence[int]
) -> dict[str, float]:
    """Return the numbers of the candidates that scores choose, by column."""
    by_budget = metrics.ranking_by_budget(scores, labels, groups, sizes)
    row = {f"n = {n}": share for n, share in by_budget.items()}
    over_all = metrics.ranking_metrics(scores, labels, groups)
    for column, key in (("AUC", "auc"), ("pairwise", "pairwise_accuracy")):
        if key in over_all:
            row[column] = over_all[key]
    return row


def _table(seeds: list[dict[str, dict[str, float]]]) -> list[Line]:
    """Return mean and spread over seeds; a dash where a seed lacks the number."""
    # the oracle has every column, unlike the majority; seeds may have other numbers of candidates
    columns = [c for c in seeds[0]["oracle"] if all(c in seed["oracle"] for seed in seeds)]
    lines = []
    for name in seeds[0]:
        line = {"chosen by": name}
        for column in columns:
            values = [seed[name][column] for seed in seeds if column in seed.get(name, {})]
            line[column] = mean_and_spread(values) if len(values) == len(seeds) else "-"
        lines.append(line)
    return lines
