"""What `accelerate launch` would meet with a traceback in the file of its `--config_file`."""

from pathlib import Path
from typing import Any

import yaml

from rlhf_trl.errors import InputError, nearest
from rlhf_trl.run.config_types import one_of, show
from rlhf_trl.run.yaml_loader import read_yaml

LEAST = {"num_processes": 1, "num_machines": 1, "machine_rank": 0}  # integers, and the smallest
OLDER = ("fp16", "dynamo_backend")  # keys that accelerate still reads


def check_accelerate_file(path: Path, processes: int | None = None) -> None:
    """Refuse a file with keys or values that accelerate does not know.

    Args:
        path: the file.
        processes: how many will be launched whatever it says; None: as many as it says.
    """
    from accelerate.commands.config.config_args import ClusterConfig

    read_yaml(path)  # says where something is no YAML
    values = yaml.safe_load(path.read_text(encoding="utf-8"))  # as accelerate reads it
    if values.get("compute_environment") == "AMAZON_SAGEMAKER":  # whose files have other keys
        return
    known = [*ClusterConfig.__dataclass_fields__, *OLDER]
    for key, value in {"distributed_type": None, **values}.items():
        if key not in known:
            raise InputError(
                f"{path}: {key} is not a key of accelerate's{nearest(key, known)}; remove it."
            )
        remedy = _remedy(key, value)
        if remedy and not (key == "num_processes" and processes):
            raise InputError(f"{path}: {key} is {show(value)}; write {remedy}.")


def _remedy(key: str, value: Any) -> str | None:
    """Return what to write in place of a value; None: accelerate reads it."""
    from accelerate.utils import ComputeEnvironment, DistributedType, PrecisionType

    if key in LEAST and (type(value) is not int or value < LEAST[key]):
        return f"{LEAST[key]} or more"
    if key == "use_cpu" and not isinstance(value, bool):
        return "true or false"
    if key == "gpu_ids" and not isinstance(value, str | None):
        return f'"{value}", with the quotes'
    if key == "mixed_precision" and value is False:  # what YAML 1.1 takes a bare `no` for
        return '"no", with the quotes'
    if key == "distributed_type" and value is False:  # a bare `NO`, which accelerate takes for it
        return None
    kinds = {
        "compute_environment": ComputeEnvironment,
        "distributed_type": DistributedType,
        "mixed_precision": PrecisionType,
    }
    if key not in kinds or (key == "mixed_precision" and value is None):
        return None
    choices = [kind.value for kind in kinds[key]]
    word = value.lower() if key == "mixed_precision" and isinstance(value, str) else value
    return None if word in choices else f"{one_of(choices)}{nearest(word or '', choices)}"
