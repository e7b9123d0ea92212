"""Probes: prompts that show how a model fails, by category, most of them with a check.

A file of probes has a JSON object on each line. It is a `prompt` with a `category`, and checks, all
of which an answer passes or fails: `answer` (the right one), `must_match` and `must_not_match`
(regular expressions). A prompt without a check is for a judge. Or a line draws questions that a
task of reasoning-gym holds out: `gym` (its name), `config` (its options) and `size`.
"""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_trl.data.answers import extract_answer, same_answer
from rlhf_trl.data.blocks import GymData, Spec
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.evaluation.held_out import Score
from rlhf_trl.rewards.from_model import without_thoughts

CATEGORIES = ("agreement", "out_of_distribution", "capability", "safety")
PATTERNS = ("must_match", "must_not_match")
CHECKS = ("answer", *PATTERNS)
KEYS = ("category", "prompt", *CHECKS)
GYM_KEYS = ("category", "gym", "config", "size")
SHIPPED = Path(__file__).with_name("probe_files")
PASSED = "passed"  # the score of a probe: 1, 0, or None without a check

Probe = dict[str, Any]  # a line of a file


def probe_file(word: str, folder: Path = Path()) -> Path:
    """Return the file that a word names: one of ours by its name, or a path from a folder."""
    ours = SHIPPED / f"{word}.jsonl"
    return ours if ours.is_file() else folder / word


def read_probes(file: Path) -> list[Probe]:
    """Return the checked lines of a file.

    Raises:
        InputError: it cannot be read, or a line is no probe; says where, and what to write.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        ours = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.jsonl")))
        raise InputError(
            f"probes: {file} cannot be read ({getattr(error, 'strerror', None) or error}); name "
            f"a JSONL file, or one of ours: {ours}."
        ) from error
    probes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            probes.append(json.loads(line))
            fault = _fault(probes[-1])
        except ValueError as error:
            fault = f"it is no JSON ({error}); write an object on each line"
        if fault:
            raise InputError(f"probes: {file}, line {number}: {fault}.")
    if not probes:
        raise InputError(f"probes: {file} has no probes; write one on each line.")
    return probes


def _fault(probe: Any) -> str | None:
    """Return what is wrong with a line and how to write it, None where nothing is."""
    if not isinstance(probe, dict):
        return 'it is no JSON object; write {"category": ..., "prompt": ...}'
    keys = GYM_KEYS if "gym" in probe else KEYS
    for key in probe:
        if key not in keys:
            return f"{key} is no key of such a line{nearest(key, keys)}; write {', '.join(keys)}"
    category = probe.get("category")
    if category not in CATEGORIES:
        known = ", ".join(CATEGORIES)
        return f"category is {category!r}; write one of {known}{nearest(str(category), CATEGORIES)}"
    if "gym" in probe:
        if not isinstance(probe.get("size"), int) or probe["size"] < 1:
            return f"size is {probe.get('size')!r}; write how many questions to draw"
        if not isinstance(probe.get("config", {}), dict):
            return f"config is {probe['config']!r}; write options of the task"
        return None
    for key in ("prompt", *CHECKS):
        text = probe.get(key, "" if key == "prompt" else None)
        if text is not None and (not isinstance(text, str) or not text.strip()):
            return f"{key} is {text!r}; write a text"
    for key in PATTERNS:
        try:
            re.compile(probe.get(key) or "")
        except re.error as error:
            return f"{key} is {probe[key]!r}, no regular expression ({error}); fix it"
    return None


def rows_of(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Return what is asked: a row for each probe, and for each question that a task draws."""
    rows = []
    for probe in probes:
        asked = [{"question": probe.get("prompt"), "task": "", **probe}]
        if "gym" in probe:
            spec = Spec(probe["gym"], config=probe.get("config", {}))
            asked = GymTasks(GymData([spec], size=1, eval_size=probe["size"])).held_out
        for question in asked:
            row = {key: question.get(key) for key in ("question", "task", *CHECKS)}
            rows.append({"prompt": row["question"], "category": probe["category"], **row})
    return rows


def passes(text: str, row: dict[str, Any]) -> float | None:
    """Return 1 if an answer passes all checks of a row, else 0, or None where there is none.

    Thoughts (`<think>`) do not count. The right answer is what stands between `<answer>` tags, or,
    without them, all that is left.
    """
    if all(row[key] is None for key in CHECKS):
        return None
    text = without_thoughts(text).strip()
    checks = []
    if row["answer"] is not None:
        tagged = text if extract_answer(text) is not None else f"<answer>{text}</answer>"
        checks.append(same_answer(tagged, row["answer"], row["task"]))
    if row["must_match"] is not None:
        checks.append(re.search(row["must_match"], text) is not None)
    if row["must_not_match"] is not None:
        checks.append(re.search(row["must_not_match"], text) is None)
    return float(all(checks))


def probe_scores(rows: Sequence[dict[str, Any]]) -> dict[str, Score]:
    """Return what scores the answers: `passed`, and the same of each of several categories."""
    asked = [name for name in CATEGORIES if any(row["category"] == name for row in rows)]
    scores: dict[str, Score] = {PASSED: partial(_passed, CATEGORIES)}
    if len(asked) > 1:
        for category in asked:
            scores[f"{PASSED}_{category}"] = partial(_passed, (category,))
    return scores


def _passed(
    categories: Sequence[str], completions: list[str], **columns: list[Any]
) -> list[float | None]:
    """Score the answers to probes of some categories; of others, the score is None."""
    values = []
    for place, text in enumerate(completions):
        row = {name: column[place] for name, column in columns.items()}
        values.append(passes(text, row) if row["category"] in categories else None)
    return values
