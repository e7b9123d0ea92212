"""The embedded default: a tokenizer, a 0.25M-parameter model, its demonstrator and a warm start."""

from pathlib import Path


def checkpoint_path() -> str:
    """Return the folder of the warm-start checkpoint that ships with the package."""
    return str(Path(__file__).parent / "checkpoint")
