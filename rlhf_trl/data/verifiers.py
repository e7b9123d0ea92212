"""Reward functions in TRL's calling convention, by name or dotted path, checked at every call.

`reward_funcs` names them. `exact_match`, `number`, `math`, `regex` and `contains` compare a
completion with the column `answer` of the data, or with another one, named after a colon:
`number:solution`. Where that column is null, the reward does not apply.
"""

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import wraps
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_trl.data import answers
from rlhf_trl.data.answers import NotRead, extract_answer
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.errors import InputError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Tasks whose answer is a number, whatever way it is written.
NUMERIC = {"basic_arithmetic", "chain_sum", "gcd", "gsm8k", "lcm", "leg_counting", "products"}
ANSWER = "answer"  # the column of right answers, unless another one is named
# Where code lies that is not the user's.
NOT_THEIRS = (
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
    "<frozen",
)

RewardFunc = Callable[..., Any]


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, plain or a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def normalize(task: str, answer: str) -> str:
    """Return the spelling of `answer` under which equal answers to `task` are equal strings."""
    if task in NUMERIC:
        with suppress(ValueError):
            return str(int(answer))  # exact, whatever its size
        with suppress(ValueError):
            number = float(answer)
            return str(int(number)) if number.is_integer() else repr(number)
    return answer.strip()


def _verifier(
    read: Callable[[str], Any], ahead: int | None = None
) -> Callable[[Callable[..., bool]], RewardFunc]:
    """Make a reward of what compares a text with the right answer to a task; no answer: None.

    It gets the right answer as `read` returns it, which says as `NotRead` what is wrong with it.
    So many rows (None: all) are read `ahead` of a run.
    """

    def reward_of(is_right: Callable[[str, Any, str], bool]) -> RewardFunc:
        @wraps(is_right)
        def reward(
            completions: list[Any],
            answer: list[Any],
            task: list[str] | None = None,
            prompts: list[Any] | None = None,
            **_: Any,
        ) -> list[float | None]:
            rewards: list[float | None] = []
            tasks = task or [""] * len(completions)
            for place, (completion, cell) in enumerate(zip(completions, answer, strict=True)):
                if cell is None:
                    rewards.append(None)
                    continue
                try:
                    right = read(_written(cell))
                except NotRead as error:
                    raise InputError(
                        f"reward function {is_right.__name__!r}: the right answer "
                        f"{_quoted(cell, prompts and prompts[place])} {error}"
                    ) from error
                rewards.append(float(is_right(completion_text(completion), right, tasks[place])))
            return rewards

        reward.read_right_answer = read
        reward.read_ahead = ahead
        return reward

    return reward_of


def _quoted(answer: Any, prompt: Any) -> str:
    """Return a right answer and the prompt that it belongs to, if there is one."""
    shown = f"{str(answer)[:60]!r}"
    return f"{shown} (prompt {completion_text(prompt)[:200]!r})" if prompt else shown


@_verifier(str)
def exact_match(text: str, right: str, task: str) -> bool:
    """1 where the extracted answer equals the right one as a string, else 0; case counts."""
    found = extract_answer(text)
    return found is not None and normalize(task, found) == normalize(task, right)


@_verifier(answers.right_number)
def number(text: str, right: Decimal, task: str) -> bool:
    """1 where the number that the completion ends in (see `read_number`) is that of the answer."""
    value = answers.read_number(text)
    return value is not None and answers.same_number(value, right)


@_verifier(answers.right_math, ahead=500)  # at up to 10 ms each
def math(text: str, right: answers.RightMath, task: str) -> bool:
    """1 where the completion's answer is mathematically equal to the right one, else 0."""
    return answers.same_math(text, right)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise NotRead(
            f"is not a regular expression ({error}); fix it, or name the column of patterns after "
            "a colon (regex:COLUMN)."
        ) from error


@_verifier(_pattern)
def regex(text: str, right: re.Pattern[str], task: str) -> bool:
    """1 where the answer, a regular expression, matches somewhere in the completion, else 0."""
    return right.search(text) is not None


def _part(text: str) -> str:
    if not text.strip():
        raise NotRead(
            "is empty, which every completion contains; leave the example out, or make its answer "
            "null."
        )
    return text.strip()


@_verifier(_part)
def contains(text: str, right: str, task: str) -> bool:
    """1 where the answer's text stands somewhere in the completion, else 0; case counts."""
    return right in text


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
    function.__name__: function for function in (exact_match, number, math, regex, contains)
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


def check_right_answers(names: Sequence[str], *sides: "Dataset | None") -> None:
    """Refuse right answers that the rewards called `names` cannot read, before a run begins.

    Of `math`, which reads slowly, the first ones; the others are refused when they are drawn.
    """
    for name in names:
        base, colon, column = name.partition(":")
        column = column if colon else ANSWER
        for rows in sides if base in VERIFIERS else ():
            if rows and column in rows.column_names:
                _check_cells(name, VERIFIERS[base], rows, column)


def _check_cells(name: str, verifier: Any, rows: "Dataset", column: str) -> None:
    cells = rows.select_columns([column])[: verifier.read_ahead][column]
    unread = []
    for place, cell in enumerate(cells):
        try:
            if cell is not None:
                verifier.read_right_answer(_written(cell))
        except NotRead as error:
            unread.append((place, cell, error))
    if unread:
        place, cell, error = unread[0]
        raise InputError(
            f"reward_funcs: {name} cannot use {len(unread)} of {len(cells)} right answers; the "
            f"first, {_quoted(cell, rows[place]['prompt'])}, {error}"
        ) from error


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
        if base == "math" and find_spec("math_verify") is None:
            raise InputError(
                "reward_funcs: math needs the extra math, which is not installed; run "
                "scripts/setup.sh math, or pip install 'rlhf_trl[math]'."
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
            f"{error}{_place_of(error)}); write package.module.function, as Python would find it."
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
                f"reward function {name!r} raised {type(error).__name__}: {error}"
                f"{_place_of(error)} {_where(culprit(sample))}; fix it, or return None where it "
                "does not apply."
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


def _place_of(error: Exception) -> str:
    """Return the file and line of the user's own code that an exception was raised in, if any.

    That is the deepest call outside this package, the installed ones and Python's own.
    """
    for call in reversed(traceback.extract_tb(error.__traceback__)):
        if not call.filename.startswith(NOT_THEIRS):
            return f" at {os.path.relpath(call.filename)}, line {call.lineno}"
    return ""


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
        if value is not None and not (isinstance(value, int | float) and isfinite(value)):
            raise InputError(
                f"reward function {name!r} returned {value!r} {_where(sample, i)}; return a "
                "finite number, or None where it does not apply."
            )
    return list(rewards)
