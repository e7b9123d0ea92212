"""The value model of PPO: loaded, attached to the policy, and separated from it again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.utils import FusedCausalLMOutput, disable_dropout_in_model

from rlhf_trl.errors import InputError
from rlhf_trl.models import dropouts, loading

NAME = "value_model"
FIELD = "value_model_name_or_path"


@dataclass
class ScoredWithValues(FusedCausalLMOutput):
    """TRL's output of a fused forward, with the values of all states."""

    state_values: Tensor | None = None  # (B, L), after each token; `values` is a method


def load(source: str, policy: Any, tokenizer: Any, trust_remote_code: bool, **options: Any) -> Any:
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


def head(policy: Any) -> nn.Linear:
    """Return a head for the policy's own trunk; all values start at 0."""
    width = policy.config.get_text_config().hidden_size
    linear = nn.Linear(width, 1, bias=False, dtype=policy.dtype, device=policy.device)
    start_at_zero(linear.weight)
    return linear


def start_at_zero(weight: Tensor) -> None:
    """Zero a weight, or this process' share of it under ZeRO-3."""
    with torch.no_grad():
        getattr(weight, "ds_tensor", weight).zero_()


def attach(policy: Any, value_model: nn.Module) -> None:
    """Make the value model a module of the policy, and its values an output of the fused forward.

    So the optimizer, gradient clipping, DDP, ZeRO and FSDP treat it like the rest, and one forward
    of the wrapped model gives both log-probabilities and values: DDP allows no second one. Two
    arguments join those of the forward, which TRL has fused: `with_values` adds `state_values`
    (B, L) to its output, `only_values` returns nothing else.
    """
    forward = policy.forward
    policy.add_module(NAME, value_model)
    is_head = isinstance(value_model, nn.Linear)
    keep_float32(value_model if is_head else value_model.score)
    # A head reads the hidden states of the policy's trunk, in the one forward that asks for values:
    # `remember` takes them out of the trunk, and `state_values` uses them.
    hidden_states: Tensor | None = None
    is_asked = False

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        """Keep what the trunk returns, once for each forward that asks for values."""
        nonlocal hidden_states, is_asked
        if is_asked:
            hidden_states, is_asked = output.last_hidden_state, False

    if is_head:
        policy.base_model.register_forward_hook(remember)

    def state_values(**inputs: Any) -> Tensor:
        """Return (B, L) values: a head's, or those of a model that reads the inputs itself."""
        nonlocal hidden_states
        critic = policy.value_model
        if is_head:
            hidden, hidden_states = hidden_states, None  # else their graph would stay in memory
            return critic(hidden).squeeze(-1)
        hidden = critic.base_model(**inputs, use_cache=False).last_hidden_state
        return critic.score(hidden).squeeze(-1)

    @wraps(forward)  # `generate` reads the signature
    def forward_with_values(
        *args: Any, with_values: bool = False, only_values: bool = False, **kwargs: Any
    ) -> Any:
        """Run the policy, the value model, or both."""
        nonlocal is_asked
        if not (with_values or only_values):
            return forward(*args, **kwargs)
        inputs = {name: kwargs[name] for name in ("input_ids", "attention_mask")}
        is_asked = is_head
        if only_values:
            if is_head:
                policy.base_model(**inputs, use_cache=False)  # for `remember`
            return state_values(**inputs)
        output = forward(*args, **kwargs)
        return ScoredWithValues(**output, state_values=state_values(**inputs))

    policy.forward = forward_with_values


def keep_float32(score: nn.Linear) -> None:
    """Compute values in float32, under autocast and with half-precision weights as well."""

    def forward(hidden: Tensor) -> Tensor:  # called as a module, so that sharded weights are there
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), score.weight.float())

    score.forward = forward


@contextmanager
def detached(policy: Any) -> Iterator[None]:
    """Take the value model off the policy for a while, so that the policy is saved alone."""
    modules = policy._modules
    value_model = modules.pop(NAME)
    try:
        yield
    finally:
        modules[NAME] = value_model


def is_of_value_model(name: str) -> bool:
    """Tell whether a parameter of the whole model belongs to the value model."""
    return NAME in name.split(".")


def split(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Separate a state dict into the policy's and, under its own names, the value model's."""
    policy = {name: x for name, x in state.items() if not is_of_value_model(name)}
    own = {name: x for name, x in state.items() if is_of_value_model(name)}
    return policy, {name.rpartition(f"{NAME}.")[2]: x for name, x in own.items()}


def only_policy(
    named_parameters: Callable[[], Iterator[tuple[str, Tensor]]],
) -> Callable[[], Iterator[tuple[str, Tensor]]]:
    """Wrap an iterator over named parameters so that it skips the value model's."""
    # the inner iterator gathers shards on all processes, so it must run through
    return lambda: ((n, p) for n, p in named_parameters() if not is_of_value_model(n))


def save(folder: str, policy: Any, state: Mapping[str, Tensor] | None, tokenizer: Any) -> None:
    """Write the value model as a sequence classifier that plain transformers loads.

    Call it on all processes: under ZeRO-3 a model comes into being on all of them at once. `state`
    is that of the policy with the value model; without it, this process writes nothing.
    """
    model = policy.value_model
    if is_head := isinstance(model, nn.Linear):
        config = deepcopy(policy.config)
        config.num_labels = 1
        model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    if state is None:
        return
    trunk, own = split(state)
    if is_head:
        names = model.state_dict().keys()  # a trunk, and `score`, whose weight is all of a head
        own = {n: t for n, t in trunk.items() if n in names} | {"score.weight": own["weight"]}
    model.save_pretrained(folder, state_dict=own)
    tokenizer.save_pretrained(folder)


def restore(folder: str, policy: Any) -> None:
    """Load what `save` wrote back into the attached value model."""
    if not Path(folder, "config.json").exists():
        raise InputError(
            f"resume_from_checkpoint: {folder!r} with the value model is missing; name another."
        )
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=policy.dtype)
    target = policy.value_model
    target.load_state_dict((model.score if isinstance(target, nn.Linear) else model).state_dict())
