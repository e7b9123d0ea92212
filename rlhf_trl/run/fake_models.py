"""Models without numbers: counted, and called once to see what autograd saves.

A model is made from its config on the device `meta`, and called with fake tensors, which have
shapes and no numbers: no weight is read, and nothing is computed.
"""

import json
import math
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from trl.trainer.utils import add_fused_lm_head

from rlhf_trl.errors import InputError
from rlhf_trl.models import UNTRAINED, model_config
from rlhf_trl.run.shares import Weights

ARCHITECTURES = Path(__file__).parent / "architectures"
ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
EIGHT_BIT = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
# of bitsandbytes: numbers in a block of 8 and of 4 bits; smaller tensors are left in float32
BLOCK_OF_8_BIT, BLOCK_OF_4_BIT, SMALLEST_IN_8_BIT = 256, 64, 4096

Head = Literal["fused", "logits", "text", "token"]
"""What is behind the last layer: TRL's fused head, a language model's own, a classifier."""

_AUTO = {
    "fused": AutoModelForCausalLM,
    "logits": AutoModelForCausalLM,
    "text": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The largest batch of one forward pass of training."""

    rows: int  # texts at once
    tokens: int  # in each of them
    assumed: bool = False  # whether no field of the config limits the tokens


def architecture_of(name: str, loaded: Any) -> Any:
    """Return the transformers config of a model, or the one that ships with the package for it.

    Args:
        name: `tiny`, a folder or a hub name.
        loaded: the run's configuration.

    Raises:
        InputError: there is none.
    """
    if name == UNTRAINED:
        from rlhf_trl.tiny.model import build_model

        return build_model(0).config
    model = copy(loaded.model)
    if name != model.model_name_or_path:
        model.model_name_or_path, model.model_revision = name, "main"
    try:
        return model_config(model, loaded.trl)
    except InputError as error:
        for file in ARCHITECTURES.glob("*.json"):
            if Path(name).name.lower().startswith(file.stem):  # qwen3-0.6b also for its -Base
                return AutoConfig.for_model(**json.loads(file.read_text()))
        raise InputError(
            f"{name} is neither a folder here nor in the hub's cache ({HF_HUB_CACHE}); a folder "
            "with its config.json is enough for a plan, which reads no weights."
        ) from error


def new_model(
    architecture: Any, head: Head, dtype: torch.dtype, adapter: Any = None, in_4_bit: bool = False
) -> Any:
    """Return the model of a config on the device `meta`, with PEFT's `adapter` if there is one.

    An adapter beside weights `in_4_bit` is cast to bfloat16, as TRL does; these stay whole here.
    """
    with torch.device("meta"):
        model = _AUTO[head].from_config(architecture, dtype=dtype)
        if head == "fused":
            add_fused_lm_head(model)
        if adapter is not None:
            from peft import get_peft_model

            model = get_peft_model(model, adapter)
    if in_4_bit:
        for name, weight in model.named_parameters():
            if weight.requires_grad and "magnitude_vector" not in name:
                weight.data = weight.data.to(torch.bfloat16)
    return model


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def weights_of(model: nn.Module, optim: str, in_4_bit: Literal["nested"] | bool = False) -> Weights:
    """Count a model's parameters, tied ones once, and the bytes of its optimizer's state.

    Args:
        model: what `new_model` returned.
        optim: TRL's field.
        in_4_bit: whether the frozen matrices are in 4 bits; nested: so are their scales, in 8.
    """
    parameters = list(model.parameters())  # yields a tied one once
    trained = [weight for weight in parameters if weight.requires_grad]
    frozen = [weight for weight in parameters if not weight.requires_grad]
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    # a sharded model gathers its layers, and its embedding, one after the other
    gathered = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    gathered += [weight.numel() for weight in parameters if weight.dim() == 2]
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    frozen_bytes = size_of(frozen)
    if in_4_bit:
        for name, module in model.named_modules():
            is_head = {"lm_head", "score"} & {*name.split(".")}  # which stays in its dtype
            if isinstance(module, nn.Linear) and not module.weight.requires_grad and not is_head:
                frozen_bytes -= size_of([module.weight])
                frozen_bytes += bytes_in_4_bit(module.weight.numel(), in_4_bit == "nested")
    return Weights(
        trained=sum(weight.numel() for weight in trained),
        frozen=sum(weight.numel() for weight in frozen),
        trained_bytes=size_of(trained),
        frozen_bytes=frozen_bytes,
        largest_layer=max(gathered, default=0),
        optimizer_bytes=sum(
            _state_bytes(weight, optim, weight in embeddings) for weight in trained
        ),
    )


def bytes_in_4_bit(numbers: int, nested: bool) -> int:
    """Return the bytes of a matrix in bitsandbytes' 4 bits: two numbers a byte, and their scales.

    Each block of 64 has a scale in float32; `nested`: in a byte, and a float32 for 256 of them.
    """
    scales = math.ceil(numbers / BLOCK_OF_4_BIT)
    size_of_scales = scales + 4 * math.ceil(scales / BLOCK_OF_8_BIT) if nested else 4 * scales
    return math.ceil(numbers / 2) + size_of_scales


def _state_bytes(parameter: Tensor, optim: str, is_embedding: bool) -> int:
    """Return the bytes of an optimizer's state for one parameter.

    Adam: two averages in the parameter's dtype, and a count of steps in float32. In 8 bits: a byte
    for each, and a float32 for each block of them; small tensors and, as transformers asks for,
    embeddings keep float32.
    """
    numbers = parameter.numel()
    if optim in ADAM:
        return 2 * numbers * parameter.element_size() + 4
    if optim in EIGHT_BIT:
        if numbers < SMALLEST_IN_8_BIT or is_embedding:
            return 2 * numbers * 4
        return 2 * (numbers + 4 * math.ceil(numbers / BLOCK_OF_8_BIT))
    if optim == "sgd":
        return 0
    raise InputError(
        f"optim: the state of {optim} is not known here; write one of "
        f"{', '.join([*ADAM, *EIGHT_BIT, 'sgd'])} to plan with."
    )


def activations(
    model: nn.Module, head: Head, texts: Texts, *, in_bf16: bool, checkpointed: bool = False
) -> int:
    """Return the bytes that autograd saves in the forward pass of one micro-batch.

    Args:
        model: what `new_model` returned; its tensors become fake ones.
        head: the one it was made with.
        texts: the micro-batch.
        in_bf16: whether it computes in bfloat16 (autocast).
        checkpointed: whether layers keep their inputs alone.
    """
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()

    def forward() -> None:
        ids = torch.zeros((texts.rows, texts.tokens), dtype=torch.long)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if head == "fused":
            inputs |= {"labels": ids, "fused_lm_head": True}
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            model(**inputs, use_cache=False)

    with FakeTensorMode():
        _make_fake(model)
        return _saved_bytes(model, forward)


def autocast_copies(model: nn.Module, head: Head) -> int:
    """Return the bytes of the copies in bfloat16 that autocast keeps until a forward pass ends.

    It keeps one of each trained float32 weight that it multiplies by, 2 bytes a number; TRL's fused
    head makes none of its own. Without checkpointing they are among what autograd saves.
    """
    linear = {module for module in model.modules() if isinstance(module, nn.Linear)}
    if head == "fused":
        linear.discard(model.get_output_embeddings())
    weights = {module.weight for module in linear}
    kept = (w for w in weights if w.requires_grad and w.dtype == torch.float32)
    return sum(2 * weight.numel() for weight in kept)


def one_layer(
    architecture: Any, head: Head, dtype: torch.dtype, texts: Texts, *, in_bf16: bool
) -> int:
    """Return the bytes that one layer saves: two layers less one.

    With checkpointing, the backward pass computes one layer at a time again, and keeps this.
    """
    sizes = []
    for layers in (1, 2):
        shortened = deepcopy(architecture)
        shortened.num_hidden_layers = layers
        if getattr(shortened, "layer_types", None):
            shortened.layer_types = shortened.layer_types[:layers]
        model = new_model(shortened, head, dtype)
        sizes.append(activations(model, head, texts, in_bf16=in_bf16))
    return sizes[1] - sizes[0]


def _make_fake(model: nn.Module) -> None:
    """Replace a model's tensors, which are on `meta`, by fake ones; tied ones stay tied.

    They are not fake from the start because PEFT cannot add an adapter to fake tensors, and do not
    stay on `meta` because transformers reads the values of a mask, which do not exist there.
    """
    fake: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in fake:
                    fake[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fake[tensor] = nn.Parameter(fake[tensor], tensor.requires_grad)
                tensors[name] = fake[tensor]


def _saved_bytes(model: nn.Module, forward: Callable[[], None]) -> int:
    """Return the bytes that a forward pass saves, beside parameters and buffers.

    A storage counts once, whatever tensors look at it.
    """
    owned = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, Tensor] = {}  # by storage; the tensor keeps the storage, and so its number

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in owned:
            saved.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
