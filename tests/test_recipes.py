"""The recipes end to end on the embedded model, and every bad input through them."""

import json
import os
import re
import resource
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import transformers
from conftest import cause
from tqdm import tqdm

from rlhf_trl import manifests, output
from rlhf_trl.evaluation import report, standstill
from rlhf_trl.rollouts.store import Rollouts, Store
from rlhf_trl.run.claiming import claim
from rlhf_trl.run.config import read_config
from rlhf_trl.tiny import checkpoint_path

ROOT = Path(__file__).parent.parent
# The smallest run: 2 prompts x 4 completions, a handful of held-out words.
SMALL = [
    *["--dataset.size", 40, "--dataset.eval_size", 8, "--max_steps", 2],
    *["--num_generations", 4, "--per_device_train_batch_size", 8],
]


def test_a_run_leaves_model_summary_curve_config_and_evaluations(run):
    folder, out = run("grpo", "grpo", *SMALL, "--max_steps", 4, "--eval_steps", 2)
    assert out.splitlines()[0] == (
        "grpo (chapter) on cpu, 1 process, strategy none, float32, adamw_torch_fused; "
        "2 prompts x 4 completions per generation, 8 completions per optimizer step, "
        "1 optimizer step per generation; skip_zero_advantage on"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["seed"], summary["held_out"]) == (4, 0, 8)
    seen = (summary["questions"], summary["seen"], summary["seen_kind"])
    assert seen == (8, 32, "completions")
    before, after = summary["before"]["eval_exact_match"], summary["after"]["eval_exact_match"]
    assert out.splitlines()[-1] == (
        f"exact match {before:.3f} -> {after:.3f} (greedy, 8 held-out words, seed 0)"
    )
    assert "held out: 8 questions" in out
    assert [p.name for p in sorted((folder / "evaluations").iterdir())] == [
        "step-000000.json",
        "step-000002.json",
        "step-000004.json",
    ]
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not [p for p in folder.rglob("*") if ".part" in p.name or ".old" in p.name]
    assert "<answer>" in out  # sample completions in the table


def test_the_exported_model_answers_alike_in_plain_transformers(run):
    folder, _ = run("grpo", "grpo", *SMALL, "--learning_rate", "1e-3")
    last = json.loads((folder / "evaluations" / "step-000002.json").read_text())
    program = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
answers = []
for question in json.loads(sys.argv[2]):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt",
        return_dict=True)
    out = model.generate(**ids, do_sample=False, max_new_tokens=20)
    answers.append(tokenizer.decode(out[0, ids["input_ids"].size(1):], skip_special_tokens=True))
print(json.dumps(answers))
"""
    questions = json.dumps([a["question"] for a in last["answers"]])
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "model"), questions],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [a["greedy"] for a in last["answers"]]


def test_a_run_repeats_from_its_saved_config(run, tmp_path):
    first, _ = run("grpo", "grpo", *SMALL, "--seed", 3)
    saved = os.path.relpath(first / "config", ROOT / "configs" / "tiny")
    again, _ = run("grpo", saved, folder=tmp_path / "again")
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (first, again)]
    assert weights[0] == weights[1]


def test_stopped_and_resumed_is_bit_identical(run, tmp_path):
    saving = [*SMALL, "--max_steps", 4, "--save_strategy", "steps", "--save_steps", 2]
    whole, _ = run("grpo", "grpo", *saving, folder=tmp_path / "whole")
    stopped = tmp_path / "stopped"
    shutil.copytree(whole / "checkpoint-2", stopped / "checkpoint-2")
    shutil.copytree(whole / "evaluations", stopped / "evaluations")
    shutil.copy(whole / "config.yaml", stopped)
    resume = ["--resume_from_checkpoint", "auto", "--save_total_limit", 7]
    resumed, out = run("grpo", "grpo", *saving, *resume, folder=stopped)
    assert "resuming from" in out and "checkpoint-2" in out
    changed = [line for line in out.splitlines() if line.startswith("changed")]
    assert [line.split()[3] for line in changed] == ["output_dir:", "save_total_limit:"]
    assert (stopped / "config-from-step-2.yaml").exists()
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (whole, resumed)]
    assert weights[0] == weights[1]
    start = (Path(checkpoint_path()) / "model.safetensors").read_bytes()
    assert weights[0] != start


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--max_steps", 1], ["at step 2 of max_steps 1", "raise max_steps"]),
        (["--max_steps", 4, "--seed", 7], ["seed was 0 and is now 7", "resume_changed: [seed]"]),
        (["--max_steps", 4, "--model_name_or_path", "tiny_untrained"], ["model_name_or_path was"]),
        (["--max_steps", 4, "--algorithm", "gspo"], ["algorithm was grpo and is now gspo"]),
    ],
)
def test_a_resume_that_would_not_be_the_same_run(run, refused, words, parts):
    saving = [*SMALL, "--save_strategy", "steps", "--save_steps", 2]
    run("grpo", "grpo", *saving)
    sentence = refused("grpo", "grpo", *saving, "--resume_from_checkpoint", "auto", *words)
    assert all(part in sentence for part in parts), sentence


def flip(file):
    """Damage one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_auto_does_what_is_left_to_do(run):
    words = [*SMALL, "--max_steps", 4, "--save_strategy", "steps", "--save_steps", 2]
    auto = [*words, "--resume_from_checkpoint", "auto"]
    folder, _ = run("grpo", "grpo", *auto)  # nothing is there yet
    weights, summary = (
        weights_of(folder / "model"),
        json.loads((folder / "summary.json").read_text()),
    )

    def same(out, *parts):
        assert all(part in out for part in parts), out
        assert weights_of(folder / "model") == weights
        now = json.loads((folder / "summary.json").read_text())
        assert all(now[key] == summary[key] for key in ("steps", "before", "after"))

    def times():
        files = {path for path in folder.rglob("*") if path.name != output.LOCK}
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    with pytest.raises(SystemExit) as stop:
        run("grpo", "grpo", *auto)
    assert stop.value.code == 0
    assert before == times()

    shutil.rmtree(folder / "model")
    (folder / ".model.part").mkdir()
    (folder / "summary.json").unlink()
    same(run("grpo", "grpo", *auto)[1], "resuming from", "checkpoint-4")
    assert not list(folder.glob("earlier-*"))
    assert [path.name for path in folder.glob(".*")] == [output.LOCK]

    flip(folder / "checkpoint-4" / "optimizer.pt")
    same(
        run("grpo", "grpo", *auto)[1],
        "checkpoint-4, which has a damaged optimizer.pt",
        f"resuming from {folder}/checkpoint-2",
    )
    assert (folder / "earlier-1" / "model").exists()

    for step in (2, 4):
        flip(folder / f"checkpoint-{step}" / "policy_gradient_state_0.pt")
    (folder / "summary.json").unlink()
    _, out = run("grpo", "grpo", *auto)
    same(out, "checkpoint-2, which has a damaged policy_gradient_state_0.pt")
    assert "resuming" not in out
    assert {"checkpoint-2", "checkpoint-4", "model", "config.yaml"} <= {
        path.name for path in (folder / "earlier-2").iterdir()
    }


# safetensors, torch and Python each say it in their own way
@pytest.mark.parametrize("name", ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"])
def test_a_file_that_cannot_be_written_costs_no_checkpoint(
    refused, run, monkeypatch, name, tmp_path
):
    write, folder = getattr(transformers.Trainer, name), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(trainer, path, *args, **kwargs):
        if trainer.state.global_step == 2:
            return write(trainer, path, *args, **kwargs)
        if name == "_save_rng_state":
            return open(f"{path}/{'x' * 300}", "w")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            return write(trainer, path, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    words = [*SMALL, "--max_steps", 4, "--save_strategy", "steps", "--save_steps", 2]
    with monkeypatch.context() as patch:
        patch.setattr(transformers.Trainer, name, limited)
        sentence = refused("grpo", "grpo", *words)
    assert "a file could not be written" in sentence and "checkpoints saved before are" in sentence
    assert (folder / "checkpoint-4").exists()
    _, out = run("grpo", "grpo", *words, "--resume_from_checkpoint", "auto")
    assert "skipped" in out and f"resuming from {folder}/checkpoint-2" in out


def test_what_may_differ_in_a_resumed_run_is_named(run):
    saving = [*SMALL, "--save_strategy", "steps", "--save_steps", 2]
    run("grpo", "grpo", *saving)
    meant = ["--resume_from_checkpoint", "auto", "--resume_changed", "seed", "dataset"]
    _, out = run(
        "grpo", "grpo", *saving, *meant, "--max_steps", 3, "--seed", 7, "--dataset.size", 41
    )
    assert "changed since checkpoint-2: seed: 0 -> 7" in out
    assert "changed since checkpoint-2: dataset.size: 40 -> 41" in out
    assert "max_steps: 2 -> 3, which changes the schedule of the learning rate" in out


def test_a_resumed_run_logs_evaluates_and_saves_as_often_as_it_is_now_told(run):
    every = ["--logging_steps", 4, "--eval_steps", 4, "--save_steps", 4]
    saving = [*SMALL, "--save_strategy", "steps", "--max_steps", 4]
    folder, _ = run("grpo", "grpo", *saving, *every)
    every = ["--logging_steps", 2, "--eval_steps", 0.25, "--save_steps", 3]
    words = [*saving, "--max_steps", 12, "--resume_from_checkpoint", "auto"]
    run("grpo", "grpo", *words, *every)
    assert {*output.whole_checkpoints(folder)} == {4, 6, 9, 12}
    assert {*output.numbered(folder, "evaluations/step-")} == {0, 4, 6, 9, 12}  # a quarter of 12: 3
    log = json.loads((folder / "log.json").read_text())
    assert [line["step"] for line in log if "loss" in line] == [1, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("key", ["ignore_data_skip", "enable_jit_checkpoint"])
def test_what_could_not_be_resumed_exactly_is_refused(refused, key):
    assert f"{key}: a run resumed with it" in refused("grpo", "grpo", *SMALL, f"--{key}", "true")


# Each step is worse than the one before.
WORSENING = [
    *[*SMALL, "--dataset.eval_size", 32, "--max_steps", 3, "--eval_steps", 1],
    *["--save_strategy", "steps", "--save_steps", 1],
    *["--learning_rate", "1e-3", "--lr_scheduler_type", "constant"],
]
BEST = ["--load_best_model_at_end", "--metric_for_best_model", "eval_exact_match"]


def weights_of(folder):
    return (folder / "model.safetensors").read_bytes()


def scores_at(folder, step):
    return json.loads((folder / "evaluations" / f"step-{step:06d}.json").read_text())["metrics"]


def test_what_is_told_is_told_of_the_model_that_is_kept(run):
    folder, out = run("grpo", "grpo", *WORSENING, *BEST)
    assert weights_of(folder / "model") == weights_of(folder / "checkpoint-1")
    start, best, last = (scores_at(folder, step)["eval_exact_match"] for step in (0, 1, 3))
    assert best > last
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"] == scores_at(folder, 1)
    assert (summary["steps"], summary["model_step"]) == (3, 1)
    lines = out.splitlines()
    assert "load_best_model_at_end: model/ is that of step 1 of 3" in lines
    assert lines[-1].startswith(f"exact match {start:.3f} -> {best:.3f} ")
    shown = next(n for n, line in enumerate(lines) if line.split() == ["step", "0", "step", "1"])
    assert lines[shown + 1].split() == ["exact", "match", f"{start:.3f}", f"{best:.3f}"]
    log = json.loads((folder / "log.json").read_text())
    assert [entry["step"] for entry in log if "eval_exact_match" in entry] == [0, 1, 2, 3]


def test_going_back_to_an_earlier_checkpoint_sets_later_results_aside(run, refused, tmp_path):
    folder, _ = run("grpo", "grpo", *WORSENING)
    before = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    change = ["--max_steps", 2, "--learning_rate", "1e-6", "--save_strategy", "no"]
    back = ["--resume_from_checkpoint", folder / "checkpoint-1"]
    _, out = run("grpo", "grpo", *WORSENING, *change, *back)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"] == scores_at(folder, 2) and summary["steps"] == 2
    assert [p.stem for p in sorted(folder.glob("evaluations/*"))] == [
        *["step-000000", "step-000001", "step-000002"]
    ]
    aside = folder / "earlier-1"
    assert str(aside) in out
    assert read_config(folder / "config-from-step-1.yaml")["learning_rate"] == 1e-6
    # nothing is lost, and the old model still lies beside the config that made it
    here = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    there = {p.relative_to(aside): p.read_bytes() for p in aside.rglob("*") if p.is_file()}
    assert {**here, **there}.items() >= before.items()
    assert there[Path("config.yaml")] == before[Path("config.yaml")]
    assert {"model", "checkpoint-2", "checkpoint-3"} <= {p.name for p in aside.iterdir()}
    # what is resumed next is of this course, not of the other
    assert claim(str(folder), "auto") == str(folder / "checkpoint-1")

    new = tmp_path / "new"
    sentence = refused("grpo", "grpo", *WORSENING, *back, "--algorithm", "gspo", folder=new)
    assert "algorithm was grpo and is now gspo" in sentence
    run("grpo", "grpo", *WORSENING, *back, folder=new)
    assert read_config(new / "config.yaml")["output_dir"] == str(new)
    finished = weights_of(new / "model")
    sentence = refused("grpo", "grpo", *WORSENING, *back, "--max_steps", 4, folder=new)
    assert "already holds files" in sentence and "in another folder" in sentence
    assert weights_of(new / "model") == finished and not list(new.glob("earlier-*"))


def test_bars_on_the_screen_say_what_they_count(run, monkeypatch):
    bars = []
    whole = tqdm.__init__

    def begin(bar, *args, **kwargs):
        whole(bar, *args, **kwargs)
        of_data = isinstance(bar, datasets.utils.tqdm) and kwargs.get("desc")  # off in tests
        if of_data or not bar.disable:
            bars.append(kwargs.get("desc"))

    monkeypatch.setattr(tqdm, "__init__", begin)
    transformers.logging.enable_progress_bar()  # as in a new process
    run("dpo", "dpo", "--dataset.size", 16, "--dataset.eval_size", 4, "--max_steps", 1)
    assert set(bars) == {
        "Tokenizing train dataset",
        "Tokenizing eval dataset",
        "Dropping identical pairs",
    }


def test_the_card_of_a_checkpoint_names_what_was_trained(run):
    folder, _ = run("grpo", "grpo", *SMALL, "--save_strategy", "steps", "--save_steps", 2)
    card = (folder / "README.md").read_text()
    assert "This model is a fine-tuned version of `tiny`." in card
    assert f'model="{folder / "model"}"' in card and "None" not in card


def test_the_table_of_completions_is_not_cut(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["--log_completions", "--eval_strategy", "no", "--eval_on_start", "false"]
    table = run("grpo", "grpo", *SMALL, *words)[1].partition("Advantage")[2].partition("╰")[0]
    completions = "".join(
        line.split("│")[3].strip() for line in table.splitlines() if "│ │" in line
    )
    assert completions.count("<think></think><answer>") > 4 and "…" not in table


def test_a_figure_that_fails_costs_no_numbers(run, tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(report, "learning_curve", fails)
    with pytest.raises(RuntimeError, match="no fonts"):
        run("grpo", "grpo", *SMALL)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["after"] == scores_at(tmp_path / "out", 2)
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    assert [e["step"] for e in log if "reward" in e] == [1, 2]


def evaluation(**metrics):
    return {"metrics": {f"eval_{name}": value for name, value in metrics.items()}, "answers": []}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    monkeypatch.setattr(report, "write_whole", lambda path, write: write(path))
    return drawn


@pytest.mark.parametrize(("logged", "marker"), [([10], "."), ([*range(1, 101)], "None")])
def test_the_curve_of_a_short_run_is_not_blank(tmp_path, drawn, logged, marker):
    log = [{"step": step, "reward": 0.5} for step in logged]
    report.learning_curve(tmp_path / "curve.png", log, {}, "grpo")
    assert drawn[0].axes[0].lines[0].get_marker() == marker


def test_chosen_and_rejected_have_panels_of_their_own(tmp_path, drawn):
    pairs = [
        {"step": n, "loss": 0.7, "logps/chosen": -1.0 - n, "logps/rejected": -50.0 * n}
        for n in (1, 2)
    ]
    report.learning_curve(tmp_path / "curve.png", pairs, {}, "dpo")
    _, chosen, rejected = drawn[0].axes
    assert chosen.lines[0].get_ydata().tolist() == [-2.0, -3.0]
    assert rejected.lines[0].get_ydata().tolist() == [-50.0, -100.0]


def test_a_figure_says_which_scale_is_whose_and_counts_whole_steps(tmp_path, drawn):
    names = ("exact_match", "sampled_exact_match", "gym_score")
    evaluations = {n: evaluation(**dict.fromkeys(names, 0.1 * n)) for n in (0, 2)}
    log = [{"step": n, "reward": 0.5, "logps/chosen": -1.0, "logps/rejected": -2.0} for n in (1, 2)]
    report.learning_curve(tmp_path / "curve.png", log, evaluations, "grpo")
    left, *below, right = drawn[0].axes
    assert len({line.get_color() for line in right.lines}) == 3
    for axis in (left, right):
        color = axis.lines[0].get_color()
        assert axis.yaxis.label.get_color() == color
        assert {tick.label1.get_color() for tick in axis.yaxis.get_major_ticks()} == {color}
    for axis in (left, *below):
        assert axis.lines and all(step == int(step) for step in axis.get_xticks())


def test_a_metric_that_one_evaluation_lacks(tmp_path, drawn):
    evaluations = {0: evaluation(loss=0.7, auc=0.5), 2: evaluation(loss=0.6)}
    evaluations[4] = evaluation(loss=0.5, auc=0.75, best_of_n=0.25)
    report.learning_curve(tmp_path / "curve.png", [{"step": 1, "loss": 0.7}], evaluations, "orm")
    curves = {line.get_label(): line for line in drawn[0].axes[1].lines}
    assert [list(xy) for xy in curves["AUC"].get_data()] == [[0, 4], [0.5, 0.75]]
    assert [list(xy) for xy in curves["best of n"].get_data()] == [[4], [0.25]]
    lines = report.table(evaluations).splitlines()
    assert [line.split() for line in lines] == [
        *[["step", "0", "step", "4"], ["loss", "0.700", "0.500"], ["auc", "0.500", "0.750"]],
        ["best", "of", "n", "-", "0.250"],
    ]
    del evaluations[4]
    assert report.headline(evaluations, set(), 3) == "loss 0.700 -> 0.600 (seed 3)"
    del evaluations[0]
    assert report.headline(evaluations, set(), 3) == "loss 0.600 (seed 3)"
    assert report.table(evaluations).split() == ["step", "2", "loss", "0.600"]


def test_a_table_shows_one_question_under_its_own_name():
    """A run may go on with other held-out questions, or with rewards that apply to none of them."""

    def answered(*questions, **metrics):
        answers = [{"question": q, "answer": None, "greedy": f"to {q}"} for q in questions]
        return {**evaluation(cut_off=0.5, **metrics), "answers": answers}

    evaluations = {0: answered("a", "b", reward=1), 3: answered("c", "b", "d")}
    assert report.table(evaluations).splitlines()[-3:] == [
        *["  b", "    step 0      'to b'", "    step 3      'to b'"]
    ]
    assert report.headline(evaluations, set(), 3).startswith("cut off 0.500 -> 0.500 (greedy, 3")


def test_lora_exports_an_adapter_that_plain_transformers_loads(run):
    from transformers import AutoModelForCausalLM

    folder, _ = run(
        "grpo", "grpo", *SMALL, "--use_peft", "--lora_target_modules", "q_proj", "v_proj"
    )
    assert (folder / "model" / "adapter_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert any("lora_A" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("tracker", ["tensorboard", "trackio", "wandb"])
def test_trackers_work_offline_and_without_a_key(run, tracker, monkeypatch, tmp_path):
    for name, folder in [("WANDB_DIR", "wandb"), ("TRACKIO_DIR", "trackio")]:
        (tmp_path / folder).mkdir()
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("WANDB_RUN_NAME", "by-hand")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logs = tmp_path / "out" / "runs"
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(logs))
    # read once, when the first test of this process imports TRL
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    folder, _ = run("grpo", "grpo", *SMALL, "--report_to", tracker, "--project", "speller")
    if tracker == "tensorboard":
        assert list(logs.rglob("events.out.tfevents.*"))
    elif tracker == "wandb":
        import wandb

        assert os.environ["WANDB_PROJECT"] == "speller"
        # in this test's folder, or in that of the first test of this process that used wandb
        assert list(Path(wandb.run.dir).parent.glob("*.wandb"))
        assert wandb.run.name == "by-hand"
        wandb.finish()
    else:
        database = sqlite3.connect(tmp_path / "trackio" / "speller.db")
        logged = {}
        for name, text in database.execute("select run_name, metrics from metrics"):
            assert name == "by-hand"
            metrics = json.loads(text)
            logged.setdefault(metrics.get("train/global_step"), {}).update(metrics)
        for entry in json.loads((folder / "log.json").read_text())[:4]:  # evaluation and training
            for key, value in entry.items():
                side = "eval/" if key.startswith("eval_") else "train/"
                if key not in ("step", "epoch"):
                    assert logged[entry["step"]][side + key.removeprefix("eval_")] == value


def test_a_second_task_and_a_mixture_by_config(run):
    specs = (
        "[{name: chain_sum, config: {min_terms: 2, max_terms: 3, max_digits: 1}}, "
        "{name: spell_backward, weight: 2, config: {max_word_len: 6}}]"
    )
    folder, out = run("grpo", "grpo", *SMALL, "--dataset.specs", specs, "--dataset.eval_size", 24)
    assert "held-out questions" in out.splitlines()[-1]
    (last,) = (folder / "evaluations").glob("step-000002.json")
    found = json.loads(last.read_text())
    sums, words = 0, 0
    for each in found["answers"]:
        if terms := re.search(r"([\d +-]+) =", each["question"]):
            numbers = re.findall(r"[+-]?\d+", terms[1].replace(" ", ""))
            assert 2 <= len(numbers) <= 3 and int(each["answer"]) == sum(map(int, numbers))
            sums += 1
        else:
            word = each["question"].rpartition(" ")[2]
            assert len(word) <= 6 and each["answer"] == word[::-1]
            words += 1
    assert sums + words == 24 and words > sums > 0
    right = [f"<answer>{each['answer']}</answer>" in each["greedy"] for each in found["answers"]]
    assert found["metrics"]["eval_exact_match"] == sum(right) / 24


def test_the_users_own_reward_by_dotted_path(run, tmp_path, monkeypatch):
    (tmp_path / "own_rewards.py").write_text(
        "seen = []\n"
        "def vowels(completions, trainer_state, **kwargs):\n"
        "    assert trainer_state.max_steps == 2\n"
        "    texts = [c[-1]['content'] for c in completions]\n"
        "    seen.extend(texts)\n"
        "    return [float(sum(i for i, x in enumerate(t) if x in 'aeiou')) for t in texts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rewards = ["--reward_funcs", "exact_match", "own_rewards.vowels"]
    silent = ["--eval_strategy", "no", "--eval_on_start", "false"]
    folder, _ = run("grpo", "grpo", *SMALL, *rewards, "--reward_weights", 0, 0.5, *silent)
    log = [e for e in json.loads((folder / "log.json").read_text()) if "reward" in e]
    texts = sys.modules["own_rewards"].seen[:16]
    counted = [sum(vowel.start() for vowel in re.finditer("[aeiou]", text)) for text in texts]
    assert len(log) == 2 and len(set(counted)) > 2
    for entry, counts in zip(log, (counted[:8], counted[8:]), strict=True):
        mean = sum(counts) / 8
        assert entry["rewards/vowels/mean"] == pytest.approx(mean)
        assert entry["reward"] == pytest.approx(mean / 2)
    start = (Path(checkpoint_path()) / "model.safetensors").read_bytes()
    assert (folder / "model" / "model.safetensors").read_bytes() != start  # it is trained on


def test_divergence_is_named(refused):
    words = ["--max_steps", 6, "--eval_strategy", "no", "--eval_on_start", "false"]
    sentence = refused("grpo", "grpo", *SMALL, *words, "--learning_rate", 1e6)
    assert "diverged; no good step was saved; lower learning_rate" in sentence


def test_a_tracker_that_is_not_installed(refused, monkeypatch):
    from rlhf_trl.run import train

    monkeypatch.setattr(train, "find_spec", lambda name: None)
    sentence = refused("grpo", "grpo", *SMALL, "--report_to", "trackio")
    assert "scripts/setup.sh trackio" in sentence


def test_warnings_when_nothing_can_be_learned(run, caplog):
    words = ["--max_completion_length", 2, "--max_steps", 11, "--eval_strategy", "no"]
    rewards = ["--reward_funcs", "exact_match", "--reward_weights", 1.0]
    run("grpo", "grpo", *SMALL, *words, *rewards)
    said = [r.getMessage() for r in caplog.records if r.name == "rlhf_trl.evaluation.standstill"]
    assert len([m for m in said if "every completion was cut off" in m]) == 1
    assert len([m for m in said if "equal rewards for 10 logged steps" in m]) == 1


@pytest.mark.parametrize("sign", list(standstill.Watch.signs))
def test_a_warning_needs_ten_total_steps_in_a_row_and_comes_once(sign, caplog):
    watch, said = standstill.Watch(), []
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    for value in [1.0] * 9 + [0.99] + [1.0] * 9 + [None] + [1.0] * 12:
        state.global_step += 1
        watch.on_log(None, state, None, logs={} if value is None else {sign: value})
        said.append(len(caplog.records))
    # a step without the metric neither counts nor resets: it is the tenth of those that follow
    assert said == [0] * 20 + [1] * 12
    assert "10 logged steps up to step 21" in caplog.records[0].getMessage()


@pytest.mark.parametrize("sign", list(standstill.Watch.signs_at_zero))
def test_a_warning_of_what_stays_zero_comes_again_only_after_a_change(sign, caplog):
    watch, counts = standstill.Watch(), []
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    for value in [0.0] * 12 + [0.25] + [3e-8] * 12:
        state.global_step += 1
        watch.on_log(None, state, None, logs={sign: value})
        counts.append(len(caplog.records))
    assert counts == [0] * 9 + [1] * 13 + [2] * 3
    assert "10 logged steps up to step 23" in caplog.records[1].getMessage()
    assert "\n" not in caplog.records[1].getMessage()


def test_equal_rewards_are_one_warning_not_two(caplog):
    watch = standstill.Watch()
    for step in range(30):
        state = SimpleNamespace(global_step=step, is_world_process_zero=True)
        watch.on_log(None, state, None, logs={"frac_reward_zero_std": 1.0, "reward_std": 0.0})
    assert len(caplog.records) == 1


def test_a_short_run_says_at_its_end_that_rewards_taught_nothing(run):
    words = ["--max_completion_length", 2, "--eval_strategy", "no", "--eval_on_start", "false"]
    rewards = ["--reward_funcs", "exact_match", "--reward_weights", 1.0]
    _, out = run("grpo", "grpo", *SMALL, *words, *rewards)
    lines = out.splitlines()
    equal = "all groups had equal rewards in every logged step, so nothing was learned from rewards"
    assert lines.count(equal) == 1
    (untagged,) = [line for line in lines if "<answer> tags" in line]
    assert untagged.startswith("no completion in rollouts.sqlite had <answer> tags, which exact_")


@pytest.mark.parametrize(
    ("log", "completion", "parts"),
    [
        ([{"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.5}], "5", []),
        ([{"frac_reward_zero_std": 1.0, "reward_std": 0.0}, {"loss": 1}], "5", ["all groups"]),
        ([{"reward_std": 0.0}, {"reward_std": 3e-8}], "5", ["all completions"]),
        ([{"loss": 1.0}], "5", []),
        ([{"rewards/exact_match/mean": 0.0}], "5", ["no completion"]),
        ([{"rewards/exact_match/mean": 0.0}], "<answer>5</answer>", []),
        ([{"rewards/exact_match/mean": 0.0}, {"rewards/exact_match/mean": 0.1}], "5", []),
        ([{"rewards/exact_match/mean": 0.0}], None, []),  # nothing is recorded
    ],
)
def test_what_a_run_says_of_rewards_that_taught_nothing(tmp_path, log, completion, parts):
    if completion is not None:
        store = Store(tmp_path, Rollouts(), {})
        store.write("train", 0, (0, 0.0), [("p", completion, 1, True, 0.0)], {"exact_match": [0.0]})
        held_out = [("p", "<answer>5</answer>", 1, True, 0.0)]
        store.write("eval-greedy", 0, (0, 0.0), held_out, {"exact_match": [0.0]})
        store.flush()
        store.close()
    sentences = report.untaught(log, tmp_path)
    assert len(sentences) == len(parts)
    assert all(map(str.startswith, sentences, parts))


def test_a_run_is_refused_whose_only_reward_applies_to_no_answer_of_a_row(refused, tmp_path):
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1) if n % 2 else None} for n in range(6)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(
        f"model_name_or_path: tiny\noutput_dir: {tmp_path / 'out'}\nuse_cpu: true\n"
        f"dataset: {{source: path, path: {path}}}\nreward_funcs: [number]\neval_strategy: 'no'\n"
        "per_device_train_batch_size: 8\nnum_generations: 4\nmax_steps: 1\n"
    )
    sentence = refused("grpo", tmp_path / "own")
    assert "number would not apply to 3 of 6 training rows, of which answer is empty" in sentence


def test_a_run_is_trained_and_evaluated_on_math(run):
    rewards = ["--reward_funcs", "exact_match", "math", "--rollouts", "off"]
    folder, _ = run("grpo", "grpo", *SMALL, *rewards, "--per_device_train_batch_size", 64)
    logged = [e for e in json.loads((folder / "log.json").read_text()) if "reward" in e]
    assert len(logged) == 2
    for entry in logged:  # words are the same or not, however they are compared
        assert entry["rewards/math/mean"] == entry["rewards/exact_match/mean"] > 0


# --- bad input, one sentence each


BAD = {
    "unknown key": (["--learning_rat", "1"], ["learning_rat", "did you mean 'learning_rate'?"]),
    "wrong type": (["--max_steps", "4.5"], ["max_steps", "integer"]),
    "another recipe's algorithm": (
        ["--algorithm", "dpo"],
        ['algorithm is "dpo"; write one of reinforce, rloo, grpo,'],
    ),
    "unknown algorithm": (["--algorithm", "grop"], ['"grop"', "did you mean 'grpo'?"]),
    "no such formulation": (["--formulation", "paper"], ["'paper'", "chapter"]),
    "key the row does not read": (["--sapo_temperature_pos", "1"], ["sapo_temperature_pos"]),
    "key that contradicts": (["--loss_type", "dapo"], ["loss_type", "contradicts", "grpo"]),
    "missing model": (
        ["--model_name_or_path", "no/such-model"],
        ["'no/such-model'", "neither a model folder", "tiny"],
    ),
    "no model": (["--model_name_or_path", "null"], ["model_name_or_path is missing"]),
    "unknown task": (["--dataset.specs.0.name", "spell"], ["no task 'spell'"]),
    "unknown task option": (
        ["--dataset.specs.0.config.max_len", 3],
        ["no such option", "max_word_len"],
    ),
    "empty data": (["--dataset.size", 0], ["dataset.size"]),
    "smaller than a generation batch": (
        ["--dataset.size", 15],
        ["15 rows", "the 16 prompts", "add rows"],
    ),
    "batch not divisible": (
        ["--num_generations", 7],
        ["num_generations", "128", "2, 4, 8, 16, 32, 64"],
    ),
    "prompt longer than the context": (
        ["--dataset.system_prompt", "x" * 300],
        ["longest prompt has", "context of 256"],
    ),
    "unknown reward": (["--reward_funcs", "exact"], ["reward_funcs", "'exact_match'"]),
    "weights and rewards": (
        ["--reward_weights", 1.0],
        ["reward_weights: 1 for 2 reward_funcs", "write one for each"],
    ),
    "a name for two numbers": (
        ["--reward_funcs", "format", "format"],
        ["'format' is what logs call another number", "rename the function"],
    ),
    "no steps": (["--max_steps", 0], ["max_steps is 0"]),
    "folder that is not there": (
        ["--model_name_or_path", "outputs/no/model"],
        ["no folder 'outputs/no/model'"],
    ),
    "learning rate": (["--learning_rate", -1], ["learning_rate is -1", "between 0 and 1000000"]),
    "temperature": (["--temperature", 0], ["temperature is 0", "between 0.001 and 1000"]),
    "completion length": (["--max_completion_length", 0], ["max_completion_length", "1 or more"]),
    "expects another launch": (["--expect.processes", 2], ["expects 2 processes and 1 came up"]),
    "an optimizer's options": (
        [*SMALL, "--optim_args", "fast"],
        ["optim, optim_args, adam_*: not enough values to unpack"],
    ),
    "a schedule's options": (
        [*SMALL, "--lr_scheduler_kwargs", "{steep: 1}"],
        [
            "lr_scheduler_type, lr_scheduler_kwargs: get_linear_schedule_with_warmup() got",
            "'steep'",
        ],
    ),
    "attention that is not there": (
        ["--attn_implementation", "flash_attention_7"],
        ["cannot be loaded with attn_implementation (Specified `attn_impl", "eager", "sdpa"],
    ),
    "the best of nothing": (
        ["--save_strategy", "best"],
        ["metric_for_best_model: `args.metric_for_best_model` must be provided"],
    ),
    "zero steps": (
        [*SMALL, "--max_steps", -1, "--num_train_epochs", 0, "--eval_strategy", "no"],
        ["num_train_epochs is 0", "above 0"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(refused, tmp_path, name):
    words, parts = BAD[name]
    sentence = refused("grpo", "grpo", *words)
    assert all(part in sentence for part in parts), sentence
    if (
        "--dataset.eval_size" not in words
    ):  # found out before anything is written, so the folder can be used
        assert {path.name for path in (tmp_path / "out").glob("*")} <= {output.LOCK}


REWARDS = """
def raises(completions, **kwargs):
    raise RuntimeError("the judge is away")
def nan(completions, **kwargs):
    return [float("nan")] * len(completions)
def scalar(completions, **kwargs):
    return 1.0
def short(completions, **kwargs):
    return [1.0]
def words(completions, **kwargs):
    return ["good"] * len(completions)
def nothing(completions, **kwargs):
    return [None] * len(completions)
def sometimes(completions, **kwargs):
    return [None if i % 2 else 1.0 for i in range(len(completions))]
"""


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ("raises", ["'bad_rewards.raises'", "the judge is away", "step 0", "prompt", "completion"]),
        ("nan", ["'bad_rewards.nan'", "nan", "step 0", "prompt", "completion"]),
        ("scalar", ["1.0", "list of 8 numbers"]),
        ("short", ["1 values for 8 completions"]),
        ("words", ["'good'"]),
        ("nothing", ["no reward function applied to 8 of 8 completions", "step 0"]),
        ("sometimes", ["no reward function applied to 4 of 8 completions"]),
    ],
)
def test_broken_rewards(refused, tmp_path, monkeypatch, reward, parts):
    (tmp_path / "bad_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--reward_funcs", f"bad_rewards.{reward}", "--reward_weights", 1.0]
    sentence = refused("grpo", "grpo", *SMALL, "--eval_strategy", "no", *own)
    assert all(part in sentence for part in parts), sentence


def test_a_folder_with_another_run_is_not_touched(refused, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "summary.json").write_text("mine")
    sentence = refused("grpo", "grpo", *SMALL)
    assert "already holds files; write elsewhere with --output_dir" in sentence
    assert {p.name for p in folder.iterdir()} == {output.LOCK, "summary.json"}
    assert (folder / "summary.json").read_text() == "mine"


def with_tokenizer(tmp_path, **changes):
    """Copy the embedded model and change its tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_path(), folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize("cut", [None, 10, 5000])
def test_a_model_folder_without_whole_weights(refused, tmp_path, cut):
    folder = with_tokenizer(tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if cut:
        weights.write_bytes(content[:cut])
    sentence = refused("grpo", "grpo", *SMALL, "--model_name_or_path", folder)
    assert ("cut-off model.safetensors" if cut else "no model weights") in sentence


def test_a_tokenizer_without_chat_template(refused, tmp_path):
    folder = with_tokenizer(tmp_path)
    (folder / "chat_template.jinja").unlink()
    sentence = refused("grpo", "grpo", *SMALL, "--model_name_or_path", folder)
    assert "no chat template" in sentence


def test_a_tokenizer_without_eos(refused, tmp_path):
    sentence = refused(
        "grpo", "grpo", *SMALL, "--model_name_or_path", with_tokenizer(tmp_path, eos_token=None)
    )
    assert "has no eos_token" in sentence


@pytest.mark.parametrize("pad", [None, "<|end|>"])
def test_eos_doubling_as_pad_trains_the_same(run, tmp_path, pad):
    """EOS stays inside the completion mask, so weights end where a pad of its own ends."""
    folder = with_tokenizer(tmp_path, pad_token=pad)
    own, _ = run("grpo", "grpo", *SMALL, folder=tmp_path / "own")
    shared, _ = run(
        "grpo", "grpo", *SMALL, "--model_name_or_path", folder, folder=tmp_path / "shared"
    )
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (own, shared)]
    assert weights[0] == weights[1]


# --- several processes


WORDS = [str(w) for w in SMALL]


@pytest.mark.multiprocess
def test_two_processes_on_the_cpu(launch, tmp_path):
    config = ["--config", "configs/tiny/grpo.yaml", "--output_dir", str(tmp_path / "out")]
    done = launch(["--config_file", "configs/accelerate/cpu_2proc.yaml"], "grpo", *config, *WORDS)
    assert done.returncode == 0, done.stdout
    for part in ("2 processes, strategy ddp", "process 0 of 2", "process 1 of 2"):
        assert part in done.stdout
    assert "4 prompts x 4 completions per generation" in done.stdout  # the batch is global
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["processes"] == 2


@pytest.mark.multiprocess
def test_a_launch_that_got_fewer_processes_stops(launch, tmp_path):
    config = ["--config", "configs/tiny/grpo.yaml", "--output_dir", str(tmp_path / "out")]
    done = launch(["--cpu", "--num_processes", "2"], "grpo", *config)
    assert done.returncode != 0
    assert "error: accelerate was asked for several processes" in done.stdout
    done = launch(
        ["--config_file", "configs/accelerate/cpu_2proc.yaml"],
        *["grpo", *config, *WORDS, "--use_cpu", "false"],
    )
    assert done.returncode != 0
    assert "error: 2 processes were launched on a machine without a GPU" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.multiprocess
def test_fsdp_on_a_cpu_is_refused(launch, tmp_path):
    config = ["--config", "configs/tiny/grpo.yaml", "--output_dir", str(tmp_path / "out")]
    accelerate = ["--config_file", "configs/accelerate/fsdp2.yaml", "--num_processes", "2"]
    done = launch(accelerate, "grpo", *config, *WORDS)
    assert done.returncode != 0
    assert "strategy fsdp was asked for and ddp came up on cpu" in done.stdout


@pytest.mark.promise
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", [2, 3])
def test_a_moved_reference_is_resumed_under_zero(launch, tmp_path, stage):
    moved = ["--beta", 0.5, "--sync_ref_model", "true", "--ref_model_sync_steps", 1]
    words = [*SMALL, "--max_steps", 3, "--save_strategy", "steps", "--save_steps", 1, *moved]
    accelerate = ["--config_file", f"configs/accelerate/zero{stage}.yaml", "--num_processes", "2"]

    def start(folder, *more):
        config = ["--config", "configs/tiny/grpo.yaml", "--output_dir", str(folder)]
        done = launch(accelerate, "grpo", *config, *map(str, [*words, *more]))
        assert done.returncode == 0, cause(done.stdout)
        return (folder / "model" / "model.safetensors").read_bytes()

    whole = start(tmp_path / "whole")
    for checkpoint, same in (("checkpoint-2", True), ("checkpoint-1", False)):
        folder = tmp_path / checkpoint
        shutil.copytree(tmp_path / "whole" / "checkpoint-2", folder / "checkpoint-2")
        reference = tmp_path / "whole" / checkpoint / "synced_reference.pt"
        shutil.copy(reference, folder / "checkpoint-2")
        manifest = manifests.read_manifest(folder / "checkpoint-2")
        manifests.write_manifest(folder / "checkpoint-2", True, **manifest)
        assert (start(folder, "--resume_from_checkpoint", "auto") == whole) == same


# --- what the project promises


@pytest.mark.promise
def test_grpo_learns_on_one_cpu_thread_within_a_minute(run):
    folder, _ = run("grpo", "grpo")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["after"]["eval_exact_match"] >= 0.93
    assert summary["after"]["eval_exact_match"] - summary["before"]["eval_exact_match"] >= 0.4
    assert summary["train_cpu_seconds"] <= 60


def test_supervised_training_learns_the_demonstrations(run, tmp_path):
    words = [*["--model_name_or_path", "tiny", "--demonstrator", "right"], *SFT]
    folder, out = run("sft", "sft", *words)
    assert out.splitlines()[0].startswith("sft on cpu, 1 process, strategy none, float32")
    assert "greedy, 32 held-out words, seed 0" in out.splitlines()[-1]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["name"], summary["steps"], summary["held_out"]) == ("sft", 12, 32)
    # the warm start copies words and drops letters; these demonstrations are right
    before, after = (summary[when]["eval_sampled_exact_match"] for when in ("before", "after"))
    assert after > before + 0.2
    log = [e for e in json.loads((folder / "log.json").read_text()) if "loss" in e]
    assert [entry["step"] for entry in log] == list(range(1, 13))
    assert sum(e["loss"] for e in log[-4:]) < 0.8 * sum(e["loss"] for e in log[:4])
    imperfect, _ = run("sft", "sft", *words, "--demonstrator", "imperfect", folder=tmp_path / "b")
    copied = json.loads((imperfect / "summary.json").read_text())["after"]
    assert copied["eval_sampled_exact_match"] < before + 0.1


SFT = [
    *["--dataset.size", 384, "--dataset.eval_size", 32, "--max_steps", 12, "--logging_steps", 1],
    *["--per_device_train_batch_size", 32, "--warmup_steps", 0, "--learning_rate", "1e-3"],
    *["--lr_scheduler_type", "constant", "--lr_scheduler_kwargs", "null", "--eval_steps", 12],
]


@pytest.mark.promise
def test_the_warm_start_rebuilds_from_nothing(run):
    rebuilt, _ = run("sft", "sft", "--eval_strategy", "no")
    shipped = run_shipped(run, rebuilt)
    new = json.loads((rebuilt / "summary.json").read_text())["after"]["eval_exact_match"]
    assert abs(new - shipped) <= 0.03


@pytest.mark.promise
def test_sums_in_words_are_learned_from_the_number_alone(run, tmp_path):
    words = {}
    for name, more in (("right", []), ("slips", ["--slips", "0.6"])):
        words[name] = tmp_path / f"{name}.jsonl"
        script = [sys.executable, str(ROOT / "scripts" / "word_sums.py"), str(words[name]), *more]
        subprocess.run(script, check=True)
    start, _ = run("sft", "sft_word_sums", "--dataset.path", words["slips"])
    options = ["--model_name_or_path", start / "model", "--dataset.path", words["right"]]
    folder, _ = run("grpo", "grpo_word_sums", *options, folder=tmp_path / "grpo")
    summary = json.loads((folder / "summary.json").read_text())
    for metric in ("eval_number", "eval_sampled_number"):
        assert summary["after"][metric] > summary["before"][metric] + 0.3


def run_shipped(run, rebuilt):
    folder, _ = run(
        "grpo", "grpo", "--max_steps", 1, "--learning_rate", 0, folder=rebuilt.parent / "shipped"
    )
    return json.loads((folder / "summary.json").read_text())["before"]["eval_exact_match"]


def test_evaluation_leaves_training_as_it_was(run, tmp_path):
    often, _ = run("grpo", "grpo", *SMALL, "--eval_steps", 1, folder=tmp_path / "often")
    never, _ = run(
        *["grpo", "grpo", *SMALL, "--eval_strategy", "no", "--eval_on_start", "false"],
        folder=tmp_path / "never",
    )
    weights = [(f / "model" / "model.safetensors").read_bytes() for f in (often, never)]
    assert weights[0] == weights[1]
