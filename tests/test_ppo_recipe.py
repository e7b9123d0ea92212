"""PPO end to end: what a run leaves behind, resume, LoRA, reward models, processes, learning."""

import json
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import cause
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.run.claiming import claim
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.trainers import value_model

ROOT = Path(__file__).parent.parent
SMALL = [
    *["--dataset.size", 80, "--dataset.eval_size", 8, "--max_steps", 2, "--learning_rate", "1e-3"],
    *["--per_device_train_batch_size", 8, "--steps_per_generation", 1],
]


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def moved(model, start):
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_a_run_leaves_policy_and_value_model_apart(run, kind):
    folder, out = run("ppo", "ppo", *SMALL, "--value_model", kind)
    assert "ppo (chapter) on cpu" in out
    start = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    policy, info = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert moved(policy, start) > 1e-4
    assert not any("value_model" in n or "score" in n for n in weights(folder / "model"))
    value, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "value_model", output_loading_info=True
    )
    assert not any(info.values()), info
    assert value.config.num_labels == 1 and value.score.weight.any()
    trunk = dict(policy.model.named_parameters())
    alike = [torch.equal(p, trunk[n]) for n, p in value.model.named_parameters()]
    assert all(alike) if kind == "head" else not any(alike)
    ours = AutoTokenizer.from_pretrained(folder / "value_model").get_vocab()
    assert ours == AutoTokenizer.from_pretrained(checkpoint_path()).get_vocab()


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_exported_models_give_the_trainers_outputs(kind, tmp_path):
    from ppo_cases import build, unsettle

    trainer = build(value_model=kind)
    unsettle(trainer)
    trainer.save_model(str(tmp_path / "model"))
    trainer.save_value_model(str(tmp_path / "value_model"))
    ids = torch.randint(7, 119, (3, 9), generator=torch.Generator().manual_seed(0))
    attention = torch.ones_like(ids)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    value = AutoModelForSequenceClassification.from_pretrained(tmp_path / "value_model")
    inputs = {"input_ids": ids, "attention_mask": attention}
    trainer.model.eval()
    with torch.no_grad():
        theirs = trainer.model(**inputs, only_values=True)
        ours = value.score(value.model(**inputs).last_hidden_state)[..., 0]
        torch.testing.assert_close(ours[:, :-1], theirs)
        torch.testing.assert_close(value(**inputs).logits[:, 0], ours[:, -1])
        torch.testing.assert_close(policy(**inputs).logits, trainer.model(**inputs).logits)
    policy, value = value_model.split(trainer.model.state_dict())
    saved = weights(tmp_path / "model")
    assert all(torch.equal(policy[name], weight) for name, weight in saved.items())
    if kind == "separate":
        assert same(value, weights(tmp_path / "value_model"))


SAVING = [*SMALL, "--max_steps", 4, "--save_strategy", "steps", "--save_steps", 2]


@pytest.mark.parametrize(
    "words",
    [[], ["--value_model", "head"], ["--num_iterations", 3], ["--steps_per_generation", 4]],
    ids=["separate", "head", "inside three iterations", "between minibatches"],
)
def test_stopped_and_resumed_is_bit_identical(run, tmp_path, words):
    whole, _ = run("ppo", "ppo", *SAVING, *words, folder=tmp_path / "whole")
    stopped = tmp_path / "stopped"
    shutil.copytree(whole / "checkpoint-2", stopped / "checkpoint-2")
    shutil.copytree(whole / "evaluations", stopped / "evaluations")
    resume = ["--resume_from_checkpoint", "auto"]
    resumed, out = run("ppo", "ppo", *SAVING, *words, *resume, folder=stopped)
    assert "resuming from" in out
    for name in ("model", "value_model"):
        assert same(weights(whole / name), weights(resumed / name))
    states = [torch.load(f / "checkpoint-4" / "optimizer.pt") for f in (whole, resumed)]
    assert len(states[0]["state"]) > 12  # both models' parameters
    for parameter, state in states[0]["state"].items():
        assert all(torch.equal(state[k], states[1]["state"][parameter][k]) for k in state)


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_the_best_policy_is_kept_with_the_value_model_of_its_step(run, kind):
    best = ["--load_best_model_at_end", "--metric_for_best_model", "eval_exact_match"]
    words = ["--save_steps", 1, "--eval_steps", 1, "--lr_scheduler_type", "constant"]
    folder, _ = run("ppo", "ppo", *SAVING, *words, *best, "--value_model", kind)
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    step = state["best_global_step"]
    chosen, last = folder / f"checkpoint-{step}", folder / "checkpoint-4"
    assert step < 4
    assert same(weights(folder / "model"), weights(chosen))
    assert same(weights(folder / "value_model"), weights(chosen / "value_model"))
    assert not same(weights(chosen / "value_model"), weights(last / "value_model"))
    assert json.loads((folder / "summary.json").read_text())["model_step"] == step


def test_a_checkpoint_that_is_damaged_or_lacks_its_value_model_is_refused(run, refused, tmp_path):
    folder, _ = run("ppo", "ppo", *SAVING)
    files = sorted(path for path in (folder / "checkpoint-4").rglob("*") if path.is_file())
    assert len(files) > 15
    for file in files:
        content = file.read_bytes()
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
        assert claim(str(folder), "auto") == str(folder / "checkpoint-2")
        file.write_bytes(content)
    assert claim(str(folder), "auto") == str(folder / "checkpoint-4")
    (folder / "checkpoint-2" / "value_model" / "model.safetensors").unlink()
    back = ["--resume_from_checkpoint", folder / "checkpoint-2"]
    assert "lacks value_model/model.safetensors" in refused("ppo", "ppo", *SAVING, *back)


def test_lora_on_the_policy_beside_a_fully_trained_value_model(run, tmp_path):
    lora = ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--beta", 0.1]
    whole, _ = run("ppo", "ppo", *SAVING, *lora, folder=tmp_path / "whole")
    adapter = load_file(whole / "model" / "adapter_model.safetensors")
    assert adapter and all("lora_" in name for name in adapter)
    value = AutoModelForSequenceClassification.from_pretrained(whole / "value_model")
    start = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    assert moved(value.model, start.model) > 1e-4
    policy = AutoModelForCausalLM.from_pretrained(whole / "model")
    assert any(p.any() for n, p in policy.named_parameters() if "lora_B" in n)
    stopped = tmp_path / "stopped"
    shutil.copytree(whole / "checkpoint-2", stopped / "checkpoint-2")
    resume = ["--resume_from_checkpoint", "auto"]
    resumed, _ = run("ppo", "ppo", *SAVING, *lora, *resume, folder=stopped)
    assert same(adapter, load_file(resumed / "model" / "adapter_model.safetensors"))
    assert same(weights(whole / "value_model"), weights(resumed / "value_model"))


def test_lora_and_a_head_on_the_trunk_are_refused(refused):
    sentence = refused("ppo", "ppo", *SMALL, "--use_peft", "--value_model", "head")
    assert "which LoRA freezes" in sentence


# --- where a value model starts


def classifier(tmp_path, labels=1, **changes):
    """A reward model on the embedded model's weights, with a score of its own."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint_path(), num_labels=labels, pad_token_id=0
    )
    for name, value in changes.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(checkpoint_path()).save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_a_value_model_starts_from_a_reward_model(run, tmp_path):
    reward_model = classifier(tmp_path)
    path = ["--value_model_name_or_path", reward_model, "--value_learning_rate", 0]
    folder, _ = run("ppo", "ppo", *SMALL, *path)
    assert same(weights(folder / "value_model"), weights(reward_model))


def test_a_value_model_has_no_dropout(tmp_path):
    from ppo_cases import build

    folder = classifier(tmp_path, attention_dropout=0.5)
    trainer = build(value_model_name_or_path=str(folder))
    trainer.model.train()
    inputs = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(2, 9, dtype=torch.long))
    first, second = (trainer.model(**inputs, only_values=True) for _ in range(2))
    assert torch.equal(first, second) and first.any()


def test_a_value_model_with_several_labels(refused, tmp_path):
    path = ["--value_model_name_or_path", classifier(tmp_path, labels=3)]
    assert "has num_labels 3; name one with num_labels 1" in refused("ppo", "ppo", *SMALL, *path)


def test_a_value_model_with_another_vocabulary(refused, tmp_path):
    folder = classifier(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    sentence = refused("ppo", "ppo", *SMALL, "--value_model_name_or_path", folder)
    assert "has 99 tokens and the policy" in sentence


def test_a_value_model_with_another_tokenizer(refused, tmp_path):
    folder = classifier(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    sentence = refused("ppo", "ppo", *SMALL, "--value_model_name_or_path", folder)
    assert "is not the policy's" in sentence and "'a'" in sentence


# --- a reward model as the reward


def messages(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("conversational", [True, False])
def test_a_reward_model_scores_the_text_it_was_trained_on(tmp_path, conversational):
    folder = classifier(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    function = load_reward_model(str(folder), tokenizer, SimpleNamespace(device="cpu"))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    rows = [("sun", "<answer>nus</answer>"), ("house", "<answer>e")]
    ids = [tokenizer.encode(answer, add_special_tokens=False) for _, answer in rows]
    ids[0].append(tokenizer.eos_token_id)  # the second was cut off
    if conversational:
        prompts = [messages(question, "")[:1] for question, _ in rows]
        answers = [messages("", answer)[1:] for _, answer in rows]
        texts = [tokenizer.apply_chat_template(messages(*r), tokenize=False) for r in rows]
        assert texts[1].endswith("<|end|>")
        texts[1] = texts[1].removesuffix("<|end|>")
    else:
        prompts, answers = zip(*rows, strict=True)
        texts = [rows[0][0] + rows[0][1] + "<|end|>", "".join(rows[1])]
    found = function(prompts=list(prompts), completions=list(answers), completion_ids=ids)
    for score_found, text in zip(found, texts, strict=True):
        encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            score = model(encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
        assert score_found == pytest.approx(float(score), abs=1e-5)
    finished = [[*ids[1], tokenizer.eos_token_id]]
    [other] = function(prompts=[prompts[1]], completions=[answers[1]], completion_ids=finished)
    assert abs(other - found[1]) > 1e-4


def test_a_run_on_a_reward_model_alone(run, tmp_path):
    path = ["--reward_funcs", "[]", "--reward_model", classifier(tmp_path)]
    folder, _ = run("ppo", "ppo", *SMALL, *path, "--reward_weights", 1.0)
    logged = json.loads((folder / "log.json").read_text())
    assert any(e.get("rewards/reward_model/std", 0) > 0 for e in logged)


@pytest.mark.parametrize("fault", ["missing", "labels", "score", "nan"])
def test_a_reward_model_that_fails(refused, tmp_path, fault):
    folder = classifier(tmp_path, labels=2 if fault == "labels" else 1)
    says = {
        "missing": "reward_model: there is no folder",
        "labels": "has num_labels 2; name a model with num_labels 1",
        "score": "lacks score.weight; name a trained one",
        "nan": "reward function 'reward_model' returned nan",
    }[fault]
    if fault == "missing":
        shutil.rmtree(folder)
    if fault in ("score", "nan"):
        state = weights(folder)
        head = state.pop("score.weight")
        state |= {"score.weight": head * float("nan")} if fault == "nan" else {}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    words = ["--reward_model", folder, "--reward_weights", 1.0, 0.5, 1.0]
    assert says in refused("ppo", "ppo", *SMALL, *words, "--eval_strategy", "no")


# --- several processes


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.promise
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_on_two_cpu_processes(launch, tmp_path, stage):
    words = [*SAVING, "--eval_strategy", "no", "--eval_on_start", "false"]
    accelerate = ["--config_file", f"configs/accelerate/zero{stage}.yaml", "--num_processes", "2"]

    def start(folder, *more):
        config = ["--config", "configs/tiny/ppo.yaml", "--output_dir", str(folder)]
        done = launch(accelerate, "ppo", *config, *map(str, words), *more)
        assert done.returncode == 0, cause(done.stdout)
        assert "2 processes, strategy deepspeed" in done.stdout
        return folder

    whole = start(tmp_path / "whole")
    stopped = tmp_path / "stopped"
    shutil.copytree(whole / "checkpoint-2", stopped / "checkpoint-2")
    resumed = start(stopped, "--resume_from_checkpoint", "auto")
    begin = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    policy = AutoModelForCausalLM.from_pretrained(whole / "model")
    value = AutoModelForSequenceClassification.from_pretrained(whole / "value_model")
    assert 1e-4 < moved(policy, begin) < 0.01
    assert 1e-4 < moved(value.model, begin.model) < 0.01
    for name in ("model", "value_model"):
        assert same(weights(whole / name), weights(resumed / name))


# --- what PPO promises


@pytest.mark.promise
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_learns_and_its_values_explain_the_returns(run, seed):
    folder, _ = run("ppo", "ppo", "--seed", seed)
    summary = json.loads((folder / "summary.json").read_text())
    gain = summary["after"]["eval_exact_match"] - summary["before"]["eval_exact_match"]
    assert gain >= 0.2 and summary["train_cpu_seconds"] <= 180
    log = json.loads((folder / "log.json").read_text())

    def mean(name, part):
        return statistics.fmean([e[name] for e in log if e.get(name) is not None][part])

    first, last = slice(0, 10), slice(-10, None)
    assert mean("loss/value_avg", last) < mean("loss/value_avg", first) / 2
    assert mean("val/explained_variance", last) > 0.3


@pytest.mark.promise
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beta_keeps_the_policy_near_the_reference(run, tmp_path, seed):
    ends = []
    for beta in (1e-6, 0.1):  # so small that it only loads the reference
        words = ["--seed", seed, "--beta", beta, "--eval_strategy", "no", "--max_steps", 60]
        folder, _ = run("ppo", "ppo", *words, folder=tmp_path / str(beta))
        log = json.loads((folder / "log.json").read_text())
        ends.append(statistics.fmean([e["kl"] for e in log if e.get("kl") is not None][-10:]))
    assert ends[1] < 0.9 * ends[0], ends
