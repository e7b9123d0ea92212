"""The versions of the libraries that decide what a run computes."""

import importlib.metadata

LIBRARIES = ("rlhf_trl", "trl", "transformers", "torch", "accelerate", "peft", "reasoning_gym")


def versions() -> dict[str, str | None]:
    """Return the version of each library; None: it is not installed."""
    installed: dict[str, str | None] = {}
    for library in LIBRARIES:
        distributions = list(importlib.metadata.distributions(name=library))
        installed[library] = distributions[0].version if distributions else None
    return installed
