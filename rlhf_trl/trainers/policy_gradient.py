"""Policy-gradient algorithms on TRL's GRPOTrainer: a row of the table, read over the book."""

import inspect
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.algorithms import FieldError, PolicyGradient, Resolved, RowConfig, of_the_row
from rlhf_trl.errors import InputError, nearest, setting
from rlhf_trl.evaluation.held_out import WITH_PENALTIES, with_penalties
from rlhf_trl.evaluation.rewarded import RewardedAnswers
from rlhf_trl.losses.calling import look_up
from rlhf_trl.losses.policy_gradients import estimate_advantages, shaped_rewards, surrogate_loss
from rlhf_trl.rewards.finished import with_finished
from rlhf_trl.rollouts.generate import without_generation_config
from rlhf_trl.rollouts.prompts_once import ReadsPromptsOnce
from rlhf_trl.trainers.dynamic_sampling import DynamicSampling
from rlhf_trl.trainers.on_trl import Batch, OnTRL, Safeguards, with_signature_of
from rlhf_trl.trainers.skipping import Skipping, UpdateFields

if hasattr(utils, "Table"):  # rich is there, whose columns cut words that are wider than they are
    add_column = partialmethod(utils.Table.add_column, overflow="fold")
    utils.Table = type("Table", (utils.Table,), {"add_column": add_column})  # of `log_completions`

STATE_FILE = "policy_gradient_state_{}.pt"  # in checkpoints, one for each process


@dataclass
class PolicyGradientConfig(RowConfig, Safeguards, UpdateFields):
    """Mixin of configs of TRL's GRPO kind: their row is one of policy gradients."""

    kind = PolicyGradient
    in_recipes: ClassVar = {"read_prompts_once": "exact"}
    critic: ClassVar[bool] = False  # whether the trainer of this config has a value model
    stock_trainer: ClassVar[str] = "GRPOTrainer"

    read_prompts_once: str | None = setting(
        "without vLLM: where tokens stay the same, or always", choices=["exact", "always"]
    )
    epsilon: float | None = of_the_row("epsilon")
    epsilon_high: float | None = of_the_row("epsilon_high")
    kl_estimator: str | None = of_the_row("kl_estimator")
    # where an algorithm without ratio reuses a batch; without a row's own, nothing is corrected
    importance_cap: float | None = of_the_row("importance_cap")
    missing_eos_penalty: float | None = of_the_row("missing_eos_penalty")

    def parameters(self, row: PolicyGradient, user_values: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters of the row's loss."""
        if user_values.get("baseline") == "moving_average":
            user_values["baseline_value"] = 0.0  # each generation sets it
        return row.parameters(user_values)

    def checked(self, resolved: Resolved) -> Resolved:
        """Return the row as its parameters make it, if the run can be computed and resumed."""
        row = resolved.row.chosen(resolved.parameters)
        _check(row, self)
        return replace(resolved, row=row)


@dataclass
class BookGRPOConfig(PolicyGradientConfig, GRPOConfig):
    """GRPOConfig whose loss fields belong to the algorithm, with the fields that TRL lacks.

    None means the default of the algorithm's row, or what it fixes. `epsilon_high` always means an
    upper bound of 1 + epsilon_high. One completion per prompt is allowed.
    """

    default_row: ClassVar[str] = "grpo"

    # TRL's fields that a row reads or fixes: TRL's default could not be told from the user's value.
    sapo_temperature_pos: float | None = of_the_row("sapo_temperature_pos")
    sapo_temperature_neg: float | None = of_the_row("sapo_temperature_neg")
    loss_type: str | None = of_the_row("loss_type")
    scale_rewards: str | None = of_the_row("scale_rewards")
    importance_sampling_level: str | None = of_the_row("importance_sampling_level")
    multi_objective_aggregation: str | None = of_the_row("multi_objective_aggregation")
    use_bias_correction_kl: bool | None = of_the_row("use_bias_correction_kl")

    baseline: str | None = of_the_row("baseline")
    baseline_decay: float | None = of_the_row("baseline_decay")
    correctness_reward: str | None = of_the_row("correctness_reward")
    format_reward: str | None = of_the_row("format_reward")
    # the last tokens before max_completion_length
    soft_punish_cache: int | None = of_the_row("soft_punish_cache")
    # afterwards groups without contrast are kept; 0: no rounds, and formulation code drops them
    dynamic_sampling_rounds: int | None = of_the_row("dynamic_sampling_rounds")

    # Extends GRPOConfig.__post_init__, which refuses one completion per prompt for all algorithms.
    def __post_init__(self) -> None:
        if self.num_generations != 1:
            super().__post_init__()
            return
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        # stands in for 1 meanwhile: it divides every generation batch that these fields can give
        share = self.generation_batch_size or self.per_device_train_batch_size * steps
        if share < 2:
            raise InputError(
                "num_generations is 1, and each process generates a single completion but needs 2; "
                "raise per_device_train_batch_size or gradient_accumulation_steps."
            )
        in_evaluation = self.num_generations_eval
        self.num_generations, self.num_generations_eval = share, in_evaluation or 1
        super().__post_init__()
        self.num_generations, self.num_generations_eval = 1, in_evaluation


class PolicyGradientTrainer(OnTRL, DynamicSampling, RewardedAnswers, ReadsPromptsOnce, Skipping):
    """Mixin of trainers of TRL's GRPO kind: advantages and loss are a row's.

    Rows that standardize rewards log, per generation, `equal_rewards/frac_groups` (share of groups
    whose rewards are all the same) and `equal_rewards/max_advantage`, the largest that rounding
    gives to a completion of such a group. Runs with penalties log the means of `with_penalties`,
    and `frac_reward_zero_std` is counted with them.
    """

    _sampler: Any = None  # of a data set that does not stream
    _finished: list[bool]  # which of the completions that are being judged the model ended

    def __init__(self, model: Any, args: Any = None, **kwargs: Any):
        args = self._take(args, model)  # sets what is read below: _row, _parameters, _stock ...
        # micro-batches that one generation feeds
        self._generate_every = args.steps_per_generation * args.num_iterations
        # what goes into and out of checkpoints
        self._carried = {"baseline_value": None, "stream_position": 0, "generation": 0}
        self._ahead: list[dict[str, Any]] = []  # generations of a window that are not yet used
        # tokens of each accumulation window (optimizer step) that the generation is learned in
        self._window_tokens: Tensor | None = None
        super().__init__(model, args=args, **kwargs)
        # reward functions that ask get to know which completions the model ended by itself; in
        # a stock run, taking any keyword is not asking: TRL hands over no such argument
        self.reward_funcs = [
            with_finished(function, lambda: self._finished, only_by_name=self._stock)
            for function in self.reward_funcs
        ]
        if "epsilon_high" in self._parameters:
            # for CISPO TRL means by it the upper bound itself, 1 more than a distance from 1
            offset = self._row.trl_offset.get("epsilon_high", 0)
            self.epsilon_high = self._parameters["epsilon_high"] + offset
        self._correctness = self._reward_column("correctness_reward")
        self._format = self._reward_column("format_reward")
        has_rounds = self._counts_examples()  # true for rounds, and for nothing else
        self._rounds = args.dynamic_sampling_rounds if has_rounds else 0
        # where `_rounds` draws no new ones, the book's code leaves groups without contrast out
        is_books_dapo = self._algorithm == "dapo" and self._formulation == "code"
        self.drops_groups = is_books_dapo and not self._rounds

    def _counts_examples(self) -> bool:
        rounds = "dynamic_sampling_rounds"
        return rounds in self._row.trainer_reads and bool(getattr(self.args, rounds))

    def _reward_column(self, name: str) -> int | None:
        """Return which reward function a config field names."""
        if name not in self._row.trainer_reads or (function := getattr(self.args, name)) is None:
            return None
        if function not in self.reward_func_names:
            raise InputError(
                f"{name}: {function!r} is not among the reward functions"
                f"{nearest(function, self.reward_func_names)} {', '.join(self.reward_func_names)}."
            )
        return self.reward_func_names.index(function)

    # Extends GRPOTrainer._generate_single_turn, which reads the checkpoint's generation_config.
    @override
    def _generate_single_turn(self, *args, **kwargs):
        if self._stock:
            return super()._generate_single_turn(*args, **kwargs)
        with without_generation_config(self.accelerator.unwrap_model(self.model)):
            return super()._generate_single_turn(*args, **kwargs)

    # Extends GRPOTrainer._calculate_rewards, which trains on 0 where no reward applies: notes which
    # completions are finished, for reward functions that ask, and keeps the gathered rewards.
    @override
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        ended = [bool(ids) and ids[-1] in self.eos_token_ids for ids in completion_ids_list]
        self._finished = ended
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        unscored = torch.isnan(rewards).all(dim=1).nonzero().flatten().tolist()
        if unscored and not self._stock:
            raise InputError(
                f"no reward function applied to {len(unscored)} of {len(rewards)} completions at "
                f"step {self.state.global_step}; one of {self.reward_func_names} has to."
            )
        self._rewards_per_func, self._completion_ids = rewards, completion_ids_list
        self._ended = ended
        return rewards

    # Extends GRPOTrainer._generate_and_score_completions: the row's advantages replace TRL's.
    @override
    def _generate_and_score_completions(self, inputs):
        windows = self.args.gradient_accumulation_steps // self._generate_every
        if not self._counts_window() or windows <= 1:
            return self._generation(inputs)
        # The first loss of the window needs the tokens of all its generations: they come at once.
        if not self._ahead:
            first_batches = self._window[:: self._generate_every]  # of each generation
            self._ahead = [self._generation(batch) for batch in first_batches]
            tokens = sum(output["num_items_in_batch"] for output in self._ahead)
            for output in self._ahead:
                output["window_tokens"] = tokens * self.num_iterations
        return self._ahead.pop(0)

    def _generation(self, inputs: list[dict[str, Any]]) -> Batch:
        """Generate and score with TRL; return its batch with the row's advantages, recorded."""
        output = super()._generate_and_score_completions(inputs)
        self._scored = None  # log-probabilities of scoring; `_compute_loss` keeps its own there
        training = self.model.training
        endings = self._endings()
        rewards = self._weighted(self._rewards_per_func)
        if penalized := with_penalties(self.args, rewards, *endings.T):
            rewards = penalized[WITH_PENALTIES]
            self._log_penalties(penalized, self._group())
        if not self._stock:
            if training and self.num_generations == 1:  # a group of one cannot have a spread
                self._metrics["train"].pop("frac_reward_zero_std", None)
            if self.drops_groups and training:
                self._drop_groups(output)  # before the tokens of their prompts are counted
            output["prompt_tokens"] = self._prompt_tokens(output)
            output["advantages"] = self._advantages(output, rewards, training)
            self._show_advantages(output)
        if training:
            if self.rollouts is not None:
                self._record_generation(output, endings)
            self._carried["generation"] += 1
        return output

    def _endings(self) -> Tensor:
        """Return (B, 2) of all completions: how many tokens, and whether the model ended it."""
        pairs = zip(self._completion_ids, self._ended, strict=True)
        mine = [(len(ids), ended) for ids, ended in pairs]
        return self.accelerator.gather(torch.tensor(mine, device=self._rewards_per_func.device))

    def _prompt_tokens(self, output: Batch) -> Tensor:
        """Return (B,) for each completion the tokens of all completions of its prompt.

        A loss cannot count them: TRL's shuffle spreads a prompt over micro-batches and processes.
        """
        lengths = self.accelerator.gather(loss_mask(output).sum(1)).view(-1, self._group())
        tokens = lengths.sum(1, keepdim=True).expand_as(lengths).flatten()
        return tokens[self._mine(output)]

    def _show_advantages(self, output: Batch) -> None:
        """Put the row's advantages in the place of TRL's in the logged table of completions."""
        advantages = self.accelerator.gather(mean_advantages(output)).tolist()
        logged = self._logs["advantages"]
        earlier = list(logged)[: len(logged) - len(advantages)]
        logged.clear()
        logged.extend([*earlier, *advantages])

    def _advantages(self, output: Batch, rewards: Tensor, training: bool) -> Tensor:
        """Return the row's advantages of this process' completions from all rewards, (B,)."""
        mine = self._mine(output)
        if self._row.kl == "reward" and self.beta:
            rewards = self.accelerator.gather(self._shaped(output, rewards[mine]))
        self._recall_baseline(rewards, training)
        size = self._group()
        inputs = {"binary_rewards": self._binary_rewards(), "num_generations": size}
        advantages = estimate_advantages(self._row, self._parameters, rewards=rewards, **inputs)
        if "std_epsilon" in self._parameters:
            groups = rewards.view(-1, size)
            equal = (groups == groups[:, :1]).all(1)
            largest = advantages.view(-1, size).abs().amax(1) * equal
            self._logged["equal_rewards/frac_groups"].append(equal.float().mean().item())
            self._logged["equal_rewards/max_advantage"].append(largest.max().item())
        return advantages[mine]

    def _mean_over_tokens(self, count: Tensor, *totals: Tensor) -> list[float]:
        """Return sums over this process' tokens, so many, as means over those of all processes."""
        sums = self.accelerator.reduce(torch.stack([count, *totals]), reduction="sum").tolist()
        return [total / max(sums[0], 1) for total in sums[1:]]

    def _group(self) -> int:
        """Return the number of completions of a prompt, in training or outside."""
        return self.num_generations if self.model.training else self.num_generations_eval

    def _mine(self, output: Batch) -> slice:
        """Return where the completions of this process stand among those of all."""
        share = len(output["completion_mask"])
        first = share * self.accelerator.process_index
        return slice(first, first + share)

    def _shaped(self, output: Batch, rewards: Tensor) -> Tensor:
        """Take the KL to the reference, if there is one, from this process' rewards."""
        logps, ref_logps = self._rollout_logps(output), output["ref_per_token_logps"]
        if self.skips:  # for TRL's metric `kl`, of the completions that the update leaves out
            output["rollout_logps"] = logps
        tensors = {"mask": loss_mask(output), "logps": logps, "ref_logps": ref_logps}
        return shaped_rewards(self._row, self._parameters, rewards=rewards, **tensors)

    def _rollout_logps(self, output: Batch) -> Tensor:
        """Return the log-probabilities at rollout time; TRL omits them while they are current."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        score = super()._get_per_token_logps_and_entropies  # ours would keep the result
        names = inspect.signature(score).parameters
        extra = {name: output[name] for name in names if name in output}  # images, if there are any
        extra["batch_size"] = self.args.per_device_train_batch_size
        with torch.no_grad():
            return score(self.model, *whole(output), output["completion_ids"].size(1), **extra)[0]

    def _binary_rewards(self) -> Tensor | None:
        """Return 1 for completions that are right (and well formed, if that is asked)."""
        if self._correctness is None:
            return None
        success = self._rewards_per_func[:, self._correctness]
        if not self._parameters.get("partial_credit"):
            success = (success == 1).float()
        if self._format is not None:
            success = success * (self._rewards_per_func[:, self._format] == 1)
        return success

    def _recall_baseline(self, rewards: Tensor, training: bool) -> None:
        """Set the moving average of earlier batches (the first has its own mean) and move it."""
        if self._row.advantage != "moving_average_baseline":
            return
        carried = self._carried["baseline_value"]
        baseline = rewards.mean().item() if carried is None else carried
        self._parameters["baseline_value"] = baseline
        if training:
            self._carried["baseline_value"] = book.advantages.moving_average(
                baseline, rewards, self.args.baseline_decay
            )

    def _counts_window(self) -> bool:
        return not self._stock and self._row.window == "window" and self.model.training

    # Extends Trainer.get_batch_samples: a window of several generations is generated as a whole.
    @override
    def get_batch_samples(self, *args, **kwargs):
        """Take the batches of an accumulation window, and remember them."""
        samples, num_items = super().get_batch_samples(*args, **kwargs)
        self._window = samples
        return samples, num_items

    # Extends GRPOTrainer._prepare_inputs: counts the tokens of each window, not of an average one.
    @override
    def _prepare_inputs(self, generation_batch):
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        window = self.args.gradient_accumulation_steps
        new = self._buffered_inputs is not before  # there is another generation
        if new and self._counts_window() and window <= self._generate_every:
            counts = torch.stack([loss_mask(batch).sum() for batch in self._buffered_inputs])
            counts = self.accelerator.reduce(counts, reduction="sum")  # of each micro-batch
            # all of them in a row are trained on `num_iterations` times
            self._window_tokens = counts.repeat(self.num_iterations).view(-1, window).sum(dim=1)
        return inputs

    # Extends GRPOTrainer._get_per_token_logps_and_entropies: keeps the result for the loss.
    @override
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self._scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._scored

    # Extends GRPOTrainer._compute_loss: the row's loss on TRL's forward; TRL's is for its metrics.
    @override
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        logps, _entropies, aux_loss = self._scored
        self._scored = None  # else the graph would outlive the step
        if self._stock:
            return loss
        mode = "train" if self.model.training else "eval"
        if self._row.surrogate != "clipped_ratio":  # TRL counts what that one clips
            for name in [n for n in self._metrics[mode] if n.startswith("clip_ratio/")]:
                del self._metrics[mode][name]
        steps = 1  # what means over micro-batches are divided by, unless transformers does it
        if mode == "train" and self.loss_is_scaled_for_ga:
            steps = self.current_gradient_accumulation_steps
        tokens = None
        if self._row.window == "window":
            # DDP takes the mean over processes of what adds up over them
            tokens = self._tokens_of_window(inputs, mode) / self.accelerator.num_processes
        loss = self.row_loss(inputs, logps, tokens)
        if tokens is None:
            loss = loss / steps
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
        return loss

    def row_loss(self, inputs: Batch, logps: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the loss of a micro-batch; a subclass may compute its own here.

        Args:
            inputs: TRL's batch; `loss_mask` has its (B, T) tokens that count, `advantages` is (B,)
                or (B, T), and `old_per_token_logps` (B, T) is there unless the policy is as it was.
            logps: (B, T) log-probabilities of the completions' tokens, with their graph.
            tokens: how many tokens the loss is divided by, where the row's window is the whole
                accumulation step; None: it is a mean over the micro-batch.

        Returns:
            A scalar. Where `tokens` is None, it is divided by the accumulation steps afterwards.
        """
        critic = self._critic(inputs)  # which may estimate the advantages
        return surrogate_loss(
            self._row,
            self._parameters,
            logps=logps,
            mask=loss_mask(inputs),
            advantages=inputs["advantages"],
            old_logps=inputs.get("old_per_token_logps"),
            ref_logps=inputs.get("ref_per_token_logps"),
            token_weights=inputs.get("importance_sampling_ratio"),
            normalizer=tokens,
            num_generations=self._group(),
            prompt_tokens=inputs.get("prompt_tokens"),
            **critic,
        )

    def _critic(self, inputs: Batch) -> dict[str, Tensor]:
        """Return what the loss of a critic needs, for rows that have one."""
        return {}

    def _tokens_of_window(self, inputs: Batch, mode: str) -> Tensor:
        """Return the tokens, over all processes, of the accumulation window of this step."""
        if mode == "eval":
            tokens = inputs["num_items_in_batch"]
        elif "window_tokens" in inputs:
            tokens = inputs["window_tokens"]
        else:
            place = self._step % self._generate_every // self.args.gradient_accumulation_steps
            tokens = self._window_tokens[place]
        return tokens.clamp(min=1)

    def _save_state(self, folder: Path) -> None:
        super()._save_state(folder)
        if self.args.save_only_model:
            return
        in_use = self._step % self._generate_every > 0  # parts of the generation are left
        state = {
            "world_size": self.args.world_size,
            "carried": self._carried,
            "step": self._step,
            "buffered_inputs": self._buffered_inputs if in_use else None,
            "window_tokens": self._window_tokens if in_use else None,
        }
        torch.save(state, folder / STATE_FILE.format(self.args.process_index))

    # Extends GRPOTrainer._get_train_sampler: kept for the next method.
    @override
    def _get_train_sampler(self, dataset=None):
        self._sampler = super()._get_train_sampler(dataset)
        return self._sampler

    # Extends Trainer._init_training_state: draws the orders of past epochs, as TRL's sampler did.
    @override
    def _init_training_state(self, *args, **kwargs):
        epochs, steps = super()._init_training_state(*args, **kwargs)
        if self._sampler is not None and self._sampler.shuffle:
            for _ in range(epochs):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)
        return epochs, steps

    # Extends GRPOTrainer._load_optimizer_and_scheduler: the counterpart of `_save_state`.
    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        """Load a checkpoint; on another number of processes, without the generation in use."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint, STATE_FILE.format(self.args.process_index))
        if not path.exists():  # there are more processes now; the first one's has what all share
            path = Path(checkpoint, STATE_FILE.format(0))
        if not path.exists():
            if self._stock:
                return  # TRL resumes without
            raise InputError(
                f"resume_from_checkpoint: {checkpoint!r} lacks {path.name}, without which "
                f"{self._row.label} cannot go on as it would have; name another checkpoint."
            )
        state = torch.load(path, map_location=self.args.device.type, weights_only=True)
        self._carried = self._carried | state["carried"]  # what this lacks starts as in a new run
        self._step = state["step"]
        if state["world_size"] == self.args.world_size:  # else TRL generates anew
            self._buffered_inputs = state["buffered_inputs"]
            self._window_tokens = state["window_tokens"]


class BookGRPOTrainer(PolicyGradientTrainer, GRPOTrainer):
    """GRPOTrainer whose advantages and loss are a row of `rlhf_trl.algorithms`."""

    config_class = BookGRPOConfig

    __init__ = with_signature_of(GRPOTrainer.__init__)(PolicyGradientTrainer.__init__)


def loss_mask(batch: Batch) -> Tensor:
    """Return (B, T) 1 on the tokens that the policy generated and that count."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def whole(output: Batch) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask of prompts with their completions."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    return ids, torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)


def mean_advantages(batch: Batch) -> Tensor:
    """Return (B,) advantages; those of tokens as their mean over the completion."""
    advantages = batch["advantages"]
    if advantages.dim() == 1:
        return advantages
    return advantages.sum(1) / loss_mask(batch).sum(1).clamp(min=1)


def _check(row: PolicyGradient, args: Any) -> None:
    """Refuse a row that its trainer cannot compute, and numbers that do not go together."""
    if row.label.endswith("(trl)") and row.trainer != args.stock_trainer:
        raise InputError(
            f"{row.label} is TRL's {row.trainer}, not {args.stock_trainer}: use "
            f"Book{row.trainer}, or another formulation."
        )
    if args.critic != (row.value_loss != "none"):
        critic, name = ("no critic", "grpo") if args.critic else ("a critic", "ppo")
        raise InputError(
            f"{row.label} has {critic}: use Book{name.upper()}Trainer (recipes/{name}.py)."
        )
    estimate = look_up(book.advantages, row.advantage)
    compares = "num_generations" in inspect.signature(estimate).parameters  # a prompt's completions
    # Stock rows are TRL's: it trains on 2 or more of each prompt, and evaluates on 1 as well.
    if compares and args.num_generations_eval == 1 and row.label.endswith(("(chapter)", "(code)")):
        raise FieldError(
            "num_generations_eval",
            f"is 1, but {row.label} compares completions; write 2 or more, or leave it out",
        )
    if args.num_generations < 2 and (compares or row.label.endswith("(trl)")):
        raise InputError(
            f"num_generations is 1, but {row.label} compares completions; write 2 or more."
        )
    order = args.train_sampling_strategy
    if order != "random" and not row.label.endswith("(trl)"):  # stock GRPOTrainer ignores it
        raise FieldError(
            "train_sampling_strategy",
            f"is {order}, which GRPOTrainer does not read; remove it (shuffle_dataset: false keeps "
            "the rows in order)",
        )
    if "soft_punish_cache" in row.trainer_reads:
        cache, limit = args.soft_punish_cache, args.max_completion_length
        if not 1 <= cache <= limit:
            raise InputError(
                f"soft_punish_cache is {cache}; write 1 to max_completion_length ({limit})."
            )
    window, steps = args.gradient_accumulation_steps, args.steps_per_generation
    fed = steps * args.num_iterations  # micro-batches that one generation feeds
    # a window takes in whole generations, or a generation whole windows
    if row.window == "window" and window % fed and fed % window:
        raise InputError(
            f"{row.label} is normalized over the accumulation window: make steps_per_generation "
            f"({steps}) x num_iterations ({args.num_iterations}) a multiple of "
            f"gradient_accumulation_steps ({window}), or the other way round."
        )
