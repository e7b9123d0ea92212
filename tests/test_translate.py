"""`rlhf-trl translate`: what comes out loads, and means what the book's code would do."""

from pathlib import Path

import pytest
import yaml
from conftest import cause
from own_model import write_lines

from rlhf_trl.algorithms import formulation, names
from rlhf_trl.cli import main
from rlhf_trl.compare.closest import distances
from rlhf_trl.compare.subjects import read_subject
from rlhf_trl.data.blocks import Samples
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import translate
from rlhf_trl.ports.book_fields import DEFAULTS
from rlhf_trl.run import train
from rlhf_trl.run.stages import STAGES

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

    def refused(text, **changed):
        path = book(text, **changed)
        with pytest.raises(InputError) as error:
            translate(path)
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
    | {"soft_punish_cache": 256, "correctness_reward": "gym_score", "dynamic_sampling_rounds": 0},
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
    "vllm_importance_sampling_correction": False,
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
    "optim": "adamw_torch",
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
    stage = STAGES["ppo" if loss == "ppo" else "grpo"]
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    loaded = stage.load(argv)
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
    assert "weights are held below 1 + 0.4, as in the book's code; TRL's own field" in flat
    assert "the bound itself and would be 1.4 epsilon_high: 0.4" in flat
    assert "k1 has the other sign than the KL's in the book's code, and so here" in flat
    assert (
        "prompts_per_step, num_rollouts: 16 batches, so 4 optimizer steps, as in the book's" in flat
    )
    assert "learning_rate: 5.0e-06 # lr" in text
    assert "#   rollout_batch_size: TRL generates the whole buffer at once" in text
    head, command, *lines = text.splitlines()  # a command stays one line, to be copied
    assert command.startswith("# accelerate launch --quiet --config_file ")
    assert all(len(line) <= 100 for line in [head, *lines])
    assert "off-policy" not in flat
    plain = translate(book(POLICY_GRADIENT, loss="rloo"))
    assert "those after the first are off-policy" in " ".join(plain.replace("#", "").split())
    assert "A mean over the tokens of a sequence instead of a sum" in plain  # of rloo
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
        "data.split is not a field of the book's code (did you mean 'data.size'?); remove it",
    ),
    "completions left over": (
        {"train_batch_size": 3},
        "a buffer of prompts_per_step 4 x num_rollouts 8 completions leaves 2 over in batches "
        "of train_batch_size 3, which the code drops and TRL does not; write a train_batch_size",
    ),
    "a smaller last step": (
        {"batch_acc": 5},
        "batch_acc 5 does not divide the 16 batches of a buffer (prompts_per_step 4 x "
        "num_rollouts 8 / train_batch_size 2), so the code ends each buffer",
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
    "a bound below 0": ({"clip_eps_lo": -0.1}, "grpo (code): epsilon must be 0 or more, not -0.1"),
}


@pytest.mark.parametrize("case", PG_REFUSED)
def test_policy_gradients_that_do_not_carry_over(refused, case):
    changed, says = PG_REFUSED[case]
    assert says in refused(POLICY_GRADIENT, **changed)


# --- direct alignment ----------------------------------------------------------------------------

# loss -> (changed fields, recipe, the row, its parameters by hand)
DIRECT = {
    "dpo": ({}, "dpo", "dpo", {"beta": 0.1}),
    "dpo with flipped labels": (
        {"loss": "dpo", "label_smoothing": 0.2},
        *("dpo", "cdpo", {"beta": 0.1, "label_smoothing": 0.2}),
    ),
    "cdpo": (
        {"label_smoothing": 0.3},  # which the code overrides
        *("dpo", "cdpo", {"beta": 0.1, "label_smoothing": 0.1}),
    ),
    "ipo": ({}, "dpo", "ipo", {"beta": 0.1}),
    "simpo": (
        {"beta": 2.5, "gamma": 0.3},
        *("dpo", "simpo", {"beta": 2.5, "gamma_beta_ratio": 0.3}),
    ),
    "orpo": ({}, "orpo", "orpo", {"beta": 0.1}),
    "kto": ({}, "kto", "kto", {"beta": 0.1}),
    "dpo_norm": ({"beta": 0.1}, "dpo", "dpo_norm", {"beta": 2.0}),  # the code raises 0.1
    "apo_zero": ({"beta": 0.3}, "dpo", "apo_zero", {"beta": 0.3}),
    "apo_down": ({}, "dpo", "apo_down", {"beta": 0.1}),
}


def loaded_by(recipe, path):
    """What a recipe makes of a config."""
    return STAGES[recipe].load(["--config", str(path), "--use_cpu", "--bf16", "false"])


def test_every_loss_is_translated():
    assert {case.split()[0] for case in DIRECT} == set(names("direct_alignment", "code"))


@pytest.mark.parametrize("case", DIRECT)
def test_direct_alignment_loads_in_its_recipe(book, tmp_path, case):
    changed, recipe, algorithm, expected = DIRECT[case]
    path = tmp_path / "ours.yaml"
    text = translate(book(DIRECT_ALIGNMENT, **{"loss": case} | changed))
    path.write_text(text)
    loaded = loaded_by(recipe, path)
    args, own, row = loaded.trl, loaded.own, loaded.row
    assert (row.algorithm, row.formulation, row.row) == (
        *(algorithm, "code"),
        formulation(algorithm, "code"),
    )
    assert {key: row.parameters[key] for key in expected} == expected
    common = {
        "learning_rate": 8e-7,
        "num_train_epochs": 3,
        # KTO's recipe counts completions
        "per_device_train_batch_size": 16 if case == "kto" else 8,
        "gradient_accumulation_steps": 4,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_length": 2048,
        "overlong": "cut_prompt",
        "gradient_checkpointing": False,
        "logging_steps": 5,
        "save_strategy": "no",
        "seed": 7,
    }
    assert {key: getattr(args, key) for key in common} == common
    assert args.get_warmup_steps(600) == 60
    model, data = loaded.model, own.dataset
    assert (model.model_name_or_path, model.dtype) == ("allenai/OLMo-2-0425-1B-SFT", "bfloat16")
    assert (data.path, data.split, data.reader, own.max_samples) == (
        *("some/pairs", "train", "book_pairs", 12800),
    )
    # every as given, the rest the code's defaults
    assert own.samples == Samples(50, 3, "round_robin", None, 0.7, 0.9, 128)
    assert text.splitlines()[1].endswith(f" recipes/{recipe}.py --config THIS_FILE")
    head, _, *lines = text.splitlines()  # the command stays one line
    assert all(len(line) <= 100 for line in [head, *lines])


def test_direct_alignments_defaults_are_the_codes(book, tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book("loss: simpo\n")))
    loaded = loaded_by("dpo", path)
    # the code raises a beta of 0.1, which is its default, to 2
    assert loaded.row.parameters == {"beta": 2.0, "gamma_beta_ratio": 0.5}
    assert (loaded.trl.learning_rate, loaded.trl.max_length) == (5e-7, 512)
    data = loaded.own.dataset
    assert data.path == "argilla/ultrafeedback-binarized-preferences-cleaned"
    assert (data.reader, loaded.own.max_samples, loaded.own.samples.every) == (
        *("ultrafeedback", 1000, 25),
    )
    path.write_text(translate(book("loss: dpo\nbf16: false\nsample_every: 0\n")))
    loaded = loaded_by("dpo", path)
    assert (loaded.model.dtype, loaded.own.samples.every) == ("float32", 0)


def test_all_samples(tmp_path):
    path = tmp_path / "book.yaml"
    path.write_text("loss: dpo\nmax_samples: null\n")
    assert "max_samples" not in yaml.safe_load(translate(path))


def test_panels_of_prompts_of_ones_own(book):
    given = {"sample_prompts_file": "mine.txt", "sample_prompt_strategy": "fixed"}
    found = yaml.safe_load(translate(book(DIRECT_ALIGNMENT, **given)))["samples"]
    assert (found["file"], found["choice"], found["every"]) == ("mine.txt", "fixed", 50)


@pytest.mark.promise
def test_the_command_that_a_translation_names_runs(book, tmp_path, launch):
    rows = [{"prompt": w, "chosen": w[::-1], "rejected": w} for w in ("abc", "bcd", "cde", "def")]
    output, data = tmp_path / "ours.yaml", write_lines(tmp_path / "pairs.jsonl", rows)
    main(["translate", str(book(DIRECT_ALIGNMENT, loss="simpo")), "--output", str(output)])
    _, command = output.read_text().splitlines()[:2]
    start, words = command.split()[1:4], command.split()[4:]
    assert start == ["accelerate", "launch", "--quiet"] and words[2] == "recipes/dpo.py"
    assert words[:2] == ["--config_file", "configs/accelerate/one_gpu.yaml"]
    words[1] = "configs/accelerate/cpu.yaml"  # there may be no GPU here
    small = ["--model_name_or_path", "tiny", "--dataset.path", str(data), "--max_steps", "1"]
    small += ["--samples.max_tokens", "4", "--output_dir", str(tmp_path / "out")]
    done = launch(words[:2], "dpo", *words[3:], *small)
    assert done.returncode == 0, cause(done.stdout)
    assert "simpo (code)" in done.stdout and (tmp_path / "out" / "model").is_dir()


DIRECT_REFUSED = {
    "flipped labels on averages": (
        {"loss": "dpo_norm", "label_smoothing": 0.1},
        "label_smoothing has no place in dpo_norm here; write 0.0.",
    ),
    "another reference": (
        {"ref_model_name": "some/model"},
        "ref_model_name is 'some/model', and the recipes take the model itself as the reference",
    ),
    "a limit on the prompt": (
        {"max_prompt_length": 100},
        "max_prompt_length is 100, and the recipes cut by max_length only; remove it.",
    ),
    "panels at random": (
        {"sample_prompt_strategy": "random"},
        "sample_prompt_strategy is 'random'; write fixed or round_robin.",
    ),
    "all steps warmup": (
        {"warmup_ratio": 1.0},
        "warmup_ratio is 1.0; write a number from 0 to belo",
    ),
    "no rows": ({"max_samples": 0}, "max_samples is 0; write 1 or more."),
    "no beta": ({"beta": 0.0}, "dpo (code): beta must be a number above 0, not 0.0."),
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


# --- reward models -------------------------------------------------------------------------------


def test_a_reward_model_loads_in_its_recipe(book, tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(text := translate(book(REWARD_MODEL)))
    loaded = loaded_by("reward", path)
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
    assert {key: getattr(loaded.trl, key) for key in expected} == expected
    row, model, data = loaded.row, loaded.model, loaded.own.dataset
    assert (row.algorithm, row.row) == ("reward", formulation("reward", "code"))
    assert (model.model_name_or_path, model.dtype) == ("Qwen/Qwen3-0.6B-Base", "float32")
    assert "bf16: true" in text and "recipes/reward.py --config THIS_FILE" in text
    # a tenth of 5000 is held out
    assert (data.path, data.split, data.eval_split, data.eval_size) == (
        *("some/pairs", "train[:4500]", "train[4500:5000]", 500),
    )


def test_a_reward_model_without_evaluation_and_decay(book):
    changed = {"lr_scheduler": "warmup_only", "val_ratio": 0.0}
    found = yaml.safe_load(translate(book(REWARD_MODEL, **changed)))
    assert found["lr_scheduler_type"] == "constant_with_warmup"
    assert not {"eval_strategy", "eval_steps"} & found.keys()
    block = {"source": "path", "path": "some/pairs", "split": "train[:5000]"}
    block["reader"] = "book_pairs"
    assert found["dataset"] == block
    found = yaml.safe_load(translate(book(REWARD_MODEL, eval_interval=0)))
    assert found["eval_strategy"] == "epoch" and "eval_steps" not in found


REWARD_REFUSED = {
    "fewer answers than the data set has": (
        {"rollouts_per_prompt": 32},
        "rollouts_per_prompt is 32, and recipes/orm.py takes all of a prompt, 100 in the book's",
    ),
    "as many as the code takes where a config is silent": (
        {"dataset_name": "RLHF-Book/gsm8k-qwen3-0.6B-rollouts"},
        "rollouts_per_prompt is 32 by default, and recipes/orm.py takes all of a prompt",
    ),
    "fields of two models": (
        {"max_tokens": 2048, "rollouts_per_prompt": 100},
        "rollouts_per_prompt and GSM8K are of an outcome reward model, max_steps, max_tokens and",
    ),
    "a frozen backbone": (
        {"freeze_backbone": True},
        "freeze_backbone is True, and the recipes train the whole model; write false.",
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


# --- the other kinds -----------------------------------------------------------------------------

PG = yaml.safe_load(POLICY_GRADIENT) | {"lr": 5e-6}
HUB = {"source": "path", "split": "train"}
OLMO = "allenai/OLMo-2-0425-1B"
ACEMATH = "Please reason step by step, and check your final answer within \\boxed{}."
HALF = {"dtype": "bfloat16", "bf16": True, "optim": "adamw_torch"}
OUTCOMES = {
    **{"model_id": "Qwen/Qwen3-0.6B", "dataset_name": "RLHF-Book/gsm8k-qwen3-0.6B-rollouts"},
    **{"samples": 2000, "rollouts_per_prompt": 100, "max_length": 2048, "batch_size": 1},
    **{"grad_accum_steps": 32, "epochs": 1, "lr": 1e-5, "warmup_ratio": 0.0, "seed": 7},
    **{"eval_interval": 500, "device": "cuda"},
}
PROCESS = {
    **{"model_id": "Qwen/Qwen3-0.6B-Base", "dataset_name": "tasksource/PRM800K", "samples": 2000},
    **{"max_steps": 12, "max_tokens": 2048, "batch_size": 1, "grad_accum_steps": 16, "epochs": 1},
    **{"lr_scheduler": "warmup_only", "seed": 13},
}
INSTRUCTION = {
    **{"model_name": OLMO, "chat_template_source": f"{OLMO}-SFT", "max_samples": 500},
    **{"dataset_name": "HuggingFaceH4/no_robots", "lr": 5e-6, "batch_size": 4, "bf16": True},
    **{"warmup_ratio": 0.1, "sample_every": 50, "wandb_run_name": "no_robots"},
}
REJECTION = {
    "data": {"name": "openai/gsm8k", "max_train_samples": 1000, "max_test_samples": 200},
    "selection": {"strategy": "random_k_overall", "top_k": 300},
    **{"model_name": "Qwen/Qwen3-1.7B", "rollout_batch_size": 4, "train_batch_size": 2},
    **{"batch_acc": 4, "lr": 5e-6, "save_checkpoint": False, "output_dir": "rs"},
}
DISTILLATION = {
    **{name: PG[name] for name in ("data", "temperature", "top_p", "top_k", "min_p", "model_name")},
    **{"loss": "sdpo", "kl_top_k": 20, "success_reward_threshold": 1.0, "enable_thinking": False},
    **{"max_new_tokens": 512, "lr": 1e-6, "warmup_ratio": 0.0, "prompts_per_step": 16},
    **{"num_rollouts": 8, "num_steps": 200, "repetition_penalty": 1.1},
}
# its name -> (what the book's code reads, recipe, what it becomes, by hand)
OTHERS = {
    "orm": (
        OUTCOMES,
        "orm",
        {
            **{"algorithm": "orm", "formulation": "code", "model_name_or_path": "Qwen/Qwen3-0.6B"},
            **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32, "seed": 7},
            **{"max_length": 2048, "num_train_epochs": 1, "learning_rate": 1e-5},
            **{"warmup_steps": 0.0, "lr_scheduler_type": "linear", "weight_decay": 0.01},
            **{"max_grad_norm": 0.0, "dtype": "float32", "bf16": True, "eval_steps": 500},
            **{"eval_strategy": "steps", "output_dir": "outputs/book"},
            "dataset": {
                **{"source": "path", "path": "RLHF-Book/gsm8k-qwen3-0.6B-rollouts"},
                **{"reader": "gsm8k_rollouts", "split": "train[:1800]"},
                **{"eval_split": "train[1800:2000]", "eval_size": 200},
            },
        },
    ),
    "prm": (
        PROCESS,
        "prm",
        {
            **{"algorithm": "prm", "formulation": "code", "seed": 13, "dtype": "float32"},
            **{"model_name_or_path": "Qwen/Qwen3-0.6B-Base", "bf16": True, "max_length": 2048},
            **{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
            **{"num_train_epochs": 1, "learning_rate": 5e-5, "warmup_steps": 0.1},
            **{"lr_scheduler_type": "constant_with_warmup", "weight_decay": 0.01},
            **{"max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 25},
            "output_dir": "outputs/book",
            "dataset": {
                **{"source": "path", "path": "tasksource/PRM800K", "reader": "prm800k"},
                **{"split": "train[:1800]", "eval_split": "train[1800:2000]", "eval_size": 200},
                **{"step_separator": "\n<step>\n", "max_steps": 12},
            },
        },
    ),
    "instruction tuning": (
        INSTRUCTION,
        "sft",
        {
            **{"model_name_or_path": OLMO, "chat_template_fallback": f"{OLMO}-SFT", **HALF},
            **{"max_length": 2048, "learning_rate": 5e-6, "num_train_epochs": 3, "seed": 42},
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
            **{"warmup_steps": 0.1, "weight_decay": 0.0, "max_grad_norm": 1.0},
            "warmup_from_zero": False,
            **{"activation_checkpointing": True, "lr_scheduler_type": "linear"},
            **{"report_to": "none", "run_name": "no_robots", "output_dir": "outputs/book"},
            "samples": {"every": 50, "temperature": 0.7, "top_p": 0.9, "max_tokens": 128},
            "dataset": {
                **{**HUB, "path": "HuggingFaceH4/no_robots", "split": "train[:500]"},
                **{"reader": "messages", "turns": "last"},
            },
        },
    ),
    "rejection sampling": (
        REJECTION,
        "rejection_sampling",
        {
            **{"model_name_or_path": "Qwen/Qwen3-1.7B", "reward_model": "nvidia/AceMath-7B-RM"},
            **{"strategy": "random_k_overall", "k": 300, "ties": "first", "seed": 42, **HALF},
            **{"num_generations": 8, "max_completion_length": 512, "temperature": 0.8},
            **{"top_p": 0.95, "top_k": 20, "min_p": 0.0, "per_device_eval_batch_size": 32},
            **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            **{"max_length": 1024, "learning_rate": 5e-6, "num_train_epochs": 2},
            "truncation_mode": "keep_end",
            **{"max_grad_norm": 1.0, "lr_scheduler_type": "constant", "save_strategy": "no"},
            **{"activation_checkpointing": True, "correctness": "number", "report_to": "none"},
            **{"answers": "rs/answers", "output_dir": "rs/random_k_overall"},
            "chat_template_kwargs": {"enable_thinking": False},
            "dataset": {
                **{"source": "path", "path": "openai/gsm8k", "name": "main", "reader": "gsm8k"},
                **{"split": "train[:1000]", "eval_split": "test", "eval_size": 200},
                "system_prompt": ACEMATH,
            },
        },
    ),
    "distillation": (
        DISTILLATION,
        "distill",
        {
            **{"algorithm": "sdpo", "formulation": "code", "model_name_or_path": PG["model_name"]},
            **{"kl_top_k": 20, "teacher": "live", "demonstration": "first", "seed": 42, **HALF},
            "dynamic_sampling_rounds": 100,
            **{"correctness_reward": "gym_score", "reward_funcs": ["gym_score"]},
            **{"num_generations": 8, "max_completion_length": 512, "max_steps": 200},
            # chunks of 4, the code's default: 16 x 8 / 4
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 32},
            **{"learning_rate": 1e-6, "warmup_steps": 0.0, "lr_scheduler_type": "constant"},
            **{"max_grad_norm": 1.0, "temperature": 1.0, "report_to": "none"},
            **{"generation_kwargs": EVERY["generation_kwargs"], "repetition_penalty": 1.1},
            "vllm_importance_sampling_correction": False,
            **{"chat_template_kwargs": {"enable_thinking": False}, "dataset": EVERY["dataset"]},
            "output_dir": "outputs/book",
        },
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_config_of_another_kind_becomes_what_the_code_does_and_loads(book, tmp_path, case):
    given, recipe, expected = OTHERS[case]
    text = translate(book(yaml.safe_dump(given)))
    assert yaml.safe_load(text) == expected
    assert f"recipes/{recipe}.py --config THIS_FILE" in text
    assert all(len(line) <= 100 for line in text.splitlines()[2:])
    path = tmp_path / "ours.yaml"
    path.write_text(text)
    loaded = loaded_by(recipe, path)
    assert loaded.model.model_name_or_path == expected["model_name_or_path"]
    assert loaded.own.dataset.seed == 42 if case == "distillation" else loaded.own.dataset.path


OTHERS_REFUSED = {
    "no strategy": (REJECTION | {"selection": {}}, "selection.strategy is '(none)'; write top_per"),
    "another limit in evaluation": (
        REJECTION | {"eval_max_new_tokens": 256},
        "eval_max_new_tokens is 256 and max_new_tokens 512, and evaluation has the limit of",
    ),
    "a softer success": (
        DISTILLATION | {"success_reward_threshold": 0.5},
        "success_reward_threshold is 0.5, and the recipe takes 1 for right; write 1.0.",
    ),
    "chunks that do not fit": (
        DISTILLATION | {"rollout_chunk": 5},
        "rollout_chunk is 5, which does not divide the 16 x 8 completions of a step; write one",
    ),
    "no number of rows": (
        INSTRUCTION | {"max_samples": "all"},
        "max_samples is 'all'; write a whole number",
    ),
    "an unknown field": (
        INSTRUCTION | {"packing": True},
        "packing is not a field of the book's code; remove it",
    ),
    "fields of no kind": ({"a": 1}, "this is not a config of the book's code: its fields fit"),
    "fields of many kinds": (
        {"seed": 1, "model_name": "m"},
        "this is not a config of the book's code: its fields fit policy_gradients, distillation, "
        "direct_alignment, instruction_tuning, rejection_sampling alike; write those of one",
    ),
}


@pytest.mark.parametrize("case", OTHERS_REFUSED)
def test_other_kinds_that_do_not_carry_over(refused, case):
    given, says = OTHERS_REFUSED[case]
    assert says in refused(yaml.safe_dump(given))


OTHER_VALUES = {
    **{"loss": "gspo", "kl_estimator": "kl1", "lr_scheduler": "warmup_only", "data.specs": [{}]},
    **{"sample_prompt_strategy": "fixed", "sample_prompts_file": "mine.txt", "beta": 0.3},
    **{"selection.strategy": "random_per_prompt", "train_batch_size": 4, "batch_acc": 2},
}
FULL = {
    "policy_gradients": PG,
    "direct_alignment": yaml.safe_load(DIRECT_ALIGNMENT),
    "instruction_tuning": INSTRUCTION,
    "rejection_sampling": REJECTION,
    "distillation": DISTILLATION,
    "reward_models": yaml.safe_load(REWARD_MODEL),
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_no_field_is_dropped_in_silence(book, kind):
    base = FULL[kind]
    losses = {"policy_gradients": "ppo grpo sapo dapo maxrl", "direct_alignment": "dpo cdpo simpo"}
    for name in DEFAULTS[kind]:
        told = False
        for loss in losses.get(kind, "").split() or [base.get("loss")]:
            block, _, key = name.rpartition(".")
            given = {**base} | ({"loss": loss} if loss else {})
            inside = base.get(block, {}) if block else base
            old = inside.get(key, DEFAULTS[kind][name])
            value = OTHER_VALUES.get(name, not old if isinstance(old, bool) else None)
            if value is None:
                number = isinstance(old, int | float) or name == "max_samples"
                value = (old or 2) * 2 if number else f"{old or 'x'}-2"
            changed = {block: {**inside, key: value}} if block else {key: value}
            before = translate(book(yaml.safe_dump(given)))
            try:
                after = translate(book(yaml.safe_dump(given | changed)))
            except InputError as error:
                told |= name in str(error) or name == "loss"  # that of another kind
            else:
                told |= before != after or f"#   {name}: " in after
        assert told, name


@pytest.mark.parametrize("kind", DEFAULTS)
@pytest.mark.parametrize("value", [-1, float("nan"), [], "?"], ids=str)
def test_a_value_that_is_none_is_refused_by_its_name_or_comes_through(book, kind, value):
    """No value ends in an error of another kind: it is refused, or it is one that a field has."""
    is_free_text = {"device", "output_dir", "model_name", "model_id", "chat_template_source"}
    for name in DEFAULTS[kind]:
        block, _, key = name.rpartition(".")
        base = FULL[kind]
        changed = {block: {**base.get(block, {}), key: value}} if block else {key: value}
        path = book(yaml.safe_dump(base), **changed)
        try:
            text = translate(path)
        except InputError as error:
            assert key in str(error), name
            assert "\n" not in str(error)
            continue
        # what is left is a name, an id of a device, or a number that may be below 0
        below_0 = {"format_weight", "sample_every", "eval_every", "score_batch_size"}
        is_name = value == "?" and isinstance(DEFAULTS[kind][name], str | None)
        is_id = "device" in name or name.startswith(("eval_", "max_prompt_len", "max_reprompt_len"))
        is_unread = f"#   {name}:" in text
        is_any = is_name or is_id or is_unread or name in below_0 | is_free_text
        assert is_any or name == "data.specs", name


# kind -> fields of an edited config, and the sentence that names the field
EDITS_REFUSED = {
    "gradients made 0": (PG | {"max_norm": 0.0}, "max_norm is 0.0; write a number above 0"),
    "fewer questions than prompts": (
        PG | {"data": PG["data"] | {"size": 3}},
        "data.size is 3, fewer than the 4 of prompts_per_step, so the code trains nothing",
    ),
    "no micro-batch": (INSTRUCTION | {"batch_size": 0}, "batch_size is 0; write 1 or more"),
    "a slice of a slice": (
        INSTRUCTION | {"dataset_split": "train[:50]"},
        "dataset_split is 'train[:50]', a slice, and rows are taken of it; write the whole split",
    ),
    "a slice for a reward model": (
        OUTCOMES | {"dataset_split": "train[:50%]"},
        "dataset_split is 'train[:50%]', a slice, and rows are taken of it",
    ),
    "a strategy for a block": (REJECTION | {"selection": "top"}, "selection is 'top'; write a map"),
    "a loss that is a list": (PG | {"loss": ["grpo"]}, "loss is ['grpo']; write one of reinforce"),
    "a bound under the code's name": (
        PG | {"clip_eps_hi": -1.0},
        "clip_eps_hi: grpo (code): epsilon_high must be 0 or more, not -1",
    ),
    "a longer cache than completion": (
        PG | {"loss": "dapo", "l_cache": 600},
        "l_cache is 600, more than the 512 of max_new_tokens; write less",
    ),
}


@pytest.mark.parametrize("case", EDITS_REFUSED)
def test_edits_that_do_not_carry_over_are_refused_by_name(refused, case):
    given, says = EDITS_REFUSED[case]
    assert says in refused(yaml.safe_dump(given))


def test_a_process_reward_model_stays_at_its_rate_whatever_the_schedule(book):
    given = PROCESS | {"lr_scheduler": "linear_decay"}
    text = translate(book(yaml.safe_dump(given)))
    assert yaml.safe_load(text)["lr_scheduler_type"] == "constant_with_warmup"
    flat = " ".join(text.replace("#", " ").split())
    assert "the book's code does not read it for a process reward model, warms up from a" in flat
    without = translate(book(yaml.safe_dump(given | {"warmup_ratio": 0.0})))
    assert yaml.safe_load(without)["lr_scheduler_type"] == "constant"
    assert "warms up" not in without


def test_without_a_warm_up_nothing_is_said_of_its_start(book):
    given = yaml.safe_load(REWARD_MODEL) | {"lr_scheduler": "warmup_only", "warmup_ratio": 0.0}
    text = translate(book(yaml.safe_dump(given)))
    assert yaml.safe_load(text)["lr_scheduler_type"] == "constant" and "tenth" not in text


def test_more_rows_than_the_data_set_has(book):
    name = "argilla/ultrafeedback-binarized-preferences-cleaned"
    given = {"dataset_name": name, "samples": 80_000, "val_ratio": 0.5}
    data = yaml.safe_load(translate(book(REWARD_MODEL, **given)))["dataset"]
    assert (data["split"], data["eval_split"]) == ("train[:30458]", "train[30458:60917]")


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_or_writes_once(book, tmp_path, capsys):
    path = book(POLICY_GRADIENT)
    main(["translate", str(path)])
    text = capsys.readouterr().out
    assert text == translate(path)
    output = tmp_path / "new" / "ours.yaml"
    main(["translate", str(path), "--output", str(output)])
    assert output.read_text() == text.replace("THIS_FILE", str(output))
    assert [p.name for p in output.parent.iterdir()] == ["ours.yaml"]
    output.write_text("mine")
    with pytest.raises(SystemExit, match=r"error: --output: .*ours.yaml exists; name a new file\."):
        main(["translate", str(path), "--output", str(output)])
    assert output.read_text() == "mine"


def test_the_command_refuses_in_one_sentence(book):
    path = book(DIRECT_ALIGNMENT, loss="dpo_norm", label_smoothing=0.1)
    with pytest.raises(SystemExit, match=r"error: .*label_smoothing has no place in dpo_norm"):
        main(["translate", str(path)])


# --- measured ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [name for name in READ if name != "ppo"])
def test_a_translated_policy_gradient_computes_what_the_code_does(book, tmp_path, loss):
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book(POLICY_GRADIENT, loss=loss)))
    [asked] = distances(read_subject(path, None), [(loss, "code")])
    assert asked.equal, asked.worst


@pytest.mark.parametrize("case", [case for case in DIRECT if case != "kto"])
def test_a_translated_direct_alignment_computes_what_the_code_does(book, tmp_path, case):
    changed, _, algorithm, _ = DIRECT[case]
    path = tmp_path / "ours.yaml"
    path.write_text(translate(book(DIRECT_ALIGNMENT, **{"loss": case} | changed)))
    [asked] = distances(read_subject(path, None), [(algorithm, "code")])
    assert asked.equal, asked.worst


# --- edited configs: data sets and templates -----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reader", "says"),
    [
        ("Anthropic/hh-rlhf", "hh", "here each turn is a message of its own"),
        ("me/pairs", "book_pairs", "the chat template is applied, as in the book's code"),
        ("HuggingFaceH4/ultrafeedback_binarized", "ultrafeedback", ""),
        ("me/my-ultrafeedback-of-texts", "book_pairs", "the chat template is applied"),
    ],
)
def test_pairs_are_read_as_the_code_reads_them(book, tmp_path, name, reader, says):
    path = tmp_path / "ours.yaml"
    text = translate(book(DIRECT_ALIGNMENT, dataset_name=name))
    path.write_text(text)
    assert loaded_by("dpo", path).own.dataset.reader == reader
    assert says in " ".join(text.replace("#", " ").split())
    text = translate(book(REWARD_MODEL, dataset_name=name))
    assert yaml.safe_load(text)["dataset"]["reader"] == reader


@pytest.fixture
def built(run, monkeypatch, tmp_path):
    """Return the trainer that a recipe builds of a translation on rows of one's own."""
    found = []
    monkeypatch.setattr(train, "run", lambda trainer, *_, **__: found.append(trainer))

    def built(recipe, text, rows, *words):
        path = tmp_path / "ours.yaml"
        path.write_text(text)
        data = write_lines(tmp_path / "rows.jsonl", rows)
        small = ["--model_name_or_path", "tiny", "--dataset.path", data, "--use_cpu"]
        small += ["--bf16", "false", "--dtype", "float32", "--report_to", "none"]
        run(recipe, path.with_suffix(""), *small, *words)
        return found.pop()

    return built


def test_pairs_of_texts_get_the_tokens_of_the_books_code(book, built):
    rows = [{"prompt": "ab", "chosen": "ba", "rejected": "ab"}] * 4
    trainer = built("dpo", translate(book(DIRECT_ALIGNMENT, dataset_name="me/pairs")), rows)
    row, tokenizer = trainer.train_dataset[0], trainer.processing_class
    asked = [{"role": "user", "content": "ab"}]
    for side, answer in (("chosen_ids", "ba"), ("rejected_ids", "ab")):
        whole = [*asked, {"role": "assistant", "content": answer}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template(whole, tokenize=False)
        assert row["prompt_ids"] == tokenizer(prompt, add_special_tokens=False).input_ids
        assert row["prompt_ids"] + row[side] == tokenizer(text, add_special_tokens=False).input_ids
