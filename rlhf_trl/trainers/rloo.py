"""RLOO on TRL's RLOOTrainer, for scripts that use it; recipes train the row rloo on GRPOTrainer."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from trl import RLOOConfig, RLOOTrainer
from typing_extensions import override

from rlhf_trl.algorithms import PolicyGradient
from rlhf_trl.errors import InputError
from rlhf_trl.trainers.on_trl import with_signature_of
from rlhf_trl.trainers.policy_gradient import PolicyGradientConfig, PolicyGradientTrainer


@dataclass
class BookRLOOConfig(PolicyGradientConfig, RLOOConfig):
    """RLOOConfig whose loss fields belong to the row rloo; `beta` keeps TRL's default, .05."""

    default_row: ClassVar[str] = "rloo"
    stock_trainer: ClassVar[str] = "RLOOTrainer"

    def check_for(self, row: PolicyGradient) -> None:
        """Refuse a row of another trainer."""
        if self.algorithm not in (None, self.default_row):
            raise InputError(
                f"{row.label} is not trained by BookRLOOTrainer, whose only row is rloo: use "
                "BookGRPOTrainer."
            )


class _PerToken(RLOOTrainer):
    """RLOOTrainer that hands on the log-probabilities of tokens, of which it keeps the sums."""

    # Extends RLOOTrainer._generate_and_score_completions: adds what it drops.
    @override
    def _generate_and_score_completions(self, inputs):
        self._scores: list[Tensor] | None = []  # of the policy, then of the reference
        output = super()._generate_and_score_completions(inputs)
        names = ("old_per_token_logps", "ref_per_token_logps")
        output |= dict(zip(names, self._scores, strict=False))
        self._scores = None
        return output

    # Extends RLOOTrainer._get_per_token_logps_and_entropies: notes what it returns.
    @override
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._scores is not None:
            self._scores.append(scored[0])
        return scored


class BookRLOOTrainer(PolicyGradientTrainer, _PerToken):
    """RLOOTrainer whose advantages and loss are those of the row rloo."""

    config_class = BookRLOOConfig
    _scores = None

    __init__ = with_signature_of(RLOOTrainer.__init__)(PolicyGradientTrainer.__init__)
