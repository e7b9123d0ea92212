"""A direct-alignment run; its data are read, made, or sampled from a model once and kept."""

from typing import Any

from rlhf_trl.data.files import Examples
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.evaluation.samples import add_panels
from rlhf_trl.models import load_tokenizer
from rlhf_trl.rollouts.generate import check_prompts
from rlhf_trl.rollouts.sampling import sampler
from rlhf_trl.run import train


@train.a_run
def train_preferences(loaded: Any, trainer_class: Any, unpaired: bool = False) -> None:
    """Do what every direct-alignment recipe does: load, train, evaluate, save, report.

    `unpaired` says whether examples with a label are accepted beside pairs.
    """
    own, args, model = loaded.own, loaded.trl, loaded.model
    train.begin(loaded, loaded.row.label)
    data, tokenizer = prepare_preferences(own, args, model, unpaired)
    train.check_held_out(args, data.held_out)
    trainer = trainer_class(
        **train.trainer_arguments(loaded, tokenizer),
        train_dataset=data.train,
        eval_dataset=data.held_out,
    )
    report_fitted(trainer)
    add_panels(trainer, own.samples, data.held_out or data.train)
    train.run(trainer, loaded, data, loaded.row.label)


def prepare_preferences(
    own: Any, args: Any, model: Any, unpaired: bool = False
) -> tuple[Examples, Any]:
    """Return the examples of a run and the tokenizer.

    On-policy pairs are made of sampled answers, which are kept in
    `<output_dir>/samples-<side>.jsonl`, where a resumed run finds them.
    """
    sample = sampler(model, args, own.dataset, own.rollouts)
    with train.reading(args, own.dataset):
        data = load_preferences(own.dataset, own.max_samples, unpaired, sample)
    train.report_dropped(data, args)
    tokenizer = load_tokenizer(model, args, data.conversational)
    if data.tasks is not None:
        check_prompts(data.tasks.held_out, tokenizer, model, args)
    return data, tokenizer


def report_fitted(trainer: Any) -> None:
    """Print how many rows were cut or left out because of their length or sameness."""
    rule = f"max_length {trainer.args.max_length}, overlong: {trainer.args.overlong}"
    for side, counts in trainer.fitted.items():
        found = [f"{count} {reason}" for reason, count in counts.items() if count]
        if found and trainer.is_world_process_zero():
            print(f"{side} rows with {rule}: {', '.join(found)}", flush=True)
