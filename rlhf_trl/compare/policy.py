"""The policy-gradient family on fixed windows: TRL's trainers, and the book's functions.

A window is what one optimizer step sees. Its completions are random tokens that depend only on the
prompt, the place in the group and the number of the call; its rewards depend only on the
completion. The policy that generated, the one that is trained and the reference are three versions
of one untrained model. Everything behind generation is the trainer's own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Module

from rlhf_trl.compare import measure
from rlhf_trl.compare.measure import Book, Measured
from rlhf_trl.compare.models import (
    Gradients,
    adapter,
    begun,
    drawn,
    drifted,
    make_trainer,
    take,
    token_logps,
    untrained,
    untrained_scorer,
    untrained_token_scorer,
)
from rlhf_trl.errors import InputError
from rlhf_trl.losses.checked import policy_gradient_loss
from rlhf_trl.tiny.model import END, PAD
from rlhf_trl.tiny.tokenizer import build_tokenizer

LIMIT, GROUP, ROWS, LENGTH = 12, 4, 8, 8
"""Tokens at most, completions per prompt, completions per micro-batch, tokens of equal lengths."""

WEIGHTS = (1.0, 0.5)
CRITIC = "value_model."  # what the names of a value model's weights begin with
WORDS = ("sun", "tree", "river", "stone", "cloud", "light", "green", "house", "mouse", "bread")


@dataclass(frozen=True)
class PolicyBatch:
    """One fixed window."""

    name: str  # what `--batches` says
    text: str  # what is special about it
    # how far the policy has moved since it generated, in standard deviations of its weights
    drift: float = 0.0
    pushed: bool = False  # it moved until every token with an advantage is outside the clip range
    ragged: bool = False  # of different lengths, some cut off; otherwise all have LENGTH tokens
    accumulation: int = 1  # micro-batches of the window
    per_generation: int = 1  # micro-batches that one generation feeds
    iterations: int = 2  # how often; the second window is measured unless there is one only
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
    # "partly": beyond 0 and 1, and None for many; "model": a reward model's, too, all weighed 1
    rewards: str = ""
    short: int = 0  # micro-batches of the measured window, where an epoch ends before it is full
    fields: tuple[tuple[str, Any], ...] = ()  # of the config

    @property
    def windows(self) -> int:
        """Windows that one generation feeds."""
        return self.per_generation * self.iterations // self.accumulation

    @property
    def schedule(self) -> dict[str, Any]:
        """The fields of a TRL config that make this window."""
        unsaid = self.rewards == "model"
        return {
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_generation": None if unsaid else self.per_generation,
            "num_iterations": self.iterations,
            "temperature": self.temperature,
            "reward_weights": None if unsaid else [w * self.reward_scale for w in self.weights],
        }


EXTREME = PolicyBatch(
    "extreme",
    "ratios from 0.1 to 8, groups of 16 with outliers among rewards of both signs, up to 40 "
    "tokens, prompts of one to three words, two micro-batches",
    drift=0.9,
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

_RARE = {"drift": 0.05, "ragged": True, "accumulation": 3, "per_generation": 3, "short": 2}
RARE = (
    PolicyBatch(
        "unscored",
        "rewards below 0, above 1 and None; padding among the tokens, which another sampler drew "
        "that cannot score them all; a short last window",
        **_RARE,
        rewards="partly",
        sampler=True,
    ),
    PolicyBatch(
        "scored",
        "a reward model beside two functions; weights and steps of a generation are not given; an "
        "evaluation before a short last window",
        **_RARE,
        rewards="model",
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
)
"""What only recorded losses are measured on: what a run rarely meets, and on two processes."""


def completion(ragged: bool, limit: int = LIMIT, padding: bool = False) -> measure.Completion:
    """Return random completions: of 1 token to `limit`, some cut off, or of LENGTH.

    With `padding` every fifth token is the one that pads, too.
    """

    def complete(prompt_ids: tuple[int, ...], index: int, call: int) -> list[int]:
        rng = drawn(prompt_ids, index, call)
        wanted = rng.randint(1, limit + limit // 6) if ragged else LENGTH
        ids = [rng.randrange(7, 113) for _ in range(min(wanted, limit))]
        ids = [PAD if padding and place % 5 == 4 else token for place, token in enumerate(ids)]
        return ids if wanted > limit else [*ids[:-1], END]

    return complete


def right(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward a random half of all completions, and a tenth of the long ones: outliers."""
    if "text" in kwargs:
        _check_texts(completion_ids, **kwargs)
    rewards = []
    for ids in completion_ids:
        share = 0.5 if len(ids) <= LIMIT else 0.1
        rewards.append(float(drawn("right", tuple(ids)).random() < share))
    return rewards


def has_format(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward two thirds of all completions fully, the others by a quarter."""
    return [drawn("format", tuple(ids)).choice([0.25, 1.0, 1.0]) for ids in completion_ids]


def _check_texts(
    completion_ids: list[list[int]], prompts: Any, completions: Any, text: list[str], **kwargs: Any
) -> None:
    """Refuse a trainer whose reward functions see other texts or columns than those of the ids."""
    shown_completions = [messages[0]["content"] for messages in completions]
    shown_prompts = [messages[-1]["content"] for messages in prompts]
    written = _tokenizer().batch_decode(completion_ids, skip_special_tokens=True)
    if shown_completions != written or shown_prompts != text:
        raise InputError("reward functions see other texts than those of the token ids")


_tokenizer = cache(build_tokenizer)


def partly(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward half of all completions."""
    return [drawn("partly", *ids).choice([None, None, 0.3, 1.7]) for ids in completion_ids]


def punished(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward or punish half of all completions."""
    return [drawn("punished", *ids).choice([None, None, -2.3, 0.6]) for ids in completion_ids]


def build_trainer(
    trainer: type, config: type, fields: Mapping[str, Any], batch: PolicyBatch, **arguments: Any
) -> Any:
    """Build a trainer of TRL's GRPO kind for a window, its completions fixed.

    Args:
        trainer: the class.
        config: its config class.
        fields: those of the config. They override those that make the window; the batch's own
            `fields` override them.
        batch: the window.
        arguments: further ones of the trainer.
    """
    window = {
        "per_device_train_batch_size": batch.rows,
        "num_generations": batch.group,
        "max_completion_length": batch.limit,
        **batch.schedule,
        **fields,
        **dict(batch.fields),
    }
    # A user's trainer may change prompts, completions and what its reward functions see; TRL's and
    # ours must not.
    is_checked = trainer.__module__.partition(".")[0] in ("trl", "rlhf_trl")
    arguments |= _window_arguments(batch)
    examples = _examples(batch, with_text=is_checked)
    built = make_trainer(trainer, config, window, examples, **arguments)
    if getattr(built, "drops_groups", False):
        # our trainer of DAPO's code drops groups without contrast, which the book's side keeps
        built.drops_groups = False
    if is_checked:
        measure.check_generation(built)
    # "partly" is the batch `unscored`, whose sampler cannot score all tokens, and some are padding
    has_gaps = batch.rewards == "partly"
    answer = completion(batch.ragged, batch.limit, padding=has_gaps)
    measure.fix_completions(built, answer, tools=batch.tools, sampler=batch.sampler, gaps=has_gaps)
    return built


def _window_arguments(batch: PolicyBatch) -> dict[str, Any]:
    """Return the arguments of a trainer that a window needs: rewards, an adapter, tokenizers."""
    rewards = _reward_functions(batch)
    arguments: dict[str, Any] = {"reward_funcs": rewards}
    if batch.name == "adapter":
        arguments |= adapter()
    if batch.rewards == "partly":
        arguments["processing_class"] = begun()
    if batch.rewards == "model":
        rewards.append(untrained_scorer())
        arguments["reward_processing_classes"] = [None, None, begun()]
    return arguments


def _reward_functions(batch: PolicyBatch) -> list[Any]:
    """Return the two reward functions of a window."""
    if batch.rewards == "partly":
        return [partly, punished]
    if batch.reward is not None:
        return [_equal_reward(batch.reward / sum(batch.weights))] * 2
    return [right, has_format]


def _examples(batch: PolicyBatch, with_text: bool) -> list[dict[str, Any]]:
    """Return the data of a window; `with_text`, a column that `right` holds against the prompts."""
    texts = _prompts(batch)
    if batch.rewards == "partly":
        examples: list[dict[str, Any]] = [{"prompt": text} for text in texts]
    else:
        examples = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
        if with_text:
            for example, text in zip(examples, texts, strict=True):
                example["text"] = text
    return examples


def _prompts(batch: PolicyBatch) -> list[str]:
    """Return prompts of one word, or of one to three where completions are long."""
    if batch.limit <= LIMIT:
        return list(WORDS)
    return [" ".join([word] * (1 + place % 3)) for place, word in enumerate(WORDS)]


def _equal_reward(reward: float) -> Callable[..., list[float]]:
    """Return a reward function that gives every completion this reward."""
    return lambda completion_ids, **_: [reward] * len(completion_ids)


class PolicyWindow:
    """A window, prepared once: token ids, policies and the stock side's way of running it."""

    def __init__(self, batch: PolicyBatch, fields: Mapping[str, Any] | None = None) -> None:
        """Move the policy; `fields` are those of the stock trainer that prepares the window."""
        self.batch, self._fields = batch, fields or {}
        self._views: dict[float, View] = {}
        critic = untrained_token_scorer().state_dict()
        critic = {CRITIC + name: tensor for name, tensor in critic.items()}
        self.generating = drifted(untrained().state_dict(), 0.05, seed=99) | critic
        self.current = self.generating
        if batch.drift:
            self.current = drifted(self.generating, batch.drift, seed=1)
        if batch.pushed:  # last, as `_pushed` runs the window with the policies above, for its ids
            self.current = self.generating | self._pushed()

    @cached_property
    def _prepared(self) -> tuple[list[measure.Batch], int]:
        """The micro-batches of a stock GRPOTrainer, and the tokens of the whole generation."""
        from trl import GRPOConfig, GRPOTrainer

        trainer = build_trainer(GRPOTrainer, GRPOConfig, self._fields, self.batch)
        _, micro = self.run(trainer)
        generation = trainer._buffered_inputs
        masks = (part["completion_mask"] * part.get("tool_mask", 1) for part in generation)
        return micro, int(sum(mask.sum() for mask in masks))

    @cached_property
    def ids(self) -> dict[str, Tensor]:
        """(B, S) token ids and masks of prompts and completions."""
        micro = self._prepared[0]
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
        return {key: torch.cat([part[key] for part in micro]) for key in keys if key in micro[0]}

    @cached_property
    def _scored(self) -> tuple[Tensor, Tensor]:
        """(B,) the rewards `right` and `has_format`."""
        pairs = zip(self.ids["completion_ids"], self.ids["completion_mask"], strict=True)
        completions = [ids[mask.bool()].tolist() for ids, mask in pairs]
        right_rewards = torch.tensor(right(completions)).double()
        format_rewards = torch.tensor(has_format(completions)).double()
        return right_rewards, format_rewards

    def stock(self, trainer: Any) -> Measured:
        """Measure a trainer that `build_trainer` built for this window."""
        measured, micro = self.run(trainer)
        if "_prepared" in vars(self):  # for the other side of a comparison
            measure.check_same(trainer, micro, self._prepared[0], "completion_ids")
        return measured

    def run(self, trainer: Any) -> tuple[Measured, list[measure.Batch]]:
        """Generate, move the policy, and measure the last window of the generation: the 1st or 2nd.

        Returns:
            Loss and gradient, and the micro-batches as the loss saw them. Where a reward model
            scores, the loss of an evaluation just before the window is added.
        """
        # the module of the TRL trainer that it is or derives from, whose shuffle `unmixed` replaces
        base_modules = (base.__module__ for base in type(trainer).__mro__)
        trl_module = next(name for name in base_modules if name.startswith("trl.trainer."))
        is_stock = type(trainer).__module__.startswith("trl.")
        if is_stock:  # others may order and shuffle as they like
            check_order(trainer)
        has_critic = hasattr(trainer.model, CRITIC.rstrip("."))
        with unmixed(trl_module, is_stock):
            source = measure.batches(trainer)
            take(trainer.model.train(), _part(self.generating, has_critic))
            if self.batch.windows > 1:
                # The first window generates. It is not trained on: the policy is moved by hand. As
                # TRL would, `_step` counts on, so that the second window reads the same generation.
                for _ in range(self.batch.accumulation):
                    trainer._prepare_inputs(next(source))
                    trainer._step += 1
                take(trainer.model, _part(self.current, has_critic))
            evaluation_loss = 0.0
            if self.batch.rewards == "model":
                evaluation_loss = self._evaluate(trainer, next(source))
            measured, micro = measure.accumulate(trainer, source, self.batch.short)
            return Measured(measured.loss + evaluation_loss, measured.gradient), micro

    def _evaluate(self, trainer: Any, examples: Any) -> float:
        """Return the trainer's evaluation loss on the first micro-batch of these examples."""
        trainer.model.eval()
        examples = examples[: self.batch.rows]
        loss = float(trainer.prediction_step(trainer.model, examples, True)[0])
        trainer.model.train()
        return loss

    def _rewards(self) -> Tensor:
        """Return the weighted sum of the two rewards, (B,)."""
        right_weight, format_weight = self.batch.weights
        right_rewards, format_rewards = self._scored
        return right_weight * right_rewards + format_weight * format_rewards

    def _pushed(self) -> dict[str, Tensor]:
        """Move the policy until every token with an advantage is clipped, by gradient descent.

        A clip holds where the ratio went the way of the advantage's sign, beyond the clip range.
        """
        model = untrained()
        model.load_state_dict(_part(self.generating))
        rewards = self._rewards().view(-1, self.batch.group)
        sign = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1).sign()
        mask = self.ids["completion_mask"].bool()
        old = _logps(model, self.ids).detach()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for _ in range(200):  # more than it takes
            # how far log-ratios went that way
            ahead = (sign * (_logps(model, self.ids) - old))[mask & (sign != 0)]
            if ahead.min() > 0.6:  # ratios above 1.8 and below 0.55
                break
            optimizer.zero_grad()
            torch.relu(0.9 - ahead).sum().backward()  # pulls up to 0.9, so that all pass 0.6
            optimizer.step()
        return model.state_dict()

    @cached_property
    def critic(self) -> tuple[Gradients, Tensor, Tensor]:
        """The gradients of a value model's values, these (B, T), and those at generation."""
        model, values = self._critic_values(self.current)
        _, old_values = self._critic_values(self.generating)
        return Gradients(model, values), values.detach(), old_values.detach()

    def _critic_values(self, state: Mapping[str, Tensor]) -> tuple[Module, Tensor]:
        """Return the value model with these weights in float64, and its values, (B, T)."""
        model = untrained_token_scorer().double()
        own = {name: tensor for name, tensor in state.items() if name.startswith(CRITIC)}
        model.load_state_dict({name.removeprefix(CRITIC): tensor for name, tensor in own.items()})
        tokens, attention = whole(self.ids)
        values = model(input_ids=tokens, attention_mask=attention).logits[..., 0]
        length = self.ids["completion_ids"].shape[1]
        return model, values[:, -length - 1 : -1]

    def view(self, temperature: float = 1.0) -> "View":
        """Return the book's side of the window, log-probabilities at a temperature."""
        if temperature not in self._views:
            self._views[temperature] = self._view(temperature)
        return self._views[temperature]

    def _view(self, temperature: float) -> "View":
        """Compute log-probabilities of the three policies, and the rewards.

        Only those of the current policy keep their graph: gradients are taken in its parameters.
        """
        policy, logps = self._policy_logps(self.current, temperature)
        with torch.no_grad():
            _, old_logps = self._policy_logps(self.generating, temperature)
            _, ref_logps = self._policy_logps(untrained().state_dict(), temperature)
        rewards = self._rewards() * self.batch.reward_scale
        if self.batch.reward is not None:  # for rows about rounding to float32, as TRL rounds
            rewards = torch.full_like(rewards, self.batch.reward, dtype=torch.float32)
        right_rewards, format_rewards = self._scored
        _, generation_tokens = self._prepared
        return View(
            window=self,
            batch=self.batch,
            policy=Gradients(policy, logps),
            logps=logps.detach(),
            old_logps=old_logps,
            ref_logps=ref_logps,
            ids=self.ids["completion_ids"],
            mask=(self.ids["completion_mask"] * self.ids.get("tool_mask", 1)).double(),
            rewards=rewards,
            binary_rewards=right_rewards * (format_rewards == 1),
            generation_tokens=generation_tokens,
        )

    def _policy_logps(
        self, state: Mapping[str, Tensor], temperature: float
    ) -> tuple[Module, Tensor]:
        """Return the policy with these weights in float64, and its log-probabilities, (B, T)."""
        model = untrained()
        model.load_state_dict(_part(state))
        model = model.double()
        return model, _logps(model, self.ids, temperature)


@contextmanager
def unmixed(module: str, stock: bool) -> Iterator[None]:
    """Keep the rows of a generation in order, so that groups stay; TRL must want to mix them."""
    _check_shuffle(module)
    with patch(f"{module}.shuffle_sequence_dict", side_effect=lambda inputs: inputs) as shuffle:
        yield
    if stock and not shuffle.called:
        raise InputError(f"{module} does not mix the rows of a generation")


@cache
def _check_shuffle(module: str) -> None:
    """Refuse a shuffle that tears a row apart; windows keep their order so that groups do."""
    numbers = torch.arange(16)
    columns = {"a": numbers, "b": numbers[:, None] * torch.ones(1, 3), "c": numbers.float()}
    with torch.random.fork_rng(devices=[]):
        mixed = import_module(module).shuffle_sequence_dict(columns)
    if not all(torch.equal(t.view(16, -1)[:, 0].long(), mixed["a"]) for t in mixed.values()):
        raise InputError(f"{module}.shuffle_sequence_dict tears the rows of a batch apart")
    if not torch.equal(mixed["a"].sort().values, numbers) or torch.equal(mixed["a"], numbers):
        raise InputError(f"{module}.shuffle_sequence_dict loses rows of a batch, or their mixing")


def check_order(trainer: Any) -> None:
    """Refuse a sampler that tears groups apart, leaves out prompts, or keeps an epoch's order."""
    args = trainer.args
    sampler = trainer._get_train_sampler()
    first_epoch = list(sampler)
    second_epoch = list(sampler)
    size = args.generation_batch_size
    generations = len(trainer.train_dataset) * args.num_generations // size
    reused = args.steps_per_generation * args.num_iterations
    right = len(first_epoch) == generations * size * reused
    right = right and (first_epoch != second_epoch) == args.shuffle_dataset
    if not (right and _keeps_groups(trainer, first_epoch)):
        raise InputError(f"{type(trainer).__name__} takes the prompts in another order")


def _keeps_groups(trainer: Any, epoch: list[int]) -> bool:
    """Return whether prompts, in training and evaluation, come a group at a time, and once.

    `epoch` holds the numbers of the prompts in the order in which an epoch trains on them: each
    prompt `num_generations` times in a row, and the generation anew for each time that it is used.
    """
    args = trainer.args
    reused = args.steps_per_generation * args.num_iterations
    # (generations, times that each is used, prompts of a generation)
    generations = torch.tensor(epoch).view(-1, reused, args.generation_batch_size)
    first_use = generations[:, 0]
    groups = first_use.reshape(-1, args.num_generations)
    held_out = torch.tensor(list(trainer._get_eval_sampler(trainer.train_dataset)))
    held_out_groups = held_out.view(-1, args.num_generations)
    # Along the second dimension nothing may differ: all uses of a generation have its prompts, all
    # completions of a group have one prompt.
    for numbers in (generations, groups, held_out_groups):
        if not torch.equal(numbers, numbers[:, :1].expand_as(numbers)):
            return False
    if len(groups[:, 0].unique()) != len(groups):  # a prompt twice in an epoch
        return False
    # in evaluation each prompt once
    distinct = len(held_out_groups[:, 0].unique())
    return distinct == len(trainer.train_dataset) == len(held_out_groups)


def _part(state: Mapping[str, Tensor], critic: bool = False) -> dict[str, Tensor]:
    """Return the weights of a policy, without those of its value model or with them."""
    return {name: tensor for name, tensor in state.items() if critic or CRITIC not in name}


def whole(ids: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (B, S) prompts with completions, and their attention mask."""
    tokens = torch.cat([ids["prompt_ids"], ids["completion_ids"]], 1)
    return tokens, torch.cat([ids["prompt_mask"], ids["completion_mask"]], 1)


def _logps(model: Module, ids: Mapping[str, Tensor], temperature: float = 1.0) -> Tensor:
    """Return (B, T) log-probabilities of the completion tokens from a plain forward."""
    length = ids["completion_ids"].shape[1]
    return token_logps(model, *whole(ids), temperature)[:, -length:]


@dataclass
class View:
    """What the book's functions see of a window, in float64 but for rewards that are rounded."""

    window: PolicyWindow
    batch: PolicyBatch
    policy: Gradients  # those of the policy's log-probabilities
    logps: Tensor  # (B, T) those log-probabilities
    old_logps: Tensor  # (B, T) those of the policy that generated
    ref_logps: Tensor  # (B, T) those of the reference
    ids: Tensor  # (B, T) the tokens
    mask: Tensor  # (B, T) 1 on tokens that count
    rewards: Tensor  # (B,) weighted sums
    binary_rewards: Tensor  # (B,) 1 for a success
    generation_tokens: int  # tokens of the whole generation batch

    @property
    def lengths(self) -> Tensor:
        """(B, 1) tokens of each completion."""
        return self.mask.sum(1, keepdim=True)

    @property
    def sampler_log_ratio(self) -> Tensor:
        """(B, T) log pi_old - log pi of the other sampler."""
        logps = torch.tensor([measure.sampler_logps(ids) for ids in self.ids.tolist()])
        return (self.old_logps - logps) * self.mask

    @property
    def ratio(self) -> Tensor:
        """(B, T) likelihood ratios."""
        return (self.logps - self.old_logps).exp()

    @property
    def ref_log_ratio(self) -> Tensor:
        """(B, T) log pi - log pi_ref."""
        return self.logps - self.ref_logps

    @property
    def group_std(self) -> Tensor:
        """(B, 1) unbiased standard deviation of the rewards in each group."""
        spread = self.rewards.view(-1, self.batch.group).std(1, keepdim=True)
        return spread.expand(-1, self.batch.group).reshape(-1, 1)

    def norm(self, kind: str) -> Tensor:
        """Return the weight that an aggregation gives to a token, (B, 1).

        Args:
            kind: "sequence_sum", "sequence_mean", "fixed_length", "per_prompt", "token_mean" over
                the window, "token_mean_micro_batch", or "token_mean_trl" with TRL's average window.
        """
        batch = self.batch
        count = len(self.mask)
        ones = torch.ones_like(self.lengths)
        if kind == "sequence_sum":
            return ones / count
        if kind == "sequence_mean":
            return 1 / self.lengths / count
        if kind == "fixed_length":
            return ones / batch.limit / count
        if kind == "per_prompt":  # 1 / (prompts x tokens of the prompt's completions)
            of_prompts = self.lengths.view(-1, batch.group).sum(1).repeat_interleave(batch.group)
            return batch.group / of_prompts.unsqueeze(1) / count
        if kind == "token_mean":
            return ones / self.mask.sum()
        if kind == "token_mean_micro_batch":
            tokens = self.mask.view(batch.accumulation, -1).sum(1).repeat_interleave(batch.rows)
            return 1 / tokens.unsqueeze(1) / batch.accumulation
        if kind == "token_mean_trl":  # the generation's tokens, times its share that a window is
            return ones / (self.generation_tokens * (batch.accumulation / batch.per_generation))
        raise KeyError(kind)

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of sum(weights * logps) in the parameters, (N,); weights (B, T).

        With a critic, weights are (2, B, T): of its values, too.
        """
        if weights.dim() == 2:
            return self.policy(weights)
        return torch.cat([self.policy(weights[0]), self.window.critic[0](weights[1])])

    def arguments(self, side: Book) -> dict[str, Any]:
        """Return what the public function gets: the side's, and what the window adds to them."""
        row = side.row
        arguments: dict[str, Any] = dict(side.params)
        if self.batch.beta and "beta" in row.reads:
            arguments.setdefault("beta", self.batch.beta)
        if "max_completion_length" in row.reads:
            arguments["max_completion_length"] = self.batch.limit
        # the function refuses tensors that the row does not read, so each is there on its condition
        if arguments.get("beta"):
            arguments["ref_logps"] = self.ref_logps
        if row.ratio != "none" or (row.kl == "reward" and arguments.get("beta")):
            arguments["old_logps"] = self.old_logps
        if row.value_loss != "none":
            _, values, old_values = self.window.critic
            arguments |= {"values": values, "old_values": old_values}
        if row.advantage == "maxrl":
            arguments["binary_rewards"] = self.binary_rewards
        return arguments | {"mask": self.mask, "rewards": self.rewards}

    def book(self, side: Book, arguments: Mapping[str, Any]) -> tuple[float, Tensor]:
        """Return the book's loss of the window on `arguments`, and d loss / d logps, (B, T).

        With a critic, d loss / d values is below it, (2, B, T).
        """
        row = side.row
        # Where rewards are in float32, advantages have to be rounded as TRL rounds them. The
        # function computes in the precision of the log-probabilities, so these get the rewards'. A
        # copy, since the window's own tensor must not require gradients.
        logps = self.logps.to(self.rewards.dtype, copy=True).requires_grad_()
        leaves = [logps]
        inputs = {
            **arguments,
            "num_generations": self.batch.group,
            "formulation": side.formulation,
            "logps": logps,
        }
        if "values" in inputs:
            inputs["values"] = inputs["values"].clone().requires_grad_()
            leaves.append(inputs["values"])
        # The function is called on each micro-batch, or on the window whole where the normalizer or
        # the baseline of the row is of the window.
        takes_window = row.window == "window" or row.advantage == "batch_mean_baseline"
        size = len(logps) if takes_window else self.batch.rows
        parts = _split(inputs, len(logps), size)
        losses = [policy_gradient_loss(side.algorithm, **part).loss for part in parts]
        loss = torch.stack(losses).mean()
        slopes = torch.autograd.grad(loss, leaves)
        return float(loss.detach()), slopes[0] if len(slopes) == 1 else torch.stack(slopes)


def _split(inputs: Mapping[str, Any], count: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield inputs whose tensors, of `count` completions, are cut into parts of a size."""
    for start in range(0, count, size):
        part = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                part[name] = value[start : start + size]
        yield part
