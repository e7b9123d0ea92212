"""Adapters as models that answer: every weight of theirs counts, or they are refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from distillation_cases import build
from named_models import add_a_token, make_adapter, make_reward_model
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig

from rlhf_trl.errors import InputError, reason_in_short
from rlhf_trl.policies import load_language_model, load_policy
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rollouts.generate import GREEDY
from rlhf_trl.rollouts.sampling import sample_completions
from rlhf_trl.run.named import config_of, load_run, named
from rlhf_trl.tiny import checkpoint_path

IDS = torch.arange(7, 103).view(4, 24)
SMALL = ["--use_cpu", "--dataset.size", "8", "--dataset.eval_size", "4"]
SMALL += ["--max_completion_length", "6"]


@pytest.fixture(scope="module")
def dora(tmp_path_factory):
    """An adapter that says other things than its base, most of all by its magnitudes."""
    return make_adapter(tmp_path_factory.mktemp("dora") / "adapter", scale=0.2, use_dora=True)


@pytest.fixture(scope="module")
def by_peft(dora):
    """The adapter on its base, as PEFT's own documentation loads it."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint_path()), dora)


def greedy(model, conversation):
    """What a model answers, by plain transformers: six tokens at most."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path())
    how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    asked = tokenizer.apply_chat_template(conversation, **how)
    said = model.generate(**asked, do_sample=False, max_new_tokens=6)
    return tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.no_grad()
def test_evaluate_chat_and_sampling_read_the_magnitudes_of_dora(dora, by_peft):
    loaded, data = load_run(config_of([named("tiny")], None), SMALL)
    policy = named(str(dora)).load(loaded, data.conversational)
    assert torch.equal(policy.model(IDS).logits, by_peft(IDS).logits)
    rows = data.tasks.held_out
    expected = [greedy(by_peft, row["prompt"]) for row in rows]
    assert [each["greedy"] for each in policy.answer(rows)] == expected
    assert [policy.reply(row["prompt"], GREEDY)[0].text for row in rows] == expected
    model = ModelConfig(model_name_or_path=str(dora))
    answers = sample_completions(model, loaded.trl, rows, 1, 0, GREEDY)
    assert [one.text for (one,) in answers] == expected
    # that is another model than the one without its magnitudes
    weights = {n: w for n, w in by_peft.state_dict().items() if "magnitude" in n}
    other = make_plain(dora)
    assert weights and (other(IDS).logits - by_peft(IDS).logits).abs().max() > 0.1


def make_plain(dora):
    """The adapter's model with the magnitudes that its base begins with."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    torch.manual_seed(0)
    start = get_peft_model(base, PeftModel.from_pretrained(base, dora).active_peft_config)
    weights = load_file(dora / "adapter_model.safetensors")
    for name, parameter in start.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = weights[name.replace(".default", "")]
    return start.eval()


@torch.no_grad()
def test_a_teacher_reads_the_magnitudes_of_dora(dora, by_peft):
    trainer = build("opd", teacher_models=[str(dora)])
    (teacher,) = trainer._teachers
    attention = torch.ones_like(IDS)
    logits = trainer._read_on(teacher, IDS, attention, 5)
    expected = by_peft(IDS).logits[:, -6:-1] / trainer.temperature
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("part", "weight", "sentence"),
    [
        ("lora_A", None, r"an adapter that lacks base_model.*lora_A.* \(of 1 such weights\)"),
        ("lora_magnitude", None, r"an adapter that lacks base_model.*lora_magnitude_vector"),
        ("embed_tokens", None, r"does not fit its base model \(it lacks base_model.*embed_tokens"),
        ("unknown", torch.zeros(2), r"an adapter that also has base_model\.model\.unknown \(of 1 "),
        ("lora_B", torch.zeros(3, 3), r"does not fit its base model \(.*size mismatch for base_"),
    ],
)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_that_lacks_a_weight_or_has_another_is_refused(tmp_path, part, weight, sentence):
    options = {"use_dora": True, "modules_to_save": ["embed_tokens"]}
    file = make_adapter(tmp_path / "adapter", **options) / "adapter_model.safetensors"
    weights = load_file(file)
    name = next((name for name in weights if part in name), f"base_model.model.{part}")
    weights.pop(name, None)
    save_file(weights if weight is None else {**weights, name: weight}, file)
    with pytest.raises(InputError, match=sentence) as stop:
        load_language_model(str(file.parent))
    assert "\n" not in str(stop.value)


def test_a_reward_models_adapter_that_has_another_weight_is_refused(tmp_path):
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification

    base = make_reward_model(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base)
    how = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")
    adapter = tmp_path / "adapter"
    get_peft_model(model, how).save_pretrained(adapter)
    for file in base.glob("token*"):
        shutil.copy(file, adapter)
    shutil.copy(base / "config.json", adapter)
    tokenizer = AutoTokenizer.from_pretrained(base)
    args = SimpleNamespace(device="cpu")
    load_reward_model(str(adapter), tokenizer, args)
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.other": torch.zeros(2)}, file)
    with pytest.raises(InputError, match=r"an adapter that also has base_model\.model\.other"):
        load_reward_model(str(adapter), tokenizer, args)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj"]}],
    ids=["lora", "dora", "embeddings"],
)
@pytest.mark.filterwarnings("ignore:Setting `save_")
@torch.no_grad()
def test_a_base_with_fewer_rows_than_its_tokenizer_has_tokens_stays_as_it_is(
    own_model, tmp_path, options
):
    folder = make_adapter(tmp_path / "adapter", own_model, scale=0.2, **options)
    add_a_token(folder)
    base = AutoModelForCausalLM.from_pretrained(own_model)
    rows = len(base.get_input_embeddings().weight)
    assert len(AutoTokenizer.from_pretrained(folder)) > rows
    expected = PeftModel.from_pretrained(base, folder).eval()(IDS).logits
    args = SimpleNamespace(device="cpu", model_init_kwargs=None)
    policy = load_policy(ModelConfig(model_name_or_path=str(folder)), args)
    teacher = load_language_model(str(folder), dtype=torch.float32)  # as a trainer loads one
    for model in (policy, teacher.eval()):
        assert len(model.get_input_embeddings().weight) == model.config.vocab_size == rows
        assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        (
            {
                "auto_mapping": {
                    "base_model_class": "Qwen2ForTokenClassification",
                    "parent_library": "transformers",
                }
            },
            "Qwen2ForTokenClassification",
        ),
    ],
)
def test_an_adapter_of_a_classifier_is_no_language_model(tmp_path, settings, kind):
    file = make_adapter(tmp_path / "adapter") / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    with pytest.raises(InputError, match=rf"another kind of model \({kind}\), which writes no an"):
        load_language_model(str(file.parent))


def test_an_error_text_that_is_cut_ends_at_a_word():
    error = ValueError("size mismatch\n  for embed-tokens of base_model")
    assert reason_in_short(error) == "size mismatch for embed-tokens of base_model"
    assert reason_in_short(error, 30) == "size mismatch for ..."
    assert reason_in_short(error, 34) == "size mismatch for embed-tokens ..."


def test_a_learned_prompt_is_refused(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    how = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    get_peft_model(base, how).save_pretrained(tmp_path / "prompt")
    with pytest.raises(InputError, match="is an adapter that holds a learned prompt, which is not"):
        load_language_model(str(tmp_path / "prompt"))
