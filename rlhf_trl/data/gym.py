"""reasoning-gym tasks as prompt data sets with a training and a held-out side that never meet."""

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rlhf_trl.data.blocks import GymData, Spec
from rlhf_trl.data.prompt_keys import prompt_key
from rlhf_trl.errors import InputError, nearest

Row = dict[str, Any]
GYM_COLUMNS = ("question", "answer", "task")
HELD_OUT_PART = 10  # one question in ten belongs to evaluation


def question_key(entry: dict[str, Any]) -> str:
    """Return a text that is the same for two entries if and only if they ask the same.

    It is the `prompt_key` of the question; of a chain_sum, it is the terms, whatever their order.
    """
    if entry["metadata"]["source_dataset"] != "chain_sum":
        return prompt_key(entry["question"])
    words = f"+ {entry['metadata']['expression']}".split()
    pairs = zip(words[::2], map(int, words[1::2]), strict=True)
    return str(sorted(term if sign == "+" else -term for sign, term in pairs))


def is_held_out(entry: dict[str, Any]) -> bool:
    """Whether an entry belongs to the held-out side: a fixed tenth, by the hash of its question.

    So a word or a sum is never on both sides, whatever the seeds.
    """
    key = question_key(entry)
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_PART == 0


class GymTasks:
    """The entries of a run, numbered, with the gym's scorer beside them.

    `train` holds `size` rows with `prompt`, `question`, `answer`, `task`, `id`, and `held_out` as
    many as `eval_size`, whose questions are all different as texts: two sums may have the same
    terms in another order.
    """

    def __init__(self, config: GymData):
        prompt = config.system_prompt
        if prompt == "deepseek_zero":
            from reasoning_gym.utils import SYSTEM_PROMPTS

            prompt = SYSTEM_PROMPTS["DeepSeekZero"]
        self._system = [] if prompt == "none" else [{"role": "system", "content": prompt}]
        self._entries: list[tuple[Any, dict[str, Any]]] = []
        self.passed_over = 0  # training candidates that belong to the held-out side
        self.train = [self._row(*e) for e in self._draw(config, config.seed, config.size, False)]
        self.held_out = [
            self._row(*e) for e in self._draw(config, config.eval_seed, config.eval_size, True)
        ]

    def score(self, answer: str | None, row_id: int) -> float:
        """Return the gym's own score of an `answer` (None: no answer found) to row `row_id`."""
        scorer, entry = self._entries[row_id]
        return float(scorer(answer, entry))

    def _row(self, scorer: Any, entry: dict[str, Any]) -> dict[str, Any]:
        self._entries.append((scorer, entry))
        return {
            "prompt": [*self._system, {"role": "user", "content": entry["question"]}],
            "question": entry["question"],
            "answer": str(entry["answer"]),
            "task": entry["metadata"]["source_dataset"],
            "id": len(self._entries) - 1,
        }

    def _draw(
        self, config: GymData, seed: int, count: int, held_out: bool
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the scorer and the entry of `count` questions of one side."""
        # many more than `count`: only a tenth is held out, and repeated questions are passed over
        candidates = 100 * count + 10_000
        dataset = _mixture(config.specs, seed, candidates)
        drawn_keys: set[str] = set()
        drawn = 0
        slice_to_train = None  # train on all
        if config.slice and not held_out:
            from rlhf_trl.data.slices import Slice

            slice_to_train = Slice(config.slice)
        for index in range(candidates):
            try:
                entry = dataset[index]  # generated now
            except (IndexError, ValueError) as error:  # options that leave nothing to draw
                names = [spec.name for spec in config.specs]
                raise InputError(
                    f"dataset.specs: {names} can draw nothing ({error}); widen the tasks' config."
                ) from error
            if is_held_out(entry) != held_out:
                if not held_out:
                    self.passed_over += 1
                continue
            if slice_to_train and not slice_to_train.has_key(question_key(entry)):
                continue
            key = prompt_key(entry["question"])
            if held_out and key in drawn_keys:  # training questions may be drawn again
                continue
            drawn_keys.add(key)
            drawn += 1
            yield dataset.score_answer, entry
            if drawn == count:
                return
        side, field_name = ("held-out", "eval_size") if held_out else ("training", "size")
        raise InputError(
            f"dataset.{field_name}: the tasks {[s.name for s in config.specs]} gave only {drawn} "
            f"{side} questions for the {count} asked; write {field_name}: {drawn} or widen the "
            "tasks' config."
        )


def _mixture(specs: list[Spec], seed: int, size: int) -> Any:
    """Return `size` entries of a mixture of tasks, as a data set of reasoning-gym."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if not specs:
        raise InputError("dataset.specs is empty; name at least one reasoning-gym task.")
    for i, spec in enumerate(specs):
        where = f"dataset.specs.{i}"
        if spec.name not in DATASETS:
            raise InputError(
                f"{where}.name: there is no task {spec.name!r}{nearest(spec.name, DATASETS)}."
            )
        _, config_class = DATASETS[spec.name]
        known = {f.name for f in fields(config_class)} - {"seed", "size"}
        for option in spec.config:
            if option not in known:
                raise InputError(
                    f"{where}.config.{option}: task {spec.name!r} has no such option"
                    f"{nearest(option, known)} (it has {', '.join(sorted(known))})."
                )
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise InputError(f"dataset.specs names a task twice ({names}); give each task one entry.")
    try:
        tasks = [DatasetSpec(spec.name, spec.weight, spec.config) for spec in specs]
        return reasoning_gym.create_dataset("composite", size=size, seed=seed, datasets=tasks)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(f"dataset.specs: reasoning-gym refused {names}: {error}.") from error
