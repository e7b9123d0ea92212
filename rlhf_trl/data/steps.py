"""Steps of a completion, and the labels of those of a word that is spelled letter by letter."""

import re
from collections.abc import Sequence

from rlhf_trl.errors import InputError
from rlhf_trl.tiny.demonstrator import COMPLETION

BAD, NEUTRAL, GOOD = -1, 0, 1
LABELS = (BAD, NEUTRAL, GOOD)
SPELLED = ("spell_backward",)  # tasks whose answer is right or wrong letter by letter
LETTERS = r"(?<=\w)(?=\w*</answer>)"  # a `step_split` that cuts an answer into its letters
OPENING, CLOSING = COMPLETION.split("{}")


def check_step_split(step_split: str) -> None:
    """Refuse a `step_split` that is no regular expression, or has a capturing group."""
    try:
        groups = re.compile(step_split).groups
    except re.error as error:
        raise InputError(
            f"dataset.step_split: {step_split!r} is not a regular expression ({error}); write one "
            r"that matches what stands between two steps, such as '\n+'."
        ) from error
    if groups:
        raise InputError(
            f"dataset.step_split: {step_split!r} has a capturing group, which re.split would "
            "return as a step of its own; write (?:...) in place of (...)."
        )


def split_steps(text: str, step_split: str) -> list[str]:
    """Cut a completion, wherever `step_split` matches, into steps that are not blank."""
    return [step for step in re.split(step_split, text) if step.strip()]


def label_steps(steps: Sequence[str], answer: str, task: str) -> list[int]:
    r"""Label the steps of an answer that is cut into its letters.

    The steps of the answer "nus" are `<think></think><answer>n`, `u`, `s` and `</answer>`.

    - A step is good (1) if its letters are the next ones of the right answer.
    - It is neutral (0) if it repeats the letter before it: the same letters are still to come.
    - The closing `</answer>` is good if the letters before it are the right answer, none repeated.
    - Everything else is bad (-1), and so is every step after a bad one.

    Raises:
        InputError: there is no rule for the steps of this task.
    """
    if task not in SPELLED:
        raise InputError(
            f"dataset.specs: the steps of task {task!r} have no rule that labels them; use "
            f"{', '.join(SPELLED)}, or a data set with labels by source: path."
        )
    if len(steps) == 1:  # a well-formed answer has at least two steps, of which </answer> is one
        return [BAD]
    labels: list[int] = []
    spelled = ""  # the letters of all steps so far
    matched = ""  # the letters of the good steps so far: the beginning of the right answer
    for n, step in enumerate(steps):
        letters = step
        if n == 0:  # a first step without the opening has no letters, and is bad
            letters = step.removeprefix(OPENING) if step.startswith(OPENING) else ""
        is_closing = n > 0 and n == len(steps) - 1 and step == CLOSING
        if n > 0 and labels[-1] == BAD:
            labels.append(BAD)
        elif is_closing:
            labels.append(GOOD if spelled == answer else BAD)
        elif letters and answer[len(matched) :].startswith(letters):
            labels.append(GOOD)
            matched += letters
        elif len(letters) == 1 and spelled.endswith(letters):
            labels.append(NEUTRAL)
        else:
            labels.append(BAD)
        spelled += letters
    return labels
