"""A few optimizer steps of a recipe's trainer, watched: in a launch, and in its reference."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlhf_trl.compare.launch.faults import Weights, flat, parts
from rlhf_trl.compare.models import quiet
from rlhf_trl.compare.windows.completions import completion
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.run import launch
from rlhf_trl.run.started import start
from rlhf_trl.tiny.model import PAD

MOVES = {"no": 0.01, "bf16": 1e-4, "fp16": 1e-4}
"""Of SGD's first step, relative to the weights: far above the rounding of float32, and so small
that three steps hardly multiply the rounding of a forward pass in 16 bits."""

RATE = 0.02  # of SGD where the configured optimizer has not shown the gradient


@dataclass(frozen=True)
class MicroBatch:
    """What a loss is computed of."""

    inputs: Mapping[str, Any]
    items: Any  # `num_items_in_batch`

    @property
    def examples(self) -> set[str]:
        """Checksums of its examples' tokens, without padding."""
        tensors = [self.inputs[name] for name in sorted(self.inputs) if name.endswith("ids")]
        tensors = [tensor for tensor in tensors if torch.is_tensor(tensor) and tensor.dim() == 2]
        tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
        return {_digest([row[row != PAD] for row in rows]) for rows in zip(*tensors, strict=True)}


@dataclass(frozen=True)
class CameUp:
    """What a launch has come to, and not what it was asked for."""

    device: str
    processes: int
    strategy: str
    stage: int | None  # of ZeRO
    offload_optimizer: str
    offload_parameters: str
    accumulation: int
    optimizer: str  # the innermost

    @property
    def line(self) -> str:
        """All of it."""
        zero = ""
        if self.stage is not None:
            zero = (
                f"ZeRO stage {self.stage}, optimizer offloaded to {self.offload_optimizer}, "
                f"parameters offloaded to {self.offload_parameters}, "
            )
        return (
            f"{self.processes} processes on {self.device}, strategy {self.strategy}, {zero}"
            f"accumulation {self.accumulation}, {self.optimizer}"
        )


@dataclass(frozen=True)
class Witness:
    """What every process tells of itself."""

    before: str  # checksum of its weights
    after: str
    random_state: str
    batches: list[MicroBatch]  # of the first optimizer step


@dataclass
class Training:
    """What came of a training; weights only in the first process."""

    weights: list[Weights] = field(default_factory=list)  # before, and after each optimizer step
    moment: Weights = field(default_factory=dict)  # the optimizer's first one after its first step
    rates: Mapping[str, float] = field(default_factory=dict)  # of SGD, by part
    asked: str = "SGD"  # the name of the optimizer that was asked for
    norm: float | None = None  # of the first step's gradient before it was clipped
    witnesses: list[Witness] = field(default_factory=list)  # of all processes
    # by parameter: (its size, micro-batches) gradients in the first weights
    columns: dict[str, Tensor] = field(default_factory=dict)
    came_up: CameUp | None = None

    def change(self, first: int, last: int) -> dict[str, Tensor]:
        """Return what some optimizer steps have added to the weights; 0 by those never taken."""
        before, after = (self.weights[min(step, len(self.weights) - 1)] for step in (first, last))
        return {name: after[name].double() - before[name].double() for name in before}

    def sgd_rates(self, move: float) -> dict[str, float]:
        """Return by part a learning rate with which SGD moves the weights by a share of them.

        Weights that are 0, as those of a new head, are moved by that share of 1.
        """
        if not self.weights:  # not the first process
            return {}
        rates = {}
        for part, names in parts([*self.weights[0]]).items():
            size = float(flat(self.moment, names).norm()) if self.moment else 0.0
            length = float(flat(self.weights[0], names).norm()) or 1.0
            rates[part] = move * length / size if size else RATE
        return rates


def train(
    config: Path,
    stage: str,
    rates: Mapping[str, float],
    columns_of: Sequence[MicroBatch] = (),
) -> Training:
    """Train a recipe with SGD, or a single step with the configured optimizer.

    Args:
        config: the path of its YAML.
        stage: the recipe.
        rates: learning rates of SGD by part; {}: the configured optimizer steps.
        columns_of: micro-batches whose gradients are wanted, too.
    """
    watched = _Watched(Training(rates=rates), columns_of)
    with quiet(), redirect_stdout(StringIO()):
        start(stage, ["--config", str(config)], watched.run)
    return watched.training


@dataclass(eq=False)
class _Watched(TrainerCallback):
    """Stands in for `run.train.run`: trains, and keeps what `Training` holds."""

    training: Training
    columns_of: Sequence[MicroBatch]
    batches: list[MicroBatch] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)  # of this process's weights

    def run(self, trainer: Any, loaded: Any, *_: Any, **__: Any) -> None:
        """Take the arguments of `train.run`, and train."""
        self.trainer = trainer
        launch.check_strategy(trainer, loaded.own.expect)
        if hasattr(trainer, "_generate_single_turn"):
            fix_completions(trainer, completion(ragged=True))
        if self.training.rates:
            self._take_sgd()
        else:
            trainer.args.max_steps = 1
            self.training.asked = launch_optimizer(trainer.args) or ""
        self._watch_losses()
        trainer.add_callback(self)
        trainer.train()
        self._end()

    def _take_sgd(self) -> None:
        trainer = self.trainer
        rate, *value_rate = self.training.rates.values()
        trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": rate})
        if value_rate:
            (trainer.args.value_learning_rate,) = value_rate
        trainer.args.weight_decay = 0.0
        plugin = trainer.accelerator.state.deepspeed_plugin
        if plugin is not None:
            config = plugin.deepspeed_config
            # else accelerate would run DeepSpeed's Adam on the CPU where SGD is offloaded
            config["zero_force_ds_cpu_optimizer"] = False
            config.pop("optimizer", None)  # which would overrule SGD
            config.pop("scheduler", None)

    def _watch_losses(self) -> None:
        """Keep the micro-batches of the first optimizer step; compute wanted gradients before."""
        trainer = self.trainer
        compute_loss = trainer.compute_loss

        def watched(model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None) -> Any:
            if not self.batches and self.columns_of:  # on all processes: losses gather metrics
                self.training.columns = self._columns(compute_loss, model)
            if trainer.state.global_step == 0:
                self.batches.append(MicroBatch(_kept(inputs), _kept(num_items_in_batch)))
            return compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch)

        trainer.compute_loss = watched

    def _columns(self, compute_loss: Any, model: Any) -> dict[str, Tensor]:
        """Return by parameter the gradient of each wanted micro-batch, (size, micro-batches)."""
        trainer = self.trainer
        unwrapped = trainer.accelerator.unwrap_model(model)
        trained = _trained(unwrapped)
        columns = []
        for batch in self.columns_of:
            inputs = _kept(batch.inputs, trainer.args.device)
            items = _kept(batch.items, trainer.args.device)
            with trainer.compute_loss_context_manager():
                loss = compute_loss(unwrapped, inputs, num_items_in_batch=items)
            # `materialize_grads`: 0 where the loss reads a parameter nowhere
            gradients = torch.autograd.grad(loss, [*trained.values()], materialize_grads=True)
            columns.append([gradient.flatten().cpu() for gradient in gradients])
        by_parameter = zip(trained, zip(*columns, strict=True), strict=True)
        return {name: torch.stack(gradients, 1) for name, gradients in by_parameter}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Look at the weights before the first step, as they are wrapped."""
        launch.check_wrapper(self.trainer)
        self.random_state = _digest([torch.get_rng_state()])
        self._look()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Look at the weights after a step, and at the optimizer after the first one."""
        self._look()
        if state.global_step == 1 and not self.training.rates:
            self.training.moment = first_moments(self.trainer)

    def _look(self) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        weights, own = whole_weights(model)
        self.digests.append(own)
        if self.trainer.args.process_index == 0:
            self.training.weights.append(weights)

    def _end(self) -> None:
        trainer, training = self.trainer, self.training
        witness = Witness(self.digests[0], self.digests[-1], self.random_state, self.batches)
        training.witnesses = [witness]
        if trainer.args.world_size > 1:
            training.witnesses = [witness] * trainer.args.world_size
            torch.distributed.all_gather_object(training.witnesses, witness)
        logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        training.norm = float(logged[0]) if logged else None
        training.came_up = came_up(trainer, accumulation=len(self.batches))
        training.asked = training.asked or training.came_up.optimizer


def launch_optimizer(args: Any) -> str | None:
    """Return the class name of the optimizer that a config asks for; None: DeepSpeed's own does."""
    from transformers import Trainer

    if args.deepspeed_plugin:
        if "optimizer" in args.deepspeed_plugin.deepspeed_config:
            return None
        from rlhf_trl.run.deepspeed import innermost_optimizer

        name = innermost_optimizer(args)
        if name != args.optim.value:
            return name
    return Trainer.get_optimizer_cls_and_kwargs(args)[0].__name__


def came_up(trainer: Any, accumulation: int) -> CameUp:
    """Return what a trainer has come to, whose first optimizer step took some micro-batches."""
    accelerator = trainer.accelerator
    stage, offload = None, ["none", "none"]
    if trainer.is_deepspeed_enabled:
        engine = trainer.model_wrapped
        stage = int(engine.zero_optimization_stage())
        settings = engine.zero_offload_optimizer(), engine.zero_offload_param()
        offload = [str(getattr(s.device, "value", s.device)) if s else "none" for s in settings]
        accumulation = engine.gradient_accumulation_steps()
    return CameUp(
        device=accelerator.device.type,
        processes=accelerator.num_processes,
        strategy=launch.strategy_of(accelerator),
        stage=stage,
        offload_optimizer=offload[0],
        offload_parameters=offload[1],
        accumulation=accumulation,
        optimizer=type(_layers(trainer.optimizer)[-1]).__name__,
    )


def _layers(optimizer: Any) -> list[Any]:
    """Return an optimizer and what it wraps; the last one steps."""
    layers = [optimizer]
    while hasattr(layers[-1], "optimizer"):
        layers.append(layers[-1].optimizer)
    return layers


def whole(model: Any, write: bool = False) -> AbstractContextManager[None]:
    """Hold the whole weights of a model that ZeRO-3 may have shared out."""
    if not any(hasattr(p, "ds_id") for p in model.parameters()):
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters(list(model.parameters()), modifier_rank=0 if write else None)


def whole_weights(model: Any) -> tuple[dict[str, Tensor], str]:
    """Return all trained weights in float32, and a checksum of those that this process holds.

    All processes call it. Weights of 16 bits that DeepSpeed steps in float32 are the latter.
    """
    trained = _trained(model)
    with whole(model):
        own = {name: _full(p.detach()).clone() for name, p in trained.items()}
    weights = {}
    for name, p in trained.items():
        stepped = None
        if p.dtype != torch.float32 and (hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")):
            from deepspeed.utils import safe_get_full_fp32_param

            stepped = safe_get_full_fp32_param(p)
        weights[name] = (own[name] if stepped is None else stepped).float().cpu().clone()
    return weights, _digest(own.values())


def first_moments(trainer: Any) -> dict[str, Tensor]:
    """Return the optimizer's `exp_avg` of all trained weights, {} where it keeps none.

    All processes call it.
    """
    *wrappers, optimizer = _layers(trainer.optimizer)
    for wrapper in wrappers:
        if hasattr(wrapper, "_hp_optimizer_states_linked"):
            # DeepSpeed 0.19.8 links the states of all groups after the first one has stepped, when
            # those of the others do not exist yet
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()
    if not any("exp_avg" in state for state in optimizer.state.values()):
        return {}
    moments = {}
    for name, p in _trained(trainer.accelerator.unwrap_model(trainer.model)).items():
        if trainer.is_deepspeed_enabled:
            from deepspeed.utils import safe_get_full_optimizer_state

            moment = safe_get_full_optimizer_state(p, "exp_avg")
        else:
            moment = optimizer.state.get(p, {}).get("exp_avg")
        if moment is None:
            return {}
        shape = getattr(p, "ds_shape", p.shape)  # ZeRO-3 leaves an empty one
        moments[name] = _full(moment).detach().float().cpu().clone().view(shape)
    return moments


def _trained(model: Any) -> dict[str, Any]:
    """Return the parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _full(tensor: Any) -> Tensor:
    """Return a tensor of which FSDP may have a part here."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _kept(value: Any, device: Any = "cpu") -> Any:
    """Copy tensors, also in mappings, to a device."""
    if torch.is_tensor(value):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _kept(item, device) for key, item in value.items()}
    return copy(value)


def _digest(tensors: Any) -> str:
    checksum = sha256()
    for tensor in tensors:
        checksum.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()
