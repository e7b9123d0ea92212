"""Reward functions that few runs need: a judge, and those of one's own, by their dotted paths."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rlhf_trl.errors import InputError, nearest
from rlhf_trl.rewards.verifiers import RewardFunc


def import_reward(name: str, built_in: Sequence[str], judge_block: Any, folder: str) -> RewardFunc:
    """Import a reward function by its dotted path, or make the reward `llm_judge`.

    The `built_in` names are for the error; `judge_block` and `folder` are those of `load_rewards`.
    """
    if name == "llm_judge":
        from rlhf_trl.rewards.llm_judge import llm_judge

        return llm_judge(judge_block, folder)
    module, _, attribute = name.rpartition(".")
    if not module:
        raise InputError(
            f"reward_funcs: {name!r} is not a reward{nearest(name, built_in)}; write one of "
            f"{', '.join(built_in)} or the dotted path of your own function."
        )
    if os.getcwd() not in sys.path:  # `python -m` puts it there, an installed command does not
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        from rlhf_trl.rewards.faults import place_of

        raise InputError(
            f"reward_funcs: {name!r} cannot be imported from here ({type(error).__name__}: "
            f"{error}{place_of(error)}); write package.module.function, as Python would find it."
        ) from error
    if not callable(function):
        raise InputError(f"reward_funcs: {name!r} is not callable; name a function.")
    return function
