"""What a judge has said of a pipeline's answers, where `rlhf-trl judge` has left it beside them."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.pairwise import Outcome, Pair
from rlhf_trl.output import read_lines

Place = tuple[str | None, str, int]  # category of probes (None: held-out questions), model, seed


def read_verdicts(folder: Path, seeds: Sequence[int], reference: str) -> dict[Place, Outcome]:
    """Return what became of the pairs of each model, from `verdicts-NAME.jsonl`, where it is there.

    Args:
        folder: of the files of answers, `seed-S.jsonl` and `probes-seed-S.jsonl`.
        seeds: of the pipeline.
        reference: the model that all others must be compared with.

    Raises:
        InputError: verdicts are of other answers, or by a score in place of a judge.
    """
    pairs: dict[Place, list[Pair]] = defaultdict(list)
    for seed in seeds:
        for name in (f"seed-{seed}", f"probes-seed-{seed}"):
            path, answers = folder / f"verdicts-{name}.jsonl", folder / f"{name}.jsonl"
            if not path.is_file():
                continue
            try:
                for category, pair in _read(path, answers, reference):
                    pairs[category, pair.model, seed].append(pair)
            except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
                raise InputError(
                    f"{path} cannot be used ({error}); move it away, and let rlhf-trl judge "
                    f"{answers} --output {path.with_suffix('')} write another."
                ) from error
    return {place: Outcome(of_place) for place, of_place in pairs.items()}


def _read(path: Path, answers: Path, reference: str) -> list[tuple[str | None, Pair]]:
    """Return the pairs of a file, each with its category; they must be of the `answers` of now."""
    categories: dict[str, str | None] = {}  # by prompt
    texts: dict[tuple[str, str], set[str]] = defaultdict(set)  # by prompt and model
    for line in read_lines(answers):
        prompt = json.dumps(line.pop("prompt"))
        for model, entry in line.items():
            categories[prompt] = entry.get("category")
            texts[prompt, model] |= {entry["greedy"], *(s["text"] for s in entry["samples"])}
    pairs = []
    for row in read_lines(path):
        pair = Pair(**row)
        prompt = json.dumps(pair.prompt)
        if any(score is not None for score in pair.scores):
            raise ValueError(f"{pair.by} is a score, and no judge")
        if pair.first != reference:
            raise ValueError(f"it compares with {pair.first}, not with {reference}")
        for model, text in zip((pair.first, pair.model), pair.answers, strict=True):
            if text not in texts[prompt, model]:
                raise ValueError(f"{answers.name} has other answers of {model} now")
        pairs.append((categories[prompt], pair))
    return pairs
