"""The end of a run: its log, summary, learning curve, and the lines that it prints last."""

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from rlhf_trl import output
from rlhf_trl.data.arrow import cells
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.prompt_keys import fingerprint, prompt_key
from rlhf_trl.evaluation import report
from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.evaluation.measured import read_evaluations
from rlhf_trl.run.origins import weights_sha256
from rlhf_trl.run.seen import examples_seen
from rlhf_trl.run.versions import versions


def finish(
    trainer: Any,
    loaded: Any,
    data: Examples,
    *,
    name: str,
    last_step: int,
    kept_step: int,
    training_time: Any,
    write_more: Callable[..., None] | None,
    prompts: Any,
) -> None:
    """Write and print what a run leaves beside its model; only the main process does.

    Args:
        trainer: trained, with its log.
        loaded: the config.
        data: the examples.
        name: of what was trained.
        last_step: the optimizer steps that were taken.
        kept_step: the step whose model is kept.
        training_time: the `TrainingTime`.
        write_more: writes what else there is; it takes trainer, folder and title.
        prompts: rows with the prompts, where the training rows hold tokens alone.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    held_out = getattr(trainer, "held_out", ())
    log = trainer.state.log_history
    evaluations = read_evaluations(folder / "evaluations")
    # with load_best_model_at_end, later evaluations are of a model that is not kept
    until_kept = {step: end for step, end in evaluations.items() if step <= kept_step}
    questions = _questions(data)
    seconds = training_time.so_far()
    seen, kind = examples_seen(trainer, data.train, kept_step)
    output.write_json(folder / "log.json", log)
    output.write_json(
        folder / "summary.json",
        {
            "name": name,
            "seed": args.seed,
            "steps": last_step,
            "model_step": kept_step,
            "seen": seen,
            "seen_kind": kind,
            "processes": args.world_size,
            "held_out": len(held_out or data.held_out or ()),  # prompts answered, or examples
            "questions": len(questions),
            "questions_fingerprint": fingerprint(questions),
            "passed_over": data.tasks.passed_over if data.tasks is not None else 0,
            "before": until_kept[min(until_kept)]["metrics"] if len(until_kept) > 1 else {},
            "after": until_kept[max(until_kept)]["metrics"] if until_kept else {},
            "train_seconds": round(seconds["seconds"], 2),
            "train_cpu_seconds": round(seconds["cpu_seconds"], 2),
            "time": training_time.phases(),
            "peak_memory_bytes": _peak_memory(args.device),
            "made_from": trainer.told["made_from"],
            "model_sha256": weights_sha256(folder / "model"),
            "versions": versions(),
        },
    )
    task_names = _task_names(trainer, data)
    title = f"{name}, seed {args.seed}"
    if task_names:
        title = f"{name}, {'+'.join(sorted(task_names))}, seed {args.seed}"
    if write_more is not None:
        write_more(trainer, folder, title)
    report.learning_curve(folder / "learning_curve.png", log, evaluations, title)

    reported = until_kept or report.training_metrics(log)
    if reported:
        print(f"\n{report.table(reported)}")
    if args.load_best_model_at_end:
        print(f"\nload_best_model_at_end: model/ is that of step {kept_step} of {last_step}")
    for sentence in report.untaught(log, folder):
        print(f"\n{sentence}")
    shown_folder = os.path.relpath(folder)
    print(f"\nseen in training: {seen} {kind}")
    print(f"model, learning curve and summary are in {shown_folder}")
    prompt = None
    if not hasattr(trainer, "reader"):  # a reward model's, which answers nothing
        prompt = _prompt_to_show(held_out, data.held_out or prompts or data.train)
    start, has_adapter = loaded.model.model_name_or_path, loaded.model.use_peft
    print(report.next_steps(shown_folder, start, last_step, prompt, has_adapter))
    if "trackio" in args.report_to:
        print(f"  {'look at it:':15}trackio show --project {quote(args.project)}")
    print(report.headline(reported, task_names, args.seed), flush=True)


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes that torch has allocated on a GPU, or else that this process has used.

    It is that of this process since it began, so of a run's last start.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # elsewhere in KiB


def _task_names(trainer: Any, data: Examples) -> set[str]:
    """Return the names of the gym's tasks whose questions were answered in evaluation."""
    if data.tasks is None or not isinstance(trainer, AnswersHeldOut):
        return set()
    return {row["task"] for row in data.tasks.held_out}


def _questions(data: Examples) -> set[str]:
    """Return the keys of the held-out prompts, those of the gym where a run has its tasks."""
    if data.tasks is not None:
        return {prompt_key(row["prompt"]) for row in data.tasks.held_out}
    if data.held_out is None:
        return set()
    return {prompt_key(prompt) for prompt in cells(data.held_out, "prompt")}


def _prompt_to_show(held_out: Sequence[Mapping[str, Any]], rows: Any) -> Any:
    """Return a prompt of the form that a run trains on: messages, which get a template, or a text.

    It is one that was answered in evaluation, or of `rows`, whose messages may be long.
    """
    if held_out:
        return held_out[0]["prompt"]
    prompt = rows[0]["prompt"]
    return prompt if isinstance(prompt, str) else [{"role": "user", "content": "Hello"}]
