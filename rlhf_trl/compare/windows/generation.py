"""Fixed completions in place of a model's own, and what else a trainer does around `generate`."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rlhf_trl.errors import InputError

# token ids of an answer, from the prompt's ids, the index in the group and the number of the call
Completion = Callable[[tuple[int, ...], int, int], list[int]]


def fix_completions(
    trainer: Any,
    completion: Completion,
    tools: bool = False,
    sampler: bool = False,
    gaps: bool = False,
) -> None:
    """Let `completion(prompt_ids, index_in_group, call)` answer in place of the model.

    Args:
        trainer: a GRPOTrainer, a RLOOTrainer, one of DISTILLING, or a subclass; its method that
            generates is replaced.
        completion: returns the token ids of one completion. The index counts within the group over
            all processes, so that any number of processes trains on the same completions; `call`
            counts the generations from 0.
        tools: let every third token pass for the answer of a tool.
        sampler: let another sampler, such as vLLM, pass for the one that drew the tokens; it
            reports log-probabilities of its own. Only GRPOTrainer reads them.
        gaps: let that sampler report no log-probability of every seventh token.
    """
    # of these trainers only GRPOTrainer's method returns log-probabilities beside the token ids
    is_grpo = "GRPOTrainer" in {base.__name__ for base in type(trainer).__mro__}
    generate = _answering(
        trainer, completion, returns_ids_only=not is_grpo, sampler=sampler, gaps=gaps
    )
    trainer._generate_single_turn = generate
    if hasattr(trainer, "_generate_transformers"):
        # An SDPOTrainer calls this method instead. It returns prompts and completions, and no mask
        # in which a tool's tokens could be marked.
        trainer._generate_transformers = lambda prompt_ids: (
            prompt_ids,
            generate(prompt_ids, images=None, multimodal_fields={}),
        )
    elif tools and is_grpo:
        _mark_tools_by_rollout(trainer, generate)
    elif tools:
        _mark_tools_of_generate(trainer)
    if sampler and is_grpo:
        trainer.use_vllm = True  # otherwise TRL does not read the sampler's log-probabilities


def _answering(
    trainer: Any, completion: Completion, returns_ids_only: bool, sampler: bool, gaps: bool
) -> Callable[..., Any]:
    """Return what stands in for a trainer's `_generate_single_turn`; see `fix_completions`.

    Where `returns_ids_only`, that function returns the token ids of the completions. Otherwise it
    returns a pair: the token ids, and the log-probabilities that the `sampler` reports, or None
    without another sampler.
    """
    calls = 0
    original = getattr(trainer, "_generate_single_turn", None)

    def generate(prompt_ids, images, multimodal_fields, num_generations=None, **kwargs):
        """Answer `prompt_ids`, in which each prompt stands once for each of its completions."""
        nonlocal calls
        # Our trainers' dynamic sampling first generates more answers than it needs. Then it calls
        # this method once more, for the answers that it has kept: these must come back, not new
        # ones, and the trainer's own method returns them.
        if getattr(trainer, "_kept", None) is not None:
            return original(prompt_ids, images, multimodal_fields, num_generations)
        # the place of this process's first prompt among those of all processes
        first = len(prompt_ids) * trainer.accelerator.process_index
        call = calls
        calls += 1
        # without groups, as in DistillationTrainer, the index counts all completions of the call
        group = num_generations or getattr(trainer, "num_generations", len(prompt_ids))
        completion_ids = [
            completion(tuple(prompt), (first + place) % group, call)  # % group: index in the group
            for place, prompt in enumerate(prompt_ids)
        ]
        if returns_ids_only:
            return completion_ids
        logps = None
        if sampler:
            logps = [_reported_logps(ids, gaps) for ids in completion_ids]
        return completion_ids, logps

    return generate


def _tool_masks(completion_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return masks of completions: 0 on every third token, as if a tool's, 1 on the model's own."""
    return [[int(place % 3 != 2) for place in range(len(ids))] for ids in completion_ids]


def _mark_tools_of_generate(trainer: Any) -> None:
    """Let `_generate` of a trainer without `rollout_func` return masks of a tool's tokens."""

    def generate_with_tools(prompts: list[Any]) -> tuple[Any, ...]:
        results = list(type(trainer)._generate(trainer, prompts))
        completion_ids = results[1]
        results[2] = _tool_masks(completion_ids)
        return tuple(results)

    trainer._generate = generate_with_tools


def _mark_tools_by_rollout(trainer: Any, generate: Callable[..., Any]) -> None:
    """Give a trainer a `rollout_func` whose completions, `generate`'s, hold answers of a tool."""

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        completion_ids, logps = generate(
            prompt_ids,
            images=None,
            multimodal_fields={},
            num_generations=trainer.num_generations,
        )
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": logps,
            "env_mask": _tool_masks(completion_ids),
        }

    trainer.rollout_func = rollout


def _reported_logps(ids: Sequence[int], gaps: bool) -> list[float | None]:
    """Return what the other sampler reports of a completion; with `gaps` every seventh is None."""
    logps: list[float | None] = [*sampler_logps(ids)]
    if gaps:
        logps[6::7] = [None] * len(logps[6::7])
    return logps


def check_generation(trainer: Any) -> None:
    """Refuse a trainer of TRL's that alters prompts, sampling or completions around `generate`.

    `fix_completions` replaces the trainer's whole generation, so a fault in it would go unseen.
    Here only the model's `generate` is replaced, by one that gives fixed answers. What the trainer
    passes to `generate` must be what its config says, and the completions that it makes must be the
    fixed answers, each cut off behind its first end token.

    Raises:
        InputError: naming everything that differs.
    """
    tokenizer = trainer.processing_class
    end = tokenizer.eos_token_id
    padding = tokenizer.pad_token_id
    # TRL 1.16 may know other end tokens beside the tokenizer's, some releases know that one only
    has_second_end = hasattr(trainer, "eos_token_ids")
    second_end = 20 if has_second_end else end
    prompts = [[1, 7, 8], [1, 9], [1]]
    # a padding token ends no completion: it is a token like any other in what a model writes
    answers_and_completions = [
        ([10, 11, second_end, padding, 12, end], [10, 11, second_end]),
        ([padding, 12, 13, 14, 15, 16], [padding, 12, 13, 14, 15, 16]),  # has no end token
        ([end, 17, second_end, 18, 19, 20], [end]),
    ]
    answers = [answer for answer, _ in answers_and_completions]
    expected = [completion for _, completion in answers_and_completions]
    # `create`: a trainer of another release has no such attribute to replace
    with patch.object(trainer, "eos_token_ids", [end, second_end], create=True):
        completions, received = _generated(trainer, prompts, answers)
    faults = _wrong_sampling(trainer, received["generation_config"], has_second_end)
    mask = received["attention_mask"].bool()
    rows = zip(received["input_ids"], mask, strict=True)
    unpadded = [ids[is_text].tolist() for ids, is_text in rows]
    is_padded_left = bool(mask[:, -1].all())
    if unpadded != prompts or not is_padded_left:
        faults.append("prompts")
    if completions != expected:
        faults.append("end of completions")
    has_tools = _is_grpo(trainer) and hasattr(trainer, "_tool_call_loop")
    if has_tools and not _masks_tools(trainer):
        faults.append("what a tool said")
    if faults:
        raise InputError(f"{type(trainer).__name__} generates otherwise: {', '.join(faults)}")


def _is_grpo(trainer: Any) -> bool:
    """Return whether a trainer is a GRPOTrainer, or an SDPOTrainer, which has its attributes."""
    return hasattr(trainer, "importance_sampling_level")


def _generated(
    trainer: Any, prompts: list[list[int]], answers: list[list[int]]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Let a trainer generate while its model gives fixed answers.

    Returns:
        The token ids of the completions that the trainer makes of the answers, and the keyword
        arguments that it passed to the model's `generate`.
    """
    received: dict[str, Any] = {}

    def generate(**inputs: Any) -> Tensor:
        received.update(inputs)
        return torch.cat([inputs["input_ids"], torch.tensor(answers)], 1)

    with patch.object(trainer.model, "generate", generate):
        if hasattr(trainer, "_generate_transformers"):
            # an SDPOTrainer, which returns prompts, then completions
            return trainer._generate_transformers(prompts)[-1], received
        arguments = [prompts, None, {}]  # no images, and no further inputs that come with images
        if _is_grpo(trainer):  # only this one takes the number of completions per prompt
            arguments.append(1)
        completions = trainer._generate_single_turn(*arguments)
    if isinstance(completions, tuple):  # completions, then log-probabilities
        completions = completions[0]
    return completions, received


def _wrong_sampling(trainer: Any, config: Any, has_second_end: bool) -> list[str]:
    """Return the fields of a generation config that are not what the trainer's config asks for."""
    args = trainer.args
    wanted = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    wanted["do_sample"] = True
    wanted["max_new_tokens"] = args.max_completion_length
    if has_second_end:
        wanted["eos_token_id"] = trainer.eos_token_ids
    return [name for name, value in wanted.items() if getattr(config, name) != value]


def _masks_tools(trainer: Any) -> bool:
    """Return whether the loop of tool calls masks a tool's answer by 0, and goes on behind it.

    The model writes 10 11 and calls a tool. The tool's answer is the text "42", which is encoded as
    1 4 2: the number of messages, then the digits. Then the model writes 50 up to the limit.
    """
    limit = trainer.args.max_completion_length
    expected_ids = [10, 11, 1, 4, 2, *[50] * limit][:limit]
    expected_mask = [1, 1, 0, 0, 0, *[1] * limit][:limit]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}

    def encode_answer(messages: list[dict[str, Any]]) -> list[int]:
        return [len(messages), *map(int, messages[-1]["content"])]

    # all that the loop takes from the trainer: tools, the encoding of an answer, the model
    stand_ins = {
        "_sync_tool_dicts": [{"look": lambda: "42"}],
        "_async_tool_dicts": [{}],
        "tools": None,
        "_get_tool_suffix_ids": encode_answer,
        "_generate_single_turn": lambda *_, **__: ([[50] * limit], None),
    }
    # the loop looks for a further call in what the model writes at the end: there is none
    module = sys.modules[type(trainer)._tool_call_loop.__module__]
    no_further_call = patch.object(module, "parse_response", lambda *_, **__: {}, create=True)
    prompts = [[]]
    prompt_ids = [[1, 7]]
    completion_ids = [[10, 11]]
    completions = [[message]]
    logps = images = None
    fields = {}  # further inputs of a model that come with images
    arguments = (prompts, prompt_ids, completion_ids, completions, logps, images, fields)
    # `create`: the trainer sets some of these attributes only when it generates
    with no_further_call, patch.multiple(trainer, create=True, **stand_ins):
        try:
            mask, _, ids, *_ = trainer._tool_call_loop(*arguments)
        except TypeError:  # a release whose loop takes other arguments is not judged
            return True
    return ids[0] == expected_ids and mask[0] == expected_mask


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of a config that say how completions are sampled."""


def sampler_logps(ids: Sequence[int]) -> list[float]:
    """Return made-up log-probabilities, as another sampler would report them: a wave around -4.8.

    -4.8 is the log-probability of a token where all 120 are equally likely.
    """
    return [-4.8 + 0.5 * math.sin(token + place) for place, token in enumerate(ids)]
