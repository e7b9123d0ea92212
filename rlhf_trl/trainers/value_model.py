"""The value model of PPO: attached to the policy, and separated from it again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from trl.trainer.utils import FusedCausalLMOutput

from rlhf_trl.errors import InputError
from rlhf_trl.value_models import start_at_zero

NAME = "value_model"


@dataclass
class ScoredWithValues(FusedCausalLMOutput):
    """TRL's output of a fused forward, with the values of all states."""

    state_values: Tensor | None = None  # (B, L - 1), see `attach`; `values` is a method


def head(policy: Any) -> nn.Linear:
    """Return a head for the policy's own trunk; all values start at 0."""
    width = policy.config.get_text_config().hidden_size
    linear = nn.Linear(width, 1, bias=False, dtype=policy.dtype, device=policy.device)
    start_at_zero(linear.weight)
    return linear


def attach(policy: Any, value_model: nn.Module) -> None:
    """Make the value model a module of the policy, and its values an output of the fused forward.

    So the optimizer, gradient clipping, DDP, ZeRO and FSDP treat it like the rest, and one forward
    of the wrapped model gives both log-probabilities and values: DDP allows no second one. Two
    arguments join those of the forward, which TRL has fused: `with_values` adds `state_values` to
    its output, `only_values` returns nothing else. They are (B, L - 1), after each of the L tokens
    but the last: nothing reads the value of an ended text.
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
        """Return the values: a head's, or those of a model that reads the inputs itself."""
        nonlocal hidden_states
        critic = policy.value_model
        if is_head:
            hidden, hidden_states = hidden_states, None  # else their graph would stay in memory
            return critic(hidden[:, :-1]).squeeze(-1)
        read = {name: tensor[:, :-1] for name, tensor in inputs.items()}
        hidden = critic.base_model(**read, use_cache=False).last_hidden_state
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
