"""Answers of several models as Markdown: the table, answers to some prompts, the best and worst."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_trl.evaluation import tables
from rlhf_trl.evaluation.side_by_side import Numbers, legend, table_lines
from rlhf_trl.evaluation.tables import SCORED_BY

PROMPTS = 10  # how many are shown with all answers; the file of answers has all of them
EXTREMES = 3  # how many of the best and of the worst answers of each model are shown
# Lines of the file of answers, one for each prompt: {model: {"question", "answer" (the right one or
# None), "greedy" (a text), "scores" (its scores), "samples": [{"text", "finished", "scores"}]}}.
Lines = Sequence[Mapping[str, Any]]


def as_markdown(heading: str, numbers: Mapping[str, Numbers], notes: str, lines: Lines) -> str:
    """Return a page on the answers of models: a table, answers to some prompts, best and worst.

    Args:
        heading: what the models answered.
        numbers: by model, as `compare` returns them.
        notes: a text that follows the legend of the table.
        lines: of the file of answers.
    """
    models = [*numbers]
    summary = tables.markdown(table_lines(numbers, deviations=True))
    parts = [f"# {heading}", summary, f"{legend(numbers)}; sd: standard deviation{notes}"]
    parts.append(f"## The first {min(PROMPTS, len(lines))} prompts, answered by all models")
    for line in lines[:PROMPTS]:
        parts += _side_by_side(line, models)
    first_sample = lines[0][models[0]]["samples"][0]  # all samples have scores of the same names
    score_name = _ranking_score(first_sample["scores"])
    if score_name:
        parts.append(f"## Best and worst sampled answers by {_with_spaces(score_name)}")
        for model in models:
            parts += _extremes(lines, model, score_name)
    return "\n\n".join(parts) + "\n"


def _ranking_score(scores: Mapping[str, float | None]) -> str | None:
    """Return the name of the score that ranks answers: --reward_model's, else "reward", if any."""
    names = [name for name in scores if name.startswith(SCORED_BY)]
    return next(iter(names), "reward" if "reward" in scores else None)


def _side_by_side(line: Mapping[str, Any], models: Sequence[str]) -> Iterator[str]:
    """Yield the parts of the page on one prompt, with the answers of all models."""
    first = line[models[0]]  # question and right answer are the same for all models
    yield "### Prompt"
    yield _literally(first["question"])
    if first["answer"] is not None:
        yield "right answer:"
        yield _literally(first["answer"])
    for model in models:
        scores = line[model]["scores"]
        yield f"**{model}**, greedily{_cut_off(not scores['cut_off'])}:"
        yield _literally(line[model]["greedy"])
        for sample in line[model]["samples"]:
            yield f"**{model}**, sampled{_cut_off(sample['finished'])}{_scores(sample['scores'])}:"
            yield _literally(sample["text"])


def _extremes(lines: Lines, model: str, score_name: str) -> Iterator[str]:
    """Yield the parts of the page on the best and the worst sampled answers of a model."""
    ranked = []  # (value, question, sample)
    for line in lines:
        for sample in line[model]["samples"]:
            value = sample["scores"][score_name]
            if value is not None:
                ranked.append((value, line[model]["question"], sample))
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    best = ranked[:EXTREMES]
    worst = ranked[: -EXTREMES - 1 : -1]  # from the worst one up
    yield f"### {model}"
    for word, entries in (("best", best), ("worst", worst)):
        for value, question, sample in entries:
            yield f"{word}, {_with_spaces(score_name)} {value:.3f}{_cut_off(sample['finished'])}:"
            yield _literally(f"{question}\n-> {sample['text']}")


def _scores(scores: Mapping[str, float | None]) -> str:
    """Return a sample's scores that apply, in brackets, without length and cut_off."""
    left_out = ("length", "cut_off")  # told in other words, or not at all
    values = [
        f"{_with_spaces(name)} {value:.3f}"
        for name, value in scores.items()
        if value is not None and name not in left_out
    ]
    return f" ({', '.join(values)})" if values else ""


def _cut_off(finished: bool) -> str:
    return "" if finished else ", cut off at the length limit"


def _with_spaces(name: str) -> str:
    return name.replace("_", " ")


def _literally(text: str) -> str:
    """Return a text as a block in which Markdown changes nothing."""
    lines = text.splitlines() if text.strip() else ["(nothing)"]
    return "\n".join(f"    {line}" for line in lines)
