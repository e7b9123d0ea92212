"""The page of a pipeline: tables, sentences, figures and samples in one HTML file."""

import base64
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_trl.evaluation.probes import CATEGORIES
from rlhf_trl.evaluation.tables import Line, markdown
from rlhf_trl.output import write_whole
from rlhf_trl.pipeline.analysis import as_markdown, chapters
from rlhf_trl.pipeline.figures import draw_distributions, draw_frontier, draw_training
from rlhf_trl.pipeline.frontier import CLEAR, over_optimization, penalty_against_stopping
from rlhf_trl.pipeline.results import (
    COLUMNS,
    FEWEST,
    Answers,
    Results,
    Sample,
    over_seeds,
    place_of,
    read_results,
    summary,
    with_content,
)
from rlhf_trl.run.race import REWARDS
from rlhf_trl.run.yaml_loader import dump_yaml

QUESTIONS = 12  # answered side by side, drawn at random
EXTREMES = 5  # best and worst samples of each model
# What supervised training on the gym's tasks learns from, by its config's `demonstrator`.
DEMONSTRATORS = {
    "right": "right answers",
    "imperfect": "answers of an imperfect demonstrator",
    "hinted": "answers of a demonstrator with hints",
}
LABELED = {  # of reward models that learn from other data than pairs
    "orm": "answers that are right or wrong",
    "prm": "steps that are right or wrong",
    "kwise": "lists ranked by the right answers",
}


def write_page(folder: str | Path) -> Path:
    """Write page, figures, `table.md` and `ANALYSIS.md` of a pipeline; return the page.

    Raises:
        InputError: the folder is not that of a pipeline that has run to its end.
    """
    from jinja2 import Environment, StrictUndefined

    results = read_results(folder)
    folder = Path(folder)
    figures = {
        "frontier.png": draw_frontier,
        "distributions.png": draw_distributions,
        "training.png": draw_training,
    }
    for name, draw in figures.items():
        draw(folder / name, results)
    sections = sections_of(results)
    write_whole(folder / "table.md", _as_markdown(sections))
    write_whole(folder / "ANALYSIS.md", as_markdown(results, sections["chapters"]))
    images = {name: base64.b64encode((folder / name).read_bytes()).decode() for name in figures}
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    target = folder / "page.html"
    write_whole(target, environment.from_string(template).render(**sections, images=images))
    return target


def sections_of(results: Results) -> dict[str, Any]:
    """Return what the page shows, apart from the figures: tables, sentences and texts."""
    table = [
        {
            "model": line["model"],  # before `line`, for the order of the columns
            "learned from": learned_from(results, name) if name in results.stages else "-",
            **line,
        }
        for name, line in zip(results.models, summary(results), strict=True)
    ]
    first = results.ends(results.reference)[0]
    preview = results.folder / "preview.json"
    return {
        "name": str(results.folder),
        "seeds": len(results.seeds),
        "questions": len(first.questions),
        "samples": len(first.samples[0]),
        "reference": results.title(results.reference),
        "gold": results.gold,
        "fewest": FEWEST,
        "clear": CLEAR,
        "preview": _preview(json.loads(preview.read_text())) if preview.is_file() else [],
        "table": table,
        "reward_models": _reward_models(results),
        "sentences": [*over_optimization(results), *penalty_against_stopping(results)],
        "curves": {results.title(name): _curve(results, name) for name in results.with_curve()},
        "chapters": chapters(results),
        "side_by_side": _side_by_side(
            {results.title(name): results.ends(name)[0] for name in results.models}
        ),
        "probes": _probes(results),
        "extremes": {results.title(name): _extremes(results, name) for name in results.models},
        "settings": {results.title(name): _settings(results, name) for name in results.stages},
    }


def _as_markdown(sections: Mapping[str, Any]) -> str:
    """Return the tables of models and the sentences as Markdown."""
    parts = [markdown(sections["table"])]
    if sections["reward_models"]:
        parts.append(markdown(sections["reward_models"]))
    parts.append("\n".join(f"- {sentence}" for sentence in sections["sentences"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def learned_from(results: Results, stage: str) -> str:
    """Return what a stage learned from: who said which answers are good."""
    config = results.config(stage)
    data = config.get("dataset", {})
    learns_answers = results.stages[stage]["recipe"] == "recipes/sft.py"
    sources = []  # rewards; of a stage without any, the data
    for name in config.get("reward_funcs") or []:
        sources.append(f"right answers ({name})" if name == results.gold else f"the reward {name}")
    if config.get("reward_model"):
        sources.append(_judge(results, config["reward_model"]))
    if not sources and data.get("scored_by"):
        sources.append(f"pairs ranked by {_judge(results, data['scored_by'])}")
    elif not sources and data.get("path"):
        sources.append(f"{'answers' if learns_answers else 'labels'} of {data['path']}")
    elif not sources and learns_answers:
        sources.append(DEMONSTRATORS[config.get("demonstrator", "imperfect")])
    elif not sources and (algorithm := config.get("algorithm")) in LABELED:
        sources.append(LABELED[algorithm])
    elif not sources:
        kind = data.get("pairs", "offline").replace("_", "-")
        sources.append(f"{kind} pairs ranked by the right answers")
    return ", ".join(sources)


def _judge(results: Results, path: str) -> str:
    """Return what people call a reward model."""
    stage, _ = place_of(path, results.stages)
    if stage in results.stages and results.title(stage) != stage:
        return results.title(stage)
    return f"reward model {stage}"


def _reward_models(results: Results) -> list[Line]:
    """Return a line for each reward model: what it learned from, and its held-out metrics."""
    lines = []
    for name, stage in results.stages.items():
        if stage["makes"] != "reward_model":
            continue
        summaries = [results.read_json(name, seed, "summary.json") for seed in results.seeds]
        line = {"reward model": results.title(name), "learned from": learned_from(results, name)}
        for heading, key in REWARDS.items():
            line[heading] = over_seeds([one.get("after", {}).get(key) for one in summaries])
        lines.append(line)
    return with_content(lines)


def _curve(results: Results, stage: str) -> list[Line]:
    """Return a line for each step of a run with checkpoints: mean and spread over seeds."""
    curves = [dict(results.curve(stage, seed)) for seed in results.seeds]
    lines = []
    for step in sorted(set.union(*map(set, curves))):
        answers = [curve[step] for curve in curves if step in curve]
        line = {"step": str(step)}
        for key in ("kl", "proxy", "gold"):
            heading, digits = COLUMNS[key]
            line[heading] = over_seeds([one.mean(key) for one in answers], digits)
        lines.append(line)
    return lines


def _settings(results: Results, stage: str) -> dict[str, str]:
    """Return how a stage is started, what it was made from, and its config."""
    planned = results.stages[stage]
    summary_of_run = results.read_json(stage, results.seeds[0], "summary.json")
    made_from = [
        f"{entry['role']}: {entry['path']} ({entry['sha256'][:12]})"
        for entry in summary_of_run.get("made_from", [])
    ]
    return {
        "recipe": " ".join([planned["recipe"], "--config", planned["config"]]),
        "options": " ".join(map(str, planned.get("options", []))),
        "made from": ", ".join(made_from),
        "config": dump_yaml(results.config(stage)),
    }


def _side_by_side(answers: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """Return some questions with one sampled answer of each model."""
    questions = next(iter(answers.values())).questions
    places = sorted(random.Random(0).sample(range(len(questions)), min(QUESTIONS, len(questions))))
    return [
        {
            "question": questions[place],
            "answers": {name: _shown(of.samples[place][0]) for name, of in answers.items()},
        }
        for place in places
    ]


def _probes(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Return some probes of each category with one sampled answer of each model."""
    seed = results.seeds[0]
    return {
        category.replace("_", " "): _side_by_side(
            {results.title(name): results.probes[category, name, seed] for name in results.models}
        )
        for category in CATEGORIES
        if (category, results.reference, seed) in results.probes
    }


def _extremes(results: Results, stage: str) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of a model that the reward model likes best, and least."""
    answers: Answers = results.ends(stage)[0]
    samples = [
        (sample.proxy, {"question": question, **_shown(sample)})
        for question, row in zip(answers.questions, answers.samples, strict=True)
        for sample in row
        if sample.proxy is not None
    ]
    samples.sort(key=lambda one: -one[0])
    ordered = [sample for _, sample in samples]
    return {"best": ordered[:EXTREMES], "worst": ordered[: -EXTREMES - 1 : -1]}


def _shown(sample: Sample) -> dict[str, Any]:
    """Return a sample as the page takes it, its numbers as text."""
    numbers = {
        name: "-" if value is None else f"{value:.2f}"
        for name, value in sample._asdict().items()
        if name in ("proxy", "gold", "kl")
    }
    return {"text": sample.text, "finished": sample.finished, "numbers": numbers}


def _preview(content: Any) -> list[Line]:
    """Return what `rlhf-trl preview --json` wrote, a line for each number.

    Blocks beside each other, as those of several stages, are columns.
    """
    blocks = content if isinstance(content, dict) else {}
    if not blocks or not all(isinstance(block, dict) for block in blocks.values()):
        blocks = {"value": content}
    columns = {name: _flat(block) for name, block in blocks.items()}
    places = dict.fromkeys(place for column in columns.values() for place in column)
    return [
        {"": place, **{name: column.get(place, "-") for name, column in columns.items()}}
        for place in places
    ]


def _flat(value: Any, place: str = "") -> dict[str, str]:
    """Return the values of nested blocks and lists, as text, by where they stand."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value, 1)
    elif value is None:
        return {place: "-"}
    else:
        return {place: f"{value:.4g}" if isinstance(value, float) else str(value)}
    flat: dict[str, str] = {}
    for key, item in items:
        name = str(key).replace("_", " ")
        flat |= _flat(item, f"{place}, {name}" if place else name)
    return flat
