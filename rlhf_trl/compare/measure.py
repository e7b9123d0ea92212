"""The harness: the two sides of a comparison, and a trainer's loss and gradient on a fixed batch.

A fixed batch is a data set and completions that depend on nothing but the prompt, the place in the
group and the number of the call. Everything behind generation is the trainer's own: scoring,
advantages, shuffling, splitting, loss, accumulation.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Module

from rlhf_trl.algorithms import Formulation, formulation
from rlhf_trl.errors import InputError

Batch = dict[str, Any]
Completion = Callable[[tuple[int, ...], int, int], list[int]]


@dataclass(frozen=True)
class Measured:
    """What one accumulation window gives."""

    loss: float  # the sum over the window's micro-batches of the scaled losses
    gradient: Tensor  # (N,) in all parameters, by sorted name, flattened, in float64


@dataclass(frozen=True)
class Book:
    """A side of a comparison: the public function, with parameters that are not the row's own."""

    algorithm: str
    formulation: str = "chapter"
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How it is called in a table."""
        return self.formulation

    @property
    def row(self) -> Formulation:
        """What the table of algorithms says of it."""
        return formulation(self.algorithm, self.formulation)


@dataclass(frozen=True)
class Stock:
    """A side of a comparison: a trainer of TRL, with fields of its config."""

    config: Mapping[str, Any]
    label: str  # how it is called in a table
    trainer: str = "GRPOTrainer"
    columns: tuple[str, ...] = ()  # further columns of the data set
    classes: tuple[type, type] | None = None  # trainer and config, where they are not TRL's own
    also: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the trainer


def fix_completions(
    trainer: Any,
    completion: Completion,
    tools: bool = False,
    sampler: bool = False,
    gaps: bool = False,
) -> None:
    """Let `completion(prompt_ids, index_in_group, call)` answer in place of the model.

    Args:
        trainer: a GRPOTrainer or RLOOTrainer; its `_generate_single_turn` is replaced.
        completion: returns the token ids of one completion. The index counts within the group over
            all processes, so that any number of processes trains on the same completions.
        tools: every third token is said to come from a tool.
        sampler: a sampler with log-probabilities of its own is said to have drawn them, as vLLM.
        gaps: of every seventh token that sampler knows none.
    """
    calls = 0
    original = getattr(trainer, "_generate_single_turn", None)
    names = [base.__name__ for base in type(trainer).__mro__]  # ours is a GRPOTrainer
    bare = "GRPOTrainer" not in names and {"RLOOTrainer", *DISTILLING} & {*names}

    def generate(prompt_ids, images, multimodal_fields, num_generations=None, **kwargs):
        nonlocal calls
        if getattr(trainer, "_kept", None) is not None:  # dynamic sampling has chosen already
            return original(prompt_ids, images, multimodal_fields, num_generations)
        first = len(prompt_ids) * trainer.accelerator.process_index
        call, calls = calls, calls + 1
        group = num_generations or getattr(trainer, "num_generations", len(prompt_ids))
        ids = [
            completion(tuple(ids), (first + i) % group, call) for i, ids in enumerate(prompt_ids)
        ]
        logps: Any = [sampler_logps(each) for each in ids] if sampler else None
        if sampler and gaps:
            logps = [[None if i % 7 == 6 else x for i, x in enumerate(each)] for each in logps]
        return ids if bare else (ids, logps)  # RLOOTrainer wants no log-probabilities

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        ids, logps = generate(prompt_ids, None, {}, trainer.num_generations)
        said = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logps}
        return said | {"env_mask": masks(ids)}

    def masks(ids: list[list[int]]) -> list[list[int]]:
        return [[int(place % 3 != 2) for place in range(len(each))] for each in ids]

    def masked(prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, ids, _, *rest = type(trainer)._generate(trainer, prompts)
        return prompt_ids, ids, masks(ids), *rest

    trainer._generate_single_turn = generate
    if hasattr(trainer, "_generate_transformers"):  # an SDPOTrainer
        trainer._generate_transformers = lambda ids: (ids, generate(ids, None, {}))
    elif tools and bare:
        trainer._generate = masked
    elif tools:
        trainer.rollout_func = rollout
    if sampler and not bare:
        trainer.use_vllm = True


def check_generation(trainer: Any) -> None:
    """Refuse a trainer of TRL's that does not hand on what its model generates, or samples else.

    `fix_completions` answers in place of all that; here only the model's `generate` is replaced.
    """
    args, tokenizer = trainer.args, trainer.processing_class
    end, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    stop = 20 if hasattr(trainer, "eos_token_ids") else end  # other releases know one end only
    prompts, given = [[1, 7, 8], [1, 9], [1]], {}
    # whatever stands behind the first end token is cut off; the second answer has none
    drawn = [
        [10, 11, stop, padding, 12, end],
        [padding, 12, 13, 14, 15, 16],
        [end, 17, stop, 18, 19, 20],
    ]
    wanted = [drawn[0][:3], drawn[1], drawn[2][:1]]

    def generate(**inputs: Any) -> Tensor:
        given.update(inputs)
        return torch.cat([inputs["input_ids"], torch.tensor(drawn)], 1)

    number = (1,) if hasattr(trainer, "importance_sampling_level") else ()  # a GRPOTrainer takes it
    ends = patch.object(trainer, "eos_token_ids", [end, stop], create=True)
    with ends, patch.object(trainer.model, "generate", generate):
        if hasattr(trainer, "_generate_transformers"):
            found = trainer._generate_transformers(prompts)[::-1]
        else:
            found = trainer._generate_single_turn(prompts, None, {}, *number)
    said, config = (found[0] if isinstance(found, tuple) else found), given["generation_config"]
    sampled = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    sampled |= {"do_sample": True, "max_new_tokens": args.max_completion_length}
    if stop != end:
        sampled["eos_token_id"] = trainer.eos_token_ids
    mask = given["attention_mask"].bool()
    shown = [row[on].tolist() for row, on in zip(given["input_ids"], mask, strict=True)]
    wrong = [name for name, value in sampled.items() if getattr(config, name) != value]
    if shown != prompts or not mask[:, -1].all():
        wrong.append("prompts")
    if said != wanted:
        wrong.append("end of completions")
    if number and hasattr(trainer, "_tool_call_loop") and not _masks_tools(trainer):
        wrong.append("what a tool said")
    if wrong:
        raise InputError(f"{type(trainer).__name__} generates otherwise: {', '.join(wrong)}")


def _masks_tools(trainer: Any) -> bool:
    """Tell whether a completion goes on behind what a tool said, of which nothing is trained on."""
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    end = trainer.args.max_completion_length
    fixed = {"_sync_tool_dicts": [{"look": lambda: "42"}], "_async_tool_dicts": [{}], "tools": None}
    fixed["_get_tool_suffix_ids"] = lambda said: [len(said), *map(int, said[-1]["content"])]
    fixed["_generate_single_turn"] = lambda *_, **__: ([[50] * end], None)
    module = sys.modules[type(trainer)._tool_call_loop.__module__]
    answers = patch.object(module, "parse_response", lambda *_, **__: {}, create=True)
    given = [[]], [[1, 7]], [[10, 11]], [[message]], None, None, {}
    with answers, patch.multiple(trainer, create=True, **fixed), suppress(TypeError):
        mask, _, ids, *_ = trainer._tool_call_loop(*given)
        told = [10, 11, 1, 4, 2, *[50] * end][:end], [1, 1, 0, 0, 0, *[1] * end][:end]
        return (ids[0], mask[0]) == told
    return True  # another release wants other arguments


DISTILLING = ("DistillationTrainer", "SDPOTrainer")
"""Trainers of TRL's that learn from a teacher what they write."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of a config that say how completions are sampled."""


def sampler_logps(ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of another sampler: a wave around those of 120 equal tokens."""
    return [-4.8 + 0.5 * math.sin(token + place) for place, token in enumerate(ids)]


def batches(trainer: Any) -> Iterator[Any]:
    """Return what the trainer's own data loader yields, epoch after epoch."""
    while True:
        given = 0
        for given, batch in enumerate(trainer.get_train_dataloader(), 1):  # noqa: B007
            yield batch
        if not given:
            raise InputError(f"{type(trainer).__name__} takes no batch from its data")


def accumulate(trainer: Any, source: Iterator[Any], count: int = 0) -> tuple[Measured, list[Batch]]:
    """Run the trainer's own loop over one accumulation window, without an optimizer step.

    Args:
        trainer: a trainer of TRL's on one process.
        source: what `batches` returned; one window is taken from it.
        count: micro-batches of the window, where an epoch ends before it is full.

    Returns:
        Loss and gradient, and the micro-batches as the loss saw them.
    """
    prepared: list[Batch] = []
    compute_loss = trainer.compute_loss

    def remember(model: Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        prepared.append(dict(inputs))
        return compute_loss(model, inputs, *args, **kwargs)

    args, model = trainer.args, trainer.model
    count = count or args.gradient_accumulation_steps
    window, items = trainer.get_batch_samples(source, count, args.device)
    trainer.current_gradient_accumulation_steps = len(window)
    trainer.compute_loss = remember
    model.zero_grad()
    try:
        loss = sum(float(trainer.training_step(model, batch, items)) for batch in window)
    finally:
        del trainer.compute_loss
    measured = Measured(loss, flat_gradient(model))
    model.zero_grad()
    return measured, prepared


def check_same(trainer: Any, found: Sequence[Batch], fixed: Sequence[Batch], key: str) -> None:
    """Refuse a trainer whose window no longer holds the tensors of the fixed one."""
    pairs = zip(found, fixed, strict=False)
    same = all(key in a and torch.equal(a[key], b[key]) for a, b in pairs)
    if not same or len(found) != len(fixed):
        what = "completions" if key == "completion_ids" else "token ids"
        raise InputError(
            f"{type(trainer).__name__} changed the {what} of the fixed batch; compare needs a "
            "trainer whose loss sees the texts that it was given, or that were generated, whole"
        )


def flat_gradient(model: Module) -> Tensor:
    """Return the gradients of all parameters, by sorted name; 0 where there is none."""
    parts = [
        (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
        for _, p in sorted(model.named_parameters())
        if p.requires_grad
    ]
    return torch.cat(parts).detach().double().cpu()


def sentence(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
