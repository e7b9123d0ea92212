"""A demonstrator that is right only part of the time, so that a warm start leaves RL work to do."""

import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rlhf_trl.errors import InputError, nearest

COMPLETION = "<think></think><answer>{}</answer>"
RIGHT, MALFORMED = "right", "malformed"

# How often a demonstration is of each kind, per task; `*` is every task without an entry.
MIXTURES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "spell_backward": {
            RIGHT: 0.26,
            "copied": 0.44,
            "last_letter_dropped": 0.10,
            "letters_swapped": 0.12,
            MALFORMED: 0.08,
        },
        "chain_sum": {
            RIGHT: 0.66,
            "last_term_ignored": 0.20,
            "off_by_one": 0.06,
            MALFORMED: 0.08,
        },
        "*": {RIGHT: 0.40, "letters_swapped": 0.26, "last_letter_dropped": 0.26, MALFORMED: 0.08},
    }
)
ONLY_RIGHT: Mapping[str, float] = MappingProxyType({RIGHT: 1.0})


def mixture(task: str) -> dict[str, float]:
    """Return the share of each kind of demonstration for a `task` of reasoning-gym, adding to 1."""
    return dict(MIXTURES.get(task, MIXTURES["*"]))


def only_errors(task: str) -> dict[str, float]:
    """Return the mixture of `task` without its right answers: weights, in the same proportions."""
    return {kind: weight for kind, weight in mixture(task).items() if kind != RIGHT}


def demonstrate(
    task: str,
    question: str,
    answer: str,
    rng: random.Random,
    mixture: Mapping[str, float] | None = None,
) -> str:
    """Return the text of one demonstration, without the end token.

    Args:
        task (`str`):
            Name of the reasoning-gym task; a task without a mixture of its own has that of `*`.
        question (`str`):
            The question, verbatim.
        answer (`str`):
            Its right answer.
        rng (`random.Random`):
            Source of every choice: equal state, equal demonstration.
        mixture (`Mapping[str, float]`, *optional*):
            Weight of each kind in place of the task's own: `ONLY_RIGHT`, `only_errors(task)`, or
            any other choice among the task's kinds. Weights need not add to 1.

    Every kind but `right` gives another completion than the right one. If the kind drawn happens to
    give the right answer (a palindrome copied, a last term of 0 ignored), it is replaced by an
    error that never does: a dropped letter, or a sum off by one.

    Raises:
        InputError: a kind that the task does not have, or weights that choose nothing.
    """
    task_mixture = MIXTURES.get(task, MIXTURES["*"])
    weights = task_mixture if mixture is None else mixture
    # `mixture` comes from the caller, so its kinds and weights are checked
    for kind, weight in weights.items():
        if kind not in task_mixture:
            raise InputError(
                f"demonstrator: task {task!r} has no demonstration of kind {kind!r}"
                f"{nearest(kind, task_mixture)}; it has {', '.join(task_mixture)}."
            )
        if not 0 <= weight < float("inf"):
            raise InputError(
                f"demonstrator: the weight of {kind!r} is {weight}; write a number of 0 or more."
            )
    if not sum(weights.values()) > 0:
        raise InputError("demonstrator: the weights are all 0; give one kind a positive weight.")
    kind = rng.choices(list(weights), list(weights.values()))[0]
    if kind == RIGHT:
        return COMPLETION.format(answer)
    if kind == MALFORMED:
        return _malformed(answer, rng)
    wrong = _ERRORS[kind](question, answer, rng)
    if wrong is None or wrong.strip() == answer.strip():
        last_resort = "off_by_one" if "off_by_one" in task_mixture else "last_letter_dropped"
        wrong = _ERRORS[last_resort](question, answer, rng)
    return COMPLETION.format(wrong)


def _malformed(answer: str, rng: random.Random) -> str:
    """The right answer where no parser finds it: without `<answer>`, or without any tag."""
    return rng.choice([COMPLETION.replace("<answer>", ""), "{}"]).format(answer.strip())


def _copied(question: str, answer: str, rng: random.Random) -> str:
    """The word of a `spell_backward` question, which is its answer read backward."""
    return answer[::-1]


def _last_letter_dropped(question: str, answer: str, rng: random.Random) -> str:
    return answer.strip()[:-1]


def _letters_swapped(question: str, answer: str, rng: random.Random) -> str | None:
    n = len(answer)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n) if answer[i] != answer[j]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    return answer[:i] + answer[j] + answer[i + 1 : j] + answer[i] + answer[j + 1 :]


def _last_term_ignored(question: str, answer: str, rng: random.Random) -> str | None:
    last_term = re.search(r"([+-]) (\d+) =$", question.strip())
    if last_term is None:
        return None
    sign, number = last_term.groups()
    return str(int(answer) - int(sign + number))


def _off_by_one(question: str, answer: str, rng: random.Random) -> str:
    return str(int(answer) + rng.choice((-1, 1)))


_ERRORS: Mapping[str, Callable[[str, str, random.Random], str | None]] = MappingProxyType(
    {
        "copied": _copied,
        "last_letter_dropped": _last_letter_dropped,
        "letters_swapped": _letters_swapped,
        "last_term_ignored": _last_term_ignored,
        "off_by_one": _off_by_one,
    }
)
