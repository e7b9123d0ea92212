"""Whole language models that answer; adapters with their base, checked for what they lack."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from rlhf_trl.errors import InputError, reason_in_short
from rlhf_trl.models import ADAPTER, as_saved, model_config, prepare_model


def load_policy(model: Any, args: Any) -> Any:
    """Return a whole language model that answers, on `args.device`; an adapter with its base."""
    from trl import get_quantization_config

    args_of_policy = copy(args)  # a copy, as `prepare_model` sets its model_init_kwargs
    quantization = get_quantization_config(model)
    policy = prepare_model(model, args_of_policy)
    if isinstance(policy, str):  # a name or folder; the untrained embedded model is built already
        check_language_model(model, args)
        options = args_of_policy.model_init_kwargs
        if quantization is not None:
            options = {
                "quantization_config": quantization,
                "device_map": {"": args.device},  # the whole model on this device
                **options,
            }
        with whole_weights(args), as_saved(policy):  # unsharded; missing weights are an error
            policy = load_language_model(policy, **options)
    if quantization is None:  # a quantized model cannot be moved
        policy = policy.to(args.device)
    return policy.eval()


def check_language_model(model: Any, args: Any) -> None:
    """Refuse a `ModelConfig`'s model that writes no answers, by what its config.json says."""
    import transformers

    config = model_config(model, args)
    name = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, name, None)
    can_generate = hasattr(model_class, "can_generate") and model_class.can_generate()
    # with auto_map, the model comes with code of its own, and transformers lacks its class
    if can_generate or getattr(config, "auto_map", None):
        return
    what = f"an architecture that transformers does not have ({name})"
    if model_class is not None:
        what = "a classifier" if "Classification" in name else f"no language model ({name})"
    raise InputError(
        f"model_name_or_path: {model.model_name_or_path!r} is {what}, which writes no answers; "
        "name a language model (of which to sample: dataset.sampled_from)."
    )


def check_trainable(model: Any, args: Any) -> None:
    """Refuse to train a quantized model, whose weights get no gradient, without an adapter."""
    if model.use_peft:
        return
    keys = [key for key in ("load_in_4bit", "load_in_8bit") if getattr(model, key)]
    if keys or getattr(model_config(model, args), "quantization_config", None) is not None:
        what = keys[0] if keys else f"model_name_or_path: {model.model_name_or_path!r}"
        raise InputError(
            f"{what}: the weights of a quantized model cannot be trained; add use_peft: true, "
            "which trains an adapter beside them, or name a whole model."
        )


def load_language_model(source: str, **options: Any) -> Any:
    """Return the language model of a folder or hub name; an adapter, on its base, as a PEFT model.

    PEFT loads adapters, as transformers would ignore weights that it does not know, such as DoRA's
    magnitudes. The `options` are those of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.peft_utils import find_adapter_config_file

    revision = options.get("revision")
    if find_adapter_config_file(source, revision=revision) is None:
        return AutoModelForCausalLM.from_pretrained(source, **options)
    from peft import PeftConfig, PeftModelForCausalLM

    config = PeftConfig.from_pretrained(source, **options)
    if config.is_prompt_learning:
        raise InputError(
            f"{source} is an adapter that holds a learned prompt, which is not read here; name one "
            "that changes weights, such as LoRA."
        )
    base_class = (config.auto_mapping or {}).get("base_model_class", "")
    if config.task_type not in (None, "CAUSAL_LM") or "Classification" in base_class:
        raise InputError(
            f"{source} is an adapter of another kind of model ({config.task_type or base_class}), "
            "which writes no answers; name one of a language model (CAUSAL_LM)."
        )
    # AutoPeftModelForCausalLM would add rows to the embeddings of a base that has fewer than its
    # tokenizer has tokens. Training adds none, so base and adapter are loaded one by one.
    base_options = {**options, "revision": config.revision}
    with fitting_adapter(source):
        base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, **base_options)
        model = PeftModelForCausalLM.from_pretrained(base, source, **options)
        check_adapter(model, source, revision)
    return model


def check_adapter(model: Any, source: str, revision: str | None = None) -> None:
    """Refuse an adapter that lacks weights, or has some that `PeftModel.from_pretrained` ignored.

    The adapter is loaded again to learn of them: `from_pretrained` does not report them all.
    """
    weights = model.load_adapter(source, model.active_adapter, revision=revision)
    for fault, keys in (("lacks", weights.missing_keys), ("also has", weights.unexpected_keys)):
        if keys:
            raise InputError(
                f"{source} is an adapter that {fault} {keys[0]} (of {len(keys)} such weights), so "
                f"it is not what its {ADAPTER} says; name a whole one."
            )


@contextmanager
def fitting_adapter(source: str) -> Iterator[None]:
    """Turn PEFT's errors in the block to one sentence: the adapter does not fit its base."""
    try:
        yield
    except (KeyError, RuntimeError) as error:  # a weight is missing, or of another shape
        is_missing = isinstance(error, KeyError)
        reason = f"it lacks {error.args[0]}" if is_missing else reason_in_short(error)
        raise InputError(
            f"{source} is an adapter that does not fit its base model ({reason}); name a whole "
            f"one, or correct base_model_name_or_path in its {ADAPTER}."
        ) from error


@contextmanager
def whole_weights(args: Any) -> Iterator[None]:
    """Load whole weights in the block, also under ZeRO-3, which would shard them for training."""
    from transformers.integrations import deepspeed

    sharded = deepspeed.is_deepspeed_zero3_enabled()
    if sharded:
        deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if sharded:
            args.deepspeed_plugin.set_deepspeed_weakref()
