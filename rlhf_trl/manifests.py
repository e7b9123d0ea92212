"""Checkpoints as files: the manifest that makes one whole, and what is damaged in another."""

import json
import zlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_trl.output import MANIFEST, write_json


def write_manifest(checkpoint: Path, checksums: bool, **facts: Any) -> None:
    """Write the manifest of a checkpoint: the names and sizes of its files, and `facts`.

    With `checksums`, read the files again for a CRC-32 of each (about 0.5 s per GiB), which finds
    damage as well as a cryptographic hash does, in half the time. Without them, a bit that flips
    on the disk goes unnoticed.
    """
    files = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            checksum = _crc32(path) if checksums else None
            files[str(path.relative_to(checkpoint))] = (path.stat().st_size, checksum)
    # converted by JSON as when it is read (tuples, keys), so that `read_manifest` has the same sum
    content = json.loads(json.dumps({**facts, "files": files}, default=str))
    write_json(checkpoint / MANIFEST, {**content, "crc32": _sum_of(content)})


def read_manifest(checkpoint: str | Path) -> dict[str, Any]:
    """Return what `write_manifest` wrote; a ValueError says that it is damaged."""
    content = json.loads((Path(checkpoint) / MANIFEST).read_text())
    if content.pop("crc32") != _sum_of(content):
        raise ValueError(MANIFEST)
    return content


def _sum_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def checkpoint_fault(checkpoint: str | Path) -> str | None:
    """Return what keeps a checkpoint from being resumed (missing or damaged file), or None.

    transformers writes a checkpoint in place, so a killed save leaves half of one; and it starts a
    fresh optimizer without a word where that file is missing.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "is not a folder"
    if not (folder / MANIFEST).exists():
        return f"has no {MANIFEST}, which is written last, so it is not whole"
    name = MANIFEST  # the file that is being read, for the error below
    try:
        manifest = read_manifest(folder)
        if manifest["save_only_model"]:
            return "has no optimizer, since it was saved with save_only_model"
        for name, (size, checksum) in manifest["files"].items():
            path = folder / name
            if not path.exists():
                return f"lacks {name}"
            if path.stat().st_size != size:
                return f"has a cut-off {name}"
            if checksum is not None and _crc32(path) != checksum:
                return f"has a damaged {name}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"has a damaged {name}"
    return None


def weights_fault(folder: Path) -> str | None:
    """Return what is wrong with the model weights in a folder (missing, cut off), or None."""
    # the last two are what DeepSpeed and FSDP save
    kinds = ("*.safetensors", "pytorch_model*.bin", "global_step*", "pytorch_model_fsdp_*")
    if not any(path for kind in kinds for path in folder.glob(kind)):
        return "has no model weights"
    for index in folder.glob("*.safetensors.index.json"):
        for shard in set(json.loads(index.read_text())["weight_map"].values()):
            if not (folder / shard).exists():
                return f"lacks the shard {shard}"
    for file in folder.glob("*.safetensors"):
        try:
            safe_open(file, "numpy")  # reads the header, which says how long the file has to be
        except (OSError, SafetensorError):
            return f"has a cut-off {file.name}"
    return None


def step_of(checkpoint: str | Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())["global_step"]
