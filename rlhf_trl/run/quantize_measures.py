"""What `rlhf-trl quantize` measures: reward models by the pairs they tell apart, policies by KL."""

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from rlhf_trl.book.reward_models import bradley_terry
from rlhf_trl.data.judgments import load_pairs_or_ranked
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.answer_kl import KL, along_answers
from rlhf_trl.evaluation.side_by_side import Policy, mean_and_error
from rlhf_trl.models import ADAPTER
from rlhf_trl.output import read_lines
from rlhf_trl.policies import load_language_model
from rlhf_trl.reward_models.metrics import prompt_groups
from rlhf_trl.reward_models.reader import Reader
from rlhf_trl.reward_models.report import SCORES
from rlhf_trl.rewards.from_model import BATCH, load_classifier
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.evaluate import run_of
from rlhf_trl.run.merge import merge
from rlhf_trl.run.named import NOT_TRAINED, Named
from rlhf_trl.run.options import join_options
from rlhf_trl.run.stages import stage_of_config

# By name: the values of the `whole` and of the `quantized` model, and the standard `error`.
Numbers = dict[str, dict[str, float]]


class Policies:
    """A policy and what becomes of it, which read answers to the held-out prompts of its run."""

    reader: Reader | None = None  # it scores no texts

    def __init__(self, model: Named, config: str | None, words: Sequence[str]):
        self.word = model.word
        self._run = run_of([model], config, words)
        self._run.loaded.model.dtype = "auto"  # as it was saved, whatever the run was trained in
        self.device = self._run.loaded.trl.device
        self.measured_on = f"{len(self._run.rows)} held-out prompts of {self._run.path}"

    def merge(self, folder: str) -> None:
        """Write what an adapter and its base make."""
        merge(self.word, folder)

    def load_plain(self, source: str, options: dict[str, Any]) -> Any:
        """Load the model alone, with options of `from_pretrained`."""
        attention = self._run.loaded.model.attn_implementation
        return load_language_model(source, dtype="auto", attn_implementation=attention, **options)

    def load(self, source: str) -> Policy:
        """Load it as a policy that answers."""
        return self._run.load(Named(self.word, source))

    def compare(self, whole: Policy, quantized: Policy) -> Numbers:
        """Let the whole one answer, and measure how the quantized one reads its sampled answers."""
        rows = self._run.rows
        whole.held_out = rows
        whole.check(rows)
        _, answers = whole.complete(rows)
        measures = {**KL, "same": lambda logits, other, _: logits.argmax(-1) == other.argmax(-1)}
        scores = along_answers(whole, quantized, answers, measures)
        kl, error = mean_and_error(scores["kl"], prompt_groups([row["prompt"] for row in rows]))
        tokens = sum(len(answer.ids) for answer in answers)
        of_kl = {"quantized": kl} if error is None else {"quantized": kl, "error": error}
        return {
            "KL of an answer, nats": of_kl,
            "same first choice, share of tokens": {"quantized": sum(scores["same"]) / tokens},
        }


class _Classifier(NamedTuple):
    """A reward model, and the tokenizer that it has."""

    model: Any
    tokenizer: Any


class RewardModels:
    """A reward model and what becomes of it, which score right and wrong answers to prompts."""

    def __init__(self, model: Named, config: str | None, words: Sequence[str]):
        self.word = model.word
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model
        self.reader = Reader.read(model.path)
        path = config or model.config
        if path is None:
            raise InputError(
                f"{model.word} is of no run here, on whose answers it could be measured; name the "
                "config of one with --config."
            )
        self._rows = _judged_rows(path, words)
        better, worse, weights = _pairs(self._rows)
        if not weights:
            raise InputError(
                f"{path} holds out no right and wrong answer to a prompt; name another."
            )
        self._better, self._worse = torch.tensor(better), torch.tensor(worse)
        self._weights = torch.tensor(weights) / sum(weights)
        self.measured_on = f"{len(weights)} pairs of held-out answers of {path}"

    def merge(self, folder: str) -> None:
        """Write what an adapter and its base make, with the config that it has."""
        path = Path(self._model.path)
        model, tokenizer = self.load(str(path))
        # `load` may read texts otherwise than the config says, which adapters may lack
        base = json.loads((path / ADAPTER).read_text())["base_model_name_or_path"]
        has_config = (path / "config.json").is_file()
        saved = transformers.AutoConfig.from_pretrained(path if has_config else base)
        model.config.get_text_config().pad_token_id = saved.get_text_config().pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def load_plain(self, source: str, options: dict[str, Any]) -> Any:
        """Load the model alone, with options of `from_pretrained`."""
        kind = "Token" if self.reader.per_token else "Sequence"
        auto = getattr(transformers, f"AutoModelFor{kind}Classification")
        return auto.from_pretrained(source, dtype="auto", **options)

    def load(self, source: str) -> _Classifier:
        """Load it as a reward is loaded."""
        args = SimpleNamespace(device=self.device, process_index=1)  # 0 would print notes
        model, tokenizer = load_classifier(source, self.reader, args)
        return _Classifier(model.eval().to(self.device), tokenizer)

    def compare(self, whole: _Classifier, quantized: _Classifier) -> Numbers:
        """Measure how well both tell the better answer of each pair."""
        numbers: Numbers = {}
        scores: dict[str, Tensor] = {}
        for side, loaded in (("whole", whole), ("quantized", quantized)):
            started = perf_counter()
            scores[side] = self._scores(loaded)
            seconds = perf_counter() - started
            better, worse = scores[side][self._better], scores[side][self._worse]
            values = {
                "pair accuracy": (better > worse) + (better == worse) / 2,
                "pair loss": bradley_terry(better, worse),
                "gap of a pair": better - worse,
            }
            for name, by_pair in values.items():
                numbers.setdefault(name, {})[side] = float((by_pair * self._weights).sum())
            numbers.setdefault("seconds to score", {})[side] = seconds
        change = (scores["quantized"] - scores["whole"]).abs()
        numbers["mean change of a score"] = {"quantized": float(change.mean())}
        numbers["largest change of a score"] = {"quantized": float(change.max())}
        return numbers

    def _scores(self, loaded: _Classifier) -> Tensor:
        """Return the usual score of each answer, (N,)."""
        reader, tokenizer = self.reader, loaded.tokenizer
        texts = []
        for row in self._rows:
            finished = row.get("finished", True)
            texts.append(reader.encode(tokenizer, row["prompt"], row["completion"], finished))
        logits = reader.outputs(loaded.model, tokenizer, texts, BATCH, self.device)
        return torch.tensor([reader.scores(of_text)[reader.names[0]] for of_text in logits])


def _judged_rows(path: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return held-out answers of the run with a config, with a `label` and the `group` to compare.

    They are what the run has scored, where it left that; else the pairs that its config names.
    """
    scored = Path(path).parent / SCORES
    if scored.is_file() and not words:
        rows = read_lines(scored)
        groups = prompt_groups([row["prompt"] for row in rows])
        return [{**row, "group": group} for row, group in zip(rows, groups, strict=True)]
    stage = stage_of_config(read_config(path), path)
    remedy = f"has left no {SCORES}, and holds out no pairs; name another with --config"
    if stage.name != "reward":
        raise InputError(f"{path} {remedy}.")
    loaded = stage.load(join_options(words, ["--config", path, *NOT_TRAINED.split()]))

    def sample(*_: Any) -> Any:
        """Refuse to sample answers: that takes a model, and minutes."""
        raise InputError(f"{path} {remedy}.")

    held_out = load_pairs_or_ranked(loaded.own.dataset, loaded.own.max_samples, sample).held_out
    rows = []
    for group, pair in enumerate(held_out or []):
        for side, is_better in (("chosen", True), ("rejected", False)):
            if side not in pair:
                raise InputError(f"{path} {remedy}.")
            row = {"prompt": pair["prompt"], "completion": pair[side]}
            rows.append({**row, "label": is_better, "group": group})
    return rows


def _pairs(rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """Return the places of the better and the worse answer of all pairs of a group, and weights.

    All groups weigh the same, and within one all pairs.
    """
    right: dict[int, list[int]] = defaultdict(list)
    wrong: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        side = right if row["label"] else wrong
        side[row["group"]].append(place)
    better, worse, weights = [], [], []
    for group in right.keys() & wrong.keys():
        pairs = [*product(right[group], wrong[group])]
        better += [place for place, _ in pairs]
        worse += [place for _, place in pairs]
        weights += [1 / len(pairs)] * len(pairs)
    return better, worse, weights
