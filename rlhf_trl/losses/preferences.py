"""The loss of a direct-alignment row, without any check."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_trl import book
from rlhf_trl.algorithms import Preference
from rlhf_trl.losses.calling import call, look_up, promoted


@dataclass(frozen=True)
class PreferenceLoss:
    """What `preference_loss` returns."""

    loss: Tensor  # the scalar to minimize; differentiable in the policy's log-probabilities
    # (B,) implicit rewards, beta * (log pi - log pi_ref), or beta * log pi where no reference is
    # read; constants
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def completions_loss(
    row: Preference, params: Mapping[str, Any], **tensors: Tensor
) -> PreferenceLoss:
    """Compute a direct-alignment loss without any check: what `preference_loss` does after them.

    `params` is what `Preference.parameters` returned, the tensors those that the row's function
    reads, (B,) log-probabilities of completions as `preference_loss` takes them.
    """
    learned = ("policy_chosen_logps", "policy_rejected_logps", "chosen_nll")
    tensors = promoted(tensors, "policy_chosen_logps", learned)

    def implicit_rewards(side: str) -> Tensor:
        policy = tensors[f"policy_{side}_logps"]
        return (params["beta"] * (policy - tensors.get(f"ref_{side}_logps", 0))).detach()

    loss = call(look_up(book.preference, row.loss), params, tensors).mean()
    return PreferenceLoss(loss, implicit_rewards("chosen"), implicit_rewards("rejected"))
