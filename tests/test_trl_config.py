"""Configs of TRL's commands, translated for the recipes: every field is what TRL makes of it."""

from dataclasses import fields

import pytest
import trl
from trl.experimental.orpo import ORPOConfig

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import translate
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.yaml_loader import dump_yaml

MODEL = {"model_name_or_path": "embedded", "dataset_name": "rows.jsonl"}
MACHINE = {"output_dir": "outputs/x", "use_cpu": True, "bf16": False, "report_to": "none"}
CASES = [
    ("grpo", trl.GRPOConfig, {"num_generations": 4, "per_device_train_batch_size": 8}, "dapo"),
    (
        "grpo",
        trl.GRPOConfig,
        {"num_generations": 4, "loss_type": "cispo", "epsilon_high": 5.0},
        "cispo",
    ),
    ("grpo", trl.GRPOConfig, {"loss_type": "grpo", "epsilon": 0.3, "num_iterations": 2}, "grpo"),
    ("dpo", trl.DPOConfig, {"max_length": 512}, "dpo"),
    ("dpo", trl.DPOConfig, {"loss_type": ["ipo"], "beta": 0.2}, "ipo"),
    ("kto", trl.KTOConfig, {"desirable_weight": 2.0}, "kto"),
    ("orpo", ORPOConfig, {"beta": 0.3, "max_length": 256}, "orpo"),
    ("reward", trl.RewardConfig, {"center_rewards_coefficient": 0.01}, "reward"),
    ("sft", trl.SFTConfig, {"packing": True, "max_length": 128}, None),
]


@pytest.mark.parametrize(("command", "config", "given", "algorithm"), CASES, ids=str)
def test_every_field_is_what_trl_makes_of_it(command, config, given, algorithm, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **given, "learning_rate": 1e-4}))
    (tmp_path / "ours.yaml").write_text(translate(path, command=command))
    loaded = STAGES[command].load(["--config", str(tmp_path / "ours.yaml")])
    stock = config(**MACHINE, **given, learning_rate=1e-4)
    # evaluation's answers here; TRL reads it for encoder-decoder models only
    moved = {"max_completion_length"} if command == "orpo" else set()
    if command == "grpo":
        moved = {"epsilon_high", "use_bias_correction_kl"}  # the latter's KL has no weight
        if given.get("loss_type") != "cispo":
            assert loaded.trl.epsilon_high == stock.epsilon  # what TRL makes of None
    assert {
        field.name: getattr(loaded.trl, field.name)
        for field in fields(stock)
        if field.init and field.name not in moved
    } == {
        field.name: getattr(stock, field.name)
        for field in fields(stock)
        if field.init and field.name not in moved
    }
    assert loaded.own.dataset.path == "rows.jsonl"
    assert getattr(loaded.own, "algorithm", None) == algorithm
    assert getattr(loaded.trl, "overlong", None) is None
    assert not loaded.trl.evaluate_examples and not loaded.trl.refuse_non_finite
    if given.get("loss_type") == "cispo":
        assert loaded.trl.epsilon_high == 4.0 and loaded.row.row.trl_offset["epsilon_high"] == 1


@pytest.mark.parametrize(
    ("given", "command", "sentence"),
    [
        ({"max_length": 512}, None, r"its fields fit `trl dpo`, .* --command dpo"),
        ({"loss_typo": "x"}, None, r"loss_typo is no field of TRL's \(did you mean 'loss_type'"),
        ({"num_generations": 4}, "dpo", r"num_generations is not a field of `trl dpo`"),
        ({"loss_type": "vespo"}, "grpo", r"no row of the table .* in Python, where BookGRPOTr"),
        ({"beta": 0.1}, "grpo", r"no row of the table"),  # TRL's KL has weights of its own
        ({}, "gropo", r"--command: 'gropo' \(did you mean 'grpo'\?\)"),
    ],
)
def test_what_is_no_config_of_a_row_is_one_sentence(given, command, sentence, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **given}))
    with pytest.raises(InputError, match=sentence) as stop:
        translate(path, command=command)
    assert "\n" not in str(stop.value)


def test_the_command_writes_rewards_and_data(tmp_path, capsys):
    path = tmp_path / "trl.yaml"
    rewards = ["accuracy_reward", "mine.reward"]
    more = {"num_generations": 4, "reward_funcs": rewards, "dataset_config": "main"}
    path.write_text(dump_yaml({**MODEL, **MACHINE, **more, "eval_strategy": "steps"}))
    main(["translate", str(path)])
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    loaded = STAGES["grpo"].load(["--config", str(tmp_path / "ours.yaml")])
    assert loaded.own.reward_funcs == ["trl.rewards.accuracy_reward", "mine.reward"]
    assert (loaded.own.dataset.name, loaded.own.dataset.eval_split) == ("main", "test")
