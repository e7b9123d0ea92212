"""The configs of the policy-gradient algorithms: each loads, and each tiny one runs."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rlhf_trl.algorithms import formulation, names
from rlhf_trl.errors import InputError
from rlhf_trl.run.policy_gradients import on_policy_note
from rlhf_trl.run.stages import STAGES, stage_of
from rlhf_trl.tiny import checkpoint_path

ROOT = Path(__file__).parent.parent
NAMES = [name for name in names("policy_gradient") if name != "ppo"]
SMALL = [
    *["--dataset.size", 40, "--dataset.eval_size", 8, "--max_steps", 2, "--learning_rate", "1e-3"],
    *["--per_device_train_batch_size", 16],
]


@pytest.mark.parametrize("name", NAMES)
def test_each_tiny_config_runs(run, name):
    words = SMALL if name == "reinforce" else [*SMALL, "--num_generations", 4]
    folder, out = run("grpo", name, *words)
    assert out.startswith(f"{name} (chapter) on cpu") or f"\n{name} (chapter) on cpu" in out
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2
    new = AutoModelForCausalLM.from_pretrained(folder / "model")
    old = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    pairs = zip(new.parameters(), old.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 1e-4


@pytest.mark.parametrize("which", ["code", "trl"])
def test_another_formulation_runs_by_one_word(run, which):
    folder, out = run("grpo", "gspo", *SMALL, "--num_generations", 4, "--formulation", which)
    assert f"gspo ({which}) on cpu" in out and (folder / "summary.json").exists()


def test_a_mistake_of_the_trainer_is_one_sentence(refused):
    sentence = refused("grpo", "dapo", *SMALL, "--num_generations", 4, "--soft_punish_cache", 64)
    assert "soft_punish_cache is 64" in sentence


def test_an_order_of_the_rows_that_trl_would_ignore(refused, tmp_path):
    words = ["--train_sampling_strategy", "batch_rebalance"]
    sentence = refused("grpo", "grpo", *SMALL, *words)
    assert "train_sampling_strategy is batch_rebalance, which GRPOTrainer does not" in sentence
    argv = ["--config", f"{ROOT}/configs/tiny/grpo.yaml", "--formulation", "trl", *words]
    assert STAGES["grpo"].load(argv).trl.train_sampling_strategy == "batch_rebalance"


def settings(folder, name, tmp_path):
    """What the recipe would hand to the trainer."""
    argv = ["--config", f"{ROOT}/configs/{folder}/{name}.yaml", "--output_dir", str(tmp_path)]
    return stage_of(name).load([*argv, "--use_cpu", "--bf16", "false"])


def test_a_run_says_where_its_algorithm_cannot_show_itself(tmp_path):
    def note(name, **changes):
        loaded = settings("tiny", name, tmp_path)
        for key, value in changes.items():
            setattr(loaded.trl, key, value)
        return on_policy_note(loaded)

    start = "one update per generation: every ratio is 1, so "
    once = {"num_iterations": 1}
    assert note("gspo", **once) == f"{start}gspo is grpo here; num_iterations 2 tells them apart"
    assert note("gspo") is None  # two updates
    assert note("gspo", **once, steps_per_generation=2) is None
    # TRL keeps the old log-probabilities where a generation does not end with its window
    assert note("gspo", **once, steps_per_generation=2, gradient_accumulation_steps=3) is None
    assert "sapo is grpo here" in note("sapo")
    assert note("cispo") == (
        f"{start}cispo differs from grpo in aggregation only, not in surrogate and epsilon_high; "
        "num_iterations 2 brings that in"
    )
    assert [name for name in ("grpo", "rloo", "drgrpo", "maxrl", "ppo") if note(name)] == []


# the book's code: completions per prompt, optimizer steps per generation, training rows
BOOK = {
    "reinforce": (1, 1, 15000),
    "rloo": (8, 4, 1000),
    "ppo": (1, 2, 10000),
    "grpo": (8, 4, 3000),
    "drgrpo": (8, 4, 1000),
    "gspo": (8, 4, 1000),
    "cispo": (8, 4, 1000),
    "sapo": (8, 4, 3000),
    "dapo": (8, 4, 3000),
    "maxrl": (8, 4, 3000),
}


@pytest.mark.parametrize("name", BOOK)
def test_each_book_config_has_the_books_settings(name, tmp_path):
    loaded = settings("book", name, tmp_path)
    args = loaded.trl
    assert loaded.own.algorithm == name
    steps = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    assert (args.num_generations, steps, loaded.own.dataset.size) == BOOK[name]
    assert args.gradient_accumulation_steps * args.per_device_train_batch_size == 8
    assert (args.temperature, args.generation_kwargs["temperature"]) == (1.0, 0.6)
    for field, value in formulation(name, "chapter").settings.items():
        assert getattr(args, field) == value
    if name == "ppo":
        assert args.generation_batch_size == 16
        found = args.gamma, args.lam, args.vf_coef, args.cliprange_value, args.epsilon
        assert found == (1.0, 0.98, 0.5, 0.4, 0.2)
    if name == "dapo":
        found = args.epsilon, args.epsilon_high, args.soft_punish_cache, args.max_completion_length
        assert found == (0.2, 0.28, 128, 512)
    if name == "cispo":
        assert (args.epsilon, args.epsilon_high) == (0.2, 0.4)


def test_in_formulation_trl_a_recipe_takes_every_loss_field_of_trls(tmp_path):
    written = "algorithm: grpo\nformulation: trl\ndelta: 1.5\nentropy_coef: 0.01\n"
    path = tmp_path / "run.yaml"
    path.write_text(f"extends: {ROOT / 'configs/tiny/grpo.yaml'}\n{written}")
    loaded = STAGES["grpo"].load(["--config", str(path)])
    assert (loaded.trl.delta, loaded.trl.entropy_coef) == (1.5, 0.01)
    for line, sentence in (
        ("kl_estimator: k1", r"run.yaml: kl_estimator is not read by grpo \(trl\)"),
        ("loss_type: sapo", "loss_type is 'sapo', .* write algorithm: sapo"),
    ):
        path.write_text(f"extends: {ROOT / 'configs/tiny/grpo.yaml'}\n{written}{line}\n")
        with pytest.raises(InputError, match=sentence):
            STAGES["grpo"].load(["--config", str(path)])
