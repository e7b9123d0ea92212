"""A demonstrator that is right only part of the time, so that a warm start leaves RL work to do."""

import re
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

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
        "chain_sum": {RIGHT: 0.66, "last_term_ignored": 0.20, "off_by_one": 0.06, MALFORMED: 0.08},
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
    row: Mapping[str, str], rng: Random, mixture: Mapping[str, float] | None = None
) -> str:
    """Return the text of one demonstration of a row of `GymTasks`, without the end token.

    `rng` makes every choice. A `mixture` of the task's kinds (`ONLY_RIGHT`, `only_errors(task)`)
    takes the place of its own; the weights need not add to 1.

    Every kind but `right` is wrong by string equality. Where the kind drawn is not (a palindrome
    copied, a last term of 0 ignored) the task's last resort stands in: a dropped letter, or a sum
    off by one.
    """
    question, answer = row["question"], row["answer"]
    own = MIXTURES.get(row["task"], MIXTURES["*"])
    weights = own if mixture is None else mixture
    kind = rng.choices(list(weights), list(weights.values()))[0]
    if kind == RIGHT:
        return COMPLETION.format(answer)
    if kind == MALFORMED:  # the right answer where no parser finds it: with one tag less, or no tag
        return rng.choice([COMPLETION.replace("<answer>", ""), "{}"]).format(answer.strip())
    wrong = _ERRORS[kind](question, answer, rng)
    if wrong is None or wrong.strip() == answer.strip():
        last_resort = "off_by_one" if "off_by_one" in own else "last_letter_dropped"
        wrong = _ERRORS[last_resort](question, answer, rng)
    return COMPLETION.format(wrong)


def _letters_swapped(question: str, answer: str, rng: Random) -> str | None:
    n = len(answer)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n) if answer[i] != answer[j]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    return answer[:i] + answer[j] + answer[i + 1 : j] + answer[i] + answer[j + 1 :]


def _last_term_ignored(question: str, answer: str, rng: Random) -> str | None:
    found = re.search(r"([+-]) (\d+) =$", question.strip())
    return str(int(answer) - int("".join(found.groups()))) if found else None


_ERRORS: Mapping[str, Callable[[str, str, Random], str | None]] = MappingProxyType(
    {
        "copied": lambda question, answer, rng: answer[::-1],
        "last_letter_dropped": lambda question, answer, rng: answer.strip()[:-1],
        "letters_swapped": _letters_swapped,
        "last_term_ignored": _last_term_ignored,
        "off_by_one": lambda question, answer, rng: str(int(answer) + rng.choice((-1, 1))),
    }
)
