"""The untrained model that comparisons run on, and what every trainer of theirs is told."""

import atexit
import gc
import hashlib
import importlib.metadata
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from importlib import import_module
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from rlhf_trl.run.config_types import recipe_defaults
from rlhf_trl.tiny.model import END, build_model
from rlhf_trl.tiny.tokenizer import build_tokenizer

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "layer_types": None,  # one a layer, made anew
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    # six times the usual initial weights: a distribution as far from uniform as a wider model's
    "initializer_range": 0.12,
}
"""Fields of the embedded model's config that others replace here, for the sake of speed."""


@cache
def _untrained() -> Module:
    embedded = build_model()
    config = type(embedded.config)(**embedded.config.to_dict() | _SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = type(embedded)(config).float()
    model.generation_config = embedded.generation_config
    return model


def untrained() -> Module:
    """Return a fresh copy of the model, which is also the reference policy."""
    return deepcopy(_untrained())


@cache
def policy_folder() -> str:
    """Return a temporary folder with the model, from which TRL loads policy and reference."""
    folder = tempfile.mkdtemp(prefix="rlhf_trl-compare-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    untrained().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@cache
def _loaded() -> Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy_folder())  # TRL finds the reference there


def untrained_scorer() -> Module:
    """Return the model with a scalar head on the last token: a reward model before training."""
    from transformers import AutoModelForSequenceClassification

    return deepcopy(_with_head(AutoModelForSequenceClassification))


def untrained_token_scorer(classes: int = 1) -> Module:
    """Return the model with a head on every token, without bias and dropout."""
    from transformers import AutoModelForTokenClassification

    return deepcopy(_with_head(AutoModelForTokenClassification, classes))


@cache
def _with_head(auto: Any, classes: int = 1) -> Module:
    body = untrained()
    body.config.num_labels, body.config.classifier_dropout = classes, 0.0
    body.config.token_classification_bias = False
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(body.config)
    model.load_state_dict(body.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.score.weight.normal_(generator=generator).mul_(0.1)
        if model.score.bias is not None:
            model.score.bias.zero_()
    return model


_from_pretrained = PreTrainedModel.from_pretrained.__func__
_loaded_models: dict[Any, Module] = {}  # by class and arguments


def _load_once(cls: type, *args: Any, **kwargs: Any) -> Module:
    """Load a model, or copy the one that was loaded with these arguments before."""
    key = cls, repr((args, kwargs))
    if key not in _loaded_models:
        _loaded_models[key] = _from_pretrained(cls, *args, **kwargs)
    return deepcopy(_loaded_models[key])


@contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars and warnings of other libraries off the screen."""
    import datasets
    import transformers

    bars_were_disabled = datasets.are_progress_bars_disabled()
    bars_of_models_were_enabled = transformers.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        if bars_of_models_were_enabled:
            transformers.logging.enable_progress_bar()
        if not bars_were_disabled:
            datasets.enable_progress_bars()


@contextmanager
def quick_and_quiet() -> Iterator[None]:
    """Keep libraries off the screen, see `quiet`, and skip their slow steps.

    What is skipped has no part in a comparison; the reason for each stands beside it.
    """
    import transformers

    shortcuts = (
        # accelerate parses the metadata of packages anew for every trainer: a quarter of its time
        patch("importlib.metadata.metadata", cache(importlib.metadata.metadata)),
        # datasets hashes every function that is mapped, for caches that nobody reads
        patch("datasets.fingerprint.Hasher.hash", lambda *_: uuid4().hex),
        # TRL loads the reference anew for every trainer
        patch.object(transformers.PreTrainedModel, "from_pretrained", classmethod(_load_once)),
        # torch keeps the stack where a seed was set, for each kind of device: `list()` is empty
        patch("traceback.format_stack", list),
        # accelerate imports DeepSpeed to see whether a model is of its kind: `bool()` is False
        patch("accelerate.utils.other.is_deepspeed_available", bool),
    )
    with quiet(), ExitStack() as stack:
        for shortcut in shortcuts:
            stack.enter_context(shortcut)
        # what is there now, above all the imported modules, is not looked at for garbage: it takes
        # a quarter of a second each time that accelerate asks for it
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield


@contextmanager
def at_scale() -> Iterator[None]:
    """Let TRL compute as on a large machine, on paths that a small run does not take.

    TRL believes itself to be the second of two processes; of the first one's numbers, counts are
    twice this one's, and all others have the other sign, too. Where a vocabulary is large, TRL
    multiplies by the head part by part; here the parts are so small that it does so with this
    model, too.
    """
    with ExitStack() as stack:
        for patched in (*_two_processes(), *_small_parts()):
            stack.enter_context(patched)
        yield


def _two_processes() -> Iterator[Any]:
    """Yield the patches that make this the second of two processes.

    Functions that gather return the first process's part, then this one's. Modules of TRL and
    accelerate import these functions by name, so the name is patched in each of the modules.
    """
    from accelerate import Accelerator, utils

    def gather_both(own: Tensor) -> Tensor:
        """Gather from both processes, the first one's numbers as `at_scale` says."""
        first = -2 * own if own.is_floating_point() else own + own
        return torch.cat([first, own]) if own.dim() else torch.stack([first, own])

    replacements = {
        utils.gather: partial(utils.recursively_apply, gather_both),
        utils.gather_object: lambda objects: [*objects, *objects],
    }
    yield patch.multiple(Accelerator, num_processes=2, process_index=1)
    for name, module in list(sys.modules.items()):
        if not name.startswith(("trl.", "accelerate")):
            continue
        for function, replacement in replacements.items():
            if vars(module).get(function.__name__) is function:
                yield patch.object(module, function.__name__, replacement)


def _small_parts() -> Iterator[Any]:
    """Yield the patches that make TRL compute in parts, of the sizes in _PARTS."""
    for place, size in _PARTS.items():
        module_name, _, constant = place.rpartition(".")
        try:
            module = import_module(module_name)
        except ImportError:  # another release has no such parts
            continue
        if hasattr(module, constant):
            yield patch.object(module, constant, size)


_PARTS = {
    "trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE": 70,
    "trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE": 200,
    "trl.kernels.chunked_divergence.VOCAB_CHUNK_SIZE": 70,
    "trl.kernels.chunked_divergence.TOKEN_CHUNK_SIZE": 50,
}
"""Tokens of the vocabulary, or of texts, that make a part."""


def drawn(*key: Any) -> random.Random:
    """Return a generator for this key, the same in every process."""
    return random.Random(hashlib.sha256(repr(key).encode()).hexdigest())


def token_logps(model: Module, ids: Tensor, attention: Tensor, temperature: float = 1.0) -> Tensor:
    """Return (R, S - 1) log-probabilities of all tokens but the first, 0 on padding."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
    logps = torch.log_softmax(logits / temperature, -1)
    return logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1) * attention[:, 1:]


class Gradients:
    """The gradients of sum(weights * outputs) in a model's parameters; each is computed once."""

    def __init__(self, model: Module, outputs: Tensor) -> None:
        """Take a model and what it put out, differentiable."""
        self.model = model
        self._outputs = outputs
        self._tensors = [parameter for _, parameter in sorted(model.named_parameters())]
        self._computed_gradients: dict[bytes, Tensor] = {}

    def __call__(self, weights: Tensor) -> Tensor:
        """Return the gradient for weights of the outputs' shape: (N,), by sorted name."""
        key = weights.numpy().tobytes()
        if key not in self._computed_gradients:
            self._computed_gradients[key] = self._computed(weights)
        return self._computed_gradients[key]

    def _computed(self, weights: Tensor) -> Tensor:
        options = {"retain_graph": True, "allow_unused": True}
        gradients = torch.autograd.grad(self._outputs, self._tensors, weights, **options)
        parts = []
        for gradient, parameter in zip(gradients, self._tensors, strict=True):
            is_unused = gradient is None
            parts.append((torch.zeros_like(parameter) if is_unused else gradient).flatten())
        return torch.cat(parts)


def drifted(state: Mapping[str, Tensor], scale: float, seed: int) -> dict[str, Tensor]:
    """Return weights that noise has moved, by `scale` standard deviations of each matrix."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=generator)
        moved[name] = tensor + scale * tensor.std() * noise if tensor.dim() > 1 else tensor.clone()
    if "lm_head.weight" in moved:  # tied to the embeddings
        moved["lm_head.weight"] = moved["model.embed_tokens.weight"]
    return moved


def trainer_fields() -> dict[str, Any]:
    """Return the config fields that keep a trainer in full precision, quiet, and off the disk."""
    return {
        "output_dir": "/nonexistent",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


SECOND_END = 30
"""A token that ends a text for `with_second_end`."""


def with_second_end() -> Module:
    """Return the model with a further end token in its generation config."""
    model = deepcopy(_loaded())
    model.generation_config.eos_token_id = [END, SECOND_END]
    return model


def adapter() -> dict[str, Any]:
    """Return the arguments with which a trainer trains an adapter.

    The model under it has its logits capped and scaled, as some models have.
    """
    from peft import LoraConfig

    model = deepcopy(_loaded())
    model.config.final_logit_softcapping = 1.0
    model.config.logit_scale = 0.8
    config = LoraConfig(
        r=4,
        lora_dropout=0.5,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,  # random weights: otherwise a new adapter changes nothing
    )
    return {"model": model, "peft_config": config}


def continued_adapter() -> dict[str, Any]:
    """Return the arguments with which a trainer goes on with an adapter, its own reference."""
    from peft import get_peft_model

    arguments = adapter()
    return {"model": get_peft_model(arguments["model"], arguments["peft_config"])}


def take(model: Module, weights: Mapping[str, Tensor]) -> None:
    """Load the weights of a policy into a model; an adapter is moved by noise instead.

    The copies of an adapter that TRL keeps, "ref" and "teacher", stay where they are.
    """
    has_adapter = hasattr(model, "peft_config")
    if has_adapter:
        parts = model.state_dict().items()
        own = {name: x for name, x in parts if "lora_" in name and ".default." in name}
        weights = drifted(own, 0.3, seed=1)
    model.load_state_dict(weights, strict=not has_adapter)


def tokenizer_with_bos() -> Any:
    """Return the embedded tokenizer, changed to put BOS before each text, as many others do."""
    tokenizer = build_tokenizer()
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    # $A stands for the text
    bos_first = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = bos_first
    return tokenizer


_ROW_FIELDS = ("algorithm", "formulation", "step_separator", "step_split")
"""Arguments of `make_trainer` that go into the config: which row our trainer trains, and how."""


def make_trainer(
    trainer: type,
    config: type,
    fields: Mapping[str, Any],
    examples: list[dict[str, Any]],
    **arguments: Any,
) -> Any:
    """Build a trainer of TRL on the untrained model, or on a `model` among its arguments.

    Args:
        trainer: the class.
        config: its config class.
        fields: those of the config, which override all others.
        examples: the data.
        arguments: further arguments of the trainer. Callers also pass those of _ROW_FIELDS here,
            which are fields of our configs.
    """
    from datasets import Dataset

    row_fields = {name: arguments.pop(name) for name in _ROW_FIELDS if name in arguments}
    # the later ones override the earlier ones; `recipe_defaults` are what our recipes turn on
    config_fields = trainer_fields() | recipe_defaults(config) | row_fields | dict(fields)
    model = arguments.pop("model", None)
    tokenizer = arguments.pop("processing_class", None)
    return trainer(
        model=model or deepcopy(_loaded()),
        args=config(**config_fields),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer or build_tokenizer(),
        **arguments,
    )
