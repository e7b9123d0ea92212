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
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import translate
from rlhf_trl.rewards.loading import answer_columns
from rlhf_trl.run import train
from rlhf_trl.run.policy_gradients import load_reward_functions
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.yaml_loader import dump_yaml
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.trainers.sft import BookSFTConfig, BookSFTTrainer

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
        ({"max_length": 512}, None, r"its fields fit `trl dpo`, .* --command dpo, kto, orpo, rewa"),
        (
            {"num_generations": 4},
            None,
            r"its fields fit `trl grpo`, `trl rloo`; say which with --command grpo or rloo\.",
        ),
        ({"loss_typo": "x"}, None, r"loss_typo is no field of TRL's \(did you mean 'loss_type'"),
        ({"num_generations": 4}, "dpo", r"num_generations is not a field of `trl dpo`"),
        (
            {"num_generations": 4, "max_prompt_length": 64},
            "grpo",
            r"yaml: TRL dropped max_prompt_length: prompts are no longer cut .* limit .*; remove",
        ),
        ({"max_prompt_length": 64}, None, r"yaml: TRL dropped max_prompt_length: "),
        ({"rpo_alpha": 1.0}, "dpo", r"dropped rpo_alpha: .* write loss_type: \[sigmoid, sft\] and"),
        ({"reference_free": True}, "dpo", r"dropped reference_free: .* reference there; remove it"),
        (
            {"completion_only_loss": False},
            "sft",
            r"completion_only_loss is false, .* remove it or .* BookSFTTrainer",
        ),
        (
            {"loss_type": "vesp"},
            "grpo",
            r"loss_type is 'vesp', which TRL does not know; .* 'vespo'",
        ),
        ({"loss_type": ["hing"]}, "dpo", r"yaml: loss_type is 'hing', .* \(did you mean 'hinge'\?"),
        ({"scale_rewards": "groups"}, "grpo", r"scale_rewards is 'groups', .* group, batch, none"),
        (
            {"beta": 0.0, "loss_type": "sft"},
            "dpo",
            r"dpo \(trl\): beta must be a number above 0, not 0.0",
        ),
        ({"loss_type": "cispo"}, "grpo", r"epsilon_high is 0.2, .* none below 1; raise it, or"),
        ({}, "gropo", r"--command: 'gropo' \(did you mean 'grpo'\?\)"),
    ],
)
def test_what_is_no_config_of_a_row_is_one_sentence(given, command, sentence, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **given}))
    with pytest.raises(InputError, match=sentence) as stop:
        translate(path, command=command)
    assert "\n" not in str(stop.value)


def loaded_as_translated(command, given, folder):
    """Return what the recipe makes of TRL's config, and the text of the translation."""
    path, ours = folder / "trl.yaml", folder / "ours.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **given}))
    ours.write_text(translate(path, command=command))
    return STAGES[command].load(["--config", str(ours)]), ours.read_text()


def assert_same_fields(ours, stock, but=()):
    """Compare every field of a config of TRL's class."""
    names = [field.name for field in fields(stock) if field.init and field.name not in but]
    assert {n: getattr(ours, n) for n in names} == {n: getattr(stock, n) for n in names}


# What TRL 1.16 has as loss_type, by the row that has it or, in brackets, by the nearest.
GRPO_LOSSES = {
    "grpo": "grpo",
    "dr_grpo": "drgrpo",
    "dapo": "dapo",
    "cispo": "cispo",
    "sapo": "sapo",
    "bnpo": "(grpo)",
    "luspo": "(grpo)",
    "vespo": "(grpo)",
}
# beta, scale_rewards, importance_sampling_level, use_bias_correction_kl (None: not written)
GRID = [
    *itertools.product(
        (0.0, 0.1), ("group", "batch", "none", False), ("token", "sequence"), (None, True, False)
    )
]
CORNERS = [
    (0.1, "group", "token", None),
    (0.0, False, "token", True),
    (0.1, "none", "sequence", False),
]


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
@pytest.mark.parametrize(
    "settings", [CORNERS, pytest.param(GRID, marks=pytest.mark.promise)], ids=["corners", "grid"]
)
def test_every_loss_of_grpo_is_carried_over(settings, loss_type, tmp_path):
    for beta, scale, level, bias in settings:
        given = {"loss_type": loss_type, "beta": beta, "scale_rewards": scale}
        given |= {"importance_sampling_level": level, "num_generations": 4}
        given |= {"epsilon_high": 5.0} if loss_type == "cispo" else {}
        given |= {} if bias is None else {"use_bias_correction_kl": bias}
        loaded, text = loaded_as_translated("grpo", given, tmp_path)
        stock = trl.GRPOConfig(**MACHINE, **given)
        # what a KL without weight does is nobody's; TRL makes the bound below of the upper one
        but = {"epsilon_high"} if beta else {"epsilon_high", "use_bias_correction_kl"}
        assert_same_fields(loaded.trl, stock, but)
        offset = loaded.row.row.trl_offset.get("epsilon_high", 0)
        if loss_type != "sapo":  # which has no such bound
            assert loaded.trl.epsilon_high + offset == (5.0 if loss_type == "cispo" else 0.2)
        # by hand: which of these configs are a row's, whole
        standard = scale == ("none" if loss_type == "dr_grpo" else "group")
        standard = standard or (loss_type == "dr_grpo" and scale is False)
        is_gspo = loss_type == "grpo" and level == "sequence"
        is_row = "(" not in GRPO_LOSSES[loss_type] and standard and (level == "token" or is_gspo)
        is_row = is_row and not (beta and bias is not False)
        assert (loaded.row.algorithm is not None) == is_row
        assert ("not its own: " in text) == (not is_row)
        if is_row:
            assert loaded.row.algorithm == ("gspo" if is_gspo else GRPO_LOSSES[loss_type])
        elif scale == "group" and level == "token":
            assert loaded.own.algorithm == GRPO_LOSSES[loss_type].strip("()")


DPO_LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero "
    "apo_down discopop sft sigmoid_norm"
)
OTHERS = [("dpo", trl.DPOConfig, {"loss_type": [name]}) for name in DPO_LOSSES.split()] + [
    ("dpo", trl.DPOConfig, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}),
    (
        "dpo",
        trl.DPOConfig,
        {
            "loss_type": ["sigmoid", "robust"],
            "loss_weights": [1.0, 0.2],
            "label_smoothing": 0.2,
        },
    ),
    ("dpo", trl.DPOConfig, {"label_smoothing": 0.2, "ld_alpha": 0.5, "use_weighting": True}),
    ("kto", trl.KTOConfig, {"loss_type": "apo_zero_unpaired", "undesirable_weight": 1.5}),
    ("kto", trl.KTOConfig, {"loss_type": "kto", "beta": 0.3}),
    ("orpo", ORPOConfig, {"beta": 0.2}),
    ("reward", trl.RewardConfig, {"center_rewards_coefficient": 0.1}),
    ("sft", trl.SFTConfig, {"loss_type": "dft"}),
]


@pytest.mark.parametrize(("command", "config", "given"), OTHERS, ids=str)
def test_every_other_loss_is_carried_over(command, config, given, tmp_path):
    loaded, text = loaded_as_translated(command, given, tmp_path)
    stock = config(**MACHINE, **given)
    # evaluation's answers here; TRL reads it for encoder-decoder models only
    assert_same_fields(loaded.trl, stock, {"max_completion_length"} if command == "orpo" else ())
    rows = ("sigmoid", "ipo", "apo_zero", "apo_down", "sigmoid_norm", "kto")
    words = given.get("loss_type", [])
    words = [words] if isinstance(words, str) else words
    is_row = command == "sft" or all(word in rows for word in words)
    assert ("the nearest row; not its own: loss_" in text) == (not is_row)


def test_what_is_not_of_the_nearest_row_is_written_with_its_value(tmp_path):
    given = {"beta": 0.1, "num_generations": 4, "delta": 2.0}
    loaded, text = loaded_as_translated("grpo", given, tmp_path)
    lines = text.splitlines()
    assert "algorithm: dapo # the nearest row; not its own: use_bias_correction_kl" in lines
    assert "use_bias_correction_kl: true # dapo has false; TRL's default" in lines
    assert "delta: 2.0 # not of the row dapo" in lines
    assert loaded.row.algorithm is None  # no card names a row
    assert loaded.row.label == "dapo (trl) but for use_bias_correction_kl"
    # without a KL it is the row, whatever TRL would do to the KL
    given = {"use_bias_correction_kl": True, "num_generations": 4}
    loaded, text = loaded_as_translated("grpo", given, tmp_path)
    assert loaded.row.label == "dapo (trl)"
    assert "#   use_bias_correction_kl: decides nothing while beta is 0" in text.splitlines()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        # another row is nearer
        ("loss_type: sapo", "loss_type is 'sapo', .* write algorithm: sapo"),
        ("importance_sampling_level: sequence", "algorithm: gspo"),
        # no row is, and TRL does not know it
        ("loss_type: bnpoo", "ours.yaml: loss_type is 'bnpoo', which TRL does not know"),
    ],
)
def test_a_recipe_refuses_what_another_row_has_or_trl_does_not_know(line, sentence, tmp_path):
    _, text = loaded_as_translated("grpo", {"loss_type": "grpo", "num_generations": 4}, tmp_path)
    path = tmp_path / "ours.yaml"
    path.write_text(text.replace("loss_type: grpo\n", "") + f"{line}\n")
    with pytest.raises(InputError, match=sentence):
        STAGES["grpo"].load(["--config", str(path)])


# --- what SFT trains -----------------------------------------------------------------------------


def trained_by_stock(trainer, config, rows, given):
    """Return the text that a trainer of TRL's trains of the first of the rows."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    trainer = trainer(
        AutoModelForCausalLM.from_pretrained(CHECKPOINT),
        args=config(**MACHINE, **given),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    labels = trainer.train_dataset[0]["labels"]
    return tokenizer.decode([label for label in labels if label != -100])


def trained_by_recipe(rows, given, folder, capsys):
    """Return the text that a translation trains of the first of the rows, as preview has it."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "trl.yaml"
    script = {"model_name_or_path": CHECKPOINT, "dataset_name": str(data)}
    path.write_text(dump_yaml({**script, **MACHINE, **given}))
    (folder / "ours.yaml").write_text(translate(path, command="sft"))
    capsys.readouterr()
    main(["preview", str(folder / "ours.yaml"), "--json"])
    (text,) = json.loads(capsys.readouterr().out)["examples"][0]
    ids = zip(text["ids"], text["trained"], strict=True)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    return tokenizer.decode([token for token, is_trained in ids if is_trained])


TALK = [
    {"role": role, "content": text}
    for role, text in zip(("user", "assistant") * 2, ("ab", "cd", "ef", "gh"), strict=True)
]
MESSAGES, PAIRS = [{"messages": TALK}] * 2, [{"prompt": TALK[:3], "completion": TALK[3:]}] * 2
LAST, BOTH = "gh<|end|>", "cd<|end|>gh<|end|>"
EVERY_TOKEN = (
    "<|bos|><|user|>ab<|end|><|assistant|>cd<|end|><|user|>ef<|end|><|assistant|>gh<|end|>"
)


@pytest.mark.parametrize(
    ("rows", "given", "stock", "here"),
    [
        (MESSAGES, {}, EVERY_TOKEN, LAST),
        (PAIRS, {}, LAST, LAST),
        (MESSAGES, {"assistant_only_loss": True}, BOTH, BOTH),
        (PAIRS, {"assistant_only_loss": True}, LAST, BOTH),
        (PAIRS, {"assistant_only_loss": True, "completion_only_loss": False}, BOTH, BOTH),
    ],
)
def test_what_is_trained_is_what_a_translation_says(rows, given, stock, here, tmp_path, capsys):
    assert trained_by_stock(trl.SFTTrainer, trl.SFTConfig, rows, given) == stock
    assert trained_by_stock(BookSFTTrainer, BookSFTConfig, rows, given) == stock  # as the note says
    assert trained_by_recipe(rows, given, tmp_path, capsys) == here


@pytest.mark.parametrize(
    ("given", "turns", "sentence"),
    [
        (
            {},
            "last",
            "of `messages`, TRL trains every token, and here the last answer's are trained (turns: "
            "all: every answer; every token: in Python with BookSFTTrainer, recipes/library.md); "
            "of prompt-completion pairs, the completion is trained there and here",
        ),
        (
            {"assistant_only_loss": True},
            "all",
            "of prompt-completion pairs, TRL trains answers in the completion, and here those in "
            "the prompt, too (turns: last: the completion alone)",
        ),
        ({"assistant_only_loss": True, "completion_only_loss": False}, "all", None),
    ],
)
def test_a_translation_says_what_is_trained(given, turns, sentence, tmp_path, capsys):
    path = tmp_path / "trl.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **given}))
    text = translate(path, command="sft")
    block = {"source": "path", "path": "rows.jsonl", "turns": turns}
    assert yaml.safe_load(text)["dataset"] == block
    assert "assistant_only_loss" not in yaml.safe_load(text)  # which turns decides
    comments = " ".join(text.partition("dataset:\n")[0].replace("#", " ").split())
    assert "default there and here, but for completion_only_loss and assistant_only" in comments
    main(["translate", str(path), "--command", "sft", "--explain"])
    explained = " ".join(capsys.readouterr().out.split())
    assert (f"- differs - dataset.turns: {turns}" in explained) == bool(sentence)
    if sentence:
        assert sentence in comments and sentence in explained
    else:
        assert "prompt-completion" not in comments


def test_a_printed_config_of_sft_says_which_defaults_are_not_here(tmp_path, capsys):
    path = tmp_path / "printed.yaml"
    path.write_text(yaml.dump(trl.SFTConfig(**MACHINE).to_dict() | MODEL))
    main(["translate", str(path), "--explain"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "defaults there and here, but for completion_only_loss and assistant_only_loss" in last


@pytest.mark.parametrize(
    ("given", "launch"),
    [
        ({}, "configs/accelerate/cpu.yaml"),
        ({"use_cpu": False}, "configs/accelerate/one_gpu.yaml"),
    ],
)
def test_the_head_says_how_to_launch(given, launch, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(dump_yaml({**MODEL, **MACHINE, **given}))
    command = f"# accelerate launch --quiet --config_file {launch} recipes/dpo.py --config my.yaml"
    assert translate(path, "my.yaml", command="dpo").splitlines()[1] == command


def test_the_help_lists_the_commands_of_trl(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit):
        main(["translate", "--help"])
    assert "(grpo, rloo, dpo, kto, orpo, reward, sft)" in " ".join(capsys.readouterr().out.split())


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
        *("center_rewards_coefficient", "drop_identical", "skip_zero_advantage"),
        "read_prompts_once",
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
    stock = trl.GRPOConfig(**MACHINE | {"use_cpu": False}, num_generations=4)
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
    # all but output_dir, bf16, num_generations and the hidden token
    assert out[-1] == f"{len(printed) - 4} more fields have TRL's defaults there and here."
    printed |= {"use_cpu": True, "dataloader_pin_memory": False}
    path.write_text(yaml.dump(printed | MODEL))
    assert "configs/accelerate/cpu_2proc.yaml --num_processes 2 recipes/grpo.py" in translate(path)


@pytest.mark.parametrize("added", [{}, {"reward_funcs": ["mine.reward"]}])
def test_a_printed_config_says_that_rewards_are_missing(added, tmp_path):
    path = tmp_path / "printed.yaml"
    stock = trl.GRPOConfig(**MACHINE, num_generations=4)
    path.write_text(yaml.dump({**stock.to_dict(), **MODEL, **added}))
    head = translate(path).partition("algorithm:")[0]
    assert ("A trainer's config has no reward_funcs, so add" in head) == (not added)


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
    torch.manual_seed(0)  # TRL shuffles the completions of a generation
    trainer.train()
    steps = kept.weights
    return [after - before for before, after in itertools.pairwise(steps)]


def of_recipe_and_stock(command, config, stock_trainer, given, folder):
    """Return what each of two steps moves the weights by: of the recipe, and of TRL's trainer."""
    rows = [{"prompt": word} for word in ("ab", "cde", "fg", "hijk", "lm", "nop", "qr", "st")]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"beta": 0.2, "learning_rate": 1e-2, "optim": "sgd", "max_steps": 2, **ROLLOUTS}
    changes |= {"gradient_accumulation_steps": 2, "save_strategy": "no", "disable_tqdm": True}
    changes |= MACHINE | {"output_dir": str(folder / "out")} | given
    path = folder / "trl.yaml"
    script = {"model_name_or_path": CHECKPOINT, "dataset_name": str(data)}
    script |= {"reward_funcs": ["test_trl_config.shortness"]}
    path.write_text(dump_yaml({**script, **changes}))
    (folder / "ours.yaml").write_text(translate(path, command=command))
    loaded = STAGES["grpo"].load(["--config", str(folder / "ours.yaml")])

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    read = train.read(loaded.trl, load_prompts, loaded.own.dataset, answer_columns(loaded.own))
    rewards = load_reward_functions(loaded.own, loaded.trl, read, tokenizer)
    trainer = STAGES["grpo"].part("trainer")
    ours = train.build(loaded, trainer, read, tokenizer, reward_funcs=rewards)

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    dataset = datasets.Dataset.from_list(rows)
    stock = stock_trainer(
        model,
        shortness,
        args=config(**changes),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    return answered(ours), answered(stock)


# of `num_iterations`: the second time, each ratio has left 1
NEAR = {"num_iterations": 2, "use_bias_correction_kl": True, "max_steps": 2}


@pytest.mark.parametrize(
    "given",
    [
        {"loss_type": "bnpo", "scale_rewards": "batch"},
        {"loss_type": "cispo", "epsilon_high": 1.0},
    ],
    ids=str,
)
def test_a_recipe_by_the_nearest_row_moves_the_weights_as_grpotrainer(given, tmp_path):
    given = NEAR | given
    ours, stock = of_recipe_and_stock("grpo", trl.GRPOConfig, trl.GRPOTrainer, given, tmp_path)
    assert len(ours) == 2 and min(step.norm() for step in stock) > 0
    assert all(torch.equal(here, there) for here, there in zip(ours, stock, strict=True))


def test_the_recipe_of_rloo_moves_the_weights_as_rlootrainer(tmp_path):
    ours, stock = of_recipe_and_stock("rloo", trl.RLOOConfig, trl.RLOOTrainer, {}, tmp_path)
    pairs = zip(stock, ours, strict=True)
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
