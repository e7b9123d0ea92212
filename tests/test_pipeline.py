"""A pipeline: its YAML, the words its stages get, what is repeated, and the whole command."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
from own_model import transcripts, write_lines

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.pipeline import command
from rlhf_trl.pipeline.command import pipeline
from rlhf_trl.pipeline.plan import read_plan
from rlhf_trl.run.config import read_config
from rlhf_trl.run.options import read_options

ROOT = Path(__file__).parent.parent
TINY = ROOT / "configs" / "tiny"
STAGES = {
    "reward": {"config": f"{TINY}/reward.yaml", "dataset": {"size": 30}},
    "dpo": {"config": f"{TINY}/dpo.yaml", "title": "DPO", "beta": 1.0},
    "grpo": {"config": f"{TINY}/grpo_reward.yaml", "reward_model": "reward"},
}


def written(path, **changed):
    """Write a pipeline's YAML with changed keys; return its path."""
    content = {
        "output_dir": str(path / "out"),
        "common": {"model_name_or_path": "tiny", "dataset": {"size": 20, "eval_size": 8}},
        "stages": STAGES,
        "answers": {"proxy": "reward", "gold": "exact_match"},
    }
    file = path / "mine.yaml"
    file.write_text(json.dumps({**content, **changed}))  # JSON is YAML, too
    return str(file)


def test_a_stage_has_the_common_keys_over_its_config_and_its_own_over_these(tmp_path):
    plan = read_plan(written(tmp_path))
    reward, dpo, grpo = plan.stages.values()
    assert (reward.value("dataset.size"), dpo.value("dataset.size")) == (30, 20)
    assert reward.value("dataset.eval_size") == dpo.value("dataset.eval_size") == 8
    assert reward.value("dataset.pairs") == "mixed"  # of its config
    assert (dpo.value("beta"), dpo.title, grpo.title) == (1.0, "DPO", None)
    assert dpo.value("title") is None and dpo.value("config") is None
    dpo.write(tmp_path / "deep" / "dpo.yaml")
    config = read_config(tmp_path / "deep" / "dpo.yaml")
    assert config == {**read_config(TINY / "dpo.yaml"), "beta": 1.0, "dataset": config["dataset"]}
    assert {"size": 20, "eval_size": 8, "pairs": "on_policy"}.items() <= config["dataset"].items()
    assert [planned.stage.name for planned in plan.stages.values()] == ["reward", "dpo", "grpo"]
    assert (reward.inputs, grpo.inputs) == ({}, {"reward_model": ["reward"]})
    assert (plan.answers.prompts_of, plan.answers.samples) == ("grpo", 4)
    assert read_plan(written(tmp_path), "elsewhere").folder == Path("elsewhere")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"stage": {}}, "stage is no key of a pipeline (did you mean 'stages'?)"),
        ({"stages": []}, "stages is missing; list each as NAME: {config: PATH}"),
        ({"output_dir": None}, "output_dir is missing"),
        ({"common": 3}, "common is 3; write keys and values below it"),
        ({"stages": {"a b": {}}}, "'a b' cannot be the name of a stage"),
        ({"stages": {"answers": {}}}, "'answers' cannot be the name of a stage"),
        ({"stages": {"grpo": {}}}, "stages.grpo.config is missing"),
        ({"stages": {"grpo": {"config": "no.yaml"}}}, "no.yaml: the config cannot be read"),
        (
            {
                "stages": {
                    "reward": STAGES["reward"],
                    "grpo": {**STAGES["grpo"], "reward_model": "rewrad"},
                }
            },
            "stages.grpo.reward_model: rewrad is no stage before it, no folder, so there is no "
            "model to read; name an earlier stage, the folder of a model or OWNER/NAME on the hub "
            "(did you mean 'reward'?)",
        ),
        (
            {"stages": {"grpo": STAGES["grpo"], "reward": STAGES["reward"]}},
            "stages.grpo.reward_model: reward stands after it, so there is no model to read",
        ),
        (
            {"stages": {"grpo": {"config": f"{TINY}/grpo_reward.yaml"}}},
            "stages.grpo.reward_model: outputs/reward/model is no stage before it, no folder",
        ),
        ({"answers": {"proxi": 3}}, "answers.proxi is no key here (did you mean 'proxy'?)"),
        ({"answers": {"proxy": "dpo"}}, "answers.proxy is dpo; name one of reward"),
        ({"answers": {"samples": 0}}, "answers.samples is 0; write 1 or more"),
        ({"answers": {"probes": 3}}, "answers.probes is 3; name a file"),
        ({"answers": {"probes": "no.jsonl"}}, "no.jsonl cannot be read (No such file"),
        ({"stages": {"reward": STAGES["reward"]}, "answers": {}}, "no stage trains a policy"),
    ],
)
def test_mistakes_in_the_yaml_are_one_sentence(tmp_path, monkeypatch, changed, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        read_plan(written(tmp_path, **changed))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def trained(tmp_path, monkeypatch, stand_in):
    """Let a pipeline's runs, its evaluation and its page be stand-ins; return what they were."""
    calls = {"answers": [], "pages": [], "previews": []}

    def leave(folder, options):
        config = read_config(options["--config"])
        (folder / "config.yaml").write_text(json.dumps(config))
        summary = {"model_step": 2, "model_sha256": f"of {folder.parent.name}"}
        (folder / "summary.json").write_text(json.dumps(summary))

    def evaluate(models, answers, **options):
        calls["answers"].append((models, options))
        Path(answers).parent.mkdir(exist_ok=True)
        Path(answers).write_text("{}\n")
        return json.dumps({"models": {model: {} for model in models}})

    def preview(config, words):
        calls["previews"].append((config, read_options(words)))
        return {"rows": 3}

    def write_page(folder):
        calls["pages"].append(folder)
        return folder / "page.html"

    calls["runs"] = stand_in(leave)
    monkeypatch.setattr(command, "evaluate", evaluate)
    monkeypatch.setattr(command, "preview", preview)
    monkeypatch.setattr(command, "write_page", write_page)
    monkeypatch.chdir(tmp_path)
    return calls


def test_stages_are_trained_in_order_with_each_seed_and_then_answer(tmp_path, trained, capsys):
    out = tmp_path / "out"
    page = pipeline(written(tmp_path), 2)
    assert page == out / "page.html" and trained["pages"] == [out]
    places = [f"{out}/{name}/seed-{seed}" for seed in (0, 1) for name in STAGES]
    assert [folder for folder, _ in trained["runs"]] == places
    words = dict(trained["runs"])
    grpo = words[f"{out}/grpo/seed-1"]
    assert grpo["--reward_model"] == f"{out}/reward/seed-1/model"
    assert (grpo["--seed"], grpo["--config"]) == ("1", f"{out}/configs/grpo.yaml")
    assert read_config(out / "configs" / "dpo.yaml")["beta"] == 1.0
    models, options = trained["answers"][1]
    assert models == ["tiny", f"{out}/dpo/seed-1", f"{out}/grpo/seed-1"]
    assert options["reward_model"] == f"{out}/reward/seed-1"
    assert (options["reference"], options["samples"]) == ("tiny", 4)
    written_json = json.loads((out / "pipeline.json").read_text())
    assert (written_json["seeds"], [*written_json["stages"]]) == (2, [*STAGES])
    assert written_json["stages"]["dpo"]["title"] == "DPO"
    # nothing is left to do, but for the page
    pipeline(written(tmp_path), 2)
    assert len(trained["runs"]) == 6 and len(trained["answers"]) == 2
    assert len(trained["pages"]) == 2


def test_the_data_of_the_first_stage_with_pairs_are_counted(tmp_path, trained):
    out = tmp_path / "out"
    stages = {"grpo": {"config": f"{TINY}/grpo.yaml"}, "dpo": STAGES["dpo"]}
    answers = {"gold": "exact_match"}
    pipeline(written(tmp_path, stages=stages, answers=answers), words=["--dataset.seed", "3"])
    config, options = trained["previews"][0]
    assert config == f"{out}/configs/dpo.yaml" and options["beta"] == 1.0
    assert options["dataset"]["seed"] == 3
    assert json.loads((out / "preview.json").read_text()) == {"dpo": {"rows": 3}}
    alone = {"other": {"config": f"{TINY}/grpo.yaml"}}
    path = written(tmp_path, stages=alone, answers=answers)
    pipeline(path, output_dir=str(tmp_path / "alone"))
    assert trained["previews"][1][0] == f"{tmp_path}/alone/configs/other.yaml"


def test_a_stage_may_read_models_of_stages_and_others(tmp_path, trained):
    teachers = {"config": f"{TINY}/opd.yaml", "teacher_models": ["dpo", "owner/name", "reward"]}
    stages = {**STAGES, "opd": teachers}
    job = command._job(read_plan(written(tmp_path, stages=stages)), "opd", 1, [])
    out = tmp_path / "out"
    place = job.words.index("--teacher_models")
    named = [f"{out}/dpo/seed-1/model", "owner/name", f"{out}/reward/seed-1/model"]
    assert job.words[place + 1 : place + 4] == named
    assert job.after == [out / "dpo" / "seed-1", out / "reward" / "seed-1"]


def test_a_model_that_was_trained_anew_answers_anew(tmp_path, trained):
    pipeline(written(tmp_path))
    path = tmp_path / "out" / "grpo" / "seed-0" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_sha256": "another"}))
    pipeline(written(tmp_path))
    assert len(trained["answers"]) == 2
    pipeline(written(tmp_path, answers={"proxy": "reward", "samples": 2}))
    assert trained["answers"][2][1]["samples"] == 2


def test_every_checkpoint_answers_if_asked(tmp_path, trained):
    pipeline(written(tmp_path))
    out = tmp_path / "out"
    for step in (1, 2):
        (out / "grpo" / "seed-0" / f"checkpoint-{step}").mkdir()
    pipeline(written(tmp_path, answers={"checkpoints": True}))
    grpo = f"{out}/grpo/seed-0"
    # that of the last step is the run's model itself
    assert trained["answers"][1][0] == ["tiny", f"{out}/dpo/seed-0", f"{grpo}/checkpoint-1", grpo]


def test_the_ends_of_runs_answer_probes_in_files_of_their_own(tmp_path, trained):
    answers = {"proxy": "reward", "gold": "exact_match", "checkpoints": True}
    file = tmp_path / "mine.jsonl"
    file.write_text('{"category": "safety", "prompt": "May I?"}\n')
    path = written(tmp_path, answers={**answers, "probes": "mine.jsonl"})
    pipeline(path)
    out = tmp_path / "out"
    (models, options), (probed, options_of_probes) = trained["answers"]
    assert (options["probes"], options_of_probes["probes"]) == (None, str(file))
    assert models == probed == ["tiny", f"{out}/dpo/seed-0", f"{out}/grpo/seed-0"]
    assert sorted(file.name for file in (out / "answers").iterdir()) == [
        *("probes-seed-0.json", "probes-seed-0.jsonl", "seed-0.json", "seed-0.jsonl"),
    ]
    (out / "grpo" / "seed-0" / "checkpoint-1").mkdir()
    file.write_text('{"category": "safety", "prompt": "May I not?"}\n')
    pipeline(path)  # another checkpoint asks the prompts again, other probes these
    (models, _), (probed, _) = trained["answers"][2:]
    assert f"{out}/grpo/seed-0/checkpoint-1" in models
    assert probed == ["tiny", f"{out}/dpo/seed-0", f"{out}/grpo/seed-0"]
    pipeline(path)
    assert len(trained["answers"]) == 4


def test_an_edited_config_is_refused_and_options_go_to_all_stages(tmp_path, trained):
    path = written(tmp_path)
    pipeline(path, words=["--dataset.seed", "3"])
    assert all(options["--dataset.seed"] == "3" for _, options in trained["runs"])
    with pytest.raises(InputError, match=r"reward/seed-0 holds a run with other settings \(opt"):
        pipeline(path)
    changed = {**STAGES, "grpo": {**STAGES["grpo"], "learning_rate": 1e-5}}
    with pytest.raises(InputError, match=r"grpo/seed-0 holds .* settings \(learning_rate\)"):
        pipeline(written(tmp_path, stages=changed), words=["--dataset.seed", "3"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["no.yaml"], "no.yaml: the config cannot be read"),
        (["mine.yaml", "--seeds", "0"], "--seeds is 0; write 1 or more"),
        (["mine.yaml", "--jobs", "0"], "--jobs is 0; write 1 or more"),
        (["mine.yaml", "--output_dir", "mine.yaml"], "mine.yaml is a file; name a folder"),
        (["mine.yaml", "--betta", "1"], "betta"),
        (["mine.yaml", "--accelerate", "no.yaml"], "--accelerate: no.yaml is not a file"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_trains(tmp_path, trained, words, sentence):
    written(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["pipeline", *words])
    assert sentence in str(stop.value.code) and "\n" not in str(stop.value.code)
    assert not trained["runs"]


def test_two_pipelines_do_not_share_a_folder(tmp_path, trained):
    (tmp_path / "out").mkdir()
    program = "from pathlib import Path; from rlhf_trl.output import hold; import sys; "
    program += "hold(Path(sys.argv[1])); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match="is in use by another run"):
            pipeline(written(tmp_path))
        other.stdin.close()
    assert not trained["runs"]


# --- what the project promises

SHORT = [
    *("--max_steps", "6", "--save_steps", "2", "--eval_steps", "3", "--dataset.size", "140"),
    *("--dataset.eval_size", "16"),
]


def started(out):
    """Start the tiny pipeline in a process of its own."""
    path = str(ROOT / "configs" / "pipeline" / "tiny.yaml")
    words = ["pipeline", path, "--output_dir", str(out), *SHORT]
    command = [sys.executable, "-m", "rlhf_trl.cli", *words]
    # what runs in the background of a shell ignores SIGINT, and so would its children
    return psutil.Popen(
        command, cwd=ROOT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )


def until(condition, process, seconds=300):
    """Wait until a condition holds, while a process runs."""
    end = time.time() + seconds
    while not condition():
        assert process.poll() is None and time.time() < end
        time.sleep(0.02)


def weights(out):
    """Return the hashes of all models of a pipeline, by path."""
    files = sorted(out.glob("*/seed-0/*/*.safetensors"))
    models = [path for path in files if "checkpoint" not in str(path)]
    return {str(path.relative_to(out)): sha256(path.read_bytes()).hexdigest() for path in models}


@pytest.mark.slow
@pytest.mark.promise
def test_a_pipeline_killed_in_every_stage_ends_equal(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert started(whole).wait() == 0
    names = [*read_plan(str(ROOT / "configs" / "pipeline" / "tiny.yaml")).stages]
    for name in names:
        process = started(killed)
        saved = killed / name / "seed-0" / "checkpoint-2" / "manifest.json"
        until(
            lambda saved=saved: saved.exists() or saved.parent.parent.joinpath("model").exists(),
            process,
        )
        for worker in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        process.wait()
    assert started(killed).wait() == 0
    assert len(weights(whole)) == 7 and weights(killed) == weights(whole)  # PPO has two models
    for name in names:
        cost = json.loads((killed / name / "seed-0" / "cost.json").read_text())
        printed = (killed / name / "seed-0" / "output.txt").read_text()
        assert cost["starts"] == 1 and "resuming from" in printed  # the killed one counts nothing
    lines = (whole / "answers" / "seed-0.jsonl").read_text().splitlines()
    again = (killed / "answers" / "seed-0.jsonl").read_text().splitlines()
    assert [[*json.loads(line).values()] for line in lines] == [
        [*json.loads(line).values()] for line in again
    ]


@pytest.mark.slow
@pytest.mark.promise
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_and_the_last_step(tmp_path, number):
    process = started(tmp_path / "out")
    run = tmp_path / "out" / "reward" / "seed-0"
    until(lambda: (run / "checkpoint-2" / "manifest.json").exists(), process)
    workers = process.children(recursive=True)
    assert len(workers) >= 2  # a launcher and what it launched
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not any(worker.is_running() for worker in workers)
    assert "stopped by SIGTERM at step" in (run / "output.txt").read_text()


@pytest.mark.promise
@pytest.mark.slow
def test_the_demo_of_pairs_runs_whole_on_a_folder_of_transcripts(
    tmp_path, monkeypatch, own_model, capfd
):
    data = tmp_path / "data"
    data.mkdir()
    rows = transcripts()
    write_lines(data / "train.jsonl", rows)  # the demo takes the first ten
    write_lines(data / "test.jsonl", rows[-20:])
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    options = ["--model_name_or_path", str(own_model), "--dataset.path", str(data)]
    options += ["--dtype", "float32", "--bf16", "false", "--use_cpu"]
    main(["pipeline", "configs/pipeline/demo.yaml", "--output_dir", str(out), *options])
    assert "6 models answer" in capfd.readouterr().out
    assert {"page.html", "table.md", "frontier.png"} <= {path.name for path in out.iterdir()}

    stages = json.loads((out / "pipeline.json").read_text())["stages"]
    assert [*stages] == ["reward", "sft", "rejection_sampling", "dpo", "ppo", "grpo"]
    for name in stages:
        summary = json.loads((out / name / "seed-0" / "summary.json").read_text())
        assert (summary["steps"], summary["held_out"]) == (2, 4)
    preview = json.loads((out / "preview.json").read_text())["reward"]
    left_out = preview["left_out"]["the prompt is in no slice to train on"]
    assert preview["train"]["rows"] + left_out == 10 and 0 < left_out < 10
    assert preview["overlap"] == 0 and preview["held_out"]["rows"] == 4
    # all answered what is held out, the last questions of transcripts that are not trained on
    lines = (out / "answers" / "seed-0.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    asked = {line["prompt"][-1]["content"] for line in answers}
    last = [row["chosen"].rpartition("Human: ")[2].partition("\n")[0] for row in rows]
    assert len(asked) == 4 and asked <= {*last[-20:]}
    runs = {f"{out}/{name}/seed-0" for name in stages if name != "reward"}
    assert all(line.keys() == {"prompt", str(own_model), *runs} for line in answers)
