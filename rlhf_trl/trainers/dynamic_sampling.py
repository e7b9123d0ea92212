"""DAPO's dynamic sampling: prompts that teach nothing are replaced before they are trained on."""

from collections import defaultdict
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from typing_extensions import override

from rlhf_trl import book
from rlhf_trl.errors import InputError


class DynamicSampling:
    """Trainer mixin that samples groups without contrast anew, for a bounded number of rounds.

    A group is a prompt's completions; it has contrast if not all are right and not all are wrong.
    Each round replaces the groups without contrast by as many fresh prompts, drawn from a seeded
    order of the training set of its own; all processes generate equally many of them. Only then
    does TRL score, count and log the generation batch, as if nothing else had been sampled. A value
    that a reward function gave to `log_metric` is weighed by how many completions stay of the call.

    Logged beside TRL's metrics, per generation: `dynamic_sampling/rounds`,
    `dynamic_sampling/discarded_groups` and `dynamic_sampling/left_without_contrast`.
    """

    _rounds: int = 0  # at most; 0: off, and in formulation code groups without contrast are dropped
    _correctness: int | None = None  # column of the reward that is 1 for right and 0 for wrong
    _carried: dict[str, Any]  # in checkpoints; `stream_position` counts the fresh prompts
    _kept: list[dict[str, Any]] | None = None  # the rows that TRL is scoring, as of `_roll_out`
    _order: tuple[int, list[int]] | None = None  # the epoch of the side stream, and its rows

    # Extends GRPOTrainer._generate_and_score_completions: the completions are chosen before.
    @override
    def _generate_and_score_completions(self, inputs):
        if not self._rounds or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._kept, self._kept_rewards = self._with_contrast(inputs)
        seen = self.state.num_input_tokens_seen
        try:
            output = super()._generate_and_score_completions([row["input"] for row in self._kept])
        finally:
            self._kept = None
        self.state.num_input_tokens_seen = seen  # every round has counted its tokens already
        self._metrics["train"]["num_tokens"] = [seen]
        return output

    # Extends GRPOTrainer._generate_single_turn: what was chosen is not generated a second time.
    @override
    def _generate_single_turn(self, *args, **kwargs):
        if self._kept is None:
            return super()._generate_single_turn(*args, **kwargs)
        logps = [row["logps"] for row in self._kept]
        return [row["ids"] for row in self._kept], None if None in logps else logps

    # Extends GRPOTrainer._calculate_rewards: nor is it judged a second time.
    @override
    def _calculate_rewards(self, *args, **kwargs):
        if self._kept is None:
            return super()._calculate_rewards(*args, **kwargs)
        for row in self._kept:
            for column, value in row["extra"].items():
                self._pending_extra_logs[column].append(value)
            for name, value in row["metrics"].items():
                self._pending_metrics[name].append(value)
        return self._kept_rewards

    def _with_contrast(self, inputs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Tensor]:
        """Return this process' rows, of groups with contrast, and the rewards of all processes.

        A group that has none is replaced by another prompt's, for `_rounds` rounds at most. Rows
        are those of `_roll_out`; rewards have a column for each reward function.
        """
        self._check_plain(inputs)  # without tools, images and their like
        size = self.num_generations
        rows, rewards = self._roll_out(inputs)
        uniform = self._without_contrast(rewards)  # numbers of groups, over all processes
        is_gathered = bool(uniform)  # without any, each process keeps its own rows
        if is_gathered:
            rows = gather_object(rows)  # every process replaces the same ones in its copy
        rounds = 0
        replaced_rows: list[dict[str, Any]] = []
        replaced_rewards: list[list[float]] = []
        while uniform and rounds < self._rounds:
            new_rows, new_rewards = self._roll_out_fresh(len(uniform))
            for new_group, group in enumerate(uniform):
                old = slice(group * size, (group + 1) * size)
                new = slice(new_group * size, (new_group + 1) * size)
                replaced_rows += rows[old]
                replaced_rewards += rewards[old].tolist()
                rows[old], rewards[old] = new_rows[new], new_rewards[new]
            rounds += 1
            uniform = self._without_contrast(rewards)
        if replaced_rows and self.rollouts is not None:
            self._record_replaced(replaced_rows, replaced_rewards)
        metrics = self._metrics["train"]
        metrics["dynamic_sampling/rounds"].append(rounds)
        metrics["dynamic_sampling/discarded_groups"].append(len(replaced_rows) // size)
        metrics["dynamic_sampling/left_without_contrast"].append(len(uniform))
        share = len(inputs)  # of the rows, for each process
        first = share * self.accelerator.process_index if is_gathered else 0
        return rows[first : first + share], rewards

    def _roll_out_fresh(self, prompts: int) -> tuple[list[dict[str, Any]], Tensor]:
        """Return rows and rewards of so many fresh prompts, the rows of all processes, too."""
        size, world = self.num_generations, self.accelerator.num_processes
        fresh = self._fresh(prompts)
        # as many completions for each process: the first prompt may come again, and is not used
        while len(fresh) * size % world:
            fresh.append(fresh[0])
        fresh = [row for row in fresh for _ in range(size)]
        share = len(fresh) // world
        first = share * self.accelerator.process_index
        rows, rewards = self._roll_out(fresh[first : first + share])
        return gather_object(rows), rewards

    def _record_replaced(self, rows: list[dict[str, Any]], rewards: list[list[float]]) -> None:
        """Record completions that nothing is learned from, with the generation that lost them."""
        prompts = [row["input"]["prompt"] for row in rows]
        completions = [row["completion"] for row in rows]
        endings = torch.tensor([(len(row["ids"]), row["ended"]) for row in rows])
        samples = self._samples(prompts, completions, endings, torch.tensor(rewards))
        number = self._carried["generation"]
        self.record("train-replaced", number, *samples, None, self.num_generations)

    def _roll_out(self, inputs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], Tensor]:
        """Generate and judge; return this process' rows and the rewards of all processes.

        A row holds the `input`, the `completion` as reward functions see it, its token `ids`,
        whether the model `ended` it, its `logps` by another sampler, and what reward functions
        logged: its `extra` columns, and `metrics`, which are means over this call.
        """
        # put back below: TRL itself counts the completions that stay, when it scores them
        metrics = {name: list(values) for name, values in self._metrics["train"].items()}
        prompts = [row["prompt"] for row in inputs]
        # not read: the prompts' ids, the tool mask, extra fields, two kinds of images
        _, ids, _, completions, logps, _, _, _ = self._generate(prompts)
        rewards = self._calculate_rewards(inputs, prompts, completions, ids)
        self._metrics["train"] = defaultdict(list, metrics)
        # what reward functions have logged is put off until TRL scores the rows that stay
        extra, self._pending_extra_logs = self._pending_extra_logs, defaultdict(list)
        logged, self._pending_metrics = self._pending_metrics, defaultdict(list)
        means = {name: sum(values) / len(values) for name, values in logged.items()}
        rows = [
            {
                "input": row,
                "completion": completions[i],
                "ids": ids[i],
                "ended": self._ended[i],
                "logps": None if logps is None else logps[i],
                "extra": {column: values[i] for column, values in extra.items()},
                "metrics": means,
            }
            for i, row in enumerate(inputs)
        ]
        return rows, rewards

    def _drop_groups(self, output: dict[str, Any]) -> None:
        """Leave groups without contrast out of the loss, as the book's code drops them."""
        dropped = self._without_contrast(self._rewards_per_func)
        keep = torch.ones(len(self._rewards_per_func), 1, device=self.args.device)
        keep.view(-1, self.num_generations)[dropped] = 0
        tokens = output.get("tool_mask", torch.ones_like(output["completion_mask"]))
        output["tool_mask"] = tokens * keep[self._mine(output)]
        self._metrics["train"]["dynamic_sampling/discarded_groups"].append(len(dropped))

    def _without_contrast(self, rewards: Tensor) -> list[int]:
        """Return the groups, over all processes, that are all right or all wrong."""
        keep = book.rewards.has_contrast(rewards[:, self._correctness], self.num_generations)
        return (~keep).nonzero().flatten().tolist()

    def _fresh(self, count: int) -> list[dict[str, Any]]:
        """Take the next rows of the side stream: the training set in orders of its own."""
        rows, size, first = [], len(self.train_dataset), self._carried["stream_position"]
        for position in range(first, first + count):
            epoch, place = divmod(position, size)
            if self._order is None or self._order[0] != epoch:
                generator = torch.Generator().manual_seed(self.args.seed + 1 + epoch)
                self._order = epoch, torch.randperm(size, generator=generator).tolist()
            rows.append(self.train_dataset[self._order[1][place]])
        self._carried["stream_position"] += count
        return rows

    def _check_plain(self, inputs: list[dict[str, Any]]) -> None:
        special = {"tools": self.tools, "rollout_func": self.rollout_func}
        special |= {"environment_factory": self.environment_factories}
        special |= {"images": {"image", "images"} & inputs[0].keys()}
        for name, used in special.items():
            if used:
                raise InputError(
                    f"dynamic_sampling_rounds does not work with {name}; write 0, or remove it."
                )
