"""PPO on TRL's GRPOTrainer: a value model beside the policy, and advantages per token."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.algorithms import of_the_row
from rlhf_trl.book.aggregation import masked
from rlhf_trl.errors import InputError, setting
from rlhf_trl.losses import estimate_advantages
from rlhf_trl.trainers import value_model
from rlhf_trl.trainers.on_trl import Batch, with_signature_of
from rlhf_trl.trainers.policy_gradient import (
    BookGRPOConfig,
    BookGRPOTrainer,
    loss_mask,
    mean_advantages,
    whole,
)


@dataclass
class BookPPOConfig(BookGRPOConfig):
    """BookGRPOConfig with what PPO adds; None in the first block is the row's own.

    A value may move by `cliprange_value`, in units of the reward, in one buffer. Whitening takes
    the advantages of all valid tokens of a generation; a lone token's becomes 0. A separate value
    model starts from any checkpoint or reward model with the policy's tokenizer.
    """

    default_row: ClassVar[str] = "ppo"
    critic: ClassVar[bool] = True

    gamma: float | None = of_the_row("gamma")
    lam: float | None = of_the_row("lam")
    vf_coef: float | None = of_the_row("vf_coef")
    cliprange_value: float | None = of_the_row("cliprange_value")
    whiten_advantages: bool | None = of_the_row("whiten_advantages")

    value_model: str = setting(
        "A backbone of its own, or a head.", "separate", choices=["separate", "head"]
    )
    value_model_name_or_path: str | None = setting(
        "What the value model starts from. None: the policy."
    )
    value_learning_rate: float | None = setting("For values. None: learning_rate.")
    value_warmup_steps: int = setting("Steps in which only values learn.", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("value_learning_rate", "value_warmup_steps"):
            if (getattr(self, name) or 0) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; write 0 or more.")
        if self.sync_ref_model:
            raise InputError(
                "sync_ref_model copies what is trained to a model without a value model; remove it."
            )
        for name in ("value_model_name_or_path", "value_warmup_steps"):
            if self.value_model == "head" and getattr(self, name):
                raise InputError(f"{name} is for a separate value model, not a head; remove one.")
        plugin = self.deepspeed_plugin
        own = {"optimizer", "scheduler"} & (plugin.deepspeed_config.keys() if plugin else set())
        for name in ("value_learning_rate", "value_warmup_steps"):
            if own and getattr(self, name) != getattr(BookPPOConfig, name):
                raise InputError(
                    f"{name} needs parameter groups, and the DeepSpeed config's own "
                    f"{' and '.join(sorted(own))} would ignore them; remove one of the two."
                )


class BookPPOTrainer(BookGRPOTrainer):
    """BookGRPOTrainer for rows with a critic.

    The value model is a module of the policy, named `value_model`; `save_model` writes the policy
    alone, `save_value_model` the value model alone, and checkpoints hold both.

    Logged beside TRL's metrics, each over the tokens that count: `loss/value_avg`,
    `val/clipfrac_avg` (share of value losses that the clip decides), `policy/approxkl_avg` (KL
    to the policy of the rollout), and once per generation, or for each micro-batch where a single
    update follows it, `val/explained_variance` (of the returns, by the values of the rollout),
    `returns/mean`, `advantages/mean` and `advantages/std`.
    """

    config_class = BookPPOConfig

    @with_signature_of(GRPOTrainer.__init__)
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._with_values = False
        self._logps: Tensor | None = None
        self._values: Tensor | None = None
        value_model.attach(self._policy, self._new_value_model())
        if self.optimizer is not None:
            self._complete_optimizer()
        if self.use_vllm:
            engine = self.vllm_generation
            engine._iter_named_params = value_model.only_policy(engine._iter_named_params)

    @property
    def _policy(self) -> Any:
        """The policy itself, inside PEFT's wrapper if there is one."""
        return self.model.get_base_model() if is_peft_model(self.model) else self.model

    def _new_value_model(self) -> Any:
        args, policy = self.args, self._policy
        if args.value_model == "head":
            if is_peft_model(self.model):
                raise InputError(
                    "value_model: head shares a backbone, which LoRA freezes; write separate."
                )
            return value_model.head(policy)
        source = args.value_model_name_or_path or get_config_model_id(policy.config)
        if not source:
            raise InputError(
                "the policy exists only in memory, so no value model can start from it; save it "
                "and name its folder, or name another checkpoint in value_model_name_or_path."
            )
        kwargs = dict(args.model_init_kwargs or {})
        kwargs = {n: kwargs[n] for n in ("revision", "attn_implementation") if n in kwargs}
        if args.value_model_name_or_path:
            kwargs.pop("revision", None)
        given = (source, policy, self.processing_class, args.trust_remote_code)
        loaded = value_model.load(*given, dtype=policy.dtype, **kwargs)
        return loaded.to(self.args.device) if self.place_model_on_device else loaded

    def _complete_optimizer(self) -> None:
        """Give an optimizer that was made before the trainer the value model as one more group."""
        if self.lr_scheduler is not None:
            raise InputError(
                "optimizers: the schedule was made before the value model joined the optimizer; "
                "write optimizers=(optimizer, None) and set lr_scheduler_type."
            )
        self._policy_groups = len(self.optimizer.param_groups)
        lr = self.args.value_learning_rate
        group = {"params": list(self._policy.value_model.parameters())}
        self.optimizer.add_param_group(group if lr is None else {**group, "lr": lr})

    # Extends BookGRPOTrainer's: asks the same forward for the values.
    @override
    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if not self._with_values:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        found = []

        def score(**inputs):
            output = model(**inputs, with_values=True)
            found.append(output.state_values)
            return output

        result = super()._get_per_token_logps_and_entropies(score, *args, **kwargs)
        self._logps, self._values = result[0], _before_tokens(torch.cat(found), result[0])
        return result

    # Extends BookGRPOTrainer's: the forward of the loss, and no other, gives values as well.
    @override
    def _compute_loss(self, model, inputs):
        self._with_values = True
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._with_values = False

    def _critic(self, inputs: Batch) -> dict[str, Tensor]:
        if "token_rewards" in inputs:
            inputs |= self._estimated(inputs, inputs["token_rewards"], self._values.detach())
            if "recorded_as" in inputs:
                self._record_estimated(inputs["recorded_as"], mean_advantages(inputs))
        critic = {"values": self._values, **{n: inputs[n] for n in ("old_values", "returns")}}
        self._log_update(critic, inputs)
        self._values = self._logps = None
        return critic

    def _rollout_values(self, output: Batch) -> Tensor:
        """Return (B, T) values of the state before each token, by the value model as it is."""
        size = self.args.per_device_train_batch_size
        batches = zip(*(each.split(size) for each in whole(output)), strict=True)
        with torch.no_grad(), self.accelerator.autocast():
            found = [
                self.model(input_ids=ids, attention_mask=mask, only_values=True)
                for ids, mask in batches
            ]
        return _before_tokens(torch.cat(found), output["completion_ids"])

    def _advantages(self, output: Batch, rewards: Tensor, training: bool) -> Tensor:
        """Return (B, T) advantages of this process; add old values and returns to the output.

        If a single update follows (TRL then omits old log-probabilities), zeros hold their place:
        `_critic` estimates them in the loss, from the added `token_rewards` and that forward's
        values. But whitening and the log of completions need those of the whole generation now.
        """
        own, mask = self._mine(output), loss_mask(output)
        rewards = self._shaped(output, rewards[own]) if self.beta else rewards[own]  # (B, T), (B,)
        single_update = training and "old_per_token_logps" not in output
        if single_update and not (self.args.whiten_advantages or self.log_completions):
            if rewards.dim() == 1:
                rewards = book.rewards.at_last_token(rewards, mask)
            output["token_rewards"] = rewards
            return torch.zeros_like(rewards)
        output |= self._estimated(output, rewards, self._rollout_values(output))
        advantages = output["advantages"]
        if self.args.whiten_advantages:
            # every process pads to its own longest completion
            padded = [self.accelerator.pad_across_processes(x, dim=1) for x in (advantages, mask)]
            all_advantages, all_mask = self.accelerator.gather(padded)
            whitened = book.advantages.whitened(all_advantages, all_mask)
            advantages = whitened[own, : mask.shape[1]]
        return advantages

    def _estimated(self, batch: Batch, rewards: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return (B, T) advantages, returns and the values of the rollout they are made of."""
        mask = loss_mask(batch)
        values = masked(values, mask)
        advantages = estimate_advantages(
            self._row, self._parameters, rewards=rewards, mask=mask, old_values=values
        )
        returns = masked(book.value.lambda_returns(advantages, values), mask)
        self._log_estimates(advantages, returns, mask)
        return {"advantages": advantages, "returns": returns, "old_values": values}

    def _log_estimates(self, advantages: Tensor, returns: Tensor, mask: Tensor) -> None:
        kept = mask.bool()
        a, g = advantages[kept].double(), returns[kept].double()
        sums = torch.stack([kept.sum(), a.sum(), (a * a).sum(), g.sum(), (g * g).sum()])
        tokens, a1, a2, g1, g2 = self.accelerator.reduce(sums, reduction="sum").tolist()
        tokens = max(tokens, 1)
        spread = max(a2 / tokens - (a1 / tokens) ** 2, 0)  # the values' errors are the advantages
        of_returns = g2 / tokens - (g1 / tokens) ** 2
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["advantages/mean"].append(a1 / tokens)
        metrics["advantages/std"].append(spread**0.5)
        metrics["returns/mean"].append(g1 / tokens)
        explained = 1 - spread / of_returns if of_returns > 0 else math.nan
        metrics["val/explained_variance"].append(explained)

    def _log_update(self, critic: dict[str, Tensor], inputs: Batch) -> None:
        """Log the value loss, how much of it is clipped, and how far the policy has moved."""
        with torch.no_grad():
            mask, logps = loss_mask(inputs), self._logps
            values, returns = critic["values"], critic["returns"]
            clip = self.args.cliprange_value
            losses = book.value.clipped_value_loss(values, critic["old_values"], returns, clip)
            clipped = losses > book.value.value_loss(values, returns)
            drift = inputs.get("old_per_token_logps", logps) - logps
            each = [losses, clipped, drift**2 / 2, torch.ones_like(logps)]
            sums = torch.stack([masked(x.float(), mask).sum() for x in each])
        *sums, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        names = ("loss/value_avg", "val/clipfrac_avg", "policy/approxkl_avg")
        for name, total in zip(names, sums, strict=True):
            metrics[name].append(total / max(tokens, 1))

    # Extends Trainer.create_optimizer.
    @override
    def create_optimizer(self, model=None):
        """Give the value model parameter groups, and a learning rate, of its own."""
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if given:
            return optimizer
        named = (self.model if model is None else model).named_parameters()
        own = {id(p) for name, p in named if value_model.is_of_value_model(name)}
        policy, value = [], []
        for group in optimizer.param_groups:
            for side, groups in ((False, policy), (True, value)):
                if params := [p for p in group["params"] if (id(p) in own) == side]:
                    groups.append({**group, "params": params})
        if self.args.value_learning_rate is not None:
            for group in value:
                group["lr"] = self.args.value_learning_rate
        optimizer.param_groups[:] = policy + value
        self._policy_groups = len(policy)
        return optimizer

    # Extends Trainer.create_scheduler.
    @override
    def create_scheduler(self, num_training_steps, optimizer=None):
        """Hold the policy still while the value model warms up."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if not (warmup := self.args.value_warmup_steps):
            return scheduler
        if not isinstance(scheduler, LambdaLR):
            raise InputError(
                f"value_warmup_steps works with schedules of a given shape, and lr_scheduler_type "
                f"{self.args.lr_scheduler_type} has none; write linear, cosine or constant."
            )

        def held(factor):
            return lambda step: 0.0 if step < warmup else factor(step)

        for group in range(self._policy_groups):
            scheduler.lr_lambdas[group] = held(scheduler.lr_lambdas[group])
            # the scheduler has already taken its first step
            scheduler.optimizer.param_groups[group]["lr"] = scheduler._last_lr[group] = 0.0
        return scheduler

    # Extends Trainer._save: what it writes is the policy alone.
    @override
    def _save(self, output_dir=None, state_dict=None):
        if state_dict is not None:
            state_dict, _ = value_model.split(state_dict)
        with value_model.detached(self._policy):
            super()._save(output_dir, state_dict)

    def save_value_model(self, folder: str) -> None:
        """Write the value model and the tokenizer, for plain transformers.

        Call it on all processes. `AutoModelForSequenceClassification` loads the folder; its `score`
        of the hidden state after a token is the value of the state there.
        """
        wrapped = self.deepspeed if self.is_deepspeed_enabled else self.model
        state = self.accelerator.get_state_dict(wrapped)
        state = state if self.args.should_save else None
        value_model.save(folder, self._policy, state, self.processing_class)

    def _save_state(self, folder: Path) -> None:
        super()._save_state(folder)
        self.save_value_model(str(folder / value_model.NAME))

    # Extends Trainer._load_from_checkpoint, where FSDP restores all (DeepSpeed does not use it).
    @override
    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with value_model.detached(self._policy):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        value_model.restore(os.path.join(resume_from_checkpoint, value_model.NAME), self._policy)

    # Extends Trainer._load_best_model: the same for both models of one step.
    @override
    def _load_best_model(self):
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_best_model()
            return
        with value_model.detached(self._policy):
            super()._load_best_model()
        folder = os.path.join(self.state.best_model_checkpoint, value_model.NAME)
        value_model.restore(folder, self._policy)


def _before_tokens(state_values: Tensor, completions: Tensor) -> Tensor:
    """Cut (B, L) values after each token down to (B, T) values before each completion token."""
    return state_values[:, :-1][:, -completions.shape[1] :]
