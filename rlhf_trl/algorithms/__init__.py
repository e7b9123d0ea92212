"""The table of algorithms, and what a row makes of a config. Imports neither torch nor trl."""

from rlhf_trl.algorithms.formulations import (
    FORMULATIONS,
    REQUIRED,
    Algorithm,
    Distillation,
    Formulation,
    Part,
    PolicyGradient,
    Preference,
    RewardModel,
)
from rlhf_trl.algorithms.parameters import (
    BASELINES,
    EARLY,
    LOSS_FIELDS,
    PARAMETERS,
    SHARED_FIELDS,
    Family,
    of_the_row,
    parameter,
)
from rlhf_trl.algorithms.resolve import FieldError, Resolved, RowConfig, contradicted, resolve
from rlhf_trl.algorithms.table import (
    ALGORITHMS,
    algorithm,
    formulation,
    names,
    nearest_row,
)
