"""What a pipeline has left in its folder: answers of all models, and the table made of them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.pairwise import Outcome
from rlhf_trl.evaluation.probes import CATEGORIES, PASSED
from rlhf_trl.evaluation.tables import SCORED_BY, Line, mean_and_spread
from rlhf_trl.output import read_lines
from rlhf_trl.pipeline.verdicts import read_verdicts
from rlhf_trl.reward_models.metrics import ranking_metrics
from rlhf_trl.run.config_files import read_config

FEWEST = 20  # right answers, and wrong ones; with fewer of either, an AUC says nothing
# Columns of the summary: what `measure` calls them, their heading and digits.
COLUMNS = {
    "greedy": ("gold, greedy", 3),
    "gold": ("gold, sampled", 3),
    "proxy": ("proxy", 2),
    "kl": ("KL", 2),
    "k1": ("KL, k1", 2),
    "tokens": ("tokens", 1),
    "cut_off": ("cut off", 3),
    "win": ("win", 3),
    "tie": ("tie", 3),
    "loss": ("loss", 3),
}


class Sample(NamedTuple):
    """One sampled answer; a number that does not apply is None."""

    text: str
    finished: bool  # False: the length limit cut it off
    tokens: int
    proxy: float | None  # what the reward model gives it
    gold: float | None  # what is really wanted
    kl: float | None  # exact, to the reference, in nats
    k1: float | None  # its estimate from the sampled tokens alone


@dataclass(frozen=True)
class Answers:
    """What one model answered to all held-out questions."""

    questions: list[str]
    greedy: list[float | None]  # gold of the greedy answers
    samples: list[list[Sample]]  # of each question, as many
    greedy_proxy: list[float | None] = field(default_factory=list)  # of the greedy answers

    def values(self, name: str) -> np.ndarray:
        """Return a number of all samples, (questions, samples), NaN where it does not apply."""
        return np.array(
            [[getattr(sample, name) for sample in row] for row in self.samples], dtype=float
        )

    def mean(self, name: str) -> float:
        """Return the mean of a number over all samples to which it applies, else NaN."""
        return _mean(self.values(name))

    def by_question(self, name: str) -> np.ndarray:
        """Return the mean of a number over the samples of each question."""
        return self.values(name).mean(1)


class Point(NamedTuple):
    """A model on the way of a run."""

    step: int
    answers: Answers


@dataclass(frozen=True)
class Results:
    """A pipeline's folder, read."""

    folder: Path
    stages: dict[str, dict[str, Any]]  # as in pipeline.json
    seeds: list[int]
    reference: str  # the stage, or the word for the model, that KL and wins are measured to
    gold: str | None  # the score that says what is really wanted
    # by stage (or word), step (None: the model that the run ends with) and seed
    answers: dict[tuple[str, int | None, int], Answers]
    # to the probes of a category, by the latter, stage (or word) and seed; passing them is gold
    probes: dict[tuple[str, str, int], Answers] = field(default_factory=dict)
    # what a judge has said of either; its category is None for the held-out questions
    verdicts: dict[tuple[str | None, str, int], Outcome] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """The reference, and the stages whose models answered."""
        answered = {stage for stage, _, _ in self.answers}
        others = [name for name in self.stages if name in answered and name != self.reference]
        return [self.reference, *others]

    def title(self, name: str) -> str:
        """Return what people call a stage, or the reference where it is none."""
        if name not in self.stages:
            return f"{name} (reference)"
        titles = [stage.get("title") for stage in self.stages.values()]
        title = self.stages[name].get("title")
        return title if title and titles.count(title) == 1 else name

    def run(self, stage: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / stage / f"seed-{seed}"

    def read_json(self, stage: str, seed: int, name: str) -> dict[str, Any]:
        """Return a file of a run, {} where there is none."""
        path = self.run(stage, seed) / name
        return json.loads(path.read_text()) if path.is_file() else {}

    def config(self, stage: str, seed: int | None = None) -> dict[str, Any]:
        """Return the config of a run, by default that of the first seed."""
        return read_config(self.run(stage, self.seeds[0] if seed is None else seed) / "config.yaml")

    def ends(self, stage: str) -> list[Answers]:
        """Return what a model, or that of the end of a run, answered with each seed."""
        return [self.answers[stage, None, seed] for seed in self.seeds]

    def beside_reference(
        self, name: str, seed: int, category: str | None = None
    ) -> tuple[Answers, Answers]:
        """Return what the reference and a model answered, to probes if a category is named."""
        if category is None:
            return self.answers[self.reference, None, seed], self.answers[name, None, seed]
        return self.probes[category, self.reference, seed], self.probes[category, name, seed]

    def curve(self, stage: str, seed: int) -> list[Point]:
        """Return the models of a run by step; a run that began with the reference begins there."""
        end = self.read_json(stage, seed, "summary.json").get("model_step", 0)
        points = {
            end if step is None else step: answers
            for (name, step, of_seed), answers in self.answers.items()
            if (name, of_seed) == (stage, seed)
        }
        start = self.config(stage, seed).get("model_name_or_path", "")
        if place_of(start, self.stages)[0] == self.reference:
            points[0] = self.answers[self.reference, None, seed]
        return [Point(step, points[step]) for step in sorted(points)]

    def with_curve(self) -> list[str]:
        """Return the stages whose checkpoints answered, too."""
        with_steps = {stage for stage, step, _ in self.answers if step is not None}
        return [name for name in self.models if name in with_steps]


def read_results(folder: str | Path) -> Results:
    """Read the folder of a pipeline.

    Raises:
        InputError: it has no `pipeline.json`, or a seed lacks the answers of a model.
    """
    folder = Path(folder)
    content = _load(folder / "pipeline.json", folder)
    stages, asked = content["stages"], content["answers"]
    seeds = list(range(content["seeds"]))
    # a plan may leave it open; the file of any seed names it, as all seeds have the same
    numbers = _load(folder / "answers" / f"seed-{seeds[0]}.json", folder)
    reference = place_of(numbers["reference"], stages)[0]
    answers = {}
    for seed in seeds:
        lines = _load(folder / "answers" / f"seed-{seed}.jsonl", folder)
        for word in lines[0].keys() - {"prompt"}:
            place = place_of(word, stages)
            answers[*place, seed] = _answers([line[word] for line in lines], asked["gold"])
    probes = _read_probes(folder, stages, seeds) if asked.get("probes") else {}
    outcomes = read_verdicts(folder / "answers", seeds, numbers["reference"])
    verdicts = {}
    for (category, word, seed), outcome in outcomes.items():
        stage, step = place_of(word, stages)
        if step is None:
            verdicts[category, stage, seed] = outcome
    ends = {stage for stage, step, _ in answers if step is None} | {reference}
    for stage, seed in product(sorted(ends), seeds):
        if (stage, None, seed) not in answers:
            raise InputError(
                f"{folder}/answers/seed-{seed}.jsonl has no answers of {stage}; move seed-{seed}.* "
                "away from there and start the pipeline again."
            )
    return Results(folder, stages, seeds, reference, asked["gold"], answers, probes, verdicts)


def _read_probes(
    folder: Path, stages: dict[str, Any], seeds: Sequence[int]
) -> dict[tuple[str, str, int], Answers]:
    """Return what the ends of runs answered to probes: `Results.probes`."""
    probes = {}
    for seed in seeds:
        lines = _load(folder / "answers" / f"probes-seed-{seed}.jsonl", folder)
        for word, category in product(sorted(lines[0].keys() - {"prompt"}), CATEGORIES):
            replies = [line[word] for line in lines if line[word]["category"] == category]
            if replies:
                probes[category, place_of(word, stages)[0], seed] = _answers(replies, PASSED)
    return probes


def _load(path: Path, folder: Path) -> Any:
    """Return the content of a JSON file, or the list of that of a JSONL file's lines."""
    try:
        return read_lines(path) if path.suffix == ".jsonl" else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read ({getattr(error, 'strerror', error)}); name the folder of a "
            f"pipeline that has run to its end, or start that of {folder} again."
        ) from error


def place_of(word: str, stages: dict[str, Any]) -> tuple[str, int | None]:
    """Return the stage and step of a model, `OUT/STAGE/seed-S` with `/checkpoint-N` or `/model`.

    Any other word stands for itself, and has no step.
    """
    parts = Path(word.removesuffix("/model")).parts
    step = None
    if parts and parts[-1].startswith("checkpoint-"):
        step = int(parts[-1].removeprefix("checkpoint-"))
        parts = parts[:-1]
    if len(parts) > 1 and parts[-1].startswith("seed-") and parts[-2] in stages:
        return parts[-2], step
    return word, None


def _answers(replies: Sequence[dict[str, Any]], gold: str | None) -> Answers:
    """Return what a model replied to each prompt, as `rlhf-trl evaluate` writes it."""
    return Answers(
        questions=[reply["question"] for reply in replies],
        greedy=[reply["scores"].get(gold) for reply in replies],
        samples=[[_sample(sample, gold) for sample in reply["samples"]] for reply in replies],
        greedy_proxy=[_proxy(reply["scores"]) for reply in replies],
    )


def _sample(sample: dict[str, Any], gold: str | None) -> Sample:
    scores = sample["scores"]
    return Sample(
        text=sample["text"],
        finished=sample["finished"],
        tokens=sample["tokens"],
        proxy=_proxy(scores),
        gold=scores.get(gold),
        kl=scores.get("kl"),
        k1=scores.get("kl_k1"),
    )


def _proxy(scores: dict[str, float | None]) -> float | None:
    """Return what the reward model gives an answer, None where there is no reward model."""
    return next((value for name, value in scores.items() if name.startswith(SCORED_BY)), None)


def measure(answers: Answers, reference: Answers) -> dict[str, float]:
    """Return what the summary shows of a model; NaN is what does not apply.

    `win`, `tie` and `loss` are shares of the pairs of an answer and one of the reference's to the
    same question, by gold; the reference has none. `auc` is that of the proxy against gold, whose
    right answers have more than 0.5.
    """
    gold = answers.values("gold")
    numbers = {name: answers.mean(name) for name in ("gold", "proxy", "kl", "k1", "tokens")}
    numbers["greedy"] = _mean(np.array(answers.greedy, dtype=float))
    numbers["cut_off"] = 1 - answers.mean("finished")
    better = gold[:, :, None] - reference.values("gold")[:, None, :]
    better = better[np.isfinite(better)] if answers is not reference else np.array([])
    numbers["win"] = _mean((better > 0).astype(float))
    numbers["tie"] = _mean((better == 0).astype(float))
    numbers["loss"] = _mean((better < 0).astype(float))
    proxy = answers.values("proxy")
    known = np.isfinite(gold) & np.isfinite(proxy)
    right = gold[known] > 0.5
    numbers["right"], numbers["wrong"] = int(right.sum()), int((~right).sum())
    numbers["auc"] = math.nan
    if min(numbers["right"], numbers["wrong"]) >= FEWEST:
        one_group = [0] * len(right)  # an AUC does not tell questions apart
        numbers["auc"] = ranking_metrics(proxy[known], right, one_group)["auc"]
    return numbers


def summary(results: Results) -> list[Line]:
    """Return a line for each model: mean and standard deviation over seeds of each number."""
    lines = []
    for name in results.models:
        by_seed = [
            measure(answers, reference)
            for answers, reference in zip(
                results.ends(name), results.ends(results.reference), strict=True
            )
        ]
        line = {"model": results.title(name)}
        for key, (heading, digits) in COLUMNS.items():
            line[heading] = over_seeds([of_seed[key] for of_seed in by_seed], digits)
        line["AUC of the proxy"] = _auc_cell(by_seed)
        lines.append(line)
    return with_content(lines)


def with_content(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of a table with the columns in which some line has something to say."""
    columns = lines[0] if lines else ()
    shown = [key for key in columns if any(line[key] != "-" for line in lines)]
    return [{key: line[key] for key in shown} for line in lines]


def over_seeds(values: Sequence[float | None], digits: int = 3) -> str:
    """Return mean and spread of the values that apply, and of how many seeds if not of all."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "-"
    part = "" if len(known) == len(values) else f" in {len(known)} of {len(values)} seeds"
    return mean_and_spread(known, digits) + part


def _auc_cell(by_seed: Sequence[dict[str, float]]) -> str:
    """Return the AUC, "-" where it says nothing, and what it rests on, in the mean over seeds."""
    right = np.mean([of_seed["right"] for of_seed in by_seed])
    wrong = np.mean([of_seed["wrong"] for of_seed in by_seed])
    if not right + wrong:
        return "-"
    auc = over_seeds([of_seed["auc"] for of_seed in by_seed])
    return f"{auc} ({right:.0f} right, {wrong:.0f} wrong)"


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan
