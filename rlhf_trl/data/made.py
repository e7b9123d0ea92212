"""Examples of the tiny world: what its demonstrator shows."""

import random
import string
from collections.abc import Iterable, Mapping

from rlhf_trl.data.answers import as_completion, completion_text
from rlhf_trl.data.gym import Row
from rlhf_trl.data.steps import LETTERS, label_steps, split_steps
from rlhf_trl.errors import InputError
from rlhf_trl.tiny import demonstrator

# Kinds of demonstrations from the best to the worst: the nearer to the right answer, the better.
ERRORS = ["letters_swapped", "off_by_one", "last_letter_dropped", "last_term_ignored", "copied"]
ORDER = (demonstrator.RIGHT, *ERRORS, demonstrator.MALFORMED)
REPEATED = "letter_repeated"  # an error of synthetic traces beside the demonstrator's


def demonstrations(rows: Iterable[Row], kind: str, seed: int = 0) -> list[Row]:
    """Return one `prompt` and `completion` per row of `GymTasks`.

    `kind` is `imperfect` (the demonstrator's mixture of right and wrong answers), `right`, or
    `hinted`: imperfect ones, and one more per row, whose prompt ends with the answer to repeat.
    The answer to repeat is random letters, or the word's letters in another order, so that only
    copying is learned from it.
    """
    rng = random.Random(seed)
    if kind == "hinted":
        return demonstrations(rows, "imperfect", seed) + [_copied(row, rng) for row in rows]
    kinds = demonstrator.ONLY_RIGHT if kind == "right" else None
    return [
        {"prompt": row["prompt"], "completion": as_completion(_demonstration(row, rng, kinds))}
        for row in rows
    ]


def _copied(row: Row, rng: random.Random) -> Row:
    letters = list(row["answer"])
    rng.shuffle(letters)
    if rng.random() < 0.7:
        letters = rng.choices(string.ascii_lowercase, k=len(letters))
    text = demonstrator.COMPLETION.format("".join(letters))
    *before, last = row["prompt"]
    hinted = {**last, "content": f"{last['content']}\n{text}"}
    return {"prompt": [*before, hinted], "completion": as_completion(text)}


def _demonstration(row: Row, rng: random.Random, kinds: Mapping[str, float] | None) -> str:
    """Return an answer to a row; `kinds` is {kind: weight}, or None: the task's own mixture."""
    return demonstrator.demonstrate(row["task"], row["question"], row["answer"], rng, kinds)


def offline_pairs(rows: Iterable[Row], seed: int) -> list[Row]:
    """Return one pair per row of `GymTasks`: the right answer, and one of the usual errors."""
    rng = random.Random(seed)
    return [
        {
            "prompt": row["prompt"],
            "chosen": as_completion(_demonstration(row, rng, demonstrator.ONLY_RIGHT)),
            "rejected": as_completion(
                _demonstration(row, rng, demonstrator.only_errors(row["task"]))
            ),
        }
        for row in rows
    ]


def ranked_demonstrations(rows: Iterable[Row], length: int, seed: int) -> list[Row]:
    """Return, for each question, the right answer and `length` - 1 errors of different kinds.

    The answers are in `ORDER`, from best to worst. Questions with too few different answers are
    left out.
    """
    rng = random.Random(seed)
    ranked = []
    for row in rows:
        kinds = sorted(demonstrator.mixture(row["task"]), key=ORDER.index)  # the best one first
        if length > len(kinds):
            raise InputError(
                f"dataset.list_length: {row['task']} has {len(kinds)} kinds of demonstrations "
                f"({', '.join(kinds)}) and no lists of {length}; write {len(kinds)} or less."
            )
        # an error that a word does not allow is replaced by another one, so texts may repeat
        texts = list(dict.fromkeys(_demonstration(row, rng, {kind: 1.0}) for kind in kinds))
        if len(texts) < length:
            continue
        # the first text is the right answer; of the errors, some are drawn and keep their order
        places = [0, *sorted(rng.sample(range(1, len(texts)), length - 1))]
        completions = [as_completion(texts[place]) for place in places]
        ranked.append({"prompt": row["prompt"], "ranked": completions})
    return ranked


def synthetic_traces(rows: Iterable[Row], errors: float, seed: int) -> list[Row]:
    """Return one demonstration of each question, a share `errors` of them with an error.

    The demonstrator's errors and `REPEATED` (a letter written twice) are equally frequent.
    """
    rng = random.Random(seed)
    traces = []
    for row in rows:
        kind = demonstrator.RIGHT
        if rng.random() < errors:
            kind = rng.choice([REPEATED, *demonstrator.only_errors(row["task"])])
        if kind == REPEATED:
            place = rng.randrange(len(row["answer"])) + 1
            answer = row["answer"]
            text = demonstrator.COMPLETION.format(answer[:place] + answer[place - 1 :])
        else:
            text = _demonstration(row, rng, {kind: 1.0})
        traces.append({**row, "completion": as_completion(text)})
    return traces


def labeled_traces(rows: Iterable[Row], step_split: str) -> list[Row]:
    """Return `prompt`, `completions` and `labels` of answers; a blank one has no steps."""
    traces = []
    for row in rows:
        steps = split_steps(completion_text(row["completion"]), step_split)
        labels = label_steps(steps, row["answer"], row["task"])
        if steps:
            traces.append({"prompt": row["prompt"], "completions": steps, "labels": labels})
    return traces


def check_cut(rows: Iterable[Row], step_split: str) -> None:
    """Refuse a `step_split` that does not cut right answers into letters."""
    for row in rows:
        text = _demonstration(row, random.Random(0), demonstrator.ONLY_RIGHT)
        if set(label_steps(split_steps(text, step_split), row["answer"], row["task"])) != {1}:
            raise InputError(
                f"dataset.step_split: {step_split!r} does not cut {text!r} into letters; write "
                f"'{LETTERS}'."
            )
