"""ORPO (chapter 8) on the ORPOTrainer of TRL's experimental package.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/orpo.py \
    --config configs/tiny/orpo.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.preferences import PreferenceData, Samples


@dataclass
class Run:
    """The fields of this recipe beside OddsRatioConfig and TRL's ModelConfig."""

    dataset: PreferenceData
    algorithm: str = field(default="orpo", metadata={"runs": ["orpo"]})
    formulation: str = "chapter"
    max_samples: int | None = None  # the first so many rows or questions only
    samples: Samples = field(default_factory=Samples)
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.orpo.OddsRatioConfig")
    own, args, model = loaded.own, loaded.trl, loaded.model

    from trl import get_peft_config

    from rlhf_trl.run import train
    from rlhf_trl.run.model import prepare_model
    from rlhf_trl.run.preferences import prepare_preferences, report_fitted
    from rlhf_trl.run.samples import add_panels
    from rlhf_trl.trainers.direct_alignment import read_row
    from rlhf_trl.trainers.orpo import OddsRatioTrainer

    name = f"{own.algorithm} ({own.formulation})"
    read_row(own.algorithm, own.formulation, args)
    train.begin(loaded, name)
    data, tokenizer = prepare_preferences(own, args, model)

    trainer = OddsRatioTrainer(
        model=prepare_model(model, args),
        args=args,
        train_dataset=data.train_dataset,
        eval_dataset=data.eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
        algorithm=own.algorithm,
        formulation=own.formulation,
    )
    report_fitted(trainer)
    add_panels(trainer, own.samples, data.held_out or data.train)
    train.run(trainer, loaded, data.tasks, name)


if __name__ == "__main__":
    recipe(main)
