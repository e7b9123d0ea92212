"""Reward functions in TRL's calling convention, by name or dotted path, checked at every call."""

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from rlhf_trl.data.gym import GymTasks
from rlhf_trl.errors import InputError, nearest

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Tasks whose answer is a number, whatever way it is written.
NUMERIC = {"basic_arithmetic", "chain_sum", "gcd", "lcm", "leg_counting", "products"}

RewardFunc = Callable[..., Any]


def completion_text(completion: str | list[dict[str, str]]) -> str:
    """Return the text of a completion, plain or a list of one assistant message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(text: str) -> str | None:
    """Return what stands in the last `<answer>...</answer>` of `text`, stripped, or None."""
    from reasoning_gym.utils import extract_answer as gym_extract

    return gym_extract(text)


def normalise(task: str, answer: str) -> str:
    """Return the spelling of `answer` under which equal answers to `task` are equal strings."""
    answer = answer.strip()
    if task in NUMERIC:
        try:
            return repr(float(answer))
        except ValueError:
            return answer
    return answer


def exact_match(
    completions: list[Any], answer: list[str], task: list[str], **_: Any
) -> list[float]:
    """1 where the extracted answer equals the right one as a string, else 0; case counts."""
    found = [extract_answer(completion_text(c)) for c in completions]
    return [
        float(f is not None and normalise(t, f) == normalise(t, a))
        for f, a, t in zip(found, answer, task, strict=True)
    ]


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


def task_metrics(tasks: GymTasks) -> dict[str, RewardFunc]:
    """Return the scores that evaluation reports, by name."""
    return {"exact_match": exact_match, "format": format_reward, "gym_score": gym_score(tasks)}


def load_rewards(names: Sequence[str], tasks: GymTasks) -> list[RewardFunc]:
    """Return the reward functions called `names`: built in, or the dotted path of the user's own.

    Every function is wrapped in `checked`.

    Raises:
        InputError: no name, unknown name, module that does not import, or attribute not callable.
    """
    built_in = task_metrics(tasks)
    if not names:
        raise InputError(f"reward_funcs is empty; name at least one of {', '.join(built_in)}.")
    found = [built_in[n] if n in built_in else _by_path(n, built_in) for n in names]
    return [checked(function, name) for function, name in zip(found, names, strict=True)]


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
            f"{error}); write "
            "package.module.function as `python -c 'import package.module'` would find it."
        ) from error
    if not callable(function):
        raise InputError(f"reward_funcs: {name!r} is not callable; name a function.")
    return function


def checked(function: RewardFunc, name: str) -> RewardFunc:
    """Wrap a reward function so that a broken result stops the run with one sentence.

    None for a sample stays allowed: TRL reads it as "this reward does not apply here".

    Raises (from the wrapper):
        InputError: the function raised, or returned something other than one finite number or None
            per completion.
    """

    def failed(error: Exception, sample: dict[str, Any]) -> InputError:
        return InputError(
            f"reward function {name!r} raised {type(error).__name__}: {error} {_where(sample)}; "
            "mend it, or return None where it does not apply."
        )

    def find_culprit(sample: dict[str, Any]) -> dict[str, Any]:
        # One completion at a time, to name the one that makes the function raise.
        for i in range(len(sample["completions"])):
            one = {k: [v[i]] if _per_sample(v, sample) else v for k, v in sample.items()}
            try:
                function(**one)
            except Exception:
                return one
        return sample

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wrapper(**kwargs: Any) -> list[float | None]:
            try:
                rewards = await function(**kwargs)
            except InputError:
                raise
            except Exception as error:
                raise failed(error, kwargs) from error
            return _validated(rewards, name, kwargs)
    else:

        @wraps(function)
        def wrapper(**kwargs: Any) -> list[float | None]:
            try:
                rewards = function(**kwargs)
            except InputError:  # says itself what to do
                raise
            except Exception as error:
                raise failed(error, find_culprit(kwargs)) from error
            return _validated(rewards, name, kwargs)

    wrapper.__name__ = name.rpartition(".")[2]
    return wrapper


def _per_sample(value: Any, sample: dict[str, Any]) -> bool:
    return isinstance(value, list) and len(value) == len(sample["completions"])


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
    if not isinstance(rewards, (list, tuple)) or len(rewards) != wanted:
        got = (
            f"{len(rewards)} values" if isinstance(rewards, (list, tuple)) else f"{rewards!r}"[:80]
        )
        raise InputError(
            f"reward function {name!r} returned {got} for {wanted} completions {_where(sample)}; "
            f"return a list of {wanted} numbers, one per completion."
        )
    for i, reward in enumerate(rewards):
        if reward is None:
            continue
        if hasattr(reward, "item"):
            reward = reward.item()
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise InputError(
                f"reward function {name!r} returned {reward!r} {_where(sample, i)}; return a "
                "finite number, or None where it does not apply."
            )
    return list(rewards)
