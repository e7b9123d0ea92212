"""A pipeline's folder as the command leaves it, with numbers that a test chooses."""

import json
import random
from pathlib import Path

import yaml

QUESTIONS, SAMPLES = 40, 4
REFERENCE = (0, 0.0, 0.3, -1.0)  # step, KL, share of right answers, mean of the proxy
# of each policy: its checkpoints, the last of which is its end
COURSES = {
    "sft": [(60, 1.4, 0.9, 2.0)],
    "grpo": [
        (10, 0.6, 0.5, 1.0),
        (20, 3.7, 0.35, 2.0),
        (40, 13.0, 0.05, 3.7),
        (60, 24.0, 0.0, 4.3),
    ],
    "grpo_beta": [(60, 1.3, 0.6, 2.4)],
}
TITLES = {"grpo": "GRPO", "grpo_beta": "GRPO, penalty"}
# of each model with probes: by category, the share that is passed and the mean of the proxy
PROBES = {
    "tiny": {"out_of_distribution": (0.0, -5.7), "safety": (0.5, 0.0)},
    "sft": {"out_of_distribution": (0.9, 1.0), "safety": (0.5, 0.0)},
    "grpo": {"out_of_distribution": (0.0, 0.6), "safety": (0.5, 0.0)},
    "grpo_beta": {"out_of_distribution": (0.0, -7.0), "safety": (0.5, 0.0)},
}
CONFIGS = {
    "rm": {"algorithm": "reward", "dataset": {"pairs": "offline", "size": 250}},
    "sft": {"model_name_or_path": "tiny", "demonstrator": "right", "dataset": {"size": 100}},
    "grpo": {"algorithm": "grpo", "model_name_or_path": "tiny", "learning_rate": 0.0001},
    "grpo_beta": {
        "algorithm": "grpo",
        "model_name_or_path": "tiny",
        "learning_rate": 0.0001,
        "beta": 0.3,
    },
}
RECIPES = {"rm": "reward", "sft": "sft", "grpo": "grpo", "grpo_beta": "grpo"}


def reply(point, draw, question, text=None):
    """A model's entry in a line of answers; `draw` gives the chance that samples share."""
    _, kl, share, proxy = point
    samples = []
    for _ in range(SAMPLES):
        gold = float(draw.random() < share)
        scores = {
            "exact_match": gold,
            "scored_by_rm": proxy + gold - share + draw.gauss(0, 0.3),
            "kl": kl * (0.5 + draw.random()),
            "kl_k1": kl + draw.gauss(0, 0.2),
        }
        tokens = draw.randint(8, 20)
        samples.append(
            {
                "text": text or f"answer {draw.random():.3f}",
                "finished": tokens < 20,
                "tokens": tokens,
                "scores": scores,
            }
        )
    return {
        "question": question,
        "answer": question[::-1],
        "greedy": "greedy answer",
        "sampled": samples[0]["text"],
        "scores": {"exact_match": float(draw.random() < share), "scored_by_rm": proxy},
        "samples": samples,
    }


def points_of(courses, out, seed, checkpoints=True):
    """The words of the models that answer, with the numbers of each."""
    points = {"tiny": REFERENCE}
    for name, course in courses.items():
        *before, end = course
        for point in before if checkpoints else ():
            points[f"{out}/{name}/seed-{seed}/checkpoint-{point[0]}"] = point
        points[f"{out}/{name}/seed-{seed}"] = end
    return points


def write_run(folder, name, seed, course):
    """What the page reads of a run's folder."""
    folder.mkdir(parents=True)
    config = {**CONFIGS[name], "seed": seed, "output_dir": str(folder)}
    made_from = []
    if name.startswith("grpo"):
        config["reward_model"] = str(folder.parents[1] / "rm" / f"seed-{seed}" / "model")
        path = config["reward_model"]
        made_from.append({"role": "reward_model", "path": path, "sha256": "ab12" * 16})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {
        "model_step": course[-1][0] if course else 100,
        "train_seconds": 10.0 + seed,
        "processes": 1,
        "made_from": made_from,
        "after": {"eval_pair_accuracy": 0.9 + seed / 100} if name == "rm" else {},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    norms = [1.0, 2.0, 3.0, 2.0]
    log = [{"step": step, "grad_norm": norm, "loss": 0.1} for step, norm in enumerate(norms, 1)]
    (folder / "log.json").write_text(json.dumps(log))
    cost = {"cpu_seconds": 20.0 + seed, "peak_memory_bytes": 1_500_000_000, "starts": 1 + seed}
    (folder / "cost.json").write_text(json.dumps(cost))


def write_probes(path, out, seed, probes):
    """The answers to ten probes of each category; every other one of safety has no check."""
    lines = []
    for category in probes["tiny"]:
        for number in range(10):
            line = {"prompt": f"{category} {number}"}
            for name, by_category in probes.items():
                share, proxy = by_category[category]
                draw = random.Random(f"{seed} {number}")
                entry = reply((0, 1.0, share, proxy), draw, f"probe {number}")
                scored = [entry["scores"], *(sample["scores"] for sample in entry["samples"])]
                for scores in scored:
                    scores["passed"] = scores.pop("exact_match")
                    if category == "safety" and number % 2:
                        scores["passed"] = None
                word = name if name == "tiny" else f"{out}/{name}/seed-{seed}"
                line[word] = {**entry, "category": category}
            lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_folder(
    out,
    courses=None,
    seeds=3,
    gold="exact_match",
    text=None,
    checkpoints=True,
    probes=None,
):
    """Write the folder of a pipeline that has run to its end.

    Args:
        out: the folder.
        courses: by policy, or a function of the seed that returns them.
        seeds: their number.
        gold: the score that is really wanted.
        text: of every sampled answer.
        checkpoints: whether they answered, too.
        probes: what was answered to them, as in `PROBES`.
    """
    out = Path(out)
    of_seed = courses if callable(courses) else lambda seed: courses or COURSES
    stages = {
        name: {
            "recipe": f"recipes/{RECIPES[name]}.py",
            "config": f"configs/tiny/{name}.yaml",
            "algorithm": CONFIGS[name].get("algorithm"),
            "makes": "reward_model" if name == "rm" else "policy",
            "title": TITLES.get(name),
            "inputs": {"reward_model": ["rm", "owner/name"]} if name.startswith("grpo") else {},
        }
        for name in ("rm", *of_seed(0))
    }
    answers = {"reference": None, "proxy": "rm", "gold": gold, "checkpoints": checkpoints}
    answers["probes"] = "mine.jsonl" if probes else None
    content = {"pipeline": "a.yaml", "seeds": seeds, "stages": stages, "answers": answers}
    (out / "answers").mkdir(parents=True)
    (out / "pipeline.json").write_text(json.dumps(content))
    for seed in range(seeds):
        for name in stages:
            write_run(out / name / f"seed-{seed}", name, seed, of_seed(seed).get(name))
        if probes:
            write_probes(out / "answers" / f"probes-seed-{seed}.jsonl", out, seed, probes)
        models = points_of(of_seed(seed), out, seed, checkpoints)
        numbers = {"reference": "tiny", "samples": SAMPLES, "models": {}}
        (out / "answers" / f"seed-{seed}.json").write_text(json.dumps(numbers))
        with (out / "answers" / f"seed-{seed}.jsonl").open("w", encoding="utf-8") as stream:
            for number in range(QUESTIONS):
                line = {"prompt": f"Spell word {number} backward."}
                for word, point in models.items():
                    draw = random.Random(f"{seed} {number}")  # the same luck for all models
                    line[word] = reply(point, draw, f"word {number}", text)
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    return out
