"""Warnings that a run trains on without learning anything."""

import logging
import math

from transformers import TrainerCallback

logger = logging.getLogger(__name__)

PATIENCE = 10  # logged steps in a row before a warning
ROUNDING = 1e-6  # of a mean or deviation of equal rewards


class Watch(TrainerCallback):
    """Warns when training runs on without learning anything, once until that changes."""

    # {metric: warning if it stays at 1}
    signs = {  # noqa: RUF012 - read only
        "frac_reward_zero_std": (
            "every group of completions got equal rewards for %d logged steps up to step %d, so "
            "all advantages are 0 and nothing is learned; look at the reward functions and at the "
            "difficulty of the task."
        ),
        "completions/clipped_ratio": (
            "every completion was cut off at max_completion_length for %d logged steps up to step "
            "%d; raise max_completion_length, or check that the model knows its eos token."
        ),
    }
    # {metric: warning if it stays at 0}
    signs_at_zero = {  # noqa: RUF012 - read only
        "reward_std": (
            "all completions got equal rewards for %d logged steps up to step %d, so that rewards "
            "teach nothing; look at the reward functions and at the difficulty of the task."
        ),
        "rewards/format/mean": (
            "the reward format was 0 for every completion for %d logged steps up to step %d: none "
            "has a tag of the answer's format; ask for it in dataset.system_prompt, teach it with "
            "recipes/sft.py first, or leave format out of reward_funcs."
        ),
    }

    def __init__(self):
        self._streak = dict.fromkeys([*self.signs, *self.signs_at_zero], 0)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Count for each sign the logged steps in a row that show it, and warn at PATIENCE."""
        logs = dict(logs or {})
        if logs.get("frac_reward_zero_std") == 1.0:  # one warning about equal rewards is enough
            logs.pop("reward_std", None)
        for messages, stuck_at in ((self.signs, 1.0), (self.signs_at_zero, 0.0)):
            for key in messages.keys() & logs.keys():
                is_sign = math.isclose(logs[key], stuck_at, abs_tol=ROUNDING)
                self._streak[key] = self._streak[key] + 1 if is_sign else 0
                if self._streak[key] == PATIENCE and state.is_world_process_zero:
                    logger.warning(messages[key], PATIENCE, state.global_step)
