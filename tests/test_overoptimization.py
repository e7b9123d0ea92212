"""Over-optimization: what the command writes, and what a reward model does to a policy."""

import json
import shutil
import subprocess
from pathlib import Path

import overoptimization
import pytest

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError

ROOT = Path(__file__).parent.parent
TINY = ["--dataset.eval_size", "8", "--per_device_train_batch_size", "8", "--max_steps", "2"]


def finished(folder, gold, rewards, answers=()):
    """Write what a policy's run leaves behind: evaluations every 2 steps, a reward every step."""
    (folder / "evaluations").mkdir()
    log = [{"step": step + 1, "reward": reward} for step, reward in enumerate(rewards)]
    for n, value in enumerate(gold):
        metrics = {"eval_sampled_exact_match": value}
        log.append({"step": 2 * n, **metrics})
        content = {"metrics": metrics, "answers": answers[n] if answers else []}
        path = folder / "evaluations" / f"step-{2 * n:06d}.json"
        path.write_text(json.dumps(content))
    (folder / "log.json").write_text(json.dumps(log))
    (folder / "summary.json").write_text("{}")


@pytest.fixture
def done(tmp_path, monkeypatch, stand_in):
    """A folder in which every run of one seed is finished."""
    monkeypatch.chdir(tmp_path)

    def answers(text):
        return [{"question": "Spell sun", "answer": "nus", "sampled": text}]

    usual = "<think></think><answer>{}</answer>"
    weak = [answers(usual.format(word)) for word in ("sun", "nus", "nusSS")]

    def leave(folder, part, options):
        name = folder.parent.name
        if folder.parent.parent.name == "reward_models":
            after = {"eval_best_of_n": 0.64 if name == "weak" else 0.8}
            (part / "summary.json").write_text(json.dumps({"after": after}))
        elif name == "weak":
            finished(part, [0.3, 0.5, 0.0], [-1, 1, 3, 5], weak)
        else:
            finished(part, [0.3, 0.4, 0.5], [-1, 0, 0, 0], [answers("<answer>n|s")] * 3)

    run = subprocess.run
    stand_in(leave)
    overoptimization.overoptimize(tmp_path / "out", 1)
    monkeypatch.setattr(subprocess, "run", run)
    return tmp_path / "out"


def test_gold_and_proxy_by_step_their_peak_and_the_answers(done, capsys):
    main(["overoptimize", "--seeds", "1", "--output_dir", str(done)])  # nothing left to train
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        *["weak reward model", "0", "0.640", "2 of 4"],
        # the first batch; the batches of steps 1 and 2; those of 3 and 4
        *["0.300 -> 0.500 -> 0.000", "-1.00 -> 0.00 -> 4.00"],
    ]
    assert lines[4].split(" | ")[2:4] == ["0.800", "4 of 4"]
    assert lines[6].count("step 2 |") == 1 and lines[6].count("step 4 |") == 3
    assert lines[8] == r"| `nus` | `sun` | `nus` | `nusSS` | `<answer>n\|s` | `<answer>n\|s` |"
    assert (done / "overoptimization.md").read_text().splitlines() == lines[:9]
    assert (done / "overoptimization.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((done / "overoptimization.json").read_text())
    assert results["weak"][0]["gold"] == [[0, 0.3], [2, 0.5], [4, 0.0]]
    assert results["weak"][0]["proxy"] == [[0, -1], [2, 0.0], [4, 4.0]]


def test_other_options_are_not_mixed(done):
    with pytest.raises(SystemExit) as stop:
        main(["overoptimize", "--seeds", "1", "--output_dir", str(done), "--beta", "0.5"])
    assert f"{done}/weak/seed-0 holds a run with other settings (options)" in str(stop.value.code)


def test_edited_configs_and_models_trained_anew_are_noticed(done, monkeypatch, tmp_path, stand_in):
    copy = shutil.copytree(ROOT / "configs" / "tiny", tmp_path / "configs" / "tiny")
    monkeypatch.setattr(overoptimization, "home", lambda: tmp_path)
    overoptimization.overoptimize(done, 1)  # the same, in another place
    again = done.rename(done.with_name("again"))
    overoptimization.overoptimize(again, 1)
    config = copy / "weak_reward.yaml"
    config.write_text(config.read_text() + "warmup_steps: 3\n")
    weak = again / "reward_models" / "weak" / "seed-0"
    with pytest.raises(InputError, match=r"weak/seed-0 holds a .* settings \(warmup_steps\)"):
        overoptimization.overoptimize(again, 1)
    # a policy belongs to the reward model that it was trained on
    shutil.move(weak, tmp_path)
    stand_in(lambda folder, part, _: shutil.copy(tmp_path / "seed-0" / "summary.json", part))
    with pytest.raises(InputError, match=r"again/weak/seed-0 holds a .* settings \(options\)"):
        overoptimization.overoptimize(again, 1)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--seeds", "0"], "--seeds is 0; write 1 or more"),
        (["--jobs", "0"], "--jobs is 0; write 1 or more"),
        (["--output_dir", "LICENSE"], "LICENSE is a file; name a folder"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, monkeypatch, words, part):
    monkeypatch.chdir(ROOT)
    elsewhere = [] if "--output_dir" in words else ["--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["overoptimize", *elsewhere, *words])
    assert str(stop.value.code).startswith("error: ") and part in str(stop.value.code)


@pytest.mark.slow
@pytest.mark.promise
def test_the_whole_command_on_two_steps_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = {
        "extra": [*TINY, "--dataset.size", "40"],
        "reward_extra": [*TINY, "--dataset.size", "9"],
    }
    text = overoptimization.overoptimize(tmp_path, 1, **tiny)
    for name, setting in overoptimization.SETTINGS.items():
        assert setting.title in text
        config = (tmp_path / name / "seed-0" / "config.yaml").read_text()
        assert f"reward_model: {tmp_path}/reward_models/{setting.reward_model}/seed-0" in config
        assert ("beta: 1.0" in config) == (name == "weak_beta")
    results = json.loads((tmp_path / "overoptimization.json").read_text())
    assert [[step for step, _ in run["gold"]] for (run,) in results.values()] == [[0, 2]] * 3
    # one untrained policy, and one reward model for two of them
    assert results["weak"][0]["proxy"][0] == results["weak_beta"][0]["proxy"][0]
    assert results["weak"][0]["proxy"][0] != results["better"][0]["proxy"][0]


@pytest.mark.slow
@pytest.mark.promise
def test_a_wrong_option_is_the_recipes_own_sentence(done):
    for name in overoptimization.SETTINGS:
        shutil.rmtree(done / name)
    with pytest.raises(SystemExit) as stop:
        main(["overoptimize", "--seeds", "1", "--output_dir", str(done), "--betta", "1"])
    assert "betta" in str(stop.value.code) and "\n" not in str(stop.value.code)


# --- what the project promises


@pytest.mark.promise
def test_gold_rises_and_falls_while_the_proxy_rises_and_a_penalty_holds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    overoptimization.overoptimize(tmp_path, 3)
    results = json.loads((tmp_path / "overoptimization.json").read_text())
    for weak, held, better in zip(*results.values(), strict=True):
        gold, proxy = dict(weak["gold"]), dict(weak["proxy"])
        assert max(gold.values()) >= gold[0] + 0.10
        assert gold[80] <= 0.10 and proxy[80] - proxy[0] >= 4
        assert held["gold"][-1][1] >= 0.40
        assert min(value for step, value in better["gold"] if step >= 20) >= gold[80] + 0.30


@pytest.mark.promise
@pytest.mark.parametrize(
    ("recipe", "config", "kind"),
    [
        ("grpo", "grpo_reward", "reward"),
        ("grpo", "grpo_orm", "orm"),
        ("grpo", "grpo_prm", "prm"),
        ("ppo", "ppo_reward", "reward"),
    ],
)
def test_every_kind_of_reward_model_teaches(run, tmp_path, recipe, config, kind):
    trained, _ = run(kind, kind, folder=tmp_path / "reward")
    words = ["--reward_model", trained / "model"]
    folder, _ = run(recipe, config, *words, folder=tmp_path / "policy")
    summary = json.loads((folder / "summary.json").read_text())
    for metric in ("eval_exact_match", "eval_sampled_exact_match"):
        assert summary["after"][metric] >= summary["before"][metric] + 0.15
