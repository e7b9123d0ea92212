"""Candidates: several answers to each prompt, which a reward model scores and ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object

from rlhf_trl.reward_models import metrics
from rlhf_trl.reward_models.reader import Encoded, Reader


class RanksCandidates:
    """Trainer mixin of reward models: scores candidates by its `reader`, on all processes."""

    reader: Reader
    candidates: Sequence[Mapping[str, Any]] = ()  # `prompt`, `completion`, `finished`, `label`
    # what the newest evaluation has found: `rows`, with logits or scores, and the candidates'
    # `scores`
    judged: dict[str, list[Any]] | None = None

    def ranking(self) -> tuple[list[float], list[bool], list[int]]:
        """Return each candidate's default score, label and prompt number, as last evaluated."""
        scores = [by_name[self.reader.names[0]] for by_name in self.judged["scores"]]
        labels = [bool(row["label"]) for row in self.candidates]
        return scores, labels, metrics.prompt_groups([row["prompt"] for row in self.candidates])

    def _score_candidates(self) -> list[dict[str, float]]:
        """Score all candidates; processes share the work evenly, as the forward is collective."""
        rows, processes = self.candidates, self.accelerator.num_processes
        if not rows:
            return []
        share = -(-len(rows) // processes)  # rounded up: rows come again where the last ones end
        first = share * self.accelerator.process_index
        places = [place % len(rows) for place in range(first, first + share)]
        texts = [self._encode(self.processing_class, rows[place]) for place in places]
        logits = self.reader.outputs(
            self.model_wrapped,
            self.processing_class,
            texts,
            self.args.per_device_eval_batch_size,
            self.accelerator.device,
        )
        scores = map(self.reader.scores, logits)
        by_place = dict(gather_object(list(zip(places, scores, strict=True))))
        return [by_place[place] for place in range(len(rows))]

    def _encode(self, tokenizer: Any, row: Mapping[str, Any]) -> Encoded:
        finished = row.get("finished", True)
        return self.reader.encode(tokenizer, row["prompt"], row["completion"], finished)
