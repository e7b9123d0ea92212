"""Over-optimization (chapter 14): what a policy learns from a reward model, step by step.

The reward model's mean reward is the proxy; exact match on held-out words is what is really wanted.
"""

import json
import re
import statistics
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.measured import read_evaluations
from rlhf_trl.output import write_json, write_whole
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.folders import home
from rlhf_trl.run.options import join_options
from rlhf_trl.run.race import draw_band, train_all
from rlhf_trl.run.stages import stage_of_config

WORDS = 8  # held-out words whose answers are shown
USUAL = re.compile(r"<think></think><answer>(.*)</answer>")


class Setting(NamedTuple):
    """What a policy is trained on: a title for people, its config, a key of `REWARD_MODELS`."""

    title: str
    policy: str
    reward_model: str


REWARD_MODELS = {"weak": "weak_reward", "better": "reward"}  # names and configs
SETTINGS = {
    "weak": Setting("weak reward model", "overoptimization", "weak"),
    "weak_beta": Setting("weak reward model, beta 1", "overoptimization_beta", "weak"),
    "better": Setting("better reward model", "overoptimization_better", "better"),
}


def overoptimize(
    folder: Path,
    seeds: int,
    *,
    jobs: int = 1,
    extra: list[str] | None = None,
    reward_extra: list[str] | None = None,
) -> str:
    """Train reward models and policies on them; write `overoptimization.json`, `.md` and `.png`.

    A finished run is not repeated, so an interrupted one goes on where it stopped.

    Args:
        folder: where the runs and the results go.
        seeds: repetitions; each trains its own reward models.
        jobs: runs side by side, each on one thread.
        extra: further options of the policies' recipe.
        reward_extra: further options of the reward models' recipe.

    Returns:
        The table, in Markdown.

    Raises:
        InputError: a run failed, or `folder` holds such a run with other settings.
    """
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}; write 1 or more.")

    def one(place: Path, config: str, seed: int, *more: str) -> tuple[Path, str, list[str]]:
        path = home() / "configs" / "tiny" / f"{config}.yaml"
        stage = stage_of_config(read_config(path), str(path))
        options = join_options(["--config", str(path), "--seed", str(seed)], more)
        return place, stage.script, options

    rewards = [
        one(_reward(folder, name, seed), config, seed, *(reward_extra or []))
        for name, config in REWARD_MODELS.items()
        for seed in range(seeds)
    ]
    train_all(rewards, jobs)
    policies = []
    for name, setting in SETTINGS.items():
        for seed in range(seeds):
            model = str(_reward(folder, setting.reward_model, seed) / "model")
            options = [*(extra or []), "--reward_model", model]
            place = folder / name / f"seed-{seed}"
            policies.append(one(place, setting.policy, seed, *options))
    train_all(policies, jobs)

    results = {
        name: [
            _read(folder / name / f"seed-{seed}", _reward(folder, setting.reward_model, seed))
            for seed in range(seeds)
        ]
        for name, setting in SETTINGS.items()
    }
    write_json(folder / "overoptimization.json", results)
    answers = {
        name: read_evaluations(folder / name / "seed-0" / "evaluations") for name in SETTINGS
    }
    text = f"{table(results)}\n\n{samples(answers)}"
    write_whole(folder / "overoptimization.md", lambda part: part.write_text(text + "\n"))
    draw(folder / "overoptimization.png", results)
    return text


def _reward(folder: Path, name: str, seed: int) -> Path:
    return folder / "reward_models" / name / f"seed-{seed}"


def _read(policy: Path, reward: Path) -> dict[str, Any]:
    """Return exact match and reward of a policy by step, and how good its reward model is.

    The reward is that of the training batches since the evaluation before; at step 0 that of the
    first batch, which the untrained policy writes.
    """
    log = json.loads((policy / "log.json").read_text())
    rewards = {e["step"]: e["reward"] for e in log if "reward" in e}
    key = "eval_sampled_exact_match"
    gold = [[e["step"], e[key]] for e in log if key in e]
    proxy, last = [], None
    for step, _ in gold:
        since = [y for x, y in rewards.items() if last is not None and last < x <= step]
        proxy.append([step, statistics.fmean(since) if since else rewards[min(rewards)]])
        last = step
    after = json.loads((reward / "summary.json").read_text())["after"]
    return {"gold": gold, "proxy": proxy, "reward_model": after}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return gold and proxy at the start, at gold's peak and at the end, in Markdown, per seed."""
    lines = [
        "| GRPO on | seed | best-of-8 by the reward model | step of the peak "
        "| exact match: start -> peak -> end | reward: start -> peak -> end |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        for seed, run in enumerate(runs):
            (start, top), end = (
                (run["gold"][0], max(run["gold"], key=itemgetter(1))),
                run["gold"][-1],
            )
            proxy = dict(run["proxy"])
            gold = [f"{point[1]:.3f}" for point in (start, top, end)]
            reward = [f"{proxy[point[0]]:.2f}" for point in (start, top, end)]
            cells = [
                SETTINGS[name].title,
                str(seed),
                f"{run['reward_model']['eval_best_of_n']:.3f}",
                f"{top[0]} of {end[0]}",
                " -> ".join(gold),
                " -> ".join(reward),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def samples(evaluations: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Return sampled answers to the same held-out words, in Markdown.

    Args:
        evaluations: of each setting, evaluations by step. "weak" is shown at the start, at the peak
            and at the end, the others at the end.
    """

    def sampled(name: str, step: int) -> list[dict[str, Any]]:
        return evaluations[name][step]["answers"][:WORDS]

    weak = [[n, e["metrics"]["eval_sampled_exact_match"]] for n, e in evaluations["weak"].items()]
    top = max(weak, key=itemgetter(1))[0]
    columns = [("weak", weak[0][0]), ("weak", top)]
    columns += [(name, max(found)) for name, found in evaluations.items()]
    heads = [f"{SETTINGS[name].title}, step {step}" for name, step in columns]
    lines = [f"| right | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    for row in zip(*(sampled(*column) for column in columns), strict=True):
        cells = [f"`{_shown(answer['sampled'])}`" for answer in row]
        lines.append(f"| `{row[0]['answer']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(text: str) -> str:
    """Return what a well-formed completion answers, or the whole of another, on one line."""
    usual = USUAL.fullmatch(text)
    return (usual[1] if usual else text).replace("\n", "\\n").replace("|", "\\|")


def draw(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """Draw exact match and reward over steps, a line for the mean and a band for the spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for name, runs in results.items():
        for axis, key in zip(axes, ("gold", "proxy"), strict=True):
            draw_band(axis, [run[key] for run in runs], SETTINGS[name].title)
    axes[0].set(ylabel="gold: held-out exact match, sampled", ylim=(0, 1.02))
    axes[1].set(ylabel="proxy: mean reward in training", xlabel="optimizer step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    write_whole(path, lambda part: figure.savefig(part, dpi=130))
