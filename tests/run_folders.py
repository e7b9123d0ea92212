"""Folders as runs leave them, with weights of a few bytes, for tests of what joins runs."""

import hashlib
import json
import os
from pathlib import Path

import yaml

from rlhf_trl.output import LOCK, MANIFEST, RECORD

# Of seven runs: algorithm or recipe, and what each was made from, by the key of its config.
SEVEN = {
    "reward": ("reward", {}),
    "weak": ("reward", {}),
    "sft": (None, {}),
    "rejection": ("rejection_sampling", {"reward_model": "reward"}),
    "dpo": ("dpo", {"dataset.sampled_from": "sft", "model_name_or_path": "sft"}),
    "ppo": ("ppo", {"reward_model": "reward"}),
    "grpo": ("grpo", {"model_name_or_path": "sft", "reward_model": "weak"}),
}


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def write_model(folder, weights):
    """Write a model whose only tensor file is a text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)


def config_of(folder, algorithm, sources):
    """Return a run's config; `sources` are paths by dotted key."""
    config = {"output_dir": str(folder), "seed": 0, "max_steps": 20, "model_name_or_path": "tiny"}
    config["dataset"] = {"source": "reasoning_gym", "size": 8}
    if algorithm == "rejection_sampling":
        config["strategy"] = "top_per_prompt"
    elif algorithm:
        config["algorithm"] = algorithm
    for key, path in sources.items():
        block, _, name = key.rpartition(".")
        (config[block] if block else config)[name] = path
    return config


def write_run(folder, algorithm="grpo", sources=None, weights=None, date=1_700_000_000):
    """Write a finished run in a folder, made from models of runs or others that exist.

    Args:
        folder: of the run, from the current one.
        algorithm: its row; None: it has none.
        sources: paths of models by the key of the config that names them.
        weights: the text that stands for its model's; by default its folder.
        date: when it began, in seconds.
    """
    folder, sources = Path(folder), sources or {}
    weights = weights or str(folder)
    write_model(folder / "model", weights)
    for step in (10, 20):
        write_model(folder / f"checkpoint-{step}", f"{weights} at {step}")
        (folder / f"checkpoint-{step}" / MANIFEST).write_text("{}")
    evaluations = folder / "evaluations"
    evaluations.mkdir()
    for step, value in ((0, 0.25), (10, 0.5), (20, 0.75)):
        evaluation = {"metrics": {"eval_exact_match": value}, "answers": []}
        (evaluations / f"step-{step:06d}.json").write_text(json.dumps(evaluation))
    made_from = [
        {"role": key, "path": path, "sha256": sha256(Path(path, "model.safetensors").read_text())}
        for key, path in sorted(sources.items())
    ]
    summary = {
        "name": str(algorithm),
        "seed": 0,
        "steps": 20,
        "model_step": 20,
        "before": {"eval_exact_match": 0.25},
        "after": {"eval_exact_match": 0.75},
        "made_from": made_from,
        "model_sha256": sha256(weights),
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "log.json").write_text("[]")
    for name in (LOCK, "learning_curve.png", RECORD):
        (folder / name).write_text("")
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(config_of(folder, algorithm, sources)))
    os.utime(config, (date, date))
    return folder


def write_seven(folder="outputs"):
    """Write the runs of `SEVEN`, one after the other."""
    for number, (name, (algorithm, sources)) in enumerate(SEVEN.items()):
        paths = {key: f"{folder}/{source}/model" for key, source in sources.items()}
        write_run(f"{folder}/{name}", algorithm, paths, date=1_700_000_000 + 60 * number)


def content(folder):
    """Return all files below a folder by path, with their bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
