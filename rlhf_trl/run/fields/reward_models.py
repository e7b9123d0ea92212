"""The fields of recipes that train reward models."""

from dataclasses import MISSING, dataclass

from rlhf_trl.data.judgment_blocks import OutcomeData, ProcessData, RewardData
from rlhf_trl.errors import setting
from rlhf_trl.run.fields.common import WHOSE_EQUATION, ExamplesRun, algorithm_of


@dataclass(kw_only=True)
class RewardRun(ExamplesRun):
    """The fields of recipes/reward.py beside BookRewardConfig and TRL's ModelConfig."""

    dataset: RewardData = setting("where pairs or lists come from", MISSING)
    algorithm: str = algorithm_of("reward", default="reward")


@dataclass(kw_only=True)
class OutcomeRun(ExamplesRun):
    """The fields of recipes/orm.py beside BookTokenRewardConfig and TRL's ModelConfig."""

    dataset: OutcomeData = setting("where answers come from", MISSING)
    algorithm: str = algorithm_of("orm", default="orm")


@dataclass(kw_only=True)
class ProcessRun(ExamplesRun):
    """The fields of recipes/prm.py beside BookTokenRewardConfig and TRL's ModelConfig."""

    dataset: ProcessData = setting("where traces come from", MISSING)
    algorithm: str = algorithm_of("prm", default="prm")
    formulation: str = setting(WHOSE_EQUATION, "code")
