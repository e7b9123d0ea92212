"""`rlhf-trl translate --explain`: each field on both sides, and how much is trained on each."""

import pytest
import yaml

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import explain, read_book, translate
from rlhf_trl.ports.book_fields import DEFAULTS
from rlhf_trl.ports.explain import entries_of_book
from rlhf_trl.ports.quantities import quantities
from rlhf_trl.run.yaml_loader import read_yaml

GYM = {"data": {"size": 1000, "specs": [{"name": "spell_backward"}]}}
OF_KIND = {
    "policy_gradients": {"loss": "grpo", **GYM},
    "distillation": {"loss": "sdpo", **GYM},
    "direct_alignment": {"loss": "dpo", "dataset_name": "me/pairs"},
    "instruction_tuning": {"chat_template_source": "me/model"},
    "rejection_sampling": {"selection": {"strategy": "top_k_overall"}},
    "reward_models": {"model_id": "me/model"},
}


@pytest.fixture
def sheet(tmp_path):
    """Read a config of the book's code, with its translation."""

    def sheet(**config):
        path = tmp_path / "book.yaml"
        path.write_text(yaml.safe_dump(config))
        return read_book(path, read_yaml(path))

    return sheet


@pytest.mark.parametrize("kind", DEFAULTS)
def test_every_field_of_the_code_has_its_line(sheet, kind):
    found = entries_of_book(sheet(**OF_KIND[kind]))
    assert [entry.field for entry in found if entry.field] == list(DEFAULTS[kind])
    for entry in found:
        assert entry.meaning
        assert (entry.verdict == "not carried over") <= (not entry.here)
        if entry.verdict == "differs":
            assert "the book's code " in entry.note and "; here " in entry.note
        if entry.verdict == "not carried over" and entry.value is not None:
            assert entry.note, entry.field  # why it is not


def test_the_verdicts(sheet):
    entries = entries_of_book(sheet(**OF_KIND["direct_alignment"], learning_rate=1e-6))
    entries = {entry.field: entry for entry in entries}
    rate, passes, logs = (entries[n] for n in ("learning_rate", "num_epochs", "log_every"))
    assert (rate.verdict, rate.value, dict(rate.here)) == ("same", 1e-6, {"learning_rate": 1e-6})
    assert (passes.verdict, dict(passes.here)) == ("converted", {"num_train_epochs": 1})
    assert (logs.verdict, logs.note) == (
        "differs",
        "the book's code does not read it and logs every step; here steps between logs",
    )
    assert entries["eval_every"].verdict == "not carried over"


# kind and edits -> the numbers on both sides, worked out by hand from the loops of the book's code
COUNTED = {
    "batches in buffers": (
        {**OF_KIND["policy_gradients"], "prompts_per_step": 6, "num_rollouts": 4, "batch_acc": 3},
        {
            "completions per optimizer step": (6, 6),  # 2 x 3
            "completions per buffer": (24, 24),
            "optimizer steps per buffer": (4, 4),  # 24 / 2 / 3
            "buffers": (166, 166),  # 1000 // 6: the last four questions are left out
            "optimizer steps": (664, 664),
            "generated tokens at most": (166 * 24 * 512, 166 * 24 * 512),
        },
    ),
    "groups with contrast": (
        {**OF_KIND["policy_gradients"], "loss": "dapo", "batch_acc": 2},
        {"optimizer steps": ("2 for each group with contrast", 250 * 8)},
    ),
    "a left-over micro-batch": (
        # 103 / 4 are 26 batches: 6 steps of 4, and one of 2; the schedule knows of the 6 alone
        {**OF_KIND["direct_alignment"], "max_samples": 103, "num_epochs": 2, "warmup_ratio": 0.3},
        {
            "optimizer steps in a pass": (7, 7),
            "optimizer steps": (14, 14),
            "warm-up steps": (3, 4),  # int(0.3 x 12) and int(0.3 x 14)
        },
    ),
    "pairs as completions": (
        {**OF_KIND["direct_alignment"], "loss": "kto", "max_samples": 64},
        {"completions per optimizer step": (32, 32), "optimizer steps": (4, 4)},
    ),
    "what an epoch of instruction tuning drops": (
        # 95 / 4 are 24 batches: 4 steps of 5, and 4 batches that are left
        {"chat_template_source": "m", "max_samples": 95, "gradient_accumulation_steps": 5},
        {"optimizer steps in a pass": (4, 5), "optimizer steps": (12, 15)},
    ),
    "answers that were selected": (
        {**OF_KIND["rejection_sampling"], "train_batch_size": 2, "batch_acc": 4},
        {"examples in a pass": (500, 500), "optimizer steps": (126, 126)},  # 2 x ceil(250 / 4)
    ),
    "an incomplete batch of a reward model": (
        # 101 less 11 held out are 90: 30 batches of 3 and 4 steps; of 4: 22 there, 23 here
        {"model_id": "m", "samples": 101, "batch_size": 4, "grad_accum_steps": 11, "epochs": 1},
        {"examples in a pass": (90, 90), "optimizer steps": (2, 3)},
    ),
    "distillation": (
        {**OF_KIND["distillation"], "num_steps": 30, "warmup_ratio": 0.05},
        {"completions per optimizer step": (32, 32), "warm-up steps": (1, 1)},
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_is_trained_on_both_sides(sheet, case):
    config, expected = COUNTED[case]
    found = {one.name: (one.code, one.here) for one in quantities(sheet(**config))}
    assert {name: found[name] for name in expected} == expected


def test_where_the_rows_are_not_known_no_number_is_named(sheet):
    config = {**OF_KIND["direct_alignment"], "max_samples": None}
    found = {one.name: one.code for one in quantities(sheet(**config))}
    assert found["examples"] == "as many as there are rows" and "optimizer steps" not in found


def test_the_command_prints_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "book.yaml"
    path.write_text(yaml.safe_dump(OF_KIND["policy_gradients"] | {"lr": 3e-6}))
    main(["translate", str(path), "--explain"])
    out = capsys.readouterr().out
    assert out == explain(path) + "\n"
    assert "lr " in out and "learning_rate: 3e-06" in out
    [same, converted, differs, left_out] = [
        int(part.rpartition(" ")[2]) for part in out.splitlines()[0].split(", ")
    ]
    rows = [line for line in out.splitlines() if line and line[0] not in " q"]
    assert sum(" differs " in line for line in rows) == differs
    assert same + converted + left_out > 30
    # a note that several fields share stands once
    assert out.count("the book's code samples with these and scores at 1") == 1
    assert "note: as at temperature" in out
    line = next(line for line in out.splitlines() if line.startswith("optimizer steps per buffer"))
    assert line.split()[-3:] == ["same", "4", "4"]
    with pytest.raises(SystemExit, match="--output is not read with --explain"):
        main(["translate", str(path), "--explain", "--output", str(tmp_path / "x.yaml")])


def test_configs_of_trl_have_the_same_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "trl.yaml"
    config = {"model_name_or_path": "m", "dataset_name": "d", "loss_type": "ipo", "beta": 0.2}
    path.write_text(yaml.safe_dump(config | {"gradient_accumulation_steps": 3}))
    main(["translate", str(path), "--command", "dpo", "--explain"])
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines if line and line[0] != " "}
    assert cells["beta"] == ["same", "0.2", "beta:", "0.2"]
    assert cells["loss_type"] == ["same", "ipo", "algorithm:", "ipo;", "loss_type:", "ipo"]
    assert cells["dataset_name"] == ["converted", "d", "dataset"]
    assert cells["examples"][-2:] == ["24", "24"]  # 8, which is TRL's default, times 3


# --- edited configs ------------------------------------------------------------------------------


def translated(sheet, **config):
    return {name: line.value for name, line in sheet(**config).lines.items()}


def test_another_model_and_length(sheet):
    edits = {"model_name": "Qwen/Qwen3-0.6B", "max_length": 512}
    found = translated(sheet, **OF_KIND["direct_alignment"], **edits)
    assert (found["model_name_or_path"], found["max_length"]) == ("Qwen/Qwen3-0.6B", 512)
    found = translated(sheet, **OF_KIND["instruction_tuning"], **edits)
    # its own template is kept: the other one is for a tokenizer that has none
    assert found["chat_template_fallback"] == "me/model" and "chat_template_path" not in found


@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_another_kl(sheet, loss):
    buffers = {"prompts_per_step": 16, "num_rollouts": 8}
    edits = {"loss": loss, "beta": 0.02, "kl_estimator": "kl2", **buffers}
    found = translated(sheet, **GYM, **edits)
    assert (found["beta"], found["kl_estimator"]) == (0.02, "k2")
    found = translated(sheet, **GYM, **edits | {"beta": 0.0})
    assert (found["beta"], found["kl_estimator"]) == (0.0, "k2")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"loss": "dapo", "beta": 0.1, **GYM}, "beta"),
        ({"loss": "dpo", "beta": 0.0}, "beta"),
        ({"loss": "dpo", "max_prompt_length": 512}, "max_prompt_length"),
        ({"loss": "dpo", "ref_model_name": "other/model"}, "ref_model_name"),
        ({"loss": "grpo", "l_cahce": 64, **GYM}, "l_cahce"),
    ],
)
def test_what_does_not_carry_over_is_refused_by_name(sheet, tmp_path, config, name):
    path = tmp_path / "edited.yaml"
    path.write_text(yaml.safe_dump(config))
    for read in (translate, explain):
        with pytest.raises(InputError, match=name):
            print(read(path))
