"""The policy-gradient family on fixed windows: TRL's trainers, and the book's functions.

A window is what one optimizer step sees. Its completions are random tokens that depend only on the
prompt, the place in the group and the number of the call; its rewards depend only on the
completion. The policy that generated, the one that is trained and the reference are three versions
of one untrained model. Everything behind generation is the trainer's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rlhf_trl.compare import measure
from rlhf_trl.compare.measure import Book, Measured, Stock
from rlhf_trl.compare.models import (
    Gradients,
    adapter,
    continued_adapter,
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
from rlhf_trl.compare.trainers import trainer_classes
from rlhf_trl.compare.windows.batches import PolicyBatch
from rlhf_trl.compare.windows.completions import (
    completion,
    has_format,
    prompt_examples,
    reward_functions,
    right,
)
from rlhf_trl.compare.windows.generation import check_generation, fix_completions, sampler_logps
from rlhf_trl.compare.windows.order import check_order, unmixed
from rlhf_trl.compare.windows.terms import Identity, Terms, apply
from rlhf_trl.compare.windows.window import Window
from rlhf_trl.losses.checked import policy_gradient_loss
from rlhf_trl.losses.policy_gradients import kl_estimate

VALUE_MODEL = "value_model"  # the policy's attribute that holds PPO's value model

CRITIC = f"{VALUE_MODEL}."  # what the names of a value model's weights begin with


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
    examples = prompt_examples(batch, with_text_column=is_checked)
    arguments |= _window_arguments(batch)
    built = make_trainer(trainer, config, window, examples, **arguments)
    if getattr(built, "drops_groups", False):
        # our trainer of DAPO's code drops groups without contrast, which the book's side keeps
        built.drops_groups = False
    if is_checked:
        check_generation(built)
    fix_completions(
        built,
        completion(batch.ragged, batch.limit, odd=batch.gaps),
        tools=batch.tools,
        sampler=batch.sampler,
        gaps=batch.gaps,
    )
    return built


def _window_arguments(batch: PolicyBatch) -> dict[str, Any]:
    """Return the arguments of a trainer that a window needs: rewards, an adapter, tokenizers."""
    rewards = reward_functions(batch)
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


class PolicyWindow(Window):
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

    def build(self, side: Stock) -> Any:
        """Build the trainer of a stock side; the batch's KL and scale of rewards override its own.

        A batch may be about these two. All other fields of a side override those of the window.
        """
        trainer, config = side.classes or trainer_classes(side.trainer)
        fields = dict(side.config)
        if self.batch.beta:
            fields["beta"] = self.batch.beta
        if "reward_weights" in fields:
            weights = fields["reward_weights"]
            fields["reward_weights"] = [weight * self.batch.reward_scale for weight in weights]
        return build_trainer(trainer, config, fields, self.batch, **side.trainer_arguments)

    def book(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss and its gradient."""
        view = self.view()
        loss, slopes = view.book(side, view.arguments(side))
        return loss, view.gradient(slopes)  # by the chain rule

    def changed(self, side: Book, steps: Sequence[Identity]) -> Tensor:
        """Return the gradient after identities, which may change temperature and arguments, too."""
        at_temperature = any(step.temperature for step in steps)
        view = self.view(self.batch.temperature if at_temperature else 1.0)
        arguments = view.arguments(side)
        for step in steps:
            if step.arguments:
                arguments = step.arguments(view, arguments)
        _, weights = view.book(side, arguments)
        terms = _apart(side, view, arguments, weights)
        apply(steps, terms)
        return view.gradient(terms.surrogate + terms.kl)

    def measured(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build_trainer` built for this window, as it computes."""
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
        logps = torch.tensor([sampler_logps(ids) for ids in self.ids.tolist()])
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


def _apart(side: Book, view: View, arguments: dict[str, Any], weights: Tensor) -> Terms:
    """Take the derivative of a loss apart: the policy gradient's part, and that of beta * KL.

    Args:
        side: the row, its formulation and parameters.
        view: the window.
        arguments: of the book's function.
        weights: (B, T) d loss / d logps.
    """
    row = side.row
    beta = arguments.get("beta", 0.0) if "ref_logps" in arguments else 0.0
    aggregation = row.aggregation
    if aggregation == "token_mean" and row.window == "micro_batch":
        aggregation = "token_mean_micro_batch"
    token_weight = view.token_weight(aggregation)
    kl = torch.zeros_like(weights)
    if beta and row.kl == "loss":
        logps = view.logps.clone().requires_grad_()
        params = {**row.reads, **arguments}
        estimate = kl_estimate(row, params, logps, view.ref_logps, view.mask)
        (slope,) = torch.autograd.grad(estimate.sum(), logps)
        kl = beta * token_weight * slope
    return Terms(view, surrogate=weights - kl, kl=kl, token_weight=token_weight, beta=beta)


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
