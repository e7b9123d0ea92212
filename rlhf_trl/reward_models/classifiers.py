"""The classifiers that reward models are: what may be one, and how one of tokens is loaded."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForTokenClassification
from trl import RewardConfig
from trl.trainer.utils import create_model_from_path

from rlhf_trl.errors import InputError
from rlhf_trl.models import loading


def check_classifier(model: Any, args: RewardConfig) -> None:
    """Refuse a classifier with several labels, which RewardTrainer cannot load or use."""
    if isinstance(model, str):
        config = _config(model, loading_options(args))
        if not any("Classification" in name for name in config.architectures or []):
            return  # a language model, which gets a new head
        name = f"model_name_or_path: {model!r}"
    else:
        config, name = model.config, "the model"
    if config.num_labels != 1:
        raise InputError(
            f"{name} has num_labels {config.num_labels}, but a reward is one number; name a "
            "language model, or a reward model with num_labels 1."
        )


def loading_options(args: RewardConfig) -> dict[str, Any]:
    """Return the options of `from_pretrained`; no `device_map`, as the trainer places the model."""
    defaults = {"trust_remote_code": args.trust_remote_code, "device_map": None}
    return defaults | (args.model_init_kwargs or {})


def _config(source: str, kwargs: Mapping[str, Any]) -> Any:
    known = {k: kwargs[k] for k in ("revision", "trust_remote_code") if k in kwargs}
    return AutoConfig.from_pretrained(source, **known)


def set_token_head(config: Any, num_labels: int, head_bias: bool | None) -> None:
    """Let a model's config describe our head on every token; None: a bias with several classes."""
    config.num_labels = num_labels
    config.classifier_dropout = 0.0
    config.token_classification_bias = num_labels > 1 if head_bias is None else head_bias


def token_classifier(source: str, num_labels: int, head_bias: bool | None, **kwargs: Any) -> Any:
    """Load a language model with a head of `num_labels` on every token, as `set_token_head`."""
    remedy = "name a language model, or a reward model of the same kind"
    fault = f"cannot be loaded as a token classifier with num_labels {num_labels}"
    with loading(f"model_name_or_path: {source!r}", remedy, fault, new_head=True):
        config = _config(source, kwargs)
        has_head = any("TokenClassification" in name for name in config.architectures or [])
        is_kept = has_head and config.num_labels == num_labels
        had_bias = getattr(config, "token_classification_bias", True)
        set_token_head(config, num_labels, head_bias)
        # the head would be loaded without its bias, or with a bias that is drawn at random
        if is_kept and had_bias != config.token_classification_bias:
            raise InputError(
                f"head_bias: the head in {source!r} has another; write {str(had_bias).lower()}."
            )
        auto = AutoModelForTokenClassification
        return create_model_from_path(source, auto, config=config, **kwargs)
