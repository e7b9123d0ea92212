"""What DeepSpeed's own config makes of the precision and the optimizer of a run."""

from typing import Any

from rlhf_trl.errors import InputError


def innermost_optimizer(args: Any) -> str:
    """Return the name of the optimizer that steps; refuse one that Adam would replace.

    Where the optimizer is offloaded, `Accelerator.prepare` puts one of DeepSpeed's CPU optimizers
    in its place, by default DeepSpeedCPUAdam, unless zero_force_ds_cpu_optimizer is false.
    """
    config = args.deepspeed_plugin.deepspeed_config
    if "optimizer" in config:  # DeepSpeed's own config overrules `optim`
        return config["optimizer"]["type"]
    device = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if device == "none" or not config.get("zero_force_ds_cpu_optimizer", True):
        return args.optim.value
    if args.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise InputError(
            f"optim is {args.optim.value}, but with offload_optimizer_device: {device} accelerate "
            "would run DeepSpeedCPUAdam in its place; write optim: adamw_torch, or take "
            "offload_optimizer_device: none or zero_force_ds_cpu_optimizer: false."
        )
    return "DeepSpeedCPUAdam"


def precision(args: Any) -> str:
    """Return what the accelerator is going to compute in: bf16, fp16 or no."""
    config = args.deepspeed_plugin.deepspeed_config
    for kind in ("bf16", "fp16"):
        if config.get(kind, {}).get("enabled") is True:
            return kind
    return "no" if config else args.mixed_precision
