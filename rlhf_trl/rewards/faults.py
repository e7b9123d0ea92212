"""Where a reward function went wrong: the line of its code, the step and the completion."""

import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from rlhf_trl.data.answers import completion_text
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.verifiers import RewardFunc

# Where code lies that is not the user's.
NOT_THEIRS = (
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
    "<frozen",
)


def place_of(error: Exception) -> str:
    """Return the file and line of the user's own code that an exception was raised in, if any.

    That is the deepest call outside this package, the installed ones and Python's own.
    """
    for call in reversed(traceback.extract_tb(error.__traceback__)):
        if not call.filename.startswith(NOT_THEIRS):
            return f" at {os.path.relpath(call.filename)}, line {call.lineno}"
    return ""


def culprit_in_time(
    function: RewardFunc, name: str, sample: dict[str, Any], error: Exception
) -> int | None:
    """Return what `culprit` does; None, too, where calling the function anew does worse things."""
    from rlhf_trl.rewards.calls import in_call

    try:
        with in_call(name, sample, is_coroutine=False) as arguments:
            return culprit(function, arguments, error)
    except InputError:
        return None


def culprit(function: RewardFunc, sample: dict[str, Any], error: Exception) -> int | None:
    """Return the first completion for which a function raises an error; None: it cannot be told.

    The function is called anew. A completion is to blame if the function raises the same error
    twice: for it alone, and for it together with all the completions that raise none alone. The
    first call does not suffice: a function that raises for every batch raises for any one alone.

    Args:
        function: a reward function.
        sample: the arguments with which it raised the error: lists, with a place for each
            completion, and what is the same for all.
        error: what it raised.
    """
    count = len(sample["completions"])

    def raises(places: list[int]) -> bool:
        """Tell whether the function raises the same error for the completions at these places."""
        rows = {
            key: [value[place] for place in places]
            if isinstance(value, list) and len(value) == count
            else value
            for key, value in sample.items()
        }
        try:
            function(**rows)
        except Exception as other:
            return (type(other), str(other)) == (type(error), str(error))
        return False

    suspects = [place for place in range(count) if raises([place])]  # for each one alone
    others = [place for place in range(count) if place not in suspects]
    if not others:  # all raise alone, as they would where the function raises for any batch
        return None
    for place in suspects:
        if raises(sorted([place, *others])):  # among completions that are not to blame
            return place
    return None


def where(sample: dict[str, Any], index: int | None = None) -> str:
    """Return words for the step and the completion at `index`, or for the batch (None).

    A batch of one is named as its only completion. Of a batch, the first completion is shown.
    """
    state = sample.get("trainer_state")
    step = f"at step {state.global_step} " if state is not None else ""
    prompts = sample.get("prompts") or sample.get("prompt")
    count = len(sample["completions"])
    shown = index or 0
    prompt = f"prompt {completion_text(prompts[shown]) if prompts else None!r}"
    completion = f"completion {completion_text(sample['completions'][shown])!r}"
    if index is not None or count == 1:
        return f"{step}({prompt}, {completion})"
    return f"{step}in a batch of {count} that begins with {prompt} and {completion}"


def refusal(name: str, rewards: Any, sample: dict[str, Any], place: int | None) -> InputError:
    """Return the error about the reward of the completion at `place`; None: about all rewards."""
    if place is None:
        wanted = len(sample["completions"])
        is_list = isinstance(rewards, list | tuple)
        returned = f"{len(rewards)} values" if is_list else shortened(rewards)
        returned += f" for {wanted} completions"
        remedy = f"a list of {wanted} numbers, one per completion"
    else:
        returned = shortened(rewards[place])
        remedy = (
            "a finite number that float32 can sum (at most 1e16), or None where it does not apply"
        )
    return InputError(
        f"reward function {name!r} returned {returned} {where(sample, place)}; return {remedy}."
    )


def shortened(value: Any) -> str:
    """Return the beginning of what a value looks like, or what it is."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # an integer of too many digits
        return f"a value of type {type(value).__name__} that cannot be printed"
