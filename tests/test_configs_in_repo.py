"""Every config in the repository loads, for the number of processes it is meant for."""

import runpy
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from test_config import load_for_its_machine

from rlhf_trl.run.config import read_config
from rlhf_trl.run.race import recipe_of

ROOT = Path(__file__).parent.parent
POLICY_GRADIENT = "rlhf_trl.trainers.policy_gradient.PolicyGradientConfig"
TRL_CONFIGS = {
    "sft": "SFTConfig",
    "grpo": POLICY_GRADIENT,
    "ppo": "rlhf_trl.trainers.ppo.PPOConfig",
    "dpo": "rlhf_trl.trainers.direct_alignment.PreferenceConfig",
    "kto": "rlhf_trl.trainers.direct_alignment.UnpairedConfig",
    "orpo": "rlhf_trl.trainers.orpo.OddsRatioConfig",
    "reward": "rlhf_trl.trainers.reward_models.ComparisonConfig",
    "orm": "rlhf_trl.trainers.reward_models.TokenRewardConfig",
    "prm": "rlhf_trl.trainers.reward_models.TokenRewardConfig",
}
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if path not in ACCELERATE and path.name != "base.yaml"  # only extended, never run
)


def name(path):
    return str(path.relative_to(ROOT / "configs"))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_loads(monkeypatch, path):
    given = read_config(path)
    recipe = Path(recipe_of(given.get("algorithm"))).stem
    own = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))["Run"]
    loaded = load_for_its_machine(monkeypatch, path, own, TRL_CONFIGS[recipe])
    assert loaded.trl.output_dir.startswith("outputs/")
    assert loaded.model.model_name_or_path
    if recipe == "grpo":
        assert loaded.trl.generation_batch_size % loaded.trl.num_generations == 0


def test_the_books_grpo_makes_four_optimizer_steps_per_buffer_of_four_prompts(monkeypatch):
    own = runpy.run_path(str(ROOT / "recipes" / "grpo.py"))["Run"]
    path = ROOT / "configs" / "book" / "grpo.yaml"
    args = load_for_its_machine(monkeypatch, path, own, POLICY_GRADIENT).trl
    assert args.generation_batch_size == 4 * 8
    assert args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps == 4
    assert args.temperature == 1.0  # scoring
    assert args.generation_kwargs == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
    assert (args.loss_type, args.scale_rewards) == ("grpo", "group")


BOOK = {  # beta, learning rate, pairs
    **dict.fromkeys(("dpo", "cdpo", "ipo", "kto", "apo_zero", "apo_down"), (0.1, 5e-6, 6400)),
    "dpo_norm": (2.0, 5e-6, 6400),
    "simpo": (2.0, 8e-7, 12800),
    "orpo": (0.1, 1e-6, 12800),
}


@pytest.mark.parametrize("algorithm", BOOK)
def test_the_books_direct_alignment_takes_64_pairs_a_step_for_three_epochs(monkeypatch, algorithm):
    recipe = Path(recipe_of(algorithm)).stem
    own = runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"))["Run"]
    path = ROOT / "configs" / "book" / f"{algorithm}.yaml"
    loaded = load_for_its_machine(monkeypatch, path, own, TRL_CONFIGS[recipe])
    args = loaded.trl
    assert (args.beta, args.learning_rate, loaded.own.max_samples) == BOOK[algorithm]
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 64
    assert (args.num_train_epochs, args.max_length, args.warmup_steps) == (3, 2048, 0.1)
    assert loaded.model.model_name_or_path == "allenai/OLMo-2-0425-1B-SFT"


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_accelerate_config_loads(path):
    config = load_config_from_file(str(path))
    processes = {"cpu": 1, "one_gpu": 1, "cpu_2proc": 2, "multi_node": 16}.get(path.stem, 8)
    assert config.num_processes == processes
    assert config.mixed_precision == "no"  # bf16 here would overrule a run's bf16: false
    kinds = {
        "fsdp2": "FSDP",
        "cpu": "NO",
        **dict.fromkeys(("zero1", "zero2", "zero3"), "DEEPSPEED"),
    }
    wanted = kinds.get(path.stem, "NO" if path.stem == "one_gpu" else "MULTI_GPU")
    assert str(config.distributed_type).rpartition(".")[2] == wanted
    if wanted == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(path.stem.removeprefix("zero"))
