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
    """Return words for the line of the user's own code in which an exception was raised, if any.

    It is the line of the deepest call outside this package, installed packages and Python itself.
    """
    for call in reversed(traceback.extract_tb(error.__traceback__)):
        if not call.filename.startswith(NOT_THEIRS):
            return f" at {os.path.relpath(call.filename)}, line {call.lineno}"
    return ""


def culprit_in_time(
    function: RewardFunc, name: str, sample: dict[str, Any], error: Exception
) -> int | None:
    """Return what `culprit` returns; None if calling the function again ends in an `InputError`.

    Called again, the function may take too long, or do to the process what it must not.
    """
    from rlhf_trl.rewards.calls import in_call

    try:
        with in_call(name, sample, is_coroutine=False) as arguments:
            return culprit(function, arguments, error)
    except InputError:
        return None


def culprit(function: RewardFunc, sample: dict[str, Any], error: Exception) -> int | None:
    """Return the place of the first completion that makes a function raise an error, or None.

    The function is called again, first with each completion alone. The completions for which it
    then raises the same error are suspects. A suspect is to blame if the function also raises it
    for the suspect together with all completions that are not suspects. (A function that raises for
    any small batch raises for every completion alone, whatever it holds.)

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

    suspects = [place for place in range(count) if raises([place])]
    innocent = [place for place in range(count) if place not in suspects]
    if not innocent:  # perhaps the function raises for any batch
        return None
    for place in suspects:
        if raises(sorted([place, *innocent])):
            return place
    return None


def where(sample: dict[str, Any], index: int | None = None) -> str:
    """Return words for the step, with the completion at `index`; None: with the first of the batch.

    Without an `index`, the words say that it is the first of a batch, unless it is the only one.
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
