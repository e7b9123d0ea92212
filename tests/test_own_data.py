"""Every recipe on files, a model, a tokenizer and a chat template of one's own: configs/own."""

import json

import pytest
from conftest import ROOT, cause
from own_model import TEMPLATE, conversations, judged, preferences, said, write_lines
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

DATA = {
    "sft": conversations,
    "dpo": preferences,
    "kto": judged,
    "orpo": preferences,
    "reward": preferences,
}
# what a recipe says of held-out data
METRICS = {
    "sft": {"eval_loss", "eval_mean_token_accuracy"},
    "dpo": {"eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"},
    "kto": {"eval_loss", "eval_rewards/margins"},
    "orpo": {"eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"},
    "reward": {"eval_loss", "eval_pair_accuracy"},
}
SMALL = [
    *["--use_cpu", "--bf16", "false", "--max_steps", 4, "--learning_rate", "3e-3"],
    *["--save_strategy", "steps", "--save_steps", 2],
    *["--dataset.eval_size", 8, "--dataset.eval_split", "train[40:]"],
]


def words(recipe, own_model, folder):
    path = write_lines(folder / "train.jsonl", DATA[recipe]())
    return [*["--model_name_or_path", own_model, "--dataset.path", path], *SMALL]


@pytest.mark.parametrize("recipe", DATA)
def test_a_recipe_runs_on_ones_own_files_and_model(recipe, run, own_model, tmp_path):
    given = words(recipe, own_model, tmp_path)
    config = ROOT / "configs" / "own" / recipe
    folder, out = run(recipe, config, *given)
    summary = json.loads((folder / "summary.json").read_text())
    for when in ("before", "after"):
        assert METRICS[recipe] <= summary[when].keys()
    assert summary["after"]["eval_loss"] < summary["before"]["eval_loss"]
    evaluated = [path.stem for path in sorted((folder / "evaluations").iterdir())]
    assert evaluated == ["step-000000", "step-000004"]
    lines = out.splitlines()
    assert next(line for line in lines if line.startswith("loss "))
    assert " -> " in lines[-1] and "seed 42" in lines[-1]

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.chat_template == TEMPLATE
    if recipe == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
        assert model.config.num_labels == 1
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        answer = pipeline("text-generation", model, tokenizer=tokenizer, max_new_tokens=4)
        assert answer([said("user", "Which?")])[0]["generated_text"][-1]["role"] == "assistant"

    _, out = run(recipe, config, *given, "--max_steps", 6, "--resume_from_checkpoint", "auto")
    assert f"resuming from {folder}/checkpoint-4" in out
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


@pytest.mark.multiprocess
def test_two_processes_run_on_ones_own_files_and_model(launch, own_model, tmp_path):
    folder = tmp_path / "out"
    done = launch(
        ["--config_file", "configs/accelerate/cpu_2proc.yaml"],
        *["sft", "--config", "configs/own/sft.yaml", "--output_dir", str(folder)],
        *map(str, words("sft", own_model, tmp_path)),
        *["--samples.every", "2", "--packing", "true", "--max_length", "128"],
    )
    assert done.returncode == 0, cause(done.stdout)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["processes"] == 2
    assert summary["after"]["eval_loss"] < summary["before"]["eval_loss"]
    panels = sorted(path.stem for path in (folder / "samples").iterdir())
    assert panels == ["step-000000", "step-000002", "step-000004"]
