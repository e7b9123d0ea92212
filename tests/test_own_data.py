"""Every recipe on files, a model, a tokenizer and a chat template of one's own: configs/own."""

import json
import os

import pytest
from conftest import ROOT, cause
from own_model import TEMPLATE, conversations, judged, preferences, prompts, said, write_lines
from peft import AutoPeftModelForCausalLM
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from rlhf_trl import cli
from rlhf_trl.data.files import read

DATA = {
    "sft": conversations,
    "dpo": preferences,
    "kto": judged,
    "orpo": preferences,
    "reward": preferences,
    "grpo": prompts,
    "ppo": prompts,
}
REWARD_METRICS = {
    f"eval_{kind}{name}"
    for kind in ("", "sampled_")
    for name in ("contains", "own_reward", "reward", "length", "cut_off")
}
# what a recipe says of held-out data
METRICS = {
    "sft": {"eval_loss", "eval_mean_token_accuracy"},
    "dpo": {"eval_loss", "eval_pair_accuracy", "eval_rewards/margins"},
    "kto": {"eval_loss", "eval_rewards/margins"},
    "orpo": {"eval_loss", "eval_pair_accuracy", "eval_rewards/margins"},
    "reward": {"eval_loss", "eval_pair_accuracy"},
    "grpo": REWARD_METRICS,
    "ppo": REWARD_METRICS,
}
REWARDS = ["contains", "tests.own_model.own_reward"]
SMALL = (
    *("--use_cpu", "--bf16", "false", "--max_steps", 4, "--learning_rate", "3e-3"),
    *("--save_strategy", "steps", "--save_steps", 2),
)


def words(recipe, own_model, folder, rows=None):
    path = write_lines(folder / "train.jsonl", rows or DATA[recipe]())
    given = ["--model_name_or_path", own_model, "--dataset.path", path, *SMALL]
    if recipe in ("grpo", "ppo"):
        given += ["--reward_funcs", *REWARDS, "--max_completion_length", 8]
    return given


@pytest.mark.parametrize("recipe", DATA)
def test_a_recipe_runs_on_ones_own_files_and_model(recipe, run, own_model, tmp_path, capfd):
    given = [*words(recipe, own_model, tmp_path), "--dataset.eval_size", 8]
    config = ROOT / "configs" / "own" / recipe
    folder, out = run(recipe, config, *given)
    summary = json.loads((folder / "summary.json").read_text())
    for when in ("before", "after"):
        assert METRICS[recipe] <= summary[when].keys()
    if recipe not in ("grpo", "ppo"):
        assert summary["after"]["eval_loss"] < summary["before"]["eval_loss"]
    evaluated = [path.stem for path in sorted((folder / "evaluations").iterdir())]
    assert evaluated == ["step-000000", "step-000004"]
    lines = out.splitlines()
    assert {line.split("  ")[0] for line in lines} >= {
        name.removeprefix("eval_").replace("_", " ") for name in METRICS[recipe]
    }
    assert " -> " in lines[-1] and "seed 42" in lines[-1]

    assert summary["held_out"] == 8
    if recipe in ("sft", "dpo"):  # the command that the run prints tells the same, in one batch
        cli.main(
            ["evaluate", str(own_model), str(folder), "--json", "--answers", f"{folder}.jsonl"]
        )
        told = json.loads(capfd.readouterr().out)["models"].values()
        names = METRICS[recipe] - {"eval_rewards/accuracies"}
        for numbers, when in zip(told, ("before", "after"), strict=True):
            for name in names:
                assert numbers[name]["value"] == pytest.approx(summary[when][name], abs=1e-5)

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


def test_rows_that_were_edited_are_not_trained_on_unasked(run, refused, own_model, tmp_path):
    given = [*words("dpo", own_model, tmp_path), "--dataset.eval_size", 8, "--logging_steps", 1]
    config = ROOT / "configs" / "own" / "dpo"
    folder, _ = run("dpo", config, *given)
    file, more = tmp_path / "train.jsonl", ["--max_steps", 5, "--resume_from_checkpoint", "auto"]
    whole = file.read_text()
    file.write_text(whole.replace('"rejected"', '"rejected" ', 1))  # the same rows
    run("dpo", config, *given, *more)
    log = json.loads((folder / "log.json").read_text())
    tokens = [line["num_tokens"] for line in log if "loss" in line]
    assert len(tokens) == 5 and tokens[4] > tokens[3] > 3 * (tokens[4] - tokens[3]) / 2
    rows = [json.loads(line) for line in whole.splitlines()]
    rows[3]["chosen"][0]["content"] += "!"
    write_lines(file, rows)
    more[1] = 6
    sentence = refused("dpo", config, *given, *more)
    assert "rows are not those of" in sentence and "resume_changed: [dataset]" in sentence
    run("dpo", config, *given, *more, "--resume_changed", "dataset")
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "folder", "nested"])
def test_a_file_changed_under_the_same_time_is_read_again(tmp_path, name):
    path = tmp_path / name
    file = {"folder": path / "rows.jsonl", "nested": path / "data" / "rows.csv"}.get(name, path)
    file.parent.mkdir(parents=True, exist_ok=True)

    def texts(first):
        rows = ["text", first, "d"] if file.suffix == ".csv" else [f'{{"text": "{first}"}}']
        file.write_text("\n".join(rows) + "\n")
        os.utime(file, (1e9, 1e9))  # as archives and images set it
        return read(str(path))[0]["text"][0]

    assert [texts(first) for first in ("aa", "bb", "aa", "ccc")] == ["aa", "bb", "aa", "ccc"]


def test_a_template_that_was_edited_is_not_trained_with_unasked(run, refused, own_model, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE)
    given = [*words("sft", own_model, tmp_path), "--dataset.eval_size", 8]
    given += ["--chat_template_path", template]
    config, resume = ROOT / "configs" / "own" / "sft", ["--resume_from_checkpoint", "auto"]
    folder, _ = run("sft", config, *given, "--max_steps", 2)
    template.write_text(TEMPLATE.replace("<|", "<||"))
    assert template.read_text() != TEMPLATE
    sentence = refused("sft", config, *given, *resume)
    assert "the chat template is not that of" in sentence
    assert "write resume_changed: [chat_template_path] if it is meant" in sentence
    meant = ["--max_steps", 3, "--resume_changed", "chat_template_path"]
    run("sft", config, *given, *resume, *meant)
    template.rename(tmp_path / "moved.jinja")  # its content is what counts
    given[-1] = tmp_path / "moved.jinja"
    run("sft", config, *given, *resume)
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4


def test_prompts_may_be_texts_and_nothing_held_out(run, own_model, tmp_path):
    rows = [{**row, "prompt": row["prompt"][0]["content"]} for row in prompts()]
    config = tmp_path / "mine"
    text = (ROOT / "configs" / "own" / "grpo.yaml").read_text().replace("  eval_size: 100\n", "")
    config.with_suffix(".yaml").write_text(text)
    folder, out = run("grpo", config, *words("grpo", own_model, tmp_path, rows))
    assert json.loads((folder / "summary.json").read_text())["before"] == {}
    last = out.splitlines()[-1]
    assert last.startswith("reward ") and "(of training; seed 42); nothing is held out" in last


@pytest.mark.parametrize("recipe", ["grpo", "rejection_sampling"])
def test_right_answers_that_no_reward_reads_stop_a_run_at_its_start(
    recipe, refused, own_model, tmp_path
):
    rows = [{"prompt": f"What is {n} half?", "answer": f"{n}/2"} for n in range(3, 40, 2)]
    given = ["--model_name_or_path", own_model, "--use_cpu", "--bf16", "false"]
    given += ["--dataset.path", write_lines(tmp_path / "train.jsonl", rows)]
    given += ["--dataset.eval_size", 4, "--reward_funcs", "number"]
    config = ROOT / "configs" / "own" / recipe
    if recipe == "rejection_sampling":
        config = ROOT / "configs" / "tiny" / recipe
        given += ["--dataset.source", "path"]
    sentence = refused(recipe, config, *given)
    assert "number cannot use 15 of 15 right answers" in sentence
    assert "half?'), is not one number; write math in place of number" in sentence


def test_lora_learns_every_turn_in_packed_rows(run, own_model, tmp_path):
    folder, _ = run(
        *["sft", ROOT / "configs" / "own" / "sft", *words("sft", own_model, tmp_path)],
        *["--dataset.eval_size", 8, "--dataset.turns", "all", "--packing", "--max_length", 128],
        *["--use_peft", "--lora_r", 4, "--lora_target_modules", "all-linear"],
        *["--samples.every", 4, "--learning_rate", "1e-2"],
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"]["eval_loss"] < summary["before"]["eval_loss"]
    model = AutoPeftModelForCausalLM.from_pretrained(folder / "model")
    assert {"lora_A", "lora_B"} <= {
        part for n, _ in model.named_parameters() for part in n.split(".")
    }
    panels = sorted(path.stem for path in (folder / "samples").iterdir())
    assert panels == ["step-000000", "step-000004"]


@pytest.mark.multiprocess
def test_two_processes_run_on_ones_own_files_and_model(launch, own_model, tmp_path):
    folder = tmp_path / "out"
    done = launch(
        ["--config_file", "configs/accelerate/cpu_2proc.yaml"],
        *["sft", "--config", "configs/own/sft.yaml", "--output_dir", str(folder)],
        *map(str, words("sft", own_model, tmp_path)),
        *["--dataset.eval_size", "8", "--samples.every", "2"],
        *["--packing", "true", "--max_length", "128"],
    )
    assert done.returncode == 0, cause(done.stdout)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["processes"] == 2
    assert summary["after"]["eval_loss"] < summary["before"]["eval_loss"]
    panels = sorted(path.stem for path in (folder / "samples").iterdir())
    assert panels == ["step-000000", "step-000002", "step-000004"]
