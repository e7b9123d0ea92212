"""What a reward model is used for, measured in evaluation: held-out rows, ranked candidates."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from datasets import Dataset
from torch import Tensor
from typing_extensions import override

from rlhf_trl.evaluation.candidates import RanksCandidates
from rlhf_trl.reward_models import metrics
from rlhf_trl.reward_models.reader import CLASSES, judged_class


class JudgesRows(RanksCandidates):
    """Trainer mixin: evaluation adds metrics of the held-out rows and of ranked candidates.

    `compute_loss` leaves in `_rows`, by example, what the metrics read: the scores of a pair or a
    list, best first; of a process model, the logits and labels of the steps.
    """

    on_answers: Any = None  # called on the main process with step, metrics, and [] for answers
    _rows: list[Any]

    # Extends RewardTrainer.evaluate, to tell afterwards.
    @override
    def evaluate(self, *args, **kwargs):
        """Evaluate as RewardTrainer does, with the added metrics, and tell `on_answers`."""
        metrics = super().evaluate(*args, **kwargs)
        if self.on_answers is not None and self.is_world_process_zero():
            skipped = ("time", "per_second", "epoch", "num_tokens")
            shown = {name: x for name, x in metrics.items() if not name.endswith(skipped)}
            self.on_answers(self.state.global_step, shown, [])
        return metrics

    # Extends OverExamples.evaluation_loop, whose metrics `evaluate` logs.
    @override
    def evaluation_loop(self, dataloader, *args, metric_key_prefix="eval", **kwargs):
        """Run the loop, then add what the model is used for."""
        self._rows, kwargs["metric_key_prefix"] = [], metric_key_prefix
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        if not self._evaluates_examples():
            return output
        self.judged = {"rows": self._rows, "scores": self._score_candidates()}
        added = self._row_metrics(dataloader.dataset)
        if self.candidates:
            added |= metrics.ranking_metrics(*self.ranking())
        for name, value in added.items():
            self._metrics["eval"].pop(name, None)  # RewardTrainer's, of the same name
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    def _kept(self, output: Any) -> dict[str, Tensor]:
        return {"logits": output.logits}

    def _row_metrics(self, dataset: Any) -> dict[str, float]:
        """Return the metrics of the held-out rows; an outcome model's rows have none."""
        if self.reader.algorithm == "orm":
            return {}
        if self.reader.algorithm == "prm":
            predicted = [judged_class(logits) for logits, _ in self._rows]
            return metrics.step_metrics(predicted, [self.meaning(y) for _, y in self._rows])
        results = metrics.pair_metrics(*_sides(self._rows))
        has_kinds = isinstance(dataset, Dataset) and "kind" in dataset.column_names
        kinds = dataset["kind"][: len(self._rows)] if has_kinds else []
        for kind in dict.fromkeys(kinds):
            of_kind = [row for row, k in zip(self._rows, kinds, strict=True) if k == kind]
            accuracy = metrics.pair_metrics(*_sides(of_kind))["pair_accuracy"]
            results[f"pair_accuracy_{kind}"] = accuracy
        return results

    def meaning(self, labels: Sequence[int]) -> list[int]:
        """Return the labels -1, 0, 1 that the numbers of a process model's loss stand for."""
        return [CLASSES[i] if self.reader.num_labels > 1 else 2 * i - 1 for i in labels]


def _sides(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return the better and the worse rewards of all neighbors in ranked lists (or pairs)."""
    pairs = [pair for row in rows for pair in pairwise(row)]
    return [better for better, _ in pairs], [worse for _, worse in pairs]
