"""Preference data: pairs made of reasoning-gym tasks, and pairs or labeled answers of files."""

from collections.abc import Callable

from rlhf_trl.data.answers import completion_text
from rlhf_trl.data.blocks import FileData, PreferenceData
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.gym import GymTasks, Row
from rlhf_trl.data.made import groups, mixed_pairs, offline_pairs, on_policy_pairs
from rlhf_trl.errors import InputError

Sample = Callable[[list[Row], int, str], list[Row]]


def load_preferences(
    config: PreferenceData,
    max_samples: int | None = None,
    unpaired: bool = False,
    sample: Sample | None = None,
    margin: bool = False,
) -> Examples:
    """Make or read the pairs that a `dataset:` block describes, of the first `max_samples` rows.

    `unpaired` says whether examples with `UNPAIRED` columns are accepted beside pairs, and `margin`
    whether that column is read. `sample` returns answers, as rows with a `completion`, those of one
    question in a row; it takes rows of `GymTasks`, the number of answers to each, and their side,
    "train" or "held-out". Answers beyond that number are ignored.
    """
    if isinstance(config, FileData):
        from rlhf_trl.data.files import read_sides
        from rlhf_trl.data.pair_files import checked_pairs

        shapes, how = ("pairs", "unpaired"), {"unpaired": unpaired, "margin": margin}
        return read_sides(config, max_samples, checked_pairs, *shapes[: 1 + unpaired], **how)
    tasks = GymTasks(config)
    asked = tasks.train[:max_samples]
    if config.pairs == "offline":
        train = offline_pairs(asked, config.seed)
        return examples(train, offline_pairs(tasks.held_out, config.eval_seed), tasks)
    count = config.samples_per_prompt

    def pairs(rows: list[Row], side: str) -> list[Row]:
        each = groups(sample(rows, count, side), len(rows))
        texts = [[completion_text(row["completion"]) for row in group[:count]] for group in each]
        return on_policy_pairs(rows, texts, config.seed)

    rows = pairs(asked, "train")
    if not rows:
        raise InputError(
            "dataset.pairs: the model gave no prompt both a right and a wrong answer, so there is "
            "no on-policy pair; raise dataset.size or samples_per_prompt, or use offline pairs."
        )
    held_out = pairs(tasks.held_out, "held-out")
    reason = f"right and wrong not both among {count} samples"
    dropped = {reason: len(asked) - len(rows)}
    dropped_held_out = {reason: len(tasks.held_out) - len(held_out)}
    if config.pairs == "mixed":
        rows = mixed_pairs(offline_pairs(asked, config.seed), rows, config.seed)
        offline = offline_pairs(tasks.held_out, config.eval_seed)
        held_out = mixed_pairs(offline, held_out, config.eval_seed)
    return examples(rows, held_out, tasks, dropped, dropped_held_out=dropped_held_out)
