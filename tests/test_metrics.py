"""Every metric that a recipe logs, writes or prints is recomputed from the run's own record.

The names come from the runs: a name that no oracle recomputes fails here, and so does an oracle of
what no run logs.
"""

import ast
import io
import json
import math
import re
import resource
import runpy
import sys
from contextlib import redirect_stdout
from hashlib import blake2b, sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import metric_oracles as oracles
import pytest
import torch
from conftest import ROOT, same_environment
from metric_oracles import SHORT, Run, close
from transformers import AutoModelForCausalLM

from rlhf_trl.run import train
from rlhf_trl.run.options import join_options

STEPS = {"grpo": 3, "ppo": 3}  # the others: 2
COMMON = {
    "dataset.size": 16,
    "dataset.eval_size": 12,
    "eval_steps": 1,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_only_model": "true",
    "per_device_eval_batch_size": 12,
    "max_completion_length": 20,
    "model_name_or_path": "tiny",
}
GROUPS = {"per_device_train_batch_size": 16, "num_generations": 4}
WHOLE = {"per_device_train_batch_size": 256}  # all examples in each step
FEW = {"dataset.samples_per_prompt": 4}
CANDIDATES = {"dataset.candidates": 4}
REWARDS = {"exact_match": 1.0, "format": 0.5}
CUT_OFF = 0.25  # DAPO's missing_eos_penalty
# recipe, config, options, oracle of a training step, oracle of held-out examples
RECIPES = {
    "grpo": (
        "grpo",
        "grpo",
        GROUPS | {"num_iterations": 2, "beta": 0.05, "epsilon": 0.1},
        oracles.grpo_step,
        None,
    ),
    "dapo": (
        "grpo",
        "dapo",
        GROUPS
        | {
            "dynamic_sampling_rounds": 1,
            "max_completion_length": SHORT,
            "soft_punish_cache": oracles.CACHE,
            "missing_eos_penalty": CUT_OFF,
        },
        oracles.dapo_step,
        None,
    ),
    "ppo": (
        "ppo",
        "ppo",
        {
            "per_device_train_batch_size": 16,
            "steps_per_generation": 1,
            "num_iterations": 2,
            "epsilon": 0.001,
            "cliprange_value": 0.01,
        },
        oracles.ppo_step,
        None,
    ),
    "opd": (
        "distill",
        "opd",
        {"per_device_train_batch_size": 16, "formulation": "chapter", "teacher_models": "TEACHER"},
        oracles.opd_step,
        None,
    ),
    "sdpo": (
        "distill",
        "sdpo",
        GROUPS | {"dynamic_sampling_rounds": 1, "demonstration": "first"},
        oracles.sdpo_step,
        None,
    ),
    "grpo_reward": (
        "grpo",
        "grpo_reward",
        # the oracle's entropy is that of all completions
        GROUPS | {"reward_model": "REWARD", "skip_zero_advantage": "false"},
        oracles.reward_model_step,
        None,
    ),
    "dpo": ("dpo", "dpo", WHOLE | FEW, None, oracles.dpo),
    "kto": ("kto", "kto", WHOLE, None, oracles.kto),
    "orpo": ("orpo", "orpo", WHOLE, None, oracles.orpo),
    "reward": ("reward", "reward", WHOLE | FEW | CANDIDATES, None, oracles.compared),
    "kwise": ("reward", "kwise", WHOLE | CANDIDATES, None, oracles.compared),
    "orm": ("orm", "orm", WHOLE | FEW | CANDIDATES, None, oracles.judged),
    "prm": (
        "prm",
        "prm",
        WHOLE | CANDIDATES | {"warmup_steps": 0, "class_weights": "[2.0, 99.0, 1.0]"},
        None,
        oracles.traced,
    ),
    "sft": ("sft", "sft", WHOLE, None, oracles.demonstrated),
    "sft_own": ("sft", "OWN", WHOLE, None, oracles.demonstrated),
    "rejection_sampling": (
        "rejection_sampling",
        "rejection_sampling",
        WHOLE | {"answers": "ANSWERS"},
        None,
        oracles.demonstrated,
    ),
}
POLICIES = ("grpo", "dapo", "ppo", "opd", "sdpo", "grpo_reward")
REWARD_MODELS = ("reward", "kwise", "orm", "prm")
ANSWERING = (*POLICIES, "dpo", "kto", "orpo", "sft", "rejection_sampling")
TRL_TIMES = {"step_time", "runtime", "samples_per_second", "steps_per_second"}
UNTOLD = ("time", "per_second", "epoch", "num_tokens")  # of reward models, in evaluations/
# of preference trainers, in evaluations/
TOLD = ("loss", "pair_accuracy", "rewards/", "logps/", "length", "cut_off", "sampled_")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a recipe's finished run, which all tests share."""
    root, runs = tmp_path_factory.mktemp("runs"), {}

    def finish(name):
        if name not in runs:
            with pytest.MonkeyPatch.context() as patch, same_environment():
                if name == "grpo_reward":
                    options = {"reward_model": str(finish("reward").folder / "model")}
                else:
                    options = {}
                runs[name] = _run(name, root, patch, options)
        return runs[name]

    return finish


def _run(name, root, patch, more):
    """Run a recipe, and keep what it starts from."""
    recipe, config, own, *_ = RECIPES[name]
    options = COMMON | own | more | {"max_steps": STEPS.get(name, 2)}
    kept = {}
    original = train.run

    def keep(trainer, loaded, data, *args, **kwargs):
        start = Path(trainer.args.output_dir, "start")
        trainer.save_model(str(start))
        if save := getattr(trainer, "save_value_model", None):
            save(str(start / "value_model"))
        kept.update(trainer=trainer, data=data)
        return original(trainer, loaded, data, *args, **kwargs)

    patch.setattr(train, "run", keep)
    patch.chdir(ROOT)
    folder, config = root / name, f"configs/tiny/{config}.yaml"
    if name == "sft_own":
        config = _own_data(root, options)
    if name == "opd":
        options["teacher_models"] = str(_teacher(root))
    if name == "rejection_sampling":
        options["answers"] = str(root / "answers")
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    argv = ["--config", config, "--output_dir", str(folder), "--disable_tqdm"]
    patch.setattr(sys, "argv", [name, *join_options(argv, words)])
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
    return Run(folder, printed.getvalue(), options=options, **kept)


def _own_data(root, options):
    """Write conversations, and a config that holds some of them out; return its path."""
    words = ("sun", "tree", "water", "stone", "cloud", "river", "green", "north", "light", "moon")
    question = "Spell this word backward (example: sun -> nus): "
    rows = [
        {"prompt": [{"role": "user", "content": question + word}],
         "completion": [{"role": "assistant", "content": f"<answer>{word[:n:-1]}</answer>"}]}
        for n, word in enumerate(words)
    ]  # fmt: skip
    for side, part in (("train", rows[:6]), ("held_out", rows[6:])):
        lines = "".join(f"{json.dumps(row)}\n" for row in part)
        (root / f"{side}.jsonl").write_text(lines)
    for key in ("dataset.size", "dataset.eval_size"):
        del options[key]
    path = root / "own.yaml"
    path.write_text(
        f"dataset: {{source: path, path: {root}/train.jsonl, eval_path: {root}/held_out.jsonl}}\n"
        "eval_strategy: steps\nuse_cpu: true\nbf16: false\nreport_to: none\nmax_length: 64\n"
        "learning_rate: 1e-3\nlr_scheduler_type: linear\nseed: 0\n"
    )
    return str(path)


def _teacher(root):
    """Write a teacher: the embedded model, moved at random."""
    from rlhf_trl.tiny import checkpoint_path

    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    from transformers import AutoTokenizer

    model.save_pretrained(root / "teacher")
    AutoTokenizer.from_pretrained(checkpoint_path()).save_pretrained(root / "teacher")
    return root / "teacher"


def _weights(name):
    """Return the weights of a run's rewards, by name."""
    if name == "grpo_reward":
        return {"format": 0.5, "reward_model": 1.0}
    return REWARDS


def _training_rows(name, run):
    if name == "kto":
        return run.trainer.train_dataset
    return list(run.data.train)


def _learning_rate(run, step):
    """What the schedule of a config gives for a step."""
    args = run.trainer.args
    if name_of(args.lr_scheduler_type) == "warmup_stable_decay":
        return args.learning_rate * (step - 1) / 50  # SFT's warm-up
    if name_of(args.lr_scheduler_type) == "constant":
        return args.learning_rate
    return args.learning_rate * (1 - (step - 1) / args.max_steps)


def name_of(scheduler):
    return getattr(scheduler, "value", scheduler)


def _epoch(name, run, step):
    """Steps over the steps of an epoch."""
    if name not in POLICIES:
        return step  # each step takes all examples
    updates = int(run.options.get("num_iterations", 1))
    prompts = 16 // int(run.options.get("num_generations", 1))
    return step * prompts / (16 * updates)


def _trained(name, run, step):
    """Return what the log of a training step holds."""
    _, _, _, of_step, of_rows = RECIPES[name]
    if of_step is not None:
        metrics = of_step(run, step, _weights(name))
    else:
        rows = _training_rows(name, run)
        metrics = of_rows(run, rows, step - 1, training=True)
        if "num_tokens" in metrics:
            metrics["num_tokens"] *= step
    return metrics | {
        "learning_rate": _learning_rate(run, step),
        "step": step,
        "epoch": _epoch(name, run, step),
    }


def _evaluated(name, run, step):
    """Return what the log of an evaluation holds, but for times."""
    metrics = {"step": step, "epoch": _epoch(name, run, step)}
    if name in ANSWERING:
        weights = _weights(name) if name in POLICIES else None
        penalty = CUT_OFF if name == "dapo" else None
        metrics |= oracles.answered(run, step, weights, penalty)
    of_rows = RECIPES[name][4]
    if of_rows is None or name in ("sft", "rejection_sampling"):
        return metrics
    rows = run.trainer.eval_dataset if name == "kto" else list(run.data.held_out)
    with torch.no_grad():
        metrics |= of_rows(run, rows, step, prefix="eval_")
    if "eval_num_tokens" in metrics:  # of training until then
        logged = [entry for entry in run.log if entry["step"] == step and "num_tokens" in entry]
        metrics["eval_num_tokens"] = logged[0]["num_tokens"] if logged else 0
    return metrics


def _parts(run):
    """Return the log's training steps, evaluations (both by step) and last entry."""
    *entries, last = run.log
    evaluations = [e for e in entries if any(key.startswith("eval_") for key in e)]
    trained = [e for e in entries if "loss" in e]
    assert len(trained) + len(evaluations) == len(entries)
    steps = run.options["max_steps"]
    assert [e["step"] for e in trained] == list(range(1, steps + 1))
    assert [e["step"] for e in evaluations] == list(range(steps + 1))
    return trained, evaluations, last


def _without_times(entry, prefix, seconds):
    """Return an entry without what TRL and transformers time, which no record holds."""
    names = {f"{prefix}{name}" for name in TRL_TIMES}
    times = {name: value for name, value in entry.items() if name in names}
    for name, value in times.items():
        assert value > 0
        assert math.isfinite(value)
        if name.endswith("time"):
            assert value <= seconds
    return {name: value for name, value in entry.items() if name not in times}, times


def _counted(name, run):
    """Return the rows that an evaluation of losses goes over."""
    return len(run.trainer.eval_dataset) if name not in POLICIES else 0


@pytest.mark.parametrize("name", RECIPES)
def test_training_metrics(finished, name):
    run = finished(name)
    trained, _, _ = _parts(run)
    for entry in trained:
        metrics, times = _without_times(entry, "", run.summary["train_seconds"] + 0.01)
        assert set(times) == ({"step_time"} if name in POLICIES else set())
        close(metrics, _trained(name, run, entry["step"]))


@pytest.mark.parametrize("name", RECIPES)
def test_evaluation_metrics(finished, name):
    run = finished(name)
    _, evaluations, _ = _parts(run)
    for entry in evaluations:
        metrics, times = _without_times(entry, "eval_", run.summary["train_seconds"] + 0.01)
        if times:
            rows = _counted(name, run)
            seconds = times["eval_runtime"]
            assert times["eval_samples_per_second"] == pytest.approx(rows / seconds, rel=0.01)
            batches = math.ceil(rows / run.trainer.args.eval_batch_size)
            assert times["eval_steps_per_second"] == pytest.approx(batches / seconds, rel=0.01)
        close(metrics, _evaluated(name, run, entry["step"]))


@pytest.mark.parametrize("name", RECIPES)
def test_last_entry_of_the_log(finished, name):
    run = finished(name)
    trained, _, last = _parts(run)
    args, steps, seconds = run.trainer.args, len(trained), last["train_runtime"]
    examples = steps * args.train_batch_size
    known = {
        "train_loss": oracles.mean(entry["loss"] for entry in trained),
        "epoch": trained[-1]["epoch"],
        "step": steps,
        # transformers counts whole batches, whatever the last one holds
        "train_samples_per_second": round(examples / seconds, 3),
        "train_steps_per_second": round(steps / seconds, 3),
        "train_runtime": seconds,
        "total_flos": _flops(name, run) * steps,
    }
    assert 0 < seconds <= run.summary["train_seconds"] + 0.01
    assert last.keys() == known.keys()
    assert last == pytest.approx(known, rel=2e-3)
    assert last["total_flos"] == known["total_flos"]


def _flops(name, run):
    """What transformers counts for a step, which it reads in `input_ids`."""
    if name in (*POLICIES, "orpo"):
        return 0
    rows = run.trainer.train_dataset
    columns = [c for c in rows.column_names if c in FLOPS_COLUMNS]
    if columns == ["input_ids"]:
        texts = rows["input_ids"]
    elif "ranked_ids" in columns:
        texts = [text for row in rows["ranked_ids"] for text in row]
    else:
        prompts = rows["prompt_ids"] if "prompt_ids" in columns else [[]] * len(rows)
        sides = [c for c in columns if c != "prompt_ids"]
        texts = [p + a for side in sides for p, a in zip(prompts, rows[side], strict=True)]
    return oracles.flops(run.trainer.model, texts)


FLOPS_COLUMNS = (
    "input_ids",
    "ranked_ids",
    "prompt_ids",
    "chosen_ids",
    "rejected_ids",
    "completion_ids",
)


@pytest.mark.parametrize("name", RECIPES)
def test_evaluations_tell_what_was_logged(finished, name):
    run = finished(name)
    _, logged, _ = _parts(run)
    assert list(run.evaluations) == [entry["step"] for entry in logged]
    for entry in logged:
        kept = run.evaluations[entry["step"]]["metrics"]
        names = {key for key in entry if key.startswith("eval_")}
        if name in REWARD_MODELS:
            names = {key for key in names if not key.endswith(UNTOLD)}
        elif name == "sft_own":
            names = {"eval_loss", "eval_mean_token_accuracy"}
        elif name in ("dpo", "kto", "orpo"):
            scores = ("exact_match", "format", "gym_score")
            names = {key for key in names if key.removeprefix("eval_").startswith(TOLD + scores)}
        assert kept == {key: entry[key] for key in names}


KINDS = {
    **dict.fromkeys(POLICIES, "completions"),
    **dict.fromkeys(("dpo", "orpo", "reward"), "pairs"),
    **dict.fromkeys(("kto", "orm", "sft", "sft_own", "rejection_sampling"), "answers"),
    "kwise": "ranked lists",
    "prm": "traces",
}


TITLES = {
    "grpo_reward": "grpo (chapter)",
    "sdpo": "sdpo (code)",
    "prm": "prm (code)",
    "sft": "sft",
    "sft_own": "sft",
    "rejection_sampling": "rejection sampling",
}


def _fingerprint(questions):
    """The hash of a set of questions, in which case and white space do not count."""
    keys = [repr([("user", " ".join(text.split()).lower())]) for text in questions]
    return blake2b(repr(sorted(keys)).encode(), digest_size=8).hexdigest()


def _weights_sha256(folder):
    """What `sha256sum` prints of the one file of a small model."""
    return sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", RECIPES)
def test_summary(finished, name):
    run = finished(name)
    steps, summary = run.options["max_steps"], dict(run.summary)
    seconds, cpu_seconds = summary.pop("train_seconds"), summary.pop("train_cpu_seconds")
    assert 0 < cpu_seconds < 4 * seconds + 1
    phases = summary.pop("time")
    assert {"update", "evaluation"} <= phases.keys()
    assert ("generation" in phases) == (name in POLICIES)
    assert sum(phases.values()) >= seconds - 0.1  # with an evaluation after training, more
    versions = summary.pop("versions")
    assert versions["peft"] == (version("peft") if find_spec("peft") else None)
    for library in ("rlhf_trl", "trl", "transformers", "torch", "accelerate", "reasoning_gym"):
        assert versions.pop(library) == version(library)
    assert set(versions) == {"peft"}
    # more than 100 MB, and no more than this process has ever used
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 100e6 < summary.pop("peak_memory_bytes") <= peak
    made_from = []
    if name == "grpo_reward":
        folder = finished("reward").folder / "model"
        origin = {"role": "reward_model", "path": str(folder), "sha256": _weights_sha256(folder)}
        made_from.append(origin)
    if teacher := run.options.get("teacher_models"):
        sha256 = _weights_sha256(Path(teacher))
        made_from.append({"role": "teacher_models", "path": teacher, "sha256": sha256})
    examples = steps * len(run.trainer.train_dataset)
    if name in POLICIES:
        generations = math.ceil(steps / int(run.options.get("num_iterations", 1)))
        examples = sum(len(run.rollouts["train", g]) for g in range(generations))
    held_out = list(run.data.held_out)
    asked = run.data.tasks.held_out if run.data.tasks is not None else held_out
    answers = name in ANSWERING
    questions = {row["prompt"][-1]["content"] for row in asked}
    left_out = 0
    if run.data.tasks is not None:
        left_out = oracles.passed_over(row["question"] for row in run.data.tasks.train)
    known = {
        "name": TITLES.get(name, f"{name} (chapter)"),
        "seed": 0,
        "steps": steps,
        "model_step": steps,
        "seen": examples,
        "seen_kind": KINDS[name],
        "processes": 1,
        "held_out": len(asked) if answers else len(held_out),
        "questions": len(questions),
        "questions_fingerprint": _fingerprint(questions),
        "passed_over": left_out,
        "before": run.evaluations[0]["metrics"],
        "after": run.evaluations[steps]["metrics"],
        "made_from": made_from,
        "model_sha256": _weights_sha256(run.folder / "model"),
    }
    if answers:  # named in the first lines, too
        assert f"; {left_out} of their kind" in run.printed
    assert summary == known


@pytest.mark.parametrize("name", RECIPES)
def test_printed_table_and_headline(finished, name):
    run = finished(name)
    last = run.options["max_steps"]
    ends = [run.evaluations[step]["metrics"] for step in (0, last)]
    lines = run.printed.splitlines()
    head = next(n for n, line in enumerate(lines) if line.split() == f"step 0 step {last}".split())
    table = {}
    for line in lines[head + 1 :]:
        if not line.strip():
            break
        label, before, after = re.fullmatch(r"(.+?) +(\S+) +(\S+)", line).groups()
        table[label] = before, after
    known = {
        key.removeprefix("eval_").replace("_", " "): tuple(f"{end[key]:.3f}" for end in ends)
        for key in ends[0]
    }
    assert table == known
    first = {
        "orm": "AUC",
        "prm": "first error found",
        "kto": "exact match",
        "sft_own": "loss",
        **dict.fromkeys(("reward", "kwise"), "pair accuracy"),
    }.get(name, "exact match")
    names = {"AUC": "eval_auc", "first error found": "eval_first_error"}
    key = names.get(first, f"eval_{first.replace(' ', '_')}")
    values = " -> ".join(f"{end[key]:.3f}" for end in ends)
    assert lines[-1].startswith(f"{first} {values} (")
    if name in ANSWERING:
        assert f"greedy, {len(run.data.tasks.held_out)} held-out words, " in lines[-1]


@pytest.mark.parametrize("name", RECIPES)
def test_printed_lines_are_those_of_the_log(finished, name):
    run = finished(name)
    printed = [ast.literal_eval(line) for line in run.printed.splitlines() if line.startswith("{'")]
    assert len(printed) == len(run.log)
    for line, entry in zip(printed, run.log, strict=True):
        values = {key: float(value) for key, value in line.items()}
        own = {key: value for key, value in entry.items() if key not in ("step", "total_flos")}
        values.pop("total_flos", None)
        assert values == pytest.approx(own, rel=6e-4)


def test_selection_of_rejection_sampling(finished):
    run = finished("rejection_sampling")
    answers = oracles.sampled_answers(run)
    kept = json.loads((run.folder / "selection.json").read_text())
    known = oracles.selection(run, answers)
    for name in ("coverage", "random_coverage"):
        assert kept.pop(name) == pytest.approx(known.pop(name))
    assert kept == pytest.approx(known)
    line = next(x for x in run.printed.splitlines() if x.startswith("top_per_prompt: "))
    assert line == "top_per_prompt: " + ", ".join(f"{k} {v:.4g}" for k, v in known.items())


# 0 in every run, as they have to be here
SILENT = {
    "clip_ratio/low_min",  # TRL's minimum over completions: some have no advantage below 0
    "equal_rewards/max_advantage",  # what rounding leaves of equal rewards
}


def test_every_recipe_is_run():
    scripts = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert {recipe for recipe, *_ in RECIPES.values()} == scripts


def test_every_metric_moves(finished):
    """One that is 0 in all runs would be right by any oracle that returns 0."""
    largest = {}
    for name in RECIPES:
        for entry in finished(name).log:
            for key, value in entry.items():
                largest[key] = max(abs(value), largest.get(key, 0))
    assert {key for key, value in largest.items() if value == 0} == SILENT


def test_a_metric_without_an_oracle_fails_by_its_name(finished):
    run = finished("sft")
    entry = _parts(run)[0][0]
    expected = _trained("sft", run, 1)
    with pytest.raises(AssertionError, match=r"\{'new_metric'\}"):
        close(entry | {"new_metric": 1.0}, expected)
    with pytest.raises(AssertionError, match=r"\{'loss'\}"):
        close({k: v for k, v in entry.items() if k != "loss"}, expected)
