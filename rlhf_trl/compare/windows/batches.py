"""The fixed batches: how long texts are, how far the policy has moved, what is rare about them."""

from dataclasses import dataclass
from typing import Any

LIMIT = 12  # tokens of a completion at most

LENGTH = 8  # tokens of each completion where all have equal lengths

GROUP = 4  # completions per prompt

ROWS = 8  # completions per micro-batch

WEIGHTS = (1.0, 0.5)  # of the two rewards


@dataclass(frozen=True)
class PolicyBatch:
    """One fixed window."""

    name: str  # what `--batches` says
    text: str  # what is special about it
    # how far the policy has moved since it generated, in standard deviations of its weights
    drift: float = 0.0
    pushed: bool = False  # it moved until every token with an advantage is outside the clip range
    # completions of different lengths, some cut off at the limit; otherwise all have LENGTH tokens
    ragged: bool = False
    accumulation: int = 1  # micro-batches of the window
    per_generation: int = 1  # micro-batches that one generation feeds
    # how often a generation is used; of several windows that it feeds, the second one is measured
    iterations: int = 2
    beta: float = 0.0  # weight of the KL, for rows that read one
    temperature: float = 1.0  # TRL's
    reward_scale: float = 1.0  # multiplies all rewards
    group: int = GROUP  # completions per prompt
    rows: int = ROWS  # completions per micro-batch
    limit: int = LIMIT  # tokens of a completion at most
    weights: tuple[float, float] = WEIGHTS  # of the two rewards
    reward: float | None = None  # every completion's, in float32 as in training; None: they differ
    tools: bool = False  # every third token came from a tool
    sampler: bool = False  # another sampler, with log-probabilities of its own, drew the tokens
    max_length: int | None = None  # of prompt and completion, where examples are given
    # Many rewards are None, and so are many log-probabilities of the sampler; others lie beyond 0
    # and 1. There is padding among the tokens of completions, and prompts are plain texts.
    gaps: bool = False
    # A reward model scores beside the two functions. Weights and steps of a generation are left to
    # TRL's defaults, and an evaluation runs before the window. Distillation, which reads no
    # rewards, has a tool's tokens in this batch.
    reward_model: bool = False
    # micro-batches of the measured window, where an epoch ends before it is full; 0: it is full
    cut_window_to: int = 0
    fields: tuple[tuple[str, Any], ...] = ()  # further ones of the config, by name

    @property
    def windows(self) -> int:
        """Windows that one generation feeds."""
        return self.per_generation * self.iterations // self.accumulation

    @property
    def schedule(self) -> dict[str, Any]:
        """The fields of a TRL config that make this window."""
        weights = [weight * self.reward_scale for weight in self.weights]
        leaves_defaults = self.reward_model
        return {
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_generation": None if leaves_defaults else self.per_generation,
            "num_iterations": self.iterations,
            "temperature": self.temperature,
            "reward_weights": None if leaves_defaults else weights,
        }


EXTREME = PolicyBatch(
    "extreme",
    "ratios from 0.1 to 8, groups of 16 with outliers among rewards of both signs, up to 40 "
    "tokens, prompts of one to three words, two micro-batches",
    drift=0.5,
    ragged=True,
    accumulation=2,
    per_generation=2,
    group=16,
    rows=16,
    limit=40,
    weights=(1.0, -0.75),
)

_TWO = {"drift": 0.05, "ragged": True, "accumulation": 2}

BATCHES = (
    PolicyBatch("on_policy", "first update after generation, equal lengths", iterations=1),
    PolicyBatch("mild", "second update, mild drift, equal lengths", drift=0.05),
    PolicyBatch("heavy", "second update, heavy drift, equal lengths", drift=0.3),
    PolicyBatch("ragged", "mild drift, ragged lengths", drift=0.05, ragged=True),
    PolicyBatch(
        "accumulation", "two micro-batches, mild drift, ragged lengths", **_TWO, per_generation=2
    ),
    PolicyBatch(
        "steps_per_generation",
        "one generation feeds two windows of two micro-batches; ragged lengths, mild drift",
        **_TWO,
        per_generation=4,
        iterations=1,
    ),
    PolicyBatch("beta", "beta 0.1, mild drift, equal lengths", drift=0.05, beta=0.1),
    PolicyBatch(
        "temperature", "temperature 0.6, mild drift, equal lengths", drift=0.05, temperature=0.6
    ),
    PolicyBatch("clipped", "every token is clipped, equal lengths", pushed=True),
    PolicyBatch(
        "small_rewards",
        "all rewards times 0.001, mild drift, equal lengths",
        drift=0.05,
        reward_scale=1e-3,
    ),
    PolicyBatch(
        "equal_rewards",
        "all eight rewards of a group are 0.3 in float32, mild drift, equal lengths; only for rows "
        "about rounding",
        drift=0.05,
        group=8,
        reward=0.3,
    ),
    PolicyBatch(
        "tools", "every third token came from a tool", **_TWO, per_generation=2, tools=True
    ),
    PolicyBatch(
        "sampler",
        "another sampler, with log-probabilities of its own, drew the tokens; only for rows about "
        "it",
        **_TWO,
        per_generation=2,
        sampler=True,
    ),
    PolicyBatch(
        "over_long",
        "mild drift, ragged lengths, many examples longer than max_length; only for rows about it",
        drift=0.05,
        ragged=True,
        max_length=36,
    ),
    EXTREME,
)

ACROSS = PolicyBatch(
    "several_generations",
    "two generations feed one window of four micro-batches; groups of 8, ragged lengths",
    ragged=True,
    accumulation=4,
    per_generation=2,
    iterations=1,
    group=8,
)
"""What only subjects are measured on: no row has a reason for what TRL does here."""

_RARE = {"drift": 0.05, "ragged": True, "accumulation": 3, "per_generation": 3, "cut_window_to": 2}

RARE = (
    PolicyBatch(
        "unscored",
        "rewards below 0, above 1 and None; padding among the tokens, which another sampler drew "
        "that cannot score them all; a short last window",
        **_RARE,
        gaps=True,
        sampler=True,
    ),
    PolicyBatch(
        "scored",
        "a reward model beside two functions; weights and steps of a generation are not given; an "
        "evaluation before a short last window",
        **_RARE,
        reward_model=True,
    ),
    PolicyBatch(
        "cut",
        "texts of 30 tokens at most, a reference model that is given, a short last window",
        **_RARE | {"drift": 0.2},
        fields=(("max_length", 30),),
    ),
    PolicyBatch(
        "cut_in_front",
        "the last 30 tokens of texts",
        **_RARE | {"drift": 0.2},
        fields=(("max_length", 30), ("truncation_mode", "keep_end")),
    ),
    PolicyBatch(
        "packed",
        "rows of 40 tokens with several texts",
        **_RARE | {"drift": 0.2},
        fields=(("max_length", 40), ("packing", True)),
    ),
    PolicyBatch(
        "adapter",
        "what is trained is an adapter, whose dropout is switched off",
        **_TWO,
        per_generation=2,
        temperature=0.6,
        fields=(("disable_dropout", True),),
    ),
    PolicyBatch(
        "continued",
        "an adapter that was trained before, and so is the reference",
        **_TWO,
        per_generation=2,
    ),
)
"""What only recorded losses are measured on: what a run rarely meets, and on two processes."""

OFFLINE_BATCHES = ("on_policy", "mild", "heavy", "ragged", "accumulation", "over_long")
"""The batches that apply where nothing is generated."""
