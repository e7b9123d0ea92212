"""Completions without advantage are left out of the update, and prompts are read once: exactly."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from policy_gradient_cases import build, checkpoint, drift
from transformers import AutoModelForCausalLM

from rlhf_trl import manifests
from rlhf_trl.algorithms import formulation
from rlhf_trl.compare.measure import accumulate, batches, flat_gradient
from rlhf_trl.errors import InputError
from rlhf_trl.rollouts import sharing
from rlhf_trl.run import policy_gradients
from rlhf_trl.run.stages import STAGES
from rlhf_trl.trainers.skipping import cut, needs_all, of_like_length, rows_to_read

ON = {"skip_zero_advantage": True}
SHARED = {"share_prompts": True}
OFF = {"skip_zero_advantage": False}


read: list[list[float]] = []  # the share of completions with an advantage, by micro-batch


def right(completion_ids, word, **columns):
    """Equal rewards in the groups of words of five letters; others by what was answered."""
    pairs = zip(completion_ids, word, strict=True)
    return [1.0 if len(name) == 5 else float(sum(ids) % 2) for ids, name in pairs]


def wrong(completion_ids, **columns):
    return [0.0 for _ in completion_ids]


def trained(name, fields, *, steps=2, **config):
    """Gradients of some accumulation windows, in the order of the weights, and the trainer."""
    config = {"per_device_train_batch_size": 40, "reward_weights": [1.0]} | config
    trainer = build(name, rewards=[right], **OFF | fields, **config)
    torch.manual_seed(0)
    source, gradients = batches(trainer), []
    for step in range(steps):
        measured, seen = accumulate(trainer, source)
        gradients.append(measured.gradient)
        read.append([float((batch["advantages"] != 0).float().mean()) for batch in seen])
        drift(trainer.model, 0.02, step)
    return gradients, trainer


def apart(name, fields, **config):
    """How far the gradients of the windows are apart, relative to their norm, at most."""
    read.clear()
    ours, trainer = trained(name, fields, **config)
    assert any(share < 1 for window in read for share in window)
    theirs, _ = trained(name, {}, **config)
    assert any(float(gradient.norm()) > 0 for gradient in theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs), trainer


LORA = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
CASES = {
    "grpo": {},
    "grpo, two iterations": {"num_iterations": 2},
    "grpo, truncated ones masked": {"mask_truncated_completions": True},
    "grpo, LoRA": {"peft_config": LORA},
    "cispo": {},
    "rloo, KL in the reward": {"beta": 0.1},
}
MORE = {
    **{name: {} for name in ("drgrpo", "gspo", "cispo_window", "sapo", "dapo", "rloo")},
    "maxrl": {"format_reward": None},
    "grpo, four iterations": {"num_iterations": 4, "steps": 4},
    "grpo, four steps a generation": {
        "steps_per_generation": 4,
        "per_device_train_batch_size": 10,
        "num_iterations": 2,
        "steps": 8,
    },
    "cispo_window, accumulated": {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 10,
    },
    "dapo_per_prompt, accumulated": {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 10,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_all_completions(case):
    name, config = case.partition(",")[0], CASES[case]
    difference, trainer = apart(name, ON, **config)
    print(f"{case}: {difference:.1e}")
    assert trainer.skips and difference < 1e-6


@pytest.mark.promise
@pytest.mark.parametrize("fields", [ON, ON | SHARED], ids=["skipped", "shared"])
@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_the_gradient_of_every_row_is_that_of_all_completions(case, fields):
    name, config = case.partition(",")[0], (CASES | MORE)[case]
    difference, _ = apart(name, fields, **config)
    print(f"{case}: {difference:.1e}")
    # shared, a ratio is to log-probabilities of a padded batch, and their rounding shows
    assert difference < (1e-5 if fields.keys() & SHARED.keys() else 2e-6)


def test_shared_prompts_are_used_and_leave_the_gradient():
    difference, trainer = apart("grpo", ON | SHARED)
    calls = []
    score = sharing.Packed.score
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing.Packed, "score", lambda *args: calls.append(1) or score(*args))
        accumulate(trainer, batches(trainer))
    assert calls == [1] and difference < 3e-6


@pytest.mark.promise
def test_shared_prompts_are_no_further_from_float64_than_the_padded_batch():
    """A permuted batch keeps the rounding of each row; packed, rows are rounded anew."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64)
    runs = {"exact": ({}, model), "padded": ({}, None), "shared": (SHARED, None)}
    gradients = {
        name: trained("grpo", fields, steps=1, model=start)[0][0].double()
        for name, (fields, start) in runs.items()
    }
    exact = gradients.pop("exact")
    apart = {name: float((g - exact).norm() / exact.norm()) for name, g in gradients.items()}
    print(apart)
    assert 0 < apart["shared"] < 1.5 * apart["padded"] < 1e-5


def test_without_any_advantage_all_weights_have_a_gradient_of_zero():
    trainer = build("grpo", rewards=[wrong], reward_weights=[1.0], **ON)
    trainer.current_gradient_accumulation_steps = 1
    lengths = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    trainer.training_step(trainer.model, next(batches(trainer)), None)
    assert lengths == [1]  # what is read, as generation is replaced
    gradients = [weight.grad for weight in trainer.model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    entropy = trainer._metrics["train"]["entropy"]
    assert len(entropy) == 1 and 0 < entropy[0] < 5


@pytest.mark.parametrize("reward", [right, wrong])
def test_old_log_probabilities_far_away_leave_the_loss_finite(reward):
    finite = []
    for fields in (ON, OFF):
        size = {"num_iterations": 2, "per_device_train_batch_size": 40}
        trainer = build("grpo", rewards=[reward], reward_weights=[1.0], **size, **fields)
        trainer.model.train()
        inputs = trainer._prepare_inputs(next(batches(trainer)))
        inputs["old_per_token_logps"][inputs["advantages"] == 0] = -200.0
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        gradient = flat_gradient(trainer.model)
        finite.append(bool(loss.isfinite() and gradient.isfinite().all()))
        assert finite != [True] or (float(gradient.norm()) > 0) == (reward is right)
    assert finite == [True, False]  # exp(200) times 0, where all is read


def test_what_is_read_of_a_batch():
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]])
    ids = torch.arange(18).view(3, 6)
    assert rows_to_read(torch.tensor([0.0, -0.0, 1e-9]), mask).tolist() == [2]
    assert rows_to_read(torch.zeros(3), mask).tolist() == [2]  # the shortest
    part = cut(ids, mask, 3, torch.tensor([0, 2]))
    assert part[0].tolist() == [[0, 1, 2, 3, 4], [12, 13, 14, 15, 16]] and part[2] == 2
    nothing = cut(ids, mask, 3, torch.tensor([1]))
    assert nothing[0].shape == (1, 4) and nothing[2] == 1


def test_rows_are_read_in_two_parts_where_that_is_less():
    lengths = [8, 1, 8, 2, 8, 1]
    mask = torch.tensor([[1, 1] + [1] * length + [0] * (8 - length) for length in lengths])
    parts = of_like_length(mask, 8)
    assert [part.tolist() for part in parts] == [[1, 3, 5], [0, 2, 4]]
    assert [part.tolist() for part in of_like_length(mask, 8, most=1)] == [[0, 1, 2, 3, 4, 5]]
    for few in (mask[:1], mask[[0, 2, 4]]):  # nothing is gained
        assert [part.tolist() for part in of_like_length(few, 8)] == [[*range(len(few))]]


def test_packed_completions_have_the_log_probabilities_of_each_alone():
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    prompts = [[7, 8, 9, 10, 11], [12], [7, 8, 9, 10, 11], [7, 8, 9, 10, 11]]
    completions = [[20, 21, 22], [23], [24, 25], [26]]
    ids = torch.zeros(4, 8, dtype=torch.long)
    mask = torch.zeros_like(ids)
    expected = torch.zeros(4, 3)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        places = slice(5 - len(prompt), 5 + len(completion))
        ids[row, places], mask[row, places] = torch.tensor(prompt + completion), 1
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        expected[row, : len(completion)] = logps[range(len(completion)), completion]
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        packed = sharing.packed(model.config, ids, mask, 3)
        assert packed.source.shape == (2, 4 + 4 + 3 + 2)
        trainer = build("grpo", model=model)  # gives the model its fused head
        with torch.no_grad():
            logps, entropies = packed.score(trainer, trainer.model)
        assert torch.allclose(logps, expected, atol=2e-6)
        assert ((entropies > 0) == mask[:, 5:].bool()).all()
        del model.forward
    alone = sharing.packed(model.config, ids[:2], mask[:2], 3)
    assert alone is None  # nothing is shared


class Settings(SimpleNamespace):
    """What the functions read of a config."""

    formulation, beta, router_aux_loss_coef, neftune_noise_alpha = "chapter", 0.0, 0.001, None
    skip_zero_advantage = share_prompts = True


def model_config(**changed):
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=2, hidden_size=8)
    config._attn_implementation = "sdpa"
    for name, value in changed.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("row", "config", "model", "says"),
    [
        ("grpo", {"beta": 0.04}, {}, "beta: 0.04, a KL in the loss of grpo (chapter)"),
        ("grpo", {"formulation": "trl"}, {}, "formulation: trl, which is stock TRL"),
        ("ppo", {}, {}, "ppo (chapter), whose critic learns from them"),
        ("opd", {}, {}, "opd (chapter), whose loss reads a teacher"),
        ("grpo", {}, {"output_router_logits": False}, "router_aux_loss_coef: 0.001, a loss"),
        ("grpo", {}, {"attention_dropout": 0.1}, "attention_dropout: 0.1, which draws other"),
        ("grpo", {"neftune_noise_alpha": 5.0}, {}, "neftune_noise_alpha: 5.0, which draws"),
    ],
)
def test_what_forbids_skipping_is_named(row, config, model, says):
    row = formulation(row, "chapter")
    with pytest.raises(InputError) as error:
        needs_all(row, Settings(**config), [model_config(**model)])
    assert says in str(error.value)
    assert str(error.value).startswith("skip_zero_advantage: true does not go with ")
    reason = needs_all(row, Settings(**config, skip_zero_advantage=None), [model_config(**model)])
    assert reason is not None and says in reason
    assert needs_all(formulation("grpo", "chapter"), Settings(), [model_config()]) is None
    assert needs_all(formulation("rloo", "chapter"), Settings(beta=0.1), [model_config()]) is None


@pytest.mark.parametrize(
    ("row", "model", "says"),
    [
        ("ppo", {}, "ppo (chapter), whose loss reads more"),
        ("grpo", {"_attn_implementation": "flash_attention_2"}, "attn_implementation: flash_"),
        ("grpo", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types of qwen3"),
        ("grpo", {"layer_types": None, "sliding_window": 8}, "layer_types of qwen3"),
        ("grpo", {"output_router_logits": True}, "the router of qwen3"),
    ],
)
def test_what_forbids_sharing_is_named(row, model, says):
    obstacles = sharing.obstacles(formulation(row, "chapter"), Settings(), [model_config(**model)])
    assert says in next(reason for reason, is_there in obstacles.items() if is_there)
    plain = sharing.obstacles(formulation("grpo", "chapter"), Settings(), [model_config()])
    assert not any(plain.values())


def test_a_trainer_refuses_what_is_not_exact():
    dropout = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    with pytest.raises(InputError, match=r"skip_zero_advantage: true .* lora_dropout: 0.1"):
        build("grpo", peft_config=dropout, **ON)
    with pytest.raises(InputError, match=r"share_prompts: true .* lora_dropout: 0.1"):
        build("grpo", peft_config=dropout, **OFF, **SHARED)
    assert not build("grpo", peft_config=dropout, skip_zero_advantage=None).skips
    assert not build("grpo", "trl", skip_zero_advantage=None).skips


def loaded(stage, *words):
    return STAGES[stage].load(["--config", f"configs/tiny/{stage}.yaml", *words])


@pytest.mark.parametrize(
    ("stage", "words", "says"),
    [
        ("grpo", [], "skip_zero_advantage on"),
        ("grpo", ["--skip_zero_advantage", "false"], "skip_zero_advantage off"),
        ("grpo", ["--beta", "0.04"], "off (beta: 0.04, a KL in the loss of grpo (chapter))"),
        ("grpo", ["--formulation", "trl"], "off (formulation: trl, which is stock TRL)"),
        ("grpo", ["--use_peft", "--lora_dropout", "0.1"], "off (lora_dropout: 0.1, which"),
        ("ppo", [], "skip_zero_advantage off (ppo (chapter), whose critic"),
    ],
)
def test_the_first_line_says_whether_completions_are_skipped(stage, words, says):
    config = loaded(stage, *words)
    assert says in policy_gradients.skipping_note(config)
    assert config.trl.skip_zero_advantage is says.startswith("skip_zero_advantage on")


KINDS = {
    "stock": ["--formulation", "trl"],
    "off": ["--skip_zero_advantage", "false", "--read_prompts_once", "null"],
    "on": ["--skip_zero_advantage", "true", "--share_prompts", "true"],
}


@pytest.mark.promise
def test_whole_runs_end_within_the_spread_of_seeds(run, tmp_path):
    """The demo from its start: what rounds otherwise samples other tokens, and learns as much."""
    ends = {}
    for kind, words in KINDS.items():
        for seed in range(3):
            options = [*words, "--seed", seed, "--eval_strategy", "no", "--eval_on_start", "false"]
            folder, _ = run("grpo", "grpo", *options, folder=tmp_path / f"{kind}-{seed}")
            summary = json.loads((folder / "summary.json").read_text())
            ends.setdefault(kind, []).append(summary["after"]["eval_sampled_exact_match"])
    print(ends)
    spread = max(max(matches) - min(matches) for matches in ends.values())
    means = [sum(matches) / len(matches) for matches in ends.values()]
    assert min(means) > 0.7 and max(means) - min(means) <= spread


def test_a_checkpoint_goes_on_as_it_was_made(monkeypatch):
    for manifest, says in (({}, "off (as in ckpt)"), ({"skip_zero_advantage": True}, "on")):
        config = loaded("grpo")
        config.trl.resume_from_checkpoint = "ckpt"
        monkeypatch.setattr(manifests, "read_manifest", lambda path, m=manifest: m)
        assert policy_gradients.skipping_note(config) == f"skip_zero_advantage {says}"
