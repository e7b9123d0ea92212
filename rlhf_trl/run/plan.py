"""What `rlhf-trl plan` does: the memory and the batches of a run, before any weight is loaded.

A model is made from its config on fake tensors, which have shapes and no numbers: parameters are
counted, and one forward pass tells which tensors autograd saves. What each process keeps of it is
arithmetic (shares.py). Everything is an estimate: the libraries' own workspaces, fragmentation and
what a GPU's context takes (about 0.5 GiB) are not in it.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    TrainingArguments,
)
from trl import get_peft_config
from trl.trainer.utils import add_fused_lm_head

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import tables
from rlhf_trl.models import UNTRAINED, model_config
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.options import join_options
from rlhf_trl.run.shares import Launch, Weights, frozen_per_process, per_process, read_launch
from rlhf_trl.run.stages import Stage, stage_of_config

GIB = 2**30
ARCHITECTURES = Path(__file__).parent / "architectures"
PAIRED = ("dpo", "orpo", "reward")  # stages whose example is two texts
WHOLE_LOGITS = ("orpo", "distill")  # stages whose trainer keeps (tokens, V) logits for its loss
# tokens and vocabulary of a tile of TRL's fused head (trl.kernels.chunked_logprob), in float32
TILE = (2048, 32768)
ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused")
EIGHT_BIT = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
BLOCK, SMALLEST_IN_8_BIT = 256, 4096  # numbers in a block of bitsandbytes; tensors left in float32


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The largest batch of one forward pass of training."""

    rows: int  # texts at once
    tokens: int  # in each of them
    assumed: bool = False  # whether no field of the config limits the tokens


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


@contextmanager
def launched_with(processes: int) -> Iterator[None]:
    """Let TRL's config classes see so many processes, which they divide batches by."""
    seen = patch.object(TrainingArguments, "world_size", PropertyMock(return_value=processes))
    with seen, patch("rlhf_trl.run.config.world_size", lambda: processes):
        yield


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

    Where the run does not fit into `gpu_memory`, it ends with the three cheapest changes.
    """
    memory = None if gpu_memory is None else read_memory(gpu_memory)
    for option, number in (("--gpus", gpus), ("--nodes", nodes), ("--text-tokens", text_tokens)):
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
    args = loaded.trl
    if loaded.model.load_in_4bit or loaded.model.load_in_8bit:
        raise InputError(
            "load_in_4bit and load_in_8bit are not planned; remove it for an upper bound."
        )
    texts = _texts(stage, args, prompt_tokens, text_tokens)
    lines = [*_training_lines(stage, loaded, launch, texts)]
    lines += _frozen_lines(stage, loaded, launch)
    if stage.prompted:
        lines += _generation_lines(loaded, texts)
    return Plan(stage=stage, loaded=loaded, launch=launch, texts=texts, lines=lines)


def _texts(stage: Stage, args: Any, prompt_tokens: int, text_tokens: int) -> Texts:
    """Return the largest batch that a process trains on at once."""
    rows = args.per_device_train_batch_size * (2 if stage.name in PAIRED else 1)
    if stage.prompted:
        return Texts(rows=rows, tokens=prompt_tokens + args.max_completion_length)
    limit = args.max_length
    return Texts(rows=rows, tokens=limit or text_tokens, assumed=limit is None)


def _architecture(model: Any, args: Any) -> Any:
    """Return the transformers config of a `ModelConfig`'s model, or the one that ships for it."""
    if model.model_name_or_path == UNTRAINED:
        from rlhf_trl.tiny.model import build_model

        return build_model(0).config
    try:
        return model_config(model, args)
    except InputError as error:
        name = Path(model.model_name_or_path).name.lower()
        shipped = [file for file in ARCHITECTURES.glob("*.json") if name.startswith(file.stem)]
        if not shipped:
            raise InputError(
                f"{model.model_name_or_path} is neither a folder here nor in the hub's cache; its "
                "config.json in a folder of its own is enough for a plan, the weights are not read."
            ) from error
        return AutoConfig.for_model(**json.loads(shipped[0].read_text()))


def _named(loaded: Loaded, name: str) -> Any:
    """Return the run's `ModelConfig` with another model."""
    model = copy(loaded.model)
    model.model_name_or_path, model.model_revision = name, "main"
    return model


def _dtype(loaded: Loaded, architecture: Any) -> torch.dtype:
    """Return the dtype in which the run loads its model."""
    dtype = (loaded.trl.model_init_kwargs or {}).get("dtype", loaded.model.dtype)
    if dtype in (None, "auto"):
        return architecture.dtype or torch.float32
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def computes_in_bf16(loaded: Loaded) -> bool:
    """Tell whether a run computes in bfloat16 on a GPU, where it is TRL's default."""
    return bool(loaded.given.get("bf16", not loaded.given.get("fp16")))


def _new_model(stage: Stage, loaded: Loaded, architecture: Any, trained: bool = True) -> Any:
    """Return the model of a stage, as its trainer makes it, on fake tensors."""
    auto = AutoModelForCausalLM
    if stage.makes == "reward_model":
        architecture.num_labels = 3 if getattr(loaded.trl, "class_weights", None) else 1
        per_token = stage.name in ("orm", "prm")
        auto = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
    model = _without_numbers(auto, architecture, _dtype(loaded, architecture))
    if auto is AutoModelForCausalLM and stage.name not in WHOLE_LOGITS:
        add_fused_lm_head(model)
    if trained and (adapter := get_peft_config(loaded.model)) is not None:
        from peft import get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, adapter)
    return model


def _without_numbers(auto: Any, architecture: Any, dtype: torch.dtype) -> Any:
    """Return the model that an auto class makes of a config, on the device `meta`."""
    with torch.device("meta"):
        return auto.from_config(architecture, dtype=dtype)


def weights_of(model: torch.nn.Module, optim: str) -> Weights:
    """Count a model's parameters, tied ones once, and the bytes of its optimizer's state."""
    parameters = list(model.parameters())  # yields a tied one once
    trained = [p for p in parameters if p.requires_grad]
    frozen = [p for p in parameters if not p.requires_grad]
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    largest = max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0)
    # the embedding, which a sharded model gathers by itself
    embedding = max((p.numel() for p in parameters if p.dim() == 2), default=0)
    return Weights(
        trained=sum(p.numel() for p in trained),
        frozen=sum(p.numel() for p in frozen),
        trained_bytes=size_of(trained),
        frozen_bytes=size_of(frozen),
        largest_layer=max(largest, embedding),
        optimizer_bytes=sum(_state_bytes(p, optim) for p in trained),
    )


def size_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_bytes(parameter: torch.Tensor, optim: str) -> int:
    """Return the bytes of an optimizer's state for one parameter.

    Adam: two averages in the parameter's dtype, and a count of steps in float32. In 8 bits: a byte
    for each, and a float32 for each block of them; small tensors keep float32.
    """
    numbers = parameter.numel()
    if optim in ADAM:
        return 2 * numbers * parameter.element_size() + 4
    if optim in EIGHT_BIT:
        if numbers < SMALLEST_IN_8_BIT:
            return 2 * numbers * 4
        return 2 * (numbers + 4 * math.ceil(numbers / BLOCK))
    if optim == "sgd":
        return 0
    raise InputError(
        f"optim: the state of {optim} is not known here; write one of "
        f"{', '.join([*ADAM, *EIGHT_BIT, 'sgd'])} to plan with."
    )


def _make_fake(model: torch.nn.Module) -> None:
    """Replace a model's tensors, of the device `meta`, by fake ones; tied ones stay tied.

    Models are made on `meta` because PEFT cannot add an adapter to fake tensors; and they are
    called with fake ones because a mask's values, which transformers reads, do not exist on `meta`.
    """
    fake: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in fake:
                    fake[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        fake[tensor] = torch.nn.Parameter(fake[tensor], tensor.requires_grad)
                tensors[name] = fake[tensor]


def saved_bytes(model: torch.nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that autograd saves in a forward pass, beside parameters and buffers.

    A storage counts once, whatever tensors look at it.
    """
    owned = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.Tensor] = {}  # by storage; a tensor keeps its storage's number in use

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in owned:
            saved.setdefault(storage, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _activations(stage: Stage, loaded: Loaded, model: Any, texts: Texts) -> int:
    """Return the bytes that one micro-batch's forward pass saves for the backward pass."""
    if loaded.trl.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    is_fused = stage.makes == "policy" and stage.name not in WHOLE_LOGITS

    def forward() -> None:
        ids = torch.zeros((texts.rows, texts.tokens), dtype=torch.long, device="cpu")
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if is_fused:
            inputs |= {"labels": ids, "fused_lm_head": True}
        with torch.autocast("cpu", torch.bfloat16, enabled=computes_in_bf16(loaded)):
            model(**inputs, use_cache=False)

    with FakeTensorMode():
        _make_fake(model)
        return saved_bytes(model, forward)


def _one_layer(stage: Stage, loaded: Loaded, architecture: Any, texts: Texts) -> int:
    """Return what a layer saves: with checkpointing, one at a time is computed again, and kept."""
    args = copy(loaded.trl)
    args.activation_checkpointing = False
    plain = loaded._replace(trl=args)
    sizes = []
    for layers in (1, 2):
        shortened = deepcopy(architecture)
        shortened.num_hidden_layers = layers
        if getattr(shortened, "layer_types", None):
            shortened.layer_types = shortened.layer_types[:layers]
        model = _new_model(stage, plain, shortened)
        sizes.append(_activations(stage, plain, model, texts))
    return sizes[1] - sizes[0]


def _training_lines(stage: Stage, loaded: Loaded, launch: Launch, texts: Texts) -> Iterator[Line]:
    """Yield what the models that are trained need."""
    args = loaded.trl
    optim = getattr(args.optim, "value", args.optim)
    counted = "counted on fake tensors"
    shared = counted if launch.processes == 1 else f"{counted}, shared by {launch.strategy}"
    trained = {"policy": _new_model(stage, loaded, _architecture(loaded.model, args))}
    if stage.makes == "reward_model":
        trained = {"reward model": trained["policy"]}
    if getattr(args, "critic", False):
        if args.value_model == "separate":
            source = args.value_model_name_or_path or loaded.model.model_name_or_path
            architecture = _architecture(_named(loaded, source), args)
            architecture.num_labels = 1
            dtype = _dtype(loaded, architecture)
            classifier = _without_numbers(AutoModelForSequenceClassification, architecture, dtype)
            trained["value model"] = classifier
        else:
            width = trained["policy"].config.get_text_config().hidden_size
            trained["value model"] = torch.nn.Linear(width, 1, bias=False)
    for name, model in trained.items():
        weights = weights_of(model, optim)
        parts = per_process(weights, launch, computes_in_bf16(loaded))
        for part, size in parts.items():
            yield Line(what=f"{name}: {part}", size=size, source=shared)
        if isinstance(model, torch.nn.Linear):
            continue  # reads the policy's own last layer
        of_policy = stage if name != "value model" else _AS_READ
        size = _activations(of_policy, loaded, model, texts)
        source = f"one forward pass, {texts.rows} x {texts.tokens} tokens"
        yield Line(what=f"{name}: activations", size=size, source=source, only_in="update")
        if args.activation_checkpointing:
            size = _one_layer(of_policy, loaded, model.config, texts)
            source = "two layers less one, without checkpointing"
            what = f"{name}: a layer computed again"
            yield Line(what=what, size=size, source=source, only_in="update")
    vocabulary = _architecture(loaded.model, args).get_text_config().vocab_size
    if stage.makes == "policy":
        yield _logits_line(stage, texts, vocabulary)


@dataclass(frozen=True)
class _AsRead:
    """Stands for a stage where a model is called without a head for tokens."""

    name: str = "value model"
    makes: str = "reward_model"


_AS_READ: Any = _AsRead()


def _logits_line(stage: Stage, texts: Texts, vocabulary: int) -> Line:
    """Return what the logits of the update take."""
    if stage.name in WHOLE_LOGITS:
        size = 4 * texts.rows * texts.tokens * vocabulary
        source = f"{texts.rows} x {texts.tokens} x {vocabulary} in float32, once more in backward"
    else:
        tokens, columns = TILE
        size = 4 * min(texts.rows * texts.tokens, tokens) * min(vocabulary, columns)
        source = "a tile of TRL's fused head"
    return Line(what="logits of the update", size=size, source=source, only_in="update")


def _frozen_lines(stage: Stage, loaded: Loaded, launch: Launch) -> Iterator[Line]:
    """Yield what the models that are only read need."""
    args, own = loaded.trl, loaded.own
    names = {}
    if _keeps_a_reference(stage, loaded):
        names["reference"] = loaded.model.model_name_or_path
    if getattr(own, "reward_model", None):
        names["reward model"] = own.reward_model
    for number, teacher in enumerate(getattr(args, "teacher_models", None) or (), 1):
        names[f"teacher {number}"] = teacher
    for what, name in names.items():
        architecture = _architecture(_named(loaded, name), args)
        auto = AutoModelForCausalLM
        if any("Classification" in kind for kind in architecture.architectures or ()):
            auto = AutoModelForSequenceClassification
        # a reference has the policy's dtype, another model that of its own config
        dtype = _dtype(loaded, architecture) if what == "reference" else architecture.dtype
        model = _without_numbers(auto, architecture, dtype or torch.float32)
        weights = weights_of(model, "sgd")
        size = frozen_per_process(weights, launch) if what == "reference" else weights.trained_bytes
        yield Line(what=f"{what}: weights", size=size, source="counted on fake tensors")


def _keeps_a_reference(stage: Stage, loaded: Loaded) -> bool:
    """Tell whether the trainer holds a second copy of the policy, as TRL decides it."""
    args = loaded.trl
    if get_peft_config(loaded.model) is not None:
        return False  # the base, with its adapter off
    if stage.prompted:
        return bool(args.beta)
    if stage.stock in ("DPOTrainer", "KTOTrainer"):
        return not args.precompute_ref_log_probs
    return False


def _generation_lines(loaded: Loaded, texts: Texts) -> Iterator[Line]:
    """Yield what sampling answers needs beside the weights."""
    args = loaded.trl
    architecture = _architecture(loaded.model, args).get_text_config()
    if args.use_vllm:
        if args.vllm_mode == "colocate":
            share = args.vllm_gpu_memory_utilization
            yield Line(
                what=f"vLLM: {share:.0%} of the GPU, beside all this",
                size=0,
                source="vllm_gpu_memory_utilization",
            )
        return
    rows = args.per_device_train_batch_size * args.steps_per_generation
    number = 2 if computes_in_bf16(loaded) else _dtype(loaded, architecture).itemsize
    head = getattr(architecture, "head_dim", None)
    head = head or architecture.hidden_size // architecture.num_attention_heads
    heads = getattr(architecture, "num_key_value_heads", architecture.num_attention_heads)
    per_token = 2 * architecture.num_hidden_layers * heads * head * number  # keys and values
    yield Line(
        what="KV cache",
        size=per_token * rows * texts.tokens,
        source=f"{rows} answers at once, {per_token} bytes a token",
        only_in="generation",
    )
    yield Line(
        what="logits of generation",
        size=2 * 4 * rows * architecture.vocab_size,
        source="of one token an answer, in float32, and their probabilities",
        only_in="generation",
    )


# --- batches --------------------------------------------------------------------------------------


def batches(plan: Plan) -> list[tuple[str, str]]:
    """Return the arithmetic of a run's batches: what, and how many."""
    args, launch, stage = plan.loaded.trl, plan.launch, plan.stage
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    batch = micro * accumulation * launch.processes
    noun = "completions" if stage.prompted else "pairs" if stage.name in PAIRED else "examples"
    out = [
        (
            f"{noun} per optimizer step",
            f"{batch} ({micro} x {accumulation} accumulated x {launch.processes} processes)",
        )
    ]
    if stage.prompted:
        completions = args.generation_batch_size
        prompts = completions // args.num_generations
        updates = args.steps_per_generation * args.num_iterations // accumulation
        out.append(
            (
                "completions per generation",
                f"{completions} ({prompts} prompts x {args.num_generations})",
            )
        )
        out.append(("optimizer steps per generation", str(updates)))
    steps = args.max_steps if args.max_steps > 0 else None
    size = getattr(plan.loaded.own.dataset, "size", None)
    if steps is None and isinstance(size, int):
        examples = size * (args.num_generations if stage.prompted else 1)
        if stage.prompted:
            examples *= args.num_iterations
        steps = math.ceil(args.num_train_epochs * examples / batch)
    if steps is not None:
        per_example = 2 if stage.name in PAIRED else 1
        tokens = steps * batch * per_example * plan.texts.tokens
        out.append(("optimizer steps of the run", str(steps)))
        out.append(("tokens trained on, at most", f"{tokens:,}"))
    return out


# --- what to change -------------------------------------------------------------------------------


def changes(plan: Plan, again: Callable[[Sequence[str], Launch], Plan]) -> list[tuple[str, int]]:
    """Return the three cheapest changes that need less memory, each with the bytes it saves.

    Cheapest first: what leaves the update as it is and costs time, then what changes its rounding,
    then what changes what is trained. `again` plans with other options and another launch.
    """
    args = plan.loaded.trl
    tried: list[tuple[str, Sequence[str], Launch]] = []
    if not args.activation_checkpointing:
        tried.append(
            ("activation_checkpointing: true", ["--activation_checkpointing", "true"], plan.launch)
        )
    half = args.per_device_train_batch_size // 2
    if half and 2 * half == args.per_device_train_batch_size:
        words = ["--per_device_train_batch_size", str(half)]
        words += ["--gradient_accumulation_steps", str(2 * args.gradient_accumulation_steps)]
        if plan.stage.prompted:
            words += ["--steps_per_generation", str(2 * args.steps_per_generation)]
        label = f"per_device_train_batch_size: {half}, and twice the accumulation"
        tried.append((label, words, plan.launch))
    if plan.launch.processes > 1 and plan.launch.strategy in ("ddp", "zero1", "zero2"):
        sharded = replace(plan.launch, strategy="zero3")
        tried.append(("--accelerate configs/accelerate/zero3.yaml", [], sharded))
    if getattr(args.optim, "value", args.optim) in ADAM:
        tried.append(("optim: adamw_8bit", ["--optim", "adamw_8bit"], plan.launch))
    if get_peft_config(plan.loaded.model) is None:
        tried.append(("use_peft: true", ["--use_peft", "true"], plan.launch))
    savings = []
    for label, words, launch in tried:
        try:
            saved = plan.needed - again(words, launch).needed
        except InputError:  # a setting that does not go with the others
            continue
        if saved > plan.needed // 100:
            savings.append((label, saved))
        if len(savings) == 3:
            break
    return savings


# --- the page -------------------------------------------------------------------------------------


def gib(size: int) -> str:
    """Return bytes in the unit in which they are read easily."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def read_memory(text: str) -> int:
    """Return the bytes of a size such as 80GB or 24GiB."""
    units = {"GiB": GIB, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
    for unit, size in units.items():
        number = text.strip().removesuffix(unit).strip()
        if number != text.strip():
            try:
                return int(float(number) * size)
            except ValueError:
                break
    raise InputError(f"--gpu-memory is {text!r}; write a number with its unit, such as 80GB.")


def as_text(plan: Plan, gpu_memory: int | None, savings: Sequence[tuple[str, int]]) -> str:
    """Return the page that the command prints."""
    launch = plan.launch
    offloaded = " and ".join(
        name
        for name, is_offloaded in (
            ("optimizer", launch.offloads_optimizer),
            ("weights", launch.offloads_weights),
        )
        if is_offloaded
    )
    out = [
        f"{plan.stage.name}, {plan.loaded.model.model_name_or_path}: {launch.processes} processes "
        f"on {launch.nodes} node{'s' * (launch.nodes > 1)}, {launch.strategy}"
        + (f", {offloaded} on the CPU" if offloaded else ""),
        "",
    ]
    rows = [
        {
            "what": line.what,
            "bytes": gib(line.size),
            "in": line.only_in or "always",
            "how it was found": line.source,
        }
        for line in plan.lines
    ]
    out.append(tables.text(rows))
    out.append("")
    for phase in ("update", "generation") if plan.stage.prompted else ("update",):
        out.append(f"{phase}: {gib(plan.peak(phase))} on each GPU, estimated")
    if plan.texts.assumed:
        out.append(
            f"the config has no max_length: planned with texts of {plan.texts.tokens} tokens "
            "(--text-tokens)"
        )
    if gpu_memory is not None:
        fits = plan.needed <= gpu_memory
        out.append(f"{'fits' if fits else 'does not fit'} into {gib(gpu_memory)}")
    out += [f"{label} saves {gib(saved)}" for label, saved in savings]
    out.append("")
    out += [f"{what}: {number}" for what, number in batches(plan)]
    return "\n".join(out)
