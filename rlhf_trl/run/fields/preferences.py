"""The fields of recipes that learn from preferences."""

from dataclasses import MISSING, dataclass

from rlhf_trl.data.blocks import PreferenceData, Samples
from rlhf_trl.errors import setting
from rlhf_trl.run.fields.common import ExamplesRun, algorithm_of


@dataclass(kw_only=True)
class AlignmentRun(ExamplesRun):
    """The fields of recipes that learn from preferences."""

    dataset: PreferenceData = setting("where pairs come from", MISSING)
    samples: Samples = setting("panels of answers", factory=Samples)


@dataclass(kw_only=True)
class DPORun(AlignmentRun):
    """The fields of recipes/dpo.py beside BookDPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("dpo", default="dpo")


@dataclass(kw_only=True)
class KTORun(AlignmentRun):
    """The fields of recipes/kto.py beside BookKTOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("kto", default="kto")


@dataclass(kw_only=True)
class ORPORun(AlignmentRun):
    """The fields of recipes/orpo.py beside BookORPOConfig and TRL's ModelConfig."""

    algorithm: str = algorithm_of("orpo", default="orpo")
