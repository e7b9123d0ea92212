"""Reward functions in TRL's calling convention, by name or dotted path, checked at every call.

`reward_funcs` names them. `exact_match`, `number`, `regex` and `contains` compare a completion with
the column `answer` of the data, or with another one, named after a colon: `number:solution`. Where
that column is null, the reward does not apply.
"""

import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

from rlhf_trl.data.gym import GymTasks
from rlhf_trl.errors import InputError, nearest

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Tasks whose answer is a number, whatever way it is written.
NUMERIC = {"basic_arithmetic", "chain_sum", "gcd", "gsm8k", "lcm", "leg_counting", "products"}
ANSWER = "answer"  # the column of right answers, unless another one is named
TOLERANCE = 1e-6
# A sign counts only where it cannot be an operator, and digits in a word or an index are no number.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:[eE][-+]?\d+)?"
)
# What may surround a number in \boxed{}: units, degrees, spaces, currency.
TRIM = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{[^{}]*\}|\^\{?\\circ\}?|\\[$%!,;: ]")

RewardFunc = Callable[..., Any]


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, plain or a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(text: str) -> str | None:
    """Return what stands in the last `<answer>...</answer>` of `text`, stripped, or None."""
    from reasoning_gym.utils import extract_answer as gym_extract

    return gym_extract(text)


def normalize(task: str, answer: str) -> str:
    """Return the spelling of `answer` under which equal answers to `task` are equal strings."""
    if task in NUMERIC:
        with suppress(ValueError):
            return repr(float(answer))
    return answer.strip()


def _verifier(right: Callable[[str, str, str], bool]) -> RewardFunc:
    """Make a reward of what compares a text with the right answer to a task; no answer: None."""

    @wraps(right)
    def reward(
        completions: list[Any], answer: list[Any], task: list[str] | None = None, **_: Any
    ) -> list[float | None]:
        rows = zip(completions, answer, task or [""] * len(completions), strict=True)
        return [
            None if wanted is None else float(right(completion_text(said), _written(wanted), task))
            for said, wanted, task in rows
        ]

    return reward


@_verifier
def exact_match(text: str, right: str, task: str) -> bool:
    """1 where the extracted answer equals the right one as a string, else 0; case counts."""
    found = extract_answer(text)
    return found is not None and normalize(task, found) == normalize(task, right)


@_verifier
def number(text: str, right: str, task: str) -> bool:
    """1 where the number that the completion ends in (see `read_number`) is that of the answer."""
    if (wanted := read_number(right)) is None:
        raise InputError(
            f"reward function 'number': the right answer {right[:60]!r} holds no number; name a "
            "column of numbers after a colon (number:COLUMN), or use contains."
        )
    found = read_number(text)
    return found is not None and math.isclose(found, wanted, rel_tol=0, abs_tol=TOLERANCE)


@_verifier
def regex(text: str, pattern: str, task: str) -> bool:
    """1 where the answer, a regular expression, matches somewhere in the completion, else 0."""
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        raise InputError(
            f"reward function 'regex': {pattern!r} is not a regular expression ({error}); fix it, "
            "or name the column of patterns after a colon (regex:COLUMN)."
        ) from error


@_verifier
def contains(text: str, right: str, task: str) -> bool:
    """1 where the answer's text stands somewhere in the completion, else 0; case counts."""
    if not right.strip():
        raise InputError(
            "reward function 'contains': a right answer is empty, which every completion contains; "
            "leave the example out, or make its answer null."
        )
    return right.strip() in text


def read_number(text: str) -> float | None:
    """Return the number that `text` gives as its answer, or None.

    That is the number in the last `\\boxed{...}`, else the one that follows the last `####` on its
    line, else the last number of the text. In the first two, several numbers (a fraction, a sum)
    and LaTeX commands (a root) are no answer. Thousands separators are removed.
    """
    text = text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    marked = _last_boxed(text)
    if marked is None and "####" in text:
        marked = text.rpartition("####")[2].strip().partition("\n")[0]
    if marked is not None:
        text = TRIM.sub("", marked)
    found = NUMBER.findall(text)
    if not found or (marked is not None and (len(found) > 1 or re.search(r"\\[a-zA-Z]", text))):
        return None
    return float(found[-1].replace(",", ""))


def _last_boxed(text: str) -> str | None:
    """Return what stands in the last `\\boxed{...}`, "" where it is cut off, None without one."""
    _, box, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place] if box else None
    return "" if box else None


def _written(answer: Any) -> str:
    if not isinstance(answer, str | int | float):
        raise InputError(
            f"reward_funcs: a right answer is {str(answer)[:60]!r}, a {type(answer).__name__}; "
            "write texts or numbers (not all like dates), or name a function of your own."
        )
    # where another cell is empty, a column of whole numbers is read as 12.0
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)


def format_reward(completions: list[Any], **_: Any) -> list[float]:
    """A quarter for each of the four tags that occurs in the completion (the book's code)."""
    texts = [completion_text(c) for c in completions]
    return [sum(tag in text for tag in TAGS) / len(TAGS) for text in texts]


def gym_score(tasks: GymTasks) -> RewardFunc:
    """Return the reward that is the gym's own score, which may give partial credit."""

    def gym_score(completions: list[Any], id: list[int], **_: Any) -> list[float]:
        answers = [extract_answer(completion_text(c)) for c in completions]
        return [tasks.score(a, i) for a, i in zip(answers, id, strict=True)]

    return gym_score


VERIFIERS: dict[str, RewardFunc] = {
    function.__name__: function for function in (exact_match, number, regex, contains)
}


def task_metrics(tasks: GymTasks) -> dict[str, RewardFunc]:
    """Return the scores that evaluation reports, by name."""
    return {"exact_match": exact_match, "format": format_reward, "gym_score": gym_score(tasks)}


def load_rewards(
    names: Sequence[str], tasks: GymTasks | None, columns: Iterable[str] = ()
) -> list[RewardFunc]:
    """Return the reward functions called `names`, as in `reward_funcs`, each `checked`.

    `tasks` are the gym's questions; without them the data are one's own and have these `columns`.
    """
    known = [*VERIFIERS, "format", "gym_score"]
    if not names:
        raise InputError(f"reward_funcs is empty; name at least one of {', '.join(known)}.")
    present = [c for c in (columns if tasks is None else tasks.train[0]) if c != "prompt"]
    found = [_built_in(name, tasks, present) or _by_path(name, known) for name in names]
    return [checked(function, name) for function, name in zip(found, names, strict=True)]


def _built_in(name: str, tasks: GymTasks | None, columns: list[str]) -> RewardFunc | None:
    """Return the function of a name that this module gives a meaning, or None."""
    base, colon, column = name.partition(":")
    if base in VERIFIERS:
        column = column if colon else ANSWER
        if column not in columns:
            raise InputError(
                f"reward_funcs: {name!r} reads the column {column!r}{nearest(column, columns)}, "
                f"and rewards get {', '.join(columns)}; write {base}:COLUMN."
            )
        verifier = VERIFIERS[base]
        return lambda completions, **has: verifier(completions, **has | {ANSWER: has[column]})
    if base not in ("format", "gym_score"):
        return None
    if colon:
        raise InputError(f"reward_funcs: {base} reads no column; write {base} in place of {name}.")
    if base == "gym_score" and tasks is None:
        raise InputError(
            "reward_funcs: gym_score is the score of reasoning-gym, which does not know these "
            f"data; write one of {', '.join(VERIFIERS)}, or the dotted path of your own."
        )
    return format_reward if base == "format" else gym_score(tasks)


def _by_path(name: str, built_in: Sequence[str]) -> RewardFunc:
    module, _, attribute = name.rpartition(".")
    if not module:
        raise InputError(
            f"reward_funcs: {name!r} is not a reward{nearest(name, built_in)}; write one of "
            f"{', '.join(built_in)} or the dotted path of your own function."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise InputError(
            f"reward_funcs: {name!r} cannot be imported from here ({type(error).__name__}: "
            f"{error}); write package.module.function, as Python would find it."
        ) from error
    if not callable(function):
        raise InputError(f"reward_funcs: {name!r} is not callable; name a function.")
    return function


def checked(function: RewardFunc, name: str) -> RewardFunc:
    """Wrap a reward function so that a broken result stops the run with one sentence.

    Right is one finite number per completion, or None: TRL reads it as "this does not apply here".
    """
    waits = inspect.iscoroutinefunction(function)

    def culprit(sample: dict[str, Any]) -> dict[str, Any]:
        # One completion at a time, to name the one that makes the function raise.
        count = len(sample["completions"])
        for i in range(0 if waits else count):
            each = {k: isinstance(v, list) and len(v) == count for k, v in sample.items()}
            one = {k: [v[i]] if each[k] else v for k, v in sample.items()}
            try:
                function(**one)
            except Exception:
                return one
        return sample

    @contextmanager
    def named(sample: dict[str, Any]) -> Iterator[None]:
        try:
            yield
        except InputError:  # says itself what to do
            raise
        except Exception as error:
            raise InputError(
                f"reward function {name!r} raised {type(error).__name__}: {error} "
                f"{_where(culprit(sample))}; fix it, or return None where it does not apply."
            ) from error

    async def waiting(**kwargs: Any) -> list[float | None]:
        with named(kwargs):
            rewards = await function(**kwargs)
        return _validated(rewards, name, kwargs)

    def wrapper(**kwargs: Any) -> list[float | None]:
        with named(kwargs):
            rewards = function(**kwargs)
        return _validated(rewards, name, kwargs)

    wrapped = wraps(function)(waiting if waits else wrapper)
    wrapped.__name__ = name.rpartition(".")[2]
    return wrapped


def _where(sample: dict[str, Any], index: int = 0) -> str:
    state = sample.get("trainer_state")
    step = f"at step {state.global_step} " if state is not None else ""
    prompts = sample.get("prompts") or sample.get("prompt")
    completion = sample["completions"][index]
    prompt = completion_text(prompts[index]) if prompts else None
    return f"{step}(prompt {prompt!r}, completion {completion_text(completion)!r})"


def _validated(rewards: Any, name: str, sample: dict[str, Any]) -> list[float | None]:
    wanted = len(sample["completions"])
    if hasattr(rewards, "tolist"):  # a tensor or an array
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != wanted:
        listed = isinstance(rewards, list | tuple)
        got = f"{len(rewards)} values" if listed else f"{rewards!r:.80}"
        raise InputError(
            f"reward function {name!r} returned {got} for {wanted} completions {_where(sample)}; "
            f"return a list of {wanted} numbers, one per completion."
        )
    for i, reward in enumerate(rewards):
        value = reward.item() if hasattr(reward, "item") else reward
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise InputError(
                f"reward function {name!r} returned {value!r} {_where(sample, i)}; return a "
                "finite number, or None where it does not apply."
            )
    return list(rewards)
