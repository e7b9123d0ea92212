"""A run that answers prompts and learns from the rewards of its answers."""

from typing import Any

from rlhf_trl.algorithms import nearest_row
from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import PENALTIES, WITH_PENALTIES
from rlhf_trl.models import configs_of, load_tokenizer
from rlhf_trl.rewards.loading import (
    answer_columns,
    check_all_rewarded,
    check_right_answers,
    load_rewards,
)
from rlhf_trl.rollouts.generate import check_prompts
from rlhf_trl.run import train
from rlhf_trl.run.config import Loaded


@train.names_the_key  # in an error that TRL raises
def train_policy(loaded: Loaded[Any, Any], trainer_class: Any) -> None:
    """Do what every policy-gradient recipe does: load, train, evaluate, save, report."""
    from rlhf_trl.rewards.calls import watched

    own, args, model = loaded.own, loaded.trl, loaded.model
    if args.generation_kwargs:
        from rlhf_trl.run.generation_kwargs import check_generation_kwargs

        check_generation_kwargs(loaded)
    train.begin(loaded, loaded.row.label, on_policy_note(loaded), skipping_note)
    check_reward_model(own)
    texts = answer_columns(own)  # columns of right answers, read as texts whatever their types are
    data = train.read(args, load_prompts, own.dataset, texts)
    if isinstance(own.dataset, FileData):
        from rlhf_trl.data.columns import check_unread

        check_unread(data.train.column_names, own.dataset.path)
    check_generation_batch(args, data.train)
    train.check_held_out(args, data.held_out)  # before a reward model is loaded
    tokenizer = load_tokenizer(model, args, data.conversational)
    train.check_template(data, tokenizer, args, own.dataset)
    rewards = load_reward_functions(own, args, data, tokenizer)
    with train.naming_refused_row(data, tokenizer, args):
        for rows in (data.train, data.held_out or []):
            check_prompts(rows, tokenizer, model, args)
    trainer = train.build(loaded, trainer_class, data, tokenizer, reward_funcs=rewards)
    if data.tasks is None and data.held_out is not None:  # `train.run` does it for the gym's tasks
        # no scores beside the rewards, which the trainer gives held-out answers anyway
        trainer.held_out, trainer.scores = data.held_out.to_list(), {}
    with watched(args, own.reward_timeout):  # names the reward function that hangs or dies
        train.run(trainer, loaded, data, loaded.row.label)


def on_policy_note(loaded: Loaded[Any, Any]) -> str | None:
    """Say which parts of an algorithm do nothing as every ratio is 1; None: there are none.

    Every ratio is 1 if each generation is used up within one accumulation step: TRL then takes the
    log-probabilities of the update itself for the old ones. The sentence ends as in "cispo differs
    from grpo in aggregation only, not in surrogate and epsilon_high; num_iterations 2 brings ...".
    """
    args = loaded.trl
    if loaded.row is None or not hasattr(args, "steps_per_generation"):
        return None
    batches_of_generation = args.steps_per_generation * args.num_iterations
    if args.gradient_accumulation_steps % batches_of_generation:
        return None  # the weights change while a generation is in use
    name = loaded.row.algorithm
    # the row that differs least, and how; TRL's settings without an algorithm have no name
    nearest = nearest_row(name, loaded.row.formulation) if name else None
    if nearest is None or not nearest.inactive_at_ratio_1:
        return None
    reason = "one update per generation: every ratio is 1, so"
    if nearest.same_at_ratio_1:
        return f"{reason} {name} is {nearest.name} here; num_iterations 2 tells them apart"
    inactive = nearest.inactive_at_ratio_1
    active = [part for part in nearest.differs_in if part not in inactive]
    return (
        f"{reason} {name} differs from {nearest.name} in {', '.join(active)} only, not in "
        f"{' and '.join(inactive)}; num_iterations 2 brings that in"
    )


def skipping_note(loaded: Loaded[Any, Any]) -> str:
    """Decide whether the update leaves out completions without advantage; say so, or why not.

    Where the config leaves it open, a run goes on as its checkpoint was made.
    """
    from rlhf_trl.trainers.skipping import needs_all

    args, checkpoint = loaded.trl, loaded.trl.resume_from_checkpoint
    # refuses the setting where it is true and not exact
    reason = needs_all(loaded.row.row, args, configs_of(loaded.model, args))
    if args.skip_zero_advantage is None:
        if checkpoint is not None:
            from rlhf_trl import manifests

            if not manifests.read_manifest(checkpoint).get("skip_zero_advantage"):
                reason = f"as in {checkpoint}"
        args.skip_zero_advantage = reason is None
        if reason:
            return f"skip_zero_advantage off ({reason})"
    return f"skip_zero_advantage {'on' if args.skip_zero_advantage else 'off'}"


def load_reward_functions(own: Any, args: Any, data: Examples, tokenizer: Any) -> list[Any]:
    """Return the reward functions and the reward model that a config names, as functions.

    Each has a name and a weight of its own. `own` is the recipe's fields, `args` TRL's config.
    """
    if not hasattr(own, "reward_funcs"):  # a recipe that learns from data, not from rewards
        return []
    rewards = []
    if own.reward_funcs or not own.reward_model:  # without either, `load_rewards` raises
        columns, folder = data.train.column_names, args.output_dir
        rewards += load_rewards(own.reward_funcs, data.tasks, columns, own.llm_judge, folder)
        check_right_answers(own.reward_funcs, data.train, data.held_out)
        if not own.reward_model:  # a reward model would reward every row
            check_all_rewarded(own.reward_funcs, data.train)
    if own.reward_model:
        from rlhf_trl.rewards.from_model import load_reward_model
        from rlhf_trl.run.folders import model_folder

        path = model_folder("reward_model", own.reward_model)
        quantization = getattr(own, "reward_quantization", None)
        strip = own.reward_model_strips_think
        reward = load_reward_model(path, tokenizer, args, own.reward_aggregate, strip, quantization)
        rewards.append(reward)
    _check_names([function.__name__ for function in rewards])
    weights = getattr(args, "reward_weights", None)  # rejection sampling has none
    if weights and not any(weights):
        raise InputError("reward_weights: all are 0, so nothing is rewarded; raise one.")
    if weights is not None and len(weights) != len(rewards):
        raise InputError(
            f"reward_weights: {len(weights)} for {len(rewards)} reward_funcs; write one for each."
        )
    return rewards


def _check_names(names: list[str]) -> None:
    """Refuse a reward function whose name stands for another number in logs."""
    taken = {"length", "cut_off", *PENALTIES, WITH_PENALTIES}
    if len(names) > 1:  # in logs, `reward` is the weighted sum; a single reward is that sum
        taken.add("reward")
    for name in names:
        if name in taken:
            raise InputError(
                f"reward_funcs: {name!r} is what logs call another number; rename the function."
            )
        taken.add(name)


def check_reward_model(own: Any) -> None:
    """Refuse what only a reward model or a judge would read, where there is none."""
    if own.llm_judge and "llm_judge" not in own.reward_funcs:
        raise InputError("llm_judge is written but not used; add llm_judge to reward_funcs.")
    for key in ("reward_aggregate", "reward_model_strips_think", "reward_quantization"):
        value = getattr(own, key, None)
        if value and not own.reward_model:
            raise InputError(
                f"{key} is {str(value).lower()}, but there is no reward_model; name one."
            )


def check_generation_batch(args: Any, rows: Any) -> None:
    """Stop unless the data set fills at least one generation batch; TRL would train 0 steps."""
    prompts = args.generation_batch_size // args.num_generations
    if len(rows) < prompts:
        raise InputError(
            f"dataset: {len(rows)} rows are fewer than the {prompts} prompts of a generation batch "
            f"({args.generation_batch_size} / {args.num_generations}); add rows or make it smaller."
        )
