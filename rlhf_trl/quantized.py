"""Models in 8 or 4 bits: how they are loaded from whole ones, and which cannot be."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, get_args

import torch

from rlhf_trl.errors import InputError, nearest
from rlhf_trl.models import Quantization, loading

# What NF4 cuts a layer into: so many inputs share a scale, and CPUs read so many outputs at once.
NF4_INPUTS, NF4_OUTPUTS = 64, 32


def quantized_options(method: Quantization, source: str, key: str, device: Any) -> dict[str, Any]:
    """Return the options of `from_pretrained` that quantize a whole model while it is loaded.

    Embeddings and heads stay as they are. The scales of NF4 are quantized, too.

    Args:
        method: `int8` is torchao's, of weights alone; the others are bitsandbytes'.
        source: folder or hub name of the model.
        key: the option or field that names the method, for errors.
        device: where the model goes.

    Raises:
        InputError: the library is missing, or the model is quantized already or does not fit.
    """
    check_method(method, key)
    from transformers import AutoConfig, BitsAndBytesConfig, TorchAoConfig

    with loading(f"{key}: {source!r}", "name a whole model", "has no config.json to read"):
        config = AutoConfig.from_pretrained(source)
    if is_quantized(config):
        raise InputError(f"{key}: {source!r} is quantized already; name the model it was made of.")
    if method == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        quantization: Any = TorchAoConfig(Int8WeightOnlyConfig())
    elif method == "int8_bitsandbytes":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    else:
        _check_widths(config, source, key)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=config.dtype or torch.float32,
        )
    return {"quantization_config": quantization, "device_map": {"": device}}


def check_method(method: Quantization, key: str) -> None:
    """Refuse a method that is none, or whose library is missing."""
    methods = get_args(Quantization)
    if method not in methods:
        known = f"{', '.join(methods[:-1])} or {methods[-1]}"
        raise InputError(f"{key} is {method!r}; write {known}{nearest(method, methods)}.")
    library = library_of(method)
    if find_spec(library) is None:
        raise InputError(f"{key}: {library} is not installed; run scripts/setup.sh quant.")


def library_of(method: Quantization) -> str:
    """Return the name of the library that quantizes so."""
    return "torchao" if method == "int8" else "bitsandbytes"


def is_quantized(config: Any) -> bool:
    """Tell whether a model's config, of transformers or as a mapping, says that it is quantized."""
    values = config if isinstance(config, Mapping) else vars(config)
    return values.get("quantization_config") is not None


def _check_widths(config: Any, source: str, key: str) -> None:
    """Refuse layers that NF4 cannot cut into whole blocks, before any weight is read."""
    from transformers import AutoModel

    with torch.device("meta"):  # shapes alone
        model = AutoModel.from_config(config)
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        inputs, outputs = layer.in_features, layer.out_features
        if inputs % NF4_INPUTS or outputs % NF4_OUTPUTS:
            raise InputError(
                f"{key}: {name} of {source!r} has {inputs} inputs and {outputs} outputs, and nf4 "
                f"takes multiples of {NF4_INPUTS} and {NF4_OUTPUTS}; write int8."
            )
