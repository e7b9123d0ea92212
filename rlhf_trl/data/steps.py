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
    """Refuse what does not cut a text."""
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
    """Cut a completion into steps that are not blank; what cuts may match nothing (`LETTERS`)."""
    return [step for step in re.split(step_split, text) if step.strip()]


def label_steps(steps: Sequence[str], answer: str, task: str) -> list[int]:
    r"""Label the steps of `<think></think><answer>n`, `u`, `s`, `</answer>`.

    A step is good (1) if its letters are the next ones of the answer, neutral (0) if it repeats the
    letter before it (which adds nothing: the same letters are still to come), and bad (-1)
    otherwise. What follows a bad step is bad, as no answer that begins like this is right. The
    closing `</answer>` is good if the answer before it is the right one exactly, without a repeated
    letter, and else bad. Everything that has not this form is bad, from its first step on.
    """
    if task not in SPELLED:
        raise InputError(
            f"dataset.specs: the steps of task {task!r} have no rule that labels them; use "
            f"{', '.join(SPELLED)}, or a data set with labels by source: path."
        )
    if len(steps) == 1:  # the form has two at least, the last one </answer>
        return [BAD]
    labels: list[int] = []
    spelled = ""  # the letters so far
    spelled_once = ""  # those without letters that only repeat the one before
    for n, step in enumerate(steps):
        letters = step
        if n == 0:  # without the opening it has no letters, and is bad
            letters = step.removeprefix(OPENING) if step.startswith(OPENING) else ""
        is_closing = n > 0 and n == len(steps) - 1 and step == CLOSING
        if n > 0 and labels[-1] == BAD:
            labels.append(BAD)
        elif is_closing:
            labels.append(GOOD if spelled == answer else BAD)
        elif letters and answer[len(spelled_once) :].startswith(letters):
            labels.append(GOOD)
            spelled_once += letters
        elif len(letters) == 1 and spelled.endswith(letters):
            labels.append(NEUTRAL)
        else:
            labels.append(BAD)
        spelled += letters
    return labels
