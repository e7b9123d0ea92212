"""`rlhf-trl merge`: an adapter becomes part of its base, or nothing is written."""

import json

import pytest
import torch
from named_models import add_a_token, make_adapter
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from rlhf_trl import cli
from rlhf_trl.errors import InputError
from rlhf_trl.run import merge as merging
from rlhf_trl.tiny import checkpoint_path


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "config.yaml").write_text("algorithm: grpo\n")
    make_adapter(tmp_path / "model", scale=0.2)
    return tmp_path


def test_a_run_is_merged_and_its_logits_stay(run_folder, capsys):
    cli.main(["merge", str(run_folder)])
    folder = run_folder / "merged"
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"{folder} holds the merged model; its logits differ from the unmerged")
    assert float(said.split()[-1]) <= 1e-5
    # by other means: PEFT on the base, and plain transformers on what was written
    base = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    ids = torch.arange(7, 103).view(4, 24)
    with torch.no_grad():
        plain = base(ids).logits
        apart = PeftModel.from_pretrained(base, run_folder / "model").eval()(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert (merged - apart).abs().max() <= 1e-5 * apart.abs().max()
    assert (plain - apart).abs().max() > 0.01 * apart.abs().max()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(checkpoint_path()).chat_template
    assert (folder / "generation_config.json").is_file()
    answer = pipeline("text-generation", str(folder), max_new_tokens=3)
    assert answer([{"role": "user", "content": "Hi"}])[0]["generated_text"][1]["content"]
    assert not list(run_folder.glob(".*"))
    with pytest.raises(SystemExit, match="merged exists; name a new folder"):
        cli.main(["merge", str(run_folder)])
    cli.main(["merge", str(run_folder / "model"), "--output", str(run_folder / "other")])
    weights = [
        (run_folder / name / "model.safetensors").read_bytes() for name in ("merged", "other")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("options", "stays_tied"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, False),
        ({"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["lm_head", "q_proj"]}, False),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [7, 8, 50]}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ({"use_dora": True}, True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_")
def test_adapters_of_embeddings_and_of_tokens_are_merged(tmp_path, options, stays_tied):
    adapter = make_adapter(tmp_path / "adapter", scale=0.2, **options)
    folder, gap = merging.merge(str(adapter))
    assert gap <= 1e-5
    base, merged = (AutoModelForCausalLM.from_pretrained(at) for at in (checkpoint_path(), folder))
    ids = torch.arange(7, 103).view(4, 24)
    with torch.no_grad():
        plain = base(ids).logits
        apart = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        found = merged(ids).logits
    assert (found - apart).abs().max() <= 1e-5 * apart.abs().max()
    assert (plain - apart).abs().max() > 0.01 * apart.abs().max()
    tied = merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert tied is merged.config.tie_word_embeddings is stays_tied


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj"]}],
    ids=["lora", "dora", "embeddings"],
)
@pytest.mark.filterwarnings("ignore:Setting `save_")
def test_a_merged_model_has_as_many_rows_as_its_base(own_model, tmp_path, options):
    adapter = make_adapter(tmp_path / "adapter", own_model, scale=0.2, **options)
    add_a_token(adapter)
    folder, gap = merging.merge(str(adapter))
    assert gap <= 1e-5
    base, merged = (AutoModelForCausalLM.from_pretrained(at) for at in (own_model, folder))
    rows = len(base.get_input_embeddings().weight)
    assert len(AutoTokenizer.from_pretrained(folder)) > rows
    assert len(merged.get_input_embeddings().weight) == merged.config.vocab_size == rows
    ids = torch.arange(7, 103).view(4, 24)
    with torch.no_grad():
        apart = PeftModel.from_pretrained(base, adapter).eval()(ids).logits
        logits = merged(ids).logits
    assert logits.shape == apart.shape
    assert (logits - apart).abs().max() <= 1e-5 * apart.abs().max()


@pytest.mark.parametrize(("gap", "refused"), [(6e-6, False), (1.5e-5, True)])
def test_the_tolerance_lies_between(run_folder, monkeypatch, gap, refused):
    merge = PeftModel.__getattr__

    def merge_with_a_gap(model, name):
        if name != "merge_and_unload":
            return merge(model, name)

        def inexactly(**options):
            merged = model.base_model.merge_and_unload(**options)
            merged.model.norm.weight.data *= 1 + gap  # so that each logit grows by that share
            return merged

        return inexactly

    monkeypatch.setattr(PeftModel, "__getattr__", merge_with_a_gap)
    if refused:
        with pytest.raises(InputError, match=r"merged, its logits differ by 1\.\de-05 of the larg"):
            merging.merge(str(run_folder))
    else:
        assert 4e-6 < merging.merge(str(run_folder))[1] < 8e-6
    assert (run_folder / "merged").exists() is not refused


def test_logits_that_differ_leave_nothing(run_folder, monkeypatch, capsys):
    monkeypatch.setattr(merging, "TOLERANCE", 1e-12)
    with pytest.raises(SystemExit, match=r"error: .*: merged, its logits differ by .*e-0\d of the"):
        cli.main(["merge", str(run_folder)])
    assert sorted(path.name for path in run_folder.iterdir()) == ["config.yaml", "model"]


def test_what_is_no_adapter_is_refused_in_one_sentence(run_folder, tmp_path):
    def no(word):
        with pytest.raises(SystemExit) as stop:
            cli.main(["merge", str(word)])
        assert "\n" not in stop.value.code
        return stop.value.code

    assert no("tiny").endswith("tiny is a whole model, not an adapter; there is nothing to merge.")
    assert "there is no folder" in no(tmp_path / "none")
    file = run_folder / "model" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_type": "SEQ_CLS"}))
    assert "is a reward model" in no(run_folder)
