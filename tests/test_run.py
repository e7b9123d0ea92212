"""What runs say before and after training: models that are missing, lengths, times, counts."""

import json
import logging
import re
from types import SimpleNamespace

import pytest
from trl import DPOConfig, KTOConfig, SFTConfig

from rlhf_trl.algorithms import algorithm
from rlhf_trl.data.gym import Spec
from rlhf_trl.data.judgments import SampledTraces, load_traces
from rlhf_trl.data.steps import LETTERS
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation import report
from rlhf_trl.run.folders import model_folder
from rlhf_trl.run.kinds import kind_of
from rlhf_trl.run.tied_weights import tied_weights_are_no_news

SMALL = [
    *["--dataset.size", 40, "--dataset.eval_size", 4, "--max_steps", 2],
    *["--num_generations", 4, "--per_device_train_batch_size", 8],
]


@pytest.mark.parametrize(
    ("recipe", "config", "field", "name", "how"),
    [
        ("grpo", "grpo_orm", "reward_model", "orm/model", " (configs/tiny/orm.yaml)"),
        ("grpo", "grpo_reward", "reward_model", "reward", " (configs/tiny/reward.yaml)"),
        ("grpo", "grpo_reward", "reward_model", "mine/model", ""),
        ("distill", "opd", "teacher_models", "grpo/model", " (configs/tiny/grpo.yaml)"),
        ("rejection_sampling", "rejection_sampling_reward", "reward_model", "x/model", ""),
    ],
)
def test_a_model_that_is_not_there_is_named(refused, tmp_path, recipe, config, field, name, how):
    missing = tmp_path / name
    sentence = refused(recipe, config, f"--{field}", missing)
    remedy = f"train it first{how}, or name another."
    assert sentence == f"error: {field}: there is no folder {missing}; {remedy}"


def test_a_run_stands_for_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("outputs/reward/model", "plain/model"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "plain" / "config.json").touch()
    assert model_folder("reward_model", "outputs/reward") == "outputs/reward/model"
    for name in ("outputs/reward/model", "plain", "org/model", "gpt2"):
        assert model_folder("reward_model", name) == name
    for name in ("outputs/orm", "outputs/orm/model", "./orm", "~/orm"):
        with pytest.raises(InputError, match=f"there is no folder {name}; "):
            model_folder("reward_model", name)


@pytest.mark.parametrize("steps", [-5, -2, 0])
def test_a_number_of_steps_that_is_none_is_refused(refused, steps):
    sentence = refused("grpo", "grpo", *SMALL, f"--max_steps={steps}")
    assert f"max_steps is {steps}" in sentence and "write 1 or more" in sentence


def test_a_resumed_run_counts_and_times_all_of_its_steps(run, tmp_path, caplog, monkeypatch):
    saving = [*SMALL, "--save_strategy", "steps", "--save_steps", 2, "--save_checksums", "false"]
    whole, out = run("grpo", "grpo", *saving, folder=tmp_path / "whole")
    assert out.count("\nseen in training: 16 completions\n") == 1
    state = whole / "checkpoint-2" / "trainer_state.json"
    later, count = re.subn(r'(seconds": )\d\.', r"\g<1>9.", state.read_text())
    state.write_text(later)
    assert count == 2
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    longer = [*saving, "--max_steps", 3, "--resume_from_checkpoint", "auto"]
    _, out = run("grpo", "grpo", *longer, folder=whole)
    assert "\nseen in training: 24 completions\n" in out
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["train_seconds"] > 9 and summary["train_cpu_seconds"] > 9
    # the output layer is the embedding, and saved under that name only
    assert "missing keys" not in caplog.text


def test_only_tied_weights_may_be_missing_in_silence(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    model = SimpleNamespace(all_tied_weights_keys={"lm_head.weight": "embed.weight"})
    logger = logging.getLogger("transformers.trainer")
    start = "There were missing keys in the checkpoint model loaded: "
    more = f"{start}['lm_head.weight', 'norm.weight']."
    with tied_weights_are_no_news(model):
        logger.warning(f"{start}['lm_head.weight'].")
        logger.warning(more)
    assert {*caplog.messages} == {more}


def test_the_columns_of_the_table_stand_below_each_other():
    names = ("eval_reward", "eval_sampled_reward_with_penalties", "eval_auc")
    metrics = dict.fromkeys(names, 0.5)
    lines = report.table({n: {"metrics": metrics, "answers": []} for n in (0, 5)}).splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "reward",
        "sampled reward with penalties",
        "auc",
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("name", "config", "kind"),
    [
        ("dpo", DPOConfig, "pairs"),
        ("kto", KTOConfig, "answers"),
        ("reward", None, "pairs"),
        ("kwise", None, "ranked lists"),
        ("orm", None, "answers"),
        ("prm", None, "traces"),
        (None, SFTConfig, "answers"),
    ],
)
def test_what_the_examples_of_a_step_are_called(tmp_path, name, config, kind):
    how = {"use_cpu": True, "bf16": False, "output_dir": str(tmp_path)}
    args = SimpleNamespace() if config is None else config(**how)
    assert kind_of(args, name and SimpleNamespace(algorithm=name)) == kind
    assert name is None or algorithm(name)


def test_blank_traces_are_counted_on_both_sides():
    gym = {"specs": [Spec("spell_backward")], "size": 12, "eval_size": 6}
    block = SampledTraces(**gym, candidates=0, samples_per_prompt=1, step_split=LETTERS)

    def sample(rows, count, side):  # a blank answer, a right and a wrong one, and so on
        blank = "" if side == "train" else "x"
        answers = [[blank, row["answer"], "zzz"][n % 3] for n, row in enumerate(rows)]
        texts = [text and f"<think></think><answer>{text}</answer>" for text in answers]
        return [{**row, "completion": text} for row, text in zip(rows, texts, strict=True)]

    found = load_traces(block, None, sample)
    assert found.dropped == {"a blank answer has no steps": 4}
    assert found.dropped_held_out == {"a blank answer has no steps": 0}
