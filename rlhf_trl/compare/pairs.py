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
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_trl.compare import measure, models
from rlhf_trl.compare.measure import Book, Measured
from rlhf_trl.compare.policy import PolicyBatch
from rlhf_trl.data.fitting import shortened
from rlhf_trl.errors import InputError
from rlhf_trl.losses import preference_loss, reward_loss
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

MADE = tuple(_MODELS)[1:]
"""Kinds of windows that are made by hand: of reward models for which TRL has no collator."""

_EXPERIMENTAL = {"ORPOTrainer": "trl.experimental.orpo", "CPOTrainer": "trl.experimental.cpo"}

UNPAIRED = ("KTOTrainer", "SFTTrainer", "orm", "prm", "prm/code")
"""Trainers that take single completions."""

DOUBLE = ("RewardTrainer", *_EXPERIMENTAL)
"""Trainers that compute in the model's precision; the others' fused head accumulates in float32."""


@dataclass
class Micro:
    """What a loss sees of a micro-batch, in float64."""

    outputs: Tensor  # (R, S) log-probabilities of all tokens but the first, or (R, 1) scores
    gradient: models.Gradients  # of these
    ref: Tensor  # (R, S) under the reference policy
    mask: Tensor  # (R, S) 1 on the completion's tokens
    text: Tensor  # (R, S) 1 on all tokens
    chosen: Tensor  # (R,) whether the completion is wanted
    labels: Tensor | None  # (R, S) of tokens or steps, -100 elsewhere
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
        """Return the book's loss of the window, and per micro-batch d loss / d outputs."""
        leaves = [part.outputs.clone().requires_grad_() for part in self.micro]
        pairs = zip(self.micro, leaves, strict=True)
        loss = torch.stack([_loss(side, part, leaf) for part, leaf in pairs]).mean()
        return float(loss.detach()), list(torch.autograd.grad(loss, leaves))


def _loss(side: Book, part: Micro, outputs: Tensor) -> Tensor:
    """Return the book's loss of a micro-batch; `outputs` stand for its own, differentiable."""
    if side.algorithm == "sft":
        return -(outputs * part.mask).sum() / part.mask.sum()
    row = side.row
    is_chosen = part.chosen
    settings = {"formulation": side.formulation, **side.params}
    if side.algorithm in ("orm", "prm"):
        return reward_loss(side.algorithm, logits=outputs, labels=part.labels, **settings)
    if row.trainer == "RewardTrainer":
        scores = outputs.squeeze(1)
        chosen, rejected = scores[is_chosen], scores[~is_chosen]
        if side.algorithm == "kwise":  # of pairs, or of RANKED completions list by list
            listed = part.labels is not None
            ranks = scores.view(-1, RANKED) if listed else torch.stack([chosen, rejected], 1)
            return reward_loss("kwise", rewards=ranks, **settings)
        pair = {"chosen": chosen, "rejected": rejected, "margin": part.margin}
        return reward_loss("bradley_terry", **pair, **settings)

    def of_completions(token_logps: Tensor) -> Tensor:
        total = (token_logps * part.mask).sum(1)
        return total / part.mask.sum(1) if row.logps == "mean" else total

    policy = of_completions(outputs)
    ref = of_completions(part.ref)
    logps = {"policy_chosen_logps": policy[is_chosen], "policy_rejected_logps": policy[~is_chosen]}
    if row.reference:
        logps |= {"ref_chosen_logps": ref[is_chosen], "ref_rejected_logps": ref[~is_chosen]}
    if side.algorithm == "orpo":
        logps["chosen_nll"] = -policy[is_chosen]
    if part.kl is not None:
        logps |= {"policy_kl_logps": part.kl[0], "ref_kl_logps": part.kl[1]}
    return preference_loss(side.algorithm, **logps, **settings).loss


# --- the stock side ------------------------------------------------------------------------------


def trainer_classes(name: str) -> tuple[type, type]:
    """Return a trainer, such as "DPOTrainer" or our "BookDPOTrainer", and its config class."""
    if name in OURS:
        try:
            module = import_module(OURS[name].rpartition(".")[0])
        except Exception as error:  # whatever it misses in another release
            raise ImportError(f"{name}: {measure.sentence(error)}") from error
    else:
        module = import_module(_EXPERIMENTAL.get(name, "trl"))
        if not hasattr(module, name):  # where another release may have it
            module = import_module(f"trl.experimental.{name.removesuffix('Trainer').lower()}")
    trainer = getattr(module, name)
    if name == "BookSFTTrainer":  # which has no row, and TRL's config
        return trainer, trainer_classes("SFTTrainer")[1]
    return trainer, getattr(module, name.replace("Trainer", "Config"))


OURS = {stage.trainer_name: stage.trainer for stage in STAGES.values() if stage.trainer}
"""Our trainers by name, and where they are."""


def own_trainer(algorithm: str) -> str:
    """Return the name of our trainer that trains a row."""
    return stage_of(algorithm).trainer_name


def arguments(name: str, which: str) -> dict[str, Any]:
    """Return what our trainer of a formulation is given beside its config."""
    steps = {"step_separator": STEP, "step_split": STEP} if name == "prm" else {}
    return {"algorithm": name, "formulation": which} | steps


def _text(length: int, *key: Any) -> str:
    rng = models.drawn(*key)
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))


def _rows(trainer: str, batch: PolicyBatch, columns: Sequence[str]) -> list[dict[str, Any]]:
    pairs = []
    for i in range(4 * PAIRS):
        rng = models.drawn("lengths", i)
        lengths = [rng.randint(1, 40) for _ in range(2)] if batch.ragged else [8, 8]
        asked = rng.randint(3, 16) if batch.ragged else 5
        if batch.fields and trainer not in _EXPERIMENTAL and i % 5 == 2:
            asked += 30  # it fills max_length
        pair = {
            "prompt": _text(asked, "prompt", i),
            "chosen": _text(lengths[0], "chosen", i),
            "rejected": _text(lengths[1], "rejected", i),
        }
        pairs.append(pair | ({"margin": rng.random()} if "margin" in columns else {}))
    for how in set(_WRITTEN).intersection(columns):
        pairs = [_written(how, number, pair) for number, pair in enumerate(pairs)]
    if "implicit" in columns:
        if trainer == "SFTTrainer":
            return [{"text": pair["chosen"]} for pair in pairs]
        return pairs[:PAIRS] if trainer == "KTOTrainer" else pairs  # all chosen come first there
    if trainer == "SFTTrainer":
        return [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs]
    if trainer == "KTOTrainer":
        # neighbors never share a prompt; five of eight are wanted if lengths are ragged, else half
        wanted = cycle([1, 0, 1, 1, 0, 1, 0, 1] if batch.ragged else [1, 0])
        return [
            {"prompt": p["prompt"], "completion": p["chosen" if w else "rejected"], "label": w == 1}
            for p, w in zip(pairs, wanted, strict=False)
        ]
    return pairs


def made_kind(also: Mapping[str, Any]) -> str:
    """Return which of MADE a trainer with these arguments needs, "" for none."""
    name = also.get("algorithm", "")
    kinds = f"{name}/{also.get('formulation')}", name
    return next((kind for kind in kinds if kind in MADE), "")


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _by_hand(kind: str, batch: PolicyBatch) -> tuple[list[dict[str, Any]], list[measure.Batch]]:
    """Return the examples of a window of MADE, and the micro-batches that they should become.

    Both completions of a pair are examples of their own, but for "kwise", where they and a third
    are one. Texts hold `input_ids`, and `labels` that are -100 where nothing is predicted.
    """
    encode = partial(_encoded, build_tokenizer())  # a token per character
    examples: list[dict[str, Any]] = []
    texts: list[dict[str, list[int]]] = []
    for number, pair in enumerate(_rows("", batch, ())[: batch.rows // 2 * batch.accumulation]):
        completions = [pair["chosen"], pair["rejected"]]
        if kind == "kwise":
            completions.append(_text(8, "third", number))
            examples.append({"prompt": pair["prompt"], "ranked": completions})
        start = encode(pair["prompt"])
        for side, completion in enumerate(completions):
            if kind.startswith("prm"):
                steps, grades = _graded_steps(completion, number, side)
                examples.append({"prompt": pair["prompt"], "completions": steps, "labels": grades})
                ids = encode("".join(step + STEP for step in steps))
                labels = _step_labels(kind, steps, grades)
            else:
                is_chosen = side == 0
                ids = [*encode(completion), END]
                labels = [int(is_chosen)] * (len(completion) + 1)
                if kind != "kwise":
                    examples.append(
                        {"prompt": pair["prompt"], "completion": completion, "label": is_chosen}
                    )
            texts.append({"input_ids": start + ids, "labels": [-100] * len(start) + labels})
    size = len(texts) // batch.accumulation
    return examples, [pad_texts(texts[n : n + size], PAD) for n in range(0, len(texts), size)]


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


def _written(how: str, number: int, pair: dict[str, Any]) -> dict[str, Any]:
    """Write a pair, texts of a prompt and two answers, in another way that TRL takes.

    "chat": as messages; "ended": a third of the answers has an end token, all have one that pads,
    and one token spans prompt and answer; "implicit": without a prompt.
    """
    prompt, sides = pair["prompt"], [pair["chosen"], pair["rejected"]]
    if how == "implicit":
        return {"chosen": f"{prompt} {sides[0]}", "rejected": f"{prompt} {sides[1]}"}
    if how == "chat":
        turns = zip(("user", "assistant", "user"), (prompt[0], prompt[1], prompt[2:]), strict=True)
        prompt = [{"role": role, "content": text} for role, text in turns]
        said: list[Any] = [[{"role": "assistant", "content": side}] for side in sides]
    else:
        prompt, ends = f"{prompt}<", ["<|end|>" * ((number + i) % 3 == 0) for i in range(2)]
        said = [f"think>{s[:4]}<|pad|>{s[4:]}{end}" for s, end in zip(sides, ends, strict=True)]
    return pair | {"prompt": prompt, "chosen": said[0], "rejected": said[1]}


_WRITTEN = ("chat", "ended", "implicit")


def build_trainer(
    trainer: type,
    config: type,
    fields: Mapping[str, Any],
    batch: PolicyBatch,
    columns: Sequence[str] = (),
    **also: Any,
) -> Any:
    """Build a trainer of TRL, or a subclass, for a window.

    `fields` are those of its config beside the window's; `columns` may be "margin", or how the
    texts are written.
    """
    made = made_kind(also)
    kind = made or base_name(trainer)
    window = {
        "per_device_train_batch_size": batch.rows if kind in UNPAIRED else batch.rows // 2,
        "gradient_accumulation_steps": batch.accumulation,
        **dict(batch.fields),
    }
    if batch.max_length:
        window["max_length"] = batch.max_length
    if made:
        window["train_sampling_strategy"] = "sequential"
    if batch.name == "cut" and kind in ("DPOTrainer", "KTOTrainer"):
        other = models.untrained()
        other.load_state_dict(models.drifted(other.state_dict(), 0.1, seed=5))
        also = {"ref_model": other} | also
    if batch.name == "adapter":
        also |= models.adapter()
    if {"ended", "implicit"} & {*columns}:
        also["processing_class"] = models.begun()
    if made or kind in DOUBLE:  # the others take a folder, and load the reference from it
        also = {"model": _MODELS.get(kind, models.untrained)()} | also
    if kind == "RewardTrainer":  # which tells the model what pads
        also["model"].config.pad_token_id = None
    rows = _by_hand(kind, batch)[0] if made else _rows(kind, batch, columns)
    return models.make_trainer(trainer, config, dict(fields) | window, rows, **also)


def base_name(trainer: type) -> str:
    """Return the name of the TRL class that a trainer is or derives from, "" for none of STOCK."""
    names = [c.__name__ for c in trainer.__mro__ if c.__module__.startswith("trl.")]
    return next((name for name in names if name in STOCK), "")


class PairWindow:
    """A window of one kind of trainer, prepared once."""

    def __init__(self, trainer: str, batch: PolicyBatch, columns: Sequence[str] = ()) -> None:
        """Move the policy; `trainer` is the name of who collates, or one of MADE."""
        self.batch, self.made, self._asked = batch, trainer in MADE, (trainer, columns)
        self._classes = () if self.made else trainer_classes(trainer)
        self.kind = trainer if self.made else base_name(self._classes[0])
        self.make = _MODELS.get(self.kind, models.untrained)
        # with this seed KTO's reference point is above 0, and clamped in one micro-batch only
        self.current = models.drifted(self.make().state_dict(), batch.drift, seed=3)

    @cached_property
    def prepared(self) -> list[measure.Batch]:
        """The micro-batches as the trainer collates them."""
        (trainer, columns), batch = self._asked, self.batch
        if self.made:
            return _by_hand(trainer, batch)[1]
        built = build_trainer(*self._classes, {}, batch, columns)
        built.model.load_state_dict(self.current)
        _, found = measure.accumulate(built, measure.batches(built), batch.short)
        if not batch.fields and not set(_WRITTEN).intersection(columns):
            _check_collation(trainer, found, _rows(self.kind, batch, columns), batch.max_length)
        return found

    def stock(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build_trainer` built; in float64 only those in DOUBLE."""
        models.take(trainer.model, self.current)
        if double:
            trainer.model.double()
        if getattr(trainer.args, "sync_ref_model", False):
            trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        measured, found = measure.accumulate(trainer, measure.batches(trainer), self.batch.short)
        if "prepared" in vars(self):  # for the other side of a comparison
            keys = {"input_ids", "chosen_input_ids"} | ({"labels"} if self.made else set())
            for key in sorted(keys & found[0].keys()):
                measure.check_same(trainer, found, self.prepared, key)
        return measured

    @cached_property
    def view(self) -> PairView:
        """The book's side of the window."""
        both = policy, _ = self.make().double(), self.make().double()  # with the reference
        policy.load_state_dict(self.current)
        parts = []
        for inputs in self.prepared:
            ids, attention, mask, chosen = _sequences(inputs)
            if self.make is models.untrained:
                graph, ref = (models.token_logps(model, ids, attention) for model in both)
            else:
                graph = policy(input_ids=ids, attention_mask=attention).logits
                if graph.dim() == 3:
                    graph = graph[:, 1:].squeeze(-1)
                ref = torch.zeros_like(graph)
            kl = None
            if "KL_input_ids" in inputs:
                rest = inputs["KL_input_ids"], inputs["KL_attention_mask"]
                covered = inputs["KL_completion_mask"][:, 1:]
                every = (models.token_logps(model, *rest) for model in both)
                kl = tuple((logps * covered).sum(1).detach() for logps in every)
            parts.append(
                Micro(
                    outputs=graph.detach(),
                    gradient=models.Gradients(policy, graph),
                    ref=ref.detach(),
                    mask=mask[:, 1:].double(),
                    text=attention[:, 1:].double(),
                    chosen=chosen,
                    labels=inputs["labels"][:, 1:] if self.made else None,
                    kl=kl,
                    margin=inputs["margin"].double() if "margin" in inputs else None,
                )
            )
        return PairView(parts)


@dataclass
class _Texts:
    """The fixed examples as a collator should tokenize them."""

    sources: dict[tuple[int, ...], tuple[int, str]]  # token ids -> number of the example, side
    prompts: dict[int, list[int]]  # number of the example -> the ids that are left of its prompt


def _expected_texts(
    trainer: str, examples: Sequence[Mapping[str, Any]], max_length: int | None
) -> _Texts:
    """Tokenize the examples; of those longer than `max_length` keep what the trainer keeps.

    TRL keeps the first tokens, our trainers the whole completion and the end of the prompt; reward
    models are not given longer ones.
    """
    tokenizer = build_tokenizer()
    rule = "cut_prompt" if trainer in OURS else "cut_completion"
    if trainer.endswith("RewardTrainer"):
        rule = "drop"
    start = [tokenizer.bos_token_id] * (trainer in _EXPERIMENTAL)  # ours have what DPO has
    texts = _Texts({}, {})
    for number, example in enumerate(examples):
        sides = [side for side in ("chosen", "rejected", "completion") if side in example]
        prompt = [*start, *_encoded(tokenizer, example["prompt"])]
        completions = [
            [*_encoded(tokenizer, example[side]), tokenizer.eos_token_id] for side in sides
        ]
        kept = shortened(prompt, completions, max_length, rule)
        if not kept:
            continue
        prompt, completions = kept
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
        prepared: the micro-batches that it made.
        examples: the data that it made them of.
        max_length: tokens of a text at most.
    """
    texts = _expected_texts(trainer, examples, max_length)

    def check(is_right: bool, subject: str) -> None:
        if not is_right:
            raise InputError(f"{trainer} does not collate the fixed data as it is: {subject}")

    for inputs in prepared:
        ids, attention, mask, chosen = _sequences(inputs)
        read = [tuple(i[a.bool()].tolist()) for i, a in zip(ids, attention, strict=True)]
        check(texts.sources.keys() >= {*read}, "token ids that are in no text")
        sources = [texts.sources[text] for text in read]
        numbers = [number for number, _ in sources]
        first_half = numbers[: len(numbers) // 2]
        if "label" in inputs:
            check([examples[n]["label"] for n in numbers] == chosen.tolist(), "labels")
        elif "completion" not in examples[0]:
            sides = [(n, side) for side in ("chosen", "rejected") for n in first_half]
            check(sources == sides, "chosen and rejected")
        if "margin" in inputs:
            margins = torch.tensor([examples[n]["margin"] for n in first_half])
            check(torch.allclose(margins, inputs["margin"].float()), "margins")
        if not trainer.endswith("RewardTrainer"):
            for on, number, completion_mask in zip(attention, numbers, mask, strict=True):
                expected = torch.zeros_like(on)
                expected[on.bool().nonzero().flatten()[len(texts.prompts[number]) :]] = 1
                same = torch.equal(expected, completion_mask.to(expected))
                check(same, "which tokens are the completion's")
        if "KL_input_ids" in inputs:
            expected_texts = _mismatched(examples, texts, numbers, max_length)
            for place, expected_ids in enumerate(expected_texts):
                kl_ids = inputs["KL_input_ids"][place][inputs["KL_attention_mask"][place].bool()]
                check(kl_ids.tolist() == expected_ids, "the mismatched pairs of the KL")


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


def _sequences(inputs: measure.Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, attention mask, completion mask (R, S) and which are wanted (R,)."""
    if "chosen_input_ids" in inputs:  # ORPO and CPO keep the two apart

        def joined(name: str, value: int) -> Tensor:
            rows = [*inputs[f"chosen_{name}"], *inputs[f"rejected_{name}"]]
            return pad_sequence(rows, batch_first=True, padding_value=value)

        ids, attention = joined("input_ids", 0), joined("attention_mask", 0)
        mask = (joined("labels", -100) != -100).long()
    else:
        ids = inputs["input_ids"]
        attention = inputs.get("attention_mask", torch.ones_like(ids))
        mask = inputs.get("completion_mask", attention)
        if "labels" in inputs:
            mask = (inputs["labels"] != -100).long()
    if "label" in inputs:
        return ids, attention, mask, torch.as_tensor(inputs["label"]).bool()
    chosen = torch.arange(len(ids)) < len(ids) // 2
    return ids, attention, mask, chosen
