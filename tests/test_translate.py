"""`rlhf-trl translate`: what comes out loads, and means what the book's code would do."""

import importlib
import runpy
from pathlib import Path

import pytest
import yaml

from rlhf_trl.algorithms import formulation, names
from rlhf_trl.cli import main
from rlhf_trl.compare.closest import distances, read_subject
from rlhf_trl.compare.translate import translate
from rlhf_trl.errors import InputError
from rlhf_trl.run.config import load_config

ROOT = Path(__file__).parent.parent

POLICY_GRADIENT = """
data:
  size: 1000
  specs:
    - name: spell_backward
      weight: 1
      config: {min_word_len: 3, max_word_len: 10}
loss: grpo
model_name: Qwen/Qwen3-1.7B
clip_eps_lo: 0.2
clip_eps_hi: 0.4
beta: 0.0
lr: 5e-6
temperature: 0.6
top_p: 0.95
top_k: 20
min_p: 0.0
max_new_tokens: 512
prompts_per_step: 4
num_rollouts: 8
rollout_batch_size: 8
train_batch_size: 2
batch_acc: 4
max_norm: 1.0
seed: 42
model_device_id: 0
"""
DIRECT_ALIGNMENT = """
model_name: allenai/OLMo-2-0425-1B-SFT
loss: dpo
beta: 0.1
dataset_name: some/pairs
dataset_split: train
max_samples: 12800
max_length: 2048
learning_rate: 8.0e-7
num_epochs: 3
batch_size: 8
gradient_accumulation_steps: 4
warmup_ratio: 0.1
max_grad_norm: 1.0
gradient_checkpointing: false
bf16: true
wandb_project: null
log_every: 5
sample_every: 50
output_dir: ./outputs
save_model: false
seed: 7
"""
REWARD_MODEL = """
model_id: Qwen/Qwen3-0.6B-Base
dataset_name: some/pairs
samples: 5000
max_length: 512
batch_size: 2
grad_accum_steps: 8
epochs: 2
lr: 5.0e-5
warmup_ratio: 0.1
lr_scheduler: linear_decay
val_ratio: 0.1
eval_interval: 25
seed: 123
use_wandb: true
"""


@pytest.fixture
def book(tmp_path):
    """Write a config of the book's code, with some fields changed (None: removed)."""

    def book(text, **changed):
        config = (
            {**yaml.safe_load(text), "lr": 5e-6} if "lr: 5e-6" in text else yaml.safe_load(text)
        )
        config |= changed
        path = tmp_path / "book.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None}))
        return path

    return book


@pytest.fixture
def refused(book):
    """Return the sentence with which a config is refused, without the file that it begins with."""

    def refused(text, closest=False, **changed):
        path = book(text, **changed)
        with pytest.raises(InputError) as error:
            translate(path, closest)
        sentence = str(error.value)
        assert sentence.startswith(f"{path}: ") and sentence.endswith(".") and "\n" not in sentence
        return sentence.removeprefix(f"{path}: ")

    return refused


# --- policy gradients ----------------------------------------------------------------------------

# what the loss reads, by hand: our field -> value, for the config above
CLIP = {"epsilon": 0.2, "epsilon_high": 0.4}
KL = {"beta": 0.0, "kl_estimator": "k3"}
READ = {
    "reinforce": KL,
    "rloo": KL,
    "ppo": CLIP
    | KL
    | {"cliprange_value": 0.2, "gamma": 0.99, "lam": 0.95, "vf_coef": 0.1},  # the code's defaults
    "grpo": CLIP | KL,
    "drgrpo": CLIP | KL,
    "gspo": CLIP | KL,
    "cispo": CLIP | KL,
    "sapo": KL | {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "dapo": CLIP
    | {"soft_punish_cache": 256, "correctness_reward": "gym_score", "dynamic_sampling_rounds": 8},
    "maxrl": {"correctness_reward": "gym_score", "format_reward": "format"},
}
EVERY = {
    "formulation": "code",
    "model_name_or_path": "Qwen/Qwen3-1.7B",
    "max_completion_length": 512,
    "num_generations": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 16,  # 4 x 8 / 2
    "learning_rate": 5e-6,
    "max_grad_norm": 1.0,
    "seed": 42,
    "temperature": 1.0,
    "generation_kwargs": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
    "reward_funcs": ["gym_score", "format"],
    "reward_weights": [1.0, 0.5],
    "dataset": {
        "source": "reasoning_gym",
        "size": 1000,
        "seed": 42,
        "system_prompt": "deepseek_zero",
        "specs": [
            {
                "name": "spell_backward",
                "weight": 1,
                "config": {"min_word_len": 3, "max_word_len": 10},
            }
        ],
    },
    "lr_scheduler_type": "constant",
    "num_train_epochs": 1,
    "dtype": "bfloat16",
    "bf16": True,
    "report_to": "none",
    "output_dir": "outputs/book",
}


def test_every_algorithm_has_values_worked_by_hand():
    assert list(READ) == names("policy_gradient", "code")


@pytest.mark.parametrize("loss", READ)
def test_a_policy_gradient_says_what_the_code_does(book, loss):
    found = yaml.safe_load(translate(book(POLICY_GRADIENT, loss=loss)))
    assert found == {"algorithm": loss, **EVERY, **READ[loss]}


@pytest.mark.parametrize("loss", READ)
def test_a_translated_policy_gradient_loads(book, tmp_path, loss):
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book(POLICY_GRADIENT, loss=loss)))
    ppo = loss == "ppo"
    recipe = runpy.run_path(str(ROOT / "recipes" / ("ppo.py" if ppo else "grpo.py")))
    config = "ppo.PPOConfig" if ppo else "policy_gradient.PolicyGradientConfig"
    config = f"rlhf_trl.trainers.{config}"
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    loaded = load_config(recipe["Run"], config, argv)
    assert (loaded.own.algorithm, loaded.own.formulation) == (loss, "code")
    for name, value in READ[loss].items():
        assert getattr(loaded.trl, name) == value
    steps = loaded.trl.steps_per_generation / loaded.trl.gradient_accumulation_steps
    assert (steps, loaded.trl.generation_batch_size) == (4, 32)
    for name, value in formulation(loss, "code").settings.items():
        assert getattr(loaded.trl, name) == value


def test_one_completion_per_prompt(book):
    rollouts = {"num_rollouts": 1, "prompts_per_step": 16}
    found = yaml.safe_load(translate(book(POLICY_GRADIENT, loss="ppo", **rollouts)))
    assert (found["num_generations"], found["steps_per_generation"]) == (1, 8)


def test_what_the_config_does_not_say_is_the_codes_default(book):
    short = {"loss": "grpo", "data": {"specs": [{"name": "spell_backward"}]}}
    found = yaml.safe_load(translate(book(yaml.safe_dump(short))))
    changed = {"dataset": {**EVERY["dataset"], "size": 3000, "specs": short["data"]["specs"]}}
    expected = {"algorithm": "grpo", **EVERY, **CLIP, **KL, **changed, "epsilon_high": 0.2}
    assert found == expected


def test_the_comments_explain(book):
    text = translate(book(POLICY_GRADIENT, loss="cispo", beta=0.1, kl_estimator="kl1"))
    flat = " ".join(line.lstrip("# ") for line in text.splitlines())
    assert "weights are held below 1 + 0.4, as in the code; TRL's own field" in flat
    assert "the bound itself and would be 1.4 epsilon_high: 0.4" in flat
    assert "k1 and k3 have the other sign than the KL's" in flat
    assert "32 completions in batches of 2 are 16, so 4 optimizer steps per buffer" in flat
    assert "learning_rate: 5.0e-06 # lr" in text
    assert "#   rollout_batch_size: TRL generates the whole buffer at once" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "off-policy" not in flat
    plain = translate(book(POLICY_GRADIENT, loss="rloo"))
    assert "those after the first are off-policy" in " ".join(plain.replace("#", "").split())
    assert "A mean over the tokens of a sequence instead of a sum" in plain
    assert "#   clip_eps_lo: not read by rloo" in plain
    dapo = translate(book(POLICY_GRADIENT, loss="dapo"))
    assert "The mean over tokens is taken in each micro-batch" in dapo
    assert yaml.safe_load(text)["kl_estimator"] == "k1"


def test_wandb(book):
    tracked = {"wandb_project": "rlhf-book", "wandb_run_name": "first"}
    text = translate(book(POLICY_GRADIENT, **tracked, wandb_entity="me", device="auto"))
    assert "#   wandb_entity: " in text and "#   device: accelerate places the models" in text
    found = yaml.safe_load(text)
    kept = found["report_to"], found["project"], found["run_name"]
    assert kept == ("wandb", "rlhf-book", "first")


PG_REFUSED = {
    "an unknown field": (
        {"clip_eps_high": 0.4},
        "clip_eps_high is not a field of the book's code (did you mean 'clip_eps_hi'?); remove it",
    ),
    "an unknown loss": ({"loss": "grop"}, "loss is 'grop' (did you mean 'grpo'?); write one of r"),
    "no number": ({"lr": "high"}, "lr is 'high'; write a number"),
    "a broken number": ({"top_k": 2.5}, "top_k is 2.5; write a whole number"),
    "a truth for a number": ({"beta": True}, "beta is True; write a number"),
    "no data": ({"data": None}, "data is missing or has no list of specs; write data: {size: N,"),
    "an unknown field of the data": (
        {"data": {"specs": [], "split": "train"}},
        "data.split is not a field of the book's code; remove it",
    ),
    "completions left over": (
        {"train_batch_size": 3},
        "a buffer of prompts_per_step 4 x num_rollouts 8 = 32 completions leaves 2 over in batches "
        "of train_batch_size 3, which the code drops and TRL does not; write a train_batch_size",
    ),
    "a smaller last step": (
        {"batch_acc": 5},
        "batch_acc 5 does not divide the 16 batches of a buffer, so the code ends each buffer",
    ),
    "no batch": ({"batch_acc": 0}, "batch_acc is 0; write 1 or more"),
    "a group of one": (
        {"num_rollouts": 1, "prompts_per_step": 8},
        "num_rollouts is 1, and grpo co",
    ),
    "a KL that is not there": (
        {"loss": "dapo", "beta": 0.1},
        "beta is 0.1, and dapo has no KL penalty here; write 0.0",
    ),
    "an unknown KL": ({"kl_estimator": "k3"}, "kl_estimator is 'k3'; write kl1, kl2 or kl3"),
    "another end of the penalty": (
        {"loss": "dapo", "l_max": 400},
        "l_max is 400 and max_new_tokens 512, and the overlong penalty here ends at the longest",
    ),
    "other bounds of correctness": (
        {"loss": "dapo", "accuracy_max_reward": 0.9},
        "accuracy_min_reward and accuracy_max_reward are 0.0 and 0.9, and dynamic sampling here",
    ),
    "a bound below 0": ({"clip_eps_lo": -0.1}, "grpo (code): epsilon must be at least 0, not -0.1"),
}


@pytest.mark.parametrize("case", PG_REFUSED)
def test_policy_gradients_that_do_not_carry_over(refused, case):
    changed, says = PG_REFUSED[case]
    assert says in refused(POLICY_GRADIENT, **changed)


# --- direct alignment ----------------------------------------------------------------------------

# loss -> (changed fields, needs --closest, TRL's config, values by hand)
DIRECT = {
    "dpo": ({}, False, "DPOConfig", {"loss_type": ["sigmoid"], "beta": 0.1, "label_smoothing": 0}),
    "dpo with flipped labels": (
        {"loss": "dpo", "label_smoothing": 0.2},
        False,
        "DPOConfig",
        # 2 (1 - 0.2), -(1 - 0.4)
        {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.6, -0.6], "label_smoothing": 0.2},
    ),
    "cdpo": (
        {"label_smoothing": 0.3},  # which the code overrides
        False,
        "DPOConfig",
        {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.8, -0.8], "label_smoothing": 0.1},
    ),
    "ipo": ({}, True, "DPOConfig", {"loss_type": ["ipo"], "beta": 0.1}),
    "simpo": (
        {"beta": 2.5, "gamma": 0.3},
        False,
        "CPOConfig",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.75, "beta": 2.5},
    ),
    "orpo": ({}, True, "ORPOConfig", {"beta": 0.1}),
    "kto": (
        {},
        True,
        "KTOConfig",
        {"loss_type": "kto", "desirable_weight": 2.0, "undesirable_weight": 2.0, "beta": 0.1},
    ),
    "dpo_norm": ({"beta": 0.1}, False, "DPOConfig", {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
    "apo_zero": ({"beta": 0.3}, False, "DPOConfig", {"loss_type": ["apo_zero"], "beta": 0.3}),
    "apo_down": ({}, False, "DPOConfig", {"loss_type": ["apo_down"], "beta": 0.1}),
}


def read_by_trl(path, name):
    """What TRL's own parser makes of a config: script, training, model and data arguments."""
    import trl
    from trl.trainer.model_config import ModelConfig

    if not hasattr(trl, name):
        module = f"trl.experimental.{name.removesuffix('Config').lower()}"
        cls = getattr(importlib.import_module(module), name)
    else:
        cls = getattr(trl, name)
    kinds = (trl.ScriptArguments, cls, ModelConfig, trl.DatasetMixtureConfig)
    argv = ["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
    return trl.TrlParser(kinds).parse_args_and_config(argv)


def test_every_loss_is_translated():
    assert {case.split()[0] for case in DIRECT} == set(names("direct_alignment", "code"))


@pytest.mark.parametrize("case", DIRECT)
def test_direct_alignment_loads_in_trl(book, tmp_path, case):
    changed, closest, name, expected = DIRECT[case]
    path = tmp_path / "trl.yaml"
    text = translate(book(DIRECT_ALIGNMENT, **{"loss": case} | changed), closest)
    path.write_text(text)
    _, args, model, data = read_by_trl(path, name)
    assert {key: getattr(args, key) for key in expected} == expected
    common = {
        "learning_rate": 8e-7,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16 if case == "kto" else 8,  # TRL counts completions there
        "gradient_accumulation_steps": 4,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_length": 2048,
        "gradient_checkpointing": False,
        "logging_steps": 5,
        "save_strategy": "no",
        "seed": 7,
    }
    assert {key: getattr(args, key) for key in common} == common
    assert args.get_warmup_steps(600) == 60
    assert (model.model_name_or_path, model.dtype) == ("allenai/OLMo-2-0425-1B-SFT", "bfloat16")
    assert [(d.path, d.split) for d in data.datasets] == [("some/pairs", "train[:12800]")]
    assert f"for TRL's stock {name.replace('Config', 'Trainer')}" in text.splitlines()[0]
    assert ("The closest, not the same" in text) == closest
    assert all(len(line) <= 100 for line in text.splitlines())


def test_direct_alignments_defaults_are_the_codes(book, tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text(translate(book("loss: simpo\n")))
    _, args, _, data = read_by_trl(path, "CPOConfig")
    # the code raises a beta of 0.1, which is its default, to 2; 2 x 0.5
    assert (args.beta, args.simpo_gamma, args.learning_rate, args.max_length) == (2, 1, 5e-7, 512)
    assert data.datasets[0].split == "train[:1000]"
    path.write_text(translate(book("loss: dpo\nbf16: false\n", max_samples=None)))
    assert read_by_trl(path, "DPOConfig")[2].dtype == "float32"


def test_all_samples(tmp_path):
    path = tmp_path / "book.yaml"
    path.write_text("loss: dpo\nmax_samples: null\n")
    assert yaml.safe_load(translate(path))["datasets"][0]["split"] == "train"


DIRECT_REFUSED = {
    "summed IPO": (
        {"loss": "ipo"},
        "loss ipo has no equal in stock TRL: TRL averages the log-probabilities over the tokens of "
        "a completion; --closest writes the nearest config.",
    ),
    "ORPO's likelihood": (
        {"loss": "orpo"},
        "no equal in stock TRL: TRL's likelihood of the chosen",
    ),
    "KTO's means": ({"loss": "kto"}, "no equal in stock TRL: TRL takes one mean over both classes"),
    "flipped labels on averages": (
        {"loss": "dpo_norm", "label_smoothing": 0.1},
        "label_smoothing has no place in TRL's sigmoid_norm; write 0.0.",
    ),
    "another reference": (
        {"ref_model_name": "some/model"},
        "ref_model_name is 'some/model', and TRL's scripts take the model itself as the reference",
    ),
    "a limit on the prompt": (
        {"max_prompt_length": 100},
        "max_prompt_length is 100, and TRL cuts by max_length only; shorten the data",
    ),
    "all steps warmup": (
        {"warmup_ratio": 1.0},
        "warmup_ratio is 1.0; write a number from 0 to belo",
    ),
    "no rows": ({"max_samples": 0}, "max_samples is 0; write 1 or more."),
    "no beta": ({"beta": 0.0}, "dpo (code): beta must be above 0, not 0.0."),
    "yes for true": ({"bf16": "yes"}, "bf16 is 'yes'; write true or false."),
    "an unknown field": (
        {"rpo_alpha": 1.0},
        "rpo_alpha is not a field of the book's code; remove it",
    ),
}


@pytest.mark.parametrize("case", DIRECT_REFUSED)
def test_direct_alignment_that_does_not_carry_over(refused, case):
    changed, says = DIRECT_REFUSED[case]
    assert says in refused(DIRECT_ALIGNMENT, **changed)


def test_the_closest_leaves_out_what_trl_lacks(book):
    text = translate(book(DIRECT_ALIGNMENT, max_prompt_length=100), closest=True)
    assert "#   max_prompt_length: TRL cuts by max_length only" in text
    assert "The closest" not in text  # DPO itself is equal


# --- reward models -------------------------------------------------------------------------------


def test_a_reward_model_loads_in_trl(book, tmp_path):
    path = tmp_path / "trl.yaml"
    text = translate(book(REWARD_MODEL))
    path.write_text(text)
    _, args, model, data = read_by_trl(path, "RewardConfig")
    expected = {
        "learning_rate": 5e-5,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "max_length": 512,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.01,  # torch's own
        "max_grad_norm": 0.0,  # the code does not clip
        "eval_strategy": "steps",
        "eval_steps": 25,
        "center_rewards_coefficient": None,
        "seed": 123,
    }
    assert {key: getattr(args, key) for key in expected} == expected
    assert (model.model_name_or_path, model.dtype) == ("Qwen/Qwen3-0.6B-Base", "float32")
    assert "bf16: true" in text
    assert [(d.path, d.split) for d in data.datasets] == [("some/pairs", "train[:5000]")]
    assert data.test_split_size == 0.1
    assert "for TRL's stock RewardTrainer" in text and "trl reward --config" in text


def test_a_reward_model_without_evaluation_and_decay(book):
    changed = {"lr_scheduler": "warmup_only", "val_ratio": 0.0}
    found = yaml.safe_load(translate(book(REWARD_MODEL, **changed)))
    assert found["lr_scheduler_type"] == "constant_with_warmup"
    assert not {"eval_strategy", "eval_steps", "test_split_size"} & found.keys()
    found = yaml.safe_load(translate(book(REWARD_MODEL, eval_interval=0)))
    assert found["eval_strategy"] == "epoch" and "eval_steps" not in found


REWARD_REFUSED = {
    "a process reward model": (
        {"max_tokens": 2048},
        "max_tokens makes this the config of the process reward model, and TRL removed its "
        "PRMTrainer in 1.14; configs/book/prm.yaml is the book's, for recipes/prm.py.",
    ),
    "an outcome reward model of today": (
        {"rollouts_per_prompt": 100},
        "rollouts_per_prompt makes this the config of the outcome reward model, and TRL has no "
        "outcome reward model; configs/book/orm.yaml is the book's, for recipes/orm.py.",
    ),
    "an outcome reward model": (
        {"max_length": None},
        "a config without max_length is an outcome reward model's in the book's code, and TRL has "
        "no outcome reward model; configs/book/orm.yaml is the book's, for recipes/orm.py; for a "
        "preference reward model, write max_length.",
    ),
    "a frozen backbone": (
        {"freeze_backbone": True},
        "freeze_backbone is true, and RewardTrainer trains the whole model; write false, or leave",
    ),
    "another schedule": ({"lr_scheduler": "cosine"}, "write linear_decay or warmup_only."),
    "everything held out": (
        {"val_ratio": 1.0},
        "val_ratio is 1.0; write a number from 0 to below 1",
    ),
    "an unknown field": (
        {"max_lenth": 1},
        "max_lenth is not a field of the book's code (did you me",
    ),
}


@pytest.mark.parametrize("case", REWARD_REFUSED)
def test_reward_models_that_do_not_carry_over(refused, case):
    changed, says = REWARD_REFUSED[case]
    assert says in refused(REWARD_MODEL, **changed)


def test_the_closest_reward_model_is_trained_whole(book):
    text = translate(book(REWARD_MODEL, freeze_backbone=True), closest=True)
    assert "The closest, not the same: the code trains only the head" in text


# --- the command ---------------------------------------------------------------------------------


def test_another_config_is_refused(refused):
    assert refused("a: 1\n") == (
        "this is not a config of the book's code: it has neither loss, as those of policy "
        "gradients and direct alignment have, nor model_id, as those of reward models have."
    )


def test_the_command_prints_or_writes_once(book, tmp_path, capsys):
    path = book(POLICY_GRADIENT)
    main(["translate", str(path)])
    text = capsys.readouterr().out
    assert text == translate(path)
    output = tmp_path / "new" / "ours.yaml"
    main(["translate", str(path), "--output", str(output)])
    assert output.read_text() == text and [p.name for p in output.parent.iterdir()] == ["ours.yaml"]
    output.write_text("mine")
    with pytest.raises(SystemExit, match=r"error: --output: .*ours.yaml exists; name a new file\."):
        main(["translate", str(path), "--output", str(output)])
    assert output.read_text() == "mine"


def test_the_command_refuses_in_one_sentence(book):
    path = book(DIRECT_ALIGNMENT, loss="ipo")
    with pytest.raises(SystemExit, match=r"error: .*loss ipo has no equal in stock TRL"):
        main(["translate", str(path)])
    main(["translate", str(path), "--closest"])


# --- measured ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [name for name in READ if name != "ppo"])
def test_a_translated_policy_gradient_computes_what_the_code_does(book, tmp_path, loss):
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book(POLICY_GRADIENT, loss=loss)))
    [asked] = distances(read_subject(path, None), [(loss, "code")])
    assert asked.equal, asked.worst


@pytest.mark.parametrize("case", [case for case, (_, closest, *_) in DIRECT.items() if not closest])
def test_a_translated_direct_alignment_computes_what_the_code_does(book, tmp_path, case):
    changed, _, config, _ = DIRECT[case]
    loss = "cdpo" if case == "dpo with flipped labels" else case
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book(DIRECT_ALIGNMENT, **{"loss": loss, **changed})))
    [asked] = distances(read_subject(path, config.replace("Config", "Trainer")), [(loss, "code")])
    assert asked.equal, asked.worst


def test_a_translated_reward_model_computes_what_the_code_does(book, tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book(REWARD_MODEL)))
    [asked] = distances(read_subject(path, "RewardTrainer"), [("reward", "code")])
    assert asked.equal, asked.worst
