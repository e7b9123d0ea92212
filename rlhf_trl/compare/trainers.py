"""The trainers that are compared: where TRL's and ours are, and which row ours trains."""

from importlib import import_module
from typing import Any

from rlhf_trl.compare.measure import sentence
from rlhf_trl.run.stages import STAGES, stage_of

STOCK = (
    "GRPOTrainer",
    "RLOOTrainer",
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
    "ORPOTrainer",
    "CPOTrainer",
    "SFTTrainer",
)
"""The trainers of TRL that are compared."""

DISTILLING = ("DistillationTrainer", "SDPOTrainer")
"""Trainers of TRL's in which a student learns from a teacher, on texts that the student writes."""

POLICY = ("GRPOTrainer", "RLOOTrainer")
"""The stock trainers that generate."""

EXPERIMENTAL = {"ORPOTrainer": "trl.experimental.orpo", "CPOTrainer": "trl.experimental.cpo"}
"""Trainers that TRL keeps apart, and where."""

OURS = {stage.trainer_name: stage.trainer for stage in STAGES.values() if stage.trainer}
OURS["BookRLOOTrainer"] = "rlhf_trl.trainers.rloo.BookRLOOTrainer"  # which no recipe trains
"""Our trainers by name, and where they are."""

STEP = "\n"
"""What separates the steps of a process model."""


def trainer_classes(name: str) -> tuple[type, type]:
    """Return a trainer, such as "DPOTrainer" or our "BookDPOTrainer", and its config class."""
    if name in OURS:
        try:
            module = import_module(OURS[name].rpartition(".")[0])
        except Exception as error:
            # A module that misses something in another release of TRL may raise anything. As an
            # ImportError it gets the verdict "not on this TRL", see `Matrix._tried`.
            raise ImportError(f"{name}: {sentence(error)}") from error
    else:
        module = import_module(EXPERIMENTAL.get(name, "trl"))
        if not hasattr(module, name):  # another release may have it among its experimental ones
            module = import_module(f"trl.experimental.{name.removesuffix('Trainer').lower()}")
    trainer = getattr(module, name)
    if name == "BookSFTTrainer":  # it has no row of the table, and so no config of its own
        return trainer, trainer_classes("SFTTrainer")[1]
    return trainer, getattr(module, name.replace("Trainer", "Config"))


def own_trainer(algorithm: str) -> str:
    """Return the name of our trainer that trains a row."""
    return stage_of(algorithm).trainer_name


def row_arguments(name: str, formulation_name: str) -> dict[str, Any]:
    """Return the arguments that choose the row of our trainer; `models.make_trainer` takes them."""
    steps = {"step_separator": STEP, "step_split": STEP} if name == "prm" else {}
    return {"algorithm": name, "formulation": formulation_name} | steps


def base_name(trainer: type) -> str:
    """Return the name of the TRL class that a trainer is or derives from, "" for none of STOCK."""
    names = [c.__name__ for c in trainer.__mro__ if c.__module__.startswith("trl.")]
    return next((name for name in names if name in STOCK), "")
