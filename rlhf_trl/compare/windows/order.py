"""The order of prompts and completions in TRL's trainers that generate: kept, or refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from rlhf_trl.errors import InputError


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
