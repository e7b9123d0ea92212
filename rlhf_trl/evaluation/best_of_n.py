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
    candidates, and the pairwise accuracy within prompts. Each is exact over the subsets of n, but
    for the majority where there are very many. With `seeds`, each folder holds a run per seed, in
    seed-*, and the table is mean and standard deviation over them, each on its own candidates.
    """
    named = _named(runs)
    if not seeds:
        return _table([_compare(named)])
    by_run = {n: {p.name: p for p in sorted(at.glob("seed-*"))} for n, at in named.items()}
    if lacking := [named[name] for name, found in by_run.items() if not found]:
        told = f"{lacking[0]} holds no seed-* folders"
        raise InputError(f"{told}; leave --seeds out for a single run.")
    first, *others = by_run
    for name in others:
        if set(by_run[name]) != set(by_run[first]):
            raise InputError(
                f"{named[first]} holds {', '.join(by_run[first])} and {named[name]} "
                f"{', '.join(by_run[name])}; name runs with the same seeds."
            )
    return _table(
        [_compare({n: folders[seed] for n, folders in by_run.items()}) for seed in by_run[first]]
    )


def read_candidates(folder: str | Path) -> Candidates:
    """Return what stands in the scores.jsonl of a run."""
    path = Path(folder) / FILE
    if not path.is_file():
        hint = "; add --seeds, since it holds seeds" if any(Path(folder).glob("seed-*")) else ""
        raise InputError(f"{folder} holds no {FILE}{hint or '; name a finished reward model run'}.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            text, task = completion_text(row["completion"]), row.get("task") or ""
            found, scores = extract_answer(text), {k: float(v) for k, v in row["scores"].items()}
            answer = None if found is None else normalize(task, found)
            if not isinstance(row["label"], bool) or not scores:
                raise ValueError("its label is not true or false, or it has no scores")
            rows.append((row["prompt"], text, answer, row["label"], scores))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path}: line {number} is not a scored candidate ({type(error).__name__}: "
                f"{error}); evaluate the run again."
            ) from error
        if scores.keys() != rows[0][4].keys():
            raise InputError(
                f"{path}: line {number} has other scores than line 1; evaluate the run again."
            )
    if not rows:
        raise InputError(f"{path} is empty; evaluate the run again.")
    prompts, completions, answers, labels, scores = map(list, zip(*rows, strict=True))
    by_name = {name: [s[name] for s in scores] for name in scores[0]}
    return Candidates(prompts, completions, labels, answers, by_name)


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
    (first, one), *others = runs.items()
    for name, other in others:
        if other[:3] != one[:3]:  # they are the same, whoever scores them
            raise InputError(
                f"{folders[first] / FILE} and {folders[name] / FILE} hold other candidates; let "
                "both runs score the same samples-held-out.jsonl."
            )
    groups, labels = metrics.prompt_groups(one.prompts), one.labels
    sizes = metrics.budgets(groups)

    def row(scores: Sequence[float]) -> dict[str, float]:
        budget = metrics.ranking_by_budget(scores, labels, groups, sizes)
        over_all = metrics.ranking_metrics(scores, labels, groups)
        found = {f"n = {n}": share for n, share in budget.items()}
        columns = {"AUC": "auc", "pairwise": "pairwise_accuracy"}
        return found | {name: over_all[key] for name, key in columns.items() if key in over_all}

    table = {"random": row([0.0] * len(labels))}
    if any(answer is not None for answer in one.answers):  # else there is nothing to vote on
        votes = metrics.majority_by_budget(one.answers, labels, groups, sizes)
        table["majority of n"] = {f"n = {n}": share for n, share in votes.items()}
    for name, run in runs.items():
        for score, scores in run.scores.items():
            try:
                table[f"{name} ({score})"] = row(scores)
            except InputError as error:
                raise InputError(f"{folders[name] / FILE}, {score}: {error}") from error
    return table | {"oracle": row([float(label) for label in labels])}


def _table(seeds: list[dict[str, dict[str, float]]]) -> list[Line]:
    """Return mean and spread over seeds; a dash where a seed lacks the number."""
    columns = [c for c in seeds[0]["oracle"] if all(c in seed["oracle"] for seed in seeds)]
    lines = []
    for name in seeds[0]:
        line = {"chosen by": name}
        for column in columns:
            values = [seed[name][column] for seed in seeds if column in seed.get(name, {})]
            line[column] = mean_and_spread(values) if len(values) == len(seeds) else "-"
        lines.append(line)
    return lines
