"""Readers of published data sets: pure functions that make examples of one of their rows."""

import json
import re
from collections.abc import Callable
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
    texts = (cell[-1]["content"] if isinstance(cell, list) and cell else cell for cell in cells)
    return not all(text and text.strip() for text in texts)


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


_RATED = {**PAIR, "margin": "float64"}
_PAIRS = ("pairs", "prompts")
_ANSWERS = {"prompt": MESSAGES, **dict.fromkeys(("answer", "solution", "task"), "string")}
_JUDGED = {"prompt": MESSAGES, "completion": MESSAGES, "label": "bool"}
_TRACES = {"prompt": "string", "completions": ["string"], "labels": ["int64"]}
_WHOLE = {"prompt": MESSAGES, "completion": MESSAGES, "messages": MESSAGES}
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
}
