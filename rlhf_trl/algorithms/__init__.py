"""The table of algorithms, and what a row makes of a config. Imports neither torch nor trl."""

from rlhf_trl.algorithms.fields import LOSS_FIELDS, SHARED_FIELDS
from rlhf_trl.algorithms.formulations import (
    BASELINES,
    FORMULATIONS,
    REQUIRED,
    Algorithm,
    Distillation,
    Family,
    Formulation,
    Part,
    PolicyGradient,
    Preference,
    RewardModel,
)
from rlhf_trl.algorithms.resolve import FieldError, Resolved, RowConfig, of_the_row, resolve
from rlhf_trl.algorithms.table import (
    ALGORITHMS,
    algorithm,
    formulation,
    names,
    nearest_row,
    of_recipe,
)
