"""What windows of generated text are made of: prompts, completions and what rewards say of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

from rlhf_trl.compare.models import SECOND_END, drawn
from rlhf_trl.compare.windows.batches import LENGTH, LIMIT, PolicyBatch
from rlhf_trl.compare.windows.generation import Completion
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.model import END, PAD
from rlhf_trl.tiny.tokenizer import build_tokenizer

WORDS = ("sun", "tree", "river", "stone", "cloud", "light", "green", "house", "mouse", "bread")


def completion(ragged: bool, limit: int = LIMIT, odd: bool = False) -> Completion:
    """Return a function that gives random completions, see `fix_completions`.

    Args:
        ragged: whether they have 1 to `limit` tokens, some without an end; else they have LENGTH.
        limit: tokens at most.
        odd: whether every fifth token is the padding token, and about half of the
            completions that would be cut off end with the model's second end token.
    """

    def complete(prompt_ids: tuple[int, ...], index: int, call: int) -> list[int]:
        rng = drawn(prompt_ids, index, call)
        # some lengths lie above the limit: those completions are cut off
        length = rng.randint(1, limit + limit // 6) if ragged else LENGTH
        ids = [rng.randrange(7, 113) for _ in range(min(length, limit))]
        ids = [PAD if odd and place % 5 == 4 else token for place, token in enumerate(ids)]
        if length <= limit:
            return [*ids[:-1], END]
        return [*ids[:-1], SECOND_END] if odd and ids[0] % 2 else ids

    return complete


def right(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward a random half of all completions, and a tenth of the long ones: outliers."""
    if "text" in kwargs:
        _check_texts(completion_ids, **kwargs)
    rewards = []
    for ids in completion_ids:
        share = 0.5 if len(ids) <= LIMIT else 0.1
        rewards.append(float(drawn("right", tuple(ids)).random() < share))
    return rewards


def has_format(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward two thirds of all completions fully, the others by a quarter."""
    return [drawn("format", tuple(ids)).choice([0.25, 1.0, 1.0]) for ids in completion_ids]


def _check_texts(
    completion_ids: list[list[int]], prompts: Any, completions: Any, text: list[str], **kwargs: Any
) -> None:
    """Refuse a trainer whose reward functions see other texts than those of the token ids.

    Args:
        completion_ids: the token ids that a reward function gets.
        prompts: the prompts that it gets, as chats.
        completions: the completions that it gets, as chats.
        text: the column of the data that holds the text of each prompt.
        kwargs: whatever else it gets.
    """
    shown_completions = [messages[0]["content"] for messages in completions]
    shown_prompts = [messages[-1]["content"] for messages in prompts]
    decoded = _tokenizer().batch_decode(completion_ids, skip_special_tokens=True)
    if shown_completions != decoded or shown_prompts != text:
        raise InputError("reward functions see other texts than those of the token ids")


_tokenizer = cache(build_tokenizer)


def partly(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward a random half of all completions; the others have no reward."""
    return [drawn("partly", *ids).choice([None, None, 0.3, 1.7]) for ids in completion_ids]


async def punished(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward or punish a random half of all completions, as a function that is awaited."""
    return [drawn("punished", *ids).choice([None, None, -2.3, 0.6]) for ids in completion_ids]


def reward_functions(batch: PolicyBatch) -> list[Any]:
    """Return the two reward functions of a window."""
    if batch.gaps:
        return [partly, punished]
    if batch.reward is not None:
        return [_equal_reward(batch.reward / sum(batch.weights))] * 2
    return [right, has_format]


def prompt_examples(batch: PolicyBatch, with_text_column: bool) -> list[dict[str, Any]]:
    """Return the data of a window.

    The column `text` holds each prompt as plain text. The reward function `right` holds it against
    the prompts that it is given.
    """
    texts = _prompts(batch)
    if batch.gaps:  # whose reward functions check nothing
        return [{"prompt": text} for text in texts]
    examples: list[dict[str, Any]] = []
    for text in texts:
        example: dict[str, Any] = {"prompt": [{"role": "user", "content": text}]}
        if with_text_column:
            example["text"] = text
        examples.append(example)
    return examples


def _prompts(batch: PolicyBatch) -> list[str]:
    """Return prompts of one word, or of one to three where completions are long."""
    if batch.limit <= LIMIT:
        return list(WORDS)
    return [" ".join([word] * (1 + place % 3)) for place, word in enumerate(WORDS)]


def _equal_reward(reward: float) -> Callable[..., list[float]]:
    """Return a reward function that gives every completion this reward."""
    return lambda completion_ids, **_: [reward] * len(completion_ids)
