"""The policy to train: the embedded model, a folder, or a hub name; checked before it is loaded.

Models that answer, and adapters with their base, are loaded in policies.py.
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
from rlhf_trl.tiny import checkpoint_path

EMBEDDED = "tiny"  # the warm-start checkpoint that ships with the package
ADAPTER = "adapter_config.json"  # in the folder of an adapter
# Options of `from_pretrained` that are hardly the reason if it fails, so that no error names them.
USUAL_OPTIONS = {"dtype", "revision", "device_map", "trust_remote_code", "config"}
Quantization = Literal["int8", "int8_bitsandbytes", "nf4"]  # see quantized.py
UNTRAINED = "tiny_untrained"  # the same architecture and tokenizer with initial weights


def load_quietly() -> None:
    """Keep bars of weights, and DeepSpeed's notice that there is no GPU, off the screen.

    The bars of what is fetched from the hub stay.
    """
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    hidden = are_progress_bars_disabled()
    transformers.logging.disable_progress_bar()  # this hides the hub's bars, too
    if not hidden:
        enable_progress_bars()  # of the hub only
    notice = "Setting accelerator to CPU"
    logging.getLogger("DeepSpeed").addFilter(lambda record: notice not in record.getMessage())


def load_tokenizer(
    model: Any, args: Any, conversational: bool = True, replaces_template: bool = True
) -> Any:
    """Return the tokenizer of a `ModelConfig`, with a pad token and, for conversations, a template.

    Args:
        model: its `model_name_or_path` is `tiny`, `tiny_untrained`, a folder or a hub name.
        args: TRL's config, which may name a template in `chat_template_path`.
        conversational: whether the prompts are conversations.
        replaces_template: whether the template of `args` goes before the tokenizer's own.
    """
    from transformers import AutoTokenizer

    name = model.model_name_or_path
    if name is None:
        raise InputError(
            f"model_name_or_path is missing; write {EMBEDDED} (embedded), a folder or a hub name."
        )
    if name == UNTRAINED:
        from rlhf_trl.tiny.tokenizer import build_tokenizer

        tokenizer = build_tokenizer()
    else:
        tokenizer = from_pretrained(AutoTokenizer, model, args)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {name!r} has no eos_token; set it in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    from rlhf_trl.named_templates import TEMPLATES, template_file

    path = getattr(args, "chat_template_path", None)
    if conversational and path and (replaces_template or tokenizer.chat_template is None):
        tokenizer.chat_template = chat_template(path)
        args.chat_template_path = template_file(path)  # which RewardTrainer and SFTTrainer read
    if conversational and tokenizer.chat_template is None:
        raise InputError(
            f"the tokenizer of {name!r} has no chat template, and prompts here are conversations; "
            "add chat_template.jinja to the model's folder (an instruction-tuned model has one), "
            "or write chat_template_path: zephyr, or another template's name "
            f"({', '.join(TEMPLATES)})."
        )
    return tokenizer


def chat_template(path: str, key: str = "chat_template_path") -> str:
    """Return the chat template that a field of a config names.

    Args:
        path: the field's value: a template's name, a .jinja file, or a folder or hub model with a
            tokenizer that has one.
        key: the field, for errors.
    """
    from transformers import AutoTokenizer

    from rlhf_trl.named_templates import TEMPLATES, template_file

    path = template_file(path)
    if path.endswith((".jinja", ".j2")):
        if not Path(path).is_file():
            raise InputError(f"{key}: there is no file {path!r}; write that of one.")
        return Path(path).read_text(encoding="utf-8")
    fault = (
        "is neither a .jinja file nor a folder or hub model with a tokenizer that can be reached"
    )
    with loading(f"{key}: {path!r}", f"name one, or a template ({', '.join(TEMPLATES)})", fault):
        donor = AutoTokenizer.from_pretrained(path)
    if donor.chat_template is None:
        raise InputError(
            f"{key}: the tokenizer of {path!r} has no chat template to take over; "
            "name an instruction-tuned model, or a .jinja file."
        )
    return donor.chat_template


def prepare_model(model: Any, args: Any) -> Any:
    """Return what a TRL trainer takes as `model`: a path or hub name, or a built model.

    Set `args.model_init_kwargs` from `model`, a `ModelConfig`, the way TRL's own scripts do.
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
    path = Path(path_or_name(model))
    if not path.is_dir():  # a hub name
        return model.model_name_or_path
    from rlhf_trl.manifests import weights_fault

    if fault := weights_fault(path):
        raise InputError(
            f"model_name_or_path: {model.model_name_or_path!r} {fault}; name a whole one."
        )
    return str(path)


def model_config(model: Any, args: Any) -> Any:
    """Return the transformers config of a `ModelConfig`'s model; of an adapter, its base's."""
    from transformers import AutoConfig

    file = Path(path_or_name(model), ADAPTER)
    if file.is_file():
        model = copy(model)
        with loading(f"model_name_or_path: {str(file)!r}", "name a whole adapter", "has no base"):
            model.model_name_or_path = json.loads(file.read_text())["base_model_name_or_path"]
        model.model_revision = "main"  # the revision of the `ModelConfig` is the adapter's
    return from_pretrained(AutoConfig, model, args)


def configs_of(model: Any, args: Any) -> list[Any]:
    """Return the configs of a `ModelConfig`'s language model and of the adapter that is trained."""
    from trl import get_peft_config

    if model.model_name_or_path in (None, UNTRAINED):  # a missing one is refused where it is loaded
        return []
    configs = [model_config(model, args).get_text_config(), get_peft_config(model)]
    if Path(path_or_name(model), ADAPTER).is_file():
        from peft import PeftConfig

        configs.append(PeftConfig.from_pretrained(path_or_name(model)))
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
    """Turn errors of transformers, in the block, to one sentence about what a field names.

    It is "{what} {fault} ({the reason by transformers}); {remedy}." With `new_head`, transformers
    does not warn that the weights of a head are new.
    """
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    if new_head:
        logging.set_verbosity_error()
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # files may hold anything, so the error may be of any kind
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if isinstance(error, ImportError) and ("bitsandbytes" in reason or "torchao" in reason):
            remedy = "run scripts/setup.sh quant"
        raise InputError(f"{what} {fault} ({reason}); {remedy}.") from error
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def as_saved(policy: Any) -> Iterator[None]:
    """Make every model's `from_pretrained` stricter in the block.

    Refuse weights that do not fit the config: transformers would only warn that it draws missing
    ones at random and ignores further layers. Where a model cannot be loaded, say why. `policy` is
    what `model_name_or_path` names; errors about other models call them `model`.
    """
    from transformers import PreTrainedModel

    load = PreTrainedModel.from_pretrained.__func__

    def checked(cls: Any, source: Any, *rest: Any, **options: Any) -> Any:
        """Load as `from_pretrained` does, and refuse what it only reports."""
        if options.get("output_loading_info"):  # the caller checks the report
            return load(cls, source, *rest, **options)
        where = f"{'model_name_or_path' if source == policy else 'model'}: {source!r}"
        fault = "cannot be loaded"
        used = [key for key, value in options.items() if value is not None]
        suspects = [key for key in used if key not in USUAL_OPTIONS]
        if "quantization_config" in suspects:
            suspects.append("load_in_8bit or load_in_4bit")  # by which the user asks for it
        if suspects:
            fault = f"cannot be loaded with {', '.join(suspects)}"
        # weights of another size, at which transformers would stop, go into the report as well,
        # and `_check_weights` refuses them in one sentence
        reporting = {"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
        with loading(where, "correct it, or name another", fault):
            model, report = load(cls, source, *rest, **reporting)
        if not Path(source, ADAPTER).is_file():  # of an adapter, `check_adapter` checks the weights
            other_sizes = options.get("ignore_mismatched_sizes", False)
            _check_weights(where, model, report, other_sizes)
        return model

    with patch.object(PreTrainedModel, "from_pretrained", classmethod(checked)):
        yield


def _check_weights(where: str, model: Any, report: Mapping[str, Any], other_sizes: bool) -> None:
    """Refuse weights that are missing, of another size, or of a layer that the config lacks.

    `report` is transformers' loading info; with `other_sizes`, the caller accepts other sizes.
    """
    missing = set(report["missing_keys"])
    if "Classification" in type(model).__name__:  # a reward model's head may be new, its base not
        missing = {key for key in missing if key.startswith(f"{model.base_model_prefix}.")}
    mismatched = [] if other_sizes else sorted(report["mismatched_keys"])
    modules = {name for name, _ in model.named_modules()}
    # weights of more layers than the config says; others (such as another head) are not needed
    surplus = []
    for key in report["unexpected_keys"]:
        # the list of layers, "model.layers", of a weight such as `model.layers.2.mlp.weight`
        layers = re.split(r"\.\d+\.", key)[0]
        if key.endswith("weight") and layers in modules:
            surplus.append(key)
    if mismatched:
        key, size, size_by_config = mismatched[0]
        count = len(mismatched)
        fault = f"has {key} of size {[*size]} where config.json or num_labels says "
        fault += f"{[*size_by_config]}"
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


def path_or_name(model: Any) -> str:
    """Return the folder or hub name of a `ModelConfig`'s model; of `tiny`, the folder."""
    name = model.model_name_or_path
    return checkpoint_path() if name == EMBEDDED else name


def from_pretrained(auto_class: Any, model: Any, args: Any) -> Any:
    """Return what an auto class loads for a `ModelConfig`, or say in one sentence why not."""
    trust = getattr(args, "trust_remote_code", False)
    name = path_or_name(model)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1  # not owner/model
    if looks_like_path and not Path(name).is_dir():
        raise InputError(
            f"model_name_or_path: there is no folder {name!r}; train or copy the model there "
            f"first, or write {EMBEDDED} for the embedded one."
        )
    remedy = f"write {EMBEDDED} for the embedded model, or the path of a local copy"
    of_run = Path(model.model_name_or_path) / "model"
    if of_run.is_dir():  # the folder of a run
        remedy = f"write {of_run}"
    with loading(f"model_name_or_path: {model.model_name_or_path!r}", remedy):
        return auto_class.from_pretrained(
            name, revision=model.model_revision, trust_remote_code=trust
        )
