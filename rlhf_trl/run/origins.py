"""What a run is made from: the folders of models that its config names, and hashes of weights."""

from collections.abc import Mapping
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

from rlhf_trl import manifests
from rlhf_trl.run.config_files import value_at
from rlhf_trl.run.folders import model_folder
from rlhf_trl.run.stages import STAGES

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")
_readings: dict[str, Future[list[dict[str, str]]]] = {}  # what `begin_reading` found, by output_dir


def find_models(loaded: Any) -> None:
    """Name the folders of the reward model and the teachers, or say which one does not exist."""
    own, args = loaded.own, loaded.trl
    if reward_model := getattr(own, "reward_model", None):
        own.reward_model = model_folder("reward_model", reward_model)
    if teachers := getattr(args, "teacher_models", None):
        args.teacher_models = [model_folder("teacher_models", name) for name in teachers]


def weights_files(folder: Path) -> list[Path]:
    """Return the files with weights directly in a folder, in the order of their names."""
    return sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))


def weights_sha256(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weights, file after file; None: the folder holds none.

    For a model in one file, it is what `sha256sum` prints.
    """
    files = weights_files(folder)
    digest = sha256()
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest() if files else None


def model_in(folder: Path) -> Path:
    """Return the folder of the model that a folder stands for: its `model/` if it is a run's."""
    has_model = not weights_files(folder) and (folder / "model").is_dir()
    return folder / "model" if has_model else folder


def sources(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, name) of all models that a config names where it may name an earlier run's."""
    keys = {key for stage in STAGES.values() for key in stage.reads}
    named = []
    for key in sorted(keys):
        value = value_at(config, key.split("."))
        names = value if isinstance(value, list) else [value]
        named += [(key, str(name)) for name in names if name is not None]
    return named


def begin_reading(config: Mapping[str, Any], output_dir: str) -> None:
    """Hash, in the background, the models in local folders that a run is about to be made from.

    What they are at the start counts: they may be trained anew while the run goes on. A run has
    other things to load meanwhile, so that it need not wait (2 s for 3 GB).
    """
    reading: Future[list[dict[str, str]]] = Future()

    def read() -> None:
        try:
            reading.set_result(_origins(config))
        except Exception as error:  # raised where the result is asked for
            reading.set_exception(error)

    Thread(target=read, daemon=True).start()  # a run that ends early does not wait for it
    _readings[output_dir] = reading


def _origins(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the key, the folder and the hash of each model of a config that a local folder holds.

    The folder is written as the config has it, with `/model` where that names a run.
    """
    origins = []
    for role, name in sources(config):
        folder = model_in(Path(name).expanduser())
        digest = weights_sha256(folder)
        if digest is not None:
            origins.append({"role": role, "path": str(folder), "sha256": digest})
    return origins


def made_from(args: Any) -> list[dict[str, str]]:
    """Return what `begin_reading` has found, behind what the checkpoint was made from before.

    A model that was trained anew before a run went on has two entries: the run learned from both.
    """
    origins: list[dict[str, str]] = []
    if args.resume_from_checkpoint is not None:  # an earlier version wrote none
        origins = manifests.read_manifest(args.resume_from_checkpoint).get("made_from", [])
    new = [origin for origin in _readings.pop(args.output_dir).result() if origin not in origins]
    return origins + new
