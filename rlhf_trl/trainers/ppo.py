"""PPO on TRL's GRPOTrainer: a value model beside the policy, and advantages per token."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LambdaLR
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.algorithms import of_the_row
from rlhf_trl.book.aggregation import masked
from rlhf_trl.errors import InputError, setting
from rlhf_trl.evaluation.recorded_later import RecordedLater
from rlhf_trl.losses.policy_gradients import estimate_advantages
from rlhf_trl.trainers import value_model
from rlhf_trl.trainers.on_trl import Batch, with_signature_of
from rlhf_trl.trainers.policy_gradient import (
    BookGRPOConfig,
    BookGRPOTrainer,
    loss_mask,
    mean_advantages,
    whole,
)
from rlhf_trl.trainers.skipping import cut, of_like_length
from rlhf_trl.value_models import value_classifier


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
        # an optimizer or schedule that DeepSpeed makes knows no parameter groups of ours
        plugin = self.deepspeed_plugin
        deepspeed_keys = plugin.deepspeed_config.keys() if plugin else set()
        ignoring = " and ".join(sorted({"optimizer", "scheduler"} & deepspeed_keys))
        for name in ("value_learning_rate", "value_warmup_steps"):
            is_default = getattr(self, name) == getattr(BookPPOConfig, name)  # None, or 0 steps
            if ignoring and not is_default:
                raise InputError(
                    f"{name} needs parameter groups, and the DeepSpeed config's own "
                    f"{ignoring} would ignore them; remove one of the two."
                )


class BookPPOTrainer(RecordedLater, BookGRPOTrainer):
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
    _policy_groups: int  # how many first groups of the optimizer are the policy's, for the warmup

    @with_signature_of(GRPOTrainer.__init__)
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._unrecorded = {}
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
        """Return the value model that the config names: a head, or a model of its own."""
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
        options = {"trust_remote_code": args.trust_remote_code, "dtype": policy.dtype}
        of_policy = args.model_init_kwargs or {}
        if "attn_implementation" in of_policy:
            options["attn_implementation"] = of_policy["attn_implementation"]
        starts_from_policy = not args.value_model_name_or_path
        if "revision" in of_policy and starts_from_policy:
            options["revision"] = of_policy["revision"]
        loaded = value_classifier(source, policy, self.processing_class, **options)
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

    # Extends BookGRPOTrainer's: asks the same forward for the values, and reads less padding.
    @override
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ):
        read = super()._get_per_token_logps_and_entropies
        whole = input_ids, attention_mask, logits_to_keep
        if not self._with_values:
            return read(model, *whole, *args, **kwargs)
        values: list[Tensor] = []

        def score(**inputs):
            output = model(**inputs, with_values=True)
            values.append(output.state_values)
            return output

        results = []
        parts = self._parts(attention_mask, logits_to_keep, kwargs)
        for rows in parts:
            part = whole if rows is None else cut(*whole, rows)
            logps, entropies, aux_loss = read(score, *part, *args, **kwargs)
            scores = logps, entropies, values.pop()[:, -part[2] :]
            results.append([pad(score, (0, logits_to_keep - part[2])) for score in scores])
        logps, entropies, self._values = map(torch.cat, zip(*results, strict=True))
        if len(parts) > 1:
            order = torch.cat(parts).argsort()
            logps, entropies, self._values = logps[order], entropies[order], self._values[order]
        self._logps = logps
        self._scored = logps, entropies, aux_loss
        return self._scored

    def _parts(self, attention_mask: Tensor, logits_to_keep: int, images: Batch) -> list[Any]:
        """Return the rows that are read together, without the padding at their end; None: all."""
        # a tensor belongs to images, of which a completion has any number
        if self.aux_loss_enabled or any(map(torch.is_tensor, images.values())):
            return [None]
        # other processes wait for each forward, and may have another number of them
        most = 2 if self.accelerator.num_processes == 1 else 1
        return of_like_length(attention_mask, logits_to_keep, most)

    # Extends BookGRPOTrainer's: the forward of the loss, and no other, gives values as well.
    @override
    def _compute_loss(self, model, inputs):
        self._with_values = True
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._with_values = False

    def _critic(self, inputs: Batch) -> dict[str, Tensor]:
        """Return what the critic's loss needs; estimate advantages first if that was put off."""
        if "token_rewards" in inputs:
            inputs |= self._estimated(inputs, inputs["token_rewards"], self._values.detach())
            if "recorded_as" in inputs:  # the record of the rollout lacks advantages
                self._record_estimated(inputs["recorded_as"], mean_advantages(inputs))
        old_values, returns = inputs["old_values"], inputs["returns"]
        critic = {"values": self._values, "old_values": old_values, "returns": returns}
        self._log_update(critic, inputs)
        self._values = self._logps = None
        return critic

    def _rollout_values(self, output: Batch) -> Tensor:
        """Return (B, T) values of the state before each token, by the value model as it is."""
        size = self.args.per_device_train_batch_size
        ids, attention = whole(output)
        batches = zip(ids.split(size), attention.split(size), strict=True)
        with torch.no_grad(), self.accelerator.autocast():
            values = [
                self.model(input_ids=part, attention_mask=mask, only_values=True)
                for part, mask in batches
            ]
        return torch.cat(values)[:, -output["completion_ids"].shape[1] :]

    def _advantages(self, output: Batch, rewards: Tensor, training: bool) -> Tensor:
        """Return (B, T) advantages of this process; add old values and returns to the output.

        Values cost a forward of the value model. If a single update follows, the forward of its
        loss gives the same ones: then the advantages returned are zeros, and `_critic` estimates
        them from these values and the `token_rewards` that are added to the output. Whitening and
        the log of completions cannot wait: they need those of the whole generation.
        """
        mine, mask = self._mine(output), loss_mask(output)
        rewards = rewards[mine]  # (B,)
        if self.beta:
            rewards = self._shaped(output, rewards)  # (B, T) where each token has a penalty
        # TRL adds old log-probabilities only where further updates follow
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
            all_advantages, all_masks = self.accelerator.gather(padded)
            whitened = book.advantages.whitened(all_advantages, all_masks)
            advantages = whitened[mine, : mask.shape[1]]
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
        """Log means and spread over tokens, and how much of the returns the values explain."""
        counts = mask.bool()
        a, g = advantages[counts].double(), returns[counts].double()
        sums = a.sum(), (a * a).sum(), g.sum(), (g * g).sum()
        mean_a, mean_a2, mean_g, mean_g2 = self._mean_over_tokens(counts.sum(), *sums)
        variance = max(mean_a2 - mean_a**2, 0)  # also of returns - values, as advantages are these
        variance_of_returns = mean_g2 - mean_g**2
        explained = 1 - variance / variance_of_returns if variance_of_returns > 0 else math.nan
        self._logged["advantages/mean"].append(mean_a)
        self._logged["advantages/std"].append(variance**0.5)
        self._logged["returns/mean"].append(mean_g)
        self._logged["val/explained_variance"].append(explained)

    def _log_update(self, critic: dict[str, Tensor], inputs: Batch) -> None:
        """Log the value loss, how much of it is clipped, and how far the policy has moved."""
        with torch.no_grad():
            mask, logps = loss_mask(inputs), self._logps
            values, returns = critic["values"], critic["returns"]
            clip = self.args.cliprange_value
            losses = book.value.clipped_value_loss(values, critic["old_values"], returns, clip)
            clipped = losses > book.value.value_loss(values, returns)
            log_ratio = inputs.get("old_per_token_logps", logps) - logps
            sums = [masked(x.float(), mask).sum() for x in (losses, clipped, log_ratio**2 / 2)]
            value_loss, clip_fraction, kl = self._mean_over_tokens(mask.sum(), *sums)
        self._logged["loss/value_avg"].append(value_loss)
        self._logged["val/clipfrac_avg"].append(clip_fraction)
        self._logged["policy/approxkl_avg"].append(kl)

    # Extends Trainer.create_optimizer.
    @override
    def create_optimizer(self, model=None):
        """Give the value model parameter groups, and a learning rate, of its own."""
        has_groups = self.optimizer is not None  # by `_complete_optimizer`, or an earlier call
        optimizer = super().create_optimizer(model)
        if has_groups:
            return optimizer
        named = (self.model if model is None else model).named_parameters()
        in_value_model = {id(p) for name, p in named if value_model.is_of_value_model(name)}
        policy_groups, value_groups = [], []  # each of the Trainer's groups becomes one of both
        for group in optimizer.param_groups:
            of_policy = [p for p in group["params"] if id(p) not in in_value_model]
            of_value_model = [p for p in group["params"] if id(p) in in_value_model]
            if of_policy:
                policy_groups.append({**group, "params": of_policy})
            if of_value_model:
                value_groups.append({**group, "params": of_value_model})
        if self.args.value_learning_rate is not None:
            for group in value_groups:
                group["lr"] = self.args.value_learning_rate
        optimizer.param_groups[:] = policy_groups + value_groups  # in this order: see the warmup
        self._policy_groups = len(policy_groups)
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
            """Return a schedule's factor of the learning rate, 0 while the policy is to wait."""
            return lambda step: 0.0 if step < warmup else factor(step)

        for group in range(self._policy_groups):
            scheduler.lr_lambdas[group] = held(scheduler.lr_lambdas[group])
            # the scheduler has already set the rate of the first step
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
