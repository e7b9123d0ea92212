"""Pairs of sampled answers that a reward model ranks."""

from collections.abc import Callable
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.run.folders import model_folder


def scorer_of_pairs(config: Any, tokenizer: Any, args: Any) -> Callable[[list[Any]], list[float]]:
    """Return a function that scores sampled answers by a reward model.

    Args:
        config: the `dataset:` block, which names the reward model in `scored_by`.
        tokenizer: that of the model which answered.
        args: of the run.

    Raises:
        InputError: the model cannot be read, or only some of the pairs would be ranked by it.
    """
    if config.pairs != "on_policy":
        raise InputError(
            f"dataset.scored_by ranks sampled answers, and dataset.pairs: {config.pairs} takes "
            "others, too; write on_policy, or remove scored_by."
        )
    try:
        path = model_folder("reward_model", config.scored_by)
        reward_model = load_reward_model(path, tokenizer, args)
    except InputError as error:  # which names the field of other recipes
        message = str(error).replace("reward_model", "dataset.scored_by", 1)
        raise InputError(message) from error

    def score(answers: list[Any]) -> list[float]:
        return reward_model(
            prompts=[answer["prompt"] for answer in answers],
            completions=[answer["completion"] for answer in answers],
            finished=[answer["finished"] for answer in answers],
            completion_ids=[[] for _ in answers],  # read where `finished` is not known
        )

    return score
