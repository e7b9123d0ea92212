"""What a chat template leaves out of the rows of a run: their tools, and calls of tools."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from datasets.utils import tqdm

from rlhf_trl.data.examples import SIDES, Examples, may_hold_tools
from rlhf_trl.errors import InputError, reason_in_short
from rlhf_trl.rollouts.generate import template_arguments

Messages = list[dict[str, Any]]
EMPTY_ANSWER = "an answer of tool_calls alone"  # a key of counts, and a phrase of an error


def check_template_reads(data: Examples, tokenizer: Any, args: Any, config: Any) -> None:
    """Print of how many rows the chat template leaves out `tools` or `tool_calls`.

    A template leaves them out of a row if the text of the row is the same without them.

    Args:
        data: the training and held-out rows; each is a conversation.
        tokenizer: whose chat template is checked.
        args: TRL's config.
        config: the `dataset:` block.

    Raises:
        InputError: an answer consists of nothing but calls that are left out, so that the empty
            text would be trained; or the template fails on the first row, or leaves out its text.
    """
    first = data.train[0]
    _check_first(first, tokenizer, _arguments(first, args))
    turns = getattr(config, "turns", "last")  # only the block of SFT can ask for "all"
    for side, rows in (("train", data.train), ("held-out", data.held_out)):
        if not rows or not may_hold_tools(rows):
            continue
        counts: Counter[str] = Counter()  # rows, by what of them is left out
        bar = {"leave": False, "disable": len(rows) < 50_000}
        for row in tqdm(rows, "tools in the chat template", **bar):
            counts.update(_left_out(row, tokenizer, args, turns))
        if empty := counts.pop(EMPTY_ANSWER, 0):
            raise InputError(
                f"dataset: {empty} of {len(rows)} {side} rows of {config.path} have "
                f"{EMPTY_ANSWER}, which the chat template leaves out, so that the empty text would "
                "be trained; take a template that reads tool_calls (chat_template_path, or "
                "chat_template.jinja in the model's folder), or remove these rows."
            )
        for name, count in sorted(counts.items()):
            if args.process_index == 0:
                print(
                    f"the chat template leaves out {name} of {count} of {len(rows)} {side} rows",
                    flush=True,
                )


def check_refusals(data: Examples, tokenizer: Any, args: Any) -> None:
    """Refuse a chat template that raises an exception of its own on a row."""
    from jinja2 import TemplateError

    for side, rows in (("are left", data.train), ("are held out", data.held_out or ())):
        for number, row in enumerate(rows, 1):
            try:
                for messages in _conversations(row):
                    tokenizer.apply_chat_template(messages, tokenize=False, **_arguments(row, args))
            except TemplateError as error:
                raise InputError(
                    f"dataset: the chat template refuses row {number} of those that {side} "
                    f"({error}), which begins {str(row['prompt'])[:80]!r}; remove such rows, or "
                    "name a template that takes them (chat_template_path)."
                ) from error


def _arguments(row: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return what the chat template gets for a row: what the run says, and what the row does."""
    of_run = getattr(args, "chat_template_kwargs", None) or {}
    return {**of_run, **template_arguments(row)}


def _check_first(row: Mapping[str, Any], tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse a chat template that fails on the first row, or leaves a text of it out.

    A text is left out where the tokens stay the same when something is added to it.
    """

    def ids(messages: Messages) -> list[int]:
        """Return the tokens of messages; a question is followed by the generation prompt."""
        is_question = messages[-1]["role"] != "assistant"
        options = {"tokenize": False, "add_generation_prompt": is_question, **arguments}
        text = tokenizer.apply_chat_template(messages, **options)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    remedy = "correct chat_template.jinja in the model's folder, or name another chat_template_path"
    with_answer = _conversations(row)[0]  # the prompt alone in a row without answers
    for name, messages in (("prompt", row["prompt"]), ("answer", with_answer)):
        *before, last = messages
        more = "and 12 words"  # any words that the text does not end with
        longer = [*before, {**last, "content": f"{last.get('content') or ''} {more}"}]
        try:
            unread = ids(messages) == ids(longer)
        except Exception as error:  # a template is a program, and may raise anything
            raise InputError(
                f"the chat template fails on the {name} of the first row "
                f"({reason_in_short(error)}); {remedy}."
            ) from error
        if unread:
            raise InputError(f"the chat template leaves out the {name} of the first row; {remedy}.")


def _left_out(row: Mapping[str, Any], tokenizer: Any, args: Any, turns: str) -> list[str]:
    """Return which of "tools", "tool_calls" and `EMPTY_ANSWER` the template leaves out of a row.

    `turns` says which answers are trained on, "last" or "all". An answer of calls alone is empty
    only if the calls are left out.
    """
    conversations = _conversations(row)
    messages = [message for conversation in conversations for message in conversation]
    has_calls = any(message.get("tool_calls") for message in messages)
    has_tools = bool(row.get("tools"))
    if not has_calls and not has_tools:
        return []
    arguments = _arguments(row, args)
    texts = _texts(tokenizer, conversations, arguments)
    if texts is None:  # the template refuses this row, and the trainer is going to say why
        return []
    left_out = []
    if has_tools and texts == _texts(tokenizer, conversations, {**arguments, "tools": None}):
        left_out.append("tools")
    without_calls = [[_without_calls(message) for message in c] for c in conversations]
    if has_calls and texts == _texts(tokenizer, without_calls, arguments):
        left_out.append("tool_calls")
        answers = [answer for c in conversations for answer in _answers(c, row, turns)]
        if any(_only_calls(answer) for answer in answers):
            left_out.append(EMPTY_ANSWER)
    return left_out


def _conversations(row: Mapping[str, Any]) -> list[Messages]:
    """Return the prompt with each of its answers, or alone where a row has none."""
    answers = [row[side] for side in SIDES if side in row] + list(row.get("ranked") or ())
    return [row["prompt"] + answer for answer in answers] or [row["prompt"]]


def _answers(conversation: Messages, row: Mapping[str, Any], turns: str) -> Messages:
    """Return the messages that are trained on; `turns` is "last" or "all"."""
    first = 0 if turns == "all" else len(row["prompt"])
    return [message for message in conversation[first:] if message["role"] == "assistant"]


def _only_calls(message: Mapping[str, Any]) -> bool:
    """Whether a message holds nothing beside the tools that it calls."""
    others = [value for key, value in message.items() if key not in ("role", "tool_calls")]
    return bool(message.get("tool_calls")) and not any(str(v or "").strip() for v in others)


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _texts(
    tokenizer: Any, conversations: Sequence[Messages], arguments: Mapping[str, Any]
) -> list[str] | None:
    """Return conversations as the chat template renders them; None: it refuses them."""
    from jinja2 import TemplateError

    try:
        return [
            tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
            for messages in conversations
        ]
    except (TemplateError, TypeError, ValueError):
        return None
