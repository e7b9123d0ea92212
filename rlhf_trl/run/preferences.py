"""A direct-alignment run; its data are read, made, or sampled from a model once and kept."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_trl.run import train
from rlhf_trl.run.model import check_prompts, load_tokenizer, prepare_model
from rlhf_trl.run.samples import add_panels
from rlhf_trl.run.sampling import is_kept, keep, sample_completions, sampling_model
from rlhf_trl.tasks.preferences import Preferences, load_preferences, on_policy_pairs
from rlhf_trl.trainers.direct_alignment import read_row


def train_preferences(loaded: Any, trainer_class: Any, unpaired: bool = False) -> None:
    """Do what every direct-alignment recipe does: load, train, evaluate, save, report.

    Args:
        loaded: what `load_config` returned.
        trainer_class: the trainer; it reads `algorithm` and `formulation`.
        unpaired: whether rows with a label are accepted beside pairs.

    Raises:
        InputError: an algorithm, a field, data, tokenizer or model that is missing or does not fit.
    """
    from trl import get_peft_config, get_quantization_config

    own, args, model = loaded.own, loaded.trl, loaded.model
    name = f"{own.algorithm} ({own.formulation})"
    read_row(own.algorithm, own.formulation, args)
    train.begin(loaded, name)
    data, tokenizer = prepare_preferences(own, args, model, unpaired)
    train.check_held_out(args, data.held_out)
    quantization = get_quantization_config(model)
    trainer = trainer_class(
        model=prepare_model(model, args),
        args=args,
        train_dataset=data.train_dataset,
        eval_dataset=data.eval_dataset,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
        algorithm=own.algorithm,
        formulation=own.formulation,
        # ORPOTrainer has no such argument
        **({} if quantization is None else {"quantization_config": quantization}),
    )
    report_fitted(trainer)
    add_panels(trainer, own.samples, data.held_out or data.train)
    train.run(trainer, loaded, data.tasks, name)


def prepare_preferences(
    own: Any, args: Any, model: Any, unpaired: bool = False
) -> tuple[Preferences, Any]:
    """Return the rows of a run and the tokenizer.

    On-policy pairs are sampled before training and kept in `<output_dir>/pairs-<side>.jsonl`, where
    a resumed run finds them; such a file can be the `dataset.path` of another run.

    Args:
        own: the recipe's fields: `dataset` (`PreferenceData`) and `max_samples`.
        args (`TrainingArguments`): the config of the trainer.
        model (`ModelConfig`): the model to train, and to sample from unless the data set names one.
        unpaired: whether rows with a label are accepted beside pairs.

    Raises:
        InputError: see `load_preferences`, `load_tokenizer` and `check_prompts`.
    """
    sampled = sampling_model(model, own.dataset)
    sample = partial(_kept_pairs, sampled, args, own.dataset.seed)
    data = load_preferences(own.dataset, own.max_samples, unpaired, sample)
    for reason, count in data.dropped.items():
        if count and args.process_index == 0:
            print(f"left out {count} rows: {reason}", flush=True)
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


def _kept_pairs(
    model: Any, args: Any, seed: int, rows: list[dict[str, Any]], count: int, side: str
) -> list[dict[str, Any]]:
    path = Path(args.output_dir) / f"pairs-{side}.jsonl"
    if not is_kept(path):
        completions = sample_completions(model, args, rows, count, seed)
        texts = [[one.text for one in each] for each in completions]
        keep(path, on_policy_pairs(rows, texts, seed), args)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
