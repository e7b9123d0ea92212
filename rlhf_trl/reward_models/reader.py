"""What a reward model sees of a text, and what it says of it: the same in training and as a reward.

A comparison model (Bradley-Terry, K-wise) scores a whole text, as RewardTrainer feeds it; an
outcome model every token of the completion; a process model the last token of every step.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file
from trl.trainer.utils import pad

from rlhf_trl import algorithms
from rlhf_trl.data.answers import completion_text
from rlhf_trl.data.steps import check_step_split, split_steps
from rlhf_trl.errors import InputError

FILE = "reward_model.json"  # beside the weights of every model that is trained here
CLASSES = (-1, 0, 1)  # bad, neutral, good, in the order of a process model's logits
AGGREGATES = {"orm": ("mean", "last"), "prm": ("min", "last", "product")}  # the first: the default


def outputs_of(algorithm: str, formulation: str) -> int:
    """Return how many numbers the head of a row's reward model gives for a token, or a text."""
    row = algorithms.formulation(algorithm, formulation, algorithms.RewardModel)
    return len(CLASSES) if row.loss == "process" else 1


@dataclass(frozen=True)
class Encoded:
    """A text for a reward model."""

    ids: list[int]  # token ids, without padding
    # which tokens' outputs are read; empty for a comparison model, which has one output per text
    places: list[int]


@dataclass(frozen=True)
class Reader:
    """How a reward model, of a row of the table, reads texts and what its outputs mean.

    In a process model's text `step_separator` ends each step; `step_split`, a regular expression,
    cuts a completion into steps.
    """

    algorithm: str
    formulation: str = "chapter"
    step_separator: str | None = None
    step_split: str | None = None

    def __post_init__(self):
        algorithms.formulation(self.algorithm, self.formulation, algorithms.RewardModel)
        if self.algorithm != "prm":
            return
        if not (isinstance(self.step_separator, str) and isinstance(self.step_split, str)):
            raise InputError(
                f"step_separator is {self.step_separator!r} and step_split {self.step_split!r}, "
                "but a process model needs both: what ends a step, and what cuts a text into steps."
            )
        check_step_split(self.step_split)

    @property
    def num_labels(self) -> int:
        """Outputs per token, or per text."""
        return outputs_of(self.algorithm, self.formulation)

    @property
    def per_token(self) -> bool:
        """Whether the model scores tokens, as outcome and process models do, not whole texts."""
        return self.algorithm in AGGREGATES

    @property
    def names(self) -> tuple[str, ...]:
        """The scores that a text gets; the first is the usual one."""
        names = AGGREGATES.get(self.algorithm, ("score",))
        return names[::-1] if (self.algorithm, self.formulation) == ("orm", "code") else names

    def save(self, folder: str | Path) -> None:
        """Write `reward_model.json`, from which `read` makes an equal reader."""
        content = {**asdict(self), "num_labels": self.num_labels}
        (Path(folder) / FILE).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, name: str | Path) -> "Reader":
        """Return the saved reader of a model; without a saved one, that of a comparison model."""
        path = Path(name) / FILE
        try:
            if not Path(name).is_dir():  # a hub name; without the file, there is an OSError
                path = Path(cached_file(str(name), FILE))
            text = path.read_text()
        except OSError:
            return cls("reward")
        try:
            content = dict(json.loads(text))
            labels = content.pop("num_labels")
            reader = cls(**content)
            if reader.num_labels != labels:
                raise ValueError(f"num_labels is {labels}, not {reader.num_labels}")
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"reward_model: {path} describes no reward model ({str(error).rstrip('.')}); take "
                "the file that training wrote beside the weights."
            ) from error
        return reader

    def encode(
        self, tokenizer: Any, prompt: Any, completion: Any, finished: bool = True
    ) -> Encoded:
        """Return a prompt with a completion as the model sees it.

        The end-of-sequence token follows only if the completion is `finished`: ended by the model
        that wrote it. `tokenizer` is the reward model's own.
        """
        text = completion_text(completion)
        if self.algorithm == "prm":
            return self.encode_steps(tokenizer, prompt, split_steps(text, self.step_split))
        if self.algorithm == "orm":
            start = prompt_ids(tokenizer, prompt)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if finished:
                ids = [*ids, tokenizer.eos_token_id]
            places = range(len(start), len(start) + len(ids))  # of the completion
            return Encoded(start + ids, list(places))
        # a comparison model reads prompt and completion as one text, as RewardTrainer makes it
        if isinstance(prompt, str):
            end = tokenizer.eos_token
            if finished and not text.endswith(end):
                text += end
            return Encoded(tokenizer(prompt + text)["input_ids"], places=[])
        chat = _chat_text(tokenizer, prompt, text, finished)
        return Encoded(tokenizer(chat, add_special_tokens=False)["input_ids"], places=[])

    def encode_steps(self, tokenizer: Any, prompt: Any, steps: Sequence[str]) -> Encoded:
        """Return a prompt with steps; each step is tokenized together with its separator."""
        ids, places = prompt_ids(tokenizer, prompt), []
        for step in steps:
            ids = ids + tokenizer(step + self.step_separator, add_special_tokens=False)["input_ids"]
            places.append(len(ids) - 1)
        return Encoded(ids, places)

    def check_separator(self, tokenizer: Any, steps: Sequence[str]) -> None:
        """Refuse a separator that does not end each step in one and the same token."""
        own = tokenizer(self.step_separator, add_special_tokens=False)["input_ids"]
        if not own:
            raise InputError(
                f"step_separator: {self.step_separator!r} is no token of this tokenizer, so a step "
                "would end nowhere; write one that it keeps, such as '\\n'."
            )
        for step in steps:
            ids = tokenizer(step + self.step_separator, add_special_tokens=False)["input_ids"]
            if ids[-1] != own[-1]:
                last = tokenizer.convert_ids_to_tokens(ids[-1])
                raise InputError(
                    f"step_separator: the tokenizer merges {self.step_separator!r} with the end of "
                    f"{step[-40:]!r} into the token {last!r}; write one that stays apart, such as "
                    "'\\n<step>\\n'."
                )

    @torch.no_grad()
    def outputs(
        self, model: Any, tokenizer: Any, texts: Sequence[Encoded], batch: int, device: Any
    ) -> list[Tensor]:
        """Return the model's logits of each text: a scalar, or (S,) or (S, 3) at its S places.

        Args:
            model: the reward model, on `device`.
            tokenizer: the reward model's own.
            texts: what `encode` returned.
            batch: how many texts are read at once.
            device: where the model is.
        """
        unwrapped = getattr(model, "module", model)  # without the wrapper of several processes
        config = unwrapped.config.get_text_config()
        # a classifier of whole texts finds their last tokens by the config's pad token, if any
        lacks_pad_token = not self.per_token and config.pad_token_id is None
        logits_of_texts = []
        for first in range(0, len(texts), batch):
            part = texts[first : first + batch]
            inputs = pad_texts([{"input_ids": text.ids} for text in part], tokenizer.pad_token_id)
            with reading_last_tokens(config, inputs) if lacks_pad_token else nullcontext():
                batch_inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
                logits = model(**batch_inputs).logits
            logits = logits.float().cpu().squeeze(-1)  # without the dimension of a single label
            for text, text_logits in zip(part, logits, strict=True):
                logits_of_texts.append(text_logits[text.places] if self.per_token else text_logits)
        return logits_of_texts

    def scores(self, logits: Tensor) -> dict[str, float]:
        """Return the scores of a text, by name, from its logits as `outputs` returns them.

        A comparison model's score is its output. An outcome model's is the probability of a right
        answer, averaged over the completion's tokens or at the last token. A process model's is the
        probability that a step is good: of the last step, of the worst, or the product over all.
        Without tokens or steps, all scores are 0.
        """
        if not self.per_token:
            return {"score": float(logits)}
        probabilities = probability_of_good(logits)
        if not len(probabilities):
            return dict.fromkeys(self.names, 0.0)
        aggregates = {
            "last": probabilities[-1],
            "mean": probabilities.mean(),
            "min": probabilities.min(),
            "product": probabilities.prod(),
        }
        return {name: float(aggregates[name]) for name in self.names}


@contextmanager
def reading_last_tokens(config: Any, inputs: dict[str, Tensor]) -> Iterator[None]:
    """Let a classifier with this config read the last token of every text of a batch.

    transformers reads, in each text, the last token that is not the config's pad token. If the end
    token is also the pad token, a finished text would be read at the token before, like one that
    was cut off. So padding becomes a token with which no text of the batch ends, for the block; the
    config names no pad token before and afterwards, which is how `outputs` knows such a model.

    Args:
        config: of the classifier; its pad token is set within the block.
        inputs: `input_ids` and `attention_mask`, (B, T); the ids of padding are replaced.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    # the place of each text's last token, and the tokens that stand there
    last_places = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)
    last_tokens = set(ids.gather(1, last_places).flatten().tolist())
    # one of the first len(last_tokens) + 1 tokens is not among them
    filler = next(token for token in range(len(last_tokens) + 1) if token not in last_tokens)
    inputs["input_ids"] = ids.masked_fill(mask == 0, filler)
    config.pad_token_id = filler
    try:
        yield
    finally:
        config.pad_token_id = None


def probability_of_good(logits: Tensor) -> Tensor:
    """Return the probability that a token or step is good: (S,) from (S,) or (S, 3) logits."""
    return logits.softmax(-1)[..., -1] if logits.dim() == 2 else logits.sigmoid()


def judged_class(logits: Tensor) -> list[int]:
    """Return the likeliest class of each step, -1, 0 or 1, from (S,) or (S, 3) logits."""
    if logits.dim() == 2:
        return [CLASSES[i] for i in logits.argmax(-1).tolist()]
    return [1 if x > 0 else -1 for x in logits.tolist()]


def _chat_text(tokenizer: Any, prompt: Any, answer: str, finished: bool) -> str:
    """Return a conversation with an answer as the chat template writes it.

    The template ends the answer's turn; unless the answer is finished, this end is cut off.
    """
    message = {"role": "assistant", "content": answer}
    chat = tokenizer.apply_chat_template([*prompt, message], tokenize=False)
    if finished:
        return chat
    # searched only after the prompt, which may hold the end token and the answer's text, too
    start = len(tokenizer.apply_chat_template(prompt, tokenize=False))
    end = chat.rfind(tokenizer.eos_token, start)
    if end >= 0:
        return chat[:end]
    place = chat.rfind(answer, start)  # another token ends the turn: cut where the answer ends
    return chat[: place + len(answer)] if place >= 0 else chat


def prompt_ids(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the token ids of a prompt, up to where the completion starts."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pad_texts(
    rows: Sequence[Mapping[str, Any]], pad_token_id: int, multiple: int | None = None, side="right"
) -> dict[str, Tensor]:
    """Return padded `input_ids` (B, T), `attention_mask` and, if there are any, `labels`.

    Padding has the label -100; T is a multiple of `multiple`, if given.
    """
    columns = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0]}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    fillers = {"input_ids": pad_token_id, "attention_mask": 0, "labels": -100}
    return {n: pad(columns[n], fillers[n], side, multiple) for n in fillers if n in columns}


def collate_ranked(
    rows: list[dict[str, Any]], pad_token_id: int, multiple: int | None = None
) -> dict[str, Any]:
    """Return the texts of all rows' lists `ranked_ids` as one padded batch, list by list."""
    texts = [{"input_ids": ids} for row in rows for ids in row["ranked_ids"]]
    return {**pad_texts(texts, pad_token_id, multiple), "list_length": len(rows[0]["ranked_ids"])}
