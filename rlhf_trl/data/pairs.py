"""Preference data: pairs made of reasoning-gym tasks, and pairs or labeled answers of files."""

from collections.abc import Callable

from rlhf_trl.data.answers import completion_text
from rlhf_trl.data.blocks import FileData, PreferenceData
from rlhf_trl.data.examples import Examples, examples
from rlhf_trl.data.gym import GymTasks, Row
from rlhf_trl.data.sampled import Score, groups, mixed_pairs, on_policy_pairs, ranked_pairs
from rlhf_trl.errors import InputError

# Samples a model's answers: takes rows of `GymTasks`, the number of answers to each, and their side
# ("train" or "held-out"); returns the answers as rows with a `completion`, question by question.
Sample = Callable[[list[Row], int, str], list[Row]]


def load_preferences(
    config: PreferenceData,
    max_samples: int | None = None,
    unpaired: bool = False,
    sample: Sample | None = None,
    margin: bool = False,
    score: Score | None = None,
) -> Examples:
    """Make or read the pairs that a `dataset:` block describes.

    Args:
        config: the block.
        max_samples: train on at most this many rows, from the first.
        unpaired: whether a file may hold labeled examples (`UNPAIRED`) in place of pairs.
        sample: samples answers, for pairs that are not offline; if it returns more to a question
            than it was asked for, only the first ones are used.
        margin: whether the column `margin` of a file's pairs is read.
        score: scores answers, where the block has `scored_by`. Training pairs are then the best and
            the worst answer; held-out pairs remain a right and a wrong one, so that runs can be
            compared.
    """
    if isinstance(config, FileData):
        from rlhf_trl.data.files import read_sides
        from rlhf_trl.data.pair_files import checked_pairs

        shapes = ("pairs", "unpaired") if unpaired else ("pairs",)
        options = {"unpaired": unpaired, "margin": margin}
        return read_sides(config, max_samples, checked_pairs, *shapes, **options)
    tasks = GymTasks(config)
    questions = tasks.train[:max_samples]
    if config.pairs != "on_policy":
        from rlhf_trl.data.made import offline_pairs
    if config.pairs == "offline":
        train = offline_pairs(questions, config.seed)
        return examples(train, offline_pairs(tasks.held_out, config.eval_seed), tasks)
    count = config.samples_per_prompt

    def sampled_pairs(rows: list[Row], side: str) -> list[Row]:
        outcomes = sample(rows, count, side)
        # `sample` may return more than `count`, so that others can use the rest (see judgments.py)
        answers = [group[:count] for group in groups(outcomes, number=len(rows))]
        if score and side == "train":
            return ranked_pairs(rows, answers, score)
        texts = [[completion_text(row["completion"]) for row in group] for group in answers]
        return on_policy_pairs(rows, texts, config.seed)

    train = sampled_pairs(questions, "train")
    if not train:
        lacking = (
            "two answers that score differently" if score else "both a right and a wrong answer"
        )
        raise InputError(
            f"dataset.pairs: the model gave no prompt {lacking}, so there is no on-policy pair; "
            "raise dataset.size or samples_per_prompt, or use offline pairs."
        )
    held_out = sampled_pairs(tasks.held_out, "held-out")
    reason = f"right and wrong not both among {count} samples"
    reason_to_train = f"all {count} samples score alike" if score else reason
    dropped = {reason_to_train: len(questions) - len(train)}
    dropped_held_out = {reason: len(tasks.held_out) - len(held_out)}
    if config.pairs == "mixed":
        train = mixed_pairs(offline_pairs(questions, config.seed), train, config.seed)
        offline_held_out = offline_pairs(tasks.held_out, config.eval_seed)
        held_out = mixed_pairs(offline_held_out, held_out, config.eval_seed)
    return examples(train, held_out, tasks, dropped, dropped_held_out=dropped_held_out)
