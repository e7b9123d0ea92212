"""Readers of published data sets: pure functions that make examples of one of their rows."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rlhf_trl.data.examples import SIDES
from rlhf_trl.data.gym import Row
from rlhf_trl.errors import InputError, nearest

# Why a row is left out.
PARTED = "the sides part before the last message"
UNANSWERED = "the last message is not the assistant's"
BLANK = "an empty prompt or answer"
UNRATED = "no rated step"
OPENED = "the assistant speaks first"

PROBLEM = "Problem: {}\nReasoning trace:\n"  # the prompt of the book's code (train_prm.py)
# the system prompt under which the answers were sampled, as in the book's code (train_orm.py)
ROLLOUT_SYSTEM = (
    "Solve the math problem step by step. End with exactly one line in the form "
    "#### <number>. Do not write anything after that line."
)
# the ratings of UltraFeedback's pairs, by who published them
ARGILLA, H4 = ("chosen-rating", "rejected-rating"), ("score_chosen", "score_rejected")
MESSAGES = [{"role": "string", "content": "string"}]
SCORED = [{"response": "string", "overall_score": "float64"}]
PAIR = {"prompt": MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES}
CHAT = ["json"]  # messages that may call tools: each has its own keys
TOOLS = {"tools": "json"}
# Who speaks, by the words of ShareGPT and of those who publish in its form, and by OpenAI's.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "tool_response"), "tool"),
    "system": "system",
    "developer": "developer",
}


class WrongRow(ValueError):
    """What is wrong with a row, and what to write; the caller knows where the row is."""


class Misfit(WrongRow):
    """A row of another kind than a reader reads: a column has another value than it expects."""

    def __init__(self, column: str, value: Any, wanted: str):
        super().__init__(f"{column} is {value!r:.80}, which is no {wanted}")


Made = Row | list[Row] | str  # an example, or several, or why a row makes none


@dataclass(frozen=True)
class Reader:
    """How the rows of a data set, in one form in which it is published, become examples."""

    read: Callable[[Row], Made]  # makes the example or examples of a row
    needs: tuple[str, ...]  # the columns that it reads
    makes: dict[str, Any]  # {column of the examples: its type, as `datasets` names it}
    # what the examples may serve as: "prompts", "prompt/completion", "messages", "pairs",
    # "unpaired", "ranked lists", "outcomes" or "traces"
    shapes: tuple[str, ...]
    # names of files on the hub, with {} for the split, that are parsed line by line, since their
    # JSON objects differ too much for `datasets` to read them as one table
    lines: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()  # columns that it reads where they are there
    is_detected: bool = False  # whether rows with `needs` are of this form if no reader is named


def detected(names: Collection[str], from_value: bool, shapes: Collection[str]) -> str | None:
    """Return the reader of rows whose columns tell their form; None: there is none to tell.

    Args:
        names: the columns of the data set.
        from_value: whether its chosen answers are in the turns of ShareGPT, with `from` and
            `value`.
        shapes: what the examples are to serve as, see `Reader.shapes`.
    """
    if from_value and "conversations" not in names:
        return "dpo_pairs" if "pairs" in shapes else None
    for name, its_forms in READERS.items():
        for form in its_forms:
            fits = form.is_detected and {*form.needs} <= {*names}
            if fits and {*form.shapes} & {*shapes}:
                return name
    return None


def check_reader(name: str | None, *shapes: str) -> None:
    """Refuse a `dataset.reader` that makes none of these shapes."""
    if name is None:
        return
    its_shapes = [shape for form in forms(name) for shape in form.shapes]
    if not set(its_shapes) & set(shapes):
        fit = [n for n in READERS if any(set(form.shapes) & set(shapes) for form in READERS[n])]
        raise InputError(
            f"dataset.reader: {name} makes {' or '.join(dict.fromkeys(its_shapes))}, and this "
            f"recipe trains on {' or '.join(shapes)}; write {' or '.join(fit)}, or use another "
            "recipe."
        )


def forms(name: str) -> tuple[Reader, ...]:
    """Return the readers of that name, one for each form in which its data set is published."""
    if name not in READERS:
        raise InputError(
            f"dataset.reader is {name!r}{nearest(name, READERS)}; write {' or '.join(READERS)}."
        )
    return READERS[name]


def columns_read(name: str) -> set[str]:
    """Return the columns that a reader may read, in any of its forms."""
    return {column for form in forms(name) for column in (*form.needs, *form.takes)}


def examples_of(row: Row, reader: Reader) -> list[Row | str]:
    """Return the examples that a reader makes of a row, or, as a text, why one is left out."""
    if reader.lines and row.keys() == {"text"}:
        try:
            row = json.loads(row["text"])
        except json.JSONDecodeError:
            raise Misfit("the line", row["text"], "JSON") from None
        for column in reader.needs:  # a line may lack a column whose value is null
            _of(dict, row, "the line", "object of columns").setdefault(column, None)
    made = reader.read(row)
    examples = made if isinstance(made, list) else [made]
    return [BLANK if isinstance(e, dict) and _blank(e) else e for e in examples]


def _blank(row: Row) -> bool:
    """Whether the prompt or an answer of an example, a text or messages, is empty."""
    cells = [row.get(name, "") for name in ("prompt", *(s for s in SIDES if s in row))]
    messages = (
        cell[-1] if isinstance(cell, list) and cell else {"content": cell} for cell in cells
    )
    return not all((m["content"] or "").strip() or m.get("tool_calls") for m in messages)


def split_prompt(row: Row) -> Row | str:
    """Split the prompt off conversations: all messages but the last, the assistant's answer.

    The row's columns `SIDES` (one, or two of a pair) hold answers or whole conversations, and the
    column `prompt` may hold a part of the prompt:

    - of messages, it stands before the conversations; then a side that is a text is the answer
    - of text, it is the user's question, unless the conversations hold a question themselves

    Returns:
        The row with its prompt split off; the row as it is, if its sides are not all conversations;
        or, as a text, why the row is to be left out: two sides with different prompts (`PARTED`),
        or an answer that is not the assistant's (`UNANSWERED`).
    """
    sides = [name for name in SIDES if name in row]
    prompt = row.get("prompt")
    prompt_messages = prompt if isinstance(prompt, list) else []
    if prompt_messages:  # then texts are answers to them
        texts = {side: row[side] for side in sides if isinstance(row[side], str)}
        row = row | {side: [_message("assistant", text)] for side, text in texts.items()}
    # texts and empty cells stay: `check_cells` judges them
    if not sides or not all(isinstance(row[side], list) and row[side] for side in sides):
        return row
    messages = [message for side in sides for message in row[side]]
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        return row
    conversations = {}
    for side in sides:
        # some data sets have the prompt in its own column and in the conversations, too
        repeats_prompt = row[side][: len(prompt_messages)] == prompt_messages
        conversations[side] = row[side] if repeats_prompt else prompt_messages + row[side]
    before = conversations[sides[0]][:-1]
    if any(conversation[:-1] != before for conversation in conversations.values()):
        return PARTED
    if any(conversation[-1]["role"] != "assistant" for conversation in conversations.values()):
        return UNANSWERED
    # no question in the conversations: the text is the question
    if isinstance(prompt, str) and prompt and all(m["role"] == "system" for m in before):
        before = [*before, _message("user", prompt)]
    row = row | {side: conversation[-1:] for side, conversation in conversations.items()}
    if before:
        row = row | {"prompt": before}
    return row


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _of(kind: Any, value: Any, column: str, wanted: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Misfit(column, value, wanted)
    return value


def _text(value: Any, column: str) -> str:
    return _of(str, value, column, "text")


def _list(value: Any, column: str) -> list[Any]:
    return _of(list, value, column, "list")


def _conversation(value: Any, column: str) -> list[dict[str, str]]:
    try:
        return [
            _message(_text(m["role"], "role"), _text(m["content"], "content"))
            for m in _list(value, column)
        ]
    except (KeyError, TypeError, Misfit):
        raise Misfit(column, value, "list of messages with role and content") from None


def hh(row: Row) -> Made:
    """Anthropic/hh-rlhf: two transcripts; a turn starts only behind a blank line."""
    return split_prompt({side: _turns(row[side], side) for side in ("chosen", "rejected")})


def _turns(transcript: Any, column: str) -> list[dict[str, str]]:
    before, *turns = re.split(r"\n\n(Human|Assistant):(?=\s|\Z)", _text(transcript, column))
    if before.strip() or not turns:
        raise Misfit(column, transcript, "transcript that begins with a blank line and 'Human: '")
    roles = ("user" if name == "Human" else "assistant" for name in turns[::2])
    return [_message(role, text.strip()) for role, text in zip(roles, turns[1::2], strict=True)]


def gsm8k(row: Row) -> Made:
    """openai/gsm8k: `answer` is the number without commas, `solution` the text without <<...>>."""
    question = _text(row["question"], "question").strip()
    solution = re.sub("<<.*?>>", "", _text(row["answer"], "answer")).strip()
    number = solution.rpartition("####")[2].strip().replace(",", "")
    if "####" not in solution or not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", number):
        raise Misfit("answer", row["answer"], "text that ends with '#### ' and a number")
    prompt = [_message("user", question)]
    return {"prompt": prompt, "answer": number, "solution": solution, "task": "gsm8k"}


def gsm8k_rollouts(row: Row) -> Made:
    """RLHF-Book/gsm8k-qwen3-0.6B-rollouts: each completion, right or wrong, of a question."""
    question = _text(row["prompt"], "prompt").strip()
    prompt = [_message("system", ROLLOUT_SYSTEM), _message("user", question)]
    completions, rewards = (_list(row[name], name) for name in ("completions", "rewards"))
    if len(completions) != len(rewards):
        raise Misfit("rewards", rewards, f"list of {len(completions)} numbers")
    if any(reward not in (0, 1) for reward in rewards):
        raise Misfit("rewards", rewards, "list of 0 and 1")
    texts = [_text(text, f"completions[{n}]") for n, text in enumerate(completions)]
    return [
        {"prompt": prompt, "completion": [_message("assistant", text)], "label": bool(reward)}
        for text, reward in zip(texts, rewards, strict=True)
    ]


def prm800k(row: Row) -> Made:
    """tasksource/PRM800K: the chosen completion of each step, with its rating.

    A step for which the labeler chose no completion, as all were bad, is the last one: one of its
    bad completions counts. The other completions of a step are alternatives, not further steps. A
    completion that the labeler wrote (phase 1) has no rating and is good; a chosen completion
    without a rating ends the trace before it.
    """
    question = _of(dict, row["question"], "question", "mapping with problem")
    problem = _text(question.get("problem"), "question.problem").strip()
    label = _of(dict, row["label"], "label", "mapping with steps")
    texts: list[str] = []
    ratings: list[int] = []
    for n, step in enumerate(_list(label.get("steps"), "label.steps")):
        where = f"label.steps[{n}]"
        completion, goes_on = _chosen(_of(dict, step, where, "mapping with completions"), where)
        rating = completion.get("rating")
        if rating is None:
            break
        if isinstance(rating, bool) or rating not in (-1, 0, 1):
            raise Misfit(f"a rating of {where}", rating, "-1, 0 or 1")
        text = _text(completion.get("text"), f"a text of {where}").strip()
        if text:
            texts.append(text)
            ratings.append(int(rating))
        if not goes_on:
            break
    if not texts:
        return UNRATED
    return {"prompt": PROBLEM.format(problem), "completions": texts, "labels": ratings}


def _chosen(step: Row, where: str) -> tuple[Row, bool]:
    """Return the completion that counts for a step, and whether the solution went on from it.

    Without one that was chosen or written by the labeler, the first bad completion counts, or {}.
    """
    completions, chosen = step.get("completions") or [], step.get("chosen_completion")
    if chosen is not None:
        if not isinstance(chosen, int) or not 0 <= chosen < len(completions):
            raise Misfit(f"{where}.chosen_completion", chosen, "place of one of its completions")
        return completions[chosen], True
    if human := step.get("human_completion"):
        return {**human, "rating": 1}, True
    bad = [completion for completion in completions if completion.get("rating") == -1]
    return bad[0] if bad else {}, False


def rated_pair(row: Row) -> Made:
    """argilla/ultrafeedback-binarized-preferences-cleaned and HuggingFaceH4's."""
    columns = ARGILLA if ARGILLA[0] in row else H4
    better, worse = (_of(int | float, row[column], column, "number") for column in columns)
    sides = {side: _conversation(row[side], side) for side in ("chosen", "rejected")}
    return split_prompt({**sides, "margin": float(better - worse)})


def book_pairs(row: Row) -> Made:
    """Pairs as the book's code takes them (direct_alignment/data.py): a question and two answers.

    `prompt` is a text; of an answer in messages, the assistant's first one counts.
    """
    prompt = [_message("user", _text(row["prompt"], "prompt"))]
    sides = ("chosen", "rejected")
    return {"prompt": prompt} | {side: [_first_answer(row[side], side)] for side in sides}


def _first_answer(value: Any, column: str) -> dict[str, str]:
    if isinstance(value, str):
        return _message("assistant", value)
    turns = _conversation(value, column)
    return next((m for m in turns if m["role"] == "assistant"), _message("assistant", ""))


def ultrafeedback_openbmb(row: Row) -> Made:
    """openbmb/UltraFeedback: scored completions, from which ranked lists are made."""
    prompt = [_message("user", _text(row["instruction"], "instruction"))]
    scored = []
    for n, completion in enumerate(_list(row["completions"], "completions")):
        where = f"completions[{n}]"
        cells = _of(dict, completion, where, "mapping with response and overall_score")
        response = _text(cells.get("response"), f"{where}.response")
        score = _of(int | float, cells.get("overall_score"), f"{where}.overall_score", "number")
        scored.append({"response": response, "overall_score": float(score)})
    return {"prompt": prompt, "completions": scored}


def messages(row: Row) -> Made:
    """HuggingFaceH4/no_robots, allenai/tulu-3-sft-mixture: the last message answers the others."""
    whole = _conversation(row["messages"], "messages")
    return split_prompt({"completion": whole, "messages": whole})


def alpaca(row: Row) -> Made:
    """tatsu-lab/alpaca, and files as LLaMA-Factory reads them: the question is both its texts."""
    conversation = []
    for n, pair in enumerate(_list(row.get("history") or [], "history")):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Misfit(f"history[{n}]", pair, "list of a question and its answer")
        question, answer = (_text(text, f"history[{n}]") for text in pair)
        conversation += [_message("user", question), _message("assistant", answer)]
    texts = (_text(row["instruction"], "instruction"), _text(row.get("input") or "", "input"))
    conversation.append(_message("user", "\n".join(text for text in texts if text.strip())))
    if "output" in row:
        conversation.append(_message("assistant", _text(row["output"], "output")))
    return _example(row, conversation)


def sharegpt(row: Row) -> Made:
    """Conversations whose turns say `from` and `value`, as those of ShareGPT and LLaMA-Factory."""
    conversation = _messages_of(row["conversations"], "conversations")
    roles = [m["role"] for m in conversation if m["role"] not in ("system", "developer")]
    if roles[:1] == ["assistant"]:
        return OPENED  # the scraped conversation began before
    return _example(row, conversation)


def openai(row: Row) -> Made:
    """Rows as OpenAI's fine-tuning takes them: messages with tools, or two outputs of an input."""
    if "messages" in row:
        return _example(row, _messages_of(row["messages"], "messages"))
    request = _of(dict, row["input"], "input", "mapping with messages")
    sides = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    conversation = _messages_of(request.get("messages"), "input.messages")
    return _example({**sides, "tools": request.get("tools")}, conversation)


def dpo_pairs(row: Row) -> Made:
    """Intel/orca_dpo_pairs and others: a question in text, and two answers or conversations."""
    question = next((row[name] for name in ("prompt", "question") if row.get(name)), [])
    if isinstance(question, str):
        question = [_message("user", question)]
    return _example(row, _messages_of(question, "prompt"))


def _example(row: Row, conversation: list[Row]) -> Made:
    """Return the example of a conversation, with its prompt split off.

    It is the pair of the row's `chosen` and `rejected`, which go on with the conversation or hold
    it themselves; or else the conversation's last message is the answer, with the row's `kto_tag`
    as its label. The row's `system` is its first message, unless it has another one.
    """
    if any(map(_says_nothing, conversation)):
        return BLANK
    more: Row = {"tools": _tools(row["tools"])} if "tools" in row else {}
    conversation = _below_system(row.get("system"), conversation)
    if "chosen" in row:
        question = next((m for m in conversation if m["role"] == "user"), None)
        first = conversation[0] if conversation else {"role": "user"}
        system = first["content"] if first["role"] == "system" else None
        sides = {}
        for side in ("chosen", "rejected"):
            value = row[side]
            value = [_message("assistant", value)] if isinstance(value, str) else value
            turns = _messages_of([value] if isinstance(value, dict) else value, side)
            holds_conversation = question in turns or question is None
            whole = turns if holds_conversation else conversation + turns
            sides[side] = _below_system(system, whole)
        return split_prompt({**sides, **more})
    if "kto_tag" in row:
        if not isinstance(row["kto_tag"], bool):
            raise Misfit("kto_tag", row["kto_tag"], "true or false")
        more["label"] = row["kto_tag"]
    return split_prompt({"completion": conversation, **more})


def _says_nothing(message: Row) -> bool:
    """Whether a message of the user or the assistant is empty, and calls no tool."""
    is_spoken = message["role"] in ("user", "assistant")
    return is_spoken and not message["content"].strip() and not message.get("tool_calls")


def _below_system(system: Any, conversation: list[Row]) -> list[Row]:
    """Return a conversation below a text of the system, unless it has one of its own."""
    text = _text(system or "", "system")
    if not text.strip() or (conversation and conversation[0]["role"] == "system"):
        return conversation
    return [_message("system", text), *conversation]


def _messages_of(turns: Any, column: str) -> list[Row]:
    """Return the messages of a column's turns."""
    turns = _of(list, turns, column, "list of turns")
    return [_message_of(turn, f"{column}[{n}]") for n, turn in enumerate(turns)]


def _message_of(turn: Any, where: str) -> Row:
    """Return the message of a turn, which says `from` and `value`, or `role` and `content`."""
    turn = _of(dict, turn, where, "turn with from and value, or role and content")
    speaker = turn.get("from") or turn.get("role")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise Misfit(f"the speaker of {where}", speaker, f"one of {', '.join(SPEAKERS)}")
    if turn.get("weight") == 0:
        raise WrongRow(
            f"{where} has weight 0, which is not read; remove the weights, and with "
            "dataset.turns: last only last answers are trained"
        )
    text = turn.get("value") if turn.get("from") else turn.get("content")
    calls = turn.get("tool_calls")
    if speaker == "function_call":
        parsed = _parsed(text, where)
        calls, text = parsed if isinstance(parsed, list) else [parsed], ""
    message = _message(SPEAKERS[speaker], _joined(text, where, bool(calls)))
    if calls:
        message["tool_calls"] = [_call(call, where) for call in _list(calls, where)]
    return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key)}


def _joined(content: Any, where: str, calls: bool) -> str:
    """Return the text of a message, which OpenAI may write in parts; None if it calls tools."""
    if content is None and calls:
        return ""
    if isinstance(content, list):
        parts = [_of(dict, part, where, "part of a text") for part in content]
        content = "".join(_text(part.get("text"), f"a part of {where}") for part in parts)
    return _text(content, f"the text of {where}")


def _call(call: Any, where: str) -> Row:
    """Return a call of a tool as chat templates read it, with its arguments as a mapping."""
    from trl.trainer.utils import remove_none_values  # of keys that Arrow added

    function = _of(dict, call, where, "call of a tool")
    function = function.get("function") or function
    arguments = _parsed(function.get("arguments"), f"the arguments of a call in {where}")
    name = _text(function.get("name"), f"the name of a call in {where}")
    content = {"name": name, "arguments": remove_none_values(arguments)}
    number = {"id": call["id"]} if call.get("id") else {}
    return {**number, "type": "function", "function": content}


def _tools(value: Any) -> list[Row] | None:
    """Return tools as chat templates read them; None: there are none."""
    from trl.trainer.utils import remove_none_values  # of keys that Arrow added

    tools = _parsed(value, "tools") if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Misfit("tools", value, "list of tools")
    tools = remove_none_values(tools)
    wrapped = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    return wrapped or None


def _parsed(value: Any, where: str) -> Any:
    """Return what a text of JSON says; what is no text, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise Misfit(where, value, "JSON") from None


_RATED = {**PAIR, "margin": "float64"}
_PAIRS = ("pairs", "prompts")
_ANSWERS = {"prompt": MESSAGES, **dict.fromkeys(("answer", "solution", "task"), "string")}
_JUDGED = {"prompt": MESSAGES, "completion": MESSAGES, "label": "bool"}
_TRACES = {"prompt": "string", "completions": ["string"], "labels": ["int64"]}
_CHAT_PAIR = {**dict.fromkeys(("prompt", "chosen", "rejected"), CHAT), **TOOLS}
_CHAT_ANSWER = {**dict.fromkeys(("prompt", "completion"), CHAT), **TOOLS}
_LEARNED, _LABELED = ("prompt/completion", "messages", "prompts"), ("unpaired", "outcomes")
_WHOLE = {"prompt": MESSAGES, "completion": MESSAGES, "messages": MESSAGES}


def _alpaca(needs: tuple[str, ...], makes: dict[str, Any], shapes: tuple[str, ...]) -> Reader:
    takes = ("input", "system", "history")
    return Reader(alpaca, ("instruction", *needs), makes, shapes, takes=takes, is_detected=True)


def _sharegpt(needs: tuple[str, ...], makes: dict[str, Any], shapes: tuple[str, ...]) -> Reader:
    takes = ("system", "tools")
    needs = ("conversations", *needs)
    return Reader(sharegpt, needs, makes, shapes, takes=takes, is_detected=True)


def _openai(needs: tuple[str, ...], is_detected: bool) -> Reader:
    takes = ("tools",)
    return Reader(openai, needs, _CHAT_ANSWER, _LEARNED, takes=takes, is_detected=is_detected)


READERS: dict[str, tuple[Reader, ...]] = {
    # prompt/completion: the chosen answer
    "hh": (Reader(hh, ("chosen", "rejected"), PAIR, (*_PAIRS, "prompt/completion")),),
    "book_pairs": (Reader(book_pairs, ("prompt", "chosen", "rejected"), PAIR, _PAIRS),),
    # prompt/completion with columns: {completion: solution}
    "gsm8k": (Reader(gsm8k, ("question", "answer"), _ANSWERS, ("prompts", "prompt/completion")),),
    "gsm8k_rollouts": (
        Reader(
            read=gsm8k_rollouts,
            needs=("prompt", "completions", "rewards"),
            makes=_JUDGED,
            shapes=("outcomes", "unpaired"),
        ),
    ),
    "prm800k": (
        Reader(
            read=prm800k,
            needs=("question", "label"),
            makes=_TRACES,
            shapes=("traces",),
            lines=("phase1_{}.jsonl", "phase2_{}.jsonl"),
        ),
    ),
    "ultrafeedback": (
        Reader(rated_pair, ("chosen", "rejected", *ARGILLA), _RATED, _PAIRS),
        Reader(rated_pair, ("chosen", "rejected", *H4), _RATED, _PAIRS),
        Reader(
            read=ultrafeedback_openbmb,
            needs=("instruction", "completions"),
            makes={"prompt": MESSAGES, "completions": SCORED},
            shapes=("ranked lists", "prompts"),
        ),
    ),
    "messages": (
        Reader(messages, ("messages",), _WHOLE, ("prompt/completion", "messages", "prompts")),
    ),
    "alpaca": (
        _alpaca(("chosen", "rejected"), PAIR, _PAIRS),
        _alpaca(("output", "kto_tag"), _JUDGED, _LABELED),
        _alpaca(("output",), {"prompt": MESSAGES, "completion": MESSAGES}, _LEARNED),
    ),
    "sharegpt": (
        _sharegpt(("chosen", "rejected"), _CHAT_PAIR, _PAIRS),
        _sharegpt(("kto_tag",), {**_CHAT_ANSWER, "label": "bool"}, _LABELED),
        _sharegpt((), _CHAT_ANSWER, _LEARNED),
    ),
    "openai": (
        Reader(
            read=openai,
            needs=("input", "preferred_output", "non_preferred_output"),
            makes=_CHAT_PAIR,
            shapes=_PAIRS,
            is_detected=True,
        ),
        _openai(("messages", "parallel_tool_calls"), is_detected=True),
        _openai(("messages",), is_detected=False),
    ),
    "dpo_pairs": (
        Reader(
            read=dpo_pairs,
            needs=("question", "chosen", "rejected"),
            makes=_CHAT_PAIR,
            shapes=_PAIRS,
            takes=("system", "tools"),
            is_detected=True,
        ),
        Reader(
            read=dpo_pairs,
            needs=("chosen", "rejected"),
            makes=_CHAT_PAIR,
            shapes=_PAIRS,
            takes=("prompt", "system", "tools"),
        ),
    ),
}
