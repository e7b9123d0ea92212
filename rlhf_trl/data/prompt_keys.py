"""When two prompts ask the same, so that one is never trained on while the other is held out."""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from unicodedata import normalize

Prompt = str | Sequence[Mapping[str, str]]  # a text, or messages with role and content
SYSTEM_ROLES = ("system", "developer")


def prompt_key(prompt: Prompt, turns: str = "last") -> str:
    """Return a text that is the same for two prompts if and only if they ask the same.

    Prompts are compared by their turns; letter case, runs of white space, composed and decomposed
    letters (NFC) and the text of the system do not count, unless there is nothing else.

    `turns` says which turns of the assistant are trained on: the `last`, which answers the whole
    prompt, or `all`. Of `all`, each answers the turns before it. Two conversations then have a
    trained prompt in common if and only if they have the first, so that one is the key.
    """
    if isinstance(prompt, str):
        return _normalized(prompt)
    messages = [message for message in prompt if message["role"] not in SYSTEM_ROLES] or prompt
    if turns == "all":
        messages = _before_first_answer(messages)
    return repr([(turn["role"].lower(), _normalized(turn["content"])) for turn in messages])


def prompt_hash(key: str) -> bytes:
    """Return eight bytes that stand for a key."""
    return blake2b(key.encode(), digest_size=8).digest()


def fingerprint(keys: Iterable[str]) -> str:
    """Return a word that is the same for two sets of keys if and only if they are equal."""
    return prompt_hash(repr(sorted(set(keys)))).hex()


def _normalized(text: str) -> str:
    return " ".join(normalize("NFC", text).split()).lower()


def _before_first_answer(messages: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
    """Return the messages before the first of the assistant that answers a user."""
    asked = False
    for number, message in enumerate(messages):
        if asked and message["role"] == "assistant":
            return messages[:number]
        asked |= message["role"] == "user"
    return messages
