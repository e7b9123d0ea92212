"""A direct-alignment run; its data are read, made, or sampled from a model once and kept."""

from typing import Any

from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.fitting import rows_named
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.models import load_tokenizer
from rlhf_trl.rollouts.generate import check_prompts
from rlhf_trl.run import train


@train.names_the_key
def train_preferences(loaded: Any, trainer_class: Any, unpaired: bool = False) -> None:
    """Do what every direct-alignment recipe does: load, train, evaluate, save, report.

    `unpaired` is true of KTO, which takes labeled examples, too.
    """
    train.begin(loaded, loaded.row.label)
    data, tokenizer = prepare_preferences(loaded.own, loaded.trl, loaded.model, unpaired)
    train.check_template(data, tokenizer, loaded.trl, loaded.own.dataset)
    trainer = train.build(loaded, trainer_class, data, tokenizer)
    rule = f"max_length {trainer.args.max_length}, overlong: {trainer.args.overlong}"
    # by side, which rows the trainer has cut or dropped, by reason: {"train": {"cut": [0, 2]}}
    for side, numbers in trainer.fitted.items():
        if not trainer.is_world_process_zero():
            continue
        # "left over" has a sentence of its own below
        changed = {reason: n for reason, n in numbers.items() if n and reason != "left over"}
        if changed:
            reasons = ", ".join(f"{len(n)} {why}{rows_named(n)}" for why, n in changed.items())
            print(f"{side} rows with {rule}: {reasons}", flush=True)
        if count := len(numbers.get("left over", ())):
            batch = trainer.args.per_device_train_batch_size
            print(
                f"left out {count} {side} rows: alone in the last batch of {batch}, where KTO has "
                "no other completion to compare with",
                flush=True,
            )
    train.run(trainer, loaded, data, loaded.row.label)


def prepare_preferences(
    own: Any, args: Any, model: Any, unpaired: bool = False
) -> tuple[Examples, Any]:
    """Return the examples of a run, which may be made of `saved_samples`, and the tokenizer."""
    sample = score = None
    if not isinstance(own.dataset, FileData):  # the rows of a file need not be sampled
        from rlhf_trl.rollouts.sampling import sampler

        sample = sampler(model, args, own.dataset, own.rollouts)
    if getattr(own.dataset, "scored_by", None):
        from rlhf_trl.run.scored_pairs import scorer_of_pairs

        score = scorer_of_pairs(own.dataset, load_tokenizer(model, args), args)
    margin = False  # that column is for reward models
    options = (own.max_samples, unpaired, sample, margin, score)  # as `load_preferences` takes them
    data = train.read(args, load_preferences, own.dataset, *options)
    tokenizer = load_tokenizer(model, args, data.conversational)  # checks its template for messages
    if data.tasks is not None:
        check_prompts(data.tasks.held_out, tokenizer, model, args)
    return data, tokenizer
