"""Built-in reward functions in TRL's calling convention, most of which compare with an answer.

`exact_match`, `number`, `math`, `regex` and `contains`, as `reward_funcs` names them, compare a
completion with the column `answer` of the data, or with another one, named after a colon:
`number:solution`. Where that column is null, the reward does not apply.
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from rlhf_trl.data.answers import NotRead, completion_text, extract_answer, same_answer
from rlhf_trl.errors import InputError

if TYPE_CHECKING:
    from decimal import Decimal

    from rlhf_trl.data.gym import GymTasks
    from rlhf_trl.data.math_answers import RightMath

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ANSWER = "answer"  # the column of right answers, unless another one is named
RewardFunc = Callable[..., Any]


def _verifier(
    name: str, read: Callable[[str], Any], answers_to_check: int | None = None
) -> Callable[[Callable[..., bool]], RewardFunc]:
    """Return a decorator that makes a reward function of a comparison with the right answer.

    The reward is 1 where the comparison is true, 0 where it is false, and None where the right
    answer is null.

    Args:
        name: of the reward in `reward_funcs` and in logs.
        read: turns the text of a right answer into what the comparison takes; raises `NotRead`,
            which says why it cannot.
        answers_to_check: how many rows' right answers `loading` checks before a run; None: all.
    """

    def reward_of(is_right: Callable[[str, Any, str], bool]) -> RewardFunc:
        """Make a reward; `is_right` takes a completion's text, the right answer and the task."""

        @wraps(is_right)
        def reward(
            completions: list[Any],
            answer: list[Any],
            task: list[str] | None = None,
            prompts: list[Any] | None = None,
            **_: Any,
        ) -> list[float | None]:
            # TRL hands over the columns of a batch by their names, and awaits a reward for each row
            rewards: list[float | None] = []
            tasks = task or [""] * len(completions)  # a file need not have this column
            for place, (completion, cell) in enumerate(zip(completions, answer, strict=True)):
                if cell is None:
                    rewards.append(None)
                    continue
                prompt = prompts[place] if prompts else None  # shown if the answer cannot be read
                right = _read_right(name, read, cell, prompt)
                rewards.append(float(is_right(completion_text(completion), right, tasks[place])))
            return rewards

        reward.__name__ = name  # by which TRL logs it
        vars(reward).update(
            read_right_answer=read, answers_to_check=answers_to_check
        )  # for loading
        return reward

    return reward_of


def _read_right(name: str, read: Callable[[str], Any], cell: Any, prompt: Any) -> Any:
    """Return what `read` makes of a right answer, the `cell`; a `NotRead` becomes an `InputError`.

    `name` is the reward's, and `prompt` the answer's or None, for the error.
    """
    try:
        return read(answer_text(cell))
    except NotRead as error:
        raise InputError(
            f"reward function {name!r}: the right answer {quoted_answer(cell, prompt)} {error}"
        ) from error


def quoted_answer(answer: Any, prompt: Any) -> str:
    """Return a right answer and the prompt that it belongs to, if there is one."""
    shown = f"{str(answer)[:60]!r}"
    return f"{shown} (prompt {completion_text(prompt)[:200]!r})" if prompt else shown


@_verifier("exact_match", str)
def exact_match(text: str, right: str, task: str) -> bool:
    """1 where the extracted answer equals the right one as a string, else 0; case counts."""
    return same_answer(text, right, task)


def _right_number(text: str) -> "Decimal":
    from rlhf_trl.data.number_answers import right_number

    return right_number(text)


@_verifier("number", _right_number)
def number_reward(text: str, right: "Decimal", task: str) -> bool:
    """1 where the number that the completion ends in (see `read_number`) is that of the answer."""
    from rlhf_trl.data.number_answers import read_number, same_number

    value = read_number(text)
    return value is not None and same_number(value, right)


def _right_math(text: str) -> "RightMath":
    from rlhf_trl.data.math_answers import right_math

    return right_math(text)


@_verifier("math", _right_math, answers_to_check=500)  # up to 10 ms each
def math_reward(text: str, right: "RightMath", task: str) -> bool:
    """1 where the completion's answer is mathematically equal to the right one, else 0."""
    from rlhf_trl.data.math_answers import same_math

    return same_math(text, right)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise NotRead(
            f"is not a regular expression ({error}); fix it, or name the column of patterns after "
            "a colon (regex:COLUMN)."
        ) from error


@_verifier("regex", _pattern)
def regex_reward(text: str, right: re.Pattern[str], task: str) -> bool:
    """1 where the answer, a regular expression, matches somewhere in the completion, else 0."""
    return right.search(text) is not None


def _part(text: str) -> str:
    if not text.strip():
        raise NotRead(
            "is empty, which every completion contains; leave the example out, or, beside another "
            "reward, make its answer null."
        )
    return text.strip()


@_verifier("contains", _part)
def contains_reward(text: str, right: str, task: str) -> bool:
    """1 where the answer's text stands somewhere in the completion, else 0; case counts."""
    return right in text


def answer_text(answer: Any) -> str:
    """Return a right answer, a text or a number in a cell of the data, as a text.

    Raises:
        InputError: it is anything else, such as a date or a list.
    """
    if not isinstance(answer, str | int | float):
        raise InputError(
            f"reward_funcs: a right answer is {str(answer)[:60]!r}, a {type(answer).__name__}; "
            "write texts or numbers (not all like dates), or name a function of your own."
        )
    # in a column with an empty cell, the whole number 12 is read as 12.0
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)


def format_reward(completions: list[Any], **_: Any) -> list[float]:
    """A quarter for each of the four tags that occurs in the completion (the book's code)."""
    texts = [completion_text(c) for c in completions]
    return [sum(tag in text for tag in TAGS) / len(TAGS) for text in texts]


def gym_score(tasks: "GymTasks") -> RewardFunc:
    """Return the reward that is the gym's own score, which may give partial credit."""

    def gym_score(completions: list[Any], id: list[int], **_: Any) -> list[float]:
        answers = [extract_answer(completion_text(c)) for c in completions]
        return [tasks.score(a, i) for a, i in zip(answers, id, strict=True)]

    return gym_score


VERIFIERS: dict[str, RewardFunc] = {
    "exact_match": exact_match,
    "number": number_reward,
    "math": math_reward,
    "regex": regex_reward,
    "contains": contains_reward,
}


def task_metrics(tasks: "GymTasks") -> dict[str, RewardFunc]:
    """Return the scores that evaluation reports, by name."""
    return {"exact_match": exact_match, "format": format_reward, "gym_score": gym_score(tasks)}
