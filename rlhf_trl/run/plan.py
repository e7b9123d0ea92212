"""What `rlhf-trl plan` does: the memory and the batches of a run, before any weight is loaded.

Everything is an estimate: the libraries' own workspaces, fragmentation and what a GPU's context
takes (about 0.5 GiB) are not in it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch import nn
from transformers import TrainingArguments
from trl import get_peft_config

from rlhf_trl.errors import InputError, reason_in_short
from rlhf_trl.evaluation import tables
from rlhf_trl.reward_models.classifiers import set_token_head
from rlhf_trl.reward_models.reader import outputs_of
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.divisibility import check_packing, unfilled_step
from rlhf_trl.run.fake_models import (
    ADAM,
    Head,
    Texts,
    activations,
    architecture_of,
    new_model,
    one_layer,
    weights_of,
)
from rlhf_trl.run.options import join_options
from rlhf_trl.run.shares import Launch, frozen_per_process, per_process, read_launch
from rlhf_trl.run.stages import Stage, stage_of_config

PAIRED = ("dpo", "orpo", "reward")  # stages whose example is two texts
# what a stage's trainer has behind the last layer; TRL's fused head for all others
HEADS: Mapping[str, Head] = {
    "orpo": "logits",
    "distill": "logits",
    "reward": "text",
    "orm": "token",
    "prm": "token",
}
# tokens and columns of a tile of TRL's fused head (trl.kernels.chunked_logprob), in float32
TILE_TOKENS, TILE_COLUMNS = 2048, 32768
NOT_PLANNED = "not planned: the architecture does not run on fake tensors"
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Bytes that one process needs on its GPU for one thing."""

    what: str
    size: int
    source: str  # how the figure was found
    only_in: str = ""  # the phase in which it is there: "update" or "generation"; "": always


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory and batches of a planned run."""

    stage: Stage
    loaded: Loaded
    launch: Launch
    texts: Texts
    lines: list[Line]

    def peak(self, phase: str) -> int:
        """Return the bytes that a process needs in a phase, `update` or `generation`."""
        return sum(line.size for line in self.lines if line.only_in in ("", phase))

    @property
    def needed(self) -> int:
        """The bytes that a process needs at most."""
        return max(self.peak("update"), self.peak("generation"))


def planned_page(
    config: str,
    words: Sequence[str],
    *,
    accelerate: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    gpu_memory: str | None = None,
    prompt_tokens: int = 256,
    text_tokens: int = 1024,
) -> str:
    """Return the page that `rlhf-trl plan` prints; the arguments are the command's options.

    Where the run does not fit into `gpu_memory`, it names the three cheapest changes.
    """
    memory = None if gpu_memory is None else read_memory(gpu_memory)
    numbers = {"--gpus": gpus, "--nodes": nodes}
    numbers |= {"--prompt-tokens": prompt_tokens, "--text-tokens": text_tokens}
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise InputError(f"{option} is {number}; write 1 or more.")
    launch = read_launch(accelerate, gpus, nodes, read_config(config).get("expect"))

    def planned(more_words: Sequence[str], other_launch: Launch) -> Plan:
        return make_plan(config, [*words, *more_words], other_launch, prompt_tokens, text_tokens)

    plan = planned([], launch)
    savings = []
    if memory is not None and plan.needed > memory:
        savings = changes(plan, planned)
    return as_text(plan, memory, savings)


@contextmanager
def launched_with(processes: int) -> Iterator[None]:
    """Let TRL's config classes see so many processes, which they divide batches by."""
    seen = patch.object(TrainingArguments, "world_size", PropertyMock(return_value=processes))
    with seen, patch("rlhf_trl.run.launch.world_size", lambda: processes):
        yield


def make_plan(
    config: str, words: Sequence[str], launch: Launch, prompt_tokens: int, text_tokens: int
) -> Plan:
    """Return the plan of a run.

    Args:
        config: of any recipe that trains.
        words: options of the recipe.
        launch: the processes it is planned for.
        prompt_tokens: of the longest prompt, where answers are sampled.
        text_tokens: of the longest text, where the config has no `max_length`.

    Raises:
        InputError: the config is not valid for so many processes, or a model cannot be planned.
    """
    stage = stage_of_config(read_config(config), config)
    if stage.config is None:
        raise InputError(f"{config} is for {stage.script}, which trains nothing; plan another.")
    with launched_with(launch.processes):
        # without a GPU here, TRL would refuse what is planned for one
        loaded = stage.load(join_options(words, ["--config", config, "--use_cpu", "true"]))
    if loaded.model.load_in_4bit or loaded.model.load_in_8bit:
        raise InputError(
            "load_in_4bit and load_in_8bit cannot be planned; remove it for an upper bound."
        )
    texts = _texts(stage, loaded.trl, prompt_tokens, text_tokens)
    lines = [*_trained(stage, loaded, launch, texts), *_frozen(stage, loaded, launch)]
    if stage.prompted:
        lines += _generation(loaded, texts)
    return Plan(stage=stage, loaded=loaded, launch=launch, texts=texts, lines=lines)


def _texts(stage: Stage, args: Any, prompt_tokens: int, text_tokens: int) -> Texts:
    """Return the largest batch that a process trains on at once."""
    check_packing(args)
    rows = args.per_device_train_batch_size * (2 if stage.name in PAIRED else 1)
    if stage.prompted:
        return Texts(rows=rows, tokens=prompt_tokens + args.max_completion_length)
    limit = args.max_length
    return Texts(rows=rows, tokens=limit or text_tokens, assumed=limit is None)


def computes_in_bf16(loaded: Loaded) -> bool:
    """Tell whether a run computes in bfloat16 on a GPU, where it is TRL's default."""
    return bool(loaded.given.get("bf16", not loaded.given.get("fp16")))


def _dtype(loaded: Loaded, architecture: Any) -> torch.dtype:
    """Return the dtype in which the run loads its model."""
    dtype = (loaded.trl.model_init_kwargs or {}).get("dtype", loaded.model.dtype)
    if dtype in (None, "auto"):
        return architecture.dtype or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def _trained(stage: Stage, loaded: Loaded, launch: Launch, texts: Texts) -> Iterator[Line]:
    """Yield what the models that are trained need."""
    args, name = loaded.trl, loaded.model.model_name_or_path
    head = HEADS.get(stage.name, "fused")
    architecture = architecture_of(name, loaded)
    if stage.makes == "reward_model":
        labels = outputs_of(loaded.own.algorithm, loaded.own.formulation)
        architecture.num_labels = labels
        if head == "token":
            set_token_head(architecture, labels, args.head_bias)
    dtype = _dtype(loaded, architecture)
    noun = "reward model" if stage.makes == "reward_model" else "policy"
    model = new_model(architecture, head, dtype, get_peft_config(loaded.model))
    yield from _states(noun, model, loaded, launch)
    yield from _saved(noun, model, head, loaded, texts)
    if stage.makes == "policy":
        yield _logits(stage, texts, architecture.get_text_config().vocab_size)
    if not getattr(args, "critic", False):
        return
    if args.value_model == "head":  # a row of weights behind the policy's own last layer
        width = architecture.get_text_config().hidden_size
        yield from _states("value head", nn.Linear(width, 1, bias=False), loaded, launch)
        return
    architecture = architecture_of(args.value_model_name_or_path or name, loaded)
    architecture.num_labels = 1
    model = new_model(architecture, "text", dtype)
    yield from _states("value model", model, loaded, launch)
    yield from _saved("value model", model, "text", loaded, texts)


def _states(noun: str, model: nn.Module, loaded: Loaded, launch: Launch) -> Iterator[Line]:
    """Yield weights, gradients and optimizer of one model that is trained."""
    optim = getattr(loaded.trl.optim, "value", loaded.trl.optim)
    weights = weights_of(model, optim)
    source = "counted"
    if launch.processes > 1:
        source = f"counted, shared as {launch.strategy} does"
    for part, size in per_process(weights, launch, computes_in_bf16(loaded)).items():
        yield Line(what=f"{noun}: {part}", size=size, source=source)


def _saved(noun: str, model: Any, head: Head, loaded: Loaded, texts: Texts) -> Iterator[Line]:
    """Yield what the forward pass of one model keeps for its backward pass."""
    checkpointed, in_bf16 = loaded.trl.activation_checkpointing, computes_in_bf16(loaded)
    what = f"{noun}: activations"
    try:
        size = activations(model, head, texts, in_bf16=in_bf16, checkpointed=checkpointed)
    except Exception as error:  # whatever the code of an architecture raises on fake tensors
        reason = f"{type(error).__name__}: {reason_in_short(error)}"
        yield Line(what=what, size=0, source=f"{NOT_PLANNED} ({reason})", only_in="update")
        return
    source = f"a forward pass, {texts.rows} x {texts.tokens} tokens"
    yield Line(what=what, size=size, source=source, only_in="update")
    if checkpointed:
        dtype = _dtype(loaded, model.config)
        size = one_layer(model.config, head, dtype, texts, in_bf16=in_bf16)
        what = f"{noun}: a layer computed again"
        yield Line(what=what, size=size, source="two layers less one", only_in="update")


def _logits(stage: Stage, texts: Texts, vocabulary: int) -> Line:
    """Return what the logits of the update take, beside what the backward pass keeps."""
    tokens = texts.rows * texts.tokens
    if HEADS.get(stage.name) == "logits":
        size = 4 * tokens * vocabulary
        source = f"{tokens} tokens x {vocabulary}, float32"
        if stage.name == "orpo":  # the likelihood of the chosen texts, of which no token is first
            size += 4 * (texts.rows // 2) * (texts.tokens - 1) * vocabulary
            source += ", and those of the chosen once more"
    else:
        size = 4 * min(tokens, TILE_TOKENS) * min(vocabulary, TILE_COLUMNS)
        source = "a tile of TRL's fused head"
    return Line(what="logits of the update", size=size, source=source, only_in="update")


def _frozen(stage: Stage, loaded: Loaded, launch: Launch) -> Iterator[Line]:
    """Yield what the models that are only read need."""
    if _keeps_a_reference(stage, loaded):
        architecture = architecture_of(loaded.model.model_name_or_path, loaded)
        model = new_model(architecture, "logits", _dtype(loaded, architecture))
        size = frozen_per_process(weights_of(model, "sgd"), launch)
        yield Line(what="reference: weights", size=size, source="counted")
    others = {"reward model": getattr(loaded.own, "reward_model", None)}
    for number, name in enumerate(getattr(loaded.trl, "teacher_models", None) or (), 1):
        others[f"teacher {number}"] = name
    for noun, name in others.items():
        if name is None:
            continue
        architecture = architecture_of(name, loaded)
        is_classifier = "Classification" in str(architecture.architectures)
        dtype = architecture.dtype or torch.float32
        model = new_model(architecture, "text" if is_classifier else "logits", dtype)
        size = weights_of(model, "sgd").trained_bytes
        yield Line(what=f"{noun}: weights", size=size, source="counted, whole on each GPU")


def _keeps_a_reference(stage: Stage, loaded: Loaded) -> bool:
    """Tell whether the trainer holds a second copy of the policy, as TRL decides it."""
    if get_peft_config(loaded.model) is not None:
        return False  # the reference is the base, with its adapter off
    if stage.prompted:
        return bool(loaded.trl.beta)
    if stage.stock in ("DPOTrainer", "KTOTrainer"):
        return not loaded.trl.precompute_ref_log_probs
    return False


def _generation(loaded: Loaded, texts: Texts) -> Iterator[Line]:
    """Yield what sampling answers needs beside the weights."""
    args = loaded.trl
    if args.use_vllm:
        if args.vllm_mode == "colocate":
            share = f"vLLM: {args.vllm_gpu_memory_utilization:.0%} of the GPU, beside all this"
            yield Line(what=share, size=0, source="vllm_gpu_memory_utilization")
        return
    architecture = architecture_of(loaded.model.model_name_or_path, loaded).get_text_config()
    rows = args.per_device_train_batch_size * args.steps_per_generation
    number_size = 2 if computes_in_bf16(loaded) else _dtype(loaded, architecture).itemsize
    heads = architecture.num_attention_heads
    width = getattr(architecture, "head_dim", None) or architecture.hidden_size // heads
    key_heads = getattr(architecture, "num_key_value_heads", None) or heads
    # keys and values of all layers
    per_token = 2 * architecture.num_hidden_layers * key_heads * width * number_size
    yield Line(
        what="KV cache",
        size=per_token * rows * texts.tokens,
        source=f"{rows} answers at once, {per_token} bytes a token",
        only_in="generation",
    )
    yield Line(
        what="logits of generation",
        size=2 * 4 * rows * architecture.vocab_size,
        source="a token of each answer, and probabilities",
        only_in="generation",
    )


def batches(plan: Plan) -> list[str]:
    """Return the arithmetic of a run's batches, a sentence each."""
    args, stage = plan.loaded.trl, plan.stage
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    processes = plan.launch.processes
    batch = micro * accumulation * processes
    noun = "completions" if stage.prompted else "pairs" if stage.name in PAIRED else "examples"
    if getattr(args, "packing", False):
        noun = f"rows, packed with up to {args.max_length} tokens,"
    sentences = [
        f"{batch} {noun} per optimizer step: {micro} x {accumulation} accumulated x {processes} "
        f"process{'es' * (processes > 1)}"
    ]
    # how often the data set is gone through in an epoch, in examples of a batch
    repeats = 1
    if stage.prompted:
        prompts = args.generation_batch_size // args.num_generations
        updates = args.steps_per_generation * args.num_iterations // accumulation
        sentences.append(
            f"{args.generation_batch_size} completions per generation: {prompts} prompts x "
            f"{args.num_generations}; {updates} optimizer steps on them"
        )
        repeats = args.num_generations * args.num_iterations
    own, steps = plan.loaded.own, args.max_steps
    if stage.name == "kto" and steps <= 0:
        return sentences  # a pair is two examples, a labeled answer one: only the data tell
    size = getattr(own, "max_samples", None) or getattr(own.dataset, "size", None)
    if steps <= 0 and isinstance(size, int):
        steps = math.ceil(args.num_train_epochs * size * repeats / batch)
        if not stage.prompted:
            sentences += unfilled_step(size, batch, noun)
    if steps > 0:
        texts = 2 if stage.name in PAIRED else 1
        tokens = steps * batch * texts * plan.texts.tokens
        sentences.append(f"{steps} optimizer steps, on at most {tokens:,} tokens")
    return sentences


def changes(plan: Plan, planned: Callable[[Sequence[str], Launch], Plan]) -> list[tuple[str, int]]:
    """Return the three cheapest changes that need less memory, each with the bytes it saves.

    Cheapest first: those that cost time and leave the update as it is, then an optimizer that
    rounds, then training less than all weights. `planned` plans with more options of the recipe
    and another launch.
    """
    args, launch = plan.loaded.trl, plan.launch
    candidates: list[tuple[str, list[str], Launch]] = []
    if not args.activation_checkpointing:
        words = ["--activation_checkpointing", "true"]
        candidates.append(("activation_checkpointing: true", words, launch))
    half, is_odd = divmod(args.per_device_train_batch_size, 2)
    if half and not is_odd:
        words = ["--per_device_train_batch_size", str(half)]
        words += ["--gradient_accumulation_steps", str(2 * args.gradient_accumulation_steps)]
        if plan.stage.prompted:
            words += ["--steps_per_generation", str(2 * args.steps_per_generation)]
        label = f"per_device_train_batch_size: {half} and twice the accumulation"
        candidates.append((label, words, launch))
    if launch.strategy in ("ddp", "zero1", "zero2"):
        sharded = replace(launch, strategy="zero3")
        candidates.append(("--accelerate configs/accelerate/zero3.yaml", [], sharded))
    if getattr(args.optim, "value", args.optim) in ADAM:
        candidates.append(("optim: adamw_8bit", ["--optim", "adamw_8bit"], launch))
    if get_peft_config(plan.loaded.model) is None:
        candidates.append(("use_peft: true", ["--use_peft", "true"], launch))
    savings: list[tuple[str, int]] = []
    for label, words, other_launch in candidates:
        try:
            saved = plan.needed - planned(words, other_launch).needed
        except InputError:  # a setting that does not go with the config's others
            continue
        if saved > plan.needed / 100 and len(savings) < 3:
            savings.append((label, saved))
    return savings


def in_units(size: int) -> str:
    """Return bytes in the unit in which they are read easily."""
    for name, unit in UNITS.items():
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def read_memory(text: str) -> int:
    """Return the bytes of a size such as 80GB or 24GiB."""
    for name, unit in (UNITS | {"GB": 10**9, "MB": 10**6}).items():
        if text.endswith(name):
            try:
                return int(float(text.removesuffix(name)) * unit)
            except ValueError:
                break
    raise InputError(f"--gpu-memory is {text!r}; write a number with its unit, such as 80GB.")


def as_text(plan: Plan, gpu_memory: int | None, savings: Sequence[tuple[str, int]]) -> str:
    """Return the page: where bytes go, whether they fit, what would save some, the batches."""
    launch = plan.launch
    first = (
        f"{plan.stage.name}, {plan.loaded.model.model_name_or_path}: {launch.processes} "
        f"process{'es' * (launch.processes > 1)} on {launch.nodes} node{'s' * (launch.nodes > 1)}, "
        f"{launch.strategy}"
    )
    if launch.offloads_optimizer:
        first += ", optimizer on the CPU"
    if launch.offloads_weights:
        first += ", weights on the CPU"
    rows = [
        {
            "on each GPU": line.what,
            "bytes": in_units(line.size),
            "in": line.only_in or "always",
            "found by": line.source,
        }
        for line in plan.lines
    ]
    page = [first, "", tables.text(rows), ""]
    for phase in ("update", "generation") if plan.stage.prompted else ("update",):
        page.append(f"{phase}: {in_units(plan.peak(phase))}, estimated")
    if plan.texts.assumed:
        page.append(
            f"max_length is not set: planned with texts of {plan.texts.tokens} tokens "
            "(--text-tokens)"
        )
    if gpu_memory is not None:
        fits = "fits" if plan.needed <= gpu_memory else "does not fit"
        page.append(f"{fits} into {in_units(gpu_memory)}")
    page += [f"{label} saves {in_units(saved)}" for label, saved in savings]
    return "\n".join([*page, "", *batches(plan)])
