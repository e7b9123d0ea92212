"""Formulation trl against stock: our trainers beside TRL's, with the same settings."""

from collections.abc import Collection, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from rlhf_trl.compare import matrix
from rlhf_trl.compare.measure import Stock, sentence
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.trainers import trainer_classes
from rlhf_trl.compare.windows.batches import BATCHES, PolicyBatch
from rlhf_trl.evaluation.tables import Line
from rlhf_trl.run.config_types import recipe_defaults


@dataclass(frozen=True)
class Case:
    """Settings of a stock trainer, and the window on which ours has to be the same."""

    trainer: str  # TRL's; ours is its name behind "Book"
    settings: dict[str, Any] = field(default_factory=dict)
    batch: str = "accumulation"


CASES = (
    Case("GRPOTrainer"),
    Case("GRPOTrainer", {"loss_type": "grpo"}),
    Case("GRPOTrainer", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Case("GRPOTrainer", {"loss_type": "bnpo"}),
    Case("GRPOTrainer", {"loss_type": "cispo", "epsilon_high": 1.4}),
    Case("GRPOTrainer", {"loss_type": "sapo"}),
    Case("GRPOTrainer", {"importance_sampling_level": "sequence"}),
    Case("GRPOTrainer", {"delta": 1.5, "loss_type": "grpo", "entropy_coef": 0.01}),
    Case("GRPOTrainer", batch="beta"),
    Case("GRPOTrainer", batch="tools"),
    Case("GRPOTrainer", batch="steps_per_generation"),
    Case("RLOOTrainer"),
    Case("RLOOTrainer", {"normalize_advantages": True, "beta": 0.0}, "heavy"),
    Case("DPOTrainer"),
    Case("DPOTrainer", {"loss_type": "ipo"}),
    Case("DPOTrainer", {"loss_type": "hinge"}),
    Case("DPOTrainer", {"loss_type": "robust", "label_smoothing": 0.1}),
    Case("DPOTrainer", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    Case("DPOTrainer", batch="over_long"),
    Case("KTOTrainer"),
    Case("KTOTrainer", batch="over_long"),
    Case("ORPOTrainer"),
    Case("RewardTrainer"),
    Case("RewardTrainer", {"center_rewards_coefficient": 0.01}),
    Case("SFTTrainer"),
)
"""What is compared: the losses of TRL's documentation, and where our recipes do other things."""


@dataclass(frozen=True)
class AsStock:
    """Both trainers on the window of a case; numbers are None if one of them cannot run."""

    case: Case
    loss_stock: float | None = None
    loss_ours: float | None = None
    largest: float | None = None  # difference of any element of the gradient
    why: str = ""  # why they cannot run

    @property
    def is_same(self) -> bool:
        """Whether loss and gradient are bit for bit TRL's."""
        return self.largest == 0 and self.loss_ours == self.loss_stock


def measure(batches: Collection[str] | None = None) -> list[AsStock]:
    """Return what both trainers of each case compute, on the named windows or on all."""
    by_name = {batch.name: batch for batch in BATCHES}
    cases = [case for case in CASES if batches is None or case.batch in batches]
    windows = matrix.Matrix()
    with quick_and_quiet(), redirect_stderr(StringIO()):  # TRL has a bar for the reference
        return [_compared(case, by_name[case.batch], windows) for case in cases]


def _compared(case: Case, batch: PolicyBatch, windows: matrix.Matrix) -> AsStock:
    stock = Stock(case.settings, case.trainer, case.trainer)
    try:
        window = windows.window(matrix.kind_of_stock(stock), (), batch)
        loss_stock, gradient_stock = window.stock(stock)
        loss_ours, gradient_ours = window.stock(_ours(case))
    except Exception as error:  # whatever another release breaks is what is reported
        return AsStock(case, why=sentence(error))
    largest = float((gradient_ours - gradient_stock).abs().max())
    return AsStock(case, loss_stock, loss_ours, largest)


def _ours(case: Case) -> Stock:
    """Return our trainer with the settings of a case, and without what only recipes turn on."""
    name = f"Book{case.trainer}"
    config = trainer_classes(name)[1]
    settings = {**dict.fromkeys(recipe_defaults(config)), **case.settings}
    if name != "BookSFTTrainer":  # whose config is TRL's, and its only loss
        settings["formulation"] = "trl"
    return Stock(settings, name, name)


def record(result: AsStock) -> dict[str, Any]:
    """Return a result for programs."""
    return {
        "left": f"TRL {result.case.trainer}",
        "right": f"Book{result.case.trainer}, formulation trl",
        "settings": result.case.settings,
        "batch": result.case.batch,
        "loss_left": result.loss_stock,
        "loss_right": result.loss_ours,
        "largest_gradient_difference": result.largest,
        "verdict": verdict(result),
    }


def lines(results: Sequence[AsStock]) -> list[Line]:
    """Return a table with one line per case."""
    return [
        {
            "TRL": result.case.trainer,
            "ours, formulation trl": f"Book{result.case.trainer}",
            "settings": written(result.case) or "default",
            "batch": result.case.batch,
            "verdict": verdict(result),
        }
        for result in results
    ]


def written(case: Case) -> str:
    """Return the settings of a case in words."""
    return ", ".join(f"{name}={value}" for name, value in case.settings.items())


def label(case: Case) -> str:
    """Return a case in words."""
    return " ".join(filter(None, [case.trainer, written(case), f"on {case.batch}"]))


def verdict(result: AsStock) -> str:
    """Return "the same bits", how far the two are apart, or why one of them cannot run."""
    if result.why:
        return f"cannot run: {result.why}"
    if result.is_same:
        return "the same bits"
    return (
        f"differs: loss {result.loss_ours - result.loss_stock:+.0e}, gradient {result.largest:.0e}"
    )
