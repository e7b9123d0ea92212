"""`rlhf-trl quantize`, and runs with a quantized reward model or reference.

What quantizes needs the extra `quant`, which `scripts/setup.sh test` does not install.
"""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT
from named_models import make_adapter, make_reward_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as Classifier
from trl import GRPOTrainer

from rlhf_trl import cli, policies, quantized
from rlhf_trl.errors import InputError
from rlhf_trl.reward_models.report import write_candidates
from rlhf_trl.rewards import from_model
from rlhf_trl.rewards.checked import checked
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.run import quantize as quantizing
from rlhf_trl.run import quantize_measures
from rlhf_trl.run.policy_gradients import check_reward_model
from rlhf_trl.run.quantized_reference import quantized_reference
from rlhf_trl.tiny import checkpoint_path

INSTALLED = all(map(find_spec, ("bitsandbytes", "torchao")))
needs_quant = pytest.mark.skipif(not INSTALLED, reason="scripts/setup.sh quant is not installed")
INT8 = ("int8", "int8_bitsandbytes")


@pytest.fixture
def without_libraries(monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)


@pytest.fixture
def with_libraries(monkeypatch):
    monkeypatch.setattr(quantized, "find_spec", lambda name: True)


def ending(*words):
    with pytest.raises(SystemExit) as caught:
        cli.main([*map(str, words)])
    return str(caught.value.code)


def scored_run(folder, texts=("olleh", "hello", "oleh", "hlelo")):
    """Leave a reward model and the answers that a run scored, of which the first is right."""
    folder.mkdir()
    (folder / "config.yaml").write_text("algorithm: reward\n")
    make_reward_model(folder / "model")
    rows = []
    for number in range(8):
        prompt = [{"role": "user", "content": f"hello {number}"}]
        for place, text in enumerate(texts):
            completion = [{"role": "assistant", "content": f"<answer>{text}</answer>"}]
            rows.append({"prompt": prompt, "completion": completion, "label": place == 0})
    write_candidates(folder, rows, [{"score": 0.0}] * len(rows))
    return folder


# --- refused, with or without the libraries -----------------------------------------------------


def test_a_missing_library_is_named_with_its_remedy(without_libraries, tmp_path):
    sentence = ending("quantize", "tiny", "--to", "int8", "--output", tmp_path / "new")
    assert sentence == "error: --to: torchao is not installed; run scripts/setup.sh quant."
    for method in ("int8_bitsandbytes", "nf4"):
        sentence = ending("quantize", "tiny", "--to", method, "--output", tmp_path / "new")
        assert sentence == "error: --to: bitsandbytes is not installed; run scripts/setup.sh quant."
    make_reward_model(tmp_path / "judge")
    args = SimpleNamespace(device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    with pytest.raises(InputError, match="reward_quantization: torchao is not installed; run"):
        load_reward_model(str(tmp_path / "judge"), tokenizer, args, quantization="int8")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(INSTALLED, reason="the libraries are installed")
@pytest.mark.parametrize("config", [{"quant_method": "bitsandbytes", "load_in_8bit": True}])
def test_a_quantized_model_needs_the_library_to_be_read(config, tmp_path):
    make_reward_model(tmp_path / "judge")
    file = tmp_path / "judge" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    with pytest.raises(InputError, match=r"reward_model: .* run scripts/setup.sh quant\.$"):
        load_reward_model(str(tmp_path / "judge"), tokenizer, SimpleNamespace(device="cpu"))


def test_what_cannot_be_quantized_is_refused(with_libraries, tmp_path):
    new = tmp_path / "new"
    assert ending("quantize", "tiny", "--to", "int3") == (
        "error: --to is 'int3'; write int8, int8_bitsandbytes or nf4 (did you mean 'int8'?)."
    )
    (tmp_path / "there").mkdir()
    sentence = ending("quantize", "tiny", "--to", "int8", "--output", tmp_path / "there")
    assert sentence == f"error: --output: {tmp_path / 'there'} exists; name a new folder."
    sentence = ending("quantize", "tiny_untrained", "--to", "int8", "--output", new)
    assert sentence == "error: tiny_untrained is made in memory; name a model that was saved."
    make_reward_model(tmp_path / "judge")
    sentence = ending("quantize", tmp_path / "judge", "--to", "int8", "--output", new)
    assert "is of no run here, on whose answers it could be measured" in sentence
    same = scored_run(tmp_path / "same", texts=("olleh",))
    sentence = ending("quantize", same, "--to", "int8", "--output", new)
    assert "holds out no right and wrong answer to a prompt" in sentence
    assert not new.exists()


def test_widths_that_nf4_cannot_take_are_refused_before_any_weight_is_read(
    with_libraries, tmp_path
):
    shutil.copy(Path(checkpoint_path(), "config.json"), tmp_path)  # and no weights
    with pytest.raises(InputError) as caught:
        quantized.quantized_options("nf4", str(tmp_path), "--to", "cpu")
    assert str(caught.value) == (
        f"--to: layers.0.self_attn.q_proj of {str(tmp_path)!r} has 96 inputs and 96 outputs, and "
        "nf4 takes multiples of 64 and 32; write int8."
    )


def test_a_quantized_model_is_not_quantized_again(with_libraries, tmp_path):
    config = json.loads(Path(checkpoint_path(), "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"--to: .* is quantized already; name the model it was"):
        quantized.quantized_options("int8", str(tmp_path), "--to", "cpu")


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit", None])
def test_training_a_quantized_model_needs_lora(key, tmp_path):
    fields = {"load_in_4bit": False, "load_in_8bit": False, "model_revision": "main"}
    shutil.copy(Path(checkpoint_path(), "config.json"), tmp_path)
    model = SimpleNamespace(**fields, model_name_or_path=str(tmp_path), use_peft=False)
    args = SimpleNamespace(trust_remote_code=False)
    policies.check_trainable(model, args)  # it is whole
    if key:
        setattr(model, key, True)
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=rf"^{key or 'model_name_or_path: .*'}: the weights of a"):
        policies.check_trainable(model, args)
    model.use_peft = True
    policies.check_trainable(model, args)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"beta": 0.0}, "beta is 0, so there is no reference model; raise beta, or remove ref"),
        ({"use_peft": True}, "with use_peft the reference is the policy without its adapter"),
        ({"sync_ref_model": True}, "sync_ref_model changes the weights of the reference; remove"),
        ({"fsdp": "full_shard"}, "DeepSpeed and FSDP would share out what is quantized; launch"),
        ({"model_name_or_path": "tiny_untrained"}, "tiny_untrained has no reference that could"),
    ],
)
def test_a_reference_that_nothing_could_quantize_is_refused(changes, reason):
    fields = {"beta": 0.1, "sync_ref_model": False, "fsdp": None, "deepspeed_plugin": None}
    fields |= {"use_peft": False, "model_name_or_path": "tiny"} | changes
    part = SimpleNamespace(**fields)
    own = SimpleNamespace(reference_quantization="int8")
    loaded = SimpleNamespace(trl=part, model=part, own=own)
    with (
        pytest.raises(InputError, match=f"^reference_quantization is int8, but {reason}"),
        quantized_reference(loaded),
    ):
        pass


def test_a_quantized_reward_needs_a_reward_model():
    fields = {"reward_model": None, "reward_aggregate": None, "reward_model_strips_think": False}
    own = SimpleNamespace(**fields, llm_judge=None, reward_quantization="int8")
    with pytest.raises(InputError, match="reward_quantization is int8, but there is no reward_mo"):
        check_reward_model(own)


def test_pairs_weigh_alike_within_a_prompt_and_prompts_alike():
    labels = [[1, 0, 0], [1, 1, 0], [1, 1], [0]]
    rows = [{"label": x, "group": group} for group, of in enumerate(labels) for x in of]
    better, worse, weights = quantize_measures._pairs(rows)
    expected = {(0, 1): 0.5, (0, 2): 0.5, (3, 5): 0.5, (4, 5): 0.5}
    pairs = zip(better, worse, strict=True)
    assert dict(zip(pairs, weights, strict=True)) == expected


def test_pairs_of_a_file_are_read_where_a_run_has_scored_nothing(tmp_path):
    rows = [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(6)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "reward.yaml"
    config.write_text(
        "algorithm: reward\nmodel_name_or_path: tiny\nuse_cpu: true\nbf16: false\n"
        f"output_dir: {tmp_path / 'none'}\n"
        f"dataset:\n  source: path\n  path: {path}\n  eval_size: 2\n"
    )
    judged = quantize_measures._judged_rows(str(config), [])
    assert [row["label"] for row in judged] == [True, False, True, False]
    assert [row["group"] for row in judged] == [0, 0, 1, 1]
    sides = {(row["prompt"], row["chosen"], row["rejected"]) for row in rows}
    for right, wrong in (judged[:2], judged[2:]):
        assert (right["prompt"], right["completion"], wrong["completion"]) in sides
    (tmp_path / "grpo.yaml").write_text("algorithm: grpo\n")
    with pytest.raises(InputError, match=r"has left no scores.jsonl, and holds out no pairs"):
        quantize_measures._judged_rows(str(tmp_path / "grpo.yaml"), [])


# --- what is written, with a model that stays as it is in place of one that is quantized ---------


@pytest.fixture
def whole(monkeypatch, with_libraries):
    """Let nothing be quantized, so that all that is measured must be as it was."""
    monkeypatch.setattr(quantizing, "quantized_options", lambda *_: {})
    monkeypatch.setattr(quantizing, "library_of", lambda method: "torch")


def test_a_policy_is_written_whole_with_what_was_measured(whole, tmp_path, capsys):
    new = tmp_path / "new"
    words = ["--dataset.eval_size", "8", "--output", str(new)]
    cli.main(["quantize", "tiny", "--to", "int8", *words])
    assert capsys.readouterr().out.endswith(
        f"{new} holds the quantized model; reloaded, it is what was measured\n"
    )
    facts = json.loads((new / "quantized.json").read_text())
    assert facts["made_from"] == "tiny" and facts["to"] == "int8"
    assert facts["measured_on"].startswith("8 held-out prompts of ")
    numbers = facts["numbers"]
    assert numbers["KL of an answer, nats"] == {"quantized": 0.0, "error": 0.0}
    assert numbers["same first choice, share of tokens"] == {"quantized": 1.0}
    assert numbers["reload gap"] == {"quantized": 0.0}
    size = Path(checkpoint_path(), "model.safetensors").stat().st_size / 1e6
    assert numbers["MB on disk"]["whole"] == size
    base = AutoModelForCausalLM.from_pretrained(checkpoint_path()).state_dict()
    copied = AutoModelForCausalLM.from_pretrained(new).state_dict()
    assert all(torch.equal(base[name], copied[name]) for name in base)
    tokenizer = AutoTokenizer.from_pretrained(new)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(checkpoint_path()).chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_reward_model_keeps_its_pad_token_and_is_measured_by_pairs(whole, tmp_path):
    folder = scored_run(tmp_path / "run")
    cli.main(["quantize", str(folder), "--to", "int8"])
    new = folder / "model-int8"
    facts = json.loads((new / "quantized.json").read_text())
    assert facts["measured_on"] == f"24 pairs of held-out answers of {folder / 'config.yaml'}"
    numbers = facts["numbers"]
    assert numbers["largest change of a score"] == {"quantized": 0.0}
    # the same by hand, each text read alone
    model = Classifier.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    scores = []
    for line in (folder / "scores.jsonl").read_text().splitlines():
        row = json.loads(line)
        text = tokenizer.apply_chat_template([*row["prompt"], *row["completion"]], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
            scores.append(float(model.score(hidden)))
    gaps = [scores[4 * n] - scores[4 * n + k] for n, k in product(range(8), (1, 2, 3))]
    accuracy = sum(gap > 0 for gap in gaps) / 24
    assert 0 < accuracy < 1
    loss = sum(torch.nn.functional.softplus(torch.tensor(-gap)).item() for gap in gaps) / 24
    for side in ("whole", "quantized"):
        assert numbers["pair accuracy"][side] == pytest.approx(accuracy)
        assert numbers["gap of a pair"][side] == pytest.approx(sum(gaps) / 24, abs=1e-5)
        assert numbers["pair loss"][side] == pytest.approx(loss, abs=1e-5)
    pads = [AutoConfig.from_pretrained(path).pad_token_id for path in (folder / "model", new)]
    assert pads == [0, 0]
    sentence = ending("quantize", folder, "--to", "int8")
    assert sentence == f"error: --output: {new} exists; name a new folder."


@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_a_model_that_is_reloaded_as_another_one_is_not_written(by, whole, tmp_path, monkeypatch):
    load = quantize_measures.RewardModels.load

    def load_damaged(self, source):
        loaded = load(self, source)
        loaded.model.score.weight.data += by
        return loaded

    monkeypatch.setattr(quantize_measures.RewardModels, "load", load_damaged)
    folder = scored_run(tmp_path / "run")
    before = sorted(folder.iterdir())
    sentence = ending("quantize", folder, "--to", "int8")
    assert "saved and reloaded, its logits differ by" in sentence
    assert sorted(folder.iterdir()) == before


def test_adapters_are_merged_first(whole, tmp_path):
    make_adapter(tmp_path / "model", scale=0.2)
    words = ["--config", "configs/tiny/grpo.yaml", "--dataset.eval_size", "4"]
    cli.main(["quantize", str(tmp_path / "model"), "--to", "int8", *words])
    ids = torch.arange(7, 103).view(4, 24)
    base = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(tmp_path / "model-int8")(ids).logits
        apart = PeftModel.from_pretrained(base, tmp_path / "model").eval()(ids).logits
    assert (written - apart).abs().max() <= 1e-5 * apart.abs().max()

    run_folder = scored_run(tmp_path / "run")
    shutil.move(run_folder / "model", run_folder / "base")
    model = Classifier.from_pretrained(run_folder / "base")
    options = {"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    adapted = get_peft_model(model, LoraConfig(**options, init_lora_weights=False)).eval()
    adapted.save_pretrained(run_folder / "model")
    AutoTokenizer.from_pretrained(checkpoint_path()).save_pretrained(run_folder / "model")
    cli.main(["quantize", str(run_folder), "--to", "int8"])
    written = Classifier.from_pretrained(run_folder / "model-int8").eval()
    with torch.no_grad():
        gap = written(ids[:1]).logits - adapted(ids[:1]).logits
    assert gap.abs().max() <= 1e-5
    assert written.config.pad_token_id == 0
    args = SimpleNamespace(device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    with pytest.raises(InputError, match="is an adapter; let rlhf-trl quantize merge and quantize"):
        load_reward_model(str(run_folder / "model"), tokenizer, args, quantization="int8")


# --- with the libraries --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge_run(tmp_path_factory):
    """A reward model that tells right from wrong, of a hundred steps."""
    folder = tmp_path_factory.mktemp("judge") / "run"
    options = "--dataset.pairs offline --dataset.size 2000 --dataset.eval_size 128 --max_steps 100"
    command = [sys.executable, "recipes/reward.py", "--config", "configs/tiny/reward.yaml"]
    command += [*options.split(), "--eval_strategy", "no", "--output_dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return folder


def quantize(word, method, folder, *words):
    cli.main(["quantize", str(word), "--to", method, "--output", str(folder), *words])
    return json.loads((folder / "quantized.json").read_text())["numbers"]


@needs_quant
@pytest.mark.promise
@pytest.mark.parametrize("method", INT8)
def test_a_reward_model_in_int8_tells_as_well(method, judge_run, tmp_path):
    new = tmp_path / "new"
    numbers = quantize(judge_run, method, new)
    accuracy = numbers["pair accuracy"]
    evaluation = json.loads((judge_run / "summary.json").read_text())["after"]
    assert accuracy["whole"] == pytest.approx(evaluation["eval_pairwise_accuracy"], abs=1e-6)
    assert accuracy["whole"] > 0.9
    assert abs(accuracy["quantized"] - accuracy["whole"]) <= 0.005
    assert numbers["reload gap"] == {"quantized": 0.0}
    assert numbers["MB on disk"]["quantized"] < numbers["MB on disk"]["whole"] / 3
    assert 0 < numbers["largest change of a score"]["quantized"] < 1
    # plain transformers reads it, and it is what the reward model was, to int8
    ids = torch.arange(7, 103).view(4, 24)
    with torch.no_grad():
        first = Classifier.from_pretrained(new).eval()(ids).logits
        whole = Classifier.from_pretrained(judge_run / "model").eval()(ids).logits
    assert 0 < (first - whole).abs().max() < 0.5
    # and training does, where it is named
    args = SimpleNamespace(device=torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    prompts = [[{"role": "user", "content": f"reverse {n}"}] for n in range(4)]
    answers = [[{"role": "assistant", "content": f"<answer>{n}</answer>"}] for n in range(4)]
    scores = []
    for path, how in ((new, None), (judge_run / "model", method)):
        reward = load_reward_model(str(path), tokenizer, args, quantization=how)
        scores.append(reward(prompts=prompts, completions=answers, completion_ids=[[5]] * 4))
    assert scores[0] == scores[1]


@needs_quant
@pytest.mark.promise
@pytest.mark.parametrize("method", INT8)
def test_a_policy_in_int8_stays_near_and_answers(method, tmp_path, capsys, monkeypatch):
    new = tmp_path / "new"
    numbers = quantize("tiny", method, new)
    assert 0 < numbers["KL of an answer, nats"]["quantized"] <= 0.005
    assert numbers["same first choice, share of tokens"]["quantized"] > 0.99
    assert numbers["reload gap"] == {"quantized": 0.0}
    capsys.readouterr()
    answers = tmp_path / "answers.jsonl"
    words = ["--reference", "tiny", "--answers", str(answers), "--json"]
    cli.main(["evaluate", "tiny", str(new), *words, "--dataset.eval_size", "64"])
    models = json.loads(capsys.readouterr().out)["models"]
    matches = [models[model]["eval_exact_match"]["value"] for model in ("tiny", str(new))]
    assert abs(matches[0] - matches[1]) <= 0.1 and matches[0] > 0.3  # of 64 words
    assert 0 < models[str(new)]["eval_sampled_kl"]["value"] <= 0.005
    lines = iter(["hello"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines, None) or chat_ends())
    cli.main(["chat", str(new), "--config", "configs/tiny/grpo.yaml"])
    assert "<answer>olleh</answer>" in capsys.readouterr().out


def chat_ends():
    raise EOFError


@needs_quant
@pytest.mark.promise
def test_nf4_is_reloaded_as_it_was_where_widths_fit(tmp_path):
    config = AutoConfig.from_pretrained(
        checkpoint_path(), hidden_size=128, intermediate_size=256, head_dim=32
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(checkpoint_path()).save_pretrained(tmp_path / "wide")
    words = ["--config", "configs/tiny/grpo.yaml", "--dataset.eval_size", "32"]
    numbers = quantize(tmp_path / "wide", "nf4", tmp_path / "new", *words)
    assert numbers["reload gap"] == {"quantized": 0.0}
    assert 0 < numbers["KL of an answer, nats"]["quantized"] < 0.1
    assert numbers["MB on disk"]["quantized"] < numbers["MB on disk"]["whole"] / 4


@needs_quant
@pytest.mark.promise
@pytest.mark.parametrize("method", INT8)
def test_grpo_on_a_quantized_reward_model_and_reference(method, judge_run, run, monkeypatch):
    """On the same completions, whole ones say nearly the same at each of 20 steps."""
    rewards, kls = [], []
    load = from_model.load_reward_model

    def load_both(path, tokenizer, args, *how):
        assert how[-1] == method
        small, whole = load(path, tokenizer, args, *how), load(path, tokenizer, args)

        def reward_model(**batch):
            scores = small(**batch), whole(**batch)
            rewards.append([sum(of) / len(of) for of in scores])
            return scores[0]

        return checked(reward_model, "reward_model")

    score = GRPOTrainer._get_per_token_logps_and_entropies
    whole_reference = AutoModelForCausalLM.from_pretrained(checkpoint_path()).eval()

    def score_both(self, model, ids, mask, kept, *rest, **options):
        logps = score(self, model, ids, mask, kept, *rest, **options)
        if model is self.ref_model:
            assert model.is_quantized and not getattr(self.model, "is_quantized", False)
            with torch.no_grad():
                by_whole = whole_reference(input_ids=ids, attention_mask=mask).logits[
                    :, -kept - 1 :
                ]
            by_whole = by_whole[:, :-1].log_softmax(-1).gather(2, ids[:, -kept:, None])[..., 0]
            # how far the log-ratios to both references are apart, in nats per sequence
            of_sequences = ((by_whole - logps[0]) * mask[:, -kept:]).sum(1)
            kls.append(float(of_sequences.mean()))
        return logps

    monkeypatch.setattr(from_model, "load_reward_model", load_both)
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", score_both)
    words = ["--reward_quantization", method, "--reference_quantization", method, "--beta", "0.05"]
    words += ["--reward_model", judge_run, "--max_steps", "20", "--eval_strategy", "no"]
    folder, _ = run("grpo", "grpo_reward", *words, "--eval_on_start", "false")
    assert len(kls) >= 20
    worst = max(abs(small - whole) for small, whole in rewards)
    print(f"{method}: reward apart at most {worst:.4f}, KL at most {max(map(abs, kls)):.5f}")
    assert 0 < worst <= 0.1
    assert 0 < max(map(abs, kls)) <= 0.02
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["reward_quantization"] == config["reference_quantization"] == method
    weights = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not hasattr(weights.config, "quantization_config")
    assert {weight.dtype for weight in weights.parameters()} == {torch.float32}


@needs_quant
@pytest.mark.promise
def test_ppo_and_lora_on_quantized_models(judge_run, run, refused, tmp_path):
    words = ["--reward_model", judge_run, "--max_steps", "1", "--eval_strategy", "no"]
    quantized_words = ["--reward_quantization", "int8", "--reference_quantization", "int8"]
    run("ppo", "ppo_reward", *words, *quantized_words, "--beta", "0.05")
    new = tmp_path / "new"
    quantize("tiny", "int8", new, "--dataset.eval_size", "4")
    words += ["--model_name_or_path", new]
    sentence = refused("grpo", "grpo_reward", *words, folder=tmp_path / "a")
    assert "the weights of a quantized model cannot be trained; add use_peft: true" in sentence
    run("grpo", "grpo_reward", *words, "--use_peft", "true", folder=tmp_path / "b")
    sentence = refused("ppo", "ppo_reward", *words, "--use_peft", "true", folder=tmp_path / "c")
    assert "is quantized, and all weights of a value model are trained; name a whole" in sentence
