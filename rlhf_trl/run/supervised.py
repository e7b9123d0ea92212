"""A run of supervised fine-tuning: which turns are trained, and with which chat template."""

from collections.abc import Mapping
from copy import copy
from typing import Any

from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.fitting import rows_named
from rlhf_trl.errors import InputError
from rlhf_trl.models import chat_template, load_tokenizer
from rlhf_trl.named_templates import family_of, template_file
from rlhf_trl.run import train
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.divisibility import check_packing

LOSSES = {
    "last": {"completion_only_loss": True, "assistant_only_loss": False},
    "all": {"completion_only_loss": False, "assistant_only_loss": True},
}
"""By `dataset.turns`, the fields of TRL that train so; its default trains on all tokens."""
ASKS_FOR = {"completion_only_loss": "last", "assistant_only_loss": "all"}
"""By field of TRL, the `dataset.turns` that a user asks for who turns it on."""


@train.names_the_key
def train_supervised(loaded: Loaded[Any, Any], trainer_class: Any) -> None:
    """Do what the recipe of supervised fine-tuning does: load, train, evaluate, save, report."""
    own, args = loaded.own, loaded.trl
    decide_what_is_trained(loaded)
    train.begin(loaded, "sft")
    data = train.read(args, load_demonstrations, own.dataset, own.demonstrator)
    tokenizer, templated = load_tokenizers(loaded, data)
    if data.conversational:
        check_marks(templated, args)
        train.check_template(data, templated, args, own.dataset)
    trainer = train.build(loaded, trainer_class, data, tokenizer)
    trainer.max_completion_length = own.max_completion_length
    print_counts(trainer)
    train.run(trainer, loaded, data, "sft")


def load_tokenizers(loaded: Loaded[Any, Any], data: Examples) -> tuple[Any, Any]:
    """Return the tokenizer that the trainer gets, and the one whose chat template it applies.

    SFTTrainer takes over the template of chat_template_path by itself.
    """
    own, args = loaded.own, loaded.trl
    names_a_template = args.chat_template_path is not None or own.chat_template_fallback is not None
    needs_own_template = data.conversational and not names_a_template
    tokenizer = load_tokenizer(loaded.model, args, needs_own_template)  # refuses one without
    if not data.conversational:
        return tokenizer, tokenizer
    if tokenizer.chat_template is None and own.chat_template_fallback is not None:
        fallback = chat_template(own.chat_template_fallback, "chat_template_fallback")
        tokenizer.chat_template = fallback
    templated = copy(tokenizer)
    if args.chat_template_path is not None:
        templated.chat_template = chat_template(args.chat_template_path)
    return tokenizer, templated


def print_counts(trainer: Any) -> None:
    """Print how many examples `max_length` left out or cut, and which, by side."""
    if not trainer.is_world_process_zero():
        return
    within = f"max_length {trainer.args.max_length}"
    for side, numbers in trainer.left_out.items():
        if numbers:
            reason = f"nothing to train on within {within}{rows_named(numbers)}"
            print(f"left out {len(numbers)} {side} rows: {reason}", flush=True)
    for side, numbers in trainer.cut_off.items():
        if numbers:
            lost = f"lose their end to {within}{rows_named(numbers)}"
            print(f"{len(numbers)} {side} rows {lost}", flush=True)


def fix_fields(
    loaded: Loaded[Any, Any],
    values: Mapping[str, Any],
    by: str,
    instead: Mapping[str, str] | None = None,
) -> None:
    """Set fields of TRL that something else decides; refuse a config that says otherwise.

    Args:
        loaded: the config.
        values: the fields with their values.
        by: what decides them, in words.
        instead: by field, what to write that decides it as the config says.
    """
    for key, value in values.items():
        written = loaded.given.get(key)
        if written not in (None, value):
            remedy = f"remove {key}"
            if instead and key in instead:
                remedy = f"write {instead[key]} or {remedy}"
            raise InputError(f"{key}: {str(written).lower()} contradicts {by}; {remedy}.")
        setattr(loaded.trl, key, value)


def decide_what_is_trained(loaded: Loaded[Any, Any]) -> None:
    """Let `dataset.turns` decide what is trained, and refuse what contradicts it or is not read."""
    own, args = loaded.own, loaded.trl
    args.chat_template_path = template_file(args.chat_template_path)
    if args.chat_template_path is not None and own.chat_template_fallback is not None:
        raise InputError(
            "chat_template_fallback is not read with chat_template_path, which replaces any chat "
            "template; remove one of the two."
        )
    check_packing(args)
    if args.packing and args.packing_strategy != "bfd":
        raise InputError(
            f"packing_strategy: {args.packing_strategy} cuts examples, so that parts are trained "
            "without their prompt (and wrapped ones see each other); write bfd."
        )
    if not isinstance(own.dataset, FileData):  # tasks of the gym: TRL trains on the completion
        return
    if "demonstrator" in loaded.given:
        raise InputError(
            "demonstrator is not read with dataset.source: path; remove one of the two."
        )
    turns = own.dataset.turns
    choices = "last: the final turn of the assistant, all: each of its turns"
    by = f"dataset.turns: {turns}, which decides what is trained ({choices})"
    # off, `completion_only_loss` asks for all tokens, which no other `turns` trains
    instead = {k: f"dataset.turns: {asked}" for k, asked in ASKS_FOR.items() if asked != turns}
    fix_fields(loaded, LOSSES[turns], by, instead)


def check_marks(tokenizer: Any, args: Any) -> None:
    """Stop where the assistant's turns are to be told apart and the chat template does not."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not args.assistant_only_loss or has_generation_markers(tokenizer.chat_template):
        return
    try:
        get_training_chat_template(tokenizer)  # TRL has its own for the usual models
    except ValueError as error:
        family = family_of(tokenizer.chat_template)
        remedy = "name one (chat_template_path)"
        if family is not None:
            remedy = f"write chat_template_path: {family}, the one of its family that has them"
        raise InputError(
            "dataset.turns: all needs a chat template with {% generation %} around the assistant's "
            f"turns, and TRL has none in its place; {remedy}, or write last."
        ) from error
