"""Texts without the thoughts that a model writes before its answer."""

import re
from typing import Any

# The second: a chat template may have opened the block at the end of the prompt.
THOUGHTS = (r"(?s)<think>.*?(</think>\s*|\Z)", r"(?s)\A.*?</think>\s*")


def without_thoughts(completion: Any) -> Any:
    """Return a completion, plain or one message, without its `<think>...</think>` blocks.

    A block that was never closed reaches to the end, so that thoughts are never read as an answer.
    """
    if not isinstance(completion, str):
        *before, last = completion
        return [*before, {**last, "content": without_thoughts(last["content"])}]
    for pattern in THOUGHTS:
        completion = re.sub(pattern, "", completion)
    return completion
