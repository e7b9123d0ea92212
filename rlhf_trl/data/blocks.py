"""The blocks `dataset:` and `samples:` of configs, apart from what loads the data they name.

Those of reward models are in judgment_blocks.py.
"""

from dataclasses import MISSING, dataclass
from typing import Any, Literal

from rlhf_trl.errors import setting


@dataclass
class Spec:
    """One reasoning-gym task: its registered `name`, `weight` in the mixture, and own `config`."""

    name: str = setting("as reasoning-gym registers it", MISSING)
    weight: float = setting("in the mixture", 1.0, range="a number above 0")
    config: dict[str, Any] = setting("of the task", factory=dict)


@dataclass
class GymData:
    """The `dataset:` block: a weighted mixture of reasoning-gym tasks.

    Seeds s and s + 1 share nearly all rows, since reasoning-gym draws entry i of seed s + 1 as
    entry i + 1 of seed s; for other rows, write one that is 100,000 away.
    """

    specs: list[Spec] = setting("reasoning-gym tasks: name, weight, config", MISSING)
    source: Literal["reasoning_gym"] = setting("or files and hub sets: path", "reasoning_gym")
    size: int = setting("training rows", 2000, range="1 to 1000000")
    seed: int = setting("of the training rows", 0)
    slice: str | None = setting("share of the prompts to train on, by a hash: ':50%', '50%:'")
    eval_size: int = setting("held-out rows; of files: prompts", 256, range="1 to 1000000")
    eval_seed: int = setting("of the held-out rows", 1000)
    system_prompt: str = setting("none, deepseek_zero (the gym's) or a text", "none")


@dataclass
class MixedFile:
    """A file that is mixed with others, and its `weight` beside the 1 of `dataset.path`."""

    path: str = setting("file, folder or hub name", MISSING)
    weight: float = setting(
        "of its examples; those of dataset.path: 1", 1.0, range="a number above 0"
    )
    split: str = setting("of a hub data set, or a slice", "train")
    name: str | None = setting("config of a hub data set")
    reader: str | None = setting("of a published data set; null: by its columns")
    columns: dict[str, str] = setting("{our name: the data set's name}", factory=dict)


@dataclass
class FileData:
    """The `dataset:` block of a data set of one's own.

    `eval_size` prompts, chosen by a hash of their text, are held out with all their rows; or, with
    `eval_path` (by default `path`) or `eval_split` (by default `split` without its slice), the
    first `eval_size` prompts there (by default 256) that are not trained on.
    """

    path: str = setting("file (JSON, JSONL, Parquet, CSV), folder or hub name", MISSING)
    source: Literal["path"] = setting("or reasoning-gym tasks: reasoning_gym", "path")
    split: str = setting("of a hub data set, or a slice: train[:90%]", "train")
    slice: str | None = setting("share of the prompts to train on, by a hash: ':50%', '50%:'")
    eval_path: str | None = setting("held-out rows from another file")
    eval_split: str | None = setting("held-out rows from another slice")
    eval_size: int | None = setting("prompts to hold out", range="1 or more")
    columns: dict[str, str] = setting("{our name: the data set's name}", factory=dict)
    name: str | None = setting("config of a hub data set")
    reader: str | None = setting("sharegpt, alpaca, openai, dpo_pairs, hh, gsm8k, ...")
    system_prompt: str | None = setting("for prompts without a system message")
    skip_bad: int = setting(
        "bad rows of each side to leave out; more are an error", 0, range="0 or more"
    )
    mix: list[MixedFile] = setting("other files, with their weights", factory=list)
    limit: int | None = setting("rows to read for training; of a mix: in all", range="1 or more")


@dataclass
class Samples:
    """The `samples:` block: a greedy and a sampled answer to each of some held-out prompts."""

    every: int = setting("steps between panels; 0: no panels", 0, range="0 or more")
    count: int = setting("prompts in a panel", 4, range="1 or more")
    choice: Literal["fixed", "round_robin"] = setting(
        "always the first ones, or the next", "round_robin"
    )
    file: str | None = setting("other prompts: a JSON list, or one per line")
    temperature: float = setting("of the sampled answer", 1.0, range="0 or more")
    top_p: float = setting("of the sampled answer", 1.0, range="a number above 0, at most 1")
    max_tokens: int | None = setting("null: as in evaluation", range="1 or more")
    start: bool = setting("one panel before the first update", True)


PromptData = GymData | FileData  # the `dataset:` block of recipes that learn from rewards


@dataclass
class OfflinePairs(GymData):
    """Pairs of the right answer and one of the demonstrator's errors."""

    pairs: Literal["offline"] = setting("right answers beside errors, or sampled ones", "offline")


@dataclass
class SampledPairs(GymData):
    """Pairs of right and wrong answers of a model; `mixed`: and of all offline pairs, shuffled."""

    pairs: Literal["on_policy", "mixed"] = setting("sampled ones, or both kinds", "on_policy")
    samples_per_prompt: int = setting("answers to choose from", 8, range="2 or more")
    sampled_from: str | None = setting("null: the model that is trained")


@dataclass
class RankablePairs(SampledPairs):
    """`SampledPairs` to align a policy with, which a reward model may rank."""

    scored_by: str | None = setting("reward model that ranks the answers; null: right and wrong")


PreferenceData = OfflinePairs | RankablePairs | FileData  # the `dataset:` block of preference data


@dataclass
class AnswersToLearn(FileData):
    """A file or hub data set of `prompt` and `completion`, or of conversations in `messages`.

    Training is on the `last` turn, which is the assistant's, or on `all` turns of the assistant.
    """

    turns: str = setting("to train on", "last", choices=("last", "all"))


DemonstrationData = GymData | AnswersToLearn  # the `dataset:` block of supervised fine-tuning
