"""The policy to train: the embedded model, a folder, or a hub name; checked before it is loaded."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlhf_trl.errors import InputError, reason_in_short
from rlhf_trl.output import weights_fault
from rlhf_trl.tiny import checkpoint_path

EMBEDDED = "tiny"  # the warm-start checkpoint that ships with the package
ADAPTER = "adapter_config.json"  # in the folder of one
UNTRAINED = "tiny_untrained"  # the same architecture and tokenizer with initial weights


def load_quietly() -> None:
    """Keep bars of weights, and DeepSpeed's notice that there is no GPU, off the screen.

    The bars of what is fetched from the hub stay.
    """
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    hidden = are_progress_bars_disabled()
    transformers.logging.disable_progress_bar()  # and the hub's
    if not hidden:
        enable_progress_bars()
    notice = "Setting accelerator to CPU"
    logging.getLogger("DeepSpeed").addFilter(lambda record: notice not in record.getMessage())


def load_tokenizer(model: Any, args: Any, conversational: bool = True) -> Any:
    """Return the tokenizer of a `ModelConfig`, with a pad token and, for conversations, a template.

    Its `model_name_or_path` is `tiny`, `tiny_untrained`, a folder or a hub name.
    """
    from transformers import AutoTokenizer

    name = model.model_name_or_path
    if name is None:
        raise InputError(
            f"model_name_or_path is missing; write {EMBEDDED} (embedded), a folder or a hub name."
        )
    if name == UNTRAINED:
        from rlhf_trl.tiny.tokenizer import build_tokenizer

        return build_tokenizer()
    tokenizer = from_pretrained(AutoTokenizer, model, args)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {name!r} has no eos_token; set it in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if conversational and tokenizer.chat_template is None:
        also = ", or write chat_template_path" if hasattr(args, "chat_template_path") else ""
        raise InputError(
            f"the tokenizer of {name!r} has no chat template, and prompts here are conversations; "
            "add chat_template.jinja to the model's folder (an instruction-tuned model has one)"
            f"{also}."
        )
    return tokenizer


def prepare_model(model: Any, args: Any) -> Any:
    """Return what a TRL trainer takes as `model`: a path or hub name, or a built model.

    Sets `args.model_init_kwargs` from the `ModelConfig` the way TRL's own scripts do.
    """
    if model.model_name_or_path == UNTRAINED:
        from rlhf_trl.tiny.model import build_model

        return build_model(args.seed)
    own = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    own |= {"revision": model.model_revision, **(args.model_init_kwargs or {})}
    args.model_init_kwargs = own
    path = Path(_path(model))
    if path.is_dir() and (fault := weights_fault(path)):
        raise InputError(
            f"model_name_or_path: {model.model_name_or_path!r} {fault}; name a whole one."
        )
    return str(path) if path.is_dir() else model.model_name_or_path


def load_policy(model: Any, args: Any) -> Any:
    """Return a whole language model that answers, on `args.device`; an adapter with its base."""
    from transformers import AutoConfig
    from trl import get_quantization_config

    fields, quantization = copy(args), get_quantization_config(model)
    policy = prepare_model(model, fields)
    if isinstance(policy, str):
        whole = not Path(policy, ADAPTER).is_file()
        kinds = whole and from_pretrained(AutoConfig, model, args).architectures
        if any("Classification" in kind for kind in kinds or ()):
            raise InputError(
                f"model_name_or_path: {model.model_name_or_path!r} is a classifier, which writes "
                "no answers; name a language model (of which to sample: dataset.sampled_from)."
            )
        if quantization is not None:  # such a model cannot be moved
            told = {"quantization_config": quantization, "device_map": {"": args.device}}
            fields.model_init_kwargs = told | fields.model_init_kwargs
        with whole_weights(args):
            policy = load_language_model(policy, **fields.model_init_kwargs)
    return policy.eval() if quantization is not None else policy.to(args.device).eval()


def model_config(model: Any, args: Any) -> Any:
    """Return what transformers says of a `ModelConfig`'s model; of an adapter's base."""
    from transformers import AutoConfig

    file = Path(_path(model), ADAPTER)
    if file.is_file():
        model = copy(model)
        model.model_name_or_path = json.loads(file.read_text())["base_model_name_or_path"]
        model.model_revision = "main"
    return from_pretrained(AutoConfig, model, args)


def load_language_model(source: str, **options: Any) -> Any:
    """Return the language model of a folder or hub name; an adapter in PEFT's wrapper, on its base.

    transformers would load adapters, too, but pass over what it does not know, such as DoRA's
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
    # Not by AutoPeftModelForCausalLM, which adds rows to the embeddings of a base that has fewer
    # than its tokenizer has tokens; training does not.
    base_options = {**options, "revision": config.revision}
    with fitting_adapter(source):
        base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, **base_options)
        model = PeftModelForCausalLM.from_pretrained(base, source, **options)
        check_adapter(model, source, revision)
    return model


def check_adapter(model: Any, source: str, revision: str | None = None) -> None:
    """Refuse an adapter of which `PeftModel.from_pretrained` passed over some weights, or lacked.

    Only loading again tells: `from_pretrained` warns of some and is silent about others.
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
    """Say in one sentence that an adapter does not fit its base, where PEFT raises an error."""
    try:
        yield
    except (KeyError, RuntimeError) as error:  # a weight is missing, or of another shape
        lacking = isinstance(error, KeyError)
        reason = f"it lacks {error.args[0]}" if lacking else reason_in_short(error)
        raise InputError(
            f"{source} is an adapter that does not fit its base model ({reason}); name a whole "
            f"one, or correct base_model_name_or_path in its {ADAPTER}."
        ) from error


@contextmanager
def loading(
    what: str,
    remedy: str,
    fault: str = "is neither a model folder here nor a hub model that can be reached",
    *also: type[Exception],
    new_head: bool = False,
) -> Iterator[None]:
    """Say in one sentence why transformers cannot load what a field names."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if new_head:  # which is no news
        logging.set_verbosity_error()
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, SafetensorError, *also) as error:
        said = str(error).strip().splitlines()[0]
        raise InputError(f"{what} {fault} ({said}); {remedy}.") from error
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def whole_weights(args: Any) -> Iterator[None]:
    """Load whole weights: ZeRO-3 would shard a model that no optimizer ever sees."""
    from transformers.integrations import deepspeed

    sharded = deepspeed.is_deepspeed_zero3_enabled()
    if sharded:
        deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if sharded:
            args.deepspeed_plugin.set_deepspeed_weakref()


def _path(model: Any) -> str:
    name = model.model_name_or_path
    return checkpoint_path() if name == EMBEDDED else name


def from_pretrained(auto_class: Any, model: Any, args: Any) -> Any:
    """Return what an auto class loads for a `ModelConfig`, or say in one sentence why not."""
    trust = getattr(args, "trust_remote_code", False)
    name = _path(model)
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise InputError(
            f"model_name_or_path: there is no folder {name!r}; train or copy the model there "
            f"first, or write {EMBEDDED} for the embedded one."
        )
    remedy = f"write {EMBEDDED} for the embedded model, or the path of a local copy"
    with loading(f"model_name_or_path: {model.model_name_or_path!r}", remedy):
        given = {"revision": model.model_revision, "trust_remote_code": trust}
        return auto_class.from_pretrained(name, **given)
