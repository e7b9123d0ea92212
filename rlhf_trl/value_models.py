"""Value models: loaded as classifiers of every position; PPO's trainer attaches one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.utils import disable_dropout_in_model

from rlhf_trl.errors import InputError
from rlhf_trl.models import dropouts, loading

FIELD = "value_model_name_or_path"


def value_classifier(
    source: str, policy: Any, tokenizer: Any, trust_remote_code: bool, **options: Any
) -> Any:
    """Load a language model, a reward model or a value model as a value model.

    The result is a sequence classifier with one label: a backbone and a `score` per position,
    without bias. A score that the checkpoint does not have starts at 0, so all values do. The
    policy, whose tokenizer this is, must have the same vocabulary. `options` are further ones of
    `from_pretrained`.
    """
    remote = {"trust_remote_code": trust_remote_code, "revision": options.pop("revision", None)}
    with loading(f"{FIELD}: {source!r}", "name the policy, another checkpoint or a reward model"):
        config = AutoConfig.from_pretrained(source, **remote)
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"{FIELD}: {source!r} is quantized, and all weights of a value model are trained; name "
            "a whole one."
        )
    classifier = any("Classification" in name for name in config.architectures or [])
    if classifier and config.num_labels != 1:
        raise InputError(
            f"{FIELD}: {source!r} has num_labels {config.num_labels}; name one with num_labels 1."
        )
    check_vocabulary(FIELD, source, config.get_text_config().vocab_size, policy, tokenizer, remote)
    config.num_labels = 1  # transformers makes two by default
    config.pad_token_id = policy.config.get_text_config().pad_token_id  # or a batch is refused
    # attention reads its dropout from the config; `disable_dropout_in_model` finds modules only
    for name in dropouts(config):
        setattr(config, name, 0.0)
    remedy = "name a decoder whose architecture has one"
    fault = "cannot be loaded as a sequence classifier"
    with loading(f"{FIELD}: {source!r}", remedy, fault, new_head=True):
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            source, config=config, output_loading_info=True, **remote, **options
        )
    missing = {name.partition(".")[0] for name in loading_info["missing_keys"]}
    if missing - {"score"} or not hasattr(model, "score"):
        raise InputError(
            f"{FIELD}: {source!r} lacks {', '.join(sorted(missing)) or 'a score'} of "
            f"{type(model).__name__}; name a language model or a reward model."
        )
    if missing:
        start_at_zero(model.score.weight)
    disable_dropout_in_model(model)
    return model


def check_vocabulary(
    field: str, source: str, size: int, policy: Any, tokenizer: Any, remote: Mapping[str, Any]
) -> None:
    """Refuse a model, named in a field, that does not read the policy's tokens."""
    if (ours := policy.config.get_text_config().vocab_size) != size:
        raise InputError(
            f"{field}: {source!r} has {size} tokens and the policy {ours}; name one of its family."
        )
    folder = Path(source)
    if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
        return  # saved without its tokenizer
    vocabulary = AutoTokenizer.from_pretrained(source, **remote).get_vocab()
    if vocabulary != tokenizer.get_vocab():
        other = sorted(set(vocabulary.items()) ^ set(tokenizer.get_vocab().items()))[0][0]
        raise InputError(
            f"{field}: the tokenizer of {source!r} is not the policy's (the first difference is "
            f"{other!r}); name a model with the same tokenizer."
        )


def start_at_zero(weight: Tensor) -> None:
    """Zero a weight, or this process' share of it under ZeRO-3."""
    with torch.no_grad():
        getattr(weight, "ds_tensor", weight).zero_()
