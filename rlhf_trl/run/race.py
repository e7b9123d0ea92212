"""Several algorithms, several seeds, one table and one figure."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_trl.algorithms import algorithm, names
from rlhf_trl.data.blocks import GymData
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.tables import Line, markdown, mean_and_spread
from rlhf_trl.output import write_json, write_whole
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.config_types import show
from rlhf_trl.run.folders import home
from rlhf_trl.run.jobs import Job, do_all
from rlhf_trl.run.options import join_options, read_options
from rlhf_trl.run.stages import stage_of_config

CURVES = ("eval_exact_match", "eval_best_of_n")  # a run has one of them
# what a summary says of a run that tells whether another can be compared with it
CONDITIONS = ("questions", "questions_fingerprint", "seen", "seen_kind")
# what decides which questions of the gym are held out
DRAWN_BY = {"specs": None, "eval_size": GymData.eval_size, "eval_seed": GymData.eval_seed}
LAST_STEPS = 10  # logged steps that the final training metrics are averaged over
# Columns of the table, here and below: their headings, and the keys of what `_result_of` returns.
ANSWERS = {"exact match": "eval_exact_match", "sampled": "eval_sampled_exact_match"}
START = {"start": "start"}  # exact match, or best of n, before training
COST = {"CPU s": "train_cpu_seconds"}
TRAINING = {
    "reward": "reward",
    "with penalties": "reward_with_penalties",
    "clipped": "clipped",
    "KL": "kl",
    "entropy": "entropy",
}
# What the columns of the table mean; the others are measured on held-out examples, too.
MEANINGS = {
    "exact match": "exact match: share of right greedy answers to held-out questions",
    "sampled": "sampled: the same of sampled answers",
    "start": "start: exact match before training (reward models: best of n)",
    "reward": f"reward: mean of the training completions, last {LAST_STEPS} logged steps",
    "clipped": "clipped: share of ratios outside the clip range, all of training",
    "KL": f"KL: estimate to the reference policy in training, last {LAST_STEPS} logged steps",
    "entropy": f"entropy: nats per token in training, last {LAST_STEPS} logged steps",
    "seen": "seen: what training learned from",
}
PREFERENCES = {
    "pair accuracy": "eval_pair_accuracy",
    "log p chosen": "eval_logps/chosen",
    "log p rejected": "eval_logps/rejected",
}
REWARDS = {
    "pair accuracy": "eval_pair_accuracy",
    "on-policy": "eval_pair_accuracy_on_policy",
    "offline": "eval_pair_accuracy_offline",
    "first error": "eval_first_error",
    "trivial": "eval_first_error_trivial",
    "step accuracy": "eval_step_accuracy",
    "majority": "eval_step_majority",
    "AUC": "eval_auc",
    "best of n": "eval_best_of_n",
    "random": "eval_random_of_n",
    "oracle": "eval_oracle_of_n",
}


def race(
    algorithms: list[str],
    seeds: int,
    folder: Path,
    *,
    config: str | None = None,
    jobs: int = 1,
    extra: list[str] | None = None,
    iterations: int = 1,
) -> list[Line]:
    """Train every algorithm with seeds 0 to `seeds` - 1, and write `race.json`, `.md` and `.png`.

    A finished run with the same settings is not repeated, so an interrupted race goes on where it
    stopped. `jobs` run side by side. The result is the lines of the table. Runs that are tested on
    different questions are refused. A seed changes the training only; `dataset.seed`, which draws
    the questions to train on, is that of the config for all.

    `algorithms` are names of rows, or of other configs; each uses our `configs/tiny/NAME.yaml`,
    unless there is one `config` for all. `extra` are further options of the recipe, and
    `iterations` is num_iterations of the policy gradients, unless `extra` has one.
    """
    to_do = []
    for name in algorithms:
        for seed in range(seeds):
            script, words = _command(name, config, seed, iterations)
            options = join_options(words, extra or [])
            to_do.append(Job(folder / name / f"seed-{seed}", script, options, kind=name))
    _check_before(to_do)
    do_all(to_do, jobs)
    results = {
        name: [_result_of(folder / name / f"seed-{seed}") for seed in range(seeds)]
        for name in algorithms
    }
    _check_questions(results)
    write_json(folder / "race.json", results)
    lines = table(results)
    write_whole(folder / "race.md", f"{markdown(lines)}\n\n{legend(lines, iterations, extra)}\n")
    draw(folder / "race.png", results)
    return lines


def _command(name: str, config: str | None, seed: int, iterations: int) -> tuple[str, list[str]]:
    """Return the recipe that trains an algorithm with a seed, and its options.

    Args:
        name: of a row of the table of algorithms, or of another config in configs/tiny.
        config: the config for all algorithms; None: each has its own in configs/tiny.
        seed: of the training.
        iterations: num_iterations of the policy gradients. 1 is TRL's default, and is written only
            over a number that the config has, as that of gspo.yaml.
    """
    path = config or str(home() / "configs" / "tiny" / f"{name}.yaml")
    if config or not Path(path).is_file():  # then `name` has to be that of a row
        algorithm(name)  # refuses an unknown one
    if not Path(path).is_file():
        raise InputError(f"{name}: {path} is not a file; name a config with --config.")
    values = read_config(path)
    algorithm_name = name if config else values.get("algorithm")  # None: a recipe without rows
    words = ["--config", path]
    if algorithm_name:
        words += ["--algorithm", algorithm_name]
    words += ["--seed", str(seed)]
    is_policy_gradient = algorithm_name in names("policy_gradient")
    if is_policy_gradient and (iterations > 1 or "num_iterations" in values):
        words += ["--num_iterations", str(iterations)]
    return stage_of_config({**values, "algorithm": algorithm_name}, path).script, words


def _check_before(jobs: list[Job]) -> None:
    """Refuse to train runs on the gym's tasks whose configs hold out different questions.

    Data from files are not checked here: which rows they hold out is known only when a run has
    read them (see `_check_questions`).
    """
    settings_by_algorithm: dict[str, dict[str, Any]] = {}  # those that draw the held-out questions
    for job in jobs:
        block = read_options(job.words).get("dataset")
        if isinstance(block, dict) and block.get("source", GymData.source) == GymData.source:
            settings = {key: block.get(key, default) for key, default in DRAWN_BY.items()}
            settings_by_algorithm[job.kind] = settings  # a job's kind is its algorithm
    first = next(iter(settings_by_algorithm), None)
    for name, settings in settings_by_algorithm.items():
        for key, value in settings.items():
            value_of_first = settings_by_algorithm[first][key]
            if value != value_of_first:
                remedy = "race them apart"
                if isinstance(value_of_first, int):  # specs, a list, cannot be written as an option
                    remedy = f"add --dataset.{key} {value_of_first}, or {remedy}"
                raise InputError(
                    f"dataset.{key} is {show(value_of_first)} for {first} and {show(value)} for "
                    f"{name}; "
                    f"runs that are tested on different questions cannot be ranked, so {remedy}."
                )


def _check_questions(results: dict[str, list[dict[str, Any]]]) -> None:
    """Refuse to rank runs that were tested on different questions."""
    tested = {
        f"{name}/seed-{seed}": (run["questions"], run["questions_fingerprint"])
        for name, runs in results.items()
        for seed, run in enumerate(runs)
    }
    first = next(iter(tested))
    for other, questions in tested.items():
        if questions != tested[first]:
            raise InputError(
                f"{first} was tested on {tested[first][0]} questions and {other} on others "
                f"({questions[0]}), so that they cannot be ranked; hold out the same for all "
                "(dataset.eval_size, dataset.eval_path) in another --output_dir."
            )


def _result_of(folder: Path) -> dict[str, Any]:
    """Return what the table and the figure show of a finished run.

    Returns:
        By key: the metrics of the last evaluation, which begin with eval_ (`after` in
        summary.json); the averages of training (values of `TRAINING`) and train_cpu_seconds;
        `start`, the first metric of `CURVES` before training; the `CONDITIONS`; and `curve`, a list
        of [step, metric of CURVES].
    """
    summary = json.loads((folder / "summary.json").read_text())
    if lacking := [key for key in CONDITIONS if key not in summary]:
        raise InputError(
            f"{folder} holds a run of an older version, whose summary.json has no {lacking[0]}; "
            "move that folder away to train it again."
        )
    log = json.loads((folder / "log.json").read_text())
    # the model that is kept may be that of an earlier step than the last
    up_to_model = [entry for entry in log if entry["step"] <= summary["model_step"]]
    for entry in up_to_model:  # CISPO's share of clipped weights has another name in TRL's logs
        entry["clipped"] = entry.get("clip_ratio/region_mean", entry.get("cispo_clip_ratio"))
    result = {}
    for key in TRAINING.values():
        # not every step logs every key: rewards belong to generations, clipping to updates
        values = [entry[key] for entry in up_to_model if entry.get(key) is not None]
        if values:
            # the clipped share shrinks with the learning rate, so it is taken over the whole run
            averaged = values if key == "clipped" else values[-LAST_STEPS:]
            result[key] = statistics.fmean(averaged)
    result |= {**summary["after"], "train_cpu_seconds": summary["train_cpu_seconds"]}
    result |= {key: summary[key] for key in CONDITIONS}
    metrics_before = [summary["before"][key] for key in CURVES if key in summary["before"]]
    if metrics_before:
        result.setdefault("start", metrics_before[0])
    # over all steps, also those after the one whose model is kept
    result["curve"] = [
        [entry["step"], entry[key]] for entry in log for key in CURVES if key in entry
    ]
    return result


def table(results: dict[str, list[dict[str, Any]]]) -> list[Line]:
    """Return mean and spread (standard deviation over seeds) of each algorithm.

    Beside what was measured stand the start, the number of questions that all were tested on, and
    what an algorithm has learned from.

    Args:
        results: by algorithm what `_result_of` returns of each run, one for each seed.
    """
    known = {key for runs in results.values() for run in runs for key in run}
    # by heading, the key of what the cell shows
    if "eval_rewards/margins" in known:  # direct alignment
        columns = ANSWERS | PREFERENCES
    elif "eval_exact_match" in known:  # policy gradients
        columns = ANSWERS | TRAINING
        if "reward_with_penalties" not in known:
            del columns["with penalties"]
    else:  # reward models, which answer nothing
        columns = {name: key for name, key in REWARDS.items() if key in known}

    def cell(runs: list[dict[str, Any]], key: str) -> str:
        """Return mean and spread over the runs that have a number, "-" if none has."""
        values = [run[key] for run in runs if key in run]
        digits = 1 if key.endswith("seconds") else 3
        return mean_and_spread(values, digits) if values else "-"

    lines = []
    for name, runs in results.items():
        line = {"algorithm": name}
        for heading, key in (columns | START).items():
            line[heading] = cell(runs, key)
        line["questions"] = str(runs[0]["questions"])  # `race` has seen to it that all are the same
        line["seen"] = f"{statistics.fmean(run['seen'] for run in runs):.0f} {runs[0]['seen_kind']}"
        for heading, key in COST.items():
            line[heading] = cell(runs, key)
        lines.append(line)
    return lines


def legend(lines: list[Line], iterations: int = 1, extra: list[str] | None = None) -> str:
    """Return one line that says what the columns of a race's table mean, and what all runs share.

    `iterations` and `extra` are those of `race`.
    """
    shown = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    sentences = [meaning for name, meaning in MEANINGS.items() if name in shown]
    overruled = any(word.partition("=")[0] == "--num_iterations" for word in extra or [])
    if not overruled and any(line["algorithm"] in names("policy_gradient") for line in lines):
        alternative = "1 with --on_policy" if iterations > 1 else "2 without --on_policy"
        sentences.append(f"num_iterations is {iterations} ({alternative})")
    return "; ".join(sentences)


def draw(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Draw exact match (or best of n) over steps: a panel for each algorithm, the others in gray.

    A line is the mean over seeds, and a band their spread.
    """
    from matplotlib.figure import Figure

    curves = {name: [run["curve"] for run in runs] for name, runs in results.items()}
    columns = min(4, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(1 + 2.4 * columns, 1 + 2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for name in curves:
        axis = next(axes)
        for other in curves.keys() - {name}:
            draw_band(axis, curves[other], other, color="lightgray")
        draw_band(axis, curves[name], name, color="tab:blue")
        axis.set_title(name, fontsize="medium")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes:  # the panels that are left over
        axis.set_axis_off()
    # reward models answer nothing; their curve is that of the candidates that they choose
    has_answers = any("eval_exact_match" in run for runs in results.values() for run in runs)
    figure.supylabel(f"held-out exact match, {'greedy' if has_answers else 'best of n'}")
    figure.supxlabel("optimizer step")
    write_whole(path, lambda p: figure.savefig(p, dpi=130))


def draw_band(axis: Any, curves: list[list[list[float]]], label: str, **look: Any) -> None:
    """Draw the mean of one [step, value] curve per seed, and their standard deviation about it."""
    by_seed = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*map(set, by_seed)))  # a metric may be missing somewhere
    values = np.array([[curve[step] for step in steps] for curve in by_seed])
    mean = values.mean(0)
    spread = values.std(0, ddof=1) if len(by_seed) > 1 else 0
    (line,) = axis.plot(steps, mean, label=label, **look)
    color = line.get_color()
    axis.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)
