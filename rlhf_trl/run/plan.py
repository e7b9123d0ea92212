"""What `rlhf-trl plan` does: the memory and the batches of a run, before any weight is loaded.

Everything is an estimate: the libraries' own workspaces, fragmentation and what a GPU's context
takes (about 0.5 GiB) are not in it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
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
    autocast_copies,
    new_model,
    one_layer,
    weights_of,
)
from rlhf_trl.run.folders import home
from rlhf_trl.run.options import join_options
from rlhf_trl.run.shares import Launch, check_expected, frozen_per_process, per_process, read_launch
from rlhf_trl.run.stages import Stage, stage_of_config
from rlhf_trl.trainers import value_model

PAIRED = ("dpo", "orpo", "reward")  # stages whose example is two texts
# what a stage's trainer has behind the last layer; TRL's fused head for all others
HEADS: Mapping[str, Head] = {
    "orpo": "logits",
    "distill": "logits",
    "reward": "text",
    "orm": "token",
    "prm": "token",
}
# of the table of `rlhf-trl plan --table`
MODELS = (
    "Qwen/Qwen3-0.6B",
    "allenai/OLMo-2-0425-1B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-8B",
)
METHODS = ("sft", "reward", "dpo", "orpo", "kto", "grpo", "ppo")
# tokens and columns of a tile of TRL's fused head (trl.kernels.chunked_logprob), in float32
TILE_TOKENS, TILE_COLUMNS = 2048, 32768
NOT_PLANNED = "not planned: "
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
    """A run that is planned."""

    stage: Stage
    loaded: Loaded
    launch: Launch
    texts: Texts
    gpu_memory: int | None = None  # bytes of each GPU, where the user named them

    @cached_property
    def lines(self) -> list[Line]:
        """What each process needs memory for."""
        lines = [*_trained(self), *_frozen(self)]
        if self.stage.prompted:
            lines += _generation(self)
        return lines

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a step that need different things."""
        return ("update", "generation") if self.stage.prompted else ("update",)

    def peak(self, phase: str) -> int:
        """Return the bytes that a process needs in a phase."""
        return sum(line.size for line in self.lines if line.only_in in ("", phase))

    @property
    def needed(self) -> int:
        """The bytes that a process needs at most."""
        return max(self.peak(phase) for phase in self.phases)

    @property
    def in_bf16(self) -> bool:
        """Whether the run computes in bfloat16 on a GPU, where it is TRL's default."""
        given = self.loaded.given
        return bool(given.get("bf16", not given.get("fp16")))

    @property
    def in_4_bit(self) -> Any:
        """Whether the base of an adapter is loaded in 4 bits, as `weights_of` takes it."""
        model = self.loaded.model
        return model.load_in_4bit and ("nested" if model.use_bnb_nested_quant else True)

    def dtype(self, architecture: Any) -> torch.dtype:
        """Return the dtype in which the run loads a model of this config."""
        dtype = (self.loaded.trl.model_init_kwargs or {}).get("dtype", self.loaded.model.dtype)
        if dtype in (None, "auto"):
            return architecture.dtype or torch.float32
        return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


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
    expected = read_config(config).get("expect") or {}
    launch = read_launch(accelerate, gpus, nodes, expected.get("processes"))
    tokens = (prompt_tokens, text_tokens)
    plan = make_plan(config, words, launch, tokens, memory)
    check_expected(launch, plan.loaded.own.expect, accelerate)
    page = as_text(plan)
    if memory is None:
        return page
    if plan.needed <= memory:
        return f"{page}\n\nfits into {in_units(memory)}"
    page += f"\n\ndoes not fit into {in_units(memory)}"
    savings = 0
    for label, more_words, other_launch in cheapest_changes(plan):
        try:
            other = make_plan(config, [*words, *more_words], other_launch, tokens, memory)
        except InputError:  # a setting that does not go with the config's others
            continue
        saved = plan.needed - other.needed
        if saved > plan.needed / 100 and savings < 3:
            savings += 1
            page += f"\n{label} saves {in_units(saved)}"
    return page


def planned_table(tokens: int) -> str:
    """Return, in Markdown, what one GPU needs for each of `MODELS` by each of `METHODS`.

    Args:
        tokens: of each of the eight texts that it learns from at once.
    """
    table = []
    for model in MODELS:
        cells = {"model": model}
        for method in METHODS:
            config = str(home() / "configs" / "own" / f"{method}.yaml")
            words = ["--model_name_or_path", model, "--dtype", "bfloat16"]
            words += ["--per_device_train_batch_size", "4" if method in PAIRED else "8"]
            if stage_of_config(read_config(config)).prompted:
                words += ["--max_completion_length", str(tokens - tokens // 2)]
            else:
                words += ["--max_length", str(tokens)]
            plan = make_plan(config, words, Launch(), (tokens // 2, tokens))
            states = sum(line.size for line in plan.lines if not line.only_in)
            cells[method] = f"{states / 2**30:.1f} + {(plan.needed - states) / 2**30:.1f}"
        table.append(cells)
    return (
        f"{tables.markdown(table)}\n\nGiB, estimated: weights, gradients, AdamW and a reference or "
        "value model (counted) + what is there for a while: the update's activations and logits "
        "(by a forward pass on fake tensors, with checkpointing), or the KV cache and logits of "
        f"generation where these are more. One GPU, configs/own, weights in bfloat16, 8 texts of "
        f"{tokens} tokens at once, half of them a prompt's where answers are sampled."
    )


@contextmanager
def launched_with(processes: int) -> Iterator[None]:
    """Let TRL's config classes see so many processes, which they divide batches by."""
    seen = patch.object(TrainingArguments, "world_size", PropertyMock(return_value=processes))
    with seen, patch("rlhf_trl.run.launch.world_size", lambda: processes):
        yield


def make_plan(
    config: str,
    words: Sequence[str],
    launch: Launch,
    tokens: tuple[int, int],
    gpu_memory: int | None = None,
) -> Plan:
    """Return the plan of a run.

    Args:
        config: of any recipe that trains.
        words: options of the recipe.
        launch: the processes it is planned for.
        tokens: of the longest prompt, where answers are sampled, and of the longest text, where
            the config has no `max_length`.
        gpu_memory: bytes of each GPU, of which vLLM takes a share.

    Raises:
        InputError: the config is not valid for so many processes, or the run cannot be planned.
    """
    stage = stage_of_config(read_config(config), config)
    if stage.config is None:
        raise InputError(f"{config} is for {stage.script}, which trains nothing; plan another.")
    with launched_with(launch.processes):
        # without a GPU here, TRL would refuse what is planned for one
        loaded = stage.load(join_options(words, ["--config", config, "--use_cpu", "true"]))
    if loaded.model.load_in_8bit:
        raise InputError("load_in_8bit cannot be planned; write load_in_4bit, or remove it.")
    if loaded.model.load_in_4bit and launch.strategy not in ("one process", "ddp"):
        raise InputError(
            f"load_in_4bit is planned where each process holds the whole model, and "
            f"{launch.strategy} shares it out; name configs/accelerate/ddp.yaml, or remove it."
        )
    check_packing(loaded.trl)
    prompt_tokens, text_tokens = tokens
    args = loaded.trl
    rows = args.per_device_train_batch_size * (2 if stage.name in PAIRED else 1)
    if stage.prompted:
        texts = Texts(rows=rows, tokens=prompt_tokens + args.max_completion_length)
    else:
        limit = args.max_length
        texts = Texts(rows=rows, tokens=limit or text_tokens, assumed=limit is None)
    return Plan(stage=stage, loaded=loaded, launch=launch, texts=texts, gpu_memory=gpu_memory)


def _trained(plan: Plan) -> Iterator[Line]:
    """Yield what the models that are trained need."""
    stage, loaded = plan.stage, plan.loaded
    args, name = loaded.trl, loaded.model.model_name_or_path
    head = HEADS.get(stage.name, "fused")
    architecture = architecture_of(name, loaded)
    noun = "policy"
    if stage.makes == "reward_model":
        noun = "reward model"
        architecture.num_labels = outputs_of(loaded.own.algorithm, loaded.own.formulation)
        if head == "token":
            set_token_head(architecture, architecture.num_labels, args.head_bias)
    adapter = get_peft_config(loaded.model)
    model = new_model(architecture, head, plan.dtype(architecture), adapter, bool(plan.in_4_bit))
    yield from _states(plan, noun, model)
    yield from _saved(plan, noun, model, head)
    if stage.makes == "policy":
        yield _logits(plan, architecture.get_text_config().vocab_size)
    if not getattr(args, "critic", False):
        return
    if args.value_model == "head":
        yield from _states(plan, "value head", value_model.head(model))
        return
    architecture = architecture_of(args.value_model_name_or_path or name, loaded)
    architecture.num_labels = 1
    model = new_model(architecture, "text", plan.dtype(architecture))
    yield from _states(plan, "value model", model)
    yield from _saved(plan, "value model", model, "text")


def _states(plan: Plan, noun: str, model: nn.Module) -> Iterator[Line]:
    """Yield weights, gradients and optimizer of one model that is trained."""
    optim = getattr(plan.loaded.trl.optim, "value", plan.loaded.trl.optim)
    weights = weights_of(model, optim, plan.in_4_bit)
    source = "counted"
    if plan.launch.processes > 1:
        source = f"counted, shared as {plan.launch.strategy} does"
    for part, size in per_process(weights, plan.launch, plan.in_bf16).items():
        yield Line(what=f"{noun}: {part}", size=size, source=source)


def _saved(plan: Plan, noun: str, model: Any, head: Head) -> Iterator[Line]:
    """Yield what the forward pass of one model keeps for its backward pass."""
    checkpointed, texts = plan.loaded.trl.activation_checkpointing, plan.texts
    what = f"{noun}: activations"
    try:
        size = activations(model, head, texts, in_bf16=plan.in_bf16, checkpointed=checkpointed)
    except Exception as error:  # whatever the code of an architecture raises on fake tensors
        source = f"{NOT_PLANNED}the architecture does not run on fake tensors ("
        source += f"{type(error).__name__}: {reason_in_short(error, 100)})"
        yield Line(what=what, size=0, source=source, only_in="update")
        return
    source = f"a forward pass, {texts.rows} x {texts.tokens} tokens"
    yield Line(what=what, size=size, source=source, only_in="update")
    if checkpointed:
        dtype = plan.dtype(model.config)
        size = one_layer(model.config, head, dtype, texts, in_bf16=plan.in_bf16)
        what, source = "a layer computed again", "two layers less one"
        # that is in the backward pass; at the end of the forward pass, autocast has its copies
        if plan.in_bf16 and plan.launch.strategy in ("one process", "ddp"):
            copies = autocast_copies(model, head)
            if copies > size:
                what, size, source = "weights in bfloat16", copies, "autocast's copies"
        yield Line(what=f"{noun}: {what}", size=size, source=source, only_in="update")


def _logits(plan: Plan, vocabulary: int) -> Line:
    """Return what the logits of the update take, beside what the backward pass keeps."""
    texts = plan.texts
    tokens = texts.rows * texts.tokens
    if HEADS.get(plan.stage.name) == "logits":
        size = 4 * tokens * vocabulary
        source = f"{tokens} tokens x {vocabulary}, float32"
        if plan.stage.name == "orpo":  # the likelihood of the chosen texts; no token is their first
            size += 4 * (texts.rows // 2) * (texts.tokens - 1) * vocabulary
            source += ", and those of the chosen once more"
    else:
        size = 4 * min(tokens, TILE_TOKENS) * min(vocabulary, TILE_COLUMNS)
        source = "a tile of TRL's fused head"
    return Line(what="logits of the update", size=size, source=source, only_in="update")


def _frozen(plan: Plan) -> Iterator[Line]:
    """Yield what the models that are only read need."""
    loaded = plan.loaded
    if _keeps_a_reference(plan):
        architecture = architecture_of(loaded.model.model_name_or_path, loaded)
        model = new_model(architecture, "logits", plan.dtype(architecture))
        size = frozen_per_process(weights_of(model, "sgd"), plan.launch)
        yield Line(what="reference: weights", size=size, source="counted")
    others = {"reward model": getattr(loaded.own, "reward_model", None)}
    for number, name in enumerate(getattr(loaded.trl, "teacher_models", None) or (), 1):
        others[f"teacher {number}"] = name
    for noun, name in others.items():
        if name is None:
            continue
        try:
            architecture = architecture_of(name, loaded)
        except InputError as error:  # an earlier run is to make it
            yield Line(what=f"{noun}: weights", size=0, source=f"{NOT_PLANNED}{error}")
            continue
        is_classifier = "Classification" in str(architecture.architectures)
        dtype = architecture.dtype or torch.float32
        model = new_model(architecture, "text" if is_classifier else "logits", dtype)
        size = weights_of(model, "sgd").trained_bytes
        yield Line(what=f"{noun}: weights", size=size, source="counted, whole on each GPU")


def _keeps_a_reference(plan: Plan) -> bool:
    """Tell whether the trainer holds a second copy of the policy, as TRL decides it."""
    args = plan.loaded.trl
    if get_peft_config(plan.loaded.model) is not None:
        return False  # the reference is the base, with its adapter off
    if plan.stage.prompted:
        return bool(args.beta)
    return plan.stage.stock in ("DPOTrainer", "KTOTrainer") and not args.precompute_ref_log_probs


def _generation(plan: Plan) -> Iterator[Line]:
    """Yield what sampling answers needs beside the weights."""
    args = plan.loaded.trl
    if args.use_vllm:
        if args.vllm_mode == "colocate":
            share = args.vllm_gpu_memory_utilization
            yield Line(
                what="vLLM",
                size=int(share * (plan.gpu_memory or 0)),
                source=f"{share:.0%} of the GPU" + (" (--gpu-memory)" * (not plan.gpu_memory)),
                only_in="generation" if args.vllm_enable_sleep_mode else "",
            )
        return
    architecture = architecture_of(plan.loaded.model.model_name_or_path, plan.loaded)
    architecture = architecture.get_text_config()
    rows = args.per_device_train_batch_size * args.steps_per_generation
    number_size = 2 if plan.in_bf16 else plan.dtype(architecture).itemsize
    heads = architecture.num_attention_heads
    width = getattr(architecture, "head_dim", None) or architecture.hidden_size // heads
    key_heads = getattr(architecture, "num_key_value_heads", None) or heads
    # keys and values of all layers
    per_token = 2 * architecture.num_hidden_layers * key_heads * width * number_size
    yield Line(
        what="KV cache",
        size=per_token * rows * plan.texts.tokens,
        source=f"{rows} answers at once, {per_token} bytes a token",
        only_in="generation",
    )
    yield Line(
        what="logits of generation",
        size=2 * 4 * rows * architecture.vocab_size,
        source="a token of each answer, and probabilities",
        only_in="generation",
    )


def batches(plan: Plan, examples: int | None = None) -> list[str]:
    """Return the arithmetic of a run's batches, a sentence each.

    `examples` are those to train on, where their number is known.
    """
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
    if stage.prompted:
        prompts = args.generation_batch_size // args.num_generations
        updates = args.steps_per_generation * args.num_iterations / accumulation
        sentences.append(
            f"{args.generation_batch_size} completions per generation: {prompts} prompts x "
            f"{args.num_generations}; {updates:g} optimizer step{'s' * (updates != 1)} on them"
        )
    size = examples or _examples_in_config(plan)
    if args.max_steps <= 0 and size and not stage.prompted:
        sentences += unfilled_step(size, batch, noun)
    steps = steps_to_come(plan, size)
    if steps:
        texts = 2 if stage.name in PAIRED else 1
        tokens = steps * batch * texts * plan.texts.tokens
        sentences.append(f"{steps} optimizer step{'s' * (steps > 1)}, on at most {tokens:,} tokens")
    return sentences


def _examples_in_config(plan: Plan) -> int | None:
    """Return how many examples the config asks for; None: only the data tell."""
    if plan.stage.name == "kto":
        return None  # a pair is two examples, a labeled answer one
    own = plan.loaded.own
    size = getattr(own, "max_samples", None) or getattr(own.dataset, "size", None)
    return size if isinstance(size, int) else None


def steps_to_come(plan: Plan, examples: int | None) -> int | None:
    """Return the optimizer steps of a run on so many examples; None: they are not known.

    As in transformers an epoch's last step may be of fewer micro-batches, and counts.
    """
    args = plan.loaded.trl
    if args.max_steps > 0:
        return args.max_steps
    if examples is None:
        return None
    micro_batch = args.per_device_train_batch_size * plan.launch.processes
    if plan.stage.prompted:  # TRL leaves out the prompts that do not fill a generation
        prompts = micro_batch * args.steps_per_generation // args.num_generations
        uses = args.steps_per_generation * args.num_iterations
        micro_batches = examples // prompts * uses
    else:
        micro_batches = math.ceil(examples / micro_batch)
    steps_of_epoch = max(math.ceil(micro_batches / args.gradient_accumulation_steps), 1)
    return math.ceil(args.num_train_epochs * steps_of_epoch)


def cheapest_changes(plan: Plan) -> Iterator[tuple[str, list[str], Launch]]:
    """Yield changes that may need less memory: what to write, options of the recipe, the launch.

    Cheapest first: those that cost time and leave the update as it is, then an optimizer that
    rounds, then training less than all weights.
    """
    args, launch = plan.loaded.trl, plan.launch
    if not args.activation_checkpointing:
        yield "activation_checkpointing: true", ["--activation_checkpointing", "true"], launch
    half, is_odd = divmod(args.per_device_train_batch_size, 2)
    if half and not is_odd:
        words = ["--per_device_train_batch_size", str(half)]
        words += ["--gradient_accumulation_steps", str(2 * args.gradient_accumulation_steps)]
        if plan.stage.prompted:
            words += ["--steps_per_generation", str(2 * args.steps_per_generation)]
        yield f"per_device_train_batch_size: {half} and twice the accumulation", words, launch
    if launch.strategy in ("ddp", "zero1", "zero2"):
        sharded = replace(launch, strategy="zero3")
        yield "--accelerate configs/accelerate/zero3.yaml", [], sharded
    if getattr(args.optim, "value", args.optim) in ADAM:
        yield "optim: adamw_8bit", ["--optim", "adamw_8bit"], launch
    if get_peft_config(plan.loaded.model) is None:
        yield "use_peft: true", ["--use_peft", "true"], launch


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


def as_text(plan: Plan) -> str:
    """Return the page: where bytes go, what each phase of a step needs, and the batches."""
    launch = plan.launch
    first = (
        f"{plan.stage.name}, {plan.loaded.model.model_name_or_path}: {launch.processes} "
        f"process{'es' * (launch.processes > 1)} on {launch.nodes} node{'s' * (launch.nodes > 1)}, "
        f"{launch.strategy}"
    )
    first += ", optimizer on the CPU" * launch.offloads_optimizer
    first += ", weights on the CPU" * launch.offloads_weights
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
    for phase in plan.phases:
        lines = [line for line in plan.lines if line.only_in in ("", phase)]
        missing = [line.what for line in lines if line.source.startswith(NOT_PLANNED)]
        without = f" without {', '.join(missing)}" if missing else ""
        page.append(f"{phase}: {in_units(plan.peak(phase))}, estimated{without}")
    if plan.texts.assumed:
        page.append(
            f"max_length is not set: planned with texts of {plan.texts.tokens} tokens "
            "(--text-tokens)"
        )
    return "\n".join([*page, "", *batches(plan)])
