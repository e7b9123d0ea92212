"""What `rlhf-trl pipeline` does: train the stages, let their models answer, write the page."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.probes import read_probes
from rlhf_trl.output import hold, numbered, write_json
from rlhf_trl.pipeline.page import write_page
from rlhf_trl.pipeline.plan import Plan, read_plan
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.evaluate import evaluate
from rlhf_trl.run.jobs import Job, do_all
from rlhf_trl.run.options import join_options
from rlhf_trl.run.preview import preview


def pipeline(
    path: str,
    seeds: int = 1,
    *,
    jobs: int = 1,
    accelerate: str | None = None,
    output_dir: str | None = None,
    words: Sequence[str] = (),
) -> Path:
    """Do what is left of a pipeline, and return its page.

    Args:
        path: of its YAML.
        seeds: runs of each stage, with seeds 0 to `seeds` - 1.
        jobs: runs side by side.
        accelerate: the config to launch with; None: one process on the CPU, on one thread.
        output_dir: in place of the one in the YAML.
        words: options for the recipes of all stages, as on their command line.

    Raises:
        InputError: the pipeline, or what its folder holds, is not as it should be; a run failed.
        Stopped: by a signal; the same call goes on.
    """
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; write 1 or more.")
    plan = read_plan(path, output_dir)
    if plan.folder.is_file():
        raise InputError(f"output_dir: {plan.folder} is a file; name a folder.")
    plan.folder.mkdir(parents=True, exist_ok=True)
    hold(plan.folder)  # refuses one that another process works in
    for name, planned in plan.stages.items():
        planned.write(_config_of(plan, name))
    to_do = [_job(plan, name, seed, words) for seed in range(seeds) for name in plan.stages]
    # one job of each stage, those of seed 0, come first
    for planned, job in zip(plan.stages.values(), to_do, strict=False):
        planned.stage.load([*job.words])  # refuses a wrong setting before hours of training
    do_all(to_do, jobs, accelerate)
    _write_preview(plan, words)
    reference = plan.answers.reference or _start_of(plan)
    write_json(plan.folder / "pipeline.json", plan.describe(seeds, reference))
    for seed in range(seeds):
        _answer(plan, seed, reference)
        if plan.answers.probes:
            _answer(plan, seed, reference, plan.answers.probes)
    return write_page(plan.folder)


def _config_of(plan: Plan, name: str) -> Path:
    return plan.folder / "configs" / f"{name}.yaml"


def _run_of(plan: Plan, name: str, seed: int) -> Path:
    return plan.folder / name / f"seed-{seed}"


def _job(plan: Plan, name: str, seed: int, more: Sequence[str]) -> Job:
    """Return the run of a stage with a seed, and with `more` options of its recipe."""
    planned = plan.stages[name]
    inputs: list[str] = []
    reads = []
    for key, models in planned.inputs.items():
        inputs.append(f"--{key}")
        for model in models:
            if model in plan.stages:
                reads.append(_run_of(plan, model, seed))
                inputs.append(str(reads[-1] / "model"))
            else:  # in a folder, or on the hub
                inputs.append(model)
    own = ["--config", str(_config_of(plan, name)), "--seed", str(seed)]
    words = join_options(own, more, inputs)
    return Job(_run_of(plan, name, seed), planned.stage.script, words, reads, kind=name)


def _write_preview(plan: Plan, more: Sequence[str]) -> None:
    """Write what the first stage that learns from pairs was trained on, else the first stage.

    `preview.json` has the numbers of `rlhf-trl preview --json` by the name of the stage. They are
    counted when all is trained, since a stage may have the tokenizer of the one it starts from.
    """
    of_pairs = [
        name
        for name, planned in plan.stages.items()
        if planned.stage.name == "reward" or planned.stage.family == "direct_alignment"
    ]
    name = [*of_pairs, *plan.stages][0]
    numbers = preview(str(_config_of(plan, name)), _job(plan, name, 0, more).words)
    write_json(plan.folder / "preview.json", {name: numbers})


def _start_of(plan: Plan) -> str:
    """Return the model from which the policy started that answers at the prompts of its run."""
    config = _run_of(plan, plan.answers.prompts_of, 0) / "config.yaml"
    return read_config(config)["model_name_or_path"]


def _models(plan: Plan, seed: int, reference: str, checkpoints: bool) -> list[str]:
    """Return the models that answer: the reference, and of each policy its end.

    If asked, its `checkpoints` answer, too.
    """
    models = [reference]
    for name, planned in plan.stages.items():
        if planned.stage.makes != "policy":
            continue
        run = _run_of(plan, name, seed)
        if checkpoints:
            saved = sorted(numbered(run, "checkpoint-").items())
            last = json.loads((run / "summary.json").read_text())["model_step"]
            models += [str(checkpoint) for step, checkpoint in saved if step != last]
        models.append(str(run))
    return models


def _answer(plan: Plan, seed: int, reference: str, probes: str | None = None) -> None:
    """Let the models of a seed answer, unless they have; write `answers/seed-S.jsonl` and `.json`.

    The JSON is written last. It says which models answered, by the hashes of their weights. Where
    `probes` names a file of them, the files are `answers/probes-seed-S`.
    """
    answers = plan.answers
    config = _run_of(plan, answers.prompts_of, seed) / "config.yaml"
    models = _models(plan, seed, reference, answers.checkpoints and not probes)
    judge = str(_run_of(plan, answers.proxy, seed)) if answers.proxy else None
    runs = [_run_of(plan, name, seed) for name in plan.stages]
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    asked = {
        "models": models,
        "reward_model": judge,
        "samples": answers.samples,
        "options": answers.options,
        "weights": {
            str(run): summary.get("model_sha256")
            for run, summary in zip(runs, summaries, strict=True)
        },
    }
    name = f"seed-{seed}"
    if probes:
        name = f"probes-seed-{seed}"
        asked["probes"] = read_probes(Path(probes))
    answers_file = plan.folder / "answers" / f"{name}.jsonl"
    numbers_file = answers_file.with_suffix(".json")  # is there once all have answered
    if numbers_file.is_file() and json.loads(numbers_file.read_text()).get("asked") == asked:
        return
    print(f"seed {seed}: {len(models)} models answer{' probes' if probes else ''}", flush=True)
    part = answers_file.with_name(f".{answers_file.name}.part")
    part.unlink(missing_ok=True)  # left by a pipeline that was killed
    numbers = evaluate(
        models,
        str(part),
        config=str(config),
        words=_words(answers.options),
        reward_model=judge,
        reference=reference,
        as_json=True,
        samples=answers.samples,
        probes=probes,
    )
    os.replace(part, answers_file)
    content = {**json.loads(numbers), "answers": str(answers_file), "asked": asked}
    write_json(numbers_file, content)


def _words(options: dict[str, Any], block: str = "") -> list[str]:
    """Return the words of a command line that set the options, those of blocks dotted."""
    words: list[str] = []
    for key, value in options.items():
        if isinstance(value, dict):
            words += _words(value, f"{block}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{block}{key}", text]
    return words
