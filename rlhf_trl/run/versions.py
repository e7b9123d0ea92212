"""The versions of the libraries that decide what a run computes."""

import importlib.metadata

LIBRARIES = ("rlhf_trl", "trl", "transformers", "torch", "accelerate", "peft", "reasoning_gym")


def versions() -> dict[str, str | None]:
    """Return the version of each library; None: it is not installed."""
    installed: dict[str, str | None] = {}
    for library in LIBRARIES:
        distributions = importlib.metadata.distributions(name=library)
        installed[library] = next((found.version for found in distributions), None)
    return installed
