"""The guard around a launch: what came up is what was asked for."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from tqdm import tqdm

from rlhf_trl.errors import InputError, setting, takes_traceback
from rlhf_trl.run.signals import signals

PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass
class Expect:
    """The `expect:` block: the launch a config is meant for; a different one is refused."""

    processes: int | None = setting("how many", range="1 or more")
    strategy: Literal["none", "ddp", "fsdp", "deepspeed"] | None = setting(
        "how the model is wrapped"
    )


def recipe(main: Callable[[], None]) -> None:
    """Run a recipe's `main`; an `InputError` ends it with its sentence and exit code 1.

    How other errors end it, `failures.report` says, and how signals do, `signals`.
    """
    with_traceback = takes_traceback(sys.argv)
    try:
        try:
            with signals.handled():
                check_process_count_asked()
                check_deepspeed()
                main()
        finally:
            # an open progress bar would share its line with the sentence that is printed next
            for bar in [*getattr(tqdm, "_instances", ())]:
                bar.close()
    except (KeyboardInterrupt, Exception) as error:
        from rlhf_trl.run import failures

        failures.report(error, with_traceback)
        raise


def world_size() -> int:
    """Return the number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def check_process_count_asked() -> None:
    """Stop a launch that was to have several processes and has one.

    `accelerate launch --cpu --num_processes 2` (and MULTI_CPU in its config) sets MASTER_ADDR, but
    starts a single process without WORLD_SIZE.
    """
    if os.environ.get("MASTER_ADDR") and not os.environ.get("WORLD_SIZE"):
        raise InputError(
            "accelerate was asked for several processes but started one, as it does with --cpu; "
            "launch with --config_file configs/accelerate/cpu_2proc.yaml, or unset MASTER_ADDR."
        )


def check_deepspeed() -> None:
    """Stop a run that was launched for DeepSpeed where that is not installed.

    `accelerate launch` says so itself, torchrun does not.
    """
    if launched_for() == "deepspeed" and find_spec("deepspeed") is None:
        raise InputError(
            "this run was launched for DeepSpeed, which is not installed; run scripts/setup.sh "
            "deepspeed, or launch with configs/accelerate/ddp.yaml or fsdp2.yaml."
        )


def cpu_settings(given: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return `use_cpu` and `bf16` for a run on a CPU, where TRL alone would ask for a GPU.

    It computes in float32, unless the fields that its config sets, `given`, name bf16. Precisions
    for GPUs are refused, and so are several processes that would all look for one.
    """
    import torch
    from accelerate.utils import parse_flag_from_env

    launched = parse_flag_from_env("ACCELERATE_USE_CPU")  # set by a launch with use_cpu or --cpu
    if launched and given.get("use_cpu") is False:
        raise InputError(
            "use_cpu is false in the config and use_cpu true in the accelerate config (or "
            "ACCELERATE_USE_CPU), which would win; write the same in both."
        )
    wants_cpu = given.get("use_cpu") or launched
    if not wants_cpu and torch.accelerator.is_available():
        return {}  # a GPU: TRL's defaults hold
    if not wants_cpu and processes > 1:
        raise InputError(
            f"{processes} processes were launched on a machine without a GPU, and would train each "
            "on its own; write use_cpu: true and launch with configs/accelerate/cpu_2proc.yaml."
        )
    if not wants_cpu and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "false":
        raise InputError(
            "accelerate was launched for a GPU (use_cpu: false), and there is none; write "
            "use_cpu: true, or launch with --config_file configs/accelerate/cpu.yaml."
        )
    if given.get("fp16"):
        reason = "use_cpu" if wants_cpu else "there is no GPU"
        raise InputError(
            f"fp16 is true and this run is on the CPU ({reason}), which would train in float32 all "
            "the same; remove it, or write bf16: true."
        )
    bf16 = bool(given.get("bf16"))
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" and (precision, bf16) != ("bf16", True):
        raise InputError(
            f"accelerate was launched with mixed_precision {precision}, which is for GPUs, and "
            "this run is on the CPU; launch with --config_file configs/accelerate/cpu.yaml"
            + (", or write bf16: true in the config." if precision == "bf16" else ".")
        )
    return {"use_cpu": True, "bf16": bf16}  # False, too: TRL's configs have bf16 true by default


def check_processes(args: Any, expect: Expect | None = None) -> None:
    """Stop unless the processes that were launched found each other, and are those expected."""
    live, launched = args.world_size, world_size()
    if live != launched:
        raise InputError(
            f"{launched} processes were launched but this one sees {live}, so each would train on "
            "its own; without GPUs write use_cpu: true (or set ACCELERATE_USE_CPU=true)."
        )
    wanted = expect.processes if expect else None
    if wanted not in (None, live):
        raise InputError(
            f"this config expects {wanted} processes and {live} came up; launch with "
            f"--num_processes {wanted}, or change expect.processes together with the batch sizes."
        )


def strategy_of(accelerator: Any) -> str:
    """Return `none`, `ddp`, `fsdp` or `deepspeed`: how this accelerator wraps a model."""
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED"):
        return kind.lower()
    return "ddp" if accelerator.num_processes > 1 else "none"


def check_strategy(trainer: Any, expect: Expect | None = None) -> None:
    """Stop unless the trainer's accelerator uses the strategy that the launch asked for.

    On a CPU, accelerate silently falls back from FSDP to DDP.
    """
    came_up = strategy_of(trainer.accelerator)
    wanted = launched_for() or (expect.strategy if expect else None)
    if wanted is not None and wanted != came_up:
        raise InputError(
            f"strategy {wanted} was asked for and {came_up} came up on "
            f"{trainer.accelerator.device.type}; use a configs/accelerate/*.yaml that fits it."
        )


def check_wrapper(trainer: Any) -> None:
    """Stop unless the model that trains is wrapped the way the strategy wraps models."""
    wanted = {
        "ddp": ("DistributedDataParallel",),
        "fsdp": ("FSDPModule", "FullyShardedDataParallel"),
        "deepspeed": ("DeepSpeedEngine",),
    }.get(strategy_of(trainer.accelerator))
    names = [cls.__name__ for cls in type(trainer.model_wrapped).__mro__]
    if wanted and not set(wanted) & set(names):
        raise InputError(
            f"the model is a {names[0]} where strategy {strategy_of(trainer.accelerator)} wraps it "
            f"in {' or '.join(wanted)}; check the accelerate config."
        )


def describe_launch(args: Any, name: str, kind: str = "examples") -> str:
    """Return the first line of a run: device, processes, dtype, optimizer and batch arithmetic.

    `kind` says what the training examples are called, such as "pairs"; a run that generates its
    completions while it trains does not read it.
    """
    processes = args.world_size
    precision, optimizer = args.mixed_precision, args.optim.value
    if args.deepspeed_plugin:  # DeepSpeed's own config overrules both
        from rlhf_trl.run import deepspeed

        precision = deepspeed.precision(args)
        optimizer = deepspeed.innermost_optimizer(args)
    line = (
        f"{name} on {args.device.type}, {processes} process{'es' * (processes > 1)}, "
        f"strategy {launched_for() or ('ddp' if processes > 1 else 'none')}, "
        f"{PRECISIONS.get(precision, precision)}, {optimizer}; "
    )
    per_step = args.per_device_train_batch_size * processes * args.gradient_accumulation_steps
    if not hasattr(args, "generation_batch_size"):
        return line + f"{per_step} {kind} per optimizer step"
    prompts = args.generation_batch_size // args.num_generations
    # each of a generation's batches is learned from num_iterations times
    updates = args.num_iterations * args.steps_per_generation / args.gradient_accumulation_steps
    return line + (
        f"{prompts} prompts x {args.num_generations} completions per generation, "
        f"{per_step} completions per optimizer step, "
        f"{updates:g} optimizer step{'s' * (updates != 1)} per generation"
    )


def launched_for() -> str | None:
    """Return the strategy that accelerate's launcher was told to shard the model with, if any."""
    for name in ("deepspeed", "fsdp"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true":
            return name
    return None
