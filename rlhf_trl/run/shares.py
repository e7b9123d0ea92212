"""What of a model's state each process of a launch holds: arithmetic, by strategy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from rlhf_trl.errors import InputError
from rlhf_trl.run.accelerate_files import check_accelerate_file
from rlhf_trl.run.config_types import one_of
from rlhf_trl.run.launch import Expect

Strategy = Literal["one process", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
SHARDING = ("fsdp2", "zero3")  # strategies under which no process holds the whole weights
FLOAT32 = 4  # bytes of a number
FILES = {"none": "one_gpu.yaml", "ddp": "ddp.yaml", "fsdp": "fsdp2.yaml", "deepspeed": "zero3.yaml"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes that a run is planned for, one for each GPU, and how they share a model."""

    processes: int = 1  # over all nodes
    nodes: int = 1
    strategy: Strategy = "one process"
    offloads_optimizer: bool = False  # master weights, their gradients and Adam's state to the CPU
    offloads_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of one model, in numbers; tied ones count once."""

    trained: int
    frozen: int
    trained_bytes: int  # in the dtype in which the model is loaded
    frozen_bytes: int
    largest_layer: int  # numbers in the largest block that a sharded model gathers at once
    optimizer_bytes: int  # of the optimizer's state, where it is not shared


def read_launch(
    accelerate: str | None,
    gpus: int | None,
    nodes: int | None,
    usual: int | None = None,
) -> Launch:
    """Return the launch that an accelerate config describes; its numbers may be replaced.

    Args:
        accelerate: path of the file that `accelerate launch --config_file` takes; None: as many
            processes as asked for, each with the whole model.
        gpus: processes over all nodes; None: the `usual` number, else the file's.
        nodes: machines; None: the file's.
        usual: how many processes the run's config expects.

    Raises:
        InputError: the file cannot be planned for, or not with these numbers.
    """
    values: dict[str, Any] = {}
    if accelerate:
        values = _read_accelerate(accelerate)
        check_accelerate_file(Path(accelerate), gpus or usual)
    processes = gpus or usual or values.get("num_processes") or 1
    machines = nodes or values.get("num_machines") or 1
    if processes < machines or processes % machines:
        raise InputError(
            f"{processes} processes do not spread over {machines} nodes; write --gpus as a "
            "multiple of --nodes (it counts the GPUs of all nodes)."
        )
    return _strategy(values, processes, machines, accelerate)


def check_expected(launch: Launch, expected: Expect | None, path: str | None) -> None:
    """Refuse a launch that the config's own `expect:` would refuse when it starts.

    Args:
        launch: as it is planned.
        expected: the config's block.
        path: of the accelerate config; None: there is none, so that only processes are compared.
    """
    if expected is None:
        return
    strategy, processes = expected.strategy, expected.processes
    family = {"one process": "none", "ddp": "ddp", "fsdp2": "fsdp"}
    planned = family.get(launch.strategy, "deepspeed")
    if path and strategy not in (None, planned):
        raise InputError(
            f"the config expects strategy {strategy} and --accelerate {path} is {planned}; name "
            f"configs/accelerate/{FILES[strategy]}, or change expect.strategy."
        )
    if processes not in (None, launch.processes):
        raise InputError(
            f"the config expects {processes} processes and {launch.processes} are planned; write "
            f"--gpus {processes}, or change expect.processes."
        )


def _read_accelerate(path: str) -> dict[str, Any]:
    """Return what an accelerate config says."""
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise InputError(
            f"--accelerate {path} cannot be read: {str(error).splitlines()[0]}; name a file that "
            "accelerate launch --config_file takes, such as configs/accelerate/zero2.yaml."
        ) from error
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise InputError(
            f"--accelerate {path} has no distributed_type; name a file that accelerate launch "
            "--config_file takes, such as configs/accelerate/zero2.yaml."
        )
    return values


def _strategy(values: Mapping[str, Any], processes: int, machines: int, path: str | None) -> Launch:
    """Return the launch with the strategy of an accelerate config's `values`."""
    kind = str(values.get("distributed_type", "NO")).upper()
    optimizer = weights = False
    strategy: Any = "ddp" if processes > 1 else "one process"
    if kind == "DEEPSPEED":
        deepspeed = values.get("deepspeed_config") or {}
        if file := deepspeed.get("deepspeed_config_file"):
            deepspeed = _read_deepspeed(file, path)
        if not deepspeed.get("zero_stage"):
            raise InputError(
                f"--accelerate {path}: its deepspeed_config names no zero_stage; write 1, 2 or 3 "
                "there, or zero_optimization.stage in its deepspeed_config_file."
            )
        strategy = f"zero{deepspeed['zero_stage']}"
        optimizer = deepspeed.get("offload_optimizer_device", "none") != "none"
        weights = deepspeed.get("offload_param_device", "none") != "none"
    elif kind == "FSDP":
        fsdp = values.get("fsdp_config") or {}
        if fsdp.get("fsdp_version", 1) != 2 or not fsdp.get("fsdp_reshard_after_forward", True):
            raise InputError(
                f"--accelerate {path}: only FSDP 2 that reshards after the forward pass can be "
                "planned; write fsdp_version: 2 and fsdp_reshard_after_forward: true."
            )
        strategy = "fsdp2"
        optimizer = weights = bool(fsdp.get("fsdp_offload_params"))
    known = get_args(Strategy)
    if strategy not in known or kind not in ("NO", "MULTI_GPU", "DEEPSPEED", "FSDP"):
        raise InputError(
            f"--accelerate {path}: {kind.lower()} {strategy} cannot be planned; write "
            f"{one_of(known[1:])}."
        )
    return Launch(
        processes=processes,
        nodes=machines,
        strategy=strategy,
        offloads_optimizer=optimizer,
        offloads_weights=weights,
    )


def _read_deepspeed(file: str, path: str | None) -> dict[str, Any]:
    """Return the stage and the offload devices of DeepSpeed's own JSON, by accelerate's names.

    A relative `file` counts from the folder of the launch, as accelerate reads it; `path` is the
    accelerate config that names it.
    """
    try:
        with open(file, encoding="utf-8") as opened:
            zero = json.load(opened).get("zero_optimization", {})
    except (OSError, ValueError) as error:
        raise InputError(
            f"--accelerate {path}: its deepspeed_config_file {file} cannot be read ({error}); "
            "correct it, or run in the folder that its path counts from."
        ) from error
    return {
        "zero_stage": zero.get("stage"),
        "offload_optimizer_device": zero.get("offload_optimizer", {}).get("device", "none"),
        "offload_param_device": zero.get("offload_param", {}).get("device", "none"),
    }


def per_process(weights: Weights, launch: Launch, computes_in_bf16: bool) -> dict[str, int]:
    """Return the bytes of one model's state that each process keeps on its GPU, by part.

    With P trained numbers of b bytes, N processes and Adam (8 bytes a number in float32):

    - one process: weights b P, gradients b P, optimizer 2 b P;
    - DDP: the same, and once more b P for the buckets in which gradients are averaged;
    - ZeRO-1 and -2 in bf16: weights 2 P, gradients 2 P / N (stage 1: 2 P), and 16 P / N for master
      weights, their gradients and Adam's state, all float32. ZeRO-3: weights 2 P / N as well,
      and the weights and gradients of the largest layer, 4 bytes a number, while it is computed;
    - FSDP 2: all by N, in float32 where it computes in bf16 (accelerate keeps master weights),
      and two gathered layers: the one that is computed and the next one.

    DeepSpeed's figures are those of its own estimators (deepspeed.runtime.zero).

    Args:
        weights: of the model.
        launch: the processes.
        computes_in_bf16: whether the run has `bf16: true`.
    """
    count, strategy = launch.processes, launch.strategy
    compute_bytes = 2 if computes_in_bf16 else FLOAT32
    gathered = 2 * compute_bytes * weights.largest_layer
    if strategy in ("one process", "ddp"):
        parts = {
            "weights": weights.trained_bytes + weights.frozen_bytes,
            "gradients": weights.trained_bytes,
            "optimizer": weights.optimizer_bytes,
            "gradient buckets": weights.trained_bytes if strategy == "ddp" else 0,
        }
    elif strategy == "fsdp2":
        trained = FLOAT32 * weights.trained if computes_in_bf16 else weights.trained_bytes
        growth = trained / weights.trained_bytes if weights.trained_bytes else 1
        parts = {
            "weights": (trained + weights.frozen_bytes) // count,
            "gradients": trained // count,
            "optimizer": int(weights.optimizer_bytes * growth) // count,
            "gathered layers": gathered,
        }
    else:
        whole = compute_bytes * (weights.trained + weights.frozen)
        gradients = compute_bytes * weights.trained
        # of ZeRO-3: those of a layer at a time, with its weights; the shares are in the optimizer
        gradients_by_stage = {"zero1": gradients, "zero2": gradients // count, "zero3": 0}
        parts = {
            "weights": whole // count if strategy == "zero3" else whole,
            "gradients": gradients_by_stage[strategy],
            # master weights, their gradients and Adam's two averages
            "optimizer": 4 * FLOAT32 * weights.trained // count,
            "gathered layers": gathered if strategy == "zero3" else 0,
        }
    if launch.offloads_optimizer:
        parts["optimizer"] = 0
        if strategy != "fsdp2":
            parts["gradients"] = 0
    if launch.offloads_weights:
        parts["weights"] = parts["gradients"] = 0
    return {part: size for part, size in parts.items() if size}


def frozen_per_process(weights: Weights, launch: Launch) -> int:
    """Return the bytes of a model that is only read (a reference, a reward model), per process."""
    size = weights.trained_bytes + weights.frozen_bytes
    return size // launch.processes if launch.strategy in SHARDING else size
