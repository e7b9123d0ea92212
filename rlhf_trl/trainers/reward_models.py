"""Reward models (chapter 5) on TRL's RewardTrainer: of whole texts, and of tokens and steps."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import IterableDataset
from torch import Tensor
from trl import RewardConfig, RewardTrainer
from typing_extensions import override

from rlhf_trl.algorithms import RewardModel, RowConfig
from rlhf_trl.errors import InputError, setting
from rlhf_trl.evaluation.judged import JudgesRows
from rlhf_trl.evaluation.over_examples import OverExamples
from rlhf_trl.losses.reward_models import scores_loss
from rlhf_trl.reward_models.classifiers import check_classifier, loading_options, token_classifier
from rlhf_trl.reward_models.reader import (
    CLASSES,
    Encoded,
    Reader,
    collate_ranked,
    pad_texts,
    reading_last_tokens,
)
from rlhf_trl.trainers.on_trl import OnTRL, Safeguards, fields_set, with_signature_of
from rlhf_trl.trainers.rebalanced import Rebalanced


@dataclass
class BookRewardConfig(RowConfig, Safeguards, RewardConfig):
    """RewardConfig for models that compare whole texts."""

    kind = RewardModel
    default_row: ClassVar[str] = "reward"

    max_completion_length: int = setting(
        "of answers sampled for on-policy data and for evaluation", 64
    )


@dataclass
class BookTokenRewardConfig(BookRewardConfig):
    """RewardConfig for models that judge tokens or steps."""

    default_row: ClassVar[str] = "orm"

    head_bias: bool | None = setting("whether the head has a bias; None: with several classes")
    class_weights: list[float] | None = setting("of bad, neutral and good steps; None: all 1")
    step_separator: str | None = setting("what ends a step (PRM); recipes: dataset.step_separator")
    step_split: str | None = setting(
        "regular expression that cuts steps; recipes: dataset.step_split"
    )

    def __post_init__(self):
        weights = self.class_weights
        if weights is not None and (len(weights) != len(CLASSES) or min(weights) <= 0):
            raise InputError(
                f"class_weights: {weights} are not 3 numbers above 0 (of bad, neutral, good steps)."
            )
        super().__post_init__()


class _OnRewardTrainer(JudgesRows, Rebalanced, OnTRL, OverExamples, RewardTrainer):
    """RewardTrainer that reads texts by a `Reader`, with the evaluation of `JudgesRows`."""

    known: ClassVar[tuple[str, ...]]  # the algorithms that a subclass trains

    left_out: dict[str, int]  # rows that were too long, by data set

    def _take(self, args: Any, model: Any) -> Any:
        args = super()._take(args, model)
        self.left_out = {}
        if (name := self._algorithm or self.config_class.default_row) not in self.known:
            raise InputError(f"algorithm is {name!r}; write {' or '.join(self.known)}.")
        steps = (args.step_separator, args.step_split) if name == "prm" else ()
        self.reader = Reader(name, self._formulation, *steps)
        return args

    def _counts_examples(self) -> bool:
        return self._algorithm in ("kwise", "orm", "prm") or super()._counts_examples()

    def _collating(self, collate: Any) -> Any:
        filler, multiple = self.processing_class.pad_token_id, self.args.pad_to_multiple_of
        return partial(collate, pad_token_id=filler, multiple=multiple)

    def _tokenized(
        self, dataset: Any, tokenize: Any, column: str, name: str, args: RewardConfig, **own: Any
    ) -> Any:
        """Return a data set tokenized, without the rows whose longest text is over `max_length`.

        `tokenize` takes a row and returns columns; the ids of its texts are in `column`.
        """
        options = {"num_proc": args.dataset_num_proc, "load_from_cache_file": False}
        rows = dataset.map(tokenize, **own, **options, desc=f"Tokenizing {name} dataset")
        if args.max_length is not None:
            options["desc"] = f"Filtering {name} >{args.max_length} tokens"  # as RewardTrainer
            rows = rows.filter(lambda row: _longest(row[column]) <= args.max_length, **options)
        return self._fitting(rows, name, len(dataset), args)

    def _fitting(self, dataset: Any, name: str, count: int, args: RewardConfig) -> Any:
        """Note how many of the rows were too long, and refuse a data set of which none is left."""
        if not len(dataset):
            raise InputError(
                f"max_length: all {count} rows of the {name} data set have more than "
                f"{args.max_length} tokens, so there is nothing to train on; raise max_length."
            )
        self.left_out[name] = count - len(dataset)
        return dataset

    # Extends Trainer._save: a reward model says how it reads texts, and what its head is.
    @override
    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = output_dir or self.args.output_dir
            self.reader.save(folder)
            self.model.config.save_pretrained(folder)  # PEFT does not, of an adapter


class BookRewardTrainer(_OnRewardTrainer):
    """RewardTrainer for pairs (its own Bradley-Terry loss) and for ranked lists (K-wise)."""

    config_class, known = BookRewardConfig, ("reward", "kwise")

    @with_signature_of(RewardTrainer.__init__)
    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        args = self._take(args, model)
        self._ranked = self.reader.algorithm == "kwise"
        self.rows_are_neighbors = self._ranked  # for OverExamples; of pairs, all chosen come first
        if self._stock:
            self._reads_last = False
            super().__init__(model, args=args, **kwargs)
            return
        check_classifier(model, args)
        super().__init__(model, args=args, **_adapting("SEQ_CLS", kwargs))
        tokenizer = self.processing_class
        # where the end token pads, it would not be read: see `reading_last_tokens`
        self._reads_last = tokenizer.pad_token_id == tokenizer.eos_token_id
        if self._ranked and "data_collator" not in kwargs:
            self.data_collator = self._collating(collate_ranked)

    # Extends RewardTrainer._prepare_dataset, which knows pairs only and may leave nothing.
    @override
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        if self._stock or isinstance(dataset, IterableDataset):  # of streams, only plain pairs come
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        count = len(dataset)
        if self.reader.formulation == "code" and "margin" in dataset.column_names:
            dataset = dataset.remove_columns("margin")  # the book's code takes none
        if not self._ranked:
            dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
            return self._fitting(dataset, dataset_name, count, args)
        is_tokenized = "ranked_ids" in dataset.column_names
        _check_lists(dataset["ranked_ids" if is_tokenized else "ranked"], dataset_name)
        if is_tokenized:  # as it is, like TRL's tokenized pairs
            return dataset

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            """Return the ids of a row's texts, the best first."""
            encode = partial(self.reader.encode, processing_class, row["prompt"])
            return {"ranked_ids": [encode(completion).ids for completion in row["ranked"]]}

        return self._tokenized(dataset, tokenize, "ranked_ids", dataset_name, args)

    # Extends RewardTrainer._set_signature_columns_if_needed: ranked lists, and the kind of a row.
    @override
    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if not self._stock and "kind" not in self._signature_columns:
            self._signature_columns += ["ranked_ids", "kind"]

    # Extends RewardTrainer.compute_loss: its own for pairs, and the row's for ranked lists.
    @override
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss; while evaluating, keep the rewards."""
        if self._stock and not self._evaluates_examples():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        config = self.model.config.get_text_config()
        with reading_last_tokens(config, inputs) if self._reads_last else nullcontext():
            if self._ranked:
                loss, outputs, rewards = self._ranking_loss(model, inputs)
            else:
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                rewards = torch.stack(outputs.logits.squeeze(-1).chunk(2), 1)
        if not self.model.training:
            self._rows = rewards.float().tolist()  # the last call of OverExamples has all examples
        return (loss, outputs) if return_outputs else loss

    def _batch_size(self, inputs):
        return len(inputs["input_ids"]) // inputs.get("list_length", 2)

    def _texts(self):
        return ("ranked_ids",) if self._algorithm == "kwise" else ("chosen_ids", "rejected_ids")

    # Extends Trainer._save: a config without a pad token says that the end token is read.
    @override
    def _save(self, output_dir=None, state_dict=None):
        if self._reads_last:
            self.model.config.get_text_config().pad_token_id = None
        super()._save(output_dir, state_dict)

    def _ranking_loss(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Any, Tensor]:
        length = inputs.pop("list_length")
        outputs = model(**inputs, use_cache=False)
        rewards = outputs.logits.view(-1, length)
        _count_tokens(self, inputs)
        return scores_loss(self._row, self._parameters, rewards=rewards), outputs, rewards


def _check_lists(lists: Sequence[Sequence[Any]], dataset_name: str) -> None:
    """Refuse ranked lists of several lengths: a batch does not say where each of its lists ends."""
    lengths = [len(ranked) for ranked in lists]
    for n, length in enumerate(lengths):
        if length != lengths[0]:
            raise InputError(
                f"dataset: row {n + 1} of the {dataset_name} data set ranks {length} "
                f"completions and row 1 {lengths[0]}; make all lists equally long."
            )


def _longest(ids: list[int] | list[list[int]]) -> int:
    """Return the tokens of a text, or of the longest of several."""
    return len(ids) if isinstance(ids[0], int) else max(map(len, ids))


class BookTokenRewardTrainer(_OnRewardTrainer):
    """RewardTrainer for models that judge every token (ORM) or every step (PRM) of a completion.

    The model is a token classifier, or the name of a language model. The data set has rows of
    `prompt`, `completion`, `label` and perhaps `finished` (ORM), or of `prompt`, `completions` and
    `labels` (PRM).
    """

    config_class, known = BookTokenRewardConfig, ("orm", "prm")

    @with_signature_of(RewardTrainer.__init__)
    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        args = self._take(args, model)
        num_labels = self.reader.num_labels  # 1, or of a process model with classes 3
        meanwhile: dict[str, Any] = {}  # what the config holds while RewardTrainer is made
        if isinstance(model, str):
            options = loading_options(args)
            if (quantization := kwargs.pop("quantization_config", None)) is not None:
                options["quantization_config"] = quantization
            torch.manual_seed(args.seed)  # the head starts at random
            model = token_classifier(model, num_labels, args.head_bias, **options)
            meanwhile["model_init_kwargs"] = None  # RewardTrainer would say that it ignores them
        if model.config.num_labels != num_labels:
            raise InputError(
                f"num_labels is {model.config.num_labels}, not {num_labels}; choose another model."
            )
        model.config.num_labels = 1  # RewardTrainer refuses others
        with fields_set(args, meanwhile):
            super().__init__(model, args=args, **_adapting("TOKEN_CLS", kwargs))
        self.model.config.num_labels = num_labels
        if "data_collator" not in kwargs:
            self.data_collator = self._collating(pad_texts)

    # Replaces RewardTrainer._prepare_dataset, which knows pairs only.
    @override
    def _prepare_dataset(self, dataset, processing_class, args, dataset_name):
        if "input_ids" in dataset.column_names:
            return dataset
        count = len(dataset)
        if self.reader.algorithm == "prm":
            steps = {step for row in dataset["completions"] for step in row}
            self.reader.check_separator(processing_class, sorted(steps))

        def tokenize(row: dict[str, Any]) -> dict[str, Any]:
            """Return ids and labels of a row's tokens, -100 but at places that are judged."""
            text, labels = self.labeled(processing_class, row)
            of_tokens = [-100] * len(text.ids)
            for place, label in zip(text.places, labels, strict=True):
                of_tokens[place] = label
            return {"input_ids": text.ids, "labels": of_tokens}

        options = {"remove_columns": dataset.column_names}  # of `map`
        dataset = self._tokenized(dataset, tokenize, "input_ids", dataset_name, args, **options)
        lost = count - len(dataset) if dataset_name == "train" else 0
        if lost and len({label for row in dataset["labels"] for label in row} - {-100}) < 2:
            # rows of another label were there, but all of them were too long
            raise InputError(
                f"max_length: without the {lost} rows of more than {args.max_length} tokens every "
                "label is the same; raise max_length."
            )
        return dataset

    def labeled(self, tokenizer: Any, row: Mapping[str, Any]) -> tuple[Encoded, list[int]]:
        """Return a row's text and the labels at its places, in the numbers of the loss.

        A process model of two classes learns nothing from neutral steps.
        """
        if self.reader.algorithm == "orm":
            text = self._encode(tokenizer, row)
            return text, [int(row["label"])] * len(text.places)
        text = self.reader.encode_steps(tokenizer, row["prompt"], row["completions"])
        if self.reader.num_labels == 1:
            return text, [{-1: 0, 0: -100, 1: 1}[label] for label in row["labels"]]
        return text, [CLASSES.index(label) for label in row["labels"]]

    # Replaces RewardTrainer._set_signature_columns_if_needed: other columns.
    @override
    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["input_ids", "labels"]

    # Replaces RewardTrainer.compute_loss: the row's loss on the outputs of tokens or steps.
    @override
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss; while evaluating, keep logits and labels."""
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        logits = outputs.logits.squeeze(-1)  # (B, T), or (B, T, 3) of three classes
        tensors = {"logits": logits, "labels": labels}
        if self.args.class_weights:
            tensors["class_weights"] = torch.tensor(self.args.class_weights, device=logits.device)
        loss = scores_loss(self._row, self._parameters, **tensors)
        _count_tokens(self, inputs)
        self._log_accuracy(logits.detach(), labels)
        if not self.model.training and self.reader.algorithm == "prm":  # for the metrics of steps
            is_step = (labels != -100).cpu()
            rows = zip(logits.detach().float().cpu(), labels.cpu(), is_step, strict=True)
            self._rows = [(x[steps], y[steps].tolist()) for x, y, steps in rows]
        return (loss, outputs) if return_outputs else loss

    def _texts(self):
        return ("input_ids",) if self._row.label == "orm (chapter)" else ()

    def _log_accuracy(self, logits: Tensor, labels: Tensor) -> None:
        """Log the share of tokens or steps with a label, over all processes, that are judged so."""
        counted = labels != -100
        predicted = logits.argmax(-1) if logits.dim() == 3 else (logits > 0).long()
        right = ((predicted == labels) & counted).sum()
        counts = self.accelerator.gather(torch.stack([right, counted.sum()])).view(-1, 2).sum(0)
        self._logged["accuracy"].append((counts[0] / counts[1].clamp(min=1)).item())


def _adapting(task_type: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with an adapter's task type, by which PEFT trains and saves the head."""
    if (adapter := kwargs.get("peft_config")) is None:
        return dict(kwargs)
    adapter = deepcopy(adapter)
    adapter.task_type = task_type
    return {**kwargs, "peft_config": adapter}


def _count_tokens(trainer: RewardTrainer, inputs: Mapping[str, Tensor]) -> None:
    """Log the tokens seen so far, as RewardTrainer does."""
    mode = "train" if trainer.model.training else "eval"
    if mode == "train":
        seen = trainer.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
        trainer._total_train_tokens += seen
    trainer._metrics[mode]["num_tokens"] = [trainer._total_train_tokens]
