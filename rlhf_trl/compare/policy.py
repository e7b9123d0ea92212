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
    SECOND_END,
    Gradients,
    adapter,
    continued_adapter,
    drawn,
    drifted,
    make_trainer,
    take,
    token_logps,
    tokenizer_with_bos,
    untrained,
    untrained_scorer,
    untrained_token_scorer,
    with_second_end,
)
from rlhf_trl.errors import InputError
from rlhf_trl.losses.checked import policy_gradient_loss
from rlhf_trl.tiny.model import END, PAD
from rlhf_trl.tiny.tokenizer import build_tokenizer

LIMIT = 12  # tokens of a completion at most
LENGTH = 8  # tokens of each completion where all have equal lengths
GROUP = 4  # completions per prompt
ROWS = 8  # completions per micro-batch
WEIGHTS = (1.0, 0.5)  # of the two rewards
VALUE_MODEL = "value_model"  # the policy's attribute that holds PPO's value model
CRITIC = f"{VALUE_MODEL}."  # what the names of a value model's weights begin with
WORDS = ("sun", "tree", "river", "stone", "cloud", "light", "green", "house", "mouse", "bread")


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


def completion(ragged: bool, limit: int = LIMIT, odd: bool = False) -> measure.Completion:
    """Return a function that gives random completions, see `measure.fix_completions`.

    Args:
        ragged: whether they have 1 to `limit` tokens, some without an end; else they have LENGTH.
        limit: tokens at most.
        odd: whether every fifth token is the padding token, and about half of the
            completions that would be cut off end with the model's second end token.
    """

    def complete(prompt_ids: tuple[int, ...], index: int, call: int) -> list[int]:
        rng = drawn(prompt_ids, index, call)
        # some lengths lie above the limit: those completions are cut off
        length = rng.randint(1, limit + limit // 6) if ragged else LENGTH
        ids = [rng.randrange(7, 113) for _ in range(min(length, limit))]
        ids = [PAD if odd and place % 5 == 4 else token for place, token in enumerate(ids)]
        if length <= limit:
            return [*ids[:-1], END]
        return [*ids[:-1], SECOND_END] if odd and ids[0] % 2 else ids

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
    """Refuse a trainer whose reward functions see other texts than those of the token ids.

    Args:
        completion_ids: the token ids that a reward function gets.
        prompts: the prompts that it gets, as chats.
        completions: the completions that it gets, as chats.
        text: the column of the data that holds the text of each prompt.
        kwargs: whatever else it gets.
    """
    shown_completions = [messages[0]["content"] for messages in completions]
    shown_prompts = [messages[-1]["content"] for messages in prompts]
    decoded = _tokenizer().batch_decode(completion_ids, skip_special_tokens=True)
    if shown_completions != decoded or shown_prompts != text:
        raise InputError("reward functions see other texts than those of the token ids")


_tokenizer = cache(build_tokenizer)


def partly(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward a random half of all completions; the others have no reward."""
    return [drawn("partly", *ids).choice([None, None, 0.3, 1.7]) for ids in completion_ids]


async def punished(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Reward or punish a random half of all completions, as a function that is awaited."""
    return [drawn("punished", *ids).choice([None, None, -2.3, 0.6]) for ids in completion_ids]


def build_trainer(
    trainer: type, config: type, fields: Mapping[str, Any], batch: PolicyBatch, **arguments: Any
) -> Any:
    """Build a trainer of TRL's GRPO kind for a window, its completions fixed.

    Args:
        trainer: the class.
        config: its config class.
        fields: those of the config. They override the fields that make the window; the batch's own
            `fields` override both.
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
    # ours must not. With the column `text` a reward function, `right`, checks what it sees.
    is_checked = trainer.__module__.partition(".")[0] in ("trl", "rlhf_trl")
    examples = _examples(batch, with_text_column=is_checked)
    arguments |= _window_arguments(batch)
    built = make_trainer(trainer, config, window, examples, **arguments)
    if getattr(built, "drops_groups", False):
        # our trainer of DAPO's code drops groups without contrast, which the book's side keeps
        built.drops_groups = False
    if is_checked:
        measure.check_generation(built)
    measure.fix_completions(
        built,
        completion(batch.ragged, batch.limit, odd=batch.gaps),
        tools=batch.tools,
        sampler=batch.sampler,
        gaps=batch.gaps,
    )
    return built


def _window_arguments(batch: PolicyBatch) -> dict[str, Any]:
    """Return the arguments of a trainer that a window needs: rewards, an adapter, tokenizers."""
    rewards = _reward_functions(batch)
    arguments: dict[str, Any] = {"reward_funcs": rewards}
    if batch.name == "adapter":
        arguments |= adapter()
    if batch.name == "continued":
        arguments |= continued_adapter()
    if batch.gaps:
        arguments["processing_class"] = tokenizer_with_bos()
        arguments["model"] = with_second_end()
    if batch.reward_model:
        rewards.append(untrained_scorer())
        # the two functions before the model have no tokenizer
        arguments["reward_processing_classes"] = [None, None, tokenizer_with_bos()]
    return arguments


def _reward_functions(batch: PolicyBatch) -> list[Any]:
    """Return the two reward functions of a window."""
    if batch.gaps:
        return [partly, punished]
    if batch.reward is not None:
        return [_equal_reward(batch.reward / sum(batch.weights))] * 2
    return [right, has_format]


def _examples(batch: PolicyBatch, with_text_column: bool) -> list[dict[str, Any]]:
    """Return the data of a window.

    The column `text` holds each prompt as plain text. The reward function `right` holds it against
    the prompts that it is given.
    """
    texts = _prompts(batch)
    if batch.gaps:  # whose reward functions check nothing
        return [{"prompt": text} for text in texts]
    examples: list[dict[str, Any]] = []
    for text in texts:
        example: dict[str, Any] = {"prompt": [{"role": "user", "content": text}]}
        if with_text_column:
            example["text"] = text
        examples.append(example)
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
        """Make the policies, by the names of their weights, each with the weights of a critic.

        Args:
            batch: the window.
            fields: of the config of the stock GRPOTrainer that prepares the window.
        """
        self.batch = batch
        self._fields = fields or {}
        self._views: dict[float, View] = {}  # by temperature
        critic = untrained_token_scorer().state_dict()
        critic = {CRITIC + name: tensor for name, tensor in critic.items()}
        # the policy that generates is not the reference, which is the untrained model itself
        self.generating = drifted(untrained().state_dict(), 0.05, seed=99) | critic
        self.current = self.generating  # the policy that is trained
        if batch.drift:
            self.current = drifted(self.generating, batch.drift, seed=1)
        if batch.pushed:  # last, as `_pushed` runs the window with the policies above, for its ids
            self.current = self.generating | self._pushed()

    @cached_property
    def _prepared(self) -> tuple[list[measure.Batch], int]:
        """The micro-batches of a stock GRPOTrainer, and the number of tokens of its generation."""
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
    def _two_rewards(self) -> tuple[Tensor, Tensor]:
        """The rewards `right` and `has_format` of the completions, (B,) each."""
        pairs = zip(self.ids["completion_ids"], self.ids["completion_mask"], strict=True)
        completions = [ids[mask.bool()].tolist() for ids, mask in pairs]
        right_rewards = torch.tensor(right(completions)).double()
        format_rewards = torch.tensor(has_format(completions)).double()
        return right_rewards, format_rewards

    def stock(self, trainer: Any) -> Measured:
        """Measure a trainer that `build_trainer` built for this window."""
        measured, micro = self.run(trainer)
        if "_prepared" in vars(self):  # the book's side, if there is one, has these completions
            fixed_micro, _ = self._prepared
            measure.check_same(trainer, micro, fixed_micro, "completion_ids")
        return measured

    def run(self, trainer: Any) -> tuple[Measured, list[measure.Batch]]:
        """Generate, move the policy, and measure the last window of the generation: the 1st or 2nd.

        Returns:
            Loss and gradient, and the micro-batches as the loss saw them. In a batch with a reward
            model the loss of an evaluation is added to the window's, so that one number shows a
            fault in either.
        """
        # the module of the TRL trainer that it is or derives from, whose shuffle `unmixed` replaces
        base_modules = (base.__module__ for base in type(trainer).__mro__)
        trl_module = next(name for name in base_modules if name.startswith("trl.trainer."))
        is_stock = type(trainer).__module__.startswith("trl.")
        if is_stock:  # others may order and shuffle as they like
            check_order(trainer)
        # only a trainer with a value model (PPO's) has a place for the critic's weights
        has_critic = hasattr(trainer.model, VALUE_MODEL)
        with unmixed(trl_module, is_stock):
            source = measure.batches(trainer)
            take(trainer.model.train(), _weights(self.generating, with_critic=has_critic))
            if self.batch.windows > 1:
                # The first window generates. It is not trained on: the policy is moved by hand. As
                # TRL would, `_step` counts on, so that the second window reads the same generation.
                for _ in range(self.batch.accumulation):
                    trainer._prepare_inputs(next(source))
                    trainer._step += 1
                take(trainer.model, _weights(self.current, with_critic=has_critic))
            evaluation_loss = 0.0
            if self.batch.reward_model:
                evaluation_loss = self._evaluate(trainer, next(source))
            measured, micro = measure.accumulate(trainer, source, self.batch.cut_window_to)
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
        right_rewards, format_rewards = self._two_rewards
        return right_weight * right_rewards + format_weight * format_rewards

    def _pushed(self) -> dict[str, Tensor]:
        """Move the policy by gradient descent until every token with an advantage is clipped.

        A token is clipped where its log-ratio has moved in the direction of its advantage, up where
        the advantage is positive and down where it is negative, to beyond the clip range.
        """
        model = untrained()
        model.load_state_dict(_weights(self.generating))
        rewards = self._rewards().view(-1, self.batch.group)
        sign = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1).sign()  # of advantages, (B, 1)
        mask = self.ids["completion_mask"].bool()
        old_logps = _logps(model, self.ids).detach()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        # every log-ratio has to move by 0.6, to a ratio above 1.8 or below 0.55: both are clipped
        enough = 0.6
        for _ in range(200):  # more steps than it takes
            log_ratio = _logps(model, self.ids) - old_logps
            moved = (sign * log_ratio)[mask & (sign != 0)]  # in the advantage's direction
            if moved.min() > enough:
                break
            optimizer.zero_grad()
            # a pull up to 0.9: one up to `enough` would end before tokens are beyond it
            torch.relu(0.9 - moved).sum().backward()
            optimizer.step()
        return model.state_dict()

    @cached_property
    def critic(self) -> tuple[Gradients, Tensor, Tensor]:
        """The critic's values: their gradients, the values now and at generation, (B, T) each."""
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
        return model, values[:, -length - 1 : -1]  # a token's value is that of the state before it

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
        right_rewards, format_rewards = self._two_rewards
        is_success = right_rewards * (format_rewards == 1)  # right, and with the whole format
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
            binary_rewards=is_success,
            generation_tokens=generation_tokens,
        )

    def _policy_logps(
        self, state: Mapping[str, Tensor], temperature: float
    ) -> tuple[Module, Tensor]:
        """Return the policy with these weights in float64, and its log-probabilities, (B, T)."""
        model = untrained()
        model.load_state_dict(_weights(state))
        model = model.double()
        return model, _logps(model, self.ids, temperature)


@contextmanager
def unmixed(module: str, stock: bool) -> Iterator[None]:
    """Keep the rows of a generation in order, so that the completions of a prompt stay together.

    Args:
        module: the module of a TRL trainer, whose function that shuffles is replaced.
        stock: whether the trainer is TRL's own: then it must have called that function, since a TRL
            that does not shuffle is not the one that compare knows.
    """
    _check_shuffle(module)
    with patch(f"{module}.shuffle_sequence_dict", side_effect=lambda inputs: inputs) as shuffle:
        yield
    if stock and not shuffle.called:
        raise InputError(f"{module} does not mix the rows of a generation")


@cache
def _check_shuffle(module: str) -> None:
    """Refuse a module whose shuffle tears rows apart, loses some, or leaves them in order.

    `unmixed` replaces this shuffle, so a fault in it would go unseen.
    """
    numbers = torch.arange(16)
    # three tensors of a batch, each of which holds in every row the number of that row
    columns = {"a": numbers, "b": numbers[:, None] * torch.ones(1, 3), "c": numbers.float()}
    with torch.random.fork_rng(devices=[]):
        mixed = import_module(module).shuffle_sequence_dict(columns)
    order = mixed["a"]
    if not all(torch.equal(tensor.view(16, -1)[:, 0].long(), order) for tensor in mixed.values()):
        raise InputError(f"{module}.shuffle_sequence_dict tears the rows of a batch apart")
    if not torch.equal(order.sort().values, numbers) or torch.equal(order, numbers):
        raise InputError(f"{module}.shuffle_sequence_dict loses rows of a batch, or their mixing")


def check_order(trainer: Any) -> None:
    """Refuse a sampler that tears groups apart, leaves out prompts, or shuffles otherwise.

    Two epochs have different orders if, and only if, the config says `shuffle_dataset`.
    """
    args = trainer.args
    sampler = trainer._get_train_sampler()
    first_epoch = list(sampler)
    second_epoch = list(sampler)
    size = args.generation_batch_size
    generations = len(trainer.train_dataset) * args.num_generations // size  # of an epoch
    # the sampler names the prompts of a generation anew for each micro-batch that reads it
    uses = args.steps_per_generation * args.num_iterations
    is_complete = len(first_epoch) == generations * size * uses
    is_shuffled = first_epoch != second_epoch
    is_right = is_complete and is_shuffled == args.shuffle_dataset
    if not (is_right and _keeps_groups(trainer, first_epoch)):
        raise InputError(f"{type(trainer).__name__} takes the prompts in another order")


def _keeps_groups(trainer: Any, epoch: list[int]) -> bool:
    """Return whether prompts, in training and evaluation, come a group at a time, and once.

    `epoch` holds the numbers of the prompts in the order in which an epoch trains on them: each
    prompt `num_generations` times in a row, and the generation anew for each time that it is used.
    """
    args = trainer.args
    uses = args.steps_per_generation * args.num_iterations
    # (generations, uses of each, prompts of a generation)
    generations = torch.tensor(epoch).view(-1, uses, args.generation_batch_size)
    first_uses = generations[:, 0]
    groups = first_uses.reshape(-1, args.num_generations)
    # an evaluation's order; the training data will do, as the sampler only counts the prompts
    evaluation = torch.tensor(list(trainer._get_eval_sampler(trainer.train_dataset)))
    evaluation_groups = evaluation.view(-1, args.num_generations)
    # Along the second dimension nothing may differ: all uses of a generation have its prompts, all
    # completions of a group have one prompt.
    for numbers in (generations, groups, evaluation_groups):
        if not torch.equal(numbers, numbers[:, :1].expand_as(numbers)):
            return False
    if len(groups[:, 0].unique()) != len(groups):  # a prompt twice in an epoch
        return False
    # an evaluation has as many groups as there are prompts, each of another prompt
    prompts = len(trainer.train_dataset)
    return len(evaluation_groups) == prompts and len(evaluation_groups[:, 0].unique()) == prompts


def _weights(state: Mapping[str, Tensor], with_critic: bool = False) -> dict[str, Tensor]:
    """Return the weights of a policy by name, without those of its value model or with them."""
    return {name: tensor for name, tensor in state.items() if with_critic or CRITIC not in name}


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
    policy: Gradients  # of `logps` in the parameters of the policy that is trained
    logps: Tensor  # (B, T) log-probabilities of the completion tokens under that policy
    old_logps: Tensor  # (B, T) the same under the policy that generated
    ref_logps: Tensor  # (B, T) the same under the reference
    ids: Tensor  # (B, T) the completion tokens
    mask: Tensor  # (B, T) 1 on tokens that count
    rewards: Tensor  # (B,) weighted sums of the two rewards
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

    def token_weight(self, aggregation: str) -> Tensor:
        """Return the factor by which an aggregation multiplies a token's loss, (B, 1).

        Args:
            aggregation: "sequence_sum", "sequence_mean", "fixed_length", "per_prompt", "token_mean"
                over the window, "token_mean_micro_batch", or "token_mean_trl" with TRL's average
                window.
        """
        batch = self.batch
        count = len(self.mask)
        ones = torch.ones_like(self.lengths)
        if aggregation == "sequence_sum":
            return ones / count
        if aggregation == "sequence_mean":
            return 1 / self.lengths / count
        if aggregation == "fixed_length":
            return ones / batch.limit / count
        if aggregation == "per_prompt":  # 1 / (prompts x tokens of the prompt's completions)
            prompt_tokens = self.lengths.view(-1, batch.group).sum(1)  # (P,)
            return batch.group / prompt_tokens.repeat_interleave(batch.group).unsqueeze(1) / count
        if aggregation == "token_mean":
            return ones / self.mask.sum()
        if aggregation == "token_mean_micro_batch":
            micro_batch_tokens = self.mask.view(batch.accumulation, -1).sum(1)
            tokens = micro_batch_tokens.repeat_interleave(batch.rows)
            return 1 / tokens.unsqueeze(1) / batch.accumulation
        if aggregation == "token_mean_trl":
            # TRL divides by the tokens of an average window: the generation's, times a window's
            # share of a generation
            window_share = batch.accumulation / batch.per_generation
            return ones / (self.generation_tokens * window_share)
        raise KeyError(aggregation)

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of sum(weights * logps) in the parameters, (N,).

        Weights are (B, T). With a critic they are (2, B, T), of which the second (B, T) are the
        weights of the critic's values, and its parameters come behind the policy's.
        """
        if weights.dim() == 2:
            return self.policy(weights)
        critic_gradients, _, _ = self.window.critic
        return torch.cat([self.policy(weights[0]), critic_gradients(weights[1])])

    def arguments(self, side: Book) -> dict[str, Any]:
        """Return the arguments of the book's function: the side's own, and the window's tensors."""
        row = side.row
        arguments: dict[str, Any] = dict(side.params)
        if self.batch.beta and "beta" in row.reads:
            arguments.setdefault("beta", self.batch.beta)
        if "max_completion_length" in row.reads:
            arguments["max_completion_length"] = self.batch.limit
        # the function refuses tensors that the row does not read, so each one has its condition
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
        """Return the book's loss of the window on `arguments`, and its derivative in `logps`.

        The derivative is (B, T). With a critic it is (2, B, T): that in `values` comes second.
        """
        row = side.row
        # The function computes in the precision of the log-probabilities. They are in float64, but
        # where rewards are in float32, advantages have to be rounded to float32, as TRL does. It is
        # a copy, since the window's own tensor must not require gradients.
        logps = self.logps.to(self.rewards.dtype, copy=True).requires_grad_()
        leaves = [logps]  # the tensors in which the loss is differentiated
        inputs = {
            **arguments,
            "num_generations": self.batch.group,
            "formulation": side.formulation,
            "logps": logps,
        }
        if "values" in inputs:
            inputs["values"] = inputs["values"].clone().requires_grad_()
            leaves.append(inputs["values"])
        # The function is called on each micro-batch; on the whole window at once where the row's
        # normalizer or its baseline is a number of the whole window.
        takes_window = row.window == "window" or row.advantage == "batch_mean_baseline"
        size = len(logps) if takes_window else self.batch.rows
        parts = _split(inputs, len(logps), size)
        losses = [policy_gradient_loss(side.algorithm, **part).loss for part in parts]
        loss = torch.stack(losses).mean()
        slopes = torch.autograd.grad(loss, leaves)
        return float(loss.detach()), slopes[0] if len(slopes) == 1 else torch.stack(slopes)


def _split(inputs: Mapping[str, Any], count: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each part of `size` completions: slices of tensors, all else as it is.

    Each tensor among the inputs has `count` completions in its first dimension.
    """
    for start in range(0, count, size):
        part = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                part[name] = value[start : start + size]
        yield part
