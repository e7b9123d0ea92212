"""One run from trainer to report: train or resume, evaluate, export, summarise."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from rlhf_trl.errors import InputError
from rlhf_trl.run import launch, output, report
from rlhf_trl.run.config import read_config
from rlhf_trl.tasks.rewards import task_metrics


class _WrapperGuard(TrainerCallback):
    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        launch.check_wrapper(self._trainer)


def begin(loaded: Any, name: str) -> None:
    """Check the launch, claim the output folder, and say in one line what is about to run.

    Args:
        loaded: what `load_config` returned; its TRL config gets `resume_from_checkpoint` resolved.
        name: the algorithm, for people.

    Raises:
        InputError: see `launch.check_processes` and `output.claim`.
    """
    args, folder = loaded.trl, Path(loaded.trl.output_dir)
    launch.check_processes(args, loaded.own.expect)
    main_process = args.process_index == 0
    resume = [output.claim(str(folder), args.resume_from_checkpoint)] if main_process else [None]
    args.resume_from_checkpoint = broadcast_object_list(resume)[0]
    # What a tracker is told by config must not be overruled by transformers' own default.
    os.environ.setdefault("WANDB_PROJECT", args.project)
    args.run_name = os.environ.get("WANDB_RUN_NAME", args.run_name)
    if "eval_on_start" not in loaded.given:
        args.eval_on_start = args.resume_from_checkpoint is None
    if main_process:
        print(launch.describe_launch(args, name), flush=True)
    if args.world_size > 1:
        print(f"process {args.process_index} of {args.world_size} on {args.device}", flush=True)
    if args.resume_from_checkpoint and getattr(args, "sync_ref_model", False):
        raise InputError(
            "resume_from_checkpoint: sync_ref_model moves the reference model and checkpoints do "
            "not hold it, so the run would go on differently; start it anew, or without "
            "sync_ref_model."
        )
    if main_process and args.resume_from_checkpoint:
        print(f"resuming from {args.resume_from_checkpoint}", flush=True)
        if (folder / "config.yaml").exists():
            before = read_config(folder / "config.yaml")
            for key in sorted((before.keys() | loaded.given.keys()) - {"resume_from_checkpoint"}):
                old, new = before.get(key, "unset"), loaded.given.get(key, "unset")
                if old != new:
                    print(f"changed since the run began: {key}: {old} -> {new}", flush=True)


def check_generation_batch(args: Any, rows: list[Any]) -> None:
    """Stop unless the data set fills at least one generation batch; TRL would train 0 steps."""
    prompts = args.generation_batch_size // args.num_generations
    if len(rows) < prompts:
        raise InputError(
            f"dataset.size: {len(rows)} rows are fewer than the {prompts} prompts of a generation "
            f"batch ({args.generation_batch_size} completions / {args.num_generations} each); "
            f"write a size of at least {prompts} or make the batch smaller."
        )


def check_reward_weights(args: Any, rewards: list[Any]) -> None:
    """Stop unless there is one weight per reward function."""
    weights = args.reward_weights
    if weights is not None and len(weights) != len(rewards):
        raise InputError(
            f"reward_weights: {len(weights)} weights for {len(rewards)} reward_funcs "
            f"({', '.join(f.__name__ for f in rewards)}); write one weight for each."
        )


def run(trainer: Any, loaded: Any, tasks: Any, name: str) -> None:
    """Train, evaluate before, during and after, export the model and write the report.

    `<output_dir>` then holds `config.yaml` (the run, reproducible), `evaluations/`, `model/`,
    `log.json`, `learning_curve.png`, `summary.json` and the checkpoints.

    Args:
        trainer: a TRL trainer with `AnswersHeldOut`.
        loaded: what `load_config` returned.
        tasks (`GymTasks`): the data, for the report.
        name: the algorithm, for people.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    trainer.held_out, trainer.scores = tasks.held_out, task_metrics(tasks)
    launch.check_strategy(trainer, loaded.own.expect)
    trainer.on_answers = partial(report.save_answers, folder / "evaluations")
    trainer.add_callback(_WrapperGuard(trainer))
    trainer.add_callback(report.Watch())
    if not args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(report.RewardProgress())

    if trainer.is_world_process_zero():
        if not args.resume_from_checkpoint:
            loaded.save(folder / "config.yaml")
        print(
            f"held out: {len(tasks.held_out)} questions; {tasks.passed_over} of their kind were "
            f"kept out of the {len(tasks.train)} training rows",
            flush=True,
        )
    started, cpu_started = time.time(), time.process_time()
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    seconds, cpu_seconds = time.time() - started, time.process_time() - cpu_started
    if result.global_step == 0:
        raise InputError(
            "the run ended after 0 optimizer steps, so the model is untrained; raise max_steps or "
            "num_train_epochs, or give it more data."
        )
    evaluated = [e["step"] for e in trainer.state.log_history if "eval_exact_match" in e]
    if not evaluated or evaluated[-1] != trainer.state.global_step:
        trainer.evaluate()

    main_process = trainer.is_world_process_zero()
    output.replace_folder(folder / "model", lambda p: trainer.save_model(str(p)), main_process)
    trainer.end()
    if not main_process:
        return
    evaluations = report.read_evaluations(folder / "evaluations")
    names = {row["task"] for row in tasks.held_out}
    title = f"{name}, {'+'.join(sorted(names))}, seed {args.seed}"
    report.learning_curve(
        folder / "learning_curve.png", trainer.state.log_history, evaluations, title
    )
    output.write_json(folder / "log.json", trainer.state.log_history)
    output.write_json(
        folder / "summary.json",
        {
            "name": name,
            "seed": args.seed,
            "steps": trainer.state.global_step,
            "processes": args.world_size,
            "held_out": len(tasks.held_out),
            "passed_over": tasks.passed_over,
            "before": evaluations[min(evaluations)]["metrics"],
            "after": evaluations[max(evaluations)]["metrics"],
            "train_seconds": round(seconds, 2),
            "train_cpu_seconds": round(cpu_seconds, 2),
            "versions": report.versions(),
        },
    )
    print()
    print(report.table(evaluations))
    print(f"\nmodel, learning curve and summary are in {os.path.relpath(folder)}")
    print(report.headline(evaluations, names, args.seed), flush=True)
