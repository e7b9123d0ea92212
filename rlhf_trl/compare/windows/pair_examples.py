"""The fixed data of windows without a rollout: pairs, labeled completions, ranked ones, steps."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from rlhf_trl.compare import measure, models
from rlhf_trl.compare.trainers import EXPERIMENTAL, STEP
from rlhf_trl.compare.windows.batches import PolicyBatch
from rlhf_trl.reward_models.reader import pad_texts
from rlhf_trl.tiny.model import END, PAD
from rlhf_trl.tiny.tokenizer import build_tokenizer

PAIRS = 4
"""Pairs of a usual micro-batch; KTO and SFT, which have none, take twice as many examples."""

RANKED = 3  # completions in a list of K-wise comparisons


MADE = ("kwise", "orm", "prm", "prm/code")
"""Kinds of windows that are made by hand: of reward models for which TRL has no collator."""


def _text(length: int, *key: Any) -> str:
    """Return a text of random letters, the same for the same key."""
    rng = models.drawn(*key)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))


_EVEN_LABELS = (1, 0)

_UNEVEN_LABELS = (1, 0, 1, 1, 0, 1, 0, 1)
"""KTO's labels in turn: as many chosen as rejected completions, or 5 to 3."""


def fixed_examples(
    trainer: str, batch: PolicyBatch, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the fixed data of a window, in the columns that a trainer reads.

    There are 4 * PAIRS examples, enough for two micro-batches of single completions, each of which
    takes 2 * PAIRS. KTO without prompts has fewer, see `_without_prompts`.

    Args:
        trainer: the name of the stock trainer, "" for plain pairs.
        batch: the window, which says how long the texts are.
        columns: what is not as usual. "margin" is a further column; the words in FORMATS are no
            columns, but ways of writing the texts, see `_in_format`.
    """
    pairs = [_random_pair(number, trainer, batch) for number in range(4 * PAIRS)]
    if "margin" not in columns:
        for pair in pairs:
            del pair["margin"]
    for text_format in set(FORMATS).intersection(columns):
        pairs = [_in_format(text_format, number, pair) for number, pair in enumerate(pairs)]
    if "implicit" in columns:
        return _without_prompts(trainer, pairs)
    if trainer == "SFTTrainer":
        return [_with_completion(pair, "chosen") for pair in pairs]
    if trainer == "KTOTrainer":
        # the irregular batches have uneven lengths and uneven labels, the others have neither
        return _labeled(pairs, _UNEVEN_LABELS if batch.ragged else _EVEN_LABELS)
    return pairs


def _without_prompts(trainer: str, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the data of pairs whose texts begin with the prompt, in the columns of a trainer."""
    if trainer == "SFTTrainer":
        return [{"text": pair["chosen"]} for pair in pairs]
    if trainer == "KTOTrainer":
        # Of each pair TRL makes two examples, and it puts those of all chosen completions first.
        # The 2 * PAIRS examples of so few pairs fit into one micro-batch, which therefore has
        # chosen and rejected completions.
        return pairs[:PAIRS]
    return pairs


_FULL_PROMPTS = {7: 22, 12: 30}
"""Letters of prompts that alone fill a max_length of 30 exactly, by number: as a chat, as a text.

The three turns of a chat have eight further tokens.
"""


def _random_pair(number: int, trainer: str, batch: PolicyBatch) -> dict[str, Any]:
    """Return a prompt, a chosen and a rejected completion of random letters, and a margin."""
    rng = models.drawn("lengths", number)
    chosen_length = rng.randint(1, 40) if batch.ragged else 8
    rejected_length = rng.randint(1, 40) if batch.ragged else 8
    prompt_length = rng.randint(3, 16) if batch.ragged else 5
    if batch.fields and trainer not in EXPERIMENTAL and number % 5 == 2:
        prompt_length = _FULL_PROMPTS.get(number, prompt_length + 30)
    return {
        "prompt": _text(prompt_length, "prompt", number),
        "chosen": _text(chosen_length, "chosen", number),
        "rejected": _text(rejected_length, "rejected", number),
        "margin": rng.random(),
    }


def _labeled(pairs: Sequence[Mapping[str, Any]], pattern: Sequence[int]) -> list[dict[str, Any]]:
    """Return one labeled completion of each pair, so that neighbors never share a prompt.

    The pattern, which repeats, has 1 for the chosen completion and 0 for the rejected one.
    """
    return [
        _with_completion(pair, "chosen" if label else "rejected") | {"label": label == 1}
        for pair, label in zip(pairs, cycle(pattern), strict=False)
    ]


def _with_completion(pair: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Return one completion of a pair, "chosen" or "rejected", as an example of its own."""
    shared = {name: pair[name] for name in ("prompt", _TEMPLATE_VALUES) if name in pair}
    return shared | {"completion": pair[side]}


def made_kind(trainer_arguments: Mapping[str, Any]) -> str:
    """Return which of MADE a trainer with these arguments needs, "" for none."""
    name = trainer_arguments.get("algorithm", "")
    kinds = f"{name}/{trainer_arguments.get('formulation')}", name
    return next((kind for kind in kinds if kind in MADE), "")


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


_Examples = list[dict[str, Any]]

_Text = dict[str, list[int]]
"""What is collated for a completion: `input_ids`, and `labels`, -100 where nothing is learned."""


def by_hand(kind: str, batch: PolicyBatch) -> tuple[_Examples, list[measure.Batch]]:
    """Return the examples of a window of MADE, and the micro-batches that they should become."""
    examples: _Examples = []
    texts: list[_Text] = []
    pairs = fixed_examples("", batch, ())[: batch.rows // 2 * batch.accumulation]
    for number, pair in enumerate(pairs):
        if kind == "kwise":
            pair_examples, pair_texts = _ranked(number, pair)
        elif kind == "orm":
            pair_examples, pair_texts = _judged(pair)
        else:
            pair_examples, pair_texts = _stepwise(kind, number, pair)
        examples += pair_examples
        texts += pair_texts
    # texts are counted, not examples, as an example of "kwise" has three
    size = len(texts) // batch.accumulation
    micro_batches = [texts[first : first + size] for first in range(0, len(texts), size)]
    return examples, [pad_texts(micro_batch, PAD) for micro_batch in micro_batches]


def _ranked(number: int, pair: Mapping[str, Any]) -> tuple[_Examples, list[_Text]]:
    """Return a list of RANKED completions, the best first, as one example, and their texts."""
    completions = [pair["chosen"], pair["rejected"], _text(8, "third", number)]
    texts = [
        _text_of_completion(pair["prompt"], completion, label)
        for completion, label in zip(completions, (1, 0, 0), strict=True)
    ]
    return [{"prompt": pair["prompt"], "ranked": completions}], texts


def _judged(pair: Mapping[str, Any]) -> tuple[_Examples, list[_Text]]:
    """Return the completions of a pair as examples of an outcome model, and their texts."""
    examples, texts = [], []
    for side in ("chosen", "rejected"):
        is_right = side == "chosen"
        examples.append({"prompt": pair["prompt"], "completion": pair[side], "label": is_right})
        texts.append(_text_of_completion(pair["prompt"], pair[side], int(is_right)))
    return examples, texts


def _stepwise(kind: str, number: int, pair: Mapping[str, Any]) -> tuple[_Examples, list[_Text]]:
    """Return the completions of a pair as examples of a process model, and their texts."""
    examples, texts = [], []
    for side, completion in enumerate((pair["chosen"], pair["rejected"])):
        steps, grades = _graded_steps(completion, number, side)
        examples.append({"prompt": pair["prompt"], "completions": steps, "labels": grades})
        texts.append(_text_of_steps(kind, pair["prompt"], steps, grades))
    return examples, texts


def _text_of_completion(prompt: str, completion: str, label: int) -> _Text:
    """Return token ids, and the label on each token of the completion and on its end token."""
    tokenizer = build_tokenizer()  # a token per character
    start = encoded(tokenizer, prompt)
    ids = [*encoded(tokenizer, completion), END]
    return {"input_ids": start + ids, "labels": [-100] * len(start) + [label] * len(ids)}


def _text_of_steps(kind: str, prompt: str, steps: Sequence[str], grades: Sequence[int]) -> _Text:
    """Return token ids, and the label of each step on its separator."""
    tokenizer = build_tokenizer()
    start = encoded(tokenizer, prompt)
    ids = encoded(tokenizer, "".join(step + STEP for step in steps))
    labels = _step_labels(kind, steps, grades)
    return {"input_ids": start + ids, "labels": [-100] * len(start) + labels}


def _graded_steps(completion: str, number: int, side: int) -> tuple[list[str], list[int]]:
    """Cut a completion into steps of five characters, and grade each by -1, 0 or 1 at random."""
    steps = [completion[n : n + 5] for n in range(0, len(completion), 5)]
    draws = [models.drawn("step", number, side, n) for n in range(len(steps))]
    return steps, [draw.choice((-1, 0, 1)) for draw in draws]


def _step_labels(kind: str, steps: Sequence[str], grades: Sequence[int]) -> list[int]:
    """Return the label of each token: a step's class on its separator, -100 on its text."""
    classes = {-1: 0, 0: 1, 1: 2} if kind == "prm/code" else {-1: 0, 0: -100, 1: 1}
    labels: list[int] = []
    for step, grade in zip(steps, grades, strict=True):
        labels += [-100] * len(step)
        labels.append(classes[grade])
    return labels


def _in_format(text_format: str, number: int, pair: dict[str, Any]) -> dict[str, Any]:
    """Return a pair with its texts written in another format that TRL takes.

    Args:
        text_format: one of FORMATS.
            "implicit": each answer begins with the prompt, which has no column of its own.
            "chat": prompt and answers are messages; the prompt has three turns. A further column
            gives the chat template another first token for each pair.
            "ended": texts that are hard to tokenize. The prompt ends with "<", and the answers
            begin with "think>": "<think>" would be a single token. Padding tokens stand in the
            answers, and end tokens in a third of them.
        number: the number of the pair.
        pair: the prompt, and the chosen and the rejected answer, as texts.
    """
    prompt = pair["prompt"]
    chosen = pair["chosen"]
    rejected = pair["rejected"]
    if text_format == "implicit":
        return {"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}
    if text_format == "chat":
        # the first two letters of the prompt become turns of their own
        turns = [_message("user", prompt[0]), _message("assistant", prompt[1])]
        return pair | {
            "prompt": [*turns, _message("user", prompt[2:])],
            "chosen": [_message("assistant", chosen)],
            "rejected": [_message("assistant", rejected)],
            _TEMPLATE_VALUES: {"bos_token": prompt[0]},
        }
    return pair | {
        "prompt": f"{prompt}<",
        "chosen": _hard_to_tokenize(chosen, has_end=number % 3 == 0),
        "rejected": _hard_to_tokenize(rejected, has_end=(number + 1) % 3 == 0),
    }


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _hard_to_tokenize(answer: str, has_end: bool) -> str:
    """Return an answer in the format "ended", see `_in_format`."""
    end = "<|end|>" if has_end else ""
    return f"think>{answer[:4]}<|pad|>{answer[4:]}{end}"


FORMATS = ("chat", "ended", "implicit")

_TEMPLATE_VALUES = "chat_template_kwargs"
"""A column that TRL knows: variables of the chat template, by name."""
