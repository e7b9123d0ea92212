"""Held-out pairs and answers of one's own data, which `rlhf-trl evaluate` lets models read."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import _tokenize, common_prefix_length, is_conversational

from rlhf_trl.algorithms import Preference
from rlhf_trl.data.blocks import AnswersToLearn, FileData
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.fitting import shortened
from rlhf_trl.evaluation.held_out import Scores
from rlhf_trl.evaluation.likelihoods import (
    Reading,
    Text,
    answer_scores,
    labeled_scores,
    pair_scores,
    read,
)
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.rollouts.generate import template_arguments
from rlhf_trl.run.config import Loaded

Row = Mapping[str, Any]
# By side, what a model makes of each row's text; None: training leaves the row out.
ReadingsBySide = list[list[Reading | None]]


class _Reference(NamedTuple):
    """What the model that a run started from has read, and what it made of that."""

    texts: list[list[Text] | None]  # by row, one for each side
    readings: ReadingsBySide


class HeldRows:
    """The held-out rows of a run on data of one's own, and how its trainer reads them.

    `noun` says what they are: pairs, labeled answers or answers. None: rows without completions,
    or questions of the gym, which the answers' own scores tell more about.
    """

    def __init__(self, loaded: Loaded, data: Examples, rows: Sequence[Row]):
        self._loaded = loaded
        self._rows = rows
        self._sides: tuple[str, ...] = ()  # the columns of the completions to read
        self.noun: str | None = None
        self._reference: _Reference | None = None
        if data.tasks is not None or not isinstance(loaded.own.dataset, FileData):
            return
        if not rows[0].keys() & {"chosen", "completion"}:
            return
        if isinstance(loaded.own.dataset, AnswersToLearn):
            self.noun, self._sides = "answers", ("completion",)
        elif loaded.row is not None and isinstance(loaded.row.row, Preference):
            paired = "chosen" in rows[0]
            self.noun = "pairs" if paired else "labeled answers"
            self._sides = ("chosen", "rejected") if paired else ("completion",)

    @property
    def compares_with_start(self) -> bool:
        """Whether the run compares its policy with the model that it started from."""
        return self.noun not in (None, "answers") and self._loaded.row.row.reference

    def read_by_start(self, policy: Policy) -> None:
        """Let the model that a run started from read the rows."""
        texts = self._texts(policy.processing_class)
        self._reference = _Reference(texts, self._read(policy, texts))

    def scores(self, policy: Policy) -> tuple[Scores, dict[str, list[int]]]:
        """Return the scores of a model on each row, and the weights of the rows in their means.

        Both map the name of a score to a value for each row. A score without weights has the plain
        mean. A model that reads other tokens than the reference has no reward relative to it.
        """
        texts = self._texts(policy.processing_class)
        readings = self._read(policy, texts)
        if self.noun == "answers":
            scores, counts = answer_scores(readings[0])
            return scores, dict.fromkeys(scores, counts)  # a row weighs as much as it has tokens
        reference_readings = None
        if self._reference is not None and self._reference.texts == texts:
            reference_readings = self._reference.readings
        resolved = self._loaded.row  # the algorithm's row, and the config's values of parameters
        if self.noun == "labeled answers":  # which have one side
            labels = [row["label"] for row in self._rows]
            of_reference = None if reference_readings is None else reference_readings[0]
            return labeled_scores(resolved, readings[0], of_reference, labels), {}
        # only the configs of algorithms that read nll_weight have the field
        has_nll_weight = "nll_weight" in resolved.row.trainer_reads
        nll_weight = self._loaded.trl.nll_weight if has_nll_weight else 0.0
        chosen, rejected = readings
        return pair_scores(resolved, chosen, rejected, reference_readings, nll_weight), {}

    def _read(self, policy: Policy, texts: list[list[Text] | None]) -> ReadingsBySide:
        """Let a model read the texts of each side."""
        return [
            read(policy, [sides and sides[number] for sides in texts])
            for number in range(len(self._sides))
        ]

    def _texts(self, tokenizer: Any) -> list[list[Text] | None]:
        """Return the texts of each row, one for each side; None where training leaves it out."""
        return [
            answer_text(tokenizer, row, self._loaded)
            if self.noun == "answers"
            else compared_texts(tokenizer, row, self._sides, self._loaded.trl)
            for row in self._rows
        ]


def compared_texts(tokenizer: Any, row: Row, sides: Sequence[str], args: Any) -> list[Text] | None:
    """Return prompt and completion for each side of a row, of the tokens that TRL makes of them.

    They are shortened as in training; None: the row is left out there.
    """
    prompt, texts, _ = tokens_of(tokenizer, row, sides)
    completions = [ids[len(prompt) :] for ids in texts]
    fitting = shortened(prompt, completions, args.max_length, args.overlong)
    if fitting is None:
        return None
    prompt, completions = fitting
    if len(completions) == 2 and completions[0] == completions[1]:
        return None  # a pair without contrast, which training drops as `fitting.fit` does
    return [Text(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in completions]


def answer_text(tokenizer: Any, row: Row, loaded: Loaded) -> list[Text] | None:
    """Return prompt and answer of a row as one text, of the tokens that SFTTrainer makes of them.

    The text is in a list of one, as `compared_texts` returns a list. The tokens that count are
    those of the answer, or with `dataset.turns: all` those of each turn of the assistant. None:
    `max_length` cuts off all tokens that count, so that the row trains nothing.
    """
    args = loaded.trl
    options: dict[str, Any] = {}
    # tasks of the gym have a single turn, and no such field
    all_turns = getattr(loaded.own.dataset, "turns", "last") == "all"
    if all_turns:
        options["return_assistant_tokens_mask"] = True
        # a template without marks of what the assistant says is replaced by TRL's version of it
        if not has_generation_markers(tokenizer.chat_template):
            options["chat_template"] = get_training_chat_template(tokenizer)
    prompt, (ids,), (assistant_mask,) = tokens_of(tokenizer, row, ("completion",), **options)
    if all_turns:
        counted = [bool(is_assistant) for is_assistant in assistant_mask]
    else:
        counted = [place >= len(prompt) for place in range(len(ids))]
    if args.max_length is not None:
        within_limit = slice(args.max_length)
        if args.truncation_mode == "keep_end":
            within_limit = slice(-args.max_length, None)
        ids, counted = ids[within_limit], counted[within_limit]
    # the first token of a text is predicted from nothing, so it never counts
    return [Text(ids, counted)] if any(counted[1:]) else None


def tokens_of(
    tokenizer: Any, row: Row, sides: Sequence[str], **options: Any
) -> tuple[list[int], list[list[int]], list[list[int] | None]]:
    """Tokenize the prompt of a row alone, and with the completion of each side, as TRL does.

    The completion starts at the first token that differs from those of the prompt alone, as in TRL:
    some chat templates end a prompt alone with more than they write before a completion.

    Args:
        tokenizer: the model's.
        row: its prompt, completions and template arguments.
        sides: the columns of the completions.
        options: further arguments of the chat template.

    Returns:
        The ids of the prompt. A list of the ids of prompt and completion, for each side. A list of
        masks, for each side: 1 on what the assistant says; None instead of a mask unless the
        options ask for it.
    """
    template_options = {**template_arguments(row), **options}
    prompt_options = {**template_options, "add_generation_prompt": True}
    prompt_options.pop("return_assistant_tokens_mask", None)  # a prompt alone has no such turn
    prompt = _tokenize(tokenizer, row["prompt"], **prompt_options)["input_ids"]
    texts, masks = [], []
    for side in sides:
        completion = row[side]
        if not is_conversational(row) and not completion.endswith(tokenizer.eos_token):
            completion += tokenizer.eos_token
        encoded = _tokenize(tokenizer, row["prompt"] + completion, **template_options)
        texts.append(encoded["input_ids"])
        masks.append(encoded.get("assistant_masks"))
    completion_start = min(common_prefix_length(prompt, ids) for ids in texts)
    return prompt[:completion_start], texts, masks
