"""The policy to train: the embedded model, a folder, or a hub name; checked before it is loaded.

Whole models, of which one samples, and adapters with their base are loaded in policies.py.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from rlhf_trl.errors import InputError
from rlhf_trl.output import weights_fault
from rlhf_trl.tiny import checkpoint_path

EMBEDDED = "tiny"  # the warm-start checkpoint that ships with the package
ADAPTER = "adapter_config.json"  # in the folder of an adapter
# The options of `from_pretrained` that are not named where it fails.
USUAL = {"dtype", "revision", "device_map", "trust_remote_code", "config"}
Quantization = Literal["int8", "int8_bitsandbytes", "nf4"]  # see quantized.py
UNTRAINED = "tiny_untrained"  # the same architecture and tokenizer with initial weights


def load_quietly() -> None:
    """Keep bars of weights, and DeepSpeed's notice that there is no GPU, off the screen.

    The bars of what is fetched from the hub stay.
    """
    for library in ("bitsandbytes", "torchao"):  # which warn of kernels, and of every cast
        logging.getLogger(library).setLevel(logging.ERROR)
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    hidden = are_progress_bars_disabled()
    transformers.logging.disable_progress_bar()  # this hides the hub's bars, too
    if not hidden:
        enable_progress_bars()  # of the hub only
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
        or_path = ", or write chat_template_path" if hasattr(args, "chat_template_path") else ""
        raise InputError(
            f"the tokenizer of {name!r} has no chat template, and prompts here are conversations; "
            "add chat_template.jinja to the model's folder (an instruction-tuned model has one)"
            f"{or_path}."
        )
    return tokenizer


def prepare_model(model: Any, args: Any) -> Any:
    """Return what a TRL trainer takes as `model`: a path or hub name, or a built model.

    Sets `args.model_init_kwargs` from the `ModelConfig` the way TRL's own scripts do.
    """
    if model.model_name_or_path == UNTRAINED:
        from rlhf_trl.tiny.model import build_model

        return build_model(args.seed)
    args.model_init_kwargs = {
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        "revision": model.model_revision,
        **(args.model_init_kwargs or {}),
    }
    path = Path(_path(model))
    if path.is_dir() and (fault := weights_fault(path)):
        raise InputError(
            f"model_name_or_path: {model.model_name_or_path!r} {fault}; name a whole one."
        )
    return str(path) if path.is_dir() else model.model_name_or_path


def model_config(model: Any, args: Any) -> Any:
    """Return what transformers says of a `ModelConfig`'s model; of an adapter's base."""
    from transformers import AutoConfig

    file = Path(_path(model), ADAPTER)
    if file.is_file():
        model = copy(model)
        with loading(f"model_name_or_path: {str(file)!r}", "name a whole adapter", "has no base"):
            model.model_name_or_path = json.loads(file.read_text())["base_model_name_or_path"]
        model.model_revision = "main"  # the revision that was named is the adapter's
    return from_pretrained(AutoConfig, model, args)


def configs_of(model: Any, args: Any) -> list[Any]:
    """Return the configs of a `ModelConfig`'s language model and of the adapter that is trained."""
    from trl import get_peft_config

    if model.model_name_or_path in (None, UNTRAINED):  # a missing one is refused where it is loaded
        return []
    configs = [model_config(model, args).get_text_config(), get_peft_config(model)]
    if Path(_path(model), ADAPTER).is_file():
        from peft import PeftConfig

        configs.append(PeftConfig.from_pretrained(_path(model)))
    return [config for config in configs if config is not None]


def dropouts(config: Any) -> dict[str, float]:
    """Return the fields of a model's or an adapter's config that make its forward a random one."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, float) and value and ("dropout" in name or name.endswith("pdrop"))
    }


@contextmanager
def loading(
    what: str,
    remedy: str,
    fault: str = "is neither a model folder here nor a hub model that can be reached",
    *,
    new_head: bool = False,
) -> Iterator[None]:
    """Say in one sentence why transformers cannot load what a field names.

    It is "{what} {fault} ({the reason by transformers}); {remedy}." With `new_head`, there is no
    warning that the weights of a head are new.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if new_head:
        logging.set_verbosity_error()
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # what it reads may be anything, and so may the error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, ImportError) and ("bitsandbytes" in reason or "torchao" in reason):
            remedy = "run scripts/setup.sh quant"
        raise InputError(f"{what} {fault} ({reason}); {remedy}.") from error
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def as_saved(policy: Any) -> Iterator[None]:
    """Refuse models whose weights are not those of their config, and say why one cannot be loaded.

    In the block, every model's `from_pretrained` is stricter: transformers only warns that it draws
    the weights that a folder lacks at random, and that it passes over layers. `policy` is what
    model_name_or_path names: errors about it name that key.
    """
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__

    def checked(cls: Any, source: Any, *rest: Any, **options: Any) -> Any:
        """Load as `from_pretrained` does, and refuse what it only reports."""
        if options.get("output_loading_info"):  # the caller judges the report by itself
            return load(cls, source, *rest, **options)
        where = f"{'model_name_or_path' if source == policy else 'model'}: {source!r}"
        fault = "cannot be loaded"
        # options that may be the reason
        unusual = [key for key, value in options.items() if value is not None and key not in USUAL]
        if "quantization_config" in unusual:
            unusual.append("load_in_8bit or load_in_4bit")  # by which the user asks for it
        if unusual:
            fault = f"cannot be loaded with {', '.join(unusual)}"
        # weights of another size, at which transformers would stop, go into the report as well,
        # and `_check_weights` refuses them in one sentence
        reporting = {"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
        with loading(where, "correct it, or name another", fault):
            model, report = load(cls, source, *rest, **reporting)
        if not Path(source, ADAPTER).is_file():  # `check_adapter` does this for adapters
            resized = options.get("ignore_mismatched_sizes", False)
            _check_weights(where, model, report, resized)
        return model

    with patch.object(PreTrainedModel, "from_pretrained", classmethod(checked)):
        yield


def _check_weights(where: str, model: Any, report: Mapping[str, Any], resized: bool) -> None:
    """Refuse weights that are missing, of another size, or of a layer that the config lacks.

    `report` is transformers' loading info; with `resized`, the caller wants other sizes.
    """
    missing = set(report["missing_keys"])
    if "Classification" in type(model).__name__:  # a reward model's head may be new, its base not
        missing = {key for key in missing if key.startswith(f"{model.base_model_prefix}.")}
    mismatched = [] if resized else sorted(report["mismatched_keys"])
    modules = {name for name, _ in model.named_modules()}
    # weights of more layers than the config says; others (such as another head) are not needed
    surplus = []
    for key in report["unexpected_keys"]:
        layers = re.split(r"\.\d+\.", key)[0]  # as in `model.layers.2.mlp.weight`
        if key.endswith("weight") and layers in modules:
            surplus.append(key)
    if mismatched:
        key, saved, wanted = mismatched[0]
        count = len(mismatched)
        fault = f"has {key} of size {[*saved]} where config.json or num_labels says {[*wanted]}"
    elif missing:
        count = len(missing)
        fault = f"lacks {min(missing)}, so that random weights would be trained"
    elif surplus:
        count = len(surplus)
        fault = f"has {min(surplus)}, which the model of its config.json lacks"
    else:
        return
    raise InputError(
        f"{where} {fault} (1 of {count} such weights); name a whole model, or correct its "
        "config.json."
    )


def _path(model: Any) -> str:
    name = model.model_name_or_path
    return checkpoint_path() if name == EMBEDDED else name


def from_pretrained(auto_class: Any, model: Any, args: Any) -> Any:
    """Return what an auto class loads for a `ModelConfig`, or say in one sentence why not."""
    trust = getattr(args, "trust_remote_code", False)
    name = _path(model)
    # what looks like a path, and not like `owner/model` on the hub
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise InputError(
            f"model_name_or_path: there is no folder {name!r}; train or copy the model there "
            f"first, or write {EMBEDDED} for the embedded one."
        )
    remedy = f"write {EMBEDDED} for the embedded model, or the path of a local copy"
    with loading(f"model_name_or_path: {model.model_name_or_path!r}", remedy):
        return auto_class.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=trust
        )
