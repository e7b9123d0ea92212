"""Direct alignment, reward models and SFT on fixed windows: TRL's trainers, the book's functions.

The token ids are those that the trainer's own collator made, the log-probabilities or scores those
of a plain forward. Policy and reference are two versions of one untrained model. Batches that need
a rollout do not apply; the others keep their names: `on_policy` has the policy at the reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils.rnn import pad_sequence

from rlhf_trl.compare import measure, models
from rlhf_trl.compare.measure import Book, Measured
from rlhf_trl.compare.policy import PolicyBatch
from rlhf_trl.data.fitting import shortened
from rlhf_trl.errors import InputError
from rlhf_trl.losses.checked import preference_loss, reward_loss
from rlhf_trl.reward_models.reader import pad_texts
from rlhf_trl.run.stages import STAGES, stage_of
from rlhf_trl.tiny.model import END, PAD
from rlhf_trl.tiny.tokenizer import build_tokenizer

PAIRS = 4
"""Pairs of a usual micro-batch; KTO and SFT, which have none, take twice as many examples."""

RANKED = 3  # completions in a list of K-wise comparisons
STEP = "\n"  # separates the steps of a process model

STOCK = (
    *("GRPOTrainer", "RLOOTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"),
    *("ORPOTrainer", "CPOTrainer", "SFTTrainer"),
)
"""The trainers of TRL that are compared."""

BATCHES = ("on_policy", "mild", "heavy", "ragged", "accumulation", "over_long")
"""The batches that apply here."""

_MODELS = {
    **{"RewardTrainer": models.untrained_scorer, "kwise": models.untrained_scorer},
    **{"orm": models.untrained_token_scorer, "prm": models.untrained_token_scorer},
    "prm/code": partial(models.untrained_token_scorer, 3),
}

MADE = ("kwise", "orm", "prm", "prm/code")
"""Kinds of windows that are made by hand: of reward models for which TRL has no collator."""

_EXPERIMENTAL = {"ORPOTrainer": "trl.experimental.orpo", "CPOTrainer": "trl.experimental.cpo"}

UNPAIRED = ("KTOTrainer", "SFTTrainer", "orm", "prm", "prm/code")
"""Trainers that take single completions."""

DOUBLE = ("RewardTrainer", *_EXPERIMENTAL)
"""Trainers that can be measured in float64: they compute in the precision of the model.

The others use a fused head, which accumulates in float32. None of these loads a reference model.
"""


@dataclass
class Micro:
    """What a loss sees of a micro-batch of R texts, in float64.

    S is the number of tokens of a text but the first, which nothing predicts.
    """

    # (R, S) log-probabilities of the tokens, or scores of them; (R, 1) scores of whole texts; of
    # the kind "prm/code" (R, S, 3) logits of three classes
    outputs: Tensor
    gradient: models.Gradients  # of `outputs` in the model's parameters
    ref: Tensor  # as `outputs`, under the reference policy; 0 for reward models
    mask: Tensor  # (R, S) 1 on the completion's tokens
    text: Tensor  # (R, S) 1 on all tokens
    chosen: Tensor  # (R,) whether the completion is preferred
    labels: Tensor | None  # (R, S) of tokens or steps, -100 elsewhere; None but for MADE
    # (M,) log-probabilities of mismatched pairs under policy and reference, for KTO
    kl: tuple[Tensor, Tensor] | None
    margin: Tensor | None  # (R / 2,) for reward models

    @property
    def lengths(self) -> Tensor:
        """(R, 1) tokens of each completion."""
        return self.mask.sum(1, keepdim=True)

    def margins(self, beta: float, mean: bool = False) -> Tensor:
        """Return beta * (d_chosen - d_rejected) of each pair, (R / 2, 1), d being log-ratios."""
        ratio = ((self.outputs - self.ref) * self.mask).sum(1, keepdim=True)
        ratio = ratio / self.lengths if mean else ratio
        return beta * (ratio[self.chosen] - ratio[~self.chosen])


@dataclass
class PairView:
    """The book's side of a window: its micro-batches."""

    micro: list[Micro]

    def gradient(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the gradient of sum(weights * outputs) in the parameters, (N,)."""
        pairs = zip(self.micro, weights, strict=True)
        return torch.stack([part.gradient(weight) for part, weight in pairs]).sum(0)

    def book(self, side: Book) -> tuple[float, list[Tensor]]:
        """Return the book's loss of the window, and per micro-batch its derivative in `outputs`."""
        leaves = [part.outputs.clone().requires_grad_() for part in self.micro]
        pairs = zip(self.micro, leaves, strict=True)
        loss = torch.stack([_loss(side, part, leaf) for part, leaf in pairs]).mean()
        return float(loss.detach()), list(torch.autograd.grad(loss, leaves))


def _loss(side: Book, part: Micro, outputs: Tensor) -> Tensor:
    """Return the book's loss of a micro-batch.

    Args:
        side: the algorithm, its formulation and parameters.
        part: the micro-batch.
        outputs: `part.outputs` as a leaf, in which the caller differentiates.
    """
    if side.algorithm == "sft":
        return -(outputs * part.mask).sum() / part.mask.sum()
    settings = {"formulation": side.formulation, **side.params}
    if side.algorithm in ("orm", "prm"):  # with labels of tokens; the others compare texts
        return reward_loss(side.algorithm, logits=outputs, labels=part.labels, **settings)
    if side.row.trainer == "RewardTrainer":
        return _comparison_loss(side, part, outputs.squeeze(1), settings)
    return _preference_loss(side, part, outputs, settings)


def _comparison_loss(
    side: Book, part: Micro, scores: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """Return the loss of a Bradley-Terry or K-wise model from the scores of completions, (R,)."""
    chosen, rejected = scores[part.chosen], scores[~part.chosen]
    if side.algorithm != "kwise":
        pair = {"chosen": chosen, "rejected": rejected, "margin": part.margin}
        return reward_loss("bradley_terry", **pair, **settings)
    if part.labels is not None:  # lists of RANKED completions, the best first
        return reward_loss("kwise", rewards=scores.view(-1, RANKED), **settings)
    return reward_loss("kwise", rewards=torch.stack([chosen, rejected], 1), **settings)


def _preference_loss(
    side: Book, part: Micro, token_logps: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """Return the direct-alignment loss of a micro-batch.

    `preference_loss` takes the tensors that the row reads, and refuses any other.

    Args:
        side: the algorithm, its formulation and parameters.
        part: the micro-batch.
        token_logps: (R, S) log-probabilities of the tokens under the policy.
        settings: formulation and parameters, as `preference_loss` takes them.
    """
    row = side.row
    is_chosen = part.chosen

    def of_completions(logps: Tensor) -> Tensor:
        """Return (R,) sums over the tokens of each completion, or means, as the row has it."""
        total = (logps * part.mask).sum(1)
        return total / part.mask.sum(1) if row.logps == "mean" else total

    policy = of_completions(token_logps)
    ref = of_completions(part.ref)
    logps = {"policy_chosen_logps": policy[is_chosen], "policy_rejected_logps": policy[~is_chosen]}
    if row.reference:
        logps |= {"ref_chosen_logps": ref[is_chosen], "ref_rejected_logps": ref[~is_chosen]}
    if side.algorithm == "orpo":  # ORPO's likelihoods are means, so this is a mean per token, too
        logps["chosen_nll"] = -policy[is_chosen]
    if part.kl is not None:  # KTO
        logps |= {"policy_kl_logps": part.kl[0], "ref_kl_logps": part.kl[1]}
    return preference_loss(side.algorithm, **logps, **settings).loss


# --- the stock side ------------------------------------------------------------------------------


def trainer_classes(name: str) -> tuple[type, type]:
    """Return a trainer, such as "DPOTrainer" or our "BookDPOTrainer", and its config class."""
    if name in OURS:
        try:
            module = import_module(OURS[name].rpartition(".")[0])
        except Exception as error:
            # A module that misses something in another release of TRL may raise anything. As an
            # ImportError it gets the verdict "not on this TRL", see `Matrix._tried`.
            raise ImportError(f"{name}: {measure.sentence(error)}") from error
    else:
        module = import_module(_EXPERIMENTAL.get(name, "trl"))
        if not hasattr(module, name):  # another release may have it among its experimental ones
            module = import_module(f"trl.experimental.{name.removesuffix('Trainer').lower()}")
    trainer = getattr(module, name)
    if name == "BookSFTTrainer":  # it has no row of the table, and so no config of its own
        return trainer, trainer_classes("SFTTrainer")[1]
    return trainer, getattr(module, name.replace("Trainer", "Config"))


OURS = {stage.trainer_name: stage.trainer for stage in STAGES.values() if stage.trainer}
OURS["BookRLOOTrainer"] = "rlhf_trl.trainers.rloo.BookRLOOTrainer"  # which no recipe trains
"""Our trainers by name, and where they are."""


def own_trainer(algorithm: str) -> str:
    """Return the name of our trainer that trains a row."""
    return stage_of(algorithm).trainer_name


def arguments(name: str, formulation_name: str) -> dict[str, Any]:
    """Return the arguments that choose the row of our trainer; `models.make_trainer` takes them."""
    steps = {"step_separator": STEP, "step_split": STEP} if name == "prm" else {}
    return {"algorithm": name, "formulation": formulation_name} | steps


def _text(length: int, *key: Any) -> str:
    """Return a text of random letters, the same for the same key."""
    rng = models.drawn(*key)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))


_EVEN_LABELS = (1, 0)
_UNEVEN_LABELS = (1, 0, 1, 1, 0, 1, 0, 1)
"""KTO's labels in turn: as many chosen as rejected completions, or 5 to 3."""


def _fixed_examples(
    trainer: str, batch: PolicyBatch, columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the fixed data of a window, in the columns that a trainer reads.

    There are 4 * PAIRS examples, enough for two micro-batches of single completions, each of which
    takes 2 * PAIRS. KTO without prompts has fewer, see `_without_prompts`.

    Args:
        trainer: the name of the stock trainer, "" for plain pairs.
        batch: the window, which says how long the texts are.
        columns: what is not as usual. "margin" is a further column; the words in _FORMATS are no
            columns, but ways of writing the texts, see `_in_format`.
    """
    pairs = [_random_pair(number, trainer, batch) for number in range(4 * PAIRS)]
    if "margin" not in columns:
        for pair in pairs:
            del pair["margin"]
    for text_format in set(_FORMATS).intersection(columns):
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


def _random_pair(number: int, trainer: str, batch: PolicyBatch) -> dict[str, Any]:
    """Return a prompt, a chosen and a rejected completion of random letters, and a margin."""
    rng = models.drawn("lengths", number)
    chosen_length = rng.randint(1, 40) if batch.ragged else 8
    rejected_length = rng.randint(1, 40) if batch.ragged else 8
    prompt_length = rng.randint(3, 16) if batch.ragged else 5
    if batch.fields and trainer not in _EXPERIMENTAL and number % 5 == 2:
        prompt_length += 30  # this prompt alone fills the batch's max_length
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


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


_Examples = list[dict[str, Any]]
_Text = dict[str, list[int]]
"""What is collated for a completion: `input_ids`, and `labels`, -100 where nothing is learned."""


def _by_hand(kind: str, batch: PolicyBatch) -> tuple[_Examples, list[measure.Batch]]:
    """Return the examples of a window of MADE, and the micro-batches that they should become."""
    examples: _Examples = []
    texts: list[_Text] = []
    pairs = _fixed_examples("", batch, ())[: batch.rows // 2 * batch.accumulation]
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
    start = _encoded(tokenizer, prompt)
    ids = [*_encoded(tokenizer, completion), END]
    return {"input_ids": start + ids, "labels": [-100] * len(start) + [label] * len(ids)}


def _text_of_steps(kind: str, prompt: str, steps: Sequence[str], grades: Sequence[int]) -> _Text:
    """Return token ids, and the label of each step on its separator."""
    tokenizer = build_tokenizer()
    start = _encoded(tokenizer, prompt)
    ids = _encoded(tokenizer, "".join(step + STEP for step in steps))
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
        text_format: one of _FORMATS.
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


_FORMATS = ("chat", "ended", "implicit")

_TEMPLATE_VALUES = "chat_template_kwargs"
"""A column that TRL knows: variables of the chat template, by name."""


def build_trainer(
    trainer: type,
    config: type,
    fields: Mapping[str, Any],
    batch: PolicyBatch,
    columns: Sequence[str] = (),
    **trainer_arguments: Any,
) -> Any:
    """Build a trainer of TRL, or a subclass, for a window.

    Args:
        trainer: the class.
        config: its config class.
        fields: those of the config. The fields that make the window override them: both sides see
            the window's texts, whatever a user's config says.
        batch: the window.
        columns: as `_fixed_examples` takes them: "margin", or how the texts are written.
        trainer_arguments: further arguments of the trainer.
    """
    kind = made_kind(trainer_arguments) or base_name(trainer)
    if kind in MADE:
        examples, _ = _by_hand(kind, batch)  # the micro-batches are for the book's side
    else:
        examples = _fixed_examples(kind, batch, columns)
    config_fields = dict(fields) | _window_fields(kind, batch)
    arguments = _window_arguments(kind, batch, columns, trainer_arguments)
    built = models.make_trainer(trainer, config, config_fields, examples, **arguments)
    if hasattr(built, "reference_point"):
        # Our KTO trainer, which in formulation code takes the rejected completions for the point.
        # Here it takes the mismatched pairs, whose log-probabilities the book's side gets.
        built.reference_point = "mismatched"
    return built


def _window_arguments(
    kind: str, batch: PolicyBatch, columns: Sequence[str], trainer_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the trainer's arguments, with the models and the tokenizer that a window adds.

    `kind` is the name of its stock trainer, or one of MADE.
    """
    arguments = dict(trainer_arguments)
    if batch.name == "cut" and kind in ("DPOTrainer", "KTOTrainer"):
        # this batch is about a reference that is given; otherwise the trainer makes its own
        reference = models.untrained()
        reference.load_state_dict(models.drifted(reference.state_dict(), 0.1, seed=5))
        arguments.setdefault("ref_model", reference)
    if batch.name == "adapter":
        arguments |= models.adapter()
    if batch.name == "continued":
        arguments |= models.continued_adapter()
    # a tokenizer that puts BOS before a text; not for chats, whose template does so
    if {"ended", "implicit"}.intersection(columns):
        arguments["processing_class"] = models.tokenizer_with_bos()
    # Reward models, ORPO and CPO have no reference, so any model will do. The other trainers get
    # the model that `make_trainer` loads from a folder, so that TRL finds the reference there.
    needs_no_reference = kind in MADE or kind in DOUBLE
    if needs_no_reference and "model" not in arguments:
        arguments["model"] = _MODELS.get(kind, models.untrained)()
    if kind == "RewardTrainer":
        # A reward model finds the last token of a text by this id. It is the trainer's task to set
        # it: without it here, a trainer that forgets to do so is found out.
        arguments["model"].config.pad_token_id = None
    return arguments


def _window_fields(kind: str, batch: PolicyBatch) -> dict[str, Any]:
    """Return the fields of a config that make a window for a kind of trainer."""
    fields = {
        "per_device_train_batch_size": batch.rows if kind in UNPAIRED else batch.rows // 2,
        "gradient_accumulation_steps": batch.accumulation,
        **dict(batch.fields),
    }
    if batch.max_length:
        fields["max_length"] = batch.max_length
    if kind in MADE:
        fields["train_sampling_strategy"] = "sequential"
    return fields


def base_name(trainer: type) -> str:
    """Return the name of the TRL class that a trainer is or derives from, "" for none of STOCK."""
    names = [c.__name__ for c in trainer.__mro__ if c.__module__.startswith("trl.")]
    return next((name for name in names if name in STOCK), "")


class PairWindow:
    """A window of one kind of trainer, prepared once."""

    def __init__(self, trainer: str, batch: PolicyBatch, columns: Sequence[str] = ()) -> None:
        """Move the policy.

        Args:
            trainer: the name of the trainer that collates, or one of MADE.
            batch: the window.
            columns: as `_fixed_examples` takes them.
        """
        self.batch = batch
        self._trainer_name = trainer
        self._columns = columns
        self._is_by_hand = trainer in MADE
        self._classes = () if self._is_by_hand else trainer_classes(trainer)
        self.kind = trainer if self._is_by_hand else base_name(self._classes[0])
        self._build_model = _MODELS.get(self.kind, models.untrained)
        # with this seed KTO's reference point is above 0, and clamped in one micro-batch only
        self.current = models.drifted(self._build_model().state_dict(), batch.drift, seed=3)

    @cached_property
    def prepared(self) -> list[measure.Batch]:
        """The micro-batches as the trainer collates them."""
        batch = self.batch
        if self._is_by_hand:
            _, micro = _by_hand(self._trainer_name, batch)
            return micro
        trainer = build_trainer(*self._classes, {}, batch, self._columns)
        trainer.model.load_state_dict(self.current)
        _, micro = measure.accumulate(trainer, measure.batches(trainer), batch.cut_window_to)
        # `_check_collation` knows neither what further fields nor what other formats make of texts
        if not batch.fields and not set(_FORMATS).intersection(self._columns):
            examples = _fixed_examples(self.kind, batch, self._columns)
            _check_collation(self._trainer_name, micro, examples, batch.max_length)
        return micro

    def stock(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build_trainer` built; `double`, for those in DOUBLE: in float64.

        Raises:
            InputError: its loss saw other token ids than the book's side.
        """
        models.take(trainer.model, self.current)
        if double:
            trainer.model.double()
        if getattr(trainer.args, "sync_ref_model", False):  # as after an optimizer step
            trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        measured, micro = measure.accumulate(
            trainer, measure.batches(trainer), self.batch.cut_window_to
        )
        if "prepared" in vars(self):  # the book's side has already been prepared
            keys = {"input_ids", "chosen_input_ids"}
            if self._is_by_hand:
                keys.add("labels")
            for key in sorted(keys & micro[0].keys()):
                measure.check_same(trainer, micro, self.prepared, key)
        return measured

    @cached_property
    def view(self) -> PairView:
        """The book's side of the window."""
        policy = self._build_model().double()
        reference = self._build_model().double()
        policy.load_state_dict(self.current)
        return PairView([self._micro(policy, reference, inputs) for inputs in self.prepared])

    def _micro(self, policy: Module, reference: Module, inputs: measure.Batch) -> Micro:
        """Return what the book's loss sees of a micro-batch, from plain forwards.

        The first token of a text has no log-probability. So masks and labels are cut by one, to
        stand beside the log-probabilities, or scores, of the tokens after it.
        """
        ids, attention, mask, chosen = _sequences(inputs)
        is_language_model = self._build_model is models.untrained
        if is_language_model:
            outputs = models.token_logps(policy, ids, attention)  # (R, S)
            ref = models.token_logps(reference, ids, attention)
        else:  # a reward model: (R, 1) scores of texts, or (R, 1 + S, classes) of tokens
            outputs = policy(input_ids=ids, attention_mask=attention).logits
            if outputs.dim() == 3:
                outputs = outputs[:, 1:].squeeze(-1)  # (R, S), or (R, S, 3) with three classes
            ref = torch.zeros_like(outputs)  # a reward model has no reference, and no loss reads it
        kl = None
        if "KL_input_ids" in inputs:  # KTO's mismatched pairs
            kl = _mismatched_logps(policy, inputs), _mismatched_logps(reference, inputs)
        return Micro(
            outputs=outputs.detach(),
            gradient=models.Gradients(policy, outputs),
            ref=ref.detach(),
            mask=mask[:, 1:].double(),
            text=attention[:, 1:].double(),
            chosen=chosen,
            # "labels" of TRL's collators are token ids: all that counts of them is in `mask`
            labels=inputs["labels"][:, 1:] if self._is_by_hand else None,
            kl=kl,
            margin=inputs["margin"].double() if "margin" in inputs else None,
        )


def _mismatched_logps(model: Module, inputs: measure.Batch) -> Tensor:
    """Return the log-probabilities, (M,), of the completions of KTO's mismatched pairs."""
    logps = models.token_logps(model, inputs["KL_input_ids"], inputs["KL_attention_mask"])
    return (logps * inputs["KL_completion_mask"][:, 1:]).sum(1).detach()


@dataclass
class _Texts:
    """The fixed examples as a collator should tokenize them."""

    # from the token ids of a text to where it comes from: the number of the example, and its side,
    # "chosen", "rejected" or "completion"
    sources: dict[tuple[int, ...], tuple[int, str]]
    prompts: dict[int, list[int]]  # number of the example -> the ids that are left of its prompt


def _expected_texts(
    trainer: str, examples: Sequence[Mapping[str, Any]], max_length: int | None
) -> _Texts:
    """Tokenize the examples; of those longer than `max_length` keep what the trainer keeps.

    TRL keeps the first tokens, our trainers keep the whole completion and the end of the prompt,
    and trainers of reward models drop the example.

    Args:
        trainer: the name of the trainer that collates.
        examples: the data.
        max_length: tokens of a text at most.
    """
    tokenizer = build_tokenizer()
    rule = "cut_prompt" if trainer in OURS else "cut_completion"
    if trainer.endswith("RewardTrainer"):
        rule = "drop"
    # TRL's trainers of ORPO and CPO put BOS before a prompt; all others do not
    start = [tokenizer.bos_token_id] if trainer in _EXPERIMENTAL else []
    texts = _Texts(sources={}, prompts={})
    for number, example in enumerate(examples):
        # two sides of a pair, or the single completion of KTO and SFT
        sides = [side for side in ("chosen", "rejected", "completion") if side in example]
        prompt = [*start, *_encoded(tokenizer, example["prompt"])]
        completions = [
            [*_encoded(tokenizer, example[side]), tokenizer.eos_token_id] for side in sides
        ]
        fitting = shortened(prompt, completions, max_length, rule)
        if fitting is None:  # dropped
            continue
        prompt, completions = fitting
        texts.prompts[number] = prompt
        for side, completion in zip(sides, completions, strict=True):
            texts.sources[(*prompt, *completion)] = (number, side)
    return texts


def _check_collation(
    trainer: str,
    prepared: Sequence[measure.Batch],
    examples: Sequence[Mapping[str, Any]],
    max_length: int | None,
) -> None:
    """Refuse a collator that does not hand on the texts, sides, labels and margins as they are.

    Both sides of a comparison take them from TRL's collator; here they are held against the data.

    Args:
        trainer: the name of the trainer whose collator it is.
        prepared: the micro-batches that the collator made.
        examples: the data from which it made them.
        max_length: tokens of a text at most.
    """
    texts = _expected_texts(trainer, examples, max_length)
    for inputs in prepared:
        fault = _collation_fault(trainer, inputs, examples, texts, max_length)
        if fault:
            raise InputError(f"{trainer} does not collate the fixed data as it is: {fault}")


def _collation_fault(
    trainer: str,
    inputs: measure.Batch,
    examples: Sequence[Mapping[str, Any]],
    texts: _Texts,
    max_length: int | None,
) -> str:
    """Return in what a micro-batch differs from the examples, "" for nothing.

    Args:
        trainer: the name of the trainer whose collator made it.
        inputs: the micro-batch.
        examples: the data.
        texts: the examples as they should be tokenized, in which each text of the micro-batch is
            looked up by its token ids.
        max_length: tokens of a text at most.
    """
    ids, attention, mask, chosen = _sequences(inputs)
    unpadded = [tuple(text) for text in _unpadded(ids, attention)]
    if not texts.sources.keys() >= set(unpadded):
        return "token ids that are in no text"
    sources = [texts.sources[text] for text in unpadded]
    numbers = [number for number, _ in sources]
    of_pairs = numbers[: len(numbers) // 2]  # the chosen texts of all pairs come first
    are_pairs = "chosen" in examples[0]
    if "label" in inputs:
        if [examples[number]["label"] for number in numbers] != chosen.tolist():
            return "labels"
    elif are_pairs:
        expected = [(number, side) for side in ("chosen", "rejected") for number in of_pairs]
        if sources != expected:
            return "chosen and rejected"
    if "margin" in inputs:
        margins = torch.tensor([examples[number]["margin"] for number in of_pairs])
        if not torch.allclose(margins, inputs["margin"].float()):
            return "margins"
    if not trainer.endswith("RewardTrainer"):  # which scores whole texts, without such a mask
        prompt_lengths = [len(texts.prompts[number]) for number in numbers]
        if not torch.equal(_completion_masks(attention, prompt_lengths), mask.to(attention)):
            return "which tokens are the completion's"
    if "KL_input_ids" in inputs:
        kl_ids = _unpadded(inputs["KL_input_ids"], inputs["KL_attention_mask"])
        if kl_ids != _mismatched(examples, texts, numbers, max_length):
            return "the mismatched pairs of the KL"
    return ""


def _unpadded(ids: Tensor, attention: Tensor) -> list[list[int]]:
    """Return the token ids of texts, (R, S), without padding."""
    rows = zip(ids, attention.bool(), strict=True)
    return [row[is_text].tolist() for row, is_text in rows]


def _completion_masks(attention: Tensor, prompt_lengths: Sequence[int]) -> Tensor:
    """Return (R, S) masks that are 1 on the tokens behind each prompt, but for padding."""
    masks = torch.zeros_like(attention)
    for mask, on, length in zip(masks, attention, prompt_lengths, strict=True):
        mask[on.bool().nonzero().flatten()[length:]] = 1
    return masks


def _mismatched(
    examples: Sequence[Mapping[str, Any]],
    texts: _Texts,
    numbers: Sequence[int],
    max_length: int | None,
) -> list[list[int]]:
    """Return KTO's mismatched pairs: each prompt with the completion of the example before it."""
    tokenizer = build_tokenizer()
    pairs = []
    for place, number in enumerate(numbers):
        completion = _encoded(tokenizer, examples[numbers[place - 1]]["completion"])
        text = [*texts.prompts[number], *completion, tokenizer.eos_token_id]
        pairs.append(text[:max_length])
    return pairs


class _Sequences(NamedTuple):
    """The texts of a micro-batch."""

    ids: Tensor  # (R, S) of all tokens, the first one included
    attention: Tensor  # (R, S) 1 on all tokens, 0 on padding
    mask: Tensor  # (R, S) 1 on the completion's tokens
    # (R,) whether the completion is preferred; without a meaning for SFT and for outcome and
    # process models, which have no pairs and do not read it
    chosen: Tensor


def _sequences(inputs: measure.Batch) -> _Sequences:
    """Return the texts that a trainer has collated.

    Trainers mark the tokens of the completion in one of three ways: by a mask, by token labels
    (`labels`) that are -100 elsewhere, or, where they score whole texts, not at all. They mark the
    preferred completions by `label` (KTO), or by putting them into the first half (pairs).
    """
    if "chosen_input_ids" in inputs:  # ORPO and CPO keep the two sides of pairs apart
        ids = _both_sides(inputs, "input_ids", 0)
        attention = _both_sides(inputs, "attention_mask", 0)
        mask = (_both_sides(inputs, "labels", -100) != -100).long()
    else:
        ids = inputs["input_ids"]
        attention = inputs.get("attention_mask", torch.ones_like(ids))
        mask = inputs.get("completion_mask", attention)
        if "labels" in inputs:
            mask = (inputs["labels"] != -100).long()
    chosen = torch.arange(len(ids)) < len(ids) // 2
    if "label" in inputs:
        chosen = torch.as_tensor(inputs["label"]).bool()
    return _Sequences(ids, attention, mask, chosen)


def _both_sides(inputs: measure.Batch, name: str, filler: int) -> Tensor:
    """Return a tensor of the chosen texts and below it that of the rejected ones, padded alike."""
    rows = [*inputs[f"chosen_{name}"], *inputs[f"rejected_{name}"]]
    return pad_sequence(rows, batch_first=True, padding_value=filler)
