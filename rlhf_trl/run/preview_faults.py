"""Faults of training data that a run would learn from: a sentence each, with its rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_trl.data.examples import SIDES
from rlhf_trl.data.fitting import rows_named
from rlhf_trl.data.preview import CUT, DROPPED, IDENTICAL, TOO_LONG, Measured
from rlhf_trl.run.fed import Fed

# What chat templates write between messages.
CHAT_MARKS = re.compile(
    r"<\|[a-z][a-z_]{1,30}\|>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>|</s>"
)
SHORTEST = 12  # letters of a prompt that an answer does not repeat by chance


def faulty_rows(
    rows: Sequence[Mapping[str, Any]],
    measured: Sequence[Measured],
    args: Any,
    context: int | None = None,
) -> dict[str, list[int]]:
    """Return what is wrong with rows, as a predicate with a remedy, and the places of the rows.

    Args:
        rows: the N rows to train on.
        measured: the same N rows in tokens, with what the run does to each.
        args: TRL's config.
        context: how many tokens the model reads at most; None: any number.
    """
    limit = getattr(args, "max_length", None)
    beyond = f"are longer than the model's context of {context} tokens; lower max_length"
    by_fate = _faults_by_fate(args)
    repeated = "have an answer that begins with the whole prompt; remove it there"
    marked = "spell out chat marks, which the template writes itself; write messages without them"
    places: dict[str, list[int]] = {}
    for place, (row, its_measure) in enumerate(zip(rows, measured, strict=True)):
        faults = [by_fate[its_measure.fate]] if its_measure.fate in by_fate else []
        length = its_measure.prompt + max(its_measure.answers.values(), default=0)
        if its_measure.answers and context and min(length, limit or length) > context:
            faults.append(beyond)
        question = _text(row["prompt"])
        answers = [_text(row[side]) for side in SIDES if side in row]
        if len(question) >= SHORTEST and any(text.startswith(question) for text in answers):
            faults.append(repeated)
        is_chat = isinstance(row["prompt"], list)
        if is_chat and any(CHAT_MARKS.search(text) for text in (question, *answers)):
            faults.append(marked)
        for fault in faults:
            places.setdefault(fault, []).append(place)
    return places


def _faults_by_fate(args: Any) -> dict[str, str]:
    """Return what is wrong with a row, by what the run does to it; `args` are TRL's config."""
    limit = f"max_length {getattr(args, 'max_length', None)}"
    cuts_end = getattr(args, "overlong", None) == "cut_completion"
    if hasattr(args, "truncation_mode") and not getattr(args, "overlong", None):
        cuts_end = args.truncation_mode == "keep_start"
    lost = "the end of their answer" if cuts_end else "the start of their prompt"
    return {
        CUT: f"lose {lost} to {limit}; raise it, or shorten them",
        DROPPED: f"are dropped, as {limit} leaves nothing to learn from; raise it",
        IDENTICAL: f"have the same answer twice once {limit} has cut them; raise it",
        TOO_LONG: "have a prompt that leaves no room for an answer, which stops the run; shorten "
        "it, or lower max_completion_length",
    }


def unbalanced_labels(labels: Sequence[bool], parameters: Mapping[str, float]) -> Iterator[str]:
    """Yield what is wrong with the weights of KTO's two labels, by their shares.

    All desirable answers are to count as much as all undesirable ones, or up to a third more, if
    there are not equally many: equation 8 of https://huggingface.co/papers/2402.01306.

    Args:
        labels: those of the rows that are trained on.
        parameters: the algorithm's, with both weights.
    """
    desirable = sum(labels)
    undesirable = len(labels) - desirable
    weights = [parameters[f"{name}_weight"] for name in ("desirable", "undesirable")]
    if desirable == undesirable or 0 in (desirable, undesirable, *weights):
        return
    ratio = desirable * weights[0] / (undesirable * weights[1])
    if not 1 <= ratio <= 1.33:
        yield (
            f"{desirable} of {len(labels)} training rows are desirable, which count {ratio:.2f} "
            "times as much as the others (KTO's paper: 1 to 1.33 times); write a desirable_weight "
            f"from {weights[0] / ratio:.2f} to {1.33 * weights[0] / ratio:.2f}"
        )


def _text(cell: Any) -> str:
    """Return a text, or that of the last message, without white space around it."""
    text = cell if isinstance(cell, str) else (cell[-1].get("content") or "" if cell else "")
    return text.strip() if isinstance(text, str) else ""


def counted(faults: Mapping[str, Sequence[int]], count: int) -> list[str]:
    """Return faults as sentences: how many of `count` training rows they are about, and which."""
    return [
        f"{len(places)} of {count} training rows {fault}{rows_named(places)}"
        for fault, places in faults.items()
    ]


def faults_of_tokens(
    examples: Sequence[Sequence[Fed]], tokenizer: Any, ends: set[int], limit: int | None
) -> Iterator[str]:
    """Yield what is wrong with the tokens of examples as a trainer reads them.

    Args:
        examples: their texts.
        tokenizer: that made the tokens.
        ends: the tokens at which the model stops; none: it generates nothing.
        limit: tokens of a text at most, where it may be cut; None: none is.
    """
    texts = [text for example in examples for text in example]
    whole = [text for text in texts if limit is None or len(text.ids) < limit]
    learned = [[i for i, t in zip(text.ids, text.trained, strict=True) if t] for text in whole]
    endless = sum(bool(ids) and not ends & {*ids} for ids in learned)
    if ends and endless:
        names = " or ".join(sorted(tokenizer.decode([token]) for token in ends))
        yield (
            f"EOS is missing: {endless} of the first {len(texts)} texts do not train the model to "
            f"stop, for which it writes {names}; end the template's answers, or the texts, with it"
        )
    split: dict[str, int] = {}
    for text in texts:
        for mark in {*CHAT_MARKS.findall(tokenizer.decode(text.ids))}:
            size = len(tokenizer(mark, add_special_tokens=False)["input_ids"])
            if size > 1:
                split[mark] = size
    if split:
        marks = ", ".join(f"{mark} ({size} tokens)" for mark, size in sorted(split.items()))
        yield (
            f"the tokenizer splits marks of a chat template: {marks}; take the template of this "
            "model's family"
        )
