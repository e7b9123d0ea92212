"""Configs of TRL's commands, translated for the recipes: every field is what TRL makes of it."""

import itertools
import json
from dataclasses import fields

import datasets
import pytest
import torch
import trl
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.orpo import ORPOConfig

from rlhf_trl.cli import main
from rlhf_trl.compare.measure import fix_completions
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import translate
from rlhf_trl.rewards.loading import answer_columns
from rlhf_trl.run import train
from rlhf_trl.run.policy_gradients import load_reward_functions
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.yaml_loader import dump_yaml
from rlhf_trl.tiny import checkpoint_path

CHECKPOINT = checkpoint_path()
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
    main(["translate", str(path), "--command", "grpo"])
    (tmp_path / "ours.yaml").write_text(capsys.readouterr().out)
    loaded = STAGES["grpo"].load(["--config", str(tmp_path / "ours.yaml")])
    assert loaded.own.reward_funcs == ["trl.rewards.accuracy_reward", "mine.reward"]
    assert (loaded.own.dataset.name, loaded.own.dataset.eval_split) == ("main", "test")


# --- what a script prints ------------------------------------------------------------------------

PRINTED = {
    "grpo": (trl.GRPOConfig, {"num_generations": 4, "steps_per_generation": 6, "epsilon": 0.3}),
    "rloo": (trl.RLOOConfig, {"num_generations": 4, "beta": 0.1, "learning_rate": 3e-6}),
    "dpo": (trl.DPOConfig, {"loss_type": ["ipo"], "gradient_checkpointing": False}),
    "kto": (trl.KTOConfig, {"desirable_weight": 2.0, "eval_steps": 7}),
    "orpo": (ORPOConfig, {"beta": 0.3, "lr_scheduler_type": "cosine"}),
    "reward": (trl.RewardConfig, {"center_rewards_coefficient": 0.01, "max_steps": 9}),
    "sft": (trl.SFTConfig, {"packing": True, "max_length": 128, "seed": 3}),
}
# fields of GRPO's class that the row rloo has otherwise than RLOOTrainer, to the same update
OF_RLOO = {"epsilon", "epsilon_high"}


@pytest.mark.parametrize("command", PRINTED)
def test_a_printed_config_keeps_only_what_a_script_has_set(command, tmp_path):
    config, changes = PRINTED[command]
    changes = {**changes, "gradient_accumulation_steps": 3}
    stock = config(**MACHINE, **changes)
    printed = yaml.dump(stock.to_dict())
    assert len(printed.splitlines()) > 120 and "<HUB_TOKEN>" in printed
    path = tmp_path / "printed.yaml"
    path.write_text(printed + yaml.dump(MODEL))
    (tmp_path / "ours.yaml").write_text(translate(path))  # the command is told by the fields
    ours = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    set_by_script = {*changes, "output_dir", "use_cpu", "bf16"}
    set_by_script -= {"gradient_checkpointing"}  # its other name is kept
    written_out = {
        *("algorithm", "formulation", "dataset", "model_name_or_path", "reward_funcs"),
        *("refuse_non_finite", "evaluate_examples", "overlong", "interleave_labels"),
        *("kl_estimator", "vllm_importance_sampling_correction", "activation_checkpointing"),
        *("epsilon", "epsilon_high", "beta", "undesirable_weight", "desirable_weight"),
        *("center_rewards_coefficient", "drop_identical"),
    }
    assert set_by_script <= ours.keys() <= set_by_script | written_out
    stage = STAGES["grpo" if command == "rloo" else command]
    loaded = stage.load(["--config", str(tmp_path / "ours.yaml")])
    moved = {"orpo": {"max_completion_length"}, "rloo": OF_RLOO}.get(command, set())
    if command == "grpo":
        moved = {"epsilon_high", "use_bias_correction_kl"}
    shared = [
        field.name
        for field in fields(stock)
        if field.init and hasattr(loaded.trl, field.name) and field.name not in moved
    ]
    assert len(shared) > 100
    assert {name: getattr(loaded.trl, name) for name in shared} == {
        name: getattr(stock, name) for name in shared
    }
    missing = {f.name for f in fields(stock) if f.init} - {*shared} - moved
    assert missing == (
        {"normalize_advantages", "reward_clip_range"} if command == "rloo" else set()
    )


def test_a_printed_config_tells_how_many_processes_it_had(tmp_path, capsys):
    stock = trl.GRPOConfig(**MACHINE, num_generations=4)
    printed = stock.to_dict() | {"generation_batch_size": 16}  # 8 on each of two
    path = tmp_path / "printed.yaml"
    path.write_text(yaml.dump(printed | MODEL))
    text = translate(path)
    assert "for 2 processes:" in text
    assert "configs/accelerate/ddp.yaml --num_processes 2 recipes/grpo.py" in text
    assert "generation_batch_size" not in text
    main(["translate", str(path), "--explain"])
    out = capsys.readouterr().out.splitlines()
    assert out[-3].split()[-2:] == ["16", "16"]
    # all but output_dir, use_cpu, bf16, num_generations and the hidden token
    assert out[-1] == f"{len(printed) - 5} more fields have TRL's defaults there and here."


def test_what_to_dict_hides_is_named(tmp_path):
    path = tmp_path / "printed.yaml"
    stock = trl.SFTConfig(**MACHINE, eos_token="<|im_end|>")
    path.write_text(yaml.dump(stock.to_dict() | MODEL))
    text = translate(path)
    assert "# Not printed by to_dict(), so add what the script sets: eos_token, hub_token" in text
    assert not {"eos_token", "hub_token"} & yaml.safe_load(text).keys()


def test_a_printed_config_without_data_says_what_to_add(tmp_path):
    path = tmp_path / "printed.yaml"
    path.write_text(yaml.dump(trl.DPOConfig(**MACHINE).to_dict()))
    with pytest.raises(InputError, match="add dataset_name and model_name_or_path to the file"):
        translate(path)


# --- RLOO, whose recipe stands on GRPOTrainer ----------------------------------------------------

ROLLOUTS = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6}


def shortness(completions, **columns):
    """Reward short completions."""
    return [-float(len(text)) for text in completions]


class Kept(TrainerCallback):
    """Keep the weights after each step."""

    def __init__(self, model):
        self.weights = [self.copy(model)]

    def copy(self, model):
        return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append(self.copy(model))


def answered(trainer):
    """Train on fixed completions; return what the weights move by in each step."""

    def completion(prompt_ids, index, call):
        return [20 + (7 * index + 3 * call + place) % 40 for place in range(2 + (index + call) % 4)]

    fix_completions(trainer, completion)
    kept = Kept(trainer.model)
    trainer.add_callback(kept)
    trainer.train()
    steps = kept.weights
    return [after - before for before, after in itertools.pairwise(steps)]


def test_the_recipe_of_rloo_moves_the_weights_as_rlootrainer(tmp_path):
    rows = [{"prompt": word} for word in ("ab", "cde", "fg", "hijk", "lm", "nop", "qr", "st")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"beta": 0.2, "learning_rate": 1e-2, "optim": "sgd", "max_steps": 2, **ROLLOUTS}
    changes |= {"gradient_accumulation_steps": 2, "save_strategy": "no", "disable_tqdm": True}
    changes |= MACHINE | {"output_dir": str(tmp_path / "out")}
    path = tmp_path / "trl.yaml"
    script = {"model_name_or_path": CHECKPOINT, "dataset_name": str(data)}
    script |= {"reward_funcs": ["test_trl_config.shortness"]}
    path.write_text(dump_yaml({**script, **changes}))
    (tmp_path / "ours.yaml").write_text(translate(path, command="rloo"))
    loaded = STAGES["grpo"].load(["--config", str(tmp_path / "ours.yaml")])

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    read = train.read(loaded.trl, load_prompts, loaded.own.dataset, answer_columns(loaded.own))
    rewards = load_reward_functions(loaded.own, loaded.trl, read, tokenizer)
    trainer = STAGES["grpo"].part("trainer")
    ours = train.build(loaded, trainer, read, tokenizer, reward_funcs=rewards)

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    dataset = datasets.Dataset.from_list(rows)
    config = trl.RLOOConfig(**changes)
    stock = trl.RLOOTrainer(
        model, shortness, args=config, train_dataset=dataset, processing_class=tokenizer
    )
    pairs = zip(answered(stock), answered(ours), strict=True)
    apart = [((here - there).norm() / there.norm()).item() for there, here in pairs]
    assert len(apart) == 2 and max(apart) < 1e-5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_iterations": 2}, "num_iterations is 2, so later steps are off-policy"),
        ({"steps_per_generation": 4}, "steps_per_generation is 4, so later steps are off-policy"),
        ({"normalize_advantages": True}, "normalize_advantages is not read by recipes/grpo.py"),
        ({"reward_clip_range": [-1, 1]}, "reward_clip_range is not read by recipes/grpo.py"),
        ({"loss_type": "grpo"}, "loss_type is not a field of `trl rloo`"),
    ],
)
def test_what_the_row_rloo_has_not_is_one_sentence(given, sentence, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **ROLLOUTS, **given}))
    with pytest.raises(InputError, match=sentence) as stop:
        translate(path, command="rloo")
    assert "\n" not in str(stop.value)
