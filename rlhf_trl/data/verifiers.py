"""The place of the verifiers before `rlhf_trl.rewards`, kept for one more release."""

import warnings
from typing import Any

import rlhf_trl
from rlhf_trl.data.answers import completion_text, extract_answer, normalize  # noqa: F401

# Under these names the package has them.
RENAMED = {
    "number": "number_reward",
    "math": "math_reward",
    "regex": "regex_reward",
    "contains": "contains_reward",
}

# Not a DeprecationWarning, which Python shows to nobody.
warnings.warn(
    "rlhf_trl.data.verifiers goes with the next release; write `from rlhf_trl import exact_match` "
    "(recipes/README.md#rewards has the other names).",
    FutureWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    """Return a verifier from where it is now."""
    return getattr(rlhf_trl, RENAMED.get(name, name))
