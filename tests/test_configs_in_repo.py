"""Every config in the repository loads, for the number of processes it is meant for."""

import json
import re
import runpy
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from test_config import load_for_its_machine

from rlhf_trl.pipeline.plan import read_plan
from rlhf_trl.ports.book_fields import DEFAULTS
from rlhf_trl.run.config import read_config
from rlhf_trl.run.stages import STAGES, stage_of, stage_of_config

ROOT = Path(__file__).parent.parent
ACCELERATE = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
PIPELINES = sorted((ROOT / "configs" / "pipeline").glob("*.yaml"))
STAGES_OF_PIPELINES = [(path, name) for path in PIPELINES for name in read_plan(str(path)).stages]
CONFIGS = sorted(
    path
    for path in (ROOT / "configs").rglob("*.yaml")
    if path not in [*ACCELERATE, *PIPELINES]
    and path.name != "base.yaml"  # only extended, never run
)


def name(path):
    return str(path.relative_to(ROOT / "configs"))


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_config_loads(path):
    check_that_it_loads(path, stage_of_config(read_config(path)))


def check_that_it_loads(path, stage):
    """Check that a config of a stage loads on the machine that it is meant for."""
    loaded = load_for_its_machine(path, stage.part("fields"), stage.config)
    assert loaded.trl.output_dir.startswith("outputs/")
    assert loaded.model.model_name_or_path
    if stage.name == "grpo":
        assert loaded.trl.generation_batch_size % loaded.trl.num_generations == 0


@pytest.mark.parametrize(
    ("path", "stage"), STAGES_OF_PIPELINES, ids=[f"{p.stem}-{s}" for p, s in STAGES_OF_PIPELINES]
)
def test_every_stage_of_a_pipeline_loads(tmp_path, path, stage):
    planned = read_plan(str(path)).stages[stage]
    config = tmp_path / f"{stage}.yaml"
    planned.write(config)
    check_that_it_loads(config, planned.stage)
    for models in planned.inputs.values():  # what it reads comes before it
        assert all(model in read_plan(str(path)).stages for model in models)


def test_the_books_grpo_makes_four_optimizer_steps_per_buffer_of_four_prompts():
    own = STAGES["grpo"].part("fields")
    path = ROOT / "configs" / "book" / "grpo.yaml"
    args = load_for_its_machine(path, own, STAGES["grpo"].config).trl
    assert args.generation_batch_size == 4 * 8
    assert args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps == 4
    assert args.temperature == 1.0  # scoring
    assert args.generation_kwargs == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
    assert (args.loss_type, args.scale_rewards) == ("grpo", "group")


def test_every_config_of_the_book_says_what_it_takes_or_that_nobody_measured():
    for path in (ROOT / "configs" / "book").glob("*.yaml"):
        head = path.read_text().partition("\n\n")[0]
        assert re.search(r"^# .*GPU with \d+ GB", head, re.MULTILINE), path
        assert re.search(r"emory and time: (not measured yet|\d.* GiB.* s )", head), path


BOOK = {  # beta, learning rate, pairs; 300 steps of 64 pairs, or 600, as the book's configs say
    **dict.fromkeys(("dpo", "cdpo", "ipo", "kto", "apo_zero", "apo_down"), (0.1, 5e-6, 6400)),
    "dpo_norm": (2.0, 5e-6, 6400),
    "simpo": (2.0, 8e-7, 12800),
    "orpo": (0.1, 1e-6, 12800),
}


@pytest.mark.parametrize("algorithm", BOOK)
def test_the_books_direct_alignment_takes_64_pairs_a_step_for_three_epochs(algorithm):
    recipe = stage_of(algorithm).name
    own = STAGES[recipe].part("fields")
    path = ROOT / "configs" / "book" / f"{algorithm}.yaml"
    loaded = load_for_its_machine(path, own, STAGES[recipe].config)
    args = loaded.trl
    assert (args.beta, args.learning_rate, loaded.own.max_samples) == BOOK[algorithm]
    texts = 2 if algorithm == "kto" else 1  # a batch of KTO counts completions, two of each pair
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert batch == 64 * texts
    steps = loaded.own.max_samples * texts // batch * args.num_train_epochs
    assert steps == {6400: 300, 12800: 600}[loaded.own.max_samples]
    assert (args.num_train_epochs, args.max_length, args.warmup_steps) == (3, 2048, 0.1)
    assert loaded.model.model_name_or_path == "allenai/OLMo-2-0425-1B-SFT"


def test_the_books_dapo_and_maxrl_take_its_cache_and_its_questions():
    dapo, maxrl = (read_config(ROOT / f"configs/book/{name}.yaml") for name in ("dapo", "maxrl"))
    assert (dapo["soft_punish_cache"], dapo["max_completion_length"]) == (128, 512)
    assert (maxrl["dataset"]["size"], dapo["dataset"]["size"]) == (3000, 3000)


@pytest.mark.parametrize("algorithm", ["reward", "orm", "prm"])
def test_the_books_reward_models_train_float32_weights_under_autocast(algorithm):
    own = STAGES[algorithm].part("fields")
    path = ROOT / "configs" / "book" / f"{algorithm}.yaml"
    loaded = load_for_its_machine(path, own, STAGES[algorithm].config)
    assert (loaded.model.dtype, loaded.trl.bf16) == ("float32", True)
    data = loaded.own.dataset
    readers = {"reward": "ultrafeedback", "orm": "gsm8k_rollouts", "prm": "prm800k"}
    assert data.reader == readers[algorithm]
    if algorithm == "orm":
        assert data.path == "RLHF-Book/gsm8k-qwen3-0.6B-rollouts"
        assert (data.split, data.eval_split, data.eval_size) == (
            *("train[:1800]", "train[1800:2000]"),
            200,
        )


def test_the_book_tunes_on_the_last_turn_with_the_template_of_the_tuned_sibling():
    own = STAGES["sft"].part("fields")
    path = ROOT / "configs" / "book" / "sft.yaml"
    loaded = load_for_its_machine(path, own, "SFTConfig")
    args, data, panels = loaded.trl, loaded.own.dataset, loaded.own.samples
    assert loaded.own.chat_template_fallback == f"{loaded.model.model_name_or_path}-SFT"
    assert (data.path, data.reader, data.turns) == ("HuggingFaceH4/no_robots", "messages", "last")
    batch = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert (*batch, args.num_train_epochs, args.learning_rate) == (4, 8, 3, 5e-6)
    assert (args.warmup_steps, args.lr_scheduler_type, args.max_length) == (0.1, "linear", 2048)
    assert (panels.every, panels.temperature, panels.top_p, panels.max_tokens) == (
        50,
        0.7,
        0.9,
        128,
    )
    assert len((ROOT / panels.file).read_text().splitlines()) == panels.count == 4


def test_the_books_sdpo_and_rejection_sampling_take_its_settings():
    def load(recipe, name):
        own = STAGES[recipe].part("fields")
        path = ROOT / "configs" / "book" / f"{name}.yaml"
        return load_for_its_machine(path, own, STAGES[recipe].config)

    args = load("distill", "sdpo").trl
    assert (args.generation_batch_size, args.num_generations, args.max_steps) == (128, 8, 200)
    assert args.steps_per_generation == args.gradient_accumulation_steps
    assert (args.kl_top_k, args.learning_rate, args.teacher) == (20, 1e-6, "live")
    assert args.generation_kwargs["temperature"] == 0.6 and args.temperature == 1.0
    rejection = load("rejection_sampling", "rejection_sampling")
    own, args = rejection.own, rejection.trl
    assert (own.temperature, own.top_p, own.top_k, own.num_generations) == (0.8, 0.95, 20, 8)
    assert (own.reward_model, own.ties) == ("nvidia/AceMath-7B-RM", "first")
    batch = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert (*batch, args.num_train_epochs, args.learning_rate) == (2, 4, 2, 5e-6)


DAPO = """
data:
  size: 3000
  specs: [{name: spell_backward, weight: 1, config: {min_word_len: 3, max_word_len: 10}}]
loss: dapo
clip_eps_hi: 0.28
l_cache: %s
batch_acc: 4
"""


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (128, None),
        (64, "dapo.yaml: soft_punish_cache is 128, the code's 64"),
        (128, "reward_models: translate does not know rollouts"),
    ],
)
def test_a_difference_from_the_books_code_is_explained_or_found(
    monkeypatch, tmp_path, capsys, cache, problem
):
    for kind in DEFAULTS:
        (tmp_path / "code" / kind / "configs").mkdir(parents=True)
        new = "    rollouts: int = 8\n" if problem and kind in problem else ""
        same = "    model_id: str\n" if kind == "reward_models" else "    model_name: str\n"
        (tmp_path / "code" / kind / "config.py").write_text(f"class Config:\n{same}{new}")
    path = tmp_path / "code" / "policy_gradients" / "configs" / "dapo.yaml"
    path.write_text(DAPO % cache)
    monkeypatch.setattr("sys.argv", ["compare_configs.py", str(tmp_path)])
    script = str(ROOT / "scripts" / "compare_configs.py")
    if problem is None:
        runpy.run_path(script, run_name="__main__")
    else:
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(script, run_name="__main__")
        assert str(stop.value.code).splitlines()[1:] == [problem]
    assert "dapo.yaml: formulation is 'chapter', the code's 'code': " in capsys.readouterr().out


@pytest.mark.parametrize("path", ACCELERATE, ids=name)
def test_accelerate_config_loads(path):
    config = load_config_from_file(str(path))
    processes = {"cpu": 1, "one_gpu": 1, "cpu_2proc": 2, "multi_node": 16}.get(path.stem, 8)
    assert config.num_processes == processes
    # bf16 here would overrule a run's bf16: false; beside a JSON file accelerate allows none
    has_file = "deepspeed_config_file" in (config.deepspeed_config or {})
    assert config.mixed_precision == (None if has_file else "no")
    kinds = {
        "fsdp2": "FSDP",
        "cpu": "NO",
        **dict.fromkeys(("zero1", "zero2", "zero3"), "DEEPSPEED"),
        **dict.fromkeys(("zero2_offload", "zero3_offload"), "DEEPSPEED"),
    }
    wanted = kinds.get(path.stem, "NO" if path.stem == "one_gpu" else "MULTI_GPU")
    assert str(config.distributed_type).rpartition(".")[2] == wanted
    if wanted == "DEEPSPEED":
        stage = int(path.stem.removeprefix("zero").removesuffix("_offload"))
        if has_file:
            settings = json.loads(
                (ROOT / config.deepspeed_config["deepspeed_config_file"]).read_text()
            )
            assert settings["zero_optimization"]["stage"] == stage
            assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
        else:
            assert config.deepspeed_config["zero_stage"] == stage
