"""Policy-gradient algorithms on TRL's GRPOTrainer."""

import torch
from trl import GRPOTrainer

from rlhf_trl.errors import InputError
from rlhf_trl.trainers.evaluation import AnswersHeldOut


class PolicyGradientTrainer(AnswersHeldOut, GRPOTrainer):
    """GRPOTrainer that is evaluated by answering and that stops on a sample without a reward."""

    # Replaces GRPOTrainer._calculate_rewards, which only warns when no reward applies to a sample
    # and then trains on an advantage of 0.
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        unscored = torch.isnan(rewards).all(dim=1).nonzero().flatten().tolist()
        if unscored:
            raise InputError(
                f"no reward function applied to {len(unscored)} of {len(rewards)} completions at "
                f"step {self.state.global_step}: all of {self.reward_func_names} returned None; "
                "let at least one of them return a number for every sample."
            )
        return rewards
