"""Reading the answer that a text gives, and comparing it with the right one as a text.

Answers that are numbers or mathematics are read in modules of their own, number_answers.py and
math_answers.py. A right answer that cannot be read is a `NotRead`, whose words go on from "the
right answer 'x' ".
"""

from contextlib import suppress

# Tasks whose answer is a number, whatever way it is written.
NUMERIC = {"basic_arithmetic", "chain_sum", "gcd", "gsm8k", "lcm", "leg_counting", "products"}


class NotRead(ValueError):
    """Why a right answer cannot be read, and what to write instead."""


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, plain or a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def as_completion(text: str) -> list[dict[str, str]]:
    """Return a text as a completion: a list of one assistant message."""
    return [{"role": "assistant", "content": text}]


def normalize(task: str, answer: str) -> str:
    """Return the spelling of `answer` under which equal answers to `task` are equal strings."""
    if task in NUMERIC:
        with suppress(ValueError):
            return str(int(answer))  # exact, whatever its size
        with suppress(ValueError):
            number = float(answer)
            return str(int(number)) if number.is_integer() else repr(number)
    return answer.strip()


def same_answer(text: str, right: str, task: str) -> bool:
    """Return whether `extract_answer` finds the right answer to a task in `text`; case counts."""
    answer = extract_answer(text)
    return answer is not None and normalize(task, answer) == normalize(task, right)


def extract_answer(text: str) -> str | None:
    """Return what stands in the last `<answer>...</answer>` of `text`, stripped, or None."""
    from reasoning_gym.utils import extract_answer as gym_extract

    return gym_extract(text)


def marked_answer(text: str) -> str | None:
    """Return what stands in the last `\\boxed{...}`, else after the last `####`, else None.

    A box that is cut off is "".
    """
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        return _until_closed(rest)
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    return None


def _until_closed(text: str) -> str:
    depth = 1
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[:place]
    return ""
