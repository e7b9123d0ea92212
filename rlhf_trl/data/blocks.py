"""The blocks `dataset:` and `samples:` of configs, apart from what loads the data they name.

Those of reward models are in judgment_blocks.py.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_trl.errors import within


@dataclass
class Spec:
    """One reasoning-gym task: its registered `name`, `weight` in the mixture, and own `config`."""

    name: str
    weight: float = within("a number above 0", 1.0)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class GymData:
    """The `dataset:` block: a weighted mixture of reasoning-gym tasks.

    Seeds s and s + 1 share nearly all rows, since reasoning-gym draws entry i of seed s + 1 as
    entry i + 1 of seed s; for other rows, write one that is 100,000 away.
    """

    specs: list[Spec]  # reasoning-gym tasks: name, weight, config
    source: Literal["reasoning_gym"] = "reasoning_gym"  # or files and hub sets: path
    size: int = within("1 to 1000000", 2000)  # training rows
    seed: int = 0  # of the training rows
    eval_size: int = within("1 to 1000000", 256)  # held-out rows; of files: prompts
    eval_seed: int = 1000  # of the held-out rows
    system_prompt: str = "none"  # none, deepseek_zero (the gym's) or a text


@dataclass
class FileData:
    """The `dataset:` block of a data set of one's own.

    `eval_size` prompts, chosen by a hash of their text, are held out with all their rows; or, with
    `eval_path` (by default `path`) or `eval_split` (by default `split` without its slice), the
    first `eval_size` prompts there (by default 256) that are not trained on.
    """

    path: str  # file (JSON, JSONL, Parquet, CSV), folder or hub name
    source: Literal["path"] = "path"
    split: str = "train"  # of a hub data set, or a slice: train[:90%]
    eval_path: str | None = None  # held-out rows from another file
    eval_split: str | None = None  # held-out rows from another slice
    eval_size: int | None = within("1 or more", None)  # prompts to hold out
    columns: dict[str, str] = field(default_factory=dict)  # {our name: the data set's name}
    name: str | None = None  # config of a hub data set
    reader: str | None = None  # of a published data set: gsm8k, hh, prm800k, ...
    system_prompt: str | None = None  # for prompts without a system message
    skip_bad: int = within("0 or more", 0)  # bad rows of each side to leave out; more are an error


@dataclass
class Samples:
    """The `samples:` block: a greedy and a sampled answer to each of some held-out prompts."""

    every: int = within("0 or more", 0)  # steps between panels; 0: no panels
    count: int = within("1 or more", 4)  # prompts in a panel
    choice: Literal["fixed", "round_robin"] = "round_robin"  # always the first ones, or the next
    file: str | None = None  # other prompts: a JSON list, or one per line
    temperature: float = within("0 or more", 1.0)  # of the sampled answer
    top_p: float = within("a number above 0, at most 1", 1.0)  # of the sampled answer
    max_tokens: int | None = within("1 or more", None)  # null: as in evaluation
    start: bool = True  # one panel before the first update


PromptData = GymData | FileData  # the `dataset:` block of recipes that learn from rewards


@dataclass
class OfflinePairs(GymData):
    """Pairs of the right answer and one of the demonstrator's errors."""

    pairs: Literal["offline"] = "offline"  # right answers beside errors, or sampled ones


@dataclass
class SampledPairs(GymData):
    """Pairs of right and wrong answers of a model; `mixed`: and of all offline pairs, shuffled."""

    pairs: Literal["on_policy", "mixed"] = "on_policy"
    samples_per_prompt: int = within("2 or more", 8)  # answers to choose from
    sampled_from: str | None = None  # null: the model that is trained


PreferenceData = OfflinePairs | SampledPairs | FileData  # the `dataset:` block of preference data


@dataclass
class AnswersToLearn(FileData):
    """A file or hub data set of `prompt` and `completion`, or of conversations in `messages`.

    Training is on the `last` turn, which is the assistant's, or on `all` turns of the assistant.
    """

    turns: str = field(default="last", metadata={"choices": ("last", "all")})  # to train on


DemonstrationData = GymData | AnswersToLearn  # the `dataset:` block of supervised fine-tuning
